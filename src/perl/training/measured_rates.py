"""What a few passes of a run take here, for its forecast.

Plan, PlanSetup -> FLOP/s, seconds of a token

The model has its own weights where they are here, else random ones. A product takes as long whatever its numbers are;
but how much the completions of a group have in common, which is written once, is the model's own.
"""

import contextlib
import copy
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError
from peft import PeftModel
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from perl.errors import ModelError
from perl.methods.settings import adaptation
from perl.packing.attention import use_packed_attention
from perl.packing.forward import score
from perl.packing.fused_lora import fuse_lora
from perl.packing.head import LogitSettings, add_scored_forward
from perl.packing.rows import Row
from perl.policy.attach import attach_adapter
from perl.policy.model import eos_token_ids, load_base, resolve_model
from perl.rollouts.branching import why_not_branching
from perl.rollouts.engine import EngineSampling
from perl.rollouts.next_token import write_as_generate
from perl.run.devices import accelerator
from perl.run.products import quicken
from perl.training.cost_flops import Execution, Group, executed_flops
from perl.training.decoder import weight_bytes
from perl.training.hardware import cpu
from perl.training.plan import Plan
from perl.training.run_shape import PlanSetup, Shape, execution_of, memory_on, shape_of

# Of the memory that is free, for the weights of the model that is measured.
_SHARE = 0.4
_REPEATS = 3
# Tokens that are written: the second number less the first is without the prompt.
_WRITTEN = (2, 10)
# Tokens of the longest completion; in longer ones it hardly counts that those of a group begin alike.
_SHORT = 64


def measure_rates(plan: Plan, setup: PlanSetup) -> dict[str, float]:
    """Of a process: ``products``, FLOP/s of passes, and ``token``, seconds of a token where transformers write.

    Processes that share a CPU are taken to have equal parts of it.

    Args:
        plan: Of the run.
        setup: What it is to run on; its device is taken to be the one at hand.

    Raises:
        ModelError: A model of this size has no room here.
    """
    device = accelerator() or torch.device("cpu")
    on_cpu = device.type == "cpu"
    shape = shape_of(plan, on_cpu=on_cpu)
    free = cpu().memory if on_cpu else float(torch.cuda.mem_get_info()[0])
    if weight_bytes(shape.model, shape.types) > _SHARE * free:
        raise ModelError("has no room here to be measured", "--measure", "measure where the run will be")
    memory = memory_on(plan, setup, shape, setup.strategies[0], setup.device.memory)
    how, lengths = execution_of(plan, shape, memory, setup.device), setup.lengths
    base, own = _base(plan, shape, device)
    # With a new adapter, prepared as a training prepares it.
    policy = attach_adapter(base, adaptation(plan.recipe.peft))
    fuse_lora(policy)
    quicken(policy)
    add_scored_forward(base, LogitSettings(), fused=how.fused_head)
    if how.packed:
        use_packed_attention(base)
    if how.recompute:
        base.gradient_checkpointing_enable({"use_reentrant": False})
    policy.train()
    # Groups that fill a micro-batch, of the rows that there are at most.
    prompt, completion, each = lengths.prompt, lengths.completion, lengths.completion - 1
    in_group = max(min(setup.rows, setup.batch.num_generations, (how.budget - prompt) // max(each, 1)), 1)
    whole = max(min(how.budget // (prompt + in_group * each), setup.rows // in_group), 1)
    groups = [Group(prompt, (completion,) * in_group)] * whole
    policy_alone = Execution(10**12, how.packed, how.shared, how.masked, how.recompute, how.fused_head)
    flops = executed_flops(shape.size, groups, policy_alone).training
    found = {"products": flops / _seconds(_pass(plan, policy, groups, how), device) / setup.sharing}
    if not plan.recipe.rollout.capabilities.takes_updates:
        short = own and lengths.longest <= _SHORT and why_not_branching(policy) is None
        token = _seconds_of_short(plan, policy, setup, device) if short else _token_seconds(policy, setup, device)
        found["token"] = token * setup.sharing
    return found


def _base(plan: Plan, shape: Shape, device: torch.device) -> tuple[PreTrainedModel, bool]:
    """The run's base, and whether it has its own weights: they are not downloaded for this."""
    section = plan.recipe.model
    folder = Path(resolve_model(section.name))
    if not folder.is_dir():
        with contextlib.suppress(LocalEntryNotFoundError):
            folder = Path(snapshot_download(section.name, revision=section.revision, local_files_only=True))
    if _holds_all_weights(folder):
        return load_base(section.model_copy(update={"name": str(folder), "revision": None}), device), True
    half = torch.float16 if section.dtype == "float16" else torch.bfloat16
    with device:
        dtype = {2: half, 4: torch.float32}[shape.types.weights]
        config = copy.deepcopy(plan.config)
        return AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False), False


def _holds_all_weights(folder: Path) -> bool:
    index = folder / SAFE_WEIGHTS_INDEX_NAME
    if not index.is_file():
        return (folder / SAFE_WEIGHTS_NAME).is_file()
    return all((folder / name).is_file() for name in set(json.loads(index.read_text())["weight_map"].values()))


def _pass(plan: Plan, policy: PeftModel, groups: list[Group], how: Execution) -> Callable[[], object]:
    """A forward and backward pass over rows of random tokens, in the type of the run."""
    device, vocabulary = next(policy.parameters()).device, policy.config.vocab_size
    rows: list[Row] = []
    members: list[list[int]] = []
    for group in groups:
        prompt = torch.randint(vocabulary, (group.prompt,), device=device)
        members.append(list(range(len(rows), len(rows) + len(group.completions))))
        for length in group.completions:
            completion = torch.randint(vocabulary, (length,), device=device)
            rows.append(Row(prompt, completion, torch.ones(length, dtype=torch.bool)))
    together = members if how.shared else [[index] for index in range(len(rows))]
    arguments = plan.arguments
    half = torch.float16 if arguments.fp16 else torch.bfloat16

    def run() -> None:
        with torch.autocast(device.type, half, enabled=bool(arguments.fp16 or arguments.bf16)):
            columns = max(group.completions[0] for group in groups)
            log_probs, _ = score(policy, rows, together, packed=how.packed, columns=columns)
        log_probs.sum().backward()

    return run


def _seconds_of_short(plan: Plan, policy: PeftModel, setup: PlanSetup, device: torch.device) -> float:
    """Seconds of a token of all completions, when the first prompts of the data are read and answered."""
    rows, each, longest = setup.rows, setup.batch.num_generations, setup.lengths.longest
    asked = list(plan.problems.train.select(range(-(-rows // each))))
    prompts = plan.rendered(asked)
    token_ids = [prompt.token_ids for prompt in prompts for _ in range(each)][:rows]
    sampling = EngineSampling(plan.arguments.temperature, longest, eos_token_ids(policy, plan.tokenizer))
    padding = int(plan.tokenizer.pad_token_id or 0)
    policy.eval()
    with torch.no_grad():
        return _seconds(partial(write_as_generate, policy, token_ids, padding, sampling), device) / longest


def _token_seconds(policy: PeftModel, setup: PlanSetup, device: torch.device) -> float:
    """Seconds of a token of all completions, halfway through them; those of a group have seen the same."""
    rows, each = setup.rows, setup.batch.num_generations
    seen = max(setup.lengths.prompt + setup.lengths.longest // 2, 1)
    prompts = torch.randint(policy.config.vocab_size, (-(-rows // each), seen), device=device)
    tokens = prompts.repeat_interleave(each, dim=0)[:rows]
    policy.eval()

    def write(count: int) -> object:
        if why_not_branching(policy) is None:
            return write_as_generate(policy, tokens.tolist(), 0, EngineSampling(1.0, count, ()))
        options = {"min_new_tokens": count, "max_new_tokens": count, "do_sample": True, "pad_token_id": 0}
        return policy.generate(input_ids=tokens, attention_mask=torch.ones_like(tokens), **options)

    with torch.no_grad():
        few, more = (_seconds(partial(write, count), device) for count in _WRITTEN)
    # Beside other work more tokens may have been the faster: then with the prompt, too much rather than nothing.
    return (more - few) / (_WRITTEN[1] - _WRITTEN[0]) if more > few else more / _WRITTEN[1]


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """Of the fastest of some runs, after one that is not counted."""
    taken = []
    for _ in range(_REPEATS + 1):
        started = time.perf_counter()
        run()
        if device.type != "cpu":
            torch.accelerator.synchronize()
        taken.append(time.perf_counter() - started)
    return min(taken[1:])
