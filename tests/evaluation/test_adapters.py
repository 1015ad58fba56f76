"""Several adapters in one evaluation score as alone, and each base is loaded and drawn once for all of them."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

import perl
from perl.errors import PerlError
from perl.evaluation.drawing import policies
from perl.evaluation.drawing.request import EvalSettings
from perl.evaluation.scoring.results import read_results
from perl.policy.fingerprint import base_fingerprint
from perl.policy.model import load_tokenizer
from perl.policy.save_adapter import write_adapter
from perl.recipe.sections import ModelSection
from perl.rollouts.hf_engine import TransformersEngine
from tests.saved_adapters import clean_base, policy_of, save_adapter

TASKS = ("sandbox:addition", "sandbox:chain")
N, K = 4, 2
USUAL = {"limit": N, "max_new_tokens": 24, "lighteval": False, "device": "cpu"}


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """Two adapters on the sandbox's base."""
    folder = tmp_path_factory.mktemp("saved")
    save_adapter(folder / "first")
    save_adapter(folder / "second", seed=5, size=0.03)
    return folder


@pytest.fixture
def asked(monkeypatch) -> list[int]:
    """How many completions each call of the engine was asked for."""
    counts, start = [], TransformersEngine.start

    def counted(engine, requests, *rest):
        counts.append(sum(request.count for request in requests))
        return start(engine, requests, *rest)

    monkeypatch.setattr(TransformersEngine, "start", counted)
    return counts


@pytest.fixture
def loaded(monkeypatch) -> list[str]:
    """The bases that were loaded with their weights."""
    names, load = [], policies.load_base

    def noted(section, *rest, **more):
        names.append(section.name)
        return load(section, *rest, **more)

    monkeypatch.setattr(policies, "load_base", noted)
    return names


def evaluate(adapter, output, tasks=TASKS, base=None, **settings):
    return perl.evaluate(adapter, base, tasks, K, output=output, settings=EvalSettings(**{**USUAL, **settings}))


def cached() -> Path:
    """The first file of the cache of bases, whose folder every test has to itself."""
    return next((Path(os.environ["PERL_CACHE"]) / "bases").glob("*.jsonl"))


def without_times(found) -> tuple:
    return found.subject, found.protocol, found.engine, found.tasks


def test_several_adapters_score_as_each_does_alone_on_a_base_that_is_loaded_and_drawn_once(saved, asked, loaded):
    both = evaluate([saved / "first", saved / "second"], "both")
    assert loaded == ["sandbox:base"]
    assert sum(asked) == 3 * len(TASKS) * N * K  # the base, and two adapters
    shutil.rmtree(cached().parent)
    alone = [evaluate(saved / name, f"alone/{name}") for name in ("first", "second")]
    assert [without_times(found) for found in both] == [without_times(found) for found in alone]
    for name in ("first", "second"):
        assert (Path("both") / name / "samples.jsonl").read_bytes() == (
            Path("alone") / name / "samples.jsonl"
        ).read_bytes()
    assert both[0].tasks[0].base == both[1].tasks[0].base
    assert both[0].tasks[0].adapter != both[1].tasks[0].adapter
    text = Path("both/table.md").read_text()
    assert all(f"| {name} " in text for name in ("base", "first", "second"))


def test_the_next_evaluation_of_another_adapter_draws_no_base(saved, asked):
    evaluate(saved / "first", "one")
    before, counts = sum(asked), len(asked)
    found = evaluate(saved / "second", "two")
    assert sum(asked[counts:]) == len(TASKS) * N * K
    assert before == 2 * len(TASKS) * N * K
    assert found.task(TASKS[0]).base == read_results("one").task(TASKS[0]).base
    counts = len(asked)
    evaluate(saved / "second", "three", base_cache=False)
    assert sum(asked[counts:]) == 2 * len(TASKS) * N * K


def test_what_is_in_the_cache_is_judged_again_and_what_cannot_be_drawn_is_left(asked):
    first = evaluate(None, "one", tasks=TASKS[:1], base="sandbox:base")
    file = cached()
    lines = [{**json.loads(line), "status": "right"} for line in file.read_text().splitlines()]
    lines[0]["seed"] += 1
    file.write_text("".join(json.dumps(line) + "\n" for line in lines)[:-10])  # and a kill cut the last one short
    counts = len(asked)
    again = evaluate(None, "two", tasks=TASKS[:1], base="sandbox:base")
    assert sum(asked[counts:]) == 2
    assert again.tasks == first.tasks


def test_adapters_of_different_bases_stand_each_beside_its_own(saved, loaded):
    other = clean_base()
    with torch.no_grad():
        other.lm_head.weight.mul_(0.5)
    other.save_pretrained("other")
    load_tokenizer(ModelSection()).save_pretrained("other")
    policy = policy_of(base=other)
    write_adapter(policy, Path("third"), "other", None, base_fingerprint(policy))
    found = evaluate([saved / "first", "third", saved / "second"], "out", tasks=TASKS[:1])
    assert [one.subject["name"] for one in found] == ["first", "third", "second"]
    assert loaded == ["sandbox:base", "other"]
    assert found[0].tasks[0].base == found[2].tasks[0].base != found[1].tasks[0].base


def test_adapters_of_one_name_have_folders_of_their_own(saved):
    shutil.copytree(saved / "second", "elsewhere/first")
    found = evaluate([saved / "first", "elsewhere/first"], "out", tasks=TASKS[:1])
    folders = sorted(path.name for path in Path("out").iterdir() if path.is_dir())
    assert len(folders) == 2
    assert all(name.startswith("first-") for name in folders)
    read = {one.subject["adapter_sha256"] for one in map(read_results, (Path("out") / name for name in folders))}
    assert read == {one.subject["adapter_sha256"] for one in found}


def test_what_cannot_be_is_refused_before_anything_is_loaded(saved, loaded):
    with pytest.raises(PerlError, match=r"^adapter: an empty list names no adapter"):
        evaluate([], "out")
    twice = str(saved / "first")
    with pytest.raises(PerlError, match=r"^--adapter: .*first is named twice"):
        evaluate([twice, twice], "out")
    assert loaded == []
