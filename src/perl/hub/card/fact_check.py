"""Do the published files of an adapter say the same?

perl_run.json, adapter_config.json, perl_recipe.yaml, metrics.jsonl -> contradictions, a line each

What a run reports of itself is compared with what was requested, what was saved and what was logged.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from peft import PeftConfig

from perl.algorithms.critic_settings import CRITIC, CRITIC_ADAPTER, IN_REWARD, PENALTY, critic_rate, shown_critic
from perl.algorithms.estimators import ADVANTAGES
from perl.algorithms.named import ALGORITHMS
from perl.algorithms.reading import penalised
from perl.errors import Mistake, PerlError
from perl.hub.card.fact_form import showable_settings
from perl.hub.card.facts import METRICS, PUBLIC_RECIPE
from perl.hub.card.form import shown as cut
from perl.hub.card.names import shown
from perl.hub.card.run_facts import RUN_FACTS, RunFacts
from perl.methods.registry import METHODS, Method
from perl.methods.settings import resolved_settings
from perl.policy.saved.adapter import CONFIG
from perl.policy.teacher import ADAPTER_NAME
from perl.recipe import Recipe
from perl.recipe.train_fields import train_fields

_AGAIN = "perl push writes both anew"
_NOT_SHOWN = ("version", "perl")
_WORDS = {
    "repo_id": "repository",
    "data_version": "version of the data",
    "step": "optimizer steps",
    "ratio_level": "importance ratio",
    "trainable_parameters": "numbers of parameters",
    "total_parameters": "numbers of parameters",
    "seconds": "wall time",
    "reload_difference": "round trip",
    "chat": "form of the questions",
}


def contradictions(
    run: RunFacts, config: PeftConfig | None, recipe: Recipe | None, rows: Sequence[Mapping[str, Any]]
) -> list[Mistake]:
    """Where ``perl_run.json`` says something else than another file.

    Args:
        run: From ``perl_run.json``.
        config: The adapter's; None: there is none.
        recipe: The run's; None: there is none.
        rows: Of the log; those after the adapter's step are of a training that went on.
    """
    found = [
        Mistake(f"says {cut(str(said))}, {file} says {cut(str(right))}", f"{RUN_FACTS}: {key}", _AGAIN)
        for key, said, file, right in _held(run, config, recipe)
        if said != right
    ]
    return found + _of_log(run, recipe, rows)


def only_reported(
    run: RunFacts, config: PeftConfig | None, recipe: Recipe | None, rows: Sequence[Mapping[str, Any]]
) -> list[str]:
    """What ``perl_run.json`` says and no other file does, for people; arguments as above."""
    held = {key for key, *_ in _held(run, config, recipe)}
    held |= {"step"} if any(row.get("step") is not None for row in rows) else set()
    known = [fact for fact, value in run if fact not in (*_NOT_SHOWN, *held) and value not in (None, [], {})]
    found = [_WORDS.get(fact, fact) for fact in known if fact != "settings"]
    settings = [name for name in run.settings if f"settings.{name}" not in held]
    return list(dict.fromkeys([*found, *([f"settings ({', '.join(settings)})"] if settings else [])]))


def _held(run: RunFacts, config: PeftConfig | None, recipe: Recipe | None) -> Iterator[tuple[str, object, str, object]]:
    """Key, what is said of it, the file that it is compared with, and what that says."""
    if config is not None:
        yield from _of_config(run, config)
    if recipe is not None:
        yield from _of_recipe(run, recipe)


def _of_config(run: RunFacts, config: PeftConfig) -> Iterator[tuple[str, object, str, object]]:
    yield "base", run.base, CONFIG, shown(str(config.base_model_name_or_path or run.base))
    yield "revision", run.revision, CONFIG, config.revision
    method = METHODS.get(run.method or "")
    if method is None:
        return
    yield "method", method.config, CONFIG, type(config).__name__
    if method.starts:  # whose first half of the rank is the base's, moved into the adapter when it was saved
        return
    for setting in method.settings:
        name = method.arguments.get(setting, setting)
        if setting in run.settings and setting != "target_modules" and hasattr(config, name):
            yield f"settings.{setting}", run.settings[setting], CONFIG, getattr(config, name)


def _of_recipe(run: RunFacts, recipe: Recipe) -> Iterator[tuple[str, object, str, object]]:
    train, peft = recipe.train, recipe.peft
    asked = {"seed": "seed", "loss": "loss_type", "ratio_level": "importance_sampling_level"}
    for fact, name in asked.items():
        said = getattr(run, fact)
        if said is not None:
            yield fact, said, PUBLIC_RECIPE, train.get(name, _default(name))
    if run.algorithm is not None or recipe.algorithm is not None:
        row = ALGORITHMS.get(recipe.algorithm or "")
        yield "algorithm", run.algorithm, PUBLIC_RECIPE, recipe.algorithm
        yield "overridden", run.overridden, PUBLIC_RECIPE, row.overridden(train) if row else {}
    yield "base", run.base, PUBLIC_RECIPE, shown(recipe.model.name)
    if run.quantization is not None or recipe.model.quantization is not None:
        yield "quantization", run.quantization, PUBLIC_RECIPE, recipe.model.quantization
    yield from _of_adapter(run, recipe)
    if "KL coefficient (beta)" in run.settings:
        beta = train.get("beta", _default("beta"))
        yield "settings.KL coefficient (beta)", run.settings["KL coefficient (beta)"], PUBLIC_RECIPE, beta
    method = METHODS.get(run.method or "")
    rate = train.get("learning_rate") or (method.learning_rate if method else None)
    if rate is not None and "learning rate" in run.settings and peft.type is None:
        yield "settings.learning rate", run.settings["learning rate"], PUBLIC_RECIPE, f"{rate:g}"
    yield from _of_critic(run, train, rate, method)
    if "optim" in train and "optimizer" in run.settings:
        yield "settings.optimizer", run.settings["optimizer"], PUBLIC_RECIPE, train["optim"]
    if "sampling" in run.settings:
        temperature = train.get("temperature", recipe.rollout.temperature)
        most = recipe.rollout.max_completion_length
        right = f"temperature {temperature:g}, at most {most} tokens"
        yield "settings.sampling", run.settings["sampling"], PUBLIC_RECIPE, right
    yield from _of_teacher(run, recipe)
    if "prompts" in run.settings or recipe.prompts.acts:
        chosen = recipe.prompts.shown if recipe.prompts.acts else None
        yield "settings.prompts", run.settings.get("prompts"), PUBLIC_RECIPE, chosen
    weights = {name.rpartition(":")[2]: setting.weight for name, setting in recipe.rewards.items()}
    said = {name.rpartition(":")[2] if name in recipe.rewards else name: w for name, w in run.rewards.items()}
    yield "rewards", said, PUBLIC_RECIPE, weights


def _of_critic(
    run: RunFacts, train: Mapping[str, Any], rate: float | None, method: Method | None
) -> Iterator[tuple[str, object, str, object]]:
    """What values were learned beside the policy, and whether rewards were less the KL divergence."""
    right = IN_REWARD if penalised(train) else None
    if right is not None or PENALTY in run.settings:
        yield f"settings.{PENALTY}", run.settings.get(PENALTY), PUBLIC_RECIPE, right
    estimator = ADVANTAGES.get(train.get("advantage_estimator", "group"))
    trained = estimator is not None and estimator.critic
    if CRITIC in run.settings and not trained:
        yield f"settings.{CRITIC}", run.settings[CRITIC], PUBLIC_RECIPE, None
    if trained and rate is not None and method is not None:
        right = shown_critic(train, critic_rate(train.get("critic_learning_rate"), rate, method.rate))
        yield f"settings.{CRITIC}", run.settings.get(CRITIC), PUBLIC_RECIPE, right
    started = train.get("critic_adapter")
    if started is not None or CRITIC_ADAPTER in run.settings:
        named = showable_settings({CRITIC_ADAPTER: started}).get(CRITIC_ADAPTER) if started else None
        yield f"settings.{CRITIC_ADAPTER}", run.settings.get(CRITIC_ADAPTER), PUBLIC_RECIPE, named


def _of_teacher(run: RunFacts, recipe: Recipe) -> Iterator[tuple[str, object, str, object]]:
    """Who teaches beside the rewards, or in their place."""
    if "teacher" in run.settings or recipe.teacher.acts:
        taught = recipe.teacher.shown if recipe.teacher.acts else None
        yield "settings.teacher", run.settings.get("teacher"), PUBLIC_RECIPE, taught
    if ADAPTER_NAME in run.settings or recipe.teacher.adapter is not None:
        named = showable_settings({ADAPTER_NAME: recipe.teacher.adapter}).get(ADAPTER_NAME)
        yield f"settings.{ADAPTER_NAME}", run.settings.get(ADAPTER_NAME), PUBLIC_RECIPE, named


def _of_adapter(run: RunFacts, recipe: Recipe) -> Iterator[tuple[str, object, str, object]]:
    """What was asked for: a method with its settings, or an adapter to go on from."""
    peft = recipe.peft
    if peft.adapter is not None or "continues" in run.settings:
        continued = showable_settings({"continues": peft.adapter}).get("continues")
        yield "settings.continues", run.settings.get("continues"), PUBLIC_RECIPE, continued
    elif peft.type is None:
        if run.method is not None:
            yield "method", run.method, PUBLIC_RECIPE, peft.method
        try:
            resolved = resolved_settings(peft)
        except PerlError:  # a method of another version
            resolved = {}
        shared = [name for name in resolved if name in run.settings]
        yield from ((f"settings.{name}", run.settings[name], PUBLIC_RECIPE, resolved[name]) for name in shared)


def _of_log(run: RunFacts, recipe: Recipe | None, rows: Sequence[Mapping[str, Any]]) -> list[Mistake]:
    """A log ends where the training ended, but for the steps that its interval leaves out."""
    every = [int(row["step"]) for row in rows if row.get("step") is not None]
    steps = [step for step in every if run.step is None or step <= run.step]
    found = []
    between = logging_interval(recipe)
    if steps and run.step is not None:
        thinned = max((b - a for a, b in pairwise(steps)), default=1)
        if run.step - steps[-1] >= max(between or run.step, thinned):
            message = f"says {run.step}, {METRICS} ends at step {steps[-1]}"
            found.append(Mistake(message, f"{RUN_FACTS}: step", _AGAIN))
    if steps and between is not None and steps[0] > between:
        found.append(Mistake(f"begins at step {steps[0]}", METRICS, _AGAIN))
    if any(later < earlier for earlier, later in pairwise(every)):
        found.append(Mistake("its steps are not in order", METRICS, _AGAIN))
    most = recipe.train.get("max_steps") if recipe else None
    for step, file in ((run.step, f"{RUN_FACTS}: step"), (every[-1] if every else None, METRICS)):
        if most and step is not None and step > most:
            message = f"goes to step {step}, {PUBLIC_RECIPE} says train.max_steps {most}"
            found.append(Mistake(message, file, _AGAIN))
    tokens = [row["num_tokens"] for row in rows if row.get("num_tokens") is not None]
    if any(later < earlier for earlier, later in pairwise(tokens)):
        found.append(Mistake("its num_tokens, which only grow, shrink", METRICS, _AGAIN))
    return found


def logging_interval(recipe: Recipe | None) -> int | None:
    """Steps between two rows of the log, as a recipe asks for them; None: it does not say."""
    if recipe is None or str(recipe.train.get("logging_strategy", "steps")) != "steps":
        return None
    asked = float(recipe.train.get("logging_steps", _default("logging_steps")))
    if asked >= 1:
        return int(asked)
    most = recipe.train.get("max_steps")  # of which it is a part; the trainer counts the steps of epochs by the data
    return math.ceil(most * asked) if most else None


def _default(name: str) -> Any:  # noqa: ANN401 (of any argument)
    """What the trainer takes where a recipe is silent."""
    return train_fields()[name].default
