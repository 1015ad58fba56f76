"""The console command ``perl`` trains where training is asked for, and is the language's Perl everywhere else."""

import os
import pty
import shutil
import signal
import subprocess
import sys
import tempfile
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
def test_a_one_liner_runs():
    result = run_perl("-e", "print 42")
    assert (result.returncode, result.stdout, result.stderr) == (0, "42", "")


@needs_language
def test_a_program_on_stdin_runs():
    result = run_perl(stdin="print 7")
    assert (result.returncode, result.stdout, result.stderr) == (0, "7", "")


@needs_language
def test_a_script_gets_its_arguments(tmp_path):
    (tmp_path / "script.pl").write_text('print "$0: @ARGV";')
    result = run_perl("script.pl", "one", "--help", "train")
    assert (result.returncode, result.stdout, result.stderr) == (0, "script.pl: one --help train", "")


@needs_language
def test_a_script_whose_first_line_finds_perl_on_the_path_runs(tmp_path):
    script = write_program(tmp_path / "hello", '#!/usr/bin/env perl\nuse strict;\nprint "hello @ARGV";\n')
    result = run_perl("a", "b c", program=script)
    assert (result.returncode, result.stdout, result.stderr) == (0, "hello a b c", "")


@needs_language
def test_its_version_option_is_the_languages():
    result = run_perl("-v")
    assert result.returncode == 0
    assert "This is perl" in result.stdout


@needs_language
@pytest.mark.parametrize("status", [0, 3, 255])
def test_the_exit_status_is_passed_on(status):
    assert run_perl("-e", f"exit {status}").returncode == status


@needs_language
def test_stdin_reaches_the_program():
    result = run_perl("-ne", "print uc", stdin="one\ntwo\n")
    assert (result.returncode, result.stdout) == (0, "ONE\nTWO\n")


@needs_language
def test_arguments_arrive_unchanged():
    arguments = ["a b", "line\nbreak", "", "$HOME", "*", "ä", "--version"]
    result = run_perl("-e", 'print join("\\0", @ARGV)', "--", *arguments)
    assert result.stdout.split("\0") == arguments


@needs_language
def test_the_process_becomes_perl_instead_of_starting_one():
    process = subprocess.Popen(
        [OURS / "perl", "-e", "print $$"],
        env={**os.environ, "PATH": f"{OURS}:{language_perl().parent}"},
        stdout=subprocess.PIPE,
        text=True,
    )
    printed, _ = process.communicate(timeout=ENDS_WITHIN)
    assert int(printed) == process.pid


@needs_language
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_death_by_a_signal_is_seen_by_the_caller(number):
    assert run_perl("-e", f"kill {int(number)}, $$; sleep 60").returncode == -number


@needs_language
def test_an_endless_program_dies_when_its_reader_leaves():
    process = subprocess.Popen(
        [OURS / "perl", "-e", 'print "x\\n" while 1'],
        env={**os.environ, "PATH": f"{OURS}:{language_perl().parent}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
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
@pytest.mark.parametrize("name", ["train", "recipes", "methods"])
def test_a_command_stays_ours_where_a_file_bears_its_name(tmp_path, name):
    for file in (name, f"{name}.yaml"):
        (tmp_path / file).write_text('print "the language\'s";')
    result = run_perl(name, "--help")
    assert result.returncode == 0
    assert f"Usage: perl {name}" in result.stdout


@needs_language
@pytest.mark.parametrize(("option", "shown"), [("--help", "Usage: perl"), ("--version", "perl-rl, version")])
def test_our_options_are_ours(option, shown):
    result = run_perl(option)
    assert result.returncode == 0
    assert result.stdout.startswith(shown)


def test_without_a_language_perl_the_options_are_a_mistake():
    result = run_perl("-e", "print 42", path=[OURS])
    assert (result.returncode, result.stdout) == (2, "")
    assert "Usage: perl" in result.stderr
    assert "No such option" in result.stderr
    assert "Traceback" not in result.stderr


def test_our_own_program_twice_on_the_path_does_not_loop(tmp_path):
    again = shutil.copy2(OURS / "perl", write_program(tmp_path / "again" / "perl", ""))
    result = run_perl("-e", "print 42", path=[OURS, Path(again).parent, OURS])
    assert result.returncode == 2
    assert "Usage: perl" in result.stderr


@needs_language
def test_the_language_is_found_behind_our_own_program_twice(tmp_path):
    again = shutil.copy2(OURS / "perl", write_program(tmp_path / "again" / "perl", ""))
    result = run_perl("-e", "print 42", path=[OURS, Path(again).parent, OURS, language_perl().parent])
    assert (result.returncode, result.stdout) == (0, "42")


@needs_language
def test_folders_and_files_that_cannot_run_are_passed_over(tmp_path):
    (tmp_path / "folder" / "perl").mkdir(parents=True)
    write_program(tmp_path / "file" / "perl", "#!/bin/sh\necho wrong\n").chmod(0o644)
    (tmp_path / "dangling").mkdir()
    (tmp_path / "dangling" / "perl").symlink_to("nowhere")
    passed_over = [tmp_path / name for name in ("folder", "file", "dangling", "absent")]
    result = run_perl("-e", "print 42", path=[OURS, *passed_over, language_perl().parent])
    assert (result.returncode, result.stdout, result.stderr) == (0, "42", "")


def test_a_program_that_may_run_but_not_be_read_is_no_crash():
    """The look-up reads the first bytes of what it finds; root may read everything, so it becomes nobody first."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        write_program(Path(folder) / "perl", "#!/bin/sh\n").chmod(0o111)
        code = (
            "import os, sys\nfrom perl.cli.main import next_perl\n"
            "if os.geteuid() == 0: os.setuid(65534)\n"
            "print(next_perl(sys.argv[1]))"
        )
        result = subprocess.run(
            [sys.executable, "-c", code, folder], capture_output=True, text=True, check=False, timeout=ENDS_WITHIN
        )
    assert result.stderr == ""
    assert result.stdout.strip() in {f"{folder}/perl", "None"}


@needs_language
def test_a_shim_that_comes_back_to_us_does_not_loop(tmp_path):
    """As pyenv and plenv do: a script called perl that puts a bin folder first and looks perl up again."""
    shim = write_program(
        tmp_path / "shims" / "perl",
        f'#!/bin/sh\nif [ "${{DEPTH:-0}}" -gt 5 ]; then echo loop >&2; exit 99; fi\n'
        f'export DEPTH=$((${{DEPTH:-0}} + 1))\nexport PATH="{OURS}:$PATH"\nexec perl "$@"\n',
    )
    result = run_perl("-e", "print join '|', @ARGV", "a b", path=[OURS, shim.parent, language_perl().parent])
    assert (result.returncode, result.stdout, result.stderr) == (0, "a b", "")
    from_the_shim = run_perl("-e", "print 1", program=shim, path=[shim.parent, OURS, language_perl().parent])
    assert (from_the_shim.returncode, from_the_shim.stdout, from_the_shim.stderr) == (0, "1", "")


@needs_language
def test_two_shims_in_a_row_do_not_loop(tmp_path):
    text = (
        '#!/bin/sh\nif [ "${DEPTH:-0}" -gt 5 ]; then echo loop >&2; exit 99; fi\n'
        'export DEPTH=$((${DEPTH:-0} + 1))\nexec perl "$@"\n'
    )
    shims = [write_program(tmp_path / name / "perl", text).parent for name in ("first", "second")]
    result = run_perl("-e", "print 42", path=[OURS, *shims, language_perl().parent])
    assert (result.returncode, result.stdout, result.stderr) == (0, "42", "")


def test_a_shim_without_a_language_perl_ends(tmp_path):
    shim = write_program(
        tmp_path / "shims" / "perl",
        '#!/bin/sh\nif [ "${DEPTH:-0}" -gt 5 ]; then echo loop >&2; exit 99; fi\n'
        'export DEPTH=$((${DEPTH:-0} + 1))\nexec perl "$@"\n',
    )
    result = run_perl("-e", "print 42", path=[OURS, shim.parent])
    assert result.returncode == 2
    assert "Usage: perl" in result.stderr


@needs_language
def test_a_perl_started_by_a_shimmed_perl_goes_through_the_shim_again(tmp_path):
    shim = write_program(tmp_path / "shims" / "perl", f'#!/bin/sh\necho shim >&2\nexec {language_perl()} "$@"\n')
    inner = 'system("perl", "-e", "print 5")'
    result = run_perl("-e", inner, path=[OURS, shim.parent, language_perl().parent])
    assert (result.returncode, result.stdout, result.stderr) == (0, "5", "shim\nshim\n")


@needs_language
def test_perl_rl_is_always_ours():
    mistaken = run_perl("-e", "print 42", program=OURS / "perl-rl")
    assert (mistaken.returncode, mistaken.stdout) == (2, "")
    assert "Usage: perl-rl" in mistaken.stderr
    piped = run_perl(program=OURS / "perl-rl", stdin="print 7")
    assert piped.stdout.startswith("Usage: perl-rl")


@needs_language
def test_python_m_perl_is_always_ours():
    mistaken = run_perl("-m", "perl", "-e", "print 42", program=sys.executable)
    assert (mistaken.returncode, mistaken.stdout) == (2, "")
    assert "Usage: python -m perl" in mistaken.stderr
    piped = run_perl("-m", "perl", program=sys.executable, stdin="print 7")
    assert piped.stdout.startswith("Usage: python -m perl")


@needs_language
def test_a_mistyped_command_is_named_before_perl_complains():
    result = run_perl("trian", "x")
    assert result.returncode == 2
    ours, language = result.stderr.splitlines()
    assert ours == "perl-rl: no command 'trian' (did you mean train?)"
    assert language.startswith('Can\'t open perl script "trian"')


@needs_language
def test_a_script_with_a_name_like_a_command_draws_no_remark(tmp_path):
    (tmp_path / "trian").write_text("print 1")
    result = run_perl("trian")
    assert (result.returncode, result.stdout, result.stderr) == (0, "1", "")


@needs_language
def test_a_person_at_a_terminal_who_types_perl_alone_sees_our_help():
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


def modules_after(code: str, suspects: tuple[str, ...]) -> list[str]:
    """Which of the suspects are imported once the code has run in a process of its own."""
    report = f"import sys\n{code}\nprint('LOADED', *[name for name in {suspects!r} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", report], capture_output=True, text=True, check=True)
    return result.stdout.splitlines()[-1].split()[1:]


def test_the_decision_imports_nothing_heavy():
    suspects = ("click", "torch", "transformers", "pydantic", "yaml", "trl", "peft", "numpy", "subprocess")
    assert modules_after("import perl.cli.main; perl.cli.main.is_ours(['-e'])", suspects) == []


@pytest.mark.parametrize(
    "code",
    [
        "import perl",
        "import perl.cli.commands; perl.cli.commands.run(['--help'], 'perl')",
        "import perl.cli.commands; perl.cli.commands.run(['recipes'], 'perl')",
        "import perl.cli.commands; perl.cli.commands.run(['methods'], 'perl')",
        "import perl.cli.commands; assert perl.cli.commands.run(['train', 'no such recipe'], 'perl') == 2",
    ],
)
def test_what_needs_no_model_imports_none_of_the_libraries(code):
    suspects = ("torch", "transformers", "trl", "peft", "datasets", "numpy")
    assert modules_after(code, suspects) == []


def test_the_look_at_imported_modules_sees_them():
    assert modules_after("import yaml", ("yaml", "torch")) == ["yaml"]
