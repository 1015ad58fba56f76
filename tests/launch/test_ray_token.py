"""A cluster that `ray start` has begun on this machine, and which lets in only those who have its token."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

pytest.importorskip("ray")

RECIPE = ["quickstart", "train.max_steps=2", "engine.name=ray", "engine.processes=1", "--dry-run"]


@pytest.fixture
def locked_cluster():
    """Variables of a user who has its token, and its address."""
    home = Path(tempfile.mkdtemp(prefix="perl-"))  # the paths of Ray's sockets must be short
    (home / ".ray").mkdir()
    (home / ".ray" / "auth_token").write_text("0123456789abcdef" * 4)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    variables |= {"HOME": str(home), "RAY_TMPDIR": str(home / "t"), "OMP_NUM_THREADS": "1"}
    command = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", "--num-cpus", "3"]
    log = home / "log"
    with log.open("w") as out:
        cluster = subprocess.Popen([*command, "--port", str(port)], env=variables, stdout=out, stderr=out)
    noted, end = home / "t" / "ray" / "ray_current_cluster", time.monotonic() + 600.0
    while not noted.is_file() or not noted.read_text():
        assert cluster.poll() is None, log.read_text()
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.2)
    yield variables, noted.read_text().strip()
    cluster.send_signal(signal.SIGTERM)
    cluster.wait()
    shutil.rmtree(home, ignore_errors=True)


def looked_at(variables, *overrides):
    command = [sys.executable, "-m", "perl", "train", *RECIPE, *overrides]
    found = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    return next(line for line in found.stdout.splitlines() if "Ray: " in line)


@pytest.mark.nightly
def test_who_has_the_token_is_let_in_and_who_has_not_is_told(locked_cluster, tmp_path):
    variables, address = locked_cluster
    fits = f"Ray: {address} has one node, 0 GPUs and 3 cores; the run fits"
    assert looked_at(variables).endswith(fits)
    assert looked_at(variables, f"engine.address={address}").endswith(fits)
    stranger = variables | {"HOME": str(tmp_path), "RAY_TMPDIR": str(tmp_path)}
    assert f"{address}: the Ray cluster there wants a token" in looked_at(stranger, f"engine.address={address}")
    told = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 4}
    assert looked_at(stranger | told, f"engine.address={address}").endswith(fits)
