"""Seconds and bytes of ``perl report`` for one run and for ten, short and long, and what a browser says of the pages.

Run as ``python benchmarks/report.py``. Short runs have 50 steps with a group of 8 completions each, as the quickstart
has; long ones 5,000 steps of 40 metrics, and 5,000 groups of 8 completions of 400 tokens. They are written here, not
trained. Each page is made by the command in a process of its own; then, where there is a Chromium, it is opened, wide
and narrow, light and dark: seconds until it is ready, errors, requests other than the file, columns beyond the window.

Prints a table and writes ``results/report.json``.
"""

import argparse
import json
import os
import platform
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from perl.run.folder import installed_versions
from perl.run.tables import plain_table

RESULTS = Path(__file__).parent / "results"
NAMES = (
    *("loss", "grad_norm", "learning_rate", "num_tokens", "completions/mean_length", "completions/min_length"),
    *("completions/max_length", "completions/clipped_ratio", "rewards/accuracy/mean", "rewards/accuracy/std", "reward"),
    *("reward_std", "frac_reward_zero_std", "reward/accuracy/error_frac", "reward/accuracy/no_answer_frac"),
    *("reward/accuracy/timeout_frac", "reward/accuracy/unparsable_gold_frac", "reward/accuracy/wrong_frac"),
    *("rows/unscored", "rows/masked_fraction", "entropy", "kl", "clip_ratio/low_mean", "clip_ratio/high_mean"),
    *("clip_ratio/region_mean", "clip_ratio/low_min", "clip_ratio/high_max", "rows/trained_fraction", "tokens/run"),
    *("tokens/passes", "sampling/sampling_logp_difference/mean", "sampling/sampling_logp_difference/max"),
    *("sync/seconds", "sync/bytes", "rollout/seconds", "rollout/tokens_per_second", "rollout/steps_behind"),
    *("update/seconds", "step_time", "epoch"),
)
WINDOWS = [((1440, 900), "light"), ((1440, 900), "dark"), ((375, 800), "light"), ((375, 800), "dark")]


def write_run(folder: Path, steps: int, tokens: int, seed: int) -> None:
    """A run that was not trained."""
    generator = random.Random(seed)  # noqa: S311 (made-up numbers)
    folder.mkdir(parents=True)
    facts = {"status": "done", "steps": steps, "planned_steps": steps, "method": "lora", "rewards": {"accuracy": 1.0}}
    (folder / "run.json").write_text(json.dumps({**facts, "seed": seed}), encoding="utf-8")
    (folder / "recipe.yaml").write_text(f"train: {{max_steps: {steps}, seed: {seed}}}\n", encoding="utf-8")
    with (folder / "metrics.jsonl").open("w", encoding="utf-8") as log:
        for step in range(1, steps + 1):
            log.write(json.dumps({"step": step, **{name: generator.random() for name in NAMES}}) + "\n")
    words = [f" word{number}" for number in range(500)]
    with (folder / "samples.jsonl").open("w", encoding="utf-8") as log:
        for step in range(1, steps + 1):
            for _ in range(8):
                written = generator.choices(words, k=tokens)
                row = {
                    "step": step,
                    "prompt": [{"role": "user", "content": f"Question {step}"}],
                    "completion": [{"role": "assistant", "content": "".join(written)}],
                    "rewards": {"accuracy": float(generator.random() < 0.5)},
                    "advantage": generator.gauss(0, 1),
                    "accuracy_verdict": generator.choice(["right", "wrong"]),
                }
                if step % 2:  # an engine gave log-probs
                    row |= {"tokens": written, "gaps": [round(generator.gauss(0, 0.01), 5) for _ in written]}
                log.write(json.dumps(row) + "\n")


def made(runs: list[Path], page: Path) -> dict[str, Any]:
    """The page of the command, in a process of its own."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "perl", "report", *map(str, runs), "--output", str(page)]
    subprocess.run(command, check=True, capture_output=True)  # noqa: S603 (a fixed command)
    read = sum(file.stat().st_size for run in runs for file in run.iterdir())
    return {"seconds": time.perf_counter() - began, "bytes": page.stat().st_size, "bytes_read": read}


def looked_at(page: Path) -> dict[str, Any] | None:
    """What a browser says of a page; None: there is none."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        return None
    from playwright.sync_api import sync_playwright

    found: dict[str, Any] = {"seconds_until_ready": [], "errors": 0, "other_requests": 0, "columns_beyond": 0}
    with sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=browser, args=["--no-sandbox", "--disable-gpu"])
        for (width, height), scheme in WINDOWS:
            tab = opened.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
            wrong: list[str] = []
            requests: list[str] = []
            tab.on("console", lambda message, wrong=wrong: wrong.append(message.text))
            tab.on("pageerror", lambda error, wrong=wrong: wrong.append(str(error)))
            tab.on("request", lambda request, requests=requests: requests.append(request.url))
            began = time.perf_counter()
            tab.goto(page.as_uri(), timeout=120_000)
            tab.wait_for_selector("html[data-ready]", timeout=120_000)
            found["seconds_until_ready"].append(time.perf_counter() - began)
            for top in range(0, tab.evaluate("document.documentElement.scrollHeight"), 700):
                tab.evaluate(f"scrollTo(0, {top})")
                tab.wait_for_timeout(50)
            found["errors"] += len(wrong)
            found["other_requests"] += len(requests) - 1
            found["columns_beyond"] += max(0, tab.evaluate("document.documentElement.scrollWidth - innerWidth"))
            tab.close()
        opened.close()
    return found


def main() -> None:
    """Measures, prints, writes."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="Short runs alone; writes nothing.")
    arguments = parser.parse_args()
    sizes = {"short": (50, 40)} if arguments.quick else {"short": (50, 40), "long": (5_000, 400)}
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        for kind, (steps, tokens) in sizes.items():
            folders = [Path(temporary) / kind / f"run-{seed}" for seed in range(10)]
            write_run(folders[0], steps, tokens, 0)
            for seed, folder in enumerate(folders[1:], 1):  # other names and seeds, so that they differ
                shutil.copytree(folders[0], folder)
                (folder / "recipe.yaml").write_text(f"train: {{max_steps: {steps}, seed: {seed}}}\n", encoding="utf-8")
            for count in (1, 10):
                page = Path(temporary) / f"{kind}-{count}.html"
                found[f"{kind}, {count} run{'s' if count > 1 else ''}"] = {
                    **made(folders[:count], page),
                    "browser": looked_at(page),
                }
    rows = [["", "seconds", "page MB", "read MB", "ready in s", "errors", "requests", "columns beyond"]]
    for name, row in found.items():
        seen = row["browser"] or {}
        ready = f"{max(seen['seconds_until_ready']):.1f}" if seen else "-"
        checks = [str(seen.get(key, "-")) for key in ("errors", "other_requests", "columns_beyond")]
        rows.append(
            [
                name,
                f"{row['seconds']:.1f}",
                f"{row['bytes'] / 1e6:.1f}",
                f"{row['bytes_read'] / 1e6:.1f}",
                ready,
                *checks,
            ]
        )
    print("\n".join(plain_table(rows)))
    if not arguments.quick:
        facts = {"pages": found, "versions": installed_versions(("plotly", "playwright")), "cores": os.cpu_count()}
        facts["machine"] = platform.machine()
        (RESULTS / "report.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
