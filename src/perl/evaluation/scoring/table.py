"""An evaluation as a table: for a paper or a model card, and for a terminal.

Results -> table.md, or lines for a terminal

The protocol stands beside the numbers, and every reservation about them.
"""

import math
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from perl.evaluation.scoring.metrics import SMALL_P, Difference, corrected, guessed_error, power_words
from perl.evaluation.scoring.protocol import asking_of
from perl.evaluation.scoring.results import OtherScore, Results, TaskResult, Who
from perl.evaluation.scoring.score import Score
from perl.evaluation.scoring.scorers import SCORERS
from perl.evaluation.scoring.task import MATH
from perl.recipe.quantisations import in_few_bits
from perl.run.tables import markdown_table, percent, plain_table, signed_percent
from perl.zoo.intervals import ALIKE, estimate_text

# Above this share of truncated completions a score says more about the limit than about the policy.
MUCH_TRUNCATED = 0.1
WIDEST = 100
"""Of a note's lines on a terminal."""
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


@dataclass(frozen=True)
class PolicyScore:
    """A score with whose it is.

    Attributes:
        who: In words: ``the base``, or the name of an adapter.
        score: On the task.
        lighteval: lighteval's own score of the same completions; None: it is not known.
    """

    who: str
    task: TaskResult
    score: Score
    lighteval: OtherScore | None


def markdown(results: Results) -> str:
    """The table in Markdown, with the protocol and all reservations below it.

    Args:
        results: With p values as they are of each task alone; the table corrects them for the number of tasks.
    """
    tasks = judged_together(results.tasks)
    columns = [*_score_columns(tasks, MARKDOWN), *_further_columns(tasks)]
    notes = [f"- {note}" for note in _notes(results, tasks, MARKDOWN)]
    return "\n".join([*markdown_table(in_cells(_rows_of(columns))), "", *notes]) + "\n"


def plain(results: Results) -> str:
    """The same for a terminal, scores first and what else was measured below."""
    tasks = judged_together(results.tasks)
    scores, further = _score_columns(tasks, PLAIN), _further_columns(tasks)
    tables = [*plain_table(_rows_of(scores)), "", *plain_table(_rows_of([scores[0], *further]))]
    return "\n".join([*tables, "", *wrapped(_notes(results, tasks, PLAIN))]) + "\n"


def wrapped(notes: Iterable[str]) -> list[str]:
    """Notes as lines for a terminal."""
    return [textwrap.fill(note, WIDEST, subsequent_indent="  ") for note in notes]


def judged_together(tasks: Sequence[TaskResult]) -> tuple[TaskResult, ...]:
    """Tasks of which a difference is shown only if it is one among so many: p values are corrected for their number."""
    differences = corrected([task.difference for task in tasks])
    return tuple(replace(task, difference=found) for task, found in zip(tasks, differences, strict=True))


def _rows_of(columns: Sequence[Column]) -> list[list[str]]:
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
    cells = [cell for score in scores for cell in (score_cell(score), pass_cell(score), majority_cell(score))]
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


def _why_not_shown(difference: Difference) -> str:
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
    if marks is MARKDOWN and any(task.scorer != MATH for task in tasks):  # a terminal has a note, names being long
        columns.append(("judged by", [judge_cell(task.scorer, marks) for task in tasks]))
    if any(task.base for task in tasks):
        columns.append((f"avg@{k} base", [_marked(task, task.base, -1, marks) for task in tasks]))
    if any(task.adapter for task in tasks):
        columns.append((f"avg@{k} adapter", [_marked(task, task.adapter, 1, marks) for task in tasks]))
    if any(task.difference for task in tasks):
        columns.append(("difference [95 % interval]", [difference_cell(task.difference) for task in tasks]))
        columns.append(("p", [p_cell(task.difference) for task in tasks]))
    return columns


def _judges_note(tasks: Iterable[TaskResult], marks: Marks) -> list[str]:
    """``Judged by: Quiz choice, Mine `my_rewards:score@3f2a9c1b0d4e`.``; nothing where the verifier judges all."""
    judges = {task.title: judge_cell(task.scorer, marks) for task in tasks if task.scorer != MATH}
    return [f"Judged by: {', '.join(f'{title} {judge}' for title, judge in judges.items())}."] if judges else []


def judge_cell(scorer: str, marks: Marks) -> str:
    """A scorer's name; of a results file it may be any text, and it must be none but that on a card."""
    name = " ".join(scorer.replace("`", "'").split())
    return "the verifier" if name == MATH else name if name in SCORERS else marks.code.format(name)


def _further_columns(tasks: Sequence[TaskResult]) -> list[Column]:
    columns: list[Column] = []
    if any(map(asked_as_lighteval, tasks)) and any(task.lighteval for task in tasks):
        columns.append((f"avg@{_k(tasks)} by lighteval", [_by_lighteval(task) for task in tasks]))
    if _k(tasks) != "1":  # with one completion a problem they are avg@1 again
        columns.append((f"pass@{_k(tasks)}", [_both(task, pass_cell) for task in tasks]))
        columns.append((f"maj@{_k(tasks)}", [_both(task, majority_cell) for task in tasks]))
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


def pass_cell(score: Score) -> str:
    """pass@k with its standard error, in percent."""
    means = (score.pass_at_stderr, score.pass_at_low, score.pass_at_high)
    return estimate_text(score.pass_at[score.k], *(found.get(score.k) for found in means))


def majority_cell(score: Score) -> str:
    """maj@k with its standard error, in percent."""
    return estimate_text(score.majority, score.majority_stderr, score.majority_low, score.majority_high)


def asked_as_lighteval(task: TaskResult) -> bool:
    """Whether a task bears lighteval's name, so that its own score belongs beside ours."""
    return "lighteval" in task.title


def lighteval_cell(score: OtherScore | None) -> str:
    """``41.2 ± 1.3``: lighteval's own score of the same completions, in percent; a dash where it is not known."""
    return "-" if score is None else estimate_text(score.accuracy, score.stderr, None, None)


def _by_lighteval(task: TaskResult) -> str:
    whose = [who for who, _ in scores_of(task)]
    return " → ".join(lighteval_cell(task.lighteval.get(who)) for who in whose) if task.lighteval else "-"


def _both(task: TaskResult, text: Callable[[Score], str]) -> str:
    """``base → adapter``, or the one that was scored."""
    return " → ".join(text(score) for score in (task.base, task.adapter) if score is not None)


def _notes(results: Results, tasks: Sequence[TaskResult], marks: Marks) -> list[str]:
    """Of results whose tasks have the p values that the table shows."""
    scored = [
        PolicyScore(f"the {who}", task, score, task.lighteval.get(who))
        for task in tasks
        for who, score in scores_of(task)
    ]
    return [
        protocol_note(results),
        engine_note(results),
        _subject(results, marks),
        _protocol_hashes(tasks, marks),
        *(_judges_note(tasks, marks) if marks is PLAIN else []),
        _legend(tasks, marks),
        *doubts(scored),
        *_without_lighteval(tasks),
        *_not_shown(tasks),
    ]


def _protocol_hashes(tasks: Sequence[TaskResult], marks: Marks) -> str:
    """``Protocol hashes: AIME 2024 `...`, ...``: two scores with the same one may be compared."""
    hashes = ", ".join(f"{task.title} {marks.code.format(task.protocol_hash)}" for task in tasks)
    return f"Protocol {'hash' if len(tasks) == 1 else 'hashes'}: {hashes}."


_ASKED_WORDS = {"thinking": "thinking", "chat_template_given": "chat template"}


def protocol_note(results: Results) -> str:
    """The settings, and where completions were really cut off if the protocol does not say it."""
    protocol = results.protocol
    asked = "".join(f", {_ASKED_WORDS[name]} {value}" for name, value in asking_of(results.subject).items())
    line = f"Protocol {protocol.preset}: {protocol}{asked}, seed {protocol.seed}."
    if all(task.max_new_tokens == protocol.max_new_tokens for task in results.tasks):
        return line
    limits = ", ".join(f"{task.title} {task.max_new_tokens:,}" for task in results.tasks)
    return f"{line} Cut off after so many tokens: {limits}."


def engine_note(results: Results) -> str:
    """What drew the completions."""
    engine = {name: value for name, value in results.engine.items() if value is not None}
    backend = " ".join(str(engine.pop(name)) for name in ("backend", "version") if name in engine)
    named = [str(engine.pop(name)) for name in ("dtype", "device") if name in engine]
    others = [
        f"{name} {value:.2g}" if isinstance(value, float) else f"{name} {value}" for name, value in engine.items()
    ]
    return f"Engine: {', '.join([backend, *named, *others])}."


def _subject(results: Results, marks: Marks) -> str:
    sha = results.subject.get("adapter_sha256")
    if sha is None:
        return f"Base: {base_words(results)}."
    adapter = f"{results.subject['name']}, sha256 {marks.code.format(sha[:_SHORT_SHA])}"
    return f"Base: {base_words(results)}; adapter: {adapter}."


def base_words(results: Results) -> str:
    """``someone/base@revision``, and in how few bits it was loaded."""
    subject = results.subject
    revision = f"@{subject['base_revision']}" if subject.get("base_revision") else ""
    return f"{subject['base']}{revision}{in_few_bits(subject.get('base_quantization'))}"


def _legend(tasks: Sequence[TaskResult], marks: Marks) -> str:
    parts = ["Scores and shares in percent", *error_words(score for task in tasks for _, score in scores_of(task))]
    differences = [task.difference for task in tasks if task.difference is not None]
    if differences:
        parts.append("difference: adapter less base, paired by problem")
        parts.append(p_words(len(differences)))
        if any(map(is_shown, differences)):
            parts.append(f"{marks.name}: the better one, the interval excludes 0 and p is at most {SMALL_P}")
    if any(task.base and task.adapter for task in tasks):
        parts.append("a → b: base → adapter")
    return "; ".join(parts) + "."


def p_words(count: int, of: str = "") -> str:
    """``p: sign flips by problem, Holm over 3 tasks``: what the p values of so many differences are.

    Args:
        count: Differences whose p values were corrected together.
        of: What they are of; else of so many tasks.
    """
    together = f", Holm over {of or f'{count} tasks'}" if count > 1 else ""
    return f"p: sign flips by problem{together}"


def doubts(scored: Sequence[PolicyScore]) -> list[str]:
    """What a reader must know before believing the scores."""
    unjudged = [(one, one.score.unjudged) for one in scored if one.score.unjudged > 0]
    truncated = [(one, one.score.truncated) for one in scored if one.score.truncated > MUCH_TRUNCATED]
    lines = [f"Not judged: {_shares(unjudged)}; they count as wrong."] if unjudged else []
    if truncated:
        other_one = "the score may be another one" if len(truncated) == 1 else "the scores may be others"
        lines.append(f"Cut off: {_shares(truncated)}; with more tokens {other_one}.")
    for one in scored:
        other, count = one.lighteval, one.score.n * one.score.k
        if other is not None and other.only_ours + other.only_lighteval > 0:
            lines.append(
                f"lighteval judges {other.only_ours + other.only_lighteval:,} of {count:,} completions of "
                f"{one.who} on {one.task.title} otherwise; right only for lighteval: {other.only_lighteval:,}, "
                f"only here: {other.only_ours:,}."
            )
    return lines


def _without_lighteval(tasks: Iterable[TaskResult]) -> list[str]:
    """Which tasks bear lighteval's name and no score of its own."""
    titles = [task.title for task in tasks if asked_as_lighteval(task) and not task.lighteval]
    return [f"Asked as lighteval asks, and not scored by lighteval itself: {', '.join(titles)}."] if titles else []


def _not_shown(tasks: Sequence[TaskResult]) -> list[str]:
    """That no difference is shown, why, and how large one had to be; nothing where one is."""
    compared = [(task, task.difference) for task in tasks if task.difference is not None]
    if not compared or any(is_shown(difference) for _, difference in compared):
        return []
    reasons = list(dict.fromkeys(_why_not_shown(difference) for _, difference in compared))
    could = []
    for task, difference in compared:
        n, k = task.score.n, task.score.k
        stderr = difference.stderr if difference.stderr > 0 else guessed_error(n, k)  # measured, else a guess
        could.append(f"{task.title}, {n:,} problems x {k}: {power_words(stderr, n, len(compared))}")
    shown = f"No difference from the base is shown: {', or '.join(reasons)}."
    return [shown, f"What could be shown: {'; '.join(could)}."]


def _shares(found: Sequence[tuple[PolicyScore, float]]) -> str:
    """Shares of completions by task and policy: ``5.0 % of the completions of the base on Sums, ...``."""
    first, *others = ((f"{percent(share)} %", f"of {one.who} on {one.task.title}") for one, share in found)
    return ", ".join([f"{first[0]} of the completions {first[1]}", *(" ".join(one) for one in others)])


def scores_of(task: TaskResult) -> Iterable[tuple[Who, Score]]:
    """Whose scores a task has, the base's first."""
    both: tuple[tuple[Who, Score | None], ...] = (("base", task.base), ("adapter", task.adapter))
    return ((who, score) for who, score in both if score is not None)
