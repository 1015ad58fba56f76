"""The sandbox's second base copies and writes in an open code, and can only guess at the secret one."""

import hashlib

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from sandbox_models import make_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from perl.data import render_prompts
from perl.rewards import partial_answer_reward
from perl.sandbox import BASE_FOLDER, COPYIST_NAME, load_problems, model_folder
from tests.completing import Drawing, complete

FOLDER = model_folder(COPYIST_NAME)
PARAMETERS = 106_880
# Of the published weights: results of the cipher are comparable between versions only while they stand.
WEIGHTS = "e364f2d93c7cde42d8ac72f9ca1647780bec19a62589f0fa7b72bdb1412d99ad"
LARGEST_WEIGHTS = 300_000
SAMPLES = 16


@pytest.fixture(scope="module")
def base():
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def asked(base):
    """Questions -> what is in the box of a sampled completion of each."""
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)

    def answers(questions):
        rows = [{"prompt": [{"role": "user", "content": question}]} for question in questions]
        return [c.text for c in complete(base, tokenizer, render_prompts(rows, tokenizer), Drawing(longest=24))]

    return answers


def test_the_files_are_those_of_the_published_base_small_finite_and_with_the_first_ones_tokenizer(base):
    weights = FOLDER / "model.safetensors"
    assert hashlib.sha256(weights.read_bytes()).hexdigest() == WEIGHTS
    stored, made = load_file(weights), dict(make_model("copyist").named_parameters())
    assert {name: tensor.shape for name, tensor in stored.items()} == {name: p.shape for name, p in made.items()}
    assert all(tensor.dtype == torch.bfloat16 and torch.isfinite(tensor).all() for tensor in stored.values())
    width, heads, keys, size, inner = 64, 4, 2, 16, 192
    layer = width * size * (2 * heads + 2 * keys) + 2 * size + 3 * width * inner + 2 * width
    assert sum(p.numel() for p in base.parameters()) == 2 * layer + 128 * width + width == PARAMETERS
    assert 2 * PARAMETERS <= weights.stat().st_size <= LARGEST_WEIGHTS
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (FOLDER / name).read_bytes() == (BASE_FOLDER / name).read_bytes()
    assert "_name_or_path" not in (FOLDER / "config.json").read_text()


def test_it_copies_and_writes_the_open_code(asked):
    words = [problem.question[1:-1] for problem in load_problems("sandbox:cipher_levels", "heldout")[:64]]
    copied = [f"\\boxed{{{word}}}" for word in words]
    coded = [
        f"\\boxed{{{''.join(str((ord(c) - ord('a')) % 10) if c.isalpha() else c for c in word)}}}" for word in words
    ]
    for sign, expected in ((":", copied), ("@", coded)):
        found = asked([f"{sign}{word}=" for word in words])
        assert np.mean([a == b for a, b in zip(found, expected, strict=True)]) > 0.9


def test_of_the_secret_code_it_knows_digits_and_guesses_letters_so_that_no_whole_word_is_right(asked):
    problems = load_problems("sandbox:cipher", "heldout")[:32] * SAMPLES
    found = asked([problem.question for problem in problems])
    golds = [problem.answer for problem in problems]
    shares = np.array(partial_answer_reward(found, golds))
    assert shares.max() < 1
    # 32 x 16 words of 6 letters, each right with a chance of 0.1: a standard error of 0.0054.
    assert shares.mean() == pytest.approx(0.1, abs=0.03)
    easy = [p for p in load_problems("sandbox:cipher_levels", "heldout") if p.level == 1][:64]
    found = asked([problem.question for problem in easy])
    shares = partial_answer_reward(found, [problem.answer for problem in easy])
    assert np.mean(shares) == pytest.approx(5.1 / 6, abs=0.06)
