"""What becomes of a run whose vLLM servers become others: steps trained on a wrong policy, and what was lost.

Run as ``python benchmarks/server_faults.py``; ``--only NAME`` for one fault, which writes nothing. Starts two servers
of vLLM on the CPU, with adapters and weights, in the environment ``.venv-vllm`` or what PERL_VLLM_ENV names, and a run
of a few steps for each fault. A fault happens after the rollouts of a step, while nothing is asked of the servers,
unless its name says otherwise.

A step counts as wrong if the engine's log-probabilities of the tokens that it was trained on differ from the trainer's
by more than 0.001 nats in the mean; those of a sound step differ by less than 0.0001. Writes
``results/server_faults.json``.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from result_lines import as_lines

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")

import torch
from datasets import Dataset
from rollout_servers import Door, Server, servers, start_command
from safetensors.torch import load_file, save_file
from transformers import PrinterCallback

from perl import PeftGRPOTrainer, PeftRLConfig
from perl.errors import PerlError
from perl.rollouts.engine import Update
from perl.rollouts.vllm.servers import ServerPool
from perl.run.folder import installed_versions
from perl.sandbox import BASE_FOLDER, load_problems

RESULTS = Path(__file__).parent / "results" / "server_faults.json"
STEPS, FAULT_AFTER = 6, 3
WRONG_NATS = 1e-3
_WEIGHTS = "model.safetensors"
PORTS = (21_401, 21_402, 21_403)


class Fleet:
    """Servers, of which the third has another base, and a door to the second.

    Attributes:
        urls: The first, which stays sound, and the door to the second.
        second_url: The second itself.
    """

    def __init__(self, found: list[Server], folder: Path) -> None:
        """Of servers that run."""
        self.servers, self.folder = found, folder
        self.someone: ServerPool | None = None
        self.second_url, self._other = found[1].url, found[2].url
        self._door = Door(self.second_url)
        self.urls = [found[0].url, self._door.url]

    def mend(self) -> None:
        """The second server answers again, and nobody else uses it."""
        self._door.lead_to(self.second_url)
        if self.someone is not None:
            self.someone.close()
        self.someone = None

    def restart(self) -> None:
        """Kills the second server and starts it again."""
        self.servers[1].kill()
        self.servers[1].start()
        self.servers[1].wait()

    def reroute(self) -> None:
        """The server with the other base answers in the place of the second."""
        self._door.lead_to(self._other)

    def reroute_while_it_writes(self) -> None:
        """The same, in the middle of its answers, from a thread of its own; then the second is killed."""

        def reroute() -> None:
            while not self.servers[1].running():
                time.sleep(0.01)
            self.reroute()

        threading.Thread(target=reroute).start()

    def load_foreign_weights(self) -> None:
        """Another run gives the second server merged weights."""
        self.someone = ServerPool([self.second_url], self.folder / "someone")
        name = "model.layers.0.mlp.down_proj.weight"
        weights = load_file(BASE_FOLDER / _WEIGHTS)[name]
        self.someone.load(Update("perl-0a0a0a0a-v1", "merged", {name: weights * 1.5}))

    def start_second_run(self) -> None:
        """Another run begins on the second server, and ends, while this one uses it."""
        self.second = run_in_process(self.folder / "second", [self.second_url], "dora")
        self.second.wait(600)

    def adapters(self) -> int:
        """Adapters that the second server knows."""
        with urllib.request.urlopen(self.second_url + "/v1/models", timeout=30) as answer:  # noqa: S310 (loopback)
            return sum(card["parent"] is not None for card in json.load(answer)["data"])


@dataclass(frozen=True)
class Fault:
    """What happens to whom.

    Attributes:
        what: In words.
        happen: Makes it happen.
        alone: The run has the second server only.
    """

    name: str
    what: str
    happen: Callable[[Fleet], None]
    alone: bool = False
    method: str = "lora"


FAULTS = (
    Fault("restart", "killed and restarted as it was", Fleet.restart),
    Fault("other-base", "another one with another base", Fleet.reroute),
    Fault("other-base-alone", "the same, the only server", Fleet.reroute, alone=True),
    Fault("other-base-writing", "the same, while it writes, one of two", Fleet.reroute_while_it_writes),
    Fault("foreign-weights", "given merged weights by another run", Fleet.load_foreign_weights),
    Fault("merged-other-base", "the same, DoRA", Fleet.reroute, method="dora"),
    Fault("second-run", "asked for by a second run, DoRA", Fleet.start_second_run, alone=True, method="dora"),
)


def settings(urls: list[str], method: str) -> dict[str, Any]:
    """Of every run here."""
    return {
        "use_cpu": True,
        "prompts_per_step": 4,
        "num_generations": 4,
        "per_device_train_batch_size": 16,
        "max_completion_length": 24,
        "max_steps": STEPS,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "report_to": [],
        "save_strategy": "steps",
        "save_steps": 1000,
        "disable_tqdm": True,
        "rollout_backend": "vllm-server",
        "rollout_servers": urls,
        "rollout_server_timeout": 240.0,
        "peft_method": method,
    }


class Reward:
    """Numbers by which every completion is trained on; after a step's rollouts something happens."""

    __name__ = "reward"

    def __init__(self, happen: Callable[[], None]) -> None:
        """What happens."""
        self._happen, self._steps = happen, 0

    def __call__(self, completions: list[Any], **_: Any) -> list[float]:  # noqa: ANN401 (TRL's)
        """One number a completion."""
        self._steps += 1
        if self._steps == FAULT_AFTER:
            self._happen()
        return [float(position % 4) for position in range(len(completions))]


def trainer(folder: Path, urls: list[str], method: str, happen: Callable[[], None]) -> PeftGRPOTrainer:
    """A small run."""
    problems = load_problems("sandbox:addition", "train")[:64]
    rows = [{"prompt": [{"role": "user", "content": p.question}], "solution": p.answer} for p in problems]
    args = PeftRLConfig(str(folder), **settings(urls, method))
    trained = PeftGRPOTrainer("sandbox:base", Reward(happen), args, train_dataset=Dataset.from_list(rows))
    trained.remove_callback(PrinterCallback)
    return trained


def suffer(fault: Fault, found: Fleet) -> dict[str, Any]:
    """One run with its fault."""
    started = time.monotonic()
    urls = found.urls[1:] if fault.alone else found.urls
    trained = trainer(found.folder / fault.name, urls, fault.method, lambda: fault.happen(found))
    ended = "done"
    try:
        trained.train()
    except PerlError as error:
        ended = str(error.mistakes[0].message)
    log = [row for row in trained.state.log_history if "sampling/sampling_logp_difference/mean" in row]
    if not log:
        raise RuntimeError(f"the run ended before its first step: {ended}")
    off = [row["sampling/sampling_logp_difference/mean"] for row in log]
    kept = sorted((found.folder / fault.name).glob("checkpoint-*"))
    counts = {n: int(log[-1][f"rollout/{n}"]) for n in ("requests_retried", "servers_lost")}
    row = {
        "fault": fault.name,
        "what": fault.what,
        "method": fault.method,
        "servers": len(urls),
        "steps": trained.state.global_step,
        "wrong_steps": sum(difference > WRONG_NATS for difference in off),
        "largest_mean_difference": max(off),
        "steps_lost": 0 if ended == "done" or kept else trained.state.global_step,
        "ended": ended,
        "seconds": time.monotonic() - started,
    } | counts
    if fault.name == "second-run":
        _, said = found.second.communicate(timeout=600)
        row["second_run"] = {"exit": found.second.returncode, "said": said.strip().splitlines()[-1][:200]}
    return row


def run_in_process(folder: Path, urls: list[str], method: str) -> "subprocess.Popen[str]":
    """The same run in a process of its own."""
    command = [sys.executable, __file__, "--run", str(folder), method, *urls]
    return subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)  # noqa: S603


def killed(found: Fleet) -> dict[str, Any]:
    """A run that is killed among its steps, and the next one in the same folder."""
    folder, before = found.folder / "killed", found.adapters()
    process = run_in_process(folder, found.urls[1:], "lora")
    while not list((folder / "sync").glob("*-v2")) and process.poll() is None:
        time.sleep(0.2)
    if process.poll() is not None:
        raise RuntimeError(f"the run that was to be killed has ended: {process.communicate()[1]}")
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    left = {"adapters": found.adapters() - before, "folders": len(list((folder / "sync").glob("perl-*-*")))}
    trainer(folder, found.urls[1:], "lora", lambda: None).train()
    after = {"adapters": found.adapters() - before, "folders": len(list((folder / "sync").glob("perl-*")))}
    return {"left_by_the_kill": left, "after_the_next_run": after}


@contextlib.contextmanager
def fleet() -> Iterator[Fleet]:
    """Three servers, with adapters and weights, the third with another base."""
    with tempfile.TemporaryDirectory() as name:
        folder, other = Path(name), Path(name) / "other"
        shutil.copytree(BASE_FOLDER, other)
        torch.manual_seed(0)
        tensors = {n: tensor + 0.02 * torch.randn_like(tensor) for n, tensor in load_file(other / _WEIGHTS).items()}
        save_file(tensors, other / _WEIGHTS, {"format": "pt"})
        variables, arguments = start_command(PORTS[0])
        variables |= {"VLLM_SERVER_DEV_MODE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}  # what other methods need besides
        with servers((), folder) as found:
            for port, base in zip(PORTS, (BASE_FOLDER, BASE_FOLDER, other), strict=True):
                told = {"--port": str(port), "--model": str(base), "--served-model-name": "base"}
                told |= {"--max-loras": "4", "--max-lora-rank": "64"}
                found.append(Server(port, folder, (variables, _with(arguments, told))))
                found[-1].start()
            for server in found:
                server.wait()
            yield Fleet(found, folder)


def _with(arguments: list[str], told: dict[str, str]) -> list[str]:
    """Arguments with other values of some."""
    changed = list(arguments)
    for name, value in told.items():
        if name in changed:
            changed[changed.index(name) + 1] = value
        else:
            changed += [name, value]
    return changed


def show(row: dict[str, Any]) -> None:
    """One line of the table."""
    print(
        f"{row['what']:46} {row['servers']:>7} {row['steps']:>5} {row['wrong_steps']:>5} "
        f"{row['largest_mean_difference']:>8.1e} {row['requests_retried']:>8} {row['steps_lost']:>5} "
        f"{row['ended'][:60]}",
        flush=True,
    )


def main() -> None:
    """All faults, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=[*(fault.name for fault in FAULTS), "killed"], action="append")
    parser.add_argument("--run", nargs="+", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.run:
        folder, method, *urls = asked.run
        try:
            trainer(Path(folder), urls, method, lambda: None).train()
        except PerlError as error:
            sys.exit(str(error))
        return
    wanted = asked.only or [*(fault.name for fault in FAULTS), "killed"]
    print(f"{'a server is':46} {'servers':>7} {'steps':>5} {'wrong':>5} {'off':>8} {'re-asked':>8} {'lost':>5} ended")
    rows: list[dict[str, Any]] = []
    leftovers = None
    with fleet() as found:
        for fault in FAULTS:
            if fault.name in wanted:
                rows.append(suffer(fault, found))
                show(rows[-1])
                found.mend()
        if "killed" in wanted:
            leftovers = killed(found)
            print(f"a run is killed: {leftovers}")
    if not asked.only:
        results = {"rows": rows, "killed": leftovers, "steps": STEPS, "fault_after": FAULT_AFTER}
        RESULTS.write_text(as_lines(results | {"versions": installed_versions()}) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
