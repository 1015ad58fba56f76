"""Which number of processes may go on with a run: any with which a step has as many prompts."""

from pathlib import Path

import pytest

from perl.errors import RunFolderError
from perl.recipe.recipe import load_recipe
from perl.run.folder import Run, open_run


def opened(processes: int, strategy: str = "ddp", **train: int) -> Run:
    engine = {"processes": processes, "strategy": strategy, "threads": processes}
    with open_run(
        load_recipe({"engine": engine, "train": {"output_dir": "run", "num_generations": 8, **train}})
    ) as run:
        Path("run/metrics.jsonl").write_text('{"step": 1}\n')  # it has trained
    run.record(status="interrupted")
    return run


def test_processes_strategy_and_threads_are_places_and_a_step_keeps_its_prompts():
    started = opened(1, per_device_train_batch_size=16)
    assert started.facts["started_with"] == {"processes": 1, "prompts_per_step": 2}
    for processes, train in (
        (2, {"per_device_train_batch_size": 8}),
        (4, {"prompts_per_step": 2}),
        (1, {"per_device_train_batch_size": 16}),
        (2, {"prompts_per_step": 2, "gradient_accumulation_steps": 4}),
    ):
        assert opened(processes, "fsdp2", **train).facts["started_with"] == started.facts["started_with"]


@pytest.mark.parametrize(
    ("processes", "train", "says"),
    [
        (2, {"per_device_train_batch_size": 16}, "train.prompts_per_step comes to 2 there, 4 here"),
        (1, {"per_device_train_batch_size": 8}, "train.per_device_train_batch_size is 16 there, 8 here"),
        (2, {"per_device_train_batch_size": 8, "seed": 7}, "train.seed is None there, 7 here"),
    ],
)
def test_what_would_be_another_step_is_another_recipe(processes, train, says):
    opened(1, per_device_train_batch_size=16)
    with pytest.raises(RunFolderError, match=says):
        opened(processes, **train)
