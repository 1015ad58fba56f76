"""The console command ``perl`` trains where training is asked for, and is the language's Perl everywhere else."""

import os
import pty
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

OURS = Path(sys.executable).parent
# A loop between programs would otherwise run for ever.
ENDS_WITHIN = 600  # seconds; only to end a program that would never end

needs_console_script = pytest.mark.skipif(
    not (OURS / "perl").is_file() or not (OURS / "perl-rl").is_file(),
    reason="the console scripts are not installed beside this Python",
)


def language_perl() -> Path | None:
    """The system's Perl, found without our own look-up: a binary, so no script of ours."""
    for folder in os.environ.get("PATH", os.defpath).split(os.pathsep):
        candidate = Path(folder) / "perl"
        if candidate.is_file() and os.access(candidate, os.X_OK) and candidate.read_bytes()[:2] != b"#!":
            return candidate
    return None


needs_language = pytest.mark.skipif(language_perl() is None, reason="this machine has no Perl")
pytestmark = [needs_console_script]


def run_perl(*arguments, path=None, program=OURS / "perl", stdin="", **options):
    """Runs a console script with our folder first on the PATH, as in an active virtual environment."""
    path = [OURS, language_perl().parent, "/usr/bin", "/bin"] if path is None else path
    environment = {**os.environ, "PATH": os.pathsep.join(str(folder) for folder in path)}
    options = {"input": stdin, "capture_output": True, "text": True, "timeout": ENDS_WITHIN, **options}
    return subprocess.run([str(program), *arguments], env=environment, check=False, **options)


def write_program(file: Path, text: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    file.chmod(0o755)
    return file


@needs_language
def test_a_program_runs_with_its_arguments_stdin_and_exit_status_also_by_its_first_line(tmp_path):
    (tmp_path / "script.pl").write_text('print "$0: @ARGV";')
    for arguments, stdin, stdout in (
        ((), "print 7", "7"),
        (("script.pl", "one", "--help", "train"), "", "script.pl: one --help train"),
        (("-ne", "print uc"), "one\ntwo\n", "ONE\nTWO\n"),
    ):
        result = run_perl(*arguments, stdin=stdin)
        assert (result.returncode, result.stdout, result.stderr) == (0, stdout, ""), arguments
    unchanged = ["a b", "line\nbreak", "", "$HOME", "*", "ä", "--version"]
    result = run_perl("-e", 'print join("\\0", @ARGV); exit 3', "--", *unchanged)
    assert (result.returncode, result.stdout.split("\0")) == (3, unchanged)
    script = write_program(tmp_path / "hello", '#!/usr/bin/env perl\nuse strict;\nprint "hello @ARGV";\n')
    result = run_perl("a", "b c", program=script)
    assert (result.returncode, result.stdout, result.stderr) == (0, "hello a b c", "")


@needs_language
def test_the_process_becomes_perl_instead_of_starting_one_and_dies_of_its_signals():
    environment = {**os.environ, "PATH": f"{OURS}:{language_perl().parent}"}
    process = subprocess.Popen([OURS / "perl", "-e", "print $$"], env=environment, stdout=subprocess.PIPE, text=True)
    printed, _ = process.communicate(timeout=ENDS_WITHIN)
    assert int(printed) == process.pid
    assert run_perl("-e", f"kill {int(signal.SIGTERM)}, $$; sleep 60").returncode == -signal.SIGTERM
    # An endless one dies when its reader leaves.
    endless = [OURS / "perl", "-e", 'print "x\\n" while 1']
    process = subprocess.Popen(endless, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "x\n"
        process.stdout.close()
        assert process.wait(timeout=ENDS_WITHIN) == -signal.SIGPIPE
        assert process.stderr.read() == ""
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


@needs_language
def test_commands_and_options_of_ours_stay_ours_and_so_do_perl_rl_and_perl_alone_at_a_terminal(tmp_path):
    for file in ("recipes", "recipes.yaml"):
        (tmp_path / file).write_text('print "the language\'s";')
    for option, shown in (("recipes", "quickstart"), ("--version", "perl-rl, version")):
        result = run_perl(option)
        assert result.returncode == 0, option
        assert shown in result.stdout
    mistaken = run_perl("-e", "print 42", program=OURS / "perl-rl")
    assert (mistaken.returncode, mistaken.stdout) == (2, "")
    assert "error: perl-rl: no such option '-e'" in mistaken.stderr
    person, terminal = pty.openpty()
    try:
        result = subprocess.run(
            [OURS / "perl"], stdin=terminal, capture_output=True, text=True, check=False, timeout=ENDS_WITHIN
        )
    finally:
        os.close(terminal)
        os.close(person)
    assert result.returncode == 0
    assert result.stdout.startswith("Usage: perl")


SHIM = (
    '#!/bin/sh\nif [ "${DEPTH:-0}" -gt 5 ]; then echo loop >&2; exit 99; fi\n'
    'export DEPTH=$((${DEPTH:-0} + 1))\nexec perl "$@"\n'
)


def test_without_a_language_perl_the_options_are_a_mistake_also_behind_ourselves_or_a_shim(tmp_path):
    again = shutil.copy2(OURS / "perl", write_program(tmp_path / "again" / "perl", ""))
    shim = write_program(tmp_path / "shims" / "perl", SHIM)
    for path in ([OURS, Path(again).parent, OURS], [OURS, shim.parent]):
        result = run_perl("-e", "print 42", path=path)
        assert (result.returncode, result.stdout) == (2, ""), path
        assert "error: perl: no such option '-e'" in result.stderr


@needs_language
def test_a_shim_that_comes_back_to_us_does_not_loop_and_one_is_gone_through_again_by_a_perl_of_its_own(tmp_path):
    """As pyenv and plenv do: a script called perl that puts a bin folder first and looks perl up again."""
    first = f'export PATH="{OURS}:$PATH"\nexec perl'
    shim = write_program(tmp_path / "shims" / "perl", SHIM.replace("exec perl", first))
    result = run_perl("-e", "print join '|', @ARGV", "a b", path=[OURS, shim.parent, language_perl().parent])
    assert (result.returncode, result.stdout, result.stderr) == (0, "a b", "")
    from_the_shim = run_perl("-e", "print 1", program=shim, path=[shim.parent, OURS, language_perl().parent])
    assert (from_the_shim.returncode, from_the_shim.stdout, from_the_shim.stderr) == (0, "1", "")


@needs_language
def test_a_mistyped_command_is_named_and_perl_does_not_complain_too(tmp_path):
    result = run_perl("trian", "x")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "perl-rl: no command 'trian' (did you mean train?)\n"
    (tmp_path / "trian").write_text("print 1")  # a script of that name draws no remark
    result = run_perl("trian")
    assert (result.returncode, result.stdout, result.stderr) == (0, "1", "")


def modules_after(code: str, suspects: tuple[str, ...]) -> list[str]:
    """Which of the suspects are imported once the code has run in a process of its own."""
    report = f"import sys\n{code}\nprint('LOADED', *[name for name in {suspects!r} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", report], capture_output=True, text=True, check=True)
    return result.stdout.splitlines()[-1].split()[1:]


def test_what_needs_no_model_imports_none_of_the_libraries(checkout):
    light = ("click", "torch", "transformers", "pydantic", "yaml", "trl", "peft", "numpy", "subprocess")
    assert modules_after("import perl.cli.main; perl.cli.main.is_ours(['-e'])", light) == []
    suspects = ("torch", "transformers", "trl", "peft", "datasets", "numpy")
    calls = (["--help"], ["recipes"], ["methods"], ["explain"], ["eval", "--list-tasks"])
    running = f"from perl.cli.commands import run; assert all(run(call, 'perl') == 0 for call in {calls})"
    mistaken = "from perl.cli.commands import run; assert run(['train', 'absent'], 'perl') == 2"
    for code in ("import perl", running, mistaken):
        assert modules_after(code, suspects) == [], code
    shutil.copytree(checkout / "model_cards" / "zoo", "model_cards/zoo")
    heavy = ("torch", "transformers", "peft", "datasets", "matplotlib")
    # What is published is searched for the login to the Hub, which its client knows.
    for commands, suspects in (
        (("list", "show sandbox-lora", "rank sandbox:addition"), (*heavy, "huggingface_hub")),
        (("html", "render", "render --check"), heavy),
    ):
        reading = f"all(run(['zoo', *line.split(), '--zoo', 'model_cards/zoo'], 'perl') == 0 for line in {commands})"
        assert modules_after(f"from perl.cli.main import run_commands as run; assert {reading}", suspects) == []
    assert modules_after("import yaml", ("yaml", "torch")) == ["yaml"]  # it sees what is imported
