"""Several processes share the completions of an evaluation: the samples are those of one process, whatever happens."""

import json
import re
import subprocess
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


def shared(
    adapter: Path, folder: Path, processes: int = 2, meets_with: tuple[str, ...] = ()
) -> subprocess.CompletedProcess:
    start = ["-m", "tests.evaluation.distributed_eval", *meets_with] if meets_with else ["-m", "perl"]
    return warm.run_distributed([*start, *command(adapter)], folder, processes)


def errors_of(said: str) -> list[str]:
    return [line for line in said.splitlines() if line.startswith("error: ")]


@pytest.mark.parametrize(
    ("differs", "words"),
    [
        ("adapter", ("has another evaluation than rank 0: adapter_sha256 is {0} there, {1} here",)),
        ("seed", ("has another evaluation than rank 0: protocol.seed is 0 there, 1 here",)),
        ("folder", ("does not see it as rank 0 does", "all processes need one folder")),
        ("weights", ("rank 1 would draw samples of another policy than rank 0: base_sha256 is ", " there, other here")),
        pytest.param("version", ("has other versions than rank 0: math-verify is ", ", 0.0.1 here"),
                     marks=pytest.mark.nightly),
    ],
)  # fmt: skip
def test_a_process_that_would_draw_something_else_is_named_before_anything_is_drawn(adapter, tmp_path, differs, words):
    other = tmp_path / "other"
    save_adapter(other, seed=1)
    asked = ["-m", "tests.evaluation.distributed_otherwise", differs, str(other)]
    done = warm.run_distributed([*asked, *command(adapter)], tmp_path)
    assert done.returncode == 2, done.stderr
    errors = errors_of(done.stderr)
    assert len(errors) == 1, done.stderr
    assert "rank 1" in errors[0]
    assert "Traceback" not in done.stderr
    digests = [sha256_of(folder / "adapter_model.safetensors") for folder in (adapter, other)]
    for text in words:
        assert text.format(*digests) in errors[0]
    assert not (tmp_path / "eval" / "samples.jsonl").exists()
    assert not list((tmp_path / "eval").glob(".together-*"))


def without_times(folder: Path) -> dict:
    found = json.loads((folder / "results.json").read_text())
    found["config_general"].pop("total_evaluation_time_secondes", None)
    found["perl"].pop("seconds")
    return found


def same(folder: Path, alone: Path) -> bool:
    texts = (folder / "samples.jsonl").read_bytes() == (alone / "samples.jsonl").read_bytes()
    return texts and without_times(folder) == without_times(alone)


@pytest.mark.parametrize("processes", [2, pytest.param(3, marks=pytest.mark.nightly)])
def test_samples_and_results_of_several_processes_are_those_of_one(adapter, alone, tmp_path, processes):
    done = shared(adapter, tmp_path, processes)
    assert done.returncode == 0, done.stderr
    assert same(tmp_path / "eval", alone)
    counts = {(who, task): counts.split(" + ") for who, task, _, counts in SHARED.findall(done.stderr)}
    assert sorted(counts) == [(w, t) for w in ("adapter", "base") for t in ("sandbox:addition", "sandbox:chain")]
    for each in counts.values():
        assert len(each) == processes
        assert sum(map(int, each)) == 14
        assert min(map(int, each)) >= 14 // processes - 1
    assert done.stdout.count("avg@2 base") == 1  # one process prints


def test_what_a_killed_evaluation_has_drawn_is_kept(adapter, alone, tmp_path):
    killed = shared(adapter, tmp_path, meets_with=("kill", "17", "0"))
    assert killed.returncode != 0
    file = tmp_path / "eval" / "samples.jsonl"
    kept = file.read_text().splitlines()
    assert len(kept) == 17
    marked = [json.loads(line) | {"text": f"{json.loads(line)['text']} "} for line in kept]  # so that it would show
    file.write_text("".join(json.dumps(line) + "\n" for line in marked))
    done = shared(adapter, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "base on sandbox:addition: 14 of 14 completions are there already" in done.stderr
    assert "base on sandbox:chain: 3 of 14 completions are there already" in done.stderr
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    by_one = [json.loads(line) for line in (alone / "samples.jsonl").read_text().splitlines()]
    assert sum(line["text"].endswith(" ") and line in marked for line in lines) == 17
    assert [line | {"text": line["text"].rstrip(" ")} for line in lines] == [
        line | {"text": line["text"].rstrip(" ")} for line in by_one
    ]


@pytest.mark.parametrize(
    ("what", "rank", "code"),
    [("fail", 1, 2), pytest.param("fail", 0, 2, marks=pytest.mark.nightly), ("interrupt", 0, 130)],
)
def test_an_error_of_one_process_ends_all_of_them(adapter, tmp_path, what, rank, code):
    ended = shared(adapter, tmp_path, meets_with=(what, "4", str(rank)))
    assert ended.returncode == code
    assert [(tmp_path / f"code-{each}").read_text() for each in range(2)] == [str(code)] * 2
    errors = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    of_another = "rank 1 has failed: " if rank else ""
    said = (
        "eval: stopped (the same command goes on)"
        if code == 130
        else f"model.name: {of_another}too little of everything"
    )
    assert errors == [f"error: {said} [{'PRL218' if code == 130 else 'PRL203'}]"]  # one process says it
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("processes", [2, pytest.param(3, marks=pytest.mark.nightly)])
def test_a_base_in_shards_draws_what_the_whole_one_does(tmp_path, processes):
    found = {}
    for how, count in (("whole", 1), ("shards", processes)):
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
    # As TRL generates rollouts, on each process as many tokens as it needs.
    assert [each["generated"] for each in found["shards"]] == whole["generated"][:processes]
    assert [len(rows[0]) for rows in whole["generated"]] == [3, 17, 8]


@pytest.mark.nightly
@pytest.mark.parametrize("how", ["whole", "shards"])
def test_servers_are_asked_by_the_main_process_and_proven_by_all(tmp_path, how):
    found = {}
    for each in {how, "whole"}:
        done = warm.run_distributed(["-m", "tests.evaluation.distributed_servers", str(tmp_path), each], tmp_path)
        assert done.returncode == 0, done.stderr
        found[each] = [json.loads((tmp_path / f"{each}-{rank}.json").read_text()) for rank in range(2)]
    main, other = found[how]
    assert main["loaded"] == [["probe"], ["adapter"]]  # the first engine proves that it binds an adapter
    assert other["loaded"] == []
    for who in ("base", "adapter"):
        difference, texts = main["found"][who]
        assert difference <= 1e-5  # rounding in float32
        assert other["found"][who] == [pytest.approx(difference, abs=1e-9), []]
        assert texts == found["whole"][0]["found"][f"{who} here"]
    assert main["found"]["base"][1] != main["found"]["adapter"][1]
