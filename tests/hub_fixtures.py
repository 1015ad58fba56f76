"""A Hub of a test's own, which this process and the processes it starts take for the real one.

Hub on loopback -> constants of huggingface_hub, environment of a process

huggingface_hub reads its environment once, at import; so in this process its constants are changed, and put back.
"""

import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from huggingface_hub import HfFileSystem, constants, hf_api
from huggingface_hub.utils import close_session

from tests.local_hub import LocalHub

USER = "user"
TOKEN = "hf_" + "testTokenOfNobody" * 2  # of a real token's form, so that a search for tokens finds it
_FORGOTTEN = (
    *("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH", "HF_OIDC_RESOURCE"),
    *("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_DATASETS_CACHE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"),
)
_DATASETS_URL = "/datasets/{repo_id}/resolve/{revision}/{path}"
# The client's own, of its upload by plain LFS, which only a Hub without Xet gets.
_OF_THE_CLIENT = r"Use 'content=<\.\.\.>' to upload raw bytes/text content"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    """A Hub where ``user`` is logged in, with an empty cache."""
    warnings.filterwarnings("ignore", message=_OF_THE_CLIENT, category=DeprecationWarning)  # pytest puts filters back
    with LocalHub(USER, TOKEN) as running, taken_for_the_hub(running, tmp_path / "hf-home"):
        yield running
        monkeypatch.undo()  # else a constant that a test replaced would get this Hub's value back when that is gone


@pytest.fixture
def nothing_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that failed is repeated at once."""
    monkeypatch.setattr("perl.hub.push.requests._FIRST_DELAY", 0.0)


@pytest.fixture
def hub_env(tmp_path: Path) -> Callable[[LocalHub], dict[str, str]]:
    """The environment of a process for which this Hub is the Hub: ``subprocess.run(..., env=hub_env(hub))``."""

    def environment(running: LocalHub) -> dict[str, str]:
        home = tmp_path / "hf-home"
        _log_in(home, running)
        kept = {name: value for name, value in os.environ.items() if name not in _FORGOTTEN}
        return kept | _environment(running, home)

    return environment


@contextmanager
def taken_for_the_hub(running: LocalHub, home: Path) -> Iterator[None]:
    """Within it this process's libraries talk to a Hub, as its user.

    Args:
        running: The Hub.
        home: ``HF_HOME``: caches, and the token where ``hf auth login`` would put it.
    """
    _log_in(home, running)
    values = _constants(running.url, home)
    with pytest.MonkeyPatch.context() as changed:
        for name in _FORGOTTEN:
            changed.delenv(name, raising=False)
        for name, value in _environment(running, home).items():
            changed.setenv(name, value)
        before = set(sys.modules)
        for module in _modules_with_copies():
            for name in values.keys() & vars(module).keys():
                changed.setattr(module, name, values[name])
        changed.setattr(hf_api.api, "endpoint", running.url)
        if "datasets.config" in before:
            for name, value in _of_datasets(values).items():
                changed.setattr(sys.modules["datasets.config"], name, value)
        _forget()
        yield
        _forget()
    _put_back_in(set(sys.modules) - before, values.keys())


def _environment(running: LocalHub, home: Path) -> dict[str, str]:
    return {
        "HF_ENDPOINT": running.url,
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HOME": str(home),
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
    }


def _log_in(home: Path, running: LocalHub) -> None:
    home.mkdir(exist_ok=True)
    place = home / "token"
    place.write_text(running.token or TOKEN)
    place.chmod(0o600)


def _constants(url: str, home: Path) -> dict[str, Any]:
    return {
        "ENDPOINT": url,
        "HUGGINGFACE_CO_URL_TEMPLATE": url + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_OFFLINE": False,
        "HF_HUB_DISABLE_XET": True,
        "HF_HOME": str(home),
        "HF_HUB_CACHE": str(home / "hub"),
        "HUGGINGFACE_HUB_CACHE": str(home / "hub"),
        "HF_ASSETS_CACHE": str(home / "assets"),
        "HF_TOKEN_PATH": str(home / "token"),
        "HF_STORED_TOKENS_PATH": str(home / "stored_tokens"),
        "AGENT_HARNESSES_PATH": str(home / ".agent_harnesses.json"),
    }


def _of_datasets(values: dict[str, Any]) -> dict[str, Any]:
    return {
        "HF_ENDPOINT": values["ENDPOINT"],
        "HUB_DATASETS_URL": values["ENDPOINT"] + _DATASETS_URL,
        "HF_HUB_OFFLINE": values["HF_HUB_OFFLINE"],
        "HF_DATASETS_OFFLINE": values["HF_HUB_OFFLINE"],
        "HF_DATASETS_CACHE": Path(values["HF_HOME"]) / "datasets",
    }


def _modules_with_copies() -> list[ModuleType]:
    """Where constants may be: their own module, and those that took one by its name."""
    known = list(sys.modules.items())
    return [constants, *(module for name, module in known if name.startswith(("huggingface_hub.", "perl.")))]


def _put_back_in(imported: set[str], names: Any) -> None:
    """Modules imported while another Hub was the Hub took its address; the constants are the real ones again."""
    for module in _modules_with_copies():
        if module.__name__ in imported:
            for name in names & vars(module).keys():
                setattr(module, name, getattr(constants, name))
    if "datasets.config" in imported:
        for name, value in _of_datasets(vars(constants)).items():
            setattr(sys.modules["datasets.config"], name, value)


def _forget() -> None:
    """No client keeps a connection, an identity or a listing of another Hub."""
    close_session()
    hf_api.api._whoami_cache.clear()
    HfFileSystem.clear_instance_cache()
