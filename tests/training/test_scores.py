"""A run scores its base and its adapter on what it holds out and on benchmark tasks, also between steps."""

import collections
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

import perl
from perl.errors import PerlError
from perl.evaluation.drawing.request import EvalSettings
from perl.evaluation.scoring.results import read_results
from perl.hub.card.candidate import find_candidate, identity_mistakes
from perl.policy.saved.adapter import WEIGHTS, find_adapter
from perl.recipe import load_recipe
from perl.run.files import sha256_of
from perl.run.folder import Run
from perl.sandbox import load_problems
from perl.training.prepare import prepare, read_recipe

QUESTIONS = 32
TASKS = {"tasks": [{"name": "sandbox:chain", "limit": None}], "k": 2, "limit": 6, "max_completion_length": 24}


def recipe(**evaluation):
    return {
        **{"model": {"name": "sandbox:base"}, "peft": {"rank": 2}, "data": {"train": "sandbox:addition"}},
        **{"rewards": {"accuracy": 1.0}, "rollout": {"max_completion_length": 24}},
        "train": {"max_steps": 4, "prompts_per_step": 2, "num_generations": 4, "learning_rate": 2e-3, "save_steps": 2},
        **{"eval": TASKS | evaluation, "engine": {"device": "cpu", "threads": 1}},
    }


@pytest.fixture(scope="module", autouse=True)
def _few_questions():
    """The task's first ones, of 500."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "perl.evaluation.tasks.task_data.load_problems", lambda name, split: load_problems(name, split)[:QUESTIONS]
        )
        yield


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return perl.train(recipe(every=2), output_dir=tmp_path_factory.mktemp("runs") / "run")


def rows_of(run):
    return [json.loads(line) for line in run.metrics.read_text().splitlines()]


def test_a_run_ends_with_base_and_adapter_on_every_task(run):
    results = read_results(run.path / "eval")
    assert [task.name for task in results.tasks] == ["sandbox:addition", "sandbox:chain"]
    assert [(task.score.n, task.score.k) for task in results.tasks] == [(6, 2), (QUESTIONS, 2)]
    for task in results.tasks:
        facts = run.facts["eval"][task.name]
        assert facts["base"] == task.base.accuracy
        assert facts["adapter"] == task.adapter.accuracy
        assert facts["stderr"] == task.adapter.stderr
    assert results.subject["adapter_sha256"] == run.facts["fingerprint"]["adapter"]
    assert results.subject["base_sha256"] == run.facts["fingerprint"]["base"]
    rows = [json.loads(line) for line in (run.path / "eval" / "samples.jsonl").read_text().splitlines()]
    for task in results.tasks:  # counted again from what was drawn
        shares = collections.defaultdict(float)
        for row in rows:
            if row["task"] == task.name:
                shares[row["policy"]] += (row["status"] == "right") / (task.score.n * task.score.k)
        assert sorted(shares.values()) == pytest.approx(sorted([task.base.accuracy, task.adapter.accuracy]))
    assert run.status == "done"
    assert torch.is_grad_enabled()


def test_the_scores_are_those_that_perl_eval_gives_for_the_adapter(run, tmp_path):
    settings = EvalSettings(temperature=1.0, top_p=1.0, max_new_tokens=24, lighteval=False, preset="base")
    again = perl.evaluate(run.adapter, tasks=["sandbox:chain"], k=2, output=tmp_path, settings=settings)
    before = read_results(run.path / "eval").task("sandbox:chain")
    assert again.task("sandbox:chain").problems == before.problems
    assert again.task("sandbox:chain").protocol_hash == before.protocol_hash


def test_scores_between_steps_stand_in_the_log_of_their_step(run):
    scored = {row["step"]: row for row in rows_of(run) if "eval/sandbox:chain/avg@2" in row}
    assert sorted(scored) == [2, 4]
    last = read_results(run.path / "eval").task("sandbox:chain").adapter
    assert scored[4]["eval/sandbox:chain/avg@2"] == pytest.approx(last.accuracy)
    assert scored[4]["eval/sandbox:chain/pass@2"] == pytest.approx(last.pass_at[2])
    assert all("reward" in row for row in scored.values())


def test_the_best_adapter_is_kept_with_its_score(run):
    best = json.loads((run.path / "best" / "best.json").read_text())
    scores = {row["step"]: row["eval/sandbox:chain/avg@2"] for row in rows_of(run) if "eval/sandbox:chain/avg@2" in row}
    assert best["value"] == pytest.approx(max(scores.values()))
    assert scores[best["step"]] == pytest.approx(best["value"])
    assert best["sha256"] == sha256_of(run.path / "best" / "adapter" / WEIGHTS)
    assert find_adapter(str(run.path / "best" / "adapter"), "sandbox:base").config.r == 2


def test_another_best_adapter_or_score_than_the_run_kept_is_refused(run, tmp_path):
    copied = Run.read(shutil.copytree(run.path, tmp_path / "run"))
    record, weights = copied.path / "best" / "best.json", copied.path / "best" / "adapter" / WEIGHTS
    best = json.loads(record.read_text())
    assert identity_mistakes(find_candidate(copied, "best")) == []
    metrics = {**best["metrics"], "eval/sandbox:chain/avg@2": 0.99}
    other = 4 if best["step"] == 2 else 2
    for changed, said in (
        ({"value": 0.99}, "value is not the mean avg@k of its own metrics"),
        ({"value": 0.99, "metrics": metrics}, f"differ in the scores of step {best['step']}"),
        ({"step": other}, f"differ in the scores of step {other}"),
    ):
        record.write_text(json.dumps({**best, **changed}))
        (mistake,) = identity_mistakes(find_candidate(copied, "best"))
        assert said in str(mistake)
    record.write_text(json.dumps(best))
    weights.write_bytes((run.adapter / WEIGHTS).read_bytes() if best["step"] == 2 else b"of another run")
    (mistake,) = identity_mistakes(find_candidate(copied, "best"))
    assert f"the run trained {best['sha256'][:12]}: it was changed since" in str(mistake)


@pytest.fixture(scope="module")
def unscored(tmp_path_factory):
    return perl.train(recipe(enabled=False, tasks=[]), output_dir=tmp_path_factory.mktemp("unscored") / "run")


def test_scores_between_steps_change_nothing_of_the_training(run, unscored):
    ours, other = (load_file(each.adapter / WEIGHTS) for each in (run, unscored))
    assert ours.keys() == other.keys()
    assert all(torch.equal(ours[name], other[name]) for name in ours)
    assert unscored.facts["fingerprint"]["adapter"] == run.facts["fingerprint"]["adapter"]
    assert not (unscored.path / "best").exists()
    assert not (unscored.path / "eval").exists()
    assert "eval" not in unscored.facts


def test_what_cannot_be_scored_is_refused_before_weights_are_loaded(tmp_path):
    for evaluation, words in (
        ({"tasks": ["sandbox:chian"]}, ["eval.tasks", "sandbox:chian", "did you mean sandbox:chain?"]),
        ({"best": "sandbox:chain/avg@4", "every": 2}, ["eval.best", "avg@4", "did you mean sandbox:chain/avg@2?"]),
        ({"tasks": ["aime24"], "data": "nowhere"}, ["nowhere", "aime24"]),
    ):
        with pytest.raises(PerlError) as caught:
            prepare(read_recipe(recipe(**evaluation), (), tmp_path / "run"))
        assert all(word in str(caught.value) for word in words), str(caught.value)
        assert "\n" not in str(caught.value)
    for evaluation in ({"tasks": [], "every": 2}, {"best": "sandbox:chain/avg@2"}):
        with pytest.raises(PerlError, match=r"eval\.\w+: is about tasks|eval\.best: needs eval\.every"):
            load_recipe(recipe(**evaluation))


def test_a_best_adapter_that_is_published_is_scored_as_the_final_one_is(tmp_path, hub, monkeypatch):
    monkeypatch.setattr("perl.evaluation.reporting.lighteval_installed", lambda: False)  # it takes ten seconds a policy
    asked = recipe(every=1, best="sandbox:chain/avg@1", k=1) | {"hub": {"repo_id": "user/best", "push": "best"}}
    asked["train"] = asked["train"] | {"max_steps": 2, "learning_rate": 0.3}  # a second step that ruins the first's
    done = perl.train(asked, output_dir=tmp_path / "run")
    record = json.loads((done.path / "best" / "best.json").read_text())
    assert record["step"] == 1
    best, final = read_results(done.path / "best" / "eval"), read_results(done.path / "eval")
    assert best.subject["adapter_sha256"] == sha256_of(done.path / "best" / "adapter" / WEIGHTS)
    assert best.subject["adapter_sha256"] != final.subject["adapter_sha256"]
    for name in ("sandbox:addition", "sandbox:chain"):
        assert best.task(name).base == final.task(name).base
        assert best.task(name).protocol_hash == final.task(name).protocol_hash
    assert best.task("sandbox:chain").adapter.accuracy == record["value"]
    there = hub.repo("user/best").files()
    assert there["adapter_model.safetensors"] == (done.path / "best" / "adapter" / WEIGHTS).read_bytes()
    assert there["eval/results.json"] == (done.path / "best" / "eval" / "results.json").read_bytes()
    drawn = [json.loads(line) for line in (done.path / "best" / "eval" / "samples.jsonl").read_text().splitlines()]
    assert len({line["policy"] for line in drawn if line["task"] == "sandbox:chain"}) == 3  # the base's only once
