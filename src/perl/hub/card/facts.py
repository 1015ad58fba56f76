"""What is known of an adapter that is shown to others, gathered from the files that are published of it.

name in the repository -> bytes; -> CardFacts

Whoever has the files has the facts, hence the card: it is rendered from them when it is written and again when it is
checked. It names no machine. A fact that is unknown is None or empty.
"""

import math
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import yaml
from peft import PeftConfig

from perl.algorithms.registry import loss_mistakes
from perl.errors import PerlError, RecipeError, first_line
from perl.evaluation.results import FIGURE, RESULTS, Results, parse_results
from perl.hub.card.names import has_hub_form, shown
from perl.hub.card.run_facts import RUN_FACTS, Licence, RunFacts, read_run_facts
from perl.methods.registry import Method, served_rank
from perl.methods.settings import method_of
from perl.policy.saved.adapter import CONFIG
from perl.policy.saved.config import read_config
from perl.recipe import Recipe, load_recipe
from perl.recipe.plain_yaml import plain_value, refuse_tags
from perl.recipe.quantisations import quantised_by
from perl.recipe.sections import DataSource
from perl.run.logs import log_rows
from perl.sandbox import is_sandbox, load_problems
from perl.zoo.catalogue import PREFIX

CURVES, PROBLEMS, PUBLIC_RECIPE = "plots/curves.png", f"eval/{FIGURE}", "perl_recipe.yaml"
"""What other files of a published adapter are called."""
METRICS, SCORES = "metrics.jsonl", f"eval/{RESULTS}"
"""Likewise."""
_COMMIT_LENGTH = 40
# What a card takes over as the run reports it.
_OF_THE_RUN = (
    *("quantization", "name", "repo_id", "method", "licence", "trainable_parameters", "total_parameters", "seed"),
    *("ratio_level", "settings", "rewards", "seconds", "hardware", "reload_difference", "versions"),
)

Files = Mapping[str, bytes | Path | None]
"""Name in the repository -> its content, or the file that holds it; None: it is there and was not read."""


@dataclass(frozen=True)
class PromptFormat:
    """How the policy was asked and what was drawn from it.

    Attributes:
        chat: Whether a question is a chat message; None: whatever the base's chat template makes of it.
        system_prompt: Message before every question.
        prompt_template: Text around the question.
        template_arguments: Further arguments of the chat template.
        sampling: Name of a setting of ``generate`` -> value.
        example: A question.
    """

    chat: bool | None = None
    system_prompt: str | None = None
    prompt_template: str | None = None
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    sampling: Mapping[str, float | int] = field(default_factory=dict)
    example: str = "What is 12 * 13?"


@dataclass(frozen=True)
class Serving:
    """How vLLM serves the adapter.

    Attributes:
        form: ``adapter`` as it is, as the ``lora`` that it is exported to, or ``merged`` into its base.
        rank: The lowest that a server can be started for; None where it is merged.
    """

    form: Literal["adapter", "lora", "merged"]
    rank: int | None = None


@dataclass(frozen=True)
class CardFacts:
    """What is known of an adapter; attributes that :class:`RunFacts` has too are described there.

    Attributes:
        base: Public name of the base; a Hub id, a sandbox name, or the last part of a path.
        dataset: Name of the training problems.
        dataset_version: Commit or hash of the training problems, with their subset and split.
        steps: Optimizer steps.
        algorithm: The loss, as in ``train.loss_type``.
        named: The algorithm, where the run names one.
        overridden: Its settings that the run has otherwise.
        reward_first: Mean reward of the first step that has one.
        reward_last: Likewise of the last.
        teacher_kl: KL divergence of policy and teacher in the first and the last step, in nats a token.
        teacher_sees: ``hint`` and ``system_prompt`` that only the teacher saw, those that there are.
        tokens: That the policy was trained on, prompts included.
        results: Scores of exactly this adapter.
        pictures: Those of its files that are pictures and exist.
        asking: How it was asked.
        serving: How vLLM serves it.
        recipe: Whether its recipe lies beside it.
        local: What that names and others do not have.
    """

    base: str
    revision: str | None = None
    quantization: str | None = None
    name: str | None = None
    repo_id: str | None = None
    method: str | None = None
    licence: Licence | None = None
    dataset: str | None = None
    dataset_version: str | None = None
    trainable_parameters: int | None = None
    total_parameters: int | None = None
    steps: int | None = None
    seed: int | None = None
    algorithm: str | None = None
    ratio_level: str | None = None
    named: str | None = None
    overridden: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    rewards: Mapping[str, float] = field(default_factory=dict)
    reward_first: float | None = None
    reward_last: float | None = None
    teacher_kl: tuple[float, float] | None = None
    teacher_sees: Mapping[str, str] = field(default_factory=dict)
    seconds: float | None = None
    tokens: int | None = None
    hardware: str | None = None
    reload_difference: float | None = None
    results: Results | None = None
    pictures: tuple[str, ...] = ()
    asking: PromptFormat | None = None
    serving: Serving | None = None
    recipe: bool = False
    local: tuple[str, ...] = ()
    checkpoints: tuple[int, ...] = ()
    tags: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def base_on_hub(self) -> bool:
        """Whether the base's name is one that the Hub can resolve."""
        return has_hub_form(self.base)

    @property
    def quantised_by(self) -> str:
        """The package that quantised the base as it was loaded; empty: it was not quantised."""
        return quantised_by(self.quantization) if self.quantization is not None else ""

    @property
    def rewarded(self) -> bool:
        """Whether a reward counts; a teacher may teach alone."""
        return _is_rewarded(self)

    @property
    def whole(self) -> bool:
        """Whether there is no adapter: the model itself was trained."""
        return self.method == "full"


def content_of(files: Files, name: str) -> bytes | None:
    """A file's bytes; None: it is not there, or was not read."""
    held = files.get(name)
    return held.read_bytes() if isinstance(held, Path) else held


def facts_from_files(files: Files) -> CardFacts:
    """What the files of a published adapter tell of it.

    Args:
        files: All of them; ``perl_run.json`` must be among them.

    Raises:
        PerlError: One of them cannot be read.
    """
    found = content_of(files, RUN_FACTS)
    if found is None:
        raise PerlError("is absent", RUN_FACTS)
    run = read_run_facts(found)
    recipe, config, results = public_recipe_in(files), config_in(files), results_in(files)
    rows = log_in(files, run.step)
    rewarded = _is_rewarded(run)  # else all are 0
    rewards = [row["reward"] for row in rows if row.get("reward") is not None and math.isfinite(row["reward"])]
    taught = [kl for row in rows if (kl := row.get("teacher/kl")) is not None and math.isfinite(kl)]
    tokens = [row["num_tokens"] for row in rows if row.get("num_tokens")]
    data = recipe.data.train if recipe else None
    base = shown(str((config.base_model_name_or_path if config else None) or run.base))
    return CardFacts(
        **{name: getattr(run, name) for name in _OF_THE_RUN},
        base=base,
        revision=config.revision if config else run.revision,
        dataset=shown(data.name) if data else run.dataset,
        dataset_version=_version(data, run.data_version) if data else None,
        steps=run.step,
        algorithm=run.loss,
        named=run.algorithm,
        overridden=run.overridden,
        reward_first=rewards[0] if rewards and rewarded else None,
        reward_last=rewards[-1] if rewards and rewarded else None,
        teacher_kl=(taught[0], taught[-1]) if taught and "teacher" in run.settings else None,
        teacher_sees=_teacher_sees(recipe) if recipe else {},
        tokens=int(tokens[-1]) if tokens else None,
        results=public_results(results, run.name or run.repo_id or base) if results else None,
        pictures=tuple(name for name in (CURVES, PROBLEMS) if name in files),
        asking=_asking(run, recipe, results) if recipe else None,
        serving=serving_of(config) if config else None,
        recipe=recipe is not None,
        local=tuple(_local_parts(recipe)) if recipe else (),
        checkpoints=tuple(run.checkpoints),
        tags=tuple(run.tags),
    )


def public_results(results: Results, name: str) -> Results:
    """Results as others may see them: under the adapter's public name, and of a base that is a path the last part.

    Args:
        results: The adapter's.
        name: What it is called.
    """
    return replace(results, subject={**results.subject, "name": name, "base": shown(str(results.subject["base"]))})


def config_in(files: Files) -> PeftConfig | None:
    """The adapter's config; None: there is none.

    Raises:
        PerlError: It is not a config of PEFT.
    """
    content = content_of(files, CONFIG)
    if content is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / CONFIG).write_bytes(content)
        try:
            return read_config(Path(folder))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            reason = f"{type(error).__name__}: {first_line(error)[:100]}"
            raise PerlError(f"is not a config of PEFT: {reason}", CONFIG) from None


def public_recipe_in(files: Files) -> Recipe | None:
    """The recipe; None: there is none.

    Raises:
        PerlError: It does not stand alone.
    """
    content = content_of(files, PUBLIC_RECIPE)
    if content is None:
        return None
    try:
        text = content.decode("utf-8")
        refuse_tags(text, PUBLIC_RECIPE)
        values = plain_value(text)
        if not isinstance(values, dict) or "extends" in values or not all(isinstance(key, str) for key in values):
            raise PerlError("is not a recipe that stands alone", PUBLIC_RECIPE, "perl push writes one")
        return load_recipe(values, checks=(loss_mistakes,))
    except RecipeError as error:
        problem = error.mistakes[0]
        raise PerlError(f"{problem.where}: {problem.message}", PUBLIC_RECIPE, problem.hint) from None
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        reason = f"{type(error).__name__}: {first_line(error)[:100]}"
        raise PerlError(f"is not plain YAML: {reason}", PUBLIC_RECIPE) from None


def results_in(files: Files) -> Results | None:
    """The scores; None: there are none.

    Raises:
        PerlError: They were not written by ``perl eval``.
    """
    content = content_of(files, SCORES)
    try:
        return parse_results(content, SCORES) if content is not None else None
    except RecursionError:
        raise PerlError("is nested too deeply", SCORES) from None


def log_in(files: Files, step: int | None = None) -> list[dict[str, Any]]:
    """What was logged, up to a step; what is no row of a log is left out."""
    rows = log_rows((content_of(files, METRICS) or b"").decode("utf-8", errors="replace"))
    return [row for row in rows if step is None or (row.get("step") or 0) <= step]


def serving_of(config: PeftConfig, method: Method | None = None) -> Serving:
    """How vLLM serves an adapter.

    Args:
        config: The adapter's.
        method: With which it is trained; None: the config is that of the saved adapter, which tells.

    Raises:
        RecipeError: The config belongs to no method that can be trained.
    """
    method = method or method_of(config)
    largest = method.update_rank(config)
    rank = served_rank(largest) if largest is not None else None
    if rank is None:
        return Serving("merged")
    return Serving("adapter" if method.delta == "lora" else "lora", rank)


def _version(data: DataSource, found: str | None) -> str | None:
    parts = [f"subset {data.subset}"] if data.subset else []
    parts += [f"split {data.split}"] if data.split else []
    if found:
        parts.append(f"revision {found}" if len(found) == _COMMIT_LENGTH else f"sha256 {found}")
    parts += [f"the first {data.limit:,} rows"] if data.limit else []
    return ", ".join(parts) or None


def _is_rewarded(facts: CardFacts | RunFacts) -> bool:
    return "teacher" not in facts.settings or any(facts.rewards.values())


def _local_parts(recipe: Recipe) -> list[str]:
    """What the recipe names that lies with its author alone: a model, data, adapters."""
    named = [recipe.model.name, recipe.data.train.name, recipe.peft.adapter, recipe.teacher.adapter]
    named += [recipe.train.get("critic_adapter"), recipe.data.eval.name if recipe.data.eval is not None else None]
    kept = [name for name in named if name is not None and not is_sandbox(name) and not name.startswith(PREFIX)]
    return list(dict.fromkeys(shown(name) for name in kept if not has_hub_form(name.partition("@")[0])))


def _teacher_sees(recipe: Recipe) -> dict[str, str]:
    """What only the teacher sees of a prompt."""
    texts = {"hint": recipe.teacher.hint, "system_prompt": recipe.teacher.system_prompt}
    return {name: text for name, text in texts.items() if text is not None}


def _asking(run: RunFacts, recipe: Recipe, results: Results | None) -> PromptFormat:
    """How training asked; what is drawn is what the scores were drawn with, where there are any."""
    drawn: Any = results.protocol if results else recipe.rollout
    longest = results.tasks[0].max_new_tokens if results and results.tasks else recipe.rollout.max_completion_length
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    sampling = {name: getattr(drawn, name) for name in names if getattr(drawn, name) is not None}
    data = recipe.data.train.name  # a question of the sandbox's is shown; those of others' data are theirs to show
    example = {"example": load_problems(data, "heldout")[0].question} if is_sandbox(data) else {}
    return PromptFormat(
        chat=run.chat if recipe.data.chat is None else recipe.data.chat,
        system_prompt=recipe.data.system_prompt,
        prompt_template=recipe.data.prompt_template,
        template_arguments=recipe.train.get("chat_template_kwargs") or {},
        sampling={**sampling, "max_new_tokens": longest},
        **example,
    )
