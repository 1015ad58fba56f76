"""A process reward: how a completion is cut into steps, what their scores become, and what is logged and refused."""

import math
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from perl.errors import RecipeError
from perl.rewards.process.reward import check_process_reward, process_reward, split_steps
from tests.oracles.tiny_prm import CONTEXT
from tests.rewards.prm_cases import COMPLETIONS, PROMPTS, STEPS, token_oracle


@pytest.mark.parametrize(
    ("text", "split", "steps"),
    [
        ("a\n\nb", "\n\n", ["a", "b"]),
        ("\n\na\n\n\n\n \n\nb \n\n", "\n\n", ["a", "b"]),
        ("", "\n\n", []),
        ("a.b.c", ".", ["a", "b", "c"]),
        ("a//b", "//", ["a", "b"]),
        ("Step 1: a\nStep 2: b\n\nc", r"/\n+|Step \d+:/", ["a", "b", "c"]),
        ("Step 1: a Step 2: b", r"/(?=Step \d+:)/", ["Step 1: a", "Step 2: b"]),
        ("a1b22c", r"/(\d)(\d)?/", ["a", "b", "c"]),
        ("abc", r"/x/", ["abc"]),
    ],
)
def test_a_completion_is_cut_at_what_stands_between_steps(text, split, steps):
    assert split_steps(text, split) == steps


def test_a_completion_that_has_no_score_is_none_and_counted_by_its_reason(token_prm):
    """Without steps, longer than the model reads, or with a score that is not finite."""
    weights = load_file(f"{token_prm}/model.safetensors")
    tokenizer = AutoTokenizer.from_pretrained(token_prm)
    weights["model.embed_tokens.weight"][tokenizer.convert_tokens_to_ids("@")] = math.nan
    save_file(weights, f"{token_prm}/model.safetensors", metadata={"format": "pt"})
    unscored = {"": "no_steps", " \n\n ": "no_steps", "a" * CONTEXT: "cut", "4\n\n@": "nan"}
    completions = [*COMPLETIONS, *unscored]
    prompts = [*PROMPTS, *["a"] * len(unscored)]
    scores = [
        token_oracle(token_prm, tokenizer.encode(prompt), steps, "\n\n")
        for prompt, steps in zip(PROMPTS, STEPS, strict=True)
    ]
    reward = process_reward(token_prm)
    logged = {}
    rewards = reward(prompts, completions, log_metric=logged.__setitem__, solution=["4"] * len(prompts))
    assert rewards[:3] == pytest.approx([min(own) for own in scores], abs=1e-6)
    assert rewards[3:] == [None] * len(unscored)
    total, every = len(completions), [score for own in scores for score in own]
    expected = {f"{why}_frac": sum(w == why for w in unscored.values()) / total for why in ("no_steps", "cut", "nan")}
    expected |= {"steps": (len(every) + 1 + 2) / total, "step_score": sum(every) / len(every)}
    assert logged == pytest.approx(
        {f"reward/process_reward/{name}": value for name, value in expected.items()}, abs=1e-6
    )
    logged.clear()
    assert reward(["a"], [""], log_metric=logged.__setitem__) == [None]
    assert "reward/process_reward/step_score" not in logged


def test_a_completion_is_scored_if_prompt_and_steps_fit_into_what_the_model_reads(token_prm):
    prompt = "2+2="
    tokenizer = AutoTokenizer.from_pretrained(token_prm)
    for options, longest in (({}, CONTEXT), ({"max_length": 7}, 7), ({"max_length": 12}, 12)):
        reward = process_reward(token_prm, **options)
        fits = "a" * (longest - len(prompt) - 2)  # a separator after each step has two tokens
        rewards = reward([prompt] * 4, [fits, fits + "a", f"4\n\n{fits}", "4"])
        assert [score is None for score in rewards] == [False, True, True, False]
        expected = [token_oracle(token_prm, tokenizer.encode(prompt), [step], "\n\n")[0] for step in (fits, "4")]
        assert rewards[::3] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, {"model": ["is required"]}),
        ({"model": "./nowhere"}, {"model": ["'./nowhere'", "no such folder"]}),
        ({"model": "empty"}, {"model": ["'empty'", "config.json"]}),
        ({"model": "a/b", "kind": "tokens"}, {"kind": ["auto, token, causal", "did you mean token?"]}),
        ({"model": "a/b", "aggregation": "prodct"}, {"aggregation": ["did you mean product?"]}),
        ({"model": "a/b", "split": "/(/"}, {"split": ["'/(/'", "unterminated"]}),
        ({"model": "a/b", "device": "gpu"}, {"device": ["'gpu'", "cuda"]}),
        ({"model": "a/b", "batch_size": "8"}, {"batch_size": ["a whole number"]}),
        ({"model": "a/b", "kind": "token", "negative": "-"}, {"negative": ["causal"]}),
        ({"model": "a/b", "aggregaton": "min"}, {"aggregaton": ["unknown key", "did you mean aggregation?"]}),
        (
            {"model": "./nowhere", "kind": "x", "split": "/(/", "device": "gpu", "batch_size": 0, "bogus": 1},
            {"batch_size": [], "bogus": [], "device": [], "kind": [], "model": [], "split": []},
        ),
        ({"model": "user/name"}, {}),
        ({"model": "there", "device": "cuda:1", "split": r"/\n+|Step \d+:/"}, {}),
        (
            {"model": "sandbox:base", "aggregation": "product", "positive": 0, "max_length": 10, "device": "cpu"},
            {},
        ),
    ],
)
def test_each_wrong_argument_is_one_mistake_and_right_ones_are_none(arguments, expected):
    for folder in ("empty", "there"):
        Path(folder).mkdir()
    Path("there/config.json").touch()
    mistakes = check_process_reward(arguments)
    assert sorted(mistake.where for mistake in mistakes) == list(expected)
    assert [(str(m), word) for m in mistakes for word in expected[m.where] if word not in str(m)] == []
    if expected and "model" in arguments:
        with pytest.raises(RecipeError) as caught:
            process_reward(**arguments)
        assert list(caught.value.mistakes) == mistakes


def test_a_recipe_is_checked_without_torch():
    code = (
        "import sys; from perl.rewards.process.reward import check_process_reward as check; "
        "assert check({'model': 'a/b', 'device': 'cpu'}) == []; assert len(check({'kind': 'x'})) == 2; "
        "assert not {'torch', 'transformers', 'huggingface_hub'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
