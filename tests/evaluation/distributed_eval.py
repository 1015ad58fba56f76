"""Run by torchrun: ``perl eval`` in which one process meets with something.

``distributed_eval.py WHAT AFTER RANK ARGUMENT...``: after so many calls of its engine, or of its sample file if it is
the main process, this process is killed (``kill``), interrupted (``interrupt``) or fails (``fail``). Each process
writes its exit code to ``code-RANK`` in its folder, and ends only when the others must have ended too.
"""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import perl.evaluation.samples
import perl.rollouts.hf_engine
from perl.cli.main import run_commands
from perl.errors import ModelError

OUTLASTS = 5.0  # seconds in which the others hear of it and say so


def main() -> None:
    what, after, rank = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    here = int(os.environ["RANK"])
    if here == rank:
        home: Any = perl.evaluation.samples.SampleFile if rank == 0 else perl.rollouts.hf_engine.TransformersEngine
        name = "append" if rank == 0 else "start"
        usual, calls = getattr(home, name), iter(range(after))

        def then(*args: Any, **kwargs: Any) -> Any:
            if next(calls, None) is None:
                if what == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise KeyboardInterrupt if what == "interrupt" else ModelError("too little of everything", "model.name")
            return usual(*args, **kwargs)

        setattr(home, name, then)
    code = run_commands(sys.argv[4:], "perl")
    Path(f"code-{here}").write_text(str(code))
    if code:
        time.sleep(OUTLASTS)
    sys.exit(code)


if __name__ == "__main__":
    main()
