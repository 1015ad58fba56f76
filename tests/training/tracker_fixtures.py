"""Which trackers are installed here, and a machine on which nobody is logged in to any."""

import importlib.util
import os

import pytest

MODULES = {"mlflow": "mlflow", "tensorboard": "tensorboard", "trackio": "trackio", "wandb": "wandb"}
NOT_INSTALLED = [name for name, module in MODULES.items() if importlib.util.find_spec(module) is None]
INSTALLED = [name for name in MODULES if name not in NOT_INSTALLED]
SQL = importlib.util.find_spec("sqlalchemy") is not None

needs = {
    name: pytest.mark.skipif(name in NOT_INSTALLED, reason=f"{name} is not installed: pip install 'perl-rl[track]'")
    for name in MODULES
}


@pytest.fixture
def nobody(tmp_path, monkeypatch):
    """An environment without logins and settings, in an empty folder."""
    for name in list(os.environ):
        if name.startswith(("WANDB_", "MLFLOW_", "TRACKIO_", "TENSORBOARD_")):
            monkeypatch.delenv(name)
    for name in ("MLFLOW_DISABLE_TELEMETRY", "WANDB_ERROR_REPORTING"):  # which are set here, and taken back
        monkeypatch.setenv(name, "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("NETRC", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path
