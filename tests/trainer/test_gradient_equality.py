"""Three optimizer steps give the adapter that TRL's trainer gives on the same rollouts, whatever is switched on.

Rows are dead (no advantage), truncated, of one token, or a tool's. What is compared is the update, not the adapter.
"""

import gc
import itertools
import random
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from trl import GRPOTrainer

from perl import PeftGRPOTrainer
from perl.algorithms.registry import LOSSES
from perl.packing import rows
from perl.packing.rows import common_beginning
from tests import warm
from tests.oracles.covering import most_pairs, pairs_of
from tests.oracles.rollouts import MIXED
from tests.oracles.two_trainers import ADAPTERS, OracleTrainer, Training, norm, relative_difference, train
from tests.trainer.clocks import CLOCKS

pytestmark = [
    pytest.mark.filterwarnings("ignore:Unsupported layer type"),  # PEFT's, of a norm that it does not list
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing_:FutureWarning"),  # TRL uses transformers' old names
]

# What float32 leaves of an update when rows are added in another order or padded differently: TRL's trainer differs
# from itself by up to 2e-6 here (other padding, other micro-batches).
RELATIVE = 1e-5
# The rows of these steps are about 400 tokens.
MANY_PASSES = {"train_tokens_per_microbatch": 100}
DEAD = ("dyadic", "tenths", "dyadic", "tenths")
LIVE = ("live", "half", "live", "cut")


@pytest.fixture(autouse=True, scope="module")
def _nothing_old_is_collected():
    """Each training ends with a full garbage collection, most of whose time goes into what was there before."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@cache
def _oracle(options: tuple[tuple[str, Any], ...]) -> Training:
    return train(OracleTrainer, **dict(options))


def oracle(**options: Any) -> Training:
    """TRL's training, once for all tests that ask for the same."""
    return _oracle(tuple(sorted(options.items())))


def assert_same_update(ours: Training, theirs: Training, tolerance: float = RELATIVE, **between: int) -> None:
    assert relative_difference(ours.pages[0], theirs.pages[0]) == 0
    expected = theirs.update(**between)
    assert norm(expected) > 0.01 * norm(theirs.pages[0])
    assert min(tensor.abs().max().item() for tensor in expected.values()) > 1e-4
    assert relative_difference(ours.update(**between), expected) <= tolerance


class Setting(NamedTuple):
    """One point of the cross of everything that enters an optimizer step."""

    adapter: str
    checkpointing: bool
    loss_type: str
    level: str
    beta: float
    accumulation: int
    iterations: int
    tokens: int | None

    def options(self) -> dict[str, Any]:
        """What TRL's trainer needs to know; the rest does not change what it does."""
        return {
            "adapter": self.adapter,
            "loss_type": self.loss_type,
            "importance_sampling_level": self.level,
            "beta": self.beta,
            "gradient_accumulation_steps": self.accumulation,
            "num_iterations": self.iterations,
            "epsilon": 0.05,
            "epsilon_high": 1.02 if self.loss_type == "cispo" else None,  # CISPO bounds the ratio itself
        }

    def ours(self) -> dict[str, Any]:
        return {"activation_checkpointing": self.checkpointing, "train_tokens_per_microbatch": self.tokens}


LOSS_TYPES = tuple(name for name, row in LOSSES.items() if row.in_trl)  # the others: test_own_losses.py
VALUES = (
    *(tuple(name for name in ADAPTERS if name != "lora everywhere"), (False, True), LOSS_TYPES),
    *(("token", "sequence"), (0.0, 0.04), (1, 4, 8), (1, 2), (None, 100)),
)
# Of the 3840 settings those that together hold the most pairs of values: the first on each change, all of them nightly.
SAMPLE = random.Random(0).sample([Setting(*values) for values in itertools.product(*VALUES)], 400)
DESIGN, ON_EACH_CHANGE = most_pairs(SAMPLE, 60), 20


def test_the_settings_that_are_compared_hold_every_value_and_most_pairs():
    for factor, values in enumerate(VALUES):
        assert {setting[factor] for setting in DESIGN[:ON_EACH_CHANGE]} == set(values)
    pairs = sum(len(one) * len(other) for one, other in itertools.combinations(VALUES, 2))
    for settings, share in ((DESIGN[:ON_EACH_CHANGE], 0.8), (DESIGN, 0.99)):
        assert len(set().union(*map(pairs_of, settings))) >= share * pairs


@pytest.mark.parametrize(
    "setting",
    [
        pytest.param(setting, marks=[pytest.mark.nightly] * (place >= ON_EACH_CHANGE), id="-".join(map(str, setting)))
        for place, setting in enumerate(DESIGN)
    ],
)
def test_the_update_is_trls(setting):
    assert_same_update(train(PeftGRPOTrainer, **setting.options(), **setting.ours()), oracle(**setting.options()))


def test_the_update_is_trls_where_both_recompute_activations():
    options = {"adapter": "adalora", "loss_type": "grpo", "gradient_accumulation_steps": 4, "beta": 0.04}
    options["activation_checkpointing"] = True
    assert_same_update(train(PeftGRPOTrainer, **options), oracle(**options))


ON_POLICY = {"gradient_accumulation_steps": 2}
OFF_POLICY = {"gradient_accumulation_steps": 2, "num_iterations": 2, "epsilon": 0.05}
SAMPLED = {"log_probs": True, "off_policy_mask_threshold": 1.5}
# First tokens of a group are equally uncertain; here no threshold is near such a tie, which rounding would break.
FEW_TOKENS = {"top_entropy_quantile": 0.74}
# Without rewards of 0.9, of which rounding makes TRL deviations that count in the second normalisation.
EXACT = tuple(tuple("half" if kind == "tenths" else kind for kind in step) for step in MIXED)
CASES = [
    {"mask_truncated_completions": True, "loss_type": "grpo"},
    {"mask_truncated_completions": True, "loss_type": "bnpo", **OFF_POLICY},
    {"tools": True, "loss_type": "bnpo"},
    {"tools": True, "loss_type": "dapo", "mask_truncated_completions": True, **OFF_POLICY},
    {"tools": True, "loss_type": "grpo", "importance_sampling_level": "sequence", **OFF_POLICY},
    {"loss_type": "bnpo", **SAMPLED, **OFF_POLICY},
    {"loss_type": "dapo", "delta": 1.02, **OFF_POLICY},
    {"loss_type": "dapo", "beta": 0.04, "use_bias_correction_kl": False, **OFF_POLICY},
    {"loss_type": "grpo", "scale_rewards": "none"},
    {"loss_type": "grpo", "multi_objective_aggregation": "normalize_then_sum", "kinds": EXACT},
    {"loss_type": "dapo", "scale_rewards": "batch", **OFF_POLICY},
    {"loss_type": "dapo", **FEW_TOKENS, "beta": 0.04, **OFF_POLICY},
    {"loss_type": "bnpo", "entropy_coef": 0.01, **FEW_TOKENS},
    {"loss_type": "dapo", "temperature": 0.7, "beta": 0.04},
    {"loss_type": "dapo", "max_grad_norm": 0.02, "learning_rate": 10.0},
    {"loss_type": "grpo", "continued": True, "beta": 0.04},
    {"loss_type": "grpo", "engine": True, "vllm_importance_sampling_mode": "token_truncate"},
    {
        "loss_type": "dapo",
        "engine": True,
        "learning_rate": 2.0,
        "vllm_importance_sampling_mode": "sequence_mask",
        **OFF_POLICY,
    },
    {"loss_type": "vespo", "engine": True, "vllm_importance_sampling_mode": "token_mask", "learning_rate": 2.0},
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_update_is_trls_with(case):
    options = {**ON_POLICY, **case}
    theirs = oracle(**options)
    plain = {name: value for name, value in options.items() if name in ("loss_type", "learning_rate", *OFF_POLICY)}
    assert relative_difference(theirs.update(), oracle(**plain).update()) > 1e-3  # else the case shows nothing
    assert_same_update(train(PeftGRPOTrainer, **options, **MANY_PASSES), theirs)


@pytest.mark.parametrize(
    ("accumulation", "per_generation", "loss_type"),
    [(2, 8, "bnpo"), (8, 4, "dapo"), (4, 3, "bnpo"), (4, 3, "dapo")],
)
def test_the_update_is_trls_where_a_step_is_more_or_less_than_a_generation(loss_type, accumulation, per_generation):
    options = {"loss_type": loss_type, "gradient_accumulation_steps": accumulation, "per_device_train_batch_size": 6}
    options |= {"steps_per_generation": per_generation, "kinds": MIXED * 2}
    assert_same_update(train(PeftGRPOTrainer, **options, **MANY_PASSES), oracle(**options))


@pytest.mark.parametrize("loss_type", ["bnpo", "dapo"])
def test_the_update_is_trls_where_an_epoch_ends_within_a_step(loss_type):
    kinds = (("live", "dyadic"), ("half", "tenths"), ("live", "cut"))
    options = {"loss_type": loss_type, "gradient_accumulation_steps": 4, "per_device_train_batch_size": 6}
    options |= {"steps_per_generation": 2, "kinds": kinds, "max_steps": 4}  # six micro-batches an epoch
    theirs = oracle(**options)
    assert [entry["epoch"] for entry in theirs.history[:4]] == pytest.approx([2 / 3, 1, 5 / 3, 2])
    assert_same_update(train(PeftGRPOTrainer, **options, **MANY_PASSES), theirs)


@pytest.mark.parametrize(("loss_type", "why"), [("grpo", "no advantage"), ("dapo", "truncated")])
def test_adam_moves_on_through_a_step_without_a_live_row(loss_type, why):
    cut = why == "truncated"
    options = {"loss_type": loss_type, "gradient_accumulation_steps": 4, "mask_truncated_completions": cut}
    options |= {"kinds": (MIXED[0], ("cut",) * 4 if cut else DEAD, LIVE, MIXED[2]), "max_steps": 4}
    # An epsilon of the gradient's size: elements that are nothing but rounding must not move like the others.
    options |= {"optim": "adamw_torch", "learning_rate": 0.02, "adam_epsilon": 1e-2}
    theirs, ours = oracle(**options), train(PeftGRPOTrainer, **options)
    assert [entry["grad_norm"] == 0 for entry in theirs.history[:4]] == [False, True, False, False]
    assert_same_update(ours, theirs, first=1, last=2)
    assert_same_update(ours, theirs)


@pytest.mark.parametrize(("loss_type", "off_policy"), [("grpo", True), ("dapo", False)])
def test_in_double_precision_the_update_is_trls_more_closely(loss_type, off_policy):
    """Not to 1e-12: TRL's log-probabilities are single precision. Padded differently its update differs by 5e-7."""
    options = {"dtype": torch.float64, "loss_type": loss_type, "beta": 0.04, **ON_POLICY}
    options |= OFF_POLICY if off_policy else {}
    assert_same_update(train(PeftGRPOTrainer, **options, **MANY_PASSES), oracle(**options), tolerance=1e-6)


@pytest.mark.parametrize(("beta", "checkpointing"), [(0.0, False), (0.04, True)])
def test_the_update_is_trls_where_all_prompts_begin_alike(beta, checkpointing, monkeypatch):
    """Of some passes all prompts do: that beginning is run once for all of their rows."""
    kinds, begun = (("begun", "begun", "begun", "tenths"), ("begun",) * 4, MIXED[2]), []
    monkeypatch.setattr(rows, "common_beginning", lambda *of: begun.append(common_beginning(*of)) or begun[-1])
    options = {"beta": beta, "gradient_checkpointing": checkpointing, "kinds": kinds, "adapter": "lora everywhere"}
    assert_same_update(train(PeftGRPOTrainer, **options), oracle(**options))
    assert {0, 20} <= set(begun)


OFF = {
    "padding_free": False,
    "train_tokens_per_microbatch": 0,
    "skip_zero_advantage": False,
    "reuse_old_log_probs": False,
    "share_prompts": False,
    "fused_lora": False,
    "fused_head": False,
}
SWITCHES = [{}, {"train_tokens_per_microbatch": 64}, *({name: value} for name, value in OFF.items()), OFF]
SITUATIONS = [
    {"loss_type": "grpo", **ON_POLICY},
    {"loss_type": "bnpo", "gradient_accumulation_steps": 8, "num_iterations": 2, "epsilon": 0.05},
    {"loss_type": "dapo", "beta": 0.04, **OFF_POLICY, "adapter": "lora everywhere"},
]


@pytest.mark.parametrize(
    ("switches", "situation"),
    [(switches, SITUATIONS[place % 3]) for place, switches in enumerate(SWITCHES)],
    ids=str,
)
def test_no_switch_changes_the_update(switches, situation):
    assert_same_update(train(PeftGRPOTrainer, **situation, **switches), oracle(**situation))


def test_where_all_rewards_are_dyadic_or_differ_trls_own_trainer_gives_the_update():
    kinds = (("live", "dyadic", "half", "cut"), MIXED[2], LIVE)
    options = {"kinds": kinds, "loss_type": "grpo", **ON_POLICY}
    assert_same_update(train(PeftGRPOTrainer, **options), train(GRPOTrainer, **options))


def test_rewards_that_agree_give_trl_advantages_out_of_rounding_and_us_none():
    options = {"kinds": (("tenths",) * 4,), "loss_type": "grpo", "max_steps": 1}
    assert 1e-4 < max(oracle(**options).spurious) < 2e-3
    assert norm(oracle(**options).update()) == 0
    assert norm(train(GRPOTrainer, **options).update()) > 1e-5
    assert norm(train(PeftGRPOTrainer, **options).update()) == 0


FROM_ROLLOUTS = [
    *("num_tokens", "reward", "reward_std", "frac_reward_zero_std"),
    *(f"rewards/preset_reward/{statistic}" for statistic in ("mean", "std")),
    *(f"completions/{end}_length" for end in ("mean", "min", "max")),
    *(f"completions/{end}_terminated_length" for end in ("mean", "min", "max")),
    "completions/clipped_ratio",
]
OF_THE_STEP = ["loss", "train_loss", "grad_norm", "learning_rate", "epoch", "step", "total_flos"]
# Of the loss: means over tokens that are trained on, so of live rows only where dead ones are left out.
CLIPPING = [f"clip_ratio/{name}" for name in ("low_mean", "high_mean", "region_mean", "low_min", "high_max")]
OF_THE_LOSS = {"grpo": CLIPPING, "bnpo": CLIPPING, "dapo": CLIPPING}
OF_THE_LOSS |= {"cispo": ["cispo_clip_ratio"], "vespo": ["vespo/phi_seq_mean"]}


def assert_same_log(ours: Training, theirs: Training, names: list[str]) -> None:
    assert len(ours.history) == len(theirs.history)
    for our_entry, their_entry in zip(ours.history, theirs.history, strict=True):
        assert our_entry.keys() >= their_entry.keys()
        for name in their_entry.keys() & set(names):
            assert our_entry[name] == pytest.approx(their_entry[name], rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize(
    ("loss_type", "switches"),
    [("grpo", {}), ("dapo", MANY_PASSES), ("bnpo", {}), ("cispo", MANY_PASSES), ("vespo", {})],
)
def test_where_all_rows_are_live_all_that_is_logged_is_trls(loss_type, switches):
    options = {"kinds": (("live", "live", "cut", "live"),) * 3, "loss_type": loss_type, "beta": 0.04, **OFF_POLICY}
    options |= {"epsilon_high": 1.02} if loss_type == "cispo" else {}
    theirs = oracle(**options)
    names = [*FROM_ROLLOUTS, *OF_THE_STEP, *OF_THE_LOSS[loss_type], "kl", "entropy"]
    assert set(names) == set().union(*theirs.history) - CLOCKS
    for name in set(OF_THE_LOSS[loss_type]) - {"clip_ratio/low_min"}:
        assert max(entry[name] for entry in theirs.history[:3]) > 0, name
    assert_same_log(train(PeftGRPOTrainer, **options, **switches), theirs, names)


@pytest.mark.parametrize(("loss_type", "switches"), [("grpo", {}), ("bnpo", MANY_PASSES), ("dapo", MANY_PASSES)])
def test_where_rows_are_dead_loss_and_gradient_norm_are_trls(loss_type, switches):
    options = {"loss_type": loss_type, **OFF_POLICY}
    ours = train(PeftGRPOTrainer, **options, **switches)
    assert_same_log(ours, oracle(**options), [*FROM_ROLLOUTS, *OF_THE_STEP])


def test_two_processes_of_which_one_has_only_dead_rows_give_trls_update(tmp_path):
    losses = ["grpo", "dapo"]
    done = warm.run_distributed(["-m", "tests.oracles.two_trainers", str(tmp_path), *losses], tmp_path)
    assert done.returncode == 0, done.stderr
    for loss_type in losses:
        theirs, *both = (
            [Training(*torch.load(tmp_path / f"{name}-{loss_type}-{rank}.pt")) for rank in range(2)]
            for name in ("theirs", "ours", "ours-in-many-passes")
        )
        assert [training.live_rows[1] > 0 for training in theirs] == [True, False]
        for ours in both:
            assert relative_difference(ours[0].pages[-1], ours[1].pages[-1]) == 0
            assert_same_update(ours[0], theirs[0])
            assert_same_log(ours[0], theirs[0], [*FROM_ROLLOUTS, *OF_THE_STEP])
