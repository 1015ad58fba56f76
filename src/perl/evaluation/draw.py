"""Draws the completions of a task from an engine and judges each as it comes.

problems, engine, protocol -> Sample, each once

What was drawn before is not drawn again. The verifier is the one that training uses, so the two cannot disagree on what
is right.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from perl.evaluation.protocol import Protocol
from perl.evaluation.samples import Place, Sample
from perl.rewards.verifier import Judging, check_all
from perl.rollouts.engine import Engine, Request, Sampled, completion_of


@dataclass(frozen=True)
class RenderedProblem:
    """A problem as the model sees it.

    Attributes:
        problem: Its id.
        prompt_ids: The rendered prompt, ends where the completion begins.
        gold: The gold answer.
    """

    problem: str
    prompt_ids: tuple[int, ...]
    gold: str


@dataclass(frozen=True)
class TaskRequest:
    """A task's problems, and what is special about how they are answered.

    Attributes:
        task: The task's name.
        max_new_tokens: Tokens after which a completion is cut off.
        end_token_ids: Tokens that end one.
        stop: Texts that end one too: what follows the first of them is dropped.
    """

    task: str
    asked: tuple[RenderedProblem, ...]
    max_new_tokens: int
    end_token_ids: tuple[int, ...]
    stop: tuple[str, ...] = ()

    def places(self, k: int) -> list[Place]:
        """Every sample that is wanted, problem by problem."""
        return [(self.task, asked.problem, index) for asked in self.asked for index in range(k)]


def draw(
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    wanted: TaskRequest,
    protocol: Protocol,
    done: Mapping[Place, Sample],
    on_sample: Callable[[Sample], None],
    judging: Judging | None = None,
) -> list[list[Sample]]:
    """As many samples of each problem as the protocol wants.

    Args:
        engine: Has the policy.
        tokenizer: The base's.
        wanted: The task.
        protocol: How completions are drawn, and how many.
        done: Samples that are there already.
        on_sample: Called with each new one, in any order, from one thread at a time.
        judging: The limits of a comparison; None: the usual ones.

    Returns:
        The samples of each problem, by index.

    Raises:
        RolloutError: No engine answers any more.
    """
    by_id = {asked.problem: asked for asked in wanted.asked}
    left = [place for place in wanted.places(protocol.k) if place not in done]
    found: dict[Place, Sample] = dict(done)
    # A request each, so that every sample has its own seed, whichever of a problem's are there already.
    seeds = [protocol.seed_of(*place) for place in left]
    requests = [Request(by_id[place[1]].prompt_ids, 1, seed) for place, seed in zip(left, seeds, strict=True)]

    def judge(position: int, group: Sequence[Sampled]) -> None:
        place = left[position]
        completion = completion_of(group[0], wanted.end_token_ids, tokenizer)
        text = _cut(completion.text, wanted.stop)
        truncated = completion.truncated and text == completion.text
        gold, limits = by_id[place[1]].gold, judging or Judging()
        [verdict] = check_all([gold], [text], timeout_seconds=limits.timeout_seconds, workers=limits.workers)
        tokens = len(completion.token_ids)
        found[place] = Sample(*place, seeds[position], text, tokens, truncated, verdict.status, verdict.extracted)
        on_sample(found[place])

    if requests:
        engine.start(requests, protocol.sampling(wanted.max_new_tokens, wanted.end_token_ids), judge).result()
    return [[found[wanted.task, asked.problem, i] for i in range(protocol.k)] for asked in wanted.asked]


def _cut(text: str, stops: Sequence[str]) -> str:
    """The text up to the first of some others."""
    ends = [text.find(stop) for stop in stops if stop in text]
    return text[: min(ends)] if ends else text
