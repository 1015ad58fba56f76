"""One row for each algorithm that has a name: the paper, and the fields of ``train`` that the name sets.

name -> Algorithm

A name sets fields and nothing else. Recipes, scripts, the plan, cards, ``perl algorithms`` and the table in
``docs/algorithms.md`` read this table; a new algorithm is a row here. It imports no torch.
"""

from collections.abc import Mapping
from typing import Any

from perl.algorithms.algorithm import Algorithm, shown_value
from perl.algorithms.estimators import ADVANTAGES
from perl.algorithms.registry import ENTROPY_MECHANISM, GRPO, GSPO, LOSSES, PAPERS, RLOO
from perl.errors import RecipeError, did_you_mean

KEY = "algorithm"
"""Where a name stands: at the top of a recipe, as a field of ``PeftRLConfig``."""

_MEAN_OF_GROUP = "(R - mean of the group) / std of the group"
_CLIPPED = "min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A)"
_PER_COMPLETION = "mean over the tokens of a completion, then over completions"
_PER_BATCH = "mean over all tokens of the batch"
_BY_MEAN_LENGTH = (
    "the mean over the tokens of the batch is the paper's sum over the tokens of each completion, divided by the "
    "batch's mean length: a factor of a batch, not of a completion"
)
_ONE_UPDATE = "with more than one update a batch nothing corrects for the old policy"
_SELECTED = (
    "tokens are selected once, over the generation batch of all processes and by the old policy's p; verl selects anew "
    "in each micro-batch of each update"
)
_EIGHT_UPDATES = "the paper takes eight updates of a batch and dynamic sampling, which the name does not set"
_OF_PPO = "epsilon 0.2: PPO's (arXiv:1707.06347)"

_ROWS = (
    Algorithm(
        "grpo",
        "GRPO",
        GRPO,
        {"loss_type": "grpo", "beta": 0.04, "use_bias_correction_kl": False},
        f"{_CLIPPED} - beta KL, {_PER_COMPLETION}",
        _MEAN_OF_GROUP,
        f"beta 0.04: section 4.2; {_OF_PPO}, the paper states none",
        "several updates a batch (num_iterations) and outcome rewards only, unless a process reward is given",
    ),
    Algorithm(
        "dr_grpo",
        "Dr. GRPO",
        LOSSES["dr_grpo"].paper,
        {"loss_type": "dr_grpo", "scale_rewards": "none"},
        f"{_CLIPPED}, sum over tokens / (completions x max_completion_length)",
        "R - mean of the group",
        f"no KL term, no division by a deviation: section 3.2; {_OF_PPO}",
    ),
    Algorithm(
        "dapo",
        "DAPO",
        LOSSES["dapo"].paper,
        {"loss_type": "dapo", "epsilon": 0.2, "epsilon_high": 0.28, "mask_truncated_completions": True},
        f"{_CLIPPED}, {_PER_BATCH}",
        _MEAN_OF_GROUP,
        "epsilon 0.2 and 0.28: section 4.1; no KL term: section 2.3; truncated completions masked out: overlong "
        "filtering, table 1",
        "no group is sampled again (dynamic sampling) unless prompts.refill says so; the paper filters truncated "
        "completions first, as the name does, and then has soft overlong punishment, a reward, for its last results "
        "(table 1, section 4.1): rewards.soft_overlong=1.0 train.mask_truncated_completions=false, since what is "
        "masked out is not punished",
    ),
    Algorithm(
        "gspo",
        "GSPO",
        GSPO,
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
        f"min(s A, clip(s, 1 - epsilon, 1 + epsilon_high) A), s the geometric mean of r, {_PER_COMPLETION}",
        _MEAN_OF_GROUP,
        "epsilon 3e-4 and 4e-4: section 5.1; no KL term: the authors in verl's pull request 2775",
        "the paper takes four updates of a batch of rollouts (steps_per_generation), which the name does not set",
        essential=("importance_sampling_level",),
    ),
    Algorithm(
        "cispo",
        "CISPO",
        LOSSES["cispo"].paper,
        {"loss_type": "cispo", "epsilon_high": 5.0},
        f"stop(min(r, epsilon_high)) A log p, {_PER_BATCH}",
        _MEAN_OF_GROUP,
        "epsilon_high 5, the bound itself: ScaleRL (arXiv:2510.13786); MiniMax-M1 states none",
        "MiniMax-M1 averages over the tokens of a group, and takes DAPO's dynamic sampling and length penalty besides",
        essential=("loss_type",),
        least={"epsilon_high": 1.0},
    ),
    Algorithm(
        "sapo",
        "SAPO",
        LOSSES["sapo"].paper,
        {"loss_type": "sapo", "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05},
        f"(4 / tau) sigmoid(tau (r - 1)) A, tau by the sign of A, {_PER_COMPLETION}",
        _MEAN_OF_GROUP,
        "tau 1.0 and 1.05: TRL's and verl's for this paper",
        essential=("loss_type",),
    ),
    Algorithm(
        "rloo",
        "RLOO",
        RLOO,
        {
            "loss_type": "reinforce",
            "advantage_estimator": "rloo",
            "beta": 0.03,
            "kl_in_reward": True,
            "kl_estimator": "k1",
        },
        f"A log p, {_PER_BATCH}",
        "R' - mean of R' of the group's other completions, R' = R - beta log (p / reference) of the completion",
        "beta 0.03: appendix C; the KL penalty is in the reward of the completion: equation 3",
        f"{_BY_MEAN_LENGTH}; {_ONE_UPDATE}",
        essential=("advantage_estimator",),
    ),
    Algorithm(
        "reinforce_pp",
        "REINFORCE++",
        ADVANTAGES["batch"].paper,
        {
            "loss_type": "dapo",
            "advantage_estimator": "batch",
            "beta": 0.01,
            "kl_in_reward": True,
            "kl_estimator": "k1",
        },
        f"{_CLIPPED}, {_PER_BATCH}",
        "(R - beta KL of the token and those after it - mean of the batch) / std of the batch",
        f"beta 0.01: the default of the authors' code (OpenRLHF); {_OF_PPO}",
        "the paper takes a single completion of a prompt (num_generations: 1), which the name does not set",
        essential=("advantage_estimator",),
    ),
    Algorithm(
        "reinforce_pp_baseline",
        "REINFORCE++-baseline",
        ADVANTAGES["group_then_batch"].paper,
        {
            "loss_type": "dapo",
            "advantage_estimator": "group_then_batch",
            "beta": 1e-5,
            "kl_estimator": "k2",
            "use_bias_correction_kl": False,
        },
        f"{_CLIPPED} - beta KL, {_PER_BATCH}",
        "(R - mean of the group) / std of that over the batch",
        f"beta 1e-5 with k2: the authors' script (OpenRLHF, train_reinforce_baseline_hybrid_engine.sh); {_OF_PPO}",
        essential=("advantage_estimator",),
    ),
    Algorithm(
        "maxrl",
        "MaxRL",
        ADVANTAGES["maxrl"].paper,
        {"loss_type": "reinforce", "advantage_estimator": "maxrl"},
        f"A log p, {_PER_BATCH}",
        "(R - mean of the group) / mean of the group",
        "none but the advantage",
        f"for rewards that are not negative; {_BY_MEAN_LENGTH}; {_ONE_UPDATE}",
        essential=("advantage_estimator",),
    ),
    Algorithm(
        "dppo",
        "DPPO",
        LOSSES["dppo"].paper,
        {"loss_type": "dppo", "dppo_divergence": "tv", "dppo_threshold": 0.15, "scale_rewards": "none"},
        f"M r A, M = 0 where p has moved further than the threshold from where it was sampled, {_PER_BATCH}",
        "R - mean of the group",
        "total variation at most 0.15, no division by a deviation: the authors' script (verl, run_qwen30b_dppo.sh)",
        "the script divides by a constant length; with dppo_divergence: kl the script takes 0.05, which "
        "dppo_threshold: null is there",
        essential=("loss_type",),
    ),
    Algorithm(
        "opd",
        "On-policy distillation",
        PAPERS["agarwal2023policy"],
        {"loss_type": "dapo"},
        f"{_CLIPPED} - weight KL(p || teacher), over the whole vocabulary at each token, {_PER_BATCH}",
        f"{_MEAN_OF_GROUP}; 0 without rewards, which are not needed",
        "weight 1, reverse KL and every token on-policy: the blog On-Policy Distillation (Thinking Machines Lab 2025)",
        "the teacher is the same base with another adapter or with a hint that the policy does not see (self-"
        "distillation, arXiv:2601.19897); the KL is exact, the blog takes its estimate at the sampled token as reward; "
        "no mixture with other texts (the paper's lambda is 1)",
        needs_teacher=True,
    ),
    Algorithm(
        "ppo",
        "PPO",
        PAPERS["schulman2017ppo"],
        {
            "loss_type": "dapo",
            "advantage_estimator": "gae",
            "gae_gamma": 1.0,
            "gae_lambda": 0.95,
            "value_clip": 0.2,
        },
        f"{_CLIPPED}, {_PER_BATCH}; critic: max((V - G)^2, (clip(V, V_old - c, V_old + c) - G)^2) / 2, G = A + V_old",
        "sum_l (gamma lambda)^l (R_(t+l) + gamma V_(t+l+1) - V_(t+l)), whitened over the tokens of the batch",
        "epsilon 0.2: table 1; lambda 0.95: table 3; gamma 1: InstructGPT (arXiv:2203.02155, appendix C.4); "
        "value_clip 0.2: the authors' code (baselines, ppo2)",
        "the critic shares the policy's base, not its adapter, and has an optimizer of its own, so its loss has no "
        "weight; several epochs of a batch, and minibatches, are num_iterations and steps_per_generation, which the "
        "name does not set",
        essential=("advantage_estimator",),
    ),
    Algorithm(
        "bnpo",
        "BNPO",
        None,
        {"loss_type": "bnpo"},
        f"{_CLIPPED}, mean over the tokens of a micro-batch",
        _MEAN_OF_GROUP,
        _OF_PPO,
        "TRL's loss of this name; that of arXiv:2506.02864 is another one",
        essential=("loss_type",),
    ),
    Algorithm(
        "luspo",
        "LUSPO",
        LOSSES["luspo"].paper,
        {"loss_type": "luspo", "importance_sampling_level": "sequence", "epsilon": 2e-3, "epsilon_high": 2.5e-3},
        "min(s A, clip(s, 1 - epsilon, 1 + epsilon_high) A), s the geometric mean of r, times the completion's length, "
        "mean over completions",
        _MEAN_OF_GROUP,
        "epsilon 2e-3 and 2.5e-3: section 5.1",
        essential=("loss_type", "importance_sampling_level"),
    ),
    Algorithm(
        "vespo",
        "VESPO",
        LOSSES["vespo"].paper,
        {
            "loss_type": "vespo",
            "vespo_k_pos": 2.0,
            "vespo_lambda_pos": 3.0,
            "vespo_k_neg": 3.0,
            "vespo_lambda_neg": 2.0,
        },
        f"stop(w^k exp(lambda (1 - w))) A log p, w the product of r, {_PER_BATCH}",
        _MEAN_OF_GROUP,
        "k 2 and 3, lambda 3 and 2: section 3.4, c1 and c2",
        "log w is clamped as in its reference implementation",
        essential=("loss_type",),
    ),
    Algorithm(
        "lite_ppo",
        "Lite PPO",
        PAPERS["liu2025tricks"],
        {"loss_type": "dapo", "scale_rewards": "batch"},
        f"{_CLIPPED}, {_PER_BATCH}",
        "(R - mean of the group) / std of the batch",
        f"no KL term: the paper's init_kl_coef; {_OF_PPO}",
        "the paper samples at temperature 0.99, top_p 0.99 and top_k 100, which the name does not set",
        essential=("scale_rewards",),
    ),
    Algorithm(
        "gdpo",
        "GDPO",
        PAPERS["liu2026gdpo"],
        {"loss_type": "grpo", "multi_objective_aggregation": "normalize_then_sum"},
        f"{_CLIPPED}, {_PER_COMPLETION}",
        "each reward normalised in its group, their weighted sum normalised over the batch",
        f"{_OF_PPO}; beta 0 is not from the paper",
        "with a single reward the group's normalisation and the batch's are both left",
        essential=("multi_objective_aggregation",),
    ),
    Algorithm(
        "icepop",
        "IcePop",
        PAPERS["lingteam2025every"],
        {
            "loss_type": "grpo",
            "vllm_importance_sampling_correction": True,
            "vllm_importance_sampling_mode": "token_mask",
            "vllm_importance_sampling_clip_min": 0.5,
            "vllm_importance_sampling_clip_max": 5.0,
        },
        f"M(m) {_CLIPPED}, m the ratio of old policy to engine, M(m) = m from 0.5 to 5, else 0, {_PER_COMPLETION}",
        _MEAN_OF_GROUP,
        f"0.5 and 5: OpenRLHF's for icepop, and INTELLECT-3's (arXiv:2512.16144); {_OF_PPO}",
        "without vLLM there is no second engine whose numbers differ, and it is GRPO without a KL term",
        essential=("vllm_importance_sampling_correction", "vllm_importance_sampling_mode"),
    ),
    Algorithm(
        "gmpo",
        "GMPO",
        LOSSES["gmpo"].paper,
        {"loss_type": "gmpo", "epsilon": 0.4, "epsilon_high": 0.4},
        "A exp(mean over the tokens of clip(log r, -epsilon, epsilon_high)), mean over completions",
        _MEAN_OF_GROUP,
        "epsilon 0.4: the paper's bounds e^-0.4 and e^0.4; no KL term: the authors' script (verl)",
        essential=("loss_type",),
    ),
    Algorithm(
        "clip_cov",
        "Clip-Cov",
        ENTROPY_MECHANISM,
        {
            "loss_type": "clip_cov",
            "epsilon": 1.0,
            "epsilon_high": 1.0,
            "cov_fraction": 2e-4,
            "cov_low": 1.0,
            "cov_high": 5.0,
        },
        f"{_CLIPPED}, 0 for some tokens with (log p - its mean) (A - its mean) between bounds, {_PER_BATCH}",
        _MEAN_OF_GROUP,
        "fraction 2e-4, covariance from 1 to 5, epsilons 1: the authors' script (verl, recipe/entropy/7b_clip_cov.sh)",
        f"{_SELECTED}; {_EIGHT_UPDATES}",
        essential=("loss_type",),
    ),
    Algorithm(
        "kl_cov",
        "KL-Cov",
        ENTROPY_MECHANISM,
        {"loss_type": "kl_cov", "cov_fraction": 2e-3, "cov_kl_weight": 1.0},
        f"r A, less abs(log r) for the tokens of the largest (log p - its mean) (A - its mean), {_PER_BATCH}",
        _MEAN_OF_GROUP,
        "fraction 2e-3 and weight 1: the authors' script for 7B (verl, recipe/entropy/7b_kl_cov.sh; for 32B 2e-4)",
        "abs(log r) is the authors' code's for the paper's KL(p_old, p): both are 0, with gradient 0, in the first "
        f"update of a batch, and with one update nothing is left but r A; {_SELECTED}; {_EIGHT_UPDATES}",
        essential=("loss_type",),
    ),
    Algorithm(
        "opo",
        "OPO",
        ADVANTAGES["opo"].paper,
        {"loss_type": "reinforce", "advantage_estimator": "opo"},
        f"A log p, {_PER_BATCH}",
        "R - mean of the group weighted by the completions' lengths",
        "no KL term and no entropy bonus: verl's page, by the authors",
        f"exactly on-policy in the paper; {_ONE_UPDATE}",
        essential=("advantage_estimator",),
    ),
    Algorithm(
        "gpg",
        "GPG",
        ADVANTAGES["gpg"].paper,
        {"loss_type": "reinforce", "advantage_estimator": "gpg"},
        f"A log p, {_PER_BATCH}",
        "(R - mean of the group) x groups / groups with a signal",
        "no KL term and no clipping: the authors' code (AMAP-ML/GPG), F_norm 1",
        f"no group is sampled again where few have a signal (the paper's beta_th 0.6); {_ONE_UPDATE}",
        essential=("advantage_estimator",),
    ),
    Algorithm(
        "remax",
        "ReMax",
        ADVANTAGES["remax"].paper,
        {"loss_type": "reinforce", "advantage_estimator": "remax"},
        f"A log p, {_PER_BATCH}",
        "R - R of the prompt's greedy completion, one more rollout a prompt",
        "none but the baseline; beta 0 is not from the paper",
        "the paper's RLHF has a KL penalty in the reward: beta and kl_in_reward, which the name does not set; "
        f"{_BY_MEAN_LENGTH}; {_ONE_UPDATE}",
        essential=("advantage_estimator",),
    ),
    Algorithm(
        "pass_at_k",
        "pass@k",
        ADVANTAGES["pass_at_k"].paper,
        {"loss_type": "reinforce", "advantage_estimator": "pass_at_k"},
        f"A log p, {_PER_BATCH}",
        "R - second largest of the group for its best completion, else 0; k is num_generations",
        "none but the advantage; beta 0 is not from the paper",
        f"not divided by the group's deviation, which verl does; {_ONE_UPDATE}",
        essential=("advantage_estimator",),
    ),
)
ALGORITHMS: dict[str, Algorithm] = {row.name: row for row in _ROWS}


def find_algorithm(name: object) -> Algorithm:
    """The row of a name.

    Raises:
        RecipeError: There is none; says the nearest.
    """
    if isinstance(name, str) and name in ALGORITHMS:
        return ALGORITHMS[name]
    if not isinstance(name, str):
        raise RecipeError(f"must be a name, not {str(name)[:60]}", KEY, "`perl algorithms` lists them")
    raise RecipeError(f"no algorithm {name!r}", KEY, did_you_mean(name, ALGORITHMS))


def named_facts(args: object) -> dict[str, Any]:
    """What a run and its card say of the name that its arguments have; nothing if they have none.

    Args:
        args: With the fields of ``train`` as attributes.
    """
    row = ALGORITHMS.get(getattr(args, KEY, None) or "")
    if row is None:
        return {}
    return {KEY: row.name, "overridden": row.overridden({name: getattr(args, name) for name in row.sets})}


def shown_settings(settings: Mapping[str, Any]) -> str:
    """Settings in one line: ``loss_type grpo, epsilon 0.0003``."""
    return ", ".join(f"{name} {shown_value(value)}" for name, value in settings.items())
