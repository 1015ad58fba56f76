"""Several processes share the completions of an evaluation: the samples are those of one process, whatever happens."""

import json
import re
from pathlib import Path

import pytest

from perl.run.files import sha256_of
from tests import warm
from tests.saved_adapters import save_adapter

# 3 problems a batch, of two tasks; 14 completions of each, so that the last round is smaller than the others.
ASKED = ["--tasks", "sandbox:addition,sandbox:chain", "--limit", "7", "--k", "2", "--batch-size", "3"]
USUAL = [*ASKED, "--max-new-tokens", "20", "--no-lighteval", "--no-base-cache", "--threads", "1"]
SHARED = re.compile(r"^(\w+) on (\S+): .* by (\d+) processes: ([\d +]+) completions$", re.MULTILINE)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "lora"
    save_adapter(folder)
    return folder


@pytest.fixture(scope="module")
def alone(adapter, tmp_path_factory) -> Path:
    """The evaluation by one process."""
    folder = tmp_path_factory.mktemp("alone")
    done = warm.run([*warm.COMMAND, *command(adapter)], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / "eval"


def command(adapter: Path) -> list[str]:
    return ["eval", "--adapter", str(adapter), *USUAL, "--output", "eval"]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("differs", "said"),
    [
        ("adapter", "has another evaluation than rank 0: adapter_sha256 is {0} there, {1} here"),
        ("weights", "rank 1 would draw samples of another policy than rank 0: base_sha256 is "),
    ],
)
def test_a_process_that_would_draw_something_else_is_named_before_anything_is_drawn(adapter, tmp_path, differs, said):
    other = tmp_path / "other"
    save_adapter(other, seed=1)
    asked = ["-m", "tests.evaluation.distributed_otherwise", differs, str(other)]
    done = warm.run_distributed([*asked, *command(adapter)], tmp_path)
    assert done.returncode == 2, done.stderr
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    digests = [sha256_of(folder / "adapter_model.safetensors") for folder in (adapter, other)]
    assert "rank 1" in error
    assert said.format(*digests) in error
    assert not (tmp_path / "eval" / "samples.jsonl").exists()


def without_times(folder: Path) -> dict:
    found = json.loads((folder / "results.json").read_text())
    found["config_general"].pop("total_evaluation_time_secondes", None)
    found["perl"].pop("seconds")
    return found


def same(folder: Path, alone: Path) -> bool:
    texts = (folder / "samples.jsonl").read_bytes() == (alone / "samples.jsonl").read_bytes()
    return texts and without_times(folder) == without_times(alone)


def test_samples_and_results_of_two_processes_are_those_of_one(adapter, alone, tmp_path):
    done = warm.run_distributed(["-m", "perl", *command(adapter)], tmp_path)
    assert done.returncode == 0, done.stderr
    assert same(tmp_path / "eval", alone)
    counts = {(who, task): counts.split(" + ") for who, task, _, counts in SHARED.findall(done.stderr)}
    assert sorted(counts) == [(w, t) for w in ("adapter", "base") for t in ("sandbox:addition", "sandbox:chain")]
    for each in counts.values():
        assert len(each) == 2
        assert sum(map(int, each)) == 14
        assert min(map(int, each)) >= 6
    assert done.stdout.count("avg@2 base") == 1  # one process prints


@pytest.mark.nightly
def test_a_base_in_shards_draws_what_the_whole_one_does(tmp_path):
    found = {}
    for how, count in (("whole", 1), ("shards", 2)):
        done = warm.run_distributed(["-m", "tests.evaluation.distributed_draw", str(tmp_path), how], tmp_path, count)
        assert done.returncode == 0, done.stderr
        found[how] = [json.loads((tmp_path / f"{how}-{rank}.json").read_text()) for rank in range(count)]
    whole, *_ = found["whole"]
    for name, drawn in found["shards"][0]["drawn"].items():
        assert drawn["samples"] == whole["drawn"][name]["samples"]
        assert len({tokens for _, _, tokens in drawn["samples"]}) > 1 or name.endswith("1")
        assert sum(drawn["counts"]) == len(drawn["samples"])
    assert whole["drawn"]["base 7"]["samples"] != whole["drawn"]["adapter 7"]["samples"]
    # Of one completion every process writes a copy: a forward pass needs them all.
    counts = found["shards"][0]["drawn"]["base 7"]["counts"]
    assert [each["written"] for each in found["shards"]] == [2 * (count + 1) for count in counts]
