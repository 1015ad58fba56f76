"""Many servers, of which some are slow: requests are spread, updates need most of them, and nobody answers stale."""

import asyncio
import contextlib
import json
import subprocess
import sys
import time

import pytest
import torch

from perl.errors import PerlError
from perl.recipe.rollout_section import RolloutSection
from perl.rollouts.engine import EngineSampling, Proof, Request, Update
from perl.rollouts.open_engine import EngineSettings, open_engine
from perl.rollouts.vllm import liveness, quorum
from perl.rollouts.vllm.connections import Connections
from perl.rollouts.vllm.dispatch import Place
from perl.rollouts.vllm.servers import ServerPool
from tests.rollouts.fake_servers import TOKEN, fake_servers, log_prob_of

SAMPLING = EngineSampling(temperature=1.0, max_completion_length=4, end_token_ids=())
HANGS = 1000.0


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
    proof = Proof((1, 2, 3), ({TOKEN: log_prob_of(name)},) * 3, 1.0, 2e-3)
    return Update(name, form, {"x": torch.zeros(1)}, proof=proof)


def begun(engine, form="adapter"):
    """A pool that has given all servers an update, and compared them, as a run does before its first step."""
    engine.check(8, form)
    engine.load(update("v0", form))
    engine.trial(Request((1, 2), 1), SAMPLING)
    assert engine.unproven is False
    return engine


def reported(groups):
    """The log-probabilities of all tokens, each once, and the versions that they are said to be from."""
    completions = [sampled for group in groups for sampled in group]
    return {p for sampled in completions for p in sampled.log_probs}, {sampled.version for sampled in completions}


def sampled_from(engine, name, number=12):
    """How many were answered; every one by this version."""
    groups = engine.start(requests(number), SAMPLING).result()
    log_probs, versions = reported(groups)
    assert max(abs(log_prob - log_prob_of(name)) for log_prob in log_probs) < 1e-9
    assert versions == {name}
    return len(groups)


def until(condition):
    """Waits for it."""
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.05)


@pytest.mark.parametrize(("ranks", "per_rank", "count"), [(8, 4, 16), (3, 1, 5), (4, 5, 6), (16, 3, 4)])
def test_processes_that_know_nothing_of_each_other_load_servers_alike(opened, ranks, per_rank, count):
    servers, pool = opened
    fakes = servers(count, answer_seconds=HANGS)
    group = 8
    pools = [pool(fakes.urls, None, main=not rank, place=Place(rank, ranks)) for rank in range(ranks)]
    started = [engine.start(requests(per_rank, group), SAMPLING) for engine in pools]
    until(lambda: sum(one["in_hand"] for one in fakes.stats()) == ranks * per_rank * group)
    in_hand = [one["in_hand"] for one in fakes.stats()]
    assert max(in_hand) - min(in_hand) <= group
    assert sum(in_hand) / count == pytest.approx(ranks * per_rank * group / count)
    assert max(in_hand) == -(-ranks * per_rank // count) * group  # the mean, in whole groups
    fakes.set(answer_seconds=0.0)
    assert [len(rollouts.result()) for rollouts in started] == [per_rank] * ranks


@pytest.mark.parametrize("form", ["adapter", "merged"])
def test_an_update_does_not_wait_for_a_slow_server_which_answers_once_it_has_proven_itself(opened, form):
    servers, pool = opened
    fakes = servers(3)
    engine = begun(pool(fakes.urls), form)
    fakes.set(1, load_seconds=HANGS)
    fakes.reset()
    engine.load(update("v1", form))
    assert sampled_from(engine, "v1") == 12
    slow = fakes.stats()[1]
    assert (slow["completions"], slow["proofs"]) == (0, 0)
    assert engine.counts["servers_late"] == 1
    fakes.set(1, load_seconds=0.0)
    until(lambda: fakes.stats()[1]["proofs"] == 1)
    until(lambda: sampled_from(engine, "v1") and fakes.stats()[1]["completions"] > 0)
    assert fakes.stats()[1]["loads"]["v1"] == 1
    assert engine.counts == {"requests_retried": 0, "servers_lost": 0, "servers_late": 1, "reloads": 0}


def test_a_server_that_is_slow_for_several_updates_goes_on_with_the_newest(opened):
    servers, pool = opened
    fakes = servers(4)
    engine = begun(pool(fakes.urls))
    fakes.set(0, load_seconds=HANGS)
    for name in ("v1", "v2", "v3"):
        engine.load(update(name))
        assert sampled_from(engine, name) == 12
    assert fakes.stats()[0]["loads"] == {"v0": 1, "v1": 1}
    fakes.set(0, load_seconds=0.0)
    before = fakes.stats()[0]["completions"]
    until(lambda: sampled_from(engine, "v3") and fakes.stats()[0]["completions"] > before)
    assert fakes.stats()[0]["loads"] == {"v0": 1, "v1": 1, "v3": 1}
    assert engine.counts["servers_late"] == 3


def test_the_folder_that_a_slow_server_reads_stays_while_newer_ones_come_and_go(opened, monkeypatch, tmp_path):
    monkeypatch.setattr(quorum, "LEAST_SECONDS", 4.0)  # in which the other two answer, whatever else this machine does
    servers, pool = opened
    fakes = servers(3)
    engine = begun(pool(fakes.urls))
    fakes.set(0, load_seconds=HANGS)
    for number in range(1, 8):
        engine.load(update(f"v{number}"))

    def kept():
        return [number for number in range(8) if (tmp_path / "a" / f"v{number}").exists()]

    until(lambda: kept() == [1, 5, 6, 7])  # of the others the last three
    fakes.set(0, load_seconds=0.0)
    until(lambda: sampled_from(engine, "v7") and fakes.stats()[0]["loads"]["v1"] + fakes.stats()[0]["loads"]["v7"] == 2)
    engine.load(update("v8"))
    until(lambda: kept() == [6, 7])


@pytest.mark.parametrize("fault", [{"refuses_loads": True}, {"wrong": 0.3}])
def test_a_slow_server_that_fails_in_the_end_is_lost_and_nothing_of_it_was_used(opened, fault):
    servers, pool = opened
    fakes = servers(3)
    engine = begun(pool(fakes.urls))
    fakes.set(2, load_seconds=HANGS, **fault)
    fakes.reset()
    engine.load(update("v1"))
    assert engine.counts["servers_lost"] == 0
    fakes.set(2, load_seconds=0.0)
    until(lambda: engine.counts["servers_lost"] == 1)
    assert sampled_from(engine, "v1") == 12
    assert fakes.stats()[2]["completions"] == 0
    fakes.set(2, refuses_loads=False, wrong=0.0)
    until(lambda: sampled_from(engine, "v1") and fakes.stats()[2]["completions"] > 0)
    assert engine.counts["servers_lost"] == 1


@pytest.mark.parametrize("form", ["adapter", "merged"])
def test_another_process_waits_for_what_the_main_process_is_still_loading(opened, form):
    servers, pool = opened
    fakes = servers(3)
    main, other = begun(pool(fakes.urls), form), pool(fakes.urls, main=False)
    other.check(8, form)
    other.load(Update("v0", form))
    assert sampled_from(other, "v0") == 12
    fakes.set(1, load_seconds=HANGS)
    fakes.reset()
    main.load(update("v1", form))
    other.load(Update("v1", form))
    assert sampled_from(other, "v1") == 12
    slow = fakes.stats()[1]
    assert (slow["completions"], slow["loads"]) == (0, {"v1": 1})  # of the main process
    assert (other.counts["servers_late"], other.counts["servers_lost"]) == (1, 0)
    fakes.set(1, load_seconds=0.0)
    until(lambda: sampled_from(other, "v1") and fakes.stats()[1]["completions"] > 0)
    assert fakes.stats()[1]["loads"] == {"v1": 1}
    assert other.counts == {"requests_retried": 0, "servers_lost": 0, "servers_late": 1, "reloads": 0}


def test_what_the_main_process_never_loads_another_one_loads_in_the_end(opened, monkeypatch):
    monkeypatch.setitem(liveness._AWAIT_SECONDS, "adapter", 0.5)
    servers, pool = opened
    fakes = servers(2)
    main, other = begun(pool(fakes.urls[:1])), pool(fakes.urls, main=False)
    main.load(update("v1"))
    other.load(Update("v1", "adapter"))
    until(lambda: sampled_from(other, "v1") and fakes.stats()[1]["completions"] > 0)
    assert [one["loads"]["v1"] for one in fakes.stats()] == [1, 1]


def test_a_trial_does_not_wait_for_a_server_that_hangs_which_is_compared_before_it_counts_again(opened):
    servers, pool = opened
    fakes = servers(4)
    engine = begun(pool(fakes.urls))
    engine.load(update("v1"))
    fakes.set(1, answer_seconds=HANGS)
    fakes.reset()
    found = engine.trial(Request((1, 2), 2), SAMPLING)
    assert sorted(found) == sorted(url for i, url in enumerate(fakes.urls) if i != 1)
    log_probs, versions = reported(found.values())
    assert list(log_probs) == pytest.approx([log_prob_of("v1")])
    assert versions == {"v1"}
    assert engine.counts["servers_late"] == 1
    until(lambda: engine.unproven)  # it is back, with its proof, and waits for the next trial
    assert fakes.stats()[1]["proofs"] == 1
    fakes.set(1, answer_seconds=0.0)
    engine.load(update("v2"))
    assert len(engine.trial(Request((1, 2), 2), SAMPLING)) == 4
    assert engine.unproven is False


def test_of_the_first_update_and_the_first_trial_every_server_has_to_show_that_it_is_fit(opened, monkeypatch):
    monkeypatch.setattr(quorum, "LEAST_SECONDS", 0.1)
    servers, pool = opened
    fakes = servers(5)
    fakes.set(4, load_seconds=1.0, answer_seconds=1.0)  # more than the patience with a late one
    engine = pool(fakes.urls)
    engine.load(update("v0"))
    assert len(engine.trial(Request((1, 2), 1), SAMPLING)) == 5
    assert engine.counts["servers_late"] == 0
    fakes.set(4, refuses_loads=True)
    with pytest.raises(PerlError, match=f"{fakes.urls[4]} cannot load adapter w0"):
        pool(fakes.urls, "b").load(update("w0"))


def test_a_server_with_data_parallel_replicas_is_refused_for_updates_and_not_for_the_base(opened):
    servers, pool = opened
    fakes = servers(2)
    fakes.set(1, engines=4)
    engine = pool(fakes.urls)
    assert [facts["replicas"] for facts in engine.check(8)] == [1, 4]
    refused = rf"{fakes.urls[1]} has 4 data-parallel replicas.*--data-parallel-size"
    for form in ("adapter", "merged"):
        with pytest.raises(PerlError, match=refused) as said:
            engine.check(8, form)
        assert "\n" not in str(said.value)
    with pytest.raises(PerlError, match="4 data-parallel replicas"):
        engine.load(update("v0"))
    assert fakes.stats()[1]["loads"] == {}


IN_HAND, OPEN_FILES = 300, 128
ASKS_MUCH = f"""
import json, os, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, ({OPEN_FILES}, {OPEN_FILES}))
from perl.rollouts.engine import EngineSampling, Request
from perl.rollouts.vllm.servers import ServerPool
pool = ServerPool(json.loads(sys.argv[1]), None)
rollouts = pool.start([Request((1, 2 + i), 2) for i in range({IN_HAND})], EngineSampling(1.0, 4, ()))
print(len(rollouts.result()), pool.counts["servers_lost"], pool.counts["requests_retried"])
pool.close()
"""


def test_a_process_with_few_open_files_asks_for_more_than_these_and_all_is_answered(opened):
    servers, _ = opened
    fakes = servers(60, answer_seconds=0.05)
    command = [sys.executable, "-c", ASKS_MUCH, json.dumps(fakes.urls)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert list(map(int, done.stdout.split())) == [IN_HAND, 0, 0]
    assert OPEN_FILES / 4 < fakes.peak_connections() <= OPEN_FILES / 2
    assert sum(one["completions"] for one in fakes.stats()) == 2 * IN_HAND


@pytest.mark.parametrize(("open_files", "completions", "others"), [(1024, 384, 128), (10**6, 3072, 1024), (8, 12, 4)])
def test_half_of_the_open_files_are_for_connections(open_files, completions, others):
    found = Connections(open_files)
    assert found.completions == completions
    assert found.one(5.0)._value + found.one(None)._value == others


@pytest.mark.parametrize(
    ("seconds", "failing", "late"),
    [
        ([0.0] * 5, (), 0),
        ([0.0, 0.0, 0.0, 60.0, 60.0], (), 2),
        ([0.0, 0.0, 0.4, 0.4], (), 0),  # half is not more than half: all are waited for
        ([0.0, 0.4], (), 0),
        ([0.0, 0.0, 0.0, 0.0, 60.0], (0, 1), 1),
        ([0.0, 0.0, 0.0, 0.4], (0, 1), 0),  # of two that do not fail both
    ],
)
def test_more_than_half_of_those_that_do_not_fail_are_enough(monkeypatch, seconds, failing, late):
    monkeypatch.setattr(quorum, "LEAST_SECONDS", 0.1)

    async def wait(index):
        await asyncio.sleep(seconds[index])
        return index not in failing

    async def left():
        tasks = [asyncio.create_task(wait(index)) for index in range(len(seconds))]
        pending = await quorum.enough(tasks, lambda task: task.result())
        for task in pending:
            task.cancel()
        return len(pending)

    assert asyncio.run(left()) == late


def test_an_engine_begins_where_the_settings_say_that_its_process_is(opened, tmp_path):
    servers, _ = opened
    fakes = servers(8, answer_seconds=HANGS)
    how = RolloutSection(backend="vllm-server", servers=fakes.urls)
    for rank in (3, 1):
        settings = EngineSettings("perl-00000000", tmp_path, main=False, rank=rank, ranks=4)
        with contextlib.closing(open_engine(how, None, torch.nn.Module(), settings)) as engine:
            engine.start(requests(2, 3), SAMPLING)
            until(lambda: sum(one["in_hand"] for one in fakes.stats()) == 6)
            in_hand = [one["in_hand"] for one in fakes.stats()]
            assert in_hand == [3 * (number // 2 == rank) for number in range(8)]
        until(lambda: sum(one["in_hand"] for one in fakes.stats()) == 0)
