"""Results in folders: beside earlier ones, which are set aside; found again; what to call them, and how they differ.

Results, folder -> Results with those that belong to them; folders -> FoundResults: where each lies, in which order, and
the settings of its run -> names

Samples stay where they are: their file holds every policy's.
"""

import contextlib
import hashlib
import logging
import os
import re
import textwrap
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from filelock import Timeout

from perl.errors import Mistake, PerlError, RunFolderError, raise_all, warn
from perl.evaluation.scoring.protocol import ASKED
from perl.evaluation.scoring.results import FIGURE, RESULTS, TABLE, Results, read_results, results_file
from perl.run.facts import RECIPE, is_run, run_above
from perl.run.tables import DASH, differing, flat

logger = logging.getLogger("perl")

EARLIER = "earlier"
_DIGITS = 8
_PARTS = ("policy", "protocol", "engine", "verifier")
SHORT_SHA = 12
"""Digits of a hash that tell policies apart."""
_LONGEST_SETTING = 40
# Where no results lie, or some that others have taken the place of.
_LEFT_OUT = {EARLIER, "checkpoints"}
# What a run is called, what it runs on, where its files are or go, and what is done with its adapter afterwards; and
# what may hold a secret.
_NOT_SETTINGS = re.compile(
    r"name|(hub|engine|eval|alarms)\..*|train\.output_dir|rollout\.(servers|server_timeout|sync_folder.*)"
    r"|.*\.(.*_)?(key|token|secret|password)(_.*)?",
    re.IGNORECASE,
)
# Settings that name a run by their values alone, then those with a short name; the rest by the last part of their keys.
_BARE = ("peft.method", "algorithm", "model.name", "data.train.name")
_SHORT = {
    "peft.rank": "rank",
    "peft.alpha": "alpha",
    "train.learning_rate": "lr",
    "train.beta": "beta",
    "train.max_steps": "steps",
    "train.num_generations": "generations",
    "train.seed": "seed",
}
_MOST = 4  # settings in a name
_LONGEST = 30


@dataclass(frozen=True)
class FoundResults:
    """A results file.

    Attributes:
        folder: That it lies in.
        searched: It was found below a folder, and not named itself.
        settings: Of the recipe of the run that it lies in, ``train.seed`` -> text; empty where there is none.
        within: Path from the run's folder, ``best/eval``; the folder's own where there is no run.
    """

    folder: Path
    searched: bool = False
    settings: Mapping[str, str] = field(default_factory=dict)
    within: Path = Path()


def find_results(paths: Sequence[str | Path]) -> list[FoundResults]:
    """The results that are named, or lie below a folder that is named.

    Args:
        paths: A results file, a folder that has one in itself or in its ``eval``, or a folder of such folders. A single
            one is searched in any case. Those in ``earlier/`` are left out.

    Returns:
        In the order given; what was found below a folder by its path, numbers by their size. Each once.

    Raises:
        PerlError: With a line for each path that there is nothing at.
    """
    found: dict[Path, FoundResults] = {}
    mistakes: list[Mistake] = []
    for path in paths:
        place = Path(path).expanduser()
        here, searched = list[Path](), False
        if len(paths) > 1 or not place.is_dir():
            with contextlib.suppress(PerlError):
                here = [results_file(place).parent]
        if not here and place.is_dir():
            here = sorted(_below(place), key=lambda folder: naturally(str(folder)))
            searched = here != [place]
        if not here:
            message = f"no results: there is no {RESULTS}"
            below = ", nor one in a folder below it" if place.is_dir() else ""
            mistakes.append(Mistake(message + below, str(path), "perl eval writes them"))
        for folder in here:
            found.setdefault(folder.resolve(), _with_settings(folder, searched=searched))
    raise_all(PerlError, mistakes)
    return list(found.values())


def _below(place: Path) -> Iterator[Path]:
    for folder, folders, files in os.walk(place):
        copied = {"adapter"} if is_run(Path(folder)) else set()  # beside its card, of the results in eval/
        folders[:] = [name for name in folders if name not in _LEFT_OUT | copied and not name.startswith(".")]
        if RESULTS in files:
            yield Path(folder)


def naturally(text: str) -> list[tuple[int, str]]:
    """A key by which ``r2`` comes before ``r10``."""
    parts = re.split(r"(\d+)", text)
    return [(int(part), "") if i % 2 else (0, part) for i, part in enumerate(parts)]


def _with_settings(folder: Path, *, searched: bool) -> FoundResults:
    whole = folder.resolve()
    run = run_above(whole, 3)
    if run is None:
        return FoundResults(folder, searched, within=folder)
    settings: dict[str, str] = {}
    # Read as text: a recipe of another version, or of a reward that is not here, names its run too.
    with contextlib.suppress(OSError, ValueError, yaml.YAMLError, RecursionError):
        settings = flat(yaml.safe_load((run / RECIPE).read_text(encoding="utf-8")))
    settings = {name: text for name, text in settings.items() if is_setting(name)}
    return FoundResults(folder, searched, settings, whole.relative_to(run))


def is_setting(name: str) -> bool:
    """Whether a key of a recipe, ``train.seed``, says how a run is trained, and not where or what becomes of it."""
    return _NOT_SETTINGS.fullmatch(name) is None


def differing_settings(found: Sequence[FoundResults]) -> list[dict[str, str]]:
    """Of each result the settings that are not the same in all that have a recipe, the most telling ones first."""
    rows = differing([one.settings for one in found])
    ranks = {key: i for i, key in enumerate((*_BARE, *_SHORT))}
    keys = sorted(rows, key=lambda key: ranks.get(key, len(ranks)))
    return [{key: rows[key][i] for key in keys} if one.settings else {} for i, one in enumerate(found)]


def names_of(found: Sequence[FoundResults], results: Sequence[Results]) -> list[str]:
    """A name for each, unlike all others: ``lora lr 1e-3``, ``dora lr 1e-3``.

    Args:
        found: Where they lie.
        results: What they hold; their own names count where no setting differs, if these are all different.
    """
    subjects = [str(one.subject["name"]) for one in results]
    places = _places([one.folder for one in found])
    own = subjects if len(set(subjects)) == len(subjects) else places
    names = []
    for settings, one, other in zip(differing_settings(found), found, own, strict=True):
        text = settings_text({key: settings[key] for key in list(settings)[:_MOST]})
        names.append(f"{text} best" if text and "best" in one.within.parts else text or other)
    told = ["base"]  # as a row for a base is called
    for name, place in zip(names, places, strict=True):
        alike = name in told or names.count(name) > 1
        told.append(f"{name} ({place})" if alike and name != place else name)
    return numbered(told[1:])


def numbered(names: Sequence[str]) -> list[str]:
    """The same names, those that stand there more than once with a number behind them."""
    return [f"{name} #{names[: i + 1].count(name)}" if names.count(name) > 1 else name for i, name in enumerate(names)]


def settings_text(settings: Mapping[str, str]) -> str:
    """``lora rank 8 lr 1e-3``: settings by short names, as a run is called."""
    last = Counter(key.rpartition(".")[2] for key in settings)
    words = []
    for key, value in settings.items():
        if key in _BARE:
            words += [] if value in (DASH, "none") else [_value(value)]
            continue
        short = key.rpartition(".")[2]
        label = _SHORT.get(key) or (short if last[short] == 1 else ".".join(key.split(".")[-2:]))
        words.append(f"{label} {_value(value)}")
    return " ".join(words)


def _value(text: str) -> str:
    """``1e-3`` for ``0.001``; a long text shortened."""
    with contextlib.suppress(ValueError):
        mantissa, _, exponent = f"{float(text):e}".partition("e")
        scientific = f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
        return min(text, scientific, key=len)
    return textwrap.shorten(text, _LONGEST, placeholder="...") or text[:_LONGEST]


def _places(folders: Sequence[Path]) -> list[str]:
    """The part of each path that is not the same in all."""
    parts = [list(folder.resolve().parts) for folder in folders]
    while all(len(one) > 1 for one in parts) and len({one[-1] for one in parts}) == 1 < len(parts):
        parts = [one[:-1] for one in parts]
    while all(len(one) > 1 for one in parts) and len({one[0] for one in parts}) == 1:
        parts = [one[1:] for one in parts]
    return ["/".join(one) for one in parts]


def conflicts_of(
    results: Sequence[Results], names: Sequence[str], tasks: Mapping[str, str]
) -> dict[tuple[int, str], str]:
    """Number of a result and task -> how it was evaluated otherwise than by the first result that has the task.

    Args:
        results: That are compared.
        names: What they are called.
        tasks: Name -> title of those that are looked at.
    """
    found: dict[tuple[int, str], str] = {}
    for task, title in tasks.items():
        first, *others = _asked(results, task)
        for i in others:
            if results[i].task(task).protocol_hash != results[first].task(task).protocol_hash:
                keys, (one, two) = _telling(results, [first, i], task)
                ways = ", ".join(f"{key} {_shown(key, one[key])} and {_shown(key, two[key])}" for key in keys)
                how = ways or "the prompt or the version of the task"
                found[i, task] = f"{title} was evaluated otherwise in {names[first]} and in {names[i]}: {how}"
    return found


def ways_of(results: Sequence[Results], tasks: Collection[str]) -> list[str]:
    """Of each result the settings in which it differs from another one, ``temperature 0.6, k 4``.

    Args:
        results: That are compared.
        tasks: Whose protocols differ.

    Returns:
        A text for each; an empty one where it was asked none of these tasks.
    """
    found: list[dict[str, list[str]]] = [{} for _ in results]
    for task in sorted(tasks):
        asked = _asked(results, task)
        keys, settings = _telling(results, asked, task)
        if not keys:
            keys, settings = ["protocol"], [{"protocol": results[i].task(task).protocol_hash} for i in asked]
        for i, own in zip(asked, settings, strict=True):
            for key in keys:
                values, value = found[i].setdefault(key, []), _shown(key, own[key]).strip("'")
                values += [] if value in values else [value]
    return [", ".join(f"{key} {'/'.join(values)}" for key, values in one.items()) for one in found]


def _asked(results: Sequence[Results], task: str) -> list[int]:
    return [i for i, result in enumerate(results) if any(one.name == task for one in result.tasks)]


def _telling(results: Sequence[Results], numbers: Sequence[int], task: str) -> tuple[list[str], list[dict[str, Any]]]:
    """The settings in which some differ, and what each has: as they were for the task, else as they were asked for."""
    settings = []
    for result in (results[i] for i in numbers):
        found = result.task(task)
        used = {"max_new_tokens": found.max_new_tokens, "k": found.score.k, "data sha256": found.data.get("sha256")}
        of_task = {"examples": found.few_shot, "scorer": found.scorer}
        asked = {name: result.subject.get(name) for name in ASKED}
        settings.append({**result.protocol.drawn(), **used, **of_task, **asked})
    if not _differing(settings):
        settings = [{**results[i].protocol.drawn(), "k": results[i].protocol.k} for i in numbers]
    return _differing(settings), settings


def _differing(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names under which not all have the same."""
    first, *others = settings
    return [name for name in first if any(other[name] != first[name] for other in others)]


def _shown(key: str, value: object) -> str:
    if key == "scorer":
        return str(value)  # whole: digits of its code may be all that differs
    if value is None:
        return "none"
    if isinstance(value, str):
        is_hash = len(value) == 64 and " " not in value
        return value[:SHORT_SHA] if is_hash else repr(textwrap.shorten(value, _LONGEST_SETTING, placeholder="..."))
    return f"{value:g}" if isinstance(value, float) else str(value)


@contextmanager
def usable(folder: Path) -> Iterator[None]:
    """What the main process finds wrong with the output folder inside is told in a line.

    Raises:
        RunFolderError: It cannot be written, or another process evaluates there.
    """
    hint = "choose another with --output"
    try:
        yield
    except Timeout:
        raise RunFolderError("another process is evaluating here", str(folder), hint) from None
    except OSError as error:  # a file of that name, no permission, no such disk
        reason = "it is a file" if folder.is_file() else error.strerror or str(error)
        raise RunFolderError(f"cannot be written: {reason}", str(folder), hint) from None


def beside_earlier(new: Results, folder: Path) -> Results:
    """Results with the other tasks that a folder has of the same policies, protocol, engine and verifier.

    What the folder has of others, or of these tasks asked otherwise, is set aside.

    Args:
        new: Will be written into the folder.
        folder: May hold results.
    """
    if not (folder / RESULTS).is_file():
        return new
    files = (RESULTS, TABLE, FIGURE)
    try:
        old = read_results(folder / RESULTS, scored=False)
    except PerlError as error:
        warn("PRL303", "%s; it is kept in %s", error.mistakes[0], _archived(folder, files, "unreadable"))
        return new
    hashes = {task.name: task.protocol_hash for task in new.tasks}
    otherwise = [t.name for t in old.tasks if hashes.get(t.name, t.protocol_hash) != t.protocol_hash]
    other = [part for part, one, two in zip(_PARTS, old.of_what(), new.of_what(), strict=True) if one != two]
    if other or otherwise:
        place = _archived(folder, files, str(old.subject.get("policy"))[:_DIGITS])
        reason = f"of another {other[0]}" if other else f"those of {otherwise[0]} asked otherwise"
        logger.info("%s: the results there are %s; they are kept in %s", folder, reason, place)
    return new if other else new.with_tasks_of(old)


def _archived(folder: Path, files: Sequence[str], name: str) -> Path:
    """Moves files of a folder into ``earlier/NAME-DIGITS`` there, the digits being of what the first one says.

    Args:
        folder: Has the first of them.
        files: Their names.
        name: Of what they are.
    """
    digest = hashlib.sha256((folder / files[0]).read_bytes()).hexdigest()[:_DIGITS]
    place = folder / EARLIER / f"{name}-{digest}"
    place.mkdir(parents=True, exist_ok=True)
    for file in files:
        if (folder / file).is_file():
            os.replace(folder / file, place / file)
    return place
