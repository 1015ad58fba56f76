"""The plan of a study, written before there are results, and the folder that holds both.

study.yaml -> Study -> DIR/plan.json, the same plan each time

DIR holds ``plan.json``, ``cells/choose`` and ``cells/score`` with a run folder each, ``logs/`` with what each printed,
``chosen.json``, ``results.json``, and the report. A plan that differs from the one in the folder is refused, since
results would be picked from more than was planned.
"""

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perl.errors import Mistake, RecipeError, RunFolderError, did_you_mean, raise_all
from perl.recipe import Recipe
from perl.recipe.layers import Layer
from perl.run.files import write_text
from perl.run.folder import held, installed_versions
from perl.training.checked_recipe import checked_recipe
from perl.training.studies.cells import Candidate, Cell, as_overrides, candidates, canonical
from perl.training.studies.study_file import StudyFile, read_study


@dataclass(frozen=True)
class Study:
    """A study that can be carried out.

    Attributes:
        name: The file's, for the report and the folder.
        file: What is written in it.
        recipe: As ``perl train`` takes it.
        candidates: In the grid's order.
        recipes: Of each candidate, but for the seed.
        layer: Where each key is written.
    """

    name: str
    file: StudyFile
    recipe: str
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
    def baseline(self) -> str:
        """Title of the arm that the others are held against: the one that the study names, else the first."""
        wanted = self.file.baseline.items()
        return next(one.title for one in self.candidates if wanted <= dict(one.arm).items())

    def arguments(self, cell: Cell) -> list[str]:
        """Of the command that trains a cell, without its folder."""
        return ["train", self.recipe, *as_overrides(self.file.overrides), *cell.overrides]

    def command(self, cell: Cell) -> str:
        """That trains a cell alone, for a person to paste, with as many threads."""
        return f"OMP_NUM_THREADS={self.file.threads} " + shlex.join(["perl", *self.arguments(cell)])

    def plan(self) -> dict[str, Any]:
        """What decides the results, as JSON values."""
        plan = {**self.file.model_dump(exclude={"at_once"}), "first recipe": self.recipes[0].as_dict()}
        return dict(json.loads(json.dumps(plan, default=str)))


def load_study(source: str | Path | Mapping[str, Any]) -> Study:
    """A study with the recipe of each candidate, checked as `perl train` checks it, without torch.

    Raises:
        RecipeError: With every mistake of the study and of its cells, where it is written.
    """
    file, layer = read_study(source)
    beside = Path(source).parent if not isinstance(source, Mapping) else Path()
    recipe = str(beside / file.recipe) if (beside / file.recipe).is_file() else file.recipe
    every = as_overrides(file.overrides)
    found = candidates(file)
    recipes: list[Recipe] = []
    mistakes: list[Mistake] = []
    for one in found:
        try:
            recipes.append(checked_recipe(recipe, (*every, *as_overrides(one.settings))))
        except RecipeError as error:
            mistakes += [_located(mistake, file, layer) for mistake in error.mistakes]
    for name in ("tune", "baseline") if not mistakes else ():
        for key in sorted(set(getattr(file, name) or ()) - file.varying):
            hint = did_you_mean(key, file.varying)
            what = f"{key} does not vary: it is no key of the grid"
            mistakes.append(Mistake(what, layer.where((name,)), hint))
    raise_all(RecipeError, [*dict.fromkeys(mistakes)] or [*_mistakes(file, found, recipes, layer)])
    name = Path(source).stem if not isinstance(source, Mapping) else "study"
    return Study(name, file, recipe, tuple(found), tuple(recipes), layer)


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


def _mistakes(
    file: StudyFile, found: Sequence[Candidate], recipes: Sequence[Recipe], layer: Layer
) -> Iterator[Mistake]:
    """What is wrong with a study whose cells can be trained."""
    from perl.data import heldout_name  # which imports what reads data sets

    arms = {one.title for one in found if file.baseline.items() <= dict(one.arm).items()}
    if file.baseline and len(arms) != 1:
        some = "; ".join(sorted(arms or {one.title for one in found})[:3])
        what = f"is {len(arms) or 'none'} of the compared: {some}"
        yield Mistake(what, layer.where(("baseline",)), "name the settings of one of them")
    where = layer.where(("recipe",))
    if any(not recipe.eval.enabled for recipe in recipes):
        yield Mistake("cells are compared by their evaluation, and eval.enabled is false", where)
    elif any(not (heldout_name(recipe.data) or recipe.eval.tasks) for recipe in recipes):
        what = "nothing scores a cell: no problems are held out, and no tasks are named"
        yield Mistake(what, where, "overrides: {data.eval: FILE}, or eval.tasks")
    if file.halving is not None and any(steps_of(recipe) <= 0 for recipe in recipes):
        yield Mistake("needs a number of steps", layer.where(("halving",)), "overrides: {train.max_steps: 100}")


def steps_of(recipe: Recipe) -> int:
    """Optimizer steps as the recipe names them; below 1 where it does not."""
    return int(recipe.train.get("max_steps") or -1)


@contextmanager
def opened(study: Study, folder: Path) -> Iterator[None]:
    """The folder of a study, held by this process, with its plan written in it.

    Raises:
        RunFolderError: The folder holds another plan or something else, or another process works on it.
    """
    with held(folder, RunFolderError("another process works on this study", str(folder), "choose another --output")):
        path, plan, another = folder / "plan.json", study.plan(), "choose another --output"
        strangers = sorted(one.name for one in folder.iterdir() if not one.name.startswith("."))
        if strangers and not path.exists():
            what = f"is not empty and holds no study: {', '.join(strangers[:3])}"
            raise RunFolderError(what, str(folder), another)
        if (folder / "cells").exists():
            try:
                before = json.loads(path.read_text(encoding="utf-8"))["plan"]
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise RunFolderError(f"holds no plan of a study: {error}", str(path), another) from None
            changed = [key for key in plan if plan[key] != before.get(key)]
            if changed:
                raise RunFolderError(
                    f"the study was planned otherwise: {', '.join(changed)} changed", str(path), another
                )
        else:
            write_text(path, json.dumps({"plan": plan, "versions": installed_versions()}, indent=2) + "\n")
        yield
