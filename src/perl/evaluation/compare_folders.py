"""The results in several folders beside each other, counted again from what lies beside them.

folders -> results, recounted -> Comparison
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from perl.errors import Mistake, PerlError, raise_all
from perl.evaluation.compare import Comparison, compare
from perl.evaluation.found_results import FoundResults, find_results
from perl.evaluation.recounting.folder import recount_folder
from perl.evaluation.recounting.recount import Recount
from perl.evaluation.results import TABLE
from perl.run.progress import progress

_MOST_NAMED = 4


def compare_folders(paths: Sequence[str | Path], *, force: bool = False, against: str | None = None) -> Comparison:
    """Puts the results in several folders beside each other.

    Args:
        paths: As :func:`perl.evaluation.found_results.find_results` takes them.
        force: As in :func:`perl.evaluation.compare.compare`.
        against: Likewise.

    Raises:
        PerlError: There are fewer than two results, or some are not those of the samples beside them; or as
            :func:`perl.evaluation.compare.compare`.
    """
    found = find_results(paths)
    if len(found) < 2 <= len(paths):
        raise PerlError("there is nothing to compare it with", str(paths[0]), "one of them is named twice")
    if len(found) < 2:
        table = found[0].folder / TABLE
        hint = "name another folder too" + (f"; these stand in {table}" if table.is_file() else "")
        raise PerlError("holds the results of one evaluation, and a comparison needs two", str(paths[0]), hint)
    counted, unreadable = _counted(found)
    mistakes = [mistake for one, recounted in counted for mistake in recounted.mistakes_at(str(one.folder))]
    raise_all(PerlError, mistakes)
    if len(counted) < 2:
        raise_all(PerlError, unreadable)
    compared = compare(
        [one.results for _, one in counted], force=force, found=[one for one, _ in counted], against=against
    )
    notes = [f"Left out: {mistake}." for mistake in unreadable]
    return replace(compared, notes=(*compared.notes, *notes, *_reported(counted)))


def _counted(found: Sequence[FoundResults]) -> tuple[list[tuple[FoundResults, Recount]], list[Mistake]]:
    """Each counted again, and what is no results file of ours among what was searched for."""
    counted: list[tuple[FoundResults, Recount]] = []
    unreadable: list[Mistake] = []
    with progress(len(found), "counting again", unit="results") as line:
        for one in found:
            try:
                counted.append((one, recount_folder(one.folder)))
            except PerlError as error:
                if not one.searched:
                    raise
                unreadable += error.mistakes
            line.update()
    return counted, unreadable


def _reported(counted: Sequence[tuple[FoundResults, Recount]]) -> list[str]:
    """What could not be counted again, with the folders of which it could not, or how many there are."""
    folders: dict[str, list[str]] = {}
    for one, recounted in counted:
        if recounted.reported:
            folders.setdefault(recounted.reported_sentence, []).append(str(one.folder))
    return [
        f"{', '.join(of) if len(of) <= _MOST_NAMED else f'{len(of)} of {len(counted)} results'}: {sentence}."
        for sentence, of in folders.items()
    ]
