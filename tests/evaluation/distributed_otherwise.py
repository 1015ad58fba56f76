"""Run by torchrun: ``perl eval`` in which the process of rank 1 has something else than the main one.

``distributed_otherwise.py WHAT ADAPTER ARGUMENT...``: another adapter, seed, output folder, weights of the base, or
version of a package.
"""

import dataclasses
import importlib.metadata
import os
import sys

import perl.launch.together
import perl.run.folder
from perl.cli.main import run_commands
from perl.evaluation.policies import BaseInMemory


def main() -> None:
    what, adapter, arguments = sys.argv[1], sys.argv[2], sys.argv[3:]
    perl.launch.together.FOLDER_SECONDS = 1.0
    if os.environ["RANK"] == "1":
        if what == "adapter":
            arguments[arguments.index("--adapter") + 1] = adapter
        elif what == "seed":
            arguments += ["--seed", "1"]
        elif what == "folder":
            arguments[arguments.index("--output") + 1] = "elsewhere"
        elif what == "weights":
            load = BaseInMemory.policies
            BaseInMemory.policies = lambda *given: dataclasses.replace(load(*given), base_sha256="other")
        else:
            version = importlib.metadata.version
            perl.run.folder.version = lambda name: "0.0.1" if name == "math-verify" else version(name)
    sys.exit(run_commands(arguments, "perl"))


if __name__ == "__main__":
    main()
