"""The command line: which Perl is meant, and one module a command."""

COMMANDS = (
    "new",
    "train",
    "plan",
    "doctor",
    "explain",
    "report",
    "compare",
    "watch",
    "study",
    "eval",
    "spectrum",
    "export",
    "export-verl",
    "import-verl",
    "card",
    "push",
    "recipes",
    "methods",
    "algorithms",
    "reward",
    "rollout",
    "zoo",
)
OPTIONS = ("--help", "--version")
