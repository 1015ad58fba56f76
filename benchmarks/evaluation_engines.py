"""The same evaluation with transformers and with a vLLM server: scores, log-probabilities, completions a second.

Run as ``python benchmarks/evaluation_engines.py``, with vLLM in ``.venv-vllm`` or in the folder that ``PERL_VLLM_ENV``
names. The quickstart is trained for 30 steps; its adapter and the base are scored on all of sandbox:addition at
temperature 1, with each engine. The two draw other completions of the same policies, so that their scores differ by
chance alone: the difference is paired by problem. Then completions of the server are scored by transformers, token by
token.

Prints a table and writes ``results/evaluation_engines.json``.
"""

import argparse
import json
import os
import secrets
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", OMP_WAIT_POLICY="PASSIVE")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

import perl
from perl.evaluation.draw import TaskRequest
from perl.evaluation.drawn_samples import draw_samples
from perl.evaluation.metrics import paired_difference
from perl.evaluation.policies import Policies, load_policies
from perl.evaluation.request import EvalSettings, Evaluation, plan_evaluation
from perl.evaluation.samples import Sample
from perl.evaluation.score import rights, score_samples
from perl.policy.attach import base_only
from perl.policy.logprobs import token_log_probs
from perl.rollouts.engine import EngineSampling, Request, Sampled
from perl.rollouts.sync import choose_form, make_update
from perl.rollouts.vllm.servers import ServerPool
from perl.run.folder import installed_versions

RESULTS = Path(__file__).parent / "results"
TASK = "sandbox:addition"
STEPS, LONGEST = 30, 128
RESCORED = 64
Groups = dict[str, list[list[Sample]]]


def planned(adapter: str, output: Path, url: str | None, k: int, limit: int | None) -> Evaluation:
    """The evaluation, on the server if there is one."""
    settings = EvalSettings(
        temperature=1.0,
        top_p=1.0,
        max_new_tokens=LONGEST,
        limit=limit,
        lighteval=False,
        device="cpu",
        backend="vllm-server" if url else "transformers",
        servers=(url,) if url else (),
    )
    return plan_evaluation(adapter, None, [TASK], k, None, output, settings)


def measured(plan: Evaluation, policies: Policies) -> tuple[Groups, dict[str, Any]]:
    """Samples of base and adapter, and what they cost; opening and proving the engine is part of the seconds."""
    started = time.perf_counter()
    drawn = draw_samples(plan, policies)
    seconds = time.perf_counter() - started
    groups = {str(who): found[TASK] for who, found in drawn.groups.items()}
    samples = [sample for found in groups.values() for group in found for sample in group]
    row: dict[str, Any] = {
        "seconds": seconds,
        "completions_per_second": len(samples) / seconds,
        "tokens_per_second": sum(sample.tokens for sample in samples) / seconds,
        "logp_diff": drawn.logp_diff,
    }
    for who, found in groups.items():
        score = score_samples(found)
        row[who] = {"accuracy": score.accuracy, "stderr": score.stderr, "mean_tokens": score.mean_tokens}
    return groups, row


def rescored(policies: Policies, asked: TaskRequest, url: str, folder: Path) -> dict[str, dict[str, float]]:
    """Per policy: how far the server's log-probabilities of its completions are from those of transformers."""
    requests = [Request(question.prompt_ids, 1, seed) for seed, question in enumerate(asked.asked[:RESCORED])]
    sampling = EngineSampling(1.0, LONGEST, asked.end_token_ids)
    policy, name = policies.trained, secrets.token_hex(4)
    if policy is None:
        raise ValueError("there is no adapter")
    found = {}
    pool = ServerPool([url], folder)
    try:
        groups = pool.start(requests, sampling).result()
        with base_only(policy):
            found["base"] = _differences(policy, requests, groups)
        pool.load(make_update(policy, choose_form(policy).form, f"rescored-{name}"))
        found["adapter"] = _differences(policy, requests, pool.start(requests, sampling).result())
    finally:
        pool.close()
    return found


def _differences(policy: torch.nn.Module, requests: list[Request], groups: list[list[Sampled]]) -> dict[str, float]:
    off = []
    with torch.no_grad():
        for request, (sampled,) in zip(requests, groups, strict=True):
            ids = torch.tensor([[*request.prompt_ids, *sampled.token_ids]])
            log_probs_T = token_log_probs(policy, ids, torch.ones_like(ids))[0, len(request.prompt_ids) - 1 :]
            off.append((log_probs_T - torch.tensor(sampled.log_probs)).abs())
    whole = torch.cat(off)
    return {"completions": len(off), "tokens": len(whole), "mean": whole.mean().item(), "max": whole.max().item()}


def compared(here: Groups, served: Groups) -> dict[str, dict[str, float]]:
    """Per policy: the server's score less that of transformers, and by how much each adapter leads its base."""
    found = {}
    for who in here:
        difference = paired_difference(rights(here[who]), rights(served[who]))
        found[who] = {"difference": difference.mean, "stderr": difference.stderr, "p_value": difference.p_value}
    return found


def show(result: dict[str, Any]) -> None:
    """As a table."""
    count = f"{result['problems']} problems, k {result['k']}"
    print(f"\n{count:24} {'base avg@k':>16} {'adapter avg@k':>16} {'completions/s':>14} {'tokens/s':>9}")
    for engine in ("transformers", "vllm-server"):
        row = result[engine]
        scores = [f"{100 * row[who]['accuracy']:.2f} ± {100 * row[who]['stderr']:.2f}" for who in ("base", "adapter")]
        speed = f"{row['completions_per_second']:>14.1f} {row['tokens_per_second']:>9.0f}"
        print(f"{engine:24} {scores[0]:>16} {scores[1]:>16} {speed}")
    differences = [result["difference"][who] for who in ("base", "adapter")]
    texts = [f"{100 * d['difference']:+.2f} ± {100 * d['stderr']:.2f}" for d in differences]
    print(f"{'paired difference':24} {texts[0]:>16} {texts[1]:>16}")
    found = [result["log_probs"][who] for who in ("base", "adapter")]
    texts = [f"{row['mean']:.1e}, {row['max']:.1e}" for row in found]
    print(f"{'|log p| off, mean, max':24} {texts[0]:>16} {texts[1]:>16}", flush=True)


def main() -> None:
    """Trains, measures, prints and writes."""
    from tests.servers import VllmProcess, absent

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--k", type=int, default=8)
    parser.add_argument("--limit", type=int, help="only so many problems")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for evaluation_engines.json")
    arguments = parser.parse_args()
    if absent():
        sys.exit(absent())
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        run = perl.train("quickstart", [f"train.max_steps={arguments.steps}", "eval.enabled=false"], folder / "run")
        plan = planned(str(run.path), folder / "here", None, arguments.k, arguments.limit)
        policies = load_policies(plan.subject, plan.device)
        here, transformers = measured(plan, policies)
        server = VllmProcess(folder / "server").wait()
        try:
            served_plan = planned(str(run.path), folder / "served", server.url, arguments.k, arguments.limit)
            served, vllm = measured(served_plan, policies)
            log_probs = rescored(policies, plan.tasks[0].request, server.url, folder / "sync")
        finally:
            server.kill()
    result = {
        "task": TASK,
        "problems": len(plan.tasks[0].request.asked),
        "k": arguments.k,
        "steps": arguments.steps,
        "transformers": transformers,
        "vllm-server": vllm,
        "difference": compared(here, served),
        "log_probs": log_probs,
        "versions": installed_versions(),
    }
    show(result)
    arguments.results.mkdir(parents=True, exist_ok=True)
    path = arguments.results / "evaluation_engines.json"
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
