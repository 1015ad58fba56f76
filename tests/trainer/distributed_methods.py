"""Run by torchrun: trains methods whose optimizer, start or step is their own, and says what each process ends with."""

import hashlib
import json
import sys
from pathlib import Path

import method_properties as properties
import torch

from perl import PeftGRPOTrainer, PeftRLConfig
from perl.policy.attach import adapter_tensors


def train(model_path: str, folder: Path, method: str, rows: int) -> PeftGRPOTrainer:
    """Three steps of eight completions, whatever the number of processes."""
    trainer = PeftGRPOTrainer(
        model=properties.fresh(model_path),
        reward_funcs=properties.reward,
        args=PeftRLConfig(
            str(folder / method),
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            peft_method=method,
            beta=0.04,
            learning_rate=0.05,
            lr_scheduler_type="constant",
            num_generations=properties.GENERATIONS,
            per_device_train_batch_size=rows,
            max_completion_length=16,
            max_steps=3,
            save_strategy="no",
            optim="sgd",
            max_grad_norm=0.0,
            seed=1,
        ),
        train_dataset=properties.Dataset.from_dict({"prompt": properties.PROMPTS}),
        processing_class=properties.load_tokenizer(properties.ModelSection()),
        rollout_func=properties.rollouts,
    )
    trainer.remove_callback(properties.PrinterCallback)
    trainer.train()
    return trainer


def main() -> None:
    """``distributed_methods.py MODEL FOLDER ROWS METHOD...`` writes a JSON file a process."""
    model_path, folder, rows, *methods = sys.argv[1:]
    torch.set_num_threads(1)
    found = {}
    for method in methods:
        trainer = train(model_path, Path(folder), method, int(rows))
        tensors = adapter_tensors(trainer.policy)
        digest = hashlib.sha256(b"".join(t.cpu().contiguous().numpy().tobytes() for t in tensors.values())).hexdigest()
        logits = properties.logits_of(trainer.policy).flatten()[::97].tolist()
        found[method] = {"digest": digest, "logits": logits, "optimizer": properties.optimizer_of(trainer)}
        rank = trainer.args.process_index
    (Path(folder) / f"found-{rows}-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
