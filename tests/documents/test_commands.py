"""Every command of the documents that runs on a CPU without a network runs, and prints what its page shows."""

import os
import re
import shlex

import pytest

from tests.documents.commands import OF_PLANS, is_learned, is_quick, need, unused_needs
from tests.documents.pages import PAGES, Block, anchors, blocks, plain_fences
from tests.documents.printed import missing
from tests.documents.stage import ran, set_up, shell_environment

ALL = [block for page in PAGES for block in blocks(page)]
HERE = [block for block in ALL if any(need(command) is None for command in block.commands)]
QUICK = [block for block in HERE if all(is_quick(command) for command in block.commands)]
COMMAND = re.compile(r"\$ |#!|(perl|python|pip|vllm|srun|torchrun|sh|bash|export|cd) |[A-Z_]+=\S+ \w")
# These print nothing that a reader waits for, or write a file.
SILENT = (" > ", "cd ", ". .venv", "--help")


def test_every_command_is_run_or_needs_what_a_cpu_without_a_network_lacks():
    commands = [command for block in ALL for command in block.commands]
    assert unused_needs(commands) == []
    unknown = [
        command for command in commands if need(command) is None and not re.match(r"([A-Z_]+=\w+ )?perl ", command)
    ]
    assert unknown == []
    assert sum(need(command) is None for command in commands) >= 60


def test_every_command_that_runs_here_is_followed_by_what_to_expect():
    silent = [
        str(block)
        for block in HERE
        if not block.shown and not all(any(part in command for part in SILENT) for command in block.commands)
    ]
    assert silent == []
    elsewhere = [block for block in ALL if block.shown and block not in HERE]
    assert [str(block) for block in elsewhere if any(need(command) != OF_PLANS for command in block.commands)] == []
    assert elsewhere


def test_a_fence_without_a_language_holds_no_commands():
    wrong = [f"{page.name}: {line}" for page in PAGES for line in plain_fences(page) if COMMAND.match(line)]
    assert wrong == []
    assert [line for line in ("$ perl plan", "perl train x", "#!/bin/sh", "srun perl") if not COMMAND.match(line)] == []


@pytest.mark.nightly
@pytest.mark.parametrize("block", QUICK, ids=str)
def test_commands_that_train_nothing_print_what_the_page_shows(block: Block, perl_command, tmp_path):
    set_up(tmp_path, block.commands, "", tmp_path, shell_environment(os.environ))
    output = ""
    for command in block.commands:
        done = perl_command(*shlex.split(command)[1:], cwd=tmp_path, env={**os.environ, "COLUMNS": "120"})
        assert done.returncode == (2 if block.shows_an_error else 0), f"{command}\n{done.stderr}"
        output += done.stdout + done.stderr
    lines = missing(output, block.shown, learned=any(is_learned(command) for command in block.commands))
    assert lines == [], output[-4000:]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Where the runs that pages take for granted are kept, each once."""
    return tmp_path_factory.mktemp("trained")


@pytest.mark.nightly
@pytest.mark.parametrize(
    "page", [page for page in PAGES if any(b.page == page.name for b in HERE)], ids=lambda p: p.name
)
def test_the_commands_of_a_page_print_what_it_shows(page, tmp_path, hub, hub_env, trained):
    """In the order they stand there, on a Hub of their own."""
    environment = shell_environment(hub_env(hub))
    here = [block for block in blocks(page) if block in HERE]
    commands = [command for block in here for command in block.commands if need(command) is None]
    set_up(tmp_path, commands, page.name, trained, environment)
    wrong = []
    for block in here:
        runnable = [command for command in block.commands if need(command) is None]
        outputs = [ran(command, tmp_path, environment, may_fail=block.shows_an_error) for command in runnable]
        learned = any(is_learned(command) for command in runnable)
        if lines := missing("".join(outputs), block.shown, learned=learned):
            wrong.append("\n".join([f"{block} shows", *lines, "and the commands printed", *outputs]))
    assert not wrong, "\n\n".join(wrong)


OUTPUT = """base 66.6 ± 1.5, in 0:02
step 1/50  reward 0.594
step 2/50  reward 0.641
adapter 99.2 ± 0.3
4 s, sha256 377178c12ccc
"""


@pytest.mark.parametrize(
    "shown",
    [
        ["base 66.6 ± 1.5, in 3:47", "...", "adapter 99.2 ± 0.3", "..."],
        ["...", "step 2/50 ...", "...", "12.5 s, sha256 0123456789ab"],
        ["base ... in ...", "step ... 0.594", "..."],
    ],
)
def test_what_was_printed_is_found(shown):
    assert missing(OUTPUT, shown, learned=False) == []


def test_learned_numbers_may_be_near_and_words_may_not_differ():
    for line, found in (("adapter 98.6 ± 0.4", True), ("adapter 80.0 ± 0.3", False), ("adaptor 99.2 ± 0.3", False)):
        assert missing(OUTPUT, ["...", line, "..."], learned=True) == ([] if found else [line])
    learned = "reward 0.95 kl 0.01"
    assert missing("reward 0.97 kl 0.02", [learned], learned=True) == []
    assert missing("reward 0.05 kl 0.01", [learned], learned=True) == [learned]
    assert missing("reward 0.95 kl 0.90", [learned], learned=True) == [learned]


def test_blocks_are_commands_with_what_follows_them_and_headings_are_called_as_github_calls_them(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# A `b`, c\n\n```bash\none # remark\ntwo \\\n  --more\n```\n\nso:\n\n```text\nout\n```\n"
        "## A `b`, c\n```bash\nthree\n```\n```yaml\na: 1\n```\n"
    )
    assert blocks(page) == [
        Block("page.md", 4, ("one", "two    --more"), ("out",)),
        Block("page.md", 16, ("three",), ()),
    ]
    assert anchors(page) == {"a-b-c", "a-b-c-1"}
