"""`perl eval` as a process: what it prints where, and what a kill, Ctrl-C or a second process do to it."""

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from perl.evaluation.scoring.task import all_tasks
from perl.recipe.assets import evaluation_tasks
from perl.sandbox import BASE_FOLDER
from tests import warm
from tests.saved_adapters import save_adapter

TASK = "sandbox:addition"
# Many small batches, so that there is a middle.
ASKED = ("--tasks", TASK, "--limit", "6", "--k", "2", "--max-new-tokens", "24", "--batch-size", "1", "--no-lighteval")
TOTAL = 6 * 2


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "lora"
    save_adapter(folder)
    return folder


@pytest.fixture(scope="module")
def uninterrupted(saved) -> Path:
    """The results of one go."""
    folder = saved.parent / "uninterrupted"
    done = evaluated(saved, folder)
    assert done.returncode == 0, done.stderr
    return folder


def evaluated(saved: Path, output: Path | str, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "perl", "eval", "--adapter", str(saved), "-o", str(output), *ASKED, *more]
    return warm.run(command, capture_output=True, text=True, check=False)


def stopped(saved: Path, output: Path, number: signal.Signals, after: int) -> subprocess.CompletedProcess[str]:
    """What a process says that gets a signal once so many samples are written."""
    command = [sys.executable, "-m", "perl", "eval", "--adapter", str(saved), "-o", str(output), *ASKED]
    process = warm.popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    file, deadline = output / "samples.jsonl", time.monotonic() + 120
    while not file.is_file() or file.read_bytes().count(b"\n") < after:
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(number)
    stdout, stderr = process.communicate()
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def tasks_of(folder: Path) -> dict:
    return json.loads((folder / "results.json").read_text())["perl"]["tasks"]


def share_right(folder: Path, who: str) -> float:
    """Counted from the samples, in which the base's come first."""
    lines = whole_lines(folder)
    half = lines[:TOTAL] if who == "base" else lines[TOTAL:]
    return sum(json.loads(line)["status"] == "right" for line in half) / TOTAL


def whole_lines(folder: Path) -> list[str]:
    return (folder / "samples.jsonl").read_text().split("\n")[:-1]


def assert_it_goes_on(saved: Path, output: Path, uninterrupted: Path) -> None:
    """The same command ends as if nothing had been; what was written is neither lost nor drawn again."""
    before = whole_lines(output)
    assert not (output / "results.json").exists()
    done = evaluated(saved, output)
    assert done.returncode == 0, done.stderr
    there = re.findall(r"(\w+) on sandbox:addition: (\d+) of (\d+) completions are there already", done.stderr)
    assert sum(int(count) for _, count, _ in there) == len(before)
    assert {int(total) for _, _, total in there} == {TOTAL}
    assert set(before) <= set(whole_lines(output))
    assert whole_lines(output) == whole_lines(uninterrupted)
    assert len(set(whole_lines(output))) == 2 * TOTAL
    assert tasks_of(output) == tasks_of(uninterrupted)


@pytest.mark.parametrize(
    ("number", "after"), [(signal.SIGKILL, TOTAL + 3), pytest.param(signal.SIGINT, 3, marks=pytest.mark.nightly)]
)
def test_after_a_kill_or_ctrl_c_the_same_command_goes_on(tmp_path, saved, uninterrupted, number, after):
    result = stopped(saved, tmp_path / "out", number, after)
    assert after <= len(whole_lines(tmp_path / "out")) < 2 * TOTAL
    if number == signal.SIGINT:
        assert (result.returncode, result.stdout) == (130, "")
        assert "Traceback" not in result.stderr
        said = f"error: {tmp_path / 'out'}: stopped (the same command goes on) [PRL218]"
        assert result.stderr.splitlines()[-1] == said
        assert_it_goes_on(saved, tmp_path / "out", uninterrupted)
        return
    assert result.returncode == -signal.SIGKILL
    with (tmp_path / "out" / "samples.jsonl").open("a") as file:
        file.write('{"policy": "4a36131d646466b4", "task": "sandbox:add')
    assert_it_goes_on(saved, tmp_path / "out", uninterrupted)


@pytest.mark.nightly
def test_the_table_or_json_goes_to_stdout_and_what_happens_to_stderr(saved, uninterrupted):
    done = evaluated(saved, uninterrupted)
    assert "Sandbox addition" in done.stdout
    assert f"results  {uninterrupted / 'results.json'}" in done.stdout
    said = done.stderr.splitlines()
    assert said[0].startswith("policy   lora on sandbox:base")
    assert re.fullmatch(
        r"adapter on sandbox:addition: avg@2 \d+\.\d( ± \d+\.\d| \[\d+\.\d, \d+\.\d\]), in 0:\d\d", said[-1]
    )
    assert not [line for line in said if "Warning" in line or "Loading" in line]
    (shown,) = re.findall(r": avg@2 (\d+\.\d)", said[-1])
    scored = tasks_of(uninterrupted)[TASK]
    for who in ("base", "adapter"):
        assert scored[who]["accuracy"] == pytest.approx(share_right(uninterrupted, who), rel=1e-12)
    assert float(shown) == pytest.approx(100 * scored["adapter"]["accuracy"], abs=0.05 + 1e-9)
    printed = evaluated(saved, uninterrupted, "--json")
    assert (printed.returncode, printed.stderr) == (0, "")
    assert json.loads(printed.stdout)["perl"]["tasks"] == tasks_of(uninterrupted)
    assert json.loads(printed.stdout) == json.loads((uninterrupted / "results.json").read_text())


def test_the_tasks_are_listed(perl_command):
    result = perl_command("eval", "--list-tasks")
    assert (result.returncode, result.stderr) == (0, "")
    assert [line.split()[0] for line in result.stdout.splitlines()] == list(all_tasks())
    assert len(all_tasks()) >= len(evaluation_tasks())
    listed = json.loads(perl_command("eval", "--list-tasks", "--json").stdout)
    assert [row["name"] for row in listed] == list(all_tasks())
    assert {"name", "title", "data", "file"} == set(listed[0])


@pytest.mark.nightly
def test_a_dry_run_loads_no_weights_and_writes_nothing(perl_command, saved, tmp_path):
    shutil.copytree(BASE_FOLDER, tmp_path / "weightless")
    (tmp_path / "weightless" / "model.safetensors").unlink()
    arguments = ("--adapter", str(saved), "--base", "weightless", "--tasks", f"{TASK}, sandbox:chain", "--k", "2")
    result = perl_command("eval", *arguments, "--dry-run", cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert "policy   lora on weightless" in result.stdout
    assert "4,000 completions" in result.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["weightless"]


@pytest.mark.nightly
def test_results_are_compared(perl_command, uninterrupted, tmp_path):
    other = shutil.copytree(uninterrupted, tmp_path / "other")
    compared = perl_command("eval", "compare", str(uninterrupted), str(other))
    assert (compared.returncode, compared.stderr) == (0, "")
    assert re.search(r"^base .*uninterrupted .*other ", compared.stdout, re.MULTILINE | re.DOTALL)
    facts = json.loads(perl_command("eval", "compare", str(uninterrupted), str(other), "--json").stdout)
    counted = [share_right(uninterrupted, who) for who in ("base", "adapter", "adapter")]
    assert [policy["scores"][TASK]["accuracy"] for policy in facts["policies"]] == pytest.approx(counted, rel=1e-12)
