"""What is wrong with a task of a recipe, in the recipe's words: its keys, where the command line has options.

PerlError about ``--limit`` or ``task my`` -> the same about ``eval.tasks[1].limit`` or ``eval.tasks[1]``
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from perl.errors import Mistake, PerlError

# Option of the command line -> key of a task.
_KEYS = {
    "--tasks": "",
    "--columns": ".columns",
    "--scorer": ".scorer",
    "--limit": ".limit",
    "--few-shot": ".few_shot",
}


@contextmanager
def in_keys(place: str, above: str) -> Iterator[None]:
    """A mistake names keys of a recipe where the command line would name options and tasks.

    Args:
        place: Of the task, ``eval.tasks[1]``.
        above: What stands before the keys of its section, ``eval.``.
    """
    try:
        yield
    except PerlError as error:
        first, *others = [_in_keys(mistake, place, above) for mistake in error.mistakes]
        raise type(error)(first.message, first.where, first.hint, tuple(others)) from error


def _in_keys(mistake: Mistake, place: str, above: str) -> Mistake:
    where = mistake.where
    if not where or where.startswith("task "):
        where = place
    elif where in _KEYS:
        where = place + _KEYS[where]
    elif where == "--system-prompt":
        where = "data.system_prompt"
    hint = mistake.hint.replace("--newest-data, or ", "")
    hint = re.sub(r"--columns (\w+)=(\w+)", r"columns: {\1: \2}", hint)
    hint = re.sub(r"--tasks (\S+)", r"name: \1", hint)
    hint = hint.replace("; without --data the Hub", f"; without {above}data the Hub")
    return replace(mistake, where=where, hint=hint.replace("--data DIR", f"{above}data: DIR"))
