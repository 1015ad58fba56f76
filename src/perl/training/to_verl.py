"""A recipe handed over to verl: planned as a run of this package's own is, then written down for verl.

Recipe -> Handover -> job folder
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from perl.errors import PerlError, RecipeError, raise_all
from perl.launch.verl.can_go import REFUSED, refusals
from perl.launch.verl.handover import Handover
from perl.launch.verl.job import check_free, submit_line, write_job
from perl.launch.verl.overrides import Overrides, overrides
from perl.launch.verl.reward_files import check_rewards, reward_files
from perl.methods.settings import adaptation, continued_adaptation
from perl.policy.attach import own_method
from perl.policy.model import load_base, source_fingerprint
from perl.policy.saved.adapter import find_adapter
from perl.recipe import Recipe
from perl.recipe.engine_section import VERL_STRATEGIES
from perl.recipe.layers import read_layers
from perl.recipe.sections import EngineSection
from perl.recipe.validation import checked
from perl.rewards.one_by_one import settings_text
from perl.run.warned import warn
from perl.training.checked_recipe import checked_recipe
from perl.training.plan import Plan, make_plan

# A base whose weights take more is not read for its fingerprint.
_LARGEST_READ = 4_000_000_000


@dataclass(frozen=True)
class Export:
    """What would be written.

    Attributes:
        job: The recipe with its data.
        made: What verl is told.
        plan: Of the run, as it would be here.
    """

    job: Handover
    made: Overrides
    plan: Plan

    @property
    def steps(self) -> int:
        """Of verl: batches of rollouts."""
        return int(self.made.values["trainer.total_training_steps"])

    def dry_lines(self) -> list[str]:
        """All that verl would be told, with :meth:`lines` as remarks."""
        return [*self.made.lines, *(f"# {line}" for line in self.lines())]

    def lines(self) -> list[str]:
        """For a person: who computes what, and what is not as here."""
        engine, facts = self.job.recipe.engine, self.made.values
        gpus = f"{engine.nodes or 1} x {engine.gpus or 1} GPUs"
        split = facts["actor_rollout_ref.rollout.tensor_model_parallel_size"]
        steps, batch = facts["trainer.total_training_steps"], facts["data.train_batch_size"]
        return [
            f"verl     {gpus}, {engine.strategy}, rollouts by {self.job.rollout} over {split} each",
            f"batches  {steps} of {batch} prompts x {facts['actor_rollout_ref.rollout.n']} completions",
            *(f"note     {note}" for note in self.made.notes),
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
        values = {key: item for key, item in recipe.engine.model_dump().items() if item is not None}
    else:  # what it says of this package's own processes; as many GPUs
        values = {"name": "verl", **({"gpus": recipe.engine.processes} if recipe.engine.processes else {})}
        _say_what_stays(recipe.engine)
    layer = read_layers({"engine": values}, of_engine)[1]
    try:
        return replace(recipe, engine=checked(EngineSection, layer.values["engine"]))
    except RecipeError as error:
        raise error.moved(lambda where: f"engine.{where}") from None


def _say_what_stays(engine: EngineSection) -> None:
    """A warning for each key that is set for this package's own processes, and has no part in verl's."""
    for key, field in EngineSection.model_fields.items():
        value = getattr(engine, key)
        usual = VERL_STRATEGIES[0] if key == "strategy" else None  # which verl has anyway
        if key in ("name", "processes") or value in (field.default, usual):
            continue
        why = REFUSED[f"engine.{key}"].why if f"engine.{key}" in REFUSED else "verl has strategies of its own"
        warn("PRL347", "engine.%s: %s is not handed over: %s", key, value, why)


def prepare_export(recipe: Recipe) -> Export:
    """What a recipe is in verl's words; no weights are loaded.

    Args:
        recipe: With verl as its engine.

    Raises:
        PerlError: The data or the model is not what the recipe needs, or verl cannot do it; names each key.
    """
    try:
        check_rewards({name: () for name in recipe.rewards})
        plan = _plan(recipe)
        check_rewards({reward.name: reward.needs for reward in plan.rewards})
        reward_files(recipe.rewards)
        job = _handover(recipe, plan)
        return Export(job, overrides(job), plan)
    except PerlError as error:
        raise recipe.located(error) from None


def export_verl(
    source: str | Path | Mapping[str, Any] | Recipe, output: str | Path, changes: Sequence[str] = ()
) -> tuple[Path, Export]:
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
    return write_export(prepare_export(read_for_verl(source, changes)), folder)


def write_export(export: Export, folder: Path) -> tuple[Path, Export]:
    """Writes what was prepared; the base is read for its fingerprint.

    Args:
        export: What :func:`prepare_export` has made.
        folder: To make.

    Raises:
        RunFolderError: It exists, or cannot be written.
    """
    recipe = export.job.recipe
    job = replace(export.job, fingerprint=_fingerprint(export.plan))
    settings = settings_text(recipe.rewards, job.arguments.max_completion_length, job.own_names)
    return write_job(job, export.made, settings, folder), replace(export, job=job)


def submit(folder: Path) -> str:
    """The line that hands a job to a Ray cluster."""
    return submit_line(folder.resolve())


def planned_here(recipe: Recipe) -> Recipe:
    """The recipe as this package's own trainer would run it, so that all that it refuses is refused."""
    train = {name: value for name, value in recipe.train.items() if name != "report_to"}
    return replace(recipe, engine=EngineSection(), train=MappingProxyType(train))


def _plan(recipe: Recipe) -> Plan:
    """The plan; where there is none, what cannot go anyway comes first."""
    try:
        return make_plan(planned_here(recipe), runs_here=False)
    except PerlError:
        raise_all(RecipeError, refusals(recipe))
        raise


def _handover(recipe: Recipe, plan: Plan) -> Handover:
    saved = find_adapter(recipe.peft.adapter, recipe.model.name) if recipe.peft.adapter else None
    how = continued_adaptation(recipe.peft, saved.config, own_method(saved)) if saved else adaptation(recipe.peft)
    heldout = plan.problems.heldout if recipe.eval.enabled else None
    most = recipe.eval.limit_of_heldout
    if heldout is not None and most is not None:
        heldout = heldout.select(range(min(most, len(heldout))))
    return Handover(
        recipe=recipe,
        arguments=plan.arguments,
        train=plan.problems.train,
        heldout=heldout,
        tokenizer=plan.tokenizer,
        adapter=how.config,
        saved=saved,
        steps=plan.steps,
        longest_prompt=plan.longest_prompt,
        own_names=plan.problems.own_names,
    )


def _fingerprint(plan: Plan) -> str | None:
    """Of the base, where reading it costs little; the way back compares it where it is known."""
    if 4 * plan.total_parameters > _LARGEST_READ:
        return None
    section = plan.recipe.model.model_copy(update={"dtype": "float32"})
    return source_fingerprint(load_base(section, plan.arguments.device, "ddp"))
