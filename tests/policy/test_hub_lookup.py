"""One request to the Hub tells apart a name that is wrong, a login that is missing and a network that is down."""

import json
import os
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"
ASK = """
import json, sys
from perl.errors import Mistake
from perl.policy.hub_lookup import look_up
answer = look_up(*json.loads(sys.argv[1]))
print(json.dumps({"message": answer.message, "hint": answer.hint} if isinstance(answer, Mistake) else answer))
"""


# Name of a repository -> status, X-Error-Code and X-Error-Message with which the Hub answers.
ANSWERS = {
    "present": (200, "", ""),
    "absent": (404, "RepoNotFound", "Repository not found"),
    "secret": (401, "RepoNotFound", "Invalid username or password."),
    "expired": (401, "", "Invalid credentials in Authorization header"),
    "gated": (403, "GatedRepo", "Access to this model is restricted"),
    "gated-anonymous": (401, "GatedRepo", "Access to this model is restricted"),
    "broken": (500, "", "Internal error"),
}


class HubHandler(BaseHTTPRequestHandler):
    """Answers as the Hub's API does, by the name that is asked for."""

    def do_GET(self):
        self.server.asked.append(self.path)
        _, _, _, owner, name, *rest = self.path.split("?")[0].split("/")
        status, code, message = ANSWERS[name]
        if rest and rest[1] not in ("main", COMMIT):
            status, code, message = 404, "RevisionNotFound", "Invalid rev id"
        found = {"id": f"{owner}/{name}", "sha": COMMIT, "private": False, "tags": [], "siblings": []}
        body = json.dumps(found if status == 200 else {"error": message}).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if code:
            self.send_header("X-Error-Code", code)
        if message:
            self.send_header("X-Error-Message", message)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub():
    """A Hub on a port of this machine; ``hub.asked`` lists the paths that were asked for."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), HubHandler)
    server.asked = []
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def ask(endpoint, kind, name, revision=None, offline="0", token=""):
    """What ``look_up`` says in a process of its own: the library reads its endpoint when it is imported."""
    environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    environment |= {"HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": offline, "HF_TOKEN": token, "HF_HOME": os.getcwd()}
    result = subprocess.run(
        [sys.executable, "-c", ASK, json.dumps([kind, name, revision])],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    return json.loads(result.stdout)


def endpoint_of(server):
    return f"http://127.0.0.1:{server.server_address[1]}"


def test_what_is_there_gives_its_commit_in_one_request(hub):
    assert ask(endpoint_of(hub), "model", "owner/absent", offline="1") is None
    assert hub.asked == []  # offline
    for arguments, path in (
        (("model", "owner/present"), "/api/models/owner/present"),
        (("dataset", "owner/present"), "/api/datasets/owner/present"),
        (("model", "owner/present", "main"), "/api/models/owner/present/revision/main"),
    ):
        assert ask(endpoint_of(hub), *arguments) == COMMIT, arguments
        assert hub.asked == [path]
        hub.asked.clear()
    answer = ask(endpoint_of(hub), "model", "owner/present", "v9")
    assert answer == {"message": "owner/present has no revision 'v9' on the Hub", "hint": ""}


def test_each_refusal_of_the_hub_is_told_from_the_others(hub):
    """What a message holds and what it does not, and its hint."""
    hidden = [
        ((kind, name), (f"no {what} '{name}'", "private"), ("cannot be reached",), "")
        for kind, what in (("model", "model"), ("dataset", "data set"))
        for name in ("owner/absent", "owner/secret")
    ]
    gated = [
        (("model", name), (f"{name} is gated",), (), "hf auth login")
        for name in ("owner/gated", "owner/gated-anonymous")
    ]
    for arguments, held, absent, hint in (
        *hidden,
        *gated,
        (("model", "owner/expired"), (), ("cannot be reached", "no such folder"), "hf auth login"),
        (("model", "owner/broken"), ("500",), ("no such folder",), ""),
    ):
        token = "hf_expired" if "expired" in arguments[1] else ""
        answer = ask(endpoint_of(hub), *arguments, token=token)
        assert all(part in answer["message"] for part in held), (arguments, answer)
        assert arguments[1] == "owner/broken" or answer["message"].startswith(held[:1] or ""), answer
        assert not any(part in answer["message"] for part in absent), (arguments, answer)
        assert hint in answer["hint"], (arguments, answer)
        assert "gated" not in arguments[1] or answer["message"] == held[0]


def test_a_closed_port_is_a_network_that_is_down():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{free.getsockname()[1]}"
    answer = ask(endpoint, "model", "owner/present")
    assert answer["message"].startswith(f"no model 'owner/present' here, and {endpoint} cannot be reached: ")
    assert "HF_HUB_OFFLINE=1" in answer["hint"]


def test_what_cannot_be_a_name_is_refused_without_asking(hub):
    for name in ("a b", "one/two/three", "owner/name with space", "../relative", "owner/a..b"):
        answer = ask(endpoint_of(hub), "model", name)
        assert "not a name on the Hub" in answer["message"], name
    assert hub.asked == []


def test_a_recipe_with_a_wrong_name_is_one_line_and_exit_code_2(hub, perl_command):
    environment = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")}
    environment |= {"HF_ENDPOINT": endpoint_of(hub), "HF_HUB_OFFLINE": "0", "HF_TOKEN": "", "HF_HOME": os.getcwd()}
    result = perl_command("train", "quickstart", "model.name=owner/absent", env=environment)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("error: command line: model.name: no model 'owner/absent'")
    assert "sandbox:base needs no network" in result.stderr
    assert hub.asked == ["/api/models/owner/absent"]
