"""How long a person waits before anything happens: import, help, and the system's Perl behind our name.

Run as ``python benchmarks/startup.py``. Prints medians in milliseconds and writes ``results/startup.json``.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from perl.cli.main import next_perl
from perl.run.folder import installed_versions

OURS = Path(sys.executable).parent / "perl"


def seconds_of(command: list[str], repeats: int) -> float:
    """Median wall time of a command, after one run that warms the disk cache."""
    times = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)  # noqa: S603 (fixed commands)
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])


def main() -> None:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=21)
    arguments = parser.parse_args()
    commands = {
        "python -c pass": [sys.executable, "-c", "pass"],
        "python -c 'import perl'": [sys.executable, "-c", "import perl"],
        "perl --help": [str(OURS), "--help"],
        "perl --version": [str(OURS), "--version"],
        "perl recipes": [str(OURS), "recipes"],
    }
    real = next_perl(os.environ["PATH"])
    if real is not None:
        commands |= {
            "perl -e 1 (ours, then the system's)": [str(OURS), "-e", "1"],
            "the system's -e 1": [real, "-e", "1"],
        }
    measured = {name: 1000 * seconds_of(command, arguments.repeats) for name, command in commands.items()}
    if real is not None:
        measured["what ours adds to -e 1"] = (
            measured["perl -e 1 (ours, then the system's)"] - measured["the system's -e 1"]
        )
    for name, milliseconds in measured.items():
        print(f"{name:38}{milliseconds:8.1f} ms")
    result = {"milliseconds": measured, "repeats": arguments.repeats, "versions": installed_versions()}
    path = Path(__file__).parent / "results" / "startup.json"
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
