"""How far right computations differ from one another, and how far wrong ones: what the tolerances must lie between.

Run as ``python benchmarks/tolerances.py``. On the sandbox base (4 layers) and on a random Qwen3 of 28 layers, 512 wide,
whose logits have a standard deviation of 2.5 and 10, as trained models' have:

* the parity check: an engine that has the policy and computes with other kernels (token by token over a cache, all its
  weights in the compute type) must pass; one with the base, with half the adapter's scale, without the adapter in half
  of the layers, with another version of it, with another base, or without the temperature must not;
* the saved adapter: for each method and type it must pass; saved before a small step, with a scale 1 % off or with one
  factor empty it must not;
* the packing probe: packed rows must pass; rows that see their neighbours, whose positions go on, or whose shared
  prompt lacks a token must not.

Prints a table and writes ``results/tolerances.json``. Differences are given as multiples of the tolerance: right ones
below 1, wrong ones above.
"""

import copy
import math
import os
import sys
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock

from result_lines import as_lines

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", OMP_WAIT_POLICY="PASSIVE")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

import perl.packing.attention
import perl.packing.forward
from perl.methods.registry import METHODS
from perl.methods.settings import adaptation
from perl.packing.attention import Scores
from perl.packing.forward import choose_passes
from perl.packing.head import add_scored_forward, logit_settings
from perl.packing.rows import Layout
from perl.policy.attach import attach_adapter
from perl.policy.guards import RELOAD_TOLERANCE
from perl.policy.model import load_base
from perl.policy.precision import compute_dtype, layers_of, tolerance_of
from perl.policy.save_adapter import reload_difference, write_adapter
from perl.recipe.sections import ModelSection, PeftSection
from perl.rollouts.engine import Sampled
from perl.rollouts.parity_check import ParityCheck
from perl.run.folder import installed_versions

RESULTS = Path(__file__).parent / "results"
TEMPERATURE = 0.8
# Name: base's type, whether under autocast in bfloat16.
TYPES = {
    "float32": (torch.float32, False),
    "bfloat16": (torch.bfloat16, False),
    "float32, autocast bfloat16": (torch.float32, True),
    "float16": (torch.float16, False),
}
SEEDS = {"sandbox": 16, "deep, logits 2.5": 2, "deep, logits 10": 2}
Found = dict[tuple[str, str, str, str], list[float]]


def main() -> None:
    """Measures, prints, saves."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found: Found = defaultdict(list)
    for model, seeds in SEEDS.items():
        for name, (dtype, autocast) in TYPES.items():
            base = base_of(model, dtype)
            AcceleratorState._reset_state(reset_partial_state=True)
            accelerator = Accelerator(mixed_precision="bf16" if autocast else "no", cpu=True)
            for seed in range(seeds):
                parity(found, (model, name), accelerator.prepare_model(lora(base, deviation=0.01, seed=seed)), seed)
                print(f"parity: {model}, {name}, {seed + 1} of {seeds}", file=sys.stderr)
            for seed in range(min(seeds, 4)):
                with accelerator.autocast():
                    packing(found, (model, name), base, seed)
            if model == "sandbox":
                for method in METHODS.values():
                    if method.config:
                        policy = accelerator.prepare_model(lora(base, method.name, deviation=1e-2))
                        saved(found, (model, name), policy)
    report(found)


def base_of(model: str, dtype: torch.dtype) -> PreTrainedModel:
    """The sandbox base, or a deep random model with logits of a given standard deviation."""
    if model == "sandbox":
        return load_base(ModelSection(dtype=str(dtype).removeprefix("torch.")), torch.device("cpu"))
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=4096, hidden_size=512, intermediate_size=1024, num_hidden_layers=28, num_attention_heads=8,
        num_key_value_heads=2, head_dim=64, tie_word_embeddings=False, attn_implementation="sdpa",
    )  # fmt: skip
    base = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in base.named_parameters():
            if parameter.dim() > 1 and "embed" not in name:
                parameter.normal_(std=1 / math.sqrt(parameter.size(1)))
        base.lm_head.weight.mul_(float(model.rpartition(" ")[2]))
    return base.to(dtype).eval()


def lora(base: PreTrainedModel, method: str = "lora", deviation: float = 0.0, seed: int = 0) -> PeftModel:
    """The base with an adapter some way from its start."""
    settings = {"rank": 4} if "rank" in METHODS[method].settings else {}
    torch.manual_seed(seed)
    policy = attach_adapter(copy.deepcopy(base), adaptation(PeftSection(method=method, **settings))).eval()
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter += deviation * torch.randn(parameter.shape)
    return policy


def parity(found: Found, where: tuple[str, str], policy: PeftModel, seed: int) -> None:
    """The check of an engine, with the policy of random numbers that it is first given."""
    vocabulary = policy.get_base_model().get_input_embeddings().weight.size(0)
    prompt = torch.randint(1, vocabulary, (9,), generator=torch.Generator().manual_seed(seed)).tolist()
    parity = ParityCheck(policy, prompt, TEMPERATURE)

    def of(engine: PreTrainedModel, temperature: float = TEMPERATURE) -> float:
        written = [write(engine, prompt, temperature, seed * 10 + i) for i in range(parity.request.count)]
        parity.tolerance, tolerance = math.inf, parity.tolerance
        difference = parity.check({"engine": written})
        parity.tolerance = tolerance
        return difference / tolerance

    with parity.far_from_base():
        engine = as_engine(policy)
        found[("parity", *where, "right")].append(of(engine))
        found[("parity", *where, "wrong: no temperature")].append(of(engine, 1.0))
        for name, change in CHANGES.items():
            changed = copy.deepcopy(engine)
            with torch.no_grad():
                change(changed)
            found[("parity", *where, f"wrong: {name}")].append(of(changed))


def _scaled(names: str, factor: float) -> Callable[[PreTrainedModel], None]:
    def change(engine: PreTrainedModel) -> None:
        for name, parameter in engine.named_parameters():
            if "lora_B" in name and any(part in name for part in names.split("|")):
                parameter.mul_(factor)

    return change


def _other_version(engine: PreTrainedModel) -> None:
    for name, parameter in engine.named_parameters():
        if "lora_" in name:
            parameter.copy_(parameter[torch.randperm(len(parameter))])


def _other_base(engine: PreTrainedModel) -> None:
    """Another fine-tune of it: 5 % of each matrix' deviation."""
    for name, parameter in engine.named_parameters():
        if "lora_" not in name and parameter.dim() > 1:
            parameter += 0.05 * parameter.float().std() * torch.randn(parameter.shape)


CHANGES: dict[str, Callable[[PreTrainedModel], None]] = {
    "the base": _scaled("lora", 0.0),
    "half the scale": _scaled("lora", 0.5),
    "half of the layers": _scaled("|".join(f"layers.{i}." for i in range(1, 28, 2)), 0.0),
    "another version": _other_version,
    "another base": _other_base,
}


def as_engine(policy: PeftModel) -> PreTrainedModel:
    """The policy as an engine has it: everything in the type it computes in."""
    dtype = compute_dtype(policy)
    engine = copy.deepcopy(policy)
    for name in ("forward", "_original_forward"):
        vars(engine).pop(name, None)
    return engine.to(dtype)


def write(engine: PreTrainedModel, prompt: list[int], temperature: float, seed: int) -> Sampled:
    """A completion, token by token over a cache, and the log-probabilities that the engine reports."""
    generator = torch.Generator().manual_seed(seed)
    tokens, log_probs, cache = list(prompt), [], None
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        for _ in range(16):
            ids = torch.tensor([tokens if cache is None else tokens[-1:]])
            out = engine(input_ids=ids, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            log_p = torch.log_softmax(out.logits[0, -1].float() / temperature, dim=-1)
            # What is drawn is drawn at the run's temperature; only what is reported may be wrong.
            drawn = torch.softmax(out.logits[0, -1].float() / TEMPERATURE, dim=-1)
            tokens.append(int(torch.multinomial(drawn, 1, generator=generator)))
            log_probs.append(float(log_p[tokens[-1]]))
    return Sampled(tuple(tokens[len(prompt) :]), tuple(log_probs), "v")


def saved(found: Found, where: tuple[str, str], policy: PeftModel) -> None:
    """The comparison of a saved adapter with the trained one."""
    ids = torch.randint(3, 60, (4, 24), generator=torch.Generator().manual_seed(0))
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "adapter"
        write_adapter(policy, folder, "sandbox:base", None)
        found[("saved", *where, "right")].append(reload_difference(policy, folder, ids) / RELOAD_TOLERANCE)
        largest = max((p for p in policy.parameters() if p.requires_grad), key=torch.numel)
        kept = largest.data.clone()
        largest.data += 1e-3 * torch.randn(largest.shape)
        found[("saved", *where, "wrong: before a step of 1e-3")].append(
            reload_difference(policy, folder, ids) / RELOAD_TOLERANCE
        )
        largest.data = kept
        weights = folder / "adapter_model.safetensors"
        tensors = load_file(weights)
        for name, change in (("1 % off", lambda t: t * 1.01), ("one tensor empty", lambda t: t * 0)):
            one = max(tensors, key=lambda key: tensors[key].numel()) if "one" in name else None
            numbers = {key: t for key, t in tensors.items() if t.is_floating_point()}
            changed = {key: change(t) if one in (None, key) else t for key, t in numbers.items()}
            save_file({**tensors, **changed}, weights, {"format": "pt"})
            found[("saved", *where, f"wrong: {name}")].append(reload_difference(policy, folder, ids) / RELOAD_TOLERANCE)


def packing(found: Found, where: tuple[str, str], base: PreTrainedModel, seed: int) -> None:
    """The comparison of packed rows with padded ones: 0 where they are taken for the same, else their difference."""
    policy = lora(base, deviation=0.01, seed=seed)
    inner = policy.get_base_model()
    add_scored_forward(inner, logit_settings(inner.config, temperature=1.0, float32=False))
    original = perl.packing.forward._probe
    generator = torch.Generator().manual_seed(seed)

    def probe(vocabulary: int, device: torch.device, *, shared: bool) -> object:
        rows, groups = original(vocabulary, device, shared=shared)
        moved = int(torch.randint(1, vocabulary, (1,), generator=generator))
        shifted = {id(row.prompt): (row.prompt + moved) % vocabulary for row in rows}
        return [replace(row, prompt=shifted[id(row.prompt)]) for row in rows], groups

    for name, planted in PLANTED.items():
        with mock.patch.object(perl.packing.forward, "_probe", probe), planted():
            how = choose_passes(policy, policy, padding_free=True, share=True)
        tolerance = tolerance_of(compute_dtype(policy), layers_of(policy))
        found[("packing", *where, name)].append(_difference(how.why, tolerance))


def _difference(why: str, tolerance: float) -> float:
    """What is said of a difference, as a multiple of the tolerance; 0: nothing is."""
    return float(why.split(" by ")[1].split(" ")[0]) / tolerance if " by " in why else math.inf if why else 0.0


@contextmanager
def _as_it_is() -> Iterator[None]:
    yield


@contextmanager
def _neighbours() -> Iterator[None]:
    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _: Layout, scores: Scores):  # noqa: ANN202
        seen = functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scores.scaling, enable_gqa=q.size(1) != k.size(1)
        )
        return seen.transpose(1, 2).contiguous()

    with mock.patch.object(perl.packing.attention, "packed_attention", attention):
        yield


@contextmanager
def _positions_go_on() -> Iterator[None]:
    original = perl.packing.forward.pack

    def pack(*args: object) -> object:
        batch = original(*args)
        return replace(batch, position_ids=torch.arange(batch.position_ids.numel())[None])

    with mock.patch.object(perl.packing.forward, "pack", pack):
        yield


@contextmanager
def _prompt_lacks_a_token() -> Iterator[None]:
    original = perl.packing.attention.packed_attention

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Layout, scores: Scores):  # noqa: ANN202
        k, v = k.clone(), v.clone()
        for segment in layout.segments:
            for start, _ in segment.prefixes:
                v[:, :, start] = 0
        return original(q, k, v, layout, scores)

    with mock.patch.object(perl.packing.attention, "packed_attention", attention):
        yield


PLANTED = {
    "right": _as_it_is,
    "wrong: neighbours": _neighbours,
    "wrong: positions go on": _positions_go_on,
    "wrong: shared prompt lacks a token": _prompt_lacks_a_token,
}


def report(found: Found) -> None:
    """Prints the table and writes the results."""
    rows = []
    print(f"{'check':8} {'model':18} {'type':28} {'case':36} {'runs':>4} {'stopped':>7} {'least':>9} {'most':>9}")
    for (check, model, dtype, case), values in sorted(found.items()):
        stopped = sum(not value <= 1 for value in values)
        rows.append(
            {"check": check, "model": model, "type": dtype, "case": case, "runs": len(values), "stopped": stopped,
             "least": min(values), "most": max(values)}
        )  # fmt: skip
        bounds = f"{min(values):9.2g} {max(values):9.2g}"
        print(f"{check:8} {model:18} {dtype:28} {case:36} {len(values):4} {stopped:7} {bounds}")
    right = [row for row in rows if row["case"] == "right"]
    wrong = [row for row in rows if row["case"] != "right"]
    print(f"right runs stopped: {sum(r['stopped'] for r in right)} of {sum(r['runs'] for r in right)}")
    print(f"wrong runs caught: {sum(r['stopped'] for r in wrong)} of {sum(r['runs'] for r in wrong)}")
    RESULTS.mkdir(exist_ok=True)
    results = {"versions": installed_versions(), "rows": rows}
    (RESULTS / "tolerances.json").write_text(as_lines(results) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
