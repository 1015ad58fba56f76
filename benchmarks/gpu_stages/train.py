"""Stage f: whole runs as a user starts them, one of them killed and started again.

quickstart; random Qwen3-0.6B with rollouts from transformers -> seconds, tokens a second, rewards, the same adapter?

Each run is a process of its own, ``perl train`` on the stage's device. The adapter of the run that was killed and went
on is compared with the undisturbed one's: bit for bit on a CPU; on CUDA, where sums have no fixed order, the difference
is reported and the steps must be the same. What the runs say goes into the stage's log.
"""

import contextlib
import functools
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import perl
from gpu_stages.random_base import PROMPT_WORDS, random_recipe, write_random_base
from gpu_stages.setting import Row, Setting
from perl.policy.checkpoint import latest_checkpoint, step_of
from perl.rollouts.engine import EngineSampling, Request
from perl.rollouts.hf_engine import TransformersEngine
from perl.run.logs import read_log

QUICKSTART, ROLLOUTS, WHOLE, KILLED = "quickstart", "rollouts", "undisturbed", "killed and resumed"
_STEPS, _SAVE = 8, 3
_WHOLE = "undisturbed"  # its folder
_POLL_SECONDS = 0.05
_LOG_BYTES = 50_000  # of what a run has said, that goes into the stage's log


def measure(setting: Setting) -> Iterator[Row]:
    """The cases that were not measured before; see the file's first lines."""
    cases = {QUICKSTART: _quickstart, ROLLOUTS: _rollouts, WHOLE: _undisturbed, KILLED: _killed}
    yield from setting.each({name: functools.partial(case, setting) for name, case in cases.items()})


def table(rows: list[Row]) -> str:
    """A line a case."""
    lines = [f"{'case':20} {'status':9} {'seconds':>8} {'steps':>6} {'tokens/s':>9} {'reward':>16}  what else"]
    for row in rows:
        before, after = row.get("reward_before"), row.get("reward_after")
        reward = "" if before is None or after is None else f"{before:.3f} -> {after:.3f}"
        lines.append(
            f"{row['case']:20} {row.get('status', '-'):9} {_number(row.get('seconds')):>8} {row.get('steps', ''):>6} "
            f"{_number(row.get('tokens_per_second'), 0):>9} {reward:>16}  {_remark(row)}"
        )
    return "\n".join(lines)


class _RunFailed(RuntimeError):
    """A run did not end as it must; the last that it said is added to the traceback."""

    def __init__(self, problem: str, log: Path) -> None:
        """What is wrong, and where the run's words are."""
        said = [line.rstrip() for line in _words(log).splitlines() if line.strip()]
        super().__init__(f"{problem}: {said[-1].strip()[:200] if said else 'it said nothing'}")
        self.add_note("\n".join(said[-10:]))


def _quickstart(setting: Setting) -> Row:
    """As it is packaged, base and adapter scored; fewer steps and problems where all is tiny."""
    shorter = ["train.max_steps=3", "train.prompts_per_step=2", "train.per_device_train_batch_size=16", "eval.limit=8"]
    settings = ["train.report_to=[]", "rollout.backend=transformers", *(shorter if setting.tiny else [])]
    device = "cpu" if setting.device.type == "cpu" else "auto"
    folder = setting.folder / "quickstart"
    setting.folder.mkdir(parents=True, exist_ok=True)
    _train(["quickstart", *settings, f"engine.device={device}"], folder, setting.folder, setting)
    row = _facts(folder, setting.folder)
    score = json.loads((folder / "run.json").read_text(encoding="utf-8"))["eval"]["sandbox:addition"]
    return row | {"score_before": score["base"], "score_after": score["adapter"]}


def _rollouts(setting: Setting) -> Row:
    """Completions of the random base from transformers alone, in this process."""
    path = write_random_base(setting.folder / "random", tiny=setting.tiny, device=setting.device)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32 if setting.tiny else torch.bfloat16)
    engine = TransformersEngine(model.to(setting.device).eval(), AutoTokenizer.from_pretrained(path))
    count, length = (4, 12) if setting.tiny else (64, 128)
    vocabulary = model.config.vocab_size
    prompt = tuple(torch.randint(2, vocabulary, (PROMPT_WORDS,), generator=torch.Generator().manual_seed(2)).tolist())
    requests = [Request(prompt, count)]
    sampling = EngineSampling(temperature=1.0, max_completion_length=length, end_token_ids=(1,))
    engine.start(requests, EngineSampling(temperature=1.0, max_completion_length=2, end_token_ids=(1,))).result()
    started = time.perf_counter()
    (group,) = engine.start(requests, sampling).result()  # tokens are lists on the CPU: the device has ended
    seconds = time.perf_counter() - started
    tokens = sum(len(sampled.token_ids) for sampled in group)
    rate = tokens / seconds
    return {"seconds_of_sampling": seconds, "tokens": tokens, "completions": count, "tokens_per_second": rate}


def _undisturbed(setting: Setting) -> Row:
    """The random base with a LoRA, from the first step to the last."""
    folder, recipe = _random_run(setting)
    _train([str(recipe)], folder / _WHOLE, folder, setting)
    return _facts(folder / _WHOLE, folder)


def _killed(setting: Setting) -> Row:
    """The same, killed after a checkpoint, and the same command again."""
    folder, recipe = _random_run(setting)
    if not (folder / _WHOLE / "adapter").is_dir():  # measured in an earlier run of this stage
        _train([str(recipe)], folder / _WHOLE, folder, setting)
    run = folder / "killed"
    killed_after = _train_and_kill([str(recipe)], run, folder, setting)
    checkpoint = latest_checkpoint(run / "checkpoints")
    _train([str(recipe)], run, folder, setting)
    row = _facts(run, folder)
    row |= {"killed_after_step": killed_after, "resumed_from_step": step_of(checkpoint) if checkpoint else 0}
    return row | compared(folder / _WHOLE, run, exact=setting.device.type == "cpu")


def compared(whole: Path, resumed: Path, *, exact: bool) -> Row:
    """Whether two runs logged the same steps and saved the same adapter.

    Args:
        whole: The undisturbed run.
        resumed: The one that was killed.
        exact: Whether the adapters must be equal bit for bit, and the rewards of all steps too.
    """
    first, second = (load_file(run / "adapter" / "adapter_model.safetensors") for run in (whole, resumed))
    logs = [read_log(run / "metrics.jsonl") for run in (whole, resumed)]
    same_tensors = first.keys() == second.keys()
    # By torch's maximum, which a NaN goes through; Python's leaves out one that is not first.
    each = [(first[name] - second[name]).abs().max().float() for name in first] if same_tensors else []
    difference = float(torch.stack(each).max()) if each else None
    finite = difference is not None and math.isfinite(difference)
    same_steps, same_rewards = (
        len({tuple(row[key] for row in log) for log in logs}) == 1 for key in ("step", "reward")
    )
    return {
        "largest_difference": difference,
        "same_steps": same_steps,
        "same_rewards": same_rewards,
        "ok": finite and same_steps and (not exact or (difference == 0.0 and same_rewards)),
    }


def _random_run(setting: Setting) -> tuple[Path, Path]:
    folder = setting.folder / "random"
    write_random_base(folder, tiny=setting.tiny, device=setting.device)
    steps, save = (6, 2) if setting.tiny else (_STEPS, _SAVE)
    recipe = random_recipe(
        folder, tiny=setting.tiny, device=setting.device, backend="transformers", steps=steps, save=save
    )
    return folder, recipe


@contextlib.contextmanager
def _started(arguments: list[str], run: Path, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """``perl train`` as a process, with this package, in a folder; what it says goes to a file, then to our own log."""
    package = str(Path(perl.__file__).parent.parent)
    paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "perl", "train", *arguments, "--output", str(run)]
    with _log_of(run, folder).open("w", encoding="utf-8") as log:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log, text=True)  # noqa: S603
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        print(f"-- perl train {' '.join(arguments)} --\n{_words(_log_of(run, folder))}", flush=True)


def _train(arguments: list[str], run: Path, folder: Path, setting: Setting) -> None:
    """A run that must end well."""
    with _started(arguments, run, folder) as process:
        try:
            code = process.wait(timeout=max(setting.left(), 1.0))
        except subprocess.TimeoutExpired:
            raise _RunFailed("the run did not end within the stage's time", _log_of(run, folder)) from None
    if code != 0:
        raise _RunFailed(f"exit code {code}", _log_of(run, folder))


def _train_and_kill(arguments: list[str], run: Path, folder: Path, setting: Setting) -> int:
    """Kills a run when it is a step beyond its first checkpoint; the last step that it logged."""
    with _started(arguments, run, folder) as process:
        while process.poll() is None and setting.left() > 0:
            checkpoint, logged = latest_checkpoint(run / "checkpoints"), _last_step(run)
            if checkpoint is not None and logged > step_of(checkpoint):
                process.send_signal(signal.SIGKILL)
                process.wait()
                return logged
            time.sleep(_POLL_SECONDS)
    raise _RunFailed("ended before it was killed", _log_of(run, folder))


def _log_of(run: Path, folder: Path) -> Path:
    return folder / f"{run.name}.log"


def _words(log: Path) -> str:
    """What a run has said, its end if that is long."""
    return log.read_bytes()[-_LOG_BYTES:].decode(errors="replace") if log.is_file() else ""


def _last_step(run: Path) -> int:
    return max((int(line["step"]) for line in read_log(run / "metrics.jsonl")), default=0)


def _facts(run: Path, folder: Path) -> Row:
    """What a run says of itself; an error if it is not done."""
    facts: dict[str, Any] = json.loads((run / "run.json").read_text(encoding="utf-8"))
    log = read_log(run / "metrics.jsonl")
    step_seconds = [line["step_time"] for line in log]
    row = {
        "status": facts["status"],
        "steps": facts["steps"],
        "seconds_of_steps": sum(step_seconds),
        "seconds_of_the_last_step": step_seconds[-1],
        # Of the whole step: sampled, judged and trained on. Prompts count.
        "tokens_per_second": log[-1]["num_tokens"] / sum(step_seconds),
        "reward_before": log[0]["reward"],
        "reward_after": log[-1]["reward"],
        "hardware": facts.get("hardware"),
    }
    if facts["status"] != "done":
        raise _RunFailed(f"{run.name} is {facts['status']}", _log_of(run, folder))
    return row


def _number(value: float | None, places: int = 1) -> str:
    return "" if value is None else f"{value:,.{places}f}"


def _remark(row: Row) -> str:
    """What the columns have no place for."""
    if "score_after" in row:
        return f"held-out {row['score_before']:.3f} -> {row['score_after']:.3f}"
    if "largest_difference" in row:
        same = "the same steps" if row["same_steps"] else "other steps"
        where = f"killed after step {row['killed_after_step']}, resumed from {row['resumed_from_step']}"
        difference = row["largest_difference"]
        apart = "the adapters hold other tensors" if difference is None else f"adapter differs by {difference:.1e}"
        return f"{where}; {same}, {apart}"
    return "the base, no training" if row["case"] == ROLLOUTS else ""
