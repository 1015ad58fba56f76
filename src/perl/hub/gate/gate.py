"""The gate that every file passes before it leaves this machine.

name in the repository -> bytes, to mistakes, one a line

A file must have a name that we write, be no larger than such a file may be, be what its ending says, and hold nothing
that must not leave this machine. Files get here as bytes (:mod:`perl.hub.gate.snapshot` reads them, once and without
following a link), and these bytes are sent.
"""

import re
from collections.abc import Mapping

from perl.errors import Mistake
from perl.hub.gate.file_kinds import MalformedFileError, read_passages
from perl.hub.gate.leaks import Machine, find_leaks, this_machine
from perl.hub.gate.snapshot import is_simple_name
from perl.recipe.assets import evaluation_tasks

_SIMPLE = r"[A-Za-z0-9][A-Za-z0-9_.-]*"


Expected = Mapping[str, int]
"""Pattern of a file's name in the repository -> bytes that it may have."""
EXPECTED: Expected = {
    r"adapter_model\.safetensors": 50_000_000_000,
    r"adapter_config\.json": 1_000_000,
    r"README\.md": 1_000_000,
    r"perl_recipe\.yaml": 200_000,
    r"perl_run\.json": 1_000_000,
    r"metrics\.jsonl": 20_000_000,
    r"eval/results\.json": 50_000_000,
    r"eval/samples\.jsonl": 50_000_000,
    rf"(?:eval|plots)/{_SIMPLE}\.png": 20_000_000,
    rf"\.eval_results/{_SIMPLE}\.yaml": 100_000,
}
"""In a repository of an adapter; whoever reads one takes no larger files either."""
ZOO: Expected = {
    r"adapter_model\.safetensors": 50_000_000_000,
    r"adapter_config\.json": 1_000_000,
    r"[a-z0-9][a-z0-9._-]*\.json": 10_000_000,  # of an entry its reader says what is too much
    r"MODEL_ZOO\.md": 10_000_000,
    r"zoo\.(?:csv|html)": 50_000_000,
}
"""In a zoo."""


def largest(name: str, among: Expected = EXPECTED) -> int | None:
    """Bytes that a file of this name may have; None: we publish none of this name."""
    fits = [most for pattern, most in among.items() if re.fullmatch(pattern, name)]
    return fits[0] if fits and is_simple_name(name) else None


def is_ours(name: str) -> bool:
    """Whether a file of a repository is one that we write, so that a push without it takes it away."""
    folder, _, file = name.rpartition("/")
    if folder == ".eval_results":  # others may have added scores of other benchmarks
        return file.removesuffix(".yaml") in evaluation_tasks()
    return largest(name) is not None


def gate_mistakes(
    files: Mapping[str, bytes], machine: Machine | None = None, among: Expected = EXPECTED
) -> list[Mistake]:
    """Why files may not leave this machine.

    Args:
        files: Name in the repository -> content.
        machine: Whose folders, people and secrets to look for; None: this one.
        among: What may be published there.

    Returns:
        Nothing, if they may.
    """
    mistakes: list[Mistake] = []
    for name, content in files.items():
        most = largest(name, among)
        if most is None:
            mistakes.append(Mistake("is not a file that perl publishes", repr(name)[1:-1][:200], "leave it out"))
        elif len(content) > most:
            mistakes.append(Mistake(f"has {len(content):,} bytes, at most {most:,} are published", name))
        else:
            try:
                read_passages(name, content)
            except MalformedFileError as error:
                mistakes.append(Mistake(str(error), name))
    return mistakes + find_leaks(files, machine if machine is not None else this_machine())
