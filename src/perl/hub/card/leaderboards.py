"""Are a repository's scores for the Hub's leaderboards those of its results?

files of a repository, results -> mistakes; files that are others'

The files are untrusted: they are read as plain YAML of no more than such a file may have, and only single values of
them are shown.
"""

from collections.abc import Iterator

import yaml

from perl.errors import Mistake, PerlError
from perl.evaluation.results import Results
from perl.evaluation.task import all_tasks
from perl.hub.card.eval_results import eval_result_files
from perl.hub.card.facts import SCORES, Files, content_of
from perl.hub.card.form import shown
from perl.hub.gate.gate import largest
from perl.recipe.plain_yaml import plain_value, refuse_tags

_FOLDER = ".eval_results/"
_LARGEST = largest(f"{_FOLDER}x.yaml") or 0
_OURS = "perl eval"
_AGAIN = "perl push writes it"

Scalar = str | int | float | bool | None


def leaderboard_mistakes(files: Files, results: Results | None) -> tuple[list[Mistake], list[str]]:
    """Scores for leaderboards that are not those of the results, and files that cannot be read.

    Args:
        files: All that lies in the repository.
        results: Of the adapter; None: there are none.

    Returns:
        The mistakes, and the names of files with scores of others.
    """
    expected = eval_result_files(results) if results is not None else {}
    found = [mistake for name, text in expected.items() for mistake in _differences(files, name, text)]
    others = []
    for name in sorted(name for name in files if name.startswith(_FOLDER) and name not in expected):
        try:
            if _is_ours(name, files, results):
                hint = "perl push takes it away"
                found.append(Mistake(f"shows scores that {SCORES} does not give", shown(name), hint))
            else:
                others.append(shown(name))
        except PerlError as error:
            found.append(Mistake(error.mistakes[0].message, shown(name)))
    return found, others


def _differences(files: Files, name: str, text: str) -> Iterator[Mistake]:
    """Where a file is not the one that the results give, whose text is known."""
    if name not in files:
        yield Mistake(f"is absent, {SCORES} gives it", name, _AGAIN)
        return
    try:
        there = _entry(_value(files, name))
    except PerlError as error:
        yield Mistake(error.mistakes[0].message, name, _AGAIN)
        return
    right = _entry(plain_value(text))
    for key in dict.fromkeys([*right, *there]):
        if key not in there or key not in right or there[key] != right[key]:
            said, given = (shown(str(one.get(key))) for one in (there, right))
            yield Mistake(f"says {shown(key)} {said}, {SCORES} says {given}", name, _AGAIN)


def _is_ours(name: str, files: Files, results: Results | None) -> bool:
    """Whether it claims to be of perl: by its name, by what it says, or because it is of a task of the results."""
    if name.removeprefix(_FOLDER).removesuffix(".yaml") in all_tasks() or content_of(files, name) is None:
        return True
    sources = [str(task.data["source"]) for task in results.tasks] if results is not None else []
    texts = list(_texts(_value(files, name)))
    return any(claim in text for text in texts for claim in (_OURS, *sources))


def _value(files: Files, name: str) -> object:
    """What a file says.

    Raises:
        PerlError: It is not plain YAML, or larger than such a file may be.
    """
    content = content_of(files, name) or b""
    if len(content) > _LARGEST:
        raise PerlError(f"has {len(content):,} bytes, read are {_LARGEST:,} at most", name)
    try:
        text = content.decode("utf-8")
        refuse_tags(text, "")  # an alias may stand for any number of values
        return plain_value(text)
    except PerlError as error:
        raise PerlError(f"cannot be read: {error.mistakes[0].message}", name) from None
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        reason = getattr(error, "problem", None) or type(error).__name__
        raise PerlError(f"is not valid YAML: {shown(str(reason))}", name) from None


def _entry(value: object) -> dict[str, Scalar]:
    """The one entry of a file, a mapping of single values or of mappings of these: ``dataset.id`` -> value.

    Raises:
        PerlError: It is something else.
    """
    pairs: list[tuple[str, object]] = []
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], dict):
        for key, inner in value[0].items():
            below = inner.items() if isinstance(inner, dict) and inner else [("", inner)]
            pairs += [(".".join(filter(None, (str(key), str(name)))), one) for name, one in below]
    found = {key: one for key, one in pairs if one is None or isinstance(one, str | int | float)}
    if not pairs or len(found) < len(pairs):
        raise PerlError("is not an entry of a leaderboard", _FOLDER)
    return found


def _texts(value: object) -> Iterator[str]:
    """Every text in data, keys too."""
    rest = [value]
    while rest:
        value = rest.pop()
        if isinstance(value, dict):
            rest += [*value, *value.values()]
        elif isinstance(value, list):
            rest += value
        else:
            yield str(value)
