"""Scores of an evaluation counted from the lines of its ``samples.jsonl`` alone.

Results, folder -> the same avg@k and pass@k, by ``math.comb``
"""

import json
import math
from pathlib import Path

import pytest

from perl.evaluation.scoring.results import Results


def check_scores(results: Results, folder: str | Path) -> Results:
    """Compares every score of every policy with the verdicts of its samples; tasks without a score are left out."""
    lines = [json.loads(line) for line in Path(folder, "samples.jsonl").read_text().splitlines()]
    k = results.protocol.k
    for task in results.tasks:
        for who, key in task.samples.items():
            score = getattr(task, who)
            if score is None:
                continue
            right = dict.fromkeys((problem.id for problem in task.problems), 0)
            for line in lines:
                if (
                    (line["policy"], line["task"]) == (key, task.name)
                    and line["problem"] in right
                    and line["index"] < k
                ):
                    right[line["problem"]] += line["status"] == "right"
            assert score.accuracy == pytest.approx(sum(right.values()) / (k * len(right)))
            for few, found in score.pass_at.items():
                missed = [math.comb(k - count, few) / math.comb(k, few) for count in right.values()]
                assert found == pytest.approx(1 - sum(missed) / len(missed))
    return results
