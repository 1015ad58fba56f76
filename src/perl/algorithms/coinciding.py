"""Which names of algorithms mean the same update where the policy is the old policy.

a name, the run's settings -> the other names

There the ratio is 1, and every objective has the gradient A d log p, whatever bounds the ratio, and where one ratio is
that of a whole completion too. What is left is how tokens are averaged, the advantage, and what is masked out. Where an
objective is corrected for another engine, tokens have weights of their own, and the level of the ratio counts again;
so does a mask of rows that are far from what the engine has sampled.
"""

from collections.abc import Mapping
from typing import Any

from perl.algorithms.algorithm import Algorithm, in_words
from perl.algorithms.estimators import ADVANTAGES
from perl.algorithms.named import ALGORITHMS
from perl.algorithms.registry import AS_SET, LEVEL, LOSSES

_ALWAYS = (
    *("advantage_estimator", "entropy_weight", "kl_in_reward"),
    *("multi_objective_aggregation", "mask_truncated_completions", "top_entropy_quantile"),
    *("entropy_coef", "use_adaptive_entropy", "beta"),
)
_WITH_KL = ("kl_estimator", "use_bias_correction_kl", "importance_sampling_level")
_WITH_CORRECTION = (
    "vllm_importance_sampling_correction",
    "vllm_importance_sampling_mode",
    "vllm_importance_sampling_clip_min",
    "vllm_importance_sampling_clip_max",
)

_LEVELS = {"none": "token"}  # a loss without a ratio has the gradient of a ratio of tokens


def same_on_policy(row: Algorithm, settings: Mapping[str, Any], *, corrected: bool, one_pass: bool) -> list[str]:
    """The other names whose update is this one's where the ratio of policy to old policy is 1.

    Args:
        row: The algorithm of the run.
        settings: The run's fields of ``train``, all of them.
        corrected: Whether rollouts have the log-probs of another engine, for which the objective is corrected.
        one_pass: Whether a step is one micro-batch of one process, so that a mean over one is a mean over the other.
    """
    own = _what_counts({**row.sets, **settings}, corrected=corrected, one_pass=one_pass)
    found = []
    for other in ALGORITHMS.values():
        theirs = _what_counts({**settings, **other.sets}, corrected=corrected, one_pass=one_pass)
        left = own.keys() & row.settings.keys() - other.sets.keys()  # which the other name would take back
        alike = other.needs_teacher == row.needs_teacher  # one of which asks for a teacher, which is in no setting
        if other.name != row.name and theirs == own and not left and alike:
            found.append(other.name)
    return found


def _what_counts(settings: Mapping[str, Any], *, corrected: bool, one_pass: bool) -> dict[str, Any]:
    loss = LOSSES[settings["loss_type"]]
    scaled = "scale" in ADVANTAGES[settings["advantage_estimator"]].reads
    names = [*_ALWAYS, *(_WITH_KL if settings.get("beta") else ()), *(_WITH_CORRECTION if corrected else ())]
    found = {name: settings.get(name) for name in names}
    alike = one_pass and loss.aggregation == LOSSES["bnpo"].aggregation
    found |= {"aggregation": LOSSES["dapo"].aggregation if alike else loss.aggregation}
    if loss.selection is not None and not loss.selection.acts:  # tokens without a gradient; what acts, acts off policy
        found |= {"selection": loss.selection.ranks, **{name: settings.get(name) for name in loss.selection.settings}}
    found |= {"scale": in_words("scale_rewards", settings.get("scale_rewards")) if scaled else None}
    if corrected:
        found |= {"off-policy rows": settings.get("off_policy_mask_threshold")}
        level = settings.get(LEVEL) if loss.level == AS_SET else _LEVELS.get(loss.level, loss.level)
        found |= {"level": level, "own correction": loss.corrects_sampling, "own bounds": loss.bounds_sampling}
    return found
