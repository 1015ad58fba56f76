"""Whether what is published is what was trained: the whole way over a Hub on this machine, with the real clients.

Run as ``python benchmarks/publishing.py``. Four parts, each of which can be asked for alone:

* ``--chain``: train, push, load with PEFT, score, list, check the card, evaluate the zoo's entry again, each in a
  process of its own, the readers with an empty cache; once with the sandbox's base and once with that base under a
  name on the Hub. The scores at both ends, and how many completions are the same, token for token;
* ``--cards``: a card of each method, with a base of the sandbox and with one of the Hub, through the check of
  ``perl card --check`` and the Hub's own validation;
* ``--faults``: a push with the connection cut, or an error answered, at each of its requests in turn;
* ``--size``: what a LoRA of rank 16 on all linear layers of Qwen2.5-1.5B's shape sends.

Prints tables and writes ``results/publishing.json``; parts that are not measured stay as they were. The Hub is the one
of the tests (``tests/local_hub``).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the checkout, for its tests

from tests.local_hub import LocalHub

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from perl.run.folder import Run

RESULTS = Path(__file__).parent / "results" / "publishing.json"
TASK, STEPS, K, PROBLEMS = "sandbox:addition", 30, 4, 256
SAME_PROTOCOL = ("--temperature", "1", "--top-p", "1", "--max-new-tokens", "64", "--seed", "0", "-k", str(K),
                 "--limit", str(PROBLEMS))  # fmt: skip
HUB_BASE = "user/sandbox-base"
# What a reader of the card runs, on the prompts that the run kept.
LOAD = """
import json, sys
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

base, adapter, probe = sys.argv[1:]
kept = json.load(open(probe))
ids, expected = torch.tensor(kept["input_ids"]), torch.tensor(kept["log_probs"])
model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), adapter).eval()
with torch.no_grad():
    found = model(ids).logits.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
print((found - expected).abs().max().item())
"""
PUSH_BASE = """
import sys
from huggingface_hub import HfApi
HfApi().create_repo(sys.argv[2])
print(HfApi().upload_folder(repo_id=sys.argv[2], folder_path=sys.argv[1]).oid)
"""
SMALL = ("train.max_steps=2", "eval.limit=8", "eval.k=2", "train.prompts_per_step=2", "train.num_generations=4",
         "train.per_device_train_batch_size=8", "train.report_to=[]")  # fmt: skip
SHAPE = {"hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2,
         "intermediate_size": 8960, "vocab_size": 151_936, "tie_word_embeddings": True}  # fmt: skip
RANK = 16


def environment(hub: LocalHub, home: Path) -> dict[str, str]:
    """Of a person for whom that Hub is the Hub, with a cache of their own."""
    home.mkdir(parents=True, exist_ok=True)
    (home / "token").write_text(str(hub.token))
    return {
        **{name: value for name, value in os.environ.items() if name not in ("HF_TOKEN", "HF_HUB_CACHE")},
        "HF_ENDPOINT": hub.url,
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_VERBOSITY": "critical",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HOME": str(home),
        "TRANSFORMERS_VERBOSITY": "error",
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "PYTHONWARNINGS": "ignore",
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
    }


def process(command: Sequence[str], env: dict[str, str], folder: Path) -> str:
    """What a command prints; what it says is shown if it fails."""
    done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, check=False)  # noqa: S603 (fixed commands)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def chain(hub: LocalHub, folder: Path) -> dict[str, Any]:
    """The whole way, with the sandbox's base and with the same base under a name on the Hub."""
    from perl.sandbox import BASE_FOLDER

    python, author = [sys.executable], environment(hub, folder / "author")
    process([*python, "-c", PUSH_BASE, str(BASE_FOLDER), HUB_BASE], author, folder)
    rows = {}
    for base, name in (("sandbox:base", "user/on-sandbox"), (HUB_BASE, "user/on-hub")):
        here = folder / name.partition("/")[2]
        here.mkdir()
        rows[base] = row = _way(base, name, author, environment(hub, here / "reader"), here, str(BASE_FOLDER))
        print(f"{base}:")
        for what, value in row.items():
            print(f"  {what:44} {value}")
    return {"steps": STEPS, "k": K, "problems": PROBLEMS, "task": TASK, "bases": rows}


def _way(
    base: str, name: str, author: dict[str, str], reader: dict[str, str], here: Path, base_folder: str
) -> dict[str, Any]:
    perl, run, started = [sys.executable, "-m", "perl"], here / "run", time.monotonic()
    settings = [f"train.max_steps={STEPS}", f"eval.k={K}", f"eval.limit={PROBLEMS}", f"model.name={base}"]
    process(
        [*perl, "train", "quickstart", *settings, f"hub.repo_id={name}", "hub.push=end", "-o", str(run)], author, here
    )
    trained = time.monotonic() - started
    loaded = base_folder if base.startswith("sandbox:") else base
    difference = process([sys.executable, "-c", LOAD, loaded, name, str(run / "probe.json")], reader, here)
    again = here / "again"
    evaluation = [*perl, "eval", "--adapter", name, "--tasks", TASK, *SAME_PROTOCOL, "--no-lighteval"]
    process([*evaluation, "-o", str(again), "-q"], reader, here)
    zoo = ["--zoo", str(here / "zoo")]
    process([*perl, "zoo", "add", name, *zoo], reader, here)
    listed = json.loads(process([*perl, "zoo", "list", "--hub", "--json", *zoo], reader, here))
    verified = json.loads(process([*perl, "zoo", "verify", name.partition("/")[2], "--json", *zoo], reader, here))
    process([*perl, "card", name, "--check"], reader, here)
    return {
        **_both_ends(run / "eval", again),
        "PeftModel.from_pretrained: difference, nats": float(difference),
        "perl zoo list --hub": [row["scores"] for row in _rows(listed) if row["name"] == name],
        "perl zoo verify": [score["verdict"] for score in verified["scores"]],
        "perl card --check": "nothing is wrong",
        "seconds of training and push": round(trained, 1),
        "seconds in all": round(time.monotonic() - started, 1),
    }


def _rows(listed: list[Any] | dict[str, Any]) -> list[Any]:
    return listed if isinstance(listed, list) else next(value for value in listed.values() if isinstance(value, list))


def _both_ends(run: Path, again: Path) -> dict[str, Any]:
    """Scores where it was trained and where it was downloaded, and completions that are the same."""
    from perl.evaluation.results import SAMPLES, read_results
    from perl.evaluation.samples import SampleFile

    found: dict[str, Any] = {}
    there, here = read_results(run), read_results(again)
    one, two = there.task(TASK), here.task(TASK)
    for who in ("base", "adapter"):
        scores = [getattr(task, who) for task in (one, two)]
        found[f"{who}: avg@{K} there, here"] = [score.accuracy for score in scores]
        found[f"{who}: standard error"] = scores[0].stderr
        samples = [SampleFile(place / SAMPLES).read(task.samples[who]) for place, task in ((run, one), (again, two))]
        same = sum(samples[0][place].text == samples[1][place].text for place in samples[0])
        found[f"{who}: completions, of these the same"] = [len(samples[0]), same]
    found["same protocol hash"] = one.protocol_hash == two.protocol_hash
    found["same adapter, same base by SHA-256"] = all(
        there.subject[name] == here.subject[name] for name in ("adapter_sha256", "base_sha256")
    )
    return found


def cards(hub: LocalHub, folder: Path) -> dict[str, Any]:
    """Cards of all methods, checked by us and by the Hub."""
    from huggingface_hub import ModelCard

    from perl.hub.card.candidate import find_candidate
    from perl.hub.card.check import check_card
    from perl.hub.push.package import package_candidate
    from tests.hub.card_runs import ADAPTERS, make_run

    wrong, count, before = {}, 0, hub.requests
    for method in ADAPTERS:
        for base in ("sandbox:base", HUB_BASE):
            run = make_run(folder / f"{method}-{base.replace(':', '-').replace('/', '-')}", method)
            if base == HUB_BASE:
                _call_base(run, base)
            candidate = find_candidate(run)
            files = package_candidate(candidate, f"user/{method}").files
            card = files["README.md"].decode()
            problems = list(map(str, check_card(files, candidate.sha256).mistakes))
            try:
                ModelCard(card).validate()
            except ValueError as error:
                problems.append(f"the Hub: {error}")
            count += 1
            if problems:
                wrong[f"{method} on {base}"] = problems
    asked = hub.requests - before
    print(f"{count} cards of {len(ADAPTERS)} methods, {asked} asked of the Hub: {count - len(wrong)} valid")
    for name, problems in wrong.items():
        print(f"  {name}: {'; '.join(problems)}")
    return {"cards": count, "methods": len(ADAPTERS), "valid": count - len(wrong), "wrong": wrong}


def _call_base(run: "Run", base: str) -> None:
    """The run as if it had been on a base of the Hub."""
    from dataclasses import replace

    from perl.evaluation.results import read_results

    run.record(base=base, revision="c" * 40)
    recipe = run.path / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("name: sandbox:base", f"name: {base}"))
    config = run.adapter / "adapter_config.json"
    named = config.read_text().replace('"sandbox:base"', f'"{base}"')
    config.write_text(named.replace('"revision": null', f'"revision": "{"c" * 40}"'))
    found = read_results(run.path / "eval")
    subject = {**found.subject, "base": base, "base_revision": "c" * 40}
    replace(found, subject=subject).write(run.path / "eval")


def faults(hub: LocalHub, _: Path) -> dict[str, Any]:
    """The fault table of the tests; nobody waits between tries."""
    import huggingface_hub.utils._http as client

    from tests.hub.test_push_faults import run_faults

    client.time = SimpleNamespace(sleep=lambda _: None)
    started = time.monotonic()
    table = run_faults(hub)
    print(table)
    head, _rule, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    found = [dict(zip(head, (row[0], *map(int, row[1:])), strict=True)) for row in rows]
    requests = found[0]["pushes"]  # each was cut once
    return {"requests": requests, "seconds": round(time.monotonic() - started, 1), "faults": found}


def size(hub: LocalHub, folder: Path) -> dict[str, Any]:
    """Bytes of an adapter's files, and bytes that a push of them sends."""
    import perl
    from perl.hub.card.candidate import find_candidate
    from perl.hub.push.commit import push_package
    from perl.hub.push.package import Package, package_candidate

    run = perl.train("quickstart", SMALL, folder / "small")
    lines = run.metrics.read_text().splitlines()
    run.metrics.write_text("".join(line + "\n" for line in lines * 1000)[:2_000_000].rpartition("\n")[0] + "\n")
    package = package_candidate(find_candidate(run))
    package = Package({**package.files, **_adapter(folder / "shape")})
    rows = {name: len(content) for name, content in package.files.items()}
    sent = []
    for _ in range(2):
        before = len(hub.log)
        started = time.monotonic()
        push_package(package, "user/rank-16")
        requests = hub.log[before:]
        bodies = sum(len(request.body) for request in requests)
        sent.append({"requests": len(requests), "bytes": bodies, "seconds": round(time.monotonic() - started, 2)})
    for name, number in sorted(rows.items(), key=lambda row: -row[1]):
        print(f"{number:>12,} {name}")
    print(f"{sum(rows.values()):>12,} in all; sent {sent[0]['bytes']:,} in {sent[0]['requests']} requests, ", end="")
    print(f"a second time {sent[1]['bytes']:,} in {sent[1]['requests']}")
    base = _parameters()
    return {
        "rank": RANK,
        "shape": SHAPE,
        "base_parameters": base,
        "files": rows,
        "sent": sent[0],
        "sent again": sent[1],
    }


def _empty_base() -> "PreTrainedModel":
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(Qwen2Config(**SHAPE))


def _parameters() -> int:
    return sum(parameter.numel() for parameter in _empty_base().parameters())


def _adapter(folder: Path) -> dict[str, bytes]:
    """The two files of a LoRA, its tensors random numbers in float32, as training keeps them."""
    import torch
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
    from safetensors.torch import save_file

    config = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    policy = get_peft_model(_empty_base(), config)
    shapes = {name: tensor.shape for name, tensor in get_peft_model_state_dict(policy).items()}
    folder.mkdir()
    save_file({name: torch.randn(shape) for name, shape in shapes.items()}, folder / "adapter_model.safetensors")
    policy.peft_config["default"].base_model_name_or_path = "Qwen/Qwen2.5-1.5B"
    policy.peft_config["default"].save_pretrained(str(folder))
    return {name: (folder / name).read_bytes() for name in ("adapter_model.safetensors", "adapter_config.json")}


PARTS = {"chain": chain, "cards": cards, "faults": faults, "size": size}


def main() -> None:
    """Measures what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, part in PARTS.items():
        parser.add_argument(f"--{name}", action="store_true", help=str(part.__doc__))
    asked = [name for name, wanted in vars(parser.parse_args()).items() if wanted] or list(PARTS)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        with LocalHub(folder / "hub", token="hf_" + "ofNobody" * 4) as hub:
            os.environ.update(environment(hub, folder / "home"))  # before any library reads it
            for name in asked:
                print(f"\n{name}: {PARTS[name].__doc__}")
                (folder / name).mkdir()
                found[name] = PARTS[name](hub, folder / name)
    from perl.run.folder import installed_versions

    before = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    RESULTS.write_text(json.dumps({**before, **found, "versions": installed_versions()}, indent=2) + "\n")


if __name__ == "__main__":
    main()
