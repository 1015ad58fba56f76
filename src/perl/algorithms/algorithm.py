"""What an algorithm with a name is: the fields of ``train`` that it sets, and the words that say why.

settings of a row + neutral rest -> every field that a name sets

The rows are in ``named``. It imports no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from perl.algorithms.reading import unused_fields
from perl.algorithms.registry import Paper
from perl.algorithms.train_fields import defaults_of

_NEUTRAL: Mapping[str, Any] = {
    "importance_sampling_level": "token",
    "scale_rewards": "group",
    "multi_objective_aggregation": "sum_then_normalize",
    "epsilon": 0.2,
    "epsilon_high": None,
    "delta": None,
    "beta": 0.0,
    "mask_truncated_completions": False,
    "top_entropy_quantile": 1.0,
    "off_policy_mask_threshold": None,
    "entropy_coef": 0.0,
    "use_adaptive_entropy": False,
    "advantage_estimator": "group",
}


def neutral() -> dict[str, Any]:
    """What every name sets where its row says nothing else, so that nothing of an earlier choice stays."""
    return {**_NEUTRAL, **defaults_of("objective")}


@dataclass(frozen=True)
class Algorithm:
    """An algorithm. In its texts r is the ratio of policy to old policy, A the advantage, p the policy, R the reward.

    Attributes:
        name: As in ``algorithm: NAME``.
        title: What people call it.
        paper: Where it is from; None: it has no paper.
        settings: Fields of ``train`` -> value, those that make it what it is; never rate or batch.
        equation: What a token is trained on, and how tokens are averaged.
        advantage: Of a completion.
        constants: Where each number is from.
        differs: Where it is not the paper's, and what of the paper the name does not set.
        essential: The settings without which nothing of it is left, so that they cannot be overridden.
        least: Settings that mean something else below a bound -> the bound.
        needs_teacher: Whether it is nothing without a teacher, which then stands for rewards where none are named.
    """

    name: str
    title: str
    paper: Paper | None
    settings: Mapping[str, Any]
    equation: str
    advantage: str
    constants: str = ""
    differs: str = ""
    essential: tuple[str, ...] = ()
    least: Mapping[str, float] = field(default_factory=dict)
    needs_teacher: bool = False

    @property
    def sets(self) -> dict[str, Any]:
        """Every field that the name sets: those of the row, then the neutral rest."""
        return {**self.settings, **{name: value for name, value in neutral().items() if name not in self.settings}}

    @property
    def source(self) -> str:
        """Its paper in one line."""
        return self.paper.reference if self.paper else "TRL"

    def changed(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The settings that are not what the name sets.

        Args:
            given: Fields of ``train``; one that is absent is as the name sets it.
        """
        sets = self.sets.items()
        return {name: given[name] for name, value in sets if name in given and in_words(name, given[name]) != value}

    def overridden(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Those of :meth:`changed` that an update reads.

        Args:
            given: Likewise.
        """
        idle = unused_fields({**self.sets, **given})
        return {name: value for name, value in self.changed(given).items() if name not in idle}


def in_words(name: str, value: Any) -> Any:  # noqa: ANN401 (of any field)
    """The value, as a word where TRL also takes true and false: of ``scale_rewards``."""
    return {True: "group", False: "none"}[value] if name == "scale_rewards" and isinstance(value, bool) else value


def shown_value(value: object) -> str:
    """A setting's value as a recipe writes it: ``0.0003``, ``null``, ``true``."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)
