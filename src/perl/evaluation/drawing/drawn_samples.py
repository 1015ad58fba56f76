"""The samples of an evaluation: what is kept already, and the rest, drawn by each policy in turn.

Evaluation, Policies -> DrawnSamples, and samples.jsonl; file of samples, problems, protocol -> samples judged as of now

A policy with nothing left to draw is not put into an engine again. A file may have been edited, and a verdict may be an
older verifier's: nothing is taken from it that can be computed again. A base's completions are kept in a file named by
all that they depend on: what their key names (weights, prompts, sampling, seed, engine, type of numbers), and the
device, the attention and the versions of the packages that draw.
"""

import contextlib
import logging
import os
import secrets
import statistics
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

from peft import PeftModel
from transformers import PreTrainedTokenizerBase

from perl.errors import PerlError, warn
from perl.evaluation.drawing.by_processes import check_same
from perl.evaluation.drawing.policies import Policies, ReadyPolicy, Who, in_turn
from perl.evaluation.drawing.request import Evaluation
from perl.evaluation.scoring.metrics import error_of_mean
from perl.evaluation.scoring.protocol import Protocol, short_hash
from perl.evaluation.scoring.results import SAMPLES
from perl.evaluation.scoring.reward_scorer import check_judged
from perl.evaluation.scoring.samples import NOT_JUDGED, Place, Sample, SampleFile
from perl.evaluation.scoring.score import score_samples
from perl.evaluation.tasks.draw import DrawSharing, TaskRequest, draw, share, within_batch
from perl.evaluation.tasks.questions import PreparedTask, prompts_hash
from perl.policy.fingerprint import base_dtype
from perl.policy.name import model_config_digest, policy_name
from perl.rewards.verifier import Judging
from perl.rollouts.engine import Engine
from perl.rollouts.open_engine import EngineSettings
from perl.run.folder import installed_versions
from perl.run.joint_work import Processes
from perl.run.progress import duration, progress
from perl.run.tables import percent

logger = logging.getLogger("perl")

VARIABLE = "PERL_CACHE"
"""Environment variable with the folder that holds caches."""
_DRAWING = ("torch", "transformers", "vllm", "bitsandbytes", "torchao")


@dataclass(frozen=True)
class StoredSamples:
    """What a file holds of a task.

    Attributes:
        samples: That are wanted, with verdicts of now; not those of problems beyond a limit, which stay in the file.
        judged_otherwise: How many of these had another verdict or another answer in the file.
        dropped: Places of samples that this evaluation cannot have drawn.
    """

    samples: Mapping[Place, Sample]
    judged_otherwise: int
    dropped: Collection[Place]


def stored_samples(
    found: Mapping[Place, Sample], wanted: TaskRequest, protocol: Protocol, judging: Judging | None = None
) -> StoredSamples:
    """Judges stored samples again, and drops what was not drawn like this.

    Args:
        found: All that a file holds under the key of this task.
        wanted: The task; where it is judged later, verdicts stay as they are stored.
        protocol: How its completions are drawn, and how many.
        judging: The limits of a comparison; None: the usual ones.
    """
    asked = {one.problem for one in wanted.asked}
    known = asked | {one.problem for one in wanted.further}
    dropped = [
        place
        for place, sample in found.items()
        if sample.task != wanted.task
        or sample.problem not in known
        or sample.seed != protocol.seed_of(*sample.place)
        or not sample.may_be_of(wanted.max_new_tokens)
    ]
    gone = set(dropped)
    kept = [s for place, s in found.items() if place not in gone and s.problem in asked and s.index < protocol.k]
    if not wanted.judged or (wanted.asking is not None and wanted.asking.rewards_itself):
        return StoredSamples({sample.place: sample for sample in kept}, 0, dropped)
    questions = {one.problem: one.as_question for one in wanted.asked}
    texts = [sample.text for sample in kept]
    verdicts = wanted.scorer.verdicts([questions[sample.problem] for sample in kept], texts, judging or Judging())
    samples = [sample.judged(verdict) for sample, verdict in zip(kept, verdicts, strict=True)]
    otherwise = sum(old != new and old.status != NOT_JUDGED for old, new in zip(kept, samples, strict=True))
    return StoredSamples({sample.place: sample for sample in samples}, otherwise, dropped)


@dataclass(frozen=True)
class SampleStore:
    """Where a policy's samples on a task are kept.

    Attributes:
        name: In a log.
        key: Names the policy and the way it was asked.
        file: In the evaluation's folder.
        cache: Of bases; None: these samples are kept in the folder alone.
    """

    name: str
    key: str
    file: SampleFile
    cache: SampleFile | None = None

    def read(self, wanted: TaskRequest, protocol: Protocol, judging: Judging | None) -> Mapping[Place, Sample]:
        """Those that are there, corrected where that is due; those of the cache are put into the folder's file too."""
        found = self.file.read(self.key)
        if self.cache is not None:
            left, taken = set(wanted.places(protocol.k)) - found.keys(), dict[Place, Sample]()
            with _may_fail(self.cache.path):
                self.cache.path.parent.mkdir(parents=True, exist_ok=True)
                every = self.cache.read(self.key)  # whose verdicts may be an older verifier's
                taken = {p: replace(s, status=NOT_JUDGED, extracted=None) for p, s in every.items() if p in left}
            if taken:
                self.file.append(self.key, taken.values())
                logger.info("%s: %d completions were drawn before and are taken from the cache", self.name, len(taken))
            found |= taken
        stored = stored_samples(found, wanted, protocol, judging)
        if stored.dropped or any(found[place] != sample for place, sample in stored.samples.items()):
            self.file.correct(self.key, stored.samples, stored.dropped)
        if stored.dropped:
            why = "another seed, a length that cannot be, an unknown problem"
            line = "%s: not drawn by this evaluation (%s), hence dropped: %d stored completions"
            warn("PRL305", line, self.name, why, len(stored.dropped))
        if stored.judged_otherwise:
            line = "%s: judged again, %d of %d stored verdicts are others now"
            warn("PRL305", line, self.name, stored.judged_otherwise, len(stored.samples))
        return stored.samples

    def append(self, sample: Sample) -> None:
        """Adds a sample; a kill right after does not lose it."""
        self.file.append(self.key, [sample])
        if self.cache is not None:
            with _may_fail(self.cache.path):
                self.cache.append(self.key, [sample])


def base_cache(key: str, device: str, attention: str | None) -> SampleFile:
    """The file of a base's completions, in ``$PERL_CACHE/bases``, else ``perl-rl/bases`` in the user's cache.

    Args:
        key: Under which the samples are kept.
        device: Type of the device that draws.
        attention: ``attn_implementation`` that was asked for; None: transformers' choice.
    """
    usual = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "perl-rl"
    folder = Path(os.environ.get(VARIABLE) or usual).expanduser() / "bases"
    versions = {name: found for name, found in installed_versions(_DRAWING).items() if name in _DRAWING}
    facts = {"key": key, "device": device, "attention": attention, "versions": versions}
    return SampleFile(folder / f"{short_hash(facts)}.jsonl")


@contextlib.contextmanager
def _may_fail(file: Path) -> Iterator[None]:
    """A cache that cannot be read or written costs a line, not an evaluation."""
    try:
        yield
    except (OSError, PerlError) as error:
        reason = error.mistakes[0].message if isinstance(error, PerlError) else error.strerror or error
        warn("PRL365", "%s: %s; the base's completions are not shared with other evaluations", file, reason)


Groups = list[list[Sample]]


@dataclass
class DrawnSamples:
    """What came of asking.

    Attributes:
        groups: Who -> task -> the samples of each problem.
        keys: Who -> task -> the name under which they are kept.
        logp_diff: The largest difference of an engine's log-probabilities, in nats; None where there is none.
    """

    groups: dict[Who, dict[str, Groups]] = field(default_factory=dict)
    keys: dict[Who, dict[str, str]] = field(default_factory=dict)
    logp_diff: float | None = None


@dataclass(frozen=True)
class _Asked:
    """A policy on a task: what there is of its samples.

    Attributes:
        done: Samples that are there, the same on all processes.
    """

    task: PreparedTask
    kept: SampleStore
    done: Mapping[Place, Sample]

    def complete(self, k: int) -> bool:
        """Whether nothing is left to draw."""
        return all(place in self.done for place in self.task.request.places(k))


def draw_samples(plan: Evaluation, policies: Policies, processes: Processes | None = None) -> DrawnSamples:
    """Every sample of every policy on every task; those that are there already are not drawn again.

    Args:
        plan: What is asked.
        policies: In memory, of each process its own.
        processes: That share the work, all of which call this at once; None: this one does it alone. On others than
            the main process there are no samples afterwards.

    Raises:
        RolloutError: No server answers any more.
        BrokenPromiseError: The engine does not answer like the policy.
        RewardError: The user's reward that judges failed too often, or on all of a task.
    """
    drawn, file, processes = DrawnSamples(), SampleFile(plan.folder / SAMPLES), processes or Processes()
    if processes.main:
        plan.folder.mkdir(parents=True, exist_ok=True)
    for failures in (task.request.scorer.failures for task in plan.tasks):
        if failures is not None:  # they are those of one evaluation, of which a run has many
            failures.count = 0
    with processes.failing_together():
        drawn.keys = {
            who: {t.request.task: key_of(plan, policies, who, t) for t in plan.tasks} for who in plan.policies
        }
        check_same(processes, {"base_sha256": policies.base_sha256, "samples": drawn.keys})
        asked = {who: [_asked(plan, drawn, who, task, file, processes) for task in plan.tasks] for who in plan.policies}
        left = [who for who, some in asked.items() if not all(one.complete(plan.protocol.k) for one in some)]
        for who in plan.policies:
            if who not in left:
                drawn.groups[who] = {}
                for one in asked[who]:
                    name, problems = one.task.request.task, one.task.request.asked if processes.main else ()
                    groups = [[one.done[name, asked.problem, i] for i in range(plan.protocol.k)] for asked in problems]
                    drawn.groups[who][name] = groups
                    if processes.main and not plan.within_run:
                        _say_scored(plan, one, groups, 0.0)
        if left:
            _draw_left(plan, policies, {who: asked[who] for who in left}, drawn, processes)
        drawn.groups = {who: drawn.groups[who] for who in plan.policies}
        for request in (task.request for task in plan.tasks if task.request.judged and processes.main):
            groups = [group for who in plan.policies for group in drawn.groups[who][request.task]]
            check_judged(request.scorer, [sample for group in groups for sample in group], request.task)
    return drawn


def _draw_left(
    plan: Evaluation, policies: Policies, left: Mapping[Who, list[_Asked]], drawn: DrawnSamples, processes: Processes
) -> None:
    """Has each policy in turn draw what is missing of its samples."""
    name = f"perl-{secrets.token_hex(4)}"
    settings = EngineSettings(name, plan.folder / "sync", plan.longest, processes=processes)
    probe = plan.tasks[0].request.asked[0].prompt_ids
    temperature = plan.protocol.temperature or 1.0  # of greedy sampling engines report log-probabilities at 1
    batch_size = plan.settings.batch_size
    turns = in_turn(policies, list(left), plan.engine, settings, probe, batch_size, temperature)
    with closing(turns):
        for ready in turns:
            if ready.logp_diff is not None:
                drawn.logp_diff = max(ready.logp_diff, drawn.logp_diff or 0.0)
            found = drawn.groups.setdefault(ready.who, {})
            for asked in left[ready.who]:
                shared = share(processes, ready.engine.capabilities, batch_size, policies.base)
                found[asked.task.request.task] = _draw_task(plan, policies.tokenizer, ready, asked, shared)


def _asked(
    plan: Evaluation, drawn: DrawnSamples, who: Who, task: PreparedTask, file: SampleFile, processes: Processes
) -> _Asked:
    """A policy on a task, with what is kept; says how much that is."""
    name, key = task.request.task, drawn.keys[who][task.request.task]
    served = plan.engine.capabilities.needs_servers  # by versions and GPUs that nobody here knows
    shared = who == "base" and plan.settings.base_cache and not plan.within_run and not served
    cache = base_cache(key, plan.device.type, plan.subject.base.attn_implementation) if shared else None
    kept = SampleStore(f"{who} on {name}", key, file, cache)
    done = processes.by_main(lambda: kept.read(task.request, plan.protocol, plan.judging))
    wanted = task.request.places(plan.protocol.k)
    there = sum(place in done for place in wanted)
    if there and processes.main and not (plan.within_run and there == len(wanted)):
        logger.info("%s: %d of %d completions are there already", kept.name, there, len(wanted))
    return _Asked(task, kept, done)


def _draw_task(
    plan: Evaluation, tokenizer: PreTrainedTokenizerBase, ready: ReadyPolicy, asked: _Asked, shared: DrawSharing
) -> Groups:
    k, processes, (task, kept) = plan.protocol.k, shared.processes, (asked.task, asked.kept)
    places = task.request.places(k)
    there, started = sum(place in asked.done for place in places), time.monotonic()
    right: dict[str, list[bool]] = defaultdict(list)  # by problem
    for done in asked.done.values():
        right[done.problem].append(done.right)
    what = f"{'scoring the' if task.request.judged else 'drawing from the'} {kept.name}"
    with progress(len(places), what, there) if processes.main else nullcontext() as line:
        if line is not None:
            line.note = lambda: _so_far(right if task.request.judged else {}, ready.engine)

        def keep(sample: Sample) -> None:
            kept.append(sample)
            right[sample.problem].append(sample.right)
            if line is not None:
                line.update(1)

        groups = draw(ready.engine, tokenizer, task.request, plan.protocol, asked.done, keep, plan.judging, shared)
    if not processes.main:
        return groups
    if there < len(places) or not plan.within_run:
        _say_scored(plan, asked, groups, time.monotonic() - started, str(shared))
    return groups


def _say_scored(plan: Evaluation, asked: _Asked, groups: Groups, seconds: float, by: str = "") -> None:
    """A policy's score on a task, or how many completions there are to be judged."""
    found = f"{sum(map(len, groups)):,} completions"
    if asked.task.request.judged:
        score = score_samples(groups, scorer=asked.task.request.scorer.name)
        found = f"avg@{plan.protocol.k} {score.average_estimate}"
    logger.info("%s: %s, in %s%s", asked.kept.name, found, duration(seconds), by)


def _so_far(right: Mapping[str, Sequence[bool]], engine: Engine) -> str:
    """``so far 61.2 ± 3.1``, in percent, with the error clustered by problem, and where the engine is."""
    shares = [statistics.fmean(row) for row in list(right.values())]
    score = f"so far {percent(statistics.fmean(shares))} ± {percent(error_of_mean(shares))}" if len(shares) > 1 else ""
    return ", ".join(filter(None, (score, within_batch(engine))))


def key_of(plan: Evaluation, policies: Policies, who: Who, task: PreparedTask) -> str:
    """Names a policy and the way it was asked: whatever a completion depends on, and no path."""
    request, trained = task.request, None if who == "base" else policies.trained
    facts = {
        "policy": plan.subject.policy(policies.base_sha256) if who == "adapter" else policy_name(policies.base_sha256),
        "architecture": model_config_digest(policies.base.config.to_json_string(use_diff=False)),
        "drawn": plan.protocol.drawn(),
        "seed": plan.protocol.seed,
        "max_new_tokens": request.max_new_tokens,
        "task": request.task,
        "prompts": prompts_hash(request),  # of the whole data, hence of tokenizer and template; no golds and no limit
        "stop": list(request.stop),
        "ends": list(request.end_token_ids),
        "template": plan.template,
        "engine": plan.engine.backend,
        "dtype": base_dtype(policies.base if trained is None or isinstance(trained, PeftModel) else trained),
        **({} if plan.settings.attention is None else {"attention": plan.settings.attention}),
    }
    return short_hash(facts)
