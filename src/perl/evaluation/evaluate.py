"""An adapter beside its base on benchmark tasks: the stages of ``perl eval``, called in order.

adapter, tasks, settings -> Results, and a folder: results.json, samples.jsonl, table.md, problems.png

Whatever is wrong with the request is found before weights are loaded; an evaluation that was stopped goes on.
"""

import hashlib
import json
import logging
import secrets
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch
from filelock import FileLock
from peft import PeftModel
from transformers import PreTrainedTokenizerBase

from perl.errors import EXIT_INTERRUPTED, InterruptedRunError, MissingExtraError, PerlError
from perl.evaluation import table
from perl.evaluation.draw import draw
from perl.evaluation.earlier import set_aside
from perl.evaluation.figure import draw_problems
from perl.evaluation.lighteval.score import LightevalError, lighteval_installed, score_with_lighteval
from perl.evaluation.policies import Policies, Who, in_turn, load_policies
from perl.evaluation.protocol import short_hash
from perl.evaluation.questions import PreparedTask
from perl.evaluation.recounting.recount import with_figures
from perl.evaluation.request import EvalSettings, Evaluation, naming_options, plan_evaluation
from perl.evaluation.results import SAMPLES, TABLE, OtherScore, Results, TaskResult, read_results
from perl.evaluation.samples import Place, Sample, SampleFile
from perl.evaluation.score import rights, score_samples
from perl.evaluation.several import arguments_of, check_same, sharing, start_several, to_start, usable
from perl.evaluation.sharing import Sharing, share
from perl.evaluation.stored import StoredSamples, stored_samples
from perl.policy.model import base_dtype, base_identity, base_of, public_name
from perl.policy.name import model_config_digest, policy_name
from perl.policy.quantised import quantisation_of
from perl.rewards.verifier import verifier_version
from perl.rollouts.engine import Engine
from perl.rollouts.open_engine import EngineSettings
from perl.run.files import write_text
from perl.run.folder import installed_versions
from perl.run.joint_work import Processes
from perl.run.progress import duration, progress
from perl.run.threads import threads_kept, use_threads
from perl.run.warned import warn

logger = logging.getLogger("perl")

DEFAULT_TASKS = ("aime24", "aime25", "math_500")
# Packages that a score depends on, beside those of a run.
_PACKAGES = ("math-verify", "vllm", "lighteval")

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


def evaluate(
    adapter: str | Path | None = None,
    base: str | Path | None = None,
    tasks: Sequence[str] = DEFAULT_TASKS,
    k: int | None = None,
    data: str | Path | None = None,
    output: str | Path | None = None,
    settings: EvalSettings | None = None,
    processes: int | None = None,
) -> Results:
    """Scores an adapter on benchmark tasks, and its base beside it under the same protocol.

    Args:
        adapter: A run folder, a checkpoint or an adapter's folder, or a Hub id with an optional ``@revision``; None:
            the base alone.
        base: Hub id with an optional ``@revision``, or folder; None: the one that the adapter names.
        tasks: Names from ``perl eval --list-tasks``.
        k: Completions a problem; None: the preset's.
        data: Folder with the tasks' data as JSON lines; None: the Hub.
        output: Folder for the results, in which an evaluation that was stopped goes on and other tasks are added; None:
            ``RUN/evals/PRESET`` for a run, else ``evals/NAME/PRESET``.
        settings: Everything else.
        processes: So many of this machine, one a GPU, share the completions; they are started here, unless a launcher
            has started this process as one of them, all of which then call this. None: this process does it alone.

    Raises:
        PerlError: The request cannot be done; nothing was started.
        RolloutError: No server answers any more; when one does, the same call goes on.
        BrokenPromiseError: The engine does not answer like the policy.
    """
    trained, on = (None if name is None else str(name) for name in (adapter, base))
    settings = settings or EvalSettings()
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):  # an adapter draws before it is filled
        plan = plan_evaluation(trained, on, tasks, k, data, output, settings)
        if processes is None:
            return carry_out(plan)
        count = to_start(processes)
        if not count:
            with sharing(plan) as together:
                return carry_out(plan, processes=together)
    code = start_several(plan, arguments_of(trained, on, tasks, k, data, plan.folder, settings), count)
    if code == EXIT_INTERRUPTED:
        raise InterruptedRunError("stopped", str(plan.folder), "the same call goes on")
    if code:
        raise PerlError("the processes that were started say what is wrong", str(plan.folder))
    return read_results(plan.folder)


def carry_out(plan: Evaluation, policies: Policies | None = None, processes: Processes | None = None) -> Results:
    """Does what was planned.

    Args:
        plan: From :func:`perl.evaluation.request.plan_evaluation`, or a run's.
        policies: Base and trained policy, where they are in memory already; None: they are loaded.
        processes: That share the work, all of which call this at once with the same plan; None: this one does it alone.

    Returns:
        What was written into ``plan.folder``.

    Raises:
        PerlError: As :func:`evaluate`.
    """
    started, processes = time.monotonic(), processes or Processes()
    with processes.failing_together(), _locked(plan.folder, processes), threads_kept():
        if plan.threads is not None:
            use_threads(plan.threads)
        for line in plan.lines() if processes.main and not plan.within_run else ():
            logger.info("%s", line)
        if policies is None:
            with naming_options():
                policies = load_policies(plan.subject, plan.device)
        samples = SampleFile(plan.folder / SAMPLES)
        broken = samples.unreadable() if processes.main else 0
        if broken:
            warn("PRL303", "%s: %d malformed lines are left out", samples.path, broken)
        drawn = draw_samples(plan, policies, processes)
        return processes.by_main(lambda: _written(plan, policies, drawn, time.monotonic() - started))


def _written(plan: Evaluation, policies: Policies, drawn: DrawnSamples, seconds: float) -> Results:
    """What came of it, and the files of the folder."""
    results = _results(plan, policies, drawn, seconds)
    set_aside(results, plan.folder)
    results = results.with_earlier(plan.folder)
    results.write(plan.folder)
    write_text(plan.folder / TABLE, table.markdown(results))
    places = [place for task in plan.tasks for place in task.request.places(plan.protocol.k)]
    keys = [key for who in drawn.keys.values() for key in who.values()]
    SampleFile(plan.folder / SAMPLES).put_first(keys, places)
    try:
        draw_problems(results, plan.folder)
    except MissingExtraError as error:
        warn("PRL306", "%s", error)
    return results


@contextmanager
def _locked(folder: Path, processes: Processes) -> Iterator[None]:
    """The folder, made and held by the main process alone."""
    if not processes.main:
        processes.meet()
        yield
        return
    lock = FileLock(folder / ".lock", timeout=0)
    with usable(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    try:
        processes.meet()
        yield
    finally:
        lock.release()


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
    """
    drawn, file, processes = DrawnSamples(), SampleFile(plan.folder / SAMPLES), processes or Processes()
    if processes.main:
        plan.folder.mkdir(parents=True, exist_ok=True)
    alone = processes.count == 1
    settings = EngineSettings(f"perl-{secrets.token_hex(4)}", plan.folder / "sync", plan.longest, alone=alone)
    probe = plan.tasks[0].request.asked[0].prompt_ids
    temperature = plan.protocol.temperature or 1.0  # of greedy sampling engines report log-probabilities at 1
    batch_size = plan.settings.batch_size
    turns = in_turn(policies, plan.policies, plan.engine, settings, probe, batch_size, temperature, processes)
    with processes.failing_together(), closing(turns):
        drawn.keys = {
            who: {task.request.task: _key(plan, policies, who, task) for task in plan.tasks} for who in plan.policies
        }
        check_same(processes, {"base_sha256": policies.base_sha256, "samples": drawn.keys})
        for ready in turns:
            if ready.logp_diff is not None:
                drawn.logp_diff = max(ready.logp_diff, drawn.logp_diff or 0.0)
            found = drawn.groups.setdefault(ready.who, {})
            for task in plan.tasks:
                key = drawn.keys[ready.who][task.request.task]
                shared = share(processes, ready.engine.capabilities, batch_size, policies.base)
                kept = _KeptSamples(file, key, f"{ready.who} on {task.request.task}")
                found[task.request.task] = _draw_task(plan, policies.tokenizer, ready.engine, task, kept, shared)
    return drawn


@dataclass(frozen=True)
class _KeptSamples:
    """Where a policy's samples on a task are kept, and how they are called in a log."""

    file: SampleFile
    key: str
    name: str

    def read(self, plan: Evaluation, task: PreparedTask) -> Mapping[Place, Sample]:
        """Those that are there, corrected where that is due."""
        stored = stored_samples(self.file.read(self.key), task.request, plan.protocol, plan.judging)
        if stored.dropped or stored.judged_otherwise:
            self.file.correct(self.key, stored.samples, stored.dropped)
            _say_corrected(self.name, stored)
        return stored.samples


def _draw_task(
    plan: Evaluation,
    tokenizer: PreTrainedTokenizerBase,
    engine: Engine,
    task: PreparedTask,
    kept: _KeptSamples,
    shared: Sharing,
) -> Groups:
    k, processes = plan.protocol.k, shared.processes
    done = processes.by_main(lambda: kept.read(plan, task))
    wanted, started = len(task.request.places(k)), time.monotonic()
    said_before = not processes.main or (plan.within_run and len(done) == wanted)
    if done and not said_before:
        logger.info("%s: %d of %d completions are there already", kept.name, len(done), wanted)
    with progress(wanted, f"scoring the {kept.name}", len(done)) if processes.main else nullcontext() as line:

        def keep(sample: Sample) -> None:
            kept.file.append(kept.key, [sample])
            if line is not None:
                line.update(1)

        groups = draw(engine, tokenizer, task.request, plan.protocol, done, keep, plan.judging, shared)
    if said_before:
        return groups
    score, seconds = score_samples(groups), duration(time.monotonic() - started)
    logger.info("%s: avg@%d %s, in %s%s", kept.name, k, table.score_cell(score), seconds, shared)
    return groups


def _say_corrected(what: str, stored: StoredSamples) -> None:
    if stored.dropped:
        why = "another seed, a length that cannot be, an unknown problem"
        line = "%s: not drawn by this evaluation (%s), hence dropped: %d stored completions"
        warn("PRL305", line, what, why, len(stored.dropped))
    if stored.judged_otherwise:
        line = "%s: judged again, %d of %d stored verdicts are others now"
        warn("PRL305", line, what, stored.judged_otherwise, len(stored.samples))


def _key(plan: Evaluation, policies: Policies, who: Who, task: PreparedTask) -> str:
    """Names a policy and the way it was asked: whatever a completion depends on, and no path."""
    request = task.request
    prompts = json.dumps([(asked.problem, asked.prompt_ids) for asked in request.asked])
    facts = {
        "policy": plan.subject.policy(policies.base_sha256) if who == "adapter" else policy_name(policies.base_sha256),
        "architecture": model_config_digest(policies.base.config.to_json_string(use_diff=False)),
        "drawn": plan.protocol.drawn(),
        "seed": plan.protocol.seed,
        "max_new_tokens": request.max_new_tokens,
        "task": request.task,
        "data": task.data.sha256,
        "prompts": hashlib.sha256(prompts.encode()).hexdigest(),  # tokenizer and template, with its arguments
        "stop": list(request.stop),
        "ends": list(request.end_token_ids),
        "template": plan.template,
        "engine": plan.engine.backend,
        "dtype": _dtype(policies, who),
    }
    return short_hash(facts)


def _dtype(policies: Policies, who: Who) -> str:
    """Of the policy's weights; of an adapter those of its base."""
    trained = policies.trained
    alone = who == "base" or trained is None or isinstance(trained, PeftModel)
    return base_dtype(policies.base if alone or trained is None else trained)


def _results(plan: Evaluation, policies: Policies, drawn: DrawnSamples, seconds: float) -> Results:
    own = {who: _by_lighteval(plan, groups) for who, groups in drawn.groups.items()}
    base, revision = public_name(*base_identity(policies.base))
    quantization = quantisation_of(base_of(policies.base))
    return Results(
        subject={
            "name": plan.subject.name,
            "base": base,
            "base_revision": revision,
            "base_sha256": policies.base_sha256,
            **({"base_quantization": quantization} if quantization is not None else {}),
            "adapter_sha256": plan.subject.adapter_sha256,
            "adapter_config_sha256": plan.subject.config_sha256,
            "policy": plan.subject.policy(policies.base_sha256),
            "chat_template": plan.template,
        },
        protocol=plan.protocol,
        engine={
            "backend": plan.engine.backend,
            "dtype": base_dtype(policies.base),
            "device": plan.device.type,
            "logp_diff": drawn.logp_diff,
        },
        versions=installed_versions(_PACKAGES, quantised=quantization is not None),
        seconds=seconds,
        tasks=tuple(_task_result(plan, task, drawn, own) for task in plan.tasks),
        verifier=verifier_version(),
    )


def _task_result(
    plan: Evaluation,
    task: PreparedTask,
    drawn: DrawnSamples,
    own: Mapping[Who, Mapping[str, OtherScore]],
) -> TaskResult:
    name = task.request.task
    facts = TaskResult(
        name=name,
        title=task.data.task.title,
        protocol_hash=task.protocol_hash,
        max_new_tokens=task.request.max_new_tokens,
        data={"source": task.data.source, "revision": task.data.revision, "sha256": task.data.sha256},
        lighteval={who: scored[name] for who, scored in own.items() if name in scored},
        samples={who: keys[name] for who, keys in drawn.keys.items()},
    )
    return with_figures(facts, {who: groups[name] for who, groups in drawn.groups.items()}, plan.settings.pass_at)


def _by_lighteval(plan: Evaluation, groups: Mapping[str, Groups]) -> dict[str, OtherScore]:
    """Lighteval's own score of the same completions, where it is wanted and installed."""
    if not plan.settings.lighteval or not lighteval_installed():
        return {}
    data = [task.data for task in plan.tasks if task.data.task.file]  # a run's own problems are not a task of lighteval
    texts = {one.task.name: [[sample.text for sample in samples] for samples in groups[one.task.name]] for one in data}
    try:
        scores = score_with_lighteval(data, texts, plan.subject.name) if data else {}
    except LightevalError as error:
        warn("PRL307", "%s; our own score stands", error)
        return {}
    found = {}
    for name, score in scores.items():
        rows = zip(rights(groups[name]), score.right, strict=True)
        # Our verdict and lighteval's -> how many completions got these.
        pairs = Counter(pair for ours, theirs in rows for pair in zip(ours, theirs, strict=True))
        config = score.results["config_tasks"][f"{name}|0"]
        found[name] = OtherScore(score.metrics, pairs[True, False], pairs[False, True], config)
    return found
