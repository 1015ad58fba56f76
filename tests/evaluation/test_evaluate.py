"""A policy's score is what counting by hand gives for the same completions."""

import math
import re
import statistics

import pytest
import torch

from perl.adapter import attach_adapter
from perl.evaluation.evaluate import evaluate_policy
from perl.methods.settings import adaptation
from perl.model import load_base, load_tokenizer
from perl.prompts import render_prompts
from perl.recipe.sections import ModelSection, PeftSection
from perl.rollouts.hf_engine import Sampling, generate
from perl.sandbox import load_problems
from perl.types import Prompt

SAMPLING = Sampling(max_completion_length=28, seed=3)  # too short for some


@pytest.fixture(scope="module")
def base():
    return load_base(ModelSection(), torch.device("cpu"))


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(ModelSection())


@pytest.fixture(scope="module")
def prompts(tokenizer) -> list[Prompt]:
    problems = load_problems("sandbox:addition", "heldout")[:12]
    return render_prompts([{"prompt": p.question, "solution": p.answer} for p in problems], tokenizer)


@pytest.mark.parametrize("k", [1, 3])
def test_the_score_is_the_share_of_boxed_answers_that_are_the_solution(base, tokenizer, prompts, k):
    completions = generate(base, tokenizer, [p for p in prompts for _ in range(k)], SAMPLING)
    answers = [re.findall(r"\\boxed\{(.*?)\}", completion.text) for completion in completions]
    right = [bool(a) and a[-1] == prompts[i // k].solution for i, a in enumerate(answers)]
    means = [statistics.fmean(right[i : i + k]) for i in range(0, len(right), k)]
    score = evaluate_policy(base, tokenizer, prompts, SAMPLING, k)
    assert (score.k, score.n) == (k, 12)
    assert score.accuracy == pytest.approx(sum(right) / len(right))
    assert score.stderr == pytest.approx(statistics.stdev(means) / math.sqrt(12))
    assert score.mean_length == pytest.approx(sum(len(c.token_ids) for c in completions) / len(completions))
    assert score.truncated == pytest.approx(sum(c.token_ids[-1] != 1 for c in completions) / len(completions))
    assert score.no_answer == pytest.approx(sum(not a for a in answers) / len(answers))
    assert 0 < score.accuracy < 1
    assert 0 < score.truncated < 1


def test_each_completion_is_checked_against_its_own_problem(base, tokenizer, prompts):
    exchanged = [Prompt(p.content, p.token_ids, q.solution) for p, q in zip(prompts, reversed(prompts), strict=True)]
    assert evaluate_policy(base, tokenizer, exchanged, SAMPLING, 2).accuracy == 0


def test_what_cannot_be_judged_is_said_and_is_not_right(base, tokenizer, prompts):
    assert evaluate_policy(base, tokenizer, prompts, SAMPLING, 1).unjudged == 0
    unreadable = [
        Prompt(p.content, p.token_ids, r"\frac{1}{" if i % 3 == 0 else p.solution) for i, p in enumerate(prompts)
    ]
    score = evaluate_policy(base, tokenizer, unreadable, SAMPLING, 1)
    assert score.unjudged == pytest.approx(4 / 12)
    assert score.accuracy <= 8 / 12


def test_an_adapter_that_does_nothing_scores_like_its_base(base, tokenizer, prompts):
    expected = evaluate_policy(base, tokenizer, prompts, SAMPLING, 2)
    policy = attach_adapter(load_base(ModelSection(), torch.device("cpu")), adaptation(PeftSection(rank=2)))
    assert evaluate_policy(policy, tokenizer, prompts, SAMPLING, 2) == expected
    assert policy.training


def test_progress_is_told_in_completions(base, tokenizer, prompts):
    told: list[int] = []
    evaluate_policy(base, tokenizer, prompts, Sampling(max_completion_length=4, batch_size=10), 2, told.append)
    assert told == [10, 10, 4]


def test_a_problem_without_solution_is_refused(base, tokenizer, prompts):
    with pytest.raises(ValueError, match="no solution to compare with: '1"):
        evaluate_policy(base, tokenizer, [Prompt("1+1=", prompts[0].token_ids)], SAMPLING, 1)


def test_no_problem_is_refused(base, tokenizer):
    with pytest.raises(ValueError, match="at least one"):
        evaluate_policy(base, tokenizer, [], SAMPLING, 1)
