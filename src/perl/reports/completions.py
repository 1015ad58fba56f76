"""Completions of a run that a page shows: as many steps as there is room for, from the first to the newest.

samples.jsonl -> Shown

The log of a long run is larger than a page may be. It is read line by line, and only the lines of chosen steps are
parsed.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perl.reports.curves import rounded
from perl.reports.run_log import number

LONGEST_TEXT = 6_000
"""Characters of a prompt or completion that are shown: its begin and its end."""
ALL_BYTES = 6_000_000
"""Of the completions of all runs on a page."""
_STEP = re.compile(rb'^\{"step": ?(\d+)[,}]')
_VERDICT, _ANSWER = "_verdict", "_answer"
_LONGEST_LINE = 20_000_000


@dataclass(frozen=True)
class Shown:
    """Completions of chosen steps.

    Attributes:
        groups: Of each step: its number, its prompts and their completions, as plain values.
        steps: Steps that have completions.
        cut: Texts that were shortened.
        left_out: Lines that are malformed.
    """

    groups: tuple[dict[str, Any], ...] = ()
    steps: int = 0
    cut: int = 0
    left_out: int = 0


def read_completions(path: Path, most_bytes: int) -> Shown:
    """The completions that fit.

    Args:
        path: The log; absent: there are none.
        most_bytes: Of their JSON.
    """
    if not path.is_file():
        return Shown()
    places, left_out = _places(path)
    steps = sorted(places)
    sizes = {step: sum(length for _, length in places[step]) for step in steps}
    chosen, cut = _evenly(steps, sizes, most_bytes), 0
    groups = []
    with path.open("rb") as file:
        for step in chosen:
            rows = []
            for offset, length in places[step]:
                file.seek(offset)
                row = _parsed(file.read(length))
                if row is None:
                    left_out += 1
                else:
                    rows.append(row)
            group, shortened = _group(step, rows)
            cut += shortened
            groups.append(group)
    return Shown(tuple(group for group in groups if group["prompts"]), len(steps), cut, left_out)


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


def verdict_of(row: Mapping[str, Any]) -> str | None:
    """What the first reward that compares answers said of a completion; None: none did."""
    return next((value for name, value in row.items() if name.endswith(_VERDICT) and isinstance(value, str)), None)


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    text = content if isinstance(content, str) else "" if content is None else json.dumps(content, ensure_ascii=False)
    calls = message.get("tool_calls")
    return f"{text}\n{json.dumps(calls, ensure_ascii=False)}" if calls else text


def _places(path: Path) -> tuple[dict[int, list[tuple[int, int]]], int]:
    """Step -> where its lines are, and how many lines have no step; one that is being written does not count."""
    places: dict[int, list[tuple[int, int]]] = {}
    offset = left_out = 0
    with path.open("rb") as file:
        for line in file:
            length = len(line)
            match = _STEP.match(line)
            step = int(match[1]) if match else _step_of(line)
            if step is not None and line.rstrip().endswith(b"}") and length < _LONGEST_LINE:
                places.setdefault(step, []).append((offset, length))
            elif line.strip() and line.endswith(b"\n"):
                left_out += 1
            offset += length
    return places, left_out


def _step_of(line: bytes) -> int | None:
    """Of a line that does not begin with it."""
    row = _parsed(line)
    step = None if row is None else number(row.get("step"))
    return None if step is None else int(step)


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def _evenly(steps: list[int], sizes: Mapping[int, int], most_bytes: int) -> list[int]:
    """Steps from the first to the last that together fit; at least one."""
    total = sum(sizes.values())
    if total <= most_bytes or len(steps) < 2:
        return steps
    count = max(2, int(len(steps) * most_bytes / total))
    while True:
        chosen = sorted({steps[round(i * (len(steps) - 1) / (count - 1))] for i in range(count)})
        if count == 2 or sum(sizes[step] for step in chosen) <= most_bytes:
            return chosen
        count = max(2, int(count * 0.9))


def _group(step: int, rows: list[dict[str, Any]]) -> tuple[dict[str, Any], int]:
    """The completions of a step under their prompts, and how many texts were shortened."""
    prompts: dict[str, list[dict[str, Any]]] = {}
    cut = 0
    for row in rows:
        prompt, shortened = _shortened(text_of(row.get("prompt")))
        completion, also = _completion(row)
        cut += shortened + also
        prompts.setdefault(prompt, []).append(completion)
    return {"step": step, "prompts": [{"text": text, "completions": found} for text, found in prompts.items()]}, cut


def _completion(row: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
    text, cut = _shortened(text_of(row.get("completion")))
    rewards = row.get("rewards")
    found: dict[str, Any] = {
        "text": text,
        "rewards": {str(name): _number(value) for name, value in rewards.items()} if isinstance(rewards, dict) else {},
        "advantage": _number(row.get("advantage")),
        "verdicts": {
            name.removesuffix(_VERDICT): value
            for name, value in row.items()
            if name.endswith(_VERDICT) and isinstance(value, str)
        },
        "answers": {
            name.removesuffix(_ANSWER): str(value)[:200]
            for name, value in row.items()
            if name.endswith(_ANSWER) and value is not None
        },
    }
    known = {"step", "prompt", "completion", "rewards", "advantage", "tokens", "gaps"}
    extra = {name: value for name, value in row.items() if name not in known and not name.endswith((_VERDICT, _ANSWER))}
    if extra:
        found["extra"] = {str(name): str(value)[:200] for name, value in extra.items()}
    tokens, gaps = row.get("tokens"), row.get("gaps")
    if isinstance(tokens, list) and isinstance(gaps, list) and len(tokens) == len(gaps) and not cut:
        found |= {"tokens": [str(token) for token in tokens], "gaps": [_number(gap) for gap in gaps]}
    return found, cut


def _number(value: Any) -> float | None:  # noqa: ANN401 (JSON)
    found = number(value)
    return None if found is None else rounded(found)


def _shortened(text: str) -> tuple[str, int]:
    if len(text) <= LONGEST_TEXT:
        return text, 0
    half = LONGEST_TEXT // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half:,} characters left out ...]\n{text[-half:]}", 1
