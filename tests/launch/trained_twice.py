"""Run in each process, as torchrun starts a script: two runs of recipes, one after the other.

``python -m tests.launch.trained_twice`` writes a JSON file a process. The main process has more to do than the other.
"""

import json
import time
from pathlib import Path

import perl
from perl.recipe.recipe import is_first_process, rank
from perl.training import stages

RECIPE = {
    "model": {"name": "sandbox:base"},
    "data": {"train": "sandbox:addition"},
    "train": {
        **{"prompts_per_step": 2, "num_generations": 2, "max_steps": 1, "learning_rate": 1e-3, "save_strategy": "no"},
        "entropy_weight": 0.1,  # a gradient, whatever completions this short are worth
    },
    "rollout": {"max_completion_length": 4},
    "eval": {"enabled": False},
    "engine": {"device": "cpu", "threads": 1},
}


def main() -> None:
    published, found = stages.publish, []

    def slowly(hub, run):
        time.sleep(3.0)
        published(hub, run)
        (run.path / "published").touch()

    if is_first_process():
        stages.publish = slowly
    for seed in (1, 2):
        run = perl.train({**RECIPE, "train": {**RECIPE["train"], "seed": seed}}, output_dir=f"run-{seed}")
        found.append({"published": (run.path / "published").exists(), "facts": run.facts})
    Path(f"found-{rank()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
