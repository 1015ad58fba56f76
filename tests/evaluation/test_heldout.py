"""Problems that a run holds out are asked as training asks them, and score what counting by hand gives."""

from dataclasses import replace

import pytest
import torch

from perl.data import render_prompts
from perl.evaluation.scoring.protocol import Protocol
from perl.evaluation.tasks.heldout import evaluate_policy, heldout_task
from perl.policy.model import load_base
from perl.recipe.sections import ModelSection
from perl.sandbox import load_problems
from perl.types import Prompt
from tests.completing import Drawing
from tests.counting import complete_with_seeds
from tests.oracles import evaluation as by_hand

PROTOCOL = Protocol(max_new_tokens=28, seed=3, k=2)  # too short for some


@pytest.fixture(scope="module")
def base():
    return load_base(ModelSection(), torch.device("cpu"))


@pytest.fixture(scope="module")
def prompts(tokenizer) -> list[Prompt]:
    problems = load_problems("sandbox:addition", "heldout")[:12]
    return render_prompts([{"prompt": p.question, "solution": p.answer} for p in problems], tokenizer)


def test_the_score_is_the_share_of_boxed_answers_that_are_the_solution(base, tokenizer, prompts):
    k = 2
    asked = [(i, prompt, index) for i, prompt in enumerate(prompts) for index in range(k)]
    seeds = [by_hand.seed_by_hand("heldout", str(i), index, seed=3) for i, _, index in asked]
    ids = [prompt.token_ids for _, prompt, _ in asked]
    completions = complete_with_seeds(base, tokenizer, ids, seeds, Drawing(longest=28))
    right = [by_hand.is_right(c.text, prompt.solution) for c, (_, prompt, _) in zip(completions, asked, strict=True)]
    rows = [right[i : i + k] for i in range(0, len(right), k)]
    score = evaluate_policy(base, tokenizer, prompts, replace(PROTOCOL, k=k))
    assert (score.k, score.n) == (k, 12)
    found = score.accuracy, score.stderr, score.low, score.high
    assert found == pytest.approx(by_hand.estimate(by_hand.shares(rows)))
    assert score.mean_tokens == pytest.approx(sum(len(c.token_ids) for c in completions) / len(completions))
    assert score.truncated == pytest.approx(sum(c.token_ids[-1] != 1 for c in completions) / len(completions))
    assert score.no_answer == pytest.approx(sum("boxed{" not in c.text for c in completions) / len(completions))
    assert 0 < score.accuracy < 1
    assert 0 < score.truncated < 1


def test_held_out_problems_are_a_task_like_any_other(prompts):
    task = heldout_task("sandbox:addition", prompts, PROTOCOL, (1,))
    assert [asked.prompt_ids for asked in task.request.asked] == [prompt.token_ids for prompt in prompts]
    assert [asked.gold for asked in task.request.asked] == [prompt.solution for prompt in prompts]
    assert [question.text for question in task.data.questions] == [prompt.content for prompt in prompts]
    assert task.longest == max(len(prompt.token_ids) for prompt in prompts) + 28
    assert heldout_task("sandbox:addition", prompts[:-1], PROTOCOL, (1,)).protocol_hash != task.protocol_hash
    assert (
        heldout_task("sandbox:addition", prompts, replace(PROTOCOL, seed=4), (1,)).protocol_hash == task.protocol_hash
    )
