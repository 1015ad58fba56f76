"""What completions by transformers in this process cost: a training, an evaluation, and tokens a second.

Run as ``python benchmarks/decoding.py --before REVISION`` (about ten minutes on two cores; ``--only PART``: one).
Three parts, each of whose ratios is taken in one run, one after the other in turns:

* training: the quickstart, by REVISION and by this checkout, for each seed, as a user trains it.
* evaluation: ``perl eval`` of the quickstart's adapter on its task, by REVISION and by this checkout, on a machine that
  does nothing else and beside processes that compute.
* speed: tokens a second of this engine, of plain ``model.generate`` and of vLLM for CPUs, one thread each. Groups of 8
  completions of random models of two widths, without an end token, so that all have their full length and no two are
  alike for long; and of the quickstart's base, whose completions end and begin alike. vLLM's environment is
  ``.venv-vllm`` or what PERL_VLLM_ENV names; without it its column is left out.

Prints tables and writes ``results/decoding.json``; parts that are not run stay as they were.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from result_lines import as_lines

CHECKOUT = Path(__file__).resolve().parent.parent
VLLM = Path(os.environ.get("PERL_VLLM_ENV", CHECKOUT / ".venv-vllm")) / "bin" / "python"
PARTS = ("training", "evaluation", "speed")
TASK, GROUP, TOKENS, PROMPTS, ROUNDS = "sandbox:addition", 8, 64, 32, 4
WIDTHS = {128: (4, 32), 512: (6, 64)}  # of hidden states: layers, numbers of a head
AS_VLLM = {
    **{"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"},
    **{"VLLM_LOGGING_LEVEL": "ERROR", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
# Run by vLLM's Python: for each line of its input writes all completions; prints their tokens, and the seconds.
WRITER = """
import json, sys, time
from vllm import LLM, SamplingParams
folder, asked = sys.argv[1], json.loads(sys.argv[2])
llm = LLM(folder, dtype="float32", max_model_len=256, enforce_eager=True, disable_log_stats=True)
params = SamplingParams(n=asked["group"], temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0,
    max_tokens=asked["tokens"], ignore_eos=not asked["ends"], stop_token_ids=asked["ends"], detokenize=False,
    logprobs=0)
prompts = [{"prompt_token_ids": ids} for ids in asked["prompts"]]
print("ready", flush=True)
for _ in sys.stdin:
    llm.reset_prefix_cache()
    started = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - started
    print(json.dumps([sum(len(o.token_ids) for each in outputs for o in each.outputs), seconds]), flush=True)
"""


# ``perl``, and how long base and adapter took to draw and judge: all but imports, loading and tables.
EVALUATED = """
import sys, time
import perl.evaluation.evaluate as evaluate
draw = evaluate.draw_samples
def timed(*args, **kwargs):
    started = time.perf_counter()
    drawn = draw(*args, **kwargs)
    print(f"drawing {time.perf_counter() - started}", flush=True)
    return drawn
evaluate.draw_samples = timed
import perl.__main__
"""


def evaluated(sources: Path, asked: Sequence[str]) -> tuple[float, float]:
    """Seconds of ``perl eval`` with a checkout's code, and of its drawing."""
    from eval_threads import environment

    started = time.perf_counter()
    command = [sys.executable, "-c", EVALUATED, "eval", *asked]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment(sources))  # noqa: S603
    seconds = time.perf_counter() - started
    [drawing] = [float(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("drawing ")]
    return seconds, drawing


def trained(sources: Path, seed: int, folder: Path) -> dict[str, Any]:
    """Trains the quickstart with a checkout's code."""
    from eval_threads import perl

    wall = perl(sources, "train", "quickstart", "train.report_to=[]", f"train.seed={seed}", "-o", str(folder))
    log = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    score = json.loads((folder / "run.json").read_text(encoding="utf-8"))["eval"][TASK]
    return {
        "training seconds": sum(row["step_time"] for row in log),
        "rollout seconds": sum(row["rollout/seconds"] for row in log),
        "command seconds": wall,
        "accuracy": score["adapter"],
        "base": score["base"],
    }


def training(before: Path, seeds: Sequence[int], place: Path) -> dict[str, Any]:
    """Both checkouts for each seed, in turns."""
    rows = []
    print(f"\n{'quickstart':12} {'seed':>4} {'training s':>11} {'rollouts s':>11} {'command s':>10} {'accuracy':>9}")
    for number, seed in enumerate(seeds):
        both = (("before", before), ("now", CHECKOUT))
        for name, sources in both if number % 2 == 0 else both[::-1]:
            load = os.getloadavg()[0]
            row = {"code": name, "seed": seed, **trained(sources, seed, place / f"{name}-{seed}"), "load before": load}
            rows.append(row)
            print(
                f"{name:12} {seed:>4} {row['training seconds']:>11.1f} {row['rollout seconds']:>11.1f} "
                f"{row['command seconds']:>10.1f} {row['accuracy']:>9.3f}",
                flush=True,
            )
    ratios = {name: ratios_of(rows, "seed", name) for name in ("training seconds", "command seconds")}
    for name, found in ratios.items():
        print(f"{name}, now over before: {statistics.median(found):.2f} ({', '.join(f'{r:.2f}' for r in found)})")
    return {"rows": rows, "ratios": ratios}


def ratios_of(rows: list[dict[str, Any]], key: str, name: str) -> list[float]:
    """Now over before, for each value of a key."""
    found = {(row["code"], row[key]): row[name] for row in rows}
    return [found["now", value] / found["before", value] for code, value in found if code == "now"]


def evaluation(before: Path, adapter: Path, place: Path) -> dict[str, Any]:
    """Seconds of ``perl eval`` of both checkouts, idle (twice) and beside 8 busy processes, in turns."""
    from eval_threads import busy, drawn

    asked = ["--adapter", str(adapter), "--tasks", TASK, "--limit", "100", "--k", "4", "--no-lighteval"]
    rows, completions = [], []
    print(f"\n{'perl eval':12} {'busy':>5} {'seconds':>8} {'drawing':>8}")
    for count in (0, 8):
        for turn, (name, sources) in enumerate((("before", before), ("now", CHECKOUT)) * (1 if count else 2)):
            output = place / f"eval-{count}-{turn}"
            with busy(count):
                seconds, drawing = evaluated(sources, [*asked, "-o", str(output)])
            completions.append(drawn(output))
            rows.append({"code": name, "busy": count, "seconds": seconds, "drawing": drawing})
            print(f"{name:12} {count:>5} {seconds:>8.1f} {drawing:>8.1f}", flush=True)
    ratios = {}
    for measured in ("seconds", "drawing"):
        best = [
            min((r for r in rows if (r["code"], r["busy"]) == (name, count)), key=lambda row: row[measured])
            for name in ("before", "now")
            for count in (0, 8)
        ]
        ratios[measured] = ratios_of(best, "busy", measured)
        print(f"{measured}, now over before, idle and beside 8: {', '.join(f'{r:.2f}' for r in ratios[measured])}")
    same = all(found == completions[0] for found in completions)
    print(f"same completions: {same}")
    return {"rows": rows, "ratios": ratios, "same completions": same, "task": TASK, "problems": 100, "k": 4}


def random_model(width: int, folder: Path) -> None:
    """Saves a model of this width with random weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from perl.sandbox import BASE_FOLDER

    layers, head = WIDTHS[width]
    config = AutoConfig.from_pretrained(BASE_FOLDER)
    changes = {"hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": layers, "head_dim": head}
    changes |= {"num_attention_heads": width // head, "num_key_value_heads": width // head // 2}
    config.update({**changes, "layer_types": ["full_attention"] * layers})
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    AutoTokenizer.from_pretrained(BASE_FOLDER).save_pretrained(folder)


def writers(folder: Path, prompts: list[list[int]], ends: list[int]) -> dict[str, Callable[[], tuple[int, float]]]:
    """This engine and ``generate``: each writes all completions; their tokens, and the seconds."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    from perl.rollouts.engine import EngineSampling, Request
    from perl.rollouts.hf_engine import TransformersEngine

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    requests = [Request(tuple(ids), GROUP, seed=GROUP * i) for i, ids in enumerate(prompts)]
    sampling = EngineSampling(1.0, TOKENS, tuple(ends))
    rows = [ids for ids in prompts for _ in range(GROUP)]
    width = max(map(len, rows))
    ids_NL = torch.tensor([[0] * (width - len(ids)) + ids for ids in rows])
    mask_NL = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in rows])
    config = GenerationConfig(
        do_sample=True, max_new_tokens=TOKENS, eos_token_id=ends or None, pad_token_id=0, top_k=0, disable_compile=True
    )
    model.generation_config.eos_token_id = None  # else taken for what is not given

    def ours() -> tuple[int, float]:
        started = time.perf_counter()
        groups = TransformersEngine(model, tokenizer).start(requests, sampling).result()
        return sum(len(s.token_ids) for group in groups for s in group), time.perf_counter() - started

    def plain() -> tuple[int, float]:
        torch.manual_seed(0)
        started = time.perf_counter()
        found = model.generate(input_ids=ids_NL, attention_mask=mask_NL, generation_config=config)[:, width:].tolist()
        seconds = time.perf_counter() - started
        return sum(next((i + 1 for i, t in enumerate(row) if t in ends), len(row)) for row in found), seconds

    return {"this engine": ours, "generate": plain}


class Vllm:
    """vLLM in a process of its own."""

    def __init__(self, folder: Path, prompts: list[list[int]], ends: list[int]) -> None:
        """Loads the model."""
        asked = json.dumps({"prompts": prompts, "ends": ends, "group": GROUP, "tokens": TOKENS})
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self._process = subprocess.Popen(  # noqa: S603
            [str(VLLM), "-c", WRITER, str(folder), asked],
            env=kept | AS_VLLM,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._answer("ready")

    def __call__(self) -> tuple[int, float]:
        """All completions: their tokens, and the seconds."""
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        tokens, seconds = json.loads(self._answer("["))
        return tokens, seconds

    def close(self) -> None:
        """Ends it."""
        self._process.kill()
        self._process.wait()

    def _answer(self, begin: str) -> str:
        for line in self._process.stdout:
            if line.startswith(begin):
                return line
        raise RuntimeError("vLLM has ended")


def speed(place: Path) -> dict[str, Any]:
    """Tokens a second, the best of several rounds in turns."""
    import torch

    from perl.data import render_prompts
    from perl.sandbox import BASE_FOLDER
    from perl.training.prepare import prepare, read_recipe

    torch.set_num_threads(1)
    plan = prepare(read_recipe("quickstart"))
    rendered = render_prompts(list(plan.problems.train.select(range(PROMPTS))), plan.tokenizer)
    sums, long = (
        [list(p.token_ids) for p in rendered],
        [[3 + (7 * i + j * j) % 37 for j in range(64)] for i in range(PROMPTS)],
    )
    cases = [(f"random, width {width}", width, long, []) for width in WIDTHS]
    rows = []
    print(f"\n{'tokens a second':22} {'this engine':>12} {'generate':>9} {'vLLM':>7}   groups of {GROUP}")
    for name, width, prompts, ends in [*cases, ("quickstart's base", None, sums, [1])]:
        folder = BASE_FOLDER if width is None else place / str(width)
        if width is not None:
            random_model(width, folder)
        ways: dict[str, Callable[[], tuple[int, float]]] = dict(writers(folder, prompts, ends))
        served = Vllm(folder, prompts, ends) if VLLM.is_file() else None
        if served is not None:
            ways["vLLM"] = served
        for write in ways.values():
            write()  # the first time much is made
        found: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(ROUNDS):
            for way, write in ways.items():
                tokens, seconds = write()
                found[way].append(tokens / seconds)
        if served is not None:
            served.close()
        best = {way: max(speeds) for way, speeds in found.items()}
        rows.append({"model": name, "prompt tokens": len(prompts[0]), "best": best, "all": found})
        print(
            f"{name:22} {best['this engine']:>12.0f} {best['generate']:>9.0f} {best.get('vLLM', float('nan')):>7.0f}",
            flush=True,
        )
    return {"rows": rows, "prompts": PROMPTS, "group": GROUP, "most tokens": TOKENS, "threads": 1}


def keep(part: str, result: dict[str, Any]) -> None:
    """Writes a part's numbers; the other parts stay as they were."""
    from perl.run.folder import installed_versions

    path = CHECKOUT / "benchmarks" / "results" / "decoding.json"
    earlier = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    earlier |= {part: result, "processors": os.cpu_count(), "versions": installed_versions()}
    path.write_text(as_lines(earlier) + "\n", encoding="utf-8")


def main() -> None:
    """Measures, prints and writes."""
    from eval_threads import of_revision

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", metavar="REVISION", help="what is compared with; needed but for speed")
    parser.add_argument("--only", choices=PARTS, help="one part")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of the training")
    parser.add_argument("--adapter", type=Path, help="run folder of the quickstart, for the evaluation")
    arguments = parser.parse_args()
    parts = [arguments.only] if arguments.only else [part for part in PARTS if arguments.before or part == "speed"]
    if arguments.before is None and parts != ["speed"]:
        sys.exit("--before REVISION says what the training and the evaluation are compared with")
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", HF_HUB_DISABLE_PROGRESS_BARS="1")
    with tempfile.TemporaryDirectory(prefix="decoding") as temporary:
        place = Path(temporary)
        before = of_revision(arguments.before, place / "code-before") if arguments.before else CHECKOUT
        for part in parts:
            if part == "training":
                keep(part, training(before, arguments.seeds, place))
            elif part == "evaluation":
                adapter = arguments.adapter or place / f"now-{arguments.seeds[0]}"
                if not adapter.is_dir():
                    trained(CHECKOUT, arguments.seeds[0], adapter)
                keep(part, evaluation(before, adapter, place))
            else:
                keep(part, speed(place))


if __name__ == "__main__":
    main()
