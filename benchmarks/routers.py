"""Experts that routers choose while completions are sampled, beside those that they choose in training's packed pass.

family x {float32, bfloat16} -> share of choices that differ, difference of log-probabilities with and without replay

    python benchmarks/routers.py [FAMILY...]
    .venv-vllm/bin/python benchmarks/routers.py --vllm [FAMILY...]

Random models of ``tests/packing/families.py``: 4 layers of 32 experts, of which 4 are chosen. The transformers engine,
or vLLM, writes 64 tokens after each of 32 prompts of 32 tokens, with its cache; then one packed pass gives the same
tokens their log-probabilities, and a second one with the choices of the sampling in the place of its own. A choice is
the set of experts of one token in one layer, of the tokens that a sampled one is predicted from. vLLM for CPUs does not
return choices: they are read from the logits of its gates, one prompt at a time. Prints a table and writes
``results/routers.json``.
"""

import argparse
import contextlib
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from result_lines import as_lines
from torch import nn

from perl.packing.forward import choose_passes, score
from perl.packing.rows import Row
from perl.rollouts.engine import EngineSampling, Request
from perl.rollouts.hf_engine import TransformersEngine
from perl.run.tables import plain_table

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "routers.json"
sys.path.insert(0, str(ROOT))
from tests.packing.families import make  # noqa: E402 (of the checkout)

VOCABULARY, LAYERS, EXPERTS, CHOSEN = 512, 4, 32, 4
SIZES = {
    **{"hidden_size": 128, "intermediate_size": 64, "moe_intermediate_size": 64, "head_dim": 32},
    **{"num_hidden_layers": LAYERS, "vocab_size": VOCABULARY, "initializer_range": 0.05},
    **{"num_experts": EXPERTS, "num_local_experts": EXPERTS, "num_experts_per_tok": CHOSEN},
}
FAMILIES = {
    "Qwen3Moe": {"norm_topk_prob": True},
    "Mixtral": {},
    "GptOss": {"sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2)},
}
PROMPTS, PROMPT, COMPLETION, TEMPERATURE = 32, 32, 64, 0.9  # the temperature of ``make``


def routers(model: nn.Module) -> list[nn.Module]:
    """In the order of the layers; each gives logits, weights of the chosen experts, and which they are."""
    return [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]


@contextlib.contextmanager
def recorded(model: nn.Module) -> Iterator[list[list[torch.Tensor]]]:
    """For each router the experts (tokens, chosen) of each of its calls."""
    calls: list[list[torch.Tensor]] = [[] for _ in routers(model)]
    handles = [
        router.register_forward_hook(lambda _module, _given, found, own=own: own.append(found[2]))
        for router, own in zip(routers(model), calls, strict=True)
    ]
    yield calls
    for handle in handles:
        handle.remove()


@contextlib.contextmanager
def replayed(model: nn.Module, chosen_LNK: list[torch.Tensor]) -> Iterator[None]:
    """Routers take these experts, with the weights that their own logits give them."""

    def replace(chosen_NK: torch.Tensor, found: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        logits_NE, weights_NK, _ = found
        # All three families divide by the sum over the chosen ones.
        return logits_NE, logits_NE.float().gather(-1, chosen_NK).softmax(-1).to(weights_NK.dtype), chosen_NK

    handles = [
        router.register_forward_hook(lambda _module, _given, found, own=own: replace(own, found))
        for router, own in zip(routers(model), chosen_LNK, strict=True)
    ]
    yield
    for handle in handles:
        handle.remove()


Sampling = tuple[list[list[int]], list[list[float]], list[torch.Tensor]]
"""Tokens and log-probabilities of each completion; for each layer the experts (B, tokens that were run, chosen)."""


def by_transformers(model: transformers.PreTrainedModel, prompts_BP: torch.Tensor) -> Sampling:
    """All prompts at once."""
    asked = [Request(tuple(prompt.tolist()), 1, seed=i) for i, prompt in enumerate(prompts_BP)]
    engine = TransformersEngine(model, SimpleNamespace(pad_token_id=0))
    with recorded(model) as calls:
        written = engine.start(asked, EngineSampling(TEMPERATURE, COMPLETION, end_token_ids=())).result()
    # The prompts' pass, then one for each token but the last, which nothing is predicted from.
    chosen = [torch.cat([call.view(PROMPTS, -1, CHOSEN) for call in own], dim=1) for own in calls]
    return [list(one.token_ids) for (one,) in written], [list(one.log_probs) for (one,) in written], chosen


def by_vllm(model: transformers.PreTrainedModel, prompts_BP: torch.Tensor) -> Sampling:
    """One prompt after the other, in this process."""
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCHDYNAMO_DISABLE": "1"}
    os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
    from vllm import LLM, SamplingParams

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        options = {"enforce_eager": True, "max_model_len": 128, "num_gpu_blocks_override": 64}
        options |= {"logprobs_mode": "processed_logprobs", "generation_config": "vllm", "skip_tokenizer_init": True}
        llm = LLM(folder, dtype=str(model.dtype).removeprefix("torch."), enable_prefix_caching=False, **options)
    calls: list[list[torch.Tensor]] = []

    def listen(served: nn.Module) -> None:
        for name, module in served.named_modules():
            if name.endswith((".gate", ".router")):
                calls.append([])
                module.register_forward_hook(partial(take, calls[-1]))

    def take(own: list[torch.Tensor], _module: nn.Module, _given: object, found: Any) -> None:  # noqa: ANN401 (vLLM's)
        logits_NE = found[0] if isinstance(found, tuple) else found
        own.append(logits_NE.float().topk(CHOSEN).indices)

    llm.apply_model(listen)
    ids, log_probs, chosen = [], [], []
    for i, prompt in enumerate(prompts_BP.tolist()):
        how = SamplingParams(temperature=TEMPERATURE, max_tokens=COMPLETION, logprobs=0, ignore_eos=True, seed=i)
        how.detokenize = False
        (one,) = llm.generate([{"prompt_token_ids": prompt}], how, use_tqdm=False)[0].outputs
        ids.append(list(one.token_ids))
        log_probs.append([entry[token].logprob for token, entry in zip(one.token_ids, one.logprobs, strict=True)])
        chosen.append([torch.cat(own)[: PROMPT + COMPLETION - 1] for own in calls])
        for own in calls:
            own.clear()
    return ids, log_probs, [torch.stack(layer) for layer in zip(*chosen, strict=True)]


def measure(name: str, dtype: torch.dtype, sample: Callable[..., Sampling]) -> dict[str, float]:
    """Of one model."""
    model = make(name, **SIZES, **FAMILIES[name]).to(dtype).eval()
    prompts_BP = torch.randint(2, VOCABULARY, (PROMPTS, PROMPT), generator=torch.Generator().manual_seed(0))
    ids, log_probs, sampled = sample(model, prompts_BP)
    found_BC, scored = torch.tensor(log_probs), torch.ones(COMPLETION, dtype=torch.bool)
    rows = [Row(prompt, torch.tensor(own), scored) for prompt, own in zip(prompts_BP, ids, strict=True)]
    if not choose_passes(model, padding_free=True, share=True).packed:
        raise RuntimeError(f"rows of {name} are not packed")

    def gap_BC() -> torch.Tensor:
        alone = [[i] for i in range(PROMPTS)]
        with torch.no_grad():
            log_probs_BC, _ = score(model, rows, alone, packed=True, columns=COMPLETION, entropy="none")
        return (log_probs_BC.float() - found_BC).abs()

    with recorded(model) as calls:
        own_BC = gap_BC()
    trained = [call.view(PROMPTS, -1, CHOSEN) for (call,) in calls]
    with replayed(model, [chosen.flatten(0, 1) for chosen in sampled]):
        replayed_BC = gap_BC()
    differs_LBC = torch.stack(
        [(a.sort(-1)[0] != b.sort(-1)[0]).any(-1)[:, PROMPT - 1 :] for a, b in zip(sampled, trained, strict=True)]
    )
    elsewhere_BC = differs_LBC.any(0)
    return {
        "choices that differ": float(differs_LBC.float().mean()),
        "tokens with one": float(elsewhere_BC.float().mean()),
        "mean": float(own_BC.mean()),
        "largest": float(own_BC.max()),
        "share on those tokens": float(own_BC[elsewhere_BC].sum() / own_BC.sum()),
        "mean replayed": float(replayed_BC.mean()),
        "largest replayed": float(replayed_BC.max()),
    }


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", choices=[[], *FAMILIES], metavar="FAMILY", help="all if left out")
    parser.add_argument("--vllm", action="store_true", help="sample from vLLM")
    given = parser.parse_args()
    names, engine = given.families or list(FAMILIES), "vllm" if given.vllm else "transformers"
    sample = by_vllm if given.vllm else by_transformers
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    lines = []
    for name in names:
        for dtype in (torch.float32, torch.bfloat16):
            key = f"{engine} {name} {str(dtype).removeprefix('torch.')}"
            results[key] = {what: float(f"{value:.2g}") for what, value in measure(name, dtype, sample).items()}
            lines.append([key, *map(str, results[key].values())])
            RESULTS.write_text(as_lines(results) + "\n")
    print("\n".join(plain_table([["", *results[key]], *lines])))


if __name__ == "__main__":
    main()
