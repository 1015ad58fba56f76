"""A person at a terminal sees one live line, a log gets whole lines, and --quiet means quiet."""

import collections
import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading

import pytest

SMALL = (
    *("train", "quickstart", "train.max_steps=2", "train.prompts_per_step=2", "train.num_generations=2"),
    *("train.per_device_train_batch_size=4", "engine.threads=1"),
)
# The tests' own settings that make libraries quieter than they are to a person.
SILENCERS = ("TRANSFORMERS_VERBOSITY", "HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS")


def as_a_person_would_see_it():
    """The environment without the tests' settings; every redraw is drawn, however fast the machine is."""
    kept = {name: value for name, value in os.environ.items() if name not in SILENCERS}
    return {**kept, "TQDM_MININTERVAL": "0"}


# The same command three times, in one process, since importing takes longer than the run: as it is, quiet, into a log.
BETWEEN = "<now quiet>"
THREE_TIMES = f"""
import logging, os, sys
from perl.cli.main import run_commands
codes = [run_commands(sys.argv[1:], "perl")]
for stream in (sys.stdout, sys.stderr):
    print({BETWEEN!r}, file=stream, flush=True)
codes.append(run_commands([*sys.argv[1:], "--quiet", "--output", "runs/quiet"], "perl"))
logging.getLogger("perl").handlers.clear()  # a command adds its own, and no process has two commands
for descriptor, name in ((1, "stdout"), (2, "stderr")):
    os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), descriptor)
codes.append(run_commands([*sys.argv[1:], "--output", "runs/logged"], "perl"))
sys.exit(max(codes))
"""


def run_at_a_terminal(folder, *arguments):
    """Exit code and everything written to a real terminal of 160 columns, to which stderr and stdout go."""
    person, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 160, 0, 0))
    written = bytearray()

    def watch():
        while True:
            try:
                chunk = os.read(person, 65536)
            except OSError:  # how Linux says that the last writer has left
                return
            if not chunk:
                return
            written.extend(chunk)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        command = [sys.executable, "-c", THREE_TIMES, *arguments]
        streams = {"stdin": subprocess.DEVNULL, "stdout": terminal, "stderr": terminal}
        returncode = subprocess.Popen(command, cwd=folder, env=as_a_person_would_see_it(), **streams).wait()
    finally:
        os.close(terminal)
        watcher.join()
        os.close(person)
    return returncode, written.decode()


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """The folder; what two small steps draw at a terminal, and when they are quiet; what they write into a log."""
    folder = tmp_path_factory.mktemp("terminal")
    returncode, drawn = run_at_a_terminal(folder, *SMALL, "eval.limit=4", "eval.k=1")
    log = (folder / "stderr").read_text()
    assert returncode == 0, drawn + log
    assert "Traceback" not in drawn + log
    loud, *quiet = drawn.split(BETWEEN)
    return folder, loud, "".join(quiet).strip(), log


@pytest.fixture
def seen_at_a_terminal(seen):
    return seen[1]


def drawn(seen, label):
    """The states of a live line, in order."""
    return [line for line in re.split(r"[\r\n]+", seen) if re.search(rf"\|.* {label} ", line)]


@pytest.mark.nightly
def test_a_terminal_shows_a_live_line_with_step_reward_length_rate_and_time_left(seen_at_a_terminal):
    lines = drawn(seen_at_a_terminal, "training")
    assert lines[0].startswith("0/2 |")
    first = r"^1/2 \|.*\| training  reward \d\.\d{3}  length \d+\.\d.* ETA \d+:\d\d"
    assert any(re.search(first, line) for line in lines)
    last = r"^2/2 \|.*\| training  reward \d\.\d{3}  length \d+\.\d  [\d,]+ tokens/s.* ETA 0:00"
    assert re.search(last, lines[-1])
    assert len(lines) >= 3
    assert [line for line in lines if re.search(r"[|\s],", line)] == []  # no stray punctuation


@pytest.mark.nightly
def test_live_lines_are_taken_away_and_no_log_lines_come_between(seen_at_a_terminal):
    """What stays on the screen is what each row holds after its last carriage return."""
    rows = [row.rstrip("\r").split("\r")[-1] for row in seen_at_a_terminal.split("\n")]
    assert not any(re.match(r"\d+/\d+ \|", row) for row in rows)
    assert not any(row.startswith("step ") for row in rows)
    assert sum(" on sandbox:addition: " in row for row in rows) == 2
    assert any(row.startswith("2 steps, ") for row in rows)


@pytest.mark.nightly
def test_quiet_prints_nothing_but_what_is_wrong(seen, perl_command):
    folder, _, quiet, _ = seen
    assert quiet == ""
    assert (folder / "runs" / "quiet" / "adapter" / "README.md").is_file()
    result = perl_command("train", "quickstart", "peft.rnak=4", "--quiet")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ")


@pytest.mark.nightly
def test_a_log_gets_whole_lines_and_only_ours(seen):
    folder, *_, stderr = seen
    assert "\r" not in stderr
    assert "\x1b" not in stderr
    lines = stderr.splitlines()
    assert len(lines) == 4
    score = r"on sandbox:addition: avg@1 \d+\.\d( ± \d+\.\d| \[\d+\.\d, \d+\.\d\]), in \d+:\d\d"
    step = r"reward \d\.\d{3}  length \d+\.\d"
    assert re.fullmatch(f"base {score}", lines[0])
    assert re.fullmatch(rf"step 1/2  {step}  ETA \d+:\d\d", lines[1])
    assert re.fullmatch(rf"step 2/2  {step}  [\d,]+ tokens/s  ETA 0:00", lines[2])
    assert re.fullmatch(f"adapter {score}", lines[3])
    run = folder / "runs" / "logged"  # the numbers of the lines are those of the files
    logged = [row for row in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if "loss" in row]
    rewards = [float(re.search(r"reward (-?\d\.\d{3})", line)[1]) for line in lines[1:3]]
    assert rewards == [pytest.approx(row["reward"], abs=5e-4 + 1e-9) for row in logged[:2]]
    drawn_samples = [json.loads(line) for line in (run / "eval" / "samples.jsonl").read_text().splitlines()]
    right = collections.Counter(row["policy"] for row in drawn_samples if row["status"] == "right")
    among = collections.Counter(row["policy"] for row in drawn_samples)
    shown = [float(re.search(r"avg@1 (\d+\.\d)", line)[1]) for line in (lines[0], lines[3])]
    assert set(among.values()) == {4}
    assert sorted(shown) == pytest.approx(sorted(100 * right[policy] / count for policy, count in among.items()))


@pytest.mark.nightly
def test_the_results_are_on_stdout(perl_command):
    result = perl_command(*SMALL, "eval.enabled=false", "hub.repo_id=me/tiny")
    assert result.returncode == 0, result.stderr
    lines = dict(line.split(maxsplit=1) for line in result.stdout.splitlines()[1:])
    assert result.stdout.startswith("2 steps, ")
    assert lines == {
        "adapter": "runs/quickstart/adapter",
        "card": "runs/quickstart/adapter/README.md",
        "curves": "runs/quickstart/plots/curves.png",
        "push": "perl push runs/quickstart",
    }
