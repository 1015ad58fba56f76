"""An evaluation's numbers are a count by hand; what was drawn once is kept, and never for another policy."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from filelock import FileLock

import perl
from perl.errors import PerlError
from perl.evaluation.drawing.request import EvalSettings
from perl.evaluation.scoring.results import read_results
from perl.policy.fingerprint import base_fingerprint
from perl.policy.model import load_tokenizer
from perl.policy.name import adapter_policy_name
from perl.recipe.sections import ModelSection
from perl.sandbox import BASE_FOLDER, load_problems
from tests.completing import Drawing
from tests.counting import complete_with_seeds
from tests.oracles.evaluation import difference, estimate, is_right, pass_at, seed_by_hand, shares
from tests.saved_adapters import BASE, clean_base, policy_of

TASK = "sandbox:addition"
N, LONGEST = 6, 28  # too short for some


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


@pytest.fixture(scope="module")
def done(saved, tmp_path_factory) -> Path:
    """The folder of an evaluation of base and adapter."""
    folder = tmp_path_factory.mktemp("done") / "out"
    evaluate(saved, output=folder)
    return folder


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


def test_the_scores_of_base_and_adapter_are_counts_by_hand(done):
    found = read_results(done).task(TASK)
    rows = {"base": counted_by_hand(clean_base(), 2), "adapter": counted_by_hand(policy_of(), 2)}
    for who, score in (("base", found.base), ("adapter", found.adapter)):
        assert [list(getattr(problem, who)) for problem in found.problems] == rows[who]
        assert (score.n, score.k) == (N, 2)
        expected = estimate(shares(rows[who]))
        assert (score.accuracy, score.stderr, score.low, score.high) == pytest.approx(expected)
        assert score.pass_at == pytest.approx({k: pass_at(rows[who], k).mean for k in (1, 2)})
    gain = found.difference
    expected = difference(rows["base"], rows["adapter"])
    assert (gain.mean, gain.stderr, gain.low, gain.high) == pytest.approx(expected)
    assert rows["base"] != rows["adapter"]
    assert 0 < found.base.accuracy < 1


def test_results_name_base_adapter_and_policy_by_the_digests_of_the_files(saved, done):
    subject = read_results(done).subject
    weights, config = (saved / "adapter_model.safetensors").read_bytes(), (saved / "adapter_config.json").read_text()
    assert subject["adapter_sha256"] == hashlib.sha256(weights).hexdigest()
    assert subject["base_sha256"] == base_fingerprint(clean_base())
    assert subject["policy"] == adapter_policy_name(config, subject["adapter_sha256"], subject["base_sha256"])
    assert (subject["base"], subject["name"]) == (BASE, "lora")


@pytest.mark.parametrize(
    ("settings", "cut", "base", "adapter"),
    [
        ({}, 30, "12 of 12", "11 of 12"),  # the last line was cut short
        ({"k": 3}, 0, "12 of 18", "12 of 18"),
        ({"limit": N - 2}, 0, "8 of 8", "8 of 8"),
    ],
    ids=["a cut line", "larger k", "fewer problems"],
)
def test_what_is_there_is_kept_and_only_the_rest_is_drawn(saved, done, said, settings, cut, base, adapter):
    shutil.copytree(done, "out")
    before, content = texts(), Path("out/samples.jsonl").read_bytes()
    Path("out/samples.jsonl").write_bytes(content[: len(content) - cut])
    evaluate(saved, **settings)
    for who, there in (("base", base), ("adapter", adapter)):
        assert said().count(f"{who} on {TASK}: {there} completions are there already") == 1
    assert before.items() <= texts().items()
    evaluate(saved, output="fresh", **settings)
    assert numbers("out") == numbers("fresh")
    assert lines("fresh") == lines()[: len(lines("fresh"))]
    problems = max(N, settings.get("limit", N))
    assert len(lines()) == len(texts()) == 2 * problems * max(2, settings.get("k", 2))


@pytest.mark.parametrize("change", [{"seed": 1}, {"system_prompt": "1+1="}], ids=str)
def test_what_was_drawn_otherwise_is_not_taken_for_it(saved, done, change, said):
    shutil.copytree(done, "out")
    evaluate(saved, with_base=False, **change)
    assert not [line for line in said() if "there already" in line]
    evaluate(saved, with_base=False, output="fresh", **change)
    assert numbers("out") == numbers("fresh")
    assert len(lines()) == 24 + 12


def test_a_config_that_was_edited_is_another_policy_whose_completions_are_drawn(saved, done, said):
    shutil.copytree(done, "out")
    shutil.copytree(saved, "lora")
    file = Path("lora/adapter_config.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | {"lora_alpha": 1e-4}))
    first, second = read_results("out"), evaluate("lora")
    assert [line for line in said() if "there already" in line] == [
        f"base on {TASK}: 12 of 12 completions are there already"
    ]
    evaluate("lora", output="fresh")
    assert numbers("out") == numbers("fresh")
    assert first.task(TASK).adapter != second.task(TASK).adapter
    assert first.subject["adapter_sha256"] == second.subject["adapter_sha256"]
    assert first.subject["policy"] != second.subject["policy"]
    [earlier] = Path("out/earlier").iterdir()
    assert read_results(earlier).tasks == first.tasks
    assert len(lines()) == 36  # what the other one wrote stays


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


def test_a_folder_in_use_is_refused_before_anything_is_loaded(saved):
    Path("out").mkdir()
    shutil.copytree(BASE_FOLDER, "weightless")
    Path("weightless/model.safetensors").unlink()
    with FileLock("out/.lock"), pytest.raises(PerlError) as caught:
        evaluate(saved, base="weightless")
    assert str(caught.value) == "out: another process is evaluating here (choose another with --output)"
    assert sorted(path.name for path in Path("out").iterdir()) == [".lock"]
    evaluate(saved, limit=1, k=1)  # it is free again


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
