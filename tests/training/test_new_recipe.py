"""A recipe that is written anew has sizes that fit by ``perl plan``'s own estimate, and reads as if written by hand."""

import json
import shutil
from pathlib import Path

import pytest

import perl
from perl.errors import PerlError
from perl.recipe import load_recipe
from perl.sandbox import BASE_FOLDER

SUMS = [{"problem": f"{i}+{j}=", "answer": str(i + j), "solution": "We count."} for i in range(10) for j in range(10)]
OF_7B = "Qwen/Qwen2.5-7B-Instruct"  # of which nothing is here but the sizes that ship


@pytest.fixture(autouse=True)
def _without_vllm(monkeypatch):
    monkeypatch.setattr("perl.recipe.rollout_section.Capabilities.installed", False)


def write_sums(name="sums.jsonl", rows=SUMS):
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return name


@pytest.mark.parametrize(("gpu", "quantization", "prompts"), [("T4", "nf4", 16), ("24", None, 8)])
def test_sizes_are_the_largest_of_a_few_that_fit_by_the_plans_estimate(gpu, quantization, prompts):
    made = perl.new_recipe(OF_7B, write_sums(), gpu=gpu)
    assert made.summary[0] == f"assumed  {OF_7B} is not here: its sizes are those that ship with perl"
    found = made.recipe
    assert found.model.name == OF_7B
    assert "boxed" in found.data.prompt_template
    assert (found.model.quantization, found.batch.prompts_per_step) == (quantization, prompts)
    name = "T4" if gpu == "T4" else f"{gpu.removesuffix('GB')}GB"

    def taken(*changes):
        values = perl.plan(found, ["engine.strategy=ddp", *changes], gpu=name).values
        column = values["strategies"]["ddp"]["memory"]
        return column["least"] / column["available"] if column["fits"] else 2.0

    assert taken() <= 0.9
    larger = ["model.quantization=null"] if quantization else ["train.prompts_per_step=16"] if prompts < 16 else []
    assert not larger or taken(*larger) > 0.9
    assert found.train.get("fp16", False) == (gpu == "T4")
    assert found.model.dtype == ("float16" if gpu == "T4" else "bfloat16")


def test_what_fits_nowhere_is_refused_with_what_it_needs():
    with pytest.raises(PerlError, match=r"72B-Instruct does not fit T4: it needs .* GiB at least, and has 14\.7"):
        perl.new_recipe("Qwen/Qwen2.5-72B-Instruct", write_sums(), "new.yaml", gpu="T4")
    assert not Path("new.yaml").exists()


@pytest.mark.parametrize("gpu", ["cpu", "T4"])
def test_every_key_has_a_comment_and_the_text_is_the_recipe(gpu):
    write_sums("held_out.jsonl", [{"problem": f"9{i}+1=", "answer": str(91 + i)} for i in range(9)])
    data = {"train": write_sums(), "eval": "held_out.jsonl"}
    made = perl.new_recipe(OF_7B if gpu == "T4" else str(BASE_FOLDER), data, "new.yaml", gpu=gpu)
    assert str(made) == made.text == Path("new.yaml").read_text(encoding="utf-8")
    assert load_recipe("new.yaml") == made.recipe
    lines = made.text.splitlines()
    assert max(map(len, lines)) <= 120
    for before, line in zip(["", *lines], lines, strict=False):
        key, _, rest = line.partition(":")
        if not line.startswith("#") and rest.strip():
            assert "  # " in line or before.strip().startswith("#"), key
    found = made.recipe
    assert found.data.train.columns.model_dump() == {"prompt": "problem", "answer": "answer"}
    assert found.data.eval.name == "held_out.jsonl"
    assert found.data.drop_overlap
    assert dict(found.rewards) == dict(load_recipe("quickstart").rewards)
    assert "{prompt}" in found.data.prompt_template
    assert found.engine.device == ("cpu" if gpu == "cpu" else "auto")
    assert any(line.startswith("needs ") for line in made.summary)


def test_completions_fit_the_context_and_steps_the_data():
    config = json.loads((BASE_FOLDER / "config.json").read_text())
    small = shutil.copytree(BASE_FOLDER, "small")
    Path(small, "config.json").write_text(json.dumps({**config, "max_position_embeddings": 40}))
    made = perl.new_recipe("./small", "sandbox:addition", gpu="cpu").recipe
    assert 0 < made.rollout.max_completion_length < 40
    few = perl.new_recipe(str(BASE_FOLDER), write_sums(rows=SUMS[:3]), gpu="cpu").recipe
    assert few.batch.prompts_per_step <= 3
    assert few.train["max_steps"] <= 10 * 3
    worked = write_sums(rows=[{**row, "solution": "12 " * 70} for row in SUMS[:3]])  # a token a character
    assert perl.new_recipe(str(BASE_FOLDER), worked, gpu="cpu").recipe.rollout.max_completion_length == 320


def test_a_reward_of_ones_own_needs_no_gold_answers(monkeypatch):
    monkeypatch.syspath_prepend(".")
    Path("drafted_reward.py").write_text("def f(completions, hint, **_):\n    return [0.0] * len(completions)\n")
    write_sums("hints.jsonl", [{"question": f"{i}?", "hint": "x"} for i in range(20)])
    found = perl.new_recipe(str(BASE_FOLDER), "hints.jsonl", reward="drafted_reward:f", gpu="cpu").recipe
    assert list(found.rewards) == ["drafted_reward:f"]
    assert found.data.train.columns.answer is None
    assert found.data.prompt_template is None


CHAT = [{"hint": "x", "talk": [{"role": "user", "content": f"{i}+1="}], "answer": str(i + 1)} for i in range(9)]
PLAIN = {"question": "1+1=", "answer": "2", "number": "3"}


@pytest.mark.parametrize(
    ("data", "columns"),
    [
        ("plain.jsonl", ("question", "answer")),
        ({"train": {"name": "plain.jsonl", "limit": 5, "columns": {"answer": "number"}}}, ("question", "number")),
        ("chat.jsonl", ("talk", "answer")),
        ("sandbox:addition", ("prompt", "answer")),
    ],
)
def test_columns_that_are_not_named_are_guessed(data, columns):
    write_sums("plain.jsonl", [PLAIN] * 9)
    write_sums("chat.jsonl", CHAT)
    found = perl.new_recipe(str(BASE_FOLDER), data, gpu="cpu").recipe.data
    assert (found.train.columns.prompt, found.train.columns.answer) == columns
    assert found.prompt_template is None or data != "chat.jsonl"
    assert found.train.limit == (5 if "limit" in str(data) else None)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (3, "data: must be a name or a mapping, not 3"),
        ({"train": 3}, "data.train: must be a mapping, not 3"),
        ({"name": "plain.jsonl", "colums": {}}, "data.train.colums: unknown key (did you mean columns?)"),
        ({"name": "plain.jsonl", "columns": {"prompt": "zz"}}, "data.train.columns.prompt: plain.jsonl has no column"),
        ({"name": "sandbox:addition", "columns": {"prompt": "x"}}, "data.train.columns: sandbox:addition has columns"),
    ],
)
def test_data_is_checked_as_a_recipes_is(data, said):
    write_sums("plain.jsonl", [PLAIN] * 9)
    with pytest.raises(PerlError) as found:
        perl.new_recipe(str(BASE_FOLDER), data, gpu="cpu")
    assert any(line.startswith(said) for line in str(found.value).splitlines()), str(found.value)
