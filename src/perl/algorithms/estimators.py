"""One row for each estimator of the advantage: what it computes, what it reads and cites.

name -> Estimator

A new estimator is a row here and its function in ``advantages.py``. Recipes, the trainer, the table in
``docs/training-step.md`` and the tests over all estimators read this table. It imports no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from perl.algorithms.registry import GRPO, PAPERS, RLOO, Paper
from perl.errors import Mistake

Penalty = Literal["", "completion", "tokens", "whitened"]
"""What beta times the KL divergence is taken off, if it is not in the loss. Empty: nothing, there is no such penalty;
``completion``: a completion's reward, all of it; ``tokens``: a token's advantage, that of it and of those after it;
``whitened``: likewise, and the differences are whitened over the tokens of the batch."""
FIELDS: Mapping[str, str] = {"scale": "scale_rewards"}
"""What an estimator reads -> field of ``train``, where it is one."""


@dataclass(frozen=True)
class Estimator:
    """An estimator. In ``equation`` r is a completion's reward, mean and std are without those that are missing.

    Attributes:
        name: As in ``train.advantage_estimator``.
        title: What people call it.
        paper: Where it is from.
        function: ``module:function``, of (P, G) rewards and what ``reads`` names -> (P, G) advantages.
        equation: The advantage of a completion.
        flat: The advantage where all rewards of a group agree.
        reads: Keywords of the function beside the rewards: ``scale`` (``train.scale_rewards``) and ``lengths_PG``
            (tokens of each completion that are in the loss).
        penalty: How a KL penalty of the rewards acts.
        before_kl: ``module:function`` of (P, G) rewards, what the KL penalty of tokens is taken off where it is not
            the advantage.
        not_negative: Whether rewards must not be negative.
        alone: Whether the only completion of a prompt has an advantage.
        compares: Whether a completion has no advantage, not even 0, without another one beside it.
        critic: Whether a critic is trained, whose values advantages are made of, token by token (``gae.py``);
            ``function`` then is what the table of completions shows.
        differs: Where it is not the paper's.
    """

    name: str
    title: str
    paper: Paper
    function: str
    equation: str
    flat: str = "0"
    reads: tuple[str, ...] = ()
    penalty: Penalty = ""
    before_kl: str = ""
    not_negative: bool = False
    alone: bool = False
    compares: bool = False
    critic: bool = False
    differs: str = ""

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields of ``train`` that only some estimators read, those that this one does."""
        return tuple(FIELDS[name] for name in self.reads if name in FIELDS)

    @property
    def writes_greedy(self) -> bool:
        """Whether a greedy completion of each prompt is written too."""
        return "greedy_PG" in self.reads


REINFORCE_PLUS_PLUS = PAPERS["hu2025reinforcepp"]
GAE = PAPERS["schulman2016gae"]
_BY_TOKENS = "verl and OpenRLHF weigh each completion by its tokens"

_ROWS = (
    Estimator(
        "group",
        "GRPO",
        GRPO,
        "perl.algorithms.advantages:group_advantages",
        "(r - mean_group) / std, that of scale_rewards: group, batch or none",
        reads=("scale",),
    ),
    Estimator(
        "rloo",
        "RLOO",
        RLOO,
        "perl.algorithms.advantages:leave_one_out_advantages",
        "r - mean of the group's other completions",
        penalty="completion",
        compares=True,
    ),
    Estimator(
        "batch",
        "REINFORCE++",
        REINFORCE_PLUS_PLUS,
        "perl.algorithms.advantages:batch_advantages",
        "(r - mean_batch) / std_batch",
        flat="as any; 0 if the whole batch agrees",
        penalty="whitened",
        before_kl="perl.algorithms.advantages:rewards_alone",
        alone=True,
        differs=_BY_TOKENS,
    ),
    Estimator(
        "group_then_batch",
        "REINFORCE++-baseline",
        REINFORCE_PLUS_PLUS,
        "perl.algorithms.advantages:group_then_batch_advantages",
        "d / std_batch(d), d = r - mean_group",
        penalty="whitened",
        before_kl="perl.algorithms.advantages:group_differences",
        differs=_BY_TOKENS,
    ),
    Estimator(
        "maxrl",
        "MaxRL",
        PAPERS["tajwar2026maxrl"],
        "perl.algorithms.advantages:maximum_likelihood_advantages",
        "(r - mean_group) / mean_group",
        not_negative=True,
    ),
    Estimator(
        "opo",
        "OPO",
        PAPERS["hao2025opo"],
        "perl.algorithms.advantages:optimal_baseline_advantages",
        "r - sum(l r) / sum(l), l the tokens of a completion",
        reads=("lengths_PG",),
    ),
    Estimator(
        "gpg",
        "GPG",
        PAPERS["chu2025gpg"],
        "perl.algorithms.advantages:live_share_advantages",
        "(r - mean_group) groups / groups with a signal",
        differs="no group is sampled again for want of a signal",
    ),
    Estimator(
        "remax",
        "ReMax",
        PAPERS["li2023remax"],
        "perl.algorithms.advantages:greedy_baseline_advantages",
        "r - r_greedy, of the completion that takes the likeliest token each time",
        flat="r - r_greedy",
        penalty="tokens",
        alone=True,
        reads=("greedy_PG",),
    ),
    Estimator(
        "pass_at_k",
        "pass@k",
        PAPERS["tang2025passatk"],
        "perl.algorithms.advantages:best_of_group_advantages",
        "r_max - r_second for the best of a group, else 0",
        compares=True,
        differs="as in verl, but not divided by the group's deviation",
    ),
    Estimator(
        "gae",
        "GAE",
        GAE,
        "perl.algorithms.advantages:batch_advantages",
        "sum_l (gamma lambda)^l (r_(t+l) + gamma V_(t+l+1) - V_(t+l)) of token t, whitened over the batch's tokens",
        flat="as any",
        penalty="whitened",
        before_kl="perl.algorithms.advantages:rewards_alone",
        alone=True,
        critic=True,
        differs="V is a critic's, trained along",
    ),
)
ADVANTAGES: dict[str, Estimator] = {row.name: row for row in _ROWS}


def generations_mistake(estimator: str, generations: int | None, *, signal: bool = True) -> Mistake | None:
    """What is wrong with a single completion of each prompt, under the name of the setting; None: nothing.

    Args:
        estimator: Name of a row; another name is somebody else's mistake.
        generations: Completions of a prompt; None: as many as usual.
        signal: Whether there is anything to make advantages of: a reward that counts, or a KL penalty.
    """
    row = ADVANTAGES.get(estimator)
    if generations != 1 or row is None or row.alone or not (signal or row.compares):
        return None
    alone = " or ".join(name for name, row in ADVANTAGES.items() if row.alone)
    what = f"must be greater than or equal to 2, not 1: advantage_estimator {estimator} compares a prompt's completions"
    return Mistake(what, "num_generations", f"advantage_estimator: {alone} takes one")


def evaluation_mistake(estimator: str, generations: int | None, when: str) -> Mistake | None:
    """What is wrong with a single completion of each prompt in evaluations, under the name of the setting.

    Args:
        estimator: Name of a row; another name is somebody else's mistake.
        generations: Completions of a prompt in evaluations; None: as many as in training.
        when: ``eval_strategy``.

    Returns:
        None where nothing is wrong, and where nothing is evaluated.
    """
    row = ADVANTAGES.get(estimator)
    if generations != 1 or when == "no" or row is None or not row.compares:
        return None
    what = f"must be 2 or more, not 1: advantage_estimator {estimator} compares completions in evaluations too"
    return Mistake(what, "num_generations_eval", "leave it out, which is as in training, or eval_strategy: no")
