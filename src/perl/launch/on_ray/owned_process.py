"""A program that ends when the process that started it does, however that one ends, with all that it has started.

python owned_process.py FOLDER NAME COMMAND... : its stdin is a pipe from the owner, which closes when the owner is no
more; FOLDER/NAME.ended says that the command has ended; FOLDER is deleted once no such program uses it

It is no child of its owner: Ray kills those as soon as an actor ends, before they could end what they have started.
"""

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import threading

_SECONDS_TO_END = 10.0
_USERS = ".users"
ENDED = ".ended"


def run(folder: str, name: str, command: list[str]) -> None:
    """Runs a command in a process group of its own until it ends, or stdin does; returns when stdin has ended."""
    users = _use(folder)
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)  # noqa: S603 (of our caller)
    noting = threading.Thread(target=_note_end, args=(process, os.path.join(folder, name + ENDED)), daemon=True)
    noting.start()
    while sys.stdin.buffer.read(4096):
        pass
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_SECONDS_TO_END)
    _kill(process.pid)
    noting.join(_SECONDS_TO_END)  # what it writes amid the deletion would stay, and the folder with it
    os.close(users)  # first: of two that end at once, the later one finds no other
    with contextlib.suppress(OSError), open(os.path.join(folder, _USERS), "r+") as last:
        fcntl.flock(last, fcntl.LOCK_EX | fcntl.LOCK_NB)  # an error where another one uses it
        shutil.rmtree(folder, ignore_errors=True)


def _use(folder: str) -> int:
    """Marks the folder as used by this process, for as long as it runs."""
    while True:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        users = os.open(os.path.join(folder, _USERS), os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(users, fcntl.LOCK_SH)
        with contextlib.suppress(FileNotFoundError):  # deleted between opening and marking
            if os.fstat(users).st_ino == os.stat(os.path.join(folder, _USERS)).st_ino:
                return users
        os.close(users)


def _note_end(process: "subprocess.Popen[bytes]", file: str) -> None:
    code = process.wait()
    _kill(process.pid)  # what it has left
    with contextlib.suppress(OSError):
        with open(file + ".tmp", "w") as ended:
            ended.write(str(code))
        os.replace(file + ".tmp", file)


def _kill(group: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    if os.fork():
        os._exit(0)
    os.setsid()
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):  # meant for the owner
        signal.signal(number, signal.SIG_IGN)
    run(sys.argv[1], sys.argv[2], sys.argv[3:])
