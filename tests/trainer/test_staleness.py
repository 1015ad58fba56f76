"""What is logged of how old rollouts are, against what was trained on; a run that goes on keeps the bound."""

import math

import pytest
import torch

from perl import PeftGRPOTrainer, PeftRLConfig
from perl.errors import RecipeError
from perl.packing.micro_batches import SAMPLED_STEP
from tests.trainer.test_rollout_check import Servers
from tests.trainer.test_rollout_source import SMALL, Seen, logged, problems, trainer

SIZE, MEAN, MOST = "sampling/effective_sample_size", "sampling/staleness/mean", "sampling/staleness/max"


@pytest.fixture
def on_policy_servers(tmp_path, monkeypatch):
    """A trainer on servers that sample from its policy at once, when they are asked."""

    def made(**changes):
        settings = SMALL | {"rollout_backend": "vllm-server", "rollout_servers": ["http://a"]}
        settings |= {"max_completion_length": 6, "learning_rate": 1e-3, "temperature": 0.8, **changes}
        reward = Seen()
        args = PeftRLConfig(str(tmp_path / "run"), **settings)
        made = PeftGRPOTrainer("sandbox:base", reward, args, train_dataset=problems(8))
        servers = Servers(made.policy, made.processing_class, ["http://a"])
        monkeypatch.setattr("perl.trainer.sampling.rollout_source.open_engine", lambda *_: servers)
        return made, reward

    return made


def log_probs_of(policy, batch, temperature):
    """(N, T) of the completions, by a plain pass over padded rows."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    with torch.no_grad():
        logits = policy(input_ids=ids, attention_mask=mask, position_ids=positions).logits / temperature
    log_probs = logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
    return log_probs[:, batch["prompt_ids"].size(1) - 1 :]


def weights_and_ages(trained, batches):
    """Of each token of a step: policy/sampled, and steps between the two."""
    weights, ages = [], []
    for batch in batches:
        own = log_probs_of(trained.policy, batch, 0.8)
        for row, column in batch["completion_mask"].nonzero().tolist():
            weights.append(math.exp(own[row, column] - batch["sampling_per_token_logps"][row, column]))
            ages.append(trained.state.global_step - int(batch[SAMPLED_STEP][row, column]))
    return weights, ages


@pytest.mark.parametrize(
    ("changes", "ages"),
    [
        ({"num_iterations": 2}, [0, 1, 2, 3, 2, 3, 2, 3]),
        ({"num_iterations": 2, "rollout_max_staleness": 2}, [0, 1, 1, 2, 1, 2, 1, 2]),
        ({"num_iterations": 2, "rollout_prefetch": 0}, [0, 1, 0, 1, 0, 1, 0, 1]),
        (
            {"steps_per_generation": 2, "prompts_per_step": 1, "per_device_train_batch_size": 4},
            [0, 1, 2, 3, 2, 3, 2, 3],
        ),
    ],
    ids=["unbounded", "bounded", "on-policy", "halves"],
)
def test_what_is_logged_of_staleness_is_that_of_the_tokens_that_are_trained_on(on_policy_servers, changes, ages):
    """Of every update, several of which train on the same rollouts; four prompts an epoch, or eight."""
    trained, _ = on_policy_servers(**{"rollout_prefetch": 1, "max_steps": 8, **changes})
    expected, run = [], trained.optimizer_step.run_window

    def run_window(model, batches):
        expected.append(weights_and_ages(trained, batches))
        return run(model, batches)

    trained.optimizer_step.run_window = run_window
    trained.train()
    sizes = [sum(w) ** 2 / (len(w) * sum(one * one for one in w)) for w, _ in expected]
    assert logged(trained, SIZE) == pytest.approx(sizes, rel=1e-4)
    assert min(sizes) < 0.9999
    assert logged(trained, MEAN) == pytest.approx([sum(found) / len(found) for _, found in expected])
    assert logged(trained, MOST) == [max(found) for _, found in expected] == ages
    assert not logged(trained, "rollout/made_again")


@pytest.mark.nightly
def test_a_run_that_goes_on_keeps_the_bound_and_the_prompts(on_policy_servers):
    """From the middle of a batch, across the end of an epoch, with rollouts that it finds in the checkpoint."""
    how = {"num_iterations": 2, "rollout_prefetch": 2, "rollout_max_staleness": 3, "max_steps": 12}
    how |= {"save_strategy": "steps", "save_steps": 1, "prompt_memory": True}
    whole, prompts = on_policy_servers(**how)
    whole.train()
    resumed, again = on_policy_servers(**how)
    resumed.train(resume_from_checkpoint=f"{whole.args.output_dir}/checkpoint-3")
    assert again.prompts == prompts.prompts[2:]
    assert logged(whole, MOST) == [0, 1, 2, 3] + [2, 3] * 4
    assert logged(resumed, MOST)[3:] == [3, 1, 2] + [2, 3] * 3
    assert max(logged(resumed, MOST)) <= 3


@pytest.mark.nightly
def test_tokens_of_requests_that_continue_are_of_the_policies_that_their_steps_had(tmp_path, vllm_server):
    """Log-probs of each token against those of the trainer's own policy of the step that is kept beside it."""
    how = {"rollout_prefetch": 2, "rollout_in_flight": "continue", "max_completion_length": 200, "max_steps": 5}
    how |= {"temperature": 1.3, "learning_rate": 1e-3, "rows": 4}
    trained = trainer(tmp_path, [vllm_server], Seen(), **how)
    policies, found, run = {}, [], trained.optimizer_step.run_window
    moved = {name: p for name, p in trained.policy.named_parameters() if p.requires_grad}

    def differences(batches):
        now = trained.state.global_step
        policies[now] = {name: p.detach().clone() for name, p in moved.items()}
        ages, gaps = [], []
        for batch in batches:
            steps, mask = batch[SAMPLED_STEP], batch["completion_mask"].bool()
            for step in steps[mask].unique().tolist():
                write(policies[step])
                own = log_probs_of(trained.policy, batch, 1.3)
                chosen = mask & (steps == step)
                gaps += (own - batch["sampling_per_token_logps"])[chosen].abs().tolist()
                ages += [now - step] * int(chosen.sum())
            write(policies[now])
        found.append((sum(gaps) / len(gaps), sum(ages) / len(ages), max(ages)))

    def write(policy):
        with torch.no_grad():
            for name, parameter in moved.items():
                parameter.copy_(policy[name])

    def run_window(model, batches):
        differences(batches)
        return run(model, batches)

    trained.optimizer_step.run_window = run_window
    trained.train()
    assert max(mean for mean, _, _ in found) < 1e-4
    assert logged(trained, MEAN) == pytest.approx([mean for _, mean, _ in found])
    assert logged(trained, MOST) == [most for _, _, most in found]
    assert max(most for _, _, most in found) in (1, 2)


def test_where_weights_are_merged_requests_cannot_continue(tmp_path):
    how = {"rollout_prefetch": 1, "rollout_in_flight": "continue", "peft_method": "dora"}
    with pytest.raises(RecipeError, match=r"rollout\.in_flight: continue needs an adapter .*finish") as refused:
        trainer(tmp_path, ["http://localhost:1"], Seen(), **how)
    assert "\n" not in str(refused.value)
