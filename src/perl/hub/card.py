"""The model card of an adapter: true values, nothing else.

CardFacts -> README.md

A fact that is unknown is left out; there are no placeholders. The words are in ``model_cards/templates``.
"""

import functools

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from perl.assets import card_templates_folder
from perl.evaluation.results import RESULTS, Results, read_results
from perl.evaluation.subject import model_digests
from perl.hub import snippets
from perl.hub.candidate import Candidate, base_of_run, find_candidate, owns
from perl.hub.citations import linked, loss_name, references
from perl.hub.facts import CURVES, PROBLEMS, PUBLIC_RECIPE, CardFacts, card_facts
from perl.hub.front_matter import front_matter
from perl.hub.scores_text import contamination, headline, reservations, results_lines
from perl.run import Run, write_text


def render_card(facts: CardFacts) -> str:
    """The card as Markdown with YAML front matter."""
    results = facts.results
    card = (
        _templates()
        .get_template("adapter.md.jinja")
        .render(
            facts=facts,
            front_matter=front_matter(facts),
            title=facts.name or (f"{facts.method} for {facts.base}" if facts.method else f"Adapter for {facts.base}"),
            loss=loss_name(facts.algorithm),
            headline=headline(results) if results else "",
            results_lines=results_lines(results) if results else [],
            limitations=[*reservations(results), *contamination(results)] if results else [],
            references=references(facts.method, facts.algorithm, facts.ratio_level),
            names={"curves": CURVES, "problems": PROBLEMS, "recipe": PUBLIC_RECIPE, "results": f"eval/{RESULTS}"},
            snippets=snippets,
        )
    )
    return _tidy(card)


def run_card(run: Run, repo_id: str | None = None) -> str:
    """The card of a run's final adapter, or of the model that it trained.

    Args:
        run: The run.
        repo_id: Where it will lie on the Hub; None: where the run's recipe says.

    Raises:
        PerlError: The run has no adapter, or its recipe cannot be read.
    """
    whole = run.facts.get("method") == "full"
    return render_card(card_facts(_whole_model(run) if whole else find_candidate(run), repo_id))


def write_card(run: Run, repo_id: str | None = None) -> None:
    """Writes :func:`run_card` beside what the run trained."""
    write_text(run.card, run_card(run, repo_id))


def _whole_model(run: Run) -> Candidate:
    """What a run without an adapter trained; it is shown, though no adapter that may be published."""
    digests, folder = model_digests(run.adapter), run.path / "eval"
    results: Results | None = read_results(folder) if (folder / RESULTS).is_file() else None
    if results is not None and not owns(results, *digests, base_of_run(run)):
        results = None
    steps = int(run.facts.get("steps", 0))
    return Candidate(run, "final", run.adapter, steps, digests[0], folder if results else None, results, digests[1])


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
    environment.filters |= {"cell": _cell, "linked": linked}
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
