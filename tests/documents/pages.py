"""The project's documents as tests read them: commands with what they print, headings, links.

page -> blocks of commands, each with the output that is shown after it; links with their anchors

A block ``bash`` holds commands. If the next block is ``text`` it shows what they print: a line ``...`` stands for any
lines, ``...`` within a line for anything.
"""

import re
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from tests.conftest import CHECKOUT

DOCS = CHECKOUT / "docs"
PAGES = (CHECKOUT / "README.md", *sorted(DOCS.glob("*.md")))
"""Those whose commands are run."""
DOCUMENTS = (
    *PAGES,
    *(CHECKOUT / f"{name}.md" for name in ("CHANGELOG", "CONTRIBUTING", "MODEL_ZOO")),
    *(CHECKOUT / folder / "README.md" for folder in ("benchmarks", "eval")),
)
"""Those whose links must lead somewhere."""
_FENCE = re.compile(r"^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"(?:^|\s+)#\s.*$|^#(!|SBATCH ).*$")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#{1,6} (.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """Commands, and what they are said to print.

    Attributes:
        page: The document's name.
        line: Of the first command, from 1.
        commands: In the order they stand there, without remarks.
        shown: Lines of the output; empty: none is shown.
    """

    page: str
    line: int
    commands: tuple[str, ...]
    shown: tuple[str, ...]

    @property
    def shows_an_error(self) -> bool:
        """Whether a command is meant to fail."""
        return any(line.startswith("error: ") for line in self.shown)

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: Path) -> list[Block]:
    """All commands of a page."""
    text = page.read_text(encoding="utf-8")
    fences = list(_FENCE.finditer(text))
    found = []
    for fence, following in pairwise([*fences, None]):
        if fence is None or fence["language"] != "bash":
            continue
        shown = following["text"].splitlines() if following and following["language"] == "text" else []
        line = text.count("\n", 0, fence.start("text")) + 1
        found.append(Block(page.name, line, tuple(_commands(fence["text"])), tuple(shown)))
    return found


def plain_fences(page: Path) -> list[str]:
    """The lines of all blocks that name no language, which hold something to read."""
    fences = _FENCE.finditer(page.read_text(encoding="utf-8"))
    return [line for fence in fences if not fence["language"] for line in fence["text"].splitlines()]


def _commands(text: str) -> list[str]:
    """Lines that a backslash continues are one; a loop over several lines is one, too."""
    commands: list[str] = []
    open_loop = False
    for line in text.replace("\\\n", " ").splitlines():
        command = _COMMENT.sub("", line).rstrip()
        if not command:
            continue
        if open_loop:
            commands[-1] += f"\n{command}"
        else:
            commands.append(command)
        open_loop = (open_loop or command.startswith("for ")) and command.strip(" &") != "done"
    return commands


def links(page: Path) -> list[str]:
    """Targets of a page's links and pictures, outside of code."""
    return _LINK.findall(re.sub(r"`[^`\n]*`", "", _FENCE.sub("", page.read_text(encoding="utf-8"))))


def anchors(page: Path) -> set[str]:
    """What GitHub calls the headings of a page."""
    names: set[str] = set()
    for heading in _HEADING.findall(_FENCE.sub("", page.read_text(encoding="utf-8"))):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        name = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        number = 0
        while (unique := f"{name}-{number}" if number else name) in names:
            number += 1
        names.add(unique)
    return names
