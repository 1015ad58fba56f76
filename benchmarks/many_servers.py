"""What a pool of many vLLM servers costs: slow servers, seconds of an update, open connections.

Run as ``python benchmarks/many_servers.py`` from the checkout; ``--only NAME`` for one part, which writes nothing. The
servers are fakes on loopback (``fake_servers.py``): requests, connections and waits are measured, no throughput. Writes
``results/many_servers.json``.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from fake_servers import TOKEN, fake_servers, log_prob_of
from result_lines import as_lines

from perl.rollouts.engine import EngineSampling, ExpectedLogProbs, Request, Update
from perl.rollouts.vllm.servers import ServerPool

RESULTS = Path(__file__).parent / "results" / "many_servers.json"
SAMPLING = EngineSampling(1.0, 8, ())


def update(name: str) -> Update:
    """One of no size, with what a server that has it must answer."""
    proof = ExpectedLogProbs((1, 2, 3), ({TOKEN: log_prob_of(name)},) * 3, 1.0, 2e-3)
    return Update(name, "adapter", {"x": torch.zeros(1)}, proof=proof)


def slow() -> dict[str, Any]:
    """Seconds that an update holds the run up, with none and one of 16 servers that takes long to load it."""
    rows = {}
    for seconds in (0.0, 20.0, 600.0):
        with fake_servers(16) as fakes, tempfile.TemporaryDirectory() as folder:
            pool = ServerPool(fakes.urls, Path(folder))
            pool.load(update("v0"))
            pool.trial(Request((1, 2), 1), SAMPLING)
            fakes.set(5, load_seconds=seconds)
            began = time.perf_counter()
            pool.load(update("v1"))
            rows[f"one of 16 takes {seconds:.0f} s"] = {
                "seconds": round(time.perf_counter() - began, 2),
                "dropped": pool.counts["servers_lost"],
            }
            fakes.set(5, load_seconds=0.0)
            pool.close()
    return rows


def connections() -> dict[str, Any]:
    """Seconds of an update, and most connections and open files at a time, with ``ulimit -n 1024``."""
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
        wall, cpu = time.perf_counter(), time.process_time()
        pool.load(update("v1"))
        sync = {"update": round(time.perf_counter() - wall, 2), "update_cpu": round(time.process_time() - cpu, 2)}
        pool.trial(Request((1, 2), 1), SAMPLING)
        groups = pool.start([Request((1, 2), 2)] * (4 * len(urls)), SAMPLING, looked).result()
        counts = pool.counts
        pool.close()
    seconds = round(time.perf_counter() - began, 1)
    print(json.dumps({"requests": len(groups), "open_files": most, "seconds": seconds} | sync | counts))


def main() -> None:
    """Measures, prints, writes."""
    parts = {"slow": slow, "connections": connections}
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", choices=parts)
    parser.add_argument("--ask", type=json.loads, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.ask:
        asks(given.ask)
        return
    results = {name: measure() for name, measure in parts.items() if given.only in (None, name)}
    print(json.dumps(results, indent=2))
    if given.only is None:
        RESULTS.write_text(as_lines(results) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
