"""What the hardware at hand reaches, from a few passes of a model of the run's shape.

Plan, Setup -> rates, measured

The model has the shape of the run's and random weights: a product takes as long whatever its numbers are. Of a model
that does not fit into what is free, one layer and two are run; the difference is a layer's.
"""

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from perl.methods.settings import adaptation
from perl.packing.attention import use_packed_attention
from perl.packing.forward import score
from perl.packing.fused_lora import fuse_lora
from perl.packing.head import LogitSettings, add_scored_forward
from perl.packing.rows import Row
from perl.policy.attach import attach_adapter
from perl.policy.model import load_empty_base
from perl.recipe import Recipe
from perl.rollouts.branching import why_not_branching
from perl.rollouts.engine import EngineSampling
from perl.rollouts.next_token import write_as_generate
from perl.run.devices import accelerator
from perl.training.cost_flops import Execution, Group, executed_flops, size_of
from perl.training.decoder import weight_bytes
from perl.training.hardware import cpu
from perl.training.measured_link import link_bandwidth
from perl.training.plan import Plan
from perl.training.run_shape import Setup, Shape, execution_of, memory_on, shape_of

# Of the device's memory, for the weights of the model that is measured.
_SHARE = 0.4
_REPEATS = 3
# Tokens that are written: the second number less the first is without the prompt.
_WRITTEN = (2, 10)
_COPIED_BYTES = 2**27
# Seconds, after which no run is repeated.
_LONG_ENOUGH = 60.0


@dataclass(frozen=True)
class Trial:
    """Seconds of a model with so many layers.

    Attributes:
        layers: Of the model that was run.
        flops: Of a forward and backward pass.
        training: Seconds of that pass.
        token: Seconds of a token of all completions of a process; None where another engine writes.
    """

    layers: int
    flops: float
    training: float
    token: float | None


def measure_rates(plan: Plan, setup: Setup) -> dict[str, float]:
    """Rates of a process by the names of :class:`perl.training.cost_time.Rates`, from runs of seconds.

    Processes that share a CPU are taken to have equal parts of it.

    Args:
        plan: Of the run.
        setup: What it is to run on; its device is taken to be the one at hand.
    """
    device = accelerator() or torch.device("cpu")
    on_cpu = device.type == "cpu"
    shape = shape_of(plan, on_cpu=on_cpu)
    count = shape.model.layers
    if weight_bytes(shape.model, shape.types) <= _SHARE * _memory(device):
        trials = [_trial(plan, setup, shape, count, device)]
    else:
        trials = [_trial(plan, setup, shape, layers, device) for layers in (1, 2)]
    share = setup.on_a_node if on_cpu else 1
    found = {"products": _product_rate(trials) / share, "bandwidth": copy_bandwidth(device) / share}
    token = _token_seconds(trials, count)
    if token is not None:
        found["token"] = token * share
    if setup.processes > 1:
        link = link_bandwidth(min(setup.on_a_node, setup.processes), on_cpu=on_cpu)
        found |= {"link": link} if link else {}
    return found


def copy_bandwidth(device: torch.device) -> float:
    """Bytes/s that are read from the device's memory and written to it."""
    source = torch.ones(_COPIED_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * _COPIED_BYTES / _seconds(lambda: target.copy_(source), device)


def _product_rate(trials: list[Trial]) -> float:
    """FLOP/s of passes; of two models that of the layer which one of them has more."""
    first, last = trials[0], trials[-1]
    flops, seconds = last.flops, last.training
    if len(trials) > 1 and last.training > first.training:
        flops, seconds = last.flops - first.flops, last.training - first.training
    return flops / seconds


def _token_seconds(trials: list[Trial], layers: int) -> float | None:
    first, last = trials[0], trials[-1]
    if first.token is None or last.token is None:
        return None
    return last.token + (layers - last.layers) * max(last.token - first.token, 0.0)


def _memory(device: torch.device) -> float:
    return cpu().memory if device.type == "cpu" else float(torch.cuda.mem_get_info()[0])


def _trial(plan: Plan, setup: Setup, shape: Shape, layers: int, device: torch.device) -> Trial:
    """Runs a model with so many of the layers."""
    model = replace(shape.model, layers=layers)
    memory = memory_on(plan, setup, shape, setup.strategies[0], (setup.device.name, setup.device.memory))
    how = execution_of(plan, shape, memory, setup.device)
    rows, lengths = setup.rows, setup.lengths
    policy = _policy(plan, shape, layers, device, how)
    groups = _of_one_pass(Group(lengths.prompt, (lengths.completion,) * setup.batch.num_generations), rows, how.budget)
    alone = replace(how, budget=10**12, reference=False, old=False, critic=None, teacher=None)
    flops = executed_flops(size_of(model, shape.rank), groups, alone).training
    training = _seconds(_pass(policy, groups, how, autocast_of(plan.recipe, device)), device)
    token = None
    if not plan.recipe.rollout.capabilities.takes_updates:
        token = _writing_seconds(policy, rows, lengths.prompt + lengths.longest // 2, device)
    return Trial(layers, flops, training, token)


def _of_one_pass(group: Group, rows: int, budget: int) -> list[Group]:
    """Groups that fill a micro-batch, of so many rows at most."""
    found: list[Group] = []
    left, tokens = rows, 0
    while left > 0:
        fitting = (budget - tokens - group.prompt) // max(group.completions[0] - 1, 1)
        count = min(left, len(group.completions), fitting if found else max(fitting, 1))
        if count < 1:
            break
        found.append(Group(group.prompt, group.completions[:count]))
        left, tokens = left - count, tokens + group.prompt + count * (group.completions[0] - 1)
    return found


def _policy(plan: Plan, shape: Shape, layers: int, device: torch.device, how: Execution) -> PeftModel:
    """A model with random weights and a new adapter, prepared as a training prepares it."""
    config = copy.deepcopy(load_empty_base(plan.recipe.model).config)
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    half = torch.float16 if plan.recipe.model.dtype == "float16" else torch.bfloat16
    dtype = {2: half, 4: torch.float32}[shape.types.weights]
    with device:
        base = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    policy = attach_adapter(base, adaptation(plan.recipe.peft))
    fuse_lora(policy)
    add_scored_forward(base, LogitSettings(), fused=how.fused_head)
    if how.packed:
        use_packed_attention(base)
    if how.recompute:
        base.gradient_checkpointing_enable({"use_reentrant": False})
    return policy.train()


def _pass(policy: PeftModel, groups: list[Group], how: Execution, autocast: torch.autocast) -> Callable[[], object]:
    """A forward and backward pass over rows of random tokens."""
    device = next(policy.parameters()).device
    vocabulary = policy.config.vocab_size
    rows: list[Row] = []
    members: list[Sequence[int]] = []
    for group in groups:
        prompt = torch.randint(vocabulary, (group.prompt,), device=device)
        members.append(range(len(rows), len(rows) + len(group.completions)))
        for length in group.completions:
            completion = torch.randint(vocabulary, (length,), device=device)
            rows.append(Row(prompt, completion, torch.ones(length, dtype=torch.bool)))
    columns = max(group.completions[0] for group in groups)
    together = members if how.shared else [[index] for index in range(len(rows))]

    def run() -> None:
        with autocast:
            log_probs, _ = score(policy, rows, together, packed=how.packed, columns=columns)
        log_probs.sum().backward()

    return run


def autocast_of(recipe: Recipe, device: torch.device) -> torch.autocast:
    """As the trainer of a recipe computes: in bfloat16 on a GPU unless it says otherwise, on a CPU if it says so."""
    bf16, fp16 = recipe.train.get("bf16"), bool(recipe.train.get("fp16"))
    mixed = fp16 or (device.type != "cpu" if bf16 is None else bool(bf16))
    return torch.autocast(device.type, torch.float16 if fp16 else torch.bfloat16, enabled=mixed)


def _writing_seconds(policy: PeftModel, rows: int, seen: int, device: torch.device) -> float:
    """Seconds of a token of so many completions, halfway through them."""
    tokens = torch.randint(policy.config.vocab_size, (rows, max(seen, 1)), device=device)
    policy.eval()

    def written(count: int) -> object:
        if why_not_branching(policy) is None:
            return write_as_generate(policy, tokens.tolist(), 0, EngineSampling(1.0, count, ()))
        options = {"min_new_tokens": count, "max_new_tokens": count, "do_sample": True, "pad_token_id": 0}
        return policy.generate(input_ids=tokens, attention_mask=torch.ones_like(tokens), **options)

    def writing(count: int) -> float:
        return _seconds(lambda: written(count), device)

    with torch.no_grad():
        few, more = (writing(count) for count in _WRITTEN)
    # Beside other work more tokens may have been the faster: then with the prompt, too much rather than nothing.
    return (more - few) / (_WRITTEN[1] - _WRITTEN[0]) if more > few else more / _WRITTEN[1]


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """Of the fastest of some runs, after one that is not counted."""
    taken = []
    for number in range(_REPEATS + 1):
        started = time.perf_counter()
        run()
        if device.type != "cpu":
            torch.accelerator.synchronize()
        taken.append(time.perf_counter() - started)
        if number and sum(taken) > _LONG_ENOUGH:
            break
    return min(taken[1:])
