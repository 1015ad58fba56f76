"""What comes before weights are loaded: the recipe read, the run planned, what it needs tried.

RECIPE -> Recipe -> Plan
"""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from perl.errors import RecipeError
from perl.hub.push.requests import check_login, publishing_mistakes
from perl.launch.meeting import check_joined
from perl.methods.registry import METHODS
from perl.policy.sharding import check_strategy
from perl.recipe import Recipe
from perl.recipe.sections import PeftSection
from perl.rollouts.open_engine import check_servers
from perl.run.devices import use_threads
from perl.run.folder import Run
from perl.training.checked_recipe import checked_recipe, located
from perl.training.plan import Plan, make_plan
from perl.training.reward_trial import check_rewards_work


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
    if recipe.model.dtype == "auto" and _trains_the_bases(recipe.peft):
        recipe = replace(recipe, model=recipe.model.model_copy(update={"dtype": "float32"}))
    return recipe if output_dir is None else recipe.with_train(output_dir=str(output_dir))


def _trains_the_bases(peft: PeftSection) -> bool:
    """Whether the recipe trains tensors of the base, or copies of them; they must be float32."""
    method = METHODS.get(peft.method if peft.type is None else "")
    named = peft.type == "LN_TUNING" or bool((peft.kwargs or {}).get("modules_to_save"))
    return named or (method is not None and method.trains_the_bases)


def prepare(recipe: Recipe, *, engine_here: bool = True) -> Plan:
    """Sets the process's threads from the recipe's engine section, and plans the run.

    Args:
        recipe: Of the run.
        engine_here: False: to be looked at; what writes rollouts may be missing here.

    Raises:
        PerlError: The data, the model or an optional package is not what the recipe needs.
    """
    if recipe.engine.threads is not None:
        use_threads(recipe.engine.threads)
    with located(recipe):
        return make_plan(_as_shared(recipe), engine_here=engine_here)


def _as_shared(recipe: Recipe) -> Recipe:
    """The recipe as its processes share the work: one alone holds everything, whatever strategy it names."""
    if recipe.batch.world_size > 1:
        return recipe
    return replace(recipe, engine=recipe.engine.model_copy(update={"strategy": "ddp"}))


def check_processes(plan: Plan) -> None:
    """Refuses processes that are not those of the plan, or a way to share the work that is not proven.

    Raises:
        PerlError: They are not.
    """
    with located(plan.recipe):
        check_joined(plan.arguments.world_size)
        check_strategy(plan.arguments)


def left_to_do(plan: Plan, run: Run) -> bool:
    """Whether something is left to do of a run; then all is ready for it.

    Its rewards have been tried, what must answer before weights are loaded does, and what a kill left for servers is
    cleared.

    Raises:
        PerlError: A reward, a login or a server does not work.
    """
    rollout = plan.recipe.rollout
    if run.status == "done":
        return False
    with located(plan.recipe):
        check_rewards_work(plan.recipe, plan.problems)
        check_login(plan.recipe.hub)
        if rollout.capabilities.needs_servers:
            check_servers(rollout, plan.longest_text, plan.form)
        # Servers that may still use what is in there come first; see the engine that is opened for them.
        elif rollout.sync_folder is None:
            shutil.rmtree(run.path / "sync", ignore_errors=True)
    return True
