"""Completions are the policy's own: reproducible, in order, and the same as a loop of forward passes by hand."""

import copy
import random

import pytest
import torch

from perl.data import render_prompts
from perl.methods.settings import adaptation
from perl.policy.attach import attach_adapter
from perl.policy.model import load_base, load_tokenizer
from perl.recipe.sections import ModelSection, PeftSection
from perl.types import Prompt
from tests.completing import Drawing, complete
from tests.oracles.sampling import likeliest_completion

END, PADDING = 1, 0
GREEDY = Drawing(temperature=0.0, longest=24)
# Different lengths in no order, chat and plain.
QUESTIONS = ["12+34=", "5+17-3+4-10=", "123*4=", "7+8=", "999+11=", "10+10="]


@pytest.fixture
def base():
    return load_base(ModelSection(), torch.device("cpu"))


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(ModelSection())


@pytest.fixture(scope="module")
def prompts(tokenizer) -> list[Prompt]:
    rows = [{"prompt": question} for question in QUESTIONS]
    return render_prompts([*rows, {"prompt": [{"role": "user", "content": QUESTIONS[0]}]}], tokenizer)


def moved(base, dropout: float = 0.0) -> torch.nn.Module:
    policy = attach_adapter(base, adaptation(PeftSection(rank=4, dropout=dropout)))
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter += 0.03 * torch.randn(parameter.shape)
    return policy.eval()


def greedy(prompts, model, ends=(END,), length=24):
    return [likeliest_completion(model, prompt.token_ids, length, ends) for prompt in prompts]


def test_greedy_completions_are_the_likeliest_tokens_whatever_shares_their_batch(base, tokenizer, prompts):
    """Of the base, with and without an adapter, in any order, also where the tokenizer pads with its end token."""
    padding = copy.deepcopy(tokenizer)
    padding.pad_token = padding.eos_token
    shuffled = random.Random(2).sample(prompts, len(prompts))
    of_base, in_order = greedy(prompts, base), greedy(shuffled, base)
    rows = [(tokenizer, prompts, of_base, size) for size in (1, 2, 3, 256)]
    rows += [(padding, prompts, of_base, 256), (tokenizer, shuffled, in_order, 3), (tokenizer, [], [], 256)]
    for reading, asked, expected, size in rows:
        found = complete(base, reading, asked, Drawing(temperature=0.0, longest=24, batch_size=size))
        assert [c.token_ids for c in found] == expected, size
    policy = moved(base)
    assert [c.token_ids for c in complete(policy, tokenizer, prompts, GREEDY)] == greedy(prompts, policy) != of_base
    with policy.disable_adapter():
        assert [c.token_ids for c in complete(policy, tokenizer, prompts, GREEDY)] == of_base


def test_what_is_drawn_neither_depends_on_the_random_numbers_of_the_process_nor_moves_them(base, tokenizer, prompts):
    torch.manual_seed(9)
    python, before = random.getstate(), torch.get_rng_state()
    found = complete(base, tokenizer, prompts, Drawing(longest=24, seed=4))
    assert random.getstate() == python
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(10)
    assert complete(base, tokenizer, prompts, Drawing(longest=24, seed=4)) == found
    assert complete(base, tokenizer, prompts, Drawing(longest=24, seed=5)) != found


def test_the_end_token_is_part_of_the_ids_but_not_of_the_text(base, tokenizer, prompts):
    completions = complete(base, tokenizer, prompts * 4, Drawing(longest=24))
    assert {c.truncated for c in completions} == {True, False}
    for completion in completions:
        *written, last = completion.token_ids
        written += [last] if completion.truncated else []
        assert (last != END) is completion.truncated is (END not in completion.token_ids)
        assert len(completion.token_ids) == 24 or not completion.truncated
        assert not {END, PADDING} & set(written)
        assert completion.text == "".join(tokenizer.convert_ids_to_tokens(written))


def test_a_completion_ends_with_any_end_token_of_the_model_or_is_truncated_at_its_length(base, tokenizer, prompts):
    (space,) = tokenizer(" ")["input_ids"]
    length = len(likeliest_completion(base, prompts[3].token_ids, 100, (END,)))
    for ends in ((END,), (END, space)):
        base.generation_config.eos_token_id = list(ends)
        for longest in (length, length - 1, 24):  # one ends with the last token that it may have
            completions = complete(base, tokenizer, prompts, Drawing(temperature=0.0, longest=longest))
            expected = greedy(prompts, base, ends, longest)
            assert [c.token_ids for c in completions] == expected
            assert [c.truncated for c in completions] == [ids[-1] not in ends for ids in expected]
    assert any(ids[-1] == space for ids in expected)


def test_the_models_own_generation_defaults_change_nothing_of_what_is_drawn(base, tokenizer, prompts):
    drawings = (GREEDY, Drawing(temperature=2.0, longest=10))
    expected, own = [complete(base, tokenizer, prompts, how) for how in drawings], copy.deepcopy(base.generation_config)
    defaults = {"repetition_penalty": 3.0, "no_repeat_ngram_size": 1, "top_k": 1, "top_p": 0.01, "temperature": 0.01}
    changed = []
    for name, value in (defaults | {"min_p": 1.0, "typical_p": 0.01}).items():
        base.generation_config = copy.deepcopy(own)
        base.generation_config.update(**{name: value})
        if [complete(base, tokenizer, prompts, how) for how in drawings] != expected:
            changed.append(name)
        assert getattr(base.generation_config, name) == value
    assert changed == []


@pytest.mark.parametrize("training", [True, False])
def test_completions_are_written_without_dropout_and_the_model_is_left_as_it_was(base, tokenizer, prompts, training):
    def stop(_: int, __: object) -> None:
        raise KeyboardInterrupt

    policy = moved(base, dropout=0.5).train(training)
    completions = complete(policy, tokenizer, prompts, GREEDY)
    assert policy.training is training
    with pytest.raises(KeyboardInterrupt):
        complete(policy, tokenizer, prompts, Drawing(longest=1), stop)
    assert policy.training is training
    assert [c.token_ids for c in completions] == greedy(prompts, policy.eval())
