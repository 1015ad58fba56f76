"""Draws the completions of a task from an engine and judges each as it comes, alone or by several processes.

problems, engine, protocol -> Sample, each once

What was drawn before is not drawn again. A sample depends on its seed and not on who draws it; each process judges what
it draws, and after each round the main process has all samples of the round, so that a kill loses no more than that.
Unless a task names another scorer the verifier of training judges, so the two cannot disagree on what is right.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn
from transformers import PreTrainedTokenizerBase

from perl.errors import RewardError
from perl.evaluation.scoring.agent_scorer import verdict_of
from perl.evaluation.scoring.protocol import Protocol
from perl.evaluation.scoring.samples import NOT_JUDGED, Place, Sample
from perl.evaluation.scoring.scorers import SCORERS, Scorer
from perl.evaluation.scoring.task import MATH, Question
from perl.recipe.rollout_section import Capabilities
from perl.rewards.verifier import Judging
from perl.rollouts.agents.asked import Asking, as_text
from perl.rollouts.engine import Engine, Request, Sampled, completion_of
from perl.run.joint_work import Processes
from perl.run.shards import is_sharded

# Completions that an engine with a queue of its own writes between two exchanges, on each process.
_QUEUED = 1024


@dataclass(frozen=True)
class RenderedProblem:
    """A problem as the model sees it.

    Attributes:
        problem: Its id.
        prompt_ids: The rendered prompt, ends where the completion begins.
        gold: The gold answer.
        question: All that is known of it; None: no more than this.
    """

    problem: str
    prompt_ids: tuple[int, ...]
    gold: str
    question: Question | None = None

    @property
    def as_question(self) -> Question:
        """What a scorer is asked about it."""
        return self.question or Question(self.problem, "", self.gold, {})


@dataclass(frozen=True)
class TaskRequest:
    """A task's problems, and what is special about how they are answered.

    Attributes:
        task: The task's name.
        max_new_tokens: Tokens after which a completion is cut off.
        end_token_ids: Tokens that end one.
        stop: Texts that end one too: what follows the first of them is dropped.
        scorer: What judges completions.
        judged: False: completions are drawn to be judged later.
        further: Problems beyond a limit, which are not asked; samples of theirs may be kept beside those that are.
        asking: How problems become conversations with tools, whose text is kept as messages; None: they are answered
            in one turn.
    """

    task: str
    asked: tuple[RenderedProblem, ...]
    max_new_tokens: int
    end_token_ids: tuple[int, ...]
    stop: tuple[str, ...] = ()
    scorer: Scorer = SCORERS[MATH]
    judged: bool = True
    further: tuple[RenderedProblem, ...] = ()
    asking: Asking | None = None

    def places(self, k: int) -> list[Place]:
        """Every sample that is wanted, problem by problem."""
        return [(self.task, asked.problem, index) for asked in self.asked for index in range(k)]


@dataclass
class DrawSharing:
    """Who draws what; without arguments this process draws everything.

    Attributes:
        processes: That share.
        at_once: Completions that each writes in a round; None: the main process draws everything, all at once.
        in_shards: A forward pass needs all processes, so each must draw in every round.
        counts: How many each process has drawn, on the main process.
    """

    processes: Processes = field(default_factory=Processes)
    at_once: int | None = None
    in_shards: bool = False
    counts: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Nothing is drawn yet."""
        self.counts = [0] * self.processes.count

    def __str__(self) -> str:
        """For the end of a line of a log: by how many processes, and the completions of each."""
        if self.processes.count == 1 or self.at_once is None:
            return ""
        return f", by {self.processes.count} processes: {' + '.join(map(str, self.counts))} completions"

    def parts(self, left: Sequence[Place]) -> Iterator[tuple[Sequence[Place], bool]]:
        """This process's part of each round, and whether it is thrown away: the others' forward passes need it too.

        Args:
            left: In the order in which one process would draw them; its batches are those of one process, but for the
                last round, which is divided evenly.
        """
        processes = self.processes
        if self.at_once is None or processes.count == 1:
            if left:
                yield (left if processes.main else ()), False
            return
        for start in range(0, len(left), self.at_once * processes.count):
            together = left[start : start + self.at_once * processes.count]
            first, end = (-(-len(together) * rank // processes.count) for rank in (processes.rank, processes.rank + 1))
            if first == end and self.in_shards:
                yield together[:1], True
            else:
                yield together[first:end], False

    def collected(self, own: Sequence[Sample]) -> list[Sample]:
        """The samples that the others drew in this round; an empty list on others than the main process."""
        drawn = self.processes.collected(list(own))
        for rank, samples in enumerate(drawn):
            self.counts[rank] += len(samples)
        return [sample for samples in drawn[1:] for sample in samples]


def share(processes: Processes, engine: Capabilities, batch_size: int, policy: nn.Module) -> DrawSharing:
    """How a policy's completions are shared.

    Args:
        processes: That could share them.
        engine: What draws. Servers are asked by the main process alone, and share the work themselves.
        batch_size: Completions that transformers write at a time.
        policy: Whose completions they are.
    """
    if engine.needs_servers:
        return DrawSharing(processes)
    if engine.takes_updates:
        return DrawSharing(processes, _QUEUED)
    return DrawSharing(processes, batch_size, in_shards=is_sharded(policy))


def draw(
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    wanted: TaskRequest,
    protocol: Protocol,
    done: Mapping[Place, Sample],
    on_sample: Callable[[Sample], None],
    judging: Judging | None = None,
    sharing: DrawSharing | None = None,
) -> list[list[Sample]]:
    """As many samples of each problem as the protocol wants.

    Args:
        engine: Has the policy.
        tokenizer: The base's.
        wanted: The task.
        protocol: How completions are drawn, and how many.
        done: Samples that are there already, the same on all processes.
        on_sample: Called with each new one, in any order, from one thread at a time; on the main process only.
        judging: The limits of a comparison; None: the usual ones.
        sharing: With which processes this one shares the work, all of which call this at once; None: with none.

    Returns:
        The samples of each problem, by index; on others than the main process nothing.

    Raises:
        RolloutError: No engine answers any more.
        RewardError: The user's reward that judges failed too often; what was drawn is kept, without verdicts.
    """
    sharing = sharing or DrawSharing()
    prompts = {asked.problem: asked.prompt_ids for asked in wanted.asked}
    left = [place for place in wanted.places(protocol.k) if place not in done]
    left.sort(key=lambda place: len(prompts[place[1]]))  # as an engine puts them into batches
    found: dict[Place, Sample] = dict(done)

    def keep(sample: Sample) -> None:
        found[sample.place] = sample
        on_sample(sample)

    for places, spare in sharing.parts(left):
        own: list[Sample] = []

        def keep_own(sample: Sample, own: list[Sample] = own) -> None:
            own.append(sample)
            if sharing.processes.main:  # those of the others come after the round
                keep(sample)

        if places or engine.capabilities.needs_servers:  # which all processes ask together
            limits = (judging or Judging()) if wanted.judged else None
            kept = (lambda _: None) if spare else keep_own
            if (asking := wanted.asking) is None:
                _ask(engine, tokenizer, wanted, protocol, places, kept, limits)
            else:
                _converse(engine, wanted, asking, protocol, places, kept, limits, sharing)
        for sample in sharing.collected(own):
            keep(sample)
    if not sharing.processes.main:
        return []
    return [[found[wanted.task, asked.problem, i] for i in range(protocol.k)] for asked in wanted.asked]


def _ask(
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    wanted: TaskRequest,
    protocol: Protocol,
    places: Sequence[Place],
    on_sample: Callable[[Sample], None],
    limits: Judging | None,
) -> None:
    """Draws samples, and judges each; without limits none.

    Raises:
        RewardError: As of :func:`draw`.
    """
    by_id = {asked.problem: asked for asked in wanted.asked}
    # A request each, so that every sample has its own seed, whichever of a problem's are there already.
    seeds = [protocol.seed_of(*place) for place in places]
    requests = [Request(by_id[place[1]].prompt_ids, 1, seed) for place, seed in zip(places, seeds, strict=True)]

    def judge(position: int, group: Sequence[Sampled]) -> None:
        place = places[position]
        completion = completion_of(group[0], wanted.end_token_ids, tokenizer)
        ends = (completion.text.find(stop) for stop in wanted.stop if stop in completion.text)
        text = completion.text[: min(ends, default=None)]
        truncated = completion.truncated and text == completion.text
        sample = Sample(*place, seeds[position], text, len(completion.token_ids), truncated, NOT_JUDGED)
        if limits is not None:
            try:
                sample = sample.judged(wanted.scorer.verdicts([by_id[place[1]].as_question], [text], limits)[0])
            except RewardError:
                on_sample(sample)  # what was drawn is kept
                raise
        on_sample(sample)

    engine.start(requests, protocol.sampling(wanted.max_new_tokens, wanted.end_token_ids), judge).result()


def _converse(
    engine: Engine,
    wanted: TaskRequest,
    asking: Asking,
    protocol: Protocol,
    places: Sequence[Place],
    on_sample: Callable[[Sample], None],
    limits: Judging | None,
    sharing: DrawSharing,
) -> None:
    """Holds conversations and judges each; of several processes that ask together all go on until the last is done."""
    together = engine.capabilities.needs_servers or sharing.in_shards
    by_id = {asked.problem: asked for asked in wanted.asked}
    seeds = [protocol.seed_of(*place) for place in places]
    rows = [by_id[place[1]].as_question.row for place in places]

    def anyone(here: bool) -> bool:
        if not together:
            return here
        parts = sharing.processes.collected(here)
        return sharing.processes.by_main(lambda: any(parts))

    sampling = protocol.sampling(wanted.max_new_tokens, wanted.end_token_ids)
    for number, one in asking.hold(rows, seeds, engine, sampling, anyone, in_shards=sharing.in_shards):
        place, text, tokens = places[number], as_text(one), len(one.ids)
        sample = Sample(*place, seeds[number], text, tokens, tokens == wanted.max_new_tokens, NOT_JUDGED)
        if asking.rewards_itself:
            sample = sample.judged(verdict_of(asking, one))
        elif limits is not None:
            question = by_id[place[1]].as_question
            sample = sample.judged(wanted.scorer.verdicts([question], [text], limits)[0])
        on_sample(sample)


def within_batch(engine: Engine) -> str:
    """How far a batch is, of an engine that counts in ``token`` and hands over whole batches; else empty."""
    return f"token {token:,}" if (token := getattr(engine, "token", 0)) else ""
