"""Two processes on one machine train one adapter, by every method and strategy, and go on with it alike."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard, SkipBatchSampler
from peft import PeftModel
from safetensors.torch import load_file
from torch.utils.data import BatchSampler
from transformers import AutoModelForCausalLM
from trl.trainer.utils import RepeatSampler

from perl.algorithms.named import ALGORITHMS
from perl.methods.registry import METHODS
from perl.sandbox import BASE_FOLDER
from perl.trainer.prompts.order import ResumableRepeatSampler
from tests import warm
from tests.oracles.two_trainers import norm, relative_difference

# A strategy's number of processes.
PROCESSES = {"one": 1, "ddp": 2, "fsdp2": 2}
CLOSE = 1e-5
Pair = tuple[str, str]
PAIRS: list[Pair] = [(begin, end) for begin in PROCESSES for end in PROCESSES]
ROUND: list[Pair] = [("one", "fsdp2"), ("fsdp2", "ddp"), ("ddp", "one"), ("fsdp2", "fsdp2")]
# Settings with which a method fits a tiny model; the rate of LoRA+ for B, 16 times that for A, is the others' rate:
# at 16 times it Adam makes 1.6e-5 of roundings that are 3e-7 with SGD.
FITTING = {
    "fourierft": {"peft_kwargs": {"n_frequency": 100}},
    "road": {"peft_kwargs": {"group_size": 8}},
    "lora_plus": {"learning_rate": 0.02 / 16},
}


def pairs_of(method: str) -> list[Pair]:
    """Who begins and who goes on, of those that train a method; fsdp2 has the base's own tensors in shards."""
    return [pair for pair in PAIRS if not (METHODS[method].trains_the_bases and "fsdp2" in pair)]


def run(folder: Path, processes: int, jobs: list[dict]) -> None:
    command = ["-m", "tests.trainer.distributed_checkpoints", str(folder), json.dumps(jobs)]
    done = warm.run_distributed(command, folder, processes)
    assert done.returncode == 0, done.stderr[-4000:]


def job(name: str, method: str, strategy: str, resume: Path | None = None, **options) -> dict:
    asked = "ddp" if strategy == "one" else strategy
    given = {**FITTING.get(method, {}), **options}
    named = {"name": name, "method": method, "strategy": asked, "options": given}
    return {**named, "resume": None if resume is None else str(resume)}


def matrix(folder: Path, methods: dict[str, list[Pair]], step: int = 2, **options) -> dict[str, dict]:
    """Trains each method by each strategy, and goes on from one's checkpoint by another; what was found, by name."""
    whole = {name: [job(f"{m}-{name}", m, name, **options) for m in methods] for name in PROCESSES}
    run(folder, 1, whole["one"])
    run(folder, 2, [one for name, size in PROCESSES.items() if size == 2 for one in whole[name]])
    resumed = {
        end: [
            job(f"{m}-{begin}-{end}", m, end, folder / f"{m}-{begin}" / f"checkpoint-{step}", **options)
            for m, pairs in methods.items()
            for begin, last in pairs
            if last == end
        ]
        for end in PROCESSES
    }
    run(folder, 1, resumed["one"])
    run(folder, 2, [one for name, size in PROCESSES.items() if size == 2 for one in resumed[name]])
    names = [f"{m}-{end}" for m in methods for end in PROCESSES]
    names += [f"{m}-{begin}-{end}" for m, pairs in methods.items() for begin, end in pairs]
    return {name: json.loads((folder / f"{name}-0.json").read_text()) for name in names}


def adapter(folder: Path, name: str) -> dict[str, torch.Tensor]:
    return load_file(folder / f"{name}.safetensors")


def check(folder: Path, methods: dict[str, list[Pair]], found: dict[str, dict]) -> dict[str, float]:
    """Every adapter against that of one uninterrupted process; within a strategy bit for bit."""
    differences = {}
    for method, pairs in methods.items():
        trains = [name for name in PROCESSES if "refused" not in found[f"{method}-{name}"]]
        whole = {end: adapter(folder, f"{method}-{end}") for end in trains}
        differences |= {f"{method}-{end}": relative_difference(whole[end], whole["one"]) for end in trains}
        for begin, end in pairs:
            name = f"{method}-{begin}-{end}"
            resumed = adapter(folder, name)
            differences[name] = relative_difference(resumed, whole["one"])
            if begin == end:
                assert all(torch.equal(resumed[key], tensor) for key, tensor in whole[end].items()), name
                assert found[name]["numbers"] == found[f"{method}-{end}"]["numbers"]
                assert found[name]["log"][-3:] == found[f"{method}-{end}"]["log"][-3:]
    return differences


def pickles(folder: Path) -> list[str]:
    """Files that are pickles, or archives that hold some, by what they begin with."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    known = (".safetensors", ".json", ".md", ".jinja")
    return [str(path) for path in files if path.suffix not in known or path.read_bytes()[:2] in (b"PK", b"\x80\x02")]


def dealt(folder: Path, name: str) -> list[list[str]]:
    """The prompts of each generation, over all processes."""
    files = sorted(folder.glob(f"{name}-[0-9].json"))
    each = [json.loads(file.read_text())["dealt"] for file in files]
    return [sorted(prompt for rank in step for prompt in rank) for step in zip(*each, strict=True)]


def test_a_checkpoint_of_any_strategy_and_size_is_gone_on_with_by_another(tmp_path):
    """With a rolling reference, and two updates a generation batch: the checkpoint holds rollouts for the second."""
    options = {"num_iterations": 2, "save_steps": 1, "reference": "rolling:2"}
    plain = {"optim": "sgd", "optim_args": "momentum=0.9", "learning_rate": 0.3}
    found = matrix(tmp_path, {"lora": ROUND}, step=1, **options, **plain)
    differences = check(tmp_path, {"lora": ROUND}, found)
    assert {name: difference for name, difference in differences.items() if difference > CLOSE} == {}
    assert found["lora-fsdp2"]["log"][1]["kl"] == found["lora-ddp"]["log"][1]["kl"]
    assert max(entry["kl"] for entry in found["lora-fsdp2"]["log"]) > 1e-3
    for name, processes in PROCESSES.items():
        checkpoint = tmp_path / f"lora-{name}" / "checkpoint-1"
        kept = {f"{kind}-rank{rank}" for kind in ("random", "rollouts") for rank in range(processes)}
        assert {"optimizer", "scheduler", "policy", *kept} <= {path.stem for path in checkpoint.iterdir()}
        assert pickles(checkpoint) == []
    for begin, end in ROUND:  # the same prompts in the same steps, whoever takes them
        assert dealt(tmp_path, f"lora-{begin}-{end}") == dealt(tmp_path, "lora-one")[1:]


@pytest.mark.nightly
def test_every_method_trains_and_is_gone_on_with_alike_by_every_strategy(tmp_path):
    methods = {name: pairs_of(name) for name in METHODS}
    found = matrix(tmp_path, methods)
    assert {name for name, result in found.items() if "refused" in result} == {"full-fsdp2", "ln_tuning-fsdp2"}
    differences = check(tmp_path, methods, found)
    assert {name: difference for name, difference in differences.items() if difference > CLOSE} == {}


def steps_of(processes: int, skipped: int) -> list[list[int]]:
    """The indices of each optimizer step from data loaders of so many processes, after some steps."""
    accumulation = 8 // processes
    whole = RepeatSampler(
        list(range(50)), mini_repeat_count=2, batch_size=8, repeat_count=accumulation, shuffle=True, seed=7
    )
    ranks = []
    for rank in range(processes):
        batches = BatchSampler(ResumableRepeatSampler(whole, epoch_of=lambda: 0), 16 // processes, drop_last=True)
        shard = SkipBatchSampler(BatchSamplerShard(batches, processes, rank), skipped * accumulation)
        ranks.append(list(shard)[::accumulation])  # the first of a step is what rollouts are made for
    return [sorted(index for rank in step for index in rank) for step in zip(*ranks, strict=True)]


def test_the_prompts_of_a_step_are_the_same_for_any_number_of_processes_also_after_a_resumption():
    uninterrupted = steps_of(1, 0)
    assert len(uninterrupted) == 6
    for processes in (1, 2, 4):
        for skipped in (0, 2, 5):
            assert steps_of(processes, skipped) == uninterrupted[skipped:]


# A step draws 4 of 20 prompts, of which a third have no variance; two updates a generation batch in the second.
CHOICES = {
    "memory": {"prompt_memory": True, "prompt_explore": 0.1},
    "refill": {"prompt_refill": 2.0},
    "both": {"prompt_memory": True, "prompt_refill": 1.0, "num_iterations": 2},
}


def by_processes(folder, jobs):
    """Runs jobs by name of their strategy."""
    for count in (1, 2):
        if wanted := [one for name, one in jobs if PROCESSES[name] == count]:
            run(folder, count, wanted)


@pytest.mark.nightly
def test_a_run_that_was_stopped_chooses_and_ends_like_one_that_was_not(tmp_path):
    cells = [(choice, name) for choice in CHOICES for name in PROCESSES]
    whole = [(name, job(f"{choice}-{name}", "lora", name, **CHOICES[choice])) for choice, name in cells]
    by_processes(tmp_path, whole)
    resumed = [
        (name, job(f"{choice}-{name}-on", "lora", name, tmp_path / f"{choice}-{name}/checkpoint-2", **CHOICES[choice]))
        for choice, name in cells
    ]
    # Memory alone chooses the same for any number of processes.
    crossed = [
        (end, job(f"memory-{begin}-{end}", "lora", end, tmp_path / f"memory-{begin}/checkpoint-2", **CHOICES["memory"]))
        for begin, end in (("one", "ddp"), ("ddp", "one"))
    ]
    by_processes(tmp_path, resumed + crossed)
    for choice, name in cells:
        found, expected = adapter(tmp_path, f"{choice}-{name}-on"), adapter(tmp_path, f"{choice}-{name}")
        assert all(torch.equal(found[key], tensor) for key, tensor in expected.items()), (choice, name)
        steps = dealt(tmp_path, f"{choice}-{name}")
        assert dealt(tmp_path, f"{choice}-{name}-on") == steps[-len(dealt(tmp_path, f"{choice}-{name}-on")) :]
    for name in PROCESSES:
        assert dealt(tmp_path, f"memory-{name}") == dealt(tmp_path, "memory-one")
        assert relative_difference(adapter(tmp_path, f"memory-{name}"), adapter(tmp_path, "memory-one")) <= CLOSE
    for _, one in crossed:
        assert relative_difference(adapter(tmp_path, one["name"]), adapter(tmp_path, "memory-one")) <= CLOSE
    assert len(dealt(tmp_path, "refill-one")) > 5  # some steps sampled more than once


def named_job(folder: Path, name: str, kind: str, resume: str | None = None, **options) -> dict:
    sets = {"algorithm": name, "beta": ALGORITHMS[name].sets["beta"], "num_iterations": 2}
    if ALGORITHMS[name].needs_teacher:
        sets["teacher_hint"] = "so"
    if ALGORITHMS[name].sets["advantage_estimator"] == "gae":
        sets["critic_learning_rate"] = 0.02  # ten times the policy's rate here would enlarge roundings a hundredfold
    checkpoint = None if resume is None else str(folder / f"{name}-{resume}" / "checkpoint-2")
    return {"name": f"{name}-{kind}", "resume": checkpoint, "options": {**sets, **options}, "greedy": name == "remax"}


@pytest.mark.nightly
def test_a_name_trains_one_adapter_whatever_it_runs_on(tmp_path):
    autocast, begin = {"bf16": True}, {"max_steps": 1, "learning_rate": 1e-30, "warmup_steps": 0}
    alone = [named_job(tmp_path, name, "one") for name in ALGORITHMS]
    alone += [named_job(tmp_path, name, "autocast", **autocast) for name in ALGORITHMS]
    alone += [named_job(tmp_path, name, "begin", **begin) for name in ALGORITHMS]
    run(tmp_path, 1, alone)
    run(tmp_path, 1, [named_job(tmp_path, name, "resumed", "one") for name in ALGORITHMS])
    run(tmp_path, 2, [named_job(tmp_path, name, "two") for name in ALGORITHMS])
    differences = {}
    for name in ALGORITHMS:
        kinds = ("one", "autocast", "begin", "resumed", "two")
        found = {kind: load_file(tmp_path / f"{name}-{kind}.safetensors") for kind in kinds}
        moved = {kind: {key: t - found["begin"][key] for key, t in found[kind].items()} for kind in kinds}
        assert norm(moved["one"]) > 0.001 * norm(found["begin"]), name
        assert all(torch.equal(found["resumed"][key], tensor) for key, tensor in found["one"].items()), name
        differences[name] = [relative_difference(moved[kind], moved["one"]) for kind in ("two", "autocast")]
    differences["bnpo"][0] = 0.0  # its mean is over a micro-batch, and TRL deals a process's rows to those at random
    apart = {name: pair for name, pair in differences.items() if pair[0] > CLOSE or pair[1] > 0.2}
    assert apart == {}


SMALL = [
    "train.max_steps=2",
    "train.prompts_per_step=4",
    "train.num_generations=4",
    "train.per_device_train_batch_size=4",
    "rollout.max_completion_length=24",
    "eval.limit=8",
    "eval.k=1",
    "engine.threads=1",
]


def test_two_processes_train_one_adapter(tmp_path):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*launcher, "-m", "perl", "train", "quickstart", *SMALL, "--output", "run"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    facts = json.loads((tmp_path / "run" / "run.json").read_text())
    assert facts["status"] == "done"
    assert set(facts["eval"]["sandbox:addition"]) >= {"base", "adapter"}
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    recipe = (tmp_path / "run" / "recipe.yaml").read_text()
    assert "prompts_per_step: 4" in recipe
    checkpoint = tmp_path / "run" / "checkpoints" / "checkpoint-2"
    assert {"random-rank0.safetensors", "random-rank1.safetensors"} <= {path.name for path in checkpoint.iterdir()}
    sandbox = AutoModelForCausalLM.from_pretrained(BASE_FOLDER, dtype=torch.float32)
    PeftModel.from_pretrained(sandbox, tmp_path / "run" / "adapter")
    assert done.stdout.count("card  ") == 1


def test_what_the_first_process_fails_at_the_others_hear_of(tmp_path):
    """It is refused before it trains: a run of another recipe lies there."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text('{"status": "done"')
    done = warm.run_distributed(["-m", "perl", "train", "quickstart", *SMALL, "--output", "run"], tmp_path)
    assert done.returncode != 0
    told = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(told) == 1, done.stderr  # the others end, and leave it to the first to say why
    assert "run.json" in told[0]


@pytest.mark.nightly
def test_the_others_wait_for_a_score_that_takes_longer_than_a_collective_may(tmp_path):
    done = warm.run_distributed(["-m", "tests.trainer.distributed_waiting", str(tmp_path)], tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "done"
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    assert rows[1]["eval/sandbox:chain/avg@1"] == 0.5
