"""Rollouts come from real vLLM servers under the update that was asked for, each once, whatever becomes of servers."""

import functools
import os
import signal
import time
import uuid

import httpx2
import pytest
import torch

from perl.errors import PerlError
from perl.rollouts.engine import EngineSampling, Request
from perl.rollouts.sync import base_update, make_update
from perl.rollouts.vllm.servers import ServerPool
from tests.rollouts.policies import completion_log_probs, seeded_policy
from tests.servers import SERVED_NAME

TOKENS = [9, 4, 13, 5, 10, 15, 22, 31, 40, 9, 9, 4]
# No end token: so many tokens are written, and what happens to a server happens in the middle.
LONG = EngineSampling(temperature=1.0, max_completion_length=60, end_token_ids=())
LONGER = EngineSampling(temperature=1.0, max_completion_length=200, end_token_ids=())
SHORT = EngineSampling(temperature=1.0, max_completion_length=8, end_token_ids=())
ONE = Request(tuple(TOKENS), 1)
STALL_SECONDS = 8.0
CLOSE = 1e-3

policy = functools.cache(seeded_policy)


def update_of(seed, form="adapter"):
    return make_update(policy(seed), form, f"t{uuid.uuid4().hex[:8]}")


def requests(number, count=4):
    """Prompts that differ, so that a completion under the wrong prompt is found."""
    return [Request((*TOKENS[:4], 5 + i % 40, 6 + i // 40), count) for i in range(number)]


def largest_difference(groups, asked, seed, temperature=1.0):
    """Largest difference of the engine's log-probabilities from the policy's, over all completions."""
    largest = 0.0
    for group, request in zip(groups, asked, strict=True):
        assert len(group) == request.count
        for sampled in group:
            mine = completion_log_probs(policy(seed), request.prompt_ids, sampled.token_ids, temperature)
            largest = max(largest, (torch.tensor(sampled.log_probs) - mine).abs().max().item())
    return largest


def differences_on_servers(engine, seed):
    """The same for what each server writes now, by its address."""
    return {url: largest_difference([group], [ONE], seed) for url, group in engine.trial(ONE, SHORT).items()}


def written(url):
    """Tokens that a server has written."""
    lines = httpx2.get(f"{url}/metrics", trust_env=False).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:generation_tokens_total"))


def wait_until(condition, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.1)


class Heard:
    """Which requests were answered, in that order."""

    def __init__(self):
        self.positions = []

    def __call__(self, position, _group):
        self.positions.append(position)


def under_way(engine, servers, asked):
    """Rollouts that each of these servers has begun to write and none has finished; there the servers are stopped.

    On a busy machine they may finish before they are looked at; then once more.
    """
    for _ in range(10):
        before = {server.url: written(server.url) for server in servers}
        heard = Heard()
        pending = engine.start(asked, LONGER, heard)
        wait_until(lambda: all(written(url) > tokens for url, tokens in before.items()))  # noqa: B023
        for server in servers:
            server.stop()
        time.sleep(0.2)  # answers that are on their way arrive
        if heard.positions == []:
            return pending, heard
        for server in servers:
            server.cont()
        pending.result()
    raise AssertionError("they were always faster")


@pytest.fixture
def open_pool(tmp_path):
    """Opens pools with short limits, and closes them."""
    opened = []

    def open_pool(urls, **settings):
        settings = {"stall_seconds": STALL_SECONDS, "timeout_seconds": 240.0} | settings
        opened.append(ServerPool(urls, settings.pop("folder", tmp_path / "updates"), **settings))
        return opened[-1]

    yield open_pool
    for engine in opened:
        engine.close()


@pytest.mark.nightly
def test_requests_under_way_keep_their_version_which_then_leaves_the_server_and_the_disk(
    vllm_server, open_pool, tmp_path
):
    engine = open_pool([vllm_server])
    updates = [update_of(seed) for seed in (1, 2, 1, 2)]
    asked = requests(80, count=4)  # more than a server is asked for at once: some wait while the next update is loaded
    short = EngineSampling(temperature=1.0, max_completion_length=16, end_token_ids=())
    engine.load(updates[0])
    before = engine.start(asked, short)
    for update in updates[1:]:
        engine.load(update)
    after = engine.start(asked[:4], short)
    old, new = before.result(), after.result()
    assert largest_difference(old, asked, 1) < CLOSE
    assert largest_difference(new, asked[:4], 2) < CLOSE
    assert {sampled.version for group in old for sampled in group} == {updates[0].name}
    assert {sampled.version for group in new for sampled in group} == {updates[3].name}

    def served():
        text = httpx2.get(f"{vllm_server}/v1/models", trust_env=False).text
        return [update.name in text for update in updates]

    kept = [False, False, True, True]
    wait_until(lambda: served() == kept == [(tmp_path / "updates" / u.name).exists() for u in updates])
    engine.close()
    assert served() == [False] * 4
    assert list((tmp_path / "updates").iterdir()) == []


@pytest.mark.nightly
@pytest.mark.parametrize("form", ["adapter", "merged"])
def test_a_folder_that_servers_do_not_see_is_named_and_does_no_harm(lone_server, open_pool, form):
    engine = open_pool([lone_server], folder_on_servers="/mnt/elsewhere")
    with pytest.raises(PerlError, match=r"does not see /mnt/elsewhere/t.*mount it"):
        engine.load(update_of(1, form))
    engine.close()
    # A server that is told to load weights from there itself would die with its next request.
    ((sampled,),) = open_pool([lone_server]).trial(ONE, SHORT).values()
    mine = completion_log_probs(None, TOKENS, sampled.token_ids)
    torch.testing.assert_close(torch.tensor(sampled.log_probs), mine, atol=CLOSE, rtol=0)
    assert sampled.version == SERVED_NAME


@pytest.fixture(scope="module")
def two(own_servers):
    """Two servers, of which each test leaves at least what it found; see ``both``."""
    return own_servers(2)


@pytest.fixture
def both(two):
    """The two of them, started again where a test killed one."""
    for server in two:
        if server.process is None:
            server.restart(wait=False)
    return [server.wait() for server in two]


@pytest.mark.nightly
def test_a_server_that_is_killed_loses_nothing_and_serves_again_with_the_current_adapter(both, open_pool):
    alive, killed = both
    engine = open_pool([server.url for server in both])
    engine.load(update_of(1))
    engine.trial(ONE, SHORT)  # warms them up
    before = [written(server.url) for server in both]
    asked = requests(16, count=2)
    assert largest_difference(engine.start(asked, SHORT).result(), asked, 1) < CLOSE
    shares = [written(server.url) - start for server, start in zip(both, before, strict=True)]
    assert shares == [16 * 2 * 8 / 2] * 2
    pending, heard = under_way(engine, both, asked)
    killed.kill()
    alive.cont()
    groups = pending.result()
    assert largest_difference(groups, asked, 1) < CLOSE
    assert sorted(heard.positions) == list(range(16))
    assert engine.counts["servers_lost"] == 1
    assert engine.counts["requests_retried"] > 0
    engine.load(update_of(2))  # while it is down
    assert set(differences_on_servers(engine, 2)) == {alive.url}
    killed.restart()
    wait_until(lambda: len(engine.trial(ONE, SHORT)) == 2)
    assert max(differences_on_servers(engine, 2).values()) < CLOSE


@pytest.mark.nightly
@pytest.mark.parametrize("what", ["everything", "what generates"])
def test_a_server_that_hangs_is_left_until_it_goes_on(both, open_pool, what):
    alive, hung = both
    engine = open_pool([server.url for server in both])
    engine.load(update_of(1))
    asked = requests(16, count=2)
    assert hung.engine_processes()
    pending, heard = under_way(engine, both, asked)
    if what == "what generates":
        os.kill(hung.process.pid, signal.SIGCONT)  # which answers, but for completions
    alive.cont()
    try:
        groups = pending.result()
        assert sorted(heard.positions) == list(range(16))
        assert largest_difference(groups, asked, 1) < CLOSE
        assert engine.counts["servers_lost"] == 1
        assert set(differences_on_servers(engine, 1)) == {alive.url}
    finally:
        hung.cont()
    wait_until(lambda: len(engine.trial(ONE, SHORT)) == 2)
    assert max(differences_on_servers(engine, 1).values()) < CLOSE


@pytest.mark.nightly
def test_rollouts_wait_for_a_server_and_a_restart_that_nobody_saw_is_found_out(both, open_pool):
    one, other = both
    engine = open_pool([server.url for server in both])
    idle = open_pool([one.url])  # asks for nothing while servers come and go
    engine.load(update_of(1))
    idle.load(update_of(2))
    asked = requests(8, count=2)
    pending, heard = under_way(engine, both, asked)
    one.kill()
    other.kill()
    one.restart()
    assert largest_difference(pending.result(), asked, 1) < CLOSE
    assert sorted(heard.positions) == list(range(8))
    assert engine.counts["servers_lost"] == 2

    # What the new process may have written for it is asked again, once it has proven itself.
    assert largest_difference(idle.start(asked, SHORT).result(), asked, 2) < CLOSE
    assert idle.counts == {"requests_retried": len(asked), "servers_lost": 1}


@pytest.mark.nightly
def test_merged_weights_are_never_answered_for_by_a_restarted_base(both, open_pool):
    engine = open_pool([server.url for server in both])
    asked = requests(12)
    engine.load(update_of(1, "merged"))
    pending = engine.start(asked, LONG)
    engine.load(update_of(2, "merged"))  # waits for what is under way
    assert largest_difference(pending.result(), asked, 1) < CLOSE
    groups = engine.start(asked, SHORT).result()
    assert largest_difference(groups, asked, 2) < CLOSE
    assert largest_difference(groups, asked, 1) > 0.1
    both[0].restart()  # nothing is under way: nobody sees it
    groups = engine.start(asked, LONG).result()
    assert largest_difference(groups, asked, 2) < CLOSE
    assert engine.counts["servers_lost"] == 1
    assert max(differences_on_servers(engine, 2).values()) < CLOSE

    # Another run finds weights that are not its own, and gives the whole base first.
    engine.close()
    successor = open_pool([server.url for server in both])
    assert both[1].url in successor.foreign_weights()
    successor.load(base_update(policy(1), f"t{uuid.uuid4().hex[:8]}"))
    assert successor.foreign_weights() == []
    successor.load(update_of(1))
    assert max(differences_on_servers(successor, 1).values()) < CLOSE
