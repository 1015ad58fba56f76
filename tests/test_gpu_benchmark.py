"""``benchmarks/gpu.py``: stages that fail cost themselves only, what is measured stays, and its checks notice defects.

The runner is tested with stages that crash and hang, in which a module of no weight stands for torch; the first two
stages run as they are, small and on a CPU.
"""

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import textwrap
import time
from functools import partial
from pathlib import Path

import gpu
import gpu_log
import gpu_stages.__main__ as stage_process
import gpu_wheels
import pytest
import torch
from gpu import Stage
from gpu_stages import OF_THE_STAGE, attention_cases, methods, pass_cases, random_models, requirements
from gpu_stages.doctor import HEAD_SIZES
from gpu_stages.setting import Setting

from perl import PeftGRPOTrainer
from perl.attention import Machine, packed_attention
from perl.methods.registry import METHODS
from perl.packing import Layout, Segment

CPU = torch.device("cpu")
LIMIT = 12.0  # of stages that hang: time enough to begin on a busy machine
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


def test_a_stage_that_fails_keeps_its_rows_and_the_next_one_runs(fakes, tmp_path, capfd):
    (fakes / "repaired").write_text("yes")
    assert run(tmp_path, "raises", "crashes", "fork", "table", "good") == 1
    for name, said in (("raises", "ValueError: it went wrong"), ("crashes", "SIGSEGV"), ("fork", "exit code 3")):
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
    assert gone(int((fakes / "child").read_text()))
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


def test_a_stage_that_hangs_is_ended_at_its_limit_with_all_that_it_has_started(fakes, tmp_path):
    assert run(tmp_path, "hangs") == 1
    result = found(tmp_path, "hangs")
    assert [row["case"] for row in result["rows"]] == ["before", OF_THE_STAGE]
    assert "limit" in result["rows"][1]["error"]
    assert all(gone(pid) for pid in stage_and_sleeper(fakes))


@pytest.mark.usefixtures("fakes")
def test_a_stage_that_takes_long_to_end_is_not_taken_for_one_that_was_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "GRACE_SECONDS", 0.3)
    assert run(tmp_path, "slow") == 1
    assert found(tmp_path, "slow")["rows"][1]["error"] == "ended with exit code 3"


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


def test_what_there_is_no_time_for_is_named(tmp_path, capsys):
    assert run(tmp_path, "good", "hangs", minutes=0.0) == 0
    assert "g good, h hangs" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


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


def test_a_command_that_cannot_be_meant_is_refused(capsys):
    for arguments, said in ((["x"], "no stage 'x'"), (["--device", "cpu"], "--tiny")):
        with pytest.raises(SystemExit):
            gpu.main(arguments)
        assert said in capsys.readouterr().err


@pytest.mark.usefixtures("fakes")
def test_without_a_gpu_nothing_is_measured(tmp_path, capsys):
    assert run(tmp_path, "good", "raises", device="cuda") == 1
    assert capsys.readouterr().out.count("no CUDA device") == 1
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """The first two stages, small and on a CPU, and what they printed."""
    root, out = Path(__file__).resolve().parent.parent, tmp_path_factory.mktemp("gpu")
    command = [sys.executable, str(root / "benchmarks" / "gpu.py"), "a", "b", "--tiny", "--device", "cpu"]
    done = subprocess.run([*command, "--output", str(out)], capture_output=True, text=True, check=False)
    return done, {path.stem: json.loads(path.read_text()) for path in out.glob("*.json")}


def test_the_first_two_stages_run_on_a_cpu_and_all_checks_hold(tiny):
    done, results = tiny
    assert done.returncode == 0, done.stdout
    assert results.keys() == {"doctor", "correct"}
    for result in results.values():
        assert result["complete"]
        assert all(row.get("ok", True) and "error" not in row for row in result["rows"])
    assert "all checks hold" in done.stdout


def test_the_doctor_finds_the_machine_its_packages_and_the_attention_that_runs(tiny):
    rows = {row["case"]: row for row in tiny[1]["doctor"]["rows"]}
    assert rows["packages"]["value"]["torch"] == torch.__version__
    assert rows["matmul bfloat16"]["tflops"] > 0
    assert rows["bandwidth"]["gb_per_s"] > 0
    assert max(rows["head float32"]["off"]) < 1e-5 < max(rows["head bfloat16"]["off"]) < 2e-2
    for size in HEAD_SIZES:
        assert "scaled_dot_product" in rows[f"attention bfloat16 {size}"]["value"]
    assert set(rows["gpu"]) >= {"skipped"}
    assert ".whl" in rows["set up"]["value"]


def test_every_type_and_head_size_is_checked_with_shared_prompts_and_grouped_heads(tiny):
    cases = {row["case"]: row for row in tiny[1]["correct"]["rows"]}
    for dtype in ("bfloat16", "float16", "float32"):
        for size in (64, 80, 96, 128, 256, 512):
            assert f"attention {dtype} {size} gqa shared" in cases
            assert cases[f"attention {dtype} {size} mha alone"]["of"].keys() == {"output", "query", "key", "value"}
    for kind in pass_cases.TYPES:
        assert f"pass {kind} recomputed shared" in cases
        assert f"pass {kind} fused head" in cases
    assert cases["pass float32 compiled"]["gradient"] < 1e-5
    assert "pass bfloat16 autocast recomputed fused head compiled" in cases
    assert cases["step beside TRL's, float32"]["difference"] < 1e-5
    assert cases["pass float32 shared"]["gradient"] < 1e-5


def no_prefix(query, key, value, layout, **_):
    return packed_attention(query, key, value, Layout(tuple(Segment(s.start, s.length) for s in layout.segments), CPU))


def one_block(query, key, value, layout, **_):
    length = sum(segment.length for segment in layout.segments)
    return packed_attention(query, key, value, Layout((Segment(0, length),), CPU))


def other_heads(query, key, value, layout, **_):
    return packed_attention(query, key.flip(1), value, layout)


def other_scale(query, key, value, layout, **_):
    return packed_attention(1.05 * query, key, value, layout)


def no_gradient_of_keys(query, key, value, layout, **_):
    return packed_attention(query, key + 0.1 * (key - key.detach()), value, layout)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("wrong", [no_prefix, one_block, other_heads, other_scale, no_gradient_of_keys])
def test_attention_that_is_wrong_is_found(wrong, dtype, monkeypatch):
    layout = attention_cases.layout_of(attention_cases.SHORT_LENGTHS["shared"], CPU)
    assert attention_cases.compare(CPU, layout, dtype, 64, (8, 2))["ok"]
    monkeypatch.setattr(attention_cases, "packed_attention", wrong)
    assert not attention_cases.compare(CPU, layout, dtype, 64, (8, 2))["ok"]


@pytest.mark.parametrize("wrong_in", ["output", "gradient"])
def test_attention_that_is_no_number_is_found(wrong_in, monkeypatch):
    def none(query, key, value, layout):
        if wrong_in == "gradient":  # of the keys alone, which are not the first to be judged
            key = key + 0 * torch.nan_to_num(key - key.detach()).sqrt()
            return packed_attention(query, key, value, layout)
        return packed_attention(query, key, value, layout) * torch.nan

    layout = attention_cases.layout_of(attention_cases.SHORT_LENGTHS["shared"], CPU)
    monkeypatch.setattr(attention_cases, "packed_attention", none)
    row = attention_cases.compare(CPU, layout, "bfloat16", 64, (8, 2))
    assert not row["ok"]
    assert row["difference"] == math.inf
    assert (row["of"]["output"] < 0.1) == (wrong_in == "gradient")


def test_a_yardstick_that_is_no_number_lets_nothing_pass(monkeypatch):
    layout = attention_cases.layout_of(attention_cases.SHORT_LENGTHS["shared"], CPU)
    by_sdpa = attention_cases._by_sdpa
    monkeypatch.setattr(attention_cases, "_by_sdpa", lambda *tensors: by_sdpa(*tensors) * torch.nan)
    monkeypatch.setattr(attention_cases, "packed_attention", other_scale)
    assert not attention_cases.compare(CPU, layout, "float32", 64, (8, 2))["ok"]
    right, broken = (pass_cases.Numbers(torch.ones(3) * factor, torch.ones(3)) for factor in (1.0, torch.inf))
    assert pass_cases.judged(right, right, right, half=True)["ok"]
    assert not pass_cases.judged(right, broken, right, half=True)["ok"]


def test_numbers_that_hold_without_the_kernel_are_a_failure_where_it_should_have_run(monkeypatch):
    layout = attention_cases.layout_of(attention_cases.SHORT_LENGTHS["shared"], CPU)
    compare = partial(attention_cases.compare, CPU, layout, size=64, heads=(8, 2))
    assert compare("bfloat16")["ok"]
    monkeypatch.setattr(attention_cases, "machine_of", lambda _: Machine("cuda", (9, 0), flash=True))
    row = compare("bfloat16")
    assert (row["ok"], row["by segment"]) == (False, "no")
    assert row["difference"] <= row["tolerance"]
    assert not compare("float32", autocast=True)["ok"]  # which is bfloat16 to the kernel
    assert compare("float32")["ok"]
    # As torch calls it where it runs.
    assert str(torch.ops.torch_attn._varlen_attn.default).split(".")[1].startswith(attention_cases.KERNEL)


def test_a_compiled_pass_that_is_not_compiled_is_found(monkeypatch):
    monkeypatch.setattr(random_models, "compile_layers", lambda *_, **__: None)
    with pytest.raises(RuntimeError, match="nothing was compiled"):
        pass_cases.compare(CPU, True, "float32", fused=False, compiled=True)


def test_every_method_is_taken_and_the_slow_ones_last():
    assert sorted(methods.in_order()) == sorted(METHODS)
    assert methods.in_order()[-1] == "boft"


@pytest.mark.parametrize("kind", pass_cases.TYPES)
def test_a_pass_that_is_wrong_is_found(kind, monkeypatch):
    right = pass_cases.score

    def wrong(model, rows, families, *, packed, **options):
        if packed:  # a row without its own prompt
            families = [[0, 1, 3], *([index] for index in range(len(rows)) if index not in (0, 1, 3))]
        return right(model, rows, families, packed=packed, **options)

    monkeypatch.setattr(pass_cases, "score", wrong)
    assert not pass_cases.compare(CPU, True, kind, recompute=False, shared=True)["ok"]


def test_a_method_that_is_saved_wrong_is_found(tmp_path, monkeypatch):
    right = PeftGRPOTrainer.save_adapter

    def wrong(trainer, path):
        parameters = [p for p in trainer.policy.parameters() if p.requires_grad]
        with torch.no_grad():
            for parameter in parameters:
                parameter.mul_(0.9)
            right(trainer, path)
            for parameter in parameters:
                parameter.div_(0.9)

    monkeypatch.setattr(PeftGRPOTrainer, "save_adapter", wrong)
    monkeypatch.setattr(methods, "STAND_FOR_ALL", ("lora",))
    row, left_out = methods.method_cases(Setting(CPU, True, frozenset(), tmp_path, 60.0))
    assert "not the one that was trained" in row["error"]
    assert "skipped" in left_out


def distribution(folder: Path, name: str, version: str, *needs: str) -> None:
    place = folder / f"{name}-{version}.dist-info"
    place.mkdir()
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {n}" for n in needs)]
    (place / "METADATA").write_text("\n".join(lines) + "\n")


def test_missing_packages_are_found_to_the_last(tmp_path):
    distribution(tmp_path, "one", "1.5", "two>=2", "extra-only; extra == 'more'", "other; sys_platform == 'nowhere'")
    distribution(tmp_path, "two", "2.0", "three_a<3", "one")
    distribution(tmp_path, "three_a", "3.1")
    path = [str(tmp_path)]
    assert dict(requirements.unmet(["one>=1"], path)) == {"three-a": "3.1 is here, two needs <3"}
    assert dict(requirements.unmet(["one[more]>=2"], path)) == {
        "one": "1.5 is here, perl-rl needs >=2",
        "three-a": "3.1 is here, two needs <3",
        "extra-only": "missing, one needs it",
    }
    assert dict(requirements.unmet(requirements.dependencies())) == {}


def test_the_wheels_are_all_that_is_needed_but_for_what_comes_with_torch(checkout):
    names = gpu_wheels.needed(requirements.dependencies(), set(gpu_wheels.THERE), "3.12")
    assert {"annotated-types", "typing-inspection", "httpcore2", "detect-secrets", "math-verify", "peft"} <= set(names)
    assert not set(names) & {"torch", "numpy", "pandas", "pyarrow", "sympy", "mpmath", "networkx"}
    pins = gpu_wheels.pinned(names, (checkout / "constraints.txt").read_text())
    assert all("==" in pin for pin in pins)
    assert "http" not in Path(gpu_wheels.__file__).read_text()


def test_modules_that_do_not_come_are_named_with_the_reason(tmp_path, monkeypatch):
    (tmp_path / "broken_one.py").write_text("import no_such_module")
    monkeypatch.syspath_prepend(tmp_path)
    (missing,) = requirements.not_importable(("json", "broken_one"))
    assert missing == ("broken_one", "ModuleNotFoundError: No module named 'no_such_module'")


def test_an_import_that_fails_says_all_that_is_missing_and_where_to_read(monkeypatch):
    assert stage_process.how_to_set_up() == ""
    monkeypatch.setattr(requirements, "unmet", lambda _: iter([("pydantic", "missing, perl-rl needs it")]))
    said = stage_process.how_to_set_up()
    assert "pydantic (missing, perl-rl needs it)" in said
    assert "benchmarks/README.md" in said
