"""vLLM servers that tests share, or have for themselves."""

import json
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest
from filelock import FileLock

from tests.servers import LORA, VllmProcess, absent


@pytest.fixture(scope="session")
def vllm_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a server with adapters up to rank 64, four at a time, that all test processes of this run share.

    For tests that leave it as it was: adapters under names of their own, no other weights.
    """
    with _shared(tmp_path_factory, "vllm") as url:
        yield url


@pytest.fixture(scope="session")
def _second_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of another one, shared likewise."""
    with _shared(tmp_path_factory, "lone-vllm") as url:
        yield url


@pytest.fixture
def lone_server(_second_server: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a server like ``vllm_server`` that only this test uses while it runs, for tests that ask the base.

    vLLM for CPUs computes the base wrongly beside requests for adapters, so it is refused where others serve some.
    Each test finds the base there, whatever weights the one before has left.
    """
    with FileLock(_of_all_processes(tmp_path_factory) / "lone-vllm-in-use.lock"):
        _put_the_base_back(_second_server, tmp_path_factory)
        yield _second_server


def _put_the_base_back(url: str, factory: pytest.TempPathFactory) -> None:
    label = httpx2.get(f"{url}/weight_info", trust_env=False).json()["weight_version"]
    if label == "default":
        return
    _label(url, f"{label}-left")  # whoever put them there
    import torch  # here: not every run of tests needs what takes seconds to import

    from perl.policy.model import load_base
    from perl.recipe.sections import ModelSection
    from perl.rollouts.sync import base_update
    from perl.rollouts.vllm.servers import ServerPool

    pool = ServerPool([url], factory.mktemp("base"))
    if pool.foreign_weights():
        pool.load(base_update(load_base(ModelSection(name="sandbox:base"), torch.device("cpu")), "tests-base"))
    pool.close()
    _label(url, "default")


def _label(url: str, label: str) -> None:
    httpx2.post(f"{url}/update_weight_version", json={"new_version": label}, trust_env=False).raise_for_status()


@contextmanager
def _shared(factory: pytest.TempPathFactory, name: str) -> Iterator[str]:
    """Address of a server that the first test process to ask starts, and the last one to leave kills."""
    reason = absent()
    if reason:
        pytest.skip(reason)
    shared = _of_all_processes(factory)
    lock, facts, users = FileLock(shared / f"{name}.lock"), shared / f"{name}.json", shared / name / "users"
    server = None
    with lock:
        if not facts.exists():
            server = VllmProcess(shared / name).wait()
            facts.write_text(json.dumps({"url": server.url, "group": server.process.pid}))
        else:
            with users.open("a") as file:
                file.write(f"{os.getpid()}\n")
        known = json.loads(facts.read_text())
    yield known["url"]
    with lock:
        left = [pid for pid in users.read_text().split() if int(pid) != os.getpid()]
        users.write_text("".join(f"{pid}\n" for pid in left))
        if not left:
            os.killpg(known["group"], signal.SIGKILL)
            facts.unlink()
    if server is not None:
        server.leave() if left else server.kill()


def _of_all_processes(factory: pytest.TempPathFactory) -> Path:
    """A folder that the test processes of this run have in common."""
    own = factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


StartServers = Callable[..., list[VllmProcess]]


@pytest.fixture(scope="module")
def own_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartServers]:
    """Starts servers of this module's own, several at once: ``own_servers(2)``; they are killed after its last test."""
    reason = absent()
    if reason:
        pytest.skip(reason)
    started: list[VllmProcess] = []

    def start(
        count: int = 1, flags: Sequence[str] = LORA, variables: dict[str, str] | None = None, wait: bool = True
    ) -> list[VllmProcess]:
        new = [VllmProcess(_folder(tmp_path_factory), flags, variables) for _ in range(count)]
        started.extend(new)
        return [server.wait() for server in new] if wait else new

    yield start
    for server in started:
        server.kill()


def _folder(factory: pytest.TempPathFactory) -> Path:
    return factory.mktemp("vllm")
