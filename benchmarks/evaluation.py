"""Whether the scores of ``perl eval`` are what they say, and what they cost.

Run as ``python benchmarks/evaluation.py --data DIR``, DIR with the public sets as JSON lines. Three parts, each
of which can be asked for alone:

* ``--counting``: the quickstart's base and adapter on its held-out problems. What a problem's chance of a right answer
  is comes from counting 64 completions of each; avg@16 of another seed is compared with that, and 200 evaluations drawn
  from the counted completions say how often the 95 % interval holds the true score;
* ``--scorers``: lighteval's own score and ours of the same completions, made by hand from the gold answers of AIME 2024
  and MATH-500: right, wrong, without a box, cut off, after reasoning; with what only one of the two calls right;
* ``--whole``: MATH-500, AIME 2024 and AIME 2025 with the sandbox's base (its context made longer, since it reads
  letters) in a process of its own, killed in the middle and started again: problems a second, memory, samples drawn
  twice.

Prints tables and writes ``results/evaluation.json``; parts that are not measured stay as they were.
"""

import argparse
import json
import os
import random
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", OMP_WAIT_POLICY="PASSIVE")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import perl
from perl.evaluation.lighteval.score import score_with_lighteval
from perl.evaluation.metrics import average_at_k, standard_error
from perl.evaluation.request import EvalSettings
from perl.evaluation.results import SAMPLES, ProblemResult, Results, read_results
from perl.evaluation.task import Question, TaskData, find_tasks
from perl.evaluation.task_data import load_task_data
from perl.rewards.verifier import check_all
from perl.run.folder import installed_versions
from perl.sandbox import BASE_FOLDER
from perl.zoo.intervals import interval

RESULTS = Path(__file__).parent / "results" / "evaluation.json"
TASK = "sandbox:addition"
COUNTED, K, SIMULATED, PROBLEMS = 64, 16, 200, 256
WHOLE, LONGEST, CONTEXT = ("math_500", "aime24", "aime25"), 64, 4096


def counting(folder: Path) -> dict[str, Any]:
    """avg@16 beside the share of right answers that counting gives, and how often its interval holds the truth."""
    run = perl.train("quickstart", ["eval.enabled=false"], folder / "run")
    counted = _evaluate(run.path, COUNTED, seed=1)
    drawn = _evaluate(run.path, K, seed=2)
    rows = {}
    print(f"{'':8} {'counted':>16} {'avg@16':>16} {'off by':>8} {'coverage of the 95 % interval':>30}")
    for who in ("base", "adapter"):
        pool = [_of(problem, who) for problem in counted.task(TASK).problems]
        found = [_of(problem, who) for problem in drawn.task(TASK).problems]
        shares, scores = [statistics.fmean(row) for row in pool], [statistics.fmean(row) for row in found]
        # The problems are the same, so only the completions differ.
        noise = sum(p * (1 - p) * (1 / K + 1 / COUNTED) for p in shares) ** 0.5 / len(shares)
        off = (statistics.fmean(scores) - statistics.fmean(shares)) / noise
        covered = coverage(pool)
        rows[who] = {
            "counted": statistics.fmean(shares),
            "counted_stderr": standard_error(pool),
            "avg@16": average_at_k(found),
            "avg@16_stderr": standard_error(found),
            "off_in_standard_errors": off,
            "coverage": covered,
        }
        row = rows[who]
        print(
            f"{who:8} {100 * row['counted']:>8.2f} ± {100 * row['counted_stderr']:.2f} "
            f"{100 * row['avg@16']:>9.2f} ± {100 * row['avg@16_stderr']:.2f} {off:>6.2f} s {100 * covered:>28.1f} %"
        )
    return {"problems": len(shares), "counted_completions": COUNTED, "simulated": SIMULATED, "policies": rows}


def coverage(pool: Sequence[Sequence[bool]]) -> float:
    """How often the interval of an evaluation of problems and completions drawn from a pool holds the pool's mean."""
    rng = random.Random(0)  # noqa: S311 (a simulation)
    truth, hits = average_at_k(pool), 0
    for _ in range(SIMULATED):
        problems = rng.choices(pool, k=PROBLEMS)
        right = [rng.choices(row, k=K) for row in problems]
        low, high = interval(average_at_k(right), standard_error(right), PROBLEMS)
        hits += low <= truth <= high
    return hits / SIMULATED


def _evaluate(run: Path, k: int, seed: int) -> Results:
    settings = EvalSettings(temperature=1.0, top_p=1.0, max_new_tokens=64, seed=seed, lighteval=False, batch_size=256)
    return perl.evaluate(run, tasks=[TASK], k=k, output=run / f"evals-{seed}", settings=settings)


def _of(problem: ProblemResult, who: str) -> tuple[bool, ...]:
    row: tuple[bool, ...] = getattr(problem, who)
    return row


# Name of a form -> the completion that an answer is put into.
FORMS = {
    "boxed": "So the answer is $\\boxed{ANSWER}$.",
    "boxed, wrong": "So the answer is $\\boxed{WRONG}$.",
    "final answer sentence": "Therefore, the final answer is: $\\boxed{ANSWER}$. I hope it is correct",
    "announced, no box": "The sum is done. The answer is $ANSWER$.",
    "ANSWER: line": "Step by step.\n\nANSWER: ANSWER",
    "neither box nor announcement": "We add and get $ANSWER$",
    "cut off": "First we note that the problem asks for a number which we find by adding up the",
    "after reasoning": "<think>Maybe \\boxed{WRONG}?</think>So the answer is $\\boxed{ANSWER}$.",
    "reasoning never ends": "<think>It could be \\boxed{ANSWER} but let me see",
    "two boxes, the last counts": "First \\boxed{WRONG}, corrected: \\boxed{ANSWER}",
}


def scorers(data: Path) -> dict[str, Any]:
    """Which completions of each form lighteval and we call right."""
    found: dict[str, Any] = {}
    print(f"{'task':10} {'completion':30} {'n':>4} {'ours':>6} {'lighteval':>10} {'only ours':>10} {'only theirs':>12}")
    for name in ("aime24", "math_500"):
        (task,) = find_tasks([name])
        questions = load_task_data(task, data)
        texts = [[_filled(form, question) for form in FORMS.values()] for question in questions.questions]
        golds = [question.gold for question in questions.questions for _ in FORMS]
        verdicts = check_all(golds, [text for row in texts for text in row])
        theirs = score_with_lighteval([questions], {name: texts}, "by-hand")[name].right
        found[name] = {}
        for index, form in enumerate(FORMS):
            pairs = [(verdicts[i * len(FORMS) + index].right, row[index]) for i, row in enumerate(theirs)]
            counts = Counter(pairs)
            row = {
                "n": len(pairs),
                "ours": sum(mine for mine, _ in pairs),
                "lighteval": sum(other for _, other in pairs),
                "only_ours": counts[True, False],
                "only_lighteval": counts[False, True],
            }
            found[name][form] = row | {"examples": _examples(questions, pairs)}
            print(
                f"{name:10} {form:30} {row['n']:>4} {row['ours']:>6} {row['lighteval']:>10} {row['only_ours']:>10} "
                f"{row['only_lighteval']:>12}"
            )
    return found


def _filled(form: str, question: Question) -> str:
    wrong = "-987654321" if question.gold != "-987654321" else "123456789"
    head, *tail = form.split("ANSWER: ANSWER")
    if tail:
        return f"{head}ANSWER: {question.gold}"
    return form.replace("ANSWER", question.gold).replace("WRONG", wrong)


def _examples(data: TaskData, pairs: Sequence[tuple[bool, bool]]) -> list[str]:
    """The first three golds of which only one of the two calls the completion right."""
    return [
        f"{data.questions[i].gold} ({'ours' if mine else 'lighteval'})"
        for i, (mine, other) in enumerate(pairs)
        if mine != other
    ][:3]


def whole(data: Path, folder: Path, k: int) -> dict[str, Any]:
    """A full pass, killed in the middle and started again."""
    base = folder / "base"
    shutil.copytree(BASE_FOLDER, base)
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT}))
    output = folder / "eval"
    command = [
        *(sys.executable, "-m", "perl", "eval", "--base", str(base), "--tasks", ",".join(WHOLE), "--data", str(data)),
        *("--k", str(k), "--max-new-tokens", str(LONGEST), "--output", str(output), "--json"),
    ]
    samples, total = output / SAMPLES, 560 * k
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)  # noqa: S603 (our own)
    while process.poll() is None and _lines(samples) < total // 3:
        time.sleep(0.5)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = _places(samples)
    started = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 (our own)
    seconds = time.monotonic() - started
    if done.returncode != 0:
        raise SystemExit(done.stderr)
    after, results = _places(samples), read_results(output)
    found = {
        "completions": len(after),
        "k": k,
        "killed_after": len(before),
        "kept": len(set(before) & set(after)),
        "drawn_twice": sum(n > 1 for n in Counter(place for place, _ in after).values()),
        "seconds_of_the_rest": seconds,
        "problems_per_second": (len(after) - len(before)) / k / seconds,
        "peak_memory_mib": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024,
        "tasks": {t.name: {"n": t.score.n, "avg": t.score.accuracy, "stderr": t.score.stderr} for t in results.tasks},
    }
    print(json.dumps(found, indent=2))
    return found


def _lines(path: Path) -> int:
    return sum(1 for _ in path.open()) if path.is_file() else 0


def _places(path: Path) -> list[tuple[tuple[str, str, int], str]]:
    """Which sample, and its text; a line that the kill cut short is none."""
    found = []
    for line in path.read_text().splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        found.append(((row["task"], row["problem"], row["index"]), row["text"]))
    return found


def main() -> None:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder with the public sets as JSON lines")
    parser.add_argument("--k", type=int, default=4, help="completions a problem of the whole pass")
    for part in ("counting", "scorers", "whole"):
        parser.add_argument(f"--{part}", action="store_true")
    arguments = parser.parse_args()
    wanted = [part for part in ("counting", "scorers", "whole") if getattr(arguments, part)]
    wanted = wanted or ["counting", *(["scorers", "whole"] if arguments.data else [])]
    found = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else {}
    for part in wanted:
        with tempfile.TemporaryDirectory() as folder:
            if part == "counting":
                found[part] = counting(Path(folder))
            elif part == "scorers":
                found[part] = scorers(arguments.data)
            else:
                found[part] = whole(arguments.data.resolve(), Path(folder), arguments.k)
        found["versions"] = installed_versions()
        RESULTS.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
