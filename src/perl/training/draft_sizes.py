"""How large a first run on a device can be: prompts of a step, the base's bits, what writes rollouts.

Plan, device -> Sizes

The estimates are those of ``perl plan``; the first of a list of candidates that fits is taken.
"""

from dataclasses import dataclass, replace

from perl.errors import ModelError, PerlError
from perl.recipe.batch_plan import plan_batch
from perl.recipe.engines import TRANSFORMERS, VLLM, Backend
from perl.recipe.quantisations import EXTRA, QUANTISATIONS, Quantization
from perl.training.hardware import GIB, Hardware
from perl.training.lengths import lengths_of
from perl.training.memory_estimate import MemoryEstimate
from perl.training.plan import Plan
from perl.training.run_shape import Setup, memory_on, shape_of

GENERATIONS = 8
_PROMPTS = (16, 8)
_FEWER_PROMPTS = (4, 2, 1)
# Of the memory that there is; estimates are of what is needed at least.
_TAKEN = 0.9
_UNKNOWN_PROMPTS = 8


@dataclass(frozen=True)
class Sizes:
    """What a first run is like.

    Attributes:
        prompts: Of an optimizer step, with :data:`GENERATIONS` completions each.
        quantization: As ``model.quantization``.
        backend: As ``rollout.backend``.
        memory: What it needs; None: the model's layers are not known to the formulas, and nothing was estimated.
    """

    prompts: int
    quantization: Quantization | None
    backend: Backend
    memory: MemoryEstimate | None


def choose_sizes(plan: Plan, device: Hardware) -> Sizes:
    """The largest of the usual sizes that fits: a base as it is published rather than quantised, many prompts first.

    Args:
        plan: Of a run without quantisation, for one process.
        device: That it is to train on.

    Raises:
        PerlError: Nothing fits.
    """
    most = len(plan.problems.train)
    candidates = [one for one in _candidates(device) if one.prompts <= most] or [
        replace(one, prompts=most) for one in _candidates(device)
    ]
    last = None
    for candidate in candidates:
        try:
            last = _memory(plan, device, candidate)
        except ModelError:  # costs of such a model are not derived
            return Sizes(min(_UNKNOWN_PROMPTS, most), None, TRANSFORMERS.name, None)
        if last.fits and last.least <= _TAKEN * last.available:
            return replace(candidate, memory=last)
    needs = f"{last.least / GIB:.1f} GiB at least, and has {last.available / GIB:.1f}" if last else "more"
    hint = "a larger one, a smaller model, or several: docs/scaling.md"
    if not device.on_cpu and _quantisation() != "nf4":
        hint = f"in 4 bits it takes less: pip install 'perl-rl[{EXTRA}]'; else {hint}"
    raise PerlError(f"{plan.recipe.model.name} does not fit {device.name}: it needs {needs}", "gpu", hint)


def _candidates(device: Hardware) -> list[Sizes]:
    plain = [Sizes(prompts, None, TRANSFORMERS.name, None) for prompts in _PROMPTS]
    fewer = [Sizes(prompts, None, TRANSFORMERS.name, None) for prompts in _FEWER_PROMPTS]
    if device.on_cpu:
        return [*plain[1:], *fewer]
    served = [replace(one, backend=VLLM.name) for one in plain] if VLLM.installed else []
    bits = _quantisation()
    small = [replace(one, quantization=bits) for one in plain] if bits else []
    smaller = [replace(one, quantization=bits) for one in fewer] if bits else []
    return [*served, *plain, *small, *fewer, *smaller]


def _quantisation() -> Quantization | None:
    """The one of the fewest bits whose package is installed; None: there is none."""
    rows = [row for row in (QUANTISATIONS["nf4"], QUANTISATIONS["int8"]) if row.package.installed]
    return rows[0].name if rows else None


def _memory(plan: Plan, device: Hardware, sizes: Sizes) -> MemoryEstimate:
    """What a run of these sizes needs, without reading data or model again."""
    batch = plan_batch(prompts_per_step=sizes.prompts, num_generations=GENERATIONS)
    model = plan.recipe.model.model_copy(update={"quantization": sizes.quantization})
    rollout = plan.recipe.rollout.model_copy(update={"backend": sizes.backend})
    changed = replace(plan, recipe=replace(plan.recipe, model=model, rollout=rollout, batch=batch))
    setup = Setup(batch, 1, device, ("ddp",), lengths_of(plan))
    shape = shape_of(changed, on_cpu=device.on_cpu)
    return memory_on(changed, setup, shape, "ddp", (device.name, device.memory))
