"""What users do with a trainer, in every type and way they do it: trains, proves, scores, resumes, goes on, again.

Cell -> what each of these came to

Run by torchrun it takes its cells in several processes; run as a script it takes the whole cross (``--all``).
"""

import argparse
import itertools
import json
import math
import os
import shutil
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", HF_HUB_DISABLE_PROGRESS_BARS="1")
os.environ.update(HF_DATASETS_DISABLE_PROGRESS_BARS="1", TOKENIZERS_PARALLELISM="false", OMP_WAIT_POLICY="PASSIVE")

import torch
from accelerate import PartialState
from datasets import Dataset
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

import perl
from perl import PeftGRPOTrainer, PeftRLConfig
from perl.errors import PerlError
from perl.policy.guards import check_saved_adapter, check_saved_model
from perl.sandbox import BASE_FOLDER

STEPS, SAVE = 4, 2
PROMPTS = [f"{a}+{b}=" for a in (12, 345, 67, 8) for b in (9, 30)]


class Cell(NamedTuple):
    """One user.

    Attributes:
        type: ``float32``, ``bfloat16`` (weights) or ``autocast`` (bfloat16 over weights of float32).
        way: ``recipe``, ``name`` (a script that names its model) or ``model`` (a script that loads it).
        method: Of the adapter.
        option: ``plain``, ``beta``, ``checkpointing`` or ``two iterations``.
        processes: 1 or 2.
    """

    type: str
    way: str
    method: str
    option: str
    processes: int


VALUES: tuple[tuple[Any, ...], ...] = (
    ("float32", "bfloat16", "autocast"),
    ("recipe", "name", "model"),
    ("lora", "dora", "pissa", "ln_tuning", "full"),
    ("plain", "beta", "checkpointing", "two iterations"),
    (1, 2),
)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "beta": {"beta": 0.04},
    "checkpointing": {"gradient_checkpointing": True},
    "two iterations": {"num_iterations": 2},
}
# With which a norm of 1 moves in bfloat16 too, and no other policy leaves its base too far behind.
RATES = {"ln_tuning": 1e-2, "full": 1e-4}
DONE = "ok"


def every_cell() -> list[Cell]:
    """The full cross."""
    return [Cell(*values) for values in itertools.product(*VALUES)]


def varied(completions: Sequence[Any], **_: object) -> list[float]:
    """A reward that differs from completion to completion, and is the same for the same text."""
    return [sum(map(ord, str(completion))) % 7 / 7 for completion in completions]


def take(cell: Cell, folder: Path) -> dict[str, str]:
    """Does all that a user does; says what each part came to."""
    parts = recipe_parts(cell, folder) if cell.way == "recipe" else script_parts(cell, folder)
    outcome: dict[str, str] = {}
    try:
        for name, _ in parts:
            outcome[name] = DONE
    except (PerlError, AssertionError, ValueError, RuntimeError, TypeError, AttributeError, KeyError, OSError) as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = " ".join(str(error).split())[:300]
        outcome["stopped"] = f"{type(error).__name__}: {text} ({Path(where.filename).name}:{where.lineno})"
    return outcome


def script_parts(cell: Cell, folder: Path) -> Iterator[tuple[str, Any]]:
    """A script's parts, one after another."""
    trainer = new_trainer(cell, folder / "first")
    trainer.train()
    yield "trains", differs(trainer, new_trainer(cell, folder / "untrained"))
    saved = folder / "saved"
    trainer.save_adapter(saved)
    trainer.accelerator.wait_for_everyone()
    probe = torch.arange(5, 35)[None]
    if isinstance(trainer.policy, PeftModel):
        yield "proves", check_saved_adapter(trainer.policy, saved, probe)
    else:
        yield "proves", check_saved_model(trainer.policy, saved)
    scores = trainer.evaluate()
    assert math.isfinite(scores["eval_reward"])
    yield "scores", scores
    resumed = new_trainer(cell, folder / "resumed")
    resumed.train(resume_from_checkpoint=str(folder / "first" / f"checkpoint-{SAVE}"))
    same_bits(trainer, resumed)
    yield "resumes", resumed.state.global_step
    further = new_trainer(cell, folder / "further", continued=saved)
    assert_near(further.policy_log_probs(probe, torch.ones_like(probe)), trainer, probe)
    further.train()
    yield "goes on", further.state.global_step
    resumed.train()
    assert resumed.state.global_step == STEPS
    yield "again", resumed.state.global_step


def new_trainer(cell: Cell, folder: Path, continued: Path | None = None) -> PeftGRPOTrainer:
    """As a script makes one."""
    settings: dict[str, Any] = {"learning_rate": RATES.get(cell.method, 1e-3), **OPTIONS[cell.option]}
    dtype = "bfloat16" if cell.type == "bfloat16" else "float32"
    name = "sandbox:base"
    if cell.method == "full" and continued is not None:
        name = str(continued)
    elif continued is not None:
        settings["adapter"] = str(continued)
    if continued is None or cell.method == "full":
        settings["peft_method"] = cell.method
    model: Any = name
    if cell.way == "model":
        model = AutoModelForCausalLM.from_pretrained(
            BASE_FOLDER if name == "sandbox:base" else name, dtype=getattr(torch, dtype)
        )
    else:
        settings["model_init_kwargs"] = {"dtype": dtype}
    args = PeftRLConfig(
        str(folder),
        use_cpu=True,
        bf16=cell.type == "autocast",
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
        max_steps=STEPS,
        save_steps=SAVE,
        num_generations=4,
        per_device_train_batch_size=8 // cell.processes,
        per_device_eval_batch_size=8 // cell.processes,
        max_completion_length=8,
        lr_scheduler_type="constant",
        seed=1,
        **settings,
    )
    data = Dataset.from_dict({"prompt": PROMPTS})
    tokenizer = AutoTokenizer.from_pretrained(BASE_FOLDER, padding_side="left")
    trainer = PeftGRPOTrainer(
        model=model,
        reward_funcs=varied,
        args=args,
        train_dataset=data,
        eval_dataset=data.select(range(4)),
        processing_class=tokenizer,
    )
    for callback in list(trainer.callback_handler.callbacks):
        if type(callback).__name__ == "PrinterCallback":
            trainer.remove_callback(callback)
    return trainer


def trained_tensors(trainer: PeftGRPOTrainer) -> dict[str, torch.Tensor]:
    """What trains, by name."""
    return {name: p.detach() for name, p in trainer.policy.named_parameters() if p.requires_grad}


def differs(one: PeftGRPOTrainer, other: PeftGRPOTrainer) -> float:
    """How far the trained tensors of one are from those of another, at least somewhere."""
    pairs = zip(trained_tensors(one).values(), trained_tensors(other).values(), strict=True)
    largest = max(float((a.float() - b.float()).abs().max()) for a, b in pairs)
    assert largest > 0, "nothing moved"
    return largest


def same_bits(one: PeftGRPOTrainer, other: PeftGRPOTrainer) -> None:
    """Trained to the same bits."""
    mine, theirs = trained_tensors(one), trained_tensors(other)
    assert mine.keys() == theirs.keys()
    unequal = [name for name in mine if not torch.equal(mine[name], theirs[name])]
    assert not unequal, f"resumed differs from uninterrupted in {len(unequal)} of {len(mine)} tensors: {unequal[0]}"


def assert_near(found: torch.Tensor, trainer: PeftGRPOTrainer, probe: torch.Tensor) -> None:
    """What goes on from the saved adapter begins as the trained policy."""
    expected = trainer.policy_log_probs(probe, torch.ones_like(probe))
    difference = float((found - expected).abs().max())
    assert difference <= 1e-4, f"goes on from another policy: {difference:.1e} nats away"


def recipe_parts(cell: Cell, folder: Path) -> Iterator[tuple[str, Any]]:
    """A recipe's parts, one after another."""
    run = train(recipe_of(cell), folder / "run")
    facts = json.loads((run.path / "run.json").read_text())
    assert (facts["status"], facts["steps"]) == ("done", STEPS)
    yield "trains", facts["steps"]
    assert facts["reload_difference"] <= 1e-4
    yield "proves", facts["reload_difference"]
    assert "base" in next(iter(facts["eval"].values()))
    yield "scores", facts["eval"]
    if is_first():
        as_if_killed(run.path, run.adapter, folder / "killed")
    wait()
    resumed = train(recipe_of(cell), folder / "killed")
    assert weights_of(resumed.adapter) == weights_of(run.adapter), "resumed differs from uninterrupted"
    yield "resumes", True
    further = train(recipe_of(cell, continued=run.adapter), folder / "further")
    assert json.loads((further.path / "run.json").read_text())["status"] == "done"
    yield "goes on", STEPS
    again = train(recipe_of(cell), folder / "run")
    assert json.loads((again.path / "run.json").read_text())["status"] == "done"
    yield "again", STEPS


def train(recipe: dict[str, Any], folder: Path) -> perl.Run:
    """The run, once the process that writes is done with it."""
    perl.train(recipe, output_dir=str(folder))
    wait()
    return perl.Run.read(folder)


def weights_of(adapter: Path) -> list[bytes]:
    """Of an adapter, or of a whole model."""
    return [file.read_bytes() for file in sorted(adapter.glob("*.safetensors"))]


def recipe_of(cell: Cell, continued: Path | None = None) -> dict[str, Any]:
    """As a person writes one."""
    options = dict(OPTIONS[cell.option])
    adapter = {"peft": {"adapter": str(continued)}} if continued and cell.method != "full" else {}
    model = str(continued) if continued and cell.method == "full" else "sandbox:base"
    return {
        "model": {"name": model, "dtype": "bfloat16" if cell.type == "bfloat16" else "float32"},
        "peft": {"method": cell.method},
        **adapter,
        "data": {"train": "sandbox:addition"},
        "rewards": {"user_matrix:varied": 1.0},
        "train": {
            "prompts_per_step": 2,
            "num_generations": 4,
            "per_device_train_batch_size": 8 // cell.processes,
            "max_steps": STEPS,
            "save_steps": SAVE,
            "learning_rate": RATES.get(cell.method, 1e-3),
            "lr_scheduler_type": "constant",
            "bf16": cell.type == "autocast",
            "seed": 1,
            **options,
        },
        "rollout": {"max_completion_length": 8},
        "eval": {"limit": 4, "k": 1},
        "engine": {"device": "cpu", "threads": 1},
    }


def as_if_killed(run: Path, adapter: Path, copy: Path) -> None:
    """The run's folder as a kill after its first checkpoint leaves it."""
    shutil.copytree(run, copy)
    for name in (adapter.relative_to(run), f"checkpoints/checkpoint-{STEPS}"):
        shutil.rmtree(copy / name)
    facts = json.loads((copy / "run.json").read_text())
    (copy / "run.json").write_text(json.dumps({**facts, "status": "running"}))


def is_first() -> bool:
    """Whether this process writes."""
    return bool(PartialState().is_main_process)


def wait() -> None:
    """For the other process."""
    PartialState().wait_for_everyone()


def main() -> None:
    """``user_matrix.py FOLDER CELL...`` takes these cells, ``--all`` every one; writes ``FOLDER/found.jsonl``."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("cells", nargs="*", help="TYPE,WAY,METHOD,OPTION,PROCESSES")
    parser.add_argument("--all", action="store_true", help="every cell for the processes that there are")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    cells = [Cell(*c.split(",")[:4], int(c.split(",")[4])) for c in asked.cells]
    if asked.all:
        cells = [cell for cell in every_cell() if cell.processes == processes]
    for cell in cells:
        place = asked.folder / "-".join(map(str, cell)).replace(" ", "_")
        outcome = take(cell, place)
        if "stopped" in outcome and processes > 1:
            sys.stderr.write(f"{cell} {outcome}\n")
        if is_first():
            with (asked.folder / "found.jsonl").open("a") as file:
                file.write(json.dumps([*cell, outcome]) + "\n")
            shutil.rmtree(place, ignore_errors=True)
        wait()


if __name__ == "__main__":
    main()
