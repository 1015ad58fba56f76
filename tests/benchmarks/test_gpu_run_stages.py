"""The stages of the GPU benchmark that run whole trainings: on a CPU, small, and how they judge what they find."""

import importlib.util
import json
import subprocess
import sys

import pytest
import torch
from gpu_stages import train, vllm
from gpu_stages.random_base import random_recipe, write_random_base
from gpu_stages.setting import Setting, attempt
from safetensors.torch import save_file

from perl.training.stages import prepare, read_recipe


def write_run(folder, tensor, rewards=(0.5, 0.75)):
    (folder / "adapter").mkdir(parents=True)
    save_file({"a": torch.zeros(3), "b": tensor}, folder / "adapter" / "adapter_model.safetensors")
    lines = [json.dumps({"step": step + 1, "reward": reward}) for step, reward in enumerate(rewards)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.mark.parametrize(
    ("moved", "rewards", "exact", "ok"),
    [
        (0.0, (0.5, 0.75), True, True),
        (1e-7, (0.5, 0.75), True, False),
        (0.0, (0.5, 0.5), True, False),
        (1e-7, (0.5, 0.5), False, True),
        (0.0, (0.5, 0.75, 0.75), False, False),
        (float("nan"), (0.5, 0.75), False, False),
    ],
    ids=["same", "another adapter", "another reward", "on a GPU", "another step", "no number"],
)
def test_a_resumed_run_is_held_to_the_undisturbed_one(tmp_path, moved, rewards, exact, ok):
    whole = write_run(tmp_path / "whole", torch.zeros(3))
    resumed = write_run(tmp_path / "resumed", torch.zeros(3) + moved, rewards)
    row = train.compared(whole, resumed, exact=exact)
    assert row["ok"] is ok
    assert row["largest_difference"] == pytest.approx(moved, nan_ok=True)


def test_adapters_with_other_tensors_are_a_line_of_the_table(tmp_path):
    whole, resumed = write_run(tmp_path / "whole", torch.zeros(3)), write_run(tmp_path / "resumed", torch.zeros(3))
    save_file({"b": torch.zeros(3)}, resumed / "adapter" / "adapter_model.safetensors")
    row = train.compared(whole, resumed, exact=False)
    assert row["ok"] is False
    row |= {"case": train.KILLED, "killed_after_step": 4, "resumed_from_step": 3}
    assert train.table([row]).endswith("resumed from 3; the same steps, the adapters hold other tensors")


def test_what_a_run_said_is_in_the_log_and_its_end_in_the_row(tmp_path, capfd, monkeypatch):
    program = tmp_path / "perl.py"
    words = "\n".join(f"print('word {n}')" for n in range(30))
    program.write_text(f"{words}\nimport sys; sys.exit(7)\n")
    monkeypatch.setattr(train.perl, "__file__", str(tmp_path / "perl" / "__init__.py"))
    setting = Setting(torch.device("cpu"), tiny=True, done=frozenset(), folder=tmp_path, seconds=60.0)
    row = attempt("case", lambda: train._train(["recipe.yaml"], tmp_path / "run", tmp_path, setting))
    assert row["error"] == "_RunFailed: exit code 7: word 29"
    assert row["log"][-10:] == [f"word {n}" for n in range(20, 30)]
    assert "-- perl train recipe.yaml --\nword 0\nword 1\n" in capfd.readouterr().out


def test_without_vllm_one_row_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    setting = Setting(torch.device("cpu"), tiny=True, done=frozenset(), folder=tmp_path, seconds=1.0)
    (row,) = vllm.measure(setting)
    assert "not installed" in row["skipped"]


def test_the_random_base_can_be_planned_by_its_recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    device = torch.device("cpu")
    write_random_base(tmp_path, tiny=True, device=device)
    path = random_recipe(tmp_path, tiny=True, device=device, backend="transformers", steps=2, save=1)
    plan = prepare(read_recipe(path))
    assert (plan.steps, plan.recipe.batch.completions_per_step) == (2, 8)
    assert plan.rewards[0].function(completions=["", ""], completion_ids=[[2, 500], [2, 3]]) == [0.5, 1.0]


def test_whole_runs_killed_and_resumed_are_a_stage_that_holds_on_a_cpu(tmp_path, checkout):
    command = [sys.executable, str(checkout / "benchmarks" / "gpu.py"), "train", "vllm", "--tiny", "--device", "cpu"]
    done = subprocess.run([*command, "--output", str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    rows = {row["case"]: row for row in json.loads((tmp_path / "train.json").read_text())["rows"]}
    assert len(rows) == 4
    assert not any("error" in row or "skipped" in row or row.get("ok") is False for row in rows.values())
    assert [row["largest_difference"] for row in rows.values() if "largest_difference" in row] == [0.0]
    assert "skipped" in json.loads((tmp_path / "vllm.json").read_text())["rows"][0]
