"""A run whose rollouts come from a server is scored by that server, between steps and at the end."""

import json

import pytest

import perl
from perl.evaluation.request import EvalSettings
from perl.evaluation.results import read_results
from perl.sandbox import load_problems

TASK = "sandbox:chain"
QUESTIONS = 200  # of 500


@pytest.mark.nightly
def test_scores_between_steps_and_at_the_end_come_from_the_server(lone_server, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "perl.evaluation.task_data.load_problems", lambda name, split: load_problems(name, split)[:QUESTIONS]
    )
    monkeypatch.setattr("perl.evaluation.reporting.lighteval_installed", lambda: False)  # it takes ten seconds a policy
    recipe = {
        "extends": "quickstart",
        "train": {"max_steps": 2, "prompts_per_step": 2, "num_generations": 4, "per_device_train_batch_size": 8},
        "rollout": {"backend": "vllm-server", "servers": [lone_server], "max_completion_length": 24},
        "eval": {"tasks": [TASK], "every": 2, "k": 1, "temperature": 0.0, "max_completion_length": 24},
    }
    run = perl.train(recipe, output_dir=tmp_path / "run")
    results = read_results(run.path / "eval")
    assert results.engine["backend"] == "vllm-server"
    assert results.engine["logp_diff"] < 2e-3
    rows = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    (between,) = [row[f"eval/{TASK}/avg@1"] for row in rows if f"eval/{TASK}/avg@1" in row]
    found = results.task(TASK)
    assert between == pytest.approx(found.adapter.accuracy, abs=0.01)  # rounding may turn a greedy token
    settings = EvalSettings(preset="greedy", max_new_tokens=24, lighteval=False, batch_size=256)
    own = perl.evaluate(run.adapter, tasks=[TASK], output=tmp_path / "own", settings=settings).task(TASK)
    for who in ("base", "adapter"):
        pairs = [(getattr(a, who), getattr(b, who)) for a, b in zip(found.problems, own.problems, strict=True)]
        assert sum(one == other for one, other in pairs) >= 0.97 * len(pairs)
