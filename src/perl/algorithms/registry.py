"""One row for each loss: what it minimises, how tokens are weighted, what it reads, logs and cites.

name -> Loss

A new loss is a row here and its functions in ``losses.py``, or both in a package of the user's, which
:func:`load_extensions` imports. Recipes, the objective, metrics, cards, the table in ``docs/training-step.md`` and the
tests over all losses read this table. It imports no torch, so that a recipe's loss is checked at once; functions are
named as ``module:function`` and looked up when they are first called.
"""

import functools
import importlib
import importlib.metadata
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from perl.errors import Mistake, PerlError, did_you_mean, first_line

Reduction = Literal["mean", "min", "max"]

ARGUMENTS: Mapping[str, str] = {
    "ratio_level": "importance_sampling_level",
    "epsilon_low": "epsilon",
    "correct_kl": "use_bias_correction_kl",
}
"""Field of ``LossSettings`` -> field of ``train``, where that has another name."""
LEVEL = ARGUMENTS["ratio_level"]
AS_SET = "as set"
"""The level of a loss whose ratio is as :data:`LEVEL` says."""


@dataclass(frozen=True)
class Paper:
    """Where a formula is from.

    Attributes:
        key: Key of its BibTeX entry.
        authors: As they are cited, ``Yu et al.``.
        year: Of publication.
        title: Of the paper.
        arxiv: Its number there.
    """

    key: str
    authors: str
    year: int
    title: str
    arxiv: str

    @property
    def reference(self) -> str:
        """In one line: ``Yu et al. 2025, arXiv:2503.14476``."""
        return f"{self.authors} {self.year}, arXiv:{self.arxiv}"


@dataclass(frozen=True)
class Selection:
    """How a loss selects tokens of a generation batch, from the old policy's log-probs and the advantages.

    Attributes:
        ranks: ``module:function``, (covariances, draw, settings) -> rank of each token; the highest are selected.
        settings: The fields of ``train`` that it reads.
        acts: Whether a selected token has a gradient of its own, whatever its advantage, once the policy has moved.
    """

    ranks: str
    settings: tuple[str, ...]
    acts: bool = False


@dataclass(frozen=True)
class Loss:
    """A loss. In ``equation`` and ``clip``, r is the ratio of policy to old policy, A the advantage, p the policy.

    Attributes:
        name: As in ``train.loss_type``.
        title: What people call it.
        paper: Where it is from; None: it has no paper.
        surrogate: ``module:function``, (ratio, inputs, settings) -> (objective of each token, quantities to log).
        aggregation: ``module:function``, (mask, step) -> weight of each token in the loss of its optimizer step.
        equation: The objective of a token.
        weighting: What a token's weight divides by.
        clip: How the ratio is bounded.
        level: Level of the importance ratio: ``as set`` by ``train.importance_sampling_level``, or the loss's own.
        settings: The fields of ``LossSettings`` that only some losses read, those that this one does.
        logs: Quantity that the surrogate returns -> how its rows are reduced; the metric is ``QUANTITY_REDUCTION``.
            Without reductions it is a mean under the quantity's own name.
        differs: Where it is not the paper's.
        corrects_sampling: Whether its own weight holds the correction for the engine that sampled; otherwise the
            objective is multiplied by it.
        in_trl: Whether TRL's trainer has it too, and so can run it where a step is TRL's.
        selection: Which tokens it treats apart; None: all tokens alike.
    """

    name: str
    title: str
    paper: Paper | None
    surrogate: str
    aggregation: str
    equation: str
    weighting: str
    clip: str
    level: str = AS_SET
    settings: tuple[str, ...] = ()
    logs: Mapping[str, tuple[Reduction, ...]] = field(default_factory=dict)
    differs: str = ""
    corrects_sampling: bool = False
    in_trl: bool = True
    selection: Selection | None = None

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields of ``train`` that only some losses read, those that this one does."""
        of_selection = self.selection.settings if self.selection is not None else ()
        of_ratio = (LEVEL,) if self.level == AS_SET else ()
        return (*(ARGUMENTS.get(name, name) for name in self.settings), *of_selection, *of_ratio)

    @property
    def metrics(self) -> dict[str, tuple[str, Reduction]]:
        """Name of each metric -> the quantity that it is of, and how that is reduced."""
        found: dict[str, tuple[str, Reduction]] = {}
        for quantity, reductions in self.logs.items():
            found |= {f"{quantity}_{reduction}": (quantity, reduction) for reduction in reductions}
            if not reductions:
                found[quantity] = (quantity, "mean")
        return found


_TEXT = Path(__file__).with_name("papers.toml").read_text(encoding="utf-8")
PAPERS: Mapping[str, Paper] = {key: Paper(key, **facts) for key, facts in tomllib.loads(_TEXT).items()}
GRPO = PAPERS["shao2024deepseekmath"]
RLOO = PAPERS["ahmadian2024rloo"]
ENTROPY_MECHANISM = PAPERS["cui2025entropy"]
GSPO = PAPERS["zheng2025gspo"]


_DUAL_CLIP = "1 - epsilon to 1 + epsilon_high; with A < 0 at most delta (dual clip, arXiv:1912.09729)"


def _clipped(name: str, title: str, paper: Paper | None, aggregation: str, weighting: str, differs: str = "") -> Loss:
    """A row of PPO's clipped surrogate, which differs from the others in how tokens are weighted."""
    return Loss(
        name,
        title,
        paper,
        "perl.algorithms.losses:clipped_surrogate",
        f"perl.algorithms.losses:{aggregation}",
        equation="-min(r A, clip(r) A)",
        weighting=weighting,
        clip=_DUAL_CLIP,
        settings=("epsilon_low", "epsilon_high", "delta"),
        logs={"clip_ratio/low": ("mean", "min"), "clip_ratio/high": ("mean", "max"), "clip_ratio/region": ("mean",)},
        differs=differs,
    )


_ROWS = (
    _clipped("grpo", "GRPO", GRPO, "completion_mean", "tokens of its completion"),
    _clipped(
        "bnpo",
        "BNPO",
        None,
        "micro_batch_mean",
        "tokens of its micro-batch",
        "TRL's loss of this name; that of arXiv:2506.02864 is another one",
    ),
    _clipped(
        "dr_grpo",
        "Dr. GRPO",
        PAPERS["liu2025understanding"],
        "constant_length",
        "max_completion_length",
        "the paper's advantages need scale_rewards: none besides",
    ),
    _clipped(
        "dapo",
        "DAPO",
        PAPERS["yu2025dapo"],
        "step_mean",
        "tokens of the generation batch",
        "the loss alone: no group is sampled again for want of a signal",
    ),
    _clipped(
        "luspo",
        "LUSPO",
        PAPERS["liu2026luspo"],
        "completion_sum",
        "number of completions",
        "the paper's ratio is that of importance_sampling_level: sequence",
    ),
    Loss(
        "cispo",
        "CISPO",
        PAPERS["minimax2025m1"],
        "perl.algorithms.losses:cispo_surrogate",
        "perl.algorithms.losses:step_mean",
        equation="-stop(min(r, epsilon_high)) A log p",
        weighting="tokens of the generation batch",
        clip="at most epsilon_high, as a weight without gradient",
        settings=("epsilon_high",),
        logs={"cispo_clip_ratio": ()},
        differs="no lower bound; epsilon_high is the bound itself, as in TRL",
    ),
    Loss(
        "sapo",
        "SAPO",
        PAPERS["gao2025sapo"],
        "perl.algorithms.losses:sapo_surrogate",
        "perl.algorithms.losses:completion_mean",
        equation="-(4 / tau) sigmoid(tau (r - 1)) A",
        weighting="tokens of its completion",
        clip="none: a gate, tau by the sign of A",
        settings=("sapo_temperature_pos", "sapo_temperature_neg"),
    ),
    Loss(
        "vespo",
        "VESPO",
        PAPERS["shen2026vespo"],
        "perl.algorithms.losses:vespo_surrogate",
        "perl.algorithms.losses:step_mean",
        equation="-stop(w^k exp(lambda (1 - w))) A log p",
        weighting="tokens of the generation batch",
        clip="none: k and lambda by the sign of A",
        level="sequence: w, the product of r over the completion",
        settings=("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"),
        logs={"vespo/phi_seq": ("mean",)},
        differs="log w is clamped as in its reference implementation",
        corrects_sampling=True,
    ),
    Loss(
        "reinforce",
        "REINFORCE",
        RLOO,
        "perl.algorithms.losses:reinforce_surrogate",
        "perl.algorithms.losses:step_mean",
        equation="-A log p",
        weighting="tokens of the generation batch",
        clip="none",
        level="none",
        differs="the paper adds up a completion's tokens; off policy nothing corrects for the old policy",
        in_trl=False,
    ),
    Loss(
        "dppo",
        "DPPO",
        PAPERS["qi2026dppo"],
        "perl.algorithms.losses:dppo_surrogate",
        "perl.algorithms.losses:step_mean",
        equation="-M r A, M = 0 where p is too far from q and would move on",
        weighting="tokens of the generation batch",
        clip="none: M bounds the binary TV, or KL with dppo_divergence: kl, by dppo_threshold",
        settings=("dppo_divergence", "dppo_threshold"),
        logs={"dppo_masked": ()},
        differs="q is the engine's probability where it has one, else the old policy's; no top-K divergence",
        in_trl=False,
    ),
    Loss(
        "gmpo",
        "GMPO",
        PAPERS["zhao2025gmpo"],
        "perl.algorithms.losses:gmpo_surrogate",
        "perl.algorithms.losses:completion_mean",
        equation="-A exp(mean of clip(log r))",
        weighting="tokens of its completion",
        clip="log r at most epsilon_high where A > 0, at least -epsilon where A < 0",
        level="geometric mean of the clipped r of tokens",
        settings=("epsilon_low", "epsilon_high"),
        logs={"clip_ratio/low": ("mean", "min"), "clip_ratio/high": ("mean", "max"), "clip_ratio/region": ("mean",)},
        differs="the paper's bounds are epsilon: 0.4",
        in_trl=False,
    ),
    Loss(
        "clip_cov",
        "Clip-Cov",
        ENTROPY_MECHANISM,
        "perl.algorithms.covariance:clip_cov_surrogate",
        "perl.algorithms.losses:step_mean",
        equation="-min(r A, clip(r) A), 0 for selected tokens",
        weighting="tokens of the generation batch",
        clip=_DUAL_CLIP,
        level="of each token",
        settings=("epsilon_low", "epsilon_high", "delta"),
        logs={"clip_ratio/low": ("mean", "min"), "clip_ratio/high": ("mean", "max"), "clip_ratio/region": ("mean",)},
        differs="tokens are selected once a generation batch, by the old policy; in verl in each micro-batch",
        in_trl=False,
        selection=Selection("perl.algorithms.covariance:drawn_within_bounds", ("cov_fraction", "cov_low", "cov_high")),
    ),
    Loss(
        "kl_cov",
        "KL-Cov",
        ENTROPY_MECHANISM,
        "perl.algorithms.covariance:kl_cov_surrogate",
        "perl.algorithms.losses:step_mean",
        equation="-r A, + cov_kl_weight abs(log r) for selected tokens",
        weighting="tokens of the generation batch",
        clip="none",
        level="of each token",
        settings=("cov_kl_weight",),
        differs="tokens are selected once a generation batch, by the old policy; in verl in each micro-batch",
        in_trl=False,
        selection=Selection("perl.algorithms.covariance:by_covariance", ("cov_fraction",), acts=True),
    ),
)
LOSSES: dict[str, Loss] = {row.name: row for row in _ROWS}


def loss_mistakes(sections: Mapping[str, Any]) -> list[tuple[tuple[str, ...], Mistake]]:
    """What is wrong with ``train.loss_type`` and the bounds of its ratio.

    Args:
        sections: The recipe's valid sections by name.

    Returns:
        Key path and mistake, if there is no such loss, or a bound is below another.
    """
    train = sections.get("train", {})
    name = train.get("loss_type", "dapo")
    if name in LOSSES:
        return [
            (("train", mistake.where), Mistake(mistake.message, hint=mistake.hint)) for mistake in delta_mistakes(train)
        ]
    message = f"must be one of {', '.join(LOSSES)}, not {name!r}"
    return [(("train", "loss_type"), Mistake(message, hint=did_you_mean(name, LOSSES)))]


def delta_mistakes(train: Mapping[str, Any]) -> list[Mistake]:
    """Dual clip's bound below that of the clip, which is then no bound where the clip leaves the ratio open.

    Args:
        train: Fields of ``train``; those that are absent are as by default.
    """
    loss, delta = LOSSES.get(train.get("loss_type", "dapo")), train.get("delta")
    low, high = train.get("epsilon", 0.2), train.get("epsilon_high")
    upper = 1 + (low if high is None else high)
    if loss is None or "delta" not in loss.fields or delta is None or delta >= upper:
        return []
    what = f"{delta:g} is below 1 + epsilon_high, {upper:g}: dual clip bounds the ratio above the clip, where A < 0"
    return [Mistake(what, "delta", f"{upper:g} or more, 3 in arXiv:1912.09729; null: no bound")]


@functools.cache
def load_extensions() -> None:
    """Imports the installed packages with an entry point in the group ``perl``; they add rows to tables like this."""
    for package in importlib.metadata.entry_points(group="perl"):
        try:
            package.load()
        except Exception as error:  # whatever a package of others raises
            what = f"the installed extension {package.name} cannot be loaded: {first_line(error)}"
            raise PerlError(what, package.value, "mend or remove its package") from error


@functools.cache
def function_at(place: str) -> Callable[..., Any]:
    """The function or class that a row names as ``module:function``."""
    module, _, name = place.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found
