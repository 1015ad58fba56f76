"""One row makes a loss: in recipes, in the objective, in metrics, on cards, in the documents."""

import dataclasses
import inspect
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from trl import GRPOConfig, GRPOTrainer

from perl.algorithms.losses import LossInputs, LossSettings, Step, objective, token_weights
from perl.algorithms.metrics import LossMetrics
from perl.algorithms.registry import LOSSES, Loss, Paper, loss_mistakes
from perl.errors import RecipeError
from perl.recipe import load_recipe

# Neither inside nor outside of every bound: what a setting changes, some token shows.
RATIOS = torch.tensor([[0.5, 0.85, 1.0, 1.1], [1.25, 1.6, 2.5, 0.7], [1.4, 0.7, 1.15, 3.0]], dtype=torch.float64)
ADVANTAGES = torch.tensor([[1.0], [-0.5], [2.0]], dtype=torch.float64)
MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1], [1, 0, 0, 0]])
# Another value for each setting that only some losses read.
OTHERS = {
    "epsilon_low": 0.4,
    "epsilon_high": 0.5,
    "delta": 1.3,
    "sapo_temperature_pos": 2.0,
    "sapo_temperature_neg": 2.0,
    "vespo_k_pos": 1.0,
    "vespo_lambda_pos": 1.0,
    "vespo_k_neg": 1.0,
    "vespo_lambda_neg": 1.0,
    "dppo_divergence": "kl",
    "dppo_threshold": 0.3,
    "cov_kl_weight": 0.4,
}


def inputs(sampling_ratio: torch.Tensor | None = None) -> LossInputs:
    policy = torch.full_like(RATIOS, -1.0).requires_grad_()
    old, selected = policy.detach() - RATIOS.log(), RATIOS == 0.85
    return LossInputs(policy, old, ADVANTAGES, MASK, sampling_ratio=sampling_ratio, selected=selected)


def gradient(settings: LossSettings) -> torch.Tensor:
    given = inputs()
    weights = token_weights(MASK, settings.loss_type, micro_batches=2, window_tokens=9.0, max_completion_length=6)
    (found,) = torch.autograd.grad((objective(given, settings).per_token * weights).sum(), given.policy_log_probs)
    return found


def trl_arguments(**changes) -> SimpleNamespace:
    """TRL's fields and defaults."""
    return SimpleNamespace(**{field.name: field.default for field in dataclasses.fields(GRPOConfig)} | changes)


def test_each_setting_that_only_some_losses_read_is_in_a_row():
    of_all = {"loss_type", "ratio_level", "beta", "correct_kl", "max_completion_length"}
    of_all |= {"kl_estimator", "entropy_weight"}
    assert {field.name for field in dataclasses.fields(LossSettings)} == of_all | OTHERS.keys()


@pytest.mark.parametrize("name", LOSSES)
def test_the_correction_for_an_engine_multiplies_the_objective_unless_the_row_has_it_in_its_weight(name):
    correction = torch.tensor([[0.5], [1.0], [2.0]], dtype=torch.float64)
    settings = LossSettings(name)
    plain, corrected = (objective(inputs(ratio), settings).per_token for ratio in (None, correction))
    multiplied = bool(torch.allclose(corrected, plain * correction, rtol=1e-12))
    assert multiplied != LOSSES[name].corrects_sampling


def test_settings_are_those_of_trls_arguments():
    of_ours = {"dppo_divergence", "dppo_threshold", "cov_kl_weight"}
    asked = {
        **{name: value for name, value in OTHERS.items() if name not in of_ours},
        "loss_type": "vespo",
        "beta": 0.3,
        "max_completion_length": 77,
    }
    del asked["epsilon_low"]
    asked_of_trl = {"epsilon": 0.4, "importance_sampling_level": "sequence", "use_bias_correction_kl": False, **asked}
    args = trl_arguments(**asked_of_trl)
    expected = LossSettings(**asked, epsilon_low=0.4, ratio_level="sequence", correct_kl=False)
    assert LossSettings.of(args) == expected
    args.epsilon_high = None
    assert LossSettings.of(args) == dataclasses.replace(expected, epsilon_high=0.4)


def test_the_rows_that_trl_has_are_marked():
    source = Path(inspect.getfile(GRPOTrainer)).read_text(encoding="utf-8")
    assert {name for name in LOSSES if f'"{name}"' in source} == {name for name, row in LOSSES.items() if row.in_trl}


def test_an_unknown_loss_is_refused_with_its_line_and_the_nearest_name(tmp_path):
    (tmp_path / "recipe.yaml").write_text("model: {name: m}\ntrain: {seed: x, loss_type: dapoo}\n")
    with pytest.raises(RecipeError) as caught:
        load_recipe(tmp_path / "recipe.yaml", checks=(loss_mistakes,))
    lines = [line for line in str(caught.value).splitlines() if "train.loss_type" in line]
    assert len(lines) == 1
    assert "recipe.yaml:2" in lines[0]
    assert ", ".join(LOSSES) in lines[0]
    assert "'dapoo' (did you mean dapo?)" in lines[0]


# A loss that is not ours: -r^2 A, each token weighted by the square of the micro-batch's share of the window's tokens.
def toy_surrogate(ratio, given, _):
    return -(ratio**2) * given.advantages, {"toy/square": ratio.detach() ** 2, "toy_large": (ratio > 2).float()}


def toy_weights(mask_NT: torch.Tensor, step: Step) -> torch.Tensor:
    return mask_NT * (mask_NT.sum() / step.window_tokens) ** 2


@pytest.fixture
def toy(monkeypatch) -> None:
    row = Loss(
        "toy",
        "TOY",
        Paper("nobody2031toy", "Nobody et al.", 2031, "A Toy", "3101.00001"),
        f"{__name__}:toy_surrogate",
        f"{__name__}:toy_weights",
        equation="-r^2 A",
        weighting="a share",
        clip="none",
        logs={"toy/square": ("mean", "max"), "toy_large": ()},
        differs="from everything",
    )
    monkeypatch.setitem(LOSSES, "toy", row)


@pytest.mark.usefixtures("toy")
def test_a_row_added_at_run_time_is_a_loss_of_recipes():
    checks = (loss_mistakes,)
    assert load_recipe({"train": {"loss_type": "toy"}}, checks=checks).train["loss_type"] == "toy"
    with pytest.raises(RecipeError, match=r"kl_cov, toy, not 'toi' \(did you mean toy\?\)"):
        load_recipe({"train": {"loss_type": "toi"}}, checks=checks)


@pytest.mark.usefixtures("toy")
def test_a_row_added_at_run_time_is_what_is_minimised():
    loss, wanted = 0.0, torch.zeros_like(RATIOS)
    share = 8 / 9  # of the window's tokens
    for n, row in enumerate(RATIOS.tolist()):
        for t, ratio in enumerate(row):
            if MASK[n, t]:
                loss -= share**2 * ratio**2 * ADVANTAGES[n].item()
                wanted[n, t] = -(share**2) * 2 * ratio**2 * ADVANTAGES[n].item()  # d r^2 / d log p = 2 r^2
    settings = LossSettings.of(trl_arguments(loss_type="toy"))
    weights = token_weights(MASK, "toy", micro_batches=2, window_tokens=9.0, max_completion_length=6)
    assert (objective(inputs(), settings).per_token * weights).sum().item() == pytest.approx(loss, rel=1e-6)
    torch.testing.assert_close(gradient(settings), wanted, rtol=1e-6, atol=0)


@pytest.mark.usefixtures("toy")
def test_a_row_added_at_run_time_logs_its_metrics():
    settings = LossSettings("toy")
    metrics = LossMetrics(2, settings, torch.device("cpu"))
    metrics.add(objective(inputs(), settings), inputs(), torch.ones(3, 4), torch.tensor([0, 1, 0]))
    found = {}
    for name, value in metrics.values(Accelerator(cpu=True)):
        found.setdefault(name, []).append(value)
    rows = zip(RATIOS.tolist(), MASK.tolist(), strict=True)
    squares = [[r**2 for r, m in zip(row, keep, strict=True) if m] for row, keep in rows]
    means = [sum(row) / len(row) for row in squares]
    assert found == {
        "entropy": [1.0, 1.0],
        "toy/square_mean": [pytest.approx(sum(squares[0] + squares[2]) / 4), pytest.approx(means[1])],
        "toy/square_max": [pytest.approx(max(means[0], means[2])), pytest.approx(means[1])],
        "toy_large": [0.0, 0.25],
    }
