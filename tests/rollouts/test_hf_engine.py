"""Completions are the policy's own and their seed's: whatever shares their batch, their server or their request."""

import asyncio
import copy
import random
from collections import Counter

import pytest
import scipy.stats
import torch

from perl.errors import ModelError
from perl.evaluation.tasks.draw import within_batch
from perl.methods.settings import adaptation
from perl.policy.attach import attach_adapter
from perl.policy.model import load_base
from perl.recipe.sections import ModelSection, PeftSection
from perl.rollouts.engine import EngineSampling, Request, Sampled, completion_of
from perl.rollouts.hf_engine import TransformersEngine
from perl.rollouts.vllm.http import VllmServer
from tests.oracles.sampling import chances, likeliest_completion, logits_after, plain_log_probs
from tests.rollouts.policies import perturbed
from tests.servers import SERVED_NAME

END = 1
PROMPT = (9, 4, 13, 5, 10, 15, 22, 31)
WARM = EngineSampling(temperature=1.0, max_completion_length=24, end_token_ids=(END,))
GREEDY = EngineSampling(temperature=0.0, max_completion_length=24, end_token_ids=(END,))
WAYS = {
    "nucleus": EngineSampling(0.7, 16, (END,), top_p=0.9),
    "warm": EngineSampling(1.6, 16, (END,)),
    "top-k": EngineSampling(2.0, 16, (END,), top_k=4),
    "min-p": EngineSampling(1.5, 16, (END,), min_p=0.1),
    "penalty": EngineSampling(1.2, 16, (END,), repetition_penalty=1.5),
    "all": EngineSampling(1.8, 16, (END,), top_p=0.95, top_k=12, min_p=0.02, repetition_penalty=1.2),
}


@pytest.fixture(scope="module")
def base():
    return load_base(ModelSection(), torch.device("cpu")).eval()


def ids_of(length: int, seed: int) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(3, 40), k=length))


def sixty_four() -> list[Request]:
    """Requests of one completion each, in no order of length, with seeds in no order."""
    return [Request(ids_of(3 + i * 7 % 13, i), 1, seed=i * 37 % 64) for i in range(64)]


@pytest.mark.parametrize("way", WAYS)
def test_first_tokens_are_drawn_as_often_as_the_distribution_says(base, tokenizer, way):
    draws, how = 4000, WAYS[way]
    one = EngineSampling(how.temperature, 1, (END,), how.top_p, how.top_k, how.min_p, how.repetition_penalty)
    prompt = tuple(tokenizer("12+34=")["input_ids"])
    (group,) = TransformersEngine(base, tokenizer, 1000).start([Request(prompt, draws, seed=0)], one).result()
    counts = Counter(sampled.token_ids[0] for sampled in group)
    expected = [draws * chance for chance in chances(logits_after(base, prompt), prompt, how)]
    assert all(expected[token] > 0 for token in counts)
    common = [token for token, number in enumerate(expected) if number >= 5]
    assert len(common) >= 2
    seen, wanted = [counts[token] for token in common], [expected[token] for token in common]
    rest = draws - sum(wanted)
    if rest >= 5:
        seen, wanted = [*seen, draws - sum(seen)], [*wanted, rest]
    else:  # too seldom for a class of its own
        wanted = [number * sum(seen) / sum(wanted) for number in wanted]
    assert scipy.stats.chisquare(seen, wanted).pvalue > 1e-6


@pytest.mark.parametrize("way", [*WAYS, "one token"])
def test_log_probabilities_are_of_the_distribution_that_the_token_was_drawn_from(base, tokenizer, way):
    how = WAYS[way] if way in WAYS else EngineSampling(1.0, 16, (END,), top_p=1e-6)
    requests, base = sixty_four()[:12], copy.deepcopy(base).double()
    groups = TransformersEngine(base, tokenizer, 5).start(requests, how).result()
    for request, (sampled,) in zip(requests, groups, strict=True):
        assert len(sampled.log_probs) == len(sampled.token_ids)
        for i, (token, log_prob) in enumerate(zip(sampled.token_ids, sampled.log_probs, strict=True)):
            before = (*request.prompt_ids, *sampled.token_ids[:i])
            chance = chances(logits_after(base, before), before, how)[token]
            assert log_prob == pytest.approx(float(torch.tensor(chance).log()), abs=1e-5)


@pytest.mark.parametrize("batch_size", [5, 256])
@pytest.mark.parametrize("way", ["nucleus", "all"])
def test_the_same_seed_gives_the_same_completion_whatever_shares_its_batch(base, tokenizer, way, batch_size):
    requests = sixty_four()
    expected = TransformersEngine(base, tokenizer, 64).start(requests, WAYS[way]).result()
    found = TransformersEngine(base, tokenizer, batch_size).start(requests[::-1], WAYS[way]).result()[::-1]
    assert [s.token_ids for (s,) in found] == [s.token_ids for (s,) in expected]
    for (one,), (other,) in zip(found, expected, strict=True):
        assert one.log_probs == pytest.approx(other.log_probs, abs=1e-4)


@pytest.fixture(params=["transformers", pytest.param("vLLM server", marks=pytest.mark.nightly)])
def drawn(request, base, tokenizer):
    """Draws from one kind of engine: requests, sampling -> the token ids of each completion of each request."""
    if request.param == "vLLM server":
        url = request.getfixturevalue("lone_server")
        return lambda requests, how: served(url, requests, how)

    def of_transformers(requests, how):
        groups = TransformersEngine(base, tokenizer).start(requests, how).result()
        return [[sampled.token_ids for sampled in group] for group in groups]

    return of_transformers


def test_the_next_completion_of_a_request_has_the_next_seed_at_any_length(drawn):
    (group,) = drawn([Request(PROMPT, 4, seed=7)], WARM)
    assert group == [ids for (ids,) in drawn([Request(PROMPT, 1, seed=7 + i) for i in range(4)], WARM)]
    (short,) = drawn([Request(PROMPT, 4, seed=7)], EngineSampling(1.0, 3, (END,)))
    assert short == [ids[:3] for ids in group]
    assert drawn([Request(PROMPT, 4, seed=40)], WARM) != [group]
    assert len(set(group)) > 1


def test_a_seed_gives_the_same_completion_alone_and_beside_others(drawn):
    mine = Request(PROMPT, 1, seed=11)
    (alone,) = drawn([mine], WARM)
    others = [Request(ids_of(3 + i % 9, i), 1, seed=None if i % 2 else i) for i in range(31)]
    for place in (0, 17, 31):
        assert drawn([*others[:place], mine, *others[place:]], WARM)[place] == alone


def test_greedy_every_engine_writes_the_likeliest_tokens(drawn, base):
    requests = sixty_four()[:6]
    assert drawn(requests, GREEDY) == [[likeliest_completion(base, r.prompt_ids, 24, (END,))] for r in requests]


@pytest.mark.parametrize("batch_size", [2, 3, 100])
def test_a_group_is_handed_on_once_as_soon_as_it_is_whole(base, tokenizer, batch_size):
    requests = [Request(ids_of(length, length), count, seed=0) for length, count in ((9, 3), (3, 2), (6, 4))]
    told: list[tuple[int, list[Sampled], str]] = []
    engine = TransformersEngine(base, tokenizer, batch_size)
    hear = lambda position, group: told.append((position, list(group), within_batch(engine)))  # noqa: E731 (a line)
    result = engine.start(requests, WARM, hear).result()
    longest = max(len(one.token_ids) for group in result for one in group)
    assert batch_size < 9 or {said for *_, said in told} == {f"token {longest}"}
    assert within_batch(engine) == ""
    assert [position for position, *_ in told] == [1, 2, 0]  # the shortest prompt first
    assert [group for _, group, _ in told] == [result[position] for position in (1, 2, 0)]
    assert [len(group) for group in result] == [3, 2, 4]


@pytest.fixture
def small(base):
    """Makes the base run out of memory beyond a number of rows."""
    hooks = []

    def allow(rows: int) -> list[int]:
        asked: list[int] = []

        def refuse(_module, _args, kwargs):
            asked.append(kwargs["input_ids"].size(0))
            if asked[-1] > rows:
                raise torch.OutOfMemoryError("CUDA out of memory")

        hooks.append(base.register_forward_pre_hook(refuse, with_kwargs=True))
        return asked

    yield allow
    for hook in hooks:
        hook.remove()


def test_a_batch_that_the_memory_does_not_hold_is_halved_until_it_does_or_is_one_completion(base, tokenizer, small):
    requests = sixty_four()
    expected = TransformersEngine(base, tokenizer).start(requests, WARM).result()
    asked, engine = small(5), TransformersEngine(base, tokenizer, 40)
    told: list[int] = []
    found = engine.start(requests, WARM, lambda position, _: told.append(position)).result()
    assert [s.token_ids for (s,) in found] == [s.token_ids for (s,) in expected]
    assert sorted(told) == list(range(64))
    assert asked[:4] == [40, 20, 10, 5]
    assert max(asked[4:]) == 5
    small(0)
    with pytest.raises(ModelError, match=r"not enough memory for one completion: 32 tokens.*fewer tokens"):
        TransformersEngine(base, tokenizer, 4).start([Request(PROMPT, 4, seed=0)], WARM)


def moved(base, dropout: float = 0.0) -> torch.nn.Module:
    return perturbed(attach_adapter(copy.deepcopy(base), adaptation(PeftSection(rank=4, dropout=dropout))), 0.03)


def test_greedy_completions_are_the_likeliest_tokens_with_and_without_an_adapter_to_any_end(base, tokenizer):
    requests, policy = sixty_four()[:6], moved(base)
    (space,) = tokenizer(" ")["input_ids"]

    def written(model, ends, longest):
        how = EngineSampling(temperature=0.0, max_completion_length=longest, end_token_ids=ends)
        groups = TransformersEngine(model, tokenizer, 4).start(requests, how).result()
        return [sampled for (sampled,) in groups]

    for ends in ((END,), (END, space), ()):
        for longest in (7, 24):
            expected = [likeliest_completion(base, r.prompt_ids, longest, ends) for r in requests]
            found = written(base, ends, longest)
            assert [sampled.token_ids for sampled in found] == expected
            cut = [completion_of(sampled, ends, tokenizer).truncated for sampled in found]
            assert cut == [ids[-1] not in ends for ids in expected]
    of_policy = [likeliest_completion(policy, r.prompt_ids, 24, ()) for r in requests]
    assert [sampled.token_ids for sampled in written(policy, (), 24)] == of_policy != expected
    for request, sampled in zip(requests, written(policy, (END,), 24), strict=True):  # at temperature 1, of all tokens
        own = plain_log_probs(policy, (*request.prompt_ids, *sampled.token_ids))[-len(sampled.token_ids) :]
        torch.testing.assert_close(torch.tensor(sampled.log_probs), own, atol=1e-5, rtol=0)
    with policy.disable_adapter():
        assert [sampled.token_ids for sampled in written(policy, (), 24)] == expected


def test_what_is_drawn_neither_depends_on_the_random_numbers_of_the_process_nor_moves_them(base, tokenizer):
    engine, requests = TransformersEngine(base, tokenizer), sixty_four()[:8]
    torch.manual_seed(9)
    python, before = random.getstate(), torch.get_rng_state()
    found = engine.start(requests, WARM).result()
    assert random.getstate() == python
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(10)
    assert engine.start(requests, WARM).result() == found


@pytest.mark.parametrize("training", [True, False])
def test_completions_are_written_without_dropout_and_the_model_is_left_as_it_was(base, tokenizer, small, training):
    """Also by a receiver that raises, before the rest is written."""

    def stop(position: int, _: object) -> None:
        raise KeyboardInterrupt(position)

    policy = moved(base, dropout=0.5).train(training)
    (group,) = TransformersEngine(policy, tokenizer).start([Request(PROMPT, 1)], GREEDY).result()
    assert policy.training is training
    assert group[0].token_ids == likeliest_completion(policy.eval(), PROMPT, 24, (END,))
    asked = small(256)
    base.train(training)
    requests = [Request(PROMPT, 2), Request((3, 4), 2), Request((3,), 3)]
    with pytest.raises(KeyboardInterrupt) as caught:
        TransformersEngine(base, tokenizer, 2).start(requests, WARM, stop)
    assert (caught.value.args, base.training) == ((2,), training)
    assert len(asked) <= 2 * WARM.max_completion_length  # two batches of four
    base.eval()


def served(url: str, requests: list[Request], sampling: EngineSampling) -> list[list[tuple[int, ...]]]:
    """What a server writes for requests that it has at once."""

    async def answers() -> list:
        server = VllmServer(url)
        try:
            return await asyncio.gather(*(server.complete(SERVED_NAME, request, sampling) for request in requests))
        finally:
            await server.close()

    return [[tuple(part.token_ids) for part in group] for group in asyncio.run(answers())]
