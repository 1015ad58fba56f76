"""Run folders as trainings write them, without a training."""

import json
import math
import random
from pathlib import Path

RECIPE = """\
model: {{name: sandbox:base}}
peft: {{method: {method}, rank: 8}}
rewards: {{accuracy: {{weight: 1.0, args: {{}}}}}}
train: {{max_steps: {planned}, learning_rate: {rate}, output_dir: somewhere/{method}}}
"""


def metrics_of(step: int, steps: int, generator: random.Random, **more: float) -> dict:
    """A row of a step of a training that goes well."""
    done = step / steps
    reward = 0.6 + 0.35 * done + 0.05 * generator.random()
    return {
        "step": step,
        "loss": -0.3 * (1 - done),
        "grad_norm": 0.1 + 0.05 * generator.random(),
        "learning_rate": 1e-3 * (1 - done),
        "num_tokens": 2000.0 * step,
        "completions/mean_length": 24 + 12 * done,
        "completions/max_length": 40.0,
        "completions/clipped_ratio": 0.01,
        "rewards/accuracy/mean": reward - 0.1,
        "rewards/format/mean": 0.9,
        "reward": reward,
        "frac_reward_zero_std": 0.2,
        "reward/accuracy/wrong_frac": 0.3 * (1 - done),
        "reward/accuracy/no_answer_frac": 0.0,
        "rows/masked_fraction": 0.0,
        "rows/trained_fraction": 0.9,
        "entropy": 0.1 * math.exp(-2 * done),
        "kl": 0.02 * done,
        "clip_ratio/region_mean": 0.001,
        "sampling/sampling_logp_difference/mean": 1e-4,
        "sampling/sampling_logp_difference/max": 1e-3,
        "sync/logp_diff": 1e-5,
        "sync/seconds": 0.1,
        "rollout/seconds": 0.5,
        "update/seconds": 0.3,
        "step_time": 1.0,
        "epoch": done,
        **more,
    }


def samples_of(step: int, count: int = 4, **more: object) -> list[dict]:
    """A group; the texts name the step and the place."""
    return [
        {
            "step": step,
            "prompt": [{"role": "user", "content": f"{step}+1="}],
            "completion": [{"role": "assistant", "content": f"Step {step}, place {place}: \\boxed{{{step + place}}}"}],
            "rewards": {"accuracy": float(place == 1), "format": 1.0},
            "advantage": 1.5 if place == 1 else -0.5,
            "accuracy_answer": str(step + place),
            "accuracy_verdict": "right" if place == 1 else "wrong",
            "tokens": ["Step ", f"{step}, ", f"place {place}: ", f"\\boxed{{{step + place}}}"],
            "gaps": [0.001, -0.02, None, 0.0001 * place],
            **more,
        }
        for place in range(count)
    ]


def write_run(
    folder: Path,
    *,
    steps: int = 12,
    planned: int = 12,
    status: str | None = "done",
    method: str = "lora",
    rate: float = 0.001,
    alarms: tuple[dict, ...] = (),
    **facts: object,
) -> Path:
    """A run's folder.

    Args:
        folder: Made anew.
        steps: That are logged.
        planned: In all.
        status: Of ``run.json``; None: a script's folder, which has none, and no recipe.
        method: Of the recipe.
        rate: Of the recipe.
        alarms: Rows of ``alarms.jsonl``.
        facts: Of ``run.json``.
    """
    folder.mkdir(parents=True)
    generator = random.Random(f"{method} {rate}")
    scored = max(1, steps // 4)
    rows = [
        metrics_of(step, planned, generator)
        | (
            {"eval/chain/avg@4": 0.3 + 0.3 * step / planned, "eval/chain/avg@4_stderr": 0.02}
            if step % scored == 0
            else {}
        )
        for step in range(1, steps + 1)
    ]
    write_rows(folder / "metrics.jsonl", rows)
    write_rows(folder / "samples.jsonl", [row for step in range(1, steps + 1) for row in samples_of(step)])
    if alarms:
        write_rows(folder / "alarms.jsonl", alarms)
    if status is not None:
        (folder / "recipe.yaml").write_text(RECIPE.format(method=method, planned=planned, rate=rate))
        known = {
            "status": status,
            "steps": steps,
            "method": method,
            "base": "sandbox:base",
            "trainable_parameters": 77824,
            "seconds": 12.5,
            "rewards": {"accuracy": 1.0, "format": 0.5},
            "settings": {"rank": 8, "learning rate": f"{rate:g}"},
            "versions": {"perl-rl": "0.2.0", "torch": "2.13.0" if method == "lora" else "2.14.0"},
            "hardware": {"device": "AMD EPYC", "count": 1},
            "forecast": ["model    sandbox:base, 804,224 parameters; lora trains 77,824", "hours of 12 steps  0.1"],
        }
        (folder / "run.json").write_text(json.dumps(known | facts))
    return folder


def write_rows(path: Path, rows: object) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def alarm(step: int, code: str = "PRL401", **more: object) -> dict:
    return {
        "step": step,
        "code": code,
        "name": "entropy_collapse",
        "value": 0.01,
        "limit": 0.02,
        "line": f"{code} step {step}: entropy fell to 0.010 nats",
        "stopped": False,
        **more,
    }
