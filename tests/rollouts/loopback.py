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
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

TOKEN = 5
BASE, WRONG_BASE, MERGED, ADAPTED = -0.5, -0.3, -0.1, -0.05
"""The log-probability of every token of the base, and what another base, merged weights or an adapter add to it."""
_SIZES = 'block_size="128",kv_cache_memory_bytes="1073741824",user_specified_block_size="False"'


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
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"{'http' if context is None else 'https'}://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


Answer = Callable[[str, str, dict[str, str], bytes], tuple[int, bytes] | None]


def answering(answer: Answer, context: ssl.SSLContext | None = None) -> contextlib.AbstractContextManager[str]:
    """The address of a server: method, path, headers, body -> status and text, or a connection that is closed."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            headers = {name.lower(): value for name, value in self.headers.items()}
            found = answer(self.command, self.path, headers, body)
            if found is None:
                self.close_connection = True
                return
            status, text = found
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            """Says nothing."""

    return serving(Handler, context)


class FakeVllm:
    """A server that speaks vLLM's HTTP and answers by arithmetic.

    Attributes:
        length_of: Tokens of a completion, by the server's own numbers or the request's seed; None: all it may have.
        seconds_a_token: To write one.
        key: That it wants; None: none.
        longest: Tokens of prompt and completion.
        asked: The bodies of all requests for completions but proofs, those whose answers were lost too.
        happens: Called with each of them.
        proofs: How many it has given.
        adapters: Name -> path.
    """

    def __init__(
        self,
        length_of: Callable[[random.Random], int] | None = None,
        seconds_a_token: float = 0.0,
        key: str | None = None,
        longest: int = 256,
        on_cpu: bool = False,
    ) -> None:
        self.length_of, self.seconds_a_token, self.key, self.longest = length_of, seconds_a_token, key, longest
        self.on_cpu, self.proofs, self.happens = on_cpu, 0, lambda: None
        self.asked: list[dict[str, Any]] = []
        self._chance = random.Random(0)
        self.restart()

    def restart(self, wrong_base: bool = False, root: str = "/models/base") -> None:
        """Another process, which knows nothing of what was loaded."""
        self.started, self.wrong_base, self.root = time.time(), wrong_base, root
        self.adapters: dict[str, str] = {}
        self.label, self.merged = "default", None

    def __call__(self, context: ssl.SSLContext | None = None) -> contextlib.AbstractContextManager[str]:
        """Its address, while it runs."""

        def answer(_method: str, path: str, headers: dict[str, str], body: bytes) -> tuple[int, bytes]:
            status, found = self.answer(path, headers.get("authorization"), json.loads(body or "{}"))
            return status, (found if isinstance(found, str) else json.dumps(found)).encode()

        return answering(answer, context)

    def answer(self, path: str, authorization: str | None, body: dict[str, Any]) -> tuple[int, Any]:
        """Status and answer."""
        if path.startswith("/v1/") and self.key is not None and authorization != f"Bearer {self.key}":
            return 401, {"error": "Unauthorized"}
        if path == "/v1/completions":
            return self._complete(body)
        cards = [{"id": "base", "root": self.root, "parent": None, "max_model_len": self.longest}]
        cards += [{"id": name, "root": place, "parent": "base"} for name, place in self.adapters.items()]
        on_cpu = f"vllm:cache_config_info{{{_SIZES}}} 1" if self.on_cpu else ""
        known = {
            "/health": {},
            "/version": {"version": "0.32.0"},
            "/v1/models": {"data": cards},
            "/weight_info": {"weight_version": self.label},
            "/metrics": f"process_start_time_seconds {self.started!r}\n{on_cpu}",
        }
        if path in known:
            return 200, known[path]
        if path == "/v1/load_lora_adapter" and body:
            self.adapters.setdefault(body["lora_name"], body["lora_path"])
        elif path == "/v1/unload_lora_adapter":
            self.adapters.pop(body["lora_name"], None)
        elif path == "/update_weight_version":
            self.label = body["new_version"]
        elif path == "/collective_rpc" and body and not body["kwargs"]["weights_path"].endswith("/seen"):
            self.merged = Path(body["kwargs"]["weights_path"]).name
        return 200, {"success": True}

    def log_prob(self, model: str) -> float:
        """Of every token under an adapter or the base."""
        value = BASE + WRONG_BASE * self.wrong_base
        value += MERGED * (self.merged is not None and not self.merged.endswith("-base"))
        return value + ADAPTED * (model in self.adapters and "/foreign/" not in self.adapters[model])

    def _complete(self, body: dict[str, Any]) -> tuple[int, Any]:
        model, prompts = body["model"], body["prompt"]
        if model != "base" and model not in self.adapters:
            return 404, {"error": {"message": f"The model `{model}` does not exist."}}
        if isinstance(prompts[0], list):  # a proof
            self.proofs += 1
            top = {f"token_id:{TOKEN}": self.log_prob(model), "token_id:6": -9.0}
            return 200, {"choices": [{"index": i, "logprobs": {"top_logprobs": [top]}} for i in range(len(prompts))]}
        log_prob = self.log_prob(model)
        self.asked.append(body)
        self.happens()
        found = []
        for index in range(body["n"]):
            ids = self.tokens(body, index)
            reason = "length" if len(ids) == body["max_tokens"] else "stop"
            scores = {"token_logprobs": [log_prob] * len(ids)}
            found.append({"index": index, "finish_reason": reason, "token_ids": ids, "logprobs": scores})
        time.sleep(self.seconds_a_token * max(len(choice["token_ids"]) for choice in found))
        return 200, {"choices": found}

    def tokens(self, body: dict[str, Any], index: int) -> list[int]:
        """Of a completion."""
        seed, most = body.get("seed"), body["max_tokens"]
        chance = self._chance if seed is None else random.Random(seed + index)
        length = most if self.length_of is None else min(self.length_of(chance), most)
        return [TOKEN if self.length_of is None else chance.randrange(5, 30) for _ in range(length)]


class Proxy:
    """A proxy before a server.

    Attributes:
        loses: Share of the completions that it loses once they are there, never three in a row.
        cuts_after: Seconds after which it ends an answer that is not there yet; None: it waits.
        status: With which it then answers; None: it closes the connection.
        lost: How many answers it has lost.
    """

    def __init__(self, url: str, loses: float = 0.0, cuts_after: float | None = None, status: int | None = None):
        self.url, self.loses, self.cuts_after, self.status = url, loses, cuts_after, status
        self.lost, self._in_a_row = 0, 0
        self._chance, self._lock = random.Random(1), threading.Lock()

    def __call__(self) -> contextlib.AbstractContextManager[str]:
        """Its address, while it runs."""

        def answer(method: str, path: str, headers: dict[str, str], body: bytes) -> tuple[int, bytes] | None:
            found = self.forward(method, path, headers, body)
            if found is None:
                self.lost += 1
                return None if self.status is None else (self.status, b"<html>Bad Gateway</html>")
            return found

        return answering(answer)

    def forward(self, method: str, path: str, headers: dict[str, str], body: bytes) -> tuple[int, bytes] | None:
        """What the server answers; None: that is lost."""
        connection = http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=self.cuts_after)
        try:
            connection.request(method, path, body, {k: v for k, v in headers.items() if k != "host"})
            response = connection.getresponse()
            answer = response.status, response.read()
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()
        if path != "/v1/completions":
            return answer
        with self._lock:  # requests come in threads
            is_lost = self._chance.random() < self.loses and self._in_a_row < 2
            self._in_a_row = self._in_a_row + 1 if is_lost else 0
        return None if is_lost else answer
