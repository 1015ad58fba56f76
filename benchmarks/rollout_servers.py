"""Stock vLLM servers that are killed while a run uses them, and a trainer that records what it was trained on.

recipe -> ``perl rollout command`` -> processes; steps -> kills; rows of a step -> prompts

Part of ``rollouts.py`` and ``staleness.py``.
"""

import contextlib
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import PrinterCallback, TrainerCallback

from perl.policy.model import load_base
from perl.rollouts.engine import EngineSampling, Request
from perl.trainer.trainer import PeftGRPOTrainer
from perl.training.plan import Plan

CHECKOUT = Path(__file__).resolve().parent.parent
ENVIRONMENT = Path(os.environ.get("PERL_VLLM_ENV", CHECKOUT / ".venv-vllm"))
START_SECONDS = 600.0
# More than a comparison of the server with the trainer asks for: it is killed among completions that are trained on.
_LEAST_RUNNING = 9
# One thread a server, bound to no core: servers, trainer and checker share the cores.
_VARIABLES = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}


class Server:
    """One server and all its processes, which are a process group.

    Attributes:
        url: Its address, the same after it was started again.
    """

    def __init__(self, port: int, folder: Path, command: tuple[dict[str, str], list[str]] | None = None) -> None:
        """Starts nothing yet; the log goes to the folder. Without a command it is the one that we print."""
        self.url = f"http://localhost:{port}"
        self._log = folder / f"server-{port}.log"
        self._command = command or start_command(port)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts it and does not wait."""
        variables, arguments = self._command
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(  # noqa: S603 (the command that we print ourselves)
                arguments, env=os.environ | variables, stdout=log, stderr=log, start_new_session=True
            )

    def wait(self) -> None:
        """Returns once it is healthy.

        Raises:
            RuntimeError: It ended, or takes too long.
        """
        until = time.monotonic() + START_SECONDS
        while self._get("/health") is None:
            if self._process is None or self._process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"{self.url} did not start:\n{self._log.read_text()[-2000:]}")
            time.sleep(0.5)

    def kill(self) -> None:
        """SIGKILL to all its processes at once."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._process = None

    def running(self) -> int:
        """Completions that it is writing now."""
        found = re.search(r"^vllm:num_requests_running(?:\{.*\})? (\S+)$", self._get("/metrics") or "", re.MULTILINE)
        return int(float(found[1])) if found else 0

    def cpu_seconds(self) -> float:
        """Processor time of all its processes since they were started."""
        seconds = 0.0
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                if self._process is not None and os.getpgid(process.pid) == self._process.pid:
                    times = process.cpu_times()
                    seconds += times.user + times.system
        return seconds

    def _get(self, path: str) -> str | None:
        """What it answers; None if it does not."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=5) as answer:  # noqa: S310 (loopback)
                return str(answer.read().decode())
        except (urllib.error.URLError, OSError):
            return None


def start_command(
    port: int, settings: Sequence[str] = ("rollout.prefetch=1",), environment: Path = ENVIRONMENT
) -> tuple[dict[str, str], list[str]]:
    """Variables and arguments that ``perl rollout command`` prints for the quickstart with such settings."""
    program = [sys.executable, "-m", "perl", "rollout", "command", "quickstart", "rollout.backend=vllm-server"]
    asked = [
        *program,
        f"rollout.servers=[http://localhost:{port}]",
        *settings,
        "--port",
        str(port),
    ]
    said = subprocess.run(asked, check=True, capture_output=True, text=True).stdout  # noqa: S603
    words = shlex.split(said)
    count = next(index for index, word in enumerate(words) if not re.match(r"[A-Z_]+=", word))
    variables = dict(word.split("=", 1) for word in words[:count])
    if words[count] != "python":
        raise RuntimeError(f"cannot start a server on a CPU by: {said}")
    return _VARIABLES | variables, [str(environment / "bin" / "python"), *words[count + 1 :]]


@contextlib.contextmanager
def servers(ports: Sequence[int], folder: Path, prefetch: int = 1) -> Iterator[list[Server]]:
    """Healthy servers, one a port; none of their processes is left afterwards, also after Ctrl-C and SIGTERM."""
    if not (ENVIRONMENT / "bin" / "python").exists():
        raise SystemExit(f"there is no vLLM in {ENVIRONMENT}; name its environment with PERL_VLLM_ENV")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    found = [Server(port, folder, start_command(port, [f"rollout.prefetch={prefetch}"])) for port in ports]
    try:
        for server in found:
            server.start()
        for server in found:
            server.wait()
        yield found
    finally:
        for server in found:
            server.kill()


class Door:
    """An address behind which first one server answers, then another; each connection keeps the one it began with.

    Attributes:
        url: The address.
    """

    def __init__(self, url: str) -> None:
        """Leads to a server."""
        self.lead_to(url)
        self._listener = socket.create_server(("localhost", 0), backlog=128)
        self.url = f"http://localhost:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def lead_to(self, url: str) -> None:
        """From the next connection on another server answers."""
        self._port = int(url.rpartition(":")[2])

    def _accept(self) -> None:
        while True:
            one, _ = self._listener.accept()
            threading.Thread(target=_forward, args=(one, self._port), daemon=True).start()


def _forward(one: socket.socket, port: int) -> None:
    with one, contextlib.suppress(OSError), socket.create_connection(("localhost", port)) as other:
        back = threading.Thread(target=_copy, args=(other, one), daemon=True)
        back.start()
        _copy(one, other)
        back.join()


def _copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65_536):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


class RecordingTrainer(PeftGRPOTrainer):
    """Remembers the prompt of each row of each optimizer step, where its gradient is computed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 (TRL's)
        """As of the trainer."""
        super().__init__(*args, **kwargs)
        self.trained_on: list[list[tuple[int, ...]]] = []
        run = self.optimizer_step.run_window

        def recorded(model: torch.nn.Module, batches: list[dict[str, Any]]) -> torch.Tensor | None:
            rows = [
                tuple(ids[mask.bool()].tolist())
                for batch in batches
                for ids, mask in zip(batch["prompt_ids"], batch["prompt_mask"], strict=True)
            ]
            self.trained_on.append(rows)
            return run(model, batches)

        self.optimizer_step.run_window = recorded  # type: ignore[method-assign]


class Killer(TrainerCallback):
    """Kills a server while it answers in given steps, and starts it again; reads the engine's counts at the end."""

    def __init__(self, trainer: PeftGRPOTrainer, victim: Server, steps: Sequence[int]) -> None:
        """Kills in the steps, counted from 1; in none before the second, when all servers have the policy."""
        self.kills: list[dict[str, int]] = []
        self.counts: dict[str, int] = {}
        self._trainer, self._victim, self._steps = trainer, victim, steps
        self._threads: list[threading.Thread] = []
        self._ended = threading.Event()

    def on_step_begin(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:  # noqa: ANN401 (transformers')
        """Waits until the victim serves and waylays it; before the last step it must have come back too."""
        step = state.global_step + 1
        if step in (*self._steps, state.max_steps):
            one = Request((5, 6, 7), 1), EngineSampling(1.0, 1, end_token_ids=())
            while self._victim.url not in self._trainer.rollout_source.engine.trial(*one):
                time.sleep(0.5)
        if step in self._steps:
            self._threads.append(threading.Thread(target=self._kill))
            self._threads[-1].start()

    def on_train_end(self, *_: Any, **__: Any) -> None:  # noqa: ANN401
        """Reads what the engine counted while there is one."""
        self._ended.set()
        for thread in self._threads:
            thread.join()
        self.counts = dict(self._trainer.rollout_source.engine.counts)

    def _kill(self) -> None:
        while (running := self._victim.running()) < _LEAST_RUNNING:
            if self._ended.wait(0.01):
                return
        step = self._trainer.state.global_step + 1
        self._victim.kill()
        self.kills.append({"step": step, "completions_being_written": running})
        self._victim.start()


def trainer_of(plan: Plan, kind: type[PeftGRPOTrainer] = PeftGRPOTrainer) -> PeftGRPOTrainer:
    """The trainer of a plan, which prints nothing."""
    trainer = kind(
        model=load_base(plan.recipe.model, plan.arguments.device),
        reward_funcs=[reward.function for reward in plan.rewards],
        args=plan.arguments,
        train_dataset=plan.problems.train,
        processing_class=plan.tokenizer,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer
