"""A server is believed only as the one that was proven, and what is lost on the way costs that answer alone."""

import contextlib
import re
import time

import pytest
import torch

from perl.errors import BrokenPromiseError, PerlError, RolloutError
from perl.rollouts.engine import EngineSampling, ExpectedLogProbs, Request, Update
from perl.rollouts.vllm import members
from perl.rollouts.vllm.servers import ServerPool
from tests.ports import free_port
from tests.rollouts.loopback import ADAPTED, BASE, MERGED, TOKEN, WRONG_BASE, FakeVllm, Proxy

SAMPLING = EngineSampling(temperature=1.0, max_completion_length=4, end_token_ids=())
REQUESTS = [Request((1, i), 2) for i in range(12)]
DEAD = "perl-00000000"


@pytest.fixture
def started(tmp_path):
    """Starts servers, and pools on them; all end with the test."""
    with contextlib.ExitStack() as stack:

        def start(*fakes, **settings):
            urls = [stack.enter_context(fake()) for fake in fakes]
            return urls, lambda **more: pool(urls, **settings, **more)

        def pool(urls, name="a", **settings):
            engine = ServerPool(urls, tmp_path / name, **{"timeout_seconds": 20.0, **settings})
            stack.callback(engine.close)
            return engine

        yield start


def update(name="a-v1", form="adapter"):
    expected = BASE + (ADAPTED if form == "adapter" else MERGED)
    proof = ExpectedLogProbs((1, 2, 3), ({TOKEN: expected},) * 3, 1.0, 2e-3)
    return Update(name, form, {"x": torch.zeros(1)}, proof=proof)


def reported(groups):
    """The one log-probability that all tokens were reported with."""
    (log_prob,) = {log_prob for group in groups for sampled in group for log_prob in sampled.log_probs}
    return log_prob


def restart(server):
    server.restart(wrong_base=True)


def other_adapter(server):
    server.adapters = {name: "/foreign/adapter" for name in server.adapters}


def foreign_weights(server):
    server.label = server.merged = f"/elsewhere/{DEAD}-v3"


def other_model(server):
    server.wrong_base, server.root = True, "/models/other"


@pytest.mark.parametrize("fault", [restart, other_adapter, foreign_weights, other_model])
@pytest.mark.parametrize("when", ["idle", "asked"])
def test_a_server_that_becomes_another_one_is_left_and_nothing_it_wrote_is_used(started, fault, when, caplog):
    good, bad = FakeVllm(), FakeVllm()
    urls, pool = started(good, bad)
    engine = pool()
    engine.load(update())
    happened = []

    def asked():
        if not happened:
            happened.append(fault(bad))

    if when == "idle":
        asked()
    else:
        bad.happens = asked
    for number in (2, 3):
        assert reported(engine.start(REQUESTS, SAMPLING).result()) == BASE + ADAPTED
        engine.load(update(f"a-v{number}"))
    assert happened
    assert engine.counts["servers_lost"] == 1
    assert engine.counts["requests_retried"] > 0
    assert urls[1] in caplog.text


@pytest.mark.parametrize(("fault", "nats"), [(restart, -WRONG_BASE), (other_adapter, -ADAPTED)])
def test_the_only_server_ends_the_rollouts_and_says_by_how_much_it_is_wrong(started, fault, nats):
    server = FakeVllm()
    _, pool = started(server)
    engine = pool()
    engine.load(update())
    fault(server)
    with pytest.raises(BrokenPromiseError, match=r"does not answer like the policy.*nats.*restarted") as raised:
        engine.start(REQUESTS, SAMPLING).result()
    (said,) = re.findall(r"(\S+) nats", str(raised.value))
    assert float(said) == pytest.approx(nats, rel=0.06)  # of two digits


def test_a_server_that_was_restarted_as_it_was_is_proven_before_it_answers(started):
    server = FakeVllm()
    _, pool = started(server)
    engine = pool()
    engine.load(update())
    for number in range(2, 5):
        answered, proofs = len(server.asked), server.proofs
        server.restart()
        engine.load(update(f"a-v{number}"))  # notices it before anything is asked
        assert reported(engine.start(REQUESTS, SAMPLING).result()) == BASE + ADAPTED
        assert (server.proofs, len(server.asked)) == (proofs + 1, answered + len(REQUESTS))
    assert engine.counts["servers_lost"] == 3


def test_a_server_that_failed_a_comparison_waits_for_another_process(started):
    good, bad = FakeVllm(), FakeVllm()
    urls, pool = started(good, bad)
    engine = pool()
    engine.load(update())
    engine.drop({urls[1]: "writes nonsense"})
    time.sleep(0.5)
    assert reported(engine.start(REQUESTS, SAMPLING).result()) == BASE + ADAPTED
    assert (len(good.asked), len(bad.asked), bad.proofs) == (len(REQUESTS), 0, 0)
    bad.restart()
    end = time.monotonic() + 20
    while not bad.asked:
        engine.start(REQUESTS, SAMPLING).result()
        assert time.monotonic() < end
    assert bad.proofs == 1


def test_merged_weights_are_refused_where_others_serve_adapters_and_so_is_the_base_on_a_cpu(started):
    server, on_cpu = FakeVllm(), FakeVllm(on_cpu=True)
    server.adapters["someone"] = on_cpu.adapters["someone"] = "/foreign/adapter"
    _, pool = started(server)
    engine = pool()
    engine.check(8, "merged")
    with pytest.raises(PerlError, match=r"serves adapters of others \(someone\).*servers that no other run uses"):
        engine.foreign_weights()
    engine.check(8)
    assert engine.foreign_weights() == []
    assert reported(engine.start(REQUESTS, SAMPLING).result()) == BASE

    _, pool = started(on_cpu)
    engine = pool()
    for form, act in ((None, engine.foreign_weights), ("adapter", lambda: engine.trial(REQUESTS[0], SAMPLING))):
        engine.check(8, form)
        with pytest.raises(PerlError, match="computes the base wrongly beside requests for adapters"):
            act()
    assert engine.foreign_weights() == []  # adapters do not mind


@pytest.mark.parametrize("form", ["merged", "adapter"])
def test_merged_weights_of_a_run_that_lives_are_refused_and_those_of_one_that_has_ended_give_way(started, form):
    """The label on the server names the folder, where each run has left its mark; closing it says so at once."""
    server = FakeVllm()
    urls, pool = started(server)
    first, second = pool(), pool(name="b")
    first.take_folder("perl-00000001")
    second.take_folder("perl-00000002")
    first.check(8, "merged")
    first.load(update("perl-00000001-v1", "merged"))
    second.check(8, form)
    with pytest.raises(PerlError, match=r"has the merged weights of another run \(\S+perl-00000001-v1\).*wait until"):
        second.foreign_weights()
    assert reported(first.start(REQUESTS, SAMPLING).result()) == BASE + MERGED
    first.close()
    assert second.foreign_weights() == urls  # what is left needs the base, at once
    second.load(Update("perl-00000002-base", "merged", {"x": torch.zeros(1)}))
    assert second.foreign_weights() == []
    assert reported(second.start(REQUESTS, SAMPLING).result()) == BASE


@pytest.mark.parametrize("status", [None, 502])
def test_an_answer_that_is_lost_is_asked_for_again_with_its_seed_and_costs_no_server(started, status, monkeypatch):
    monkeypatch.setattr("perl.rollouts.vllm.dispatch.DYING_SECONDS", 0.0)
    fake = FakeVllm(length_of=lambda chance: chance.randrange(1, 9))
    asked = [Request((1, 2), 2, seed=10 * number) for number in range(100)]
    (url,), pool = started(fake)
    undisturbed = pool().start(asked, SAMPLING).result()
    proxies = [Proxy(url, loses=0.1, status=status) for _ in range(2)]
    _, through = started(*proxies)
    engine = through(name="b")
    found = engine.start(asked, SAMPLING).result()
    lost = sum(proxy.lost for proxy in proxies)
    assert [[s.token_ids for s in group] for group in found] == [[s.token_ids for s in group] for group in undisturbed]
    assert lost >= 5
    assert len(fake.asked) == 2 * len(asked) + lost
    assert engine.counts == {"requests_retried": lost, "servers_lost": 0}


def test_a_proxy_that_cuts_off_slow_answers_is_named_before_short_ones_take_their_place(started, monkeypatch):
    monkeypatch.setattr(members, "_SHORTEST_TIMEOUT_SECONDS", 0.2)
    fake = FakeVllm(length_of=lambda chance: chance.choice([1, 60]), seconds_a_token=0.05)
    (url,), _ = started(fake)
    (address,), pool = started(Proxy(url, cuts_after=1.0))
    asked = [Request((1, 2), 1)] * 64
    with pytest.raises(RolloutError, match=rf"{address} .*cut off after 1.*proxy_read_timeout"):
        pool().start(asked, EngineSampling(1.0, 60, (0,))).result()


def test_without_a_server_it_ends_after_the_time_that_was_given_and_closing_waits_for_none(started, tmp_path):
    closed = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(RolloutError, match=f"no vLLM server answers.*{closed}.*the same command goes on"):
        ServerPool([closed], tmp_path, timeout_seconds=1.0)
    fake = FakeVllm()
    _, pool = started(fake)
    engine = pool(timeout_seconds=1.0)
    engine.load(update())
    fake.answer = lambda *_: (500, {})
    with pytest.raises(RolloutError, match="no vLLM server answers, for 1 seconds"):
        engine.start(REQUESTS, SAMPLING).result()
    engine.close()
    engine.close()
    with pytest.raises(RolloutError, match="closed"):
        engine.start(REQUESTS, SAMPLING)
