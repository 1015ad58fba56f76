"""How many planted failures the alarms find, and how many healthy runs they disturb.

Run as ``python benchmarks/alarms.py``. Trains healthy runs of the sandbox in two sets that share no seed: one that
thresholds are set by, and one of 150 runs that nobody looks at before. What each run logs is kept in ``--runs``, so
that rules are replayed without training again.
"""

import argparse
import json
import multiprocessing
import os
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from result_lines import as_lines

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")

import yaml

from perl.algorithms.estimators import ADVANTAGES
from perl.algorithms.named import ALGORITHMS
from perl.methods.registry import METHODS
from perl.sandbox.tasks import TASKS
from perl.trainer.alarms.of_policy import usual_rate
from perl.trainer.alarms.rule import AlarmSetup, History
from perl.trainer.alarms.table import RULES

# The quickstart's learning rate, which its recipe gives for LoRA.
LORA_RATE = 1e-3
SANDBOX_WIDTH = 128
PLANTED_SEED = 77
JUMPS_AFTER = 14  # calls of the reward: 12 steps and 2 evaluations
RESULTS = Path(__file__).parent / "results" / "alarms.json"
SHORT = (
    "train.max_steps=18",
    "train.prompts_per_step=4",
    "train.per_device_train_batch_size=32",
    "train.lr_scheduler_type=linear",
    "train.report_to=[]",
    "train.save_strategy=no",
    "train.eval_strategy=steps",
    "train.eval_steps=6",
    "train.per_device_eval_batch_size=64",
    "eval.enabled=false",
)
# Runs that are never looked at before thresholds are set.
HELD_OUT = 150
LONG = ("train.max_steps=60", "train.eval_steps=15")
# What users change beside method, task and algorithm, and what a healthy run does then.
VARIANTS: dict[str, tuple[str, ...]] = {
    "beta 0": ("train.beta=0.0",),
    "bfloat16 base": ("model.dtype=bfloat16",),
    "bf16": ("train.bf16=true",),
    "logging each 4 steps": ("train.logging_steps=4",),
    "two iterations a batch": ("train.num_iterations=2",),
    "four iterations a batch": ("train.num_iterations=4",),
    "with a length reward": ("rewards.length_penalty=0.2",),
    "with a cosine length reward": ("rewards.accuracy=null", "rewards.cosine_length=1.0"),
    "soft overlong": ("rewards.soft_overlong=0.5",),
    "no warm start of rates": ("train.lr_scheduler_type=constant",),
    "warmup": ("train.warmup_steps=8",),
    "entropy bonus": ("train.entropy_weight=0.01",),
    "sixteen completions a prompt": ("train.prompts_per_step=2", "train.num_generations=16"),
    "gspo, four iterations": ("algorithm=gspo", "train.num_iterations=4"),
    "ppo, two iterations": ("algorithm=ppo", "train.num_iterations=2"),
    "long": LONG,
    "long, beta 0": (*LONG, "train.beta=0.0"),
    "long, full batch": (*LONG, "train.prompts_per_step=8", "train.per_device_train_batch_size=64"),
}


SEEDS = {"calibration": 100, "heldout": 1000, "heldout2": 2000}


@dataclass(frozen=True)
class Healthy:
    """A run that learns, or at least does nothing that a person would stop it for.

    Attributes:
        name: What is special about it.
        task: Of the sandbox.
        seed: Of the training.
        settings: Overrides of the quickstart's recipe.
    """

    name: str
    task: str
    seed: int
    settings: tuple[str, ...]

    @property
    def overrides(self) -> list[str]:
        """Everything that differs from the quickstart."""
        length = 96 if self.task == "chain" else 64
        problems, heldout = (f"{{name: sandbox:{self.task}, limit: {count}}}" for count in (400, 8))
        data = (f"data.train={problems}", f"data.eval={heldout}")
        of_task = (*data, f"rollout.max_completion_length={length}")
        return [*SHORT, *of_task, f"train.seed={self.seed}", *self.settings]


def healthy_runs(kind: str) -> list[Healthy]:
    """The runs of a set; another set has other seeds, and other tasks for what is trained on one task only."""
    tasks, calibrates = list(TASKS), kind == "calibration"
    named = [name for name in ALGORITHMS if not ALGORITHMS[name].needs_teacher]
    found: list[tuple[str, str, tuple[str, ...]]] = []
    for at, (method, row) in enumerate(METHODS.items()):
        settings = (f"peft.method={method}", "peft.rank=null", "peft.alpha=null")
        rate = f"train.learning_rate={LORA_RATE * row.rate}"
        chosen = [tasks[at % 3]] if calibrates else tasks
        found += [(f"method {method}", task, (*settings, rate)) for task in chosen]
    for at, name in enumerate(named[::2] if calibrates else named):
        found.append((f"algorithm {name}", tasks[at % 3], (f"algorithm={name}",)))
    for at, (variant, changes) in enumerate(VARIANTS.items()):
        found.append((variant, tasks[(at + calibrates) % 3], changes))
    found += [("algorithm opd", "addition", ("algorithm=opd", "rewards.accuracy=null"))] * 3
    if not calibrates:
        again = [(f"algorithm {name}", tasks[(at + 1) % 3], (f"algorithm={name}",)) for at, name in enumerate(named)]
        found += again[: HELD_OUT - len(found)]
    return [Healthy(name, task, SEEDS[kind] + at, changes) for at, (name, task, changes) in enumerate(found)]


def train_one(run: Healthy, kept: Path, teacher: Path) -> dict[str, Any]:
    """Trains a run and keeps its recipe and what it logged."""
    if kept.is_file():  # another call of the benchmark was faster
        found: dict[str, Any] = json.loads(kept.read_text(encoding="utf-8"))
        return found
    taught = [f"teacher.adapter={teacher}"] if "opd" in run.name else []
    row = {"name": run.name, "task": run.task, "seed": run.seed, **logged([*run.overrides, *taught])}
    kept.write_text(json.dumps(row), encoding="utf-8")
    return row


def logged(
    overrides: list[str],
    rewards: tuple[Callable[..., Any], ...] | None = None,
    changed: Callable[[Any], None] | None = None,
) -> dict[str, Any]:
    """Trains the quickstart with overrides: recipe, log, processor seconds; or an error.

    Args:
        overrides: Of the recipe.
        rewards: Reward functions in the place of the recipe's.
        changed: Called with the trainer before it trains.
    """
    import warnings

    from transformers import PrinterCallback

    from perl import PeftGRPOTrainer
    from perl.errors import PerlError
    from perl.policy.model import load_base
    from perl.training.prepare import prepare, read_recipe

    warnings.simplefilter("ignore")
    row, started = dict[str, Any](), time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        try:
            plan = prepare(read_recipe("quickstart", overrides, Path(folder) / "run"))
            if rewards is not None:
                plan.arguments.reward_weights = [1.0] * len(rewards)
            trainer = PeftGRPOTrainer(
                model=load_base(plan.recipe.model, plan.arguments.device, plan.arguments.strategy),
                reward_funcs=[reward.function for reward in plan.rewards] if rewards is None else list(rewards),
                args=plan.arguments,
                train_dataset=plan.problems.train,
                eval_dataset=plan.problems.heldout,
                processing_class=plan.tokenizer,
            )
            trainer.remove_callback(PrinterCallback)
            trainer.rollout_source.judging = plan.judging
            row |= {"recipe": plan.recipe.to_yaml(), "log": trainer.state.log_history}
            if changed is not None:
                changed(trainer)
            trainer.train()
            row["log"] = trainer.state.log_history
        except (PerlError, RuntimeError, ValueError) as error:
            row |= {"error": f"{type(error).__name__}: {error}", "log": trainer.state.log_history if row else []}
    row["seconds"] = round(time.process_time() - started, 1)
    return row


def train_all(kind: str, folder: Path, jobs: int) -> None:
    """Trains those runs of a set that are not kept yet."""
    import perl

    folder.mkdir(parents=True, exist_ok=True)
    teacher = folder.parent / "teacher"
    if not (teacher / "adapter").is_dir():
        perl.train("quickstart", ["train.max_steps=40", "eval.enabled=false", "train.seed=7"], teacher)
    spawn = multiprocessing.get_context("spawn")
    runs = {folder / f"{run.seed}.json": run for run in healthy_runs(kind)}
    todo = {kept: run for kept, run in runs.items() if not kept.is_file()}
    order = random.Random(0).sample(sorted(todo), len(todo))  # noqa: S311 (what is done first is a fair sample)
    with spawn.Pool(jobs, maxtasksperchild=40) as pool:
        waiting = [pool.apply_async(train_one, (todo[kept], kept, teacher)) for kept in order]
        for count, job in enumerate(waiting, start=1):
            row = job.get()
            what = row.get("error", "")[:90]
            which = f"{row['name']:30} {row['task']:15}"
            print(f"\n{count:>3}/{len(todo)} {which} {row['seconds']:>5} s {what}", flush=True)


def planted_runs() -> dict[str, tuple[tuple[str, ...], tuple[Callable[..., Any], ...] | None]]:
    """A training for each alarm that deserves it; that of an engine is simulated, see :func:`drifting_engine`.

    Returns:
        Overrides of the quickstart and reward functions (None: the recipe's), by the alarm's name.
    """
    from perl.rewards import accuracy_reward

    high = f"train.learning_rate={LORA_RATE * 20}"
    return {
        "samples_masked": (("rollout.max_completion_length=8", "train.mask_truncated_completions=true"), (pays_ones,)),
        "completions_truncated": (("rollout.max_completion_length=8",), (pays_ones,)),
        "rewards_flat": (("rollout.max_completion_length=4",), None),
        "entropy_collapse": ((high,), (pays_ones, pays_a_little)),
        "ratios_clipped": (("train.num_iterations=4", "train.epsilon=0.0003"), None),
        "kl_explosion": ((high,), (pays_ones,)),
        "gradient_explosion": (("train.scale_rewards=none",), (jumping_reward(),)),
        "gradient_zero": ((), None),
        "learning_rate": ((high,), None),
        "heldout_falling": ((high, "train.warmup_steps=8", "train.eval_steps=2"), (pays_ones_in_training,)),
        "length_gaming": ((f"train.learning_rate={LORA_RATE * 3}",), (pays_brevity, accuracy_reward)),
    }


def train_planted(folder: Path) -> None:
    """Trains those planted failures that are not kept yet; one that a guard ends keeps what it had logged."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, (changes, rewards) in planted_runs().items():
        kept = folder / f"{name}.json"
        if kept.is_file():
            continue
        run = Healthy(f"planted {name}", "addition", PLANTED_SEED, changes)
        row = {"name": name, **logged(run.overrides, rewards, without_start if name == "gradient_zero" else None)}
        kept.write_text(json.dumps(row), encoding="utf-8")
        print(f"\nplanted {name}: {row['seconds']} s {row.get('error', '')[:120]}", flush=True)


def pays_ones(completions: list[Any], **_: object) -> list[float]:
    """A reward with a hole: the share of ones among what is written."""
    from perl.rewards.answers import completion_text

    return [text.count("1") / max(len(text), 8) for text in map(completion_text, completions)]


def pays_a_little(completions: list[Any], **columns: Any) -> list[float | None]:  # noqa: ANN401 (the data's)
    """Accuracy, at a twentieth of its weight."""
    from perl.rewards import accuracy_reward

    return [None if right is None else right / 20 for right in accuracy_reward(completions, **columns)]


def pays_ones_in_training(prompts: list[Any], completions: list[Any], **columns: Any) -> list[float | None]:  # noqa: ANN401
    """The hole is open for training problems only; held-out ones are judged."""
    from perl.rewards import accuracy_reward
    from perl.sandbox.tasks import split_of

    judged = accuracy_reward(completions, **columns)
    questions = [prompt if isinstance(prompt, str) else prompt[-1]["content"] for prompt in prompts]
    return [
        right if split_of(question) == "heldout" else hole
        for question, right, hole in zip(questions, judged, pays_ones(completions), strict=True)
    ]


def pays_brevity(completions: list[Any], **_: object) -> list[float]:
    """More for less."""
    from perl.rewards.answers import completion_text

    return [3.0 - len(completion_text(completion)) / 10 for completion in completions]


def jumping_reward() -> Callable[..., list[float]]:
    """Accuracy whose scale becomes a thousand times larger in the middle of the training, as after a wrong edit."""
    from perl.rewards import accuracy_reward

    calls = iter(range(10**6))

    def jumping(completions: list[str], **columns: object) -> list[float | None]:
        scale = 1.0 if next(calls) < JUMPS_AFTER else 1000.0
        return [None if r is None else r * scale for r in accuracy_reward(completions, **columns)]

    return jumping


def without_start(trainer: Any) -> None:  # noqa: ANN401 (a trainer)
    """Both factors of each LoRA at zero, where neither has a gradient."""
    import torch

    with torch.no_grad():
        for name, tensor in trainer.policy.named_parameters():
            if "lora_A" in name:
                tensor.zero_()


def drifting_engine(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A run's log as if its engine had kept the adapter of step 10: no vLLM runs on the CPU beside this benchmark.

    The gap grows with the steps since then, by what bfloat16 differs at first.
    """
    return [
        {**row, "sampling/sampling_logp_difference/mean": 0.008 + 0.02 * max(0, row["step"] - 10)}
        if "loss" in row
        else row
        for row in rows
    ]


def setup_of(recipe_text: str) -> AlarmSetup:
    """What the callback reads from a run's arguments."""
    recipe = yaml.safe_load(recipe_text)
    train = recipe["train"]
    method = METHODS[recipe["peft"]["method"]]
    estimator = ADVANTAGES[train.get("advantage_estimator", "group")]
    return AlarmSetup(
        usual_rate=usual_rate(method.learning_rate, SANDBOX_WIDTH),
        by_sequence=train.get("importance_sampling_level") == "sequence",
        waits=train.get("critic_warmup_steps", 0),
        flat_steps=5 if recipe["rewards"] else 0,
        compares=estimator.flat == "0",
        masks_truncated=train.get("mask_truncated_completions", False),
        values={"num_generations": train["num_generations"]},
    )


def judged(log: list[dict[str, Any]], setup: AlarmSetup) -> dict[str, tuple[float, float, bool]]:
    """Of each rule that could be judged: the worst statistic, its limit then, whether it was an alarm."""
    history, worst = History(), dict[str, tuple[float, float, bool]]()
    for row in log:
        if not history.add(row["step"], row):
            continue
        for rule in RULES.values():
            sign = rule.measure(history, setup)
            if sign is None:
                continue
            limit = rule.limit_of(sign)
            before = worst.get(rule.name)
            if before is None or sign.value / limit > before[0] / before[1]:
                worst[rule.name] = (sign.value, limit, sign.value >= limit)
    return worst


def without_gradient(log: list[dict[str, Any]]) -> str | None:
    """In how many steps a run was not trained at all, if in more than half of them; it is then not healthy."""
    norms = [row["grad_norm"] for row in log if "grad_norm" in row]
    zeros = sum(norm == 0 for norm in norms)
    return f"no gradient in {zeros} of {len(norms)} steps" if zeros > len(norms) / 2 else None


def replayed(folder: Path) -> dict[str, Any]:
    """What the rules say of a set: runs, those that could not be trained, alarms, the worst statistic of each rule."""
    rows = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    extremes, false, idle = dict[str, dict[str, Any]](), list[dict[str, Any]](), list[dict[str, Any]]()
    for row in rows:
        if "error" in row:
            continue
        found, which = judged(row["log"], setup_of(row["recipe"])), f"{row['name']}, {row['task']}, seed {row['seed']}"
        why = without_gradient(row["log"])
        if why is not None:
            idle.append({"run": which, "why": why, "alarms": [name for name, (*_, alarm) in found.items() if alarm]})
            continue
        for name, (value, limit, alarm) in found.items():
            known = extremes.setdefault(name, {"share_of_limit": 0.0, "judged": 0})
            known["judged"] += 1
            if value / limit > known["share_of_limit"]:
                known |= {"share_of_limit": value / limit, "value": value, "limit": limit, "run": which}
            if alarm:
                false.append({"alarm": name, "value": value, "limit": limit, "run": which})
    failed = [f"{row['name']}, {row['task']}: {row['error']}" for row in rows if "error" in row]
    healthy = len(rows) - len(failed) - len(idle)
    return {"runs": healthy, "failed": failed, "idle": idle, "false": false, "extremes": extremes}


def planted_found(folder: Path) -> list[dict[str, Any]]:
    """Which alarms each planted failure raises, and at which step the one that it deserves."""
    rows = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    for healthy in sorted((folder.parent / "calibration").glob("*.json"))[:1]:
        row = json.loads(healthy.read_text(encoding="utf-8"))
        rows.append({**row, "name": "engine_drift", "log": drifting_engine(row["log"])})
    found = []
    for row in rows:
        setup = setup_of(row["recipe"])
        worst = judged(row["log"], setup)
        raised = [name for name, (_, _, alarm) in worst.items() if alarm]
        value, limit, caught = worst.get(row["name"], (None, None, False))
        step = next((s for s in _steps(row["log"]) if row["name"] in _raised_by(row["log"], setup, s)), None)
        found.append({"planted": row["name"], "caught": caught, "step": step, "value": value, "limit": limit,
                      "others": [name for name in raised if name != row["name"]]})  # fmt: skip
    return found


def _steps(log: list[dict[str, Any]]) -> list[int]:
    return sorted({row["step"] for row in log})


def _raised_by(log: list[dict[str, Any]], setup: AlarmSetup, step: int) -> list[str]:
    return [name for name, (*_, alarm) in judged([r for r in log if r["step"] <= step], setup).items() if alarm]


def report(runs: Path, sets: list[str]) -> None:
    """Replays, prints a table and writes the results."""
    results: dict[str, Any] = {kind: replayed(runs / kind) for kind in sets}
    results["planted"] = planted_found(runs / "planted")
    results["limits"] = {name: rule.limit for name, rule in RULES.items()}
    print(
        f"{'alarm':22} {'limit':>7} {'planted, found at step':>23}",
        *(f"{kind + ': worst / limit, false':>34}" for kind in sets),
    )
    for rule in RULES.values():
        planted = next((row for row in results["planted"] if row["planted"] == rule.name), None)
        at = "-" if planted is None else str(planted["step"]) if planted["caught"] else "NOT FOUND"
        cells = []
        for kind in sets:
            extreme = results[kind]["extremes"].get(rule.name)
            false = sum(row["alarm"] == rule.name for row in results[kind]["false"])
            worst = "never judged" if extreme is None else f"{extreme['share_of_limit']:.2f}"
            cells.append(f"{worst + f', {false}':>34}")
        print(f"{rule.name:22} {rule.limit:>7g} {at:>23}", *cells)
    for kind in sets:
        runs_with = {row["run"] for row in results[kind]["false"]}
        print(f"{kind}: {results[kind]['runs']} healthy runs, {len(runs_with)} with a false alarm,", end=" ")
        print(f"{len(results[kind]['failed'])} not trained, {len(results[kind]['idle'])} that are not healthy:")
        for row in results[kind]["idle"]:
            print(f"  {row['run']}: {row['why']}, alarms: {', '.join(row['alarms']) or 'none'}")
        for row in results[kind]["false"]:
            print(f"  {row['alarm']} {row['value']:.3g} (limit {row['limit']:.3g}): {row['run']}")
        for line in results[kind]["failed"]:
            print(f"  not trained: {line[:150]}")
    RESULTS.write_text(as_lines(results) + "\n", encoding="utf-8")


def main() -> None:
    """Trains, replays, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--train", choices=[*SEEDS, "planted"], nargs="*", default=[], help="train these sets first")
    parser.add_argument("--sets", choices=SEEDS, nargs="*", default=["calibration", "heldout"], help="replay these")
    parser.add_argument("--runs", type=Path, default=Path("runs/alarms"), help="folder for what runs have logged")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, one thread each")
    arguments = parser.parse_args()
    for kind in arguments.train:
        if kind == "planted":
            train_planted(arguments.runs / kind)
        else:
            train_all(kind, arguments.runs / kind, arguments.jobs)
    if not arguments.train or arguments.sets:
        report(arguments.runs, arguments.sets)


if __name__ == "__main__":
    main()
