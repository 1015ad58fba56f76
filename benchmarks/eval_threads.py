"""Seconds of `perl eval` on a tiny model, on an idle machine and beside busy processes, by the number of CPU threads.

Run as ``python benchmarks/eval_threads.py`` (about four minutes on two cores). The quickstart's adapter and its base
answer problems of ``sandbox:chain`` in processes of their own: with all threads, which is what PyTorch takes by itself,
and with as many as ``perl eval`` chooses. ``--before REVISION`` runs that revision's ``perl eval`` too. One that takes
longer than ``--most`` seconds is stopped, and its completions counted. All must draw the same completions. Prints a
table and writes ``results/eval_threads.json``.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from result_lines import as_lines

from perl.run import devices as threads
from perl.run.folder import installed_versions

CHECKOUT = Path(__file__).resolve().parent.parent
TASK = "sandbox:chain"
# What a person's shell has; a number of threads in the environment would be the user's choice.
CHOICES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def environment(sources: Path) -> dict[str, str]:
    """Of a process that runs ``perl`` from these sources."""
    kept = {name: value for name, value in os.environ.items() if name not in CHOICES}
    return {**kept, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(sources / "src")}


def perl(sources: Path, *arguments: str, most: float | None = None) -> float:
    """Wall seconds of a command, which is stopped after so many."""
    started = time.perf_counter()
    command = [sys.executable, "-m", "perl", *arguments]
    with suppress(subprocess.TimeoutExpired):
        subprocess.run(command, check=True, capture_output=True, env=environment(sources), timeout=most)  # noqa: S603
    return time.perf_counter() - started


@contextmanager
def busy(count: int) -> Iterator[None]:
    """So many processes that compute meanwhile."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def of_revision(revision: str, folder: Path) -> Path:
    """The sources of a revision."""
    archive = subprocess.run(["git", "-C", CHECKOUT, "archive", revision], check=True, capture_output=True)  # noqa: S603, S607
    folder.mkdir()
    subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)  # noqa: S603, S607
    return folder


def drawn(folder: Path) -> dict[tuple[Any, ...], str]:
    """Every completion of an evaluation by policy, problem and number."""
    file = folder / "samples.jsonl"
    whole = file.read_text(encoding="utf-8").rpartition("\n")[0] if file.is_file() else ""
    rows = [json.loads(line) for line in whole.splitlines()]
    return {(row["policy"], row["problem"], row["index"]): row["text"] for row in rows}


def main() -> None:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--adapter", help="run folder of the quickstart; trained first if not given")
    parser.add_argument("--before", metavar="REVISION", help="measure that revision's `perl eval` too")
    parser.add_argument("--limit", type=int, default=24, help="problems")
    parser.add_argument("--most", type=float, default=110.0, help="seconds of an evaluation")
    parser.add_argument("--busy", type=int, default=8, help="processes that compute meanwhile")
    arguments = parser.parse_args()
    place = Path(tempfile.mkdtemp(prefix="eval_threads"))
    adapter = arguments.adapter or str(place / "quickstart")
    if not arguments.adapter:
        perl(CHECKOUT, "train", "quickstart", "train.report_to=[]", "-o", adapter)
    asked = ["--adapter", adapter, "--tasks", TASK, "--limit", str(arguments.limit), "--k", "4", "--no-lighteval"]
    everything = str(os.cpu_count())
    ways = {f"all threads ({everything})": (CHECKOUT, ["--threads", everything]), "chosen": (CHECKOUT, [])}
    if arguments.before:
        ways = {arguments.before: (of_revision(arguments.before, place / "before"), []), **ways}
    rows: list[dict[str, Any]] = []
    completions: list[dict[tuple[Any, ...], str]] = []
    wanted = arguments.limit * 4 * 2
    print(f"{'perl eval':22}{'busy processes':>15}{'load before':>13}{'seconds':>9}{'completions':>13}", flush=True)
    for count in (0, arguments.busy):
        for name, (sources, further) in ways.items():
            output = place / f"{count}-{len(rows)}"
            load = os.getloadavg()[0]
            with busy(count):
                seconds = perl(sources, "eval", *asked, "-o", str(output), *further, most=arguments.most)
            found = drawn(output)
            completions.append(found)
            row = {"way": name, "busy": count, "load before": load, "seconds": seconds, "completions": len(found)}
            rows.append(row)
            print(f"{name:22}{count:>15}{load:>13.1f}{seconds:>9.1f}{len(found):>9}/{wanted}", flush=True)
    whole = max(completions, key=len)
    same = all(whole.get(place) == text for one in completions for place, text in one.items())
    print(f"the same completions each time: {'yes' if same else 'NO'}")
    shutil.rmtree(place)
    result = {
        "numbers a thread": threads.NUMBERS_A_THREAD,
        "rows": rows,
        "task": TASK,
        "problems": arguments.limit,
        "k": 4,
        "completions wanted": wanted,
        "processors": os.cpu_count(),
        "same completions": same,
        "versions": installed_versions(),
    }
    path = Path(__file__).parent / "results" / "eval_threads.json"
    path.write_text(as_lines(result) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
