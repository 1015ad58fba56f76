"""Everything that is published of an adapter which nobody trained: two tasks, a base and data of the Hub.

FULL, FOUND -> FILES, name in the repository -> content
"""

import json
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from perl.evaluation.recounting.files import published_samples
from perl.evaluation.recounting.recount import with_figures
from perl.evaluation.scoring.protocol import Protocol
from perl.evaluation.scoring.results import TaskResult
from perl.evaluation.scoring.samples import SampleFile
from perl.hub.card.card_facts import facts_from_files
from perl.hub.card.facts import RunFacts
from perl.hub.card.render import render_card
from perl.methods.settings import resolved_settings
from perl.policy.name import adapter_config_digest
from perl.recipe import load_recipe
from tests.evaluations import results, samples, task_result
from tests.hub.card_runs import asked_settings
from tests.hub.files import weights
from tests.hub.test_card import BASE, FULL, LORA

PROTOCOL = Protocol(preset="perl", temperature=0.6, top_p=0.95, max_new_tokens=512, k=4)
KEYS = {"base": "b" * 16, "adapter": "a" * 16}


def scored(asked: TaskResult, base: Sequence[str], adapter: Sequence[str], odd: int = 0) -> TaskResult:
    """A task counted from samples, which are put beside those of others; so many of the adapter's are odd ones."""
    groups = {"base": samples(base, asked.name), "adapter": samples(adapter, asked.name, tokens=64)}
    for who, rows in groups.items():
        groups[who] = [
            [replace(one, seed=PROTOCOL.seed_of(*one.place), text=f"\\boxed{{{one.extracted}}}") for one in row]
            for row in rows
        ]
    row = groups["adapter"][-1]
    cut = {"tokens": asked.max_new_tokens, "truncated": True, "status": "timeout"}
    groups["adapter"][-1] = [replace(one, **cut) if one.index < odd else one for one in row]
    for who, rows in groups.items():
        KEPT.append(KEYS[who], [one for row in rows for one in row])
    return with_figures(replace(asked, samples=KEYS), groups)


_FOLDER = TemporaryDirectory()
KEPT = SampleFile(Path(_FOLDER.name) / "samples.jsonl")
SUMS = scored(task_result("sums", BASE, LORA, title="sums"), BASE, LORA)
PRODUCTS = ["1010", "0101", "1111"], ["1111", "1010", "0101"]
DOUBTFUL = scored(task_result("products", *PRODUCTS, title="products", max_new_tokens=99), *PRODUCTS, odd=3)
_CONFIG = {"base_model_name_or_path": FULL.base, "revision": FULL.revision, "peft_type": "LORA", "use_dora": True}
CONFIG = json.dumps({**_CONFIG, "task_type": "CAUSAL_LM", "r": 16, "lora_alpha": 32.0}).encode()
FOUND = results(
    SUMS, DOUBTFUL, protocol=PROTOCOL, base=FULL.base, base_revision=FULL.revision, name="a run",
    adapter_config_sha256=adapter_config_digest(CONFIG),
)  # fmt: skip
RECIPE = load_recipe(
    {
        "model": {"name": FULL.base, "revision": FULL.revision},
        "peft": {"method": "dora", "rank": 16},
        "data": {"train": {"name": FULL.dataset, "split": "train"}, "eval": {"name": FULL.dataset, "split": "test"}},
        "rewards": {"accuracy": {}, "format": {"weight": 0.2}},
        "train": {
            "seed": FULL.seed, "loss_type": "cispo", "importance_sampling_level": "sequence", "max_steps": FULL.step,
            "learning_rate": 1e-5,
        },
    }
)  # fmt: skip
RUN = replace(
    RunFacts(**{field.name: getattr(FULL, field.name) for field in fields(RunFacts)}),
    quantization=None,
    dataset=None,
    algorithm=None,
    overridden={},
    data_version="4" * 40,
    chat=True,
    tags=(),
    settings={**resolved_settings(RECIPE.peft), **asked_settings(RECIPE)},
)
ROWS = [{"step": step, "reward": step / 200, "num_tokens": 1000.0 * step} for step in range(1, FULL.step + 1)]


def with_card(files: dict[str, bytes]) -> dict[str, bytes]:
    """The same files with the card that they give."""
    return {**files, "README.md": render_card(facts_from_files(files)).encode()}


FILES = with_card(
    {
        "adapter_config.json": CONFIG,
        "adapter_model.safetensors": weights(bytes(FULL.trainable_parameters)),
        "eval/results.json": json.dumps(FOUND.as_dict()).encode(),
        "eval/samples.jsonl": published_samples(FOUND, KEPT.path),
        "metrics.jsonl": "".join(json.dumps(row) + "\n" for row in ROWS).encode(),
        "perl_recipe.yaml": RECIPE.to_yaml().encode(),
        "perl_run.json": RUN.to_json(),
    }
)
