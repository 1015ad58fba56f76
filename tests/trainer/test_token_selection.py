"""Clip-Cov and KL-Cov in a training: a plain trainer's update, one choice however rows are divided, what is refused."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from perl import PeftGRPOTrainer, PeftRLConfig
from perl.training.prepare import prepare, read_recipe
from perl.training.run_shape import execution_of, shape_of
from tests.oracles.covariance import CLIP, KL, PlainSelection, places, recording
from tests.oracles.two_trainers import norm, relative_difference, train
from tests.trainer.distributed_checkpoints import Job, trainer_of
from tests.trainer.test_critic_checks import refused

RELATIVE = 1e-5
ON_POLICY = {"gradient_accumulation_steps": 2}
OFF_POLICY = {"gradient_accumulation_steps": 2, "num_iterations": 2, "max_steps": 4}
MINIBATCHES = {"gradient_accumulation_steps": 2, "steps_per_generation": 4, "max_steps": 4}
MANY_PASSES = {"train_tokens_per_microbatch": 100}


def cut(options: dict) -> dict:
    """Rows for a data loader that gives out two optimizer steps at a time."""
    return {"per_device_train_batch_size": 6} if "steps_per_generation" in options else {}


@pytest.mark.parametrize(
    ("settings", "policy"),
    [(CLIP, ON_POLICY), (KL, ON_POLICY), (KL, OFF_POLICY), (CLIP, MINIBATCHES)],
    ids=["clip on", "kl on", "kl off", "clip minibatches"],
)
def test_a_plain_trainers_update(settings, policy):
    options = {"tools": True, "learning_rate": 1.0, **policy, **cut(policy)}
    kind = recording()
    found = train(kind, **options, **settings, **MANY_PASSES)
    plain = type("Plain", (PlainSelection,), {"plain": settings, "shares": []})
    expected = train(plain, **options)
    assert relative_difference(found.pages[0], expected.pages[0]) == 0
    assert norm(expected.update()) > 0.01 * norm(expected.pages[0])
    assert relative_difference(found.update(), expected.update()) <= RELATIVE
    shares = [entry["cov/selected_fraction"] for entry in found.history if "cov/selected_fraction" in entry]
    assert shares[: len(plain.shares)] == pytest.approx(plain.shares)
    assert min(plain.shares) > 0.01
    fraction = settings["cov_fraction"]
    assert all(0 < share <= fraction for share in shares)
    unlike = {"cov_fraction": 1e-9} if settings is CLIP else {"cov_kl_weight": 1e-9}
    without = train(PeftGRPOTrainer, **options, **{**settings, **unlike})
    acts = settings is CLIP or policy is not ON_POLICY
    assert (relative_difference(found.update(), without.update()) > 1e-3) == acts


def test_kl_cov_with_one_update_is_its_surrogate_alone_and_a_line_says_so(caplog):
    options = {**ON_POLICY, "tools": True}
    found = train(PeftGRPOTrainer, **options, **KL)
    assert sum("no effect with a single update per batch" in line for line in caplog.text.splitlines()) == 1
    caplog.clear()
    plain = train(PeftGRPOTrainer, **options, loss_type="dapo")
    assert norm(plain.update()) > 0
    assert relative_difference(found.update(), plain.update()) <= 1e-6
    train(PeftGRPOTrainer, **OFF_POLICY, **KL)
    train(PeftGRPOTrainer, **ON_POLICY, **CLIP)
    assert "with a single update" not in caplog.text


@pytest.mark.parametrize("settings", [CLIP, KL], ids=["clip", "kl"])
def test_neither_passes_nor_micro_batches_change_the_choice_or_the_update(settings):
    trained = []
    for division in ({"gradient_accumulation_steps": 1}, {"gradient_accumulation_steps": 4}, MANY_PASSES):
        kind = recording()
        options = {"gradient_accumulation_steps": 2, "num_iterations": 2, "max_steps": 4, **division}
        trained.append((train(kind, **options, **settings), [places(seen) for seen in kind.seen]))
    (first, chosen), *others = trained
    assert [bool(tokens) for tokens in chosen] == [True, True]
    for other, tokens in others:
        assert tokens == chosen
        assert relative_difference(other.update(), first.update()) <= RELATIVE


def test_rounding_between_two_passes_holds_no_token_back_in_the_first_update():
    """As of another kernel or type: |log r| has a gradient of full size wherever it is not exactly 0."""

    class Rounded(PeftGRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            output = super()._generate_and_score_completions(inputs)
            shape = output["old_per_token_logps"].shape
            output["old_per_token_logps"] += 1e-6 * torch.randn(shape, generator=torch.Generator().manual_seed(1))
            return output

    options = {**OFF_POLICY, **KL, "cov_fraction": 1.0}
    exact, rounded = (train(kind, **options) for kind in (PeftGRPOTrainer, Rounded))
    for first in (0, 2):
        assert norm(exact.update(first, first + 1)) > 0
        steps = [found.update(first, first + 1) for found in (rounded, exact)]
        assert relative_difference(*steps) <= (RELATIVE if first == 0 else 1e-3)


def test_the_choice_is_resumed_with_the_rollouts_bit_for_bit(tmp_path):
    def run(name: str, resume: Path | None = None) -> Path:
        options = {**KL, "num_iterations": 2, "save_steps": 1}
        trainer_of(tmp_path, Job(name, options=options)).train(
            resume_from_checkpoint=None if resume is None else str(resume)
        )
        return tmp_path / name

    whole = run("whole")
    for step in (1, 2):  # among rollouts, and between
        again = run(f"resumed-{step}", whole / f"checkpoint-{step}")
        one, other = (load_file(folder / "checkpoint-5" / "policy.safetensors") for folder in (whole, again))
        assert all(torch.equal(tensor, other[key]) for key, tensor in one.items())
    rollouts = load_file(whole / "checkpoint-1" / "rollouts-rank0.safetensors")
    assert rollouts["0/selected_tokens"].dtype == torch.bool
    assert "0/selected_at_step" in rollouts


def test_rows_without_an_advantage_count_in_the_means_and_are_run_where_they_are_held_back():
    found = train(PeftGRPOTrainer, **OFF_POLICY, **{**KL, "cov_fraction": 1.0})
    fractions = [entry["rows/trained_fraction"] for entry in found.history if "rows/trained_fraction" in entry][:4]
    assert fractions[0] < 1 == fractions[1]
    assert fractions[2] < 1 == fractions[3]
    clipped = train(PeftGRPOTrainer, **OFF_POLICY, **CLIP)
    assert all(entry["rows/trained_fraction"] < 1 for entry in clipped.history if "rows/trained_fraction" in entry)


def test_the_plan_accounts_for_the_pass_that_selects():
    memory, device = SimpleNamespace(plan=SimpleNamespace(tokens=100, recompute=False)), SimpleNamespace(on_cpu=True)
    found = {}
    for name in ("dapo", "clip_cov", "kl_cov"):
        recipe = {"extends": "quickstart", "algorithm": name, "model": {"name": "sandbox:base"}}
        plan = prepare(read_recipe(recipe))
        found[name] = execution_of(plan, shape_of(plan, on_cpu=True), memory, device).old
    assert found == {"dapo": False, "clip_cov": True, "kl_cov": True}


OTHERS = {"cov_fraction": 0.01, "cov_low": 0.5, "cov_high": 9.0, "cov_kl_weight": 0.1}
OTHERS |= {"dppo_divergence": "kl", "dppo_threshold": 0.3}


@pytest.mark.parametrize("name", OTHERS)
def test_a_setting_is_refused_beside_a_loss_that_does_not_read_it(name):
    readers = {"cov_fraction": ("clip_cov", "kl_cov"), "cov_kl_weight": ("kl_cov",)}.get(name, ("clip_cov",))
    readers = ("dppo",) if name.startswith("dppo") else readers
    for algorithm in ("grpo", "clip_cov", "kl_cov"):
        given = {"algorithm": algorithm, name: OTHERS[name]}
        if algorithm in readers:
            assert getattr(PeftRLConfig("run", use_cpu=True, **given), name) == OTHERS[name]
            continue
        named, unnamed = refused(**given), refused(**{name: OTHERS[name], "loss_type": algorithm})
        assert named.startswith(f"{name}: ")
        assert f"({', '.join(readers)} would)" in named
        assert unnamed.startswith(f"{name}: belongs to {' or '.join(readers)}")
        assert "\n" not in named + unnamed


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"cov_fraction": 1.5}, ("cov_fraction", "less than or equal to 1", "1.5")),
        ({"cov_low": 5.0}, ("cov_low", "below cov_high 5")),
        ({"algorithm": "kl_cov", "cov_kl_weight": 0.0}, ("cov_kl_weight", "greater than 0")),
        ({"importance_sampling_level": "sequence"}, ("importance_sampling_level", "clip_cov", "token")),
        ({"loss_type": "dapo"}, ("loss_type", "leaves nothing of clip_cov")),
    ],
    ids=str,
)
def test_what_cannot_be_is_one_line_with_its_key(given, words):
    line = refused(**{"algorithm": "clip_cov", **given})
    assert line.startswith(f"{words[0]}: ")
    assert all(word in line for word in words)
    assert "\n" not in line
