"""A short training by a name: the trainer's arguments, the loss and the run folder have what the row sets."""

import json

import pytest

import perl
from perl.algorithms.algorithm import Algorithm
from perl.algorithms.named import ALGORITHMS
from perl.algorithms.registry import Paper
from perl.errors import RunFolderError
from perl.recipe import load_recipe

SHORT = {
    "extends": "quickstart",
    "rollout": {"max_completion_length": 48},  # so that some are right
    "eval": {"enabled": False},
    "engine": {"device": "cpu", "threads": 1},
    "train": {
        **{"max_steps": 2, "prompts_per_step": 2, "num_generations": 8, "per_device_train_batch_size": 16},
        "num_iterations": 2,
    },
}


def test_a_training_by_name_has_the_rows_arguments_and_is_recorded_and_resumed(tmp_path, trainers):
    overrides = ["algorithm=gspo", "train.beta=0.01"]
    run = perl.train(SHORT, overrides, tmp_path / "run")
    expected = {**ALGORITHMS["gspo"].sets, "beta": 0.01}
    (trainer,) = trainers
    assert {name: getattr(trainer.args, name) for name in expected} == expected
    assert trainer.args.algorithm == "gspo"
    assert (trainer.epsilon_low, trainer.epsilon_high, trainer.beta) == (3e-4, 4e-4, 0.01)
    assert (trainer.loss_type, trainer.importance_sampling_level) == ("grpo", "sequence")
    facts = json.loads((run.path / "run.json").read_text())
    assert (facts["status"], facts["algorithm"], facts["overridden"]) == ("done", "gspo", {"beta": 0.01})
    saved = load_recipe(run.path / "recipe.yaml")
    assert saved.algorithm == "gspo"
    assert {name: saved.train[name] for name in expected} == expected
    card = run.card.read_text()
    assert "| algorithm | gspo; overridden: beta 0.01 |" in card
    assert "algorithm GSPO: Zheng et al. 2025" in card
    # The same recipe is the same run; the saved one too; another name is another run.
    assert perl.train(SHORT, overrides, tmp_path / "run").status == "done"
    assert perl.train(run.path / "recipe.yaml", (), tmp_path / "run").status == "done"
    assert len(trainers) == 1
    with pytest.raises(RunFolderError, match="algorithm is gspo there, sapo here"):
        perl.train(SHORT, ["algorithm=sapo", "train.beta=0.01"], tmp_path / "run")


@pytest.fixture
def toy(monkeypatch):
    paper = Paper("nobody2031toy", "Nobody et al.", 2031, "A Toy", "3101.00001")
    row = Algorithm("toy", "TOY", paper, {"loss_type": "bnpo", "epsilon": 0.07}, "min(x, y)", "R - z", "all: section 9")
    monkeypatch.setitem(ALGORITHMS, "toy", row)
    return row
