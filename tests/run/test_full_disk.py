"""A disk that is full, or a file that vanishes, is a line; nothing is lost, and the same command goes on.

The disk is full for this process: the system refuses each file beyond a number of bytes.
"""

import errno
import hashlib
import os
import resource
import shutil
import sys
from contextlib import contextmanager

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from perl.cli.commands import run
from perl.errors import EXIT_DONE, EXIT_FAILED, EXIT_USER_MISTAKE
from perl.run.files import file_access_error, new_folder, write_file
from perl.run.logs import append_row


@contextmanager
def full_beyond(number):
    """Python itself would leave compiled modules cut short: none are written meanwhile, here and in workers."""
    before, written = resource.getrlimit(resource.RLIMIT_FSIZE), sys.dont_write_bytecode
    sys.dont_write_bytecode, os.environ["PYTHONDONTWRITEBYTECODE"] = True, "1"
    resource.setrlimit(resource.RLIMIT_FSIZE, (number, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        sys.dont_write_bytecode = written
        os.environ.pop("PYTHONDONTWRITEBYTECODE")


@pytest.mark.parametrize(
    ("arguments", "file"),
    [
        (["zoo", "html", "-o", "zoo.html"], "zoo.html"),
        (["zoo", "pull", "sandbox-lora", "pulled"], "pulled"),
        (["export", "zoo:sandbox-lora", "--as", "lora", "-o", "exported"], "exported"),
        (["spectrum", "zoo:sandbox-lora", "-o", "found"], "found/spectrum.json"),
        pytest.param(
            [
                "eval",
                "--adapter",
                "zoo:sandbox-lora",
                "--tasks",
                "sandbox:chain",
                "--limit",
                "4",
                "--k",
                "1",
                "-o",
                "e",
            ],
            "e/samples.jsonl",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            ["new", "--model", "sandbox:base", "--data", "sums.jsonl", "-o", "made.yaml"],
            "made.yaml",
            marks=pytest.mark.nightly,
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_command_on_a_full_disk_says_which_file_and_goes_on_when_there_is_room(tmp_path, capsys, arguments, file):
    (tmp_path / "sums.jsonl").write_text("".join(f'{{"prompt": "{i}+1=", "answer": "{i + 1}"}}\n' for i in range(40)))
    with full_beyond(300):
        assert run(arguments, "perl") == EXIT_FAILED
    (line,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("error"))
    assert f"{file}: cannot be written: File too large" in line
    assert not [path for path in tmp_path.rglob("*") if path.name.endswith(".tmp")]
    assert run(arguments, "perl") == EXIT_DONE


def test_a_training_that_met_a_full_disk_ends_with_the_adapter_of_one_that_did_not(tmp_path, capsys):
    def train(output):
        return run(
            [
                "train",
                "quickstart",
                "train.max_steps=2",
                "train.save_steps=1",
                "eval.limit=4",
                "eval.k=1",
                "-o",
                output,
            ],
            "perl",
        )

    with full_beyond(30_000):
        assert train("met") == EXIT_FAILED
    assert "met/checkpoints: cannot be written" in capsys.readouterr().err
    assert train("met") == train("spared") == EXIT_DONE
    met, spared = (tmp_path / name / "adapter" / "adapter_model.safetensors" for name in ("met", "spared"))
    assert hashlib.sha256(met.read_bytes()).digest() == hashlib.sha256(spared.read_bytes()).digest()


@pytest.mark.parametrize(
    "write",
    [
        lambda file: torch.save(torch.zeros(1000), file),
        lambda file: save_file({"a": torch.zeros(1000)}, file),
        lambda file: file.write_text("a" * 1000),
    ],
    ids=["torch", "safetensors", "text"],
)
def test_whichever_library_writes_the_file_is_named_and_what_was_there_stays(tmp_path, write):
    (tmp_path / "file").write_text("before")
    with full_beyond(300):
        with pytest.raises(OSError, match="cannot be written") as whole_file:
            write_file(tmp_path / "file", write)
        with (
            pytest.raises(OSError, match="cannot be written") as whole_folder,
            new_folder(tmp_path / "folder") as staged,
        ):
            write(staged / "part")
        with pytest.raises((OSError, RuntimeError, SafetensorError)) as bare:
            write(tmp_path / "bare")
    assert (whole_file.value.filename, whole_folder.value.filename) == (
        str(tmp_path / "file"),
        str(tmp_path / "folder"),
    )
    assert [path.name for path in tmp_path.iterdir() if path.name != "bare"] == ["file"]
    assert (tmp_path / "file").read_text() == "before"
    assert file_access_error(bare.value).exit_code == EXIT_FAILED


@pytest.mark.parametrize(
    ("error", "exit_code"),
    [
        (OSError(errno.EROFS, "Read-only file system", "card.md"), EXIT_USER_MISTAKE),
        (PermissionError(errno.EACCES, "Permission denied", "card.md"), EXIT_USER_MISTAKE),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "card.md"), EXIT_USER_MISTAKE),
        (OSError(errno.EIO, "Input/output error", "card.md"), EXIT_FAILED),
        (ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"), None),
        (KeyError("card.md"), None),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_an_error_of_a_file_is_told_by_its_name_and_any_other_is_not_one(error, exit_code):
    told = file_access_error(error)
    assert (told and told.exit_code) == exit_code
    assert told is None or str(told).startswith("card.md: cannot be ")
    wrapped = RuntimeError("while it was made")
    wrapped.__cause__ = error
    assert (file_access_error(wrapped) is None) == (told is None)


def test_a_folder_that_is_removed_while_it_is_trained_in_is_said_at_the_next_step(tmp_path, capsys, monkeypatch):
    rows = []

    def removed_at_the_second(log, row):
        rows.append(row)
        if len(rows) == 2:
            shutil.rmtree(tmp_path / "gone")
        append_row(log, row)

    monkeypatch.setattr("perl.trainer.callbacks.step_logs.append_row", removed_at_the_second)
    assert (
        run(["train", "quickstart", "train.max_steps=8", "eval.limit=4", "eval.k=1", "-o", "gone"], "perl")
        == EXIT_USER_MISTAKE
    )
    assert "gone: was removed while the run wrote to it" in capsys.readouterr().err
    assert {row["step"] for row in rows} <= {1, 2}
