"""What a pool of many vLLM servers costs: balance, slow servers, health checks, open connections.

Run as ``python benchmarks/many_servers.py`` from the checkout; ``--only NAME`` for one part, which writes nothing. The
servers are fakes on loopback (``tests/rollouts/fake_servers.py``): requests, connections and waits are measured, no
throughput. Writes ``results/many_servers.json``.
"""

import argparse
import contextlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the checkout, for its tests

import torch

from perl.rollouts.engine import EngineSampling, Proof, Request, Update
from perl.rollouts.vllm.dispatch import Place
from perl.rollouts.vllm.servers import ServerPool
from tests.rollouts.fake_servers import TOKEN, Fakes, fake_servers, log_prob_of

RESULTS = Path(__file__).parent / "results" / "many_servers.json"
SAMPLING = EngineSampling(1.0, 8, ())
LONG = 10_000.0


def update(name: str) -> Update:
    """One of no size, with what a server that has it must answer."""
    proof = Proof((1, 2, 3), ({TOKEN: log_prob_of(name)},) * 3, 1.0, 2e-3)
    return Update(name, "adapter", {"x": torch.zeros(1)}, proof=proof)


def in_hand(fakes: Fakes, expected: int) -> list[int]:
    """Completions that each server has in hand, once they are as many as expected."""
    while sum(found := [one["in_hand"] for one in fakes.stats()]) < expected:
        time.sleep(0.1)
    return found


def balance() -> dict[str, Any]:
    """8 processes, of 4 requests with 8 completions each, on 16 servers."""
    rows = {}
    for ranks, per_rank, count in ((8, 4, 16), (16, 8, 24)):
        for known in (True, False):
            with fake_servers(count, answer_seconds=LONG) as fakes, contextlib.ExitStack() as stack:
                for rank in range(ranks):
                    place = Place(rank, ranks) if known else None
                    pool = stack.enter_context(
                        contextlib.closing(ServerPool(fakes.urls, None, main=False, place=place))
                    )
                    pool.start([Request((1, 2), 8)] * per_rank, SAMPLING)
                name = f"{ranks} ranks x {per_rank} requests, {count} servers, {'rank known' if known else 'as before'}"
                rows[name] = in_hand(fakes, ranks * per_rank * 8)
    return rows


def slow() -> dict[str, Any]:
    """Seconds that an update holds the run up, with none and one of 16 servers that takes 20 seconds to load it."""
    rows = {}
    for seconds in (0.0, 20.0):
        with fake_servers(16) as fakes, tempfile.TemporaryDirectory() as folder:
            pool = ServerPool(fakes.urls, Path(folder))
            pool.load(update("v0"))
            pool.trial(Request((1, 2), 1), SAMPLING)
            fakes.set(5, load_seconds=seconds)
            began = time.perf_counter()
            pool.load(update("v1"))
            rows[f"one of 16 takes {seconds:.0f} s"] = {
                "seconds": round(time.perf_counter() - began, 2),
                "late": pool.counts["servers_late"],
            }
            pool.close()
    return rows


def watches(url: str, run: str) -> None:
    """A process that has a request in hand until its standard input is closed."""
    pool = ServerPool([url], None, main=False, place=Place(run=run or None))
    pool.start([Request((1, 2), 1)], SAMPLING)
    print("busy", flush=True)
    sys.stdin.read()


def health() -> dict[str, Any]:
    """Requests for health and counters a second on one busy server, by the number of processes of a machine."""
    rows, passed = {}, 20.0
    for count, run in ((1, "measured"), (2, "measured"), (8, "measured"), (8, "")):
        with fake_servers(1, answer_seconds=LONG) as fakes, contextlib.ExitStack() as stack:
            asked = [sys.executable, __file__, "--watch", fakes.urls[0], run]
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            processes = [subprocess.Popen(asked, **pipes) for _ in range(count)]  # noqa: S603
            for process in processes:
                stack.enter_context(process)
                stack.callback(process.kill)
                process.stdout.readline()
            time.sleep(6.0)  # they have looked once
            fakes.reset()
            time.sleep(passed)
            requests = fakes.stats()[0]["requests"]
        asked_for = requests.get("/health", 0) + requests.get("/metrics", 0)
        rows[f"{count} processes, {'shared' if run else 'each for itself'}"] = round(asked_for / passed, 2)
    return rows


def connections() -> dict[str, Any]:
    """Most connections and open files at a time, with ``ulimit -n 1024``."""
    rows = {}
    for count in (128, 512):
        with fake_servers(count, answer_seconds=0.5) as fakes:
            asked = [sys.executable, __file__, "--ask", json.dumps(fakes.urls)]
            done = subprocess.run(asked, capture_output=True, text=True, check=True)  # noqa: S603
            rows[f"{count} servers, 4 requests each"] = json.loads(done.stdout) | {
                "peak_connections": fakes.peak_connections()
            }
    return rows


def asks(urls: list[str]) -> None:
    """A process with few open files: an update, a trial, and four requests for each server."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    most, began = 0, time.perf_counter()

    def looked(*_: object) -> None:
        nonlocal most
        most = max(most, len(os.listdir("/proc/self/fd")))

    with tempfile.TemporaryDirectory() as folder:
        pool = ServerPool(urls, Path(folder))
        pool.load(update("v0"))
        pool.trial(Request((1, 2), 1), SAMPLING)
        groups = pool.start([Request((1, 2), 2)] * (4 * len(urls)), SAMPLING, looked).result()
        counts = pool.counts
        pool.close()
    seconds = round(time.perf_counter() - began, 1)
    print(json.dumps({"requests": len(groups), "open_files": most, "seconds": seconds} | counts))


def main() -> None:
    """Measures, prints, writes."""
    parts = {"balance": balance, "slow": slow, "health": health, "connections": connections}
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", choices=parts)
    parser.add_argument("--watch", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--ask", type=json.loads, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.watch:
        watches(*given.watch)
        return
    if given.ask:
        asks(given.ask)
        return
    results = {name: measure() for name, measure in parts.items() if given.only in (None, name)}
    print(json.dumps(results, indent=2))
    if given.only is None:
        RESULTS.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
