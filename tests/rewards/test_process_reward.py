"""A process reward: how a completion is cut into steps, what their scores become, and what is logged and refused."""

import inspect
import math
import random
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from perl.errors import RecipeError
from perl.rewards.process.model import ProcessRewardSetting
from perl.rewards.process.reward import check_process_reward, process_reward, split_steps
from tests.oracles.tiny_prm import CONTEXT, letter_tokenizer, tiny_model
from tests.rewards.prm_cases import COMPLETIONS, PROMPTS, STEPS, random_rows, token_oracle


@pytest.mark.parametrize(
    ("text", "split", "steps"),
    [
        ("a\n\nb", "\n\n", ["a", "b"]),
        ("\n\na\n\n\n\n \n\nb \n\n", "\n\n", ["a", "b"]),
        ("a\nb", "\n\n", ["a\nb"]),
        ("", "\n\n", []),
        (" \n\n\t", "\n\n", []),
        ("a.b.c", ".", ["a", "b", "c"]),
        ("a/b", "/", ["a", "b"]),
        ("a//b", "//", ["a", "b"]),
        ("Step 1: a\nStep 2: b\n\nc", r"/\n+|Step \d+:/", ["a", "b", "c"]),
        ("Step 1: a Step 2: b", r"/(?=Step \d+:)/", ["Step 1: a", "Step 2: b"]),
        ("a1b22c", r"/(\d)(\d)?/", ["a", "b", "c"]),
        ("abc", r"/x/", ["abc"]),
        ("", r"/x/", []),
    ],
)
def test_a_completion_is_cut_at_what_stands_between_steps(text, split, steps):
    assert split_steps(text, split) == steps


def test_an_escaped_literal_as_a_regular_expression_cuts_alike():
    rng = random.Random(0)
    texts = ["".join(rng.choices("ab.\n ", k=rng.randint(0, 30))) for _ in range(300)]
    for separator in (".", "\n\n", "a.b"):
        for text in texts:
            assert split_steps(text, separator) == split_steps(text, f"/{re.escape(separator)}/")


def test_threads_get_the_scores_of_the_plain_model(token_prm):
    tokenizer = AutoTokenizer.from_pretrained(token_prm)
    prompts, completions = random_rows(8)
    expected = [
        min(token_oracle(token_prm, tokenizer.encode(prompt), split_steps(completion, "\n\n"), "\n\n"))
        for prompt, completion in zip(prompts, completions, strict=True)
    ]
    reward = process_reward(token_prm)
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda row: reward([prompts[row]], [completions[row]])[0], range(8)))
    assert found == pytest.approx(expected, abs=1e-6)


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
        ({"model": None}, {"model": ["must be text"]}),
        ({"model": ""}, {"model": ["at least 1 character"]}),
        ({"model": "./nowhere"}, {"model": ["'./nowhere'", "no such folder"]}),
        ({"model": "empty"}, {"model": ["'empty'", "config.json"]}),
        ({"model": "a/b", "kind": "tokens"}, {"kind": ["auto, token, causal", "did you mean token?"]}),
        ({"model": "a/b", "aggregation": "prodct"}, {"aggregation": ["did you mean product?"]}),
        ({"model": "a/b", "split": "/(/"}, {"split": ["'/(/'", "unterminated"]}),
        ({"model": "a/b", "split": ""}, {"split": ["at least 1 character"]}),
        ({"model": "a/b", "device": "gpu"}, {"device": ["'gpu'", "cuda"]}),
        ({"model": "a/b", "device": "cuda:x"}, {"device": ["'cuda:x'"]}),
        ({"model": "a/b", "batch_size": 0}, {"batch_size": ["greater than or equal to 1"]}),
        ({"model": "a/b", "batch_size": "8"}, {"batch_size": ["a whole number"]}),
        ({"model": "a/b", "max_length": 0}, {"max_length": ["greater than or equal to 1"]}),
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


def test_the_signature_shows_the_settings():
    parameters = inspect.signature(process_reward).parameters
    assert list(parameters) == list(ProcessRewardSetting.model_fields)
    assert {"model", "kind", "split", "aggregation", "device", "batch_size", "dtype", "revision"} <= set(parameters)
    assert [p.name for p in parameters.values() if p.default is p.empty] == ["model"]
    assert process_reward.__name__ == process_reward("a/b").__name__ == "process_reward"
    assert list(inspect.signature(process_reward("a/b")).parameters) == ["prompts", "completions", "log_metric", "_"]
    assert all(field.description for field in ProcessRewardSetting.model_fields.values())


def test_a_recipe_is_checked_without_torch():
    code = (
        "import sys; from perl.rewards.process.reward import check_process_reward as check; "
        "assert check({'model': 'a/b', 'device': 'cpu'}) == []; assert len(check({'kind': 'x'})) == 2; "
        "assert not {'torch', 'transformers', 'huggingface_hub'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_model_trained_to_like_a_word_scores_steps_with_it_above_others():
    torch.manual_seed(0)
    rng = random.Random(0)
    tokenizer = letter_tokenizer()
    model = tiny_model("token", len(tokenizer))
    torch.nn.init.normal_(model.model.embed_tokens.weight, std=1.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(150):
        rows, labels = [], []
        for _ in range(16):
            ids, own = tokenizer.encode("p"), []
            own += [-100] * len(ids)
            for _ in range(2):
                right = rng.random() < 0.5
                step = tokenizer.encode("!" if right else "?") + tokenizer.encode("\n\n")
                ids += step
                own += [-100] * (len(step) - 1) + [int(right)]
            rows.append(ids)
            labels.append(own)
        model.train()(torch.tensor(rows), labels=torch.tensor(labels)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval().save_pretrained("trained")
    tokenizer.save_pretrained("trained")
    rewards = process_reward("trained")(["p"] * 4, ["!\n\n!", "!\n\n?", "?\n\n!", "?\n\n?"])
    assert rewards[0] > 0.8
    assert max(rewards[1:]) < 0.2
    last = process_reward("trained", aggregation="last")(["p"] * 4, ["!\n\n!", "!\n\n?", "?\n\n!", "?\n\n?"])
    assert min(last[0], last[2]) > 0.8
    assert max(last[1], last[3]) < 0.2
