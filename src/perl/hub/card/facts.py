"""What only the run knows of an adapter: the typed record ``perl_run.json``, from which its card is rendered.

plain values <-> RunFacts <-> perl_run.json

It holds names, numbers and settings that perl writes: no key that is not named here, no link, mark-up or path.
"""

import functools
import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path, PurePath
from typing import Annotated, Any, Literal

from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from pydantic import AfterValidator, ConfigDict, Field, JsonValue, StringConstraints, TypeAdapter, ValidationError
from transformers.training_args import OptimizerNames

from perl.algorithms.critic_settings import CRITIC, CRITIC_ADAPTER, IN_REWARD, PENALTY, WORDS
from perl.algorithms.named import ALGORITHMS
from perl.errors import PerlError
from perl.hub.gate import largest
from perl.methods.registry import METHODS
from perl.policy.teacher import ADAPTER_NAME
from perl.recipe.quantisations import QUANTISATIONS
from perl.recipe.sections import MEMORY_WORDS, REFILL_WORDS, is_data_file
from perl.run.facts import CARD_FACTS
from perl.run.folder import installed_versions
from perl.sandbox import is_sandbox

RUN_FACTS = CARD_FACTS
"""What the file is called."""
_LARGEST = largest(RUN_FACTS) or 0
_LONGEST_WORD, _LONGEST_TEXT = 200, 500
# A text with one of these could be taken for a score, a heading, a link, a picture or code.
_MARKS = re.compile(r"[<%±`]|\]\(|\*\*|://|www\.")
_HUB_NAME = r"\w[\w.-]*/[\w.-]+"
_NUMBER = r"\d[\d.e+-]*"
_CHOSEN = (
    rf"{MEMORY_WORDS} \(explore {_NUMBER}, floor {_NUMBER}\)|{REFILL_WORDS} \(at most {_NUMBER} x a batch more\)|"
    rf"easy first by a column \({_NUMBER} of them at first, all after {_NUMBER} of the training\)"
)
_TAUGHT = "another adapter|a hint|a system prompt"
# What runs and scripts call what a trainer was asked for, beside the settings of methods and of PEFT's configs, and the
# form of each.
_FORMS = {
    "teacher": rf"the base with ({_TAUGHT})(, ({_TAUGHT}))*; KL over (the vocabulary|the \d+ likeliest tokens) "
    rf"x {_NUMBER}",
    "prompts": rf"({_CHOSEN})(; ({_CHOSEN}))*",
    CRITIC: WORDS.pattern,
    PENALTY: IN_REWARD,
    "trained by": r"verl [\w.+-]+, \w+ on \d+ processes",
    "batch": r"\d+ prompts x \d+ generations = \d+ completions a step = \d+ rows x \d+ passes( x \d+ processes)?",
    "sampling": rf"temperature {_NUMBER}, at most \d+ tokens",
    **dict.fromkeys(("continues", ADAPTER_NAME, CRITIC_ADAPTER), r"\S+"),
    **dict.fromkeys(("base loaded as", "continued base loaded as"), r"[\w-]{1,40}"),
    f"{ADAPTER_NAME} SHA-256": r"[0-9a-f]{64}",
    "optimizer": "|".join(kind.value for kind in OptimizerNames),
    **dict.fromkeys(("learning rate", "KL coefficient (beta)"), _NUMBER),
    "completions a prompt": r"\d+",
}


def perl_version() -> str:
    """The version that writes cards here."""
    return installed_versions()["perl-rl"]


def plain_word(text: str) -> str:
    """The nearest word, as names of folders may be anything."""
    word = re.sub(r"([:/])\W+", r"\1", re.sub(r"[^\w.+@:/-]+", "-", text))
    return word[:_LONGEST_WORD].strip("-.+:/@") or "adapter"


def has_hub_form(name: str) -> bool:
    """Whether a name is ``user/name``: what a published file says of the Hub does not depend on who reads it where."""
    return re.fullmatch(_HUB_NAME, name) is not None and not is_data_file(name)


def is_hub_name(name: str) -> bool:
    """Whether a name is ``user/name`` and no folder or file here, which is what libraries look for first."""
    return has_hub_form(name) and not Path(name).exists()


def label(name: str) -> str:
    """A model's or data set's name as others may see it: of a path only the last part."""
    return name if is_hub_name(name) or is_sandbox(name) else PurePath(name).name


def published_label(name: str) -> str:
    """The same of a name in a published file, whatever lies where it is read."""
    return name if has_hub_form(name) or is_sandbox(name) else PurePath(name).name


def _settings(settings: dict[str, JsonValue]) -> dict[str, JsonValue]:
    for name, value in settings.items():
        if name not in _setting_names():
            raise ValueError(f"{name[:_LONGEST_WORD]!r} is not a setting of a run")
        if not _has_form(name, value):
            raise ValueError(f"{name} has a malformed value")
    return settings


def _has_form(name: str, value: JsonValue) -> bool:
    if name in _FORMS:
        return re.fullmatch(_FORMS[name], str(value)) is not None
    if isinstance(value, str):
        return " " not in value and value.isprintable() and len(value) <= _LONGEST_TEXT and not _MARKS.search(value)
    if isinstance(value, float):
        return math.isfinite(value)
    inner = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []
    return all(_has_form(name, one) for one in inner)


@functools.cache
def _setting_names() -> frozenset[str]:
    """Every name that a setting can have: ours, a method's, and those of PEFT's configs."""
    of_methods = {name for method in METHODS.values() for name in (*method.settings, *method.options)}
    of_peft = {field.name for config in PEFT_TYPE_TO_CONFIG_MAPPING.values() for field in fields(config)}
    return frozenset({*_FORMS, *of_methods, *of_peft})


def showable_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Those that a card can show: of an adapter's config a pattern may hold what looks like a link."""
    return {name: value for name, value in settings.items() if _has_form(name, value)}


def _text(text: str) -> str:
    if not text.isprintable() or _MARKS.search(text):
        raise ValueError("holds a mark of scores, links or code")
    return text


def _hub_id(text: str) -> str:
    if not has_hub_form(text):
        raise ValueError("is not user/name")
    return text


Word = Annotated[
    str, StringConstraints(pattern=r"^\w[\w.+@-]*([:/]\w[\w.+@-]*)*$", min_length=1, max_length=_LONGEST_WORD)
]
"""A name: of a run, a method, a reward, a version."""
Text = Annotated[str, StringConstraints(min_length=1, max_length=_LONGEST_WORD), AfterValidator(_text)]
"""Plain text of one line without marks or links."""
VERSION = r"\d+(\.\d+)*((a|b|rc|\.?dev|\.?post)\d+)*(\+[a-z0-9.]+)?|not installed"
"""What the version of a package looks like."""
Version = Annotated[str, StringConstraints(pattern=rf"^({VERSION})$", max_length=_LONGEST_WORD)]
_PACKAGES = (*installed_versions(), "verl", *(row.package.pip for row in QUANTISATIONS.values()))
Package = Literal[_PACKAGES]  # type: ignore[valid-type]
_OVERRIDDEN = tuple({name for row in ALGORITHMS.values() for name in row.sets})
Overridden = Literal[_OVERRIDDEN]  # type: ignore[valid-type]
Digest = Annotated[str, StringConstraints(pattern=r"^([0-9a-f]{40}|[0-9a-f]{64})$")]
Link = Annotated[str, StringConstraints(pattern=r"^[\w./~?#=&%+:,@-]+$", max_length=_LONGEST_TEXT)]
# As makers call their processors: capital letters and digits, no decimals but a clock's, so that no sentence fits.
Hardware = Annotated[
    str,
    StringConstraints(
        pattern=r"^\d{1,5} x (processor|(\d+th Gen )?(NVIDIA|AMD|Intel\(R\)|Apple|Ampere)"
        r"( ([A-Z0-9][A-Za-z0-9()+-]*|i[3579]-\w+|@|\d\.\d+GHz))*)$",
        max_length=100,
    ),
]
HubId = Annotated[str, AfterValidator(_hub_id)]
Count = Annotated[int, Field(ge=0)]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
_PLAIN = ConfigDict(extra="forbid", strict=True)


@dataclass(frozen=True)
class Licence:
    """A licence.

    Attributes:
        identifier: As the Hub calls it: ``apache-2.0``, or ``other``.
        name: What an ``other`` one is called.
        link: Where it can be read.
    """

    __pydantic_config__ = _PLAIN

    identifier: Word
    name: Word | None = None
    link: Link | None = None


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What is reported of a training. A fact that is unknown is None or empty.

    Attributes:
        version: Of this layout.
        perl: The version of perl-rl that wrote the card.
        name: For people.
        repo_id: Where the adapter lies on the Hub.
        base: Public name of the base: a Hub id, a sandbox name, or the last part of a path.
        revision: Commit of the base.
        quantization: What the base was quantised to as it was loaded; None: it was not.
        loader: The class of transformers that loads the base; None: AutoModelForCausalLM.
        method: As in ``peft.method``; ``full``: there is no adapter, the model itself was trained.
        licence: Of the base, which the adapter inherits.
        dataset: Name of the training problems.
        data_version: Commit or hash of the training problems.
        step: Optimizer steps.
        seed: Of the training.
        loss: As in ``train.loss_type``.
        ratio_level: Of what the importance ratio is, as in ``train.importance_sampling_level``.
        algorithm: Name of a row of :data:`perl.algorithms.named.ALGORITHMS`; None: the run names none.
        overridden: Settings of that row that the run has otherwise.
        settings: Name -> value of what the run was asked for, in the order shown.
        rewards: Reward name -> weight.
        trainable_parameters: Numbers that were trained.
        total_parameters: All numbers of base and adapter.
        seconds: Wall time of the run, evaluation included.
        hardware: As ``1 x NVIDIA H100``; ``processor`` of another maker.
        rewards_changed: Steps after which the code of a reward was changed.
        reload_difference: Largest difference of a token's log-probability after saving and loading, in nats.
        chat: Whether a question is a chat message; None: whatever the base's chat template makes of it.
        checkpoints: Steps whose adapters are tags of the repository.
        tags: Further tags.
        versions: Package -> version.
        files: Name -> SHA-256 of config, recipe and weights beside the card.
    """

    __pydantic_config__ = _PLAIN

    version: Literal[1] = 1
    perl: Version = field(default_factory=perl_version)
    name: Word | None = None
    repo_id: HubId | None = None
    base: Text
    revision: Word | None = None
    quantization: Word | None = None
    loader: Literal["AutoModelForImageTextToText"] | None = None
    method: Word | None = None
    licence: Licence | None = None
    dataset: Word | None = None
    data_version: Digest | None = None
    step: Count | None = None
    seed: int | None = None
    loss: Word | None = None
    ratio_level: Word | None = None
    algorithm: Word | None = None
    overridden: dict[Overridden, bool | int | Finite | Word | None] = field(default_factory=dict)
    settings: Annotated[dict[str, JsonValue], AfterValidator(_settings)] = field(default_factory=dict)
    rewards: dict[Word, Finite] = field(default_factory=dict)
    trainable_parameters: Count | None = None
    total_parameters: Count | None = None
    seconds: Amount | None = None
    hardware: Hardware | None = None
    rewards_changed: tuple[Count, ...] = ()
    reload_difference: Annotated[Amount, Field(le=1e-4)] | None = None  # RELOAD_TOLERANCE, whose file imports TRL
    chat: bool | None = None
    checkpoints: tuple[Count, ...] = ()
    tags: tuple[Word, ...] = ()
    versions: dict[Package, Version] = field(default_factory=dict)
    files: dict[Word, Digest] = field(default_factory=dict)

    def to_json(self) -> bytes:
        """The file."""
        return (json.dumps(asdict(self), indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()

    @property
    def rewarded(self) -> bool:
        """Whether a reward counts; a teacher may teach alone."""
        return "teacher" not in self.settings or any(self.rewards.values())


_READER = TypeAdapter(RunFacts)


def read_run_facts(content: bytes) -> RunFacts:
    """The facts in a file, which is untrusted.

    Raises:
        PerlError: It holds none, or one that is not what perl writes.
    """
    if len(content) > _LARGEST:
        raise PerlError(f"has {len(content):,} bytes, read are {_LARGEST:,} at most", RUN_FACTS)
    return _facts(content, RUN_FACTS, "", "perl push writes it anew")


def made_facts(facts: Mapping[str, Any], where: str) -> RunFacts:
    """Facts from plain values that this package wrote.

    Raises:
        PerlError: A value is not what a card can show.
    """
    return _facts(json.dumps(facts).encode(), where, "a card cannot show: ", "")


def _facts(content: bytes, where: str, prefix: str, hint: str) -> RunFacts:
    try:
        return _READER.validate_json(content)
    except ValidationError as error:
        first, *others = error.errors()
        key = ".".join(map(str, first["loc"]))[:80]
        more = f", and {len(others)} more" if others else ""
        message = f"{prefix}{first['msg'].removeprefix('Value error, ')[:200]}{more}"
        raise PerlError(message, f"{where}: {key}" if key else where, hint) from None
