"""What the likeliest completion of each prompt is worth: the baseline of ReMax.

prompts -> their greedy completions by the policy as it is now -> rewards
"""

import contextlib
import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from trl import GRPOTrainer
from trl.data_utils import is_conversational

from perl.errors import RecipeError, RolloutError
from perl.rollouts.engine import Request
from perl.run.joint_work import joined
from perl.trainer.arguments.rollout_choice import holds_conversations
from perl.trainer.live import most
from perl.trainer.overrides import may_hold_images
from perl.trainer.sampling.rollout_source import RolloutSource


def check_greedy(trainer: GRPOTrainer) -> None:
    """Refuses a trainer whose rollouts cannot be repeated with the likeliest tokens.

    Raises:
        RecipeError: Somebody else samples, or completions are no single answers to a text.
    """
    reasons = {
        "a rollout_func samples by itself, and has no likeliest completion": trainer.rollout_func is not None,
        "a conversation with tools has no single likeliest completion": holds_conversations(trainer),
        "prompts may hold images, which a second rollout is not given": may_hold_images(trainer),
    }
    for reason, holds in reasons.items():
        if holds:
            raise RecipeError(reason, "advantage_estimator", "rloo, which compares with the other completions")


def greedy_rewards(trainer: GRPOTrainer, source: RolloutSource, inputs: Sequence[dict[str, Any]]) -> torch.Tensor:
    """The rewards of greedy completions, one for each prompt, repeated for each completion of it.

    A reward function scores each of them once, so that one that fails counts as one failure.

    Args:
        trainer: Whose reward functions score them.
        source: Samples them, with whatever samples the rollouts.
        inputs: The examples of this process, one for each completion.

    Returns:
        (N, K) float, of all processes' examples and all reward functions; NaN where a function gave None.

    Raises:
        RolloutError: The engine gives no completions.
    """
    prompts = copy.deepcopy([row["prompt"] for row in inputs])
    prompt_ids = [tuple(ids) for ids in trainer._tokenize_prompts(prompts)[0]]
    distinct, of_example = list(dict.fromkeys(prompt_ids)), _groups(inputs, prompt_ids)
    try:
        engine = source.policy_engine(distinct[0], len(distinct))
        with joined().failing_together():
            asked = [Request(ids, 1) for ids in distinct]
            answers = engine.start(asked, replace(source.sampling, temperature=0.0)).result()
        joined().meet()
        engine.sleep()
    except RolloutError:
        source.end_training()
        raise
    written = dict(zip(distinct, (list(group[0].token_ids) for group in answers), strict=True))
    # A group is scored once; as many rows on every process, or they could not be gathered.
    scored = [of_example.index(group) for group in range(of_example[-1] + 1)]
    scored += [scored[-1]] * (most(trainer.accelerator, len(scored)) - len(scored))
    completion_ids = [written[prompt_ids[row]] for row in scored]
    texts = trainer.processing_class.batch_decode(completion_ids, skip_special_tokens=True)
    talks = is_conversational({"prompt": prompts[0]})
    completions = [[{"role": "assistant", "content": text}] for text in texts] if talks else texts
    asked_of, asked_by = [inputs[row] for row in scored], [prompts[row] for row in scored]
    with _unlogged(trainer):
        rewards: torch.Tensor = trainer._calculate_rewards(asked_of, asked_by, completions, completion_ids)
    first = trainer.accelerator.process_index * len(scored)
    place_n = torch.tensor([first + group for group in of_example], device=trainer.accelerator.device)
    return rewards[trainer.accelerator.gather(place_n).to(rewards.device)]


def _groups(inputs: Sequence[dict[str, Any]], prompt_ids: Sequence[tuple[int, ...]]) -> list[int]:
    """Of each example the number of its run of equal ones: the completions of a prompt stand together."""
    numbers = [0]
    for row in range(1, len(inputs)):
        same = False
        with contextlib.suppress(ValueError, RuntimeError):  # of arrays, which have no single answer
            # A gold answer may differ.
            same = prompt_ids[row] == prompt_ids[row - 1] and bool(inputs[row] == inputs[row - 1])
        numbers.append(numbers[-1] + (not same))
    return numbers


@contextlib.contextmanager
def _unlogged(trainer: GRPOTrainer) -> Iterator[None]:
    """While reward functions log nothing: their columns and shares are those of what is trained on."""
    names = ("_log_completion_extra", "_log_metric")
    before = {name: vars(trainer)[name] for name in names if name in vars(trainer)}
    for name in names:
        setattr(trainer, name, lambda *_, **__: None)
    try:
        yield
    finally:
        for name in names:
            delattr(trainer, name)
        vars(trainer).update(before)
