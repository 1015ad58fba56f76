"""Process reward models, worker pools and counts of failures that several test modules of rewards use."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from perl.rewards.custom import Failures
from perl.run.workers.pool import WorkerPool
from tests.rewards.pool_work import FUNCTIONS, LONG


@pytest.fixture
def token_prm() -> str:
    """Folder of a random model with a class for each step."""
    import torch

    from tests.oracles.tiny_prm import save_tiny_prm

    torch.manual_seed(1)
    return save_tiny_prm(Path("token_prm"))


@pytest.fixture
def causal_prm() -> str:
    """Folder of a random model that is read as Math-Shepherd's."""
    import torch

    from tests.oracles.tiny_prm import save_tiny_prm, shepherd_tokenizer

    torch.manual_seed(2)
    return save_tiny_prm(Path("causal_prm"), "causal", shepherd_tokenizer())


@pytest.fixture
def own_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The module ``own_work`` with what workers are given to do."""
    monkeypatch.syspath_prepend(tmp_path)
    Path("own_work.py").write_text(FUNCTIONS, encoding="utf-8")


@pytest.fixture
def pool_of() -> Iterator[Callable[..., WorkerPool]]:
    """Pools of functions of ``own_work`` that are closed after the test: ``pool_of("double", workers=2)``."""
    pools = []

    def make(function: str, **settings: object) -> WorkerPool:
        pools.append(WorkerPool(f"own_work:{function}", **{"timeout_seconds": LONG, **settings}))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


@pytest.fixture
def failures() -> Failures:
    return Failures("own", most=2)


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """What has been logged as a warning."""
    caplog.set_level(logging.WARNING, logger="perl")

    def without_codes() -> list[str]:
        found = [record.getMessage() for record in caplog.records]
        assert all(line.endswith(" [PRL334]") for line in found)
        return [line.removesuffix(" [PRL334]") for line in found]

    return without_codes
