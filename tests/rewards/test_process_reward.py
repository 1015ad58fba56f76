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


def test_the_aggregations_keep_their_order(token_prm):
    prompts, completions = random_rows(20, seed=1)
    product, least, mean, last = (
        process_reward(token_prm, aggregation=name)(prompts, completions) for name in ("product", "min", "mean", "last")
    )
    several = [len(split_steps(text, "\n\n")) > 1 for text in completions]
    assert 5 < sum(several) < 20
    for p, m, a, z, more in zip(product, least, mean, last, several, strict=True):
        assert 0 < p <= m <= min(a, z)
        assert max(a, z) < 1
        assert (p < m < a) is more
        assert more or p == m == z == pytest.approx(a)


def test_another_thread_gets_the_same_scores(token_prm):
    expected = process_reward(token_prm)(PROMPTS, COMPLETIONS)
    reward = process_reward(token_prm)
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda _: reward(PROMPTS, COMPLETIONS), range(8)))
    assert found == [expected] * 8


def test_nothing_is_loaded_for_no_completions_or_before_the_first_call():
    reward = process_reward("nobody/has-this")
    assert reward([], [], log_metric=lambda *logged: pytest.fail(str(logged))) == []


def test_a_completion_without_steps_has_no_score(token_prm):
    reward = process_reward(token_prm)
    logged = {}
    rewards = reward(
        [*PROMPTS, "a", "b"], [*COMPLETIONS, "", " \n\n "], log_metric=logged.__setitem__, solution=["4"] * 5
    )
    assert rewards[3:] == [None, None]
    assert rewards[:3] == pytest.approx(reward(PROMPTS, COMPLETIONS), abs=1e-6)
    assert logged["reward/process_reward/no_steps_frac"] == 2 / 5
    assert logged["reward/process_reward/steps"] == (2 + 3 + 1) / 5
    assert reward(["a"], [""]) == [None]


def test_what_is_logged(token_prm):
    logged = {}
    process_reward(token_prm)(PROMPTS, COMPLETIONS, log_metric=logged.__setitem__)
    ids = [AutoTokenizer.from_pretrained(token_prm).encode(prompt) for prompt in PROMPTS]
    scores = [s for own, steps in zip(ids, STEPS, strict=True) for s in token_oracle(token_prm, own, steps, "\n\n")]
    assert logged == {
        "reward/process_reward/steps": 2.0,
        "reward/process_reward/step_score": pytest.approx(sum(scores) / 6, abs=1e-6),
        "reward/process_reward/no_steps_frac": 0.0,
        "reward/process_reward/cut_frac": 0.0,
        "reward/process_reward/nan_frac": 0.0,
    }


def test_a_completion_too_long_for_the_model_has_no_score(token_prm):
    prompt, fits = "2+2=", "a" * (CONTEXT - 4 - 2)
    logged = {}
    reward = process_reward(token_prm)
    rewards = reward([prompt] * 4, [fits, fits + "a", f"4\n\n{fits}", "4"], log_metric=logged.__setitem__)
    assert [score is None for score in rewards] == [False, True, True, False]
    assert logged["reward/process_reward/cut_frac"] == 2 / 4
    assert logged["reward/process_reward/steps"] == 5 / 4
    assert rewards[3] == pytest.approx(reward([prompt], ["4"])[0], abs=1e-6)
    short = process_reward(token_prm, max_length=7)
    assert short([prompt] * 2, ["4", "44"]) == [pytest.approx(rewards[3], abs=1e-6), None]
    logged.clear()
    assert short([prompt], ["44"], log_metric=logged.__setitem__) == [None]
    assert "reward/process_reward/step_score" not in logged


def test_a_score_that_is_no_number_is_none_and_counted(token_prm):
    weights = load_file(f"{token_prm}/model.safetensors")
    row = AutoTokenizer.from_pretrained(token_prm).convert_tokens_to_ids("@")
    weights["model.embed_tokens.weight"][row] = math.nan
    save_file(weights, f"{token_prm}/model.safetensors", metadata={"format": "pt"})
    logged = {}
    reward = process_reward(token_prm)
    rewards = reward(["a"] * 4, ["4\n\n@", "4\n\n5", "", "6"], log_metric=logged.__setitem__)
    assert [score is None for score in rewards] == [True, False, True, False]
    assert logged["reward/process_reward/nan_frac"] == 1 / 4
    assert 0 < logged["reward/process_reward/step_score"] < 1


@pytest.mark.parametrize(
    ("arguments", "where", "words"),
    [
        ({}, "model", ["is required"]),
        ({"model": None}, "model", ["must be text"]),
        ({"model": ""}, "model", ["at least 1 character"]),
        ({"model": "./nowhere"}, "model", ["'./nowhere'", "no such folder"]),
        ({"model": "empty"}, "model", ["'empty'", "config.json"]),
        ({"model": "a/b", "kind": "tokens"}, "kind", ["auto, token, causal", "did you mean token?"]),
        ({"model": "a/b", "aggregation": "prodct"}, "aggregation", ["did you mean product?"]),
        ({"model": "a/b", "split": "/(/"}, "split", ["'/(/'", "unterminated"]),
        ({"model": "a/b", "split": ""}, "split", ["at least 1 character"]),
        ({"model": "a/b", "device": "gpu"}, "device", ["'gpu'", "cuda"]),
        ({"model": "a/b", "device": "cuda:x"}, "device", ["'cuda:x'"]),
        ({"model": "a/b", "batch_size": 0}, "batch_size", ["greater than or equal to 1"]),
        ({"model": "a/b", "batch_size": "8"}, "batch_size", ["a whole number"]),
        ({"model": "a/b", "max_length": 0}, "max_length", ["greater than or equal to 1"]),
        ({"model": "a/b", "kind": "token", "negative": "-"}, "negative", ["causal"]),
        ({"model": "a/b", "aggregaton": "min"}, "aggregaton", ["unknown key", "did you mean aggregation?"]),
    ],
)
def test_a_wrong_argument_is_one_problem(arguments, where, words):
    Path("empty").mkdir()
    (problem,) = check_process_reward(arguments)
    assert problem.where == where
    assert all(word in str(problem) for word in words), str(problem)
    if "model" in arguments:
        with pytest.raises(RecipeError) as caught:
            process_reward(**arguments)
        assert caught.value.mistakes == (problem,)


def test_every_wrong_argument_is_found_at_once():
    arguments = {"model": "./nowhere", "kind": "x", "split": "/(/", "device": "gpu", "batch_size": 0, "bogus": 1}
    assert sorted(problem.where for problem in check_process_reward(arguments)) == sorted(arguments)


def test_arguments_that_are_well_are_no_problem(token_prm):
    for arguments in (
        {"model": "user/name"},
        {"model": token_prm, "device": "cuda:1", "split": r"/\n+|Step \d+:/"},
        {"model": "sandbox:base", "aggregation": "product", "positive": 0, "max_length": 10, "device": "cpu"},
    ):
        assert check_process_reward(arguments) == []


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
