"""What comes before weights are loaded: the recipe read, the run planned, what it needs tried.

RECIPE -> Recipe -> Plan
"""

import logging
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from perl.algorithms.named import KEY
from perl.errors import MissingExtraError, PerlError, RecipeError, raise_all
from perl.hub.push.requests import check_login, publishing_mistakes
from perl.launch.meeting import check_joined
from perl.launch.together import ProcessGroup, log_on_main, wait_until
from perl.methods.registry import METHODS
from perl.policy.sharding import check_strategy
from perl.recipe import Recipe
from perl.recipe.agent_section import AgentSection
from perl.recipe.optional_packages import missing_packages
from perl.recipe.recipe import is_first_process, world_size
from perl.recipe.sections import FIELD_OF_SETTING
from perl.rollouts.open_engine import check_servers
from perl.rollouts.vllm.release import check_engine
from perl.run.folder import Run, follow_run, open_run
from perl.run.host import host
from perl.run.joint_work import joined
from perl.trainer.arguments.argument_checks import check_teacher, step_mistakes
from perl.trainer.arguments.config import PeftRLConfig
from perl.trainer.arguments.derived_fields import APPLIED
from perl.training.checked_recipe import checked_recipe
from perl.training.inputs import read_inputs
from perl.training.plan import Plan, make_plan
from perl.training.reward_trial import check_rewards_work
from perl.training.stored_run import bring, check_kept

logger = logging.getLogger("perl")


def read_recipe(
    source: str | Path | Mapping[str, Any] | Recipe,
    overrides: Sequence[str] = (),
    output_dir: str | Path | None = None,
    *,
    on_verl: bool = False,
) -> Recipe:
    """The recipe with everything checked that needs neither data nor model, method and reward names included.

    Args:
        source: A recipe file, the name of a packaged one, a mapping, or a recipe.
        overrides: ``section.key=value``.
        output_dir: The run folder; None: the recipe's.
        on_verl: Whether it may be one that verl trains, which this package's own trainer cannot.

    Raises:
        RecipeError: With every mistake found.
    """
    recipe = checked_recipe(source, overrides, (publishing_mistakes,))
    if recipe.engine.on_verl and not on_verl:
        what = "verl: verl trains it, in processes that it starts itself; here is this package's own trainer"
        raise recipe.located(RecipeError(what, "engine.name", "perl train RECIPE, or perl export-verl RECIPE -o DIR"))
    peft, method = recipe.peft, METHODS.get(recipe.peft.method if recipe.peft.type is None else "")
    trains_the_bases = peft.type == "LN_TUNING" or bool(peft.kwargs.get("modules_to_save"))
    trains_the_bases |= method is not None and method.trains_the_bases
    if recipe.model.dtype == "auto" and trains_the_bases:  # tensors of the base, or copies of them, must be float32
        recipe = replace(recipe, model=recipe.model.model_copy(update={"dtype": "float32"}))
    return recipe if output_dir is None else recipe.with_train(output_dir=str(output_dir))


def prepare(recipe: Recipe, *, engine_here: bool = True) -> Plan:
    """Plans a run of this process, or of the processes that share it.

    Args:
        recipe: Of the run.
        engine_here: False: to be looked at; what writes rollouts may be missing here.

    Raises:
        PerlError: The data, the model or an optional package is not what the recipe needs.
    """
    if recipe.batch.world_size == 1:  # one process holds everything, whatever strategy its recipe names
        recipe = replace(recipe, engine=recipe.engine.model_copy(update={"strategy": "ddp"}))
    with log_on_main(), recipe.locating():
        return plan_of(recipe, engine_here=engine_here)


def plan_of(recipe: Recipe, *, runs_here: bool = True, engine_here: bool = True) -> Plan:
    """The plan of a recipe as it stands.

    Args:
        recipe: Of the run.
        runs_here: False: on another machine, so that packages may be missing here.
        engine_here: False: what writes rollouts may be missing here.

    Raises:
        PerlError: Whatever is wrong, before any weights are loaded.
    """
    arguments = planned_arguments(recipe, runs_here=runs_here, engine_here=engine_here)
    return make_plan(recipe, arguments, read_inputs(recipe, arguments, runs_here=runs_here))


def planned_arguments(recipe: Recipe, *, runs_here: bool = True, engine_here: bool = True) -> PeftRLConfig:
    """The trainer's arguments, before anything is read; :func:`plan_of` says which they take, and what is raised."""
    if runs_here:
        raise_all(MissingExtraError, [*missing_packages(recipe.train)])
        if engine_here:
            check_engine(recipe.rollout)
    else:
        recipe = recipe.with_train(report_to=None)  # another machine has a recipe's trackers or not
    arguments = training_arguments(recipe, str(recipe.output_dir / "checkpoints"))
    check_teacher(arguments)
    # Of settings of our step beside those that TRL's step is run for.
    found = [
        one if one.where == "teacher" else replace(one, where=f"train.{one.where}") for one in step_mistakes(arguments)
    ]
    raise_all(RecipeError, found)
    return arguments


def training_arguments(recipe: Recipe, output_dir: str) -> PeftRLConfig:
    """The trainer's arguments of a recipe.

    Args:
        recipe: Of the run.
        output_dir: Where checkpoints go.

    Raises:
        RecipeError: TRL or transformers refuse a combination of fields.
    """
    generations = recipe.batch.num_generations
    stands_for = recipe.batch.world_size // world_size()  # processes: a plan is made by one before there are several
    derived = {
        "num_generations": generations,
        "per_device_train_batch_size": recipe.batch.per_device_train_batch_size * max(1, stands_for),
        "gradient_accumulation_steps": recipe.batch.gradient_accumulation_steps,
        "reward_weights": [setting.weight for setting in recipe.rewards.values()],
        "use_cpu": recipe.engine.device == "cpu",
        "strategy": recipe.engine.strategy,
        "shards": str(recipe.engine.shards),
        "disable_tqdm": True,
        **{
            FIELD_OF_SETTING[section, name]: value
            for section in ("peft", "rollout", "teacher", "prompts")
            for name, value in getattr(recipe, section).model_dump().items()
        },
        **_agent_arguments(recipe.agent),
        "rollout_sync_folder": recipe.rollout.sync_folder or str(recipe.output_dir / "sync"),
    }
    asked = {name: value for name, value in recipe.train.items() if name != "prompts_per_step"}
    asked |= {KEY: recipe.algorithm, APPLIED: recipe.algorithm}  # whose fields are in train
    # A group must not be split between evaluation batches.
    rows = generations if generations > 1 else recipe.batch.per_device_train_batch_size
    # Trackers name a run after its folder, in a project that is named after the recipe.
    tracked_as = {"run_name": recipe.output_dir.resolve().name, "project": recipe.name}
    defaults = {"per_device_eval_batch_size": rows, **tracked_as}
    try:
        arguments = PeftRLConfig(**{**defaults, **asked, **derived, "output_dir": output_dir})
    except PerlError as error:
        fields = PeftRLConfig.__dataclass_fields__
        places = {name: f"train.{name}" for name in fields}
        places |= {"strategy": "engine.strategy", "shards": "engine.shards", "peft_method": "peft.method"}
        mirrored = ("teacher", "prompts")
        places |= {name: f"{part}.{key}" for (part, key), name in FIELD_OF_SETTING.items() if part in mirrored}
        raise error.moved(lambda where: places.get(where, where)) from None
    except (ValueError, TypeError) as error:
        named = [name for name in asked if re.search(rf"\b{name}\b", str(error))]
        raise RecipeError(str(error), ".".join(["train", *named[:1]])) from error
    arguments.of_a_recipe = True  # whose plan says what is trained
    return arguments


def _agent_arguments(section: AgentSection) -> dict[str, Any]:
    """The trainer's arguments of conversations."""
    if not section.acts:
        return {}
    own = {field: getattr(section, key) for (part, key), field in FIELD_OF_SETTING.items() if part == "agent"}
    return own | {"max_tool_calling_iterations": section.max_turns - 1}


@contextmanager
def opened_run(
    recipe: Recipe, plan: Plan, group: ProcessGroup, resume_from: str | None = None
) -> Iterator[tuple[Run, bool]]:
    """The run's folder, held by the main process, and whether something is left to do of the run.

    Args:
        recipe: As it is kept in the folder.
        plan: Of the run.
        group: The processes that run it; what the end of one makes of the work inside is raised as that.
        resume_from: Store that the run is brought from; None: none.

    Raises:
        PerlError: The processes are not those of the plan, or share the work in a way that is not proven; the folder
            cannot be used; a reward, a login or a server does not work.
    """
    with plan.recipe.locating():
        check_joined(plan.arguments.world_size)
        check_strategy(plan.arguments)
    every = joined()
    with ExitStack() as opened:
        with every.failing_together():
            if resume_from is not None and every.main:
                bring(resume_from, recipe)
            run = opened.enter_context(open_run(recipe)) if every.main else follow_run(recipe)
        goes_on = every.by_main(lambda: _left_to_do(plan, run))
        opened.enter_context(group.named())
        if goes_on:
            group.share(run)
        elif every.main:
            logger.info("done before: %s", run.path)
        yield run, goes_on


def seen_done(run: Run) -> Run:
    """The run, once this process sees in its folder that the main one, which is done, has called it so."""

    def is_done() -> bool:
        run.facts.update(Run.read(run.path).facts)
        return run.status == "done"

    if not is_first_process() and not host().keeps_files:
        wait_until(is_done)
    return run


def _left_to_do(plan: Plan, run: Run) -> bool:
    """Whether the run is not done; then its rewards are tried, and what must answer before weights are loaded does."""
    rollout = plan.recipe.rollout
    if run.status == "done":
        return False
    with plan.recipe.locating():
        check_rewards_work(plan.recipe, plan.problems)
        check_login(plan.recipe.hub)
        check_kept(plan.recipe, run)
        if rollout.capabilities.needs_servers:
            check_servers(rollout, plan.longest_text, plan.form)
        # Servers that may still use what is in there come first; see the engine that is opened for them.
        elif rollout.sync_folder is None:
            shutil.rmtree(run.path / "sync", ignore_errors=True)
    return True
