"""A step whose rollouts are another policy's is not trained on: a trainer on engines that turn wrong when told to."""

import copy
import random

import pytest
import torch

from perl import PeftGRPOTrainer, PeftRLConfig
from perl.errors import RolloutError
from perl.policy.checkpoint import latest_checkpoint
from perl.rollouts.engine import FinishedRollouts, Sampled
from perl.rollouts.hf_engine import TransformersEngine
from perl.rollouts.vllm.servers import ServerPool
from tests.trainer.test_rollout_source import SMALL, Seen, logged, problems


class Servers(ServerPool):
    """Two servers that are transformers with the trainer's own policy.

    Attributes:
        left: Which are asked.
        wrong: Which of them sample from another policy now.
        passes: Those show the trainer's in a trial all the same, as something that answers for several servers may.
        trials: How often they were compared.
    """

    def __init__(self, policy, tokenizer, names=("http://a", "http://b")):
        self.policy, self.tokenizer = policy, tokenizer
        self.left, self.wrong, self.passes, self.trials = list(names), set(), False, 0
        self.samples = 0

    counts = {}  # noqa: RUF012
    unproven = False

    def foreign_weights(self):
        return []

    def load(self, update):
        """It has the policy itself."""

    def sleep(self):
        """Nothing to give back."""

    def close(self):
        """Nothing to give back."""

    def drop(self, failures):
        for url in failures:
            self.left.remove(url)

    def start(self, requests, sampling, on_group=None):
        self.samples += 1
        groups = [self._write(self.left[i % len(self.left)], request, sampling) for i, request in enumerate(requests)]
        for position, group in enumerate(groups):
            on_group(position, group)
        return FinishedRollouts(groups)

    def trial(self, request, sampling):
        self.trials += 1
        return {name: self._write(name, request, sampling, trial=True) for name in self.left}

    def _write(self, name, request, sampling, trial=False):
        kept = {key: tensor.detach().clone() for key, tensor in self.policy.named_parameters() if tensor.requires_grad}
        is_wrong = name in self.wrong and not (trial and self.passes)
        try:
            with torch.no_grad():
                for key, parameter in self.policy.named_parameters():
                    if is_wrong and key in kept:
                        parameter += 0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
            engine = TransformersEngine(self.policy, self.tokenizer, 64)
            return engine.start([copy.copy(request)], sampling).result()[0]
        finally:
            with torch.no_grad():
                for key, parameter in self.policy.named_parameters():
                    if key in kept:
                        parameter.copy_(kept[key])


@pytest.fixture
def on_servers(tmp_path, monkeypatch):
    """A trainer on such servers, and the servers; ``before(step, servers)`` is called before each step's rollouts."""

    def on_servers(before, names=("http://a", "http://b"), **changes):
        settings = {
            **SMALL,
            "max_steps": 4,
            "max_completion_length": 8,
            "rollout_backend": "vllm-server",
            "rollout_servers": list(names),
        }
        args = PeftRLConfig(str(tmp_path), **{**settings, "learning_rate": 1e-3, **changes})
        reward = Seen()
        trainer = PeftGRPOTrainer("sandbox:base", reward, args, train_dataset=problems())
        servers = Servers(trainer.policy, trainer.processing_class, names)
        monkeypatch.setattr("perl.trainer.sampling.rollout_source.open_engine", lambda *_: servers)
        begin = trainer.rollout_source.rollouts

        def rollouts(prompt_ids):
            before(trainer.state.global_step, servers)
            return begin(prompt_ids)

        monkeypatch.setattr(trainer.rollout_source, "rollouts", rollouts)
        return trainer, servers, reward

    return on_servers


GAP = "sampling/sampling_logp_difference/mean"


def nothing(_step, _servers):
    """Nothing happens."""


def test_right_rollouts_are_never_checked_out_of_turn(on_servers):
    trainer, servers, _ = on_servers(nothing)
    trainer.train()
    assert servers.trials == 3  # before the first, with random numbers and as it is, and after the first step
    assert servers.samples == 4
    assert max(logged(trainer, GAP)) < 1e-4
    assert len(logged(trainer, "sync/gap_limit")) == 4
    assert not logged(trainer, "rollout/made_again")


@pytest.mark.parametrize(("ours", "parts"), [(True, 2), (False, 1)])
def test_a_server_that_turns_wrong_is_left_and_no_step_is_trained_on_it(on_servers, ours, parts):
    def before(step, servers):
        if step == 2:
            servers.wrong = {"http://b"}

    changes = {} if ours else {"top_entropy_quantile": 0.5}
    if parts == 2:  # a step's rollouts come in two
        changes |= {"prompts_per_step": 4, "steps_per_generation": 1}
    trainer, servers, reward = on_servers(before, **changes)
    trainer.train()
    assert trainer.state.global_step == 4
    assert servers.left == ["http://a"]
    assert len(logged(trainer, GAP)) == 4
    assert max(logged(trainer, GAP)) < 1e-4
    assert sum(logged(trainer, "rollout/made_again")) == 1
    assert None not in [value for row in trainer.state.log_history for value in row.values()]
    asked, at = reward.prompts, 2 * parts
    assert asked[at : at + parts] == asked[at + parts : at + 2 * parts]  # of the same prompts
    assert len(asked) == 5 * parts


@pytest.mark.parametrize(
    ("names", "passes", "message"),
    [
        (["http://a"], False, r"above .*, and the parity check fails: .*http://a"),
        (["http://a", "http://b"], True, "again and again, though the engine passes the parity check"),
    ],
)
def test_where_no_servers_rollouts_are_the_policys_the_run_ends_with_its_last_step(
    on_servers, tmp_path, names, passes, message
):
    def before(step, servers):
        if step == 2:
            servers.wrong, servers.passes = set(names), passes

    trainer, _, _ = on_servers(before, names, save_strategy="steps", save_steps=100)
    with pytest.raises(RolloutError, match=message) as raised:
        trainer.train()
    assert "\n" not in str(raised.value)
    assert trainer.state.global_step == 2
    assert latest_checkpoint(tmp_path).name == "checkpoint-2"
    # The same command goes on, from the step that was kept.
    on_right, _, _ = on_servers(nothing, names, save_strategy="steps", save_steps=100)
    on_right.train(resume_from_checkpoint=True)
    assert on_right.state.global_step == 4


def test_a_step_that_was_sampled_again_is_the_step_that_would_have_been(on_servers):
    """With completions that depend on their prompts alone, a run that left a wrong server ends like one without."""

    def written(servers):
        def write(name, request, _sampling, **_):
            chance = random.Random(str(request.prompt_ids))
            groups = [tuple(chance.randrange(5, 30) for _ in range(6)) for _ in range(request.count)]
            off = 0.5 if name in servers.wrong else 0.0
            return [Sampled(ids, scores(servers.policy, request.prompt_ids, ids, off), "v") for ids in groups]

        return write

    def scores(policy, prompt, ids, off):
        from perl.policy.model import evaluating
        from perl.policy.reference import token_log_probs

        text = torch.tensor([[*prompt, *ids]])
        with evaluating(policy), torch.no_grad():
            found = token_log_probs(policy, text, torch.ones_like(text))[0, -len(ids) :]
        return tuple((found + off).tolist())

    ends = []
    for wrong_at in (None, 3):

        def before(step, servers):
            if step == wrong_at:  # noqa: B023
                servers.wrong = {"http://b"}

        trainer, servers, _ = on_servers(before, max_steps=5)
        servers._write = written(servers)
        trainer.rollout_source.rollout = trainer.rollout_source.rollout.model_copy(update={"check_every": 0})
        trainer.train()
        assert servers.left == ["http://a", "http://b"][: 1 if wrong_at else 2]
        ends.append([p.detach().clone() for p in trainer.policy.parameters() if p.requires_grad])
    for one, other in zip(*ends, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=0)  # the rows are added up in another order


def test_rollouts_that_a_checkpoint_holds_are_trained_on_before_an_engine_is_open(on_servers):
    kept = {"steps_per_generation": 2, "save_strategy": "steps", "save_steps": 1}
    trainer, _, _ = on_servers(nothing, max_steps=3, **kept)
    trainer.train()
    resumed, servers, _ = on_servers(nothing, max_steps=5, **kept)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 5
    assert servers.samples == 1  # for the fifth; the fourth's were there
