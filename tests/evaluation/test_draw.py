"""Each sample is drawn once, with a seed of its own, whatever else is asked for, and judged against its own problem."""

from dataclasses import replace

import pytest

from perl.data import render_prompts
from perl.evaluation.draw import RenderedProblem, TaskRequest, draw
from perl.evaluation.protocol import Protocol
from perl.evaluation.samples import Sample
from perl.policy.model import load_tokenizer
from perl.recipe.sections import ModelSection
from perl.rollouts.engine import Sampled, completion_of
from perl.rollouts.hf_engine import TransformersEngine
from perl.sandbox import load_problems
from tests.completing import Drawing
from tests.counting import complete_with_seeds, is_right, seed_by_hand
from tests.saved_adapters import clean_base

TASK, ENDS = "sandbox:addition", (1,)
PROTOCOL = Protocol(k=3, max_new_tokens=28)


@pytest.fixture(scope="module")
def base():
    return clean_base()


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(ModelSection())


@pytest.fixture(scope="module")
def wanted(tokenizer) -> TaskRequest:
    problems = load_problems(TASK, "heldout")[:6]
    prompts = render_prompts([{"prompt": p.question, "solution": p.answer} for p in problems], tokenizer)
    asked = tuple(RenderedProblem(f"p{i}", prompt.token_ids, prompt.solution) for i, prompt in enumerate(prompts))
    return TaskRequest(TASK, asked, 28, ENDS)


@pytest.fixture
def sampled(base, tokenizer):
    """The samples of each problem, and those that were new."""

    def ask(wanted, protocol=PROTOCOL, done=None, batch_size=64):
        new: list[Sample] = []
        engine = TransformersEngine(base, tokenizer, batch_size)
        return draw(engine, tokenizer, wanted, protocol, done or {}, new.append), new

    return ask


def flat(groups):
    return [sample for group in groups for sample in group]


def test_samples_are_what_the_model_writes_with_their_seeds(base, tokenizer, wanted, sampled):
    found = flat(sampled(wanted)[0])
    assert [sample.place for sample in found] == [(TASK, f"p{i}", index) for i in range(6) for index in range(3)]
    seeds = [seed_by_hand(*sample.place) for sample in found]
    assert [sample.seed for sample in found] == seeds
    assert len(set(seeds)) == len(seeds)
    prompts = [asked.prompt_ids for asked in wanted.asked for _ in range(3)]
    completions = complete_with_seeds(base, tokenizer, prompts, seeds, Drawing(longest=28))
    assert [sample.text for sample in found] == [completion.text for completion in completions]
    assert [sample.tokens for sample in found] == [len(completion.token_ids) for completion in completions]
    assert [sample.truncated for sample in found] == [completion.truncated for completion in completions]
    golds = [asked.gold for asked in wanted.asked for _ in range(3)]
    assert [sample.right for sample in found] == [is_right(s.text, gold) for s, gold in zip(found, golds, strict=True)]
    assert 0 < sum(sample.right for sample in found) < len(found)
    assert any(sample.truncated for sample in found)


@pytest.mark.parametrize("batch_size", [1, 4])
def test_the_number_written_at_a_time_changes_nothing(wanted, sampled, batch_size):
    assert sampled(wanted, batch_size=batch_size)[0] == sampled(wanted)[0]


def test_another_order_or_fewer_problems_have_the_same_samples(wanted, sampled):
    whole = dict(zip([asked.problem for asked in wanted.asked], sampled(wanted)[0], strict=True))
    for asked in (wanted.asked[::-1], wanted.asked[2:4], wanted.asked[5:]):
        found, _ = sampled(replace(wanted, asked=asked))
        assert found == [whole[one.problem] for one in asked]


def test_a_larger_k_keeps_the_first_samples(wanted, sampled):
    assert [group[:1] for group in sampled(wanted)[0]] == sampled(wanted, replace(PROTOCOL, k=1))[0]


def test_what_is_there_is_not_drawn_again(wanted, sampled):
    expected, _ = sampled(wanted)
    done = {sample.place: replace(sample, text="as it was") for sample in flat(expected)[1::2]}
    found, new = sampled(wanted, done=done)
    assert {sample.place for sample in new}.isdisjoint(done)
    assert len(new) == 18 - len(done)
    assert flat(found) == [done.get(sample.place, sample) for sample in flat(expected)]
    assert sampled(wanted, done={sample.place: sample for sample in flat(expected)}) == (expected, [])


def test_another_seed_draws_others_and_greedy_asks_none(wanted, sampled):
    assert sampled(wanted, replace(PROTOCOL, seed=1))[0] != sampled(wanted)[0]
    greedy = replace(PROTOCOL, temperature=0.0, k=1)
    texts = [[sample.text for sample in group] for group in sampled(wanted, greedy)[0]]
    assert [[sample.text for sample in group] for group in sampled(wanted, replace(greedy, seed=9))[0]] == texts


def test_a_stop_text_ends_a_completion_which_is_then_not_cut_off(wanted, sampled):
    whole, _ = sampled(wanted)
    stopped, _ = sampled(replace(wanted, stop=("nowhere", "{", "boxed")))
    assert [s.text for s in flat(stopped)] == [s.text.partition("boxed")[0].partition("{")[0] for s in flat(whole)]
    assert [s.tokens for s in flat(stopped)] == [s.tokens for s in flat(whole)]  # they were written all the same
    assert [s.truncated for s in flat(stopped)] == [s.truncated and "boxed" not in s.text for s in flat(whole)]
    assert {sample.status for sample in flat(stopped)} == {"no_answer"}


def test_a_completion_of_the_longest_length_that_ends_by_itself_is_not_cut_off(tokenizer):
    def is_truncated(ids):
        return completion_of(Sampled(tuple(ids), (None,) * len(ids), ""), ENDS, tokenizer).truncated

    assert is_truncated([5] * 28)
    assert not is_truncated([5] * 27 + [1])
    assert not is_truncated([5, 1])


def test_an_error_of_who_keeps_samples_ends_the_drawing(base, tokenizer, wanted):
    kept = []

    def keep(sample):
        kept.append(sample)
        if len(kept) == 4:
            raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        draw(TransformersEngine(base, tokenizer, 2), tokenizer, wanted, PROTOCOL, {}, keep)
    assert len(kept) == 4
