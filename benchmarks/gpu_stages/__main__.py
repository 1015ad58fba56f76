"""One stage in its process: ``python -m gpu_stages OPTIONS``, as ``benchmarks/gpu.py`` starts it.

options in JSON -> lines in JSON on a pipe: a header, then a message a row

A process, so that an out-of-memory, a crash or a hang costs one stage and leaves nothing on the GPU.
"""

import ctypes
import gc
import importlib
import json
import os
import platform
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

from gpu_stages import OF_THE_STAGE

PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)
OPTIONAL = ("triton", "vllm", "bitsandbytes", "liger_kernel", "flash_attn")


def main() -> int:
    """Runs the stage that the one argument describes."""
    options = json.loads(sys.argv[1])
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL)  # ends with its parent, however that ends
    with os.fdopen(options["pipe"], "w", encoding="utf-8") as pipe:

        def send(message: dict[str, Any]) -> None:
            pipe.write(json.dumps(message) + "\n")
            pipe.flush()

        try:
            return _run(options, send)
        except Exception as error:  # noqa: BLE001 (the boundary of the process)
            from gpu_stages.setting import failure

            traceback.print_exc()
            row = {"case": OF_THE_STAGE, **failure(error)}
            if isinstance(error, ImportError):
                row["error"] += how_to_set_up()
            send({"row": row})
            return 1


def how_to_set_up() -> str:
    """What follows an import that failed: all that is missing or too old here, and where it says how to bring it."""
    from gpu_stages.requirements import dependencies, unmet

    found = [f"{name} ({what})" for name, what in unmet(dependencies())]
    where = "benchmarks/README.md says how to set up a machine without a package index"
    return f"; pyproject.toml asks for what is not here: {', '.join(found)}; {where}" if found else ""


def _run(options: dict[str, Any], send: Any) -> int:  # noqa: ANN401 (a function)
    import torch

    from gpu_stages.setting import Setting
    from perl.run.folder import git_commit

    device = torch.device(options["device"])
    if device.type == "cuda" and not torch.cuda.is_available():
        send({"refused": "torch finds no CUDA device here; --tiny --device cpu shows that all stages run"})
        return 2
    header = {"device": device_name(device), "tiny": options["tiny"], "versions": versions(), "commit": git_commit()}
    rows, complete = ([], False) if options["again"] else earlier(Path(options["earlier"]), header)
    send({"header": header, "rows": rows, "complete": complete})
    os.chdir(options["folder"])  # whatever a library writes beside itself
    stage = importlib.import_module(options["module"])
    gc.freeze()  # what libraries have made stays; collecting between cases need not go through it
    send({"table": _table(stage, rows)})
    if complete:
        return 0
    done = frozenset(row["case"] for row in rows)
    setting = Setting(device, options["tiny"], done, Path(options["folder"]), options["seconds"])
    for row in stage.measure(setting):
        if row["case"] in {known["case"] for known in rows}:
            raise ValueError(f"the case {row['case']!r} was measured already")
        rows.append(row)
        send({"row": row, "table": _table(stage, rows)})
    send({"complete": True, "table": _table(stage, rows)})
    return 0


def earlier(path: Path, header: dict[str, Any]) -> tuple[list[dict[str, Any]], bool]:
    """What an earlier run has measured here, and whether nothing is left to do.

    Args:
        path: Of the stage's results; there need be none.
        header: What is the same if the rows are to count: device, tiny, versions.

    Returns:
        Rows to keep. Not those with an error, nor checks that failed, nor what was skipped: they are taken anew.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if any(found[name] != header[name] for name in ("device", "tiny", "versions")):
            return [], False
        kept = [row for row in found["rows"] if _stays(row)]
        return kept, bool(found["complete"]) and len(kept) == len(found["rows"])
    except (OSError, ValueError, KeyError, TypeError):  # none yet, or no results of ours
        return [], False


def _stays(row: dict[str, Any]) -> bool:
    return "error" not in row and "skipped" not in row and row.get("ok") is not False


def _table(stage: Any, rows: list[dict[str, Any]]) -> str:  # noqa: ANN401 (a module)
    """The stage's own words on what it has measured; errors and what was skipped the runner tells."""
    measured = [row for row in rows if "error" not in row and "skipped" not in row]
    try:
        return stage.table(measured) if measured else ""
    except Exception as error:  # noqa: BLE001 (a slip in a table must not cost what is still to be measured)
        traceback.print_exc()
        return f"no table: {type(error).__name__}: {error}"


def device_name(device: Any) -> str:  # noqa: ANN401 (torch's, which is imported late)
    """What results are told apart by."""
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} {platform.machine()}"


def versions() -> dict[str, str]:
    """Of Python, CUDA and the packages that results depend on."""
    import torch

    from perl.run.folder import installed_versions

    own = {"python": platform.python_version(), "cuda": str(torch.version.cuda)}
    return {**own, **installed_versions(OPTIONAL), "torch": torch.__version__}


if __name__ == "__main__":
    sys.exit(main())
