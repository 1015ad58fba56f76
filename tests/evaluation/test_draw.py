"""Each sample is drawn once, with a seed of its own, whatever else is asked for, and judged against its own problem."""

from dataclasses import replace

import pytest

from perl.data import render_prompts
from perl.evaluation.scoring.protocol import Protocol
from perl.evaluation.scoring.samples import Sample
from perl.evaluation.tasks.draw import RenderedProblem, TaskRequest, draw
from perl.rollouts.hf_engine import TransformersEngine
from perl.sandbox import load_problems
from tests.completing import Drawing
from tests.counting import complete_with_seeds
from tests.oracles import evaluation as by_hand
from tests.saved_adapters import clean_base

TASK, ENDS = "sandbox:addition", (1,)
PROTOCOL = Protocol(k=3, max_new_tokens=28)


@pytest.fixture(scope="module")
def base():
    return clean_base()


@pytest.fixture(scope="module")
def wanted(tokenizer) -> TaskRequest:
    problems = load_problems(TASK, "heldout")[:6]
    prompts = render_prompts([{"prompt": p.question, "solution": p.answer} for p in problems], tokenizer)
    asked = tuple(RenderedProblem(f"p{i}", prompt.token_ids, prompt.solution) for i, prompt in enumerate(prompts))
    return TaskRequest(TASK, asked, 28, ENDS)


@pytest.fixture(scope="module")
def sampled(base, tokenizer):
    """The samples of each problem, and those that were new."""

    def ask(wanted, protocol=PROTOCOL, done=None, batch_size=64):
        new: list[Sample] = []
        engine = TransformersEngine(base, tokenizer, batch_size)
        return draw(engine, tokenizer, wanted, protocol, done or {}, new.append), new

    return ask


@pytest.fixture(scope="module")
def whole(wanted, sampled):
    """All samples of each problem, drawn at once."""
    return sampled(wanted)[0]


def flat(groups):
    return [sample for group in groups for sample in group]


def test_samples_are_what_the_model_writes_with_their_seeds(base, tokenizer, wanted, whole):
    found = flat(whole)
    assert [sample.place for sample in found] == [(TASK, f"p{i}", index) for i in range(6) for index in range(3)]
    seeds = [by_hand.seed_by_hand(*sample.place) for sample in found]
    assert [sample.seed for sample in found] == seeds
    assert len(set(seeds)) == len(seeds)
    prompts = [asked.prompt_ids for asked in wanted.asked for _ in range(3)]
    completions = complete_with_seeds(base, tokenizer, prompts, seeds, Drawing(longest=28))
    assert [sample.text for sample in found] == [completion.text for completion in completions]
    assert [sample.tokens for sample in found] == [len(completion.token_ids) for completion in completions]
    assert [sample.truncated for sample in found] == [completion.truncated for completion in completions]
    assert any(sample.truncated for sample in found)


@pytest.mark.parametrize(
    ("batch_size", "k", "chosen"),
    [
        (1, 3, slice(None)),
        (64, 3, slice(None, None, -1)),
        (4, 2, slice(3, None)),  # of a larger k the first are kept
    ],
    ids=["one at a time", "another order", "fewer problems, batches and k"],
)
def test_a_sample_depends_on_nothing_else_that_is_drawn(wanted, sampled, whole, batch_size, k, chosen):
    found, _ = sampled(replace(wanted, asked=wanted.asked[chosen]), replace(PROTOCOL, k=k), batch_size=batch_size)
    assert found == [group[:k] for group in whole[chosen]]


def test_a_stop_text_ends_a_completion_which_is_then_not_cut_off(wanted, sampled, whole):
    stopped, _ = sampled(replace(wanted, stop=("nowhere", "{", "boxed")))
    assert [s.text for s in flat(stopped)] == [s.text.partition("boxed")[0].partition("{")[0] for s in flat(whole)]
    assert [s.tokens for s in flat(stopped)] == [s.tokens for s in flat(whole)]  # they were written all the same
    assert [s.truncated for s in flat(stopped)] == [s.truncated and "boxed" not in s.text for s in flat(whole)]
    assert {sample.status for sample in flat(stopped)} == {"no_answer"}
