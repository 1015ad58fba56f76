"""Many servers, of which some are slow or fail: requests are spread, updates go on, and nobody answers stale."""

import contextlib
import time

import pytest
import torch
from fake_servers import TOKEN, fake_servers, log_prob_of

from perl.errors import PerlError
from perl.rollouts.engine import EngineSampling, ExpectedLogProbs, Request, Update
from perl.rollouts.vllm import liveness, transport
from perl.rollouts.vllm.servers import ServerPool

SAMPLING = EngineSampling(temperature=1.0, max_completion_length=4, end_token_ids=())
HANGS = 1000.0


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    monkeypatch.setattr(liveness, "LEAST_SECONDS", 2.0)


@pytest.fixture
def opened(tmp_path):
    """Opens servers and pools; all end with the test."""
    with contextlib.ExitStack() as stack:

        def servers(count, **behaviour):
            return stack.enter_context(fake_servers(count, **behaviour))

        def pool(urls, folder="a", **settings):
            engine = ServerPool(urls, folder and tmp_path / folder, **{"timeout_seconds": 60.0, **settings})
            stack.callback(engine.close)
            return engine

        yield servers, pool


def requests(number, count=2):
    return [Request((1, 2 + i), count) for i in range(number)]


def update(name, form="adapter"):
    proof = ExpectedLogProbs((1, 2, 3), ({TOKEN: log_prob_of(name)},) * 3, 1.0, 2e-3)
    return Update(name, form, {"x": torch.zeros(1)}, proof=proof)


def begun(engine, form="adapter"):
    """A pool that has given all servers an update, and compared them, as a run does before its first step."""
    engine.check(8, form)
    engine.load(update("v0", form))
    engine.trial(Request((1, 2), 1), SAMPLING)
    return engine


def sampled_from(engine, name, number=12):
    """How many were answered; every one by this version."""
    groups = engine.start(requests(number), SAMPLING).result()
    completions = [sampled for group in groups for sampled in group]
    assert all(p == pytest.approx(log_prob_of(name)) for sampled in completions for p in sampled.log_probs)
    assert {sampled.version for sampled in completions} == {name}
    return len(groups)


def until(condition):
    """Waits for it."""
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.05)


def test_servers_are_loaded_alike(opened):
    servers, pool = opened
    fakes = servers(5, answer_seconds=HANGS)
    started = pool(fakes.urls, None).start(requests(12, 8), SAMPLING)
    until(lambda: sum(one["in_hand"] for one in fakes.stats()) == 12 * 8)
    in_hand = [one["in_hand"] for one in fakes.stats()]
    assert sorted(in_hand) == [16, 16, 16, 24, 24]
    fakes.set(answer_seconds=0.0)
    assert len(started.result()) == 12


@pytest.mark.parametrize("form", ["adapter", "merged"])
def test_a_server_that_does_not_follow_an_update_in_time_is_dropped_and_proves_itself(opened, form):
    servers, pool = opened
    fakes = servers(3)
    engine = begun(pool(fakes.urls), form)
    fakes.set(1, load_seconds=HANGS)
    fakes.reset()
    for name in ("v1", "v2"):
        engine.load(update(name, form))
        assert sampled_from(engine, name) == 12
    slow = fakes.stats()[1]
    assert (slow["completions"], slow["proofs"]) == (0, 0)
    fakes.set(1, load_seconds=0.0)
    until(lambda: sampled_from(engine, "v2") and fakes.stats()[1]["completions"] > 0)
    assert fakes.stats()[1]["proofs"] >= 1  # of each version that it has come to have
    assert engine.counts == {"requests_retried": 0, "servers_lost": 1}


def test_a_parity_check_goes_on_without_a_server_that_hangs(opened):
    servers, pool = opened
    fakes = servers(3)
    engine = begun(pool(fakes.urls))
    fakes.set(1, answer_seconds=HANGS)
    found = engine.trial(Request((1, 2), 2), SAMPLING)
    assert sorted(found) == sorted([fakes.urls[0], fakes.urls[2]])
    assert engine.counts["servers_lost"] == 1
    fakes.set(1, answer_seconds=0.0)
    until(lambda: len(engine.trial(Request((1, 2), 2), SAMPLING)) == 3)


def test_of_the_first_update_every_server_has_to_show_that_it_is_fit(opened, monkeypatch):
    monkeypatch.setattr(liveness, "LEAST_SECONDS", 0.1)
    servers, pool = opened
    fakes = servers(3)
    fakes.set(2, load_seconds=1.0)
    engine = pool(fakes.urls)
    engine.load(update("v0"))
    assert engine.counts["servers_lost"] == 0
    fakes.set(2, refuses_loads=True)
    with pytest.raises(PerlError, match=f"{fakes.urls[2]} cannot load adapter w0"):
        pool(fakes.urls, "b").load(update("w0"))


def test_servers_forget_all_that_was_loaded_when_a_pool_is_closed_right_after_an_update(opened, monkeypatch):
    monkeypatch.setattr(transport, "_OF_FILES", 0.0)  # four connections at a time
    servers, pool = opened
    fakes = servers(32)
    engine = pool(fakes.urls)
    for name in ("v0", "v1", "v2"):
        engine.load(update(name))
    engine.close()
    assert [one["adapters"] for one in fakes.stats()] == [[]] * 32


def test_a_server_with_data_parallel_replicas_is_refused_for_updates_and_not_for_the_base(opened):
    servers, pool = opened
    fakes = servers(2)
    fakes.set(1, engines=4)
    engine = pool(fakes.urls)
    assert [facts["replicas"] for facts in engine.check(8)] == [1, 4]
    with pytest.raises(PerlError, match=rf"{fakes.urls[1]} has 4 data-parallel replicas.*--data-parallel-size"):
        engine.check(8, "adapter")
