"""Run by torchrun: ``perl eval`` in which the process of rank 1 has something else than the main one.

``distributed_otherwise.py WHAT ADAPTER ARGUMENT...``: another adapter, or weights of the base.
"""

import dataclasses
import os
import sys

from perl.cli.main import run_commands
from perl.evaluation.policies import BaseInMemory


def main() -> None:
    what, adapter, arguments = sys.argv[1], sys.argv[2], sys.argv[3:]
    if os.environ["RANK"] == "1":
        if what == "adapter":
            arguments[arguments.index("--adapter") + 1] = adapter
        else:
            load = BaseInMemory.policies
            BaseInMemory.policies = lambda *given: dataclasses.replace(load(*given), base_sha256="other")
    sys.exit(run_commands(arguments, "perl"))


if __name__ == "__main__":
    main()
