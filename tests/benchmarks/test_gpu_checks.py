"""The first two stages of the GPU benchmark run small on a CPU, and their checks notice defects that are planted."""

import json
import math
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
from gpu_stages import attention_cases, correct, doctor, methods, pass_cases, random_models, train
from gpu_stages.doctor import HEAD_SIZES
from gpu_stages.setting import Setting

from perl import PeftGRPOTrainer
from perl.methods.registry import METHODS
from perl.packing.attention import Machine, packed_attention
from perl.packing.rows import Layout, Segment

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[2]


# Layers that are compiled are a case of the stage ``fuse`` too, which is run in test_gpu_stages.
COMPILED = frozenset(
    name for name in pass_cases.pass_cases(Setting(CPU, True, frozenset(), Path(), 1.0)) if "compiled" in name
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """The rows of the first two stages, small and on a CPU, by stage and case."""
    setting = Setting(CPU, tiny=True, done=COMPILED, folder=tmp_path_factory.mktemp("gpu"), seconds=600.0)
    found = {}
    with pytest.MonkeyPatch.context() as changed, warnings.catch_warnings():
        changed.setattr(Setting, "clear", lambda _: None)  # collecting garbage 98 times takes most of the time here
        warnings.simplefilter("ignore")
        for name, stage in (("doctor", doctor), ("correct", correct)):
            found[name] = {row["case"]: row for row in stage.measure(setting)}
    return found


def wrong_rows(rows):
    return [row for row in rows if "error" in row or row.get("ok") is False]


def test_the_doctor_finds_the_machine_its_packages_and_the_attention_that_runs(tiny):
    rows = tiny["doctor"]
    assert wrong_rows(rows.values()) == []
    assert rows["packages"]["value"]["torch"] == torch.__version__
    assert rows["matmul bfloat16"]["tflops"] > 0
    assert rows["bandwidth"]["gb_per_s"] > 0
    assert max(rows["head float32"]["off"]) < 1e-5 < max(rows["head bfloat16"]["off"]) < 2e-2
    for size in HEAD_SIZES:
        assert "scaled_dot_product" in rows[f"attention bfloat16 {size}"]["value"]
    assert set(rows["gpu"]) >= {"skipped"}
    assert ".whl" in rows["set up"]["value"]


def test_every_type_head_size_pass_and_method_is_checked_and_all_checks_hold_on_a_cpu(tiny):
    cases = tiny["correct"]
    assert wrong_rows(cases.values()) == []
    assert "all checks hold" in correct.table([row for row in cases.values() if "skipped" not in row])
    for dtype in ("bfloat16", "float16", "float32"):
        for size in (64, 80, 96, 128, 256, 512):
            assert f"attention {dtype} {size} gqa shared" in cases
            assert cases[f"attention {dtype} {size} mha alone"]["of"].keys() == {"output", "query", "key", "value"}
    for kind in pass_cases.TYPES:
        assert f"pass {kind} recomputed shared" in cases
        assert f"pass {kind} fused head" in cases
    assert {"pass float32 compiled", "pass bfloat16 autocast recomputed fused head compiled"} == COMPILED
    assert cases["step beside TRL's, float32"]["difference"] < 1e-5
    assert cases["pass float32 shared"]["gradient"] < 1e-5
    assert sorted(methods.in_order()) == sorted(METHODS)
    assert methods.in_order()[-1] == "boft"  # which takes the longest


@pytest.mark.nightly
def test_the_command_runs_stages_as_processes_and_compiled_passes_hold(tmp_path):
    names = ["doctor", "correct", "train", "vllm"]
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), *names, "--tiny", "--device", "cpu"]
    done = subprocess.run([*command, "--output", str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    results = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert results.keys() == set(names)
    for result in results.values():
        assert result["complete"]
        assert wrong_rows(result["rows"]) == []
    assert "all checks hold" in done.stdout
    cases = {row["case"]: row for row in results["correct"]["rows"]}
    assert cases.keys() >= COMPILED
    assert cases["pass float32 compiled"]["gradient"] < 1e-5
    assert [row["case"] for row in results["train"]["rows"] if "skipped" not in row] == [
        *(train.QUICKSTART, train.ROLLOUTS, train.WHOLE, train.KILLED)
    ]


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


def no_number(query, key, value, layout):
    return packed_attention(query, key, value, layout) * torch.nan


def no_number_of_keys(query, key, value, layout):
    """In the gradient, and of the keys alone, which are not the first to be judged."""
    key = key + 0 * torch.nan_to_num(key - key.detach()).sqrt()
    return packed_attention(query, key, value, layout)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(
    "wrong", [no_prefix, one_block, other_heads, other_scale, no_gradient_of_keys, no_number, no_number_of_keys]
)
def test_attention_that_is_wrong_or_no_number_is_found(wrong, dtype, monkeypatch):
    layout = attention_cases.layout_of(attention_cases.SHORT_LENGTHS["shared"], CPU)
    assert attention_cases.compare(CPU, layout, dtype, 64, (8, 2))["ok"]
    monkeypatch.setattr(attention_cases, "packed_attention", wrong)
    row = attention_cases.compare(CPU, layout, dtype, 64, (8, 2))
    assert not row["ok"]
    assert (row["difference"] == math.inf) == (wrong in (no_number, no_number_of_keys))
    if wrong is no_number_of_keys:
        assert row["of"]["output"] < 0.1


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
