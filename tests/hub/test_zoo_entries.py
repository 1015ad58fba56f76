"""An entry of the zoo says what the run says, its numbers follow from their problems, and can be measured again."""

import json
import shutil

import pytest

from perl.errors import PerlError
from perl.evaluation.scoring.results import read_results
from perl.hub.zoo_entries.adding import add
from perl.hub.zoo_entries.material import entry_facts
from perl.hub.zoo_entries.verification import _remeasured, compare, verify
from perl.policy.name import adapter_policy_name, policy_name
from perl.run.files import sha256_of
from perl.zoo.catalogue import open_zoo
from perl.zoo.entry import read_entry
from tests.evaluation.forgeries import FORGERIES
from tests.hub.zoo_entry_runs import change, copied, trained
from tests.zoo.entries import score

TASK = "sandbox:addition"


@pytest.fixture
def run(tmp_path):
    return copied(trained(), tmp_path / "tiny-0")


def results_file(run):
    return run / "eval" / "results.json"


def task_facts(facts):
    return facts["perl"]["tasks"][TASK]


def test_an_entry_says_what_the_run_says_and_is_read_back_without_a_path(run, tmp_path, caplog):
    entry = add(run, tmp_path / "zoo", notes=["a note"])
    facts, results = json.loads((run / "run.json").read_text()), read_results(run)
    found = (entry.name, entry.provenance, entry.base, entry.method, entry.notes)
    assert found == ("tiny-0", "trained-here", "sandbox:base", "lora", ["a note"])
    assert entry.base_sha256 == facts["fingerprint"]["base"]
    assert entry.adapter.sha256["adapter_model.safetensors"] == facts["fingerprint"]["adapter"]
    assert entry.adapter.size == sum((run / "adapter" / name).stat().st_size for name in entry.adapter.sha256)
    assert (entry.seed, entry.steps, entry.algorithm, entry.licence) == (0, 2, facts["loss"], "apache-2.0")
    assert (entry.seconds, entry.trainable_parameters) == (facts["seconds"], facts["trainable_parameters"])
    assert (entry.settings["rank"], entry.created) == (8, facts["created"][:10])
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert entry.tokens == rows[-1]["num_tokens"]
    assert entry.curve == [(row["step"], row["reward"]) for row in rows if "reward" in row]
    file = tmp_path / "zoo" / "entries" / "tiny-0.json"
    assert read_entry(file) == entry == open_zoo(tmp_path / "zoo").entry("tiny-0")
    assert str(tmp_path) not in file.read_text()
    assert entry.recipe["train"]["max_steps"] == 2
    assert not entry.adapter.shipped
    assert "neither pushed nor shipped" in caplog.text
    config = (run / "adapter" / "adapter_config.json").read_text()
    digest = entry.adapter.sha256["adapter_model.safetensors"]
    assert entry.policy == adapter_policy_name(config, digest, entry.base_sha256) == results.subject["policy"]
    small = add(run, tmp_path / "zoo", "small", ship=True)
    folder = tmp_path / "zoo" / "adapters" / "small"
    assert {file.name: sha256_of(file) for file in folder.iterdir()} == small.adapter.sha256
    assert small.adapter.shipped
    push = {"status": "done", "repo_id": "user/tiny", "steps": [], "commit": "c" * 40, "sha256": digest}
    for changes, expected in (({}, ("user/tiny", "c" * 40)), ({"sha256": "0" * 64}, (None, None))):
        (run / "push.json").write_text(json.dumps([push | changes]))
        place = add(run, tmp_path / "pushed", force=True).adapter
        assert (place.repo, place.revision) == expected


def test_an_entry_has_a_fit_name_and_source_and_is_replaced_only_with_force(run, tmp_path):
    zoo = tmp_path / "zoo"
    add(run, zoo, notes=["first"], ship=True)
    with pytest.raises(PerlError, match=r"there is an entry 'tiny-0' already .*--force"):
        add(run, zoo, notes=["second"])
    assert add(run, zoo, notes=["second"], force=True).notes == ["second"]
    assert not (zoo / "adapters" / "tiny-0").exists()  # it no longer ships: of the older one no adapter is left
    with pytest.raises(PerlError, match=r"^--name: '../My LoRA' is not a valid name of an entry \(as in my-lora\)$"):
        add(run, zoo, name="../My LoRA")
    shutil.copytree(run, tmp_path / "My Run!")
    assert add(tmp_path / "My Run!", zoo).name == "my-run"
    for source in ("nowhere", "./a/b", "a/b/c"):
        with pytest.raises(PerlError, match="neither a run folder nor a name on the Hub"):
            add(source, zoo)


def of_other_weights(facts):
    subject = facts["perl"]["subject"]
    subject["adapter_sha256"] = "0" * 64
    subject["policy"] = policy_name(subject["base_sha256"], "0" * 64, subject["adapter_config_sha256"])


REFUSED = [
    (lambda f: task_facts(f)["adapter"].update(accuracy=0.99), "adapter.accuracy is 0.99 in the file, counted"),
    (lambda f: f["perl"]["protocol"].update(temperature=0.5), "its protocol_hash is"),
    (lambda f: task_facts(f)["problems"].popitem(), "not of 32 problems with 2 completions"),
    (lambda f: task_facts(f).update(adapter=None), "the score of the adapter is not of 0 problems"),
    (of_other_weights, "those of another adapter"),
]


def test_results_that_do_not_follow_from_the_samples_or_are_of_another_adapter_are_refused(run, tmp_path):
    file, config = results_file(run), run / "adapter" / "adapter_config.json"
    good, as_trained = file.read_text(), config.read_text()
    for edit, said in REFUSED:
        file.write_text(good)
        change(file, edit)
        with pytest.raises(PerlError, match=said):
            add(run, tmp_path / "zoo")
    file.write_text(good)
    change(config, lambda facts: facts.update(lora_alpha=160))
    with pytest.raises(PerlError, match="or of this one with another config"):
        add(run, tmp_path / "zoo")
    config.write_text(as_trained)
    # Every figure follows from bits that are all 1, only the samples say otherwise.
    FORGERIES["every bit 1 and every figure that follows"].edit(run / "eval")
    with pytest.raises(PerlError, match="the adapter's rights differ on"):
        add(run, tmp_path / "zoo")
    shutil.rmtree(run / "eval")
    with pytest.raises(PerlError, match=r"was not evaluated .*perl eval --adapter"):
        add(run, tmp_path / "zoo")
    assert not (tmp_path / "zoo").exists()


def test_other_seeds_stand_beside_the_first_if_recipe_and_tasks_are_the_same(run, tmp_path):
    zoo = tmp_path / "zoo"
    (seed,), other = add(run, zoo, seeds=[trained(1)]).seeds, read_results(trained(1))
    assert (seed.seed, seed.scores) == (1, {TASK: other.task(TASK).adapter.accuracy})
    assert seed.adapter_sha256 == other.subject["adapter_sha256"]
    changed = copied(trained(1), tmp_path / "changed")
    recipe = changed / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("scheduler_type: linear", "scheduler_type: constant"))
    with pytest.raises(PerlError, match=r"perl_run.json: says perl_recipe.yaml .* one was changed since"):
        add(run, zoo, seeds=[changed], force=True)
    (changed / "adapter" / "perl_run.json").unlink()
    with pytest.raises(PerlError, match=r"changed: is not another seed of .*tiny-0: its recipe differs in train"):
        add(run, zoo, seeds=[changed], force=True)
    with pytest.raises(PerlError, match="a seed is named twice"):
        add(run, zoo, seeds=[copied(trained(), tmp_path / "twin")], force=True)


@pytest.fixture(scope="module")
def shipping(tmp_path_factory):
    """A zoo that ships the run's adapter; nobody may write to it."""
    folder = tmp_path_factory.mktemp("shipping") / "zoo"
    add(trained(), folder, ship=True)
    return folder


@pytest.fixture
def zoo(shipping, tmp_path):
    shutil.copytree(shipping, tmp_path / "zoo")
    return open_zoo(tmp_path / "zoo")


def test_the_same_adapter_scores_the_same_again_and_a_score_that_is_not_its_own_differs(zoo, tmp_path):
    found = verify(zoo, "zoo:tiny-0", output=tmp_path / "again")
    assert ([score.verdict for score in found.scores], found.agrees, found.notes) == (
        ["identical"],
        True,
        ("sandbox:addition: asked as the entry's recipe asks",),
    )
    assert list(found.lines())[-1].startswith("reported only: ")
    entry, again = zoo.entry("tiny-0"), read_results(tmp_path / "again")
    assert again.task(TASK).protocol_hash == entry.scores[0].protocol_hash
    assert again.subject["name"] == "zoo:tiny-0"
    wrong = replace_in(entry.scores[0], adapter=0.3)
    found = compare(replace_in(entry, base_sha256="0" * 64), [wrong], again)
    assert ([score.verdict for score in found.scores], found.agrees) == (["differs"], False)
    assert any("the base is another one: 000000000000 then" in note for note in found.notes)


def test_what_an_entry_says_beside_its_scores_is_contradicted_or_listed_as_reported_only(zoo):
    entry, folder = zoo.entry("tiny-0"), zoo.folder / "adapters" / "tiny-0"
    files = {name: folder / name for name in entry.adapter.sha256}
    wrong, reported = entry_facts(entry, files)
    assert wrong == []
    assert {"tokens", "curve", "seconds", "hardware", "rewards", "licence"} <= set(reported)
    train = entry.recipe["train"]
    for changes, said in (
        ({"method": "dora"}, "the entry: method: says dora"),
        ({"settings": entry.settings | {"rank": 64}}, "the entry: settings.rank: says 64"),
        ({"algorithm": "gspo"}, "the entry: algorithm: says gspo"),
        ({"steps": 5000}, "the entry: steps: says 5000, its recipe says 2"),
        ({"recipe": entry.recipe | {"train": train | {"max_steps": 5000}}}, "steps: says 2, its recipe says 5000"),
    ):
        lines = [str(mistake) for mistake in entry_facts(replace_in(entry, **changes), files)[0]]
        assert any(said in line for line in lines), (changes, lines)
    with pytest.raises(PerlError, match="batch has a malformed value"):
        entry_facts(replace_in(entry, settings={"batch": "AIME 2024: 97.3 (audited)"}), files)
    zoo.entries["tiny-0"] = replace_in(entry, method="dora")
    assert not verify(zoo, "tiny-0").agrees


def replace_in(entry, **changes):
    return entry.model_copy(update=changes)


def test_what_cannot_be_measured_as_it_was_is_refused_with_the_reason(zoo):
    entry = zoo.entry("tiny-0")
    with pytest.raises(PerlError, match=r"has no score on 'sandbox:additon' \(did you mean sandbox:addition\?\)"):
        verify(zoo, "tiny-0", tasks=["sandbox:additon"])
    own = replace_in(entry.scores[0], task="my held out problems")
    for changes, said in (
        ({"protocol": entry.protocol | {"top_k": 5}}, "sandbox:addition cannot be evaluated as it was: the task"),
        ({"protocol": entry.protocol | {"chat_template_given": "0" * 12}}, "with a chat template that the entry does"),
        ({"scores": [own]}, "cannot be evaluated on my held out problems, no task of perl eval"),
    ):
        zoo.entries["tiny-0"] = replace_in(entry, **changes)
        with pytest.raises(PerlError, match=said):
            verify(zoo, "tiny-0")
    zoo.entries["tiny-0"] = entry
    file = zoo.folder / "adapters" / "tiny-0" / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(PerlError, match="is not the file that its entry lists"):
        verify(zoo, "tiny-0")


def test_a_score_is_identical_agrees_or_differs_by_the_intervals_of_adapter_and_base():
    same = score(0.5, base=0.4)
    for changes, verdict in (
        ({}, "identical"),
        ({"base": 0.2}, "differs"),  # of another base
        ({"adapter": 0.9}, "differs"),
        ({"stderr": None, "adapter": 0.505}, "agrees"),
        ({"adapter": 0.9, "stderr": 0.5}, "differs"),  # by the error that was measured
        ({"base_stderr": 0.001}, "differs"),
        ({"metric": "pass@9"}, "differs"),
    ):
        assert _remeasured(same.model_copy(update=changes), same).verdict == verdict, changes
    few = same.model_copy(update={"adapter": 0.4375, "stderr": 0.128, "base": 0.375, "base_stderr": 0.125, "n": 16})
    for claimed in (0.99, 1.0, 0.0):  # whose own errors are smaller than the one that was measured
        assert _remeasured(few.model_copy(update={"adapter": claimed}), few).verdict == "differs"
