"""Connections between the processes of a run: an end is known to all, whatever it was, and a stranger is not heard."""

import json
import socket
import threading
import time

import pytest
from torch.distributed import HashStore

from perl.launch.meeting import Meeting, MeetingError
from perl.launch.watch import End, LostProcessError, Watch


@pytest.fixture
def watches(monkeypatch):
    """Of three processes; here, of three threads of this one."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setattr("perl.launch.watch.GRACE_SECONDS", 60.0)  # after which a process that noticed nothing is ended
    store = HashStore()
    made = [Watch(Meeting(store, rank, 3)) for rank in range(3)]
    yield made
    for watch in made:
        watch._closing.set()
        watch._thread.join()
        watch._disconnect()


def test_an_orderly_end_is_nobodys_cause(watches):
    watches[1].close(End(1, "done", code=0))
    watches[2].close(End(2, "stopped", "stopped after step 3", 130))
    time.sleep(1.0)
    assert watches[0].cause() is None
    watches[0].look()


def test_an_error_is_told_to_all_with_its_rank(watches):
    closing = threading.Thread(
        target=watches[2].close, args=(End(2, "error", "ValueError: of its own", pid=7, host="n"),)
    )
    closing.start()
    for watch in watches[:2]:
        end = watch.cause(seconds=20.0)
        assert end is not None
        assert str(end) == "rank 2 (pid 7 on n) failed: ValueError: of its own"
        with pytest.raises(LostProcessError, match="rank 2"):
            watch.look()
    watches[0].close(End(0, "lost"))
    closing.join()


def test_a_process_that_says_nothing_was_killed_and_one_that_lost_another_is_not_the_cause(watches):
    watches[1].close(End(1, "lost", "a consequence"))
    for connection in list(watches[2]._connections):
        connection.shutdown(socket.SHUT_RDWR)  # as the kernel does
    end = watches[0].cause(seconds=20.0)
    assert end is not None
    assert (end.rank, end.kind) == (2, "killed")
    assert "ended without a word" in str(end)


def test_a_stranger_is_not_heard(watches):
    port = watches[0]._meeting.told("watch")["port"]
    for said in (b"GET / HTTP/1.1\r\n\r\n", json.dumps({"rank": 1, "kind": "error", "text": "x"}).encode() + b"\n"):
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(said)
            stranger.settimeout(20.0)
            assert stranger.recv(1) == b""
    assert watches[0].cause() is None


def test_a_process_that_never_comes_is_named():
    with pytest.raises(MeetingError, match="nothing from rank 0 of 2"):
        Meeting(HashStore(), 1, 2).told("watch", seconds=0.3)
