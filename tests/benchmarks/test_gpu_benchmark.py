"""``benchmarks/gpu.py``: stages that fail cost themselves only, and what is measured stays.

The runner is tested with stages that crash and hang, in which a module of no weight stands for torch.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import gpu
import gpu_log
import pytest
from gpu import Stage
from gpu_stages import OF_THE_STAGE

LIMIT = 8.0  # of stages that hang: time enough to begin on a busy machine
TORCH = """
__version__ = "{version}"
class device:
    def __init__(self, name): self.type = name
class version: cuda = None
class cuda: is_available = staticmethod(lambda: False)
"""
FAKES = {
    # Takes three cases, one of which fails until a file is there, and writes down what it takes.
    "good": """
        from pathlib import Path
        HERE = Path(__file__).parent
        def measure(setting):
            def take(case):
                with (HERE / "taken").open("a") as taken: taken.write(case + " ")
                return {"value": case, "ok": True}
            def repaired():
                take("second")
                return {"value": (HERE / "repaired").read_text()}
            cases = {"first": lambda: take("first"), "second": repaired, "third": lambda: take("third")}
            yield from setting.each(cases)
        """,
    "raises": """
        def measure(setting):
            yield {"case": "before", "ok": False}
            raise ValueError("it went\\n wrong")
        """,
    "crashes": """
        import os, signal, sys
        def measure(setting):
            yield {"case": "before"}
            print("last words", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGSEGV)
        """,
    "hangs": """
        import os, subprocess, sys, time
        from pathlib import Path
        def measure(setting):
            sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
            own = subprocess.Popen(sleeper, start_new_session=True)
            (Path(__file__).parent / "sleeper").write_text(f"{own.pid} {os.getpid()}")
            yield {"case": "before"}
            time.sleep(600)
        """,
    "fork": """
        import os, time
        from pathlib import Path
        def measure(setting):
            yield {"case": "before"}
            child = os.fork()
            if child == 0: time.sleep(600)
            (Path(__file__).parent / "child").write_text(str(child))
            os._exit(3)
        """,
    # Tells no more, then takes longer to end than a stage that is asked to.
    "slow": """
        import os, time
        def measure(setting):
            yield {"case": "before"}
            os.closerange(3, 256)
            time.sleep(1.5)
            os._exit(3)
        """,
    "loud": """
        import sys
        def measure(setting):
            print("a warning")
            sys.stdout.flush()
            sys.stderr.write("x" * 5000)
            yield {"case": "before"}
            print("the last of it")
        """,
    "table": """
        def measure(setting):
            yield {"case": "before", "value": 1}
        """,
}


@pytest.fixture
def fakes(tmp_path, monkeypatch):
    """A folder of stages, in which torch is a stub."""
    folder = tmp_path / "fakes"
    folder.mkdir()
    for name, text in FAKES.items():
        table = "raise KeyError(rows)" if name == "table" else "return 'TABLE ' + ' '.join(row['case'] for row in rows)"
        text = textwrap.dedent(text) + f"def table(rows):\n    {table}\n"
        (folder / f"fake_{name}.py").write_text(text)
    (folder / "torch.py").write_text(TORCH.format(version="1"))
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return folder


def run(tmp_path: Path, *names: str, **changes) -> int:
    options = {
        "device": "cpu",
        "tiny": True,
        "again": False,
        "output": tmp_path / "out",
        "earlier": None,
        "minutes": 5.0,
    }
    options |= changes
    stages = [Stage(name[0], name, f"fake_{name}", limit=LIMIT, least=1.0) for name in names]
    return gpu.run_stages(stages, argparse.Namespace(**options))


def found(tmp_path: Path, name: str) -> dict:
    return json.loads((tmp_path / "out" / f"{name}.json").read_text())


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] != "Z"
    except OSError:
        return False


def gone(pid: int) -> bool:
    for _ in range(100):
        if not alive(pid):
            return True
        time.sleep(0.1)
    return False


def stage_and_sleeper(fakes: Path) -> list[int]:
    return [int(pid) for pid in (fakes / "sleeper").read_text().split()]


def test_a_stage_that_fails_keeps_its_rows_leaves_no_process_and_the_next_one_runs(fakes, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(gpu, "GRACE_SECONDS", 0.3)  # less than "slow" takes to end, which is not taken for stopped
    (fakes / "repaired").write_text("yes")
    assert run(tmp_path, "raises", "crashes", "hangs", "fork", "slow", "table", "good") == 1
    ends = {"raises": "ValueError: it went wrong", "crashes": "SIGSEGV", "fork": "exit code 3"}
    for name, said in (ends | {"hangs": "limit", "slow": "ended with exit code 3"}).items():
        result = found(tmp_path, name)
        assert [row["case"] for row in result["rows"]] == ["before", OF_THE_STAGE]
        assert said in result["rows"][1]["error"]
        assert not result["complete"]
    assert found(tmp_path, "crashes")["rows"][1]["log"][-1] == "last words"
    assert (tmp_path / "out" / "crashes.log").read_text().endswith("==\nlast words\n")
    assert not (tmp_path / "out" / "fork.log").exists()  # it said nothing
    raised = found(tmp_path, "raises")["rows"][1]["log"]
    assert any('raise ValueError("it went' in line for line in raised)
    assert any('fakes/fake_raises.py", line' in line for line in raised)
    assert str(tmp_path) not in "".join(raised)  # results are published
    assert "ValueError: it went" in (tmp_path / "out" / "raises.log").read_text()
    assert all(gone(pid) for pid in [int((fakes / "child").read_text()), *stage_and_sleeper(fakes)])
    good = found(tmp_path, "good")
    assert good["complete"]
    assert good["stage"] == "good"
    assert good["tiny"] is True
    assert (good["device"], good["versions"]["torch"], good["limit"]) == (good["device"], "1", LIMIT)
    printed = capfd.readouterr().out
    assert "TABLE first second third" in printed
    assert "| last words" in printed
    assert "no table: KeyError" in printed
    assert found(tmp_path, "table")["rows"] == [{"case": "before", "value": 1}]


@pytest.mark.usefixtures("fakes")
def test_what_a_stage_said_lies_beside_its_results_and_does_not_grow_without_end(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_log, "LOG_BYTES", 200)
    log = tmp_path / "out" / "loud.log"
    for _ in range(3):
        assert run(tmp_path, "loud", again=True) == 0
        kept = log.read_text()
        assert "a warning" in kept[:200]
        assert "bytes are left out" in kept
        assert kept.endswith("the last of it\n")
        assert len(kept) < 500
    assert run(tmp_path, "loud") == 0  # nothing to do, nothing to say
    assert log.read_text() == kept


def test_results_of_another_folder_are_gone_on_from_and_left_as_they_are(fakes, tmp_path):
    assert run(tmp_path, "good") == 1
    earlier = (tmp_path / "out").rename(tmp_path / "earlier")
    before = {path.name: path.read_bytes() for path in earlier.iterdir()}
    assert before.keys() == {"good.json", "good.log"}
    (fakes / "repaired").write_text("yes")
    (fakes / "taken").write_text("")
    assert run(tmp_path, "good", earlier=earlier) == 0
    assert (fakes / "taken").read_text().split() == ["second"]
    assert len(found(tmp_path, "good")["rows"]) == 3
    assert {path.name: path.read_bytes() for path in earlier.iterdir()} == before
    assert (tmp_path / "out" / "good.log").read_bytes().startswith(before["good.log"])
    # A stage with nothing left to do is among the results all the same, and what is there counts before the other.
    again = (tmp_path / "out").rename(tmp_path / "again")
    assert run(tmp_path, "good", earlier=again) == 0
    assert run(tmp_path, "good", earlier=earlier) == 0
    assert (fakes / "taken").read_text().split() == ["second"]
    assert (tmp_path / "out" / "good.json").read_bytes() == (again / "good.json").read_bytes()


def test_the_same_command_goes_on_where_it_was(fakes, tmp_path):
    def taken() -> list[str]:
        known = (fakes / "taken").read_text().split()
        (fakes / "taken").write_text("")
        return known

    assert run(tmp_path, "good") == 1
    assert taken() == ["first", "second", "third"]
    assert "FileNotFoundError" in found(tmp_path, "good")["rows"][1]["error"]
    (fakes / "repaired").write_text("yes")
    assert run(tmp_path, "good") == 0
    assert taken() == ["second"]
    assert sorted(row["case"] for row in found(tmp_path, "good")["rows"]) == ["first", "second", "third"]
    before = found(tmp_path, "good")
    assert run(tmp_path, "good") == 0
    assert taken() == []
    assert found(tmp_path, "good") == before
    assert run(tmp_path, "good", again=True) == 0
    assert taken() == ["first", "second", "third"]
    (fakes / "torch.py").write_text(TORCH.format(version="2"))
    assert run(tmp_path, "good") == 0
    assert taken() == ["first", "second", "third"]


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda how: how.name)
def test_ended_from_outside_it_leaves_rows_and_no_process(how, fakes, tmp_path, checkout):
    program = "import gpu, sys; gpu.STAGES = (gpu.Stage('h', 'hangs', 'fake_hangs'),); sys.exit(gpu.main(sys.argv[1:]))"
    command = [sys.executable, "-c", program, "hangs", "--tiny", "--device", "cpu", "--output", str(tmp_path / "out")]
    paths = os.pathsep.join([str(checkout / "benchmarks"), str(fakes)])
    process = subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": paths}, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert any("before: measured" in line for line in process.stdout)
        process.send_signal(how)
        said, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert [row["case"] for row in found(tmp_path, "hangs")["rows"]] == ["before"]
    sleeper, stage = stage_and_sleeper(fakes)
    if how == signal.SIGKILL:  # nobody is left to end what has a session of its own; what is on the GPU ends by itself
        assert gone(stage)
        os.kill(sleeper, signal.SIGKILL)
    else:
        assert process.returncode == 130
        assert "goes on from here" in said
        assert gone(stage)
        assert gone(sleeper)


@pytest.mark.usefixtures("fakes")
def test_a_command_that_can_measure_nothing_names_why_and_writes_nothing(tmp_path, capsys):
    for arguments, said in ((["x"], "no stage 'x'"), (["--device", "cpu"], "--tiny")):
        with pytest.raises(SystemExit):
            gpu.main(arguments)
        assert said in capsys.readouterr().err
    assert run(tmp_path, "good", "hangs", minutes=0.0) == 0
    assert "g good, h hangs" in capsys.readouterr().out  # what there is no time for
    assert run(tmp_path, "good", "raises", device="cuda") == 1
    assert capsys.readouterr().out.count("no CUDA device") == 1
    assert not (tmp_path / "out").exists()
