"""Problems that a run holds out, as a task: asked as training asks them.

prompts with solutions -> PreparedTask; model, PreparedTask -> Score
"""

from collections.abc import Callable, Sequence

from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from perl.data import prompt_text
from perl.evaluation.draw import TaskRequest, draw
from perl.evaluation.heldout_of_recipe import held_out_by_run
from perl.evaluation.protocol import Protocol
from perl.evaluation.questions import PreparedTask, protocol_hash, rendered
from perl.evaluation.samples import Sample
from perl.evaluation.score import Score, score_samples
from perl.evaluation.task import Question, TaskData, questions_hash
from perl.policy.model import eos_token_ids
from perl.rewards.verifier import Judging
from perl.rollouts.hf_engine import TransformersEngine
from perl.types import Prompt


def heldout_task(
    name: str,
    prompts: Sequence[Prompt],
    protocol: Protocol,
    end_token_ids: tuple[int, ...],
    limit: int | None = None,
) -> PreparedTask:
    """Held-out problems as a task.

    Args:
        name: What they are called in results.
        prompts: Rendered as training renders them.
        protocol: How they will be asked; says how long a completion may be.
        end_token_ids: Tokens that end one.
        limit: Only the first so many are asked; None: all.

    Raises:
        ValueError: There is no problem, or one has no solution, or the protocol sets no length.
    """
    if not prompts or protocol.max_new_tokens is None:
        raise ValueError("there must be at least one problem, and a length that no completion exceeds")
    texts = [prompt_text(p.content if isinstance(p.content, str) else list(p.content)) for p in prompts]
    questions = tuple(Question(str(i), text, _solution(prompts[i]), {}) for i, text in enumerate(texts))
    task = held_out_by_run(name)
    some = questions[:limit]
    data = TaskData(task, some, name, None, questions_hash(some), questions[len(some) :])
    every = tuple(rendered(question, p.token_ids) for question, p in zip(questions, prompts, strict=True))
    longest = protocol.max_new_tokens
    request = TaskRequest(name, every[: len(some)], longest, end_token_ids, further=every[len(some) :])
    return PreparedTask(data, request, protocol_hash(protocol, data, longest))


def evaluate_policy(
    model: PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    protocol: Protocol,
    on_sample: Callable[[Sample], None] | None = None,
    judging: Judging | None = None,
) -> Score:
    """The score of a model in memory, with whatever adapter is active, on problems with solutions.

    Args:
        model: The policy.
        tokenizer: The base's.
        prompts: As in :func:`heldout_task`.
        protocol: How completions are drawn, and how many of each problem.
        on_sample: Called with each completion.
        judging: The limits of a comparison; None: the usual ones.

    Raises:
        ValueError: There is no problem, or one has no solution.
    """
    task = heldout_task("heldout", prompts, protocol, eos_token_ids(model, tokenizer))
    engine = TransformersEngine(model, tokenizer)
    groups = draw(engine, tokenizer, task.request, protocol, {}, on_sample or (lambda _: None), judging)
    return score_samples(groups)


def _solution(prompt: Prompt) -> str:
    if prompt.solution is None:
        raise ValueError(f"no solution to compare with: {prompt.content!r}")
    return prompt.solution
