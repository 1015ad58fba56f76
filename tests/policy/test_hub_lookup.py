"""One request to the Hub tells apart a name that is wrong, a login that is missing and a network that is down."""

import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

from perl.cli.main import run_commands
from perl.policy.hub_files import look_up
from tests.hub_fixtures import taken_for_the_hub

COMMIT = "0123456789abcdef0123456789abcdef01234567"
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
GATED = ("gated", "gated-anonymous")


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


def ask(endpoint, kind, name, revision=None, token=""):
    """What ``look_up`` finds on this Hub."""
    with taken_for_the_hub(SimpleNamespace(url=endpoint, token=token), Path("home")):
        return look_up(kind, name, revision)


def endpoint_of(server):
    return f"http://127.0.0.1:{server.server_address[1]}"


def closed_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"


def test_what_is_there_gives_its_commit_and_each_refusal_is_told_from_the_others(hub, capfd):
    """Arguments -> requests made, and the commit; or what the message starts with, holds and does not, and the hint."""
    here, closed = endpoint_of(hub), closed_port()
    model, dataset = "/api/models/owner/present", "/api/datasets/owner/present"
    found = [
        (("model", "owner/present"), [model]),
        (("dataset", "owner/present"), [dataset]),
        (("model", "owner/present", "main"), [f"{model}/revision/main"]),
    ]
    wrong = []
    for arguments, paths in found:
        hub.asked.clear()
        answer = ask(here, *arguments)
        if (answer, hub.asked) != (COMMIT, paths):
            wrong.append((arguments, answer, list(hub.asked)))
    hub.asked.clear()
    assert look_up("model", "owner/absent", None) is None
    assert hub.asked == []  # offline
    refused = [
        *(
            (here, (kind, name), f"no {what} '{name}'", "private", ("cannot be reached",), "")
            for kind, what in (("model", "model"), ("dataset", "data set"))
            for name in ("owner/absent", "owner/secret")
        ),
        *((here, ("model", f"owner/{gated}"), f"owner/{gated} is gated", "", (), "hf auth login") for gated in GATED),
        (here, ("model", "owner/present", "v9"), "owner/present has no revision 'v9' on the Hub", "", (), ""),
        (here, ("model", "owner/expired"), "", "", ("cannot be reached", "no such folder"), "hf auth login"),
        (here, ("model", "owner/broken"), "", "500", ("no such folder",), ""),
        (closed, ("model", "owner/present"), f"no model 'owner/present' here, and {closed}", "cannot be reached: ", (),
         "HF_HUB_OFFLINE=1"),
    ]  # fmt: skip
    for endpoint, arguments, start, held, absent, hint in refused:
        answer = ask(endpoint, *arguments, token="hf_expired" if "owner/expired" in arguments else "")
        message = answer.message
        fits = message.startswith(start) and held in message and not any(part in message for part in absent)
        if not fits or hint not in answer.hint or ("gated" in start and message != start):
            wrong.append((arguments, answer))
    hub.asked.clear()
    for name in ("a b", "one/two/three", "owner/name with space", "../relative", "owner/a..b"):
        answer = ask(here, "model", name)
        if "not a name on the Hub" not in answer.message or hub.asked:
            wrong.append((name, answer, list(hub.asked)))
    assert wrong == []
    assert capfd.readouterr().err == ""


def test_a_recipe_with_a_wrong_name_is_one_line_and_exit_code_2(hub, tmp_path, capsys):
    with taken_for_the_hub(SimpleNamespace(url=endpoint_of(hub), token=""), tmp_path / "home"):
        assert run_commands(["train", "quickstart", "model.name=owner/absent"], "perl") == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert said.err.startswith("error: command line: model.name: no model 'owner/absent'")
    assert "sandbox:base needs no network" in said.err
    assert hub.asked == ["/api/models/owner/absent"]
