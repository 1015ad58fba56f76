"""A script with every public callback: ``python -m tests.training.scripted_callbacks FOLDER [resume] [bf16] [signal]``.

Prints ``done STEP REQUESTED`` when it ends. With ``signal`` it is sent SIGINT in its third step, with ``kill`` SIGKILL.
"""

import os
import signal
import sys
from pathlib import Path

import torch
from datasets import Dataset
from transformers import TrainerCallback

from perl import PeftGRPOTrainer, PeftRLConfig
from perl.callbacks import BenchmarkScores, GracefulStop, LearningCurves, LiveProgress, SamplesLog

STEPS = 6
ROWS = Dataset.from_list([{"prompt": f"{i}+{j}=", "solution": str(i + j)} for i in range(8) for j in range(8)])
SENT = {"signal": signal.SIGINT, "kill": signal.SIGKILL}


def sum_of_letters(completions, **_):
    return [float(sum(map(ord, completion)) % 7) for completion in completions]


def trainer_of(folder, callbacks, **options):
    """A small trainer with callbacks."""
    settings = {
        **{"learning_rate": 1e-3, "use_cpu": True, "report_to": "none", "max_steps": STEPS, "save_steps": 2, "seed": 3},
        **{"per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 8, **options},
    }
    arguments = PeftRLConfig(str(folder), **settings)
    return PeftGRPOTrainer("sandbox:base", sum_of_letters, arguments, ROWS, callbacks=callbacks)


def every_callback(stop=None):
    scores = BenchmarkScores(
        [{"name": "sandbox:chain", "limit": 8, "few_shot": 1}], k=2, every=2, max_completion_length=8
    )
    return [LiveProgress(), stop or GracefulStop(), SamplesLog(every=2), LearningCurves(), scores]


class Sender(TrainerCallback):
    """Sends this process a signal in its third step."""

    def __init__(self, number):
        self.number = number

    def on_step_begin(self, _, state, *__, **___):
        if state.global_step == 2:
            os.kill(os.getpid(), self.number)


def main(folder: Path, *words: str) -> None:
    torch.set_num_threads(1)
    stop = GracefulStop()
    sent = [Sender(SENT[word]) for word in words if word in SENT]
    trainer = trainer_of(folder, [*every_callback(stop), *sent], bf16="bf16" in words)
    trainer.train(resume_from_checkpoint="resume" in words or None)
    sys.stdout.write(f"done {trainer.state.global_step} {stop.requested}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
