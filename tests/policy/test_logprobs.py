"""Log-probabilities against a softmax by hand, and their independence of padding and of the rows around them."""

import math

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from perl.policy import reference
from perl.policy.model import load_base
from perl.policy.reference import token_log_probs
from perl.recipe.sections import ModelSection

# Rows of different lengths; 0 is the padding token.
ROWS = [[6, 7, 78, 8, 9, 96, 10, 1], [12, 13, 14, 77, 96, 5, 1], [20, 21], [6, 78, 7, 96, 9, 91, 17, 30, 39, 20, 19, 1]]


@pytest.fixture(scope="module")
def base():
    return load_base(ModelSection(), torch.device("cpu"))


def padded(rows: list[list[int]], side: str, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids, mask = [], []
    for row in rows:
        padding = [0] * (width - len(row))
        ids.append(padding + row if side == "left" else row + padding)
        mask.append([0] * len(padding) + [1] * len(row) if side == "left" else [1] * len(row) + [0] * len(padding))
    return torch.tensor(ids), torch.tensor(mask)


def alone(model, row: list[int], temperature: float = 1.0) -> torch.Tensor:
    with torch.no_grad():
        return token_log_probs(
            model, torch.tensor([row]), torch.ones(1, len(row), dtype=torch.long), temperature=temperature
        )[0]


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_log_probs_are_a_softmax_over_the_logits_of_the_token_before(base, temperature):
    for row in ROWS:
        with torch.no_grad():
            logits = base(torch.tensor([row])).logits[0].double().tolist()
        expected = []
        for t, token in enumerate(row[1:]):
            scaled = [value / temperature for value in logits[t]]
            highest = max(scaled)
            total = math.fsum(math.exp(value - highest) for value in scaled)
            expected.append(scaled[token] - highest - math.log(total))
        assert alone(base, row, temperature).tolist() == pytest.approx(expected, rel=1e-5, abs=1e-5)


def with_learned_positions() -> GPT2LMHeadModel:
    config = GPT2Config(vocab_size=128, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=1)
    model = GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        model.transformer.wpe.weight *= 50  # as far apart as trained ones
    return model


@pytest.mark.parametrize(
    ("side", "width", "positions"), [("left", 12, "rotary"), ("right", 19, "rotary"), ("left", 19, "learned")]
)
def test_padding_does_not_change_a_rows_numbers_nor_the_token_under_it(base, side, width, positions):
    model = base if positions == "rotary" else with_learned_positions()
    ids, mask = padded(ROWS, side, width)
    with torch.no_grad():
        together = token_log_probs(model, ids, mask)
        others = token_log_probs(model, ids.masked_fill(mask == 0, 77), mask)
    assert together.shape == (len(ROWS), width - 1)
    for row, numbers in zip(ROWS, together, strict=True):
        mine = numbers[width - len(row) :] if side == "left" else numbers[: len(row) - 1]
        torch.testing.assert_close(mine, alone(model, row), rtol=1e-5, atol=1e-5)
    real = (mask[:, :-1] * mask[:, 1:]).bool()
    torch.testing.assert_close(others[real], together[real], rtol=1e-5, atol=1e-5)


def test_rows_that_do_not_fit_together_go_in_parts(base, monkeypatch):
    ids, mask = padded(ROWS, "left", 12)
    calls = []
    hook = base.register_forward_pre_hook(
        lambda _, __, inputs: calls.append(len(inputs["input_ids"])), with_kwargs=True
    )
    with torch.no_grad():
        whole = token_log_probs(base, ids, mask)
        row = 12 * base.config.vocab_size
        # A row larger than the limit still goes.
        for limit, expected in ((1, [1] * 4), (row, [1] * 4), (2 * row, [2, 2]), (3 * row, [3, 1])):
            calls.clear()
            monkeypatch.setattr(reference, "_LARGEST_LOGITS", limit)
            parts = token_log_probs(base, ids, mask)
            assert calls == expected, limit
            torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-5)
    hook.remove()


def test_a_half_precision_model_gives_single_precision_numbers(base):
    model = load_base(ModelSection(dtype="bfloat16"), torch.device("cpu"))
    numbers = alone(model, ROWS[0])
    assert numbers.dtype == torch.float32
    torch.testing.assert_close(numbers, alone(base, ROWS[0]), rtol=0.05, atol=0.1)
