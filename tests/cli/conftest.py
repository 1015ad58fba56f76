"""Commands in this process, with what they print and their exit code."""

import io
import logging
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

from perl.cli import commands


class Said(NamedTuple):
    """What a command left behind."""

    code: int
    out: str
    err: str


@pytest.fixture
def perl(capsys, monkeypatch) -> Iterator[Callable[..., Said]]:
    """``perl("train", "quickstart")``, with ``stdin`` as it is piped."""

    def run(*arguments: str, stdin: str = "") -> Said:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        code = commands.run(list(arguments), "perl")
        return Said(code, *capsys.readouterr())

    logger = logging.getLogger("perl")
    before, propagates, level = list(logger.handlers), logger.propagate, logger.level
    yield run
    logger.handlers[:], logger.propagate = before, propagates
    logger.setLevel(level)


@pytest.fixture
def printed(perl) -> Callable[..., str]:
    """What a command prints that succeeds and complains of nothing."""

    def run(*arguments: str) -> str:
        said = perl(*arguments)
        assert (said.code, said.err) == (0, ""), said
        return said.out

    return run


@pytest.fixture
def mistake(perl) -> Callable[..., str]:
    """The one line of a command that refuses what it is asked."""

    def run(*arguments: str) -> str:
        said = perl(*arguments)
        assert (said.code, said.out) == (2, ""), (arguments, said)
        (line,) = said.err.splitlines()
        assert line.startswith("error: ")
        return line

    return run
