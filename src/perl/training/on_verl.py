"""A recipe that verl trains: handed over into its run folder, trained there, and brought home.

Recipe with engine.name: verl -> RUN/job -> verl -> RUN, a run like any other
"""

import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from perl.errors import MissingExtraError, PerlError, RecipeError, RunFolderError
from perl.launch.start import ProcessFailedError
from perl.launch.verl.come_back import come_into
from perl.launch.verl.found_job import find_job, newest_step
from perl.launch.verl.job_files import VERL_VERSION
from perl.launch.verl.run_job import OUTPUT, run_job
from perl.recipe import Recipe
from perl.run.facts import RECIPE
from perl.run.folder import VERL_JOB, Run, check_folder, differences, open_run
from perl.training.to_verl import Export, prepare_export, write_export

_HAS_VERL = "import sys; from importlib.util import find_spec; sys.exit(not (find_spec('verl') and find_spec('perl')))"
_OR_EXPORT = "or perl export-verl RECIPE -o DIR, for where they are"


def train_on_verl(recipe: Recipe, finish: Callable[[Run], None]) -> Run:
    """Trains a recipe with verl, or goes on with it from verl's newest checkpoint.

    Args:
        recipe: Checked; verl is its engine.
        finish: Draws and describes the run, once what verl trained is in it.

    Returns:
        The run, done.

    Raises:
        PerlError: verl is not here, cannot do what the recipe asks for, or refuses the job; or the folder is another
            recipe's. Nothing was started.
        ProcessFailedError: verl has failed; the same call goes on.
        InterruptedRunError: Ctrl-C or SIGTERM; likewise.
    """
    check_folder(recipe)
    run = Run.read(recipe.output_dir) if (recipe.output_dir / "run.json").is_file() else None
    if run is not None and run.status == "done":
        return run
    try:
        python = python_of_verl(recipe.engine.python)
    except PerlError as error:
        raise recipe.located(error) from None
    export = prepared(recipe)
    with open_run(recipe) as run:
        folder = (run.path / VERL_JOB).absolute()
        _hand_over(export, folder)
        job = find_job(folder)
        if newest_step(job) < export.steps:
            run_job(job, python, export.steps)
        if (step := newest_step(job)) < export.steps:
            what = f"verl has ended at step {step} of {export.steps}"
            raise ProcessFailedError(what, str(folder / OUTPUT), "the same command goes on")
        come_into(folder, run)
        finish(run)
    return run


def prepared(recipe: Recipe) -> Export:
    """What a recipe is in verl's words, its folder apart, which is the run's.

    Raises:
        PerlError: The data or the model is not what the recipe needs, or verl cannot do it; names each key.
    """
    train = {name: value for name, value in recipe.train.items() if name != "output_dir"}
    return prepare_export(replace(recipe, train=MappingProxyType(train)))


def python_of_verl(asked: str | None) -> str:
    """The Python that verl is started with.

    Args:
        asked: As ``engine.python`` names it; None: this one.

    Raises:
        RecipeError: There is no such program.
        MissingExtraError: It has no verl, or not this package.
    """
    install = f"pip install 'verl[vllm]=={VERL_VERSION}', then pip install --no-deps perl-rl"
    if asked is None:
        if importlib.util.find_spec("verl") is None:
            hint = f"engine.python: PATH of a Python that has it ({install}), {_OR_EXPORT}"
            raise MissingExtraError("verl is not installed in this Python", "engine.name", hint)
        return sys.executable
    found = shutil.which(Path(asked).expanduser())
    if found is None:
        raise RecipeError(f"{asked}: no such program", "engine.python", "PATH of a Python that has verl")
    if subprocess.run([found, "-c", _HAS_VERL], check=False, capture_output=True).returncode:  # noqa: S603 (the user's)
        raise MissingExtraError(f"{asked}: has not both verl and perl", "engine.python", f"{install}, {_OR_EXPORT}")
    return str(Path(found).absolute())


def _hand_over(export: Export, folder: Path) -> None:
    """Writes the job, unless it is there; one of another recipe of which nothing was trained is replaced.

    Raises:
        RunFolderError: verl has trained another recipe there.
    """
    if folder.exists():
        there, here = Recipe.of_run(folder / RECIPE), export.job.recipe
        found = differences(there.as_dict(), here.as_dict())
        if there.engine.strategy != here.engine.strategy:
            found.append(f"engine.strategy is {there.engine.strategy} there, {here.engine.strategy} here")
        if not found:
            return
        if newest_step(find_job(folder)):
            what = f"holds a job of another recipe: {'; '.join(found[:3])}"
            raise RunFolderError(what, str(folder), "choose another with --output")
        shutil.rmtree(folder)
    write_export(export, folder)
