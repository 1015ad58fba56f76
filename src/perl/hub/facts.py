"""What is known of an adapter that will be shown to others, gathered from the run it comes from.

Candidate -> CardFacts

Nothing of this machine is in it: of paths only the last part. A fact that is unknown is None or empty.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from typing import Any, Literal

from huggingface_hub import HfApi, constants
from peft import PeftConfig

from perl.errors import RecipeError, RunFolderError
from perl.evaluation.results import FIGURE, Results
from perl.hub.candidate import Candidate
from perl.methods.registry import Method, served_rank
from perl.methods.settings import method_of
from perl.model import public_name
from perl.recipe import Recipe
from perl.recipe.sections import DATA_FILE_SUFFIXES, DataSource
from perl.run import Run, read_log
from perl.sandbox import is_sandbox, load_problems
from perl.saved_adapter import CONFIG, find_adapter

CURVES, PROBLEMS, PUBLIC_RECIPE = "plots/curves.png", f"eval/{FIGURE}", "perl_recipe.yaml"
"""What other files of a published adapter are called."""
LICENCE_SECONDS = 5.0
"""A card is not worth waiting longer for the Hub."""
_SANDBOX_LICENCE = "apache-2.0"
_HUB_NAME = re.compile(r"\w[\w.-]*/[\w.-]+")
_COMMIT_LENGTH = 40


@dataclass(frozen=True)
class Licence:
    """A licence.

    Attributes:
        identifier: As the Hub calls it: ``apache-2.0``, or ``other``.
        name: What an ``other`` one is called.
        link: Where it can be read.
    """

    identifier: str
    name: str | None = None
    link: str | None = None


@dataclass(frozen=True)
class Asking:
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
    """What is known of an adapter.

    Attributes:
        base: Public name of the base; a Hub id, a sandbox name, or the last part of a path.
        revision: Commit of the base.
        name: For people.
        repo_id: Where it will lie on the Hub.
        method: As in ``peft.method``; ``full``: there is no adapter, the model itself was trained.
        licence: Of the base, which the adapter inherits.
        dataset: Name of the training problems.
        dataset_version: Commit or hash of the training problems, with their subset and split.
        steps: Optimizer steps.
        algorithm: The loss, as in ``train.loss_type``.
        ratio_level: Of what the importance ratio is, as in ``train.importance_sampling_level``.
        settings: Name -> value of what the run was asked for, in the order shown.
        rewards: Reward name -> weight.
        reward_first: Mean reward of the first step.
        reward_last: Likewise of the last.
        seconds: Wall time of the run, evaluation included.
        tokens: That the policy was trained on, prompts included.
        hardware: As ``1 x NVIDIA H100``.
        reload_difference: Largest difference of a token's log-probability after saving and loading, in nats.
        results: Scores of exactly this adapter.
        pictures: Those of its files that are pictures and exist.
        asking: How it was asked.
        serving: How vLLM serves it.
        recipe: Whether its recipe lies beside it.
        checkpoints: Steps whose adapters are tags of the repository.
        tags: Further tags.
        versions: Package -> version.
    """

    base: str
    revision: str | None = None
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
    settings: Mapping[str, Any] = field(default_factory=dict)
    rewards: Mapping[str, float] = field(default_factory=dict)
    reward_first: float | None = None
    reward_last: float | None = None
    seconds: float | None = None
    tokens: int | None = None
    hardware: str | None = None
    reload_difference: float | None = None
    results: Results | None = None
    pictures: tuple[str, ...] = ()
    asking: Asking | None = None
    serving: Serving | None = None
    recipe: bool = False
    checkpoints: tuple[int, ...] = ()
    tags: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def base_on_hub(self) -> bool:
        """Whether the base's name is one that the Hub can resolve."""
        return is_hub_name(self.base)

    @property
    def whole(self) -> bool:
        """Whether there is no adapter: the model itself was trained."""
        return self.method == "full"


def is_hub_name(name: str) -> bool:
    """Whether a name is ``user/name`` and no folder or file here, which is what libraries look for first."""
    return (
        _HUB_NAME.fullmatch(name) is not None
        and PurePath(name).suffix not in DATA_FILE_SUFFIXES
        and not Path(name).exists()
    )


def label(name: str) -> str:
    """A model's or data set's name as others may see it: of a path only the last part."""
    return name if is_hub_name(name) or is_sandbox(name) else PurePath(name).name


def card_facts(candidate: Candidate, repo_id: str | None = None, licence: str | None = None) -> CardFacts:
    """What a run tells of one of its adapters.

    Args:
        candidate: The adapter.
        repo_id: Where it will lie on the Hub; None: where the run's recipe says.
        licence: Of the base; None: the Hub is asked, unless it is offline.

    Raises:
        RecipeError: The run's recipe cannot be read.
    """
    run, known = candidate.run, candidate.run.facts
    recipe = _recipe(run)
    if not isinstance(known.get("base"), str):
        raise RunFolderError("does not say in its run.json which base it trained on", str(run.path))
    base, revision = public_name(str(known["base"]), known.get("revision"))
    repo_id = repo_id or (recipe.hub.repo_id if recipe else known.get("repo_id"))
    name = repo_id or (recipe.name if recipe else run.path.resolve().name)
    rows, whole_run = _logged(run, candidate.step), candidate.which == "final"
    rewards = [row["reward"] for row in rows if row.get("reward") is not None]
    tokens = [row["num_tokens"] for row in rows if row.get("num_tokens")]
    data = recipe.data.train if recipe else None
    return CardFacts(
        base=label(base),
        revision=revision,
        name=name,
        repo_id=repo_id,
        method=known.get("method"),
        licence=Licence(licence) if licence else base_licence(base, revision),
        dataset=label(data.name) if data else None,
        dataset_version=_version(data, (known.get("data") or {}).get("train")) if data else None,
        trainable_parameters=known.get("trainable_parameters"),
        total_parameters=known.get("total_parameters"),
        steps=candidate.step,
        seed=known.get("seed"),
        algorithm=known.get("loss"),
        ratio_level=known.get("ratio_level"),
        settings=known.get("settings") or {},
        rewards=known.get("rewards") or {},
        reward_first=rewards[0] if rewards else None,
        reward_last=rewards[-1] if rewards else None,
        seconds=(known.get("seconds") if run.status == "done" else run.elapsed()) if whole_run else None,
        tokens=int(tokens[-1]) if tokens else None,
        hardware=_hardware(known.get("hardware") or {}),
        reload_difference=known.get("reload_difference") if whole_run else None,
        results=public_results(candidate.results, name) if candidate.results else None,
        pictures=_pictures(candidate),
        asking=_asking(run, recipe, candidate.results) if recipe else None,
        serving=serving_of(find_adapter(str(candidate.folder)).config) if _is_adapter(candidate) else None,
        recipe=recipe is not None,
        versions=known.get("versions") or {},
    )


def public_results(results: Results, name: str) -> Results:
    """Results as others may see them: under the adapter's public name, and of a base that is a path the last part.

    Args:
        results: The adapter's.
        name: What it is called.
    """
    return replace(results, subject={**results.subject, "name": name, "base": label(str(results.subject["base"]))})


def base_licence(name: str, revision: str | None) -> Licence | None:
    """The licence of a base, as its own card on the Hub has it; None where that is not known within a moment."""
    if is_sandbox(name):
        return Licence(_SANDBOX_LICENCE)
    if constants.HF_HUB_OFFLINE or not is_hub_name(name):
        return None
    try:
        card = HfApi().model_info(name, revision=revision, timeout=LICENCE_SECONDS).card_data
    except Exception:  # noqa: BLE001 (a network client's errors are not part of the Hub library's interface)
        return None
    found = card.get("license") if card else None
    if card is None or not isinstance(found, str):
        return None
    return Licence(found, card.get("license_name"), card.get("license_link"))


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


def _is_adapter(candidate: Candidate) -> bool:
    return (candidate.folder / CONFIG).is_file()


def _recipe(run: Run) -> Recipe | None:
    file = run.path / "recipe.yaml"
    if not file.is_file():
        return None
    try:
        recipe = Recipe.load(file)
    except RecipeError as error:
        raise RecipeError("the run's recipe cannot be read", str(file), str(error)) from None
    return replace(recipe, name=run.path.resolve().name)  # its file is called recipe.yaml in every run


def _logged(run: Run, step: int) -> list[dict[str, Any]]:
    """What was logged up to a step."""
    return [row for row in read_log(run.metrics) if (row.get("step") or 0) <= step]


def _version(data: DataSource, found: str | None) -> str | None:
    parts = [f"subset {data.subset}"] if data.subset else []
    parts += [f"split {data.split}"] if data.split else []
    if found:
        parts.append(f"revision {found}" if len(found) == _COMMIT_LENGTH else f"sha256 {found}")
    parts += [f"the first {data.limit:,} rows"] if data.limit else []
    return ", ".join(parts) or None


def _hardware(found: Mapping[str, Any]) -> str | None:
    return f"{found.get('count', 1)} x {found['device']}" if found.get("device") else None


def _pictures(candidate: Candidate) -> tuple[str, ...]:
    of_a_step = isinstance(candidate.which, int)  # whose curves end before those of the picture
    places = {} if of_a_step else {CURVES: candidate.run.plots / Path(CURVES).name}
    if candidate.results_folder is not None:
        places[PROBLEMS] = candidate.results_folder / FIGURE
    return tuple(name for name, path in places.items() if path.is_file())


def _asking(run: Run, recipe: Recipe, results: Results | None) -> Asking:
    """How training asked; what is drawn is what the scores were drawn with, where there are any."""
    drawn: Any = results.protocol if results else recipe.rollout
    longest = results.tasks[0].max_new_tokens if results and results.tasks else recipe.rollout.max_completion_length
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    sampling = {name: getattr(drawn, name) for name in names if getattr(drawn, name) is not None}
    return Asking(
        chat=_is_chat(run, recipe),
        system_prompt=recipe.data.system_prompt,
        prompt_template=recipe.data.prompt_template,
        template_arguments=recipe.train.get("chat_template_kwargs") or {},
        sampling={**sampling, "max_new_tokens": longest},
        **_example(recipe.data.train.name),
    )


def _example(data: str) -> dict[str, str]:
    """A question of the sandbox's; those of others' data are theirs to show."""
    return {"example": load_problems(data, "heldout")[0].question} if is_sandbox(data) else {}


def _is_chat(run: Run, recipe: Recipe) -> bool | None:
    """Whether questions were chat messages: what was logged knows, where a recipe leaves it to the tokenizer."""
    if recipe.data.chat is not None:
        return recipe.data.chat
    first: Sequence[str] = ()
    if run.samples.is_file():
        with run.samples.open(encoding="utf-8") as file:
            first = [file.readline()]
    try:
        return isinstance(json.loads(first[0])["prompt"], list) if first else None
    except (ValueError, KeyError, TypeError, RecursionError):  # a line that a kill cut short
        return None
