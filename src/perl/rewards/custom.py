"""Custom rewards, the user's functions: a sample that one cannot score is None and counted, and the run goes on.

completions, prompts, columns -> one finite number or None a completion

Two ways to the same signature: in this process (`guarded`), or in worker processes that are killed when they overrun
(`in_workers`). Each process of a distributed run counts its own failures.
"""

import asyncio
import functools
import inspect
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from perl.errors import DataError, PerlError, RewardError, warn
from perl.run.launched import own_share
from perl.run.workers.pool import WorkerPool, as_json
from perl.run.workers.worker import imported, placed_line

# TRL's signature: completions, prompts and columns by name -> one number (or None) a completion; may be a coroutine.
RewardFunction = Callable[..., Any]
Arguments = Mapping[str, Any]

MOST_LINES = 3  # a batch; a thousand samples that fail for one reason need not be listed
SHOWN_PROMPT = 60
# What TRL passes beside the samples; it is useless in another process, so a worker's function goes without.
NOT_FOR_WORKERS = ("trainer_state", "log_metric", "log_extra")


@dataclass
class Failures:
    """Samples that a reward function could not score, counted over the run.

    Attributes:
        name: The reward's.
        most: How many the run puts up with.
        newest: The newest one, as one line.
        lines: How many are said at most; None: the first of each batch.
        samples: What the samples of the next batch are called; empty: they are known by their prompts.
    """

    name: str
    most: int
    count: int = 0
    newest: str = ""
    lines: int | None = None
    samples: Sequence[str] = ()

    @property
    def too_many(self) -> bool:
        """Whether more samples failed than the run puts up with."""
        return self.count > self.most


def is_async(function: RewardFunction) -> bool:
    """Whether calls of the function must be awaited.

    Args:
        function: Anything that can be called.

    Returns:
        True for an ``async def``, for an object whose class has an ``async def __call__``, and for a
        ``functools.partial`` of one. False for a function that merely returns a coroutine.
    """
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def guarded(
    function: RewardFunction, failures: Failures, bind: Callable[[Arguments], Arguments] = dict
) -> RewardFunction:
    """The function, with None for each sample that it cannot score.

    A batch for which it raises, or returns anything but one finite number or None a sample, is scored again one sample
    at a time: every list or tuple of the batch's length is cut to length 1, all else is passed as it is. So a function
    that compares the samples of a batch with each other scores such a batch differently. What it logs counts only from
    the calls whose values count. ``reward/NAME/failed_frac`` is logged for every batch.

    Args:
        function: Sync or async as :func:`is_async` says, and stays what it is.
        failures: Is counted up.
        bind: TRL's arguments -> those that the function is called with.

    Returns:
        A function of keyword arguments. It raises PerlError and what is not an Exception (Ctrl-C), nothing else; for
        ``sys.exit`` a RewardError.
    """
    waits = is_async(function)

    async def call(arguments: Arguments, rows: int) -> _Call:
        made = _Call()
        try:
            answer = function(**bind(made.instead_of_trl(arguments)))
            made.values = _numbers(await answer if waits else answer, rows)
        except PerlError:
            raise
        except SystemExit as error:  # it would end this process of a run as if the run had wanted it
            what, hint = f"calls sys.exit({error.code!r}), which would end the run", "None for what it cannot score"
            raise RewardError(what, f"reward {failures.name}", hint) from error
        except Exception as error:  # noqa: BLE001 (the user's function may raise anything)
            return _Call(fault=placed_line(error))
        return made

    @functools.wraps(function)
    async def awaited(**arguments: Any) -> list[float | None]:  # noqa: ANN401
        return await _scored(call, arguments, failures)

    @functools.wraps(function)
    def at_once(**arguments: Any) -> list[float | None]:  # noqa: ANN401
        try:  # without a loop: what a sync function scores never waits
            _scored(call, arguments, failures).send(None)
        except StopIteration as end:
            values: list[float | None] = end.value
            return values
        raise RuntimeError("the function waits")

    reward = awaited if waits else at_once
    reward.__name__ = getattr(function, "__name__", failures.name)
    return reward


def in_workers(
    path: str, arguments: Arguments, failures: Failures, *, workers: int, timeout_seconds: float
) -> RewardFunction:
    """The function, called for one sample at a time in worker processes.

    It gets lists of length 1 (completions, prompts, completion_ids, columns), but neither ``trainer_state`` nor
    ``log_metric`` nor ``log_extra``. Its module is imported by each worker, before any time counts. All samples that a
    worker scores share one event loop. ``reward/NAME/failed_frac`` and ``timeout_frac`` are logged for every batch.

    Args:
        path: ``package.module:function``, sync or async.
        arguments: By name; they win over columns of the same name.
        failures: Is counted up.
        workers: Processes at most, for all processes of a run on this machine; at least one each.
        timeout_seconds: Wall time for a sample; one that takes longer is None and its worker is killed.

    Returns:
        A sync function of keyword arguments. It raises DataError for a column that cannot be sent to a worker, and
        WorkerStartError.

    Raises:
        ValueError: ``workers`` or ``timeout_seconds`` is out of :class:`~perl.run.workers.pool.WorkerPool`'s range.
    """
    module, _, name = path.partition(":")
    pool = WorkerPool(
        f"{__name__}:{score_in_worker.__name__}",
        workers=own_share(workers) if workers > 0 else workers,
        timeout_seconds=timeout_seconds,
        imports=[module],
    )

    def reward(**columns: Any) -> list[float | None]:  # noqa: ANN401
        rows = len(columns["completions"])
        sent = {key: value for key, value in columns.items() if key not in NOT_FOR_WORKERS}
        items = [(path, dict(arguments), row_of(sent, row, rows)) for row in range(rows)]
        try:
            outcomes = pool.map(items)
        except TypeError as error:
            unsent = next(filter(None, (unsendable(row) for _, _, row in items)), None)
            if unsent is None:
                raise
            hint = "a reward in worker processes gets text, numbers, lists and mappings only"
            raise DataError(unsent, f"rewards.{path}", hint) from error
        faults = {row: f"{o.status}: {o.error}" for row, o in enumerate(outcomes) if o.status == "timeout"}
        timeouts = len(faults)
        faults |= {row: o.error for row, o in enumerate(outcomes) if o.status == "error"}
        _count(dict(sorted(faults.items())), columns, failures)
        log_metric = columns.get("log_metric")
        if log_metric is not None and rows:
            log_metric(f"reward/{failures.name}/timeout_frac", timeouts / rows)
        return [None if outcome.status != "done" else outcome.value for outcome in outcomes]

    reward.__name__ = name
    return reward


def score_in_worker(item: tuple[str, dict[str, Any], dict[str, Any]]) -> float | None:
    """One sample's reward; what a worker runs."""
    path, arguments, row = item
    values = imported(path)(**{**row, **arguments})
    if inspect.isawaitable(values):
        # A sample that is interrupted leaves no task that would go on in the time of the next one.
        loop = _runner().get_loop()
        earlier = asyncio.all_tasks(loop)
        try:
            values = _runner().run(asyncio.wait_for(values, None))
        except BaseException as error:
            if not isinstance(error, Exception):
                for task in asyncio.all_tasks(loop) - earlier:
                    task.cancel()
            raise
    return _numbers(values, 1)[0]


def unsendable(row: Mapping[str, Any]) -> str | None:
    """The first column of a sample that cannot be sent to a worker.

    Args:
        row: A data row, or the arguments of a call; values by column.

    Returns:
        ``column 'NAME' is not a JSON value: REASON``, or None where every column is one.
    """
    for column, value in row.items():
        try:
            as_json(value)
        except TypeError as error:
            return f"column {column!r} {error}"
    return None


@functools.cache
def _runner() -> asyncio.Runner:
    """The one event loop of a worker: a client that the user's module keeps is bound to the loop of its first use."""
    return asyncio.Runner()


@dataclass
class _Call:
    """One call of the function: its values or why there are none, and what it logged (nothing if it failed)."""

    values: list[float | None] = field(default_factory=lambda: [None])
    fault: str = ""
    metrics: list[tuple[str, float]] = field(default_factory=list)
    columns: dict[str, list[Any]] = field(default_factory=dict)

    def instead_of_trl(self, arguments: Arguments) -> dict[str, Any]:
        """The arguments of the call: TRL's loggers, where it gave them, replaced by these lists."""
        ours = {
            "log_metric": lambda name, value: self.metrics.append((name, value)),
            "log_extra": lambda column, values: self.columns.setdefault(column, []).extend(values),
        }
        return {**arguments, **{key: log for key, log in ours.items() if arguments.get(key) is not None}}


async def _scored(
    call: Callable[[Arguments, int], Awaitable[_Call]], arguments: Arguments, failures: Failures
) -> list[float | None]:
    """The rewards of a batch, from one call or, if that fails, from one more for each sample."""
    rows = len(arguments["completions"])
    if not rows:
        return []
    batch = await call(arguments, rows)
    if not batch.fault:
        _pass_on(arguments, batch.metrics, batch.columns)
        _count({}, arguments, failures)
        return batch.values
    calls = [batch]
    if rows > 1:
        calls = [await call(row_of(arguments, row, rows), 1) for row in range(rows)]
    faults = {row: made.fault for row, made in enumerate(calls) if made.fault}
    if not faults:
        warn("PRL334", "reward %s: a batch failed, its samples one by one did not: %s", failures.name, batch.fault)
    # Columns of TRL's table must be as long as the batch: None where a call logged nothing.
    names = dict.fromkeys(name for made in calls for name in made.columns)
    columns = {name: [(made.columns.get(name) or [None])[0] for made in calls] for name in names}
    _pass_on(arguments, [metric for made in calls for metric in made.metrics], columns)
    _count(faults, arguments, failures)
    return [value for made in calls for value in made.values]


def _pass_on(arguments: Arguments, metrics: Iterable[tuple[str, float]], columns: Mapping[str, list[Any]]) -> None:
    for name, value in metrics:
        arguments["log_metric"](name, value)
    for column, values in columns.items():
        arguments["log_extra"](column, values)


def _count(faults: Mapping[int, str], arguments: Arguments, failures: Failures) -> None:
    """Counts, names and logs the samples of a batch that failed, given by row."""
    prompts = arguments.get("prompts")
    for number, (row, fault) in enumerate(faults.items()):
        shown = f" for the prompt {shown_prompt(prompts[row])!r}" if prompts is not None else f" for sample {row}"
        shown = f" for {failures.samples[row]}" if failures.samples else shown
        failures.newest = f"reward {failures.name}: {fault}{shown}"
        if number < MOST_LINES and (failures.lines is None or failures.count + number < failures.lines):
            warn("PRL334", "%s", failures.newest)
    if len(faults) > MOST_LINES and failures.lines is None:
        warn("PRL334", "reward %s: and %d more", failures.name, len(faults) - MOST_LINES)
    failures.count += len(faults)
    rows = len(arguments["completions"])
    log_metric = arguments.get("log_metric")
    # Also 0: TRL averages only what it is given, and so would leave out processes and batches without a failure.
    if log_metric is not None and rows:
        log_metric(f"reward/{failures.name}/failed_frac", len(faults) / rows)


def shown_prompt(prompt: Any) -> str:  # noqa: ANN401 (text or chat messages)
    """The beginning of a prompt as one line; of chat messages the last one, which is the question."""
    if isinstance(prompt, list | tuple) and prompt and isinstance(prompt[-1], Mapping):
        prompt = prompt[-1].get("content")
    return " ".join(str(prompt).split())[:SHOWN_PROMPT]


def row_of(arguments: Arguments, row: int, rows: int) -> dict[str, Any]:
    """A batch of one sample: what holds a value for each sample is cut, all else is left."""
    return {
        name: value[row : row + 1] if isinstance(value, list | tuple) and len(value) == rows else value
        for name, value in arguments.items()
    }


def _numbers(values: Any, rows: int) -> list[float | None]:  # noqa: ANN401 (what the user's function returns)
    """One finite number or None a sample, of whatever type numbers come in.

    Raises:
        TypeError: It is not a list of numbers.
        ValueError: There are more or fewer than samples, or one is not finite.
    """
    listed = numbers_in(values)
    if len(listed) != rows:
        raise ValueError(f"returned {len(listed)} rewards for {rows} samples")
    for number in listed:
        if number is not None and not math.isfinite(number):
            raise ValueError(f"returned {number}, which is not finite")
    return listed


def numbers_in(values: Any) -> list[float | None]:  # noqa: ANN401 (what a user's function returns)
    """The numbers, Python's, NumPy's or torch's, and None in a list.

    Raises:
        TypeError: It is not a list of numbers.
    """
    if inspect.iscoroutine(values):
        values.close()  # or Python warns that it was never awaited
        raise TypeError("returned a coroutine; define the function itself with async def")
    if isinstance(values, str | bytes | Mapping | Awaitable) or not isinstance(values, Iterable):
        raise TypeError(f"returned {type(values).__name__}, not a list of numbers")
    listed = list(values)
    for value in listed:
        if isinstance(value, str | bytes):  # float() would read it
            raise TypeError(f"returned {value!r:.60}, which is not a number")
    return [None if value is None else float(value) for value in listed]
