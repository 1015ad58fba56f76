"""Edits to ``results.json`` and ``samples.jsonl`` by which somebody may make a score look better than it is.

name -> edit(folder) -> whether counting again shows it, and by which words

The folder is an evaluation's: the two files of base and adapter on a sandbox task, four completions of a problem.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from perl.evaluation.recounting.files import published_samples, read_published
from perl.evaluation.recounting.recount import KeptSamples, recount
from perl.evaluation.scoring.protocol import Protocol
from perl.evaluation.scoring.results import read_results
from perl.evaluation.scoring.samples import SampleFile
from perl.evaluation.scoring.task import all_tasks

TASK = "sandbox:addition"

Edit = Callable[[Path], None]


@dataclass(frozen=True)
class Forgery:
    """One edit.

    Attributes:
        edit: Changes the files of a folder.
        said: What a line says of it, by a regular expression; None: it cannot be shown without drawing again.
        texts: Counting again needs the completions' texts to show it.
    """

    edit: Edit
    said: str | None
    texts: bool = False


def _results(edit: Callable[[dict[str, Any]], None]) -> Edit:
    """An edit of the parsed ``results.json``."""

    def change(folder: Path) -> None:
        file = folder / "results.json"
        facts = json.loads(file.read_text())
        edit(facts)
        file.write_text(json.dumps(facts))

    return change


def _task(edit: Callable[[dict[str, Any]], None]) -> Edit:
    return _results(lambda facts: edit(facts["perl"]["tasks"][TASK]))


def _samples(edit: Callable[[list[dict[str, Any]]], None]) -> Edit:
    """An edit of the lines of ``samples.jsonl``: the base's first, then the adapter's, problem by problem."""

    def change(folder: Path) -> None:
        file = folder / "samples.jsonl"
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        edit(lines)
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))

    return change


def _last_policy(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The adapter's lines, which stand after the base's."""
    return [line for line in lines if line["policy"] == lines[-1]["policy"]]


def _score(**changes: object) -> Edit:
    return _task(lambda task: task["adapter"].update(changes))


def _difference(**changes: object) -> Edit:
    return _task(lambda task: task["difference"].update(changes))


def whole_results_forged(folder: Path) -> None:
    """Every figure follows from bits that are all 1; the samples stay as they are."""
    file, results = folder / "samples.jsonl", read_results(folder)
    is_public = b'"text"' not in file.read_bytes()
    lines = read_published(file.read_bytes() if is_public else published_samples(results, file), "forged").lines
    right = {sample.problem: sample.extracted for _, sample in lines if sample.right}
    forged = [
        (key, replace(sample, status="right", extracted=right.get(sample.problem)) if key == lines[-1][0] else sample)
        for key, sample in lines
    ]
    recount(results, KeptSamples(forged, texts=False)).results.write(folder)


def results_and_statuses_forged(folder: Path) -> None:
    """The verdicts too, with the answers that go with them; the texts stay."""

    def edit(lines: list[dict[str, Any]]) -> None:
        right = {line["problem"]: line["extracted"] for line in lines if line["status"] == "right"}
        for line in _last_policy(lines):
            if line["problem"] in right:
                line.update(status="right", extracted=right[line["problem"]])

    _samples(edit)(folder)
    _written_again(folder)


def everything_forged(folder: Path) -> None:
    """Texts, verdicts and results say the same."""

    def edit(lines: list[dict[str, Any]]) -> None:
        right = {line["problem"]: line for line in lines if line["status"] == "right"}
        for line in _last_policy(lines):
            if line["problem"] in right:
                line.update({k: right[line["problem"]][k] for k in ("text", "status", "extracted", "tokens")})

    _samples(edit)(folder)
    _written_again(folder)


def fewer_tokens_everywhere(folder: Path) -> None:
    _samples(lambda lines: [line.update(tokens=max(1, line["tokens"] // 2)) for line in _last_policy(lines)])(folder)
    _written_again(folder)


def problems_left_out(folder: Path) -> None:
    """The adapter's worst problem is taken out of the results, and every figure counted without it."""

    def edit(task: dict[str, Any]) -> None:
        worst = min(task["problems"], key=lambda name: task["problems"][name]["adapter"].count("1"))
        del task["problems"][worst]
        for who in ("base", "adapter"):
            task[who]["n"] -= 1

    _task(edit)(folder)
    _written_again(folder)


def _rehashed(**changes: object) -> Edit:
    """Another scorer or SHA-256 of the data, and the protocol's hash that would go with it."""

    def edit(facts: dict[str, Any]) -> None:
        task, known = facts["perl"]["tasks"][TASK], all_tasks()[TASK]
        task["scorer"] = changes.get("scorer", task["scorer"])
        task["data"]["sha256"] = changes.get("data", task["data"]["sha256"])
        hashed = {"task": TASK, "task_version": known.version, "prompt": known.prompt, "data": task["data"]["sha256"]}
        hashed |= {"max_new_tokens": task["max_new_tokens"], **changes}
        task["protocol_hash"] = Protocol(**facts["perl"]["protocol"]).hash(hashed)

    return _results(edit)


def _written_again(folder: Path) -> None:
    """Every figure counted from the lines of the samples, as ``perl eval`` would."""
    kept = KeptSamples(list(SampleFile(folder / "samples.jsonl").lines()))
    recount(read_results(folder), kept).results.write(folder)


def _flip_status(lines: list[dict[str, Any]]) -> None:
    next(line for line in _last_policy(lines) if line["status"] == "wrong")["status"] = "right"


FORGERIES: dict[str, Forgery] = {
    "every bit 1 and every figure that follows": Forgery(whole_results_forged, "the adapter's rights differ on"),
    "accuracy": Forgery(_score(accuracy=0.99), "adapter.accuracy is 0.99 in the file"),
    "pass@k": Forgery(_task(lambda task: task["adapter"]["pass_at"].update({"2": 1.0})), r"adapter.pass_at.2 is 1 in"),
    "difference": Forgery(_difference(mean=0.526), "difference.mean is 0.526 in the file"),
    "p": Forgery(_difference(p_value=0.0001), "difference.p_value is 0.0001 in the file"),
    "n": Forgery(_score(n=500), "is not of 500 problems with 4 completions"),
    "k of the protocol": Forgery(_results(lambda f: f["perl"]["protocol"].update(k=3)), "its protocol_hash is"),
    "k without end": Forgery(_results(lambda f: f["perl"]["protocol"].update(k=10**9)), "1,000,000,000 completions"),
    "examples without end": Forgery(_task(lambda task: task.update(few_shot=10**9)), "few_shot: .*1000"),
    "temperature": Forgery(_results(lambda f: f["perl"]["protocol"].update(temperature=0.6)), "its protocol_hash is"),
    "protocol_hash": Forgery(_task(lambda task: task.update(protocol_hash="0" * 16)), "its protocol_hash is '0{16}'"),
    "seed": Forgery(_results(lambda f: f["perl"]["protocol"].update(seed=7)), "were not drawn with their own seed"),
    "title": Forgery(_task(lambda task: task.update(title="AIME 2024")), "its title is 'AIME 2024', the task's is"),
    "scorer and the hash": Forgery(_rehashed(scorer="normalised"), "its scorer is 'normalised', the task's is 'math'"),
    "SHA-256 of the data and the hash": Forgery(_rehashed(data="0" * 64), "its data is not the task's"),
    "a problem left out everywhere": Forgery(problems_left_out, "its data is not the task's"),
    "policy": Forgery(
        _results(lambda f: f["perl"]["subject"].update(policy="0" * 64)), "its policy is not the one that its digests"
    ),
    "a verdict": Forgery(_samples(_flip_status), "1 verdicts are not those of the texts", texts=True),
    "verdicts and results": Forgery(results_and_statuses_forged, "verdicts are not those of the texts", texts=True),
    "a sample's seed": Forgery(
        _samples(lambda lines: lines[-1].update(seed=1)), "1 samples were not drawn with their own seed"
    ),
    "a sample's length": Forgery(
        _samples(lambda lines: lines[-1].update(tokens=10**6)), "have another length than 0 to"
    ),
    "a sample twice": Forgery(_samples(lambda lines: lines.append(lines[-1])), "1 samples stand there more than once"),
    "samples missing": Forgery(_samples(lambda lines: lines.pop()), "1 samples are missing"),
    "the base's samples for the adapter's": Forgery(
        _task(lambda task: task["samples"].update(adapter=task["samples"]["base"])),
        "base and adapter name the same samples",
    ),
    "lengths, in samples and results": Forgery(fewer_tokens_everywhere, None),
    "texts, verdicts and results": Forgery(everything_forged, None),
}
"""Those without words are shown by ``perl zoo verify`` alone, which draws the completions again."""
