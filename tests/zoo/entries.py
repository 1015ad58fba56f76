"""Entries of a zoo, made up for tests."""

from pathlib import Path
from typing import Any

from perl.zoo.catalogue import Zoo, open_zoo
from perl.zoo.entry import Entry, Location, SeedScores, TaskScore

PROTOCOL, OTHER_PROTOCOL = "1111aaaa2222bbbb", "9999cccc8888dddd"
SHA = {"adapter_config.json": "c" * 64, "adapter_model.safetensors": "a" * 64}
CURVE = [(1, 0.2), (2, 0.35), (3, 0.3), (4, 0.5)]


def score(value: float, task: str = "sums", **facts: Any) -> TaskScore:
    """A score under our protocol beside a base of 0.4."""
    known = {"metric": "avg@4", "k": 4, "n": 500, "stderr": 0.01, "base": 0.4, "base_stderr": 0.012}
    return TaskScore(task=task, adapter=value, **{"protocol_hash": PROTOCOL, **known, **facts})


def trained(name: str, *scores: TaskScore, **facts: Any) -> Entry:
    """An entry that was trained here."""
    known = {
        "provenance": "trained-here",
        "adapter": Location(shipped=True, sha256=SHA, size=81_234),
        "base": "sandbox:base",
        "method": "lora",
        "settings": {"rank": 2},
        "algorithm": "dapo",
        "seed": 0,
        "steps": 50,
        "tokens": 123_456,
        "trainable_parameters": 19_456,
        "curve": CURVE,
        "created": "2026-01-31",
    }
    return Entry(name=name, scores=list(scores), **{**known, **facts})


def reported(name: str, *scores: TaskScore, **facts: Any) -> Entry:
    """An entry with numbers of others."""
    known = {"provenance": "reported", "base": "someone/base-7B", "method": "dora", "source": "A paper, Table 1"}
    return Entry(name=name, scores=list(scores), **{**known, **facts})


def theirs(value: float, task: str = "sums", **facts: Any) -> TaskScore:
    """A score as others report it."""
    return TaskScore(task=task, adapter=value, **{"metric": "avg@32", **facts})


def seeds(*values: float, task: str = "sums") -> list[SeedScores]:
    """Scores of further seeds, 1, 2, ..."""
    return [
        SeedScores(seed=number, adapter_sha256="b" * 64, scores={task: value})
        for number, value in enumerate(values, start=1)
    ]


def zoo_of(folder: Path, *entries: Entry) -> Zoo:
    """A zoo with these entries, on disk."""
    (folder / "entries").mkdir(parents=True, exist_ok=True)
    for entry in entries:
        (folder / "entries" / f"{entry.name}.json").write_text(entry.to_json(), encoding="utf-8")
    return open_zoo(folder)
