"""A connection from each process of a run to the main one: who ended, and why, is known to all of them at once.

process that ends -> its rank and its error -> every other process ends too

Collectives cannot tell: the CPU's raise whatever a socket says and name nobody, a GPU's wait for minutes. An open
connection needs no clock: the kernel closes it when its process is killed, and leaves it open while that only waits.
"""

import json
import os
import secrets
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from perl.errors import EXIT_FAILED, PerlError
from perl.launch.meeting import PATIENCE_SECONDS, Meeting, MeetingError
from perl.run.launched import STARTED_BY, started_by_us, who

# After another process has ended a process has this long to end by itself, as most do when a collective fails.
GRACE_SECONDS = 8.0
# How long the cause of a failed collective may take to be known: the end of the process behind it is already under way.
CAUSE_SECONDS = 5.0
_LOOK_EVERY_SECONDS = 0.5
# Of a connection that nothing comes over: a node that is lost, not a process, is noticed after these.
_IDLE_SECONDS, _PROBE_SECONDS, _PROBES = 10, 5, 3
_LONGEST_MESSAGE = 2**16

END = "end"
"""Topic under which the launcher of ``perl train --processes N`` finds how its processes ended."""

Kind = Literal["done", "stopped", "mistake", "interrupted", "error", "lost", "killed"]
# After these the others end by themselves: all have been asked to, or nothing is left to do.
IN_ORDER = ("done", "stopped")


@dataclass(frozen=True)
class End:
    """How a process has ended.

    Attributes:
        rank: Which.
        kind: ``done``; ``stopped``, as all are; ``mistake``, which its text says; ``interrupted``; ``error``, with a
            traceback; ``lost``: it has lost another one; ``killed``: it has said nothing.
        text: Its error, in a line.
        code: Its exit code.
        pid: Its process id.
        host: Where it ran.
        message: What is wrong, without where and what to do.
    """

    rank: int
    kind: Kind
    text: str = ""
    code: int = EXIT_FAILED
    pid: int = 0
    host: str = ""
    message: str = ""

    def tells_of(self, other: "End") -> bool:
        """Whether this process's error is another one's too, which need not be told again."""
        return self.kind == "mistake" and (self.rank == other.rank or other.message in self.message)

    def __str__(self) -> str:
        """What the others say of it."""
        name = who(self.rank, self.pid, self.host)
        if self.kind == "killed":
            return f"{name} ended without a word, as a process does that is killed"
        if self.kind == "interrupted":
            return f"{name} was interrupted"
        return f"{name}: {self.text}" if self.kind == "mistake" else f"{name} failed: {self.text}"


class Watch:
    """This process's connections to the others, looked after by a thread."""

    def __init__(self, meeting: Meeting) -> None:
        """Connects; the main process listens, and waits for nobody yet.

        Raises:
            MeetingError: The main process cannot be reached.
        """
        self.at_loss: Callable[[PerlError], None] = lambda _: None
        self.hint: Callable[[], str] = str
        self._meeting, self._main = meeting, meeting.rank == 0
        self._connections: dict[socket.socket, _Peer] = {}
        self._ends: list[End] = []
        self._heard_of = 0
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._selector = selectors.DefaultSelector()
        self._token = ""
        (self._listen if self._main else self._connect)()
        self._thread = threading.Thread(target=self._look_after, name="perl-watch", daemon=True)
        self._thread.start()

    def cause(self, seconds: float = 0.0) -> End | None:
        """The first process that ended before its time, by what it says or because it says nothing.

        Args:
            seconds: How long to wait for one.

        Returns:
            None while all others run, or have ended in order.
        """
        if seconds:
            with self._changed:
                self._changed.wait_for(lambda: self._first() is not None, seconds)
        return self._first()

    def look(self) -> None:
        """Raises the error of a run that has lost one of its processes."""
        end = self.cause()
        if end is not None:
            raise self.lost(end)

    def lost(self, end: End) -> "LostProcessError":
        """The error of a run that has lost a process."""
        error = LostProcessError(str(end), hint=self.hint() if end.kind in ("killed", "error") else "")
        error.exit_code = end.code or EXIT_FAILED
        return error

    def close(self, own: End) -> End | None:
        """Says how this process ends, and listens to the others no more.

        Returns:
            How the main process ended, where this one has failed and the main one says so in time.
        """
        early = own.kind not in IN_ORDER
        if self._main and early:  # one that has yet to start must find somebody who tells it
            self._wait(lambda: self._heard_of >= self._meeting.size - 1)
        self._closing.set()
        self._thread.join()
        for connection in list(self._connections):
            _send(connection, asdict(own))
        if not self._main and early:
            end = time.monotonic() + GRACE_SECONDS
            while self._connections and self._end_of_main() is None and time.monotonic() < end:
                self._receive()
        self._disconnect()
        return self._end_of_main()

    def _disconnect(self) -> None:
        for key in list((self._selector.get_map() or {}).values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()

    def _end_of_main(self) -> End | None:
        return next((end for end in self._ends if end.rank == 0), None)

    def _wait(self, until: Callable[[], bool]) -> None:
        with self._changed:
            self._changed.wait_for(until, GRACE_SECONDS)

    def _first(self) -> End | None:
        early = [end for end in self._ends if end.kind not in IN_ORDER]
        return next((end for end in early if end.kind != "lost"), None)

    def _listen(self) -> None:
        self._token = secrets.token_hex(16)
        address = os.environ["MASTER_ADDR"]
        if address in ("localhost", "127.0.0.1"):
            server = socket.create_server(("127.0.0.1", 0), backlog=self._meeting.size)
        elif socket.has_dualstack_ipv6():
            server = socket.create_server(
                ("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=self._meeting.size
            )
        else:
            server = socket.create_server(("", 0), backlog=self._meeting.size)
        self._selector.register(server, selectors.EVENT_READ)
        place = {"port": server.getsockname()[1], "token": self._token}
        self._meeting.tell("watch", {**place, "pid": os.getpid(), "host": socket.gethostname()})

    def _connect(self) -> None:
        place = self._meeting.told("watch", seconds=PATIENCE_SECONDS)
        address = os.environ["MASTER_ADDR"], int(place["port"])
        try:
            connection = socket.create_connection(address, timeout=PATIENCE_SECONDS)
        except OSError as error:
            what = f"rank {self._meeting.rank} cannot reach rank 0 at {address[0]}:{address[1]}: {error.strerror}"
            raise MeetingError(what, "launcher", "all nodes must be able to connect to each other") from None
        peer = _Peer(0, int(place["pid"]), str(place["host"]), trusted=True)
        self._take(connection, peer)
        hello = {"token": place["token"], "rank": self._meeting.rank, "pid": os.getpid(), "host": socket.gethostname()}
        _send(connection, hello)

    def _take(self, connection: socket.socket, peer: "_Peer") -> None:
        _keep_alive(connection)
        connection.settimeout(GRACE_SECONDS)
        self._connections[connection] = peer
        self._selector.register(connection, selectors.EVENT_READ)

    def _look_after(self) -> None:
        """The thread: takes what comes, and ends this process if another has ended and this one does not notice."""
        parent = int(os.environ[STARTED_BY]) if started_by_us() else None
        told, deadline = False, 0.0
        while not self._closing.is_set():
            self._receive()
            if parent is not None and os.getppid() != parent:  # whoever started this process was killed
                parent = None
                os.kill(os.getpid(), signal.SIGTERM)
            first = self.cause()
            if first is None:
                continue
            if not told:
                told, deadline = True, time.monotonic() + GRACE_SECONDS
                for connection in list(self._connections) if self._main else ():
                    _send(connection, asdict(first))
            elif time.monotonic() > deadline:
                self._end_this_process(first)

    def _receive(self) -> None:
        """Takes what the others say, and others that have come."""
        for key, _ in self._selector.select(_LOOK_EVERY_SECONDS):
            if key.fileobj in self._connections:
                self._read(key.fileobj)
            else:
                self._take(key.fileobj.accept()[0], _Peer())  # type: ignore[union-attr]

    def _read(self, connection: socket.socket) -> None:
        peer = self._connections[connection]
        try:
            data = connection.recv(_LONGEST_MESSAGE)
        except OSError:
            data = b""
        peer.unread += data
        *lines, peer.unread = peer.unread.split(b"\n")
        try:
            for line in lines:
                self._hear(connection, peer, json.loads(line))
        except (ValueError, KeyError, TypeError):  # a stranger, or a broken message
            data = b""
        if not data or len(peer.unread) > _LONGEST_MESSAGE:
            self._selector.unregister(connection)
            del self._connections[connection]
            connection.close()
            if not peer.ended and peer.rank is not None:
                self._add(End(peer.rank, "killed", pid=peer.pid, host=peer.host))

    def _hear(self, connection: socket.socket, peer: "_Peer", message: Mapping[str, Any]) -> None:
        if peer.trusted:
            end = End(**message)
            peer.ended = peer.ended or end.rank == peer.rank
            self._add(end)
        elif secrets.compare_digest(str(message["token"]), self._token):
            peer.rank, peer.pid, peer.host = int(message["rank"]), int(message["pid"]), str(message["host"])
            peer.trusted = True
            with self._changed:
                self._heard_of += 1
                self._changed.notify_all()
            first = self.cause()
            if first is not None:
                _send(connection, asdict(first))
        else:
            raise ValueError("a stranger")

    def _add(self, end: End) -> None:
        with self._changed:
            if end not in self._ends:
                self._ends.append(end)
            self._changed.notify_all()

    def _end_this_process(self, first: End) -> None:
        """What is left where the main thread waits for a process that is no more, in a library that never returns."""
        error = self.lost(first)
        self.at_loss(error)
        if says_it(first, self._meeting.rank):
            print(f"error: {error}", file=sys.stderr, flush=True)  # noqa: T201
        if started_by_us():
            self._meeting.tell(END, asdict(End(self._meeting.rank, "lost", code=error.exit_code)))
        os._exit(error.exit_code)


@dataclass
class _Peer:
    """What is known of a process at the other end; of one that has not said who it is, nothing."""

    rank: int | None = None
    pid: int = 0
    host: str = ""
    ended: bool = False
    trusted: bool = False
    unread: bytes = b""


class LostProcessError(PerlError):
    """Another process of the run has ended, and with it the run; the exit code is that one's."""

    exit_code = EXIT_FAILED


def says_it(end: End, rank: int) -> bool:
    """Whether a process tells the user how another one ended: the main one; of the main one, if killed, the next."""
    if end.rank == 0:
        return not started_by_us() and rank == 1 and end.kind == "killed"
    return not started_by_us() and rank == 0


def _send(connection: socket.socket, message: Mapping[str, Any]) -> None:
    try:
        connection.sendall(json.dumps(message).encode() + b"\n")
    except OSError:  # it has ended
        return


def _keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", _IDLE_SECONDS), ("TCP_KEEPINTVL", _PROBE_SECONDS), ("TCP_KEEPCNT", _PROBES)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
