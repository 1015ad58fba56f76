"""Evaluations made by hand: which completions are right is written as ``"110"``, a text a problem."""

import hashlib
from collections.abc import Sequence
from dataclasses import replace

from perl.evaluation.scoring.metrics import paired_difference
from perl.evaluation.scoring.protocol import Protocol
from perl.evaluation.scoring.results import ProblemResult, Results, TaskResult
from perl.evaluation.scoring.samples import Sample
from perl.evaluation.scoring.score import score_samples
from perl.policy.name import policy_name

SHA = "0123456789abcdef" * 4


def rows(texts: Sequence[str]) -> list[tuple[bool, ...]]:
    return [tuple(mark == "1" for mark in text) for text in texts]


def samples(texts: Sequence[str], task: str = "sums", tokens: int = 10) -> list[list[Sample]]:
    """Right ones answer 1, wrong ones 2."""
    return [
        [
            Sample(task, str(problem), i, i, "", tokens, False, "right" if right else "wrong", "1" if right else "2")
            for i, right in enumerate(row)
        ]
        for problem, row in enumerate(rows(texts))
    ]


def task_result(
    name: str = "sums", base: Sequence[str] | None = None, adapter: Sequence[str] | None = None, **changes
) -> TaskResult:
    """A task with scores and difference of these completions."""
    both = base is not None and adapter is not None
    count = len(adapter if adapter is not None else base)
    result = TaskResult(
        name=name,
        title=name.title(),
        protocol_hash=hashlib.sha256(name.encode()).hexdigest()[:16],
        max_new_tokens=512,
        data={"source": f"someone/{name}", "revision": "c0ffee" * 6 + "c0ff", "sha256": SHA},
        base=None if base is None else score_samples(samples(base, name)),
        adapter=None if adapter is None else score_samples(samples(adapter, name, tokens=1234)),
        difference=paired_difference(rows(base), rows(adapter)) if both else None,
        problems=tuple(
            ProblemResult(
                str(i), None if base is None else rows(base)[i], None if adapter is None else rows(adapter)[i]
            )
            for i in range(count)
        ),
    )
    return replace(result, **changes)


def results(*tasks: TaskResult, protocol: Protocol | None = None, **subject: str | None) -> Results:
    """An evaluation of ``runs/lora`` on ``someone/base``."""
    known = {
        "name": "runs/lora",
        "base": "someone/base",
        "base_revision": "r1",
        "base_sha256": "b" * 64,
        "adapter_sha256": SHA,
        "adapter_config_sha256": "c" * 64,
        **subject,
    }
    if known["adapter_sha256"] is None:
        known["adapter_config_sha256"] = None
    if "policy" not in subject:
        known["policy"] = policy_name(*(known[f"{of}_sha256"] for of in ("base", "adapter", "adapter_config")))
    protocol = protocol or Protocol(preset="perl", temperature=0.6, top_p=0.95, max_new_tokens=512, k=4)
    engine = {"backend": "vllm", "version": "1.2", "dtype": "bfloat16", "device": "cpu", "logp_diff": 0.00123}
    return Results(known, protocol, engine, {"torch": "2.13.0"}, 12.0, tasks, verifier="1 (by hand)")
