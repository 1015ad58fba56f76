"""What a run costs, before it is paid for: memory and FLOPs under each strategy, and the seconds of a step.

Recipe, what it is to run on -> Forecast

Puts together what :mod:`perl.training.memory_estimate`, ``cost_flops`` and ``hardware`` derive, and
:mod:`perl.training.measured_rates` measures.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from perl.algorithms.estimators import ADVANTAGES
from perl.errors import PerlError
from perl.recipe import Recipe
from perl.recipe.batch_plan import plan_batch
from perl.recipe.recipe import launched, processes_of_node
from perl.recipe.sections import STRATEGIES, Strategy
from perl.run.devices import threads_kept, use_threads
from perl.training.cost_flops import StepFlops, executed_flops, generation_flops
from perl.training.decoder import ModelSharing, bytes_into_node, cached_bytes, weight_bytes
from perl.training.hardware import (
    AROUND_MEASURED,
    Hardware,
    Range,
    hardware_named,
    product_rate,
    sold_as,
    taking,
    token_seconds,
)
from perl.training.measured_rates import measure_rates
from perl.training.memory_estimate import MemoryEstimate
from perl.training.plan import Plan, make_plan, most_completions
from perl.training.prepare import plan_of, planned_arguments
from perl.training.run_shape import PlanSetup, Shape, execution_of, groups_of_process, lengths_of, memory_on, shape_of
from perl.training.without_hub import plan_or_assume

GPUS = {f"{size} GB": sold_as(size) for size in (16, 24, 40, 48, 80)}
"""As GPUs are sold."""
_OF_NODE = 8  # GPUs of a node, as servers with several are sold


@dataclass(frozen=True)
class StrategyForecast:
    """A step under one strategy.

    Attributes:
        sharing: Of the model.
        memory: Of a process.
        fits: Sizes of GPUs, as they are sold, that suffice.
        flops: Of a process.
        seconds: Of training and rollouts.
        step: Seconds of a step.
        into_node: Bytes that each node receives from others in a step.
    """

    sharing: ModelSharing
    memory: MemoryEstimate
    fits: tuple[str, ...]
    flops: StepFlops
    seconds: Mapping[str, Range]
    step: Range
    into_node: float

    @property
    def bottleneck(self) -> str:
        """The part that takes longest, by the geometric mean."""
        return max(self.seconds, key=lambda name: self.seconds[name].low * self.seconds[name].high)


@dataclass(frozen=True)
class Forecast:
    """What a run costs.

    Attributes:
        shape: Model and adapter.
        strategies: Each with its step.
    """

    plan: Plan
    setup: PlanSetup
    shape: Shape
    strategies: Mapping[Strategy, StrategyForecast]


def answer(
    recipe: Recipe,
    *,
    gpu: str | None = None,
    completion: int | None = None,
    run: str | None = None,
    measured: bool = False,
    per_node: int | None = None,
) -> Forecast:
    """What the run costs; refuses what cannot run before anything is read that takes long.

    Args:
        recipe: Of the run.
        gpu: Name of what each process has; None: what is here, else a card of 80 GB; a recipe for a CPU has a CPU.
        completion: Tokens of a completion on average; None: half of the most.
        run: Folder of an earlier run, whose lengths are taken.
        measured: Whether a few passes are run here.
        per_node: Processes of a node; None: as many as :func:`_of_node` takes.

    Raises:
        PerlError: The recipe, or what is asked of it, is impossible.
    """
    with threads_kept(), recipe.locating():
        if recipe.engine.threads is not None:
            use_threads(recipe.engine.threads)
        made = plan_of if measured else plan_or_assume
        device, plan = _device(recipe, gpu), made(_of_one_process(recipe), runs_here=False)
        lengths = lengths_of(plan, completion=completion, run=run)
        # The strategy that the recipe names, or the command line; else all, to be compared.
        named = ("engine", "strategy") in recipe.written_at.origins
        strategies = (recipe.engine.strategy,) if named else STRATEGIES
        setup = PlanSetup(recipe.batch, device, strategies, lengths, *_sharing(recipe, device, per_node))
        return make_forecast(plan, replace(setup, measured=measure_rates(plan, setup)) if measured else setup)


def forecast_of(plan: Plan, gpu: str | None = None) -> Forecast:
    """What a run costs under the recipe's own strategy, on what is here or a GPU, for who has the plan already.

    Raises:
        PerlError: As :func:`answer`.
    """
    recipe, device = plan.recipe, _device(plan.recipe, gpu)
    if recipe.batch.world_size > 1:
        alone = _of_one_process(recipe)
        plan = make_plan(alone, planned_arguments(alone, runs_here=False), plan)
    sharing = _sharing(recipe, device)
    return make_forecast(plan, PlanSetup(recipe.batch, device, (recipe.engine.strategy,), lengths_of(plan), *sharing))


def _sharing(recipe: Recipe, device: Hardware, per_node: int | None = None) -> tuple[str | int, int]:
    """``engine.shards``, and how many processes a node has: as asked or launched, else up to 8, all on a CPU.

    Raises:
        PerlError: They do not make whole nodes.
    """
    processes = recipe.batch.world_size
    if per_node is not None and processes % per_node:
        raise PerlError(f"{processes} processes do not make nodes of {per_node}", "--per-node", "a divisor of them")
    if per_node is None and launched():
        per_node = processes_of_node()
    usual = processes if device.on_cpu else max(size for size in range(1, _OF_NODE + 1) if processes % size == 0)
    return recipe.engine.shards, per_node or usual


def _device(recipe: Recipe, gpu: str | None = None) -> Hardware:
    with threads_kept():
        if recipe.engine.threads is not None:
            use_threads(recipe.engine.threads)
        return hardware_named("cpu" if gpu is None and recipe.engine.device == "cpu" else gpu)


def _of_one_process(recipe: Recipe) -> Recipe:
    """Lengths, steps and parameters are those of one process with the whole batch, in as many passes.

    With another number of passes ``steps_per_generation`` would be another number of updates of each rollout.
    """
    whole = ("prompts_per_step", "num_generations", "gradient_accumulation_steps")
    return replace(recipe, batch=plan_batch(**{name: getattr(recipe.batch, name) for name in whole}))


def make_forecast(plan: Plan, setup: PlanSetup) -> Forecast:
    """Derives what a run costs.

    Args:
        plan: Of the run, made for one process.
        setup: What it is to run on.

    Raises:
        PerlError: It cannot run on so many processes, or its model is not known.
    """
    shape = shape_of(plan, on_cpu=setup.device.on_cpu)
    return Forecast(plan, setup, shape, {name: _under(name, plan, setup, shape) for name in setup.strategies})


def _under(strategy: Strategy, plan: Plan, setup: PlanSetup, shape: Shape) -> StrategyForecast:
    """A step under one strategy."""
    memory = memory_on(plan, setup, shape, strategy, setup.device.memory / setup.sharing)
    sizes = {name: memory_on(plan, setup, shape, strategy, size) for name, size in GPUS.items()}
    lengths, groups, steps = setup.lengths, groups_of_process(setup), plan.arguments.num_iterations
    how, served = execution_of(plan, shape, memory, setup.device), plan.recipe.rollout.capabilities.takes_updates
    counts = [max(round(share * len(groups)), 1) for share in lengths.live]
    fewest, flops = (
        executed_flops(shape.size, [replace(group, live=number < count) for number, group in enumerate(groups)], how)
        for count in counts
    )
    # A generation serves so many steps; of a process its share of the completions.
    writing = 0.0 if served else _writing_flops(plan, setup, shape, setup.rows) / steps
    products = product_rate(setup.device, compute=shape.types.compute, sharing=setup.sharing)
    if "products" in setup.measured:
        products = AROUND_MEASURED.times(setup.measured["products"])
    rollouts = _rollout_seconds(plan, setup, shape, products)
    most = most_completions(plan.recipe.prompts, plan.arguments, setup.batch.world_size)
    refilled = most / plan.arguments.generation_batch_size  # times that a refill samples, at most
    seconds = {
        "rollouts": Range(rollouts.low / steps, rollouts.high / steps * refilled),
        "training": Range(taking(fewest.in_training, products).low, taking(flops.in_training, products).high),
    }
    ends = zip(*seconds.values(), strict=True)  # beside each other where rollouts are sampled ahead
    step = Range(*(max(parts) if plan.recipe.rollout.prefetch else sum(parts) for parts in ends))
    fits = tuple(name for name, estimate in sizes.items() if estimate.fits)
    sharing, tokens = setup.shared_by(strategy), 0 if served else lengths.longest // steps
    passes = {"training": flops.micro_batches, "scoring": flops.scored + tokens}
    into_node = bytes_into_node(shape.model, shape.types, shape.trained, sharing, **passes)
    return StrategyForecast(sharing, memory, fits, replace(flops, rollouts=writing), seconds, step, into_node)


def _writing_flops(plan: Plan, setup: PlanSetup, shape: Shape, rows: int) -> float:
    """Of so many completions, and of one more of each prompt where it is written greedily besides."""
    served, lengths = plan.recipe.rollout.capabilities.takes_updates, setup.lengths
    flops = generation_flops(
        shape.size,
        rows,
        lengths.prompt,
        lengths.completion if served else lengths.longest,  # which transformers pad to
        prompts=-(-rows // setup.batch.num_generations),
        padded=not served and lengths.prompt != plan.longest_prompt,
        common=0 if served else lengths.common,
    )
    return flops * (1 + 1 / setup.batch.num_generations) if _writes_greedy(plan) else flops


def _writes_greedy(plan: Plan) -> bool:
    return ADVANTAGES[plan.arguments.advantage_estimator].writes_greedy


def _rollout_seconds(plan: Plan, setup: PlanSetup, shape: Shape, products: Range) -> Range:
    """Until an engine has written all of its completions at once: in the process, or on a server like its device."""
    engine, lengths, device = plan.recipe.rollout.capabilities, setup.lengths, setup.device
    weights, of_token = weight_bytes(shape.model, shape.types), cached_bytes(shape.model, shape.types)
    engines = max(plan.recipe.rollout.server_count, 1) if engine.needs_servers else setup.processes
    each = -(-setup.batch.completions_per_step // engines)
    tokens = lengths.longest * (2 if _writes_greedy(plan) else 1)  # those are written after the others
    if "token" in setup.measured:  # with its reading and its products
        return AROUND_MEASURED.times(tokens * setup.measured["token"])
    written = lengths.completion if engine.takes_updates else lengths.longest  # which transformers pad to
    cached = each * of_token * (lengths.prompt + written / 2) * written / lengths.longest
    token = token_seconds(device, engine, shape.model.layers, weights + cached, sharing=setup.sharing)
    # At best all of it overlaps, at worst nothing does.
    multiplying = taking(_writing_flops(plan, setup, shape, each), products)
    return Range(max(tokens * token.low, multiplying.low), tokens * token.high + multiplying.high)
