"""What many vLLM servers cost: slow ones, seconds of an update, connections; requests by processes and servers.

Run as ``python benchmarks/many_servers.py`` from the checkout; ``--only NAME`` for one part, which writes nothing. The
servers are fakes on loopback (``fake_servers.py``): requests, connections and waits are measured, no throughput of
servers. Writes ``results/many_servers.json``.
"""

import argparse
import contextlib
import functools
import json
import os
import pickle
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from datasets import Dataset
from fake_servers import TOKEN, Fakes, fake_servers, log_prob_of
from result_lines import as_lines

from perl import PeftGRPOTrainer, PeftRLConfig
from perl.recipe.rollout_section import RolloutSection
from perl.rollouts import open_engine
from perl.rollouts.engine import EngineSampling, ExpectedLogProbs, Request, Update
from perl.rollouts.vllm import liveness
from perl.rollouts.vllm.servers import ServerPool
from perl.run.joint_work import Processes, joining

RESULTS = Path(__file__).parent / "results" / "many_servers.json"
SAMPLING = EngineSampling(1.0, 8, ())
PROMPTS = 128
"""Of a batch that processes share."""
_TRAINING = 4  # processes that train, at most


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
            found = in_its_own("--ask", fakes)
            rows[f"{count} servers, 4 requests each"] = found | {"peak_connections": fakes.peak_connections()}
    return rows


def asks(urls: list[str], _: str) -> None:
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


class Counted(ServerPool):
    """A pool that knows what its servers were asked, but for whether they hang, which is asked by the clock.

    Attributes:
        rows: Requests of ``opening``, of the last ``update`` (with what unloads the one before), and after that: of
            ``completions``, and ``looks`` of three requests each, by which all answers of a server within 20 ms are
            known to be of the server that was proven.
    """

    def __init__(self, fakes: Fakes, *given: Any, **settings: Any) -> None:  # noqa: ANN401 (a pool's)
        """As a pool; asks the fakes what they were asked."""
        self.fakes, self.rows, self._before = fakes, dict[str, int](), Counter[str]()
        liveness._WATCH_SECONDS = 3600.0
        super().__init__(*given, **settings, stall_seconds=4 * 3600.0)

    def load(self, update: Update) -> None:
        """Counts what it takes."""
        before = self._since()
        self.rows.setdefault("opening", before.total())
        super().load(update)
        self.rows["update"] = self._since().total()

    def close(self) -> None:
        """Counts what came after the last load."""
        if "update" in self.rows:
            of_batch = self._since()
            while more := (time.sleep(1) or self._since()):  # until all is unloaded
                of_batch += more
            self.rows["update"] += of_batch["/v1/unload_lora_adapter"]
            self.rows |= {"completions": of_batch["/v1/completions"], "looks": of_batch["/v1/models"]}
            self.rows["peak_connections"] = self.fakes.peak_connections()
        super().close()

    def _since(self) -> Counter[str]:
        """Requests by path since it was called last."""
        now = sum((Counter(one["requests"]) for one in self.fakes.stats()), Counter[str]())
        found, self._before = now - self._before, now
        return found


def processes() -> dict[str, Any]:
    """Requests by the number of processes and servers, for one batch of 128 prompts that the processes share.

    Up to 4 processes train; 8 and 64 are without a model, and do what a training does with its engine.
    """
    rows = {}
    for count in (1, 2, 4, 8, 64):
        for servers in (1, 16, 64):
            with fake_servers(servers, answer_seconds=0.5) as fakes:
                rows[f"{count} processes, {servers} servers"] = in_its_own("--processes", fakes, count)
    return rows


def tokens() -> dict[str, Any]:
    """What a million tokens cost the main process: to read its servers' answers, and to hand them on."""
    rows = {}
    for count in (1, 8, 64):
        with fake_servers(8, tokens=4096) as fakes:
            found = in_its_own("--processes", fakes, count, 4096)
            names = ("seconds", "cpu_of_main", "bytes_to_others")
            rows[f"{count} processes"] = {name: found[name] for name in names}
    return rows


def in_its_own(way: str, fakes: Fakes, *given: int) -> dict[str, Any]:
    """What a process of its own prints, whose open files and seconds are not the servers'."""
    command = [sys.executable, __file__, way, json.dumps([fakes.urls, fakes.control, *given])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode:
        raise SystemExit(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def share(urls: list[str], control: str, count: int, longest: int = 8) -> None:
    """So many processes, forks of this one; prints what the servers were asked, and how many processes asked."""
    ports, connected = {urlsplit(url).port for url in urls}, []
    sys.addaudithook(lambda event, of: event == "socket.connect" and of[1][1] in ports and connected.append(1))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    os.environ |= {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    rank = next((rank for rank in range(1, count) if os.fork() == 0), 0)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    opened: list[Counted] = []

    def pool(*given: Any, **settings: Any) -> ServerPool:  # noqa: ANN401
        opened.append(Counted(Fakes(urls, control), *given, **settings))
        return opened[0]

    open_engine.ServerPool = pool  # type: ignore[assignment, misc]
    with joining(on_cpu=True) as every, tempfile.TemporaryDirectory() as folder:
        work = train if count <= _TRAINING and longest == 8 else functools.partial(ask, longest=longest)
        took = work(urls, folder, every)
        asked = every.collected(bool(connected))
        if every.main:
            print(json.dumps(opened[0].rows | {"processes_that_asked": sum(asked)} | (took or {})), flush=True)
    if rank:
        os._exit(0)


def train(urls: list[str], folder: str, every: Processes) -> None:
    """Three steps of a real training, whose parity checks let the servers' made-up numbers pass."""
    given = {"rollout_backend": "vllm-server", "rollout_servers": urls, "rollout_tolerance": 1e3}
    given |= {"prompts_per_step": PROMPTS, "num_generations": 2, "max_completion_length": 8, "max_steps": 3}
    given |= {"per_device_train_batch_size": 2 * PROMPTS // every.count, "save_strategy": "no", "use_cpu": True}
    rows = [{"prompt": [{"role": "user", "content": f"{i} + {i}"}]} for i in range(3 * PROMPTS)]
    reward = {"reward_funcs": lambda completions, **_: [float(i % 2) for i in range(len(completions))]}
    with contextlib.redirect_stdout(sys.stderr):
        args = PeftRLConfig(folder, report_to=[], disable_tqdm=True, **given)
        PeftGRPOTrainer("sandbox:base", **reward, args=args, train_dataset=Dataset.from_list(rows)).train()


def ask(urls: list[str], folder: str, every: Processes, longest: int) -> dict[str, Any]:
    """Three updates and batches; each process asks for its part. What the last batch took."""
    how = RolloutSection(backend="vllm-server", servers=urls)
    sampling = replace(SAMPLING, max_completion_length=longest)
    settings = open_engine.EngineSettings("run", Path(folder), processes=every)
    engine = open_engine.open_engine(how, None, torch.nn.Identity(), settings)
    engine.foreign_weights()
    requests = [Request((1, 2, every.rank, i), 2) for i in range(PROMPTS // every.count)]
    for step in range(3):
        engine.load(update(f"run-v{step}"))
        wall, cpu = time.perf_counter(), time.process_time()
        groups = engine.start(requests, sampling).result()
        took = {"seconds": time.perf_counter() - wall, "cpu_of_main": time.process_time() - cpu}
        if [[len(one.token_ids) for one in group] for group in groups] != [[longest] * 2] * len(requests):
            raise SystemExit("completions are missing")
    engine.close()
    sent = every.collected(len(pickle.dumps(groups)))
    return {name: round(value, 2) for name, value in took.items()} | {"bytes_to_others": sum(sent[1:])}


def main() -> None:
    """Measures, prints, writes."""
    parts = {"slow": slow, "connections": connections, "processes": processes, "tokens": tokens}
    own = {"--ask": asks, "--processes": share}
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", choices=parts)
    for way, work in own.items():
        if sys.argv[1:2] == [way]:
            work(*json.loads(sys.argv[2]))
            return
    given = parser.parse_args()
    results = {name: measure() for name, measure in parts.items() if given.only in (None, name)}
    print(json.dumps(results, indent=2))
    if given.only is None:
        RESULTS.write_text(as_lines(results) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
