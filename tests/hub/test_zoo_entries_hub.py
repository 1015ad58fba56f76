"""A stranger's adapter on the Hub: what is taken of it, what is refused, and how it is found."""

import json
import time

import pytest
from huggingface_hub import constants

from perl.errors import PerlError
from perl.evaluation.recounting.published_samples import PUBLISHED, read_published
from perl.evaluation.recounting.recount import recount
from perl.evaluation.results import read_results
from perl.hub.card.candidate import find_candidate
from perl.hub.found_card import find_card
from perl.hub.push.package import package_candidate
from perl.hub.zoo_entries import add, hub_adapters, verify
from perl.run.folder import Run
from perl.zoo.catalogue import open_zoo
from tests.hub.zoo_entry_runs import trained

TASK, REPO = "sandbox:addition", "user/tiny"
CONFIG = "adapter_config.json"
RESULTS, RECIPE, WEIGHTS = "eval/results.json", "perl_recipe.yaml", "adapter_model.safetensors"


@pytest.fixture
def files():
    return dict(package_candidate(find_candidate(Run.read(trained())), REPO).files)


@pytest.fixture
def pushed(hub, files):
    """The Hub, with the run's adapter in a repository."""
    hub.create(REPO, files)
    return hub


def head(hub):
    return hub.repo(REPO).commits[-1].oid


def changed(content, edit):
    facts = json.loads(content)
    edit(facts)
    return json.dumps(facts).encode()


def test_a_strangers_numbers_are_reported(pushed, files, tmp_path):
    commit = head(pushed)
    entry, of_run = add(REPO, tmp_path / "zoo"), add(trained(), tmp_path / "own")
    assert not [request for request in pushed.log if request.method == "GET" and WEIGHTS in request.path]
    assert (entry.name, entry.provenance) == ("tiny", "reported")
    assert entry.source == f"{pushed.url}/user/tiny/tree/{commit}"
    assert (entry.adapter.repo, entry.adapter.revision) == (REPO, commit)
    assert entry.adapter.sha256 == of_run.adapter.sha256
    assert entry.adapter.size == of_run.adapter.size == sum(len(files[name]) for name in (CONFIG, WEIGHTS))
    assert [score.protocol_hash for score in entry.scores] == [None]
    assert [s.model_copy(update={"protocol_hash": None}) for s in of_run.scores] == entry.scores
    assert "nobody evaluated it here" in entry.notes[0]
    same = ("base", "base_sha256", "method", "seed", "steps", "tokens", "curve", "licence", "recipe", "protocol")
    assert [getattr(entry, name) for name in same] == [getattr(of_run, name) for name in same]
    with pytest.raises(PerlError, match=r"user/tiny: was not trained here"):
        add(REPO, tmp_path / "zoo", provenance="trained-here", force=True)
    add(REPO, tmp_path / "zoo", ship=True, force=True)
    assert (tmp_path / "zoo" / "adapters" / "tiny" / WEIGHTS).read_bytes() == files[WEIGHTS]
    pushed.commit(REPO, {RESULTS: b"{}"})
    with pytest.raises(PerlError, match="holds no results"):
        add(REPO, tmp_path / "zoo", force=True)
    assert add(f"{REPO}@{commit}", tmp_path / "zoo", force=True).adapter.revision == commit


def claiming_none(files, folder):
    """Samples of which the adapter's are all wrong, and results in which every figure follows from those."""
    folder.mkdir()
    (folder / "results.json").write_bytes(files[RESULTS])
    results = read_results(folder)
    lines = [json.loads(line) for line in files[PUBLISHED].decode().splitlines()]
    for line in lines:
        if line["policy"] == results.task(TASK).samples["adapter"]:
            line.update(status="wrong", extracted="none")
    samples = "".join(json.dumps(line) + "\n" for line in lines).encode()
    recount(results, read_published(samples, REPO)).results.write(folder)
    return {RESULTS: (folder / "results.json").read_bytes(), PUBLISHED: samples}


def test_reproduced_means_evaluated_here(pushed, files, tmp_path):
    true = json.loads(files[RESULTS])["perl"]["tasks"][TASK]
    pushed.commit(REPO, claiming_none(files, tmp_path / "claimed"))
    reported = add(REPO, tmp_path / "zoo")
    assert reported.scores[0].adapter == 0.0
    found = verify(open_zoo(tmp_path / "zoo"), "tiny")
    assert not found.agrees
    entry = add(REPO, tmp_path / "zoo", provenance="reproduced", force=True)
    assert (entry.provenance, entry.scores[0].adapter) == ("reproduced", true["adapter"]["accuracy"])
    assert entry.scores[0].protocol_hash == true["protocol_hash"]
    asked_as = {name: value for name, value in reported.protocol.items() if name not in ("backend", "dtype")}
    assert {name: entry.protocol[name] for name in asked_as} == asked_as
    assert entry.protocol["preset"] not in ("perl", "perl-paper")  # it is a recipe's
    assert entry.notes[0] == "Evaluated here; its author reports 0.0 on sandbox:addition."
    assert verify(open_zoo(tmp_path / "zoo"), "tiny").scores[0].verdict == "identical"


def test_hostile_files_and_those_of_another_adapter_or_of_other_samples_give_one_line(pushed, files, tmp_path):
    config, secret = json.loads(files[CONFIG]) | {"lora_alpha": 160}, "hf_" + "x" * 30
    of_these_files = {
        "other weights": (
            {WEIGHTS: files[WEIGHTS] + b"x"},
            r"user/tiny: is of another adapter: sha256 [0-9a-f]{12}, the weights",
        ),
        "the same weights with another config": (
            {CONFIG: json.dumps(config).encode()},
            r"user/tiny: is of another adapter_config.json: sha256 ",
        ),
        "a token of the author": (
            {RECIPE: files[RECIPE].replace(b"prompt: prompt", f"prompt: {secret}".encode())},
            "what looks like a token",
        ),
        "an entry that could not be read again": (
            {RESULTS: changed(files[RESULTS], many_versions)},
            r"tiny.json: is not an entry of a zoo: it has [\d,]+ bytes",
        ),
    }
    for name, (change, said) in {**HOSTILE, **of_these_files}.items():
        absent = [file for file, content in change.items() if content is None]
        pushed.commit(REPO, {k: v for k, v in {**files, **change}.items() if v is not None}, delete=absent)
        with pytest.raises(PerlError, match=said) as caught:
            add(REPO, tmp_path / "zoo")
        assert secret not in str(caught.value)
        if name in HOSTILE:
            assert len(str(caught.value)) < 500, name
            assert "user/tiny" in str(caught.value), name
        assert not (tmp_path / "zoo").exists(), name
    claimed = claiming_none(files, tmp_path / "claimed")
    for name in (RESULTS, PUBLISHED):  # either alone
        pushed.commit(REPO, {**files, name: claimed[name]})
        with pytest.raises(PerlError, match=r"user/tiny: results.json: .*the adapter's rights differ on \d+ problems"):
            add(REPO, tmp_path / "zoo")
    assert not (tmp_path / "zoo").exists()
    pushed.commit(REPO, files)
    with pytest.raises(PerlError, match="user/none: no model 'user/none'"):
        add("user/none", tmp_path / "zoo")
    pushed.faults.fail(2, 500, times=100)
    with pytest.raises(PerlError, match="the Hub answers 500"):
        add(REPO, tmp_path / "zoo")


DEEP = b"[" * 100_000
HOSTILE = {
    "no results": ({RESULTS: None}, r"has no eval/results.json \(perl push sends them\)"),
    "no weights": ({WEIGHTS: None}, r"has no adapter_model.safetensors \(only safetensors are taken\)"),
    "huge recipe": ({RECIPE: b"#" * 200_001}, "perl_recipe.yaml has 200,001 bytes, at most 200,000 are downloaded"),
    "huge card": ({"README.md": b"#" * 1_000_001}, "README.md has 1,000,001 bytes, at most 1,000,000 are downloaded"),
    "deep results": ({RESULTS: DEEP}, "eval/results.json"),
    "results of no kind": ({RESULTS: b"[1]"}, "holds no results"),
    "aliases": ({RECIPE: b"a: &a [x]\nb: [*a, *a]\n"}, "not plain YAML: an alias"),
    "tags": ({RECIPE: b"a: !!python/object/apply:os.getcwd []\n"}, "not plain YAML: a tag"),
    "aliases in the card": ({"README.md": b"---\na: &a [x]\nb: [*a, *a]\n---\n"}, "README.md.* an alias"),
    "another recipe": ({RECIPE: b"extends: quickstart\n"}, "perl_recipe.yaml: is not a recipe that stands alone"),
    "deep recipe": ({RECIPE: b"peft: " + DEEP[:90_000]}, "perl_recipe.yaml:1: not plain YAML: nested too deeply"),
    "deep card": (
        {"README.md": b"---\na: " + b"[" * 200 + b"]" * 200 + b"\n---\n"},
        "README.md:1: not plain YAML: nested too deeply",
    ),
    "long front matter": ({"README.md": b"---\na: [" + b"b, " * 70_000 + b"]\n---\n"}, "README.md: its front matter"),
    "unknown key": ({RECIPE: b"peft: {rnak: 1}\n"}, "perl_recipe.yaml: peft.rnak: unknown key"),
    "no text": ({RECIPE: b"\xff\xfe\x00"}, "perl_recipe.yaml: is not plain YAML"),
    "long number": ({RECIPE: b"peft: {rank: " + b"9" * 5000 + b"}\n"}, "perl_recipe.yaml"),
}


def many_versions(facts):
    facts["perl"]["versions"] = {f"package-{i}": "1" for i in range(50_000)}


class TestSearch:
    """``hub_adapters``: by tags, tolerant of what cards hold."""

    CARD = """---
base_model: user/base
library_name: peft
tags: [perl-rl, lora, "base_model:adapter:user/base"]
{more}
---
"""

    def create(self, hub, name, more=""):
        return hub.create(name, {"README.md": self.CARD.format(more=more).encode()})

    def test_what_perl_pushed_is_found_with_its_scores_and_by_filters(self, pushed, files):
        (found,) = hub_adapters()
        truth = json.loads(files[RESULTS])["perl"]["tasks"][TASK]["adapter"]["accuracy"]
        assert (found.id, found.sha, found.base, found.method) == (REPO, head(pushed), "sandbox:base", "lora")
        assert any(value in (truth, pytest.approx(100 * truth, abs=0.051)) for value in found.scores.values())
        assert found.notes == ()
        assert found.modified is not None
        self.create(pushed, "user/other")
        pushed.create("user/foreign", {"README.md": b"---\ntags: [lora]\n---\n"})
        for asked, expected in (
            ({}, {REPO, "user/other"}),
            ({"base": "user/base"}, {"user/other"}),
            ({"base": "sandbox:base"}, {REPO}),
            ({"method": "lora"}, {REPO, "user/other"}),
            ({"method": "dora"}, set()),
        ):
            assert sorted(found.id for found in hub_adapters(**asked)) == sorted(expected), asked
        assert len(hub_adapters(limit=1)) == 1

    INDEXES = (
        "5",
        "[5]",
        "[{name: x, results: {}}]",
        "[{name: x, results: [{task: text, dataset: 5, metrics: []}]}]",
        "[{name: x, results: [{task: {type: a}, dataset: {name: [1], type: b}, metrics: [{type: c, value: 1}]}]}]",
        "[{name: x, results: [{task: {type: a}, dataset: {type: b}, metrics: {type: c}}]}]",
        "[{name: x, results: [{task: {type: a}, dataset: {type: b}, metrics: [{type: c, value: high}]}]}]",
        "[{name: x, results: [{task: {type: a}, dataset: {type: b}, metrics: [{type: c, value: true}]}]}]",
    )

    def test_a_card_of_any_shape_hides_no_other_and_texts_are_short_and_printable(self, pushed):
        hostile = {f"user/hostile-{number}": index for number, index in enumerate(self.INDEXES)}
        for name, index in hostile.items():
            self.create(pushed, name, f"model-index: {index}")
        long = "A\\e[31m" + "x" * 1000
        index = f'[{{name: x, results: [{{dataset: {{name: "{long}"}}, metrics: [{{name: m, value: 1}}]}}]}}]'
        self.create(pushed, "user/loud", f"model-index: {index}")
        found = {adapter.id: adapter for adapter in hub_adapters()}
        assert set(found) == {REPO, "user/loud", *hostile}
        for name, index in hostile.items():
            assert found[name].scores == {}, index
            assert len(found[name].notes) == 1, index
        assert found[REPO].scores
        (name,) = found["user/loud"].scores
        assert name.isprintable()
        assert len(name) < 250

    def test_an_outage_is_one_line_whatever_is_read(self, pushed, monkeypatch, tmp_path):
        for n in (1, 2, 3):
            for read in (lambda: add(REPO, tmp_path / "zoo"), lambda: find_card(REPO)):
                pushed.faults.cut(n, times=100)
                with pytest.raises(PerlError) as caught:
                    read()
                assert len(caught.value.mistakes) == 1, n
                pushed.faults.rules.clear()
        pushed.faults.fail(1, 403, times=100)
        with pytest.raises(PerlError) as refused:
            hub_adapters()
        pushed.faults.clear()
        pushed.faults.cut(1, times=100)
        started = time.monotonic()
        with pytest.raises(PerlError) as cut:
            hub_adapters()
        assert time.monotonic() - started < 5
        assert "403" in str(refused.value)
        assert f"{pushed.url} cannot be asked for adapters" in str(cut.value)
        assert [len(str(error.value).splitlines()) for error in (refused, cut)] == [1, 1]
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        with pytest.raises(PerlError, match="HF_HUB_OFFLINE: the Hub is not asked"):
            hub_adapters()
