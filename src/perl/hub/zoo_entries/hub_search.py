"""Finds adapters on the Hub by the tags of their cards.

tag, base, method -> Found

What a card says is anybody's text: whatever has the wrong type is left out, which is noted.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from huggingface_hub import HfApi, constants, get_session
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.hf_api import ModelInfo

from perl.errors import PerlError, first_line
from perl.hub.card.front_matter import OURS, SANDBOX_TAGS, adapter_tag
from perl.methods.registry import METHODS
from perl.policy.hub_lookup import HUB_ERRORS, TIMEOUT_SECONDS
from perl.run.tables import plain

_OF_BASE = adapter_tag("")
_ASKED = ("sha", "tags", "lastModified", "model-index")
_LONGEST = 200


@dataclass(frozen=True)
class Found:
    """An adapter on the Hub, as its card describes it; nobody here has looked at its files.

    Attributes:
        id: user/name.
        sha: Commit.
        base: Hub id or sandbox name; None: its tags do not say.
        method: Likewise.
        scores: ``TASK METRIC`` -> the number in the card.
        modified: Of the last commit.
        notes: What of its card could not be read.
    """

    id: str
    sha: str | None
    base: str | None
    method: str | None
    scores: Mapping[str, float] = field(default_factory=dict)
    modified: datetime | None = None
    notes: tuple[str, ...] = ()


def hub_adapters(base: str | None = None, method: str | None = None, limit: int = 100) -> list[Found]:
    """Adapters on the Hub that bear our tag, those changed last first.

    Args:
        base: Only adapters of this base.
        method: Only those of this method.
        limit: At most so many.

    Raises:
        PerlError: The Hub is unreachable.
    """
    if constants.HF_HUB_OFFLINE:
        raise PerlError("the Hub is not asked", "HF_HUB_OFFLINE", "unset it")
    of_base = SANDBOX_TAGS.get(base or "", f"{_OF_BASE}{base}")
    tags = [OURS, *([of_base] if base else []), *([method] if method else [])]
    api = HfApi()
    try:
        get_session().head(api.endpoint, timeout=TIMEOUT_SECONDS)  # listing would try again and again for long
        listed = list(api.list_models(filter=tags, expand=list(_ASKED), sort="last_modified", limit=limit))  # type: ignore[arg-type]  # literals
    except HfHubHTTPError as error:
        status = error.response.status_code
        raise PerlError(f"the Hub answers {status} when asked for adapters", "", "try again later") from None
    except HUB_ERRORS as error:
        raise PerlError(f"{api.endpoint} cannot be asked for adapters: {first_line(error)}") from None
    return [_found(info) for info in listed]


def _found(info: ModelInfo) -> Found:
    notes: list[str] = []
    tags = [tag for tag in info.tags or [] if isinstance(tag, str)] if isinstance(info.tags, list) else []
    bases = [tag.removeprefix(_OF_BASE) for tag in tags if tag.startswith(_OF_BASE)]
    methods = [tag for tag in tags if tag in METHODS]
    of_the_sandbox = next((name for name, tag in SANDBOX_TAGS.items() if tag in tags), None)
    scores: dict[str, float] = {}
    for name, value in _scores(info.model_index, notes):
        scores.setdefault(name, value)
    return Found(
        id=info.id,
        sha=info.sha,
        base=plain(bases[0])[:_LONGEST] if bases else of_the_sandbox,
        method=methods[0] if methods else None,
        scores=scores,
        modified=info.last_modified,
        notes=tuple(dict.fromkeys(notes)),
    )


def _scores(index: object, notes: list[str]) -> Iterator[tuple[str, float]]:
    """``TASK METRIC`` and number of each result in a card's model-index, as far as it has the shape of one."""
    if index is None:
        return
    results = [
        r for model in _mappings(index, "model-index", notes) for r in _mappings(model.get("results"), "results", notes)
    ]
    for result in results:
        dataset = result.get("dataset")
        task = dataset.get("name") or dataset.get("type") if isinstance(dataset, Mapping) else None
        if not isinstance(task, str):
            notes.append("a result in its card names no data set")
            continue
        for metric in _mappings(result.get("metrics"), "metrics", notes):
            name, value = metric.get("name") or metric.get("type"), metric.get("value")
            number = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
            if not isinstance(name, str) or not math.isfinite(number):
                notes.append("a metric in its card is not a number")
                continue
            yield f"{plain(task)[:_LONGEST]} {plain(name)[:_LONGEST]}", number


def _mappings(value: object, called: str, notes: list[str]) -> list[Mapping[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(item, Mapping) for item in value):
        notes.append(f"{called} of its card is not a list of mappings")
        return []
    return value
