"""Is a recipe one that can be trained, and that of the adapter which lies beside it?

recipe, perl_run.json, config, results -> contradictions, a line each; keys that nothing repeats
"""

import re
from dataclasses import fields
from fnmatch import fnmatchcase
from typing import Any

from peft import PeftConfig

from perl.algorithms.kl_place import KL_IN_REWARD
from perl.data import heldout_name
from perl.errors import Mistake, RecipeError
from perl.evaluation.scoring.results import Results, is_held_out
from perl.hub.card.facts import TRAINED_BY, RunFacts
from perl.hub.card.form import shown
from perl.hub.card.names import is_data_name
from perl.hub.card.published import PUBLIC_RECIPE
from perl.methods.registry import METHODS
from perl.methods.settings import adaptation
from perl.recipe import Recipe, load_recipe
from perl.recipe.batch_plan import NUMBERS
from perl.run.tables import as_text, flat

# Keys that are facts of a run, hence compared with what it says.
_REPEATED = (
    *("algorithm", "model.name", "model.quantization", "peft.[!k]*", "rewards.*.weight", "teacher.[!hs]*"),
    *("prompts.[!c]*", "prompts.curriculum_*", "rollout.temperature", "rollout.max_completion_length"),
    *("train.seed", "train.loss_type", "train.importance_sampling_level", "train.learning_rate", "train.beta"),
    *("train.optim", "train.critic_*", "train.gae_*", "train.value_clip", f"train.{KL_IN_REWARD}"),
    *(f"train.{name}" for name in NUMBERS),
)
# Fields of an adapter's config that no recipe gives: the base's, or known once the adapter is on it.
_NOT_ASKED = {
    *("base_model_name_or_path", "revision", "inference_mode", "auto_mapping", "task_type", "peft_version"),
    *("target_modules", "rank_pattern", "total_step", "tinit", "tfinal", "deltaT"),
}
_PART = re.compile(r"[\w.,+:\[\]%/-]{1,100}")


def check_recipe(
    recipe: Recipe, run: RunFacts, config: PeftConfig | None, results: Results | None
) -> tuple[list[Mistake], list[str]]:
    """Where a recipe says something else than config and results, and the keys that no other file repeats.

    Args:
        recipe: Whose other keys are facts of the run.
        run: From ``perl_run.json``.
        config: Of the adapter; None: there is none.
        results: Of the adapter; None: there are none.
    """
    values, usual = (flat(one.as_dict()) for one in (recipe, load_recipe({})))
    known = _of_results(recipe, results) if results is not None else {}
    # Of the last adapter of a run alone, which need not be the last of another program.
    if run.seconds is not None and TRAINED_BY not in run.settings and "train.max_steps" in values:
        known["train.max_steps"] = run.step
    said: dict[str, tuple[Any, Any]] = {key: (values[key], as_text(right)) for key, right in known.items()}
    found, repeated, method = _of_data(recipe), [*_REPEATED, *known], METHODS.get(run.method or "")
    # What an adapter starts on may be moved into it when it is saved.
    if config is not None and recipe.peft.adapter is None and not (method and method.starts):
        try:
            given = adaptation(recipe.peft).config
        except RecipeError as error:
            return [*error.moved(lambda where: f"{PUBLIC_RECIPE}: {where}").mistakes], []
        names = [one.name for one in fields(config) if one.name not in _NOT_ASKED]
        said |= {f"peft: {name}": (getattr(given, name, None), getattr(config, name)) for name in names}
        repeated.append("peft.*")
    for key, (asked, right) in said.items():
        if asked != right:
            what = f"says {shown(str(asked))}, the other files say {shown(str(right))}"
            found.append(Mistake(what, f"{PUBLIC_RECIPE}: {key}", "perl push writes it anew"))
    alone = [key for key, value in values.items() if value != usual.get(key)]
    return found, [key for key in alone if not any(fnmatchcase(key, pattern) for pattern in repeated)]


def _of_results(recipe: Recipe, results: Results) -> dict[str, Any]:
    """Key -> what the scores say of it: those that the run itself drew were drawn as its recipe asks."""
    names = {f"eval.{name}": name for name in ("temperature", "top_p", "k", "seed")}
    names = names | {"data.system_prompt": "system_prompt"} if results.protocol.preset == "recipe" else {}
    found = {key: getattr(results.protocol, name) for key, name in names.items()}
    data, held_out = recipe.data.eval or recipe.data.train, {t.name for t in results.tasks if is_held_out(t.title)}
    if held_out:
        key = "data.train.name" if recipe.data.eval is None else "data.eval.name"
        found[key] = data.name if held_out == {heldout_name(recipe.data)} else ", ".join(held_out)
    return found


def _of_data(recipe: Recipe) -> list[Mistake]:
    """Data by a name, or a part of it, that no card can show."""
    sets = {"train": recipe.data.train} | ({"eval": recipe.data.eval} if recipe.data.eval is not None else {})
    texts = [(role, data.name) for role, data in sets.items() if not is_data_name(data.name)]
    parts = [(role, part) for role, data in sets.items() for part in (data.subset, data.split, data.revision)]
    texts += [(role, part) for role, part in parts if part is not None and _PART.fullmatch(part) is None]
    hint = "sandbox:TASK, user/name, or a file's name without a space: rename it"
    where = f"{PUBLIC_RECIPE}: data"
    return [Mistake(f"names what no card can show: {shown(text)}", f"{where}.{role}", hint) for role, text in texts]
