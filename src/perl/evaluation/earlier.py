"""Results that a folder holds already and that new ones would take the place of.

Results, folder -> folder/earlier/NAME with what was there

Samples stay where they are: their file holds every policy's.
"""

import logging
import os
from dataclasses import asdict, replace
from pathlib import Path

from perl.errors import PerlError
from perl.evaluation.protocol import short_hash
from perl.evaluation.results import FIGURE, RESULTS, TABLE, Results, read_results
from perl.run.warned import warn

logger = logging.getLogger("perl")

EARLIER = "earlier"
_UNREADABLE = "unreadable"
_DIGITS = 8


def set_aside(new: Results, folder: Path) -> None:
    """Moves results of another policy, protocol, engine or verifier out of the way, and says so.

    Args:
        new: Will be written into the folder.
        folder: May hold results.
    """
    if not (folder / RESULTS).is_file():
        return
    try:
        old = read_results(folder / RESULTS)
    except PerlError as error:
        place = free_place(folder / EARLIER / _UNREADABLE)
        warn("PRL303", "%s; it is kept in %s", error.mistakes[0], place)
        _move(folder, place)
        return
    if old.of_what() == new.of_what():
        others = [task.name for task in old.tasks if _asked_otherwise(old, new, task.name)]
        if not others:
            return
        reason, suffix = f"{others[0]} was asked otherwise", _protocol(old)
    elif old.subject.get("policy") != new.subject.get("policy"):
        reason, suffix = "those of another policy", ""
    elif old.verifier != new.verifier:
        reason, suffix = f"by the verifier {old.verifier}; verdicts were given again by {new.verifier}", _protocol(old)
    else:
        reason, suffix = f"of the same policy, but {_otherwise(old, new)}", _protocol(old)
    place = _place(folder / EARLIER, old, suffix)
    logger.info("%s: the results there are %s; they are kept in %s", folder, reason, place)
    kept = old.with_earlier(place) if (place / RESULTS).is_file() else old
    _move(folder, place)
    kept.write(place)
    if old.of_what() == new.of_what():  # what is not asked anew stays here too
        untouched = tuple(task for task in old.tasks if not _asked_otherwise(old, new, task.name))
        if untouched:
            replace(old, tasks=untouched).write(folder)


def set_file_aside(file: Path, old: Results, folder: Path) -> None:
    """Moves a file of a folder out of the way, and says so.

    Args:
        file: Is there.
        old: What it says.
        folder: Has it.
    """
    policy = str(old.subject.get("policy"))[:_DIGITS]
    place = free_place(folder / EARLIER / f"{policy}{_protocol(old)}")
    place.mkdir(parents=True)
    os.replace(file, place / file.name)
    logger.info("%s: %s there is of another evaluation; it is kept in %s", folder, file.name, place)


def _otherwise(old: Results, new: Results) -> str:
    """In which facts two evaluations of a policy are not the same, with what the old and the new one say."""
    facts = [{**r.subject, **asdict(r.protocol), **r.engine} for r in (old, new)]
    names = [name for name in {**facts[0], **facts[1]} if name != "logp_diff"]
    other = [name for name in names if facts[0].get(name) != facts[1].get(name)]
    return "; ".join(f"{name} was {facts[0].get(name)}, is {facts[1].get(name)}" for name in other)


def _asked_otherwise(old: Results, new: Results, name: str) -> bool:
    hashes = {task.name: task.protocol_hash for task in new.tasks}
    return name in hashes and hashes[name] != old.task(name).protocol_hash


def _protocol(results: Results) -> str:
    """Short, of everything but the policy; of the tasks too, as they may have been asked with other problems."""
    facts = {"how": [str(part) for part in results.of_what()[1:]], "tasks": [t.protocol_hash for t in results.tasks]}
    return f"-{short_hash(facts)[:_DIGITS]}"


def _place(above: Path, results: Results, suffix: str) -> Path:
    """Where results go: named by the policy, and by the protocol where another one's are there."""
    policy = str(results.subject.get("policy"))[:_DIGITS]
    place = above / f"{policy}{suffix}"
    try:
        there = read_results(place / RESULTS)
    except PerlError:
        return place if not (place / RESULTS).exists() else free_place(place)
    if there.of_what() == results.of_what() and not any(
        _asked_otherwise(there, results, task.name) for task in there.tasks
    ):
        return place
    return free_place(above / f"{policy}{_protocol(results)}") if suffix else _place(above, results, _protocol(results))


def free_place(place: Path, suffix: str = "") -> Path:
    """The place of this name and suffix, or the next one beside it that is not taken."""
    number, free = 2, place.with_name(place.name + suffix)
    while free.exists():
        free, number = place.with_name(f"{place.name}-{number}{suffix}"), number + 1
    return free


def _move(folder: Path, place: Path) -> None:
    place.mkdir(parents=True, exist_ok=True)
    for name in (RESULTS, TABLE, FIGURE):
        if (folder / name).is_file():
            os.replace(folder / name, place / name)
