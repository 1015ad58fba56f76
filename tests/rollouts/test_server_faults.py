"""Runs on real vLLM servers that become others meanwhile: no step is trained on what those wrote."""

import shutil
import uuid

import pytest
import torch
from safetensors.torch import load_file, save_file

from perl.checkpoint import latest_checkpoint
from perl.errors import BrokenPromiseError, PerlError
from perl.rollouts.update import make_update
from perl.rollouts.vllm_server import ServerPool
from perl.sandbox import BASE_FOLDER
from tests.rollouts.policies import policy_of
from tests.rollouts.test_served import Seen, logged, trainer
from tests.servers import LORA

FAULT_AT, STEPS = 2, 4


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A folder with the base that servers are started from, under one path whatever is in it."""
    folder = tmp_path_factory.mktemp("base")
    shutil.copytree(BASE_FOLDER, folder, dirs_exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def servers(own_servers, base):
    """Two servers with adapters and weights; see ``sound``."""
    return own_servers(2, flags=("--model", str(base), *LORA))


@pytest.fixture
def sound(servers, base):
    """The two of them, with the base as it is published, whatever the test before did."""
    shutil.copyfile(BASE_FOLDER / "model.safetensors", base / "model.safetensors")
    for server in servers:
        if getattr(server, "touched", False):
            server.restart(wait=False)
            server.touched = False
    return [server.wait() for server in servers]


def other_base(server, base):
    """Restarts a server with other weights under the same name and path; returns when it answers."""
    torch.manual_seed(0)
    tensors = load_file(BASE_FOLDER / "model.safetensors")
    save_file(
        {name: t + 0.02 * torch.randn_like(t) for name, t in tensors.items()},
        base / "model.safetensors",
        {"format": "pt"},
    )
    server.touched = True
    server.restart()


def foreign_weights(server, folder):
    """Another run loads merged weights."""
    someone = ServerPool([server.url], folder)
    server.touched = True
    someone.load(make_update(policy_of(1), "merged", f"t{uuid.uuid4().hex[:8]}"))
    return someone


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


def test_a_server_that_came_back_with_another_base_is_left_and_the_run_goes_on(tmp_path, sound, base, caplog):
    reward = At(lambda: other_base(sound[1], base))
    trained = trainer(tmp_path, [server.url for server in sound], reward, **RUN)
    trained.train()
    assert_every_step_is_the_policys(trained)
    assert logged(trained, "rollout/servers_lost")[-1] == 1
    assert f"{sound[1].url} does not answer like the policy" in caplog.text


def test_the_only_server_with_another_base_ends_the_run_which_keeps_its_last_step(tmp_path, sound, base):
    reward = At(lambda: other_base(sound[1], base))
    trained = trainer(tmp_path, [sound[1].url], reward, **RUN)
    with pytest.raises(BrokenPromiseError, match="does not answer like the policy"):
        trained.train()
    assert trained.state.global_step == FAULT_AT
    assert max(logged(trained, "sampling/sampling_logp_difference/max")) < 2e-3
    assert latest_checkpoint(tmp_path).name == f"checkpoint-{FAULT_AT}"


def test_merged_weights_of_another_run_are_noticed_by_one_that_serves_adapters(tmp_path, sound, caplog):
    reward = At(lambda: foreign_weights(sound[1], tmp_path / "someone"))
    try:
        trained = trainer(tmp_path / "run", [server.url for server in sound], reward, **RUN)
        trained.train()
        assert_every_step_is_the_policys(trained)
        assert "got weights from someone else" in caplog.text
        with pytest.raises(PerlError, match="has the merged weights of another run"):
            trainer(tmp_path / "late", [sound[1].url], peft_method="dora", **RUN).train()
    finally:
        reward.found.close()


def test_merged_weights_are_refused_beside_the_adapters_of_another_run(tmp_path, sound):
    someone = ServerPool([sound[0].url], tmp_path / "someone")
    someone.load(make_update(policy_of(1), "adapter", f"t{uuid.uuid4().hex[:8]}"))
    try:
        with pytest.raises(PerlError, match="serves adapters of others"):
            trainer(tmp_path / "run", [sound[0].url], peft_method="dora", **RUN).train()
    finally:
        someone.close()
