"""What is minimised, in verl's words: loss, clip, advantage, KL divergence, correction for the engine.

fields of ``train`` -> overrides, what cannot be said, where verl's numbers differ

The definitions compared are ``perl.algorithms`` and verl 0.9.1's ``core_algos.py``. Where a formula is the same up to a
constant below, it is said; where it is another one, it is refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from perl.algorithms.critic_settings import SETTINGS as CRITIC
from perl.errors import Mistake

_ACTOR = "actor_rollout_ref.actor"
NEVER = 1.0e9
"""A bound that no ratio and no value reaches."""


@dataclass
class Mapped:
    """What became of some settings.

    Attributes:
        overrides: verl's key -> value.
        mistakes: What verl cannot do, by key of the recipe.
        notes: Where it does it by other numbers, a line each.
    """

    overrides: dict[str, Any] = field(default_factory=dict)
    mistakes: list[Mistake] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def refuse(self, key: str, why: str, instead: str) -> None:
        """Adds a mistake."""
        self.mistakes.append(Mistake(f"cannot go to verl: {why}", key, instead))


# Loss -> (verl's loss, how tokens are averaged), of a ratio for each token; the clipped ones have a ratio of sequences.
_LOSSES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "grpo": ("vanilla", "seq-mean-token-mean"),
        "dapo": ("vanilla", "token-mean"),
        "dr_grpo": ("vanilla", "seq-mean-token-sum-norm"),
        "luspo": ("vanilla", "seq-mean-token-sum"),
        "cispo": ("cispo", "token-mean"),
        "sapo": ("sapo", "seq-mean-token-mean"),
        "reinforce": ("gpg", "token-mean"),
    }
)
_OTHER_LOSSES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "bnpo": ("verl averages over no micro-batch, since its size may vary", "loss_type: dapo"),
        "vespo": ("verl has no such loss", "loss_type: cispo"),
        "dppo": ("verl's truncates the ratio at 20 and bounds otherwise", "loss_type: dapo"),
        "gmpo": ("verl averages completions over a micro-batch, whose size may vary", "loss_type: grpo"),
        "clip_cov": ("verl selects tokens anew in each micro-batch", "loss_type: dapo"),
        "kl_cov": ("verl selects tokens anew in each micro-batch", "loss_type: dapo"),
    }
)
_ESTIMATORS: Mapping[str, str] = MappingProxyType(
    {
        "group": "grpo",
        "rloo": "rloo",
        "opo": "opo",
        "batch": "reinforce_plus_plus",
        "group_then_batch": "reinforce_plus_plus_baseline",
        "gae": "gae",
    }
)
_OTHER_ESTIMATORS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "maxrl": ("verl has no such advantage", "advantage_estimator: group"),
        "gpg": ("verl's counts rewards that are not 0, not groups with a signal", "advantage_estimator: group"),
        "remax": ("greedy completions are not in verl's new trainer", "advantage_estimator: rloo"),
        "pass_at_k": ("verl's is divided by the group's deviation", "advantage_estimator: group"),
    }
)
_KL = {"k1": "kl", "k2": "mse", "k3": "low_var_kl"}


def objective(arguments: Any) -> Mapped:  # noqa: ANN401 (PeftRLConfig, or any object with its fields)
    """The overrides of everything that is in the loss.

    Args:
        arguments: The trainer's, complete.
    """
    mapped = Mapped()
    _loss(arguments, mapped)
    _advantage(arguments, mapped)
    _divergence(arguments, mapped)
    _correction(arguments, mapped)
    if arguments.advantage_estimator == "gae":
        _critic(arguments, mapped)
    return mapped


def _loss(arguments: Any, mapped: Mapped) -> None:  # noqa: ANN401
    name, sequences = arguments.loss_type, arguments.importance_sampling_level == "sequence"
    if name in _OTHER_LOSSES:
        why, instead = _OTHER_LOSSES[name]
        mapped.refuse("train.loss_type", f"{name}: {why}", instead)
        return
    mode, mean = _LOSSES[name]
    low = arguments.epsilon
    high = low if arguments.epsilon_high is None else arguments.epsilon_high
    if sequences and mode == "vanilla":
        mode = "gspo"
    elif sequences and name != "reinforce":
        what = f"verl's {name} has a ratio for each token"
        mapped.refuse("train.importance_sampling_level", what, "token, or loss_type: grpo")
    if mode == "gspo" and arguments.delta is not None:
        mapped.refuse("train.delta", "verl has no dual clip for ratios of sequences", "null")
    if mode == "cispo":  # ours bounds the ratio itself, from above alone; verl clamps it to 1 - low, 1 + high
        low, high = 1.0, high - 1.0
    mapped.overrides |= {
        f"{_ACTOR}.policy_loss.loss_mode": mode,
        f"{_ACTOR}.loss_agg_mode": mean,
        f"{_ACTOR}.clip_ratio": low,
        f"{_ACTOR}.clip_ratio_low": low,
        f"{_ACTOR}.clip_ratio_high": high,
        f"{_ACTOR}.clip_ratio_c": NEVER if arguments.delta is None else arguments.delta,
        f"{_ACTOR}.entropy_coeff": arguments.entropy_weight,
    }
    if name == "dr_grpo":  # verl's default divides by the longest row of a micro-batch
        mapped.overrides[f"{_ACTOR}.loss_scale_factor"] = arguments.max_completion_length
    if mode == "sapo":
        positive, negative = arguments.sapo_temperature_pos, arguments.sapo_temperature_neg
        mapped.overrides |= {f"{_ACTOR}.tau_pos": positive, f"{_ACTOR}.tau_neg": negative}


def _advantage(arguments: Any, mapped: Mapped) -> None:  # noqa: ANN401
    name = arguments.advantage_estimator
    if name in _OTHER_ESTIMATORS:
        why, instead = _OTHER_ESTIMATORS[name]
        mapped.refuse("train.advantage_estimator", f"{name}: {why}", instead)
        return
    scale = {True: "group", False: "none"}.get(arguments.scale_rewards, arguments.scale_rewards)
    if name == "group" and scale == "batch":
        what = "verl divides by the deviation of a group or not at all"
        mapped.refuse("train.scale_rewards", what, "group or none")
    mapped.overrides |= {
        "algorithm.adv_estimator": _ESTIMATORS[name],
        "algorithm.norm_adv_by_std_in_grpo": scale != "none",
        "algorithm.gamma": arguments.gae_gamma if name == "gae" else 1.0,
        "algorithm.lam": arguments.gae_lambda if name == "gae" else 1.0,
    }
    if name == "group" and scale == "group":
        mapped.notes.append("advantages: verl adds 1e-6 to a group's deviation, here it is 1e-4")
    if name == "group_then_batch" or (name == "batch" and not _in_reward(arguments)):
        mapped.notes.append("advantages: mean and deviation of a batch weigh each completion by its tokens in verl")


def _in_reward(arguments: Any) -> bool:  # noqa: ANN401
    return bool(arguments.kl_in_reward and arguments.beta)


def _divergence(arguments: Any, mapped: Mapped) -> None:  # noqa: ANN401
    in_reward = _in_reward(arguments)
    in_loss = bool(arguments.beta) and not in_reward
    mapped.overrides |= {"algorithm.use_kl_in_reward": in_reward, f"{_ACTOR}.use_kl_loss": in_loss}
    if in_reward:
        if arguments.advantage_estimator == "group_then_batch":
            what = "verl takes the divergence off before a group's mean, for the whole completion"
            mapped.refuse("train.kl_in_reward", what, "false")
        if arguments.advantage_estimator in ("group", "opo"):
            mapped.refuse("train.kl_in_reward", "this advantage has no such penalty", "false")
        mapped.overrides |= {
            "algorithm.kl_penalty": "kl",
            "algorithm.kl_ctrl.type": "fixed",
            "algorithm.kl_ctrl.kl_coef": arguments.beta,
        }
    if in_loss:
        if arguments.use_bias_correction_kl:
            what = "verl's KL term is not multiplied by the ratio"
            mapped.refuse("train.use_bias_correction_kl", what, "false, as GRPO's paper has it")
        mapped.overrides |= {
            f"{_ACTOR}.kl_loss_coef": arguments.beta,
            f"{_ACTOR}.kl_loss_type": _KL[arguments.kl_estimator],
        }


def _correction(arguments: Any, mapped: Mapped) -> None:  # noqa: ANN401
    """How the loss corrects for an engine that computes other numbers than the trainer."""
    place = "algorithm.rollout_correction"
    mapped.overrides[f"{place}.bypass_mode"] = False
    if not arguments.vllm_importance_sampling_correction:
        mapped.overrides[f"{place}.rollout_is"] = None
        return
    level, _, bound = arguments.vllm_importance_sampling_mode.partition("_")
    low, high = arguments.vllm_importance_sampling_clip_min, arguments.vllm_importance_sampling_clip_max
    mapped.overrides[f"{place}.rollout_is"] = level
    if bound == "truncate" and low is not None:
        what = "verl bounds ratios from above only where it moves them"
        mapped.refuse("train.vllm_importance_sampling_clip_min", what, "null")
    elif bound == "mask" and not (low and high):
        what = "verl sets ratios to 0 between two bounds only"
        mapped.refuse("train.vllm_importance_sampling_mode", what, f"{level}_truncate, or clip_min above 0")
    elif bound == "mask":
        mapped.overrides[f"{place}.rollout_is_threshold"] = f"{low:g}_{high:g}"
    else:
        mapped.overrides[f"{place}.rollout_is_threshold"] = NEVER if high is None else high


def _critic(arguments: Any, mapped: Mapped) -> None:  # noqa: ANN401
    """The critic of verl: a model of its own, all of which trains."""
    asked = arguments.critic_learning_rate
    rate = 1.0e-5 if asked is None else asked
    mapped.overrides |= {
        "critic.optim.lr": rate,
        "critic.optim.weight_decay": 0.0,
        "critic.cliprange_value": NEVER if arguments.value_clip is None else arguments.value_clip,
        "critic.loss_agg_mode": "token-mean",
    }
    mapped.notes.append(
        "critic: a whole model of the base's size, all of it trained, where ours is a LoRA and a value head on the "
        f"policy's own base (critic_rank {CRITIC['critic_rank']} means nothing there); its rate is {rate:g}"
    )
