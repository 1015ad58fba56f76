"""Does the record of a run say what the other published files say?

perl_run.json, config, recipe, results, header of the weights, log -> contradictions, a line each

What these know of a record is built from them anew and compared with it; a log must fit its steps.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from peft import PeftConfig

from perl.algorithms.critic_settings import CRITIC, CRITIC_ADAPTER, IN_REWARD, PENALTY, critic_rate, shown_critic
from perl.algorithms.estimators import ADVANTAGES
from perl.algorithms.kl_place import off_reward
from perl.algorithms.named import ALGORITHMS
from perl.algorithms.train_fields import train_fields
from perl.errors import Mistake
from perl.evaluation.scoring.protocol import asking_of
from perl.evaluation.scoring.results import Results
from perl.hub.card.facts import RUN_FACTS, TRAINED_BY, RunFacts, processes_of, showable_settings
from perl.hub.card.form import shown
from perl.hub.card.names import published_label
from perl.hub.card.published import (
    METRICS,
    PUBLIC_RECIPE,
    SCORES,
    Files,
    config_in,
    header_in,
    log_in,
    public_recipe_in,
    results_in,
)
from perl.hub.card.recipe_check import check_recipe
from perl.methods.registry import METHODS, Method
from perl.methods.settings import method_of, resolved_settings
from perl.policy.saved.adapter import BASE_FINGERPRINT, BASE_QUANTIZATION, CONFIG, START, WEIGHTS
from perl.policy.teacher import ADAPTER_NAME
from perl.recipe import Recipe
from perl.recipe.batch_plan import NUMBERS, plan_batch

_AGAIN = "perl push writes both anew"
_SETTING = "settings."
# PEFT saves fewer numbers of these than it trains.
_COMPRESSED = {"AdaLoraConfig", "VBLoRAConfig"}


def contradictions(run: RunFacts, files: Files, says: Collection[str] = ()) -> tuple[list[Mistake], list[str]]:
    """Where ``perl_run.json`` or the recipe says something else than another file, and what no other file says.

    Args:
        run: From ``perl_run.json``.
        files: Of the adapter.
        says: Facts that are stated; empty: all.

    Raises:
        PerlError: One of them cannot be read.
    """
    recipe, rows, config, results = public_recipe_in(files), log_in(files), config_in(files), results_in(files)
    remarks, numbers = header_in(files)
    found = list[Mistake]()
    held = {"version", "perl", "settings"} | ({"step"} if rows else set())
    for file, facts in {
        CONFIG: _of_config(run, config) if config is not None else {},
        PUBLIC_RECIPE: _of_recipe(run, recipe) if recipe is not None else {},
        SCORES: _of_results(run, recipe, results) if results is not None else {},
        WEIGHTS: _of_header(remarks),
    }.items():
        known = {fact: right for fact, right in facts.items() if not says or fact.partition(".")[0] in says}
        held |= known.keys()
        for fact, right in known.items():
            if (said := _said(run, fact)) != right:
                message = f"says {shown(str(said))}, {file} says {shown(str(right))}"
                found.append(Mistake(message, f"{RUN_FACTS}: {fact}", _AGAIN))
    reported = [
        name.replace("_", " ") for name, value in vars(run).items() if name not in held and value not in (None, (), {})
    ]
    settings = [name for name in run.settings if f"{_SETTING}{name}" not in held]
    reported += [f"settings ({', '.join(settings)})"] if settings else []
    trained = run.trainable_parameters or 0
    if numbers is not None and trained > numbers and type(config).__name__ not in _COMPRESSED:
        what = f"says {trained:,}, {WEIGHTS} has {numbers:,} numbers"
        found.append(Mistake(what, f"{RUN_FACTS}: trainable_parameters", _AGAIN))
    found += _of_log(run, recipe, rows)
    if recipe is not None:
        wrong, alone = check_recipe(recipe, run, config, results)
        found, reported = found + wrong, reported + ([f"recipe ({', '.join(alone)})"] if alone else [])
    return found, reported


def _said(run: RunFacts, fact: str) -> object:
    name = fact.removeprefix(_SETTING)
    return run.settings.get(name) if name != fact else getattr(run, fact)


def _of_header(remarks: Mapping[str, Any]) -> dict[str, Any]:
    """Fact -> what the weights say; those that another program saved name no base."""
    quantization = {"quantization": remarks.get(BASE_QUANTIZATION)} if BASE_FINGERPRINT in remarks else {}
    return quantization | ({"method": remarks[START]} if START in remarks else {})


def _of_results(run: RunFacts, recipe: Recipe | None, results: Results) -> dict[str, Any]:
    """The base that was scored: the one that the adapter was trained on, at its commit, quantised alike.

    Questions are chat messages where it has a template for them, unless the recipe says otherwise.
    """
    subject = results.subject
    known: dict[str, Any] = {
        "base": published_label(str(subject.get("base"))),
        "quantization": subject.get("base_quantization"),
    }
    if run.chat is not None and "chat_template" in subject and not asking_of(subject):
        asked = recipe.data.chat if recipe is not None else None
        known["chat"] = subject["chat_template"] is not None if asked is None else asked
    commit = subject.get("base_revision")
    return known | ({"revision": commit} if None not in (commit, run.revision) else {})


def _of_config(run: RunFacts, config: PeftConfig) -> dict[str, Any]:
    known = {"base": published_label(str(config.base_model_name_or_path or run.base)), "revision": config.revision}
    method, own = METHODS.get(run.method or ""), method_of(config)
    if method is None:
        return known
    if method.config == own.config and method.starts:  # moved into the adapter when it was saved
        return {**known, "method": method.name}
    same = (method.config, method.fixed) == (own.config, own.fixed)  # how it trains no config tells
    names = {ours: method.arguments.get(ours, ours) for ours in run.settings if ours != "target_modules"}
    settings = {f"{_SETTING}{o}": getattr(config, name) for o, name in names.items() if hasattr(config, name)}
    return {**known, "method": method.name if same else own.name, **settings}


def _of_recipe(run: RunFacts, recipe: Recipe) -> dict[str, Any]:
    train, row = recipe.train, ALGORITHMS.get(recipe.algorithm or "")
    named = {"seed": "seed", "loss": "loss_type", "ratio_level": "importance_sampling_level"}
    weights = {name.rpartition(":")[2]: setting.weight for name, setting in recipe.rewards.items()}
    rewarded = {name.rpartition(":")[2] if name in recipe.rewards else name: w for name, w in run.rewards.items()}
    known: dict[str, Any] = {
        **{fact: train.get(name, _default(name)) for fact, name in named.items()},
        "algorithm": recipe.algorithm,
        "overridden": row.overridden(train) if row else {},
        "base": published_label(recipe.model.name),
        "quantization": recipe.model.quantization,
        # A reward of one's own is called by its function, here or there with its file.
        "rewards": run.rewards if rewarded == weights else weights,
    }
    if recipe.peft.adapter is None and recipe.peft.type is None:
        known["method"] = recipe.peft.method
    return known | {f"{_SETTING}{name}": value for name, value in _recipe_settings(recipe, run).items()}


def _recipe_settings(recipe: Recipe, run: RunFacts) -> dict[str, Any]:
    """What a run of a recipe says of its settings, as far as the recipe alone tells; None: it says nothing."""
    train, peft, teacher, method = recipe.train, recipe.peft, recipe.teacher, METHODS.get(run.method or "")
    rate = train.get("learning_rate") or (method.learning_rate if method else None)
    temperature = train.get("temperature", recipe.rollout.temperature)
    found = {
        "continues": peft.adapter,
        "teacher": teacher.shown if teacher.acts else None,
        ADAPTER_NAME: teacher.adapter,
        "prompts": recipe.prompts.shown if recipe.prompts.acts else None,
        "base loaded as": recipe.model.quantization,
        "KL coefficient (beta)": train.get("beta", _default("beta")),
        "sampling": f"temperature {temperature:g}, at most {recipe.rollout.max_completion_length} tokens",
        **_critic_settings(train, rate, method),
    }
    if TRAINED_BY not in run.settings:  # by another program, which divides its batches by other rules
        numbers = {name: train.get(name) for name in NUMBERS}
        found["batch"] = str(plan_batch(**numbers, world_size=processes_of(run.settings)))
    if rate is not None and peft.type is None:
        found["learning rate"] = f"{rate:g}"
    if "optim" in train:
        found["optimizer"] = train["optim"]
    if peft.adapter is None and peft.type is None:
        found |= resolved_settings(peft)
    shown_here = showable_settings(found)
    return {name: shown_here.get(name) for name in found}


def _critic_settings(train: Mapping[str, Any], rate: float | None, method: Method | None) -> dict[str, Any]:
    """What values were learned beside the policy, and whether rewards were less the KL divergence."""
    estimator = ADVANTAGES.get(train.get("advantage_estimator", "group"))
    found = {PENALTY: IN_REWARD if off_reward(train) else None, CRITIC_ADAPTER: train.get("critic_adapter")}
    if estimator is None or not estimator.critic:
        return {**found, CRITIC: None}
    if rate is None or method is None:
        return found
    return {**found, CRITIC: shown_critic(train, critic_rate(train.get("critic_learning_rate"), rate, method.rate))}


def _of_log(run: RunFacts, recipe: Recipe | None, rows: Sequence[Mapping[str, Any]]) -> Iterator[Mistake]:
    """A log begins and ends where the training did, but for the steps that its interval leaves out."""
    every = [int(row["step"]) for row in rows if row.get("step") is not None]
    steps = [step for step in every if run.step is None or step <= run.step]  # later ones: the training went on
    between = _logging_interval(recipe)
    if not steps:
        if between is not None and run.step and run.step >= between:
            what = "has no steps" if rows else "is absent or empty"
            yield Mistake(f"{what}, though there is a recipe", METRICS, "perl push sends it")
        return
    thinned = max((b - a for a, b in pairwise(steps)), default=1)
    if run.step is not None and run.step - steps[-1] >= max(between or run.step, thinned):
        yield Mistake(f"says {run.step}, {METRICS} ends at step {steps[-1]}", f"{RUN_FACTS}: step", _AGAIN)
    if between is not None and steps[0] > between:
        yield Mistake(f"begins at step {steps[0]}", METRICS, _AGAIN)
    if sorted(every) != every:
        yield Mistake("its steps are not in order", METRICS, _AGAIN)
    most = recipe.train.get("max_steps") if recipe else None
    if most and max(every[-1], run.step or 0) > most:
        yield Mistake(f"goes on after step {most}, train.max_steps of {PUBLIC_RECIPE}", METRICS, _AGAIN)


def _logging_interval(recipe: Recipe | None) -> int | None:
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
