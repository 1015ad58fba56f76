"""The command line: which Perl is meant, and one module a command."""

COMMANDS = ("train", "eval", "export", "recipes", "methods", "reward", "rollout")
OPTIONS = ("--help", "--version")
