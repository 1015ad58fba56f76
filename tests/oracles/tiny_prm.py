"""Tiny process reward models on disk: two layers of width 32, random or trained for a few seconds.

folder, kind, tokenizer -> a checkpoint that ``process_reward`` loads
"""

import string
from pathlib import Path

import torch
from sandbox_models import make_tokenizer
from tokenizers import Tokenizer, models, normalizers
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForTokenClassification, PreTrainedTokenizerFast

TAG = "ки"
CONTEXT = 256
_CHARACTERS = [*(c for c in string.printable if c.isprintable()), "\n"]


def shepherd_tokenizer() -> PreTrainedTokenizerFast:
    """As Math-Shepherd's (Llama 2's): a first token, a mark before every text and word, the tag as one token."""
    merges = [("▁", "к"), ("▁к", "и"), ("▁", "+"), ("▁", "-"), ("▁", "S")]
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    words = [*special.values(), "▁", "к", "и", *_CHARACTERS, *(left + right for left, right in merges)]
    tokenizer = Tokenizer(
        models.BPE({word: n for n, word in enumerate(dict.fromkeys(words))}, merges, unk_token=special["unk_token"])
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    fast.add_bos_token = True
    return fast


def letter_tokenizer(special: tuple[str, ...] = ()) -> PreTrainedTokenizerFast:
    """The sandbox base's: one token a character, a chat template, no first token; and some special tokens."""
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(list(special), special_tokens=True)
    return tokenizer


def tiny_model(kind: str, words: int, labels: int = 2) -> torch.nn.Module:
    """Random weights, large enough that the scores of different steps differ."""
    config = LlamaConfig(
        vocab_size=words,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        initializer_range=0.3,
        num_labels=labels,
        pad_token_id=0,
    )
    return (LlamaForTokenClassification if kind == "token" else LlamaForCausalLM)(config).eval()


def save_tiny_prm(
    folder: Path, kind: str = "token", tokenizer: PreTrainedTokenizerFast | None = None, labels: int = 2
) -> str:
    """Writes a random process reward model and gives its folder's name.

    Args:
        folder: Where to; made if it is not there.
        kind: ``token`` or ``causal``.
        tokenizer: None: the one of the letters, with ``<extra_0>`` and the tag as tokens.
        labels: Classes of a model of kind ``token``.
    """
    tokenizer = tokenizer or letter_tokenizer(("<extra_0>", TAG))
    model = tiny_model(kind, len(tokenizer), labels)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
