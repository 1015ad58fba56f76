"""A stranger's adapter on the Hub: what is taken of it, what is refused, and how it is found."""

import hashlib
import json
import time

import pytest

from perl.errors import PerlError
from perl.evaluation.recounting.files import PUBLISHED, read_published
from perl.evaluation.recounting.recount import recount
from perl.evaluation.scoring.results import read_results
from perl.evaluation.tasks.heldout import heldout_questions
from perl.hub.card.candidate import find_candidate
from perl.hub.card.facts import RUN_FACTS
from perl.hub.push.package import package_candidate
from perl.hub.zoo_entries.adding import add
from perl.hub.zoo_entries.material import held_out_of_sandbox, hub_adapters
from perl.recipe.recipe import load_recipe
from perl.run.folder import Run
from tests.hub.zoo_entry_runs import trained

TASK, REPO = "sandbox:addition", "user/tiny"
CONFIG = "adapter_config.json"
RESULTS, RECIPE, WEIGHTS = "eval/results.json", "perl_recipe.yaml", "adapter_model.safetensors"


@pytest.fixture(scope="module")
def files():
    return dict(package_candidate(find_candidate(Run.read(trained())), REPO).files)


@pytest.fixture
def pushed(hub, files):
    """The Hub, with the run's adapter in a repository."""
    hub.create(REPO, files)
    return hub


def head(hub):
    return hub.repo(REPO).commits[-1].oid


def test_a_strangers_numbers_are_reported(pushed, files, tmp_path):
    commit = head(pushed)
    entry, of_run = add(REPO, tmp_path / "zoo"), add(trained(), tmp_path / "own")
    assert not [request for request in pushed.log if request.method == "GET" and WEIGHTS in request.path]
    assert (entry.name, entry.provenance) == ("tiny", "reported")
    assert entry.source == f"{pushed.url}/user/tiny/tree/{commit}"
    assert (entry.adapter.repo, entry.adapter.revision) == (REPO, commit)
    assert (entry.adapter.sha256, entry.adapter.size) == (of_run.adapter.sha256, of_run.adapter.size)
    assert [s.model_copy(update={"protocol_hash": None}) for s in of_run.scores] == entry.scores
    assert "nobody evaluated it here" in entry.notes[0]
    same = ("base", "base_sha256", "method", "seed", "steps", "tokens", "curve", "licence", "recipe", "protocol")
    assert [getattr(entry, name) for name in same] == [getattr(of_run, name) for name in same]
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


def test_hostile_files_and_those_of_another_adapter_or_of_other_samples_are_refused(pushed, files, tmp_path):
    config, secret = json.loads(files[CONFIG]) | {"lora_alpha": 160}, "hf_" + "x" * 30
    code = {"auto_mapping": {"parent_library": "os", "base_model_class": "x"}}
    claimed, facts = claiming_none(files, tmp_path / "claimed"), json.loads(files[RUN_FACTS])
    leaking = files[RECIPE].replace(b"prompt: prompt", f"prompt: {secret}".encode())
    facts["files"][RECIPE] = hashlib.sha256(leaking).hexdigest()
    for change, said in (
        ({RESULTS: None}, r"has no eval/results.json \(only what perl push sends is taken\)"),
        ({WEIGHTS: None}, r"has no adapter_model.safetensors \(only what"),
        ({RECIPE: b"#" * 200_001}, "perl_recipe.yaml has 200,001 bytes, at most 200,000 are downloaded"),
        ({RESULTS: b"[" * 100_000}, "eval/results.json"),
        ({RECIPE: b"a: &a [x]\nb: [*a, *a]\n"}, "not plain YAML: an alias"),
        ({RECIPE: b"peft: {rnak: 1}\n"}, "perl_recipe.yaml: peft.rnak: unknown key"),
        ({WEIGHTS: files[WEIGHTS] + b"x"}, r"user/tiny: is of another adapter: sha256 [0-9a-f]{12}"),
        ({CONFIG: json.dumps(config).encode()}, r"user/tiny: is of another adapter_config.json: sha256 "),
        ({CONFIG: json.dumps(json.loads(files[CONFIG]) | code).encode()}, "auto_mapping names 'os'"),
        ({RESULTS: files[RESULTS].replace(b'"transformers"', b'"AIME 2024: 99"')}, "engine.backend is"),
        ({RECIPE: leaking}, "perl_recipe.yaml: has SHA-256"),
        ({RECIPE: leaking, RUN_FACTS: json.dumps(facts).encode()}, "looks like a token"),
        ({RESULTS: claimed[RESULTS]}, r"the adapter's rights differ on \d+ problems"),
        ({PUBLISHED: claimed[PUBLISHED]}, r"the adapter's rights differ on \d+ problems"),
    ):
        absent = [file for file, content in change.items() if content is None]
        pushed.commit(REPO, {k: v for k, v in {**files, **change}.items() if v is not None}, delete=absent)
        with pytest.raises(PerlError, match=said) as caught:
            add(REPO, tmp_path / "zoo")
        assert secret not in str(caught.value)
        assert not (tmp_path / "zoo").exists(), said
    pushed.commit(REPO, files)
    with pytest.raises(PerlError, match="user/none: no model 'user/none'"):
        add("user/none", tmp_path / "zoo")
    pushed.faults.fail(2, 500, times=100)
    with pytest.raises(PerlError, match="the Hub answers 500"):
        add(REPO, tmp_path / "zoo")


def test_what_a_strangers_recipe_names_is_asked_of_the_sandbox_alone():
    """No file of this machine is read for it, nothing is fetched, and no benchmark gets other problems by its name."""
    for data in (
        {"train": "secrets.jsonl", "eval": "sandbox:sums"},
        {"train": "stranger/huge", "eval": "sandbox:sums"},
        {"train": "sandbox:sums", "eval": "stranger/gsm8k"},
        {"train": "gsm8k.jsonl"},
    ):
        assert held_out_of_sandbox(load_recipe({"extends": "quickstart", "data": data})) is None
    recipe = load_recipe({"extends": "quickstart", "eval": {"data": "/etc"}}, ["data.prompt_template='Sum: {prompt}'"])
    kept = held_out_of_sandbox(recipe)
    assert (kept.eval.data, kept.data.train.limit) == (None, 1)
    asked, again = (heldout_questions(one) for one in (recipe, kept))
    assert asked == again
    assert asked[0].text.startswith("Sum: ")


def test_adapters_are_found_by_their_tag_and_an_outage_is_one_line(pushed):
    card = (
        '---\nbase_model: user/base\ntags: [perl-rl, dora, "base_model:adapter:user/base", 5]\nmodel-index: [5]\n---\n'
    )
    pushed.create("user/other", {"README.md": card.encode()})
    pushed.create("user/foreign", {"README.md": b"---\ntags: [lora]\n---\n"})
    rows = [{name: cell.value for name, cell in row.items()} for row in hub_adapters()]
    found = {row["name"]: (row["revision"], row["base"], row["method"]) for row in rows}
    assert found == {
        REPO: (head(pushed), "sandbox:base", "lora"),
        "user/other": (pushed.repo("user/other").head.oid, "user/base", "dora"),
    }
    assert len(hub_adapters(limit=1)) == 1
    for cut in (lambda: pushed.faults.fail(1, 403, times=100), lambda: pushed.faults.cut(1, times=100)):
        cut()
        started = time.monotonic()
        with pytest.raises(PerlError, match=f"^{pushed.url} cannot be asked for adapters: ") as caught:
            hub_adapters()
        assert time.monotonic() - started < 30
        assert len(str(caught.value).splitlines()) == 1
        pushed.faults.clear()
