"""Servers that somebody has started for the run: they are found again elsewhere, and updates are brought to them."""

import asyncio
import contextlib
import copy
import json
import multiprocessing
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

import httpx2
import pytest
import torch
from safetensors.torch import load

from perl.errors import RecipeError, RolloutError
from perl.recipe.rollout_section import RolloutSection
from perl.recipe.server_address import ServerAddress
from perl.rollouts.engine import EngineSampling, Proof, Request, Update
from perl.rollouts.open_engine import check_servers
from perl.rollouts.vllm.answers import AccessError, ServerDownError
from perl.rollouts.vllm.http import VllmServer
from perl.rollouts.vllm.servers import ServerPool
from perl.run.host import Fleet, Host, host, hosted_by
from tests.rollouts.fake_servers import TOKEN, fake_servers, log_prob_of

SAMPLING = EngineSampling(temperature=1.0, max_completion_length=4, end_token_ids=())


def spoken(tell, url):
    return asyncio.run(tell(ServerAddress(url)))


class Movable(Fleet):
    """Keeps updates in memory; a server may move to another address."""

    def __init__(self, urls, node=None):
        self.urls, self.kept, self.brought, self.forgotten = list(urls), {}, Counter(), []
        self.unreachable, self.node = set(), node

    def addresses(self):
        return list(self.urls)

    async def address(self, index):
        return self.urls[index]

    def path(self, name):
        return f"/memory/{name}"

    def publish(self, name, files):
        self.kept[name] = dict(files)

    async def give(self, index, name, tell, seconds):  # noqa: ARG002
        """By a process of its own, to which everything is pickled, as to another node."""
        if index in self.unreachable:
            raise OSError("its node is gone")
        assert name is None or name in self.kept
        self.brought[name, index] += 1
        return await asyncio.wrap_future(self.node.submit(spoken, tell, self.urls[index]))

    def forget(self, name):
        self.forgotten.append(name)


@pytest.fixture(scope="module")
def node():
    """A process beside the servers."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as processes:
        yield processes


@pytest.fixture
def opened(node):
    """Three fakes, of which two serve; a fleet that knows them; a pool."""
    with contextlib.ExitStack() as stack:
        fakes = stack.enter_context(fake_servers(3))
        fleet = Movable(fakes.urls[:2], node)
        pool = ServerPool(fleet.addresses(), fleet, timeout_seconds=60.0)
        stack.callback(pool.close)
        pool.check(8, "adapter")
        yield fakes, fleet, pool


def update(name, form="adapter"):
    proof = Proof((1, 2, 3), ({TOKEN: log_prob_of(name)},) * 3, 1.0, 2e-3)
    return Update(name, form, {"a.weight": torch.arange(4.0)}, {"r": 2}, proof=proof)


@pytest.fixture
def sent(monkeypatch):
    """Requests of this process, by path."""
    paths, send = Counter(), VllmServer._send_once

    async def counted(self, method, path, *rest):
        paths[path] += 1
        return await send(self, method, path, *rest)

    monkeypatch.setattr(VllmServer, "_send_once", counted)
    return paths


def log_probs(pool, number):
    groups = pool.start([Request((1, i), 1) for i in range(number)], SAMPLING).result()
    return [log_prob for (sampled,) in groups for log_prob in sampled.log_probs]


def completions(pool, fakes, name="v0"):
    """Completions of each fake server, of eight requests whose tokens are all of the newest update."""
    fakes.reset()
    assert log_probs(pool, 8) == pytest.approx([log_prob_of(name)] * 32)
    return [server["completions"] for server in fakes.stats()]


def test_updates_are_brought_to_each_server_once_and_are_what_the_policy_has(opened):
    _, fleet, pool = opened
    pool.load(update("v0"))
    pool.load(update("v1"))
    assert log_probs(pool, 8) == pytest.approx([log_prob_of("v1")] * 32)
    assert fleet.brought == {(name, index): 1 for name in ("v0", "v1") for index in (0, 1)}
    torch.testing.assert_close(load(fleet.kept["v1"]["adapter_model.safetensors"])["a.weight"], torch.arange(4.0))
    assert json.loads(fleet.kept["v1"]["adapter_config.json"]) == {"r": 2}


def test_a_server_that_was_started_again_elsewhere_is_found_and_has_the_update(opened):
    fakes, fleet, pool = opened
    pool.load(update("v0"))
    fleet.urls[1] = fakes.urls[2]
    fakes.restart(1)
    while completions(pool, fakes) != [4, 0, 4]:
        pass
    assert fleet.brought["v0", 1] == 2
    assert pool.counts["servers_lost"] == 1


def test_a_server_whose_node_gets_no_update_is_lost_and_never_asked(opened):
    fakes, fleet, pool = opened
    fleet.unreachable = {0}
    pool.load(update("v0"))
    assert log_probs(pool, 6) == pytest.approx([log_prob_of("v0")] * 24)
    assert [server["completions"] for server in fakes.stats()] == [0, 6, 0]


@pytest.mark.parametrize("form", ["adapter", "merged"])
def test_an_update_is_one_call_to_each_servers_node_and_no_request_of_this_process(opened, sent, form):
    fakes, fleet, pool = opened
    fakes.reset()
    for number in range(4):
        pool.load(update(f"v{number}", form))
    assert sent == {}
    assert fleet.brought == {(f"v{number}", index): 1 for number in range(4) for index in (0, 1)}
    for server in fakes.stats()[:2]:
        assert server["loads"] == {f"v{number}": 1 for number in range(4)}
        assert server["adapters"] == (["v2", "v3"] if form == "adapter" else [])  # the older ones were unloaded
        assert sum(server["requests"].values()) == (4 * 4 + 2 if form == "adapter" else 4 * 10)
    assert log_probs(pool, 8) == pytest.approx([log_prob_of("v3")] * 32)


def restarted(fakes):
    fakes.restart(1)


def given_weights(fakes):
    posted(fakes.urls[1], "/update_weight_version", {"new_version": "someone~1"})


def given_another_adapter(fakes):
    posted(fakes.urls[1], "/v1/load_lora_adapter", {"lora_name": "v1", "lora_path": "/elsewhere/v1"})


def posted(url, path, body):
    with httpx2.Client(trust_env=False) as client:
        client.post(url + path, json=body).raise_for_status()


@pytest.mark.parametrize(
    ("fault", "reason", "comes_back"),
    [
        (restarted, "was restarted", True),
        (given_weights, "got weights from someone else", False),
        (given_another_adapter, "has another adapter under the name v1", False),
    ],
)
def test_a_server_that_is_another_one_is_found_before_anything_of_it_is_used(opened, caplog, fault, reason, comes_back):
    fakes, fleet, pool = opened
    pool.load(update("v0"))
    fault(fakes)
    fakes.reset()
    pool.load(update("v1"))
    assert log_probs(pool, 8) == pytest.approx([log_prob_of("v1")] * 32)
    assert reason in caplog.text
    assert pool.counts["servers_lost"] == 1
    while comes_back and completions(pool, fakes, "v1") != [4, 4, 0]:
        pass
    if comes_back:
        assert fleet.brought["v1", 1] == 2  # of which the first told it nothing
    else:
        assert completions(pool, fakes, "v1") == [8, 0, 0]


def test_a_server_that_comes_back_is_proven_on_its_node(opened, sent):
    fakes, _, pool = opened
    pool.load(update("v0"))
    fakes.restart(1)
    fakes.reset()
    pool.load(update("v1"))
    while fakes.stats()[1]["proofs"] < 1:
        log_probs(pool, 2)
    asked = sent.copy()
    while completions(pool, fakes, "v1") != [4, 4, 0]:
        pass
    assert (fakes.stats()[1]["proofs"], asked["/v1/load_lora_adapter"], sent["/v1/load_lora_adapter"]) == (0, 1, 1)
    fakes.restart(1)
    fakes.set(1, wrong=0.3)
    pool.load(update("v2"))
    while "differ by 3.0e-01" not in pool._dispatcher.servers.members[1].reason:
        log_probs(pool, 1)
    assert completions(pool, fakes, "v2") == [8, 0, 0]


def test_what_a_server_refuses_on_its_node_is_the_error_here(opened, node):
    fakes, _, pool = opened
    fakes.set(0, refuses_loads=True)
    with pytest.raises(RolloutError, match=f"{fakes.urls[0]} cannot load adapter v0: cannot load v0") as caught:
        pool.load(update("v0"))
    assert caught.value.code == RolloutError.code
    for error in (AccessError("no", hint="a key"), ServerDownError("gone", answered=True, timed_out=True)):
        same = node.submit(copy.copy, error).result()
        assert (type(same), str(same), vars(same)) == (type(error), str(error), vars(error))


def test_updates_that_no_request_needs_are_forgotten(opened):
    _, fleet, pool = opened
    for step in range(8):
        pool.load(update(f"v{step}"))
        log_probs(pool, 2)
    while len(fleet.forgotten) < 4:
        log_probs(pool, 1)
    assert fleet.forgotten[:4] == ["v0", "v1", "v2", "v3"]
    assert "v7" not in fleet.forgotten


def test_servers_that_nobody_starts_are_refused_in_one_line():
    section = RolloutSection(backend="vllm-server", servers={"count": 2})
    assert section.server_count == 2
    assert host().fleet is None
    with pytest.raises(RecipeError, match=r"started by perl train on a Ray cluster only"):
        check_servers(section, 8, "adapter")


def test_inside_a_host_its_servers_are_checked(opened):
    fakes, _, _ = opened

    class Hosting(Host):
        fleet = Movable(fakes.urls)

    with hosted_by(Hosting()):
        found = check_servers(RolloutSection(backend="vllm-server", servers={"count": 3}), 8, "adapter")
    assert [row["url"] for row in found] == fakes.urls
    assert host().fleet is None
