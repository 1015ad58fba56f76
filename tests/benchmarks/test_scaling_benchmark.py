"""The arithmetic of the scaling benchmark against numbers by hand, what it measures on fakes, and what is stored."""

import dataclasses
import json

import pytest
import scaling_model as model
from scaling_model import ASSUMED, Constant, Costs, halving_knee, step_range, sync_knee, sync_parts, sync_seconds

from perl.training.cost_time import Part, Range
from tests.conftest import CHECKOUT

ROUND = {
    "nfs": 2e9,
    "parallel_fs": 50e9,
    "nic": 10e9,
    "ray_link": 1e9,
    "load_fixed": 0.1,
    "load_rate": 1e9,
    "ray_put": 2e-9,
    "ray_take": 0.5e-9,
    "ray_call": 1e-3,
    "ray_agent": 0.02,
    "folder": 3e-9,
    "serialise": 1e-9,
    "answer": 1e-6,
}
COSTS = Costs(
    {name: Constant(value, "", "assumed", "") for name, value in ROUND.items()}, [(8, 0.04), (64, 0.4), (256, 2.8)]
)
GB = 1e9


@pytest.mark.parametrize(
    ("transport", "servers", "by_hand"),
    [
        # 1.1 s to load and 0.4 s to ask 64 servers; 3 s to write a folder, or 1 s to serialise.
        ("nfs_by_server", 64, 1.5 + 3.0 + 0.5 + 32.0),
        ("nfs_by_node", 64, 1.5 + 3.0 + 0.5 + 4.0),
        ("parallel_fs", 64, 1.5 + 3.0 + 0.1 + 64 / 50),
        ("http", 64, 1.5 + 1.0 + 6.4),
        # log2 of 8 nodes and the sender: 4 rounds of 1 s; 64 calls in place of what the main process asks.
        ("ray", 64, 1.1 + 1.0 + 2.0 + 4.0 + 0.5 + 0.064 + 0.02),
        # Of few servers the node's own network is the limit: 8 x 1 GB through 10 GB/s.
        ("parallel_fs", 8, 1.1 + 0.04 + 3.0 + 0.1 + 0.8),
    ],
)
def test_seconds_of_a_sync_are_those_by_hand(transport, servers, by_hand):
    assert sync_seconds(transport, COSTS, GB, servers) == pytest.approx(by_hand)
    assert sum(sync_parts(transport, COSTS, GB, servers).values()) == pytest.approx(by_hand)


@pytest.mark.parametrize(
    ("servers", "seconds"), [(4, 0.02), (8, 0.04), (36, 0.22), (64, 0.4), (160, 1.6), (256, 2.8), (1024, 11.2)]
)
def test_seconds_to_ask_lie_on_the_lines_between_measurements_and_grow_in_proportion_beyond(servers, seconds):
    assert COSTS.seconds_to_ask(servers) == pytest.approx(seconds)
    told = dataclasses.replace(COSTS, telling=COSTS.asking)
    assert (COSTS.seconds_to_tell(servers), told.seconds_to_tell(servers)) == pytest.approx((servers * 1e-3, seconds))


def test_a_fourfold_adapter_takes_four_times_all_that_depends_on_its_bytes():
    for transport in model.TRANSPORTS:
        small, large = (sync_parts(transport, COSTS, size, 100) for size in (GB, 4 * GB))
        fixed = sum(small.get(part, 0.0) for part in ("ask", "tell", "agent")) + COSTS["load_fixed"]
        assert sum(large.values()) - fixed == pytest.approx(4 * (sum(small.values()) - fixed))


def test_a_step_is_its_parts_or_the_longer_of_rollouts_and_the_rest():
    parts = {
        "rollouts": Part("rollouts", Range(20.0, 60.0), ""),
        "verifier": Part("verifier", Range(1.0, 2.0), ""),
        "training": Part("training", Range(10.0, 50.0), ""),
        "sync": Part("sync", Range(700.0, 900.0), ""),
    }
    assert step_range(parts, 3.0, 0.0, ahead=False) == pytest.approx((34.0, 115.0))
    assert step_range(parts, 3.0, 0.0, ahead=True) == pytest.approx((20.0, 60.0))
    # 30 s of reading answers are more than the 20 s in which they are written at best.
    assert step_range(parts, 3.0, 30.0, ahead=False) == pytest.approx((44.0, 115.0))


def test_knees_are_where_a_step_no_longer_halves_and_where_its_sync_is_a_tenth():
    steps = {8: 100.0, 16: 50.0, 32: 30.0, 64: 20.0, 128: 19.0}
    syncs = {8: 1.0, 16: 1.0, 32: 2.0, 64: 2.5, 128: 5.0}
    assert halving_knee(steps) == 32  # 50 and 60 % of the time pay, 67 % do not
    assert sync_knee(steps, syncs) == 64
    assert halving_knee({8: 1.0, 16: 0.5}) is None
    assert sync_knee(steps, dict.fromkeys(steps, 0.1)) is None


def test_a_pool_is_measured_on_fake_servers():
    import scaling_measured

    found = scaling_measured.measure_pool(3, [400_000])
    assert found["batch"]["tokens"] == 64 * 8 * 256
    assert 3 <= found["peak_connections"] <= 2 * 64
    assert found["syncs"]["400000"]["cpu_seconds"] > 0
    assert found["syncs"]["400000"]["seconds"] <= found["syncs"]["400000"]["all_seconds"]


def test_what_is_stored_follows_from_what_was_measured():
    stored = json.loads((CHECKOUT / "benchmarks" / "results" / "scaling.json").read_text(encoding="utf-8"))
    constants = {name: Constant(**fields) for name, fields in stored["constants"].items()}
    assert set(ASSUMED) <= set(constants)
    costs = Costs(constants, *([tuple(point) for point in stored[name]] for name in ("asking", "telling")))
    for row in stored["derived"]["syncs"]:
        seconds = sync_seconds(row["transport"], costs, row["bytes"], row["servers"])
        assert row["seconds"] == pytest.approx(seconds, rel=2e-3)  # four digits are stored
    for series in stored["derived"]["steps"]:
        steps = {row["gpus"]: row["step"] for row in series["rows"]}
        assert series["halving_knee"] == halving_knee(steps)
        assert series["sync_knee"] == sync_knee(steps, {row["gpus"]: row["sync"] for row in series["rows"]})
        assert all(row["trainers"] + row["servers"] == row["gpus"] for row in series["rows"])
