r"""Whether a recipe's own gold answers count as right: each as the completion ``\boxed{gold answer}``.

Recipe -> verdicts on its gold answers; what its other rewards give them

Loads no model and imports no torch.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from datasets import Dataset

from perl.data import ProblemSet, load_problem_set
from perl.errors import DataError
from perl.recipe import Recipe
from perl.recipe.sections import DataSection
from perl.rewards import resolve_rewards
from perl.rewards.answers import gold_answer
from perl.rewards.verifier import Judging, check_all, unreadable
from perl.run.progress import live_line
from perl.training.checked_recipe import located
from perl.training.reward_trial import RewardTrial, try_rewards

_LISTED_ROWS = 20
# Rows that are compared at a time, between two drawings of the live line.
_AT_A_TIME = 200
# Words that are no LaTeX, one fewer beside a comma: of 2,900 gold answers of GSM8K, MATH-500, AIME, AMC, HMMT, Minerva
# and OlympiadBench one has so many, and a unit, as in "5 square feet per second", has fewer.
_WORDS_OF_A_SENTENCE = 5
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
_PAUSE = re.compile(r"[a-z][,;.] ")
_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mbox)\s*\{")


@dataclass(frozen=True)
class FailingRow:
    """A row of a data set whose gold answer the verifier does not judge right.

    Attributes:
        row: Counted from 1, in the data set as it was read.
        status: Of the verdict on it; ``unparsable_gold`` and ``a_sentence`` also where it is right letter for letter.
    """

    row: int
    gold: str
    status: str


@dataclass(frozen=True)
class CheckedSet:
    """What came of the gold answers of one set; ``unreadable`` ones can be matched letter for letter only."""

    role: str
    name: str
    problems: int
    checked: int
    right: int
    unreadable: int
    failing: list[FailingRow] = field(default_factory=list)


@dataclass(frozen=True)
class GoldCheck:
    """What came of a recipe's gold answers.

    Attributes:
        chosen: Which training problems were taken.
        rows: Of each training problem, its row in the data set.
    """

    sets: list[CheckedSet]
    rewards: list[RewardTrial]
    chosen: Sequence[int]
    rows: Sequence[int]

    @property
    def failing(self) -> int:
        """Rows that give right completions no reward."""
        return sum(len(checked.failing) for checked in self.sets)

    @property
    def sound(self) -> bool:
        """Whether no row and no reward has something wrong with it."""
        return not self.failing and not any(one.problem for one in self.rewards)

    def lines(self) -> Iterator[str]:
        """For a person to read."""
        for checked in self.sets:
            among = "" if checked.checked == checked.problems else f"{checked.checked:,} of "
            letters = f", {checked.unreadable:,} only letter for letter" if checked.unreadable else ""
            counts = f"{among}{checked.problems:,} gold answers, {checked.right:,} right{letters}"
            yield f"{checked.role:5}  {beginning(checked.name)}: {counts}"
            for row in checked.failing[:_LISTED_ROWS]:
                yield f"  row {row.row}: {row.status.replace('_', ' ')}: {beginning(row.gold)}"
            if len(checked.failing) > _LISTED_ROWS:
                yield f"  and {len(checked.failing) - _LISTED_ROWS:,} more"
        yield from (beginning(one.line(), 300) for one in self.rewards)
        if self.failing:
            rows = "1 row gives" if self.failing == 1 else f"{self.failing:,} rows give"
            yield f"{rows} right completions no reward: drop or rewrite {'it' if self.failing == 1 else 'them'}"


def beginning(text: str, longest: int = 80) -> str:
    """Of a text, in one line."""
    line = " ".join(text.split())
    return line if len(line) <= longest else f"{line[:longest]}..."


def check_gold_answers(recipe: Recipe, limit: int | None) -> GoldCheck:
    """Judges each gold answer as a completion; all should be right.

    Args:
        recipe: Names data and rewards.
        limit: Rows of each set, evenly spaced; None: all.

    Raises:
        PerlError: The data cannot be read, or has no gold answers.
    """
    rewards = resolve_rewards(recipe.rewards, recipe.rollout)
    judging = next((reward.judging for reward in rewards if reward.judging is not None), None) or Judging()
    with located(recipe):
        problems, rows = _read_problems(recipe.data, judging.solution)
    chosen = _evenly(len(problems.train), limit)
    sets: list[CheckedSet] = []
    tried: list[RewardTrial] = []
    if "solution" in problems.train.column_names:
        sets.append(_checked("train", recipe.data.train.name, problems.train, rows, limit, judging))
        tried = try_rewards(recipe, problems)
    if problems.heldout is not None and "solution" in problems.heldout.column_names:
        of_heldout, name = range(len(problems.heldout)), problems.heldout_name or ""
        sets.append(_checked("eval", name, problems.heldout, of_heldout, limit, judging))
    return GoldCheck(sets, tried, chosen, rows)


def _evenly(count: int, limit: int | None) -> Sequence[int]:
    """At most ``limit`` positions of ``count``, evenly spaced, the first among them."""
    return range(count) if limit is None or limit >= count else [i * count // limit for i in range(limit)]


def _read_problems(section: DataSection, gold: str) -> tuple[ProblemSet, Sequence[int]]:
    """The problems with their gold answers as ``solution``, and which row of the data set each training problem is.

    Overlapping ones may have been dropped.

    Args:
        section: The recipe's ``data``.
        gold: The column of the gold answers.
    """
    sources = (section.train, section.eval or section.train)
    if gold == "solution" and all(source.columns.answer is None for source in sources):
        hint = "columns: {answer: NAME}, the column that holds the gold answer"
        raise DataError("there are no gold answers to check", "data.train", hint)
    # Without a model it is not known whether it has a chat template; a system prompt needs one.
    problems = load_problem_set(section, chat=bool(section.system_prompt))
    heldout = None if problems.heldout is None else _with_solution(problems.heldout, gold)
    problems = replace(problems, train=_with_solution(problems.train, gold), heldout=heldout)
    return problems, range(len(problems.train)) if problems.rows is None else problems.rows


def _with_solution(rows: Dataset, gold: str) -> Dataset:
    """The rows with another column's answers as ``solution``."""
    if gold == "solution" or gold not in rows.column_names:
        return rows
    others = [name for name in rows.column_names if name != "solution"]
    return rows.select_columns(others).add_column("solution", rows[gold][:])


def _checked(
    role: str, name: str, problems: Dataset, rows: Sequence[int], limit: int | None, judging: Judging
) -> CheckedSet:
    """The verdicts on a set's gold answers.

    Args:
        role: train or eval.
        name: The set's.
        problems: With ``solution``.
        rows: Of each problem, in the data set.
        limit: How many to check; None: all.
        judging: The limits of a comparison.
    """
    golds: list[str] = problems["solution"][:]
    chosen = list(_evenly(len(golds), limit))
    failing: list[FailingRow] = []
    letters = right = 0
    with live_line(len(chosen), f"checking {role}") as line:
        for start in range(0, len(chosen), _AT_A_TIME):
            part = chosen[start : start + _AT_A_TIME]
            bad = set(unreadable([golds[i] for i in part], judging.workers))
            statuses = _statuses([golds[i] for i in part], judging)
            right += statuses.count("right")
            letters += len(bad)
            for k, status in enumerate(statuses):
                sentence = _is_sentence(golds[part[k]])
                if status != "right" or k in bad or sentence:
                    found = "unparsable_gold" if k in bad else "a_sentence" if sentence else status
                    failing.append(FailingRow(rows[part[k]] + 1, golds[part[k]], found))
            line.update(len(part))
    return CheckedSet(role, name, len(golds), len(chosen), right, letters, failing)


def _is_sentence(gold: str) -> bool:
    """Whether a gold answer is words that no completion will repeat, where only those are right."""
    answer = _TEXT.sub(" ", gold_answer(gold))
    return len(_WORD.findall(answer)) + bool(_PAUSE.search(answer)) >= _WORDS_OF_A_SENTENCE


def _statuses(golds: Sequence[str], judging: Judging) -> list[str]:
    """The first status that is not right of each gold answer: boxed, and as it stands if that is a worked solution."""
    pairs: list[tuple[int, str]] = []
    for k, gold in enumerate(golds):
        pairs.append((k, f"\\boxed{{{gold_answer(gold)}}}"))
        if "####" in gold or "\\boxed" in gold:
            pairs.append((k, gold))
    asked, completions = [golds[k] for k, _ in pairs], [completion for _, completion in pairs]
    verdicts = check_all(asked, completions, timeout_seconds=judging.timeout_seconds, workers=judging.workers)
    statuses = ["right"] * len(golds)
    for (k, _), verdict in zip(pairs, verdicts, strict=True):
        if statuses[k] == "right":
            statuses[k] = verdict.status
    return statuses
