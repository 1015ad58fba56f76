"""What version 0.1 wrote is read by this one: recipes, run folders, checkpoints, adapters and results.

The files lie in ``made_before/0.1``; ``made_before/make.py`` made them, with the code of that version.
"""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from click.testing import CliRunner
from safetensors.torch import load_file

import perl
from perl.cli.commands import commands
from perl.evaluation.recounting.folder import recount_folder
from perl.evaluation.results import read_results
from perl.hub.card.candidate import find_candidate
from perl.hub.push.round_trip import check_round_trip
from perl.policy.checkpoint import latest_checkpoint
from tests.made_before.make import machine, script

BEFORE = Path(__file__).parent / "made_before" / "0.1"
ADAPTER = Path("adapter") / "adapter_model.safetensors"
RUNS = ("finished", "adalora", "pissa")
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")


@pytest.fixture
def before(tmp_path: Path) -> Path:
    """A copy that a test may write to."""
    return Path(shutil.copytree(BEFORE, tmp_path / "before"))


def content_of(folder: Path) -> dict[str, bytes]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def same_numbers_as_then() -> bool:
    """Whether this machine adds up in the same order as the one that made the files: same torch, same kernels."""
    return machine() == json.loads((BEFORE / "machine.json").read_text())


def assert_same_adapter(made: Path, before: Path) -> None:
    """But for rounding where the machine allows it; elsewhere the same tensors, near the old ones.

    Since version 0.2 completions of a group that are alike are run once, so that an update adds up in another order.
    """
    apart = 1e-6 if same_numbers_as_then() else 5e-3  # four steps of 1e-3 at most
    tensors, expected = load_file(made), load_file(before)
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(tensors[name], tensor, rtol=0, atol=apart)


def asked(file: Path) -> list[dict]:
    """Samples without what they are kept under, which names the adapter by its bits."""
    return [{**json.loads(line), "policy": None} for line in file.read_text().splitlines()]


def run_command(*arguments: str) -> str:
    result = CliRunner().invoke(commands, list(arguments))
    assert result.exit_code == 0, result.output
    return result.output


def test_the_files_are_small_and_made_by_version_0_1():
    files = content_of(BEFORE)
    assert 40 <= len(files) <= 80
    assert sum(map(len, files.values())) < 600_000
    assert len(re.findall(rb'"perl-rl": "0\.1\.0"', b"".join(files.values()))) >= 5


@pytest.mark.parametrize("recipe", ["recipe.yaml", *(f"{run}/recipe.yaml" for run in (*RUNS, "interrupted"))])
def test_a_recipe_is_read(recipe):
    loaded = perl.Recipe.load(BEFORE / recipe)
    assert loaded.peft.rank == 2
    assert loaded.peft.target_modules == ["v_proj"]
    assert loaded.batch.completions_per_step == 8


def test_a_finished_run_is_done_and_stays_as_it_is(before):
    files = content_of(before / "finished")
    run = perl.train(before / "recipe.yaml", output_dir=before / "finished")
    assert run.status == "done"
    assert content_of(before / "finished") == files


def test_an_interrupted_run_goes_on_and_ends_as_version_0_1_would_have_ended_it(before):
    perl.train(before / "recipe.yaml", output_dir=before / "interrupted")
    resumed, finished = before / "interrupted", before / "finished"
    assert latest_checkpoint(resumed / "checkpoints").name == "checkpoint-4"
    assert_same_adapter(resumed / ADAPTER, finished / ADAPTER)
    facts, expected = (json.loads((run / "run.json").read_text()) for run in (resumed, finished))
    assert facts["status"] == "done"
    assert facts["created"] != expected["created"]
    logged = [json.loads(line)["step"] for line in (resumed / "metrics.jsonl").read_text().splitlines()]
    assert logged == [1, 2, 3, 4]
    if same_numbers_as_then():
        assert facts["fingerprint"]["base"] == expected["fingerprint"]["base"]
        assert facts["reward"] == expected["reward"]
        assert facts["eval"] == expected["eval"]
        assert (resumed / "samples.jsonl").read_bytes() == (finished / "samples.jsonl").read_bytes()
        samples = asked(finished / "eval" / "samples.jsonl")
        # After them come those of the base that version 0.1 kept under another name, which are drawn again.
        assert asked(resumed / "eval" / "samples.jsonl")[: len(samples)] == samples


def test_a_scripts_checkpoint_goes_on_and_ends_as_version_0_1_ended_it(before):
    trainer = script(before / "script", steps=4)
    trainer.train(resume_from_checkpoint=True)
    assert [log["step"] for log in trainer.state.log_history if "reward" in log][:4] == [1, 2, 3, 4]
    trainer.save_adapter(before / "again")
    assert_same_adapter(before / "again" / ADAPTER.name, BEFORE / "script" / ADAPTER)


@pytest.mark.parametrize("name", RUNS)
def test_an_adapter_is_still_the_policy_that_was_trained(name):
    run = perl.Run.read(BEFORE / name)
    difference = check_round_trip(find_candidate(run), run.adapter, torch.device("cpu"))
    assert difference is not None  # the run kept its policy's log-probs
    assert difference <= 1e-5


@pytest.mark.parametrize("adapter", ["finished/adapter", "adalora/adapter", "pissa/adapter", "script/checkpoint-2"])
@pytest.mark.filterwarnings("ignore:The PEFT config's `base_model_name_or_path` was renamed")
def test_an_adapter_can_be_trained_further(adapter, tmp_path):
    recipe = yaml.safe_load((BEFORE / "recipe.yaml").read_text())
    del recipe["extends"]
    recipe |= {"peft": {"adapter": str(BEFORE / adapter)}, "model": {"name": "sandbox:base"}}
    overrides = ["train.max_steps=2", "train.learning_rate=1e-3", "eval.enabled=false", "engine.device=cpu"]
    run = perl.train(recipe, overrides, tmp_path / "further")
    assert run.status == "done"
    trained, start = load_file(run.path / ADAPTER), load_file(BEFORE / adapter / ADAPTER.name)
    assert trained.keys() == start.keys()
    assert any(not torch.equal(trained[name], start[name]) for name in start)


def test_an_adapter_is_scored_as_it_was(tmp_path):
    settings = ["--tasks", "sandbox:addition", "--k", "2", "--limit", "4", "--no-lighteval"]
    output = run_command("eval", "--adapter", str(BEFORE / "finished"), *settings, "--output", str(tmp_path / "again"))
    assert "sandbox:addition" in output
    again, then = read_results(tmp_path / "again"), read_results(BEFORE / "finished")
    assert {**again.subject, "name": None} == {**then.subject, "name": None}  # the folder's, and the recipe's


def shares_of_right(folder: Path) -> list[float]:
    """Of the answers in a folder of samples, by policy in the order in which they were drawn: base, adapter."""
    verdicts: dict[str, list[bool]] = {}
    for line in (folder / "eval" / "samples.jsonl").read_text().splitlines():
        sample = json.loads(line)
        verdicts.setdefault(sample["policy"], []).append(sample["status"] == "right")
    return [sum(right) / len(right) for right in verdicts.values()]


def test_results_are_read_and_counted_again():
    results = read_results(BEFORE / "finished")
    (task,) = results.tasks
    assert [task.base.accuracy, task.adapter.accuracy] == pytest.approx(shares_of_right(BEFORE / "finished"))
    recorded = json.loads((BEFORE / "finished" / "run.json").read_text())["eval"][task.name]
    assert (task.base.accuracy, task.adapter.accuracy) == (recorded["base"], recorded["adapter"])
    assert recount_folder(BEFORE / "finished").mistakes == ()


@pytest.mark.parametrize("form", ["lora", "merged"])
def test_an_adapter_is_exported(form, before):
    run_command("export", str(before / "pissa"), "--as", form)
    assert list((before / f"pissa-{form}").glob("*.safetensors"))


def test_a_run_is_packed_with_a_card_that_is_true(before):
    run = str(before / "finished")
    assert "nothing is wrong with it" in run_command("card", run, "--check")  # the card that version 0.1 wrote
    run_command("card", run)
    assert "nothing is wrong with it" in run_command("card", run, "--check")
    packed = run_command("push", run, "--repo", "user/name", "--dry-run")
    assert "adapter_model.safetensors" in packed
    assert "eval/results.json" in packed
