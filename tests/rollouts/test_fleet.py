"""Servers that somebody has started for the run: they are found again elsewhere, and updates are brought to them."""

import contextlib
import json
from collections import Counter

import pytest
import torch
from fake_servers import fake_servers
from safetensors.torch import load

from perl.errors import RecipeError
from perl.recipe.rollout_section import RolloutSection
from perl.recipe.server_address import ServerAddress
from perl.rollouts.engine import Update
from perl.rollouts.open_engine import check_servers
from perl.rollouts.vllm.servers import ServerPool
from perl.run.host import Fleet, Host, host, hosted_by
from tests.rollouts.test_many_servers import begun, sampled_from, until, update


class Movable(Fleet):
    """Keeps updates in memory; a server may move to another address."""

    def __init__(self, urls):
        self.urls, self.kept, self.brought, self.unreachable, self.forgotten = list(urls), {}, Counter(), set(), []

    def addresses(self):
        return [ServerAddress(url) for url in self.urls]

    async def address(self, index):
        return self.urls[index]

    def path(self, name):
        return f"/memory/{name}"

    def publish(self, name, files):
        self.kept[name] = files

    async def bring(self, index, name):
        if index in self.unreachable or name not in self.kept:
            raise OSError(f"nobody brings {name} to {index}")
        self.brought[name, index] += 1

    def forget(self, name):
        self.forgotten.append(name)


@pytest.fixture
def opened():
    """Three servers, a fleet of the first two, and a pool that has begun with them."""
    with fake_servers(3) as fakes:
        fleet = Movable(fakes.urls[:2])
        with contextlib.closing(ServerPool(fleet.addresses(), fleet, timeout_seconds=60.0)) as pool:
            yield fakes, fleet, begun(pool)


def test_each_server_is_brought_each_update_once_and_old_ones_are_forgotten(opened):
    fakes, fleet, pool = opened
    pool.load(Update("v1", "adapter", {"a.weight": torch.arange(4.0)}, {"r": 2}))
    assert fleet.brought == {(name, index): 1 for name in ("v0", "v1") for index in (0, 1)}
    torch.testing.assert_close(load(fleet.kept["v1"]["adapter_model.safetensors"])["a.weight"], torch.arange(4.0))
    assert json.loads(fleet.kept["v1"]["adapter_config.json"]) == {"r": 2}
    for number in range(2, 6):
        pool.load(update(f"v{number}"))
    until(lambda: fleet.forgotten == ["v0", "v1", "v2", "v3"])
    until(lambda: all(one["adapters"] == ["v4", "v5"] for one in fakes.stats()[:2]))
    assert sampled_from(pool, "v5") == 12


def test_a_server_that_was_started_again_elsewhere_is_found_and_proves_itself(opened):
    fakes, fleet, pool = opened
    fleet.urls[1] = fakes.urls[2]
    fakes.restart(1)
    fakes.reset()
    until(lambda: sampled_from(pool, "v0") and fakes.stats()[2]["completions"] > 0)
    assert (fleet.brought["v0", 1], fakes.stats()[2]["proofs"], pool.counts["servers_lost"]) == (2, 1, 1)


def test_servers_that_a_recipe_starts_are_those_of_the_host(opened):
    fakes, _, _ = opened
    section = RolloutSection(backend="vllm-server", servers={"count": 3})
    assert (section.server_count, host().fleet) == (3, None)
    with pytest.raises(RecipeError, match=r"started by perl train on a Ray cluster only"):
        check_servers(section, 8, "adapter")

    class Hosting(Host):
        fleet = Movable(fakes.urls)

    with hosted_by(Hosting()):
        assert [row["url"] for row in check_servers(section, 8, "adapter")] == fakes.urls
