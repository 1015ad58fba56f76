"""The model card of an adapter: true values, nothing else.

CardFacts -> README.md

A fact that is unknown is left out; there are no placeholders. The words are in ``model_cards/templates``.
"""

import functools
import json
from functools import partial

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from perl.algorithms.named import shown_settings
from perl.hub.card import snippets
from perl.hub.card.card_facts import CardFacts
from perl.hub.card.citations import linked, loss_name, references
from perl.hub.card.front_matter import front_matter
from perl.hub.card.published import PUBLIC_RECIPE, SCORES
from perl.hub.card.scores_text import contamination, headline, reservations, results_lines
from perl.recipe.assets import card_templates_folder


def render_card(facts: CardFacts) -> str:
    """The card as Markdown with YAML front matter.

    Args:
        facts: What it says.
    """
    results = facts.results
    card = (
        _templates()
        .get_template("adapter.md.jinja")
        .render(
            facts=facts,
            front_matter=front_matter(facts),
            title=facts.name or (f"{facts.method} for {facts.base}" if facts.method else f"Adapter for {facts.base}"),
            loss=loss_name(facts),
            overridden=shown_settings(facts.overridden),
            headline=headline(results) if results else "",
            results_lines=results_lines(results) if results else [],
            limitations=[*reservations(results), *contamination(results)] if results else [],
            references=references(facts),
            names={"recipe": PUBLIC_RECIPE, "results": SCORES},
            snippets=snippets,
        )
    )
    return _tidy(card)


@functools.cache
def _templates() -> Environment:
    # Markdown, not HTML: nothing is to be escaped, and every name must be defined.
    environment = Environment(  # noqa: S701
        loader=FileSystemLoader(card_templates_folder()),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"cell": _cell, "linked": linked, "json": partial(json.dumps, ensure_ascii=False)}
    return environment


def _cell(value: object) -> str:
    """Text that keeps a table's row whole."""
    return " ".join(str(value).split()).replace("|", "\\|")


def _tidy(card: str) -> str:
    """One empty line where templates leave several, outside of code and front matter."""
    lines: list[str] = []
    fenced = False
    for line in card.splitlines():
        fenced ^= line.startswith("```")
        if line.strip() or fenced or (lines and lines[-1]):
            lines.append(line if fenced else line.rstrip())
    return "\n".join(lines).rstrip() + "\n"
