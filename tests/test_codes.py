"""Every error and every warning of the package has a code, and every code is explained and used."""

import ast
import dataclasses
import importlib
import logging
import re
import warnings
from pathlib import Path

import pytest

import perl.errors
from perl.cli import commands
from perl.doctor.codes import CODES
from perl.doctor.codes.alarms import ALARMS
from perl.doctor.codes.errors import ERRORS
from perl.doctor.codes.findings import FINDINGS
from perl.doctor.codes.warnings import WARNINGS
from perl.errors import PerlError
from perl.run.warned import warn

SOURCES = sorted(Path(perl.errors.__file__).parent.rglob("*.py"))
THE_FUNCTION = "run/warned.py"
ALARMING = {"trainer/callbacks/alarms.py", "trainer/callbacks/diagnosis.py"}
"""Their lines are alarms."""
CAUGHT_INSIDE = {
    "AdapterGoneError", "ChangedServerError", "LateServerError", "MalformedFileError", "NotArithmeticError",
    "ServerDownError", "SettingError", "TooManyAnswersError",
}  # fmt: skip
"""Errors that become another one, or a verdict, before anybody sees them."""


def name_of(path: Path) -> str:
    return str(path.relative_to(Path(perl.errors.__file__).parent))


def calls() -> list[tuple[str, str, ast.Call]]:
    """File, dotted name of what is called, and the call."""
    found = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                found.append((name_of(path), ast.unparse(node.func), node))
    return found


def error_classes() -> dict[str, tuple[str, str | None]]:
    """Of each error class of the package: its file, and the code that it has itself."""
    found = {}
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and node.name.endswith("Error"):
                own = [
                    line.value.value
                    for line in node.body
                    if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == "code"
                ]
                found[node.name] = (name_of(path), *(own or [None]))
    return found


def test_one_function_warns_and_each_of_its_callers_names_a_code_of_the_table():
    others = {
        file for file, name, _ in calls() if re.fullmatch(r"(.*\.)?(log(ger|ging)?|_log(ger)?)\.warn(ing)?", name)
    }
    assert others - ALARMING == {THE_FUNCTION}
    python_s = {file for file, name, _ in calls() if name == "warnings.warn"}
    assert python_s == {"errors.py"}
    used = [call.args[0] for _, name, call in calls() if name == "warn"]
    assert len(used) >= 60
    assert all(isinstance(code, ast.Constant) for code in used)
    of_warnings = {row.name for row in WARNINGS}
    assert {code.value for code in used} == of_warnings - {"PRL301"}
    assert "[PRL301]" in Path(perl.errors.__file__).read_text(encoding="utf-8")


def test_each_class_of_errors_has_a_code_of_its_own():
    classes = error_classes()
    silent = {name for name, (_, code) in classes.items() if code is None}
    assert silent == CAUGHT_INSIDE
    codes = sorted(code for _, code in classes.values() if code)
    assert codes == sorted(row.name for row in ERRORS)
    for name, (file, code) in classes.items():
        module = importlib.import_module("perl." + file.removesuffix(".py").replace("/", "."))
        found = getattr(module, name)
        assert issubclass(found, PerlError) == (code is not None), name
        assert getattr(found, "code", None) == code, name


def test_a_row_says_everything_and_its_kind_can_be_told_by_its_number():
    numbers = [name.removeprefix("PRL") for name in CODES]
    assert len(CODES) == sum(map(len, (FINDINGS, ERRORS, WARNINGS, ALARMS)))
    assert numbers == sorted(numbers)
    for row in CODES.values():
        assert all(value.strip() for value in dataclasses.astuple(row)), row.name
        assert row.title[-1] != ".", row.name
        assert {row.what[-1], row.why[-1]} == {"."}, row.name
    for kind, rows in (("1", FINDINGS), ("2", ERRORS), ("3", WARNINGS), ("4", ALARMS)):
        assert {row.name[3] for row in rows} <= {kind}
    for row in (*ERRORS, *WARNINGS):
        assert row.example.endswith(f" [{row.name}]")
        assert row.example.startswith("error: ") == (row in ERRORS)


def pattern(message: ast.expr) -> str:
    """The lines that a message gives; of one that is no literal any."""
    text = message.value if isinstance(message, ast.Constant) else "%s"
    return ".*".join(map(re.escape, re.split(r"%(?:[sd]|\.\df)", text.replace("%%", "%"))))


def test_the_example_of_a_warning_is_a_line_that_one_of_its_calls_gives():
    messages = {row.name: set() for row in WARNINGS}
    for _, name, call in calls():
        if name == "warn":
            messages[call.args[0].value].add(pattern(call.args[1]))
    messages["PRL301"].add(".* is now .*")
    for row in WARNINGS:
        line = row.example.removesuffix(f" [{row.name}]")
        assert any(re.fullmatch(one, line) for one in messages[row.name]), (row.name, messages[row.name])


def test_a_warning_ends_its_first_line_with_its_code_and_its_record_has_it(caplog):
    with caplog.at_level(logging.INFO, "perl"):
        warn("PRL304", "%d of %d, 100 %%", 3, 4)
        warn("PRL306", "100 %")
        warn("PRL306", "%s", "one\ntwo")
    assert caplog.messages == ["3 of 4, 100 % [PRL304]", "100 % [PRL306]", "one [PRL306]\ntwo"]
    assert {record.levelname for record in caplog.records} == {"WARNING"}
    assert [record.code for record in caplog.records] == ["PRL304", "PRL306", "PRL306"]
    assert {record.filename for record in caplog.records} == {Path(__file__).name}


def test_an_old_name_has_a_code_and_the_warning_is_where_it_is_used():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert PerlError("no").problems == PerlError("no").mistakes
        assert perl.errors.Problem is perl.errors.Mistake
    assert [str(one.message).endswith("[PRL301]") for one in caught] == [True, True]
    assert {one.filename for one in caught} == {__file__}


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("train", "quikstart"), "quikstart: no such file, and no recipe of that name (did you mean quickstart?)"),
        (("explain", "PRL999"), None),
    ],
)
def test_an_error_line_ends_with_its_code_which_is_explained(capsys, arguments, line):
    assert commands.run(list(arguments), "perl") == 2
    (said,) = capsys.readouterr().err.splitlines()
    code = re.fullmatch(r"error: (.+) \[(PRL2\d\d)\]", said)
    assert line is None or line.split(":")[0] in code[1]
    assert commands.run(["explain", code[2]], "perl") == 0
    assert capsys.readouterr().out.startswith(f"{code[2]}: ")
