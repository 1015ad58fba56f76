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
from perl.recipe.quantisations import in_few_bits
from perl.run.progress import duration
from perl.run.tables import plain_table
from perl.training.forecast import Forecast, StrategyForecast
from perl.training.hardware import GIB, Range
from perl.training.memory_estimate import MemoryEstimate
from perl.training.plan import Plan, most_completions

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
    "cache": ("cache of rollouts", lambda m: m.cache),
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
    columns, processes, steps = forecast.strategies, forecast.setup.processes, forecast.plan.steps
    some = next(iter(columns.values())).memory
    parts = {label.format(some): value for label, value in _MEMORY.values() if label}
    if not some.teacher:
        del parts[_MEMORY["teacher"][0]]
    parts[f"left of {some.available / GIB:.1f} GiB"] = lambda m: m.available - m.least
    unit, symbol = (GIB, "GiB") if some.least >= GIB else (2**20, "MiB")
    memory = [[f"{symbol} of a process (derived)", *columns]]
    for name, value in parts.items():
        sizes = [value(column.memory) / unit for column in columns.values()]
        memory.append([name, *(f"{size:,.{1 if abs(size) >= 1 else 2}f}" if size else _DASH for size in sizes)])
    if any(column.sharing.parts > 1 for column in columns.values()):
        memory.append(["parts of the base", *(str(column.sharing.parts) for column in columns.values())])
    memory.append(["fits", *("yes" if column.memory.fits else "NO" for column in columns.values())])
    plans = [column.memory.plan if column.memory.fits else None for column in columns.values()]
    budgets = [f"{plan.tokens:,}{', again' if plan.recompute else ''}" if plan else _DASH for plan in plans]
    memory.append(["tokens in a pass", *budgets])
    if not forecast.setup.device.on_cpu:
        memory.append(["suffices", *(_sizes(column.fits) for column in columns.values())])
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
    if forecast.setup.of_node < processes:
        rows = {**rows, "into a node (derived)": lambda c: bytes_text(c.into_node)}
    step = [[name, *map(value, columns.values())] for name, value in rows.items()]
    return [memory, [["a step", *columns], *step]]


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
    who = f"{plan.method.name} and a critic train" if plan.critic_parameters else f"{plan.method.name} trains"
    yield f"model    {plan.recipe.model.name}, {_base_parameters(plan):,} parameters; {who} {shape.trained:,}"
    yield from (f"assumed  {line}" for line in plan.assumed)
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
    processes += f", {setup.of_node} a node" if setup.of_node < setup.processes else ""
    yield f"device   {device.name}: {device.memory / GIB:.1f} GiB ({device.source}); {processes}"
    if setup.measured:
        token = setup.measured.get("token")
        each = "" if token is None else f", {1e3 * token:,.1f} ms for a token of all its completions"
        yield f"measured {setup.measured['products'] / 1e9:,.1f} GFLOP/s in passes of a process{each}"
    if lengths.seconds is not None:
        yield f"measured {lengths.seconds:.3g} s a step of that run"


def bytes_text(size: float) -> str:
    """Bytes in GiB, of small models in MiB."""
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / 2**20:.1f} MiB"


def _sizes(names: Sequence[str]) -> str:
    return f"from {names[0]}" if names else "more than 80 GB"


def _flops(value: float) -> str:
    return f"{value:.2e}" if value else _DASH


def _durations(seconds: Range) -> str:
    return f"{duration(seconds.low)} to {duration(seconds.high)}"


def _range(seconds: Range) -> str:
    low, high = (f"{value:,.0f}" if value >= 100 else f"{value:.2g}" for value in seconds)
    return f"{low} to {high}"


def forecast_values(forecast: Forecast) -> dict[str, Any]:
    """Everything as plain values: bytes, FLOPs, seconds."""
    plan, setup = forecast.plan, forecast.setup
    strategies = {
        name: {
            "memory": {
                **{key: value(column.memory) for key, (_, value) in _MEMORY.items()},
                "fits": column.memory.fits,
                "fits_on": list(column.fits),
                "tokens_in_a_pass": column.memory.plan.tokens,
                "recompute": column.memory.plan.recompute,
            },
            "processes_of_copy": column.sharing.parts,
            "bytes_into_node": column.into_node,
            "process_flops": {key: getattr(column.flops, key) for key in ("training", "scoring", "rollouts")},
            "micro_batches": column.flops.micro_batches,
            "process_tokens": column.flops.tokens,
            "step_seconds": list(column.step),
            "bottleneck": column.bottleneck,
        }
        for name, column in forecast.strategies.items()
    }
    return {
        "model": plan.recipe.model.name,
        "assumed": list(plan.assumed),
        "trained_parameters": forecast.shape.trained,
        "like_lora_of_rank": None if forecast.shape.exact else forecast.shape.rank,
        "processes": setup.processes,
        "processes_of_node": setup.of_node,
        "device": {"name": setup.device.name, "memory": setup.device.memory, "source": setup.device.source},
        "measured": dict(setup.measured),
        "tokens": {
            "prompt": setup.lengths.prompt,
            "completion": setup.lengths.completion,
            "longest_completion": setup.lengths.longest,
            "source": setup.lengths.source,
        },
        "completions_per_step": setup.batch.completions_per_step,
        "strategies": strategies,
    }


def plan_lines(plan: Plan) -> Iterator[str]:
    """The plan, a line a topic."""
    recipe, arguments, method = plan.recipe, plan.arguments, plan.method
    in_bits = f", base{in_few_bits(recipe.model.quantization)}" if recipe.model.quantization else ""
    yield f"model    {recipe.model.name}, {_base_parameters(plan):,} parameters{in_bits}"
    settings = ", ".join(f"{name} {value}" for name, value in plan.settings.items())
    yield f"adapter  {method.name} ({settings})" if method.config else "adapter  none: the model itself"
    if (row := ALGORITHMS.get(recipe.algorithm or "")) is not None:
        own = row.overridden({field.name: getattr(arguments, field.name) for field in fields(arguments)})
        overridden = f"; overridden: {shown_settings(own)}" if own else ""
        yield f"algorithm {row.name}: {shown_settings(row.settings)}{overridden}"
    share = 100 * plan.trainable_parameters / plan.total_parameters
    yield f"trained  {plan.trainable_parameters:,} parameters ({share:.2f} % of all)"
    if plan.critic_parameters:
        rate = critic_rate(arguments.critic_learning_rate, float(arguments.learning_rate or 0), method.rate)
        still = "" if rate else ": its values stay as they begin"
        shape = f"rank {arguments.critic_rank}, and a value head"
        yield f"critic   {plan.critic_parameters:,} parameters ({shape}), learning rate {rate:g}{still}"
    heldout = len(plan.problems.heldout or ())
    yield f"data     {recipe.data.train.name}: {len(plan.problems.train):,} problems, {heldout:,} held out"
    yield first_prompt(plan)
    yield f"tokens   prompts up to {plan.longest_prompt}, completions up to {arguments.max_completion_length}"
    yield from _rollout_lines(plan)
    shown = ", ".join(f"{name} x {weight:g}" for name, weight in plan.reward_weights.items())
    yield f"rewards  {shown or 'none: the teacher alone'}"
    greedy = ADVANTAGES[arguments.advantage_estimator].writes_greedy
    yield f"batch    {recipe.batch}" + (f", and {recipe.batch.prompts_per_step} greedy completions" if greedy else "")
    if recipe.batch.world_size > 1:
        yield f"strategy {recipe.engine.strategy}"
    least, completions = "at least " if recipe.prompts.refill else "", plan.steps * recipe.batch.completions_per_step
    yield f"steps    {plan.steps} ({least}{completions:,} completions in all)"
    yield f"output   {recipe.output_dir}"


def _base_parameters(plan: Plan) -> int:
    return plan.total_parameters - (plan.trainable_parameters if plan.method.config else 0)


def _rollout_lines(plan: Plan) -> Iterator[str]:
    """How prompts are chosen, what the engine is given after each step, and who teaches beside it."""
    recipe = plan.recipe
    if recipe.prompts.acts:
        yield f"prompts  {recipe.prompts.shown}"
    if recipe.prompts.refill:
        usual = plan.arguments.generation_batch_size
        most = most_completions(recipe.prompts, plan.arguments, recipe.batch.world_size)
        yield f"         up to {most:,} completions in the place of {usual:,} of a batch of rollouts"
    if recipe.rollout.capabilities.takes_updates:
        what = "the changed weights" if plan.served_rank is None else f"a LoRA of rank {plan.served_rank}"
        quantised = recipe.model.quantization is not None
        of_nf4 = "; its base must be quantised too, as `perl rollout command` starts it" if quantised else ""
        yield f"rollouts {recipe.rollout.backend}, which gets {what} after each step{of_nf4}"
    if plan.asking is not None:
        yield f"tools    {plan.asking.agent.shown}"
    if recipe.teacher.acts:
        yield f"teacher  {recipe.teacher.shown}" + (f" ({recipe.teacher.adapter})" if recipe.teacher.adapter else "")


def first_prompt(plan: Plan) -> str:
    """The first training prompt as the policy reads it, special tokens and all, and its gold answer."""
    row = plan.problems.train[0]
    ids = plan.rendered([row])[0].token_ids if plan.asking is None else plan.asking.begun(row)[0].prompt_ids
    text = json.dumps(plan.tokenizer.decode(ids), ensure_ascii=False)
    if len(text) > _LONGEST_PROMPT:
        text = f"{text[: _LONGEST_PROMPT // 2]} ... {text[-_LONGEST_PROMPT // 2 :]}"
    template = "no chat template" if isinstance(row["prompt"], str) else "by the chat template"
    mode = plan.recipe.data.thinking
    template += "" if mode is None else f", thinking {'on' if mode else 'off'}"
    gold = f", answer {json.dumps(row['solution'], ensure_ascii=False)[:80]}" if row.get("solution") is not None else ""
    return f"prompt   {text} ({len(ids)} tokens, {template}){gold}"
