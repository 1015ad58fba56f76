"""A turn of a conversation is asked for what is left of its completion; what cannot fit is refused at the start."""

import copy

import pytest
from datasets import Dataset

from perl import PeftGRPOTrainer, PeftRLConfig
from perl.errors import PerlError
from perl.rewards import accuracy_reward
from perl.rollouts.vllm.servers import ServerPool
from tests.rollouts.loopback import FakeVllm
from tests.trainer.test_rollout_source import SMALL, problems

COMPLETION, SUFFIX = 80, [7, 8, 9, 7, 8, 9, 7, 8, 9, 7]


def trainer(folder, url, data=None, **changes):
    served = {"rollout_backend": "vllm-server", "rollout_servers": [url], "max_completion_length": COMPLETION}
    args = PeftRLConfig(str(folder), **{**SMALL, **served, **changes})
    return PeftGRPOTrainer("sandbox:base", accuracy_reward, args, train_dataset=data or problems())


def conversation(trained, monkeypatch, url, prompt_ids, first):
    """The loop of tool calls, over a server; each completion calls a tool until it has no room."""
    pool = ServerPool([url], None)
    monkeypatch.setattr(trained.rollout_source, "_engine", pool)
    monkeypatch.setattr(trained.rollout_source, "sync", lambda *_: None)
    monkeypatch.setattr(trained.rollout_source, "inputs", [])
    monkeypatch.setattr(trained, "_get_tool_suffix_ids", lambda _: list(SUFFIX))
    call = {"type": "function", "function": {"name": "look", "arguments": {}}}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    monkeypatch.setattr("perl.rollouts.agents.conversations.parse_response", lambda *_, **__: copy.deepcopy(message))
    trained.tools = [lambda: "seen"]
    trained._sync_tool_dicts = [{"look": lambda: "seen"} for _ in prompt_ids]
    trained._async_tool_dicts = [{} for _ in prompt_ids]
    try:
        return trained._tool_call_loop(
            [[{"role": "user", "content": "?"}] for _ in prompt_ids],
            prompt_ids,
            [list(ids) for ids in first],
            [[copy.deepcopy(message)] for _ in prompt_ids],
            [[-0.5] * len(ids) for ids in first],
            None,
            {},
        )
    finally:
        pool.close()


def test_each_turn_asks_for_what_is_left_of_its_own_prompts_completion(tmp_path, monkeypatch):
    prompt_ids = [[11] * 20, [11] * 20, [12] * 5, [13] * 20]
    first = [[21] * 10, [21] * 10, [22] * 61, [23] * 70]
    fake = FakeVllm(length_of=lambda _: 15, longest=100)
    with fake() as url:
        trained = trainer(tmp_path, url)
        mask, _, completion_ids, logprobs, calls, failures, _ = conversation(
            trained, monkeypatch, url, prompt_ids, first
        )
    turns = [(len(body["prompt"]), 5 if body["prompt"][0] == 12 else 20, body["max_tokens"]) for body in fake.asked]
    for length, start, most in turns:
        written = length - start
        assert most == COMPLETION - written
        assert length + most <= 100
    assert len({length for length, _, _ in turns}) >= 3
    for ids, kept, scores in zip(completion_ids, mask, logprobs, strict=True):
        assert len(ids) == len(kept) == len(scores) <= COMPLETION
    # The last one has room for the tool's answer and for nothing more: no turn is asked for.
    assert completion_ids[3] == [23] * 70 + SUFFIX
    assert mask[3] == [1] * 70 + [0] * 10
    assert calls >= 6
    assert failures == 0


def test_what_a_server_cannot_hold_is_refused_before_a_completion_is_sampled(tmp_path):
    long = [{"prompt": [{"role": "user", "content": "1 + " * words + "1"}], "solution": "2"} for words in (2, 2, 40, 2)]
    fake = FakeVllm(longest=100)
    with fake() as url:
        trained = trainer(tmp_path, url, Dataset.from_list(long))
        with pytest.raises(PerlError, match=r"holds 100 tokens.*--max-model-len \d+"):
            trained.train()
    assert fake.asked == []
