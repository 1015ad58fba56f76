"""What a job for verl is made of: a recipe and what is known of its data and model.

Recipe, plan -> Handover
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from perl.policy.saved.adapter import SavedAdapter
from perl.recipe import Recipe
from perl.recipe.engine_section import ParallelSection

if TYPE_CHECKING:
    from datasets import Dataset
    from peft import PeftConfig
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Handover:
    """A recipe that can be written down for verl.

    Attributes:
        recipe: With ``engine.name: verl``.
        arguments: The trainer's, a complete ``PeftRLConfig``.
        train: Problems to train on, with ``prompt`` and, where there are answers, ``solution``.
        heldout: Held-out problems, those that are scored; None: there are none.
        tokenizer: The base's.
        adapter: PEFT's config of the adapter as it would train here.
        saved: The adapter that is continued; None: a new one.
        steps: Optimizer steps.
        longest_prompt: In tokens.
        fingerprint: Of the base, if its weights are here and small enough to be read.
        own_names: Name in the data set -> where it is stored, of the columns that custom rewards get by it.
    """

    recipe: Recipe
    arguments: Any
    train: "Dataset"
    heldout: "Dataset | None"
    tokenizer: "PreTrainedTokenizerBase"
    adapter: "PeftConfig"
    saved: SavedAdapter | None
    steps: int
    longest_prompt: int
    fingerprint: str | None = None
    own_names: Mapping[str, str] = field(default_factory=dict)

    @property
    def megatron(self) -> bool:
        """Whether Megatron trains."""
        return self.recipe.engine.strategy == "megatron"

    @property
    def rollout(self) -> str:
        """The engine that writes rollouts."""
        return self.recipe.engine.rollout or "vllm"

    @property
    def parallel(self) -> ParallelSection:
        """How a copy of the model is split in training."""
        return self.recipe.engine.parallel or ParallelSection()

    @property
    def prompts_per_step(self) -> int:
        """Prompts of an optimizer step."""
        return self.recipe.batch.prompts_per_step

    @property
    def updates_per_batch(self) -> int:
        """Optimizer steps that one batch of rollouts is cut into, each seen ``num_iterations`` times."""
        accumulated = self.arguments.gradient_accumulation_steps or 1
        return int((self.arguments.steps_per_generation or accumulated) // accumulated)

    @property
    def steps_per_batch(self) -> int:
        """Optimizer steps of one batch of rollouts, which is one step of verl."""
        return self.updates_per_batch * int(self.arguments.num_iterations)

    @property
    def chat(self) -> bool:
        """Whether prompts are chat messages."""
        return not isinstance(self.train[0]["prompt"], str)
