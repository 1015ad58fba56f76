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


@pytest.mark.parametrize(("kind", "path"), [("model", "models"), ("dataset", "datasets")])
def test_what_is_there_gives_its_commit_in_one_request(hub, kind, path):
    assert ask(endpoint_of(hub), kind, "owner/present") == COMMIT
    assert hub.asked == [f"/api/{path}/owner/present"]


def test_a_revision_that_is_there_gives_its_commit(hub):
    assert ask(endpoint_of(hub), "model", "owner/present", "main") == COMMIT
    assert hub.asked == ["/api/models/owner/present/revision/main"]


def test_a_revision_that_is_not_there_is_named(hub):
    answer = ask(endpoint_of(hub), "model", "owner/present", "v9")
    assert answer == {"message": "owner/present has no revision 'v9' on the Hub", "hint": ""}


@pytest.mark.parametrize(("kind", "what"), [("model", "model"), ("dataset", "data set")])
@pytest.mark.parametrize("name", ["owner/absent", "owner/secret"])
def test_a_name_that_the_hub_does_not_show_may_be_wrong_or_private(hub, kind, what, name):
    answer = ask(endpoint_of(hub), kind, name)
    assert answer["message"].startswith(f"no {what} '{name}'")
    assert "private" in answer["message"]
    assert "cannot be reached" not in answer["message"]


@pytest.mark.parametrize("name", ["owner/gated", "owner/gated-anonymous"])
def test_a_gated_name_says_how_to_get_in(hub, name):
    answer = ask(endpoint_of(hub), "model", name)
    assert answer["message"] == f"{name} is gated"
    assert "hf auth login" in answer["hint"]


def test_a_token_that_the_hub_refuses_is_neither_a_wrong_name_nor_a_network_that_is_down(hub):
    answer = ask(endpoint_of(hub), "model", "owner/expired", token="hf_expired")  # noqa: S106
    assert "cannot be reached" not in answer["message"]
    assert "no such folder" not in answer["message"]
    assert "hf auth login" in answer["hint"]


def test_a_closed_port_is_a_network_that_is_down():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{free.getsockname()[1]}"
    answer = ask(endpoint, "model", "owner/present")
    assert answer["message"].startswith(f"no model 'owner/present' here, and {endpoint} cannot be reached: ")
    assert "HF_HUB_OFFLINE=1" in answer["hint"]


def test_a_server_in_trouble_is_not_a_wrong_name(hub):
    answer = ask(endpoint_of(hub), "model", "owner/broken")
    assert "500" in answer["message"]
    assert "no such folder" not in answer["message"]


@pytest.mark.parametrize("name", ["a b", "one/two/three", "owner/name with space", "../relative", "owner/a..b"])
def test_what_cannot_be_a_name_is_refused_without_asking(hub, name):
    answer = ask(endpoint_of(hub), "model", name)
    assert "not a name on the Hub" in answer["message"]
    assert hub.asked == []


def test_offline_nothing_is_asked(hub):
    assert ask(endpoint_of(hub), "model", "owner/absent", offline="1") is None
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
