"""What every test runs under: no network, few threads, no usage statistics, warnings that are errors.

Stricter than production: a test that reaches for the Hub fails at once instead of waiting for it.
"""

import atexit
import contextlib
import gc
import logging
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

# Before any library reads them.
os.environ.update(
    HF_HUB_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    TOKENIZERS_PARALLELISM="false",
    TRANSFORMERS_VERBOSITY="error",
    HF_HUB_DISABLE_PROGRESS_BARS="1",
    HF_DATASETS_DISABLE_PROGRESS_BARS="1",
    TRL_EXPERIMENTAL_SILENCE="1",  # about rollout_func, which is how tests give two trainers the same completions
    # Two test processes share two cores; threads that spin while they wait would slow both down many times.
    OMP_NUM_THREADS="1",
    OMP_WAIT_POLICY="PASSIVE",
    # Of this test process alone: what one evaluation keeps of a base is not there for another test's.
    PERL_CACHE=tempfile.mkdtemp(prefix="perl-tests-cache-"),
)
atexit.register(shutil.rmtree, os.environ["PERL_CACHE"], ignore_errors=True)
for launcher_variable in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
    os.environ.pop(launcher_variable, None)

CHECKOUT = Path(__file__).resolve().parent.parent
pytest_plugins = ["tests.tiers", "tests.vllm_fixtures", "tests.hub_fixtures", "tests.training.tracker_fixtures"]

# So many modules, imported since, are worth another look of the garbage collector.
MANY_MODULES = 200
_frozen = {"modules": 0}


def pytest_runtest_setup() -> None:
    """What libraries hold is no garbage, and the collector need not go through it again.

    A full collection takes .4 s in a process that has imported everything, and trainers ask for two in each training,
    which is half of a short training's time.
    """
    if len(sys.modules) >= _frozen["modules"] + MANY_MODULES:
        gc.collect()
        gc.freeze()
        _frozen["modules"] = len(sys.modules)


@pytest.fixture(autouse=True)
def _deterministic() -> None:
    """The same random numbers in every test, in whatever order tests run; no thread count left behind."""
    random.seed(0)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(0)
        torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _environment_as_it_was() -> Iterator[None]:
    """What a library sets while it trains or compiles is not in the way of commands that later tests fork."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    for name, value in before.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path) -> Iterator[None]:
    """Nothing is written to the checkout, and no test finds a file by the folder it was started in.

    Not by ``monkeypatch``: a test that calls ``undo()`` would go on in the checkout.
    """
    with contextlib.chdir(tmp_path):
        yield


@pytest.fixture(autouse=True)
def _nothing_kept_of_bases() -> None:
    """A test that counts what is drawn of a base finds nothing that another test has drawn."""
    shutil.rmtree(os.environ["PERL_CACHE"], ignore_errors=True)


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    """A command that runs in this process sets up its own logging, which a later test's ``caplog`` would not hear."""
    logger = logging.getLogger("perl")
    handlers, propagate, level = list(logger.handlers), logger.propagate, logger.level
    yield
    logger.handlers[:], logger.propagate = handlers, propagate
    logger.setLevel(level)


@pytest.fixture(scope="module")
def tokenizer():
    """That of the sandbox's base."""
    from perl.policy.model import load_tokenizer  # here: not every test needs what it imports
    from perl.recipe.sections import ModelSection

    return load_tokenizer(ModelSection())


@pytest.fixture
def checkout() -> Path:
    """The root of the project."""
    return CHECKOUT


@pytest.fixture
def perl_command() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs ``python -m perl`` as a process of its own: ``perl_command("train", "quickstart", cwd=...)``."""
    from tests import warm

    def run(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
        return warm.run([*warm.COMMAND, *arguments], capture_output=True, text=True, check=False, **options)

    return run
