"""The command line: which Perl is meant, and which function is which command."""

COMMANDS = {
    "new": "recipes:new",
    "train": "train:command",
    "plan": "doctor:plan",
    "doctor": "doctor:doctor",
    "explain": "doctor:explain",
    "report": "runs:report",
    "compare": "runs:compare",
    "watch": "runs:watch",
    "study": "runs:study",
    "eval": "eval:command",
    "spectrum": "runs:spectrum_of",
    "export": "export:command",
    "export-verl": "export:export_verl",
    "import-verl": "export:import_verl",
    "card": "card:command",
    "push": "push:command",
    "recipes": "recipes:command",
    "methods": "methods:command",
    "algorithms": "methods:algorithms",
    "reward": "reward:command",
    "rollout": "doctor:rollout",
    "zoo": "zoo:command",
}
"""Name -> module of this room and its function, which are imported when the command runs."""
OPTIONS = ("--help", "--version")
