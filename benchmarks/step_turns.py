"""Trainers that take turns over the same rollouts, and what is measured of each step: seconds, FLOPs, memory.

Case, Scale, rollouts -> trainer, Meter -> update of the adapter

Completions are random tokens, drawn once with a fixed seed and handed to every trainer through TRL's ``rollout_func``.
Our trainer takes SHA-256 of the whole base before and after a run, to prove that it was not touched: gigabytes on one
core, outside of what is measured. Here it does not; whole runs do (``matrix.py``, ``gpu.py``'s ``learn``).
"""

import time
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from step_cases import Case, Rollout, Scale, make_base, make_tokenizer
from step_flops import Group, counter
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from perl import PeftGRPOTrainer, PeftRLConfig
from perl.run.products import by_torch
from perl.trainer.callbacks.adapter import AdapterCallback

RANK = 16
TRAINERS = {"TRL": (GRPOTrainer, GRPOConfig), "perl": (PeftGRPOTrainer, PeftRLConfig)}


class Meter:
    """Takes the time, the FLOPs and the peak memory of each step of a trainer.

    Attributes:
        on_cuda: Whether the trainer's model is there.
        counter: What counts FLOPs, if something does.
        watch: A context that one step of each turn is taken in, if there is one.
        watched: Which step, from 0.
        seconds: Of each step since ``clear``.
        flops: Of each step.
        peaks: Bytes by which the peak of each step lay above what was in use before it; None if they are not told.
        totals: The peak itself, of what was in use.
        reserved: What PyTorch's allocator held at most; 0 on a CPU.
        metrics: The trainer's own of the step so far.
        passes: Forward and backward passes of each step, as our trainer counts them.
    """

    def __init__(self, *, on_cuda: bool) -> None:
        """Nothing taken yet."""
        self.on_cuda = on_cuda
        self.counter: FlopCounterMode | None = None
        self.watch: AbstractContextManager[Any] | None = None
        self.watched = 0
        self._inside: ExitStack | None = None
        self.metrics: dict[str, list[float]] = {}
        self.clear()

    def clear(self) -> None:
        """Forgets the steps taken."""
        self.seconds: list[float] = []
        self.flops: list[int] = []
        self.peaks: list[int | None] = []
        self.totals: list[int] = []
        self.reserved: list[int] = []
        self.passes: list[float | None] = []

    def begin(self) -> None:
        """Called before the first micro-batch of a step."""
        self._in_use = self._start_peak()
        if self.watch is not None and len(self.seconds) == self.watched:
            self._inside = ExitStack()
            self._inside.enter_context(by_torch())  # counters know no other library's products
            self._inside.enter_context(self.watch)
        self._flops = self.counter.get_total_flops() if self.counter else 0
        self._started = time.perf_counter()

    def end(self) -> None:
        """Called after the optimizer's step."""
        if self.on_cuda:
            torch.cuda.synchronize()
        self.leave()
        self.seconds.append(time.perf_counter() - self._started)
        self.passes.append(self.metrics.get("tokens/passes", [None])[-1])
        self.flops.append(self.counter.get_total_flops() - self._flops if self.counter else 0)
        peak = torch.cuda.max_memory_allocated() if self.on_cuda else resident("VmHWM")
        self.peaks.append(None if self._in_use is None else peak - self._in_use)
        self.totals.append(peak)
        self.reserved.append(torch.cuda.max_memory_reserved() if self.on_cuda else 0)

    def leave(self) -> None:
        """Leaves ``watch`` if a step is within it: also of a step that failed, or it would watch all that follows."""
        if self._inside is not None:
            self._inside.close()
            self._inside = None

    def _start_peak(self) -> int | None:
        """Bytes in use now; the peak is counted from here on."""
        if self.on_cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            return torch.cuda.memory_allocated()
        return start_resident_peak()


def start_resident_peak() -> int | None:
    """Bytes of this process now; VmHWM is the peak from here on. None: this system does not tell."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # sets VmHWM to VmRSS
    except OSError:
        return None
    return resident("VmRSS")


def resident(field: str) -> int:
    """Bytes of this process, on Linux."""
    if not Path("/proc/self/status").is_file():
        return 0
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith(field)))


class Begin(TrainerCallback):
    """The first of the callbacks, so that what others do at the beginning of a step is measured."""

    def __init__(self, meter: Meter) -> None:
        """Starts this meter."""
        self.on_step_begin = lambda *_, **__: meter.begin()


class End(TrainerCallback):
    """The last of the callbacks."""

    def __init__(self, meter: Meter) -> None:
        """Stops this meter."""
        self.on_step_end = lambda *_, **__: meter.end()


class Unhashed(TrainerCallback):
    """Leaves out the proof that the base was not touched; comes after the trainer's own callbacks."""

    def __init__(self, trainer: PeftGRPOTrainer) -> None:
        """Of this trainer."""
        trainer.base_fingerprint = "not taken"  # instead of SHA-256 at the first step
        (guard,) = (one for one in trainer.callback_handler.callbacks if isinstance(one, AdapterCallback))
        self.on_train_begin = lambda *_, **__: setattr(guard, "weights", None)


def make_trainer(
    name: str, case: Case, scale: Scale, rollouts: list[Rollout], folder: str, base: PreTrainedModel | None = None
) -> tuple[GRPOTrainer, Meter]:
    """A trainer of a base, else of a random one, whose ``train()`` goes through the rollouts once; and its meter."""
    kind, arguments = TRAINERS[name]
    by_prompt = {f"p{place}": rollout for place, rollout in enumerate(rollouts)}

    def rollout_func(prompts: list[str], _: GRPOTrainer) -> dict[str, Any]:
        chosen = [(by_prompt[prompt], place % case.generations) for place, prompt in enumerate(prompts)]
        return {
            "prompt_ids": [rollout.prompt for rollout, _ in chosen],
            "completion_ids": [rollout.completions[place] for rollout, place in chosen],
            "logprobs": None,
            "rewards": [rollout.rewards[place] for rollout, place in chosen],
        }

    def reward(rewards: list[float], **_: object) -> list[float]:
        return list(rewards)

    meter = Meter(on_cuda=not scale.arguments["use_cpu"])
    trainer = kind(
        model=make_base(case, scale) if base is None else base,
        reward_funcs=reward,
        args=arguments(
            output_dir=folder,
            per_device_train_batch_size=scale.rows,
            gradient_accumulation_steps=scale.groups * case.generations // scale.rows,
            num_generations=case.generations,
            max_completion_length=case.completions[1],
            max_steps=len(rollouts) // scale.groups,
            beta=case.beta,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            shuffle_dataset=False,
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
            seed=0,
            **{"optim": "sgd", "learning_rate": 1.0} | scale.arguments,
        ),
        train_dataset=Dataset.from_dict({"prompt": list(by_prompt)}),
        processing_class=make_tokenizer(case.vocabulary),
        peft_config=LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM"),
        rollout_func=rollout_func,
        callbacks=[Begin(meter)],
    )
    meter.metrics = trainer._metrics["train"]
    trainer.add_callback(End(meter))
    if isinstance(trainer, PeftGRPOTrainer):
        trainer.add_callback(Unhashed(trainer))
    trainer.remove_callback(PrinterCallback)
    return trainer, meter


def how_it_ran(trainer: GRPOTrainer) -> dict[str, Any]:
    """How our trainer has put rows into passes; "ok": packed, and prompts shared, since the models allow it."""
    passes = trainer.log_prob_passes.passes
    return {
        "packed": passes.packed,
        "shared": passes.shared,
        "why_not": passes.why,
        "ok": passes.packed and passes.shared and not passes.why,
    }


def adapter_of(trainer: GRPOTrainer) -> dict[str, torch.nn.Parameter]:
    """What is trained, by name."""
    return {name: p for name, p in trainer.model.named_parameters() if p.requires_grad}


def take_turn(trainer: GRPOTrainer, meter: Meter, start: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Trains from the given adapter and returns its update; the meter holds the numbers."""
    with torch.no_grad():
        for name, parameter in adapter_of(trainer).items():
            parameter.copy_(start[name])
    meter.clear()
    try:
        trainer.train()
    finally:
        meter.leave()
    return {
        name: parameter.detach() - start[name].to(parameter.device) for name, parameter in adapter_of(trainer).items()
    }


def count_turn(trainer: GRPOTrainer, meter: Meter, start: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same under the FLOP counter, which takes time of its own."""
    with counter() as meter.counter:
        update = take_turn(trainer, meter, start)
    meter.counter = None
    return update


def difference(update: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Frobenius norm of the difference over that of what is expected."""
    squares = [((update[name] - p).double().square().sum(), p.double().square().sum()) for name, p in expected.items()]
    return float(sum(s[0] for s in squares) / sum(s[1] for s in squares)) ** 0.5


def tokens_of(groups: list[Group], groups_in_step: int, *, with_reference: bool) -> dict[str, float]:
    """Tokens of a step on average: of TRL's rectangle, of all rows, of rows with a gradient, distinct ones of these."""
    steps = [groups[first : first + groups_in_step] for first in range(0, len(groups), groups_in_step)]
    live = [group for group in groups if group.live or with_reference]
    numbers = {
        "padded": sum(
            sum(len(group.completions) for group in step)
            * (max(group.prompt for group in step) + max(max(group.completions) for group in step))
            for step in steps
        ),
        "real": sum(len(group.completions) * group.prompt + sum(group.completions) for group in groups),
        "live": sum(len(group.completions) * group.prompt + sum(group.completions) for group in live),
        "distinct": sum(group.prompt + sum(group.completions) for group in live),
    }
    return {name: number / len(steps) for name, number in numbers.items()}
