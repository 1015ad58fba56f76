"""Wherever the trainer saves, the card is ours, not PEFT's or TRL's."""

from pathlib import Path

import pytest
import torch
from datasets import Dataset
from transformers import AutoTokenizer

from perl import PeftGRPOTrainer, PeftRLConfig
from perl.hub.card.check import check_card
from perl.hub.cards import find_card
from perl.sandbox import BASE_FOLDER

THEIRS = ("[More Information Needed]", "Model Card for", "This model is a fine-tuned version", "Framework versions")


def made(tmp_path) -> PeftGRPOTrainer:
    arguments = {
        "output_dir": str(tmp_path / "out"), "max_steps": 2, "save_steps": 1, "save_strategy": "steps", "use_cpu": True,
        "per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 4, "report_to": "none",
        "learning_rate": 1e-3, "peft_rank": 4, "logging_steps": 1, "bf16": False,
    }  # fmt: skip
    return PeftGRPOTrainer(
        model="sandbox:base",
        reward_funcs=[lengths],
        args=PeftRLConfig(**arguments),
        train_dataset=Dataset.from_list([{"prompt": f"{i}+{i}="} for i in range(8)]),
        processing_class=AutoTokenizer.from_pretrained(BASE_FOLDER, padding_side="left"),
    )


def lengths(completion_ids, **_):
    return [float(len(ids) + sum(ids) % 7) for ids in completion_ids]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> PeftGRPOTrainer:
    torch.manual_seed(0)
    trainer = made(tmp_path_factory.mktemp("trained"))
    trainer.train()
    trainer.save_model()
    return trainer


def test_every_folder_that_was_saved_has_our_card_with_what_the_arguments_say(trained):
    out = Path(trained.args.output_dir)
    cards = sorted(out.rglob("README.md"))
    assert [card.parent.name for card in cards] == ["out", "checkpoint-1", "checkpoint-2"]
    for card in cards:
        text = card.read_text()
        assert [mark for mark in THEIRS if mark in text] == []
        found = find_card(str(card.parent))
        assert check_card(found.files, found.weights_sha256).mistakes == ()
        assert str(out) not in text
    assert "| optimizer steps | 1 |" in (out / "checkpoint-1" / "README.md").read_text()
    assert "| optimizer steps | 2 |" in (out / "checkpoint-2" / "README.md").read_text()
    trained.create_model_card("mine", "someone/problems", tags=["math"])
    text = (Path(trained.args.output_dir) / "README.md").read_text()
    of_arguments = ("| learning rate | 0.001 |", "lengths (1.0)", "| loss | dapo |")
    for part in ("# mine", "- math\n", "- someone/problems\n", *of_arguments):
        assert part in text
    found = find_card(str(trained.args.output_dir))
    assert check_card(found.files, found.weights_sha256).mistakes == ()
    assert "--max-lora-rank 8 " in text
