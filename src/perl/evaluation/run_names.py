"""What to call several results: by the settings that differ between their runs, else by where they lie.

FoundResults, Results -> names, no two the same: ``lora lr 1e-3``, ``dora lr 1e-3``
"""

import contextlib
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from perl.evaluation.found_results import FoundResults
from perl.evaluation.results import Results
from perl.run.tables import DASH, differing

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
_MOST = 4
"""Settings in a name, unless more are needed to tell the runs apart."""
_LONGEST = 30


def differing_settings(found: Sequence[FoundResults]) -> list[dict[str, str]]:
    """Of each result the settings that are not the same in all that have a recipe, the most telling ones first."""
    rows = differing([one.settings for one in found])
    ranks = {key: i for i, key in enumerate((*_BARE, *_SHORT))}
    keys = sorted(rows, key=lambda key: ranks.get(key, len(ranks)))
    return [{key: rows[key][i] for key in keys} if one.settings else {} for i, one in enumerate(found)]


def names_of(found: Sequence[FoundResults], results: Sequence[Results]) -> list[str]:
    """A name for each, unlike all others.

    Args:
        found: Where they lie.
        results: What they hold; their own names count where no setting differs, if these are all different.
    """
    settings = differing_settings(found)
    keys = _telling(settings)
    subjects = [str(one.subject["name"]) for one in results]
    places = _places([one.folder for one in found])
    own = subjects if len(set(subjects)) == len(subjects) else places
    by_settings = [settings_text({key: one[key] for key in keys if key in one}) for one in settings]
    names = [
        f"{text} best" if text and "best" in one.within.parts else text
        for text, one in zip(by_settings, found, strict=True)
    ]
    names = [name or other for name, other in zip(names, own, strict=True)]
    for name, count in Counter(names).items():
        if count > 1:
            same = [i for i, other in enumerate(names) if other == name]
            for i, place in zip(same, _places([found[i].folder for i in same]), strict=True):
                names[i] = f"{name} ({place})" if name != place else name
    # A row for a base is called so.
    names = [f"{name} ({place})" if name == "base" else name for name, place in zip(names, places, strict=True)]
    return numbered(names)


def numbered(names: Sequence[str]) -> list[str]:
    """The same names, those that stand there more than once with a number behind them."""
    return [f"{name} #{names[: i + 1].count(name)}" if names.count(name) > 1 else name for i, name in enumerate(names)]


def _telling(settings: Sequence[Mapping[str, str]]) -> list[str]:
    """The first few keys, and as many more as are needed to tell apart what all of them do."""
    known = [one for one in settings if one]
    keys = list(known[0]) if known else []
    chosen = keys[:_MOST]

    def apart(some: Sequence[str]) -> int:
        return len({tuple(one[key] for key in some) for one in known})

    for key in keys[_MOST:]:
        if apart([*chosen, key]) > apart(chosen):
            chosen.append(key)
    return chosen


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
    """The shortest part of each path that tells it from the others."""
    if len(folders) == 1:
        return [folders[0].resolve().name]
    parts = [list(folder.resolve().parts) for folder in folders]
    while all(parts) and len({one[0] for one in parts}) == 1:
        parts = [one[1:] for one in parts]
    while all(len(one) > 1 for one in parts) and len({one[-1] for one in parts}) == 1:
        parts = [one[:-1] for one in parts]
    return [
        "/".join(_shortest(one, parts)) or folder.resolve().name for one, folder in zip(parts, folders, strict=True)
    ]


def _shortest(one: Sequence[str], others: Sequence[Sequence[str]]) -> Sequence[str]:
    """The first parts of a path with which no other begins; all of them where another goes on below it."""
    for count in range(1, len(one) + 1):
        if sum(other[:count] == one[:count] for other in others) == 1:
            return one[:count]
    return one
