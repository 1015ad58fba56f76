"""A forecast for a person to read, and as plain values.

Forecast -> lines, or numbers for JSON

What is derived says so, and what was measured says that.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from perl.run.progress import duration
from perl.run.tables import plain_table, size_text
from perl.training.cost_time import Part, Range
from perl.training.forecast import Forecast, StrategyForecast
from perl.training.hardware import GIB
from perl.training.memory_estimate import MemoryEstimate
from perl.training.run_shape import peak_of

_DASH = "-"


def forecast_lines(forecast: Forecast) -> Iterator[str]:
    """All of it, a table a topic, a column a strategy."""
    yield from run_lines(forecast)
    for table in forecast_tables(forecast):
        yield ""
        yield from plain_table(table)
    found = list(serving_lines(forecast))
    yield from ["", *found] if found else []


def forecast_tables(forecast: Forecast) -> list[list[list[str]]]:
    """Memory, work and time: rows of cells, the headings first."""
    return [_memory_table(forecast), _work_table(forecast), _time_table(forecast)]


def summary_lines(forecast: Forecast) -> Iterator[str]:
    """Memory and time of the recipe's own strategy, a line each."""
    ((strategy, column),) = forecast.strategies.items()
    memory, device = column.memory, forecast.setup.device
    unit, symbol = (GIB, "GiB") if memory.least >= GIB else (2**20, "MiB")
    fits = "fits" if memory.fits else "does NOT fit"
    of_a_process = f" a process ({strategy})" if forecast.setup.processes > 1 else ""
    gpus = "" if device.on_cpu else f"; of GPUs it needs one {_sizes(column.fits)}"
    have = f"{memory.available / GIB:.1f} GiB of {device.name}"
    yield f"needs    {memory.least / unit:.1f} {symbol}{of_a_process} at least, {fits} {have}{gpus} (derived)"
    if memory.fits:
        run = column.step.times(forecast.plan.steps)
        steps = f"{duration(run.low)} to {duration(run.high)} for {forecast.plan.steps:,}"
        slowest = _bottleneck(column.bottleneck)
        yield f"time     {_range(column.step)} s a step, {steps} ({slowest}; derived, `perl plan --measure` measures)"


def run_lines(forecast: Forecast) -> Iterator[str]:
    """What is planned, on what: a line each."""
    plan, setup, shape = forecast.plan, forecast.setup, forecast.shape
    base = plan.total_parameters - (plan.trainable_parameters if plan.method.config else 0)
    who = f"{plan.method.name} and a critic train" if plan.critic_parameters else f"{plan.method.name} trains"
    yield f"model    {plan.recipe.model.name}, {base:,} parameters; {who} {shape.trained:,}"
    if not shape.exact:
        yield f"         activations and FLOPs are those of a LoRA of rank {shape.rank} on all linear layers"
    lengths = setup.lengths
    yield f"tokens   prompts {lengths.prompt:,} on average, up to {plan.longest_prompt:,}"
    yield (
        f"         completions {lengths.completion:,} on average, the longest of a step {lengths.longest:,} of "
        f"{plan.arguments.max_completion_length:,} ({lengths.source})"
    )
    yield f"batch    {setup.batch.prompts_per_step} prompts x {setup.batch.num_generations} generations a step"
    nodes = f" on {setup.nodes} nodes" if setup.nodes > 1 else ""
    processes = f"{setup.processes} process{'es' if setup.processes > 1 else ''}{nodes}"
    device = setup.device
    peak, half = peak_of(plan, shape, device), shape.types.compute < torch.float32.itemsize
    kind = "" if half or device.on_cpu else f" in {'TF32' if plan.recipe.train.get('tf32') else 'float32'}"
    yield (
        f"device   {device.name}: {peak / 1e12:,.3g} TFLOP/s{kind}, {device.bandwidth / 1e9:,.0f} GB/s, "
        f"{device.memory / GIB:.1f} GiB ({device.source}); {processes}"
    )
    for name, value in setup.measured.items():
        yield f"measured {_MEASURED[name](value)}"
    if lengths.seconds is not None:
        yield f"measured {lengths.seconds:.3g} s a step of that run"


_MEASURED: dict[str, Callable[[float], str]] = {
    "products": lambda rate: f"{rate / 1e9:,.1f} GFLOP/s in forward and backward passes of a process",
    "bandwidth": lambda rate: f"{rate / 1e9:,.1f} GB/s between memory and cores",
    "link": lambda rate: f"{rate / 1e9:,.2f} GB/s between processes",
    "token": lambda seconds: f"{1e3 * seconds:,.1f} ms for a token of all completions of a process",
}


def _memory_table(forecast: Forecast) -> list[list[str]]:
    columns = forecast.strategies
    some = next(iter(columns.values())).memory
    longest = f"a pass of {some.in_a_pass:,} tokens"
    rows: list[tuple[str, Callable[[MemoryEstimate], float | None]]] = [
        ("base", lambda m: m.weights),
        ("gathered for a while", lambda m: m.gathered),
        ("adapter", lambda m: m.trained.parameters),
        ("its gradients", lambda m: m.trained.gradients),
        ("its optimizer", lambda m: m.trained.optimizer),
        *([("the teacher's adapter", lambda m: m.teacher)] if some.teacher else []),
        (f"activations, {longest}", lambda m: m.activations(recompute=False)),
        ("... computed again", lambda m: m.activations(recompute=True)),
        ("tile of logits", lambda m: m.head),
        ("cache of rollouts, not with passes", lambda m: m.cache),
        ("vLLM in the process", lambda m: m.engine),
        ("driver and libraries", lambda m: m.context),
        ("at least", lambda m: m.least),
        (f"left of {some.available / GIB:.1f} GiB", lambda m: m.available - m.least),
    ]
    unit, symbol = (GIB, "GiB") if some.least >= GIB else (2**20, "MiB")
    table = [[f"{symbol} of a process (derived)", *columns]]
    table += [[name, *(_sized(value(column.memory), unit) for column in columns.values())] for name, value in rows]
    table.append(["fits", *("yes" if column.memory.fits else "NO" for column in columns.values())])
    table.append(["tokens in a pass", *(_budget(column.memory) for column in columns.values())])
    if not forecast.setup.device.on_cpu:
        table.append(["suffices", *(_sizes(column.fits) for column in columns.values())])
    return table


def _budget(memory: MemoryEstimate) -> str:
    again = ", again" if memory.plan.recompute else ""
    return f"{memory.plan.tokens:,}{again}" if memory.fits else _DASH


def _sizes(names: Sequence[str]) -> str:
    return f"from {names[0]}" if names else "more than 80 GB"


def _work_table(forecast: Forecast) -> list[list[str]]:
    columns, processes = forecast.strategies, forecast.setup.processes
    table = [["a step (derived)", *columns]]

    def row(name: str, value: Callable[[StrategyForecast], str]) -> None:
        table.append([name, *(value(column) for column in columns.values())])

    row("tokens trained on", lambda c: f"{c.flops.tokens * processes:,}")
    row("micro-batches of a process", lambda c: f"{c.flops.micro_batches:,}")
    row("FLOPs the policy needs", lambda _: _flops(forecast.ideal))
    row("FLOPs of training", lambda c: _flops(c.flops.in_training * processes))
    row("... of which are needed", lambda c: _share(forecast.ideal, c.flops.in_training * processes))
    row("FLOPs of rollouts, transformers", lambda c: _flops(c.flops.rollouts * processes))
    row("gradients sent by a process", lambda c: _bytes(c.traffic.averaged))
    row("base gathered by a process", lambda c: _bytes(c.traffic.gathered))
    row("... for rollouts", lambda c: _bytes(c.traffic.gathered_for_rollouts))
    engines = forecast.serving.count if forecast.serving else 0
    row(f"policy to each of {engines} engines" if engines else "policy to engines", lambda c: _bytes(c.traffic.synced))
    return table


def _time_table(forecast: Forecast) -> list[list[str]]:
    columns = forecast.strategies
    table = [["seconds of a step", *columns]]
    parts = [part.name for part in next(iter(columns.values())).parts.values()]
    for name in parts:
        table.append([name, *(_if_it_fits(column, _part(column.parts[name])) for column in columns.values())])
    ahead = " (rollouts beside the rest)" if forecast.plan.recipe.rollout.prefetch else ""
    table.append([f"all{ahead}", *(_if_it_fits(column, _range(column.step)) for column in columns.values())])
    table.append(["bottleneck", *(_if_it_fits(c, _bottleneck(c.bottleneck)) for c in columns.values())])
    hours = {name: column.step.times(forecast.plan.steps / 3600) for name, column in columns.items()}
    shown = [_if_it_fits(column, _range(hours[name])) for name, column in columns.items()]
    table.append([f"hours of {forecast.plan.steps:,} steps", *shown])
    return table


def serving_lines(forecast: Forecast) -> Iterator[str]:
    """What the engines do beside the trainers; nothing where they take turns."""
    serving = forecast.serving
    if serving is None or serving.supply is None:
        return
    fed, work = serving.supply, serving.work
    gpus = f" of {serving.gpus_each} GPUs each" if serving.gpus_each > 1 else ""
    memory = f"has memory for {work.at_once:,} at a time"
    yield f"servers  {serving.count}{gpus}; each writes {work.count:,} completions a step and {memory}"
    if fed.samples is None:
        many = f"{fed.at_once:,} completions at a time on each"
        yield f"         {serving.count} cannot keep the trainer busy with {many} (derived)"
    else:
        yield f"         {fed.samples:,} completions at a time on each keep the trainer busy (derived)"
    needed = math.ceil(fed.servers_per_trainer * forecast.setup.processes)
    each = f"{fed.servers_per_trainer:.3g}, so {needed} with {fed.at_once:,} completions at a time on each"
    yield f"         servers for each process that trains: {each} (derived)"


def _if_it_fits(column: StrategyForecast, text: str) -> str:
    return text if column.memory.fits else _DASH


def _bottleneck(part: Part) -> str:
    return f"{part.name}: {part.bound}"


def _part(part: Part) -> str:
    shown = _range(part.seconds)
    return f"{shown} measured" if part.measured else shown


def _range(seconds: Range) -> str:
    if not seconds.high:
        return _DASH
    return f"{_number(seconds.low)} to {_number(seconds.high)}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2g}"


def _sized(value: float | None, unit: int) -> str:
    if not value:
        return _DASH
    return f"{value / unit:,.1f}" if abs(value) >= unit else f"{value / unit:.2f}"


def _bytes(value: float) -> str:
    return size_text(int(value)) if value else _DASH


def _flops(value: float) -> str:
    return f"{value:.2e}" if value else _DASH


def _share(part: float, whole: float) -> str:
    # Of tiny rows more than 100 %: the least counts a completion's last token, which predicts nothing and is not run.
    return f"{100 * part / whole:.0f} %" if whole else _DASH


def forecast_values(forecast: Forecast) -> dict[str, Any]:
    """Everything as plain values: bytes, FLOPs, seconds."""
    plan, setup, serving = forecast.plan, forecast.setup, forecast.serving
    values: dict[str, Any] = {
        "model": plan.recipe.model.name,
        "trained_parameters": forecast.shape.trained,
        "like_lora_of_rank": None if forecast.shape.exact else forecast.shape.rank,
        "processes": setup.processes,
        "nodes": setup.nodes,
        "device": {"name": setup.device.name, "memory": setup.device.memory, "source": setup.device.source},
        "measured": dict(setup.measured),
        "tokens": {
            "prompt": setup.lengths.prompt,
            "completion": setup.lengths.completion,
            "longest_completion": setup.lengths.longest,
            "source": setup.lengths.source,
        },
        "completions_per_step": forecast.setup.batch.completions_per_step,
        "ideal_flops": forecast.ideal,
        "strategies": {name: _strategy_values(column) for name, column in forecast.strategies.items()},
        "serving": None,
    }
    if serving is not None:
        fed = serving.supply
        values["serving"] = {
            "engines": serving.count,
            "gpus_each": serving.gpus_each,
            "at_once": serving.work.at_once,
            "samples_to_keep_the_trainer_busy": fed.samples if fed else None,
            "servers_per_trainer": fed.servers_per_trainer if fed else None,
        }
    return values


def _strategy_values(column: StrategyForecast) -> dict[str, Any]:
    memory, flops, traffic = column.memory, column.flops, column.traffic
    return {
        "memory": {
            "base": memory.weights,
            "gathered": memory.gathered,
            "adapter": memory.trained.parameters,
            "gradients": memory.trained.gradients,
            "optimizer": memory.trained.optimizer,
            "teacher": memory.teacher,
            "activations": memory.activations(recompute=False),
            "activations_recomputed": memory.activations(recompute=True),
            "logits": memory.head,
            "cache": memory.cache,
            "engine": memory.engine,
            "context": memory.context,
            "least": memory.least,
            "available": memory.available,
            "fits": memory.fits,
            "fits_on": list(column.fits),
            "tokens_in_a_pass": memory.plan.tokens,
            "recompute": memory.plan.recompute,
        },
        "process_flops": {"training": flops.training, "scoring": flops.scoring, "rollouts": flops.rollouts},
        "micro_batches": flops.micro_batches,
        "process_tokens": flops.tokens,
        "bytes": {
            "gathered": traffic.gathered,
            "gathered_for_rollouts": traffic.gathered_for_rollouts,
            "averaged": traffic.averaged,
            "synced": traffic.synced,
        },
        "seconds": {
            part.name: {"range": list(part.seconds), "bound": part.bound, "measured": part.measured}
            for part in column.parts.values()
        },
        "step_seconds": list(column.step),
        "bottleneck": column.bottleneck.name,
    }
