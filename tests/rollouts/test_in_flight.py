"""Requests that go on under an adapter that is loaded meanwhile: whole completions, each token of a named version."""

import random

import pytest

from perl.errors import ModelError, RecipeError
from perl.recipe.recipe import load_recipe
from perl.rollouts.engine import EngineSampling, Request
from perl.rollouts.vllm.answers import GrowingGroup, Part, ServerDownError, read_choices
from perl.training.prepare import prepare, read_recipe
from tests.rollouts.policies import completion_log_probs
from tests.rollouts.test_vllm_server import TOKENS, open_pool, policy, update_of, wait_until, written  # noqa: F401 (a fixture)

LONGEST = 60
SAMPLING = EngineSampling(temperature=1.0, max_completion_length=LONGEST, end_token_ids=())


@pytest.mark.parametrize("seed", range(3))
def test_parts_of_several_versions_make_the_completions_that_were_written(seed):
    """Stopped anywhere and often, also before a token came: nothing is lost, doubled or asked for too long."""
    chance = random.Random(seed)
    texts = [[chance.randrange(100) for _ in range(chance.randrange(1, LONGEST + 1))] for _ in range(5)]
    request = Request((1, 2, 3), 5, continues=True)
    group = GrowingGroup(request, SAMPLING)
    asked, versions, written_by = [(tuple(range(5)), request)], 0, [[] for _ in texts]
    while asked:
        versions, waiting = versions + 1, []
        for places, part in asked:
            parts = []
            for place in places:
                begun = len(written_by[place])
                assert part.prompt_ids == (1, 2, 3, *texts[place][:begun])
                assert part.most_tokens(SAMPLING) == LONGEST - begun
                new = texts[place][begun : begun + chance.choice([0, 1, 7, 100])]
                written_by[place] += [f"v{versions}"] * len(new)
                ended = "stop" if len(written_by[place]) == len(texts[place]) else None
                parts.append(Part(list(new), [-float(token) for token in new], ended))
            waiting += group.left(group.add(places, parts, f"v{versions}"))
        asked = waiting
    assert group.finished
    for sampled, text, by in zip(group.sampled(), texts, written_by, strict=True):
        assert list(sampled.token_ids) == text
        assert sampled.log_probs == tuple(-float(token) for token in text)
        assert list(sampled.versions) == by
        assert sampled.version == by[-1]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"choices": [{"index": 3, "token_ids": [1]}]}', "something else"),
        ('{"choices": [{"index": 0, "token_ids": [1, 2], "logprobs": {"token_logprobs": [-1.0]}}]}', "each token"),
        ('{"choices": [{"index": 0, "finish_reason": "abort"}]}', "abort"),
    ],
)
def test_a_stream_that_is_none_is_refused(line, says):
    with pytest.raises(ServerDownError, match=says):
        read_choices(line, [Part(), Part()])


def test_a_stream_may_bring_several_tokens_at_once_and_completions_in_turns():
    parts = [Part(), Part()]
    read_choices('{"choices": [{"index": 1, "token_ids": [5, 6], "logprobs": {"token_logprobs": [-1, null]}}]}', parts)
    read_choices('{"choices": [{"index": 0, "token_ids": [7], "logprobs": {"token_logprobs": [-2.5]}}]}', parts)
    end = '{"choices": [{"index": 1, "token_ids": [8], "logprobs": {"token_logprobs": [0]}, "finish_reason": "stop"}]}'
    read_choices(end, parts)
    read_choices('{"choices": []}', parts)
    assert parts == [Part([7], [-2.5]), Part([5, 6, 8], [-1.0, None, 0.0], "stop")]


def written_under_many(engine, requests, sampling):
    """The groups, written while one version after the other is loaded, and the policy of each version by its name."""
    seeds = {}

    def load(seed):
        update = update_of(seed)
        seeds[update.name] = seed
        engine.load(update)

    for _ in range(20):  # on a busy machine a load may take as long as all completions
        load(0)
        pending = engine.start(requests, sampling)
        number = 0
        while not pending.done():
            number += 1
            load(number % 3)
        groups = pending.result()
        if max(len(set(sampled.versions)) for group in groups for sampled in group) > 1:
            return groups, seeds
    raise AssertionError("they were always faster")


def difference(groups, requests, seeds):
    """Mean and largest difference of log-probs, of each token from those of the policy that its version was made of."""
    found = []
    for group, request in zip(groups, requests, strict=True):
        for sampled in group:
            mine = {
                seed: completion_log_probs(policy(seed), request.prompt_ids, sampled.token_ids)
                for seed in {seeds[version] for version in sampled.versions}
            }
            for place, (version, log_prob) in enumerate(zip(sampled.versions, sampled.log_probs, strict=True)):
                found.append(abs(log_prob - mine[seeds[version]][place].item()))
    return sum(found) / len(found), max(found)


@pytest.mark.nightly
@pytest.mark.parametrize("ends", [(), tuple(range(20, 24))], ids=["to the longest", "to an end token"])
def test_each_token_is_of_the_version_that_it_names_and_none_is_lost(open_pool, vllm_server, ends):  # noqa: F811
    """Log-probs are of the prompt and all tokens before: one lost or doubled would change all that follow."""
    engine = open_pool([vllm_server])
    requests = [Request((*TOKENS[:4], 5 + i), 4, continues=True) for i in range(3)]
    sampling = EngineSampling(temperature=1.0, max_completion_length=200, end_token_ids=ends)
    groups, seeds = written_under_many(engine, requests, sampling)
    assert [len(group) for group in groups] == [4, 4, 4]
    mean, largest = difference(groups, requests, seeds)
    assert mean < 1e-4
    assert largest < 2e-3
    for sampled in (sampled for group in groups for sampled in group):
        assert len(sampled.token_ids) == len(sampled.log_probs) == len(sampled.versions) <= 200
        assert sampled.version == sampled.versions[-1]
        assert not set(sampled.token_ids[:-1]) & set(ends)
        assert len(sampled.token_ids) == 200 or sampled.token_ids[-1] in ends
    assert engine.counts["requests_continued"] > 0


@pytest.mark.parametrize(
    ("changes", "needs"),
    [({"prefetch": 0}, r"rollout\.prefetch: 1"), ({"prefetch": 1, "sync": "merged"}, "sync: auto")],
)
def test_what_cannot_go_on_is_refused_in_one_line_that_says_what_is_missing(changes, needs):
    rollout = {"backend": "vllm-server", "servers": ["http://a:1"], "in_flight": "continue", **changes}
    with pytest.raises(RecipeError, match=rf"rollout\.in_flight: continue needs .*{needs}") as refused:
        load_recipe({"extends": "quickstart", "rollout": rollout})
    assert len(str(refused.value).splitlines()) == 1


def test_a_method_whose_update_is_no_lora_cannot_go_on_and_is_refused_before_weights_load(tmp_path):
    rollout = {"backend": "vllm-server", "servers": ["http://a:1"], "prefetch": 1, "in_flight": "continue"}
    recipe = {"extends": "quickstart", "peft": {"method": "dora"}, "rollout": rollout}
    with pytest.raises(ModelError, match=r"rollout\.in_flight: continue needs a LoRA that vLLM serves") as refused:
        prepare(read_recipe(recipe, [], tmp_path))
    assert len(str(refused.value).splitlines()) == 1
