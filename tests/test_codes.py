"""Every error and every warning of the package has a code, and every code is explained and used."""

import ast
import dataclasses
import importlib
import logging
import re
from functools import cache
from pathlib import Path

import perl.errors
from perl.cli import commands
from perl.doctor.codes import codes, explained
from perl.errors import PerlError, warn
from tests.conftest import CHECKOUT

PACKAGE = Path(perl.errors.__file__).parent
ALARMING = {"trainer/callbacks/alarms.py"}
"""Their lines are alarms."""
FINDINGS, ERRORS, WARNINGS, ALARMS = (
    [row for name, row in codes().items() if name.startswith(f"PRL{kind}")] for kind in range(1, 5)
)


@cache
def nodes() -> list[tuple[str, ast.AST]]:
    """File, and each node of its tree."""
    return [
        (path.relative_to(PACKAGE).as_posix(), node)
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    ]


@cache
def calls() -> list[tuple[str, str, ast.Call]]:
    """File, dotted name of what is called, and the call."""
    return [(file, ast.unparse(node.func), node) for file, node in nodes() if isinstance(node, ast.Call)]


def test_one_function_warns_and_each_of_its_callers_names_a_code_of_the_table():
    logging_ = re.compile(r"(.*\.)?(log(ger|ging)?|_log(ger)?)\.warn(ing)?")
    assert {file for file, name, _ in calls() if logging_.fullmatch(name)} - ALARMING == {"errors.py"}
    used = {call.args[0].value for _, name, call in calls() if name == "warn"}
    assert used == {row.name for row in WARNINGS}


def test_each_class_of_errors_that_a_user_may_see_has_a_code_of_its_own():
    classes = {
        node.name: file for file, node in nodes() if isinstance(node, ast.ClassDef) and node.name[-5:] == "Error"
    }
    found = {}
    for name, file in classes.items():
        module = importlib.import_module("perl." + file.removesuffix(".py").replace("/", "."))
        error = getattr(module, name)
        assert issubclass(error, PerlError) == ("code" in vars(error)), name  # others are caught inside
        found |= {error.code: name} if issubclass(error, PerlError) else {}
    assert sorted(found) == [row.name for row in ERRORS]


def test_a_row_says_everything_and_its_kind_can_be_told_by_its_number():
    assert list(codes()) == sorted(codes())
    assert len(codes()) == sum(map(len, (FINDINGS, ERRORS, WARNINGS, ALARMS)))
    for row in codes().values():
        assert all(value.strip() for value in dataclasses.astuple(row)), row.name
        assert row.title[-1] != ".", row.name
        assert {row.what[-1], row.why[-1]} == {"."}, row.name
        ends = row.example.startswith(f"{row.name} ") if row in FINDINGS else row.example.endswith(f" [{row.name}]")
        assert ends, row.name
        assert row.example.startswith("error: ") == (row in ERRORS)


def pattern(message: ast.expr) -> str:
    """The lines that a message gives; of one that is no literal any."""
    text = message.value if isinstance(message, ast.Constant) else "%s"
    return ".*".join(map(re.escape, re.split(r"%(?:[sd]|\.\df)", text.replace("%%", "%"))))


def test_the_example_of_a_warning_is_a_line_that_one_of_its_calls_gives():
    messages: dict[str, set[str]] = {}
    for _, name, call in calls():
        if name == "warn":
            messages.setdefault(call.args[0].value, set()).add(pattern(call.args[1]))
    for row in WARNINGS:
        line = row.example.removesuffix(f" [{row.name}]")
        assert any(re.fullmatch(one, line) for one in messages[row.name]), row.name


def test_a_warning_ends_its_first_line_with_its_code_and_its_record_has_it(caplog):
    with caplog.at_level(logging.INFO, "perl"):
        warn("PRL303", "%d of %d, 100 %%", 3, 4)
        warn("PRL306", "100 %")
        warn("PRL306", "%s", "one\ntwo")
    assert caplog.messages == ["3 of 4, 100 % [PRL303]", "100 % [PRL306]", "one [PRL306]\ntwo"]
    assert {record.levelname for record in caplog.records} == {"WARNING"}
    assert [record.code for record in caplog.records] == ["PRL303", "PRL306", "PRL306"]
    assert {record.filename for record in caplog.records} == {Path(__file__).name}


def test_each_code_is_explained_and_the_page_is_made_of_the_same_rows(capsys):
    sections = "\n".join(f"## {row.name}: {row.title}\n\n{explained(row)}" for row in codes().values())
    assert (CHECKOUT / "docs" / "codes.md").read_text(encoding="utf-8").endswith(sections)
    assert commands.run(["explain"], "perl") == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(codes())
    for name, row in (("prl108", codes()["PRL108"]), ("samples_masked", codes()["PRL401"])):
        assert commands.run(["explain", name], "perl") == 0
        assert capsys.readouterr().out.strip() == f"{row.name}: {row.title}\n\n{explained(row)}".strip()


def test_an_error_line_ends_with_its_code_which_is_explained(capsys):
    for arguments in (["train", "quikstart"], ["explain", "PRL999"]):
        assert commands.run(arguments, "perl") == 2
        (said,) = capsys.readouterr().err.splitlines()
        code = re.fullmatch(r"error: .+ \[(PRL2\d\d)\]", said)
        assert commands.run(["explain", code[1]], "perl") == 0
        assert capsys.readouterr().out.startswith(f"{code[1]}: ")
