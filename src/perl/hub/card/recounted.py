"""Scores that are published or shown, counted again from the samples they claim to stand on.

Run, Candidate -> Recount
"""

from pathlib import Path

from perl.errors import Mistake, PerlError
from perl.evaluation.recounting.folder import recount_folder
from perl.evaluation.recounting.recount import Recount
from perl.hub.card.candidate import Candidate, find_candidate
from perl.hub.card.published import SCORES
from perl.recipe import Recipe
from perl.run.folder import Run


def run_mistakes(run: Run) -> list[Mistake]:
    """Why the scores of what a run trained may not be shown; see :func:`candidate_mistakes`."""
    place = _place(run)
    return [] if place is None else _recount(run, place).mistakes_at(str(place))


def candidate_mistakes(candidate: Candidate) -> list[Mistake]:
    """Why an adapter's scores may not be shown or sent: they are not those of its samples.

    Args:
        candidate: An adapter of a run; without results nothing is wrong with them.

    Raises:
        PerlError: There are no samples, or they or the results cannot be read.
    """
    return [] if candidate.results_folder is None else recount_candidate(candidate).mistakes_at(str(candidate.run.path))


def recount_candidate(candidate: Candidate) -> Recount:
    """The results of an adapter, counted again from the samples that were drawn of it.

    Raises:
        PerlError: There are no results or samples, or they cannot be read.
    """
    if candidate.results_folder is None:
        raise PerlError("its adapter was not evaluated", str(candidate.run.path), "perl eval")
    return _recount(candidate.run, candidate.results_folder)


def _place(run: Run) -> Path | None:
    """The folder with the results of what a run trained."""
    if run.facts.get("method") != "full":
        return find_candidate(run).results_folder
    return run.path / "eval" if (run.path / SCORES).is_file() else None


def _recount(run: Run, place: Path) -> Recount:
    return recount_folder(place, Recipe.of_run(run.path / "recipe.yaml"))
