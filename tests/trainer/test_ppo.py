"""PPO: the update and the critic of a plain trainer, REINFORCE where the critic says nothing, what moves and when."""

import copy
import json
import math
from pathlib import Path

import pytest
import torch
from live_bytes import LiveBytes
from peft import get_peft_model
from safetensors.torch import load_file

from perl import PeftGRPOTrainer
from perl.algorithms.advantages import whitened
from perl.errors import ModelError, RecipeError
from perl.policy.critic import Critic
from perl.policy.fingerprint import base_fingerprint
from tests.oracles.ppo import CRITIC, SETTINGS, PlainPPO, ours
from tests.oracles.rollouts import LONGEST, ROWS
from tests.oracles.two_trainers import ADAPTERS, base, norm, relative_difference, train
from tests.trainer.distributed_checkpoints import Job, trainer_of

RELATIVE = 1e-5
OFF_POLICY = {"num_iterations": 2, "max_steps": 4, "epsilon": 0.05}
MINIBATCHES = {"steps_per_generation": 4, "num_iterations": 2, "max_steps": 5, "epsilon": 0.05}
MANY_PASSES = {"train_tokens_per_microbatch": 100}
PENALTY = {"beta": 0.3, "kl_in_reward": True}


def moved(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: after[name] - tensor for name, tensor in before.items()}


def cut(options: dict) -> dict:
    """Rows for a data loader that gives out two optimizer steps at a time."""
    return {"per_device_train_batch_size": 6} if "steps_per_generation" in options else {}


@pytest.mark.parametrize(
    ("policy", "penalty"),
    [({}, PENALTY), (OFF_POLICY, {}), (MINIBATCHES, PENALTY)],
    ids=["on policy, penalised", "off policy", "minibatches, penalised"],
)
def test_policy_and_critic_take_a_plain_trainers_update(policy, penalty):
    kind, options = ours(), {**SETTINGS, "tools": True, "learning_rate": 1.0, **policy, **cut(policy)}
    found = train(kind, **options, **CRITIC, **penalty, **MANY_PASSES)
    plain = type("Plain", (PlainPPO,), {"start": kind.seen[0].start})
    expected = train(plain, **options, **{name: value for name, value in penalty.items() if name == "beta"})
    assert relative_difference(found.pages[0], expected.pages[0]) == 0
    assert norm(expected.update()) > 0.01 * norm(expected.pages[0])
    assert relative_difference(found.update(), expected.update()) <= RELATIVE
    start = kind.seen[0].start
    wanted = moved(start, {name: t.detach() for name, t in plain.trained.tensors.items()})
    assert norm(wanted) > 0.1 * norm(start)
    assert relative_difference(moved(start, kind.seen[0].critic.state()), wanted) <= RELATIVE


def test_where_the_critic_says_nothing_it_is_reinforce_with_the_batchs_normalisation():
    silent = {**CRITIC, "gae_lambda": 1.0, "critic_learning_rate": 0.0}
    kind, penalty = ours(offset=0.0), {"beta": 0.3, "kl_in_reward": True}
    exact = {**SETTINGS, "dtype": torch.float64}  # the two add up a completion's penalties in other orders
    found = train(kind, **exact, **silent, **penalty)
    expected = train(PeftGRPOTrainer, **exact, **penalty, advantage_estimator="batch")
    assert norm(expected.update()) > 0.001 * norm(expected.pages[0])
    assert relative_difference(found.update(), expected.update()) <= 1e-6
    plain = ours(offset=0.0)
    train(plain, **SETTINGS, **silent)
    for rollouts in plain.seen[0].rollouts:
        mask = rollouts["completion_mask"]
        assert torch.equal(rollouts["old_values"], torch.zeros(mask.shape))
        rewards = rollouts["returns"].amax(dim=1, keepdim=True).expand(mask.shape)
        assert torch.equal(rollouts["returns"], rewards * mask)
        assert torch.equal(rollouts["advantages"], whitened(rewards, mask))


@pytest.mark.parametrize("adapter", ["adalora", "ia3", "ln"])
def test_the_critic_learns_beside_every_kind_of_adapter_and_the_base_stays(adapter):
    kind = ours(offset=0.0)
    found = train(kind, adapter=adapter, **{**SETTINGS, "optim": "adamw_torch"}, **CRITIC)
    trainer = kind.seen[0]
    assert norm(found.update()) > 0
    assert all(not torch.equal(t, trainer.start[name]) for name, t in trainer.critic.state().items())
    assert base_fingerprint(trainer.policy) == base_fingerprint(base(torch.float32))
    logged = [entry for entry in found.history if "critic/loss" in entry]
    names = {"critic/loss", "critic/explained_variance", "critic/clip_fraction", "critic/value_mean"}
    assert len(logged) == 3 + 1  # steps, and the last entry once more
    assert all(names <= set(entry) and all(math.isfinite(entry[name]) for name in names) for entry in logged)
    assert logged[0]["critic/value_mean"] == 0
    assert logged[2]["critic/value_mean"] != 0


def test_the_policy_waits_while_the_critic_warms_up():
    kind = ours(offset=0.0)
    options = {**SETTINGS, **CRITIC, "max_steps": 5, "weight_decay": 0.1, "optim": "adamw_torch"}
    found = train(kind, adapter="adalora", **options, critic_warmup_steps=2)
    assert relative_difference(found.pages[2], found.pages[0]) == 0
    assert norm(moved(found.pages[2], found.pages[3])) > 0
    entries = [entry for entry in found.history if "critic/loss" in entry][:5]
    assert [entry["grad_norm"] > 0 for entry in entries] == [False, False, True, True, True]
    assert set(entries[0]) == set(entries[2])
    assert entries[1]["critic/value_mean"] != 0


def test_an_evaluation_has_values_too_and_trains_nothing():
    kind = ours()
    train(kind, **SETTINGS, **CRITIC, per_device_eval_batch_size=6)
    trainer = kind.seen[0]
    before, policy = trainer.critic.state(), {n: p.detach().clone() for n, p in trainer.policy.named_parameters()}
    found = trainer.evaluate(trainer.train_dataset)
    assert math.isfinite(found["eval_loss"])
    assert math.isfinite(found["eval_critic/explained_variance"])
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.critic.state().items())
    assert all(torch.equal(p, policy[name]) for name, p in trainer.policy.named_parameters())


def test_peak_memory_is_that_of_a_policy_alone_and_the_critics_own():
    """Tensor, gradient and Adam's two averages of each parameter, and a few numbers for each token of the batch."""
    options = {**SETTINGS, "optim": "adamw_torch", "max_steps": 2, "adapter": "lora everywhere"}
    peaks = []
    for further in ({"advantage_estimator": "batch"}, CRITIC):
        with LiveBytes() as live:
            train(PeftGRPOTrainer, **options, **further)
        peaks.append(live.peak)
    policy = get_peft_model(copy.deepcopy(base(torch.float32)), copy.deepcopy(ADAPTERS["lora everywhere"]))
    of_critic = sum(4 * p.numel() for p in Critic(policy, rank=CRITIC["critic_rank"], seed=0).parameters)
    of_tokens = ROWS * LONGEST * 4
    assert peaks[1] - peaks[0] <= 4 * of_critic + 6 * of_tokens
    assert peaks[0] > 20 * of_critic


RESUMED = {"advantage_estimator": "gae", "critic_rank": 4, "critic_learning_rate": 0.02, "loss_type": "dapo"}
RESUMED |= {"kl_in_reward": True, "num_iterations": 2, "save_steps": 1}


def run(folder: Path, name: str, resume: Path | None = None, **options) -> dict[str, torch.Tensor]:
    trainer = trainer_of(folder, Job(name, options={**RESUMED, **options}))
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    assert trainer.critic_training is not None
    return trainer.critic_training.critic.state()


def test_a_resumed_run_ends_like_an_uninterrupted_one_bit_for_bit(tmp_path):
    whole = run(tmp_path, "whole")
    for step in (1, 2):  # among rollouts, and between
        again = run(tmp_path, f"resumed-{step}", tmp_path / "whole" / f"checkpoint-{step}")
        assert all(torch.equal(tensor, whole[name]) for name, tensor in again.items())
        for file in ("policy.safetensors", "critic.safetensors", "critic-optimizer.safetensors"):
            ends = [tmp_path / name / "checkpoint-5" / file for name in ("whole", f"resumed-{step}")]
            one, other = (load_file(end) for end in ends)
            assert one.keys() == other.keys()
            assert all(torch.equal(tensor, other[name]) for name, tensor in one.items()), file
    checkpoint = tmp_path / "whole" / "checkpoint-1"
    listed = json.loads((checkpoint / "complete.json").read_text())
    assert {"critic.safetensors", "critic-optimizer.safetensors"} <= set(listed)
    assert not any("critic" in name or "value_head" in name for name in load_file(checkpoint / "policy.safetensors"))
    adapter = load_file(checkpoint / "adapter_model.safetensors")
    assert not any("critic" in name or "value_head" in name for name in adapter)
    rollouts = load_file(checkpoint / "rollouts-rank0.safetensors")
    assert {"0/old_values", "0/returns"} <= set(rollouts)
    with pytest.raises(ModelError, match=r"^train.critic_rank: [^\n]*rank 4[^\n]*rank 2[^\n]*$"):
        run(tmp_path, "other", checkpoint, critic_rank=2)
    trainer_of(tmp_path, Job("without", options={"max_steps": 1})).train()
    with pytest.raises(ModelError, match=r"^resume_from_checkpoint: [^\n]*without a critic[^\n]*$"):
        run(tmp_path, "other", tmp_path / "without" / "checkpoint-1")
    finished = run(tmp_path, "finished", tmp_path / "whole" / "checkpoint-5")
    assert all(torch.equal(tensor, whole[name]) for name, tensor in finished.items())


def test_a_script_saves_its_critic_and_another_one_starts_from_it(tmp_path):
    trainer = trainer_of(tmp_path, Job("first", options={**RESUMED, "max_steps": 1}))
    trainer.train()
    trainer.save_critic(tmp_path / "critic")
    trained = trainer.critic_training.critic.state()
    about = json.loads((tmp_path / "critic" / "critic.json").read_text())
    assert about["base_fingerprint"] == base_fingerprint(trainer.policy)
    given = {**RESUMED, "critic_adapter": str(tmp_path / "critic")}
    second = trainer_of(tmp_path, Job("second", options={**given, "max_steps": 1}))
    assert all(torch.equal(tensor, trained[name]) for name, tensor in second.critic_training.critic.state().items())
    second.train()
    logged = [entry for entry in second.state.log_history if "critic/value_mean" in entry]
    assert logged[0]["critic/value_mean"] != 0
    for changes, words in (
        ({"critic_rank": 2}, r"train.critic_rank: [^\n]*rank 4[^\n]*rank 2"),
        ({"critic_adapter": str(tmp_path / "absent")}, r"train.critic_adapter: [^\n]*no such folder"),
    ):
        with pytest.raises(ModelError, match=rf"^{words}[^\n]*$"):
            trainer_of(tmp_path, Job("third", options={**given, **changes}))
    without = trainer_of(tmp_path, Job("without", options={"max_steps": 1}))
    with pytest.raises(ModelError, match=r"^advantage_estimator: no critic is trained[^\n]*$"):
        without.save_critic(tmp_path / "none")


def test_a_step_that_is_trls_trains_no_critic():
    for name, replacement in (("_prepare_inputs", lambda _, x: x), ("compute_loss", lambda *_, **__: 0.0)):
        own = type("Own", (PeftGRPOTrainer,), {name: replacement, "__module__": __name__})
        with pytest.raises(RecipeError, match=r"^advantage_estimator: gae trains a critic[^\n]*$"):
            train(own, advantage_estimator="gae", loss_type="dapo")
