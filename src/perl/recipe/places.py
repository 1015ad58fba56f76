"""Where a setting belongs that was written without its section.

``learning_rate`` -> ``train.learning_rate``
"""

import difflib
from collections import defaultdict

from perl.recipe.sections import FIELD_OF_SETTING, SECTION_NAMES, SECTIONS
from perl.recipe.train_fields import REFUSED, train_fields

_SHORT = {"lr": "learning_rate", "steps": "max_steps", "batch_size": "prompts_per_step"}
_CLOSE = 0.8


def places_of(name: str) -> list[str]:
    """Every ``section.key`` of a setting, by its name or one very like it.

    Args:
        name: As somebody wrote it, as an option too: ``--learning-rate``.
    """
    plain = name.lstrip("-").replace("-", "_")
    known: dict[str, list[str]] = defaultdict(list)
    for key in set(train_fields()) - set(FIELD_OF_SETTING.values()) - set(REFUSED):
        known[key].append(f"train.{key}")
    for section, model in SECTIONS.items():
        for key in model.model_fields:
            known[key].append(f"{section}.{key}")
    plain = _SHORT.get(plain, plain)
    if plain in known and plain not in SECTION_NAMES:
        return known[plain]
    if difflib.get_close_matches(plain, SECTION_NAMES, n=1, cutoff=_CLOSE):
        return []
    return [place for key in difflib.get_close_matches(plain, known, n=1, cutoff=_CLOSE) for place in known[key]]


def place_hint(name: str) -> str:
    """``did you mean train.learning_rate?``, or nothing where no section has such a setting."""
    places = places_of(name)
    return f"did you mean {' or '.join(places)}?" if places else ""
