"""The model card of an adapter: true values from the run, nothing else.

CardFacts -> README.md

A fact that is unknown is left out; there are no placeholders. Knows nothing of models or run folders.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from perl.assets import card_templates_folder
from perl.recipe.sections import DATA_FILE_SUFFIXES
from perl.sandbox import is_sandbox

_HUB_NAME = re.compile(r"\w[\w.-]*/[\w.-]+")


@dataclass(frozen=True)
class TaskFacts:
    """Base and adapter on one held-out task, as fractions."""

    task: str
    base: float
    base_stderr: float | None
    adapter: float
    stderr: float | None
    k: int
    n: int
    base_length: float
    adapter_length: float


@dataclass(frozen=True)
class CardFacts:
    """What is known of an adapter.

    Attributes:
        base: Public name of the base; a Hub id, a sandbox name or a path.
        settings: Name -> value of what the run was asked for, in the order shown.
        rewards: Reward name -> weight.
        seconds: Wall time of the run, evaluation included.
    """

    base: str
    revision: str | None = None
    name: str | None = None
    repo_id: str | None = None
    method: str | None = None
    dataset: str | None = None
    trainable_parameters: int | None = None
    total_parameters: int | None = None
    steps: int | None = None
    seed: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    rewards: Mapping[str, float] = field(default_factory=dict)
    reward_first: float | None = None
    reward_last: float | None = None
    seconds: float | None = None
    tasks: tuple[TaskFacts, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def base_on_hub(self) -> bool:
        """Whether the base's name is one that the Hub can resolve."""
        return _is_hub_name(self.base)

    @property
    def base_label(self) -> str:
        """The base's name as a card may show it: of a path only the last part."""
        return _label(self.base)

    @property
    def dataset_label(self) -> str | None:
        """The data set's name as a card may show it: of a path only the last part."""
        return self.dataset and _label(self.dataset)


def _is_hub_name(name: str) -> bool:
    """Whether a name is ``user/name`` and no folder or file here, which is what libraries look for first."""
    return (
        _HUB_NAME.fullmatch(name) is not None
        and PurePath(name).suffix not in DATA_FILE_SUFFIXES
        and not Path(name).exists()
    )


def _label(name: str) -> str:
    return name if _is_hub_name(name) or is_sandbox(name) else PurePath(name).name


def render_card(facts: CardFacts) -> str:
    """The card as Markdown with YAML front matter."""
    # Markdown, not HTML: nothing is to be escaped, and every name must be defined.
    environment = Environment(  # noqa: S701
        loader=FileSystemLoader(card_templates_folder()),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    front_matter = yaml.safe_dump(_front_matter(facts), sort_keys=False, allow_unicode=True).strip()
    return environment.get_template("adapter.md.jinja").render(facts=facts, front_matter=front_matter)


def _front_matter(facts: CardFacts) -> dict[str, Any]:
    """Metadata that the Hub reads; the base only where it is a name the Hub knows."""
    tags = ["perl-rl", "reinforcement-learning", "grpo", *([facts.method] if facts.method else [])]
    metadata: dict[str, Any] = {"library_name": "peft", "pipeline_tag": "text-generation", "tags": tags}
    if facts.base_on_hub:
        metadata |= {"base_model": facts.base, "base_model_relation": "adapter"}
    if facts.dataset and _is_hub_name(facts.dataset):
        metadata["datasets"] = [facts.dataset]
    return metadata
