"""Groups without variance are replaced: which, by what, up to which cap; and the gradient of all others stays."""

import copy

import pytest
import torch
from datasets import Dataset

from perl import PeftGRPOTrainer, PeftRLConfig
from perl.errors import ModelError, PerlError, RolloutError
from perl.policy.attach import adapter_tensors
from perl.trainer.prompts.refill import BatchLayout, GenerationBatch, refilled, replaced
from tests.oracles.rollouts import GENERATIONS, LONGEST, PAD, preset_reward, rollout_function, rollout_table
from tests.oracles.two_trainers import QUIET, base, tokenizer

G = 3


def rollouts(prompts, width, first):
    """Rows of which each says whose it is."""
    rows = torch.arange(len(prompts) * G) + first
    return {
        "prompt_ids": rows[:, None].repeat(1, width),
        "prompt_mask": torch.ones(len(rows), width, dtype=torch.long),
        "completion_ids": rows[:, None].repeat(1, width + 1),
        "completion_mask": torch.ones(len(rows), width + 1, dtype=torch.long),
        "sampling_per_token_logps": rows[:, None].repeat(1, width + 1).float(),
        "num_items_in_batch": torch.tensor(5),
    }


def batch_of(prompts, rewards_PG, *, width=2, first=0, process=0, processes=1):
    """The share of a process; rewards are of all."""
    own = len(prompts) // processes
    mine = prompts[process * own : (process + 1) * own]
    shown = {"prompt": [p for p in prompts for _ in range(G)], "rewards/r": [r for row in rewards_PG for r in row]}
    return GenerationBatch(
        [{"prompt": str(p)} for p in mine for _ in range(G)],
        rollouts(mine, width, first + process * own * G),
        torch.tensor(rewards_PG, dtype=torch.float32).view(-1, 1),
        list(prompts),
        shown,
        tokens=len(prompts),
    )


def flat(rewards_NK):
    return (rewards_NK.view(-1, G) == rewards_NK.view(-1, G)[:, :1]).all(dim=1)


LIVE, ONES, NONE = [1, 0, 1], [1, 1, 1], [0, 0, 0]


@pytest.mark.parametrize("widths", [(2, 2), (2, 4), (4, 2)])
def test_only_rows_of_groups_that_are_given_up_change(widths):
    batch = batch_of([10, 11, 12], [LIVE, ONES, LIVE], width=widths[0])
    offered = batch_of([20, 21], [NONE, [0, 1, 0]], width=widths[1], first=100)
    shape = BatchLayout(G, 1, 0, PAD)
    found = replaced(batch, offered, shape.pairs(flat(batch.rewards_NK), flat(offered.rewards_NK)), shape)
    assert found.prompts == [10, 21, 12]
    assert [row["prompt"] for row in found.inputs] == ["10"] * 3 + ["21"] * 3 + ["12"] * 3
    assert found.shown == {"prompt": [10] * 3 + [21] * 3 + [12] * 3, "rewards/r": [1, 0, 1, 0, 1, 0, 1, 0, 1]}
    assert found.rewards_NK.flatten().tolist() == [1, 0, 1, 0, 1, 0, 1, 0, 1]
    whose = [0, 1, 2, 103, 104, 105, 6, 7, 8]
    assert found.rollouts["completion_ids"].amax(1).tolist() == whose
    assert found.rollouts["prompt_ids"][:, -1].tolist() == whose  # padded on the left
    assert found.rollouts["completion_ids"][:, 0].tolist() == whose  # and on the right
    own = [widths[0]] * 3 + [widths[1]] * 3 + [widths[0]] * 3
    assert found.rollouts["prompt_mask"].sum(1).tolist() == own
    assert found.rollouts["completion_mask"].sum(1).tolist() == [width + 1 for width in own]
    assert found.rollouts["num_items_in_batch"] == 5
    assert batch.prompts == [10, 11, 12]  # what was given is as it was


def test_each_process_replaces_its_own_groups_and_all_agree_on_which():
    rewards = [LIVE, ONES, NONE, LIVE]
    offers = [[0, 0, 1], ONES]
    found = []
    for process in (0, 1):
        shape = BatchLayout(G, 2, process, PAD)
        batch = batch_of([10, 11, 12, 13], rewards, process=process, processes=2)
        offered = batch_of([20, 21], offers, first=100, process=process, processes=2)
        found.append(replaced(batch, offered, shape.pairs(flat(batch.rewards_NK), flat(offered.rewards_NK)), shape))
    assert [one.prompts for one in found] == [[10, 20, 12, 13]] * 2  # the second process was offered nothing better
    assert torch.equal(found[0].rewards_NK, found[1].rewards_NK)
    assert [one.rollouts["completion_ids"][:, 0].tolist() for one in found] == [
        [0, 1, 2, 100, 101, 102],
        [6, 7, 8, 9, 10, 11],
    ]
    assert [row["prompt"] for row in found[0].inputs + found[1].inputs] == [
        text for text in ("10", "20", "12", "13") for _ in range(G)
    ]


@pytest.mark.parametrize("cap", [0.0, 0.5, 1.0, 3.0])
@pytest.mark.parametrize("processes", [1, 2])
def test_no_more_is_sampled_than_the_cap_allows_and_no_prompt_twice(cap, processes):
    asked: list[int] = []

    def sample(prompts):
        asked.extend(prompts)
        return batch_of(prompts, [LIVE if p % 5 == 0 else NONE for p in prompts], processes=processes)

    def others(count, without):
        return [prompt for prompt in range(200) if prompt not in without][:count]

    batch = batch_of(list(range(8)), [LIVE, NONE, ONES, NONE, NONE, NONE, LIVE, NONE], processes=processes)
    layout = BatchLayout(G, processes, 0, PAD)
    found, extra, logged = refilled(batch, layout, cap, flat=flat, replacements=others, sample=sample)
    assert len(asked) == len(set(asked)) <= cap * 8
    assert sum(len(one.prompts) for one in extra) == len(asked)
    assert logged["refill/samples"] == G * len(asked)
    assert logged["refill/tokens"] == len(asked)
    assert logged["refill/flat_before"] == 6 / 8
    assert logged["refill/flat_after"] == flat(found.rewards_NK).float().mean()
    assert logged["refill/groups"] == 6 - 8 * logged["refill/flat_after"]
    if cap == 3.0:  # one in five varies
        assert logged["refill/flat_after"] <= 3 / 8
    if cap == 0.0:
        assert found is batch


KINDS = (("live", "dyadic", "live", "half"), ("live", "half", "live", "live"), ("tenths", "dyadic", "live", "half"))
FLAT = [1, 8, 9]


def made(folder, prompts, table=None, reward=preset_reward, **options):
    """A trainer that takes steps of plain gradient descent on fixed rollouts."""
    table = table or rollout_table(KINDS)
    known = list(table)
    args = {
        **QUIET,
        "optim": "sgd",
        "learning_rate": 1.0,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "max_steps": 1,
        "num_generations": GENERATIONS,
        "per_device_train_batch_size": GENERATIONS * 4,
        "max_completion_length": LONGEST,
        "shuffle_dataset": False,
        "loss_type": "grpo",
        **options,
    }
    torch.manual_seed(0)
    return PeftGRPOTrainer(
        model=copy.deepcopy(base(torch.float32)),
        reward_funcs=reward,
        args=PeftRLConfig(str(folder), **args),
        train_dataset=Dataset.from_dict({"prompt": [known[i] for i in prompts], "level": list(range(len(prompts)))}),
        processing_class=tokenizer(),
        rollout_func=rollout_function(table, log_probs=False, tools=False),
    )


def trained(folder, prompts, *args, **options):
    """How far the adapter has moved after the steps, and its trainer."""
    trainer = made(folder, prompts, *args, **options)
    before = {name: t.clone() for name, t in adapter_tensors(trainer.policy).items()}
    torch.manual_seed(0)
    trainer.train()
    moved = {name: t - before[name] for name, t in adapter_tensors(trainer.policy).items()}
    return torch.cat([t.flatten().double() for _, t in sorted(moved.items())]), trainer


@pytest.mark.parametrize("loss", ["grpo", "dapo"])
def test_a_refilled_step_is_the_step_of_the_groups_that_it_ends_with(tmp_path, loss):
    refilled, trainer = trained(tmp_path / "refilled", range(12), prompt_refill=1.0, loss_type=loss)
    known = list(rollout_table(KINDS))
    ended = [known.index(prompt) for prompt in list(trainer._logs["prompt"])[::GENERATIONS]]
    assert ended[0] == 0
    assert ended[2:] == [2, 3]
    assert ended[1] not in (0, 2, 3, *FLAT)
    direct, _ = trained(tmp_path / "direct", ended, loss_type=loss)
    torch.testing.assert_close(refilled, direct, rtol=0, atol=1e-6 * direct.abs().max().item())
    entry = trainer.state.log_history[0]
    assert (entry["refill/groups"], entry["refill/flat_before"], entry["refill/flat_after"]) == (1, 0.25, 0)
    assert entry["frac_reward_zero_std"] == 0
    plain, other = trained(tmp_path / "plain", range(4), loss_type=loss)
    assert (plain - direct).abs().max() > 1e-3 * direct.abs().max()
    assert entry["reward"] == other.state.log_history[0]["reward"]  # of the first draw, as a run without refill has it
    if loss == "grpo":  # where a row's weight does not depend on the tokens of the others
        alone, _ = trained(tmp_path / "alone", [ended[1], *FLAT], loss_type=loss)
        torch.testing.assert_close(refilled, plain + alone, rtol=0, atol=1e-5 * direct.abs().max().item())


def test_a_group_without_an_advantage_has_no_signal_though_its_rewards_differ(tmp_path):
    """pass@k: of a group with two right answers in six, every pair that is drawn may fail; with five right none can."""
    _, trainer = trained(
        tmp_path,
        range(12),
        prompt_refill=1.0,
        advantage_estimator="pass_at_k",
        reward=five_of_six,
        loss_type="reinforce",
    )
    entry = trainer.state.log_history[0]
    assert (entry["refill/flat_before"], entry["refill/flat_after"]) == (1.0, entry["frac_reward_zero_std"])


def five_of_six(prompts, **_):
    """All groups have all right answers but one, in the last place."""
    return [float(row % GENERATIONS < GENERATIONS - 1) for row in range(len(prompts))]


SETTINGS = {
    "memory": {"prompt_memory": True},
    "refill": {"prompt_refill": 1.0},
    "curriculum": {"prompt_curriculum": "level", "prompt_curriculum_start": 0.1},
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_second_training_of_one_trainer_begins_anew_and_is_gone_on_with(tmp_path, setting):
    how = {"max_steps": 3, "save_strategy": "steps", "save_steps": 2, **SETTINGS[setting]}
    _, trainer = trained(tmp_path / "whole", range(12), **how)
    first = dict(trainer.prompt_selection.choice._chosen)
    trainer.train()
    second = dict(trainer.prompt_selection.choice._chosen)
    assert set(second) == set(first)  # numbered from 0 again
    assert len(set(second[0])) == 4
    if setting != "memory":  # which knows more by now
        assert second == first
    ended = torch.cat([t.flatten() for t in adapter_tensors(trainer.policy).values()])
    again = made(tmp_path / "whole", range(12), **how)
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert torch.equal(torch.cat([t.flatten() for t in adapter_tensors(again.policy).values()]), ended)
    how |= {"prompt_memory": setting != "memory", "prompt_refill": 1.0}
    with pytest.raises(ModelError, match=r"checkpoint was written with .*memory.*here is .*memory") as raised:
        made(tmp_path / "other", range(12), **how).train(str(tmp_path / "whole" / "checkpoint-2"))
    assert "\n" not in str(raised.value)


def test_rewards_that_never_vary_end_a_training_with_a_checkpoint_and_a_line(tmp_path):
    kinds = (("dyadic", "tenths", "dyadic", "tenths"),) * 4
    with pytest.raises(RolloutError, match=r"prompts\.refill: all rewards were equal within each of 40") as raised:
        trained(tmp_path, range(16), rollout_table(kinds), prompt_refill=1.0, max_steps=20, save_steps=100)
    assert "\n" not in str(raised.value)
    assert (tmp_path / "checkpoint-4" / "complete.json").is_file()


@pytest.mark.parametrize(
    ("options", "prompts", "line"),
    [
        ({"prompt_memory": True}, 2, r"prompts: chooses among 2 prompts, and a generation batch takes 4"),
        ({"prompt_refill": 1.0, "advantage_estimator": "batch"}, 12, r"prompts\.refill: .*batch learns too"),
        ({"prompt_memory": True, "advantage_estimator": "batch"}, 12, r"prompts\.memory: .*batch learns too"),
        (
            {"prompt_refill": 1.0, "advantage_estimator": "rloo", "kl_in_reward": True, "beta": 0.1},
            12,
            r"prompts\.refill: .*kl_in_reward learns too",
        ),
        ({"prompt_memory": True, "ignore_data_skip": True}, 12, r"ignore_data_skip: starts the data again on resume"),
        ({"prompt_explore": 0.3}, 12, r"explore: needs memory: true"),
        ({"prompt_refill": -1.0}, 12, r"refill"),
        ({"prompt_curriculum": "lewel"}, 12, r"prompts\.curriculum: .*no column 'lewel' \(did you mean level"),
    ],
    ids=str,
)
def test_what_cannot_be_chosen_is_one_line(tmp_path, options, prompts, line):
    with pytest.raises(PerlError, match=line) as raised:
        trained(tmp_path, range(prompts), **options)
    assert "\n" not in str(raised.value)
