"""The command line: which Perl is meant, and one module a command."""

COMMANDS = ("train", "eval", "export", "card", "push", "recipes", "methods", "reward", "rollout", "zoo")
OPTIONS = ("--help", "--version")
