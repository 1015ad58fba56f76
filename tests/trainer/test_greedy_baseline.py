"""ReMax's baseline is the reward of the completion that the policy itself writes with the likeliest tokens."""

from types import SimpleNamespace

import pytest
import torch

from perl import PeftGRPOTrainer
from perl.errors import RecipeError
from perl.rollouts.engine import EngineSampling
from perl.trainer import group_rewards
from perl.trainer.sampling.greedy_baseline import _groups, check_greedy, greedy_rewards
from tests.trainer.test_trainer import arguments, problems

SHORT = {"max_completion_length": 6, "learning_rate": 1e-2, "optim": "sgd", "advantage_estimator": "remax"}


def by_tokens(completion_ids, log_extra, log_metric, **_):
    """A number of the tokens alone, so that every other completion has another reward; None for some."""
    log_extra("number", [sum(ids) for ids in completion_ids])
    log_metric("called_with", float(len(completion_ids)))
    return [
        None if sum(ids) % 7 == 0 else sum(i * token for i, token in enumerate(ids, 1)) / 50 for ids in completion_ids
    ]


def made(folder, **changes):
    changes = {"max_steps": 2, **SHORT, **changes}
    options = {name: changes.pop(name) for name in ("rollout_func",) if name in changes}
    config, data = arguments(folder, **changes), problems(8)
    return PeftGRPOTrainer(model="sandbox:base", reward_funcs=by_tokens, args=config, train_dataset=data, **options)


def likeliest(policy, prompt_ids, end, longest):
    """One token after another, without a cache."""
    ids = list(prompt_ids)
    with torch.no_grad():
        for _ in range(longest):
            ids.append(int(policy(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
            if ids[-1] in end:
                break
    return ids[len(prompt_ids) :]


def test_advantages_are_rewards_less_that_of_the_likeliest_completion(tmp_path, monkeypatch):
    trainer, tables = made(tmp_path), []

    def noted(trainer, source, inputs):
        rewards = greedy_rewards(trainer, source, inputs)
        prompts = [ids for ids in trainer._tokenize_prompts([row["prompt"] for row in inputs])[0]]
        trainer.policy.eval()
        written = [likeliest(trainer.policy, ids, trainer.eos_token_ids, 6) for ids in prompts]
        trainer.policy.train()
        expected = by_tokens(written, lambda *_: None, lambda *_: None)
        tables.append((rewards.flatten(), torch.tensor([float("nan") if r is None else r for r in expected])))
        return rewards

    monkeypatch.setattr(group_rewards, "greedy_rewards", noted)
    seen = []
    put = group_rewards.GroupRewards.put_advantages

    def keep(rewards, output, rewards_NK, rows):
        put(rewards, output, rewards_NK, rows)
        seen.append((output["advantages"], rewards_NK.flatten()))

    monkeypatch.setattr(group_rewards.GroupRewards, "put_advantages", keep)
    before = {name: p.detach().clone() for name, p in trainer.policy.named_parameters() if p.requires_grad}
    trainer.train()
    assert len(seen) == len(tables) == 2
    for (found, expected), (advantages, rewards) in zip(tables, seen, strict=True):
        torch.testing.assert_close(found, expected, equal_nan=True)
        torch.testing.assert_close(advantages, (rewards - expected).nan_to_num(nan=0.0))
        assert advantages.abs().max() > 0.01
    assert any(not torch.equal(p, before[name]) for name, p in trainer.policy.named_parameters() if name in before)
    entry = trainer.state.log_history[0]
    assert entry["reward/greedy"] == pytest.approx(tables[0][1].nanmean().item(), abs=1e-6)
    # What reward functions log is of the rollouts alone.
    rows = len(seen[0][1])
    assert entry["called_with"] == rows
    assert len(trainer._logs["extra"]["number"]) == len(trainer._logs["prompt"])


def test_a_process_with_fewer_prompts_than_another_scores_as_many_rows_and_finds_its_own():
    """The second of two processes: the first one has two prompts, this one has a single one."""
    asked = []

    def gather(tensor):
        return torch.cat([torch.tensor([2]) if tensor.numel() == 1 else torch.tensor([0, 1, 1]), tensor])

    def rewards(inputs, prompts, completions, completion_ids):
        asked.append((inputs, prompts, completions, completion_ids))
        return torch.tensor([[10.0], [20.0], [3.0], [3.0]])

    answers = SimpleNamespace(result=lambda: [[SimpleNamespace(token_ids=(7, 8))]])
    engine = SimpleNamespace(start=lambda *_: answers, sleep=lambda: None)
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(num_processes=2, process_index=1, device=torch.device("cpu"), gather=gather),
        _tokenize_prompts=lambda prompts: ([[5]] * len(prompts),),
        _calculate_rewards=rewards,
        processing_class=SimpleNamespace(batch_decode=lambda ids, **_: ["text"] * len(ids)),
    )
    source = SimpleNamespace(policy_engine=lambda *_: engine, sampling=EngineSampling(1.0, 8, (0,)))
    found = greedy_rewards(trainer, source, [{"prompt": "c"}] * 3)
    assert found.tolist() == [[10.0], [20.0], [20.0], [3.0], [3.0], [3.0]]
    assert asked == [([{"prompt": "c"}] * 2, ["c"] * 2, ["text"] * 2, [[7, 8]] * 2)]


def test_examples_of_one_prompt_with_two_gold_answers_are_two():
    one, other = {"prompt": "a", "solution": "1"}, {"prompt": "a", "solution": "2"}
    assert _groups([one, one, other, other], [(1,)] * 4) == [0, 0, 1, 1]
    assert _groups([one, dict(one), one], [(1,), (1,), (2,)]) == [0, 0, 1]
    arrays = [{"prompt": "a", "columns": torch.arange(2)} for _ in range(2)]
    assert _groups(arrays, [(1,), (1,)]) == [0, 1]  # who knows


def test_rollouts_without_a_likeliest_completion_are_refused(tmp_path):
    with pytest.raises(RecipeError, match=r"^advantage_estimator: a rollout_func [^\n]*rloo[^\n]*$"):
        made(tmp_path, rollout_func=lambda *_: {})
    plain = {"rollout_func": None, "tools": [], "environment_factories": None, "_is_vlm": False}
    plain |= {"train_dataset": "a stream", "eval_dataset": None}
    check_greedy(SimpleNamespace(**plain))
    for other in ({"tools": [len]}, {"environment_factories": [len]}, {"_is_vlm": True}):
        with pytest.raises(RecipeError, match=r"^advantage_estimator: [^\n]*rloo[^\n]*$"):
            check_greedy(SimpleNamespace(**{**plain, **other}))
