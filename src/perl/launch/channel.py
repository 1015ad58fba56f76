"""One channel on which the processes of a run hear who has ended, and of what.

end of a process -> the hub, in the launcher, Ray's driver or the main process -> every other process, which ends too

Collectives cannot tell: the CPU's raise whatever a socket says and name nobody, a GPU's wait for minutes. An open
connection needs no clock: the kernel closes it when its process is killed, and leaves it open while that only waits.
"""

import contextlib
import json
import logging
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable

from perl.errors import EXIT_FAILED, PerlError
from perl.launch.meeting import PATIENCE_SECONDS, Meeting, MeetingError
from perl.run.failure import IN_ORDER, LONGEST_FAILURE, Failure, LostProcessError, first_cause
from perl.run.files import parse_mapping
from perl.run.launched import HUB, started_by_us

logger = logging.getLogger("perl")

# After another process has ended a process has this long to end by itself, as most do when a collective fails.
GRACE_SECONDS = 8.0
# How long the cause of a failed collective may take to be known: the end of the process behind it is already under way.
CAUSE_SECONDS = 5.0
_LOOK_EVERY_SECONDS = 0.5
# Of a connection that nothing comes over: a node that is lost, not a process, is noticed after these.
_PROBES = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}


class Channel:
    """What is known here of the ends of the run's processes.

    Attributes:
        ends: By rank, in the order in which they became known; the first word of each counts.
    """

    def __init__(self) -> None:
        """Nobody has ended yet."""
        self.ends: dict[int, Failure] = {}
        self._changed = threading.Condition()
        self._closed = False

    def add(self, end: Failure) -> None:
        """A process has ended."""
        with self._changed:
            self.ends.setdefault(end.rank, end)
            self._changed.notify_all()

    def wait(self, seen: Callable[[], bool], seconds: float | None) -> None:
        """Returns when something is known, or the channel is closed, or after so long."""
        with self._changed:
            self._changed.wait_for(lambda: seen() or self._closed, seconds)

    def cause(self, seconds: float | None = 0.0) -> Failure | None:
        """The first process that ended before its time; None: none is known after so many seconds."""
        self.wait(lambda: first_cause(self.ends) is not None, seconds)
        with self._changed:
            return first_cause(self.ends)

    def close(self) -> None:
        """Nothing is heard any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class Hub(Channel):
    """The end of the channel where all others connect, and from which they hear what any of them says."""

    def __init__(self, *, local: bool, names_killed: bool) -> None:
        """Listens.

        Args:
            local: All processes are on this machine.
            names_killed: Whether a connection that ends without a word is taken for a process that was killed; else
                somebody here knows how it ended.
        """
        super().__init__()
        self.token, self._names_killed = secrets.token_hex(16), names_killed
        self._starts = [""]  # the current one last
        self._links: dict[int, socket.socket] = {}
        self._heard_of: set[int] = set()
        dual = socket.has_dualstack_ipv6() and not local
        family = socket.AF_INET6 if dual else socket.AF_INET
        place = ("127.0.0.1" if local else "", 0)
        self._server = socket.create_server(place, family=family, backlog=1024, dualstack_ipv6=dual)
        self.port: int = self._server.getsockname()[1]
        threading.Thread(target=self._accept, name="perl-hub", daemon=True).start()

    def add(self, end: Failure) -> None:
        """A process has ended; all others are told."""
        with self._changed:
            new = end.rank not in self.ends
            super().add(end)
            for rank, link in self._links.items():
                if new and rank != end.rank:
                    _send(link, end.encoded())

    def wait_for_all(self, others: int) -> None:
        """Waits until so many other processes have come: one that has yet to start must find somebody who tells it."""
        self.wait(lambda: len(self._heard_of) >= others, GRACE_SECONDS)

    def wait_until_left(self, rank: int) -> None:
        """Waits until all is read that an ended process has said."""
        self.wait(lambda: rank not in self._links, CAUSE_SECONDS)

    def close(self) -> None:
        """Sends everybody away."""
        super().close()
        for connection in [self._server, *self._links.values()]:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._server.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection = self._server.accept()[0]
            except OSError:  # it is closed, or this process may open no more files; then it is asked again
                time.sleep(_LOOK_EVERY_SECONDS)
                continue
            threading.Thread(target=self._serve, args=(connection,), name="perl-hub", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        """Listens to a process for as long as it runs; a stranger is sent away."""
        with (
            contextlib.suppress(OSError, ValueError, KeyError, TypeError),
            connection,
            connection.makefile("rb") as said,
        ):
            connection.settimeout(GRACE_SECONDS)
            hello = parse_mapping(said.readline(LONGEST_FAILURE))
            token, _, start = str(hello["token"]).partition("/")
            if not secrets.compare_digest(token.encode(), self.token.encode()):
                return
            rank, pid, host = int(hello["rank"]), int(hello["pid"]), str(hello["host"])
            _keep_alive(connection)
            with self._changed:
                if start not in self._starts[:-1]:  # else it is left of an earlier start, and leaves by itself
                    if start != self._starts[-1]:  # all are started again: what would end them as before is what counts
                        self._starts.append(start)
                        self._links = {}
                        self.ends = {r: e for r, e in self.ends.items() if e.kind == "mistake" and not e.restartable}
                    self._links[rank] = connection
                    self._heard_of.add(rank)
                    for end in self.ends.values():
                        _send(connection, end.encoded())
                    self._changed.notify_all()
            try:
                for line in said:
                    if self._links.get(rank) is connection:  # else it is of an earlier start
                        self.add(Failure.decoded(line))
            finally:
                with self._changed:
                    if self._links.get(rank) is connection:
                        if self._names_killed and not self._closed:
                            self.add(Failure(rank, "killed", exit_code=None, pid=pid, host=host))
                        del self._links[rank]
                        self._changed.notify_all()


class Link(Channel):
    """A process's connection to the hub."""

    def __init__(self, rank: int, address: tuple[str, int], token: str, main: Failure | None) -> None:
        """Connects.

        Args:
            rank: Of this process.
            address: Of the hub.
            token: Of the hub.
            main: What the end of the connection means, the main process's; None: the launcher's, without which this
                process stops in order.

        Raises:
            OSError: The hub cannot be reached.
        """
        super().__init__()
        self._main = main
        self._connection = socket.create_connection(address, timeout=PATIENCE_SECONDS)
        _keep_alive(self._connection)
        hello = {"token": token, "rank": rank, "pid": os.getpid(), "host": socket.gethostname()}
        _send(self._connection, json.dumps(hello).encode())
        threading.Thread(target=self._listen, name="perl-link", daemon=True).start()

    def say(self, end: Failure) -> None:
        """Tells the others how this process ends."""
        _send(self._connection, end.encoded())

    def close(self) -> None:
        """Leaves the hub."""
        super().close()
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def _listen(self) -> None:
        with contextlib.suppress(OSError, ValueError), self._connection, self._connection.makefile("rb") as said:
            for line in said:
                self.add(Failure.decoded(line))
        if self._main is not None and not self._closed:
            self.add(self._main)
        elif not self._closed:
            os.kill(os.getpid(), signal.SIGTERM)


class PeerMonitor:
    """What this process knows of the others; a thread ends it if another one has ended and it does not notice."""

    def __init__(self, channel: Hub | Link, meeting: Meeting) -> None:
        """Listens from now on."""
        self.at_loss: Callable[[PerlError], None] = lambda _: None
        self.hint: Callable[[], str] = str
        self.channel, self.meeting = channel, meeting
        self._thread = threading.Thread(target=self._end_if_stuck, name="perl-watch", daemon=True)
        self._leaving = threading.Event()
        self._thread.start()

    def look(self) -> None:
        """Raises the error of a run that has lost one of its processes."""
        end = self.channel.cause()
        if end is not None:
            raise self.lost(end)

    def lost(self, end: Failure) -> LostProcessError:
        """The error of a run that has lost a process."""
        error = LostProcessError(str(end), hint=self.hint() if end.kind in ("killed", "error") else "")
        error.exit_code, error.restartable = end.exit_code or EXIT_FAILED, end.restartable
        return error

    def wait_for_main(self) -> None:
        """Waits, however long that takes, until the main process has ended, so that this one does not leave before it.

        Raises:
            LostProcessError: The main process, or another one, has ended before its time.
        """
        if self.meeting.rank > 0:
            self.channel.wait(lambda: 0 in self.channel.ends or first_cause(self.channel.ends) is not None, None)
            self.look()

    def close(self, own: Failure) -> Failure | None:
        """Says how this process ends, and listens to the others no more.

        Returns:
            How the main process ended, where this one has failed and the main one says so in time.
        """
        self._leaving.set()
        channel, early = self.channel, own.kind not in IN_ORDER
        if isinstance(channel, Hub):
            if early:
                channel.wait_for_all(self.meeting.size - 1)
            channel.add(own)
        else:
            channel.say(own)
            if early and not started_by_us():
                channel.wait(lambda: 0 in channel.ends, GRACE_SECONDS)
        channel.close()
        self._thread.join()
        return channel.ends.get(0)

    def _end_if_stuck(self) -> None:
        """What is left where the main thread waits for a process that is no more, in a library that never returns."""
        first = self.channel.cause(None)
        if first is None or self._leaving.wait(GRACE_SECONDS):
            return
        error = self.lost(first)
        try:
            if reports_failure(first, self.meeting.rank):
                print(f"error: {error} [{error.code}]", file=sys.stderr, flush=True)  # noqa: T201
            self.at_loss(error)
        except Exception:  # no room on the disk: the process ends all the same
            logger.exception("the end of another process of this run could not be recorded")
        finally:
            os._exit(error.exit_code)


def open_channel(meeting: Meeting) -> Hub | Link:
    """This process's end of the channel: the launcher keeps the hub, else the main process.

    Raises:
        MeetingError: The hub cannot be reached.
        LostProcessError: The main process has ended already.
    """
    if started_by_us():
        (address, token), main = _launchers_hub(), None
    elif meeting.rank == 0:
        hub = Hub(local=os.environ["MASTER_ADDR"] in ("localhost", "127.0.0.1"), names_killed=True)
        meeting.put("watch", {"port": hub.port, "token": hub.token, "pid": os.getpid(), "host": socket.gethostname()})
        return hub
    else:
        place = meeting.get("watch", seconds=PATIENCE_SECONDS)
        address, token = (os.environ["MASTER_ADDR"], int(place["port"])), str(place["token"])
        main = Failure(0, "killed", exit_code=None, pid=int(place["pid"]), host=str(place["host"]))
    try:
        return Link(meeting.rank, address, token, main)
    except ConnectionRefusedError:  # it has ended since, as its own output says
        raise LostProcessError(str(main or "the launcher has ended")) from None
    except OSError as error:
        what = f"rank {meeting.rank} cannot reach {main.who if main else 'the launcher'} at {address[0]}:{address[1]}"
        raise MeetingError(f"{what}: {error.strerror}", "launcher", "the nodes cannot connect to each other") from None


def tell_launcher(end: Failure) -> None:
    """Says how this process ends, where the launcher has not heard it yet."""
    with contextlib.suppress(OSError):  # it has ended
        link = Link(end.rank, *_launchers_hub(), None)
        link.say(end)
        link.close()


def _launchers_hub() -> tuple[tuple[str, int], str]:
    """Its address and token."""
    host, port, token = os.environ[HUB].rsplit(":", 2)
    return (host, int(port)), token


def reports_failure(end: Failure, rank: int) -> bool:
    """Whether a process tells the user how another one ended: the main one; of the main one, if killed, the next."""
    teller = 1 if end.rank == 0 and end.kind == "killed" else 0
    return not started_by_us() and rank == teller and rank != end.rank


def _send(connection: socket.socket, message: bytes) -> None:
    with contextlib.suppress(OSError):  # it has ended
        connection.sendall(message + b"\n")


def _keep_alive(connection: socket.socket) -> None:
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _PROBES.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
