"""A server is believed only as the one that was proven: whatever becomes another one proves itself, or is left."""

import contextlib
import re
import time

import pytest
import torch

from perl.errors import BrokenPromiseError, PerlError, RolloutError
from perl.rollouts.engine import EngineSampling, Proof, Request, Update
from perl.rollouts.vllm import liveness, weight_labels
from perl.rollouts.vllm.servers import ServerPool
from tests.rollouts.fake_vllm import ADAPTED, BASE, MERGED, TOKEN, WRONG_BASE, FakeVllm, serving

SAMPLING = EngineSampling(temperature=1.0, max_completion_length=4, end_token_ids=())
REQUESTS = [Request((1, i), 2) for i in range(12)]


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(liveness, "RENEW_SECONDS", 0.05)
    monkeypatch.setattr(weight_labels, "RENEW_SECONDS", 0.05)
    monkeypatch.setattr(weight_labels, "LEASE_SECONDS", 1.0)


@pytest.fixture
def started(tmp_path):
    """Starts servers, and pools on them; all end with the test."""
    with contextlib.ExitStack() as stack:

        def start(*fakes, **settings):
            urls = [stack.enter_context(serving(fake)) for fake in fakes]
            return urls, lambda **more: pool(urls, **settings, **more)

        def pool(urls, name="a", **settings):
            engine = ServerPool(urls, tmp_path / name, **{"timeout_seconds": 20.0, **settings})
            stack.callback(engine.close)
            return engine

        yield start


def update(name="a-v1", form="adapter"):
    expected = BASE + (ADAPTED if form == "adapter" else MERGED)
    proof = Proof((1, 2, 3), ({TOKEN: expected},) * 3, 1.0, 2e-3)
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
    server.label, server.merged = "perl-00000000-v3~7", "perl-00000000-v3"


def other_model(server):
    server.wrong_base, server.root = True, "/models/other"


FAULTS = [restart, other_adapter, foreign_weights, other_model]


@pytest.mark.parametrize("fault", FAULTS)
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
        bad.asked = asked
    groups = engine.start(REQUESTS, SAMPLING).result()
    assert happened
    assert reported(groups) == BASE + ADAPTED
    assert engine.counts["servers_lost"] == 1
    assert engine.counts["requests_retried"] > 0
    engine.load(update("a-v2"))
    assert reported(engine.start(REQUESTS, SAMPLING).result()) == BASE + ADAPTED
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
    for _ in range(3):
        answered, proofs = server.answered, server.proofs
        server.restart()
        engine.load(update(f"a-v{answered}"))  # notices it before anything is asked
        assert server.proofs == proofs + 1
        assert reported(engine.start(REQUESTS, SAMPLING).result()) == BASE + ADAPTED
        assert server.answered == answered + len(REQUESTS)
    assert engine.counts["servers_lost"] == 3


def test_a_server_that_failed_a_comparison_waits_for_another_process(started):
    good, bad = FakeVllm(), FakeVllm()
    urls, pool = started(good, bad)
    engine = pool()
    engine.load(update())
    engine.drop({urls[1]: "writes nonsense"})
    time.sleep(0.5)
    assert reported(engine.start(REQUESTS, SAMPLING).result()) == BASE + ADAPTED
    assert (good.answered, bad.answered) == (len(REQUESTS), 0)
    bad.restart()
    end = time.monotonic() + 20
    while engine.counts["reloads"] == 0:
        assert time.monotonic() < end
        time.sleep(0.05)
    time.sleep(0.3)
    engine.start(REQUESTS, SAMPLING).result()
    assert bad.answered > 0


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
    engine.check(8)
    with pytest.raises(PerlError, match="computes the base wrongly beside requests for adapters"):
        engine.foreign_weights()
    engine.check(8, "adapter")
    assert engine.foreign_weights() == []  # adapters do not mind
    with pytest.raises(PerlError, match="computes the base wrongly beside requests for adapters"):
        engine.trial(REQUESTS[0], SAMPLING)


def test_an_adapter_that_appears_beside_merged_weights_on_a_cpu_throws_their_answers_away(started):
    alone, shared = FakeVllm(on_cpu=True), FakeVllm(on_cpu=True)
    _, pool = started(alone, shared)
    engine = pool()
    engine.check(8, "merged")
    engine.load(update("a-v1", "merged"))
    shared.asked = lambda: shared.adapters.update(someone="/foreign/adapter")
    assert reported(engine.start(REQUESTS, SAMPLING).result()) == BASE + MERGED
    assert engine.counts["servers_lost"] == 1


@pytest.mark.parametrize("form", ["merged", "adapter"])
def test_a_run_that_finds_merged_weights_of_one_that_lives_is_refused(started, form):
    server = FakeVllm()
    _, pool = started(server)
    first, second = pool(), pool(name="b")
    first.check(8, "merged")
    first.load(update("a-v1", "merged"))
    second.check(8, form)
    with pytest.raises(PerlError, match=r"has the merged weights of another run \(a-v1\).*wait until") as refused:
        second.foreign_weights()
    assert "\n" not in str(refused.value)
    assert reported(first.start(REQUESTS, SAMPLING).result()) == BASE + MERGED
    assert first.counts["servers_lost"] == 0
    first.close()
    assert len(second.foreign_weights()) == 1  # what is left needs the base, at once
    second.load(Update("b-base", "merged", {"x": torch.zeros(1)}))
    assert second.foreign_weights() == []


def test_the_lock_of_a_run_that_was_killed_ends(started):
    server = FakeVllm()
    foreign_weights(server)
    urls, pool = started(server)
    engine = pool()
    began = time.monotonic()
    assert engine.foreign_weights() == urls
    assert time.monotonic() - began > weight_labels.LEASE_SECONDS / 2


def test_of_two_runs_that_load_at_once_none_answers_with_the_others_weights(started):
    server = FakeVllm()
    _, pool = started(server)
    engines = [pool(name=name) for name in ("a", "b")]
    for engine in engines:
        engine.check(8, "merged")
    post, seen = server.post, []

    def post_and_claim(path, body):
        found = post(path, body)
        if path == "/collective_rpc" and not seen:  # while one loads the other says that it does
            seen.append(server.label)
            post("/update_weight_version", {"new_version": "perl-00000000-v1-loading~1"})
        return found

    server.post = post_and_claim
    with pytest.raises(RolloutError, match="got weights from someone else"):
        engines[0].load(update("a-v1", "merged"))
    assert seen[0].startswith("a-v1-loading")  # no answer of meanwhile is taken for one of the old weights


def test_a_run_that_was_stopped_while_it_renewed_its_label_loads_its_weights_again(started, caplog):
    server = FakeVllm()
    _, pool = started(server)
    engine = pool()
    engine.load(update("a-v1", "merged"))
    post, slow = server.post, []

    def late(path, body):
        if path == "/update_weight_version" and not slow:
            slow.append(path)
            time.sleep(weight_labels.LEASE_SECONDS)
            server.merged = "perl-00000000-v1"  # of another run, which has come and gone
        return post(path, body)

    server.post = late
    end = time.monotonic() + 20
    while not engine.counts["reloads"]:
        assert time.monotonic() < end
        time.sleep(0.02)
    assert "could not say whose its weights are" in caplog.text
    assert server.merged == "a-v1"
    assert reported(engine.start(REQUESTS, SAMPLING).result()) == BASE + MERGED
