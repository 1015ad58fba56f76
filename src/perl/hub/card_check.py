"""Is a card true, whole and fit for the Hub?

card, results, names of files -> problems, a line each

A card is text from anywhere: its YAML is read as plain values, and no more of it than a card may have. Knows nothing
of runs or of the network.
"""

import json
import math
import posixpath
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml
from huggingface_hub.repocard_data import eval_results_to_model_index

from perl.errors import PerlError, Problem
from perl.evaluation.metrics import average_at_k, pass_at_k
from perl.evaluation.results import RESULTS, Results, read_results
from perl.evaluation.score import Score
from perl.hub.eval_results import model_index
from perl.hub.facts import is_hub_name, public_results
from perl.hub.front_matter import OURS, SANDBOX, adapter_tag
from perl.hub.paths import ROOTS
from perl.hub.scores_text import headline, reservations, results_lines
from perl.recipe.plain_yaml import plain_value, refuse_tags

LARGEST_CARD = 1_000_000
LARGEST_FRONT_MATTER = 200_000
CARD = "README.md"
SCORES = f"eval/{RESULTS}"
_AGAIN = "perl card RUN writes it anew"
_FRONT_MATTER = re.compile(r"\A---\r?\n(.*?)\r?\n---\r?(?:\n|\Z)", re.DOTALL)
_FENCES = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
# What templates leave where nobody knew better.
_PLACEHOLDER = re.compile(r"\[More Information Needed\]|\{\{|\{%|\bTODO\b|\bNone\b|\b[Nn]a[Nn]\b|\bUndefined\b")
_ALWAYS_PLACEHOLDER = re.compile(r"\[More Information Needed\]")
_LOCAL_PATH = re.compile(rf"(?<![\w.:/~-])(?:/(?:{ROOTS})/[^\s`\"')]*|~/[^\s`\"')]+|[A-Z]:\\[^\s`\"')]+|file://\S+)")
_LINK = re.compile(r"(!?)\[[^\]\n]*\]\(\s*<?([^)>\s]+)")
_IMAGE_TAG = re.compile(r"<img\b[^>]*\bsrc\s*=\s*[\"']?([^\"'\s>]+)", re.IGNORECASE)
_REMOTE = re.compile(r"[a-z][a-z0-9+.-]*:|//|#", re.IGNORECASE)
_SUBJECT = re.compile(r"adapter: .*?, sha256")
_SCORE = re.compile(r"\d ± \d|\d %")
_REQUIRED = {"library_name": "peft", "pipeline_tag": "text-generation", "tags": f"[{OURS}, ...]"}


def check_card(
    card: str, results: dict[str, Any] | None, files: Collection[str], weights_sha256: str | None = None
) -> list[Problem]:
    """What is wrong with a card.

    Args:
        card: ``README.md``.
        results: ``eval/results.json`` beside it; None: there is none.
        files: Paths of all files beside it.
        weights_sha256: Of the adapter beside it; None: it is not known.

    Returns:
        Nothing for a card that is as it should be.
    """
    if len(card) > LARGEST_CARD:
        return [Problem(f"has {len(card):,} characters, a card has at most {LARGEST_CARD:,}", CARD)]
    metadata, problems = read_front_matter(card)
    if metadata is None:
        return problems
    problems = [*_metadata_problems(metadata), *_text_problems(card), *_link_problems(card, files)]
    if results is None:
        return problems + _unfounded(card, metadata)
    found = _read(results)
    if isinstance(found, Problem):
        return [*problems, found]
    problems += _contradictions(found, results, weights_sha256)
    public = public_results(found, "")
    return [*problems, *_score_problems(card, public), *_index_problems(metadata, public)]


def read_front_matter(card: str) -> tuple[dict[str, Any] | None, list[Problem]]:
    """A card's metadata; None, and why, if it has none that is plain YAML."""
    match = _FRONT_MATTER.match(card)
    if match is None:
        return None, [Problem("has no YAML between --- and --- at its beginning", CARD, _AGAIN)]
    if len(match[1]) > LARGEST_FRONT_MATTER:
        return None, [Problem(f"its front matter has {len(match[1]):,} characters, more than any needs", CARD)]
    try:
        refuse_tags(match[1], CARD)
        metadata = plain_value(match[1])
    except PerlError as error:
        return None, [Problem(problem.message, problem.where) for problem in error.problems]
    except yaml.YAMLError as error:
        reason = getattr(error, "problem", None) or str(error)
        return None, [Problem(f"its front matter is no YAML: {reason}", CARD)]
    except (RecursionError, ValueError) as error:  # ValueError: a number of more digits than Python reads
        return None, [Problem(f"its front matter cannot be read: {type(error).__name__}", CARD)]
    if not isinstance(metadata, dict):
        return None, [Problem("its front matter is no mapping", CARD, _AGAIN)]
    return metadata, []


def _metadata_problems(metadata: Mapping[str, Any]) -> list[Problem]:
    whole = metadata.get("library_name") == "transformers" and metadata.get("base_model_relation") == "finetune"
    tags = metadata.get("tags")
    tags = tags if isinstance(tags, list) else []
    found = [_about(key, "is absent", value) for key, value in _REQUIRED.items() if not metadata.get(key)]
    if metadata.get("library_name") not in ("peft", None) and not whole:
        found.append(_about("library_name", f"is {metadata['library_name']!r}, which does not load adapters", "peft"))
    if metadata.get("pipeline_tag") not in ("text-generation", None):
        found.append(_about("pipeline_tag", f"is {metadata['pipeline_tag']!r}", "text-generation"))
    if tags and OURS not in tags:
        found.append(_about("tags", f"lack {OURS}", "by which others find it"))
    if metadata.get("license") == "other" and not (metadata.get("license_name") and metadata.get("license_link")):
        found.append(_about("license", "other needs license_name and license_link"))
    data = metadata.get("datasets", [])
    found += [
        _about("datasets", f"{name!r} is not a name on the Hub", "user/name")
        for name in (data if isinstance(data, list) else [data])
        if not (isinstance(name, str) and is_hub_name(name))
    ]
    return found + _base_problems(metadata.get("base_model"), metadata.get("base_model_relation"), tags, whole=whole)


def _base_problems(base: object, relation: object, tags: list[Any], *, whole: bool) -> list[Problem]:
    if base is None and SANDBOX in tags:
        return []
    if base is None:
        return [_about("base_model", "is absent", "the Hub id of the base; push the base first if it has none")]
    if not (isinstance(base, str) and is_hub_name(base)):
        return [_about("base_model", f"{base!r} is not a name on the Hub", "user/name")]
    if whole:
        return []
    found = [_about("base_model_relation", f"is {relation!r}", "adapter")] if relation != "adapter" else []
    if adapter_tag(base) not in tags:
        found.append(_about("tags", f"lack {adapter_tag(base)}", "by which the Hub finds a base's adapters"))
    return found


def _about(key: str, message: str, hint: str = "") -> Problem:
    return Problem(message, f"{CARD}: {key}", hint)


def _text_problems(card: str) -> list[Problem]:
    """Placeholders and paths. In code ``None`` is a word of the language, and braces are somebody's template."""
    bare = _FENCES.sub(lambda match: "\n" * match[0].count("\n"), card)
    left = [(number, match[0]) for number, match in _matches(_PLACEHOLDER, bare)]
    left += [
        (number, match[0]) for number, match in _matches(_ALWAYS_PLACEHOLDER, card) if (number, match[0]) not in left
    ]
    found = [
        Problem(f"a placeholder is left: {text}", f"{CARD}:{number}", "leave out what is unknown")
        for number, text in left
    ]
    found += [
        Problem(f"a path of somebody's machine: {match[0][:80]}", f"{CARD}:{number}", "name it without the path")
        for number, match in _matches(_LOCAL_PATH, card)
    ]
    return found


def _link_problems(card: str, files: Collection[str]) -> list[Problem]:
    """Pictures and files that are linked and are not there."""
    bare = _FENCES.sub(lambda match: "\n" * match[0].count("\n"), card)
    links = [(number, "picture" if match[1] else "file", match[2]) for number, match in _matches(_LINK, bare)]
    links += [(number, "picture", match[1]) for number, match in _matches(_IMAGE_TAG, bare)]
    return [
        Problem(f"there is no {what} {target[:80]}", f"{CARD}:{number}")
        for number, what, target in links
        if not _REMOTE.match(target) and posixpath.normpath(target.partition("#")[0]) not in files
    ]


def _matches(pattern: re.Pattern[str], text: str) -> list[tuple[int, re.Match[str]]]:
    """Number of a line from 1, and match."""
    return [(number, m) for number, line in enumerate(text.splitlines(), 1) for m in pattern.finditer(line)]


def _unfounded(card: str, metadata: Mapping[str, Any]) -> list[Problem]:
    """Scores that nothing stands behind."""
    shown = [name for name, there in (("model-index", "model-index" in metadata), ("a table", _section(card))) if there]
    return [Problem(f"shows scores in {' and '.join(shown)}, but there is no {SCORES}", CARD)] if shown else []


def _read(results: dict[str, Any]) -> Results | Problem:
    try:
        with TemporaryDirectory() as folder:
            path = Path(folder) / RESULTS
            path.write_text(json.dumps(results), encoding="utf-8")
            found = read_results(path)
        results_lines(found)  # reads every number that a card shows
        model_index(found)
    except PerlError as error:
        return Problem(error.problems[0].message, SCORES)
    except (TypeError, ValueError, AttributeError, KeyError, ArithmeticError, RecursionError) as error:
        return Problem(f"holds no results of perl eval: {type(error).__name__}: {str(error)[:80]}", SCORES)
    return found


def _contradictions(found: Results, written: Mapping[str, Any], weights_sha256: str | None) -> list[Problem]:
    """Where results do not agree with themselves or with the adapter."""
    problems = []
    sha = found.subject.get("adapter_sha256")
    if weights_sha256 is not None and sha != weights_sha256:
        message = f"is of another adapter: sha256 {str(sha)[:12]}, the weights beside it have {weights_sha256[:12]}"
        problems.append(Problem(message, SCORES, "perl eval scores the one that is there"))
    if written.get("results") != json.loads(json.dumps(found.as_dict()["results"])):
        problems.append(Problem("its two parts hold different scores", SCORES, "perl eval writes it anew"))
    for task in found.tasks:
        for who, score in (("base", task.base), ("adapter", task.adapter)):
            rows = [row for row in (getattr(problem, who) for problem in task.problems) if row]
            if score is not None and rows and not _follows(score, rows):
                message = f"the score of the {who} on {task.title} does not follow from its problems"
                problems.append(Problem(message, SCORES, "perl eval writes it anew"))
    return problems


def _follows(score: Score, rows: Sequence[Sequence[bool]]) -> bool:
    """Whether a score is that of these rights and wrongs."""
    if (score.n, score.k) != (len(rows), len(rows[0])):
        return False
    try:
        expected = {0: average_at_k(rows), **{k: pass_at_k(rows, k) for k in score.pass_at}}
        return all(math.isclose(expected[k], value) for k, value in {0: score.accuracy, **score.pass_at}.items())
    except (ValueError, TypeError):  # more completions than there are, or no number
        return False


def _score_problems(card: str, results: Results) -> list[Problem]:
    """Numbers of the text that are not those of the results."""
    section = _section(card)
    if not section:
        return [Problem("says nothing of its scores", CARD, _AGAIN)]
    lines = [(number, _plain(line)) for number, line in enumerate(card.splitlines(), 1)]
    said = {line for _, line in lines}
    table = [line for line in results_lines(results) if line.startswith("|")]
    prose = [_plain(line) for line in results_lines(results) if line and not line.startswith("|")]
    prose += [headline(results), *(f"- {line}" for line in reservations(results))]
    problems = _table_problems(section, table)
    problems += [Problem(f"lacks the line: {line[:100]}", CARD, _AGAIN) for line in prose if line and line not in said]
    expected = {*prose, *table}
    body = _FRONT_MATTER.sub("", card)
    first = len(card.splitlines()) - len(body.splitlines())
    begin, end = section[0][0], section[-1][0]
    for number, line in lines[first:]:
        in_results = begin <= number <= end and line.startswith("-")
        if (in_results or _SCORE.search(line)) and not line.startswith("|") and line not in expected:
            problems.append(Problem(f"the results do not say: {line[:100]}", f"{CARD}:{number}", _AGAIN))
    return problems


def _table_problems(section: list[tuple[int, str]], expected: list[str]) -> list[Problem]:
    """Cell by cell, the rows found by their first cells."""
    found = {_cells(line)[0]: (number, _cells(line)) for number, line in section if line.startswith("|")}
    headings, _, *rows = [_cells(line) for line in expected]
    if headings[0] not in found:
        return [Problem("has no table of the scores", CARD, _AGAIN)]
    problems = []
    for row in [headings, *rows]:
        number, there = found.pop(row[0], (0, []))
        if len(there) != len(row):
            problems.append(Problem(f"the table lacks a row for {row[0]}, or cells of it", CARD, _AGAIN))
            continue
        for heading, cell, right in zip(headings, there, row, strict=True):
            if cell != right:
                message = f"{heading} of {row[0]} is {cell!r} on the card and {right!r} in the results"
                problems.append(Problem(message, f"{CARD}:{number}", _AGAIN))
    further = [name for name in found if name.strip("-: ")]
    return problems + [Problem(f"the results have no {name[:80]!r}", f"{CARD}:{found[name][0]}") for name in further]


def _section(card: str) -> list[tuple[int, str]]:
    """The lines below ``## Results``, with their numbers."""
    lines = list(enumerate(card.splitlines(), 1))
    start = next((number for number, line in lines if line.strip() == "## Results"), len(lines))
    end = next((number for number, line in lines[start:] if line.startswith("## ")), len(lines) + 1)
    return [(number, _plain(line)) for number, line in lines[start : end - 1]]


def _plain(line: str) -> str:
    """A line without what the adapter is called, which differs from place to place."""
    return _SUBJECT.sub("adapter: it, sha256", line.strip())


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))]


def _index_problems(metadata: Mapping[str, Any], results: Results) -> list[Problem]:
    """Scores in the metadata that are not those of the results."""
    entries = model_index(results)
    expected = _flat(eval_results_to_model_index("it", entries)) if entries else {}
    try:
        found = _flat(metadata.get("model-index") or [])
    except (TypeError, KeyError, AttributeError):
        return [Problem("is not one", f"{CARD}: model-index", _AGAIN)]
    problems = []
    for key in [*expected, *(key for key in found if key not in expected)]:
        there, right = found.get(key), expected.get(key)
        if there != right:
            shown = [
                "nothing" if entry is None else ", ".join(f"{n} {v}" for n, v in entry.items())
                for entry in (there, right)
            ]
            message = f"{key[2]} of {key[1]}: the card says {shown[0]}, the results {shown[1]}"
            problems.append(Problem(message[:300], f"{CARD}: model-index", _AGAIN))
    return problems


def _flat(index: list[Any]) -> dict[tuple[str, str, str], dict[str, Any]]:
    """(data set, its name, metric) -> all else that is said of it."""
    return {
        (str(result["dataset"]["type"]), str(result["dataset"]["name"]), str(metric.get("name"))): {
            "value": metric["value"],
            **(metric.get("args") or {}),
            **{name: v for name, v in result["dataset"].items() if name not in ("type", "name")},
        }
        for model in index
        for result in model["results"]
        for metric in result["metrics"]
    }
