"""The first hour on a GPU: one command, eight stages, each a table and a JSON file.

Run as ``python benchmarks/gpu.py`` on a machine with a CUDA device; ``--tiny --device cpu`` runs all of it small, which
shows that it works and measures nothing. Stages by letter or name, in the order in which they are worth most:

* a ``doctor``: versions, the GPU, what it reaches, which attention kernel is taken.
* b ``correct``: packed rows against padded ones, the kernel against SDPA, a step against TRL's, every method.
* d ``step``: the training half of a step beside TRL's on the same rollouts.
* c ``memory``: the memory that is predicted and the true peak; an out-of-memory and what is left after it.
* f ``train``: whole runs with transformers' rollouts, killed and resumed.
* e ``profile``: which kernels the time goes to.
* g ``vllm``: rollouts from vLLM in the process, where it is installed.
* h ``fuse``: whether compiled layers and a fused head make a step faster there.

A stage runs in a process of its own and is stopped at its limit, with every process it has started; what it has
measured until then is kept, and the next stage begins. The same command again goes on where it was: rows that are there
for the same device and versions are not measured again (``--again``: all are), those that failed are. Prints tables and
writes ``results/gpu/STAGE.json`` after every row (``gpu_tiny`` with ``--tiny``; on a CPU into ``runs/gpu_benchmark``),
and beside it ``STAGE.log``, all that the stage and its runs have said. ``--earlier`` goes on from the results in
another folder, which is left as it is.
Ends with 1 if a row has an error or a check failed, with 130 if it was interrupted.
"""

import argparse
import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gpu_log import Log
from gpu_stages import OF_THE_STAGE
from result_lines import as_lines

HERE = Path(__file__).resolve().parent
MARK = "PERL_GPU_STAGE"  # in the environment of all that a stage starts: how it is found when the stage ends
GRACE_SECONDS = 5.0  # between being asked to end and being ended
EXIT_SECONDS = 60.0  # that a process which tells no more is given for its exit code: it may have a GPU to give back


NAMES = ("doctor", "correct", "step", "memory", "train", "profile", "vllm", "fuse")


@dataclass(frozen=True)
class Stage:
    """What is run, and how long at most."""

    letter: str
    name: str
    module: str
    limit: float = 480.0
    least: float = 45.0  # with less time than this it is not begun


STAGES = tuple(Stage(letter, name, f"gpu_stages.{name}") for letter, name in zip("abdcfegh", NAMES, strict=True))


@dataclass
class Outcome:
    """What is known of a stage by now."""

    stage: Stage
    header: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    kept: int = 0
    table: str = ""
    complete: bool = False
    refused: str = ""
    seconds: float = 0.0

    def count(self, kind: str) -> int:
        """Rows with an error, rows that were skipped or checks that failed ("ok")."""
        return sum(row.get("ok") is False if kind == "ok" else kind in row for row in self.rows)

    def failed(self) -> bool:
        """Whether something is wrong with it."""
        return bool(self.count("error") or self.count("ok") or self.refused)


def main(arguments: list[str] | None = None) -> int:
    """Runs the stages asked for, prints, and says what was left out."""
    options = _options(arguments)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))  # asked to end: as with Ctrl-C
    return run_stages([stage for stage in STAGES if stage in options.stages], options)


def run_stages(stages: list[Stage], options: argparse.Namespace) -> int:
    """One stage after the other until the time is up.

    Args:
        stages: In this order.
        options: ``device``, ``tiny``, ``again``, ``output``, ``earlier``, ``minutes``.

    Returns:
        The exit code.
    """
    end = time.monotonic() + 60 * options.minutes
    outcomes: list[Outcome] = []
    left_out: list[str] = []
    code = 0
    for stage in stages:
        left = end - time.monotonic()
        if left < stage.least:
            left_out.append(f"{stage.letter} {stage.name}")
            continue
        print(f"\n== {stage.letter} {stage.name}, {min(left, stage.limit):.0f} s at most ==", flush=True)
        outcomes.append(Outcome(stage))
        try:
            run_stage(outcomes[-1], options, min(left, stage.limit))
        except KeyboardInterrupt:
            code = 130
        _print_outcome(outcomes[-1])
        if code or outcomes[-1].refused:
            break
    _print_summary(outcomes, options)
    if left_out:
        print(f"left out, no time left of {options.minutes:g} minutes: {', '.join(left_out)}; run them by name")
    if code:
        print("interrupted; the same command goes on from here")
    return code or int(any(outcome.failed() for outcome in outcomes))


def run_stage(outcome: Outcome, options: argparse.Namespace, seconds: float) -> None:
    """Runs a stage in a process of its own, and stops it at its limit with all that it has started.

    Args:
        outcome: Filled as rows arrive, so that it holds what there is if this is interrupted.
        options: As for :func:`run_stages`.
        seconds: The limit.
    """
    started, began = time.monotonic(), datetime.now(UTC).isoformat(timespec="seconds")
    path = options.output / f"{outcome.stage.name}.json"
    folder = Path(tempfile.mkdtemp(prefix=f"gpu-{outcome.stage.name}-"))
    mark, written = uuid.uuid4().hex, True
    if options.earlier and not options.again:
        _bring(path, options.earlier)
    log = Log(path.with_suffix(".log"), f"== {began} ==\n")
    process, pipe = _start(outcome.stage, options, path, folder, mark, seconds)
    try:
        for message in _messages(process, pipe, started + seconds):
            written = not _take(outcome, message)
            outcome.seconds = time.monotonic() - started
            if not written:
                _write(path, outcome, began, seconds)
                written = True
            if "row" in message:
                _print_progress(message["row"])
        trouble = _trouble(process, started + seconds, outcome)
        if trouble:
            outcome.rows.append({"case": OF_THE_STAGE, "error": trouble, "log": log.tail()})
            written = False
    finally:
        _end(process, mark)
        os.close(pipe)
        if not written:
            _write(path, outcome, began, seconds)
        log.close()
        shutil.rmtree(folder, ignore_errors=True)


def _bring(path: Path, earlier: Path) -> None:
    """Copies a stage's results and log from another folder to where there are none yet."""
    for wanted in (path, path.with_suffix(".log")):
        if (earlier / wanted.name).is_file() and not wanted.exists():
            wanted.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(earlier / wanted.name, wanted)


def _start(
    stage: Stage, options: argparse.Namespace, path: Path, folder: Path, mark: str, seconds: float
) -> tuple[subprocess.Popen[bytes], int]:
    """The stage's process, and the end of the pipe on which it tells its rows."""
    ours, theirs = os.pipe()
    told = {
        "module": stage.module,
        "device": options.device,
        "tiny": options.tiny,
        "again": options.again,
        "earlier": str(path.resolve()),
        "folder": str(folder),
        "seconds": seconds,
        "pipe": theirs,
    }
    places = [str(HERE), str(HERE.parent / "src"), os.environ.get("PYTHONPATH", "")]
    environment = {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "TRL_EXPERIMENTAL_SILENCE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
        "PYTHONUNBUFFERED": "1",  # what was said is in the log, however the process ends
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, places)),
        MARK: mark,
    }
    with path.with_suffix(".log").open("ab") as log:
        process = subprocess.Popen(  # noqa: S603 (ourselves)
            [sys.executable, "-W", "ignore", "-m", "gpu_stages", json.dumps(told)],
            cwd=HERE.parent,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=(theirs,),
            start_new_session=True,  # a group of its own, which can be ended; Ctrl-C is for us to handle
        )
    os.close(theirs)
    return process, ours


def _messages(process: subprocess.Popen[bytes], pipe: int, end: float) -> Iterator[dict[str, Any]]:
    """What the stage tells, until it ends or its time is up. A line that its end has cut short is left out."""
    read = b""
    while (left := end - time.monotonic()) > 0:
        if not select.select([pipe], [], [], min(left, 1.0))[0]:
            if process.poll() is not None:  # something that it has started holds the pipe
                return
            continue
        some = os.read(pipe, 1 << 16)
        if not some:
            return
        *lines, read = (read + some).split(b"\n")
        yield from map(json.loads, lines)


def _take(outcome: Outcome, message: dict[str, Any]) -> bool:
    """Adds what the stage has told to what is known; whether that is more than an earlier run has written."""
    outcome.table = message.get("table", outcome.table)
    outcome.complete = message.get("complete", outcome.complete)
    outcome.refused = message.get("refused", outcome.refused)
    if "header" in message:
        outcome.header, outcome.rows, outcome.kept = message["header"], message["rows"], len(message["rows"])
        return False
    if "row" in message:
        outcome.rows.append(message["row"])
    return bool(message.keys() & {"row", "complete"})


def _print_progress(row: dict[str, Any]) -> None:
    """A line as soon as a row is there, unless it came at once and is as it should be: the table has it."""
    found = next((f"{kind}: {row[kind]}" for kind in ("error", "skipped") if kind in row), "")
    found = found or {True: "ok", False: "FAILED"}.get(row.get("ok"), "measured")
    seconds = row.get("seconds")
    if found in ("ok", "measured") and isinstance(seconds, float) and seconds < 1:
        return
    print(f"  {row['case']}: {found}", flush=True)


def _trouble(process: subprocess.Popen[bytes], end: float, outcome: Outcome) -> str:
    """Why the stage did not come to its end, if it has not said so itself."""
    said = any(row["case"] == OF_THE_STAGE for row in outcome.rows)
    fine = bool(outcome.complete or outcome.refused or said)
    left = end - time.monotonic()
    try:
        code = process.wait(timeout=max(0.0, min(left, GRACE_SECONDS if fine else EXIT_SECONDS)))
    except subprocess.TimeoutExpired:
        stopped = "stopped at its limit; run it again to go on"
        return "" if fine else stopped if left < EXIT_SECONDS else "told no more, and did not end by itself"
    if fine:
        return ""
    return f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _end(process: subprocess.Popen[bytes], mark: str) -> None:
    """Ends the stage's group and whatever else bears its mark: servers have sessions of their own."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=GRACE_SECONDS)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    for pid in _marked(mark):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def _marked(mark: str) -> list[int]:
    """Processes that the stage or what it started has started; none where there is no /proc."""
    found, wanted = [], f"{MARK}={mark}".encode()
    for place in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if wanted in place.read_bytes().split(b"\0"):
                found.append(int(place.parent.name))
    return found


def _write(path: Path, outcome: Outcome, began: str, limit: float) -> None:
    """The file as a whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    found = {
        "stage": outcome.stage.name,
        "device": outcome.header.get("device"),
        "tiny": outcome.header.get("tiny"),
        "versions": outcome.header.get("versions"),
        "commit": outcome.header.get("commit"),
        "started": began,
        "seconds": round(outcome.seconds, 1),
        "limit": round(limit, 1),
        "complete": outcome.complete,
        "rows": outcome.rows,
    }
    partial = path.with_suffix(".part")
    partial.write_text(as_lines(found) + "\n", encoding="utf-8")
    partial.replace(path)


def _print_outcome(outcome: Outcome) -> None:
    """The stage's table, then what has no place in it."""
    if outcome.kept:
        print(f"  {outcome.kept} rows are there from an earlier run")
    if outcome.table:
        print("\n" + outcome.table)
    for row in outcome.rows:
        if "error" in row:
            print(f"{row['case']}: error: {row['error']}")
            print("\n".join(f"    | {line}" for line in row.get("log", [])), end="\n" if row.get("log") else "")
    sys.stdout.flush()


def _print_summary(outcomes: list[Outcome], options: argparse.Namespace) -> None:
    """A line a stage."""
    print(f"\n{'stage':12}{'state':>12}{'rows':>6}{'errors':>8}{'failed':>8}{'skipped':>9}{'seconds':>9}")
    for outcome in outcomes:
        state = "refused" if outcome.refused else "complete" if outcome.complete else "cut short"
        counts = [outcome.count(kind) for kind in ("error", "ok", "skipped")]
        name = f"{outcome.stage.letter} {outcome.stage.name}"
        print(f"{name:12}{state:>12}{len(outcome.rows):6}{counts[0]:8}{counts[1]:8}{counts[2]:9}{outcome.seconds:9.0f}")
    for refused in {outcome.refused for outcome in outcomes if outcome.refused}:
        print(refused)
    if options.output.exists():
        print(f"results: {options.output}")


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = ", ".join(f"{stage.letter} {stage.name}" for stage in STAGES)
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=f"by letter or name; all if none: {names}")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="models of a toy's size: shows that it runs")
    parser.add_argument("--again", action="store_true", help="measures what is there already anew")
    parser.add_argument("--output", type=Path, help="folder of the results")
    parser.add_argument("--earlier", type=Path, help="folder of results to go on from where --output has none")
    parser.add_argument("--minutes", type=float, default=25.0, help="after which no stage goes on (default 25)")
    options = parser.parse_args(arguments)
    known = {name: stage for stage in STAGES for name in (stage.letter, stage.name)}
    unknown = [name for name in options.stages if name not in known]
    if unknown:
        parser.error(f"no stage {unknown[0]!r}: there are {names}")
    if options.device == "cpu" and not options.tiny:
        parser.error("--device cpu needs --tiny: the real sizes take hours there")
    options.stages = [known[name] for name in options.stages] or list(STAGES)
    if options.output is None:
        on_gpu = HERE / "results" / ("gpu_tiny" if options.tiny else "gpu")
        options.output = on_gpu if options.device == "cuda" else HERE.parent / "runs" / "gpu_benchmark"
    return options


if __name__ == "__main__":
    sys.exit(main())
