"""How long it takes to count an evaluation again from its samples.

a run's results and samples; 500 problems with 16 completions each of two policies -> seconds -> results/recount.json

The large file is made up: golds and answers as MATH-500 has them, half of them integers, half formulas that only
algebra compares, a share of the completions wrong in up to eight ways. maj@k asks the verifier of every two wrong
answers of a problem that differ.
"""

import argparse
import json
import multiprocessing
import random
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from result_lines import as_lines

from perl.evaluation.recounting.files import PUBLISHED, published_samples, read_published, recount_folder
from perl.evaluation.recounting.recount import Golds, KeptSamples, recount, with_figures
from perl.evaluation.scoring.protocol import Protocol
from perl.evaluation.scoring.results import SAMPLES, Results, TaskResult, read_results
from perl.evaluation.scoring.samples import Sample, SampleFile
from perl.evaluation.scoring.task import all_tasks
from perl.policy.name import policy_name
from perl.rewards.verifier import check_all, start_workers, verifier_version

TASK, PROBLEMS, K = "math_500", 500, 16
SHA = "0" * 64


def main() -> None:
    """Measures and writes the numbers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", help="A run folder with results, such as the quickstart's.")
    parser.add_argument("--output", default=Path(__file__).parent / "results" / "recount.json", type=Path)
    arguments = parser.parse_args()
    found: dict[str, object] = {}
    if arguments.run:
        found["run"] = _of_run(arguments.run)
    found["made up"] = _of_made_up()
    arguments.output.write_text(as_lines(found) + "\n", encoding="utf-8")
    print(json.dumps(found, indent=2))


def _of_run(folder: str) -> dict[str, float]:
    measured = []
    for _ in range(2):  # the first call starts the verifier and imports what it needs
        started = time.perf_counter()
        counted = recount_folder(folder)
        measured.append(time.perf_counter() - started)
        if counted.mistakes:
            raise SystemExit("\n".join(map(str, counted.mistakes)))
    samples = sum(score.n * score.k for task in counted.results.tasks for score in (task.base, task.adapter) if score)
    return {"samples": samples, "seconds, first": measured[0], "seconds, again": measured[1]}


def _of_made_up() -> dict[str, float]:
    """Each way in a process of its own, which knows no verdict yet."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with _fresh() as process:
            process.submit(_make_up, folder).result()
        seconds = {"samples": float(2 * PROBLEMS * K)}
        for way in ("texts", "verdicts", "published"):
            with _fresh() as process:
                seconds[way] = process.submit(_timed, folder, way).result()
        seconds["bytes of the published file"] = float((folder / PUBLISHED).stat().st_size)
    return seconds


def _fresh() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))


def _timed(folder: Path, way: str) -> float:
    """Seconds to count a folder again, its files read included."""
    results = read_results(folder)
    golds = json.loads((folder / "golds.json").read_text()) if way == "texts" else None
    start_workers()
    started = time.perf_counter()
    if way == "published":
        kept = read_published((folder / PUBLISHED).read_bytes(), PUBLISHED)
    else:
        kept = KeptSamples(list(SampleFile(folder / SAMPLES).lines()))
    counted = recount(results, kept, golds)
    if counted.mistakes:
        raise SystemExit("\n".join(map(str, counted.mistakes)))
    return time.perf_counter() - started


def _make_up(folder: Path) -> None:
    golds, lines, results = _made_up(Protocol(k=K))
    (folder / "golds.json").write_text(json.dumps(golds))
    for key, rows in lines.items():
        SampleFile(folder / SAMPLES).append(key, [sample for _, sample in rows])
    results.write(folder)
    (folder / PUBLISHED).parent.mkdir()
    (folder / PUBLISHED).write_bytes(published_samples(results, folder / SAMPLES) or b"")


def _made_up(protocol: Protocol) -> tuple[Golds, dict[str, list[tuple[str, Sample]]], Results]:
    """Golds, each policy's lines, and the results that they give."""
    draw = random.Random(0)  # noqa: S311 (made-up answers)
    golds = {str(i): _answer(draw, i) for i in range(PROBLEMS)}
    groups = {}
    for who, ease in (("base", 0.5), ("adapter", 0.7)):
        texts = {name: [_text(draw, gold, ease) for _ in range(K)] for name, gold in golds.items()}
        flat = [(name, index, text) for name, row in texts.items() for index, text in enumerate(row)]
        verdicts = check_all([golds[name] for name, _, _ in flat], [text for _, _, text in flat])
        made = [
            Sample(TASK, name, index, protocol.seed_of(TASK, name, index), text, 900, False, one.status, one.extracted)
            for (name, index, text), one in zip(flat, verdicts, strict=True)
        ]
        groups[who] = [made[i : i + K] for i in range(0, len(made), K)]
    known = all_tasks()[TASK]
    facts = {"task": TASK, "task_version": known.version, "prompt": known.prompt, "data": SHA, "max_new_tokens": 1000}
    empty = TaskResult(
        name=TASK,
        title=known.title,
        protocol_hash=protocol.hash(facts),
        max_new_tokens=1000,
        data={"source": known.repository, "revision": None, "sha256": SHA},
        samples={"base": "b" * 16, "adapter": "a" * 16},
    )
    task = with_figures(empty, groups)
    lines = {task.samples[who]: [(task.samples[who], s) for row in rows for s in row] for who, rows in groups.items()}
    digests = {name: SHA for name in ("base_sha256", "adapter_sha256", "adapter_config_sha256")}
    named = {"name": "made up", "base": "made up", "base_revision": None, "chat_template": None}
    subject = {**named, **digests, "policy": policy_name(SHA, SHA, SHA)}
    results = Results(subject, protocol, {}, {}, 0.0, (task,), verifier_version())
    return {TASK: golds}, lines, results


def _answer(draw: random.Random, number: int) -> str:
    a, b = draw.randint(2, 99), draw.randint(2, 99)
    forms = (f"{a * b}", f"\\frac{{{a}}}{{{b + 100}}}", f"{a}", f"{a}\\sqrt{{{b}}}+{number}")
    return forms[number % len(forms)]


def _text(draw: random.Random, gold: str, ease: float) -> str:
    wrong = f"{gold}+{draw.randint(1, 8)}" if not gold.isdigit() else str(int(gold) + draw.randint(1, 8))
    return "I think about it for a while. " * 100 + f"So it is \\boxed{{{gold if draw.random() < ease else wrong}}}."


if __name__ == "__main__":
    main()
