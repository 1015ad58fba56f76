"""Runs on real vLLM servers that become others meanwhile: no step is trained on what those wrote."""

import asyncio
import contextlib
import shutil
import socket
import threading
import uuid

import pytest
import torch
from safetensors.torch import load_file, save_file

from perl.errors import BrokenPromiseError, PerlError
from perl.policy.checkpoint import latest_checkpoint
from perl.rollouts.sync import make_update
from perl.rollouts.vllm.http import VllmServer
from perl.rollouts.vllm.servers import ServerPool
from perl.rollouts.vllm.written_updates import write_update
from perl.sandbox import BASE_FOLDER
from tests.rollouts.policies import policy_of
from tests.servers import LORA
from tests.trainer.test_rollout_source import Seen, logged, trainer

FAULT_AT, STEPS = 2, 4


@pytest.fixture(scope="module")
def three(own_servers, tmp_path_factory):
    """Two servers with adapters and weights, and one with another base under the same name."""
    folder = tmp_path_factory.mktemp("other")
    shutil.copytree(BASE_FOLDER, folder, dirs_exist_ok=True)
    torch.manual_seed(0)
    tensors = {name: t + 0.02 * torch.randn_like(t) for name, t in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    started = own_servers(2, wait=False) + own_servers(1, flags=("--model", str(folder), *LORA), wait=False)
    return [server.wait().url for server in started]


class Door:
    """An address behind which first one server answers, then another.

    Attributes:
        port: Of the server that answers now.
    """

    def __init__(self, url):
        self.port = int(url.rpartition(":")[2])
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._accept)
        self._thread.start()

    def lead_to(self, url):
        """From the next connection on another server answers."""
        self.port = int(url.rpartition(":")[2])

    def close(self):
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                one, _ = self._listener.accept()
                threading.Thread(target=_forward, args=(one, self.port)).start()


def _forward(one, port):
    with one, contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)) as other:
        back = threading.Thread(target=_copy, args=(other, one))
        back.start()
        _copy(one, other)
        back.join()


def _copy(source, target):
    with contextlib.suppress(OSError):
        while data := source.recv(65_536):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


@pytest.fixture
def door(three):
    """One that leads to the second server."""
    door = Door(three[1])
    yield door
    door.close()


def foreign_weights(url, folder):
    """Somebody loads merged weights and asks nobody."""
    update = make_update(policy_of(1), "merged", f"t{uuid.uuid4().hex[:8]}")
    path = write_update(update, folder)

    async def load():
        server = VllmServer(url)
        await server.load_weights(update.name, str(path))
        await server.label_weights(update.name)
        await server.close()

    asyncio.run(load())


class At(Seen):
    """A reward in whose second call something happens, while nothing is asked of the servers."""

    def __init__(self, what):
        super().__init__()
        self.what, self.found = what, None

    def __call__(self, prompts, completions, **columns):
        if len(self.prompts) == FAULT_AT - 1:
            self.found = self.what()
        return super().__call__(prompts, completions, **columns)


RUN = {"max_steps": STEPS, "rollout_server_timeout": 240.0, "save_strategy": "steps", "save_steps": 100}


def assert_every_step_is_the_policys(trained):
    assert len(logged(trained, "sampling/sampling_logp_difference/max")) == trained.state.global_step == STEPS
    assert max(logged(trained, "sampling/sampling_logp_difference/max")) < 2e-3


def test_a_server_with_another_base_in_the_place_of_one_is_left_and_the_run_goes_on(tmp_path, three, door, caplog):
    reward = At(lambda: door.lead_to(three[2]))
    trained = trainer(tmp_path, [three[0], door.url], reward, **RUN)
    trained.train()
    assert_every_step_is_the_policys(trained)
    assert logged(trained, "rollout/servers_lost")[-1] == 1
    assert f"{door.url} is lost (was restarted, or another server answers in its place)" in caplog.text


@pytest.mark.parametrize("method", ["lora", "dora"])
def test_the_only_server_with_another_base_ends_the_run_which_keeps_its_last_step(tmp_path, three, door, method):
    reward = At(lambda: door.lead_to(three[2]))
    trained = trainer(tmp_path, [door.url], reward, peft_method=method, **RUN)
    with pytest.raises(BrokenPromiseError, match="does not answer like the policy"):
        trained.train()
    assert trained.state.global_step == FAULT_AT
    assert max(logged(trained, "sampling/sampling_logp_difference/max")) < 2e-3
    assert latest_checkpoint(tmp_path).name == f"checkpoint-{FAULT_AT}"


def test_merged_weights_are_refused_beside_the_adapters_of_another_run(tmp_path, three):
    someone = ServerPool([three[0]], tmp_path / "someone")
    someone.load(make_update(policy_of(1), "adapter", f"t{uuid.uuid4().hex[:8]}"))
    try:
        with pytest.raises(PerlError, match="serves adapters of others"):
            trainer(tmp_path / "run", [three[0]], peft_method="dora", **RUN).train()
    finally:
        someone.close()


def test_merged_weights_of_another_run_are_noticed_by_one_that_serves_adapters(tmp_path, three, caplog):
    reward = At(lambda: foreign_weights(three[0], tmp_path / "someone"))
    trained = trainer(tmp_path / "run", three[:2], reward, **RUN)
    trained.train()
    assert_every_step_is_the_policys(trained)
    assert "got weights from someone else" in caplog.text
