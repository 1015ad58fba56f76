"""What a GPU makes of this project, row by row, each with a time limit of its own.

Run as ``python benchmarks/gpu.py first`` (8 minutes) and ``python benchmarks/gpu.py rest`` (4 minutes) on a machine
with a CUDA device, ``python benchmarks/gpu.py real --base FOLDER`` to train a base from a folder, or name single rows.
``--tiny --device cpu`` runs the same rows small: that shows that they run, and measures nothing.

Rows run one after the other in a process of their own. A row that fails leaves one line of error, and a new process
takes the next one; so does a row that crashes, or is killed at its limit. The results are written after every row:
``FIRST.json`` and ``FIRST.log`` in the folder of ``--output``, named after what was asked for first. Ends with 1 if a
row failed, with 0 whether or not the aims are met.
"""

import argparse
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from result_lines import as_lines

HERE = Path(__file__).resolve().parent
LOG_BYTES = 4 * 2**20  # of the log's end that are kept
LEAST_SECONDS = 10.0  # with less time left than this no row is begun
START_SECONDS = 90.0  # that a process has for its imports before its first row
EXIT_SECONDS = 5.0  # a killed process that hangs in the driver is left behind after these


@dataclass(frozen=True)
class Row:
    """One thing to measure.

    Attributes:
        name: As it is asked for and printed.
        limit: Seconds until it is killed.
        function: ``package.module.function``, given the setting and the arguments; returns the numbers, and what is
            printed of them as "says".
        arguments: By name.
    """

    name: str
    limit: float
    function: str
    arguments: dict[str, Any] = field(default_factory=dict)


def step_row(model: str, tokens: int, trainer: str) -> Row:
    """A training step."""
    limit = {"4B": 40.0, "0.6B": 25.0}[model]
    arguments = {"model": model, "tokens": tokens, "trainer": trainer}
    return Row(f"{model} {tokens // 1024}k {trainer}", limit, "gpu_rows.speed.step", arguments)


PAIR = ("perl", "AsyncGRPO")
GROUPS: dict[str, list[Row]] = {
    "first": [
        Row("machine", 20, "gpu_rows.machine.machine"),
        Row("float32", 25, "gpu_rows.correct.passes", {"kind": "float32", "path": "segment"}),
        Row("bfloat16 kernel", 12, "gpu_rows.correct.passes", {"kind": "bfloat16", "path": "kernel"}),
        Row("bfloat16 segment", 12, "gpu_rows.correct.passes", {"kind": "bfloat16", "path": "segment"}),
        Row("step as TRL's", 15, "gpu_rows.correct.step_beside_trl"),
        Row("out of memory", 26, "gpu_rows.correct.out_of_memory"),
        *(step_row(model, 16_384, trainer) for model in ("4B", "0.6B") for trainer in PAIR),
        *(step_row(model, 2048, trainer) for model in ("4B", "0.6B") for trainer in (*PAIR, "GRPO")),
        Row("learn", 120, "gpu_rows.learn.sandbox"),
        *(step_row(model, 16_384, "GRPO") for model in ("4B", "0.6B")),
    ],
    "rest": [
        Row("profile", 50, "gpu_rows.more.profile"),
        Row("fused head", 35, "gpu_rows.more.variant", {"name": "fused head"}),
        Row("compiled layers", 70, "gpu_rows.more.variant", {"name": "compile"}),
        Row("NF4", 75, "gpu_rows.more.nf4"),
        Row("decode", 30, "gpu_rows.more.decode"),
        Row("compiled, fused head", 70, "gpu_rows.more.variant", {"name": "both"}),
    ],
    "real": [Row("learn real", 300, "gpu_rows.learn.real")],
}
ROWS = {row.name: row for rows in GROUPS.values() for row in rows}
# On an H100: a row's tokens/s, with what prime-rl's count of FLOPs makes of them for the 4B.
SPEED_AIMS = (
    ("4B 16k perl", 6500, " (22.6 % MFU)"),
    ("4B 16k perl", 8600, " (30 %), stretch"),
    ("0.6B 16k perl", 14_000, ""),
)
GRPO_RATIO, ASYNC_RATIO, PEAK_SHARE = 3.0, 1.0, 0.15


@dataclass(frozen=True)
class Options:
    """How rows are run: with what device and sizes, the end on ``time.monotonic``'s clock, the files."""

    device: str
    tiny: bool
    base: str | None
    end: float
    results: Path
    log: Path


def main(arguments: list[str] | None = None) -> int:
    """Runs the rows asked for, prints, and says how the aims fare."""
    rows, options = _asked(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the process of the rows is ended on the way out
    found = run_rows(rows, options)
    if options.tiny:
        print("--tiny: these numbers measure nothing")
    print("\n".join(aims(found)))
    return int(any("error" in row or row.get("ok") is False for row in found))


def run_rows(rows: list[Row], options: Options) -> list[dict[str, Any]]:
    """One row after the other until the time is up; what each gave, or why it gave nothing."""
    options.results.parent.mkdir(parents=True, exist_ok=True)
    found: list[dict[str, Any]] = []
    todo = list(rows)
    while todo:
        if options.end - time.monotonic() < LEAST_SECONDS:
            late = [{"row": row.name, "skipped": "no time was left"} for row in todo]
            print("\n".join(map(line, late)))
            _write(found := found + late, options)
            break
        for result in _of_one_process(list(todo), options):
            found.append({"row": todo.pop(0).name, **result})
            print(line(found[-1]), flush=True)
            _write(found, options)
    return found


def _of_one_process(rows: list[Row], options: Options) -> Iterator[dict[str, Any]]:
    """The results of the first rows, until one of them fails or the time is up."""
    with (
        tempfile.TemporaryDirectory(prefix="gpu-", ignore_cleanup_errors=True) as folder,
        _process(rows, options, folder) as (process, pipe),
    ):
        messages = _messages(pipe)
        ready = next(messages(min(time.monotonic() + START_SECONDS, options.end)), None)
        if ready is None:
            yield {"error": f"the process did not start: {_ended(process)}{_last_line(options.log)}", "seconds": 0.0}
            return
        for row in rows:
            left = options.end - time.monotonic()
            if left < LEAST_SECONDS:
                return
            began, limit = time.monotonic(), min(row.limit, left)
            result = next(messages(began + limit), None)
            seconds = round(time.monotonic() - began, 1)
            if result is None:
                why = _ended(process) if time.monotonic() < began + limit else f"killed at its limit of {limit:.0f} s"
                yield {"error": why, "seconds": seconds}
                return
            yield {**result, "seconds": seconds}
            if "error" in result:  # an error of CUDA stays in a process
                return


@contextlib.contextmanager
def _process(rows: list[Row], options: Options, folder: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A process that runs rows and tells of each, in a group of its own, which is killed at the end."""
    ours, theirs = os.pipe()
    told = {"rows": [asdict(row) for row in rows], "device": options.device, "tiny": options.tiny, "pipe": theirs}
    told |= {"folder": folder, "base": options.base}
    places = [str(HERE), str(HERE.parent / "src"), os.environ.get("PYTHONPATH")]
    environment = {
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "TRL_EXPERIMENTAL_SILENCE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, places)),
    }
    with options.log.open("ab") as log:
        process = subprocess.Popen(  # noqa: S603 (ourselves)
            [sys.executable, "-W", "ignore", "-m", "gpu_rows", json.dumps(told)],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=(theirs,),
            start_new_session=True,
        )
    os.close(theirs)
    try:
        yield process, ours
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=EXIT_SECONDS)
        os.close(ours)
        if options.log.stat().st_size > LOG_BYTES:
            options.log.write_bytes(options.log.read_bytes()[-LOG_BYTES:])


def _messages(pipe: int) -> Any:  # noqa: ANN401 (a function)
    """Of the process: a function that gives those which come before a time."""
    lines, read = [], b""

    def until(end: float) -> Iterator[dict[str, Any]]:
        nonlocal read
        while not lines:
            if not select.select([pipe], [], [], max(0.0, end - time.monotonic()))[0]:
                return
            some = os.read(pipe, 1 << 16)
            if not some:
                return
            *whole, read = (read + some).split(b"\n")
            lines.extend(whole)
        yield json.loads(lines.pop(0))

    return until


def _ended(process: subprocess.Popen[bytes]) -> str:
    """How it ended by itself."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        code = process.wait(timeout=EXIT_SECONDS)
        return f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return "told nothing in its time"


def _last_line(log: Path) -> str:
    """Of what was said, for an error whose process could not tell it."""
    lines = log.read_bytes()[-2000:].decode(errors="replace").splitlines()
    return f"; {lines[-1][:200]}" if lines else ""


def _write(found: list[dict[str, Any]], options: Options) -> None:
    """The file as a whole or not at all."""
    partial = options.results.with_suffix(".part")
    partial.write_text(as_lines({"tiny": options.tiny, "rows": found}) + "\n", encoding="utf-8")
    partial.replace(options.results)


def line(row: dict[str, Any]) -> str:
    """What is printed of a row."""
    says = next((f"{kind}: {row[kind]}" for kind in ("error", "skipped") if kind in row), row.get("says", ""))
    failed = "FAILED: " if row.get("ok") is False else ""
    return f"{row['row']:22} {row.get('seconds', 0.0):6.1f} s  {failed}{says}"


def aims(found: list[dict[str, Any]]) -> Iterator[str]:
    """Each aim for an H100 beside what was measured, where it was."""
    rows = {row["row"]: row for row in found if "tokens_per_second" in row}

    def told(aim: str, value: str, met: bool) -> str:
        return f"aim: {aim}: {value}, {'met' if met else 'not met'}"

    for name, least, remark in SPEED_AIMS:
        if name in rows:
            speed = rows[name]["tokens_per_second"]
            yield told(f"{name} at least {least:,} tokens/s{remark}", f"{speed:,.0f}", speed >= least)
    for name, row in rows.items():
        if row.get("planned_gib"):
            off = row["peak_gib"] / row["planned_gib"] - 1
            yield told(f"{name} within {PEAK_SHARE:.0%} of the planned peak", f"{off:+.0%}", abs(off) <= PEAK_SHARE)
    for name, row in rows.items():
        for other, least in (("GRPO", GRPO_RATIO), ("AsyncGRPO", ASYNC_RATIO)):
            if name.endswith(" perl") and (beside := rows.get(name.replace(" perl", f" {other}"))):
                ratio = row["tokens_per_second"] / beside["tokens_per_second"]
                yield told(f"{name} at least {least:g} x {other}", f"{ratio:.2f}", ratio >= least)


def _asked(arguments: list[str] | None) -> tuple[list[Row], Options]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = ", ".join([*GROUPS, *ROWS])
    parser.add_argument("rows", nargs="+", metavar="ROW", help=f"in this order; of {names}")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="models of a toy's size: shows that all runs")
    parser.add_argument("--minutes", type=float, default=8.0, help="after which no row goes on (default 8)")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "gpu", help="folder of results and log")
    parser.add_argument("--base", type=Path, help="for real: folder of a model, or of a .gguf file's parts")
    asked = parser.parse_args(arguments)
    unknown = [name for name in asked.rows if name not in ROWS and name not in GROUPS]
    if unknown:
        parser.error(f"no row {unknown[0]!r}: there are {names}")
    if asked.device == "cpu" and not asked.tiny:
        parser.error("--device cpu needs --tiny: the real sizes take hours there")
    rows = [row for name in asked.rows for row in GROUPS.get(name) or [ROWS[name]]]
    path = asked.output.resolve() / asked.rows[0].replace(" ", "-").replace(",", "").replace("'", "")
    base = str(asked.base.resolve()) if asked.base else None
    end = time.monotonic() + 60 * asked.minutes
    return rows, Options(
        asked.device, asked.tiny, base, end, path.with_name(f"{path.name}.json"), path.with_name(f"{path.name}.log")
    )


if __name__ == "__main__":
    sys.exit(main())
