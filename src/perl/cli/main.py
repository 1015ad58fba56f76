"""The console commands ``perl`` and ``perl-rl``.

arguments -> ours, or the system's Perl

Installed in a virtual environment, our ``perl`` hides the language's. So whatever is not one of our commands or options
goes to the next ``perl`` on the PATH, by ``exec``: same arguments, same stdin, same exit status. The decision comes
before any import that costs time.
"""

import os
import sys

from perl.cli import COMMANDS, OPTIONS

# Programs of ours carry this in their first bytes (pip and its relatives write it); the real one is no Python script.
_OUR_MARK = b"perl.cli.main"
# Set only while handing over to a script (a pyenv or plenv shim) that might come back to us: pid and scripts tried.
_HANDED_OVER = "PERL_RL_HANDED_OVER"
_USER_MISTAKE = 2  # perl.errors.EXIT_USER_MISTAKE, whose import costs time; Perl's own for a script that is not there


def perl() -> int:
    """The console command ``perl``: ours or the system's."""
    arguments = sys.argv[1:]
    if not is_ours(arguments):
        other = next_perl(os.environ.get("PATH", os.defpath))
        if other is not None:
            # Neither an option of Perl's nor a script that is there: was a command of ours meant?
            if arguments and not arguments[0].startswith("-") and not os.path.exists(arguments[0]):
                import difflib

                for meant in difflib.get_close_matches(arguments[0], COMMANDS, n=1):
                    print(f"perl-rl: no command {arguments[0]!r} (did you mean {meant}?)", file=sys.stderr)  # noqa: T201
                    return _USER_MISTAKE
            hand_over(other, arguments)
    return run_commands(arguments, "perl")


def perl_rl() -> int:
    """The console command ``perl-rl``: always ours."""
    return run_commands(sys.argv[1:], "perl-rl")


def is_ours(arguments: list[str]) -> bool:
    """Whether the first argument is a command or option of ours; without any, whether a person is at the terminal."""
    if not arguments:
        return sys.stdin is not None and sys.stdin.isatty()
    return arguments[0] in COMMANDS or arguments[0] in OPTIONS


def next_perl(search_path: str) -> str | None:
    """The first ``perl`` on a search path that is not one of our own programs, or None."""
    tried = _tried_by_this_process()
    for folder in search_path.split(os.pathsep):
        candidate = os.path.join(folder or os.curdir, "perl")
        runs = os.path.isfile(candidate) and os.access(candidate, os.X_OK)
        if runs and candidate not in tried and _OUR_MARK not in _first_bytes(candidate):
            return candidate
    return None


def hand_over(program: str, arguments: list[str]) -> None:
    """Becomes another program."""
    import signal

    for name in ("SIGPIPE", "SIGXFSZ"):  # Python ignores these two; a program that inherits that misbehaves in a pipe
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_DFL)
    tried = _tried_by_this_process()
    os.environ.pop(_HANDED_OVER, None)
    if _first_bytes(program).startswith(b"#!"):
        os.environ[_HANDED_OVER] = os.pathsep.join([str(os.getpid()), *tried, program])
    os.execv(program, [program, *arguments])  # noqa: S606 (no shell is wanted)


def run_commands(arguments: list[str], program: str) -> int:
    """Runs one of our commands.

    Args:
        arguments: As typed, without the program's name.
        program: The name to show in usage lines.

    Returns:
        The exit code: 0 done, 1 failed, 2 the user's mistake, 130 interrupted.
    """
    from perl.cli.commands import run

    return run(arguments, program)


def _first_bytes(program: str) -> bytes:
    """The beginning of a program; nothing of one that may be run but not read, which no Python script can be."""
    try:
        with open(program, "rb") as file:
            return file.read(4096)
    except OSError:
        return b""


def _tried_by_this_process() -> tuple[str, ...]:
    pid, *programs = os.environ.get(_HANDED_OVER, "").split(os.pathsep)
    return tuple(programs) if pid == str(os.getpid()) else ()
