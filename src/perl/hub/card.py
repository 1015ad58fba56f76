"""The model card of an adapter: true values from the run, nothing else.

CardFacts -> README.md

A fact that is unknown is left out; there are no placeholders. Knows nothing of models or folders.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from perl.assets import card_templates_folder
from perl.sandbox import is_sandbox


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
        return not is_sandbox(self.base) and self.base.count("/") == 1 and self.base[0] not in "./~"

    @property
    def base_label(self) -> str:
        """The base's name as a card may show it: of a path only the last part."""
        return self.base if self.base_on_hub or is_sandbox(self.base) else self.base.rstrip("/").rpartition("/")[2]


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
    if facts.dataset and facts.dataset.count("/") == 1 and not facts.dataset.startswith((".", "/", "~")):
        metadata["datasets"] = [facts.dataset]
    return metadata
