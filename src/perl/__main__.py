"""``python -m perl``: our command line, never the system's Perl."""

import sys

from perl.cli.main import run_commands

sys.exit(run_commands(sys.argv[1:], "python -m perl"))
