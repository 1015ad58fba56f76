"""What a run costs, before it is paid for: memory, FLOPs, bytes and seconds of a step under each strategy.

Plan, Setup -> Forecast

Puts together what :mod:`perl.training.memory_estimate`, ``cost_flops``, ``cost_traffic`` and ``cost_time`` derive. No
weights are loaded.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from perl.algorithms.estimators import ADVANTAGES
from perl.errors import RecipeError
from perl.recipe.sections import Strategy
from perl.rewards.verifier import Judging
from perl.training.cost_flops import Group, StepFlops, executed_flops, generation_flops, ideal_flops
from perl.training.cost_time import (
    Part,
    Range,
    Rates,
    Supply,
    Writing,
    derived_rates,
    rollout_part,
    step_seconds,
    supply,
    sync_part,
    training_part,
    verdict_part,
)
from perl.training.cost_traffic import Passes, Traffic, sync_bytes, traffic_of
from perl.training.decoder import cached_bytes, weight_bytes
from perl.training.lengths import Lengths
from perl.training.memory_estimate import GPUS, ON_CPU, MemoryEstimate
from perl.training.plan import Plan
from perl.training.prompt_checks import most_completions
from perl.training.run_shape import Setup, Shape, execution_of, groups_of_process, memory_on, peak_of, shape_of
from perl.training.sharing import Sharing

# Of a server's memory, what vLLM takes by itself.
_SERVER_SHARE = 0.9
# Of a server's share, the weights at most: the rest is for caches.
_MOST_WEIGHTS = 0.75
# Parts of a step that are done once for each generation, which serves `num_iterations` steps.
_OF_A_GENERATION = ("rollouts", "verifier", "sync")
_MOST_AT_ONCE = 256  # sequences that vLLM runs at a time unless it is told otherwise


@dataclass(frozen=True)
class StrategyForecast:
    """A step under one strategy.

    Attributes:
        memory: Of a process.
        fits: Sizes of GPUs, as they are sold, that suffice.
        flops: Of a process.
        traffic: Of a process.
        parts: Seconds by part.
        step: Seconds of a step.
    """

    memory: MemoryEstimate
    fits: tuple[str, ...]
    flops: StepFlops
    traffic: Traffic
    parts: Mapping[str, Part]
    step: Range

    @property
    def bottleneck(self) -> Part:
        """The part that takes longest."""
        return max(self.parts.values(), key=lambda part: part.seconds.middle)


@dataclass(frozen=True)
class Serving:
    """The engines that write rollouts.

    Attributes:
        count: Servers, or engines in the processes.
        gpus_each: GPUs of a server.
        work: Of each in a step.
        supply: Whether they keep the trainers busy; None where they take turns with them.
    """

    count: int
    gpus_each: int
    work: Writing
    supply: Supply | None


@dataclass(frozen=True)
class Forecast:
    """What a run costs.

    Attributes:
        shape: Model and adapter.
        ideal: FLOPs that the gradient of a step needs at least, over all processes.
        strategies: Each with its step.
        serving: None where transformers write in the processes.
    """

    plan: Plan
    setup: Setup
    shape: Shape
    ideal: float
    strategies: Mapping[Strategy, StrategyForecast]
    serving: Serving | None


def make_forecast(plan: Plan, setup: Setup) -> Forecast:
    """Derives what a run costs.

    Args:
        plan: Of the run, made for one process.
        setup: What it is to run on.

    Raises:
        PerlError: It cannot run on so many processes, or its model is not known.
    """
    if setup.processes % setup.nodes:
        raise RecipeError(f"{setup.processes} processes on {setup.nodes} nodes", "--nodes", "as many on each")
    batch, shape = setup.batch, shape_of(plan, on_cpu=setup.device.on_cpu)
    lengths, beta = setup.lengths, plan.arguments.beta > 0
    group = Group(lengths.prompt, (lengths.completion,) * batch.num_generations)
    of_group = lengths_share(lengths, beta=beta) * ideal_flops(shape.size, [group], with_reference=beta)
    ideal = batch.prompts_per_step * of_group
    rates = derived_rates(
        setup.device,
        plan.recipe.rollout.capabilities,
        shape.model.layers,
        peak=peak_of(plan, shape, setup.device),
        on_a_node=setup.on_a_node,
        nodes=setup.nodes,
    ).with_measured(setup.measured)
    serving = _serving(plan, setup, shape)
    found = {name: _under(name, plan, setup, shape, rates, serving) for name in setup.strategies}
    if serving is not None and plan.recipe.rollout.capabilities.needs_servers:
        first = next(iter(found.values()))
        written = batch.completions_per_step * lengths.completion / plan.arguments.num_iterations
        wanted = written / first.parts["training"].seconds.middle
        fed = supply(
            wanted,
            serving.work,
            _of_server(rates, serving),
            servers=serving.count,
            trainers=setup.processes,
            ahead=plan.recipe.rollout.prefetch,
        )
        serving = replace(serving, supply=fed)
    return Forecast(plan, setup, shape, ideal, found, serving)


def lengths_share(lengths: Lengths, *, beta: bool) -> float:
    """Share of the completions that are trained on: with a KL term all of them."""
    return 1.0 if beta else lengths.live


def _under(
    strategy: Strategy,
    plan: Plan,
    setup: Setup,
    shape: Shape,
    rates: Rates,
    serving: Serving | None,
) -> StrategyForecast:
    """A step under one strategy."""
    device, lengths = setup.device, setup.lengths
    here = (ON_CPU if device.on_cpu else device.name, device.memory / (setup.on_a_node if device.on_cpu else 1))
    memory = memory_on(plan, setup, shape, strategy, here)
    sizes = {name: memory_on(plan, setup, shape, strategy, (name, size)) for name, size in GPUS.items()}
    flops = _flops_of(plan, shape, memory, setup)
    sharing = Sharing(strategy, setup.processes)
    passes = Passes(flops.micro_batches, flops.scoring_passes, 0 if serving else lengths.longest)
    served = shape.rank if shape.exact and plan.served_rank is not None else plan.served_rank
    synced = sync_bytes(shape.model, shape.types, served) if serving else 0.0
    traffic = traffic_of(shape.model, shape.types, sharing, passes, trained=shape.trained, synced=synced)
    if serving is None:
        writing = _in_process(shape, lengths, setup.rows, flops.rollouts, traffic.gathered_for_rollouts)
        written_at = rates
    else:
        writing, written_at = serving.work, _of_server(rates, serving)
    rollouts = rollout_part(writing, written_at)
    if ADVANTAGES[plan.arguments.advantage_estimator].writes_greedy:
        completions = setup.batch.num_generations
        rollouts = rollouts.then(rollout_part(writing.one_each(completions), written_at))
        flops = replace(flops, rollouts=flops.rollouts * (1 + 1 / completions))
    engines = serving.count if serving and plan.recipe.rollout.capabilities.needs_servers else 1
    answers = setup.batch.completions_per_step if isinstance(plan.judging, Judging) else 0
    most = most_completions(plan.recipe.prompts, plan.arguments, setup.batch.world_size)
    times = most / plan.arguments.generation_batch_size  # that a refill samples and judges, at most
    parts = {
        "rollouts": rollouts.up_to(times),
        "verifier": verdict_part(answers, setup.nodes, rates).up_to(times),
        "training": training_part(flops.in_training, traffic.gathered, traffic.averaged, rates),
        "sync": sync_part(synced, engines),
    }
    fits = tuple(name for name, estimate in sizes.items() if estimate.fits)
    steps = plan.arguments.num_iterations
    parts = {name: part.times(1 / steps) if name in _OF_A_GENERATION else part for name, part in parts.items()}
    flops, traffic = replace(flops, rollouts=flops.rollouts / steps), traffic.of_a_step(steps)
    step = step_seconds(parts, overlapped=bool(plan.recipe.rollout.prefetch))
    return StrategyForecast(memory, fits, flops, traffic, parts, step)


def _flops_of(plan: Plan, shape: Shape, memory: MemoryEstimate, setup: Setup) -> StepFlops:
    """Of a process, with those of a whole generation: its share of the completions, in whole groups if it can be."""
    lengths, groups = setup.lengths, groups_of_process(setup)
    how = execution_of(plan, shape, memory, setup.device)
    trained = max(round(lengths_share(lengths, beta=how.takes_all) * len(groups)), 1)
    groups = [replace(group, live=number < trained) for number, group in enumerate(groups)]
    found = executed_flops(shape.size, groups, how)
    if plan.recipe.rollout.capabilities.takes_updates:
        return found
    padded = lengths.prompt != plan.longest_prompt
    prompts = -(-setup.rows // setup.batch.num_generations)
    written = generation_flops(shape.size, setup.rows, lengths.prompt, lengths.longest, prompts=prompts, padded=padded)
    return replace(found, rollouts=written)


def _in_process(shape: Shape, lengths: Lengths, rows: int, flops: float, gathered: float) -> Writing:
    """What transformers write in each process: all of its completions at once, padded to the longest."""
    cache = cached_bytes(shape.model, shape.types) * (lengths.prompt + lengths.longest / 2)
    weights = weight_bytes(shape.model, shape.types)
    reading = generation_flops(shape.size, rows, lengths.prompt, 1)
    return Writing(
        rows, rows, lengths.longest, lengths.longest, flops, reading, weights, cache, gathered / max(lengths.longest, 1)
    )


def _serving(plan: Plan, setup: Setup, shape: Shape) -> Serving | None:
    """The engines of a run that samples from vLLM."""
    engine = plan.recipe.rollout.capabilities
    if not engine.takes_updates:
        return None
    weights = weight_bytes(shape.model, shape.types)
    count = plan.recipe.rollout.server_count if engine.needs_servers else setup.processes
    share = _SERVER_SHARE if engine.needs_servers else plan.arguments.vllm_gpu_memory_utilization
    gpus = 1
    while engine.needs_servers and weights > _MOST_WEIGHTS * share * setup.device.memory * gpus:
        gpus *= 2
    lengths, each = setup.lengths, -(-setup.batch.completions_per_step // max(count, 1))
    of_token = cached_bytes(shape.model, shape.types)
    room = max(share * setup.device.memory * gpus - weights, 0.0)
    at_once = int(room / (of_token * (lengths.prompt + lengths.completion)))
    prompts = -(-each // setup.batch.num_generations)
    flops = generation_flops(shape.size, each, lengths.prompt, lengths.completion, prompts=prompts, padded=False)
    cache = of_token * (lengths.prompt + lengths.completion / 2)
    reading = generation_flops(shape.size, each, lengths.prompt, 1, prompts=prompts, padded=False)
    most = max(min(at_once, _MOST_AT_ONCE), 1)
    work = Writing(each, most, lengths.longest, lengths.completion, flops, reading, weights, cache)
    return Serving(count, gpus, work, None)


def _of_server(rates: Rates, serving: Serving) -> Rates:
    """Of a server with several GPUs, which read and multiply their parts at the same time."""
    gpus = serving.gpus_each
    return replace(rates, bandwidth=rates.bandwidth.times(gpus), writing=rates.writing.times(gpus))
