"""A fork of the warm process prints and ends as a process that imports, in whatever environment it is asked for."""

import os
import subprocess

import pytest

from tests import warm


@pytest.fixture(autouse=True)
def _as_it_was_at_the_start(monkeypatch):
    """Other tests of this process may have left variables that libraries set while they train."""
    for name in os.environ.keys() - warm._ENVIRONMENT.keys():
        monkeypatch.delenv(name)
    for name, value in warm._ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


def both(*arguments, **options):
    command = [*warm.COMMAND, *arguments]
    options |= {"capture_output": True, "text": True, "check": False}
    return warm.run(command, **options), subprocess.run(command, **options)


@pytest.mark.nightly
def test_it_prints_and_ends_as_a_process_that_imports(tmp_path):
    for arguments in (
        ("recipes",),
        ("train", "quickstart", "peft.rnak=4"),
        ("train", "nothing.yaml"),
        ("eval", "--list-tasks"),
        ("--version",),
    ):
        forked, started = both(*arguments, cwd=tmp_path)
        assert (forked.returncode, forked.stdout, forked.stderr) == (
            started.returncode,
            started.stdout,
            started.stderr,
        )
        assert forked.returncode == (2 if arguments[0] == "train" else 0)  # both trainings are the user's mistakes
    forked, started = both("reward", "try", "7", "-", input="so \\boxed{7}\n")  # what it reads
    assert forked.stdout == started.stdout
    assert "7" in forked.stdout


@pytest.mark.nightly
def test_only_an_environment_that_libraries_were_not_imported_in_starts_an_ordinary_process():
    import perl.training.stages  # noqa: F401 (libraries set variables when they are imported)

    other = {**os.environ, "HF_HUB_OFFLINE": "0"}
    for environment, ordinary in ((other, True), (dict(os.environ), False), (None, False)):
        with warm.popen([*warm.COMMAND, "--version"], env=environment, stdout=subprocess.PIPE) as process:
            assert (type(process) is subprocess.Popen) == ordinary
