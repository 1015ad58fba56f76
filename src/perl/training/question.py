"""What a person asks before a run is paid for, and the answer.

Recipe, Question -> Forecast
"""

from dataclasses import dataclass, replace

from perl.errors import PerlError
from perl.recipe import Recipe
from perl.recipe.batch_plan import plan_batch
from perl.recipe.sections import STRATEGIES, Strategy
from perl.run.devices import threads_kept, use_threads
from perl.training.forecast import Forecast, make_forecast
from perl.training.hardware import Hardware, cpu, hardware_named
from perl.training.lengths import lengths_of
from perl.training.measured_rates import measure_rates
from perl.training.plan import Plan, make_plan
from perl.training.run_shape import Setup


@dataclass(frozen=True)
class Question:
    """What a run is to be planned for.

    Attributes:
        nodes: That the recipe's ``engine.processes`` are on.
        gpu: Name of what each has; None: what is here, else a card of 80 GB; a recipe for a CPU has a CPU.
        memory: Gigabytes of it, as it is sold; None: as the name says.
        completion: Tokens of a completion on average; None: half of the most.
        run: Folder of an earlier run, whose lengths are taken.
        measured: Whether a few passes are run here.
    """

    nodes: int = 1
    gpu: str | None = None
    memory: float | None = None
    completion: int | None = None
    run: str | None = None
    measured: bool = False


def answer(recipe: Recipe, question: Question) -> Forecast:
    """What the run costs; refuses what cannot run before anything is read that takes long.

    Args:
        recipe: Of the run.
        question: What it is planned for.

    Raises:
        PerlError: The recipe, or what is asked of it, is impossible.
    """
    with threads_kept():
        if recipe.engine.threads is not None:
            use_threads(recipe.engine.threads)
        try:
            return _answer(recipe, question)
        except PerlError as error:
            raise recipe.located(error) from error


def forecast_of(plan: Plan) -> Forecast:
    """What a run costs on what is here, under the recipe's own strategy, for who has the plan already.

    Raises:
        PerlError: As :func:`answer`.
    """
    recipe = plan.recipe
    if recipe.batch.world_size > 1:
        plan = _plan_of_one_process(recipe)
    setup = Setup(recipe.batch, 1, _device(recipe, Question()), (recipe.engine.strategy,), lengths_of(plan))
    return make_forecast(plan, setup)


def _plan_of_one_process(recipe: Recipe) -> Plan:
    """Lengths, steps and parameters are those of one process with the whole batch, in as many passes.

    With another number of passes ``steps_per_generation`` would be another number of updates of each rollout.
    """
    batch = recipe.batch
    alone = plan_batch(
        prompts_per_step=batch.prompts_per_step,
        num_generations=batch.num_generations,
        gradient_accumulation_steps=batch.gradient_accumulation_steps,
    )
    return make_plan(replace(recipe, batch=alone), runs_here=False)


def _answer(recipe: Recipe, question: Question) -> Forecast:
    batch, device = recipe.batch, _device(recipe, question)
    plan = _plan_of_one_process(recipe)
    lengths = lengths_of(plan, completion=question.completion, run=question.run)
    setup = Setup(batch, question.nodes, device, _strategies(recipe), lengths)
    return make_forecast(plan, replace(setup, measured=measure_rates(plan, setup)) if question.measured else setup)


def _strategies(recipe: Recipe) -> tuple[Strategy, ...]:
    """The one that the recipe names, or the command line; else all, to be compared."""
    named = ("engine", "strategy") in recipe.written_at.origins
    return (recipe.engine.strategy,) if named else STRATEGIES


def _device(recipe: Recipe, question: Question) -> Hardware:
    if question.gpu is None and recipe.engine.device == "cpu":
        return cpu(question.memory)
    return hardware_named(question.gpu, question.memory)
