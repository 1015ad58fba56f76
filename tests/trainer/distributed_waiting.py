"""Run by torchrun: a run whose main process scores for longer than a collective may take, before and between steps.

``distributed_waiting.py FOLDER`` trains there; only how long it takes to be scored is simulated.
"""

import sys
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

import perl
import perl.training.scores
import perl.training.stages
from perl.training.callbacks import benchmark_scores

GIVES_UP, TAKES = 10, 15  # seconds

RECIPE = {
    "model": {"name": "sandbox:base"},
    "peft": {"rank": 2},
    "data": {"train": "sandbox:addition"},
    "rewards": {"accuracy": 1.0},
    "rollout": {"max_completion_length": 8},
    "train": {
        **{"max_steps": 2, "prompts_per_step": 2, "num_generations": 4, "per_device_train_batch_size": 4},
        "entropy_weight": 0.1,  # a gradient, whatever completions this short are worth
    },
    "eval": {"tasks": ["sandbox:chain"], "limit": 2, "k": 1, "every": 2, "max_completion_length": 8},
    "engine": {"device": "cpu", "threads": 1},
}


def slowly(work: Any) -> Any:
    def after_a_while(*args: Any, **kwargs: Any) -> Any:
        if torch.distributed.get_rank() == 0:
            time.sleep(TAKES)
        return work(*args, **kwargs)

    return after_a_while


def main() -> None:
    # As ``train.ddp_timeout`` has it on a GPU; on a CPU transformers leaves the usual half hour.
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=GIVES_UP))
    found = SimpleNamespace(k=1, accuracy=0.5, stderr=None, pass_at={1: 0.5}, mean_tokens=8.0, truncated=0.0)
    perl.training.scores.draw_samples = slowly(perl.training.scores.draw_samples)
    benchmark_scores.draw = slowly(lambda *_: [])
    benchmark_scores.score_samples = lambda *_, **__: found
    perl.training.stages.score_run = lambda *_: None
    perl.train(RECIPE, output_dir=Path(sys.argv[1]) / "run")
    again = perl.train(RECIPE, output_dir=Path(sys.argv[1]) / "run")  # done: nobody waits for anybody
    assert again.path.name == "run"


if __name__ == "__main__":
    main()
