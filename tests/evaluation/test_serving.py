"""What the command for a server says of updates, decided on shapes alone, is what the server will be given."""

import pytest
import torch

from perl.errors import PerlError
from perl.evaluation.drawing.request import EvalSettings, plan_evaluation
from perl.evaluation.drawing.serving import serving_command
from perl.methods.settings import adaptation
from perl.policy.attach import attach_adapter, continue_adapter
from perl.policy.model import load_base
from perl.policy.save_adapter import write_adapter
from perl.policy.saved.adapter import find_adapter
from perl.recipe.sections import ModelSection, PeftSection
from perl.rollouts.sync import choose_form


def planned(adapter):
    return plan_evaluation(str(adapter), None, ["sandbox:addition"], 1, None, None, EvalSettings(device="cpu"))


@pytest.mark.parametrize("method", ["lora", "dora", "pissa", "adalora", "ia3", "vera"])
def test_the_command_names_the_form_and_rank_of_what_is_sent(method, tmp_path):
    policy = attach_adapter(load_base(ModelSection(), torch.device("cpu")), adaptation(PeftSection(method=method)))
    write_adapter(policy, tmp_path / "adapter", "sandbox:base", None)
    said = serving_command([planned(tmp_path / "adapter")])
    loaded = continue_adapter(load_base(ModelSection(), torch.device("cpu")), find_adapter(str(tmp_path / "adapter")))
    sent = choose_form(loaded)
    assert ("--enable-lora" in said, "VLLM_SERVER_DEV_MODE=1" in said) == (
        sent.form == "adapter",
        sent.form == "merged",
    )
    if sent.form == "adapter":
        rank = int(said.split("--max-lora-rank ")[1].split()[0])
        assert sent.largest_rank <= rank < max(2 * sent.largest_rank, 16)  # vLLM's ranks are powers of two, from 8 on


@pytest.mark.parametrize(
    ("address", "port"),
    [(None, 8000), ("http://gpu1:9", 9), ("http://[::1]:8123/v1", 8123), ("http://gpu1:99999", None)],
)
def test_the_server_listens_where_it_will_be_asked_if_there_can_be_such_a_port(address, port):
    plan = plan_evaluation(None, "sandbox:base", ["sandbox:addition"], 1, None, None, EvalSettings())
    if port is None:
        with pytest.raises(PerlError, match=f"--server: {address} is not an address"):
            serving_command([plan], address)
    else:
        assert f" --port {port} " in serving_command([plan], address)


def test_the_base_is_split_over_as_many_gpus_as_are_asked_for_and_there_is_room_for_the_longest():
    settings = EvalSettings(max_new_tokens=77)
    plan = plan_evaluation(None, "sandbox:base", ["sandbox:addition"], 1, None, None, settings)
    longest = max(len(asked.prompt_ids) for asked in plan.tasks[0].request.asked)
    assert f" --max-model-len {longest + 77} " in serving_command([plan])
    assert "--logprobs-mode processed_logprobs" in serving_command([plan])
    assert "tensor-parallel" not in serving_command([plan])
    assert " --tensor-parallel-size 2 " in serving_command([plan], gpus=2)
