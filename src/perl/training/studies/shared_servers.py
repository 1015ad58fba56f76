"""Whether vLLM servers have room for the cells that share them, before any of these is trained.

Study -> what each candidate gives to servers -> nothing, or a line for each server that is too small
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from perl.errors import Mistake, RecipeError, raise_all
from perl.recipe.rollout_section import RolloutSection
from perl.rollouts.vllm.adapter_room import AdapterRoom, adapter_rooms
from perl.rollouts.vllm.http import LORA_FLAGS
from perl.training.stages import prepare
from perl.training.studies.cells import Candidate, counted
from perl.training.studies.written_plan import Study


@dataclass(frozen=True)
class Served:
    """What cells of a candidate give to servers.

    Attributes:
        candidate: Whose.
        rollout: Of its recipe.
        rank: Of the LoRA, one that vLLM can be started for; None: weights, in the place of the base's.
    """

    candidate: Candidate
    rollout: RolloutSection
    rank: int | None

    @property
    def adapters(self) -> int:
        """That a server answers with at a time for one cell."""
        return 1 + self.rollout.prefetch

    @property
    def place(self) -> tuple[object, ...]:
        """By which two candidates have the same servers."""
        return self.rollout.addresses, self.rollout.sync_folder, self.rollout.sync_folder_on_servers


def served(planned: Study) -> list[Served]:
    """Those of the candidates whose completions come from servers.

    Raises:
        PerlError: A cell cannot run.
    """
    found = []
    for candidate, recipe in zip(planned.candidates, planned.recipes, strict=True):
        if recipe.rollout.capabilities.needs_servers:
            plan = prepare(recipe, engine_here=False)
            found.append(Served(candidate, plan.recipe.rollout, plan.served_rank))
    return found


def check_room(planned: Study, some: Sequence[Served], folder: Path) -> list[str]:
    """Refuses servers without room for the adapters of the cells that share them.

    Args:
        planned: The study.
        some: As :func:`served` gives them.
        folder: Of the study, or one above it that is there.

    Returns:
        A line for each server that does not answer; the cells wait for those.

    Raises:
        RecipeError: With a line for each server.
        PerlError: A server refuses access.
    """
    groups: dict[tuple[object, ...], list[Served]] = {}
    for one in some:
        if one.rank is not None and one.rollout.addresses:
            groups.setdefault(one.place, []).append(one)
    mistakes: list[Mistake] = []
    absent: list[str] = []
    for group in groups.values():
        how = group[0].rollout
        largest = max(one.rank for one in group if one.rank is not None)
        through = Path(how.sync_folder) if how.sync_folder is not None else folder
        for room in adapter_rooms(how.addresses, largest, through, how.sync_folder_on_servers):
            mistakes += _too_small(planned, group, room)
            absent += [f"{room.url} does not answer: {room.absent}"] if room.absent else []
    raise_all(RecipeError, mistakes)
    return absent


def room_lines(planned: Study, folder: Path | None) -> Iterator[str]:
    """What :func:`check_room` finds, for a person who only looks.

    Args:
        planned: The study.
        folder: That it would have; None: the usual one.

    Raises:
        RecipeError: With a line for each server that is too small.
    """
    folder = (folder or Path("runs") / "studies" / planned.name).absolute()
    there = next(one for one in (folder, *folder.parents) if one.is_dir())
    absent = check_room(planned, served(planned), there)
    yield from absent or ["the servers have room for the cells that run at once"]


def _too_small(planned: Study, group: Sequence[Served], room: AdapterRoom) -> Iterator[Mistake]:
    where = planned.layer.where
    if room.adapters == 0:
        yield Mistake(f"{room.url} cannot load adapters", where(("overrides",)), LORA_FLAGS)
        return
    each, cells = max(one.adapters for one in group), min(planned.file.at_once, _most_cells(planned))
    if cells > 1 and room.adapters is not None and room.adapters < each * cells:
        fit = room.adapters // each
        hint = f"start it with --max-loras {each * cells}" + (f", or at_once: {fit}" if fit else "")
        what = f"{room.url} has room for {counted(room.adapters, 'adapter')} at a time, and {cells} cells at once need"
        yield Mistake(f"{what} {each * cells}", where(("at_once",)), hint)
    ranks = {one.candidate.title: one.rank for one in group if one.rank is not None}
    if room.rank is not None and room.rank < max(ranks.values()):
        title = max(ranks, key=lambda title: ranks[title])
        what = f"{room.url} takes adapters up to rank {room.rank}, and {title} needs {ranks[title]}"
        yield Mistake(what, where(("grid",)), f"start it with --max-lora-rank {ranks[title]}")


def _most_cells(planned: Study) -> int:
    """Cells that wait at the same time, at most."""
    seeds, file = planned.file.seeds, planned.file
    finalists = 2 * len(planned.arms) if file.chosen else len(planned.candidates)
    return max(len(planned.candidates) * len(seeds.choose), finalists * len(seeds.score))
