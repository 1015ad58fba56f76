"""An evaluation's numbers are a count by hand; what was drawn once is kept, and never for another policy."""

import hashlib
import json
import logging
import random
import shutil
from pathlib import Path

import pytest
import torch
from filelock import FileLock

import perl
from perl.errors import PerlError
from perl.evaluation.lighteval.score import lighteval_installed
from perl.evaluation.request import EvalSettings
from perl.evaluation.results import read_results
from perl.policy.model import base_fingerprint, load_tokenizer
from perl.recipe.sections import ModelSection
from perl.sandbox import BASE_FOLDER, load_problems
from tests.completing import Drawing
from tests.counting import complete_with_seeds, is_right, seed_by_hand
from tests.saved_adapters import BASE, clean_base, policy_of, save_adapter

TASK = "sandbox:addition"
N, LONGEST = 6, 28  # too short for some


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "lora"
    save_adapter(folder)
    return folder


@pytest.fixture
def said(caplog):
    """What the evaluations so far said."""
    caplog.set_level(logging.INFO, logger="perl")
    return lambda: [record.getMessage() for record in caplog.records]


def evaluate(adapter=None, output="out", k=2, tasks=(TASK,), base=None, **settings):
    chosen = {"limit": N, "max_new_tokens": LONGEST, "lighteval": False, "device": "cpu", **settings}
    return perl.evaluate(adapter, base, tasks, k, output=output, settings=EvalSettings(**chosen))


def lines(folder="out") -> list[dict]:
    return [json.loads(line) for line in (Path(folder) / "samples.jsonl").read_text().splitlines()]


def texts(folder="out") -> dict:
    return {(row["policy"], row["task"], row["problem"], row["index"]): row["text"] for row in lines(folder)}


def numbers(folder) -> dict:
    """What a results file says of the tasks, which no interruption may change."""
    return json.loads((Path(folder) / "results.json").read_text())["perl"]["tasks"]


def counted_by_hand(policy, k) -> list[list[bool]]:
    """Problem by problem, which completions are right."""
    problems = load_problems(TASK, "heldout")[:N]
    tokenizer = load_tokenizer(ModelSection())
    messages = [[{"role": "user", "content": problem.question}] for problem in problems]
    prompts = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    drawing = Drawing(longest=LONGEST, temperature=0.6, top_p=0.95)
    right = []
    for i, (problem, prompt) in enumerate(zip(problems, prompts, strict=True)):
        seeds = [seed_by_hand(TASK, str(i), index) for index in range(k)]
        completions = complete_with_seeds(policy, tokenizer, [prompt] * k, seeds, drawing)
        right.append([is_right(completion.text, problem.answer) for completion in completions])
    return right


@pytest.fixture(scope="module")
def by_hand():
    """Of base and adapter."""
    return {"base": counted_by_hand(clean_base(), 2), "adapter": counted_by_hand(policy_of(), 2)}


def test_the_scores_of_base_and_adapter_are_counts_by_hand(saved, by_hand):
    results = evaluate(saved)
    found = results.task(TASK)
    for who, score in (("base", found.base), ("adapter", found.adapter)):
        rows = by_hand[who]
        assert [list(getattr(problem, who)) for problem in found.problems] == rows
        assert (score.n, score.k) == (N, 2)
        assert score.accuracy == pytest.approx(sum(map(sum, rows)) / (2 * N))
        assert score.pass_at == pytest.approx({1: score.accuracy, 2: sum(map(any, rows)) / N})
    assert found.difference.mean == pytest.approx(found.adapter.accuracy - found.base.accuracy)
    assert by_hand["base"] != by_hand["adapter"]
    assert 0 < found.base.accuracy < 1


def test_the_hashes_are_those_of_the_files(saved):
    subject = evaluate(saved).subject
    weights = (saved / "adapter_model.safetensors").read_bytes()
    assert subject["adapter_sha256"] == hashlib.sha256(weights).hexdigest()
    assert subject["base_sha256"] == base_fingerprint(clean_base())
    assert (subject["base"], subject["name"]) == (BASE, "lora")


def test_the_base_under_an_adapter_is_the_base(saved):
    evaluate(saved, output="both")
    alone = evaluate(base=BASE, output="alone")
    key = alone.task(TASK).samples["base"]
    assert {place: text for place, text in texts("both").items() if place[0] == key} == texts("alone")
    assert read_results("both").task(TASK).base == alone.task(TASK).base
    assert alone.task(TASK).adapter is None
    assert alone.subject["adapter_sha256"] is None


def test_without_the_base_the_adapter_scores_the_same(saved):
    both = evaluate(saved, output="both").task(TASK)
    alone = evaluate(saved, output="alone", with_base=False).task(TASK)
    assert (alone.base, alone.difference) == (None, None)
    assert alone.adapter == both.adapter
    assert len(lines("both")) == 2 * len(lines("alone"))


def test_what_is_there_is_not_drawn_again(saved, said):
    first = evaluate(saved)
    before = lines()
    again = evaluate(saved)
    assert lines() == before
    assert again.tasks == first.tasks
    assert said().count(f"base on {TASK}: 12 of 12 completions are there already") == 1
    assert said().count(f"adapter on {TASK}: 12 of 12 completions are there already") == 1


def test_a_larger_k_keeps_the_first_completions_and_draws_the_rest(saved, said):
    evaluate(saved, k=1)
    first = texts()
    evaluate(saved, k=3)
    assert f"base on {TASK}: 6 of 18 completions are there already" in said()
    assert first.items() <= texts().items()
    assert len(lines()) == len(texts()) == 2 * 18
    evaluate(saved, k=3, output="at once")
    assert numbers("at once") == numbers("out")
    assert lines("at once") == lines()
    evaluate(saved, k=1, output="out")  # fewer again: all stay
    assert len(lines()) == 2 * 18
    assert numbers("out")[TASK]["adapter"]["k"] == 1


@pytest.mark.parametrize("settings", [{"batch_size": 1}, {"batch_size": 5}, {"limit": 3}, {"limit": 9}])
def test_batch_size_and_number_of_problems_change_no_completion(saved, settings):
    evaluate(saved, output="one")
    evaluate(saved, output="other", **settings)
    one, other = (by_policy(folder) for folder in ("one", "other"))
    shared = one.keys() & other.keys()
    assert len(shared) == 2 * 2 * min(N, settings.get("limit", N))
    assert all(one[place] == other[place] for place in shared)


def by_policy(folder) -> dict:
    """Policy, problem and index -> the text and its verdict."""
    keys = {key: who for who, key in numbers(folder)[TASK]["samples"].items()}
    return {(keys[row["policy"]], row["problem"], row["index"]): (row["text"], row["status"]) for row in lines(folder)}


def test_another_order_of_tasks_changes_no_completion(saved):
    evaluate(saved, output="one", tasks=(TASK, "sandbox:chain"))
    evaluate(saved, output="other", tasks=("sandbox:chain", TASK))
    assert texts("one") == texts("other")
    assert list(numbers("other")) == ["sandbox:chain", TASK]
    assert numbers("one") == numbers("other")


def test_a_task_that_is_added_later_joins_the_others(saved):
    evaluate(saved)
    results = evaluate(saved, tasks=("sandbox:chain",))
    assert [task.name for task in results.tasks] == ["sandbox:chain", TASK]
    evaluate(saved, output="at once", tasks=("sandbox:chain", TASK))
    assert numbers("out") == numbers("at once")
    assert len(lines()) == 48


@pytest.mark.parametrize(
    "change", [{"temperature": 0.9}, {"seed": 1}, {"max_new_tokens": 20}, {"system_prompt": "1+1="}]
)
def test_what_was_drawn_otherwise_is_not_taken_for_it(saved, change, said):
    evaluate(saved, with_base=False)
    evaluate(saved, with_base=False, **change)
    assert not [line for line in said() if "there already" in line]
    evaluate(saved, with_base=False, output="fresh", **change)
    assert numbers("out") == numbers("fresh")
    assert len(lines()) == 24


def test_an_adapter_that_was_trained_again_at_the_same_place_is_another_one(saved, said):
    shutil.copytree(saved, "lora")
    old = evaluate("lora")
    save_adapter("lora", seed=5, size=0.03)
    new = evaluate("lora")
    assert new.task(TASK).samples["base"] == old.task(TASK).samples["base"]
    assert new.task(TASK).samples["adapter"] != old.task(TASK).samples["adapter"]
    assert [line for line in said() if "there already" in line] == [
        f"base on {TASK}: 12 of 12 completions are there already"
    ]
    evaluate("lora", output="fresh")
    assert numbers("out") == numbers("fresh")
    assert numbers("out")[TASK]["adapter"] != json.loads(json.dumps(old.as_dict()))["perl"]["tasks"][TASK]["adapter"]
    assert len(lines()) == 36  # what the old one wrote stays


def test_a_line_that_was_cut_short_is_drawn_again_and_nothing_else(saved, said):
    evaluate(saved)
    file, expected = Path("out/samples.jsonl"), (lines(), numbers("out"))
    content = file.read_bytes()
    file.write_bytes(content[: len(content) - 30])
    evaluate(saved)
    assert f"adapter on {TASK}: 11 of 12 completions are there already" in said()
    assert (lines(), numbers("out")) == expected


def test_the_folder_holds_what_is_promised(saved):
    evaluate(saved)
    names = {path.name for path in Path("out").iterdir()} - {".lock"}
    assert names - {"problems.png"} == {"results.json", "samples.jsonl", "table.md"}

    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    facts = json.loads(Path("out/results.json").read_text(), parse_constant=refuse)
    assert set(facts["results"]) == {f"{TASK}|0"}
    assert {"avg@2", "avg@2_stderr", "pass@1", "pass@2", "maj@2"} <= set(facts["results"][f"{TASK}|0"])
    assert facts["config_general"]["model_config"]["backend"] == "transformers"
    kept = {row["policy"] for row in lines()}
    assert set(facts["perl"]["tasks"][TASK]["samples"].values()) == kept
    assert str(Path.cwd()) not in Path("out/results.json").read_text()
    assert str(saved) not in Path("out/results.json").read_text()


def test_a_single_problem_is_valid_json_too(saved):
    evaluate(saved, limit=1, k=1)
    facts = numbers("out")[TASK]
    assert facts["difference"] is None
    assert facts["adapter"]["stderr"] is None


def test_a_run_of_method_full_is_compared_with_its_base():
    run = Path("runs/full")
    run.mkdir(parents=True)
    (run / "run.json").write_text(json.dumps({"status": "done", "method": "full"}))
    (run / "recipe.yaml").write_text("model: {name: sandbox:base}\n")
    trained = policy_of(size=0.03).merge_and_unload()
    trained.save_pretrained(run / "model")
    load_tokenizer(ModelSection()).save_pretrained(run / "model")
    found = evaluate(run, output=None)
    assert found.task(TASK).base == evaluate(base=BASE, output="base").task(TASK).base
    assert found.task(TASK).adapter == evaluate(base=run / "model", output="model").task(TASK).base
    assert found.task(TASK).adapter != found.task(TASK).base
    weights = (run / "model" / "model.safetensors").read_bytes()
    assert found.subject["adapter_sha256"] == hashlib.sha256(weights).hexdigest()
    assert (run / "evals" / "perl" / "results.json").is_file()


def test_a_checkpoint_and_a_folder_score_like_the_run(saved):
    run = Path("runs/mine")
    for folder in ("adapter", "checkpoints/checkpoint-3"):
        shutil.copytree(saved, run / folder)
    (run / "run.json").write_text(json.dumps({"status": "done", "method": "lora"}))
    (run / "recipe.yaml").write_text("model: {name: sandbox:base}\n")
    expected = evaluate(run, output=None)
    assert read_results(run / "evals" / "perl").tasks == expected.tasks
    for folder in ("adapter", "checkpoints/checkpoint-3"):
        assert evaluate(run / folder, output=f"of {folder}").tasks == expected.tasks
    assert evaluate(run / "adapter", output=None).subject["name"] == "mine"
    assert Path("evals/mine/perl/results.json").is_file()


def test_the_process_is_as_it_was(saved):
    torch.manual_seed(3)
    random.seed(3)
    before = torch.get_rng_state(), random.getstate()
    evaluate(saved)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()


def test_a_folder_in_use_is_refused_before_anything_is_loaded(saved):
    Path("out").mkdir()
    shutil.copytree(BASE_FOLDER, "weightless")
    Path("weightless/model.safetensors").unlink()
    with FileLock("out/.lock"), pytest.raises(PerlError) as caught:
        evaluate(saved, base="weightless")
    assert str(caught.value) == "out: another process is evaluating here (choose another with --output)"
    assert sorted(path.name for path in Path("out").iterdir()) == [".lock"]
    evaluate(saved)  # it is free again


def test_a_base_that_is_not_the_adapters_is_refused_even_if_it_fits(saved):
    other = clean_base()
    with torch.no_grad():
        next(other.parameters())[0] += 1
    other.save_pretrained("other")
    load_tokenizer(ModelSection()).save_pretrained("other")
    with pytest.raises(PerlError, match=r"^--adapter: .*lora was trained on another base|^--adapter: ") as caught:
        evaluate(saved, base="other")
    assert len(str(caught.value).splitlines()) == 1
    assert not Path("out/samples.jsonl").exists()


@pytest.mark.skipif(not lighteval_installed(), reason="lighteval is not installed")
def test_lightevals_own_score_stands_beside_ours(saved):
    results = evaluate(saved, limit=5, lighteval=True)
    found = results.task(TASK)
    assert set(found.lighteval) == {"base", "adapter"}
    facts = json.loads(Path("out/results.json").read_text())
    for who, ours in (("base", found.base), ("adapter", found.adapter)):
        own = found.lighteval[who]
        disagreements = own.only_lighteval - own.only_ours
        assert own.metrics["avg@n:n=2"] == pytest.approx(ours.accuracy + disagreements / 10)
        assert facts["perl"]["tasks"][TASK]["lighteval"][who]["only_ours"] == own.only_ours == 0
    assert facts["results"][f"{TASK}|0"]["avg@n:n=2"] == found.lighteval["adapter"].metrics["avg@n:n=2"]
    assert facts["results"][f"{TASK}|0"]["avg@2"] == found.adapter.accuracy
    assert torch.is_grad_enabled()


def test_where_lighteval_is_broken_our_own_score_stands(monkeypatch, said):
    Path("broken/lighteval").mkdir(parents=True)
    Path("broken/lighteval/__init__.py").write_text("raise RuntimeError('its latex2sympy2 is of another version')\n")
    monkeypatch.syspath_prepend(str(Path("broken").resolve()))
    expected = evaluate(base=BASE, output="without").task(TASK)
    found = evaluate(base=BASE, lighteval=True).task(TASK)
    assert found == expected
    [warning] = [line for line in said() if line.startswith("lighteval")]
    assert "its latex2sympy2 is of another version" in warning
    assert warning.endswith("; our own score stands")
