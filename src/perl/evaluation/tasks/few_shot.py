"""Few-shot examples: which solved problems stand before a question, and how they are shown.

questions, count, seed -> Example -> chat turns, or plain text
"""

import hashlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

from perl.errors import DataError
from perl.evaluation.scoring.results import is_held_out
from perl.evaluation.scoring.scorers import SCORERS
from perl.evaluation.scoring.task import MATH, Example, Question, Task
from perl.rewards.answers import announced_answer

_BOX = "\\boxed{"
_FINAL = re.compile(r"\n*####[^\n]*\s*\Z")


def check_examples(task: Task, limit: int | None, few_shot: int, places: tuple[str, str] | None = None) -> None:
    """Refuses examples that a task cannot have, and a limit below the pool that is set aside.

    Args:
        task: That is asked.
        limit: Of its problems; None: all.
        few_shot: Examples before each.
        places: Where the user gave limit and examples; None: the error names the task.

    Raises:
        DataError: Says which.
    """
    at_limit, at_examples = places or (f"task {task.name}",) * 2
    if few_shot and is_held_out(task.title):
        what = "held-out problems are asked as in training, without examples"
        raise DataError(what, at_examples, "leave few_shot out")
    if task.examples is None and limit is not None and limit < few_shot:
        what = f"a limit of {limit} is below the {few_shot} examples, which are set aside from the same problems"
        raise DataError(what, at_limit, f"a limit of at least {few_shot}, or fewer examples")


def choose_examples(task: Task, pool: Sequence[Question], count: int, seed: int) -> list[Question]:
    """The first of a pool in an order that the seed decides: fewer examples are the first of more.

    Args:
        task: Its name enters the order, so that two tasks do not share it.
        pool: Problems with answers.
        count: How many.
        seed: Of the evaluation.

    Raises:
        DataError: There are not as many.
    """
    if count > len(pool):
        what = f"examples asked for: {count}, problems to take them from: {len(pool)}"
        raise DataError(what, f"task {task.name}", "fewer examples")

    def place(question: Question) -> bytes:
        return hashlib.sha256(f"{seed}\n{task.name}\n{question.id}\n{question.text}".encode()).digest()

    return sorted(pool, key=place)[:count]


def example(task: Task, question: Question) -> Example:
    r"""A problem with its answer as a completion would give it.

    That is the worked solution where the data has one, else the answer as the scorer reads it. The solution ends in
    ``\boxed{}`` where the task asks for that, or the verifier would find no answer in it.

    Raises:
        DataError: The problem has no answer.
    """
    if not question.gold:
        raise DataError(f"{question.id} has no answer to be shown", f"task {task.name}", "leave few_shot out")
    if question.choices:
        return Example(question, SCORERS["choice"].shown(question.gold))
    if task.scorer != MATH:
        return Example(question, SCORERS[task.scorer].shown(question.gold) if task.scorer in SCORERS else question.gold)
    boxed = SCORERS[MATH].shown(question.gold)
    # In words: of the solution's own column, or what stands where the answer does.
    cells = [question.row.get(name) for name in ("solution", *task.answer)]
    texts = [cell.strip() for cell in cells if isinstance(cell, str)]
    worked = next((text for text in texts if text and text.strip("$") != question.gold), None)
    if worked is None:
        return Example(question, boxed)
    if _BOX in worked or (_BOX not in task.prompt and announced_answer(worked) is not None):
        return Example(question, worked)
    return Example(question, f"{_FINAL.sub('', worked)}\n{boxed}")


def shown_before(examples: Sequence[Example], question: Question) -> list[dict[str, Any]]:
    """The examples as turns of a chat, and the question as its last user message."""
    turns = [turn for one in examples for turn in (*_asked(one.question), _said("assistant", one.answer))]
    return [*turns, *_asked(question)]


def as_text(examples: Sequence[Example], question: Question) -> str:
    """The examples and the question as plain text, a blank line between two of them."""
    pairs = [(one.question.text, one.answer) for one in examples]
    parts = [f"{asked} {answer}" if asked.endswith(":") else f"{asked}\n{answer}" for asked, answer in pairs]
    return "\n\n".join([*parts, question.text])


def titled(title: str, few_shot: int) -> str:
    """A task's title, with the number of its examples if there are any."""
    return f"{title}, {few_shot}-shot" if few_shot else title


def shown_fact(count: int, sha256: str | None) -> str | None:
    """What a protocol's hash has of the examples: how many, and which."""
    return f"{count}:{sha256}" if count else None


def shown_hash(examples: Sequence[Example]) -> str | None:
    """SHA-256 of what is shown, in its order; None: there are no examples."""
    content = "\0".join(part for one in examples for part in (one.question.text, one.answer))
    return hashlib.sha256(content.encode()).hexdigest() if examples else None


def _asked(question: Question) -> Iterator[dict[str, Any]]:
    """What the user says; a system message of the data's own stands at the beginning of the chat alone."""
    if not isinstance(question.prompt, tuple):
        yield _said("user", question.text)
        return
    yield from (dict(message) for message in question.prompt if message.get("role") != "system")


def _said(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text}
