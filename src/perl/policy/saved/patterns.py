"""Regular expressions of an adapter's config, tried on the base's modules in a process that can be stopped.

PeftConfig, names -> nothing, or an error

PEFT matches them in this process, where one that backtracks without end could not be interrupted.
"""

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence

from peft import PeftConfig

from perl.errors import ModelError

SECONDS = 10.0
"""Within which all of them must match all names; usual ones need milliseconds."""
_PLAIN = re.compile(r"[\w.-]*", re.ASCII)
# Counts up on stdout, so that the one that did not end is known.
_TRY = """
import json, re, sys
patterns, names = json.load(sys.stdin)
for number, pattern in enumerate(patterns):
    print(number, flush=True)
    try:
        compiled = re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        print(f"no pattern: {error}")
        break
    for name in names:
        compiled.match(name)
"""


def check_patterns(config: PeftConfig, modules: Sequence[str], where: str) -> None:
    """Refuses malformed patterns, and those that do not end in time.

    Args:
        config: The adapter's.
        modules: Names of the base's modules.
        where: Where the adapter is named.

    Raises:
        ModelError: With the first such pattern.
    """
    found = [(text, pattern) for text, pattern in _patterns(config) if not _PLAIN.fullmatch(text)]
    if not found:
        return
    command = [sys.executable, "-I", "-S", "-c", _TRY]
    given = json.dumps([[pattern for _, pattern in found], list(modules)])
    try:
        tried = subprocess.run(  # noqa: S603 (a fixed program)
            command, input=given.encode(), capture_output=True, check=True, timeout=SECONDS
        )
    except subprocess.TimeoutExpired as error:
        text = found[max(0, len((error.stdout or b"").split()) - 1)][0]
        raise ModelError(
            f"the pattern {text!r:.80} in its config does not end within {SECONDS:g} s on the names of this base",
            where,
            "a list of names needs no pattern",
        ) from None
    reason = next((line for line in tried.stdout.decode().splitlines() if line.startswith("no pattern")), None)
    if reason is not None:
        number = sum(line.isdigit() for line in tried.stdout.decode().splitlines()) - 1
        raise ModelError(f"{found[number][0]!r:.80} in its config is {reason}", where)


def _patterns(config: PeftConfig) -> Iterator[tuple[str, str]]:
    """Each pattern as it stands in the config, and as PEFT matches it with the beginning of a name."""
    for name in ("target_modules", "exclude_modules", "feedforward_modules"):
        value = getattr(config, name, None)
        if isinstance(value, str):
            yield value, f"(?:{value})\\Z"
    for name, form in (
        ("layers_pattern", r"(?:^|.*?\.){}\.(?P<idx>\d+)\."),
        ("modules_to_save", r"(^|.*\.){}($|\..*)"),
    ):
        value = getattr(config, name, None) or ()
        for text in [value] if isinstance(value, str) else value:
            yield str(text), form.replace("{}", str(text))
    for name, value in vars(config).items():
        if name.endswith("_pattern") and isinstance(value, dict):
            for text in value:
                yield text, f"(.*\\.)?({text})$"
