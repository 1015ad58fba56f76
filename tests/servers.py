"""Stock vLLM servers for tests: real processes that are started, killed, stopped and started again.

environment folder -> server process -> address

None outlives the tests: each has a watchdog that kills it once no process that uses it is left, however that one ended.
"""

import contextlib
import http.client
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from perl.sandbox import BASE_FOLDER
from tests import warm
from tests.ports import free_port

CHECKOUT = Path(__file__).resolve().parent.parent
ENVIRONMENT = Path(os.environ.get("PERL_VLLM_ENV", CHECKOUT / ".venv-vllm"))
START_SECONDS = 600

SERVED_NAME = "sandbox"
LORA = ("--enable-lora", "--max-lora-rank", "64", "--max-loras", "4")
RUNTIME = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", "VLLM_SERVER_DEV_MODE": "1"}
_FLAGS = {
    "--model": str(BASE_FOLDER),
    "--served-model-name": SERVED_NAME,
    "--max-model-len": "256",
    "--dtype": "float32",
    "--logprobs-mode": "processed_logprobs",
    "--num-gpu-blocks-override": "256",  # the smallest cache that can be asked for, 1 GiB, is much more than is needed
}
_VARIABLES = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
_PROGRAM = "vllm.entrypoints.openai.api_server"
VLLM = warm.Warmed(
    str(ENVIRONMENT / "bin" / "python"),
    (_PROGRAM, "vllm.v1.engine.core", "vllm.v1.worker.cpu_worker"),
    os.environ | _VARIABLES,
)
# Kills a process group once the group is empty or no process named in a file is left.
_WATCHDOG = """
import os, sys, time
group, users = int(sys.argv[1]), sys.argv[2]
def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
while alive(-group) and any(alive(int(pid)) for pid in open(users).read().split()):
    time.sleep(0.3)
try:
    os.killpg(group, 9)
except ProcessLookupError:
    pass
"""


def absent() -> str | None:
    """Why no server can be started here; None: it can."""
    if (ENVIRONMENT / "bin" / "python").exists():
        return None
    return f"there is no vLLM in {ENVIRONMENT}: make vllm-env, or name its folder with PERL_VLLM_ENV"


class VllmProcess:
    """A vLLM server with the sandbox's base, in float32 on the CPU.

    Attributes:
        url: Its address, the same after a restart.
        log: What it printed.
    """

    def __init__(
        self,
        folder: Path,
        flags: Sequence[str] = LORA,
        variables: dict[str, str] | None = None,
        port: int | None = None,
        imports: bool = False,
    ) -> None:
        """Starts it; :meth:`wait` for it.

        Args:
            folder: For its log and for the list of processes that use it, which begins with this one.
            flags: Added to those of every server, or in their place.
            variables: Of its environment; None: with them it loads adapters and weights.
            port: None: one that is free.
            imports: Start it as a person does; otherwise it is a fork of a process that has imported vLLM.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log, self.users = folder / "server.log", folder / "users"
        self.users.write_text(f"{os.getpid()}\n")
        given = list(flags)
        for name, value in _FLAGS.items():
            given += [] if name in given else [name, value]
        self._arguments = [
            "-m",
            _PROGRAM,
            "--enforce-eager",
            "--no-enable-chunked-prefill",
            "--port",
            str(self.port),
            *given,
        ]
        self._imports = imports
        self._variables = os.environ | _VARIABLES | (RUNTIME if variables is None else variables)
        self._watchdogs: list[subprocess.Popen[bytes]] = []
        self.process: subprocess.Popen[bytes] | None = None
        self.restart(wait=False)

    def restart(self, wait: bool = True) -> None:
        """Starts it again on the same port."""
        self.kill()
        with self.log.open("ab") as log:
            options = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log, "cwd": self.log.parent}
            options |= {"env": self._variables, "start_new_session": True}
            if self._imports:
                self.process = subprocess.Popen([VLLM.python, *self._arguments], **options)
            else:
                self.process = warm.fork(VLLM, self._arguments, **options)
        watchdog = [sys.executable, "-c", _WATCHDOG, str(self.process.pid), str(self.users)]
        self._watchdogs.append(subprocess.Popen(watchdog, start_new_session=True))
        if wait:
            self.wait()

    def wait(self) -> "VllmProcess":
        """Returns when it is healthy."""
        end = time.monotonic() + START_SECONDS
        while not is_healthy(self.url):
            if self.process is None or self.process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"vLLM did not start; see {self.log}:\n{self.log.read_text()[-3000:]}")
            time.sleep(0.2)
        return self

    def kill(self) -> None:
        """SIGKILL to the server and all its processes."""
        if self.process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.process = None
        for watchdog in self._watchdogs:  # each ends with its group
            watchdog.wait()
        self._watchdogs.clear()

    def leave(self) -> None:
        """Leaves it to the other processes that use it, and to its watchdog."""
        for process in [self.process, *self._watchdogs]:
            process.returncode = 0  # not waited for here

    def stop(self) -> None:
        """SIGSTOP: it keeps its connections and answers nothing."""
        os.killpg(self.process.pid, signal.SIGSTOP)

    def cont(self) -> None:
        """SIGCONT."""
        os.killpg(self.process.pid, signal.SIGCONT)

    def engine_processes(self) -> list[int]:
        """Its processes that generate, which the one that answers HTTP started."""
        command = [str(shutil.which("ps")), "-o", "pid=", "-g", str(self.process.pid)]
        found = subprocess.run(command, capture_output=True, text=True, check=True)
        return sorted({int(pid) for pid in found.stdout.split()} - {self.process.pid})


def is_healthy(url: str) -> bool:
    """Whether a server answers that it is."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=5.0)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
