"""Connections between the processes of a run: an end is known to all, whatever it was, and a stranger is not heard."""

import contextlib
import json
import socket
import threading
import time

import pytest
from torch.distributed import HashStore

from perl.errors import Mistake
from perl.launch.channel import Hub, PeerMonitor, open_channel, tell_launcher
from perl.launch.meeting import Meeting, MeetingError
from perl.run.failure import Failure, LostProcessError

DONE = Failure(0, "done", exit_code=0)


@pytest.fixture
def watches(monkeypatch):
    """Of three processes; here, of three threads of this one."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setattr("perl.launch.channel.GRACE_SECONDS", 60.0)  # after which one that noticed nothing is ended
    store = HashStore()
    meetings = [Meeting(store, rank, 3) for rank in range(3)]
    made = [PeerMonitor(open_channel(meeting), meeting) for meeting in meetings]
    yield made
    for watch in made:
        watch._leaving.set()
        watch.channel.close()
        watch._thread.join()


def test_an_orderly_end_is_nobodys_cause(watches):
    watches[1].close(Failure(1, "done", exit_code=0))
    watches[2].close(Failure(2, "stopped", (Mistake("stopped after step 3"),), 130))
    time.sleep(1.0)
    assert watches[0].channel.cause() is None
    watches[0].look()


def test_an_error_is_told_to_all_with_its_rank(watches):
    closing = threading.Thread(
        target=watches[2].close, args=(Failure(2, "error", (Mistake("ValueError: of its own"),), pid=7, host="n"),)
    )
    closing.start()
    for watch in watches[:2]:
        end = watch.channel.cause(seconds=20.0)
        assert end is not None
        assert str(end) == "rank 2 (pid 7 on n) failed: ValueError: of its own"
        with pytest.raises(LostProcessError, match="rank 2"):
            watch.look()
    watches[0].close(Failure(0, "lost"))
    closing.join()


def test_a_process_that_says_nothing_was_killed_and_one_that_lost_another_is_not_the_cause(watches, monkeypatch):
    with monkeypatch.context() as soon:  # the main process will not say how it ends
        soon.setattr("perl.launch.channel.GRACE_SECONDS", 0.0)
        watches[1].close(Failure(1, "lost", (Mistake("a consequence"),)))
    watches[2].channel._connection.shutdown(socket.SHUT_RDWR)  # as the kernel does
    end = watches[0].channel.cause(seconds=20.0)
    assert end is not None
    assert (end.rank, end.kind) == (2, "killed")
    assert "was killed" in str(end)


def test_a_stranger_is_not_heard(watches):
    port = watches[0].meeting.get("watch")["port"]
    claims = json.dumps({"rank": 1, "kind": "error", "text": "x"}).encode() + b"\n"
    for said in (b"GET / HTTP/1.1\r\n\r\n", claims, b'{"token": "\xc3\xa9"}\n', b"[" * 60_000 + b"\n"):
        assert_sent_away(port, said)
    assert watches[0].channel.cause() is None


def assert_sent_away(port: int, said: bytes) -> None:
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.sendall(said)
        stranger.settimeout(20.0)
        with contextlib.suppress(ConnectionResetError):  # it left something unread
            assert stranger.recv(1) == b""


def test_processes_that_are_started_again_hear_only_of_what_would_end_them_as_before(monkeypatch):
    """As Ray starts them; the word of one that is left of the earlier start counts no more."""
    with contextlib.ExitStack() as opened:
        hub = opened.enter_context(contextlib.closing(Hub(local=True, names_killed=True)))
        place = f"127.0.0.1:{hub.port}:{hub.token}"
        monkeypatch.setenv("PERL_RL_HUB", f"{place}/first")
        left = opened.enter_context(contextlib.closing(open_channel(Meeting(HashStore(), 1, 3))))
        tell_launcher(Failure(2, "mistake", (Mistake("no such key"),), 2, restartable=False))
        hub.wait(lambda: 2 in hub.ends, 20.0)  # each connection has a thread: the next one's word could come first
        tell_launcher(Failure(0, "error", (Mistake("of its own"),)))
        assert left.cause(20.0).rank == 2
        monkeypatch.setenv("PERL_RL_HUB", f"{place}/second")
        again = opened.enter_context(contextlib.closing(open_channel(Meeting(HashStore(), 1, 3))))
        assert again.cause(20.0).rank == 2
        left.close()
        monkeypatch.setenv("PERL_RL_HUB", f"{place}/first")
        tell_launcher(Failure(0, "error", (Mistake("of its own"),)))  # which comes late
        hub.wait(lambda: 1 in hub.ends, 0.5)
        assert list(hub.ends) == [2]


def test_one_that_comes_after_the_main_process_was_killed_names_it(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    store = HashStore()
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    Meeting(store, 0, 2).put("watch", {"port": port, "token": "", "pid": 7, "host": "n"})
    with pytest.raises(LostProcessError, match=r"rank 0 \(pid 7 on n\) was killed"):
        open_channel(Meeting(store, 1, 2))


@pytest.mark.parametrize(
    ("end", "then"), [(DONE, "goes on"), (Failure(0, "mistake", (Mistake("cannot push"),), 2), "cannot push")]
)
def test_the_others_wait_for_the_main_process_however_long_it_takes(watches, end, then):
    found = []

    def wait() -> None:
        try:
            watches[1].wait_for_main()
            found.append("goes on")
        except LostProcessError as error:
            found.append(str(error))

    waiting = threading.Thread(target=wait)
    waiting.start()
    waiting.join(1.5)
    assert not found
    watches[0].close(end)
    waiting.join()
    assert then in found[0]


def test_processes_that_never_come_are_named_with_what_usually_keeps_them():
    with pytest.raises(MeetingError, match=r"nothing from rank 0 of 4 .*never started"):
        Meeting(HashStore(), 1, 4).get("watch", seconds=0.3)
    store = HashStore()
    Meeting(store, 2, 4).put("statement", {})
    with pytest.raises(MeetingError, match=r"nothing from rank 1, 3 of 4 in .*never started"):
        Meeting(store, 0, 4).get("statement", 1, seconds=0.3)
