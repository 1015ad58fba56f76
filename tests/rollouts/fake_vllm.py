"""A server that speaks vLLM's HTTP and answers by arithmetic, so that it can be restarted between two bytes.

base, weights, adapter -> the one log-probability that its answers report
"""

import contextlib
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

TOKEN = 5
BASE, WRONG_BASE, MERGED, ADAPTED = -0.5, -0.3, -0.1, -0.05
_SIZES = 'block_size="128",kv_cache_memory_bytes="1073741824",user_specified_block_size="False"'
CPU_CACHE = f"vllm:cache_config_info{{{_SIZES}}} 1"


class FakeVllm:
    """The state of one server.

    Attributes:
        asked: Called before each answer to a request that is no proof.
        adapters: Name -> path.
    """

    def __init__(self, on_cpu=False):
        self.on_cpu, self.asked, self.answered = on_cpu, lambda: None, 0
        self.proofs, self._lock = 0, threading.Lock()
        self.restart()

    def restart(self, wrong_base=False, root="/models/base"):
        """Another process, which knows nothing of what was loaded."""
        self.started, self.wrong_base, self.root = time.time(), wrong_base, root
        self.adapters, self.label, self.merged = {}, "default", None

    def log_prob(self, model):
        value = BASE + WRONG_BASE * self.wrong_base
        value += MERGED * (self.merged is not None and not self.merged.endswith("-base"))
        return value + ADAPTED * (model in self.adapters and "/foreign/" not in self.adapters[model])

    def get(self, path):
        if path == "/version":
            return {"version": "0.32.0"}
        if path == "/weight_info":
            return {"weight_version": self.label}
        if path == "/metrics":
            return f"process_start_time_seconds {self.started!r}\n" + (CPU_CACHE if self.on_cpu else "")
        if path == "/v1/models":
            cards = [{"id": "base", "root": self.root, "parent": None, "max_model_len": 64}]
            return {"data": cards + [{"id": n, "root": p, "parent": "base"} for n, p in self.adapters.items()]}
        return {}

    def post(self, path, body):
        if path == "/v1/completions":
            return self._complete(body)
        if path == "/v1/load_lora_adapter":
            self.adapters.setdefault(body["lora_name"], body["lora_path"])
        elif path == "/v1/unload_lora_adapter":
            self.adapters.pop(body["lora_name"], None)
        elif path == "/update_weight_version":
            self.label = body["new_version"]
        elif path == "/collective_rpc" and not body["kwargs"]["weights_path"].endswith("/seen"):
            self.merged = Path(body["kwargs"]["weights_path"]).name
        return {"success": True}

    def _complete(self, body):
        model, prompts = body["model"], body["prompt"]
        if model != "base" and model not in self.adapters:
            return 404, {"error": {"message": f"The model `{model}` does not exist."}}
        if isinstance(prompts[0], list):  # a proof
            self.proofs += 1
            top = {f"token_id:{TOKEN}": self.log_prob(model), "token_id:6": -9.0}
            return {"choices": [{"index": i, "logprobs": {"top_logprobs": [top]}} for i in range(len(prompts))]}
        log_prob = self.log_prob(model)
        with self._lock:
            self.answered += 1
            self.asked()
        length = body["max_tokens"]
        choice = {"finish_reason": "length", "token_ids": [TOKEN] * length}
        scores = {"logprobs": {"token_logprobs": [log_prob] * length}}
        return {"choices": [choice | scores | {"index": i} for i in range(body["n"])]}


@contextlib.contextmanager
def serving(fake):
    """The server's address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self._say(fake.get(self.path))

        def do_POST(self):
            length = int(self.headers.get("Content-Length", 0))
            self._say(fake.post(self.path, json.loads(self.rfile.read(length) or b"{}")))

        def _say(self, found):
            status, found = found if isinstance(found, tuple) else (200, found)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(found.encode() if isinstance(found, str) else json.dumps(found).encode())

        def log_message(self, *_args):
            """Says nothing."""

    class Listener(ThreadingHTTPServer):
        request_queue_size = 128  # as many as ask at once

    server = Listener(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
