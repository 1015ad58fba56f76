r"""The answer checker: does it agree, how fast is it, does anything stop it, does it leak.

Run as ``python benchmarks/verifier.py``; ``--quick`` for a small one. Needs the public data sets (``--data``). Prints
tables and writes ``results/verifier.json``.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
from math_verify import parse, verify
from result_lines import as_lines

from perl.rewards.answers import extract_answer, gold_answer
from perl.rewards.verifier import TIMEOUT_SECONDS, WORKERS, check_all, start_workers, unreadable
from perl.rewards.verifier.verdicts import _verifier, told_at_once
from perl.run.folder import installed_versions
from perl.run.workers.pool import WorkerPool

CHECKOUT = Path(__file__).resolve().parent.parent
SETS = (
    "aime24",
    "aime25",
    "amc23",
    "gsm8k_test",
    "gsm8k_train",
    "hmmt_feb_2025",
    "math_500",
    "minerva_math",
    "olympiadbench",
)
TYPICAL = ("math_500", "aime24", "aime25", "gsm8k_test", "amc23")
MIB = 1 << 20

PATHOLOGICAL = [
    "5^{5^{5^{5^5}}}",
    r"\binom{1000000}{500000}",
    "(" * 200 + "x" + ")" * 200,
    "9^9^9^9",
    "9^{9^{9^9}}",
    "1000000!",
    "(1000000!)!",
    r"\sum_{k=1}^{100000000} \frac{1}{k^2+k+1}",
    r"\prod_{k=1}^{1000000} (1+\frac{1}{k})",
    r"\int_0^1 \sin(\sin(\sin(x^x))) dx",
    r"\int_0^{\infty} e^{-x^2} \cos(x^3) dx",
    r"\lim_{n \to \infty} (1+\frac{1}{n})^{n^n}",
    r"\sqrt{" * 100 + "2" + "}" * 100,
    "+".join(f"x_{{{i}}}^{{{i}}}" for i in range(150)),
    "(x+1)^{100000}",
    "(a+b+c+d+e)^{200}",
    r"\frac{1}{" * 100 + "x" + "}" * 100,
    r"\sin(" * 100 + "x" + ")" * 100,
    "2^{2^{2^{2^{2^{2}}}}}",
    r"10^{10^{100}} \bmod 7",
    r"\zeta(\zeta(\zeta(x)))",
    r"x^{x^{x^{x^{x^{x}}}}}",
    r"\binom{n}{" * 40 + "k" + "}" * 40,
    r"\begin{pmatrix}" + r"x & y \\ " * 150 + r"\end{pmatrix}",
    r"a \pm b " * 200,
]
PIECES = [
    "\\frac", "\\sqrt", "{", "}", "(", ")", "[", "]", "\\{", "\\}", ",", ";", "1", "23", "0.5", "x", "y_1", "n!", "^",
    "^{2}", "\\pm", "\\cup", "\\infty", "=", "<", "\\leq", "\\in", "\\text{cm}", "\\text{ and }", " ", "%", "\\pi",
    "\u221a", "\u00bd", "\u4e2d", "\x00", "\ud800", "\\begin{pmatrix}", "\\end{pmatrix}", "&", "\\\\", "|",
    "\\sum_{k=1}^n", "\\int", "\\sin", "$", "\\circ", "e", "i", "9^9^9", "\\overline{3}", "\\mid", "million", "\\", "_",
]  # fmt: skip

Result = dict[str, Any]


def boxed(answer: str) -> str:
    """A completion as models write them."""
    return f"We compute step by step, and the result follows. So the answer is $\\boxed{{{answer}}}$."


def rows_of(data: Path, name: str) -> list[Result]:
    """The rows of a public data set."""
    return [json.loads(line) for line in (data / f"{name}.jsonl").read_text(encoding="utf-8").strip().split("\n")]


def near_misses() -> list[Result]:
    """Answers that are nearly a gold answer, and other ways to write it, as the cases are."""
    lines = (CHECKOUT / "tests/rewards/verifier/near_misses.jsonl").read_text(encoding="utf-8").splitlines()
    return [
        {
            "gold": row["gold"],
            "pred": pred,
            "expected": kind == "right",
            "tier": f"near misses, {kind}",
            "pred_form": form,
        }
        for row in map(json.loads, lines)
        for kind in ("right", "wrong")
        for pred in row[kind]
        for form in ["response" if "boxed" in pred or "nswer" in pred else "answer"]
    ]


def by_math_verify(gold: str, completion: str) -> bool:
    """math-verify on its own, the gold answer between dollar signs as its parser wants it."""
    gold = gold if "$" in gold or "boxed" in gold else f"${gold}$"
    return bool(verify(parse(gold, parsing_timeout=5), parse(completion, parsing_timeout=5), timeout_seconds=5))


def agreement(data: Path) -> Result:
    """How often cases are judged as expected, beside math-verify, and each data set's answers by themselves."""
    rows = [*rows_of(data, "verifier_cases"), *near_misses()]
    completions = [f"\\boxed{{{row['pred']}}}" if row["pred_form"] == "answer" else row["pred"] for row in rows]
    ours = [verdict.right for verdict in check_all([row["gold"] for row in rows], completions)]
    theirs = [by_math_verify(row["gold"], completion) for row, completion in zip(rows, completions, strict=True)]
    cases: dict[str, list[int]] = {}
    for row, *found in zip(rows, ours, theirs, strict=True):
        for group in (row["tier"], f"{row['tier']}, {row['kind']}") if row["tier"] == "core" else (row["tier"],):
            counted = cases.setdefault(group, [0, 0, 0])
            for place, agreed in enumerate((*(right == row["expected"] for right in found), True)):
                counted[place] += agreed
    cases = dict(sorted(cases.items()))
    sets = {}
    for name in SETS:
        golds = [row["answer"] for row in rows_of(data, name)]
        right = sum(verdict.right for verdict in check_all(golds, [f"\\boxed{{{gold}}}" for gold in golds]))
        sets[name] = {"problems": len(golds), "right": right, "unreadable": len(unreadable(golds))}
    print("verdicts as expected of them:")
    for group, (good, math_verify, total) in cases.items():
        print(f"  {group:26}{good:6} of {total:6}  {100 * good / total:5.1f} %  math-verify {math_verify:6}")
    print("gold answers judged by themselves:")
    for name, counts in sets.items():
        print(f"  {name:26}{counts['right']:6} of {counts['problems']:6}  unreadable {counts['unreadable']}")
    return {"cases": cases, "sets": sets}


def typical_pairs(data: Path) -> list[tuple[str, str]]:
    """Distinct pairs: model outputs with their gold answers, and each gold answer with itself and another output."""
    draw = random.Random(0)  # noqa: S311 (no secret)
    outputs = [row for row in rows_of(data, "verifier_cases") if row["kind"] == "model_output"]
    pairs = [(row["gold"], row["pred"]) for row in outputs]
    for name in TYPICAL:
        for row in rows_of(data, name):
            pairs += [(row["answer"], row["answer"]), (row["answer"], draw.choice(outputs)["pred"])]
    pairs = list(dict.fromkeys(pairs))
    draw.shuffle(pairs)
    return pairs


def measured_speed(data: Path, number: int) -> Result:
    """Seconds for two halves of typical pairs; before the first one the workers have started and judged nothing."""
    start_workers()
    pairs = typical_pairs(data)[:number]
    middle = len(pairs) // 2
    seconds, verdicts = [], []
    for half in (pairs[:middle], pairs[middle:]):
        completions = [boxed(answer) for _, answer in half]
        started = time.perf_counter()
        verdicts += check_all([gold for gold, _ in half], completions)
        seconds.append(time.perf_counter() - started)
    asked = [pair for pair in pairs if told_at_once(gold_answer(pair[0]), extract_answer(boxed(pair[1]))) is None]
    pool = WorkerPool("perl.rewards.verifier.symbolic:judge", workers=WORKERS)  # remembers nothing
    pool.map(asked[: len(asked) // 2])
    started = time.perf_counter()
    pool.map(asked[len(asked) // 2 :])
    return {
        "pairs": len(pairs),
        "asked": len(asked),
        "first_rate": middle / seconds[0],
        "rate": (len(pairs) - middle) / seconds[1],
        "worker_rate": (len(asked) - len(asked) // 2) / (time.perf_counter() - started),
        "statuses": Counter(verdict.status for verdict in verdicts),
        "slowest_seconds": max(verdict.seconds for verdict in verdicts),
        "right": [verdict.right for verdict in verdicts],
    }


def trl_speed(data: Path, number: int) -> Result:
    """TRL's reward on the same pairs, its gold answers between dollar signs as its parser wants them."""
    from trl.rewards import accuracy_reward

    pairs = typical_pairs(data)[:number]
    accuracy_reward([[{"role": "assistant", "content": boxed("1")}]], ["$1$"])
    completions = [[{"role": "assistant", "content": boxed(answer)}] for _, answer in pairs]
    started = time.perf_counter()
    rewards = accuracy_reward(completions, [f"${gold}$" for gold, _ in pairs])
    return {"seconds": time.perf_counter() - started, "rewards": rewards}


def in_a_process(part: str, data: Path, number: int) -> Result:
    """What a part of this file measures in a process of its own."""
    command = [sys.executable, __file__, "--part", part, "--data", str(data), "--pairs", str(number)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)  # noqa: S603 (this file)
    result: Result = json.loads(done.stdout.splitlines()[-1])
    return result


def speed(data: Path, number: int, repeats: int) -> Result:
    """Checks a second, beside TRL's reward, medians of several processes."""
    ours = [in_a_process("ours", data, number) for _ in range(repeats)]
    trl = [in_a_process("trl", data, number) for _ in range(repeats)]
    pairs, asked = ours[0]["pairs"], ours[0]["asked"]
    result = {
        "pairs": pairs,
        "share_that_needed_a_worker": asked / pairs,
        "checks_per_second": statistics.median(run["rate"] for run in ours),
        "checks_per_second_at_first": statistics.median(run["first_rate"] for run in ours),
        "checks_per_second_of_workers": statistics.median(run["worker_rate"] for run in ours),
        "checks_per_second_of_trl": pairs / statistics.median(run["seconds"] for run in trl),
        "slowest_seconds": statistics.median(run["slowest_seconds"] for run in ours),
        "statuses": ours[0]["statuses"],
        "trl_without_a_verdict": sum(reward is None for reward in trl[0]["rewards"]),
        "only_ours_right": sum(a and b == 0.0 for a, b in zip(ours[0]["right"], trl[0]["rewards"], strict=True)),
        "only_trls_right": sum(not a and b == 1.0 for a, b in zip(ours[0]["right"], trl[0]["rewards"], strict=True)),
        "workers": WORKERS,
    }
    print("speed on typical pairs:")
    for name, value in result.items():
        print(f"  {name:32}{value:12.3f}" if isinstance(value, float) else f"  {name:32}{value!s:>12}")
    return result


def latency(data: Path, number: int, timeout_seconds: float) -> Result:
    """A batch in which one pair in twenty is made to hang a verifier."""
    pairs = typical_pairs(data)[: number - number // 20]
    hostile = [PATHOLOGICAL[i % len(PATHOLOGICAL)] for i in range(number // 20)]
    pairs += [(text, f"{text} + {i}") if i % 2 else (r"\sqrt{7}", f"{text} + {i}") for i, text in enumerate(hostile)]
    random.Random(1).shuffle(pairs)  # noqa: S311 (no secret)
    start_workers()
    killed = _verifier(WORKERS)._pool.killed
    started = time.perf_counter()
    verdicts = check_all([g for g, _ in pairs], [boxed(a) for _, a in pairs], timeout_seconds=timeout_seconds)
    result = {
        "pairs": len(pairs),
        "pathological": len(hostile),
        "limit_seconds": timeout_seconds,
        "batch_seconds": time.perf_counter() - started,
        "worst_verdict_seconds": max(verdict.seconds for verdict in verdicts),
        "killed": _verifier(WORKERS)._pool.killed - killed,
        "statuses": Counter(verdict.status for verdict in verdicts),
    }
    print("a batch with pathological answers:")
    for name, value in result.items():
        print(f"  {name:32}{value!s:>12}")
    return result


class Memory:
    """Watches the peak memory of this process and of its workers."""

    def __init__(self) -> None:
        """Starts nothing yet."""
        self.parent = self.worker = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> "Memory":
        """Starts to watch."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stops."""
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        process = psutil.Process()
        while not self._done.wait(0.1):
            self.parent = max(self.parent, process.memory_info().rss)
            for child in process.children():
                try:
                    self.worker = max(self.worker, child.memory_info().rss)
                except psutil.NoSuchProcess:
                    continue


def fuzz(data: Path, number: int) -> Result:
    """Random LaTeX, a tenth of it long, against random LaTeX and, every second time, against answers of MATH-500."""
    draw = random.Random(0)  # noqa: S311 (no secret)
    start_workers()
    process = psutil.Process()
    before, memory_before = len(process.children()), process.memory_info().rss
    golds = [row["answer"] for row in rows_of(data, "math_500")]
    texts = ["".join(draw.choices(PIECES, k=draw.randint(1, 200 if i % 10 == 0 else 8))) for i in range(2 * number)]
    started = time.perf_counter()
    with Memory() as memory:
        verdicts = check_all(
            [draw.choice(golds) if i % 2 else text for i, text in enumerate(texts[::2])],
            [boxed(text) for text in texts[1::2]],
        )
    result = {
        "items": number,
        "seconds": time.perf_counter() - started,
        "statuses": Counter(verdict.status for verdict in verdicts),
        "worst_verdict_seconds": max(verdict.seconds for verdict in verdicts),
        "parent_mib_before": memory_before / MIB,
        "parent_mib_peak": memory.parent / MIB,
        "worker_mib_peak": memory.worker / MIB,
        "worker_processes_before": before,
        "worker_processes_after": len(process.children()),
    }
    print("random LaTeX:")
    for name, value in result.items():
        print(f"  {name:32}{value!s:>12}")
    return result


def main() -> None:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a small run; writes nothing")
    parser.add_argument(
        "--data", type=Path, default=CHECKOUT.parent / "shared" / "data", help="folder of the data sets"
    )
    parser.add_argument("--agreement", action="store_true", help="that part alone, in place of what is written")
    parser.add_argument("--part", choices=["ours", "trl"], help=argparse.SUPPRESS)
    parser.add_argument("--pairs", type=int, default=10_000, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part:
        measure = measured_speed if arguments.part == "ours" else trl_speed
        print(json.dumps(measure(arguments.data, arguments.pairs)))
        return
    path = Path(__file__).parent / "results" / "verifier.json"
    if arguments.agreement:
        written = json.loads(path.read_text(encoding="utf-8")) | {"agreement": agreement(arguments.data)}
        path.write_text(as_lines(written) + "\n", encoding="utf-8")
        return
    quick = arguments.quick
    load = os.getloadavg()
    result = {
        "load_before": load,
        "cores": os.cpu_count(),
        "speed": speed(arguments.data, 500 if quick else 10_000, 1 if quick else 3),
        "agreement": agreement(arguments.data),
        "latency": latency(arguments.data, 200 if quick else 1000, 1.0 if quick else TIMEOUT_SECONDS),
        "fuzz": fuzz(arguments.data, 500 if quick else 10_000),
        "load_after": os.getloadavg(),
        "versions": installed_versions(),
    }
    print(f"load {load[0]:.1f} before, {os.getloadavg()[0]:.1f} after, on {os.cpu_count()} cores")
    if not quick:
        path.write_text(as_lines(result) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
