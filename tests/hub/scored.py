"""Scores of an adapter on problems of the sandbox, with the samples that they stand on, without a model.

which completions are right, as ``"1100"`` a problem -> FOLDER/results.json, FOLDER/samples.jsonl
"""

import functools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from perl.evaluation.recounting.files import published_samples
from perl.evaluation.recounting.recount import with_figures
from perl.evaluation.scoring.protocol import Protocol
from perl.evaluation.scoring.results import HELD_OUT, RESULTS, SAMPLES, Results, TaskResult, read_results
from perl.evaluation.scoring.samples import Sample, SampleFile
from perl.evaluation.scoring.task import TaskData, all_tasks
from perl.evaluation.tasks.task_data import load_task_data
from perl.rewards.verifier import check_all

TASK = "sandbox:addition"
LONGEST = 16


@functools.cache
def problems(count: int) -> TaskData:
    """The first of the sandbox's held-out additions."""
    return load_task_data(all_tasks()[TASK], None, count)


@functools.cache
def _verdicts(count: int) -> dict[tuple[str, bool], tuple[str, str, str]]:
    """Problem, right or not -> a text, and what the verifier says of it."""
    asked = [(q.id, q.gold, right) for q in problems(count).questions for right in (True, False)]
    texts = [f"\\boxed{{{gold if right else int(gold) + 1}}}" for _, gold, right in asked]
    verdicts = check_all([gold for _, gold, _ in asked], texts)
    return {
        (name, right): (text, verdict.status, verdict.extracted)
        for (name, _, right), text, verdict in zip(asked, texts, verdicts, strict=True)
    }


def marked(marks: Sequence[str], protocol: Protocol, tokens: int) -> list[list[Sample]]:
    """Samples of each problem that are right where the marks say so."""
    known, questions = _verdicts(len(marks)), problems(len(marks)).questions
    rows = []
    for question, row in zip(questions, marks, strict=True):
        samples = []
        for index, mark in enumerate(row):
            text, status, extracted = known[question.id, mark == "1"]
            seed = protocol.seed_of(TASK, question.id, index)
            samples.append(Sample(TASK, question.id, index, seed, text, tokens, False, status, extracted))
        rows.append(samples)
    return rows


def write_scored(folder: Path, made: Results, base: Sequence[str], adapter: Sequence[str]) -> Results:
    """Writes scores on a run's own held-out problems, under the subject, protocol and engine of others.

    Args:
        folder: Where to.
        made: Whose, how.
        base: Which completions of the base are right.
        adapter: Likewise of the adapter.
    """
    data, protocol = problems(len(base)), made.protocol
    facts = {"task": TASK, "task_version": 1, "prompt": "{problem}", "data": data.sha256, "max_new_tokens": LONGEST}
    keys = {"base": "b" * 16, "adapter": "a" * 16}
    task = TaskResult(
        name=TASK,
        title=TASK + HELD_OUT,
        protocol_hash=protocol.hash(facts),
        max_new_tokens=LONGEST,
        data={"source": TASK, "revision": None, "sha256": data.sha256},
        base=None,
        adapter=None,
        difference=None,
        problems=(),
        samples=keys,
    )
    groups = {"base": marked(base, protocol, 10), "adapter": marked(adapter, protocol, 12)}
    found = replace(made, tasks=(with_figures(task, groups),))
    folder.mkdir(parents=True, exist_ok=True)
    found.write(folder)
    (folder / SAMPLES).unlink(missing_ok=True)
    for who, rows in groups.items():
        SampleFile(folder / SAMPLES).append(keys[who], [sample for row in rows for sample in row])
    return found


def forge_all_right(files: dict[str, bytes]) -> None:
    """Published results and samples by which the adapter answers everything right, in agreement with each other."""
    with TemporaryDirectory() as folder:
        place = Path(folder)
        (place / RESULTS).write_bytes(files["eval/results.json"])
        found = read_results(place)
        base = ["".join("1" if right else "0" for right in problem.base or ()) for problem in found.tasks[0].problems]
        forged = write_scored(place, found, base, ["1" * found.protocol.k] * len(base))
        files["eval/results.json"] = (place / RESULTS).read_bytes()
        files["eval/samples.jsonl"] = published_samples(forged, place / SAMPLES) or b""
