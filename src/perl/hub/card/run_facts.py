"""What a card says that no other published file holds: the file ``perl_run.json``.

Candidate -> RunFacts <-> perl_run.json

It is plain JSON of short plain texts and numbers: no path of a machine, no HTML, and no key that is not named here.
"""

import json
import re
from typing import Annotated, Any

from huggingface_hub import HfApi, constants
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from perl.errors import PerlError, RecipeError, RunFolderError
from perl.hub.card.candidate import Candidate
from perl.hub.card.fact_form import Fact, HubId, Link, Overridden, Settings, Word, plain_word, showable_settings
from perl.hub.card.names import is_hub_name, label
from perl.hub.card.public_recipe import without_paths
from perl.hub.gate.gate import largest
from perl.policy.hub_lookup import HUB_ERRORS
from perl.policy.model import public_name
from perl.recipe import Recipe
from perl.run.facts import CARD_FACTS
from perl.run.folder import Run, installed_versions
from perl.sandbox import is_sandbox

RUN_FACTS = CARD_FACTS
"""What the file is called."""
_LARGEST = largest(RUN_FACTS) or 0
LICENCE_SECONDS = 5.0
"""A card is not worth waiting longer for the Hub."""
_VERSION = 1
_SANDBOX_LICENCE = "apache-2.0"


def _version(text: str) -> str:
    if re.fullmatch(r"[\w.+!-]+|not installed", text) is None:
        raise ValueError("is not a version")
    return text


Version = Annotated[str, AfterValidator(_version)]
Count = Annotated[int, Field(ge=0)]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Licence(BaseModel):
    """A licence.

    Attributes:
        identifier: As the Hub calls it: ``apache-2.0``, or ``other``.
        name: What an ``other`` one is called.
        link: Where it can be read.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    identifier: Fact
    name: Fact | None = None
    link: Link | None = None

    def __init__(self, identifier: str, name: str | None = None, link: str | None = None) -> None:
        """Takes its fields in this order."""
        super().__init__(identifier=identifier, name=name, link=link)


class RunFacts(BaseModel):
    """What is reported of a training. A fact that is unknown is None or empty.

    Attributes:
        version: Of this layout.
        perl: The version of perl-rl that wrote the card.
        name: For people.
        repo_id: Where the adapter lies on the Hub.
        base: Public name of the base; ``adapter_config.json`` must say the same.
        revision: Commit of the base, likewise.
        quantization: What the base was quantised to as it was loaded; None: it was not.
        method: As in ``peft.method``; ``full``: there is no adapter, the model itself was trained.
        licence: Of the base, which the adapter inherits.
        dataset: Name of the training problems, where no recipe lies beside it.
        data_version: Commit or hash of the training problems.
        step: Optimizer steps.
        seed: Of the training.
        loss: As in ``train.loss_type``.
        ratio_level: Of what the importance ratio is, as in ``train.importance_sampling_level``.
        algorithm: Name of a row of :data:`perl.algorithms.named.ALGORITHMS`; None: none, and not in the file.
        overridden: Settings of that row that the run has otherwise, likewise.
        settings: Name -> value of what the run was asked for, in the order shown.
        rewards: Reward name -> weight.
        trainable_parameters: Numbers that were trained.
        total_parameters: All numbers of base and adapter.
        seconds: Wall time of the run, evaluation included.
        hardware: As ``1 x NVIDIA H100``.
        reload_difference: Largest difference of a token's log-probability after saving and loading, in nats.
        chat: Whether a question is a chat message; None: whatever the base's chat template makes of it.
        checkpoints: Steps whose adapters are tags of the repository.
        tags: Further tags.
        versions: Package -> version.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    version: Annotated[int, Field(ge=_VERSION, le=_VERSION)] = _VERSION
    perl: Word
    name: Word | None = None
    repo_id: HubId | None = None
    base: Fact
    revision: Word | None = None
    quantization: Word | None = None
    method: Word | None = None
    licence: Licence | None = None
    dataset: Word | None = None
    data_version: Word | None = None
    step: Count | None = None
    seed: int | None = None
    loss: Word | None = None
    ratio_level: Word | None = None
    algorithm: Word | None = None
    overridden: Overridden = {}
    settings: Settings = {}
    rewards: dict[Word, Annotated[float, Field(allow_inf_nan=False)]] = {}
    trainable_parameters: Count | None = None
    total_parameters: Count | None = None
    seconds: Amount | None = None
    hardware: Fact | None = None
    reload_difference: Amount | None = None
    chat: bool | None = None
    checkpoints: list[Count] = []
    tags: list[Fact] = []
    versions: dict[Word, Version] = {}

    def to_json(self) -> bytes:
        """The file."""
        unnamed = {"algorithm", "overridden"} if self.algorithm is None else set()  # as every version wrote it
        facts = self.model_dump(mode="json", exclude=unnamed)
        return (json.dumps(facts, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()


def read_run_facts(content: bytes) -> RunFacts:
    """The facts in a file, which is untrusted.

    Raises:
        PerlError: It holds none; what is wrong with each key is a line.
    """
    if len(content) > _LARGEST:
        raise PerlError(f"has {len(content):,} bytes, read are {_LARGEST:,} at most", RUN_FACTS)
    try:
        return RunFacts.model_validate_json(content)
    except ValidationError as error:
        first, *others = [(one["msg"], ".".join(map(str, one["loc"]))) for one in error.errors()]
        more = f", and {len(others)} more" if others else ""
        where = f"{RUN_FACTS}: {first[1][:80]}" if first[1] else RUN_FACTS
        raise PerlError(
            f"{first[0].removeprefix('Value error, ')[:200]}{more}", where, "perl push writes it anew"
        ) from None


def perl_version() -> str:
    """The version that writes cards here."""
    return installed_versions()["perl-rl"]


def run_facts(
    candidate: Candidate, repo_id: str | None = None, steps: list[int] | None = None, licence: Licence | None = None
) -> RunFacts:
    """What a run tells of one of its adapters.

    Args:
        candidate: The adapter.
        repo_id: Where it will lie on the Hub; None: where the run's recipe says.
        steps: Of the run's checkpoints that are published too.
        licence: Of the base; None: the Hub is asked, unless it is offline.
    """
    run, known, whole_run = candidate.run, candidate.run.facts, candidate.which == "final"
    recipe = recipe_of(run)
    if not isinstance(known.get("base"), str):
        raise RunFolderError("does not say in its run.json which base it trained on", str(run.path))
    base, revision = public_name(str(known["base"]), known.get("revision"))
    repo_id = repo_id or (recipe.hub.repo_id if recipe else known.get("repo_id"))
    data, settings = known.get("data") or {}, known.get("settings") or {}
    # Of an adapter that lies on this machine the last part of its path, as its recipe.
    continued = {"continues": without_paths(settings["continues"])} if "continues" in settings else {}
    facts = {
        "perl": perl_version(),
        "name": repo_id or plain_word(run.path.resolve().name),
        "repo_id": repo_id,
        "base": label(base),
        "revision": revision,
        "quantization": known.get("quantization"),
        "method": known.get("method"),
        "licence": licence or base_licence(base, revision),
        "data_version": data.get("train"),
        "step": candidate.step,
        "seed": known.get("seed"),
        "loss": known.get("loss"),
        "ratio_level": known.get("ratio_level"),
        **(
            {"algorithm": name, "overridden": known.get("overridden") or {}} if (name := known.get("algorithm")) else {}
        ),
        "settings": showable_settings(settings | continued),
        "rewards": without_paths(known.get("rewards") or {}),
        "trainable_parameters": known.get("trainable_parameters"),
        "total_parameters": known.get("total_parameters"),
        "seconds": (known.get("seconds") if run.status == "done" else run.elapsed()) if whole_run else None,
        "hardware": hardware_of(known.get("hardware") or {}),
        "reload_difference": known.get("reload_difference") if whole_run else None,
        "chat": _is_chat(run),
        "checkpoints": list(steps or []),
        "versions": known.get("versions") or {},
    }
    return made_facts(facts, str(run.path / "run.json"))


def made_facts(facts: dict[str, Any], where: str) -> RunFacts:
    """Facts from values that this package wrote.

    Raises:
        PerlError: A value is not what a card can show.
    """
    try:
        return RunFacts.model_validate(facts)
    except ValidationError as error:
        first = error.errors()[0]
        message = f"{'.'.join(map(str, first['loc']))}: {first['msg'].removeprefix('Value error, ')}"
        raise PerlError(f"a card cannot show {message}", where) from None


def recipe_of(run: Run) -> Recipe | None:
    """The recipe of a run; None: it has none.

    Raises:
        RecipeError: It cannot be read.
    """
    file = run.path / "recipe.yaml"
    if not file.is_file():
        return None
    try:
        return Recipe.of_run(file)
    except RecipeError as error:
        raise RecipeError("the run's recipe cannot be read", str(file), str(error)) from None


def base_licence(name: str, revision: str | None) -> Licence | None:
    """The licence of a base, as its own card on the Hub has it; None where that is not known within a moment."""
    if is_sandbox(name):
        return Licence(_SANDBOX_LICENCE)
    if constants.HF_HUB_OFFLINE or not is_hub_name(name):
        return None
    try:
        card = HfApi().model_info(name, revision=revision, timeout=LICENCE_SECONDS).card_data
    except HUB_ERRORS:
        return None
    found = card.get("license") if card else None
    if card is None or not isinstance(found, str):
        return None
    try:
        return Licence(found, card.get("license_name"), card.get("license_link"))
    except ValidationError:  # an untrusted card may hold anything
        return None


def hardware_of(found: dict[str, Any]) -> str | None:
    """Processors as ``1 x NVIDIA H100``; None: it is not known."""
    return f"{found.get('count', 1)} x {found['device']}" if found.get("device") else None


def _is_chat(run: Run) -> bool | None:
    """Whether questions were chat messages, as what was logged knows it."""
    if not run.samples.is_file():
        return None
    with run.samples.open("rb") as file:
        first = file.readline()
    try:  # what is not UTF-8 is a ValueError too
        return isinstance(json.loads(first)["prompt"], list) if first else None
    except (ValueError, KeyError, TypeError, RecursionError):  # a line that a kill cut short
        return None
