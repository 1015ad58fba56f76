"""Completions are the policy's own: reproducible, in order, and the same as a loop of forward passes by hand."""

import copy
import random
from collections import Counter

import pytest
import torch

from perl.data import render_prompts
from perl.methods.settings import adaptation
from perl.policy.attach import attach_adapter
from perl.policy.logprobs import token_log_probs
from perl.policy.model import load_base, load_tokenizer
from perl.recipe.sections import ModelSection, PeftSection
from perl.types import Completion, Prompt
from tests.completing import Drawing, complete

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


def by_hand(model: torch.nn.Module, prompt: Prompt, length: int, ends: tuple[int, ...] = (END,)) -> tuple[int, ...]:
    """The likeliest token after all before it, one forward pass a token, without cache or padding."""
    written: list[int] = []
    with torch.no_grad():
        while len(written) < length and not (written and written[-1] in ends):
            logits = model(torch.tensor([[*prompt.token_ids, *written]]), use_cache=False).logits[0, -1]
            written.append(int(logits.argmax()))
    return tuple(written)


def moved(base, dropout: float = 0.0) -> torch.nn.Module:
    policy = attach_adapter(base, adaptation(PeftSection(rank=4, dropout=dropout)))
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter += 0.03 * torch.randn(parameter.shape)
    return policy.eval()


def test_greedy_completions_are_the_likeliest_tokens_by_hand(base, tokenizer, prompts):
    completions = complete(base, tokenizer, prompts, GREEDY)
    assert [c.token_ids for c in completions] == [by_hand(base, prompt, 24) for prompt in prompts]
    assert len({c.token_ids for c in completions}) > 1


def test_greedy_completions_are_those_of_the_active_adapter(base, tokenizer, prompts):
    without = complete(base, tokenizer, prompts, GREEDY)
    policy = moved(base)
    completions = complete(policy, tokenizer, prompts, GREEDY)
    assert [c.token_ids for c in completions] == [by_hand(policy, prompt, 24) for prompt in prompts]
    assert completions != without
    with policy.disable_adapter():
        assert complete(policy, tokenizer, prompts, GREEDY) == without


@pytest.mark.parametrize("batch_size", [1, 2, 3, 100])
def test_greedy_completions_do_not_depend_on_what_shares_their_batch(base, tokenizer, prompts, batch_size):
    sampling = Drawing(temperature=0.0, longest=24, batch_size=batch_size)
    assert complete(base, tokenizer, prompts, sampling) == complete(base, tokenizer, prompts, GREEDY)


def test_a_tokenizer_that_pads_with_its_end_token_gives_the_same_completions(base, tokenizer, prompts):
    expected = complete(base, tokenizer, prompts, GREEDY)
    padding = copy.deepcopy(tokenizer)
    padding.pad_token = padding.eos_token
    assert complete(base, padding, prompts, GREEDY) == expected


def test_completions_come_in_the_order_of_the_prompts(base, tokenizer, prompts):
    expected = complete(base, tokenizer, prompts, GREEDY)
    order = random.Random(2).sample(range(len(prompts)), len(prompts))
    shuffled = complete(base, tokenizer, [prompts[i] for i in order], GREEDY)
    assert shuffled == [expected[i] for i in order]


def test_the_same_seed_gives_the_same_completions_and_another_seed_others(base, tokenizer, prompts):
    first = complete(base, tokenizer, prompts, Drawing(longest=24, seed=4))
    torch.rand(5)
    assert complete(base, tokenizer, prompts, Drawing(longest=24, seed=4)) == first
    assert complete(base, tokenizer, prompts, Drawing(longest=24, seed=5)) != first


def test_the_random_numbers_of_the_process_are_left_as_they_were(base, tokenizer, prompts):
    torch.manual_seed(9)
    expected = torch.rand(3)
    torch.manual_seed(9)
    python, before = random.getstate(), torch.get_rng_state()
    complete(base, tokenizer, prompts, Drawing(longest=5, seed=1))
    assert random.getstate() == python
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(torch.rand(3), expected)


def test_repeated_prompts_get_completions_of_their_own(base, tokenizer, prompts):
    completions = complete(base, tokenizer, [prompts[0]] * 16, Drawing(longest=24))
    assert len(set(completions)) > 1


def test_the_end_token_is_part_of_the_ids_but_not_of_the_text(base, tokenizer, prompts):
    completions = complete(base, tokenizer, prompts * 4, Drawing(longest=24))
    ended = [c for c in completions if not c.truncated]
    cut = [c for c in completions if c.truncated]
    assert ended
    assert cut
    for completion in ended:
        assert completion.token_ids[-1] == END
        assert completion.token_ids.count(END) == 1
        assert PADDING not in completion.token_ids
        assert completion.text == "".join(tokenizer.convert_ids_to_tokens(list(completion.token_ids[:-1])))
    for completion in cut:
        assert len(completion.token_ids) == 24
        assert END not in completion.token_ids
        assert completion.text == "".join(tokenizer.convert_ids_to_tokens(list(completion.token_ids)))


def test_a_completion_that_ends_with_its_last_allowed_token_is_not_truncated(base, tokenizer, prompts):
    length = len(by_hand(base, prompts[3], 100))
    for allowed, truncated in ((length, False), (length - 1, True)):
        sampling = Drawing(temperature=0.0, longest=allowed)
        (completion,) = complete(base, tokenizer, [prompts[3]], sampling)
        assert len(completion.token_ids) == allowed
        assert completion.truncated is truncated


def test_every_end_token_that_the_model_declares_ends_a_completion(base, tokenizer, prompts):
    (space,) = tokenizer(" ")["input_ids"]
    base.generation_config.eos_token_id = [END, space]
    completions = complete(base, tokenizer, prompts, GREEDY)
    assert [c.token_ids for c in completions] == [by_hand(base, p, 24, (END, space)) for p in prompts]
    assert any(c.token_ids[-1] == space and not c.truncated for c in completions)


@pytest.mark.parametrize("default", [{"repetition_penalty": 3.0}, {"no_repeat_ngram_size": 1}], ids=str)
def test_the_models_own_generation_defaults_do_not_change_what_is_likeliest(base, tokenizer, prompts, default):
    expected = complete(base, tokenizer, prompts, GREEDY)
    base.generation_config.update(**default)
    assert complete(base, tokenizer, prompts, GREEDY) == expected
    assert base.generation_config.to_dict().items() >= default.items()


@pytest.mark.parametrize(
    "default", [{"top_k": 1}, {"top_p": 0.01}, {"temperature": 0.01}, {"min_p": 1.0}, {"typical_p": 0.01}], ids=str
)
def test_the_models_own_generation_defaults_do_not_narrow_what_is_drawn(base, tokenizer, prompts, default):
    sampling = Drawing(temperature=2.0, longest=10)
    expected = complete(base, tokenizer, prompts, sampling)
    base.generation_config.update(**default)
    assert complete(base, tokenizer, prompts, sampling) == expected


def test_first_tokens_are_drawn_as_often_as_the_policy_says(base, tokenizer, prompts):
    draws, temperature = 2000, 3.0
    sampling = Drawing(temperature=temperature, longest=1, batch_size=draws)
    counts = Counter(c.token_ids[0] for c in complete(base, tokenizer, [prompts[0]] * draws, sampling))
    ids = torch.tensor([[*prompts[0].token_ids, token] for token in range(base.config.vocab_size)])
    with torch.no_grad():
        chances = token_log_probs(base, ids, torch.ones_like(ids), temperature=temperature)[:, -1].exp().tolist()
    assert sum(chance > 0.01 for chance in chances) > 2
    for token, chance in enumerate(chances):  # five standard deviations, and one draw for what is hardly ever drawn
        assert abs(counts[token] - draws * chance) <= 5 * (draws * chance * (1 - chance)) ** 0.5 + 1


def test_a_small_nucleus_leaves_only_the_likeliest_token(base, tokenizer, prompts):
    nucleus = Drawing(temperature=1.0, top_p=1e-6, longest=24)
    assert complete(base, tokenizer, prompts, nucleus) == complete(base, tokenizer, prompts, GREEDY)


@pytest.mark.parametrize("training", [True, False])
def test_completions_are_written_without_dropout_and_the_model_is_left_as_it_was(base, tokenizer, prompts, training):
    policy = moved(base, dropout=0.5).train(training)
    first = complete(policy, tokenizer, prompts, GREEDY)
    assert policy.training is training
    assert complete(policy, tokenizer, prompts, GREEDY) == first
    assert [c.token_ids for c in first] == [by_hand(policy.eval(), prompt, 24) for prompt in prompts]


def test_a_generation_that_fails_leaves_the_model_training(base, tokenizer, prompts):
    def stop(_: int, __: object) -> None:
        raise KeyboardInterrupt

    base.train()
    with pytest.raises(KeyboardInterrupt):
        complete(base, tokenizer, prompts, Drawing(longest=1), stop)
    assert base.training


def test_no_prompt_gives_no_completion(base, tokenizer):
    assert complete(base, tokenizer, [], GREEDY) == []


def test_completions_are_records(base, tokenizer, prompts):
    (completion,) = complete(base, tokenizer, prompts[:1], GREEDY)
    assert isinstance(completion, Completion)
    assert all(type(token) is int for token in completion.token_ids)
