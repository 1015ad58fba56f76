"""Answers that a proxy loses or cuts off cost what was lost, and never choose which completions a run sees."""

import json

import pytest

from perl.errors import RolloutError
from perl.rollouts.engine import EngineSampling, Request
from perl.rollouts.vllm import lost_answers
from perl.rollouts.vllm.servers import ServerPool
from tests.rollouts.loopback import FakeVllm, Proxy
from tests.rollouts.test_vllm_server import CLOSE, largest_difference, requests, update_of

SAMPLING = EngineSampling(1.0, 8, end_token_ids=(0,))


@pytest.fixture
def open_pool():
    """Opens pools, and closes them."""
    opened = []

    def open_pool(urls, **settings):
        opened.append(ServerPool(urls, settings.pop("folder", None), **{"timeout_seconds": 60.0} | settings))
        return opened[-1]

    yield open_pool
    for pool in opened:
        pool.close()


@pytest.mark.parametrize("status", [None, 502])
@pytest.mark.parametrize("copies", [1, 2])
def test_an_answer_that_is_lost_costs_one_request_and_no_server(open_pool, status, copies, monkeypatch):
    monkeypatch.setattr("perl.rollouts.vllm.dispatch.DYING_SECONDS", 0.0)
    fake = FakeVllm()
    asked = [Request((1, 2), 2, seed=10 * number) for number in range(150)]
    with fake() as url:
        undisturbed = open_pool([url]).start(asked, SAMPLING).result()
        already = len(fake.asked)
        proxies = [Proxy(url, loses=0.1, status=status) for _ in range(copies)]
        with proxies[0]() as first, proxies[-1]() as second:
            pool = open_pool([first, second][:copies])
            found = pool.start(asked, SAMPLING).result()
        lost = len(fake.asked) - already - len(asked)
    # What was asked again is the same, since each completion has a seed of its own.
    assert [[s.token_ids for s in group] for group in found] == [[s.token_ids for s in group] for group in undisturbed]
    assert lost >= 5
    assert lost == sum(proxy.lost_completions for proxy in {id(proxy): proxy for proxy in proxies}.values())
    assert pool.counts == {"requests_retried": lost, "servers_lost": 0, "servers_late": 0, "reloads": 0}


def test_a_request_that_was_lost_is_asked_of_another_server_if_there_is_one(open_pool):
    fakes = [FakeVllm(), FakeVllm()]
    with fakes[0]() as one, fakes[1]() as other, LosesCompletions(one)() as first:
        pool = open_pool([first, other])
        pool.start([Request((1, 2), 1)], SAMPLING).result()
    assert (len(fakes[0].asked), len(fakes[1].asked)) == (1, 1)
    assert pool.counts["servers_lost"] == 0


class LosesCompletions(Proxy):
    """Loses every completion, and nothing else."""

    def forward(self, method, path, headers, body):
        answer = super().forward(method, path, headers, body)
        return None if path == "/v1/completions" and json.loads(body)["max_tokens"] > 1 else answer


def test_a_proxy_that_loses_every_completion_ends_the_rollouts(open_pool):
    fake = FakeVllm()
    with fake() as url, LosesCompletions(url)() as address:
        pool = open_pool([address])
        with pytest.raises(RolloutError, match="again and again"):
            pool.start([Request((1, 2), 1)], SAMPLING).result()


def test_a_proxy_that_cuts_off_slow_answers_is_named_before_short_ones_take_their_place(open_pool, monkeypatch):
    monkeypatch.setattr(lost_answers, "SHORTEST_TIMEOUT_SECONDS", 0.2)
    fake = FakeVllm(length_of=lambda chance: chance.choice([1, 60]), seconds_a_token=0.05)
    steps = 0
    with fake() as url, Proxy(url, cuts_after=1.0)() as address:
        pool = open_pool([address])
        with pytest.raises(RolloutError) as raised:  # noqa: PT012 (the step in which it happens is not known)
            for steps in range(1, 9):  # noqa: B007
                pool.start([Request((1, 2), 1)] * 8, EngineSampling(1.0, 60, (0,))).result()
    assert steps <= lost_answers.CUTS  # each that ended has cut off an answer
    said = str(raised.value)
    assert address in said
    assert "cut off after 1" in said
    assert "proxy_read_timeout" in said
    assert "\n" not in said


def test_a_real_server_behind_a_proxy_that_loses_every_tenth_answer(vllm_server, open_pool, tmp_path):
    proxy = Proxy(vllm_server, loses=0.1)
    with proxy() as address:
        engine = open_pool([address], folder=tmp_path / "updates", timeout_seconds=240.0)
        engine.load(update_of(1))
        asked = requests(40, count=2)
        groups = engine.start(asked, SAMPLING).result()
        assert proxy.lost >= 2
        assert largest_difference(groups, asked, 1) < CLOSE
        assert engine.counts["servers_lost"] == 0
        assert engine.counts["requests_retried"] >= 1
