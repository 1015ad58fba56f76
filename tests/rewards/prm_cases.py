"""Prompts and completions for tests of process reward models, and what a class model says of their steps."""

import random

import torch
from transformers import AutoModelForTokenClassification, AutoTokenizer

PROMPTS = ["2+2=", "What is 3 times 4? ", "7-1="]
COMPLETIONS = ["two and two\n\nare 4", "3*4\n\n\n\n=3+3+3+3\n\n=12\n\n", "6"]
STEPS = [["two and two", "are 4"], ["3*4", "=3+3+3+3", "=12"], ["6"]]


def random_rows(count, seed=0):
    """Prompts, and completions of 1 to 6 steps of 1 to 20 letters."""
    rng = random.Random(seed)
    words = lambda: "".join(rng.choices("abcdef 0123456789+=", k=rng.randint(1, 20))).strip() or "x"  # noqa: E731
    return [words() for _ in range(count)], [
        "\n\n".join(words() for _ in range(rng.randint(1, 6))) for _ in range(count)
    ]


def token_oracle(folder, prompt_ids, steps, separator, right=1):
    """A row by itself: ids end to end, a class after each separator."""
    model = AutoModelForTokenClassification.from_pretrained(folder, dtype="float32").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    parts = [prompt_ids]
    for step in steps:
        parts.append(tokenizer.encode(step + separator, add_special_tokens=False))
    ends = torch.tensor([len(part) for part in parts]).cumsum(0)[1:] - 1
    with torch.no_grad():
        logits = model(torch.tensor([[token for part in parts for token in part]])).logits[0]
    return logits.softmax(-1)[ends, right].tolist()
