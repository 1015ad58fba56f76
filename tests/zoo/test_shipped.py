"""The adapters that come with the package are what their entries say, and small."""

import hashlib
import json

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file

from perl.hub.zoo_entries import verify
from perl.methods.registry import METHODS
from perl.policy.attach import without_harmless_warnings
from perl.policy.logprobs import token_log_probs
from perl.policy.name import adapter_policy_name
from perl.policy.saved.adapter import CONFIG, WEIGHTS
from perl.policy.saved.download import zoo_adapter
from perl.sandbox import load_problems
from perl.zoo.catalogue import open_zoo
from tests.saved_adapters import clean_base

ZOO = open_zoo()
# Saved as a LoRA of twice the rank; saved with frozen numbers, or without ranks that were taken away.
ANCHORED = {"pissa", "milora", "olora"}
OTHER_NUMBERS = {"adalora", "delora", "lora_fa", "shira", "slicefine", "tinylora", "vera"}
SHIPPED = [entry for entry in ZOO.entries.values() if entry.adapter.shipped]


def test_every_method_has_an_adapter_with_the_sizes_policy_and_seeds_that_its_entry_names():
    assert sorted(entry.method for entry in SHIPPED) == sorted(name for name in METHODS if name != "full")
    assert {entry.provenance for entry in SHIPPED} == {"trained-here"}
    files = [path for path in (ZOO.folder / "adapters").rglob("*") if path.is_file()]
    assert len(files) == 2 * len(SHIPPED) == 56
    assert {path.parent.name for path in files} == {entry.name for entry in SHIPPED}
    sizes = {entry.name: sum(p.stat().st_size for p in files if p.parent.name == entry.name) for entry in SHIPPED}
    assert {entry.name: entry.adapter.size for entry in SHIPPED} == sizes
    assert sum(sizes.values()) <= 3_000_000
    for entry in SHIPPED:
        there = ZOO.folder / "adapters" / entry.name
        digest = hashlib.sha256((there / WEIGHTS).read_bytes()).hexdigest()
        assert entry.policy == adapter_policy_name((there / CONFIG).read_text(), digest, entry.base_sha256), entry.name
        held = sum(tensor.numel() for tensor in load_file(there / WEIGHTS).values())
        if entry.method not in OTHER_NUMBERS:
            assert held == entry.trainable_parameters * (2 if entry.method in ANCHORED else 1), entry.name
    assert len({entry.policy for entry in SHIPPED}) == len(SHIPPED)
    # Three seeds of each were trained, and scored under one protocol.
    for entry in SHIPPED:
        assert [entry.seed, *(other.seed for other in entry.seeds)] == [0, 1, 2], entry.name
        digests = {entry.adapter.sha256[WEIGHTS], *(other.adapter_sha256 for other in entry.seeds)}
        assert len(digests) == 3, entry.name
        assert all(other.scores.keys() == {"sandbox:addition"} for other in entry.seeds), entry.name
    scores = [entry.score("sandbox:addition") for entry in SHIPPED]
    assert len({score.protocol_hash for score in scores}) == 1
    assert len({(score.base, score.base_stderr, score.n, score.k) for score in scores}) == 1


@pytest.fixture(scope="module")
def text():
    """(1, T) a prompt with its answer."""
    from perl.policy.model import load_tokenizer
    from perl.recipe.sections import ModelSection

    problem = load_problems("sandbox:addition", "heldout")[0]
    return torch.tensor([load_tokenizer(ModelSection())(problem.question + problem.answer)["input_ids"]])


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch, of SHiRA
@pytest.mark.parametrize("entry", SHIPPED, ids=lambda entry: entry.name)
def test_plain_peft_loads_it_on_the_base_and_it_is_another_policy(entry, text):
    folder = zoo_adapter(entry.name)
    base = clean_base()
    mask = torch.ones_like(text)
    with torch.no_grad():
        before = token_log_probs(base, text, mask)
        with without_harmless_warnings():
            policy = PeftModel.from_pretrained(base, str(folder)).eval()
        after = token_log_probs(policy, text, mask)
    assert after.isfinite().all()
    assert (after - before).abs().max() > 1e-3
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "sandbox:base"


@pytest.mark.parametrize("limit", [40, pytest.param(None, marks=pytest.mark.nightly)])
def test_one_of_them_evaluated_again_scores_the_same(limit, tmp_path):
    """Of the first problems the samples are counted here: they are the entry's, drawn with its seeds."""
    found = verify(ZOO, "sandbox-ia3", limit=limit, output=tmp_path / "again")
    assert [score.verdict in ("identical", "agrees") for score in found.scores] == [True]
    lines = [json.loads(line) for line in (tmp_path / "again" / "samples.jsonl").read_text().splitlines()]
    keys = found.results.tasks[0].samples
    (score,) = found.scores
    for who, now in (("adapter", score.now), ("base", score.base_now)):
        rights = [line["status"] == "right" for line in lines if line["policy"] == keys[who]]
        assert len(rights) == 4 * (limit or 500)
        assert now == pytest.approx(sum(rights) / len(rights))
