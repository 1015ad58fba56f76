"""A recipe for verl: planned as a run of this package's own is, then written down, trained there and brought home.

Recipe -> Export -> job folder; with engine.name: verl -> RUN/job -> verl -> RUN, a run like any other
"""

import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from perl.errors import MissingExtraError, PerlError, RecipeError, RunFolderError, raise_all, warn
from perl.hub.push.requests import check_login
from perl.launch.start import ProcessFailedError
from perl.policy.fingerprint import source_fingerprint
from perl.policy.model import load_base
from perl.recipe import Recipe
from perl.recipe.engine_section import VERL_STRATEGIES
from perl.recipe.layers import read_layers
from perl.recipe.sections import EngineSection
from perl.recipe.validation import checked
from perl.run.facts import RECIPE
from perl.run.folder import VERL_JOB, Run, check_folder, differences, open_run
from perl.training.checked_recipe import checked_recipe
from perl.training.plan import Plan
from perl.training.prepare import plan_of
from perl.verl.import_job import add_to_run
from perl.verl.job import check_free, check_rewards, reward_files, write_job
from perl.verl.job_folder import VERL_VERSION, find_job
from perl.verl.run_job import OUTPUT, run_job
from perl.verl.settings import Handover, Settings, settings
from perl.verl.table import refusals

# A base whose weights take more is not read for its fingerprint.
_LARGEST_READ = 4_000_000_000
_HAS_VERL = "import sys; from importlib.util import find_spec; sys.exit(not (find_spec('verl') and find_spec('perl')))"
_INSTALL = f"pip install 'verl[vllm]=={VERL_VERSION}', then pip install --no-deps perl-rl"
_OR_EXPORT = "or perl export-verl RECIPE -o DIR, for where they are"


@dataclass(frozen=True)
class VerlExport:
    """What would be written.

    Attributes:
        job: The recipe with its data.
        told: What verl is told.
        plan: Of the run, as it would be here.
    """

    job: Handover
    told: Settings
    plan: Plan

    @property
    def steps(self) -> int:
        """Of verl: batches of rollouts."""
        return int(self.told.values["trainer.total_training_steps"])

    def dry_lines(self) -> list[str]:
        """All that verl would be told, with :meth:`lines` as remarks."""
        return [*self.told.lines, *(f"# {line}" for line in self.lines())]

    def lines(self) -> list[str]:
        """For a person: who computes what, and what is not as here."""
        engine, values = self.job.recipe.engine, self.told.values
        gpus, rollouts = f"{engine.nodes or 1} x {engine.gpus or 1} GPUs", engine.rollout or "vllm"
        split = values["actor_rollout_ref.rollout.tensor_model_parallel_size"]
        batch = f"{values['data.train_batch_size']} prompts x {values['actor_rollout_ref.rollout.n']} completions"
        return [
            f"verl     {gpus}, {engine.strategy}, rollouts by {rollouts} over {split} each",
            f"batches  {self.steps} of {batch}",
            *(f"note     {note}" for note in self.told.notes),
        ]


def read_for_verl(source: str | Path | Mapping[str, Any] | Recipe, changes: Sequence[str] = ()) -> Recipe:
    """The recipe, with verl as its engine.

    Args:
        source: A file, the name of a packaged recipe, a mapping, or a recipe.
        changes: ``section.key=value``.

    Raises:
        RecipeError: With every mistake found.
    """
    of_engine = [one for one in changes if one.startswith("engine.")]
    recipe = checked_recipe(source, [one for one in changes if one not in of_engine])
    if recipe.engine.on_verl:
        values = recipe.engine.model_dump(exclude_none=True)
    else:  # what it says of this package's own processes stays; as many GPUs
        values = {"name": "verl", **({"gpus": recipe.engine.processes} if recipe.engine.processes else {})}
        given = recipe.engine.model_dump(exclude_defaults=True, exclude={"name", "processes"})
        stays = [f"engine.{key}: {value}" for key, value in given.items() if value != VERL_STRATEGIES[0]]
        if stays:
            warn("PRL347", "not handed over, since it is of this package's own processes: %s", ", ".join(stays))
    layer = read_layers({"engine": values}, of_engine)[1]
    try:
        return replace(recipe, engine=checked(EngineSection, layer.values["engine"]))
    except RecipeError as error:
        raise error.moved(lambda where: f"engine.{where}") from None


def prepare_export(recipe: Recipe) -> VerlExport:
    """What a recipe is in verl's words; no weights are loaded.

    Args:
        recipe: With verl as its engine.

    Raises:
        PerlError: The data or the model is not what the recipe needs, or verl cannot do it; names each key.
    """
    with recipe.locating():
        check_rewards({name: () for name in recipe.rewards})
        try:
            plan = plan_of(planned_here(recipe), runs_here=False)
        except PerlError:
            raise_all(RecipeError, refusals(recipe))  # what cannot go anyway comes first
            raise
        check_rewards({reward.name: reward.needs for reward in plan.rewards})
        reward_files(recipe.rewards)
        heldout, most = plan.problems.heldout if recipe.eval.enabled else None, recipe.eval.limit_of_heldout
        if heldout is not None and most is not None:
            heldout = heldout.select(range(min(most, len(heldout))))
        job = Handover(
            recipe=recipe,
            arguments=plan.arguments,
            train=plan.problems.train,
            heldout=heldout,
            tokenizer=plan.tokenizer,
            adapter=plan.how.config,
            saved=plan.saved,
            steps=plan.steps,
            longest_prompt=plan.longest_prompt,
            own_names=plan.problems.own_names,
        )
        return VerlExport(job, settings(job), plan)


def export_verl(
    source: str | Path | Mapping[str, Any] | Recipe, output: str | Path, changes: Sequence[str] = ()
) -> tuple[Path, VerlExport]:
    """Writes a recipe's job folder for verl.

    Args:
        source: As of :func:`read_for_verl`.
        output: The folder to make.
        changes: ``section.key=value``.

    Returns:
        The folder, and what is in it.

    Raises:
        PerlError: As of :func:`prepare_export`; or the folder exists.
    """
    folder = Path(output)
    check_free(folder)
    export = prepare_export(read_for_verl(source, changes))
    write_job(export.job, export.told, folder, _fingerprint(export.plan))
    return folder, export


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
    with recipe.locating():
        check_login(recipe.hub)
        python = python_of_verl(recipe.engine.python)
    export = prepare_export(recipe.with_train(output_dir=None))  # whose folder is the run's
    with open_run(recipe) as run:
        folder = (run.path / VERL_JOB).absolute()
        if folder.exists():  # a job of another recipe is replaced, where nothing was trained of it
            there, here = Recipe.of_run(folder / RECIPE), export.job.recipe
            found = differences(there.as_dict(), here.as_dict())
            if there.engine.strategy != here.engine.strategy:
                found.append(f"engine.strategy is {there.engine.strategy} there, {here.engine.strategy} here")
            if found and find_job(folder).newest_step:
                what = f"holds a job of another recipe: {'; '.join(found[:3])}"
                raise RunFolderError(what, str(folder), "choose another with --output")
            if found:
                shutil.rmtree(folder)
        if not folder.exists():
            write_job(export.job, export.told, folder, _fingerprint(export.plan))
        job = find_job(folder)
        if job.newest_step < export.steps:
            run_job(job, python, export.steps)
        if (step := job.newest_step) < export.steps:
            what = f"verl has ended at step {step} of {export.steps}"
            raise ProcessFailedError(what, str(folder / OUTPUT), "the same command goes on")
        add_to_run(job, run)
        finish(run)
    return run


def python_of_verl(asked: str | None) -> str:
    """The Python that verl is started with.

    Args:
        asked: As ``engine.python`` names it; None: this one.

    Raises:
        RecipeError: There is no such program.
        MissingExtraError: It has no verl, or not this package.
    """
    if asked is None:
        if importlib.util.find_spec("verl") is None:
            hint = f"engine.python: PATH of a Python that has it ({_INSTALL}), {_OR_EXPORT}"
            raise MissingExtraError("verl is not installed in this Python", "engine.name", hint)
        return sys.executable
    found = shutil.which(Path(asked).expanduser())
    if found is None:
        raise RecipeError(f"{asked}: no such program", "engine.python", "PATH of a Python that has verl")
    if subprocess.run([found, "-c", _HAS_VERL], check=False, capture_output=True).returncode:  # noqa: S603 (the user's)
        raise MissingExtraError(f"{asked}: has not both verl and perl", "engine.python", f"{_INSTALL}, {_OR_EXPORT}")
    return str(Path(found).absolute())


def planned_here(recipe: Recipe) -> Recipe:
    """The recipe as this package's own trainer would run it, so that all that it refuses is refused."""
    return replace(recipe.with_train(report_to=None), engine=EngineSection())


def _fingerprint(plan: Plan) -> str | None:
    """Of the base, where reading it costs little; the way back compares it where it is known."""
    if 4 * plan.total_parameters > _LARGEST_READ:
        return None
    section = plan.recipe.model.model_copy(update={"dtype": "float32"})
    return source_fingerprint(load_base(section, plan.arguments.device, "ddp"))
