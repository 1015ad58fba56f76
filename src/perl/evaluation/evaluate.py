"""Scores a policy on held-out problems.

policy, problems, sampling -> TaskScore

The verifier is the one that training uses, so the two cannot disagree on what is right.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase

from perl.evaluation.metrics import average_at_k, standard_error
from perl.rewards.verifier import Judging, check_all
from perl.rollouts.hf_engine import Sampling, generate
from perl.types import Prompt


@dataclass(frozen=True)
class TaskScore:
    """What a policy achieved on one task.

    Attributes:
        accuracy: avg@k over the problems.
        stderr: Its standard error, clustered by problem.
        k: Completions a problem.
        n: Problems.
        mean_length: Mean completion length in tokens, the end token included.
        truncated: Share of completions that were cut off.
        no_answer: Share of completions without an answer.
        unjudged: Share of completions that could not be compared with the gold answer: too slow, failed, or a gold
            answer that cannot be read. They count as not right.
    """

    accuracy: float
    stderr: float
    k: int
    n: int
    mean_length: float
    truncated: float
    no_answer: float
    unjudged: float


def evaluate_policy(
    model: torch.nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    k: int,
    on_batch: Callable[[int], None] | None = None,
    judging: Judging | None = None,
) -> TaskScore:
    """Draws k completions of every problem and checks each.

    Args:
        model: The policy, with whatever adapter is active.
        tokenizer: The base's.
        prompts: Problems with solutions.
        sampling: How tokens are drawn; the same for every policy that is to be compared.
        k: Completions a problem.
        on_batch: Called with the number of completions that are new.
        judging: The limits of a comparison; None: the usual ones.

    Raises:
        ValueError: There is no problem, or one has no solution.
    """
    judging = judging or Judging()
    repeated = [prompt for prompt in prompts for _ in range(k)]
    completions = generate(model, tokenizer, repeated, sampling, on_batch)
    verdicts = check_all(
        [_solution(prompt) for prompt in repeated],
        [completion.text for completion in completions],
        timeout_seconds=judging.timeout_seconds,
        workers=judging.workers,
    )
    right = [[v.right for v in verdicts[i : i + k]] for i in range(0, len(verdicts), k)]
    return TaskScore(
        accuracy=average_at_k(right),
        stderr=standard_error(right),
        k=k,
        n=len(prompts),
        mean_length=sum(len(c.token_ids) for c in completions) / len(completions),
        truncated=sum(c.truncated for c in completions) / len(completions),
        no_answer=sum(v.status == "no_answer" for v in verdicts) / len(verdicts),
        unjudged=sum(v.status in ("timeout", "error", "unparsable_gold") for v in verdicts) / len(verdicts),
    )


def _solution(prompt: Prompt) -> str:
    if prompt.solution is None:
        raise ValueError(f"no solution to compare with: {prompt.content!r}")
    return prompt.solution
