"""Servers on loopback that stand where a real one or a network would: a fake vLLM, and a proxy that loses answers.

request -> answer, or none
"""

import contextlib
import http.client
import json
import random
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit


@contextlib.contextmanager
def serving(handler: type[BaseHTTPRequestHandler], context: ssl.SSLContext | None = None) -> Iterator[str]:
    """The address of a server whose requests a handler answers."""

    class Server(ThreadingHTTPServer):
        request_queue_size = 256
        daemon_threads = True

        def handle_error(self, *_: object) -> None:
            """A client that has gone is no fault here."""

    server = Server(("127.0.0.1", 0), handler)
    if context is not None:
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"{'http' if context is None else 'https'}://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class FakeVllm:
    """What a fake server is like, and what it was asked.

    Attributes:
        length_of: Tokens of a completion, by the server's own numbers or the request's seed.
        seconds_a_token: To write one.
        key: That it wants; None: none.
        longest: Tokens of prompt and completion.
        asked: The bodies of all requests for completions, those whose answers were lost too.
    """

    def __init__(
        self,
        length_of: Callable[[random.Random], int] = lambda chance: chance.randrange(1, 9),
        seconds_a_token: float = 0.0,
        key: str | None = None,
        longest: int = 256,
    ) -> None:
        self.length_of, self.seconds_a_token, self.key, self.longest = length_of, seconds_a_token, key, longest
        self.asked: list[dict] = []
        self._chance = random.Random(0)

    def __call__(self, context: ssl.SSLContext | None = None) -> contextlib.AbstractContextManager[str]:
        """Its address, while it runs."""
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                status, answer = fake.answer(self.path, self.headers.get("Authorization"), json.loads(body or "{}"))
                text = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            do_POST = do_GET

            def log_message(self, *_: object) -> None:
                """Says nothing."""

        return serving(Handler, context)

    def answer(self, path: str, authorization: str | None, body: dict) -> tuple[int, dict]:
        """Status and answer."""
        if path.startswith("/v1/") and self.key is not None and authorization != f"Bearer {self.key}":
            return 401, {"error": "Unauthorized"}
        if path == "/v1/completions":
            return 200, {"choices": self._completions(body)}
        known = {
            "/health": {},
            "/version": {"version": "0.32.0"},
            "/v1/models": {"data": [{"id": "base", "max_model_len": self.longest}]},
        }
        return (200, known[path]) if path in known else (404, {"detail": "Not Found"})

    def _completions(self, body: dict) -> list[dict]:
        self.asked.append(body)
        seed = body.get("seed")
        found = []
        for index in range(body.get("n", 1)):
            chance = self._chance if seed is None else random.Random(seed + index)
            length = min(self.length_of(chance), body["max_tokens"])
            ids = [chance.randrange(5, 30) for _ in range(length)]
            scores = {"token_logprobs": [-0.5] * length}
            reason = "length" if length == body["max_tokens"] else "stop"
            found.append({"index": index, "finish_reason": reason, "token_ids": ids, "logprobs": scores})
        time.sleep(self.seconds_a_token * max(len(choice["token_ids"]) for choice in found))
        return found


class Proxy:
    """A proxy before a server.

    Attributes:
        loses: Share of the answers that it loses, of whatever kind, once they are there; never three completions in a
            row, nor two of another kind.
        cuts_after: Seconds after which it ends an answer that is not there yet; None: it waits.
        status: With which it then answers; None: it closes the connection.
        lost: How many answers it has lost.
        lost_completions: How many of those were completions.
    """

    def __init__(self, url: str, loses: float = 0.0, cuts_after: float | None = None, status: int | None = None):
        self.url, self.loses, self.cuts_after, self.status = url, loses, cuts_after, status
        self.lost = self.lost_completions = 0
        self._chance, self._in_a_row, self._lock = random.Random(1), dict[str, int](), threading.Lock()

    def __call__(self) -> contextlib.AbstractContextManager[str]:
        """Its address, while it runs."""
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                answer = proxy.forward(self.command, self.path, dict(self.headers), body)
                if answer is None and proxy.status is None:
                    self.close_connection = True
                    return
                status, text = answer or (proxy.status, b"<html>Bad Gateway</html>")
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            do_POST = do_GET

            def log_message(self, *_: object) -> None:
                """Says nothing."""

        return serving(Handler)

    def forward(self, method: str, path: str, headers: dict[str, str], body: bytes) -> tuple[int, bytes] | None:
        """What the server answers; None: that is lost."""
        connection = http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=self.cuts_after)
        try:
            connection.request(method, path, body, {k: v for k, v in headers.items() if k.lower() != "host"})
            response = connection.getresponse()
            answer = response.status, response.read()
        except (OSError, http.client.HTTPException):
            with self._lock:
                return self._lose(path)
        finally:
            connection.close()
        most = 2 if path == "/v1/completions" else 1
        with self._lock:  # requests come in threads
            in_a_row = self._in_a_row.get(path, 0)
            is_lost = self._chance.random() < self.loses and in_a_row < most
            self._in_a_row[path] = in_a_row + 1 if is_lost else 0
            return self._lose(path) if is_lost else answer

    def _lose(self, path: str) -> None:
        """Counts an answer that is lost."""
        self.lost += 1
        self.lost_completions += path == "/v1/completions"
