"""Whether each PEFT method is trained right: the reference, what is saved, what is resumed; beside TRL's trainer.

Run as ``python benchmarks/method_properties.py``. Every method of the table on four tiny random models (untied, tied,
grouped-query attention, attention biases), float32, fixed rollouts, five updates with beta 0.04, by
``perl.PeftGRPOTrainer`` and by ``trl.GRPOTrainer`` with the same PEFT config. All differences are the largest of any
logit on fixed tokens:

* reference at step 0 and after 5 updates, against the pristine base;
* the saved adapter, loaded by plain PEFT on a fresh base in another random state, against the trained policy;
* the run resumed after 3 updates, against the uninterrupted one;
* whether the base's weights are the loaded ones.

``-`` is a method that TRL cannot be asked for by a config; ``as`` says what the optimizer is. Prints a
table and writes ``results/method_properties.json``.
"""

import argparse
import json
import os
import random
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from result_lines import as_lines

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", TRL_EXPERIMENTAL_SILENCE="1")

import torch
from datasets import Dataset
from peft import PeftModel
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PrinterCallback,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from trl import GRPOTrainer
from trl.trainer.utils import use_adapter

from perl import PeftGRPOTrainer, PeftRLConfig
from perl.methods.registry import METHODS, Method
from perl.methods.settings import adaptation
from perl.policy.fingerprint import base_fingerprint
from perl.policy.model import load_tokenizer, trainable_parameters
from perl.recipe.sections import ModelSection, PeftSection
from perl.run.folder import installed_versions

PROMPTS = ["12+34=", "5+6=", "7+8=", "90+1="]
GENERATIONS = 4
UPDATES, INTERRUPTED_AFTER = 5, 3
RESULTS = Path(__file__).parent / "results"
_SHAPE = {
    "vocab_size": 128,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "untied": lambda: LlamaForCausalLM(LlamaConfig(**_SHAPE, num_key_value_heads=4, tie_word_embeddings=False)),
    "tied": lambda: Qwen3ForCausalLM(Qwen3Config(**_SHAPE, num_key_value_heads=4, tie_word_embeddings=True)),
    "gqa": lambda: LlamaForCausalLM(LlamaConfig(**_SHAPE, num_key_value_heads=2, tie_word_embeddings=False)),
    "biases": lambda: Qwen2ForCausalLM(Qwen2Config(**_SHAPE, num_key_value_heads=2, tie_word_embeddings=False)),
}
IDS = torch.randint(8, 100, (2, 24), generator=torch.Generator().manual_seed(3))


def write_model(name: str, folder: Path) -> str:
    """A tiny random model on disk; biases are not zero."""
    torch.manual_seed(0)
    model = MODELS[name]()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("bias"):
                parameter.normal_(std=0.1)
    path = folder / name
    model.save_pretrained(path)
    return str(path)


def fresh(path: str) -> PreTrainedModel:
    """The model as others load it."""
    kinds = {"LlamaForCausalLM": LlamaForCausalLM, "Qwen2ForCausalLM": Qwen2ForCausalLM}
    architecture = json.loads((Path(path) / "config.json").read_text(encoding="utf-8"))["architectures"][0]
    return kinds.get(architecture, Qwen3ForCausalLM).from_pretrained(path, dtype=torch.float32).eval()


def logits_of(model: torch.nn.Module) -> torch.Tensor:
    """(2, 24, V) on fixed tokens, without dropout."""
    was_training = model.training
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=IDS).logits.float()
    model.train(was_training)
    return logits


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Largest difference of a logit."""
    return (one - other).abs().max().item()


def rollouts(prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
    """The same random completions at every call for the same prompt, as TRL's ``rollout_func`` gives them."""
    tokenizer = trainer.processing_class
    prompt_ids, completion_ids = [], []
    for place, prompt in enumerate(prompts):
        generator = random.Random(f"{prompt} {place % GENERATIONS}")  # noqa: S311 (no secret)
        prompt_ids.append(tokenizer(prompt)["input_ids"])
        completion_ids.append([generator.randrange(8, 100) for _ in range(generator.randrange(4, 12))] + [1])
    return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": None}


def reward(completion_ids: list[list[int]], **_: object) -> list[float]:
    """Something that differs in every group."""
    return [float(sum(ids) % 7) for ids in completion_ids]


def make_trainer(kind: type[GRPOTrainer], path: str, method: Method, folder: Path) -> GRPOTrainer:
    """A trainer of the method, ready to train."""
    arguments = PeftRLConfig(
        str(folder),
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        peft_method=method.name,
        beta=0.04,
        learning_rate=5e-3 * min(method.rate, 4.0),
        num_generations=GENERATIONS,
        per_device_train_batch_size=2 * GENERATIONS,
        max_completion_length=16,
        max_steps=UPDATES,
        save_steps=INTERRUPTED_AFTER,
        lr_scheduler_type="constant",
        seed=1,
    )
    config = adaptation(PeftSection(method=method.name)).config
    if hasattr(config, "total_step"):
        config.total_step = UPDATES
    trainer = kind(
        model=fresh(path),
        reward_funcs=reward,
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
        processing_class=load_tokenizer(ModelSection()),
        peft_config=None if kind is PeftGRPOTrainer else config,
        rollout_func=rollouts,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def reference_logits(trainer: GRPOTrainer) -> torch.Tensor:
    """Of what the trainer's KL divergence is measured against."""
    policy = trainer.accelerator.unwrap_model(trainer.model)
    if isinstance(trainer, PeftGRPOTrainer):
        assert trainer.reference is not None  # noqa: S101 (beta is above 0)
        with trainer.reference.in_place_of(policy):
            return logits_of(policy)
    if trainer.ref_model is not None:
        return logits_of(trainer.ref_model)
    with use_adapter(policy, adapter_name="ref" if "ref" in policy.peft_config else None):
        return logits_of(policy)


def measure(kind: type[GRPOTrainer], path: str, method: Method, folder: Path) -> dict[str, Any]:
    """One cell of the table."""
    base, pristine = fresh(path), logits_of(fresh(path))
    trainer = make_trainer(kind, path, method, folder / "run")
    row: dict[str, Any] = {"reference at 0": distance(reference_logits(trainer), pristine)}
    trainer.train()
    policy = trainer.accelerator.unwrap_model(trainer.model)
    trained = logits_of(policy)
    row["moved"] = distance(trained, pristine)
    row["reference after 5"] = distance(reference_logits(trainer), pristine)
    row["base unchanged"] = not method.config or base_fingerprint(policy) == base_fingerprint(base)
    row["trained"] = trainable_parameters(policy)
    row["optimizer"] = optimizer_of(trainer)
    trainer.save_model(str(folder / "saved"))
    torch.manual_seed(99)
    row["reloaded"] = distance(logits_of(reloaded(path, method, folder / "saved")), trained)
    again = make_trainer(kind, path, method, folder / "run")
    again.train(resume_from_checkpoint=str(folder / "run" / f"checkpoint-{INTERRUPTED_AFTER}"))
    row["resumed"] = distance(logits_of(again.accelerator.unwrap_model(again.model)), trained)
    return row


def reloaded(path: str, method: Method, folder: Path) -> torch.nn.Module:
    """What others get from the saved files."""
    if not method.config:
        return fresh(str(folder))
    return PeftModel.from_pretrained(fresh(path), str(folder)).eval()


def optimizer_of(trainer: GRPOTrainer) -> str:
    """What the optimizer does with the adapter."""
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    if optimizer._optimizer_step_pre_hooks:
        return "LoRA-FA"
    rates = {group["lr"] for group in optimizer.param_groups if group["params"]}
    return "LoRA+" if len(rates) > 1 else "AdamW"


def cells(methods: list[str], models: list[str], folder: Path) -> Iterator[dict[str, Any]]:
    """Every measurement, as it is made."""
    for model in models:
        path = write_model(model, folder)
        for name in methods:
            method = METHODS[name]
            for kind in (PeftGRPOTrainer, GRPOTrainer):
                trainer = "perl" if kind is PeftGRPOTrainer else "TRL"
                row = {"method": name, "model": model, "trainer": trainer}
                if trainer == "TRL" and method.starts and not method.fixed:
                    yield {**row, "absent": "no PEFT config asks for it"}
                    continue
                with tempfile.TemporaryDirectory(dir=folder) as own:
                    try:
                        yield {**row, **measure(kind, path, method, Path(own))}
                    except (RuntimeError, ValueError, KeyError, AttributeError, TypeError) as error:
                        yield {**row, "error": f"{type(error).__name__}: {error}"[:300]}


def line(row: dict[str, Any]) -> str:
    """A row of the printed table."""
    head = f"{row['method']:12} {row['model']:7} {row['trainer']:4}"
    if "absent" in row or "error" in row:
        return f"{head}  - {row.get('absent') or row['error'][:90]}"
    numbers = [row[name] for name in ("reference at 0", "reference after 5", "reloaded", "resumed", "moved")]
    shown = " ".join(f"{number:>9.1e}" for number in numbers)
    return f"{head} {shown}  {'yes' if row['base unchanged'] else 'NO':4} {row['optimizer']:8} {row['trained']:>8,}"


def main() -> None:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS), metavar="METHOD")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for method_properties.json")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    numbers = " ".join(f"{name:>9}" for name in ("ref at 0", "ref at 5", "reloaded", "resumed", "moved"))
    print(f"{'method':12} {'model':7} {'by':4} {numbers}  {'base':4} {'as':8} {'trained':>8}")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for row in cells(arguments.methods, arguments.models, Path(folder)):
            rows.append(row)
            print(line(row), flush=True)
    arguments.results.mkdir(parents=True, exist_ok=True)
    path = arguments.results / "method_properties.json"
    path.write_text(as_lines({"rows": rows, "versions": installed_versions()}) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
