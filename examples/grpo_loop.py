"""GRPO for an adapter as one loop: the whole algorithm on a page, without a Trainer.

problems -> prompts -> completions -> verdicts -> advantages -> log-probabilities -> loss -> adapter

Run it with ``python examples/grpo_loop.py``: a tiny model learns to add, offline, on a CPU. On the same rollouts it
trains the same adapter as ``PeftGRPOTrainer``, as a test checks; the trainer adds everything around the loop.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from peft import PeftModel
from transformers import PreTrainedTokenizerBase, set_seed

from perl.algorithms.advantages import group_advantages
from perl.algorithms.losses import LossInputs, LossSettings, objective, token_weights
from perl.data import render_prompts
from perl.evaluation.scoring.protocol import Protocol
from perl.evaluation.tasks.heldout import evaluate_policy
from perl.methods.settings import adaptation
from perl.policy.attach import attach_adapter
from perl.policy.model import base_identity, eos_token_ids, load_base, load_tokenizer
from perl.policy.reference import reference_log_probs, token_log_probs
from perl.policy.save_adapter import write_adapter
from perl.recipe.sections import ModelSection, PeftSection
from perl.rewards import check
from perl.rollouts.engine import EngineSampling, Request, completion_of
from perl.rollouts.hf_engine import TransformersEngine
from perl.sandbox import load_problems
from perl.types import Completion, Prompt

Rollout = Callable[[PeftModel, Sequence[Prompt], int], list[Completion]]
"""(policy, prompts, step) -> one completion for each prompt."""


@dataclass(frozen=True)
class LoopSettings:
    """P prompts a step, G completions of each; loss type, clipping and the weight beta of the KL divergence."""

    steps: int = 30
    prompts_per_step: int = 8
    num_generations: int = 8
    temperature: float = 1.0
    loss: LossSettings = field(default_factory=lambda: LossSettings(beta=0.01, max_completion_length=64))


@dataclass(frozen=True)
class Batch:
    """Rows of prompt and completion, padded on the right.

    Attributes:
        input_ids_NT: (N, T) int64.
        attention_mask_NT: (N, T) 1 for tokens, 0 for padding.
        completion_mask_NT: (N, T-1) 1 where the next token is one that the policy wrote.
    """

    input_ids_NT: torch.Tensor
    attention_mask_NT: torch.Tensor
    completion_mask_NT: torch.Tensor


@dataclass(frozen=True)
class StepReport:
    """An optimizer step: means of reward, length in tokens, and KL divergence in nats; tokens of the whole run."""

    step: int
    reward: float
    length: float
    kl: float | None
    tokens: int


def grpo_loop(
    policy: PeftModel,
    optimizer: torch.optim.Optimizer,
    prompts: Sequence[Prompt],
    settings: LoopSettings,
    rollout: Rollout,
    on_step: Callable[[StepReport], object],
) -> None:
    """Trains the policy's adapter.

    Args:
        policy: Base and trainable adapter; only the adapter changes.
        optimizer: Over the adapter's parameters.
        prompts: With solutions; taken in this order, P a step.
        settings: Batch, loss, sampling.
        rollout: Where completions come from.
        on_step: Called with the means of each step.
    """
    tokens, size = 0, settings.prompts_per_step
    for step in range(settings.steps):
        chosen = prompts[step * size : (step + 1) * size]
        repeated = [prompt for prompt in chosen for _ in range(settings.num_generations)]
        completions = rollout(policy, repeated, step)
        rewards_PG = score(repeated, completions).view(len(chosen), settings.num_generations)
        advantages_PG = group_advantages(rewards_PG)  # (r - mean) / (std + 1e-4)
        loss, kl = step_loss(policy, collate(repeated, completions), advantages_PG.flatten(), settings)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        written = sum(len(completion.token_ids) for completion in completions)
        tokens += written + sum(len(prompt.token_ids) for prompt in repeated)
        on_step(StepReport(step + 1, rewards_PG.mean().item(), written / len(completions), kl, tokens))


def score(prompts: Sequence[Prompt], completions: Sequence[Completion]) -> torch.Tensor:
    """(N,) rewards: 1 for a correct answer, else 0."""
    verdicts = [check(prompt.solution or "", c.text) for prompt, c in zip(prompts, completions, strict=True)]
    return torch.tensor([float(verdict.right) for verdict in verdicts])


def collate(prompts: Sequence[Prompt], completions: Sequence[Completion]) -> Batch:
    """All completions of a step as one batch."""
    rows = [(prompt.token_ids, c.token_ids) for prompt, c in zip(prompts, completions, strict=True)]
    longest = max(len(prompt) + len(completion) for prompt, completion in rows)
    ids_NT = torch.zeros(len(rows), longest, dtype=torch.long)
    attention_NT, written_NT = torch.zeros_like(ids_NT), torch.zeros_like(ids_NT)
    for row, (prompt, completion) in enumerate(rows):
        end = len(prompt) + len(completion)
        ids_NT[row, :end] = torch.tensor([*prompt, *completion])
        attention_NT[row, :end] = 1
        written_NT[row, len(prompt) : end] = 1
    return Batch(ids_NT, attention_NT, written_NT[:, 1:])


def step_loss(
    policy: PeftModel, batch: Batch, advantages_N: torch.Tensor, settings: LoopSettings
) -> tuple[torch.Tensor, float | None]:
    """The loss of one optimizer step, and the mean KL divergence to the base per token."""
    mask_NT = batch.completion_mask_NT
    rows = batch.input_ids_NT, batch.attention_mask_NT
    policy_log_probs = token_log_probs(policy, *rows, temperature=settings.temperature)
    reference = reference_log_probs(policy, *rows) if settings.loss.beta > 0 else None
    result = objective(
        LossInputs(
            policy_log_probs=policy_log_probs,
            old_log_probs=policy_log_probs.detach(),  # the rollouts are on-policy: the ratio is 1
            advantages=advantages_N.unsqueeze(1),
            mask=mask_NT,
            reference_log_probs=reference,
        ),
        settings.loss,
    )
    count, kind, longest = float(mask_NT.sum()), settings.loss.loss_type, settings.loss.max_completion_length
    weights_NT = token_weights(mask_NT, kind, micro_batches=1, window_tokens=count, max_completion_length=longest)
    kl = None if result.kl is None else float((result.kl * mask_NT).sum()) / count
    return (result.per_token * weights_NT).sum(), kl


def sample(
    tokenizer: PreTrainedTokenizerBase, settings: LoopSettings, policy: PeftModel, prompts: Sequence[Prompt], step: int
) -> list[Completion]:
    """Completions drawn from the policy itself, each with its own seed."""
    ends, first = eos_token_ids(policy, tokenizer), step * len(prompts)
    sampling = EngineSampling(settings.temperature, settings.loss.max_completion_length, ends)
    requests = [Request(prompt.token_ids, 1, seed=first + i) for i, prompt in enumerate(prompts)]
    groups = TransformersEngine(policy, tokenizer).start(requests, sampling).result()
    return [completion_of(sampled, ends, tokenizer) for (sampled,) in groups]


def main() -> None:
    """Trains on sandbox additions and scores base and adapter on held-out ones."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=LoopSettings.steps)
    parser.add_argument("--output", type=Path, default=Path("runs/grpo_loop"))
    arguments = parser.parse_args()
    set_seed(0)
    section = ModelSection(name="sandbox:base")
    tokenizer = load_tokenizer(section)
    policy = attach_adapter(load_base(section, torch.device("cpu")), adaptation(PeftSection(rank=8, alpha=16)))
    settings = LoopSettings(steps=arguments.steps)

    def prompts_of(split: str) -> list[Prompt]:
        rows = [
            {"prompt": [{"role": "user", "content": problem.question}], "solution": problem.answer}
            for problem in load_problems("sandbox:addition", split)  # type: ignore[arg-type]
        ]
        return render_prompts(rows, tokenizer)

    def heldout_accuracy() -> float:
        protocol = Protocol(max_new_tokens=settings.loss.max_completion_length, k=1)
        return evaluate_policy(policy, tokenizer, prompts_of("heldout")[:256], protocol).accuracy

    def show(step: StepReport) -> None:
        print(f"step {step.step:3}  reward {step.reward:.3f}  length {step.length:.1f}  kl {step.kl or 0:.4f}")

    before = heldout_accuracy()  # B is zero in a new adapter: this is the base
    optimizer = torch.optim.AdamW([p for p in policy.parameters() if p.requires_grad], lr=1e-3, weight_decay=0.0)
    grpo_loop(policy, optimizer, prompts_of("train"), settings, partial(sample, tokenizer, settings), show)
    write_adapter(policy, arguments.output / "adapter", *base_identity(policy))
    print(f"held-out accuracy {before:.3f} -> {heldout_accuracy():.3f}; adapter in {arguments.output / 'adapter'}")


if __name__ == "__main__":
    main()
