"""Rollouts come from real vLLM servers under the update that was asked for, each once, whatever becomes of servers."""

import collections
import functools
import os
import signal
import socket
import time
import uuid

import httpx2
import pytest
import torch

from perl.errors import PerlError, RolloutError
from perl.rollouts.engine import EngineSampling, Request, Update
from perl.rollouts.sync import base_update, make_update
from perl.rollouts.vllm.servers import ServerPool
from tests.ports import free_port
from tests.rollouts.policies import completion_log_probs, policy_of
from tests.servers import SERVED_NAME

TOKENS = [9, 4, 13, 5, 10, 15, 22, 31, 40, 9, 9, 4]
# No end token: so many tokens are written, and what happens to a server happens in the middle.
LONG = EngineSampling(temperature=1.0, max_completion_length=60, end_token_ids=())
LONGER = EngineSampling(temperature=1.0, max_completion_length=200, end_token_ids=())
SHORT = EngineSampling(temperature=1.0, max_completion_length=8, end_token_ids=())
ONE = Request(tuple(TOKENS), 1)
STALL_SECONDS = 8.0
CLOSE = 1e-3

policy = functools.cache(policy_of)


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


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_completions_come_with_the_policys_log_probabilities(vllm_server, open_pool, temperature):
    engine = open_pool([vllm_server])
    engine.load(update_of(1))
    asked = requests(5, count=3)
    heard = Heard()
    sampling = EngineSampling(temperature=temperature, max_completion_length=20, end_token_ids=())
    groups = engine.start(asked, sampling, heard).result()
    assert largest_difference(groups, asked, 1, temperature) < CLOSE
    assert largest_difference(groups, asked, 2, temperature) > 0.1  # another policy would have been noticed
    assert sorted(heard.positions) == list(range(5))
    assert {len(sampled.token_ids) for group in groups for sampled in group} == {20}
    assert len({sampled.token_ids for group in groups for sampled in group}) > 10


def test_only_the_end_tokens_that_were_named_end_a_completion(vllm_server, open_pool):
    engine = open_pool([vllm_server])
    engine.load(update_of(1))
    asked = requests(8, count=4)
    seen = collections.Counter(
        token for group in engine.start(asked, LONG).result() for sampled in group for token in sampled.token_ids
    )
    frequent = seen.most_common(1)[0][0]
    sampling = EngineSampling(temperature=1.0, max_completion_length=60, end_token_ids=(frequent,))
    completions = [sampled for group in engine.start(asked, sampling).result() for sampled in group]
    ended = [sampled for sampled in completions if len(sampled.token_ids) < 60]
    assert len(ended) > 10
    assert all(sampled.token_ids[-1] == frequent for sampled in ended)
    assert all(frequent not in sampled.token_ids[:-1] for sampled in completions)


def test_before_the_first_update_the_base_answers(lone_server, open_pool):
    engine = open_pool([lone_server])
    ((sampled,),) = engine.start([ONE], SHORT).result()
    mine = completion_log_probs(None, TOKENS, sampled.token_ids)
    torch.testing.assert_close(torch.tensor(sampled.log_probs), mine, atol=CLOSE, rtol=0)
    assert sampled.version == SERVED_NAME


def test_requests_under_way_keep_their_version(vllm_server, open_pool):
    engine = open_pool([vllm_server])
    first, second = update_of(1), update_of(2)
    asked = requests(80, count=4)  # more than a server is asked for at once: some wait while the next update is loaded
    short = EngineSampling(temperature=1.0, max_completion_length=16, end_token_ids=())
    engine.load(first)
    before = engine.start(asked, short)
    engine.load(second)
    after = engine.start(asked[:4], short)
    old, new = before.result(), after.result()
    assert largest_difference(old, asked, 1) < CLOSE
    assert largest_difference(new, asked[:4], 2) < CLOSE
    assert {sampled.version for group in old for sampled in group} == {first.name}
    assert {sampled.version for group in new for sampled in group} == {second.name}


def test_old_versions_leave_the_server_and_the_disk(vllm_server, open_pool, tmp_path):
    engine = open_pool([vllm_server])
    updates = [update_of(seed) for seed in (1, 2, 1, 2, 1)]
    for update in updates:
        engine.load(update)

    def served():
        text = httpx2.get(f"{vllm_server}/v1/models", trust_env=False).text
        return [update.name in text for update in updates]

    wait_until(lambda: served() == [False, False, False, True, True])
    wait_until(lambda: [(tmp_path / "updates" / u.name).exists() for u in updates] == [False, False, True, True, True])
    engine.close()
    assert served() == [False] * 5
    assert list((tmp_path / "updates").iterdir()) == []


def test_another_process_asks_for_what_the_main_process_loaded(vllm_server, open_pool):
    main, follower = open_pool([vllm_server]), open_pool([vllm_server], main=False)
    update = update_of(2)
    main.load(update)
    follower.load(Update(update.name, update.form))
    asked = requests(3)
    assert largest_difference(follower.start(asked, SHORT).result(), asked, 2) < CLOSE
    assert follower.counts == {"requests_retried": 0, "servers_lost": 0, "servers_late": 0, "reloads": 0}


def test_an_error_of_one_request_or_of_its_receiver_is_raised_and_the_others_go_on(lone_server, open_pool):
    engine = open_pool([lone_server])

    def fails(_position, _group):
        raise KeyError("of the caller's")

    good, too_long = engine.start(requests(2), SHORT), engine.start([Request(tuple(TOKENS) * 30, 1)], SHORT)
    with pytest.raises(KeyError, match="of the caller's"):
        engine.start(requests(3), SHORT, fails).result()
    with pytest.raises(RolloutError, match=r"refuses a request.*256"):
        too_long.result()
    assert (len(good.result()), len(engine.start(requests(3), SHORT).result())) == (2, 3)
    assert engine.start([], SHORT).result() == []


@pytest.mark.parametrize("form", ["adapter", "merged"])
def test_a_folder_that_servers_do_not_see_is_named_and_does_no_harm(lone_server, open_pool, form):
    engine = open_pool([lone_server], folder_on_servers="/mnt/elsewhere")
    with pytest.raises(PerlError, match=r"does not see /mnt/elsewhere/t.*mount it"):
        engine.load(update_of(1, form))
    # A server that is told to load weights from there itself would die with its next request.
    ((sampled,),) = open_pool([lone_server]).trial(ONE, SHORT).values()
    mine = completion_log_probs(None, TOKENS, sampled.token_ids)
    torch.testing.assert_close(torch.tensor(sampled.log_probs), mine, atol=CLOSE, rtol=0)


def test_what_a_server_cannot_hold_is_refused_with_the_flag_that_changes_it(vllm_server, open_pool):
    engine = open_pool([vllm_server])
    (facts,) = engine.check(256)
    assert (facts["url"], facts["base_name"], facts["loads_adapters"]) == (vllm_server, SERVED_NAME, True)
    update = make_update(policy_of(1, rank=70), "adapter", f"t{uuid.uuid4().hex[:8]}")
    with pytest.raises(PerlError, match=r"up to rank 64, this one has rank 70 \(start it with --max-lora-rank 128\)"):
        engine.load(update)
    with pytest.raises(PerlError, match=r"holds 256 tokens.*300 are needed.*--max-model-len 300"):
        engine.check(300)


def test_no_server_at_all_ends_after_the_time_that_was_given(open_pool):
    closed = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(RolloutError, match=f"no vLLM server answers.*{closed}.*the same command goes on"):
        open_pool([closed], timeout_seconds=1.0)


def test_closing_does_not_wait_for_a_server_that_hangs(open_pool, vllm_server):
    with socket.socket() as silent:  # accepts, and never says a word
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        engine = open_pool([vllm_server, f"http://127.0.0.1:{silent.getsockname()[1]}"])
        engine.load(update_of(1))
        engine.start(requests(4), LONG)
        engine.close()
        engine.close()
    with pytest.raises(RolloutError, match="closed"):
        engine.start(requests(1), SHORT)


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


def test_two_servers_share_the_work(both, open_pool):
    engine = open_pool([server.url for server in both])
    engine.load(update_of(1))
    before = [written(server.url) for server in both]
    asked = requests(16)
    assert largest_difference(engine.start(asked, SHORT).result(), asked, 1) < CLOSE
    shares = [written(server.url) - start for server, start in zip(both, before, strict=True)]
    assert shares == [16 * 4 * 8 / 2] * 2
    assert max(differences_on_servers(engine, 1).values()) < CLOSE
    assert set(differences_on_servers(engine, 1)) == {server.url for server in both}


def test_a_server_that_is_killed_loses_nothing_and_serves_again_with_the_current_adapter(both, open_pool):
    alive, killed = both
    engine = open_pool([server.url for server in both])
    engine.load(update_of(1))
    asked = requests(16, count=2)
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
    assert engine.counts["reloads"] == 1
    before = written(killed.url)
    asked = requests(8)
    assert largest_difference(engine.start(asked, SHORT).result(), asked, 2) < CLOSE
    assert written(killed.url) > before


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


def test_rollouts_end_after_the_time_that_was_given_without_servers(both, open_pool):
    engine = open_pool([both[0].url], timeout_seconds=2.0)
    engine.load(update_of(1))
    pending = engine.start(requests(4), LONG)
    both[0].stop()
    try:
        with pytest.raises(RolloutError, match=r"no vLLM server answers, for 2 seconds.*the same command goes on"):
            pending.result()
        engine.close()
    finally:
        both[0].cont()


def test_rollouts_wait_for_a_server_and_a_restart_that_nobody_saw_is_found_out(both, open_pool):
    one, other = both
    engine = open_pool([server.url for server in both])
    idle = open_pool([one.url])  # asks for nothing while servers come and go
    first, second = update_of(1), update_of(2)
    engine.load(first)
    idle.load(second)
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
    assert idle.counts == {"requests_retried": len(asked), "servers_lost": 1, "servers_late": 0, "reloads": 1}


def test_merged_weights_are_never_answered_for_by_a_restarted_base(both, open_pool):
    engine = open_pool([server.url for server in both])
    asked = requests(12)
    engine.load(update_of(1, "merged"))
    engine.load(update_of(2, "merged"))
    groups = engine.start(asked, SHORT).result()
    assert largest_difference(groups, asked, 2) < CLOSE
    assert largest_difference(groups, asked, 1) > 0.1
    both[0].restart()  # nothing is under way: nobody sees it
    groups = engine.start(asked, LONG).result()
    assert largest_difference(groups, asked, 2) < CLOSE
    assert engine.counts["reloads"] >= 1
    assert max(differences_on_servers(engine, 2).values()) < CLOSE

    # Another run finds weights that are not its own, and gives the whole base first.
    engine.close()
    successor = open_pool([server.url for server in both])
    assert successor.foreign_weights() == sorted(server.url for server in both)
    successor.load(base_update(policy(1), f"t{uuid.uuid4().hex[:8]}"))
    assert successor.foreign_weights() == []
    successor.load(update_of(1))
    assert max(differences_on_servers(successor, 1).values()) < CLOSE


def test_merged_weights_wait_for_what_is_under_way(both, open_pool):
    engine = open_pool([both[0].url])
    if engine.foreign_weights():
        engine.load(base_update(policy(1), f"t{uuid.uuid4().hex[:8]}"))
    first, second = update_of(1, "merged"), update_of(2, "merged")
    asked = requests(6)
    engine.load(first)
    pending = engine.start(asked, LONG)
    engine.load(second)
    assert largest_difference(pending.result(), asked, 1) < CLOSE
    assert max(differences_on_servers(engine, 2).values()) < CLOSE


def test_weights_that_someone_else_puts_there_end_the_rollouts(both, open_pool):
    engine, someone_else = open_pool([both[1].url], timeout_seconds=5.0), open_pool([both[1].url])
    if engine.foreign_weights():
        engine.load(base_update(policy(1), f"t{uuid.uuid4().hex[:8]}"))
    engine.load(update_of(1, "merged"))
    with pytest.raises(PerlError, match="has the merged weights of another run"):
        someone_else.foreign_weights()
    asked = requests(2)
    assert largest_difference(engine.start(asked, SHORT).result(), asked, 1) < CLOSE
    label = {"new_version": "of-someone-who-does-not-ask"}
    httpx2.post(f"{both[1].url}/update_weight_version", json=label, trust_env=False).raise_for_status()
    with pytest.raises(RolloutError, match=r"got weights from someone else \(of-someone-who"):
        engine.start(requests(2), SHORT).result()


def test_a_server_that_was_started_otherwise_says_how_to_start_it(own_servers, vllm_server, open_pool):
    (plain,) = own_servers(1, flags=("--served-model-name", "another"), variables={})
    engine = open_pool([plain.url])
    (facts,) = engine.check(256)
    assert (facts["loads_adapters"], facts["takes_weights"]) == (False, False)
    with pytest.raises(PerlError, match="--enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"):
        engine.load(update_of(1))
    with pytest.raises(PerlError, match="VLLM_SERVER_DEV_MODE=1"):
        engine.load(update_of(1, "merged"))
    assert engine.foreign_weights() == []
    with pytest.raises(PerlError, match=f"serves another, not {SERVED_NAME}.*--served-model-name"):
        open_pool([vllm_server, plain.url], base_name=SERVED_NAME)
