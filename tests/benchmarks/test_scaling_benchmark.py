"""The arithmetic of the scaling benchmark against numbers by hand, and what is stored."""

import json

import pytest
from scaling_model import ASSUMED, Constant, Costs, halving_knee, sync_knee, sync_parts, sync_seconds

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
