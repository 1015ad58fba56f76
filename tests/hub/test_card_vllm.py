"""The card's commands for vLLM, on a real server: it answers as the adapter does in PEFT."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from perl.hub.cards import write_card
from perl.run.folder import Run
from tests.hub.card_runs import make_run, scores
from tests.servers import VllmProcess, absent

BASH = str(shutil.which("bash"))
pytestmark = pytest.mark.skipif(absent() is not None, reason=str(absent()))


def greedy_run(folder: Path, method: str) -> Run:
    """A run whose scores were drawn without chance, so that its snippets always answer the same."""
    run = make_run(folder, method)
    scores(run.adapter, temperature=0.0).write(run.path / "eval")
    write_card(run)
    return run


@pytest.mark.nightly
@pytest.mark.parametrize("method", ["lora", "hra", "dora"])
def test_a_server_started_as_the_card_says_answers_as_the_snippet_does(method, tmp_path, monkeypatch):
    run = greedy_run(tmp_path / "a-run", method)
    card = run.card.read_text().replace("path/to/this/folder", str(run.adapter))
    shell = re.findall(r"```bash\n(.*?)\n```", card, re.DOTALL)
    serve, ask = (next(block for block in shell if word in block) for word in ("vllm serve", "curl"))
    load = re.findall(r"```python\n(.*?)```", card, re.DOTALL)[0]
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    # The package for CPUs has no `vllm serve`: what it would be given goes to the server's module instead.
    noting = "vllm() { printf '%s\\0' \"$@\" > arguments; }\n"
    subprocess.run([BASH, "-e", "-c", noting + serve], check=True, env=environment, capture_output=True)
    _, model, *flags = Path("arguments").read_text().rstrip("\0").split("\0")
    server = VllmProcess(
        tmp_path / "server", ["--model", str(Path(model).resolve()), *_absolute(flags)], {}, imports=True
    )
    try:
        server.wait()
        command = ask.replace("http://localhost:8000", server.url)
        done = subprocess.run([BASH, "-c", command], check=True, capture_output=True, text=True)
    finally:
        server.kill()
    answer = json.loads(done.stdout)["choices"][0]["message"]["content"]
    said = []
    monkeypatch.setattr("builtins.print", lambda *words: said.extend(words))
    exec(load, {})  # noqa: S102 (what a reader would do)
    monkeypatch.undo()
    assert answer == said[0]


def _absolute(flags: list[str]) -> list[str]:
    """``name=folder`` with the folder's whole path: the server is started elsewhere."""
    parted = [flag.partition("=") for flag in flags]
    return [f"{name}={Path(place).resolve()}" if place else name for name, _, place in parted]
