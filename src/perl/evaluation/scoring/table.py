"""An evaluation as a table: for a paper or a model card, and for a terminal.

Results -> table.md, or lines for a terminal

The protocol stands beside the numbers, and every reservation about them.
"""

import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from perl.evaluation.scoring.metrics import SMALL_P, Difference, corrected, guessed_error, power_words
from perl.evaluation.scoring.protocol import asking_of
from perl.evaluation.scoring.results import OtherScore, Results, TaskResult, Who
from perl.evaluation.scoring.score import Score
from perl.evaluation.scoring.scorers import SCORERS
from perl.evaluation.scoring.task import MATH
from perl.recipe.quantisations import in_few_bits
from perl.run.tables import DASH, UNKNOWN, Row, TableCell, fact_cell, percent, printed, signed_percent
from perl.zoo.intervals import ALIKE

# Above this share of truncated completions a score says more about the limit than about the policy.
MUCH_TRUNCATED = 0.1
WIDEST = 100
"""Of a note's lines on a terminal."""
_SHORT_SHA = 12
_ASKED_WORDS = {"thinking": "thinking", "chat_template_given": "chat template"}


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
        called: In words: ``the base``, or the name of an adapter.
        who: Which of the two it is on the task.
    """

    called: str
    who: Who
    task: TaskResult
    score: Score

    @property
    def lighteval(self) -> OtherScore | None:
        """Of the same completions, as lighteval itself judges them; None: it is not known."""
        return self.task.lighteval.get(self.who)


def markdown(results: Results) -> str:
    """The table in Markdown, with the protocol and all reservations below it.

    Args:
        results: With p values as they are of each task alone; the table corrects them for the number of tasks.
    """
    tasks = judged_together(results.tasks)
    rows = [{**scores, **further} for scores, further in _rows(tasks, MARKDOWN)]
    notes = _notes(results, tasks, MARKDOWN)
    return with_notes(printed(rows, style="markdown", in_marks=True), notes, MARKDOWN)


def plain(results: Results) -> str:
    """The same for a terminal, scores first and what else was measured below."""
    tasks = judged_together(results.tasks)
    rows = _rows(tasks, PLAIN)
    others = [{"Task": scores["Task"], **further} for scores, further in rows]
    tables = f"{printed([scores for scores, _ in rows])}\n\n{printed(others)}"
    return with_notes(tables, _notes(results, tasks, PLAIN), PLAIN)


def with_notes(table: str, notes: Iterable[str], marks: Marks) -> str:
    """A table, and below it the notes: a list in Markdown, filled lines for a terminal."""
    if marks is MARKDOWN:
        return "\n".join([table, "", *(f"- {note}" for note in notes)]) + "\n"
    return "\n".join([table, "", *(textwrap.fill(note, WIDEST, subsequent_indent="  ") for note in notes)]) + "\n"


def judged_together(tasks: Sequence[TaskResult]) -> tuple[TaskResult, ...]:
    """Tasks of which a difference is shown only if it is one among so many: p values are corrected for their number."""
    differences = corrected([task.difference for task in tasks])
    return tuple(replace(task, difference=found) for task, found in zip(tasks, differences, strict=True))


def scores_of(task: TaskResult, called: str = "the adapter") -> list[PolicyScore]:
    """The scores that a task has, the base's first.

    Args:
        task: Of an adapter, a base, or both.
        called: What the adapter is called.
    """
    base = [PolicyScore("the base", "base", task, task.base)] if task.base else []
    return [*base, *([PolicyScore(called, "adapter", task, task.adapter)] if task.adapter else [])]


def error_words(scores: Iterable[Score]) -> list[str]:
    """What the errors in the cells of these scores are."""
    of_each = ((score.average_estimate, score.pass_estimate, score.majority_estimate) for score in scores)
    cells = [str(found) for estimates in of_each for found in estimates]
    words = ["±: standard error, clustered by problem"]
    return [*words, f"[ ]: {ALIKE}"] if any("[" in cell for cell in cells) else words


def difference_cell(difference: Difference | None, show: Callable[[float], str] = signed_percent) -> str:
    """``+3.1 [+0.2, +6.0]``: a difference with its 95 % interval, in points of a percent or as another text."""
    if difference is None:
        return "-"
    mean, low, high = (difference.mean, difference.low, difference.high)
    return show(mean) if math.isnan(low) else f"{show(mean)} [{show(low)}, {show(high)}]"


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


def compared_cells(
    difference: Difference | None, heading: str, show: Callable[[float], str] = signed_percent
) -> dict[str, TableCell]:
    """A difference with its interval, and its p value, as columns of a table."""
    if difference is None:
        return {heading: UNKNOWN, "p": UNKNOWN}
    p_value = None if math.isnan(difference.p_value) else difference.p_value
    cell = TableCell(difference.mean, difference_cell(difference, show))
    return {heading: cell, "p": TableCell(p_value, p_cell(difference))}


def _rows(tasks: Sequence[TaskResult], marks: Marks) -> list[tuple[Row, Row]]:
    """Of each task its scores, and what else was measured."""
    ks = {task.score.k for task in tasks}
    k = f"{ks.pop()}" if len(ks) == 1 else "k"
    judged = marks is MARKDOWN and any(task.scorer != MATH for task in tasks)  # a terminal has a note, names being long
    rows: list[tuple[Row, Row]] = []
    for task in tasks:
        scored, judge = scores_of(task), judge_cell(task.scorer, marks) if judged else None
        gain = task.difference.mean if task.difference is not None and is_shown(task.difference) else 0.0
        cells = {
            "Task": fact_cell(task.title),
            "n": fact_cell(task.score.n),
            "k": fact_cell(task.score.k if k == "k" else None),
            "judged by": fact_cell(judge),
        }
        cells |= dict.fromkeys([f"avg@{k} base", f"avg@{k} adapter"], UNKNOWN)
        for one in scored:
            text, is_better = str(one.score.average_estimate), gain < 0 if one.who == "base" else gain > 0
            cells[f"avg@{k} {one.who}"] = TableCell(
                one.score.accuracy, marks.strong.format(text) if is_better else text
            )
        further = {
            f"avg@{k} by lighteval": [str(one.lighteval.estimate) if one.lighteval else DASH for one in scored]
            if asked_as_lighteval(task) and task.lighteval
            else [],
            # With one completion a problem they are avg@1 again.
            f"pass@{k}": [str(one.score.pass_estimate) for one in scored if k != "1"],
            f"maj@{k}": [str(one.score.majority_estimate) for one in scored if k != "1"],
            "mean tokens": [f"{one.score.mean_tokens:,.0f}" for one in scored],
            "truncated": [percent(one.score.truncated) for one in scored],
            "no answer": [percent(one.score.no_answer) for one in scored],
        }
        # As many numbers, which stand to the right.
        both = {name: TableCell(len(texts), " → ".join(texts)) if texts else UNKNOWN for name, texts in further.items()}
        rows.append(({**cells, **compared_cells(task.difference, "difference [95 % interval]")}, both))
    return rows


def judge_cell(scorer: str, marks: Marks) -> str:
    """A scorer's name; of a results file it may be any text, and it must be none but that on a card."""
    name = " ".join(scorer.replace("`", "'").split())
    return "the verifier" if name == MATH else name if name in SCORERS else marks.code.format(name)


def asked_as_lighteval(task: TaskResult) -> bool:
    """Whether a task bears lighteval's name, so that its own score belongs beside ours."""
    return "lighteval" in task.title


def _notes(results: Results, tasks: Sequence[TaskResult], marks: Marks) -> list[str]:
    """Of results whose tasks have the p values that the table shows."""
    sha, of = results.subject.get("adapter_sha256"), f"Base: {base_words(results)}"
    if sha is not None:
        of += f"; adapter: {results.subject['name']}, sha256 {marks.code.format(sha[:_SHORT_SHA])}"
    hashes = ", ".join(f"{task.title} {marks.code.format(task.protocol_hash)}" for task in tasks)
    notes = [protocol_note(results), engine_note(results), f"{of}."]
    notes.append(f"Protocol {'hash' if len(tasks) == 1 else 'hashes'}: {hashes}.")
    judges = {task.title: task.scorer for task in tasks if task.scorer != MATH and marks is PLAIN}
    notes += judges_note(judges, marks)
    scored = [one for task in tasks for one in scores_of(task)]
    legend = ["Scores and shares in percent", *error_words(one.score for one in scored)]
    compared = [(task, task.difference) for task in tasks if task.difference is not None]
    if compared:
        legend += ["difference: adapter less base, paired by problem", p_words(len(compared))]
        if any(is_shown(difference) for _, difference in compared):
            legend.append(f"{marks.name}: the better one, the interval excludes 0 and p is at most {SMALL_P}")
    if any(task.base and task.adapter for task in tasks):
        legend.append("a → b: base → adapter")
    notes += [f"{'; '.join(legend)}.", *doubts(scored)]
    without = [task.title for task in tasks if asked_as_lighteval(task) and not task.lighteval]
    if without:
        notes.append(f"Asked as lighteval asks, and not scored by lighteval itself: {', '.join(without)}.")
    return [*notes, *_not_shown(compared)]


def judges_note(judges: Mapping[str, str], marks: Marks) -> list[str]:
    """``Judged by: Quiz choice, Mine `my_rewards:score@3f2a9c1b0d4e`.``; nothing where the verifier judges all.

    Args:
        judges: Title of a task -> what judged it where that is not the verifier.
        marks: How the text is marked.
    """
    each = ", ".join(f"{title} {judge_cell(scorer, marks)}" for title, scorer in judges.items())
    return [f"Judged by: {each}."] if each else []


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


def base_words(results: Results) -> str:
    """``someone/base@revision``, and in how few bits it was loaded."""
    subject = results.subject
    revision = f"@{subject['base_revision']}" if subject.get("base_revision") else ""
    return f"{subject['base']}{revision}{in_few_bits(subject.get('base_quantization'))}"


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
    lines = []
    if unjudged := _shares([(one, one.score.unjudged) for one in scored], 0.0):
        lines.append(f"Not judged: {', '.join(unjudged)}; they count as wrong.")
    if truncated := _shares([(one, one.score.truncated) for one in scored], MUCH_TRUNCATED):
        other_one = "the score may be another one" if len(truncated) == 1 else "the scores may be others"
        lines.append(f"Cut off: {', '.join(truncated)}; with more tokens {other_one}.")
    for one in scored:
        other, count = one.lighteval, one.score.n * one.score.k
        if other is not None and other.only_ours + other.only_lighteval > 0:
            lines.append(
                f"lighteval judges {other.only_ours + other.only_lighteval:,} of {count:,} completions of "
                f"{one.called} on {one.task.title} otherwise; right only for lighteval: {other.only_lighteval:,}, "
                f"only here: {other.only_ours:,}."
            )
    return lines


def _shares(found: Sequence[tuple[PolicyScore, float]], least: float) -> list[str]:
    """Larger shares of completions, by task and policy: ``5.0 % of the completions of the base on Sums``, ..."""
    large = [(f"of {one.called} on {one.task.title}", f"{percent(share)} %") for one, share in found if share > least]
    return [f"{share} {'' if i else 'of the completions '}{of}" for i, (of, share) in enumerate(large)]


def _not_shown(compared: Sequence[tuple[TaskResult, Difference]]) -> list[str]:
    """That no difference is shown, why, and how large one had to be; nothing where one is."""
    if not compared or any(is_shown(difference) for _, difference in compared):
        return []
    reasons, could = [], []
    for task, difference in compared:
        n, k = task.score.n, task.score.k
        reason = f"p is above {SMALL_P}" if excludes_zero(difference) else "the 95 % interval includes 0"
        reasons.append("a single problem has no interval" if math.isnan(difference.low) else reason)
        stderr = difference.stderr if difference.stderr > 0 else guessed_error(n, k)  # measured, else a guess
        could.append(f"{task.title}, {n:,} problems x {k}: {power_words(stderr, n, len(compared))}")
    shown = f"No difference from the base is shown: {', or '.join(dict.fromkeys(reasons))}."
    return [shown, f"What could be shown: {'; '.join(could)}."]
