"""Losses, divergences, the entropy and advantages that TRL lacks give the update of a plain trainer."""

import pytest

from perl import PeftGRPOTrainer
from perl.algorithms.estimators import ADVANTAGES
from perl.algorithms.registry import LOSSES
from perl.errors import RecipeError, RewardError
from tests.oracles.own_algorithms import PlainLosses, PlainPenalty, TRLsGMPO, trainers
from tests.oracles.rollouts import MIXED
from tests.oracles.two_trainers import norm, relative_difference, train

RELATIVE = 1e-5
ON_POLICY = {"gradient_accumulation_steps": 2}
OFF_POLICY = {"gradient_accumulation_steps": 2, "num_iterations": 2, "epsilon": 0.05}
MANY_PASSES = {"train_tokens_per_microbatch": 100}
DPPO = {"loss_type": "dppo", "dppo_threshold": 0.002}


def assert_plain_update(ours, plain):
    assert relative_difference(ours.pages[0], plain.pages[0]) == 0
    expected = plain.update()
    assert norm(expected) > 0.01 * norm(plain.pages[0])
    assert relative_difference(ours.update(), expected) <= RELATIVE


def plain_training(settings, **options):
    return train(type("Plain", (PlainLosses,), {"plain": settings}), **options)


def test_each_loss_that_trl_lacks_is_compared_here():
    elsewhere = {name for name, row in LOSSES.items() if row.selection is not None}  # test_token_selection.py
    assert {name for name, row in LOSSES.items() if not row.in_trl} - elsewhere == {"reinforce", "dppo", "gmpo"}


@pytest.mark.parametrize(
    ("policy", "settings"),
    [
        (OFF_POLICY, {"loss_type": "reinforce"}),
        (ON_POLICY, DPPO),
        (OFF_POLICY, DPPO),
        (OFF_POLICY, {**DPPO, "dppo_divergence": "kl"}),
    ],
    ids=str,
)
def test_a_loss_gives_a_plain_trainers_update(policy, settings):
    options = {"tools": True, "learning_rate": 2.0, **policy}
    ours = train(PeftGRPOTrainer, **options, **settings, **MANY_PASSES)
    assert_plain_update(ours, plain_training(settings, **options))
    if "dppo_threshold" in settings:
        masked = [entry["dppo_masked"] for entry in ours.history if "dppo_masked" in entry]
        assert (max(masked) > 0) == (policy is OFF_POLICY)


@pytest.mark.parametrize(("policy", "beta"), [(ON_POLICY, 0.04), ({**OFF_POLICY, "epsilon_high": 0.01}, 0.0)], ids=str)
def test_the_geometric_mean_is_that_of_trls_own_trainer(policy, beta):
    options = {"use_bias_correction_kl": False, "beta": beta, "tools": True, **policy}
    ours = train(PeftGRPOTrainer, **options, loss_type="gmpo", **MANY_PASSES)
    assert_plain_update(ours, train(TRLsGMPO, **options))
    if "num_iterations" in policy:
        assert max(entry.get("clip_ratio/region_mean", 0) for entry in ours.history) > 0


@pytest.mark.parametrize(("estimator", "corrects"), [("k1", False), ("k2", True)])
def test_the_estimator_of_the_divergence_gives_a_plain_trainers_update(estimator, corrects):
    options = {"beta": 0.3, "use_bias_correction_kl": corrects, **OFF_POLICY, "epsilon": 50.0}
    settings = {"kl_estimator": estimator}
    ours = train(PeftGRPOTrainer, **options, **settings, **MANY_PASSES)
    assert_plain_update(ours, plain_training(settings, **options))


def test_the_entropy_gives_a_plain_trainers_update_on_every_row():
    options, settings = {**ON_POLICY, "tools": True, "epsilon": 50.0}, {"loss_type": "dapo", "entropy_weight": 0.2}
    ours = train(PeftGRPOTrainer, **options, **settings, **MANY_PASSES)
    assert_plain_update(ours, plain_training(settings, **options))
    assert all(entry["rows/trained_fraction"] == 1 for entry in ours.history if "rows/trained_fraction" in entry)
    without = train(PeftGRPOTrainer, **options, loss_type="dapo")
    assert relative_difference(ours.update(), without.update()) > 0.01


def assert_same_advantages(ours, plain):
    """Rollout for rollout, of all rows."""
    assert len(ours) == len(plain) > 1
    for found, wanted in zip(ours, plain, strict=True):
        assert found == pytest.approx(wanted, rel=1e-5, abs=1e-6)
        assert max(abs(value) for value in wanted) > 0.01


NOT_OF_REWARDS_ALONE = {"group", "remax", "gae"}


@pytest.mark.parametrize("estimator", sorted(ADVANTAGES.keys() - NOT_OF_REWARDS_ALONE))
def test_an_estimator_reaches_log_and_update(estimator):
    options = {"kinds": MIXED, "loss_type": "dapo", "tools": True, "max_steps": 2, **ON_POLICY}
    if estimator == "pass_at_k":  # only the best of a group counts: fewer rows, so longer steps
        options["learning_rate"] = 5.0
    plain, ours = trainers(estimator)
    expected, found = train(plain, **options), train(ours, **options, advantage_estimator=estimator, **MANY_PASSES)
    assert_same_advantages(ours.seen, plain.seen)
    assert_plain_update(found, expected)


@pytest.mark.parametrize("estimator", ["batch", "rloo"])
def test_a_kl_penalty_in_the_rewards_gives_a_plain_trainers_update(estimator):
    options = {"beta": 0.5, "tools": True, "max_steps": 2, **OFF_POLICY, "epsilon": 50.0}
    plain = train(type("Plain", (PlainPenalty,), {"estimator": estimator}), **options)
    settings = {"advantage_estimator": estimator, "kl_in_reward": True}
    ours = train(PeftGRPOTrainer, **options, **settings, **MANY_PASSES)
    assert_plain_update(ours, plain)
    assert any(entry.get("kl", 0.0) != 0.0 for entry in ours.history)
    on_policy = train(PeftGRPOTrainer, **{**options, **settings, "num_iterations": 1})
    assert norm(on_policy.update()) > 0
    without = train(PeftGRPOTrainer, **options, advantage_estimator=estimator)
    assert relative_difference(ours.update(), without.update()) > 0.001


def test_a_negative_reward_ends_a_run_whose_advantages_divide_by_the_mean():
    with pytest.raises(RewardError, match=r"^reward preset_reward: gave a completion a reward of -[^\n]*maxrl[^\n]*$"):
        train(PeftGRPOTrainer, advantage_estimator="maxrl", reward_weights=[-1.0], **ON_POLICY)


def test_a_step_that_is_trls_refuses_a_loss_that_is_not():
    own = type("Own", (PeftGRPOTrainer,), {"_prepare_inputs": lambda _, inputs: inputs, "__module__": __name__})

    class Patched(PeftGRPOTrainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self._prepare_inputs = self._prepare_inputs

    for kind in (own, Patched):
        with pytest.raises(RecipeError, match=r"^loss_type: dppo is not known to TRL's step[^\n]*$"):
            train(kind, loss_type="dppo")


@pytest.mark.parametrize("name", ["compute_loss", "_compute_loss"])
@pytest.mark.parametrize(
    "settings",
    [
        {"loss_type": "dapo", "advantage_estimator": "batch", "kl_in_reward": True, "beta": 0.2},
        {"loss_type": "dapo", "kl_estimator": "k2", "beta": 0.3, "epsilon": 50.0},
        {"loss_type": "dapo", "entropy_weight": 0.2},
        {**DPPO, "gradient_accumulation_steps": 1},
        {"loss_type": "gmpo", "adapter": "adalora"},
        {"loss_type": "kl_cov", "cov_fraction": 0.2},
    ],
    ids=str,
)
def test_a_loss_that_calls_its_parents_has_every_setting(name, settings):
    def calls(self, *args, **kwargs):
        return getattr(super(kind, self), name)(*args, **kwargs)

    kind = type("Calls", (PeftGRPOTrainer,), {name: calls, "__module__": __name__})
    options = {**OFF_POLICY, "tools": True, **settings}
    ours, theirs = train(PeftGRPOTrainer, **options), train(kind, **options)
    assert norm(ours.update()) > 0
    assert relative_difference(theirs.update(), ours.update()) <= RELATIVE
    for metric in ("loss", "kl"):
        logged, found = ([entry.get(metric, 0.0) for entry in of.history[:2]] for of in (ours, theirs))
        assert found == pytest.approx(logged, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize(
    ("options", "methods", "why"),
    [
        ({"top_entropy_quantile": 0.5}, {}, "top_entropy_quantile"),
        ({"entropy_coef": 0.1}, {}, "entropy_coef"),
        ({}, {"get_off_policy_mask": lambda *_, **__: None}, "Calls.get_off_policy_mask"),
    ],
)
def test_a_loss_that_must_be_trls_refuses_what_it_lacks_whoever_calls_it(options, methods, why):
    methods |= {"compute_loss": lambda *_, **__: None, "__module__": __name__}
    with pytest.raises(RecipeError, match=rf"^kl_estimator: k2 is not known to TRL's step[^\n]*{why}"):
        train(type("Calls", (PeftGRPOTrainer,), methods), kl_estimator="k2", beta=0.1, **options)
