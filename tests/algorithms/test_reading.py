"""What an update reads is what it depends on; with an algorithm's name nothing that is written may have no effect."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from trl import GRPOConfig

from perl import PeftRLConfig
from perl.algorithms.estimators import ADVANTAGES, FIELDS
from perl.algorithms.losses import LossSettings, objective
from perl.algorithms.named import ALGORITHMS
from perl.algorithms.reading import sometimes_read, unused_fields
from perl.algorithms.registry import ARGUMENTS, LOSSES, loss_mistakes
from perl.algorithms.train_fields import train_fields
from perl.errors import RecipeError
from perl.recipe import load_recipe
from tests.algorithms.test_losses import some_inputs

DEFAULTS = {field.name: field.default for field in dataclasses.fields(GRPOConfig)}
DEFAULTS |= {name: field.default for name, field in train_fields().items()} | {"max_completion_length": 7}
# So that the examples reach every bound.
REACHED = {"epsilon": 0.25, "epsilon_high": 0.4, "delta": 1.6, "dppo_threshold": 0.05}
OTHER = {
    **{"epsilon": 0.3, "epsilon_high": 0.5, "delta": 1.9, "dppo_threshold": 0.2, "dppo_divergence": "kl"},
    **{"importance_sampling_level": "sequence", "kl_estimator": "k2", "use_bias_correction_kl": False},
    **{"sapo_temperature_pos": 2.0, "sapo_temperature_neg": 2.0, "cov_kl_weight": 3.0},
    **{"vespo_k_pos": 1.0, "vespo_lambda_pos": 1.0, "vespo_k_neg": 1.0, "vespo_lambda_neg": 1.0},
}


def update(settings) -> torch.Tensor:
    """Value and gradient of the objective of an off-policy batch."""
    inputs = some_inputs()
    loss = LossSettings.of(SimpleNamespace(**{**DEFAULTS, **settings}))
    value = (objective(inputs, loss).per_token * inputs.mask).sum()
    (found,) = torch.autograd.grad(value, inputs.policy_log_probs)
    return torch.cat([found.flatten(), value.detach().view(1)])


def of_selection() -> set[str]:
    """Fields that only the selection of tokens reads, which is no part of the objective."""
    return {name for row in LOSSES.values() if row.selection is not None for name in row.selection.settings}


@pytest.mark.parametrize("beta", [0.0, 0.3])
@pytest.mark.parametrize("loss_type", LOSSES)
def test_an_objective_depends_on_the_fields_that_its_row_names_and_on_no_other(loss_type, beta):
    bound = {"epsilon_high": 1.3} if loss_type == "cispo" else {}  # which there bounds the ratio itself
    settings = {**REACHED, **bound, "loss_type": loss_type, "beta": beta}
    idle = unused_fields(settings)
    names = sometimes_read() - of_selection() - set(FIELDS.values())
    assert names == set(OTHER)
    if LOSSES[loss_type].selection is not None:  # with which one ratio of a completion is refused
        names -= {"importance_sampling_level"}
    for name in names:
        same = torch.equal(update({**settings, name: OTHER[name]}), update(settings))
        assert same == (name in idle), (name, idle.get(name))


def test_a_bound_that_stands_for_another_is_read_and_a_level_that_only_the_divergence_has():
    cispo = {"loss_type": "cispo", "epsilon_high": None}
    assert "epsilon" not in unused_fields(cispo)
    assert "epsilon" in unused_fields({**cispo, "epsilon_high": 5.0})
    gmpo = {"loss_type": "gmpo", "beta": 0.1}
    assert "importance_sampling_level" not in unused_fields(gmpo)
    assert "importance_sampling_level" in unused_fields({**gmpo, "use_bias_correction_kl": False})
    in_reward = {"advantage_estimator": "rloo", "beta": 0.1, "kl_in_reward": True}
    assert "kl_estimator" not in unused_fields(in_reward)
    assert "kl_in_reward" in unused_fields(in_reward)["use_bias_correction_kl"]
    assert "scale_rewards" in unused_fields({"multi_objective_aggregation": "normalize_then_sum"})
    assert unused_fields({"loss_type": "unknown"}) == unused_fields({"advantage_estimator": "unknown"}) == {}


def test_rows_name_what_their_functions_are_given():
    fields = {field.name for field in dataclasses.fields(LossSettings)}
    for row in LOSSES.values():
        assert set(row.settings) <= fields
    assert set(ARGUMENTS) <= fields
    assert set(FIELDS) == {"scale"} <= {name for row in ADVANTAGES.values() for name in row.reads}


NOT_READ = [
    ("maxrl", {"epsilon": 0.05, "delta": 2.0}, "loss_type reinforce"),
    ("gspo", {"dppo_threshold": 0.3, "sapo_temperature_pos": 3.0}, "loss_type grpo"),
    ("cispo", {"epsilon": 0.1}, "loss_type cispo"),
    ("vespo", {"importance_sampling_level": "sequence"}, "loss_type vespo"),
    ("rloo", {"scale_rewards": "none"}, "advantage_estimator rloo"),
    ("gdpo", {"scale_rewards": "batch"}, "normalize_then_sum"),
    ("dapo", {"kl_estimator": "k2"}, "beta is 0"),
    ("rloo", {"use_bias_correction_kl": False}, "kl_in_reward"),
    ("grpo", {"cov_fraction": 0.1}, "clip_cov"),
]


@pytest.mark.parametrize(("name", "written", "why"), NOT_READ)
def test_what_nothing_reads_is_refused_beside_a_name_and_taken_without_one(name, written, why):
    refused = []
    for make in (
        lambda: load_recipe({"algorithm": name, "train": written}),
        lambda: PeftRLConfig("out", use_cpu=True, algorithm=name, **written),
    ):
        with pytest.raises(RecipeError) as caught:
            make()
        refused.append({mistake.where.removeprefix("train."): str(mistake) for mistake in caught.value.mistakes})
    for found in refused:
        assert set(found) == set(written)
        for line in found.values():
            assert "changes nothing" in line
            assert why in line
            assert "leave it out" in line
            assert "\n" not in line
    plain = {key: value for key, value in ALGORITHMS[name].settings.items() if key not in written}
    of_trl = set(written) <= {field.name for field in dataclasses.fields(GRPOConfig)}
    if of_trl:  # as a script for TRL may say it
        assert PeftRLConfig("out", use_cpu=True, **{**plain, **written}).algorithm is None


def test_what_is_as_usual_is_not_refused_since_a_saved_recipe_says_it_too():
    for row in ALGORITHMS.values():
        given = {"teacher": {"hint": "so"}} if row.needs_teacher else {}
        saved = load_recipe({"algorithm": row.name, "train": row.sets, **given})
        assert {name: saved.train[name] for name in row.sets} == row.sets
        assert row.overridden(saved.train) == {}
    assert PeftRLConfig("out", use_cpu=True, algorithm="maxrl", epsilon=0.2).algorithm == "maxrl"
    assert load_recipe({"algorithm": "gspo", "train": {"dppo_threshold": None}}).algorithm == "gspo"


def test_an_override_that_another_override_needs_is_taken():
    recipe = load_recipe({"algorithm": "maxrl", "train": {"loss_type": "dapo", "epsilon": 0.05}})
    assert (recipe.train["loss_type"], recipe.train["epsilon"]) == ("dapo", 0.05)
    assert ALGORITHMS["maxrl"].overridden(recipe.train) == {"loss_type": "dapo", "epsilon": 0.05}
    assert load_recipe({"algorithm": "dapo", "train": {"beta": 0.1, "kl_estimator": "k2"}}).train["beta"] == 0.1


def test_what_was_written_before_the_name_and_it_does_not_read_is_replaced(tmp_path):
    (tmp_path / "first.yaml").write_text("train: {loss_type: sapo, sapo_temperature_pos: 3.0, dppo_threshold: 0.3}\n")
    recipe = load_recipe(tmp_path / "first.yaml", ["algorithm=dppo"])
    assert "sapo_temperature_pos" not in recipe.train
    assert recipe.train["dppo_threshold"] == 0.15
    with pytest.raises(RecipeError, match=r"train\.sapo_temperature_pos: 3 changes nothing"):
        load_recipe(tmp_path / "first.yaml", ["algorithm=dppo", "train.sapo_temperature_pos=3.0"])


def test_what_nothing_reads_is_not_said_to_override():
    row = ALGORITHMS["maxrl"]
    assert row.changed({"epsilon": 0.05, "beta": 0.1}) == {"epsilon": 0.05, "beta": 0.1}
    assert row.overridden({"epsilon": 0.05, "beta": 0.1}) == {"beta": 0.1}


def test_a_recipe_is_held_to_the_bound_of_dual_clip():
    for given in ({"delta": 1.1}, {"delta": 1.2, "epsilon_high": 0.28}, {"loss_type": "clip_cov", "delta": 1.1}):
        (found,) = loss_mistakes({"train": given})
        assert found[0] == ("train", "delta")
        assert "arXiv:1912.09729" in str(found[1])
    for given in ({"delta": 1.2}, {"delta": None}, {}, {"loss_type": "sapo", "delta": 0.5}):
        assert loss_mistakes({"train": given}) == []
