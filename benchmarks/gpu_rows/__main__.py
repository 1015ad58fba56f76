"""The process that runs rows: ``python -m gpu_rows OPTIONS``, as ``benchmarks/gpu.py`` starts it.

options in JSON -> lines in JSON on a pipe: that it is ready, then the numbers of each row, or its error in one line

It ends after a row that failed: an error of CUDA stays in a process. Tracebacks go to the log.
"""

import gc
import importlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any


def main() -> int:
    """Runs the rows that the one argument describes."""
    options = json.loads(sys.argv[1])
    with os.fdopen(options["pipe"], "w", encoding="utf-8") as pipe:

        def send(message: dict[str, Any]) -> None:
            pipe.write(json.dumps(message) + "\n")
            pipe.flush()

        setting = _setting(options)
        send({})  # ready
        for row in options["rows"]:
            print(f"== {row['name']} ==", flush=True)
            numbers = _taken(row, setting)
            send(numbers)
            if "error" in numbers:
                return 1
            gc.collect()
            if setting.on_cuda:
                setting.settle()
                importlib.import_module("torch").cuda.empty_cache()
    return 0


def _setting(options: dict[str, Any]) -> Any:  # noqa: ANN401 (imported here, where an error is told)
    import torch

    from gpu_rows.setting import Setting

    device = torch.device(options["device"])
    for module in {row["function"].rpartition(".")[0] for row in options["rows"]}:
        try:
            importlib.import_module(module)  # so that no row's time goes to imports
        except Exception:  # noqa: BLE001 (its rows fail by themselves, and "machine" says what is missing)
            traceback.print_exc()
    return Setting(device, options["tiny"], Path(options["folder"]), Path(options["base"]) if options["base"] else None)


def _taken(row: dict[str, Any], setting: Any) -> dict[str, Any]:  # noqa: ANN401
    """The numbers of a row, or its error."""
    try:
        module, name = row["function"].rsplit(".", 1)
        function = getattr(importlib.import_module(module), name)
        numbers: dict[str, Any] = function(setting, **row["arguments"])
        return numbers
    except Exception as error:  # noqa: BLE001 (whatever it is: a row of the results, and the next one is taken)
        traceback.print_exc()
        return {"error": one_line(error)}


def one_line(error: BaseException) -> str:
    """What went wrong."""
    said = " ".join(str(error).split())
    return f"{type(error).__name__}: {said}"[:300] if said else type(error).__name__


if __name__ == "__main__":
    sys.exit(main())
