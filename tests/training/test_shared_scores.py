"""Two processes of a run share the scores of base, policy and adapter; they are what one process gives."""

import json

import pytest
import yaml

import perl
from perl.evaluation.drawing.request import EvalSettings
from perl.evaluation.scoring.results import read_results
from tests import warm
from tests.training.test_scores import recipe

RECIPE = recipe(k=1, max_completion_length=16, every=1, batch_size=50) | {"rollout": {"max_completion_length": 16}}
RECIPE["train"] |= {"max_steps": 2, "per_device_train_batch_size": 4, "learning_rate": 5e-3, "save_steps": 1}
# The whole task is asked.
SETTINGS = EvalSettings(temperature=1.0, top_p=1.0, max_new_tokens=16, lighteval=False, preset="base")


def trained(folder, *overrides, processes=2):
    (folder / "two.yaml").write_text(yaml.safe_dump(RECIPE))
    command = ["-m", "perl", "train", "two.yaml", *overrides, "--output", "run"]
    return warm.run_distributed(command, folder, processes)


@pytest.fixture(scope="module", params=["ddp", pytest.param("fsdp2", marks=pytest.mark.nightly)])
def run(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    done = trained(folder, f"engine.strategy={request.param}")
    assert done.returncode == 0, done.stderr
    return done, perl.Run.read(folder / "run")


@pytest.mark.nightly
def test_scores_between_steps_are_those_of_the_adapter_at_that_step(run, tmp_path):
    _, found = run
    rows = [json.loads(line) for line in found.metrics.read_text().splitlines()]
    between = {
        row["step"]: [row[f"eval/sandbox:chain/{name}"] for name in ("avg@1", "mean_tokens")]
        for row in rows
        if "eval/sandbox:chain/avg@1" in row
    }
    assert between.keys() == {1, 2}
    last = read_results(found.path / "eval").task("sandbox:chain").adapter
    assert between[2] == pytest.approx([last.accuracy, last.mean_tokens])
    first = found.checkpoints / "checkpoint-1"
    alone = perl.evaluate(first, tasks=["sandbox:chain"], k=1, output=tmp_path, settings=SETTINGS)
    then = alone.task("sandbox:chain").adapter
    assert between[1] == pytest.approx([then.accuracy, then.mean_tokens])
    assert between[1] != between[2]  # so that it would show
    best = json.loads((found.path / "best" / "best.json").read_text())
    assert best["value"] == pytest.approx(max(score for score, _ in between.values()))
