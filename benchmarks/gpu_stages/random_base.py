"""A random Qwen3 with a tokenizer of our own, written as a folder that a recipe can name.

folder, size -> folder/model, folder/prompts.jsonl, folder/low_tokens.py

Nothing is read from the Hub. The reward is the share of tokens from the lower half of the vocabulary: every completion
of a random model has one, no two have quite the same, and a policy can raise it.
"""

import json
from pathlib import Path
from typing import Any

import torch
import yaml
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

from gpu_stages.shapes import SHAPES, VOCABULARY

PROMPTS, PROMPT_WORDS = 64, 24
_REWARD = '''
def share_of_low_tokens(completion_ids, below, **kwargs):
    """Share of a completion's tokens whose number is below a bound."""
    return [sum(token < below for token in ids) / max(len(ids), 1) for ids in completion_ids]
'''


def qwen3_config(*, tiny: bool) -> Qwen3Config:
    """The shape of Qwen3-0.6B, or a toy's."""
    _, width, published = SHAPES["Qwen3-0.6B"]
    sizes = {"vocab_size": VOCABULARY, "hidden_size": width, "max_position_embeddings": 40960, **published}
    toy = {
        "vocab_size": 512,
        "hidden_size": 64,
        "max_position_embeddings": 1024,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    }
    shape: dict[str, Any] = {
        **(toy if tiny else sizes),
        # Wide enough that an adapter can move the policy: logits of a deviation of about 1.6. The usual 0.02 leaves the
        # toy all but uniform whatever its layers do, and an engine cannot be proven to bind what changes nothing.
        "initializer_range": 0.2 if tiny else 0.05,
    }
    return Qwen3Config(**shape, tie_word_embeddings=True, pad_token_id=0, bos_token_id=None, eos_token_id=1)


def write_random_base(folder: Path, *, tiny: bool, device: torch.device) -> Path:
    """The model, its prompts and its reward, the same each time; what is there already is left.

    Returns:
        The model's folder.
    """
    model_folder = folder / "model"
    if (model_folder / "tokenizer.json").is_file():  # it is written last
        return model_folder
    folder.mkdir(parents=True, exist_ok=True)
    config = qwen3_config(tiny=tiny)
    names = [f"t{token}" for token in range(config.vocab_size)]
    words = Tokenizer(models.WordLevel({name: token for token, name in enumerate(names)}, unk_token=names[0]))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randint(2, config.vocab_size, (PROMPTS, PROMPT_WORDS), generator=generator)
    rows = [json.dumps({"prompt": " ".join(names[token] for token in row)}) for row in drawn.tolist()]
    (folder / "prompts.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    (folder / "low_tokens.py").write_text(_REWARD, encoding="utf-8")
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32 if tiny else torch.bfloat16)
    model.save_pretrained(model_folder)
    PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token=names[0], eos_token=names[1], padding_side="left"
    ).save_pretrained(model_folder)
    return model_folder


def random_recipe(folder: Path, *, tiny: bool, device: torch.device, backend: str, steps: int, save: int) -> Path:
    """A recipe that trains a LoRA on the random base, beside it.

    Args:
        folder: As given to :func:`write_random_base`; the run must be started in it.
        tiny: Whether the base is the toy.
        device: Where it trains.
        backend: What samples.
        steps: Of training.
        save: Steps between two checkpoints.
    """
    recipe = {
        "model": {"name": str(folder / "model"), "dtype": "float32" if tiny else "bfloat16"},
        "peft": {"method": "lora", "rank": 16, "alpha": 32},
        "data": {"train": {"name": str(folder / "prompts.jsonl"), "columns": {"prompt": "prompt", "answer": None}}},
        "rewards": {"low_tokens:share_of_low_tokens": {"args": {"below": qwen3_config(tiny=tiny).vocab_size // 2}}},
        "train": {
            "prompts_per_step": 2 if tiny else 8,
            "num_generations": 4 if tiny else 8,
            "per_device_train_batch_size": 8 if tiny else 64,
            "max_steps": steps,
            "save_steps": save,
            "learning_rate": 1e-3,
            "report_to": [],
        },
        "rollout": {"backend": backend, "max_completion_length": 12 if tiny else 128},
        "eval": {"enabled": False},
        "engine": {"device": "cpu" if device.type == "cpu" else "auto"},
    }
    path = folder / f"{backend}.yaml"
    path.write_text(yaml.safe_dump(recipe, sort_keys=False), encoding="utf-8")
    return path
