"""Serves a Hub on loopback, with the faults that a test asks for.

socket -> request -> answer -> socket

Knows nothing of repositories. Every request is written to a log before its answer is sent.
"""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self
from urllib.parse import parse_qs, urlsplit

from tests.local_hub.answers import Answer, Asked, answer
from tests.local_hub.faults import Faults
from tests.local_hub.store import Repository, Store

CUT = 0  # stands for the status of a request whose connection was cut


@dataclass(frozen=True)
class Request:
    """One request that came.

    Attributes:
        path: With its query, as it came.
        status: Of the answer; 0: the connection was cut instead.
        carried_out: Whether it took effect before that.
        token: With which it came.
        body: What was sent.
    """

    method: str
    path: str
    status: int
    carried_out: bool = True
    token: str | None = field(default=None, repr=False)
    body: bytes = field(default=b"", repr=False)


class LocalHub:
    """A Hub on this machine; a context manager.

    Attributes:
        url: Its address.
        log: Every request, in the order in which they were answered.
        faults: What goes wrong; nothing until asked for.
    """

    def __init__(
        self,
        user: str = "user",
        token: str | None = None,
        lfs_patterns: Sequence[str] = ("*.safetensors",),
    ) -> None:
        """Binds a port; entering the context serves.

        Args:
            user: Who is logged in.
            token: The one that is accepted; None: any, or none at all.
            lfs_patterns: Files that must come by LFS.
        """
        self.user, self.token = user, token
        self.store = Store(lfs_patterns)
        self.faults = Faults()
        self.log: list[Request] = []
        self._server = _Server(self)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def requests(self) -> int:
        """How many requests came so far."""
        return len(self.log)

    def repo(self, name: str) -> Repository:
        """A repository; KeyError where there is none."""
        return self.store.repositories[name]

    def create(self, name: str, files: Mapping[str, bytes], private: bool = False) -> str:
        """Puts a repository there without any request; gives the commit with its files."""
        repository = self.store.create(name, private)
        return self.store.commit(repository, files, title="files").oid if files else repository.head.oid

    def commit(self, name: str, files: Mapping[str, bytes], delete: Collection[str] = ()) -> str:
        """Commits to the main branch as somebody else would; gives the commit."""
        return self.store.commit(self.repo(name), files, delete).oid


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, hub: LocalHub) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.hub = hub


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # headers and body in one packet
    disable_nagle_algorithm = True
    server: _Server

    def handle(self) -> None:
        with contextlib.suppress(OSError):  # the client went away, or the server is being stopped
            super().handle()

    def log_message(self, *_: object) -> None:
        """Nothing on the screen."""

    def _carry_out(self) -> None:
        hub = self.server.hub
        body = self._body()
        token = self.headers.get("Authorization", "").removeprefix("Bearer ") or None
        parts = urlsplit(self.path)
        struck = hub.faults.strike(self.path)
        if struck and struck.what == "cut":
            hub.log.append(Request(self.command, self.path, CUT, False, token, body))
            self._cut()
            return
        if struck and struck.what == "fail":
            headers = {} if struck.retry_after is None else {"Retry-After": f"{struck.retry_after:g}"}
            message = json.dumps({"error": f"status {struck.status} was asked for"}).encode()
            result, carried_out = Answer(struck.status, message, headers), False
            if struck.page is not None:
                result = Answer(struck.status, struck.page, content_type="text/html; charset=utf-8")
        else:
            asked = Asked(self.command, parts.path, parse_qs(parts.query), self.headers, body, token)
            result, carried_out = self._answer_of(asked), True
        if hub.faults.delay:
            time.sleep(hub.faults.delay)
        cut = struck is not None and struck.what == "cut_after"
        hub.log.append(Request(self.command, self.path, CUT if cut else result.status, carried_out, token, body))
        self._cut() if cut else self._send(result)

    do_GET = do_POST = do_PUT = do_HEAD = do_DELETE = _carry_out

    def _answer_of(self, asked: Asked) -> Answer:
        try:
            return answer(self.server.hub, asked)
        except (KeyError, ValueError, TypeError) as error:  # a request that this Hub cannot read
            return Answer(400, json.dumps({"error": f"{type(error).__name__}: {error}"}).encode())

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        chunks = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    def _send(self, result: Answer) -> None:
        self.send_response(result.status)
        self.send_header("Content-Type", result.content_type)
        self.send_header("Content-Length", str(len(result.body)))
        for name, value in result.headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            self.wfile.flush()
            return
        self.wfile.write(result.body)
        self.wfile.flush()

    def _cut(self) -> None:
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
