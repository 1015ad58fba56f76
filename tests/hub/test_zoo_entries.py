"""An entry of the zoo says what the run says, its numbers follow from their problems, and can be measured again."""

import json
import logging
import math
import random
import shutil
import statistics
from dataclasses import replace

import pytest

from perl.errors import PerlError
from perl.evaluation.results import ProblemResult, TaskResult, read_results
from perl.evaluation.samples import Sample
from perl.evaluation.score import score_samples
from perl.hub.push.package import evenly
from perl.hub.zoo_entries import add, verification, verify
from perl.hub.zoo_entries.from_run import of_run
from perl.policy.name import adapter_policy_name, policy_name
from perl.run.files import sha256_of, write_text
from perl.zoo.catalogue import open_zoo
from perl.zoo.entry import TaskScore, read_entry
from tests.evaluation.forgeries import FORGERIES
from tests.hub.files import weights
from tests.hub.zoo_entry_runs import change, copied, trained
from tests.oracles.mean_intervals import redrawn_differs, redrawn_reach

TASK = "sandbox:addition"


@pytest.fixture
def run(tmp_path):
    return copied(trained(), tmp_path / "tiny-0")


def results_file(run):
    return run / "eval" / "results.json"


def task_facts(facts):
    return facts["perl"]["tasks"][TASK]


def double(problem, facts):
    """A problem's rights twice, which leaves every share as it is."""
    return {who: 2 * marks for who, marks in task_facts(facts)["problems"][problem].items()}


def test_an_entry_says_what_the_run_says(run, tmp_path):
    entry = add(run, tmp_path / "zoo", notes=["a note"])
    facts, results = json.loads((run / "run.json").read_text()), read_results(run)
    assert (entry.name, entry.provenance, entry.base, entry.method) == (
        "tiny-0",
        "trained-here",
        "sandbox:base",
        "lora",
    )
    assert entry.base_sha256 == facts["fingerprint"]["base"]
    assert entry.adapter.sha256["adapter_model.safetensors"] == facts["fingerprint"]["adapter"]
    assert entry.adapter.size == sum((run / "adapter" / name).stat().st_size for name in entry.adapter.sha256)
    assert (entry.seed, entry.steps, entry.algorithm, entry.licence) == (0, 2, facts["loss"], "apache-2.0")
    assert (entry.seconds, entry.trainable_parameters) == (facts["seconds"], facts["trainable_parameters"])
    assert entry.settings["rank"] == 8
    assert entry.hardware == f"1 x {facts['hardware']['device']}"
    assert entry.created == facts["created"][:10]
    assert entry.notes == ["a note"]
    (score,), task = entry.scores, results.task(TASK)
    assert (score.task, score.metric, score.n, score.k) == (TASK, "avg@2", 8, 2)
    assert (score.adapter, score.stderr) == (task.adapter.accuracy, task.adapter.stderr)
    assert (score.base, score.base_stderr) == (task.base.accuracy, task.base.stderr)
    assert score.protocol_hash == task.protocol_hash
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert entry.tokens == rows[-1]["num_tokens"]
    assert entry.curve == [(row["step"], row["reward"]) for row in rows if "reward" in row]
    assert len(entry.curve) == 2


def test_an_entry_holds_no_path_names_policy_and_repository_and_is_read_back(run, tmp_path, caplog):
    entry = add(run, tmp_path / "zoo")
    file = tmp_path / "zoo" / "entries" / "tiny-0.json"
    assert read_entry(file) == entry
    assert str(tmp_path) not in file.read_text()
    assert entry.recipe["train"]["max_steps"] == 2
    assert open_zoo(tmp_path / "zoo").entry("tiny-0") == entry
    assert not entry.adapter.shipped
    assert "neither pushed nor shipped" in caplog.text
    subject = json.loads(results_file(run).read_text())["perl"]["subject"]
    config = (run / "adapter" / "adapter_config.json").read_text()
    digest = entry.adapter.sha256["adapter_model.safetensors"]
    assert entry.policy == adapter_policy_name(config, digest, entry.base_sha256) == subject["policy"]
    with caplog.at_level(logging.INFO, logger="perl"):
        small = add(run, tmp_path / "zoo", "small", ship=True)
    folder = tmp_path / "zoo" / "adapters" / "small"
    assert {file.name: sha256_of(file) for file in folder.iterdir()} == small.adapter.sha256
    assert small.adapter.shipped
    assert small.adapter.size == sum(file.stat().st_size for file in folder.iterdir())
    assert f"{small.adapter.size:,} bytes" in caplog.text
    digest = sha256_of(run / "adapter" / "adapter_model.safetensors")
    push = {"status": "done", "repo_id": "user/tiny", "steps": [], "commit": "c" * 40, "sha256": digest}
    (run / "push.json").write_text(json.dumps({"version": 2, "pushes": [push]}))
    assert add(run, tmp_path / "pushed").adapter.repo == "user/tiny"
    assert add(run, tmp_path / "pushed", force=True).adapter.revision == "c" * 40
    for other in ({"status": "queued"}, {"sha256": "0" * 64}):
        (run / "push.json").write_text(json.dumps({"version": 2, "pushes": [push | other]}))
        assert add(run, tmp_path / "pushed", force=True).adapter.repo is None


def test_the_scores_of_an_entry_are_those_of_the_samples(run, tmp_path):
    """Counted from the verdicts: accuracy, and its standard error over the means of the problems."""
    (score,) = add(run, tmp_path / "zoo").scores
    keys, rights = read_results(run).task(TASK).samples, {}
    for line in map(json.loads, (run / "eval" / "samples.jsonl").read_text().splitlines()):
        rights.setdefault((line["policy"], line["problem"]), []).append(line["status"] == "right")
    for who, found, error in (
        ("adapter", score.adapter, score.stderr),
        ("base", score.base, score.base_stderr),
    ):
        means = [sum(row) / len(row) for (policy, _), row in rights.items() if policy == keys[who]]
        assert (len(means), score.n) == (8, 8)
        assert found == pytest.approx(sum(means) / 8)
        assert error == pytest.approx(statistics.stdev(means) / 8**0.5)
    assert score.gain == pytest.approx(score.adapter - score.base)


def _shipped(zoo, name="small"):
    return zoo / "adapters" / name / "adapter_model.safetensors"


@pytest.mark.parametrize("at", ["replace_folder", "write_text"])
def test_a_kill_while_an_entry_is_replaced_leaves_none_with_anothers_adapter(run, tmp_path, at, monkeypatch):
    zoo = tmp_path / "zoo"
    add(run, zoo, "small", ship=True)
    older = _shipped(zoo).read_bytes()
    entry = zoo / "entries" / "small.json"

    def killed(place, *_):
        if at == "replace_folder" or place == entry:  # not where it is looked whether it can be read
            raise KeyboardInterrupt
        write_text(place, *_)

    with monkeypatch.context() as changed:
        changed.setattr("perl.hub.zoo_entries.adding._material", _of_another)
        changed.setattr(f"perl.hub.zoo_entries.adding.{at}", killed)
        with pytest.raises(KeyboardInterrupt):
            add(run, zoo, "small", ship=True, force=True)
    assert not entry.exists() or _shipped(zoo).read_bytes() == older
    add(run, zoo, "small", ship=True, force=True)
    assert _shipped(zoo).read_bytes() == older
    assert open_zoo(zoo).entry("small").adapter.shipped


def _of_another(source):
    """The same run with other weights, which nobody looks into."""
    found = of_run(source)
    return replace(found, files=found.files | {"adapter_model.safetensors": weights(b"of another run")})


def test_an_entry_has_a_fit_name_source_and_provenance_and_is_replaced_only_with_force(run, tmp_path):
    zoo = tmp_path / "zoo"
    add(run, zoo, notes=["first"], ship=True)
    with pytest.raises(PerlError, match=r"there is an entry 'tiny-0' already .*--force"):
        add(run, zoo, notes=["second"])
    assert open_zoo(zoo).entry("tiny-0").notes == ["first"]
    assert add(run, zoo, notes=["second"], force=True).notes == ["second"]
    assert not _shipped(zoo, "tiny-0").parent.exists()  # it no longer ships: of the older one no adapter is left
    assert not open_zoo(zoo).entry("tiny-0").adapter.shipped
    assert add(run, zoo, name="tiny.2-b").name == "tiny.2-b"
    with pytest.raises(PerlError, match=r"^--name: '../My LoRA' is not a valid name of an entry \(as in my-lora\)$"):
        add(run, zoo, name="../My LoRA")
    shutil.copytree(run, tmp_path / "My Run!")
    assert add(tmp_path / "My Run!", zoo).name == "my-run"
    zoo = tmp_path / "another"
    change(run / "run.json", lambda facts: facts.update(hardware={"device": "A Processor"}))
    with pytest.raises(PerlError, match=r"is a run of this machine, not reported \(trained-here\)"):
        add(run, zoo, provenance="reported")
    assert add(run, zoo).hardware == "1 x A Processor"  # a run that says less of itself
    (tmp_path / "empty").mkdir()
    for source in ("nowhere", str(tmp_path / "empty"), "./a/b", "a/b/c"):
        with pytest.raises(PerlError, match="neither a run folder nor a name on the Hub"):
            add(source, zoo)


def of_other_weights(facts):
    subject = facts["perl"]["subject"]
    subject["adapter_sha256"] = "0" * 64
    subject["policy"] = policy_name(subject["base_sha256"], "0" * 64, subject["adapter_config_sha256"])


DO_NOT_FOLLOW = [
    (lambda f: task_facts(f)["adapter"].update(accuracy=0.99), "adapter.accuracy is 0.99 in the file, counted"),
    (lambda f: task_facts(f)["base"].update(accuracy=0.01), r"base.accuracy is 0.01 in the file"),
    (lambda f: task_facts(f)["adapter"].update(stderr=0.0001), "adapter.stderr is 0.0001 in the file"),
    (lambda f: task_facts(f)["adapter"].update(stderr=None), "adapter.stderr is None in the file"),
    (lambda f: task_facts(f)["difference"].update(mean=0.526), "difference.mean is 0.526 in the file"),
    (lambda f: task_facts(f)["adapter"].update(mean_tokens=1.5), "adapter.mean_tokens is 1.5 in the file"),
    (lambda f: task_facts(f).update(protocol_hash="0" * 16), "its protocol_hash is '0000000000000000', which protocol"),
    (lambda f: f["perl"]["protocol"].update(temperature=0.5), "its protocol_hash is"),
    (lambda f: task_facts(f).update(max_new_tokens=65), "its protocol_hash is"),
    (lambda f: task_facts(f)["data"].update(sha256="x"), "its data has no SHA-256"),
]
NOT_RESULTS = [
    (lambda f: task_facts(f)["problems"].popitem(), "not of 8 problems with 2 completions"),
    (lambda f: task_facts(f)["problems"]["0"].pop("adapter"), "not of 8 problems with 2 completions"),
    (lambda f: task_facts(f)["problems"]["0"].update(double("0", f)), "not of 8 problems with 2 completions"),
    (lambda f: f["perl"]["protocol"].update(temperature="1"), "protocol: temperature: "),
    (lambda f: f["perl"]["protocol"].update(k=True), "protocol: k: "),
    (lambda f: task_facts(f)["data"].update(sha256=None), r"data\.sha256: "),
    (lambda f: task_facts(f).update(adapter=None), "no score of the adapter"),
    (lambda f: task_facts(f)["adapter"].update(accuracy="high"), "adapter on sandbox:addition: accuracy: "),
    (lambda f: task_facts(f)["adapter"].update(accuracy=float("nan")), "NaN is not a number"),
    (lambda f: f["perl"].update(tasks={}), "tasks: "),
]
OF_OTHERS = [
    (of_other_weights, "those of another adapter"),
    (
        lambda facts: facts["perl"]["subject"].update(adapter_sha256="0" * 64),
        "its policy is not the one that its digests name",
    ),
]


def test_results_that_do_not_follow_from_the_samples_or_are_of_another_adapter_are_refused(run, tmp_path):
    """A number that does not follow: in lines that name the file. Results that are none: in one line."""
    file, config = results_file(run), run / "adapter" / "adapter_config.json"
    good = file.read_text()
    as_trained = config.read_text()
    for rows in (DO_NOT_FOLLOW, NOT_RESULTS, OF_OTHERS):
        for edit, said in rows:
            file.write_text(good)
            change(file, edit)
            with pytest.raises(PerlError, match=said) as caught:
                add(run, tmp_path / "zoo")
            lines = str(caught.value).splitlines()
            assert rows is not NOT_RESULTS or len(lines) == 1, said
            assert rows is not DO_NOT_FOLLOW or all(line.startswith(f"{run}: results.json: ") for line in lines), said
    file.write_text(good)
    change(config, lambda facts: facts.update(lora_alpha=160))
    with pytest.raises(PerlError, match="or of this one with another config"):
        add(run, tmp_path / "zoo")
    config.write_text(as_trained)
    whole = shutil.copytree(run / "eval", tmp_path / "eval")
    shutil.rmtree(run / "eval")
    with pytest.raises(PerlError, match=r"was not evaluated .*perl eval --adapter"):
        add(run, tmp_path / "zoo")
    assert not (tmp_path / "zoo").exists()
    shutil.copytree(whole, run / "eval")
    # Every figure follows from bits that are all 1, only the samples say otherwise.
    FORGERIES["every bit 1 and every figure that follows"].edit(run / "eval")
    with pytest.raises(PerlError, match="the adapter's rights differ on"):
        add(run, tmp_path / "zoo")
    (run / "eval" / "samples.jsonl").unlink()
    with pytest.raises(PerlError, match=r"cannot be counted again, there is no samples.jsonl .*perl eval --adapter"):
        add(run, tmp_path / "zoo")
    assert not (tmp_path / "zoo").exists()


def test_other_seeds_stand_beside_the_first_if_recipe_and_tasks_are_the_same(run, tmp_path):
    zoo = tmp_path / "zoo"
    (seed,), other = add(run, zoo, seeds=[trained(1)]).seeds, read_results(trained(1))
    assert (seed.seed, seed.scores) == (1, {TASK: other.task(TASK).adapter.accuracy})
    assert seed.adapter_sha256 == other.subject["adapter_sha256"]
    for number, (file, edit, said) in enumerate(
        (
            (
                "recipe.yaml",
                lambda text: text.replace("learning_rate: 0.001", "learning_rate: 0.002"),
                r"0: is not another seed of .*tiny-0: its recipe differs in train.learning_rate",
            ),
            ("eval/results.json", renamed_task, None),
            ("run.json", without_seed, r"2: does not say in its run.json which seed it had"),
        )
    ):
        changed = copied(trained(1), tmp_path / f"{number}")
        (changed / file).write_text(edit((changed / file).read_text()))
        with pytest.raises(PerlError, match=said):
            add(run, zoo, seeds=[changed], force=True)
    with pytest.raises(PerlError, match="seed 0 is named twice"):
        add(run, zoo, seeds=[copied(trained(), tmp_path / "twin")], force=True)


def renamed_task(text):
    facts = json.loads(text)
    facts["perl"]["tasks"].update({"x": facts["perl"]["tasks"].pop(TASK)})
    return json.dumps(facts)


def without_seed(text):
    return json.dumps({name: value for name, value in json.loads(text).items() if name != "seed"})


def test_a_curve_keeps_its_ends_and_points_evenly_apart():
    for length, most in ((200, 64), (65, 64), (1000, 64), (10_001, 7)):
        kept = evenly([(step, step / length) for step in range(length)], most)
        places = [number * (length - 1) / (most - 1) for number in range(most)]
        assert [step for step, _ in kept] == pytest.approx(places, abs=0.5)
        assert [reward for _, reward in kept] == pytest.approx([step / length for step, _ in kept])
        assert (kept[0][0], kept[-1][0]) == (0, length - 1)
    points = [(step, 0.5) for step in range(64)]
    assert evenly(points, 64) == points


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
    assert [score.verdict for score in found.scores] == ["identical"]
    assert found.agrees
    assert found.notes == ()
    assert next(iter(found.lines())).startswith("sandbox:addition: identical, ")
    entry, again = zoo.entry("tiny-0"), read_results(tmp_path / "again")
    assert again.task(TASK).protocol_hash == entry.scores[0].protocol_hash
    assert again.subject["name"] == "zoo:tiny-0"
    entry = zoo.entry("tiny-0")
    score = entry.scores[0].model_copy(update={"adapter": 0.0})
    zoo.entries["tiny-0"] = entry.model_copy(update={"scores": [score], "base_sha256": "0" * 64})
    found = verify(zoo, "tiny-0", tasks=[TASK])
    assert [score.verdict for score in found.scores] == ["differs"]
    assert not found.agrees
    assert any("the base is another one: 000000000000 then" in note for note in found.notes)


def test_what_cannot_be_measured_as_it_was_is_refused_with_the_reason(zoo):
    entry = zoo.entry("tiny-0")
    with pytest.raises(PerlError, match=r"has no score on 'sandbox:additon' \(did you mean sandbox:addition\?\)"):
        verify(zoo, "tiny-0", tasks=["sandbox:additon"])
    other = entry.scores[0].model_copy(update={"protocol_hash": "0" * 16})
    own = entry.scores[0].model_copy(update={"task": "my held out problems"})
    for changes, said in (
        (
            {"protocol": entry.protocol | {"top_k": 5}},
            "sandbox:addition cannot be evaluated as it was: the task, its data",
        ),
        (
            {"protocol": entry.protocol | {"preset": "perl", "max_new_tokens": None}},
            "cannot be evaluated as it was: max_new_tokens None then, 32768 now",
        ),
        (
            {"protocol": entry.protocol | {"chat_template_given": "0" * 12}},
            "with a chat template that the entry does not",
        ),
        ({"scores": [other]}, "sandbox:addition cannot be evaluated as it was: the task, its data"),
        ({"scores": [own]}, "'my held out problems', which is not a task of perl eval"),
    ):
        zoo.entries["tiny-0"] = entry.model_copy(update=changes)
        with pytest.raises(PerlError, match=said):
            verify(zoo, "tiny-0")
    zoo.entries["tiny-0"] = entry
    file = zoo.folder / "adapters" / "tiny-0" / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(PerlError, match="is not the file that its entry lists"):
        verify(zoo, "tiny-0")


def measured(adapter, base):
    """A task's results from rights and wrongs."""
    groups = {
        who: [
            [Sample("sums", str(p), i, 0, "", 1, False, "right" if r else "wrong", None) for i, r in enumerate(row)]
            for p, row in enumerate(rows)
        ]
        for who, rows in (("base", base), ("adapter", adapter))
    }
    scores = {who: score_samples(rows) for who, rows in groups.items()}
    problems = tuple(ProblemResult(str(i), *rows) for i, rows in enumerate(zip(base, adapter, strict=True)))
    return TaskResult("sums", "sums", "0" * 16, 8, {}, **scores, problems=problems)


def drawn(chances, k, draw):
    rows = [[tuple(draw.random() < chance for _ in range(k)) for chance in chances] for _ in range(2)]
    return measured(*rows)


def as_score(found):
    """What an entry says of results."""
    return TaskScore(
        task="sums",
        metric=f"avg@{found.adapter.k}",
        k=found.adapter.k,
        n=found.adapter.n,
        adapter=found.adapter.accuracy,
        stderr=found.adapter.stderr,
        base=found.base.accuracy,
        base_stderr=found.base.stderr,
        protocol_hash=found.protocol_hash,
    )


class TestVerdicts:
    """Of scores made by hand: the run's results with other numbers in the entry."""

    def found(self, run, tmp_path, **changes):
        entry = add(run, tmp_path / "zoo", force=True)
        score = entry.scores[0].model_copy(update=changes)
        return verification.compare(entry, [score], read_results(run)).scores[0]

    def test_within_the_noise_of_the_completions_it_agrees(self, run, tmp_path):
        task = read_results(run).task(TASK)
        halves = sum(sum(problem.adapter) == 1 for problem in task.problems)
        # p(1-p) k/(k-1) = 1/2 for each problem with one right answer of two; two draws of two.
        expected = (halves * 0.5 / 8**2 * (1 / 2 + 1 / 2)) ** 0.5
        found = self.found(
            run, tmp_path, adapter=task.adapter.accuracy - 1.9 * expected, protocol_hash=task.protocol_hash
        )
        assert found.stderr == pytest.approx(expected)
        assert found.verdict == "agrees"
        assert found.reach > 1.96 * expected

    @pytest.mark.parametrize(("problems", "k"), [(11, 4), (30, 2), (100, 4)])
    def test_an_honest_score_differs_less_than_one_time_in_twenty_and_an_inflated_one_mostly(self, problems, k):
        """Drawn again with the same chance of each problem; many problems have a chance near 0 or 1.

        Each verdict is compared with that of the rule written anew. What an entry claims too much: 40 points.
        """
        draw, count = random.Random(0), 150
        told = {"honest": 0, "inflated": 0}
        by_hand = dict(told)
        for _ in range(count):
            chances = [draw.choice((0.01, 0.5, 0.99, 1.0)) for _ in range(problems)]
            then, now = (drawn(chances, k, draw) for _ in range(2))
            base, adapter = ([getattr(problem, who) for problem in now.problems] for who in ("base", "adapter"))
            for kind, claimed in (("honest", 0.0), ("inflated", 0.4)):
                score = as_score(then)
                score = score.model_copy(update={"adapter": min(1.0, score.adapter + claimed)})
                told[kind] += bool(verification._remeasured(score, now).differs)
                by_hand[kind] += redrawn_differs((score.base, k, base), (score.adapter, k, adapter))
        for kind, number in told.items():
            assert number / count == pytest.approx(by_hand[kind] / count, abs=1e-12), kind
        assert told["honest"] / count <= 0.05
        assert told["inflated"] / count > (0.5 if problems > 11 else 0.05)

    def test_one_completion_of_44_may_come_out_otherwise_but_not_half_nor_a_base_made_worse(self):
        right = [(True,) * 4] * 11
        other = [*right[:-1], (True, True, True, False)]
        half = [(True,) * 4] * 5 + [(False,) * 4] * 6
        for then, now, expected in ((other, right, "agrees"), (half, right, "differs")):
            found = verification._remeasured(as_score(measured(then, half)), measured(now, half))
            share = sum(map(sum, then)) / 44
            assert found.reach == pytest.approx(redrawn_reach(share, 4, now), rel=1e-6)
            assert found.verdict == expected
        assert found.differs == ("adapter", "gain")
        rows = [(True, False, True, False)] * 50
        score = as_score(measured([(True,) * 4] * 50, rows))
        now = measured([(True,) * 4] * 50, rows)
        assert verification._remeasured(score, now).verdict == "identical"
        found = verification._remeasured(score.model_copy(update={"base": 0.0}), now)
        assert (found.verdict, found.differs) == ("differs", ("base", "gain"))
        assert "the base 0.0 then, 50.0 now; not the same: base and gain" in str(found)

    def test_other_problems_have_both_errors(self, run, tmp_path):
        stderr = read_results(run).task(TASK).adapter.stderr
        for theirs in (0.3, 0.01, None):
            found = self.found(run, tmp_path, n=500, protocol_hash="0" * 16, stderr=theirs)
            assert found.stderr == pytest.approx(math.hypot(stderr, stderr if theirs is None else theirs))
        # Without any error it is unclear.
        entry, results = add(run, tmp_path / "zoo", force=True), read_results(run)
        one = replace(results.tasks[0], adapter=replace(results.tasks[0].adapter, stderr=None))
        score = entry.scores[0].model_copy(update={"adapter": 0.0, "n": 500, "protocol_hash": "0" * 16})
        found = verification.compare(entry, [score], replace(results, tasks=(one,)))
        assert found.scores[0].verdict == "unclear"
        assert found.agrees
        # The same number of another base is not identical.
        assert self.found(run, tmp_path).verdict == "identical"
        other = self.found(run, tmp_path, base=0.123)
        assert other.verdict == "differs"
        assert "base" in other.differs
        assert "adapter" not in other.differs
