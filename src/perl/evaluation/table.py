"""An evaluation as a table: for a paper or a model card, and for a terminal.

Results -> table.md, or lines for a terminal

The protocol stands beside the numbers, and every reservation about them.
"""

import math
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from perl.evaluation.metrics import Difference
from perl.evaluation.results import Results, TaskResult
from perl.evaluation.score import Score
from perl.policy.name import in_few_bits
from perl.run.tables import markdown_table, percent, plain_table, signed_percent
from perl.zoo.intervals import ALIKE, estimate_text

# Above this share of truncated completions a score says more about the limit than about the policy.
MUCH_TRUNCATED = 0.1
# A terminal shows wider tables in two parts.
WIDEST = 100
# A difference with a larger p value is not called one, whatever its interval.
SMALL_P = 0.05
_SHORT_SHA = 12

Column = tuple[str, list[str]]
"""Heading and cells; the first column of a table is aligned to the left, all others to the right."""


@dataclass(frozen=True)
class Marks:
    """How the better score and a hash are set off.

    Attributes:
        strong: ``{}`` stands for the score.
        code: ``{}`` stands for the hash.
        name: What the better score has.
    """

    strong: str
    code: str
    name: str


MARKDOWN, PLAIN = Marks("**{}**", "`{}`", "bold"), Marks("{} *", "{}", "*")


def markdown(results: Results) -> str:
    """The table in Markdown, with the protocol and all reservations below it."""
    columns = [*_score_columns(results.tasks, MARKDOWN), *_further_columns(results.tasks)]
    notes = [f"- {note}" for note in _notes(results, MARKDOWN)]
    return "\n".join([*markdown_table(in_cells(rows_of(columns))), "", *notes]) + "\n"


def plain(results: Results) -> str:
    """The same for a terminal; where it would be too wide, scores first and what else was measured below."""
    scores, further = _score_columns(results.tasks, PLAIN), _further_columns(results.tasks)
    lines = plain_table(rows_of([*scores, *further]))
    if max(map(len, lines)) > WIDEST:
        first, *others = (plain_table(rows_of(part)) for part in (scores, *_parts(scores[0], further)))
        lines = [*first, *(line for table in others for line in ("", *table))]
    notes = [textwrap.fill(note, WIDEST, subsequent_indent="  ") for note in _notes(results, PLAIN)]
    return "\n".join([*lines, "", *notes]) + "\n"


def rows_of(columns: Sequence[Column]) -> list[list[str]]:
    """The rows of a table of these columns, its headings first."""
    return [list(row) for row in zip(*([heading, *cells] for heading, cells in columns), strict=True)]


def in_cells(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """Rows whose cells are Markdown but for pipes."""
    return [[cell.replace("|", "\\|") for cell in row] for row in rows]


def score_cell(score: Score | None) -> str:
    """``41.2 ± 1.3``: avg@k and its standard error in percent; ``100.0 [88.4, 100.0]`` where that error is 0.0."""
    return "-" if score is None else estimate_text(score.accuracy, score.stderr, score.low, score.high)


def error_words(scores: Iterable[Score]) -> list[str]:
    """What the errors in the cells of these scores are."""
    cells = [cell for score in scores for cell in (score_cell(score), _pass_cell(score), _majority_cell(score))]
    words = ["±: standard error, clustered by problem"]
    return [*words, f"[ ]: {ALIKE}"] if any("[" in cell for cell in cells) else words


def difference_cell(difference: Difference | None) -> str:
    """``+3.1 [+0.2, +6.0]``: a difference with its 95 % interval, in points of a percent."""
    if difference is None:
        return "-"
    if math.isnan(difference.low):
        return signed_percent(difference.mean)
    return f"{signed_percent(difference.mean)} [{signed_percent(difference.low)}, {signed_percent(difference.high)}]"


def p_cell(difference: Difference | None) -> str:
    """A p value with three decimals."""
    if difference is None or math.isnan(difference.p_value):
        return "-"
    return f"{difference.p_value:.3f}" if difference.p_value >= 0.001 else "<0.001"


def is_shown(difference: Difference | None) -> bool:
    """Whether a difference is more than chance: its 95 % interval excludes 0, and its p value is at most 0.05."""
    return difference is not None and excludes_zero(difference) and difference.p_value <= SMALL_P


def excludes_zero(difference: Difference) -> bool:
    """Whether the 95 % interval of a difference excludes 0."""
    return difference.low > 0 or difference.high < 0


def why_not_shown(difference: Difference) -> str:
    """Why a difference is not shown: ``the 95 % interval includes 0``."""
    if math.isnan(difference.low):
        return "a single problem has no interval"
    if excludes_zero(difference):
        return f"p is above {SMALL_P}"
    return "the 95 % interval includes 0"


def _score_columns(tasks: Sequence[TaskResult], marks: Marks) -> list[Column]:
    """avg@k of base and adapter and their difference, as far as there are any."""
    k = _k(tasks)
    columns: list[Column] = [("Task", [task.title for task in tasks]), ("n", [f"{task.score.n:,}" for task in tasks])]
    if k == "k":
        columns.append(("k", [f"{task.score.k}" for task in tasks]))
    if any(task.base for task in tasks):
        columns.append((f"avg@{k} base", [_marked(task, task.base, -1, marks) for task in tasks]))
    if any(task.adapter for task in tasks):
        columns.append((f"avg@{k} adapter", [_marked(task, task.adapter, 1, marks) for task in tasks]))
    if any(task.difference for task in tasks):
        columns.append(("difference [95 % interval]", [difference_cell(task.difference) for task in tasks]))
        columns.append(("p", [p_cell(task.difference) for task in tasks]))
    return columns


def _further_columns(tasks: Sequence[TaskResult]) -> list[Column]:
    columns: list[Column] = []
    if _k(tasks) != "1":  # with one completion a problem they are avg@1 again
        columns.append((f"pass@{_k(tasks)}", [_both(task, _pass_cell) for task in tasks]))
        columns.append((f"maj@{_k(tasks)}", [_both(task, _majority_cell) for task in tasks]))
    columns.append(("mean tokens", [_both(task, lambda s: f"{s.mean_tokens:,.0f}") for task in tasks]))
    columns.append(("truncated", [_both(task, lambda s: percent(s.truncated)) for task in tasks]))
    columns.append(("no answer", [_both(task, lambda s: percent(s.no_answer)) for task in tasks]))
    return columns


def _k(tasks: Sequence[TaskResult]) -> str:
    """Completions a problem, for a heading; ``k`` where tasks differ in it."""
    found = {task.score.k for task in tasks}
    return f"{found.pop()}" if len(found) == 1 else "k"


def _marked(task: TaskResult, score: Score | None, sign: int, marks: Marks) -> str:
    """A score, set off if the difference shows that it is the better one."""
    better = is_shown(task.difference) and task.difference is not None and task.difference.mean * sign > 0
    return marks.strong.format(score_cell(score)) if better else score_cell(score)


def _pass_cell(score: Score) -> str:
    means = (score.pass_at_stderr, score.pass_at_low, score.pass_at_high)
    return estimate_text(score.pass_at[score.k], *(found.get(score.k) for found in means))


def _majority_cell(score: Score) -> str:
    return estimate_text(score.majority, score.majority_stderr, score.majority_low, score.majority_high)


def _parts(first: Column, further: Sequence[Column]) -> list[list[Column]]:
    """The columns in as few tables as a terminal shows, each with the first one."""
    parts: list[list[Column]] = [[first]]
    for column in further:
        if len(parts[-1]) > 1 and max(map(len, plain_table(rows_of([*parts[-1], column])))) > WIDEST:
            parts.append([first])
        parts[-1].append(column)
    return parts


def _both(task: TaskResult, text: Callable[[Score], str]) -> str:
    """``base → adapter``, or the one that was scored."""
    return " → ".join(text(score) for score in (task.base, task.adapter) if score is not None)


def _notes(results: Results, marks: Marks) -> list[str]:
    tasks = results.tasks
    hashes = ", ".join(f"{task.title} {marks.code.format(task.protocol_hash)}" for task in tasks)
    return [
        _protocol(results),
        f"Engine: {_engine(results)}.",
        _subject(results, marks),
        f"Protocol {'hash' if len(tasks) == 1 else 'hashes'}: {hashes}.",
        _legend(tasks, marks),
        *_doubts(tasks),
    ]


def _protocol(results: Results) -> str:
    """The settings, and where completions were really cut off if the protocol does not say it."""
    protocol = results.protocol
    line = f"Protocol {protocol.preset}: {protocol}, seed {protocol.seed}."
    if all(task.max_new_tokens == protocol.max_new_tokens for task in results.tasks):
        return line
    limits = ", ".join(f"{task.title} {task.max_new_tokens:,}" for task in results.tasks)
    return f"{line} Cut off after so many tokens: {limits}."


def _engine(results: Results) -> str:
    engine = {name: value for name, value in results.engine.items() if value is not None}
    backend = " ".join(str(engine.pop(name)) for name in ("backend", "version") if name in engine)
    named = [str(engine.pop(name)) for name in ("dtype", "device") if name in engine]
    others = [
        f"{name} {value:.2g}" if isinstance(value, float) else f"{name} {value}" for name, value in engine.items()
    ]
    return ", ".join([backend, *named, *others])


def _subject(results: Results, marks: Marks) -> str:
    subject = results.subject
    revision = f"@{subject['base_revision']}" if subject.get("base_revision") else ""
    base = f"Base: {subject['base']}{revision}{in_few_bits(subject.get('base_quantization'))}"
    sha = subject.get("adapter_sha256")
    if sha is None:
        return f"{base}."
    return f"{base}; adapter: {subject['name']}, sha256 {marks.code.format(sha[:_SHORT_SHA])}."


def _legend(tasks: Sequence[TaskResult], marks: Marks) -> str:
    parts = ["Scores and shares in percent", *error_words(score for task in tasks for _, score in _policies(task))]
    if any(task.difference for task in tasks):
        parts.append("difference: adapter less base, paired by problem")
        parts.append("p: sign flips by problem" + (", not corrected for the number of tasks" if len(tasks) > 1 else ""))
        if any(is_shown(task.difference) for task in tasks):
            parts.append(f"{marks.name}: the better one, the interval excludes 0 and p is at most {SMALL_P}")
    if any(task.base and task.adapter for task in tasks):
        parts.append("a → b: base → adapter")
    return "; ".join(parts) + "."


def _doubts(tasks: Sequence[TaskResult]) -> list[str]:
    """What a reader must know before believing the scores."""
    scored = [(task, who, score) for task in tasks for who, score in _policies(task)]
    unjudged = [(task, who, score.unjudged) for task, who, score in scored if score.unjudged > 0]
    truncated = [(task, who, score.truncated) for task, who, score in scored if score.truncated > MUCH_TRUNCATED]
    lines = [f"Not judged: {_shares(unjudged)}; they count as wrong."] if unjudged else []
    if truncated:
        other_one = "the score may be another one" if len(truncated) == 1 else "the scores may be others"
        lines.append(f"Cut off: {_shares(truncated)}; with more tokens {other_one}.")
    for task, who, score in scored:
        other = task.lighteval.get(who)
        if other is not None and other.only_ours + other.only_lighteval > 0:
            lines.append(
                f"lighteval judges {other.only_ours + other.only_lighteval:,} of {score.n * score.k:,} completions of "
                f"the {who} on {task.title} otherwise; right only for lighteval: {other.only_lighteval:,}, "
                f"only here: {other.only_ours:,}."
            )
    differences = [task.difference for task in tasks if task.difference is not None]
    if differences and not any(map(is_shown, differences)):
        lines.append(f"No difference from the base is shown: {_reasons(differences)}.")
    return lines


def _shares(found: Sequence[tuple[TaskResult, str, float]]) -> str:
    """Shares of completions by task and policy: ``5.0 % of the completions of the base on Sums, ...``."""
    first, *others = ((f"{percent(share)} %", f"of the {who} on {task.title}") for task, who, share in found)
    return ", ".join([f"{first[0]} of the completions {first[1]}", *(" ".join(one) for one in others)])


def _policies(task: TaskResult) -> Iterable[tuple[str, Score]]:
    return ((who, score) for who, score in (("base", task.base), ("adapter", task.adapter)) if score is not None)


def _reasons(differences: Sequence[Difference]) -> str:
    reasons = list(dict.fromkeys(map(why_not_shown, differences)))
    if len(differences) > 1 and reasons == ["the 95 % interval includes 0"]:
        return "every 95 % interval includes 0"
    return ", or ".join(reasons)
