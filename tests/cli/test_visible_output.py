"""Names in files and on the Hub are anybody's: what a terminal would obey is shown, not sent."""

import ast
import io
import json
import logging
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from perl.cli import output
from perl.cli.commands import run
from perl.errors import PerlError, visible

COMMANDS = Path(output.__file__).parent
HOSTILE = "a\x1b[2J\x07b\u202egnp.c\u2066d\x9b5m\r\x00\ud800"
SHOWN = "a\\u001b[2J\\u0007b\\u202egnp.c\\u2066d\\u009b5m\\u000d\\u0000\\ud800"


def test_what_a_terminal_obeys_is_written_out():
    assert visible(HOSTILE) == SHOWN
    assert visible("π ≤ 3\tand\nÜber ± 1, العربية, 中文") == "π ≤ 3\tand\nÜber ± 1, العربية, 中文"
    assert json.loads(visible(json.dumps({"a": "\u202e\x9b"}, ensure_ascii=False))) == {"a": "\u202e\x9b"}
    assert str(PerlError("is none", HOSTILE)) == f"{SHOWN.replace(chr(92) + 'u000d', ' ')}: is none"


def test_results_errors_and_log_lines_are_made_visible():
    said = io.StringIO()
    with redirect_stdout(said), redirect_stderr(said):
        output.say(HOSTILE)
        output.say(HOSTILE, err=True, colour="red")
        assert run(["card", "no/a\x1b[2J\u202egnp", "--check"], "perl") == 2
    lines = said.getvalue().splitlines()
    assert lines[:2] == [SHOWN, SHOWN]
    assert "a\\u001b[2J\\u202egnp" in lines[2]
    assert not set(said.getvalue()) & set("\x1b\u202e\x9b\r\x00")
    logger = logging.getLogger("perl")
    before, propagates, level = list(logger.handlers), logger.propagate, logger.level
    try:
        logged = io.StringIO()
        output.set_up_output(quiet=False)
        (handler,) = [handler for handler in logger.handlers if handler not in before]
        handler.setStream(logged)
        logger.warning("pushed %s", HOSTILE)
        assert logged.getvalue() == f"pushed {SHOWN}\n"
    finally:
        logger.handlers[:], logger.propagate = before, propagates
        logger.setLevel(level)


def test_nothing_else_of_the_command_line_prints():
    # main: before click is imported, of the user's own words
    for path in {*COMMANDS.glob("*.py")} - {COMMANDS / "output.py", COMMANDS / "main.py"}:
        calls = [node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        names = {ast.unparse(call) for call in calls}
        assert not names & {"print", "click.echo", "click.secho", "sys.stdout.write", "sys.stderr.write"}, path.name
