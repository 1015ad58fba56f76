"""What an evaluation found: every figure counted from its samples, and the files of its folder.

Evaluation, Policies, DrawnSamples -> Results -> results.json, table.md, problems.png
"""

import importlib.util
import json
import os
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from perl.errors import MissingExtraError, PerlError, warn
from perl.evaluation.drawing.drawn_samples import DrawnSamples, Groups
from perl.evaluation.drawing.policies import Policies, Who
from perl.evaluation.drawing.request import Evaluation
from perl.evaluation.recounting.recount import with_figures
from perl.evaluation.scoring import table
from perl.evaluation.scoring.figure import draw_problems
from perl.evaluation.scoring.found_results import beside_earlier
from perl.evaluation.scoring.metrics import error_of_mean
from perl.evaluation.scoring.results import SAMPLES, TABLE, OtherScore, ProblemResult, Results, TaskResult
from perl.evaluation.scoring.samples import Place, SampleFile
from perl.evaluation.scoring.score import rights
from perl.evaluation.scoring.task import TaskData, shown_hash, titled
from perl.evaluation.tasks.questions import PreparedTask
from perl.policy.fingerprint import base_dtype
from perl.policy.model import base_identity, base_of, public_name
from perl.policy.quantised import quantisation_of
from perl.rewards.verifier import verifier_version
from perl.run.files import write_text
from perl.run.folder import installed_versions

# Packages that a score depends on, beside those of a run.
_PACKAGES = ("math-verify", "vllm", "lighteval")


def write_found(plan: Evaluation, policies: Policies, drawn: DrawnSamples, seconds: float) -> Results:
    """What came of an evaluation, in its folder; tasks have no score where completions are judged later.

    Args:
        plan: What was asked.
        policies: Whom.
        drawn: On the main process.
        seconds: Wall time.
    """
    data = [task.data for task in plan.tasks]
    by_task = {one.task.name: {who: groups[one.task.name] for who, groups in drawn.groups.items()} for one in data}
    wanted = plan.settings.lighteval and not plan.settings.predict_only
    own = scored_by_lighteval(data, by_task) if wanted else {}
    base, revision = public_name(*base_identity(policies.base))
    quantization = quantisation_of(base_of(policies.base))
    attention = plan.subject.base.attn_implementation
    results = Results(
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
            **plan.asking,
        },
        protocol=plan.protocol,
        engine={
            "backend": plan.engine.backend,
            "dtype": base_dtype(policies.base),
            "device": plan.device.type,
            "logp_diff": drawn.logp_diff,
            **({} if attention is None else {"attention": attention}),
        },
        versions=installed_versions(_PACKAGES, quantization=quantization),
        seconds=seconds,
        tasks=tuple(_task_result(plan, task, drawn, own) for task in plan.tasks),
        verifier=verifier_version(),
    )
    places = [place for task in plan.tasks for place in task.request.places(plan.protocol.k)]
    return write_results(results, plan.folder, places)


def write_results(results: Results, folder: Path, places: Sequence[Place]) -> Results:
    """Puts results into a folder, beside those of other tasks that belong to them; others are set aside.

    Args:
        results: Counted.
        folder: Has their samples.
        places: Of these samples, in order.

    Returns:
        All that the folder's file holds now.
    """
    keys = list(dict.fromkeys(key for task in results.tasks for key in task.samples.values()))
    results = beside_earlier(results, folder)
    results.write(folder)
    SampleFile(folder / SAMPLES).put_first(keys, places)
    scored = replace(results, tasks=tuple(task for task in results.tasks if task.is_scored))
    if scored.tasks:
        write_text(folder / TABLE, table.markdown(scored))
        try:
            draw_problems(scored, folder)
        except MissingExtraError as error:
            warn("PRL306", "%s", error)
    return results


def _task_result(
    plan: Evaluation, task: PreparedTask, drawn: DrawnSamples, own: Mapping[str, Mapping[Who, OtherScore]]
) -> TaskResult:
    name = task.request.task
    facts = TaskResult(
        name=name,
        title=titled(task.data.task.title, len(task.data.examples)),
        protocol_hash=task.protocol_hash,
        max_new_tokens=task.request.max_new_tokens,
        data={"source": task.data.source, "revision": task.data.revision, "sha256": task.data.sha256},
        lighteval=own.get(name, {}),
        samples={who: keys[name] for who, keys in drawn.keys.items()},
        scorer=task.request.scorer.label,
        few_shot=len(task.data.examples),
        examples=shown_hash(task.data.examples),
    )
    if plan.settings.predict_only:
        return replace(facts, problems=tuple(ProblemResult(asked.problem, None, None) for asked in task.request.asked))
    return with_figures(facts, {who: groups[name] for who, groups in drawn.groups.items()}, plan.settings.pass_at)


def scored_by_lighteval(
    data: Sequence[TaskData], groups: Mapping[str, Mapping[Who, Groups]]
) -> dict[str, dict[Who, OtherScore]]:
    """Lighteval's own scores of completions, where it is installed; of tasks that bear its name.

    Args:
        data: The tasks' questions.
        groups: Task -> policy -> the samples of each problem, judged by us.
    """
    data = [one for one in data if one.task.lighteval is not None]
    if not data or not lighteval_installed():
        return {}
    texts = {}
    for one in data:  # of each problem the completions of all policies, one after the other
        every = zip(*groups[one.task.name].values(), strict=True)
        texts[one.task.name] = [[sample.text for row in rows for sample in row] for rows in every]
    try:
        verdicts = judge_with_lighteval(data, texts)
    except PerlError as error:
        warn("PRL307", "%s; our own score stands", error)
        return {}
    found: dict[str, dict[Who, OtherScore]] = {}
    for name, rows in verdicts.items():
        start, found[name] = 0, {}
        for who, of in groups[name].items():
            end = start + len(of[0])
            ours, theirs = rights(of), [row[start:end] for row in rows]
            shares = [statistics.fmean(row) for row in theirs]
            stderr = error_of_mean(shares) if len(shares) > 1 else None
            # Our verdict and lighteval's -> how many completions got these.
            both = zip(ours, theirs, strict=True)
            pairs = Counter(pair for one, two in both for pair in zip(one, two, strict=True))
            found[name][who] = OtherScore(statistics.fmean(shares), stderr, pairs[True, False], pairs[False, True])
            start = end
    return found


def lighteval_installed() -> bool:
    """Whether lighteval can be found; imports nothing."""
    return importlib.util.find_spec("lighteval") is not None


def judge_with_lighteval(
    data: Sequence[TaskData], texts: Mapping[str, Sequence[Sequence[str]]]
) -> dict[str, list[list[bool]]]:
    """Has lighteval judge completions of its own tasks, with its prompts, golds and metrics; asks no network.

    It sees them without their reasoning. Unlike us it leaves reasoning that was never closed, or never opened because
    the prompt opened it.

    Args:
        data: The tasks, each one of lighteval's, and the questions that were asked.
        texts: Task -> question -> completion, questions in the order of ``data``.

    Returns:
        Task -> question -> whether each completion is right.

    Raises:
        PerlError: lighteval failed.
    """
    asked = {}
    for one in data:
        columns = {*one.task.problem, *one.task.answer, "solution"}  # others may hold what JSON cannot
        rows = [{name: cell for name, cell in question.row.items() if name in columns} for question in one.questions]
        asked[one.task.name] = (rows, texts[one.task.name])
    request = json.dumps(asked)
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join(str(Path(entry).absolute()) for entry in sys.path),
    }
    command = [sys.executable, "-P", "-m", "perl.evaluation.tasks.lighteval_process"]
    done = subprocess.run(command, input=request, env=environment, capture_output=True, text=True, check=False)  # noqa: S603 (ourselves)
    if done.returncode != 0:
        sys.stderr.write(done.stderr)
        last = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        raise PerlError(f"lighteval's process ended with {done.returncode}: {last}", "lighteval")
    found: dict[str, list[list[bool]]] = json.loads(done.stdout)
    return found
