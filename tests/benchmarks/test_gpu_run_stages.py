"""The stages of the GPU benchmark that run whole trainings: on a CPU, small, and how they judge what they find."""

import json
import math
import subprocess
from types import SimpleNamespace

import pytest
import torch
from gpu_stages import train, vllm
from gpu_stages.setting import Setting, attempt
from safetensors.torch import load_file, save_file

from tests import warm


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
        (None, (0.5, 0.75), False, False),
    ],
    ids=["same", "another adapter", "another reward", "on a GPU", "another step", "no number", "other tensors"],
)
def test_a_resumed_run_is_held_to_the_undisturbed_one(tmp_path, moved, rewards, exact, ok):
    whole = write_run(tmp_path / "whole", torch.zeros(3))
    resumed = write_run(tmp_path / "resumed", torch.zeros(3) + (moved or 0.0), rewards)
    if moved is None:
        save_file({"b": torch.zeros(3)}, resumed / "adapter" / "adapter_model.safetensors")
    row = train.compared(whole, resumed, exact=exact)
    assert row["ok"] is ok
    row |= {"case": train.KILLED, "killed_after_step": 4, "resumed_from_step": 3}
    if moved is None:
        assert row["largest_difference"] is None
        assert train.table([row]).endswith("resumed from 3; the same steps, the adapters hold other tensors")
    else:
        assert row["largest_difference"] == pytest.approx(moved, nan_ok=True)
        assert f"adapter differs by {moved:.1e}" in train.table([row])


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


def largest_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return max(abs(a - b) for name in one for a, b in zip(one[name].tolist(), other[name].tolist(), strict=True))


def test_whole_runs_killed_and_resumed_are_a_stage_that_holds_on_a_cpu(tmp_path, monkeypatch):
    """Its runs are forks of a process that has imported already; the nightly tier starts them as the command does."""

    def fork(command, *, env, **options):
        assert env["HF_HUB_OFFLINE"] == "1"
        return warm.popen(command, **options)

    monkeypatch.setattr(train, "subprocess", SimpleNamespace(Popen=fork, TimeoutExpired=subprocess.TimeoutExpired))
    setting = Setting(torch.device("cpu"), tiny=True, done=frozenset(), folder=tmp_path, seconds=300.0)
    rows = {row["case"]: row for row in train.measure(setting)}
    assert rows.keys() == {train.QUICKSTART, train.ROLLOUTS, train.WHOLE, train.KILLED}
    assert [row for row in rows.values() if "error" in row or "skipped" in row or row.get("ok") is False] == []
    killed = rows[train.KILLED]
    assert 0 < killed["resumed_from_step"] < killed["killed_after_step"] < rows[train.WHOLE]["steps"]
    # The figures again, from the runs' files.
    whole, resumed = tmp_path / "random" / "undisturbed", tmp_path / "random" / "killed"
    files = [load_file(run / "adapter" / "adapter_model.safetensors") for run in (whole, resumed)]
    flat = [{name: tensor.flatten() for name, tensor in tensors.items()} for tensors in files]
    assert killed["largest_difference"] == largest_difference(*flat) == 0.0
    log = [json.loads(line) for line in (resumed / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in log] == [1, 2, 3, 4, 5, 6]
    spent = math.fsum(line["step_time"] for line in log)
    assert killed["tokens_per_second"] == pytest.approx(log[-1]["num_tokens"] / spent)
    # There is no vLLM in this environment, which is a row too.
    (row,) = vllm.measure(setting)
    assert "not installed" in row["skipped"]
