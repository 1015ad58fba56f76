"""A connection from each process of a run to the main one: who ended, and why, is known to all of them at once.

process that ends -> its rank and its error -> every other process ends too

Collectives cannot tell: the CPU's raise whatever a socket says and name nobody, a GPU's wait for minutes. An open
connection needs no clock: the kernel closes it when its process is killed, and leaves it open while that only waits.
"""

import json
import logging
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

logger = logging.getLogger("perl")

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
            return f"{name} was killed, without an exit message"
        if self.kind == "interrupted":
            return f"{name} was interrupted"
        return f"{name}: {self.text}" if self.kind == "mistake" else f"{name} failed: {self.text}"


class PeerMonitor:
    """This process's connections to the others, looked after by a thread."""

    def __init__(self, meeting: Meeting) -> None:
        """Connects; the main process listens, and waits for nobody yet.

        Raises:
            MeetingError: The main process cannot be reached.
            LostProcessError: It has ended already.
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
        self._parent = int(os.environ[STARTED_BY]) if started_by_us() else None
        self._deadline = 0.0
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
        error.restartable = end.kind in ("killed", "error")
        return error

    def wait_for_main(self) -> None:
        """Waits, however long that takes, until the main process has ended, so that this one does not leave before it.

        Raises:
            LostProcessError: The main process, or another one, has ended before its time.
        """
        while not self._main:
            self.look()
            end = self._end_of_main()
            if end is not None and end.kind in IN_ORDER:
                return
            if end is not None:
                raise self.lost(end)
            with self._changed:
                self._changed.wait_for(lambda: bool(self._ends), _LOOK_EVERY_SECONDS)

    def close(self, own: End) -> End | None:
        """Says how this process ends, and listens to the others no more.

        Returns:
            How the main process ended, where this one has failed and the main one says so in time.
        """
        early = own.kind not in IN_ORDER
        if self._main and early:  # one that has yet to start must find somebody who tells it
            with self._changed:
                self._changed.wait_for(lambda: self._heard_of >= self._meeting.size - 1, GRACE_SECONDS)
        self._closing.set()
        self._thread.join()
        self._tell(own)
        if not self._main and early:
            end = time.monotonic() + GRACE_SECONDS
            while self._connections and self._end_of_main() is None and time.monotonic() < end:
                self._receive()
        self._disconnect()
        return self._end_of_main()

    def _tell(self, end: End) -> None:
        """Sends it to those that have said who they are."""
        for connection, peer in list(self._connections.items()):
            if peer.trusted:
                _send(connection, asdict(end))

    def _disconnect(self) -> None:
        for key in list((self._selector.get_map() or {}).values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()

    def _end_of_main(self) -> End | None:
        return next((end for end in self._ends if end.rank == 0), None)

    def _first(self) -> End | None:
        return next((end for end in self._ends if end.kind not in (*IN_ORDER, "lost")), None)

    def _listen(self) -> None:
        self._token = secrets.token_hex(16)
        backlog, local = self._meeting.size, os.environ["MASTER_ADDR"] in ("localhost", "127.0.0.1")
        if socket.has_dualstack_ipv6() and not local:
            server = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog)
        else:
            server = socket.create_server(("127.0.0.1" if local else "", 0), backlog=backlog)
        self._selector.register(server, selectors.EVENT_READ)
        place = {"port": server.getsockname()[1], "token": self._token}
        self._meeting.put("watch", {**place, "pid": os.getpid(), "host": socket.gethostname()})

    def _connect(self) -> None:
        place = self._meeting.get("watch", seconds=PATIENCE_SECONDS)
        address = os.environ["MASTER_ADDR"], int(place["port"])
        pid, host = int(place["pid"]), str(place["host"])
        try:
            connection = socket.create_connection(address, timeout=PATIENCE_SECONDS)
        except ConnectionRefusedError:  # it has ended since, as its own output says
            raise self.lost(End(0, "killed", pid=pid, host=host)) from None
        except OSError as error:
            main = who(0, pid, host)
            what = f"rank {self._meeting.rank} cannot reach {main} at {address[0]}:{address[1]}: {error.strerror}"
            hint = "the nodes cannot connect to each other"
            raise MeetingError(what, "launcher", hint) from None
        self._take(connection, _Peer(0, pid, host, trusted=True))
        hello = {"token": place["token"], "rank": self._meeting.rank, "pid": os.getpid(), "host": socket.gethostname()}
        _send(connection, hello)

    def _take(self, connection: socket.socket, peer: "_Peer") -> None:
        _keep_alive(connection)
        connection.settimeout(GRACE_SECONDS)
        self._connections[connection] = peer
        self._selector.register(connection, selectors.EVENT_READ)

    def _look_after(self) -> None:
        """The thread: takes what comes, and ends this process if another has ended and this one does not notice."""
        said = ""
        while not self._closing.is_set():
            try:
                self._look_once()
            except Exception as error:  # whatever it is: without this thread nobody would watch
                if str(error) != said:  # once, not twice a second
                    said = str(error)
                    logger.exception("the watch over the other processes of this run goes on after an error")
                self._closing.wait(_LOOK_EVERY_SECONDS)

    def _look_once(self) -> None:
        self._receive()
        if self._parent is not None and os.getppid() != self._parent:  # whoever started this process was killed
            self._parent = None
            os.kill(os.getpid(), signal.SIGTERM)
        first = self.cause()
        if first is None:
            return
        if not self._deadline:
            self._deadline = time.monotonic() + GRACE_SECONDS
            if self._main:
                self._tell(first)
        elif time.monotonic() > self._deadline:
            self._end_this_process(first)

    def _receive(self) -> None:
        """Takes what the others say, and others that have come."""
        for key, _ in self._selector.select(_LOOK_EVERY_SECONDS):
            if key.fileobj in self._connections:
                self._read(key.fileobj)
            else:
                self._accept(key.fileobj)  # type: ignore[arg-type]

    def _accept(self, server: socket.socket) -> None:
        try:
            self._take(server.accept()[0], _Peer())
        except OSError:  # it has left already, or this process may open no more files; it is asked again
            self._closing.wait(_LOOK_EVERY_SECONDS)

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
            if len(peer.unread) > _LONGEST_MESSAGE:
                raise ValueError("longer than any message")
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):  # a stranger, or a broken message
            data = b""
        if not data:
            self._drop(connection)
            if not peer.ended and peer.rank is not None:
                self._add(End(peer.rank, "killed", pid=peer.pid, host=peer.host))

    def _drop(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        del self._connections[connection]
        connection.close()

    def _hear(self, connection: socket.socket, peer: "_Peer", message: Mapping[str, Any]) -> None:
        if peer.trusted:
            end = End(**message)
            peer.ended = peer.ended or end.rank == peer.rank
            self._add(end)
        elif secrets.compare_digest(str(message["token"]).encode(), self._token.encode()):
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
        try:
            if reports_failure(first, self._meeting.rank):
                print(f"error: {error} [{error.code}]", file=sys.stderr, flush=True)  # noqa: T201
            if started_by_us():
                self._meeting.put(END, asdict(End(self._meeting.rank, "lost", code=error.exit_code)))
            self.at_loss(error)
        except Exception:  # no launcher any more, no room on the disk: the process ends all the same
            logger.exception("the end of another process of this run could not be recorded")
        finally:
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

    code = "PRL217"
    exit_code = EXIT_FAILED
    restartable = True
    """Whether the same command may succeed if it is started again."""


def reports_failure(end: End, rank: int) -> bool:
    """Whether a process tells the user how another one ended: the main one; of the main one, if killed, the next."""
    teller = 1 if end.rank == 0 and end.kind == "killed" else 0
    return not started_by_us() and rank == teller and rank != end.rank


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
