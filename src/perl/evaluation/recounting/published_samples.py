"""The samples that results stand on, as they are published: with verdicts, seeds and lengths, without their texts.

Results, samples.jsonl -> lines of eval/samples.jsonl -> KeptSamples

An answer too long to be published is named by a hash, so that maj@k can still be counted: where a problem's wrong
answers that mean the same hold such a one, all of them bear the same name. An untrusted file is read line by line,
every field checked.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ConfigDict, TypeAdapter, ValidationError

from perl.errors import PerlError
from perl.evaluation.recounting.recount import WHO, KeptSamples
from perl.evaluation.scoring.metrics import answer_classes
from perl.evaluation.scoring.results import SAMPLES, Results
from perl.evaluation.scoring.samples import Sample, SampleFile
from perl.evaluation.scoring.score import HASHED, same_meaning
from perl.types import VerdictStatus

PUBLISHED = f"eval/{SAMPLES}"
LONGEST_ANSWER = 200
"""Characters; longer answers are published as a hash."""
LARGEST = 50_000_000
"""Bytes of a published file that are read."""


@dataclass(frozen=True)
class _PublishedLine:
    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    policy: str
    task: str
    problem: str
    index: int
    seed: int
    tokens: int
    truncated: bool
    status: VerdictStatus
    extracted: str | None


_LINE = TypeAdapter(_PublishedLine)


def published_samples(results: Results, file: Path) -> bytes | None:
    """The lines that results stand on, in their order, without texts; None: some are missing, or they are too many.

    Args:
        results: Name the policies and problems.
        file: ``samples.jsonl`` of the evaluation.
    """
    wanted = {task.samples[who] for task in results.tasks for who in WHO if who in task.samples}
    found: dict[tuple[str, str], dict[tuple[str, int], Sample]] = {}
    for policy, sample in SampleFile(file).lines():
        if policy in wanted:
            found.setdefault((policy, sample.task), {})[sample.problem, sample.index] = sample
    lines: list[str] = []
    for task in results.tasks:
        for who in WHO:
            if getattr(task, who) is None:
                continue
            policy = task.samples.get(who, "")
            there = found.get((policy, task.name), {})
            for problem in task.problems:
                places = [(problem.id, index) for index in range(results.protocol.k)]
                if any(place not in there for place in places):
                    return None
                lines += _lines(policy, [there[place] for place in places], task.scorer)
    content = "".join(lines).encode(errors="backslashreplace")  # half a surrogate pair stays an escape of JSON
    return content if len(content) <= LARGEST else None


def read_published(content: bytes, where: str) -> KeptSamples:
    """Samples that somebody published.

    Args:
        content: Of the file, which may hold anything.
        where: Names it in an error.

    Raises:
        PerlError: A line is not a sample.
    """
    lines = []
    for number, line in enumerate(content.splitlines(), 1):
        try:
            one = _LINE.validate_json(line)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            field = ".".join(map(str, first["loc"]))
            reason = f"{field}: {first['msg']}" if field else first["msg"]
            raise PerlError(f"is not a sample: {reason[:200]}", f"{where}:{number}") from None
        facts = {name: fact for name, fact in vars(one).items() if name != "policy"}
        lines.append((one.policy, Sample(text="", **facts)))
    return KeptSamples(lines, texts=False, exact=True)


def _lines(policy: str, samples: Sequence[Sample], scorer: str) -> list[str]:
    """The lines of one problem."""
    names = _names([one.extracted for one in samples if one.extracted is not None and not one.right], scorer)
    facts = [{"policy": policy, **vars(sample), "extracted": _public(sample, names)} for sample in samples]
    public = ({name: fact for name, fact in one.items() if name != "text"} for one in facts)
    return [json.dumps(one, ensure_ascii=False) + "\n" for one in public]


def _names(answers: Sequence[str], scorer: str) -> Mapping[str, str]:
    """What a problem's wrong answers are published as."""
    if all(len(answer) <= LONGEST_ANSWER for answer in answers):
        return {answer: answer for answer in answers}
    names: dict[str, str] = {}
    by_text: dict[str, list[str]] = {}
    for answer in answers:
        by_text.setdefault(" ".join(answer.split()), []).append(answer)
    for texts in answer_classes(list(by_text), same_meaning([list(by_text)], scorer=scorer)):
        members = [answer for text in texts for answer in by_text[text]]
        one_name = _short(min(texts, key=len)) if any(len(a) > LONGEST_ANSWER for a in members) else None
        names |= {answer: one_name or answer for answer in members}
    return names


def _public(sample: Sample, names: Mapping[str, str]) -> str | None:
    answer = sample.extracted
    return answer if answer is None else _short(answer) if sample.right else names[answer]


def _short(answer: str) -> str:
    if len(answer) <= LONGEST_ANSWER:
        return answer
    return HASHED + hashlib.sha256(answer.encode()).hexdigest()
