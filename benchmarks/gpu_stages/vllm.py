"""Stage g: rollouts from vLLM in this process, where it is installed.

random Qwen3-0.6B with a LoRA -> parity with the trainer, what a sync costs, free memory around a sleep, three steps

The engine proves when it opens that it binds the adapter: with one of random numbers, then with the policy's own. One
that does not is an error of the first case, and of those that need it.
"""

import functools
import importlib.util
import json
import os
import time
from collections.abc import Iterator
from typing import Any

import torch
from datasets import Dataset

from gpu_stages.random_base import qwen3_config, write_random_base
from gpu_stages.setting import Row, Setting
from perl import PeftGRPOTrainer, PeftRLConfig
from perl.policy.precision import compute_dtype, layers_of, tolerance_of
from perl.rollouts.engine import Engine, EngineSampling, Request

PARITY, SLEEP, STEPS = "parity and sync", "sleep and wake", "three steps"
_GIGA = 2**30
# Of vLLM for CPUs: a small cache, and no compiler, which would take minutes for a toy.
_ON_A_CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


def measure(setting: Setting) -> Iterator[Row]:
    """The cases that were not measured before; one row that says so where there is no vLLM."""
    if importlib.util.find_spec("vllm") is None:
        if "vllm" not in setting.done:
            yield {"case": "vllm", "skipped": "vllm is not installed here"}
        return
    if setting.device.type == "cpu":
        for name, value in _ON_A_CPU.items():
            os.environ.setdefault(name, value)
    colocated = _Colocated(setting)
    cases = {PARITY: colocated.parity, SLEEP: colocated.sleep, STEPS: colocated.steps}
    yield from setting.each(cases)


def table(rows: list[Row]) -> str:
    """A line a number that was found."""
    lines = []
    for row in rows:
        lines.append(row["case"])
        lines += [f"  {name:34} {_shown(value)}" for name, value in row.items() if name not in ("case", "device")]
    return "\n".join(lines)


class _Colocated:
    """A trainer and the engine in its process, which the cases share."""

    def __init__(self, setting: Setting) -> None:
        self._setting, self._failed = setting, False

    @functools.cached_property
    def _trainer(self) -> PeftGRPOTrainer:
        setting, tiny = self._setting, self._setting.tiny
        folder = setting.folder / "random"
        model = write_random_base(folder, tiny=tiny, device=setting.device)
        prompts = [json.loads(line)["prompt"] for line in (folder / "prompts.jsonl").read_text().splitlines()]
        below = qwen3_config(tiny=tiny).vocab_size // 2
        length = 12 if tiny else 512
        arguments = PeftRLConfig(
            str(folder / "run"),
            peft_method="lora",
            peft_rank=16,
            peft_alpha=32,
            rollout_backend="vllm",
            prompts_per_step=2 if tiny else 8,
            num_generations=4 if tiny else 8,
            per_device_train_batch_size=8 if tiny else 64,
            max_completion_length=length,
            vllm_max_model_length=64 + length,
            vllm_gpu_memory_utilization=0.05 if tiny else 0.3,
            model_init_kwargs={"dtype": "float32" if tiny else "bfloat16"},
            max_steps=3,
            save_strategy="no",
            learning_rate=1e-3,
            use_cpu=setting.device.type == "cpu",
            report_to=[],
            disable_tqdm=True,
        )

        def share_of_low_tokens(completion_ids: list[list[int]], **_: Any) -> list[float]:  # noqa: ANN401
            return [sum(token < below for token in ids) / max(len(ids), 1) for ids in completion_ids]

        return PeftGRPOTrainer(
            model=str(model),
            reward_funcs=share_of_low_tokens,
            args=arguments,
            train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
        )

    def _opened(self) -> Engine:
        """The engine, proven; a second try after a failed proof would find one that is open and not proven."""
        if self._failed:
            raise RuntimeError("the engine's proof has failed")
        self._failed = True
        engine = self._trainer.rollout_source.policy_engine(self._prompt_ids, 8)
        self._failed = False
        return engine

    @functools.cached_property
    def _prompt_ids(self) -> list[int]:
        trainer = self._trainer
        ids: list[int] = trainer.processing_class(trainer.train_dataset[0]["prompt"])["input_ids"]
        return ids

    def parity(self) -> Row:
        """Opens the engine, which must answer like the policy, and gives it the adapter."""
        trainer = self._trainer
        with trainer.accelerator.autocast():
            tolerance = tolerance_of(compute_dtype(trainer.policy), layers_of(trainer.policy))
        started = time.perf_counter()
        self._opened()
        seconds = time.perf_counter() - started
        found = {name: values[-1] for name, values in trainer._metrics["train"].items() if name.startswith("sync/")}
        return {
            "seconds_to_open": seconds,
            "tolerance_nats": tolerance,
            **found,
            "ok": found["sync/logp_diff"] <= tolerance,
        }

    def sleep(self) -> Row:
        """What the engine's cache holds: given back while it sleeps, taken again when it is asked."""
        engine = self._opened()
        requests = [Request(tuple(self._prompt_ids), 2, seed=7)]
        sampling = EngineSampling(temperature=1.0, max_completion_length=8, end_token_ids=(1,))
        before, free_before = engine.start(requests, sampling).result(), _free()
        started = time.perf_counter()
        engine.sleep()
        slept, free_asleep, given_back = time.perf_counter() - started, _free(), engine.asleep_bytes
        started = time.perf_counter()
        after = engine.start(requests, sampling).result()
        woken, free_awake = time.perf_counter() - started, _free()
        same = [sampled.token_ids for sampled in before[0]] == [sampled.token_ids for sampled in after[0]]
        row: Row = {
            "seconds_to_sleep": slept,
            "seconds_to_wake_and_answer": woken,
            "same_completions": same,
            "ok": same,
        }
        if free_before is None or free_asleep is None or free_awake is None:
            return row | {"memory": "not measured: on a CPU the cache stays", "ok": same}
        figures = {"before": free_before, "asleep": free_asleep, "after_wake": free_awake, "given_back": given_back}
        # What is asleep must be free, and taken again afterwards; graphs and fragments may move a few MiB.
        row["ok"] = same and free_asleep > free_before and abs(free_awake - free_before) < 0.02 * free_before
        return row | {f"gib_{name}": round(value / _GIGA, 2) for name, value in figures.items()}

    def steps(self) -> Row:
        """Three optimizer steps, with a sync before each."""
        trainer = self._trainer
        self._opened()
        started = time.perf_counter()
        trainer.train()
        log = [row for row in trainer.state.log_history if "step_time" in row and "train_runtime" not in row]
        args = trainer.args
        count = args.per_device_train_batch_size * args.gradient_accumulation_steps  # completions of a step
        tokens = count * sum(row["completions/mean_length"] for row in log)
        names = ("step_time", "rollout/seconds", "sync/seconds", "sync/bytes", "sync/logp_diff", "reward")
        return {
            "seconds_of_training": time.perf_counter() - started,
            "steps": len(log),
            "tokens_of_completions": tokens,
            "tokens_per_second_of_rollouts": tokens / sum(row["rollout/seconds"] for row in log),
            **{name: [row.get(name) for row in log] for name in names},
            "ok": len(log) == trainer.state.global_step == trainer.args.max_steps,
        }


def _free() -> int | None:
    """Bytes of the device as its driver sees them, without what torch's allocator keeps for itself."""
    if not torch.cuda.is_available():
        return None
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info()[0])


def _shown(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(_shown, value))
    if isinstance(value, bool) or not isinstance(value, float):
        return str(value)
    return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
