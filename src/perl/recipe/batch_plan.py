"""From a person's batch (prompts a step, completions a prompt) to the numbers that the trainer wants.

prompts_per_step, num_generations -> BatchPlan

Pure arithmetic.
"""

import math
from dataclasses import dataclass

from perl.errors import Mistake, RecipeError, raise_all

DEFAULT_PROMPTS_PER_STEP = 16
DEFAULT_NUM_GENERATIONS = 8
NUMBERS = ("prompts_per_step", "num_generations", "per_device_train_batch_size", "gradient_accumulation_steps")
"""The training arguments that a plan is made of."""
# Rows in one forward pass when nobody says: what TRL takes.
LARGEST_DEFAULT_MICRO_BATCH = 8
_PROMPTS = "train.prompts_per_step"
# Of any of the numbers; nobody means more.
_LARGEST = 1_000_000


@dataclass(frozen=True)
class BatchPlan:
    """How the completions of one optimizer step are cut into forward passes.

    Example:
        8 prompts x 8 generations on 2 processes with 16 rows a pass: ``BatchPlan(prompts_per_step=8,
        num_generations=8, per_device_train_batch_size=16, gradient_accumulation_steps=2, world_size=2)``.
    """

    prompts_per_step: int
    num_generations: int
    per_device_train_batch_size: int
    gradient_accumulation_steps: int
    world_size: int = 1

    @property
    def completions_per_step(self) -> int:
        """Completions that one optimizer step sees, over all processes."""
        return self.prompts_per_step * self.num_generations

    def __str__(self) -> str:
        """The arithmetic as one line."""
        processes = f" x {self.world_size} processes" if self.world_size > 1 else ""
        return (
            f"{self.prompts_per_step} prompts x {self.num_generations} generations = {self.completions_per_step} "
            f"completions a step = {self.per_device_train_batch_size} rows x {self.gradient_accumulation_steps} "
            f"passes{processes}"
        )


def plan_batch(
    *,
    prompts_per_step: int | None = None,
    num_generations: int | None = None,
    per_device_train_batch_size: int | None = None,
    gradient_accumulation_steps: int | None = None,
    world_size: int = 1,
) -> BatchPlan:
    """Derives what is not given and checks that everything fits.

    Args:
        prompts_per_step: Different prompts in one optimizer step. None: from the two numbers below if either is
            given, else 16.
        num_generations: Completions of each prompt (G in the GRPO paper). None: 8.
        per_device_train_batch_size: Rows in one forward pass on one process; if these are more than it has, or fit one
            process and not several, the largest number below that does. None: the largest that fits, at most 8.
        gradient_accumulation_steps: Forward passes in one optimizer step. None: whatever is left.
        world_size: Number of processes.

    Raises:
        RecipeError: The numbers contradict each other; the hint names ones that fit.
    """
    rows, passes = per_device_train_batch_size, gradient_accumulation_steps
    numbers = zip(NUMBERS, (prompts_per_step, num_generations, rows, passes), strict=True)
    given = {f"train.{name}": number for name, number in numbers if number is not None}
    mistakes = [Mistake(f"must be at least 1, not {n}", key) for key, n in given.items() if n < 1]
    mistakes += [Mistake(f"must be at most {_LARGEST:,}", key) for key, n in given.items() if n > _LARGEST]
    raise_all(RecipeError, mistakes)
    generations = num_generations or DEFAULT_NUM_GENERATIONS
    if prompts_per_step is None and (rows or passes):
        completions = (rows or LARGEST_DEFAULT_MICRO_BATCH) * (passes or 1) * world_size
        if completions % generations:
            choice = _divisors(completions)[1:]
            hint = f"it must divide {completions}: {_listed(choice)}; or " if choice else ""
            hint += "set train.prompts_per_step and leave the batch to be derived"
            what = f"num_generations {generations} does not fit {completions} completions a step"
            raise RecipeError(what, "train.num_generations", hint)
        prompts_per_step = completions // generations
    prompts = prompts_per_step or DEFAULT_PROMPTS_PER_STEP
    completions = prompts * generations
    shown = f"{prompts} prompts x {generations} generations = {completions} completions a step"
    if completions < world_size:
        hint = f"at most {completions} processes, or a larger train.prompts_per_step"
        raise RecipeError(f"{shown}: {world_size} are more processes than a prompt batch can feed", _PROMPTS, hint)
    if completions % world_size:
        fitting = max(size for size in _divisors(completions) if size < world_size)
        hint = f"{fitting} processes, or a multiple of {world_size // math.gcd(world_size, generations)} prompts"
        raise RecipeError(f"{shown} cannot be split over {world_size} processes", _PROMPTS, hint)
    per_process = completions // world_size
    if rows and passes is None and per_process % rows and (rows > per_process or completions % rows == 0):
        rows = max(d for d in _divisors(per_process) if d <= rows)  # room for more than there is, or for one process
    if rows is None and passes is not None:
        what = f"{shown} cannot be cut into {passes} passes"
        rows = _parts(per_process, passes, what, "gradient_accumulation_steps")
    rows = rows or max(d for d in _divisors(per_process) if d <= LARGEST_DEFAULT_MICRO_BATCH)
    over = f" over {world_size} processes" if world_size > 1 else ""
    uneven = f"{shown}{over} cannot be cut into passes of {rows} rows"
    passes = passes or _parts(per_process, rows, uneven, "per_device_train_batch_size")
    if rows * passes != per_process:
        raise RecipeError(
            f"{shown}, but {rows} rows x {passes} passes x {world_size} processes are {rows * passes * world_size}",
            "train.gradient_accumulation_steps",
            "leave it out, it is derived",
        )
    return BatchPlan(prompts, generations, rows, passes, world_size)


def _parts(per_process: int, size: int, message: str, field: str) -> int:
    """How many parts of that size there are; an error of the training argument if they are not whole."""
    if per_process % size:
        hint = f"it must divide {per_process}: {_listed(_divisors(per_process))}"
        raise RecipeError(message, f"train.{field}", hint)
    return per_process // size


def _divisors(number: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def _listed(numbers: list[int]) -> str:
    return ", ".join(str(n) for n in numbers)
