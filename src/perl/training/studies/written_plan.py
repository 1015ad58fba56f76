"""The plan of a study, written before there are results, and the folder that holds both.

StudyFile, candidates -> DIR/plan.json -> the same plan, or a refusal

DIR holds ``plan.json``, ``cells/choose`` and ``cells/score`` with a run folder each, ``logs/`` with what each printed,
``chosen.json``, ``results.json``, and the report. A plan that differs from the one in the folder is refused, since
results would be picked from more than was planned; ``--new-plan`` moves all that is there, cells included, into a
folder ``earlier-HASH``.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from perl.errors import Mistake, RecipeError, RunFolderError, did_you_mean, raise_all
from perl.recipe import Recipe
from perl.recipe.beside import folders_beside
from perl.recipe.layers import Layer
from perl.run.files import sha256_of, write_text
from perl.run.folder import installed_versions
from perl.training.checked_recipe import checked_recipe
from perl.training.studies.cells import Candidate, as_overrides, at_baseline, candidates, canonical, cell_name, titled
from perl.training.studies.study_file import StudyFile, read_study

# How many cells train at once and for how long decides no result.
_HOW = ("at_once", "budget")
_EARLIER = "earlier-"


@dataclass(frozen=True)
class Study:
    """A study that can be carried out.

    Attributes:
        name: The file's, for the report and the folder.
        file: What is written in it.
        recipe: As ``perl train`` takes it.
        every: Overrides of every cell.
        candidates: In the grid's order.
        recipes: Of each candidate, but for the seed.
        layer: Where each key is written.
    """

    name: str
    file: StudyFile
    recipe: str
    every: tuple[str, ...]
    candidates: tuple[Candidate, ...]
    recipes: tuple[Recipe, ...]
    layer: Layer

    def recipe_of(self, candidate: Candidate) -> Recipe:
        """The whole recipe of a candidate's cells, but for the seed."""
        return self.recipes[[one.key for one in self.candidates].index(candidate.key)]

    @property
    def arms(self) -> list[list[Candidate]]:
        """The candidates of each arm, in the grid's order."""
        found: dict[str, list[Candidate]] = {}
        for one in self.candidates:
            found.setdefault(canonical(one.arm), []).append(one)
        return list(found.values())

    @property
    def baseline(self) -> str | None:
        """Title of the arm that the study holds the others against; None: it names none."""
        wanted = self.file.baseline.items()
        if not wanted:
            return None
        return next(one.title for one in self.candidates if wanted <= dict(one.arm).items())

    def plan(self) -> dict[str, Any]:
        """What decides the results, as JSON values."""
        kept = {key: value for key, value in self.file.model_dump().items() if key not in _HOW}
        resolved = {"tune": list(self.file.chosen), "first recipe": self.recipes[0].as_dict()}
        return {
            **kept,
            **resolved,
            "files": _digests(self.recipes),
            "candidates": [c.settings for c in self.candidates],
        }


def load_study(source: str | Path | Mapping[str, Any]) -> Study:
    """A study with the recipe of each candidate, checked as `perl train` checks it, without torch.

    Raises:
        RecipeError: With every mistake of the study and of its cells, where it is written.
    """
    file, layer = read_study(source)
    beside = Path(source).parent if not isinstance(source, Mapping) else Path()
    recipe = str(beside / file.recipe) if (beside / file.recipe).is_file() else file.recipe
    every = tuple(as_overrides(file.overrides))
    found = candidates(file, layer)
    recipes, mistakes = [], []
    for one in found:
        try:
            recipes.append(checked_recipe(recipe, (*every, *as_overrides(one.settings))))
        except RecipeError as error:
            mistakes += [_located(mistake, file, layer) for mistake in error.mistakes]
    raise_all(RecipeError, list(dict.fromkeys(mistakes)))
    raise_all(RecipeError, list(_absent_mistakes(file, layer)))
    mistakes += [*_baseline_mistakes(file, found, layer), *_score_mistakes(file, recipes, layer)]
    mistakes += [*_halving_mistakes(file, recipes, layer), *_name_mistakes(found, layer)]
    raise_all(RecipeError, mistakes)
    _check_at_baseline(recipe, every, file, found, layer)
    name = Path(source).stem if not isinstance(source, Mapping) else "study"
    return Study(name, file, recipe, every, tuple(found), tuple(recipes), layer)


def _located(mistake: Mistake, file: StudyFile, layer: Layer) -> Mistake:
    """A mistake of a cell, where the study has the key."""
    if not mistake.where:
        return Mistake(mistake.message, layer.where(("recipe",)), mistake.hint)
    place, colon, key = mistake.where.partition("command line: ")
    if not colon or place:
        return mistake
    path: tuple[str, ...] = ("overrides", key)
    for number, block in enumerate(file.grid):
        meant = next((one for one in block if one == key or one.startswith(f"{key}.")), None)
        if meant is not None:
            path = ("grid", meant) if isinstance(layer.values.get("grid"), Mapping) else ("grid", str(number), meant)
    return Mistake(mistake.message, layer.where(path), mistake.hint)


def _absent_mistakes(file: StudyFile, layer: Layer) -> Iterator[Mistake]:
    """Keys that do not vary where one that does is meant."""
    for name in ("tune", "baseline"):
        for key in sorted(set(getattr(file, name) or ()) - file.varying):
            hint = did_you_mean(key, file.varying)
            yield Mistake(f"{key} does not vary: it is no key of the grid", layer.where((name,)), hint)


def _baseline_mistakes(file: StudyFile, found: Sequence[Candidate], layer: Layer) -> Iterator[Mistake]:
    if not file.baseline:
        return
    arms = {one.title for one in found if file.baseline.items() <= dict(one.arm).items()}
    if len(arms) != 1:
        some = "; ".join(sorted(arms or {one.title for one in found})[:3])
        yield Mistake(
            f"is {len(arms) or 'none'} of the compared: {some}",
            layer.where(("baseline",)),
            "name the settings of one of them",
        )


def _score_mistakes(file: StudyFile, recipes: Sequence[Recipe], layer: Layer) -> list[Mistake]:
    from perl.data import heldout_name

    where, first = layer.where(("recipe",)), recipes[0]
    if any(not recipe.eval.enabled for recipe in recipes):
        return [Mistake("cells are compared by their evaluation, and eval.enabled is false", where)]
    if any(not (heldout_name(recipe.data) or recipe.eval.tasks) for recipe in recipes):
        what = "nothing scores a cell: no problems are held out, and no tasks are named"
        return [Mistake(what, where, "overrides: {data.eval: FILE}, or eval.tasks")]
    if file.score == "best" and first.eval.every is None:
        what = "best: no adapter is kept as the best one, since eval.every is not set"
        return [Mistake(what, layer.where(("score",)), "overrides: {eval.every: 20, eval.tasks: [...]}")]
    return []


def _halving_mistakes(file: StudyFile, recipes: Sequence[Recipe], layer: Layer) -> Iterator[Mistake]:
    """Halving needs steps to count, and a process that can be told to pause."""
    if file.halving is None:
        return
    if any(int(recipe.train.get("max_steps") or -1) <= 0 for recipe in recipes):
        yield Mistake("needs a number of steps", layer.where(("halving",)), "overrides: {train.max_steps: 100}")
    for steps in sorted({int(recipe.train.get("max_steps") or -1) for recipe in recipes}):
        places = [step_of(share, steps) for share in file.halving.at]
        if steps > 0 and len({*places, steps}) <= len(places):
            what = f"at: of {steps} steps {file.halving.at} are the steps {places}, which must grow and end before"
            yield Mistake(f"{what} {steps}", layer.where(("halving",)), "fewer shares, or more steps")
    if any((recipe.engine.processes or 1) > 1 for recipe in recipes):
        yield Mistake(
            "pauses cells of one process only", layer.where(("halving",)), "leave it out, or engine.processes"
        )


def step_of(share: float, steps: int) -> int:
    """The step after which cells pause at a share of their steps."""
    return max(1, round(share * steps))


def _name_mistakes(found: Sequence[Candidate], layer: Layer) -> Iterator[Mistake]:
    names: dict[str, Candidate] = {}
    for one in found:
        other = names.setdefault(cell_name(one, 0), one)
        if other is not one:
            what = f"{titled(one.settings)} and {titled(other.settings)} would have one folder"
            yield Mistake(what, layer.where(("grid",)), "two studies")


def _check_at_baseline(
    recipe: str, every: Sequence[str], file: StudyFile, found: Sequence[Candidate], layer: Layer
) -> None:
    """Refuses a study in which an arm cannot be trained with what may be chosen for the baseline.

    Raises:
        RecipeError: With what is wrong.
    """
    possible = [one.chosen for one in found if file.baseline and file.baseline.items() <= dict(one.arm).items()]
    mistakes, seen = [], {one.key for one in found}
    for arm in found:
        for chosen in possible:
            one = at_baseline(arm, chosen, file.overrides)
            if one.key in seen:
                continue
            seen.add(one.key)
            try:
                checked_recipe(recipe, (*every, *as_overrides(one.settings)))
            except RecipeError as error:
                what = f"{one.title} cannot be trained with what may be chosen for it: {error.mistakes[0].message}"
                mistakes.append(Mistake(what, layer.where(("baseline",)), "leave baseline out, or another grid"))
    raise_all(RecipeError, mistakes)


def _digests(recipes: Sequence[Recipe]) -> dict[str, str]:
    """SHA-256 of the files that recipes name: problems, tasks, modules of rewards beside a recipe or in this folder."""
    named: set[str] = set()
    for recipe in recipes:
        named |= {source.name for source in (recipe.data.train, recipe.data.eval) if source is not None}
        tasks = [task.name for task in recipe.eval.tasks]
        named |= {one for task in tasks for one in (task, task.rpartition(":")[0])}
        named |= {f"{recipe.eval.data}/{task}.jsonl" for task in tasks if recipe.eval.data}
        modules = [f"{name.partition(':')[0].replace('.', '/')}.py" for name in recipe.rewards if ":" in name]
        folders = [*folders_beside(recipe.written_at), "."]
        named |= {str(Path(folder) / module) for folder in folders for module in modules}
    return {name: sha256_of(Path(name)) for name in sorted(named) if name and Path(name).is_file()}


def plan_hash(plan: Mapping[str, Any]) -> str:
    """SHA-256 of a plan as canonical JSON."""
    return hashlib.sha256(canonical(plan).encode()).hexdigest()


@contextmanager
def opened(study: Study, folder: Path, *, new_plan: bool = False) -> Iterator[str]:
    """The folder of a study, held by this process, with its plan written in it.

    Args:
        study: What is to be done.
        folder: Where.
        new_plan: Put another plan, with its results, beside this one.

    Yields:
        The plan's hash.

    Raises:
        RunFolderError: The folder holds another plan or something else, or another process works on it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / ".lock", timeout=0.5)
        lock.acquire()
    except Timeout:
        raise RunFolderError("another process works on this study", str(folder), "choose another --output") from None
    except OSError as error:
        raise RunFolderError(f"cannot be written: {error.strerror or error}", str(folder)) from None
    try:
        yield _claim(study, folder, new_plan=new_plan)
    finally:
        lock.release()


def _claim(study: Study, folder: Path, *, new_plan: bool) -> str:
    plan = json.loads(json.dumps(study.plan(), default=str))
    digest, path = plan_hash(plan), folder / "plan.json"
    if path.exists():
        before = read_plan(folder)
        if before["sha256"] == digest:
            return digest
        if any((folder / "cells").glob("*/*/run.json")):
            if not new_plan:
                changed = [key for key in plan if plan[key] != before["plan"].get(key)]
                what = f"the study was planned otherwise: {', '.join(changed)} changed"
                raise RunFolderError(what, str(path), "--new-plan keeps the old one beside it; or another --output")
            _move_away(folder, before["sha256"])
    elif strangers := _strangers(folder):
        raise RunFolderError(
            f"is not empty and holds no study: {', '.join(strangers[:3])}", str(folder), "another --output"
        )
    written = {"sha256": digest, "plan": plan, "versions": installed_versions()}
    write_text(path, json.dumps(written, indent=2) + "\n")
    return digest


def _strangers(folder: Path) -> list[str]:
    return sorted(one.name for one in folder.iterdir() if not one.name.startswith((".", _EARLIER)))


def _move_away(folder: Path, digest: str) -> None:
    """Moves a study into a folder of its own; its plan last, so that a kill in between leaves it to be moved."""
    number = 1
    while (place := folder / f"{_EARLIER}{digest[:8]}-{number}").joinpath("plan.json").exists():
        number += 1
    place.mkdir(exist_ok=True)
    for name in [*(one for one in _strangers(folder) if one != "plan.json"), "plan.json"]:
        (folder / name).rename(place / name)


def read_plan(folder: Path) -> dict[str, Any]:
    """What was planned in a folder, with its hash.

    Raises:
        RunFolderError: There is none, or it was changed by hand.
    """
    path = folder / "plan.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        sound = isinstance(found, dict) and plan_hash(found["plan"]) == found["sha256"]
    except (OSError, ValueError, KeyError) as error:
        raise RunFolderError(f"holds no study: {error}", str(path)) from None
    if not sound:
        raise RunFolderError("is not the plan that was written: its hash differs", str(path), "--output ANOTHER")
    return dict(found)
