"""What a vLLM server is given after a step, whether it then answers like the policy, and what that costs.

Run as ``python benchmarks/sync.py``, with vLLM in ``.venv-vllm`` or in the folder that ``PERL_VLLM_ENV`` names. Three
parts, each of which can be asked for alone:

* ``--methods``: every method of the table on a real server, float32, by the product's own path. The sandbox base is
  trained for three AdamW updates on real gradients, at a learning rate that moves the policy clearly; then the server
  samples completions, whose log-probabilities under the trainer's policy and under the base are compared with the
  server's. Bytes and median seconds of a sync, and whether the base's fingerprint is the same after 200 of them;
* ``--rounding``: 200 steps of LoRA on a bfloat16 base, after each of which the policy is synced as TRL does it, by
  adding the adapter to the base's weights and taking it off again, and as we do: how much of the base changed;
* ``--shapes``: bytes of a sync beside TRL's, which sends every parameter, for two models of known shapes.

Prints tables and writes ``results/sync.json``; parts and methods that are not measured stay as they were.
"""

import argparse
import copy
import json
import os
import secrets
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from result_lines import as_lines
from sandbox_models import careful_completion

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", OMP_WAIT_POLICY="PASSIVE")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from perl.methods.optim import lora_plus_optimizer, precondition_lora_fa
from perl.methods.registry import METHODS
from perl.methods.settings import adaptation
from perl.policy.attach import attach_adapter
from perl.policy.fingerprint import base_fingerprint
from perl.policy.model import base_parameters, load_base, load_tokenizer
from perl.policy.reference import base_only, token_log_probs
from perl.recipe.sections import ModelSection, PeftSection
from perl.rollouts.engine import EngineSampling, Request, Sampled
from perl.rollouts.sync import base_update, choose_form, make_update
from perl.rollouts.vllm.servers import ServerPool
from perl.run.folder import installed_versions
from perl.sandbox import load_problems

RESULTS = Path(__file__).parent / "results"
UPDATES, BATCH, TIMED = 3, 16, 10
# LoRA's; that of other methods is relative to it, as in the table.
LEARNING_RATE = 2e-3
PROMPTS, COMPLETIONS, LENGTH = 16, 4, 48
_QWEN = {"num_hidden_layers": 28, "max_position_embeddings": 32768}
SHAPES = {
    "Qwen2.5-1.5B": Qwen2Config(
        **_QWEN, hidden_size=1536, intermediate_size=8960, num_attention_heads=12, num_key_value_heads=2,
        vocab_size=151936, tie_word_embeddings=True,
    ),
    "Qwen2.5-7B": Qwen2Config(
        **_QWEN, hidden_size=3584, intermediate_size=18944, num_attention_heads=28, num_key_value_heads=4,
        vocab_size=152064, tie_word_embeddings=False,
    ),
}  # fmt: skip

_TOKENIZER = load_tokenizer(ModelSection())
_PROBLEMS = load_problems("sandbox:addition", "train")


def fresh_policy(method: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel | PeftModel:
    """The sandbox base with a new adapter of the method's own settings, or to be trained itself."""
    torch.manual_seed(0)
    base = load_base(ModelSection(), torch.device("cpu")).to(dtype)
    return untied(base) if method == "full" else attach_adapter(base, adaptation(PeftSection(method=method)))


def untied(base: PreTrainedModel) -> PreTrainedModel:
    """The same model with a head of its own.

    On a CPU vLLM keeps a second copy of a head that shares the embeddings' weights, which loading weights leaves as it
    was: a model whose embeddings are trained cannot be served there in any other way.
    """
    base.config.tie_word_embeddings = False
    base.lm_head.weight = nn.Parameter(base.lm_head.weight.detach().clone())
    return base


def optimizer_of(policy: nn.Module, method: str, rate: float) -> torch.optim.Optimizer:
    """AdamW as the method has it."""
    row, arguments = METHODS[method], {"lr": rate * METHODS[method].rate, "weight_decay": 0.0}
    if row.optimizer == "lora_plus":
        return lora_plus_optimizer(policy, torch.optim.AdamW, arguments, row.options["loraplus_lr_ratio"])
    optimizer = torch.optim.AdamW([p for p in policy.parameters() if p.requires_grad], **arguments)
    if row.optimizer == "lora_fa":
        precondition_lora_fa(policy, optimizer)
    return optimizer


def train_step(policy: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """An update towards solutions that are worked out."""
    problems = _PROBLEMS[step * BATCH : (step + 1) * BATCH]
    texts = [problem.question + careful_completion(problem) + _TOKENIZER.eos_token for problem in problems]
    batch = _TOKENIZER(texts, padding=True, return_tensors="pt")
    log_probs_BT = token_log_probs(policy, batch["input_ids"], batch["attention_mask"])
    (-(log_probs_BT * batch["attention_mask"][:, :-1]).sum() / batch["attention_mask"].sum()).backward()
    optimizer.step()
    optimizer.zero_grad()


def scored(model: nn.Module, requests: list[Request], groups: list[list[Sampled]]) -> torch.Tensor:
    """(N,) the model's log-probabilities of all sampled tokens, in the order of the groups."""
    found = []
    with torch.no_grad():
        for request, group in zip(requests, groups, strict=True):
            for sampled in group:
                ids = torch.tensor([[*request.prompt_ids, *sampled.token_ids]])
                log_probs_T = token_log_probs(model, ids, torch.ones_like(ids))[0]
                found.append(log_probs_T[len(request.prompt_ids) - 1 :])
    return torch.cat(found)


def measure(method: str, pool: ServerPool, syncs: int) -> dict[str, Any]:
    """Trains, syncs, samples and compares; then syncs again and again."""
    policy = fresh_policy(method)
    untouched = copy.deepcopy(policy) if method == "full" else None
    plan, before = choose_form(policy), base_fingerprint(policy)
    optimizer = optimizer_of(policy, method, LEARNING_RATE)
    for step in range(UPDATES):
        train_step(policy, optimizer, step)
    policy.eval()
    trained, seconds, making = base_fingerprint(policy), [], []
    run = secrets.token_hex(4)  # a server may remember the names of an earlier one
    requests = [
        Request(tuple(_TOKENIZER(problem.question)["input_ids"]), COMPLETIONS) for problem in _PROBLEMS[-PROMPTS:]
    ]
    sampling = EngineSampling(temperature=1.0, max_completion_length=LENGTH, end_token_ids=(_TOKENIZER.eos_token_id,))
    for sync in range(syncs):
        start = time.perf_counter()
        update = make_update(policy, plan.form, f"{run}-{method}-{sync}")
        making.append(time.perf_counter() - start)
        pool.load(update)
        seconds.append(time.perf_counter() - start)
        if sync == 0:
            groups = pool.start(requests, sampling).result()
    engine_N = torch.tensor([p for group in groups for sampled in group for p in sampled.log_probs])
    policy_N = scored(policy, requests, groups)
    if untouched is not None:
        base_N = scored(untouched.eval(), requests, groups)
    else:
        with base_only(policy):
            base_N = scored(policy, requests, groups)
    if plan.form == "merged":  # the next method's is added to the base's own weights
        pool.load(base_update(fresh_policy("full" if method == "full" else "lora"), f"{run}-base"))
    off, moved = (engine_N - policy_N).abs(), (engine_N - base_N).abs()
    return {
        "method": method,
        "form": plan.form,
        "rank": plan.largest_rank,
        "bytes": plan.nbytes,
        "tensors": plan.tensors,
        "seconds": statistics.median(seconds[:TIMED]),
        "seconds_making": statistics.median(making[:TIMED]),
        "completions": sum(len(group) for group in groups),
        "tokens": len(engine_N),
        "policy_mean": off.mean().item(),
        "policy_max": off.max().item(),
        "base_mean": moved.mean().item(),
        "base_max": moved.max().item(),
        "syncs": syncs,
        # The weights of a model that is trained itself are its own; syncing must leave them, too.
        "base_unchanged": base_fingerprint(policy) == (trained if method == "full" else before),
    }


def measure_methods(names: list[str], syncs: int, url: str | None) -> Iterator[dict[str, Any]]:
    """Every method on one server; adapters first, since they are meant for the base's own weights."""
    from tests.servers import VllmProcess, absent

    if absent():
        sys.exit(absent())
    print(
        f"{'method':12} {'form':8} {'rank':>4} {'bytes':>10} {'sync ms':>8} {'making':>7} {'|engine - policy|':>21} "
        f"{'|engine - base|':>22}  base after {syncs} syncs",
        flush=True,
    )
    adapters_first = sorted(names, key=lambda name: not METHODS[name].sync.startswith("adapter"))
    lora = ("--enable-lora", "--max-lora-rank", "256", "--max-loras", "2")
    with tempfile.TemporaryDirectory() as folder:
        for whole in (False, True):
            chosen = [name for name in adapters_first if (name == "full") == whole]
            if not chosen:
                continue
            model = Path(folder) / "untied"
            if whole:
                fresh_policy("full").save_pretrained(model)
                _TOKENIZER.save_pretrained(model)
            own = ("--model", str(model)) if whole else lora
            server = VllmProcess(Path(folder) / f"server-{whole}", own).wait() if whole or url is None else None
            pool = ServerPool([server.url if server is not None else str(url)], Path(folder) / "sync")
            try:
                for name in chosen:
                    row = measure(name, pool, syncs)
                    print(_line(row), flush=True)
                    yield row
            finally:
                pool.close()
                if server is not None:
                    server.kill()


def _line(row: dict[str, Any]) -> str:
    base = "identical" if row["base_unchanged"] else "CHANGED"
    return (
        f"{row['method']:12} {row['form']:8} {row['rank'] or '':>4} {row['bytes']:>10,} {1e3 * row['seconds']:>8.1f} "
        f"{1e3 * row['seconds_making']:>7.1f}  mean {row['policy_mean']:.1e} max {row['policy_max']:.1e} "
        f"  mean {row['base_mean']:.3f} max {row['base_max']:>5.2f}  {base}"
    )


def measure_rounding(syncs: int) -> list[dict[str, Any]]:
    """What is left of a bfloat16 base after so many steps of LoRA, by how the policy was synced."""
    rows = []
    ids = _TOKENIZER([problem.question for problem in _PROBLEMS[-PROMPTS:]], padding=True, return_tensors="pt")
    print(f"\n{'bfloat16 base, LoRA':24} {'numbers changed':>16} {'base moved, mean':>17} {'max':>8}")
    for how in ("TRL: merge and unmerge", "perl: adapter", "perl: merged"):
        policy = fresh_policy("lora", torch.bfloat16)
        before = {name: p.detach().clone() for name, p in base_parameters(policy)}
        optimizer = optimizer_of(policy, "lora", 1e-3)
        log_probs = []
        for sync in range(syncs + 1):
            if sync in (0, syncs):
                with base_only(policy), torch.no_grad():
                    log_probs.append(token_log_probs(policy, ids["input_ids"], ids["attention_mask"]))
            if sync == syncs:
                break
            train_step(policy, optimizer, sync % 200)
            if how.startswith("TRL"):
                policy.merge_adapter()
                policy.unmerge_adapter()
            else:
                make_update(policy, "adapter" if how.endswith("adapter") else "merged", str(sync))
        adapted = [name for name in before if name.endswith("proj.weight")]
        after = dict(base_parameters(policy))
        changed = sum(int((after[name] != before[name]).sum()) for name in before)
        moved = (log_probs[1] - log_probs[0]).abs()[ids["attention_mask"][:, 1:] > 0]
        row = {
            "how": how,
            "syncs": syncs,
            "changed": changed / sum(before[name].numel() for name in adapted),
            "base_mean": moved.mean().item(),
            "base_max": moved.max().item(),
        }
        rows.append(row)
        print(f"{how:24} {row['changed']:>15.2%} {row['base_mean']:>17.4f} {row['base_max']:>8.4f}", flush=True)
    return rows


def measure_shapes() -> list[dict[str, Any]]:
    """Bytes of a sync with LoRA of rank 16 on all linear layers, bfloat16."""
    rows = []
    print(f"\n{'bfloat16, LoRA rank 16':24} {'perl':>14} {'TRL':>16} {'times':>7}")
    for name, config in SHAPES.items():
        with torch.device("meta"):
            model = Qwen2ForCausalLM(config).bfloat16()
        everything = sum(p.numel() * p.element_size() for _, p in model.named_parameters())  # what TRL sends
        policy = attach_adapter(model, adaptation(PeftSection(method="lora", rank=16)))
        ours = make_update(policy, choose_form(policy).form, "shapes").nbytes
        row = {"model": name, "rank": 16, "bytes": ours, "trl_bytes": everything, "times": everything / ours}
        rows.append(row)
        print(f"{name:24} {ours:>14,} {everything:>16,} {row['times']:>7.1f}", flush=True)
    return rows


def main() -> None:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--methods", nargs="*", default=None, choices=list(METHODS), metavar="METHOD", help="none: all")
    parser.add_argument("--rounding", action="store_true")
    parser.add_argument("--shapes", action="store_true")
    parser.add_argument("--syncs", type=int, default=200)
    parser.add_argument("--url", help="a server of the sandbox base that runs, with a LoRA rank of 256")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for sync.json")
    arguments = parser.parse_args()
    everything = arguments.methods is None and not arguments.rounding and not arguments.shapes
    path = arguments.results / "sync.json"
    result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)

    def keep(part: str, rows: list[dict[str, Any]]) -> None:
        result.update({part: rows, "versions": installed_versions()})
        arguments.results.mkdir(parents=True, exist_ok=True)
        path.write_text(as_lines(result) + "\n", encoding="utf-8")

    if arguments.methods is not None or everything:
        found = {row["method"]: row for row in result.get("methods", [])}
        for row in measure_methods(arguments.methods or list(METHODS), arguments.syncs, arguments.url):
            found[row["method"]] = row
            keep("methods", [found[name] for name in METHODS if name in found])
    if arguments.rounding or everything:
        keep("rounding", measure_rounding(arguments.syncs))
    if arguments.shapes or everything:
        keep("shapes", measure_shapes())


if __name__ == "__main__":
    main()
