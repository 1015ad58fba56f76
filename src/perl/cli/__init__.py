"""The command line: which Perl is meant, and which function is which command."""

COMMANDS = {
    "new": "new:command",
    "train": "train:command",
    "plan": "plan:command",
    "doctor": "doctor:doctor",
    "explain": "doctor:explain",
    "report": "runs:report",
    "compare": "runs:compare",
    "watch": "runs:watch",
    "study": "study:command",
    "eval": "eval:command",
    "spectrum": "spectrum:command",
    "export": "export:command",
    "export-verl": "export_verl:command",
    "import-verl": "import_verl:command",
    "card": "card:command",
    "push": "push:command",
    "recipes": "recipes:command",
    "methods": "methods:command",
    "algorithms": "algorithms:command",
    "reward": "reward:command",
    "rollout": "rollout:command",
    "zoo": "zoo:command",
}
"""Name -> module of this room and its function, which are imported when the command runs."""
OPTIONS = ("--help", "--version")
