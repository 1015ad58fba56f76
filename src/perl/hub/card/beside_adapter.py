"""Links of a card that lies beside the adapter of a run: scores, pictures and recipe lie one folder higher there.

card as it is published <-> card in ``RUN/adapter``
"""

from perl.hub.card.facts import PUBLIC_RECIPE
from perl.hub.card.notes import split_notes

# As it is published -> as it is found from the adapter's folder.
_PLACES = {
    "](eval/": "](../eval/",
    "](plots/": "](../plots/",
    f"perl train {PUBLIC_RECIPE}\n": "perl train ../recipe.yaml\n",
}


def beside_adapter(card: str) -> str:
    """The card with links that lead somewhere from the run's folder; an author's notes stay as they are."""
    return _replaced(card, _PLACES)


def as_published(card: str) -> str:
    """The same card with the links that it is published with."""
    return _replaced(card, {there: published for published, there in _PLACES.items()})


def _replaced(card: str, places: dict[str, str]) -> str:
    made, notes, _ = split_notes(card)
    for old, new in places.items():
        made = made.replace(old, new)
    return f"{made}\n{notes}" if notes else made
