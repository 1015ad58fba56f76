"""What the Hub reads of a card: its YAML front matter.

CardFacts -> YAML

A key whose value is unknown is not there.
"""

from typing import Any

from huggingface_hub import ModelCardData

from perl.hub.card.card_facts import CardFacts
from perl.hub.card.eval_results import model_index
from perl.hub.card.names import has_hub_form
from perl.recipe.plain_yaml import dump
from perl.sandbox import BASE_NAME, MODELS

PIPELINE = "text-generation"
OURS = "perl-rl"
# Sandbox model -> the tag by which its adapters are found; the Hub has no base to name.
SANDBOX_TAGS = {name: "sandbox" if name == BASE_NAME else name.replace(":", "-") for name in MODELS}
"""Tags: of every card, and of adapters that no base of the Hub takes."""


def adapter_tag(base: str) -> str:
    """The tag by which the Hub finds a base's adapters."""
    return f"base_model:adapter:{base}"


def front_matter(facts: CardFacts) -> str:
    """The metadata as YAML, without the dashes around it."""
    # Not by the Hub library, whose YAML 1.1 leaves a hash like 12e34 bare, which the Hub reads as a number.
    metadata: dict[str, Any] = ModelCardData(**_metadata(facts)).to_dict()  # type: ignore[no-untyped-call]
    return dump(metadata).strip()


def _metadata(facts: CardFacts) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    if facts.base_on_hub:
        relation = "finetune" if facts.whole else "adapter"
        metadata |= {"base_model": facts.base, "base_model_relation": relation}
    metadata["library_name"] = "transformers" if facts.whole else "peft"
    metadata["pipeline_tag"] = PIPELINE
    if facts.licence is not None:
        licence = facts.licence
        metadata |= {"license": licence.identifier, "license_name": licence.name, "license_link": licence.link}
    if facts.dataset and has_hub_form(facts.dataset):
        metadata["datasets"] = [facts.dataset]
    metadata["tags"] = _tags(facts)
    if facts.results is not None and facts.results.tasks:
        name = (facts.repo_id or facts.name or "adapter").rpartition("/")[2]
        metadata |= {"model_name": name, "eval_results": model_index(facts.results)}
    return metadata


def _tags(facts: CardFacts) -> list[str]:
    tags = [OURS, "reinforcement-learning", facts.algorithm or ("grpo" if facts.rewarded else "opd")]
    tags += [facts.method] if facts.method else []
    tags += [SANDBOX_TAGS[facts.base]] if facts.base in SANDBOX_TAGS else []
    tags += [adapter_tag(facts.base)] if facts.base_on_hub and not facts.whole else []
    return list(dict.fromkeys([*tags, *facts.tags]))
