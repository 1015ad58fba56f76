"""The adapters that come with the package are what their entries say, which claim nothing that nobody here has seen."""

import hashlib
import json
import re

import pytest
import torch
from peft import PeftModel

from perl.hub.zoo_entries.material import entry_facts
from perl.hub.zoo_entries.verification import verify
from perl.policy.attach import without_harmless_warnings
from perl.policy.name import adapter_policy_name
from perl.policy.reference import token_log_probs
from perl.policy.saved.adapter import CONFIG, WEIGHTS
from perl.policy.saved.download import zoo_adapter
from perl.sandbox import load_problems
from perl.zoo.catalogue import open_zoo
from perl.zoo.ranking import rank_task
from tests.saved_adapters import clean_base

ZOO = open_zoo()
SHIPPED = [entry for entry in ZOO.entries.values() if entry.adapter.shipped]


def test_six_methods_have_an_adapter_with_the_size_policy_and_seeds_that_its_entry_names():
    assert sorted(entry.method for entry in SHIPPED) == ["adalora", "dora", "ia3", "lora", "pissa", "vera"]
    files = [path for path in (ZOO.folder / "adapters").rglob("*") if path.is_file()]
    assert len(files) == 2 * len(SHIPPED)
    assert sum(path.stat().st_size for path in files) <= 600_000
    for entry in SHIPPED:
        there = ZOO.folder / "adapters" / entry.name
        assert entry.adapter.size == sum((there / name).stat().st_size for name in (CONFIG, WEIGHTS)), entry.name
        assert entry_facts(entry, {name: there / name for name in (CONFIG, WEIGHTS)})[0] == [], entry.name
        digest = hashlib.sha256((there / WEIGHTS).read_bytes()).hexdigest()
        assert entry.policy == adapter_policy_name((there / CONFIG).read_text(), digest, entry.base_sha256), entry.name
        assert [entry.seed, *(other.seed for other in entry.seeds)] == [0, 1, 2], entry.name
        assert len({digest, *(other.adapter_sha256 for other in entry.seeds)}) == 3, entry.name
    scores = [entry.score("sandbox:addition") for entry in SHIPPED]
    assert len({(s.protocol_hash, s.base, s.base_stderr, s.n, s.k) for s in scores}) == 1


@pytest.fixture(scope="module")
def text():
    """(1, T) a prompt with its answer."""
    from perl.policy.model import load_tokenizer
    from perl.recipe.sections import ModelSection

    problem = load_problems("sandbox:addition", "heldout")[0]
    return torch.tensor([load_tokenizer(ModelSection())(problem.question + problem.answer)["input_ids"]])


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


def test_one_of_them_evaluated_again_scores_the_same(tmp_path):
    """Of the first problems the samples are counted here: they are the entry's, drawn with its seeds."""
    found = verify(ZOO, "sandbox-ia3", limit=40, output=tmp_path / "again")
    assert found.agrees
    lines = [json.loads(line) for line in (tmp_path / "again" / "samples.jsonl").read_text().splitlines()]
    keys = found.results.tasks[0].samples
    (score,) = found.scores
    for who, now in (("adapter", score.now), ("base", score.base_now)):
        rights = [line["status"] == "right" for line in lines if line["policy"] == keys[who]]
        assert len(rights) == 4 * 40
        assert now == pytest.approx(sum(rights) / len(rights))


REPORTED = [entry for entry in ZOO.entries.values() if entry.provenance == "reported"]


def notes(name):
    return " ".join(ZOO.entry(name).notes)


def test_single_runs_have_no_order_and_a_printed_average_that_is_not_the_mean_is_said_to_be_none():
    """The means of the printed columns are computed here; where another average is printed, the notes say so."""
    ranking = rank_task(list(ZOO.entries.values()), "perl-average")
    assert {row["rank"].text for row in ranking.rows} == {"1-12"}
    assert sorted(len(names) for names in ranking.others.values()) == [3, 5]
    for name in ("base", "lora", "nora", "milora", "pissa"):
        *columns, average = ZOO.entry(f"nora-1.5b-{name}").scores
        mean = sum(score.adapter for score in columns) / len(columns)
        assert abs(mean - average.adapter) > 0.0005
        said = re.search(r"not the mean of the six printed columns \(that is ([\d.]+)\)", notes(f"nora-1.5b-{name}"))
        assert float(said[1]) == pytest.approx(100 * mean, abs=0.051)


def test_reported_entries_claim_nothing_that_nobody_here_has_seen_and_have_notes():
    for entry in REPORTED:
        assert entry.source, entry.name
        assert entry.notes, entry.name
        claims = (entry.adapter.sha256, entry.adapter.shipped, entry.recipe, entry.protocol, entry.licence)
        assert not any(claims), entry.name
        assert all(score.stderr is None and score.base_stderr is None for score in entry.scores), entry.name
        if entry.adapter.repo:
            assert "Nobody here has opened the repository" in notes(entry.name), entry.name
