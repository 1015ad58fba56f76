"""A plan and a forecast for a person to read, and as plain values.

Forecast -> lines, or numbers for JSON

What is derived says so, and what was measured says that.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from perl.algorithms.critic_settings import critic_rate
from perl.algorithms.estimators import ADVANTAGES
from perl.algorithms.named import ALGORITHMS, shown_settings
from perl.data import render_prompts
from perl.methods.registry import Method
from perl.recipe import Recipe
from perl.recipe.quantisations import in_few_bits
from perl.run.progress import duration
from perl.run.tables import plain_table
from perl.trainer.arguments.config import PeftRLConfig
from perl.training.forecast import Forecast, StrategyForecast
from perl.training.hardware import GIB, Range
from perl.training.memory_estimate import MemoryEstimate
from perl.training.plan import Plan
from perl.training.plan_checks import most_completions

_DASH = "-"
# Characters of the first prompt that are shown, half of them from its end.
_LONGEST_PROMPT = 400
# Name in JSON -> how a person reads it, if at all, and the bytes.
_MEMORY: dict[str, tuple[str, Callable[[MemoryEstimate], float]]] = {
    "base": ("base", lambda m: m.weights),
    "gathered": ("gathered for a while", lambda m: m.gathered),
    "adapter": ("adapter", lambda m: m.trained.parameters),
    "gradients": ("its gradients", lambda m: m.trained.gradients),
    "optimizer": ("its optimizer", lambda m: m.trained.optimizer),
    "teacher": ("the teacher's adapter", lambda m: m.teacher),
    "activations": ("activations, a pass of {0.in_a_pass:,} tokens", lambda m: m.activations(recompute=False)),
    "activations_recomputed": ("... computed again", lambda m: m.activations(recompute=True)),
    "logits": ("tile of logits", lambda m: m.head),
    "cache": ("cache of rollouts, not with passes", lambda m: m.cache),
    "engine": ("vLLM in the process", lambda m: m.engine),
    "context": ("driver and libraries", lambda m: m.context),
    "least": ("at least", lambda m: m.least),
    "available": ("", lambda m: m.available),
}


def forecast_lines(forecast: Forecast) -> Iterator[str]:
    """All of it, a table a topic, a column a strategy."""
    yield from run_lines(forecast)
    for table in forecast_tables(forecast):
        yield ""
        yield from plain_table(table)


def forecast_tables(forecast: Forecast) -> list[list[list[str]]]:
    """Memory, and a step: rows of cells, the headings first."""
    return [_memory_table(forecast), _step_table(forecast)]


def summary_lines(forecast: Forecast) -> Iterator[str]:
    """Memory and time of the recipe's own strategy, a line each."""
    ((strategy, column),) = forecast.strategies.items()
    memory, device = column.memory, forecast.setup.device
    fits = "fits" if memory.fits else "does NOT fit"
    of_a_process = f" a process ({strategy})" if forecast.setup.processes > 1 else ""
    gpus = "" if device.on_cpu else f"; of GPUs it needs one {_sizes(column.fits)}"
    have = f"{memory.available / GIB:.1f} GiB of {device.name}"
    yield f"needs    {bytes_text(memory.least)}{of_a_process} at least, {fits} {have}{gpus} (derived)"
    if memory.fits:
        steps = f"{_durations(column.step.times(forecast.plan.steps))} for {forecast.plan.steps:,}"
        slowest = f"{column.bottleneck} most of it; derived, `perl plan --measure` measures"
        yield f"time     {_range(column.step)} s a step, {steps} ({slowest})"


def run_lines(forecast: Forecast) -> Iterator[str]:
    """What is planned, on what: a line each."""
    plan, setup, shape = forecast.plan, forecast.setup, forecast.shape
    base = plan.total_parameters - (plan.trainable_parameters if plan.method.config else 0)
    who = f"{plan.method.name} and a critic train" if plan.critic_parameters else f"{plan.method.name} trains"
    yield f"model    {plan.recipe.model.name}, {base:,} parameters; {who} {shape.trained:,}"
    if not shape.exact:
        yield f"         activations and FLOPs are those of a LoRA of rank {shape.rank} on all linear layers"
    lengths, device = setup.lengths, setup.device
    yield f"tokens   prompts {lengths.prompt:,} on average, up to {plan.longest_prompt:,}"
    yield (
        f"         completions {lengths.completion:,} on average, the longest of a step {lengths.longest:,} of "
        f"{plan.arguments.max_completion_length:,} ({lengths.source})"
    )
    yield f"batch    {setup.batch.prompts_per_step} prompts x {setup.batch.num_generations} generations a step"
    processes = f"{setup.processes} process{'es' if setup.processes > 1 else ''}"
    yield f"device   {device.name}: {device.memory / GIB:.1f} GiB ({device.source}); {processes}"
    if setup.measured:
        token = setup.measured.get("token")
        each = "" if token is None else f", {1e3 * token:,.1f} ms for a token of all its completions"
        yield f"measured {setup.measured['products'] / 1e9:,.1f} GFLOP/s in passes of a process{each}"
    if lengths.seconds is not None:
        yield f"measured {lengths.seconds:.3g} s a step of that run"


def _memory_table(forecast: Forecast) -> list[list[str]]:
    columns = forecast.strategies
    some = next(iter(columns.values())).memory
    rows = {label.format(some): value for label, value in _MEMORY.values() if label}
    if not some.teacher:
        del rows[_MEMORY["teacher"][0]]
    rows[f"left of {some.available / GIB:.1f} GiB"] = lambda m: m.available - m.least
    unit, symbol = (GIB, "GiB") if some.least >= GIB else (2**20, "MiB")
    table = [[f"{symbol} of a process (derived)", *columns]]
    table += [[name, *(_sized(value(c.memory), unit) for c in columns.values())] for name, value in rows.items()]
    table.append(["fits", *("yes" if column.memory.fits else "NO" for column in columns.values())])
    table.append(["tokens in a pass", *(_budget(column.memory) for column in columns.values())])
    if not forecast.setup.device.on_cpu:
        table.append(["suffices", *(_sizes(column.fits) for column in columns.values())])
    return table


def _step_table(forecast: Forecast) -> list[list[str]]:
    columns, processes, steps = forecast.strategies, forecast.setup.processes, forecast.plan.steps
    how = "measured" if forecast.setup.measured else "derived"
    rows: Mapping[str, Callable[[StrategyForecast], str]] = {
        "tokens trained on": lambda c: f"{c.flops.tokens * processes:,}",
        "micro-batches of a process": lambda c: f"{c.flops.micro_batches:,}",
        "FLOPs of training": lambda c: _flops(c.flops.in_training * processes),
        "FLOPs of rollouts, transformers": lambda c: _flops(c.flops.rollouts * processes),
        f"seconds ({how})": lambda c: _range(c.step) if c.memory.fits else _DASH,
        "bottleneck": lambda c: c.bottleneck if c.memory.fits else _DASH,
        f"{steps:,} steps ({how})": lambda c: _durations(c.step.times(steps)) if c.memory.fits else _DASH,
    }
    return [["a step", *columns], *([name, *map(value, columns.values())] for name, value in rows.items())]


def bytes_text(size: float) -> str:
    """Bytes in GiB, of small models in MiB."""
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / 2**20:.1f} MiB"


def _budget(memory: MemoryEstimate) -> str:
    again = ", again" if memory.plan.recompute else ""
    return f"{memory.plan.tokens:,}{again}" if memory.fits else _DASH


def _sizes(names: Sequence[str]) -> str:
    return f"from {names[0]}" if names else "more than 80 GB"


def _flops(value: float) -> str:
    return f"{value:.2e}" if value else _DASH


def _durations(seconds: Range) -> str:
    return f"{duration(seconds.low)} to {duration(seconds.high)}"


def _range(seconds: Range) -> str:
    low, high = (f"{value:,.0f}" if value >= 100 else f"{value:.2g}" for value in seconds)
    return f"{low} to {high}"


def _sized(value: float, unit: int) -> str:
    if not value:
        return _DASH
    return f"{value / unit:,.1f}" if abs(value) >= unit else f"{value / unit:.2f}"


def forecast_values(forecast: Forecast) -> dict[str, Any]:
    """Everything as plain values: bytes, FLOPs, seconds."""
    plan, setup = forecast.plan, forecast.setup
    return {
        "model": plan.recipe.model.name,
        "trained_parameters": forecast.shape.trained,
        "like_lora_of_rank": None if forecast.shape.exact else forecast.shape.rank,
        "processes": setup.processes,
        "device": {"name": setup.device.name, "memory": setup.device.memory, "source": setup.device.source},
        "measured": dict(setup.measured),
        "tokens": {
            "prompt": setup.lengths.prompt,
            "completion": setup.lengths.completion,
            "longest_completion": setup.lengths.longest,
            "source": setup.lengths.source,
        },
        "completions_per_step": setup.batch.completions_per_step,
        "strategies": {name: _strategy_values(column) for name, column in forecast.strategies.items()},
    }


def _strategy_values(column: StrategyForecast) -> dict[str, Any]:
    memory, flops = column.memory, column.flops
    return {
        "memory": {
            **{name: value(memory) for name, (_, value) in _MEMORY.items()},
            "fits": memory.fits,
            "fits_on": list(column.fits),
            "tokens_in_a_pass": memory.plan.tokens,
            "recompute": memory.plan.recompute,
        },
        "process_flops": {"training": flops.training, "scoring": flops.scoring, "rollouts": flops.rollouts},
        "micro_batches": flops.micro_batches,
        "process_tokens": flops.tokens,
        "step_seconds": list(column.step),
        "bottleneck": column.bottleneck,
    }


def plan_lines(plan: Plan) -> Iterator[str]:
    """The plan, a line a topic."""
    share = 100 * plan.trainable_parameters / plan.total_parameters
    heldout = len(plan.problems.heldout) if plan.problems.heldout is not None else 0
    settings = ", ".join(f"{name} {value}" for name, value in plan.settings.items())
    base = plan.total_parameters - (plan.trainable_parameters if plan.method.config else 0)
    quantization = plan.recipe.model.quantization
    in_bits = f", base{in_few_bits(quantization)}" if quantization else ""
    yield f"model    {plan.recipe.model.name}, {base:,} parameters{in_bits}"
    yield f"adapter  {plan.method.name} ({settings})" if plan.method.config else "adapter  none: the model itself"
    yield from _algorithm_lines(plan.recipe, plan.arguments)
    yield f"trained  {plan.trainable_parameters:,} parameters ({share:.2f} % of all)"
    yield from _critic_lines(plan.arguments, plan.method, plan.critic_parameters)
    yield f"data     {plan.recipe.data.train.name}: {len(plan.problems.train):,} problems, {heldout:,} held out"
    yield first_prompt(plan)
    yield f"tokens   prompts up to {plan.longest_prompt}, completions up to {plan.arguments.max_completion_length}"
    yield from _prompt_lines(plan.recipe, plan.arguments)
    yield from _rollout_lines(plan.recipe, plan.served_rank)
    yield f"rewards  {', '.join(f'{r.name} x {r.weight:g}' for r in plan.rewards) or 'none: the teacher alone'}"
    greedy = ADVANTAGES[plan.arguments.advantage_estimator].writes_greedy
    more = f", and {plan.recipe.batch.prompts_per_step} greedy completions" if greedy else ""
    yield f"batch    {plan.recipe.batch}{more}"
    if plan.recipe.batch.world_size > 1:
        yield f"strategy {plan.recipe.engine.strategy}"
    completions = plan.steps * plan.recipe.batch.completions_per_step
    least = "at least " if plan.recipe.prompts.refill else ""
    yield f"steps    {plan.steps} ({least}{completions:,} completions in all)"
    yield f"output   {plan.recipe.output_dir}"


def first_prompt(plan: Plan) -> str:
    """The first training prompt as the policy reads it, special tokens and all, and its gold answer."""
    row = plan.problems.train[0]
    [asked] = render_prompts([row], plan.tokenizer, plan.arguments.chat_template_kwargs)
    text = json.dumps(plan.tokenizer.decode(asked.token_ids), ensure_ascii=False)
    if len(text) > _LONGEST_PROMPT:
        text = f"{text[: _LONGEST_PROMPT // 2]} ... {text[-_LONGEST_PROMPT // 2 :]}"
    template = "no chat template" if isinstance(row["prompt"], str) else "by the chat template"
    gold = f", answer {json.dumps(row['solution'], ensure_ascii=False)[:80]}" if row.get("solution") is not None else ""
    return f"prompt   {text} ({len(asked.token_ids)} tokens, {template}){gold}"


def _algorithm_lines(recipe: Recipe, arguments: PeftRLConfig) -> Iterator[str]:
    """What the algorithm's name sets, and what overrides it."""
    row = ALGORITHMS.get(recipe.algorithm or "")
    if row is None:
        return
    given = {field.name: getattr(arguments, field.name) for field in fields(arguments)}
    own = row.overridden(given)
    overridden = f"; overridden: {shown_settings(own)}" if own else ""
    yield f"algorithm {row.name}: {shown_settings(row.settings)}{overridden}"


def _critic_lines(arguments: PeftRLConfig, method: Method, parameters: int) -> Iterator[str]:
    """What a critic trains, and how fast; nothing where there is none."""
    if parameters:
        shape = f"rank {arguments.critic_rank}, and a value head"
        rate = critic_rate(arguments.critic_learning_rate, float(arguments.learning_rate or 0), method.rate)
        still = "" if rate else ": its values stay as they begin"
        yield f"critic   {parameters:,} parameters ({shape}), learning rate {rate:g}{still}"


def _rollout_lines(recipe: Recipe, served_rank: int | None) -> Iterator[str]:
    """What the engine is given after each step, and who teaches beside it.

    Args:
        recipe: Of the run.
        served_rank: Of the LoRA that is served; None: the changed weights are.
    """
    if recipe.rollout.capabilities.takes_updates:
        what = "the changed weights" if served_rank is None else f"a LoRA of rank {served_rank}"
        quantised = recipe.model.quantization is not None
        of_nf4 = "; its base must be quantised too, as `perl rollout command` starts it" if quantised else ""
        yield f"rollouts {recipe.rollout.backend}, which gets {what} after each step{of_nf4}"
    if recipe.teacher.acts:
        named = f" ({recipe.teacher.adapter})" if recipe.teacher.adapter else ""
        yield f"teacher  {recipe.teacher.shown}{named}"


def _prompt_lines(recipe: Recipe, arguments: PeftRLConfig) -> Iterator[str]:
    """How prompts are chosen, and what is sampled at most; nothing where they are taken as they come."""
    if recipe.prompts.acts:
        yield f"prompts  {recipe.prompts.shown}"
    if recipe.prompts.refill:
        usual, most = (
            arguments.generation_batch_size,
            most_completions(recipe.prompts, arguments, recipe.batch.world_size),
        )
        yield f"         up to {most:,} completions in the place of {usual:,} of a batch of rollouts"
