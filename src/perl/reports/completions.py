"""Completions of a run that a page shows: as many steps as there is room for, from the first to the newest.

samples.jsonl -> Shown

The log of a long run is larger than a page may be. It is read line by line, and only the lines of chosen steps are
parsed.
"""

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perl.reports.curves import rounded
from perl.run.logs import logged_step

LONGEST_TEXT = 6_000
"""Characters of a prompt or completion that are shown: its begin and its end."""
ALL_BYTES = 6_000_000
"""Of the completions of all runs on a page."""
_ENDINGS = ("_verdict", "_answer")
_LONGEST_LINE = 20_000_000


@dataclass(frozen=True)
class Shown:
    """Completions of chosen steps.

    Attributes:
        groups: Of each step: its number, its prompts and their completions, as plain values.
        steps: Steps that have completions.
        left_out: Lines that are malformed.
    """

    groups: tuple[dict[str, Any], ...] = ()
    steps: int = 0
    left_out: int = 0


def read_completions(path: Path, most_bytes: int) -> Shown:
    """The completions that fit.

    Args:
        path: The log; absent: there are none.
        most_bytes: Of their JSON.
    """
    if not path.is_file():
        return Shown()
    sizes: Counter[int] = Counter()
    left_out = 0
    for line, step in _lines(path):
        if step is None:
            left_out += line.endswith(b"\n")  # else it is being written
        else:
            sizes[step] += len(line)
    # From the first step to the last, so many that about so many bytes fit.
    steps, apart = sorted(sizes), max(1, math.ceil(sizes.total() / most_bytes))
    rows: dict[int, list[dict[str, Any]]] = {step: [] for step in sorted({*steps[::apart], *steps[-1:]})}
    for line, step in _lines(path):
        if step in rows:
            parsed = _parsed(line)
            left_out += parsed is None
            rows[step] += [] if parsed is None else [parsed]
    groups = []
    for step, found in rows.items():
        prompts: dict[str, list[dict[str, Any]]] = {}
        for row in found:
            prompts.setdefault(_shortened(text_of(row.get("prompt"))), []).append(_completion(row))
        each = [{"text": text, "completions": completions} for text, completions in prompts.items()]
        groups += [{"step": step, "prompts": each}] if found else []
    return Shown(tuple(groups), len(sizes), left_out)


def newest_completion(path: Path) -> Mapping[str, Any] | None:
    """The last whole row of a log, from its end; None: there is none."""
    if not path.is_file():
        return None
    with path.open("rb") as file:
        size = file.seek(0, 2)
        start = max(0, size - 1_000_000)
        file.seek(start)
        lines = file.read().split(b"\n")
    whole = lines[:-1] if start == 0 else lines[1:-1]  # what follows the last line end is being written
    return next((row for line in reversed(whole) if (row := _parsed(line)) is not None), None)


def text_of(messages: Any) -> str:  # noqa: ANN401 (whatever the JSON holds)
    """A prompt or completion as text: of a conversation its only message, or all with who said them."""
    if isinstance(messages, str):
        return messages
    if not isinstance(messages, list):
        return json.dumps(messages, ensure_ascii=False)
    parts = [message if isinstance(message, dict) else {"content": message} for message in messages]
    if len(parts) == 1:
        return _content(parts[0])
    return "\n".join(f"{part.get('role', '?')}: {_content(part)}" for part in parts)


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    text = content if isinstance(content, str) else "" if content is None else json.dumps(content, ensure_ascii=False)
    calls = message.get("tool_calls")
    return f"{text}\n{json.dumps(calls, ensure_ascii=False)}" if calls else text


def _lines(path: Path) -> Iterator[tuple[bytes, int | None]]:
    """The lines of a log, each with its step; None: it is malformed."""
    with path.open("rb") as file:
        for line in file:
            if line.strip():
                step = logged_step(line) if len(line) < _LONGEST_LINE else math.inf
                yield line, int(step) if math.isfinite(step) else None


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def _completion(row: Mapping[str, Any]) -> dict[str, Any]:
    text, rewards = text_of(row.get("completion")), row.get("rewards")
    verdicts, answers = ({n.removesuffix(e): v for n, v in row.items() if n.endswith(e)} for e in _ENDINGS)
    found: dict[str, Any] = {
        "text": _shortened(text),
        "rewards": {str(name): rounded(value) for name, value in rewards.items()} if isinstance(rewards, dict) else {},
        "advantage": rounded(row.get("advantage")),
        "verdicts": {name: value for name, value in verdicts.items() if isinstance(value, str)},
        "answers": {name: str(value)[:200] for name, value in answers.items() if value is not None},
    }
    tokens, gaps = row.get("tokens"), row.get("gaps")
    whole = len(text) <= LONGEST_TEXT
    if whole and isinstance(tokens, list) and isinstance(gaps, list) and len(tokens) == len(gaps):
        found |= {"tokens": [str(token) for token in tokens], "gaps": [rounded(gap) for gap in gaps]}
    return found


def _shortened(text: str) -> str:
    if len(text) <= LONGEST_TEXT:
        return text
    half = LONGEST_TEXT // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half:,} characters left out ...]\n{text[-half:]}"
