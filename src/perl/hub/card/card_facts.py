"""All that the card of an adapter says, gathered from the files that are published of it.

files of a repository -> CardFacts

Whoever has the files has the facts, hence the card: it is rendered from them when it is written and again when it is
checked. It names no machine. A fact that is unknown is None or empty.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from peft import PeftConfig

from perl.errors import PerlError
from perl.evaluation.scoring.results import Results
from perl.hub.card.facts import RUN_FACTS, RunFacts, has_hub_form, plain_word, published_label, read_run_facts
from perl.hub.card.published import Files, config_in, content_of, evenly, log_in, public_recipe_in, results_in
from perl.methods.registry import Method, served_rank
from perl.methods.settings import method_of
from perl.recipe import Recipe
from perl.recipe.quantisations import quantised_by
from perl.recipe.sections import THINKING_SWITCHES, AnsweredQuestion
from perl.sandbox import is_sandbox, load_problems
from perl.zoo.catalogue import PREFIX

_COMMIT_LENGTH = 40
_CURVE_ROWS = 8
# Columns of the learning curves: their heading, and the metric in the log.
_CURVES = {
    "reward": "reward",
    "tokens a completion": "completions/mean_length",
    "entropy": "entropy",
    "KL to the reference": "kl",
}


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
        examples: Answered questions before every question.
        tools: That it may call, as the recipe names them; empty: none.
    """

    chat: bool | None = None
    system_prompt: str | None = None
    prompt_template: str | None = None
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    sampling: Mapping[str, float | int] = field(default_factory=dict)
    example: str = "What is 12 * 13?"
    examples: Sequence[AnsweredQuestion] = ()
    tools: str = ""


@dataclass(frozen=True)
class Serving:
    """How vLLM serves the adapter.

    Attributes:
        form: ``adapter`` as it is, as the ``lora`` that it is exported to, or ``merged`` into its base.
        rank: The lowest that a server can be started for; None where it is merged.
    """

    form: Literal["adapter", "lora", "merged"]
    rank: int | None = None


@dataclass(frozen=True, kw_only=True)
class CardFacts(RunFacts):
    """What is known of an adapter: what its run reports, and what the other files say.

    Attributes:
        dataset_version: Commit or hash of the training problems, with their subset and split.
        reward_first: Mean reward of the first step that has one.
        reward_last: Likewise of the last.
        unrewarded: Logged steps in which no completion had a reward, and how many were logged; None: there is none.
        teacher_kl: KL divergence of policy and teacher in the first and the last step, in nats a token.
        teacher_sees: ``hint`` and ``system_prompt`` that only the teacher saw, those that there are.
        tokens: That the policy was trained on, prompts included.
        curves: A few rows of the log: headings, then step and values as text.
        results: Scores of exactly this adapter.
        asking: How it was asked.
        serving: How vLLM serves it.
        recipe: Whether its recipe lies beside it.
        local: What that names and others do not have.
    """

    dataset_version: str | None = None
    reward_first: float | None = None
    reward_last: float | None = None
    unrewarded: tuple[int, int] | None = None
    teacher_kl: tuple[float, float] | None = None
    teacher_sees: Mapping[str, str] = field(default_factory=dict)
    tokens: int | None = None
    curves: tuple[tuple[str, ...], ...] = ()
    results: Results | None = None
    asking: PromptFormat | None = None
    serving: Serving | None = None
    recipe: bool = False
    local: tuple[str, ...] = ()

    @property
    def base_on_hub(self) -> bool:
        """Whether the base's name is one that the Hub can resolve."""
        return has_hub_form(self.base)

    @property
    def quantised_by(self) -> str:
        """The package that quantised the base as it was loaded; empty: it was not quantised."""
        return quantised_by(self.quantization) if self.quantization is not None else ""

    @property
    def whole(self) -> bool:
        """Whether there is no adapter: the model itself was trained."""
        return self.method == "full"


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
    recipe, config, results, rows = (
        public_recipe_in(files),
        config_in(files),
        results_in(files),
        log_in(files, run.step),
    )
    base = published_label(str((config.base_model_name_or_path if config else None) or run.base))
    reported: dict[str, Any] = {**vars(run), "base": base}
    if config is not None:
        reported |= {"revision": config.revision, "serving": serving_of(config)}
    if results is not None:
        reported["results"] = public_results(results, run.name or run.repo_id or base)
    if recipe is not None:
        data = recipe.data.train
        version = [f"subset {data.subset}"] if data.subset else []
        version += [f"split {data.split}"] if data.split else []
        if commit := run.data_version:
            version.append(f"revision {commit}" if len(commit) == _COMMIT_LENGTH else f"sha256 {commit}")
        version += [f"the first {data.limit:,} rows"] if data.limit else []
        alone = {"hint": recipe.teacher.hint, "system_prompt": recipe.teacher.system_prompt}
        reported |= {
            "recipe": True,
            "local": _local_parts(recipe),
            "dataset": published_label(data.name),
            "dataset_version": ", ".join(version) or None,
            "teacher_sees": {name: text for name, text in alone.items() if text is not None},
            "asking": _asking(run, recipe, results),
        }
    if run.rewarded:  # without a reward all are 0
        rewards, logged = _finite(rows, "reward"), [row for row in rows if "rows/unscored" in row]
        # Steps in which every reward failed or gave None, of those that count such completions.
        count = sum(not _finite([row], "reward") for row in logged)
        reported |= {"reward_first": rewards[0], "reward_last": rewards[-1]} if rewards else {}
        reported |= {"unrewarded": (count, len(logged))} if count else {}
    taught = _finite(rows, "teacher/kl") if "teacher" in run.settings else []
    tokens = [int(row["num_tokens"]) for row in rows if row.get("num_tokens")]
    return CardFacts(
        **reported,
        teacher_kl=(taught[0], taught[-1]) if taught else None,
        tokens=tokens[-1] if tokens else None,
        curves=_curves(rows, rewarded=run.rewarded),
    )


def public_results(results: Results, name: str) -> Results:
    """Results as others may see them: under the adapter's public name, and of a base that is a path the last part.

    Args:
        results: The adapter's.
        name: What it is called.
    """
    return replace(
        results, subject={**results.subject, "name": name, "base": published_label(str(results.subject["base"]))}
    )


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


def _finite(rows: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    return [row[name] for row in rows if row.get(name) is not None and math.isfinite(row[name])]


def _curves(rows: Sequence[Mapping[str, Any]], *, rewarded: bool) -> tuple[tuple[str, ...], ...]:
    """A table of a few steps, evenly apart, of what was logged at each of them; nothing of a single step."""
    rows = evenly([row for row in rows if _finite([row], "reward")], _CURVE_ROWS)
    names = {title: name for title, name in _CURVES.items() if rewarded or name != "reward"}
    names = {title: name for title, name in names.items() if len(_finite(rows, name)) == len(rows)}
    if len(rows) < 2 or not names:
        return ()
    values = ((str(row.get("step")), *(f"{row[name]:.4g}" for name in names.values())) for row in rows)
    return (("step", *names), *values)


def _local_parts(recipe: Recipe) -> tuple[str, ...]:
    """What the recipe names that lies with its author alone: a model, data, adapters."""
    named = [recipe.model.name, recipe.data.train.name, recipe.peft.adapter, recipe.teacher.adapter]
    named += [recipe.train.get("critic_adapter"), recipe.data.eval.name if recipe.data.eval is not None else None]
    kept = [name for name in named if name is not None and not is_sandbox(name) and not name.startswith(PREFIX)]
    private = [published_label(name) for name in kept if not has_hub_form(name.partition("@")[0])]
    return tuple(dict.fromkeys(map(plain_word, private)))


def _asking(run: RunFacts, recipe: Recipe, results: Results | None) -> PromptFormat:
    """How training asked; what is drawn is what the scores were drawn with, where there are any."""
    drawn: Any = results.protocol if results else recipe.rollout
    longest = results.tasks[0].max_new_tokens if results and results.tasks else recipe.rollout.max_completion_length
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    sampling = {name: getattr(drawn, name) for name in names if getattr(drawn, name) is not None}
    data = recipe.data.train.name  # a question of the sandbox's is shown; those of others' data are theirs to show
    mode = recipe.data.thinking  # a template reads the one of the names that it knows
    switches = {} if mode is None else dict.fromkeys(THINKING_SWITCHES, mode)
    example = {"example": load_problems(data, "heldout")[0].question} if is_sandbox(data) else {}
    return PromptFormat(
        chat=run.chat if recipe.data.chat is None else recipe.data.chat,
        system_prompt=recipe.data.system_prompt,
        prompt_template=recipe.data.prompt_template,
        examples=recipe.data.examples,
        tools=", ".join(f"`{plain_word(path.rpartition('/')[2])}`" for path in recipe.agent.paths),
        template_arguments=(recipe.train.get("chat_template_kwargs") or {}) | switches,
        sampling={**sampling, "max_new_tokens": longest},
        **example,
    )
