r"""``perl reward`` says what the verifier makes of an answer, and which gold answers of a recipe are no answers."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from perl.rewards import check
from perl.sandbox import BASE_FOLDER, HELDOUT_COUNT, TRAIN_COUNT, load_problems

ROWS = ["12", "-3/4", "north", "\\frac{1}{", "first 3\n#### 1,234", "so it is \\boxed{\\frac{1}{2}}", "(1, 2)"]
REWARDS = """
import asyncio

def length(completions, **_):
    return [float(len(text)) for text in completions]

def level(completions, solution, level, **_):
    return [float(level[i] == solution[i]) for i in range(len(completions))]

def asks_for_more(completions, colour, **_):
    return [1.0] * len(completions)

def strict(completions):
    return [1.0] * len(completions)

def fails(completions, **_):
    raise RuntimeError("not today")

def one(completions, **_):
    return [1.0] * len(completions)

def shorter(completions, **_):
    return [-float(len(text)) for text in completions]

def backwards(completions, solution, **_):
    return [float(gold not in text) for gold, text in zip(solution, completions)]

def nested(completions, **_):
    return [[1.0]] * len(completions)

def box(completions, **_):
    return [float(text.split("boxed{")[1][0] == "1") for text in completions]

def nothing(completions, **_):
    return [None] * len(completions)

def chat(completions, prompts, **_):
    return [float(c[0]["role"] == "assistant" and p[0]["role"] == "system") for c, p in zip(completions, prompts)]

async def slow(completions, **_):
    await asyncio.sleep(0)
    return [2.0 if i == 0 else None for i in range(len(completions))]
"""


def write_rows(path, golds):
    rows = [{"prompt": f"question {i}", "answer": gold, "level": "12"} for i, gold in enumerate(golds, 1)]
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_recipe(golds=(), **sections):
    """A recipe over a file of problems with these gold answers."""
    write_rows("train.jsonl", golds)
    Path("recipe.yaml").write_text(json.dumps({"data": {"train": "train.jsonl"}, **sections}), encoding="utf-8")
    return "recipe.yaml"


VERDICTS = (
    ("1/2", r"so it is \boxed{0.5}", "right", "0.5", "1/2"),
    ("12", "I do not know", "no answer", "none", "12"),
    ("\\frac{1}{", r"\boxed{3}", "unparsable gold", "3", "\\frac{1}{"),
    ("9 - 2\n#### 7", "#### 7", "right", "7", "7"),
    ("-5", r"\boxed{-5}", "right", "-5", "-5"),
)


def test_try_prints_status_answer_and_gold_answer_also_of_stdin_and_as_json(printed, perl):
    for gold, completion, status, extracted, understood in VERDICTS:
        rows = dict(line.split(maxsplit=1) for line in printed("reward", "try", gold, completion).splitlines())
        assert float(rows.pop("seconds")) >= 0.0
        assert rows == {"status": status, "extracted": extracted, "gold": understood}
    said = perl("reward", "try", "7", "-", stdin="first 9,\nthen \\boxed{7}\n")
    assert said.out.splitlines()[:3] == ["status     right", "extracted  7", "gold       7"]
    row = json.loads(printed("reward", "try", "--json", "-12", "so\n\\boxed{ 11\n+ 1 }"))
    assert row.pop("seconds") >= 0.0
    assert row == {"status": "wrong", "extracted": "11\n+ 1", "gold": "-12"}


def test_the_gold_answers_of_the_sandbox_are_all_right_and_no_torch_is_imported():
    code = (
        "import sys; from perl.cli.commands import run; code = run(['reward', 'check', 'quickstart'], 'perl'); "
        "print('torch' in sys.modules); sys.exit(code)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.splitlines() == [
        f"train  sandbox:addition: {TRAIN_COUNT:,} gold answers, {TRAIN_COUNT:,} right",
        f"eval   sandbox:addition: {HELDOUT_COUNT:,} gold answers, {HELDOUT_COUNT:,} right",
        "reward accuracy: boxed 1, sentence 1, tagged 1, wrong 0, empty 0",
        "False",
    ]
    assert len(load_problems("sandbox:addition", "train")) == TRAIN_COUNT


def test_a_gold_answer_that_cannot_be_read_is_listed_with_its_row_in_the_file(perl):
    said = perl("reward", "check", write_recipe(ROWS))
    assert (said.code, said.err) == (1, "")
    lines = said.out.splitlines()
    assert lines[0].startswith("train  train.jsonl: 7 gold answers, ")
    assert lines[0].endswith(", 1 only letter for letter")
    assert lines[1:] == [
        "  row 4: unparsable gold: \\frac{1}{",
        lines[2],
        "1 row gives right completions no reward: drop or rewrite it",
    ]
    # What stands after #### is the gold answer, but a completion with that text has another one in its box.
    said = perl("reward", "check", write_recipe(["#### 7", "the first \\boxed{8} is no #### 7"]), "--json")
    ((train,), rewards) = json.loads(said.out).values()
    assert train["failing"] == [{"row": 2, "gold": "the first \\boxed{8} is no #### 7", "status": "wrong"}]
    assert (said.code, train["right"], train["unreadable"]) == (1, 1, 0)
    assert rewards[0]["means"]["wrong"] == 0.0
    # No completion has the words of a sentence; a unit of several words is none.
    sentences = ["She has 35 apples, because I counted them.", "5 square feet per second"]
    said = perl("reward", "check", write_recipe(sentences), "--json")
    assert [row["status"] for row in json.loads(said.out)["sets"][0]["failing"]] == ["a_sentence"]


def test_rewards_are_tried_on_right_wrong_and_empty_texts_and_a_useless_one_is_found(perl, monkeypatch):
    monkeypatch.syspath_prepend(".")
    Path("own.py").write_text(REWARDS, encoding="utf-8")
    names = ("length", "level", "asks_for_more", "strict", "fails", "nothing", "slow", "one", "nested", "box")
    rewards = {"accuracy": 1, "format": 1, "repetition_penalty": 1, **{f"own:{name}": 1 for name in names}}
    rewards["process_reward"] = {"weight": 1, "args": {"model": "nobody/nothing", "positive": "+", "negative": "-"}}
    said = perl("reward", "check", write_recipe(["12", "123"], rewards=rewards), "--json")
    found = {row["name"]: row for row in json.loads(said.out)["rewards"]}
    assert (said.code, list(found)) == (1, list(rewards))
    lengths = [len(f"\\boxed{{{gold}}}") for gold in (12, 123)]
    assert (found["own:length"]["means"]["boxed"], found["own:length"]["means"]["empty"]) == (sum(lengths) / 2, 0.0)
    assert found["accuracy"]["means"] == {"boxed": 1, "sentence": 1, "tagged": 1, "wrong": 0, "empty": 0}
    for name, word in (
        *(("own:asks_for_more", "colour"), ("own:strict", "**kwargs"), ("own:one", "1 to all 10 texts")),
        *(("own:fails", "not today"), ("own:nested", "list"), ("own:nothing", "None"), ("own:box", "6 of 10")),
    ):
        assert word in found[name]["problem"]
    assert {name for name, row in found.items() if row["skipped"]} == {"repetition_penalty", "process_reward"}
    assert not any(found[name]["problem"] for name in ("accuracy", "format", "own:length", "own:level", "own:slow"))
    # Messages where the prompts are some; a sum of rewards that right answers do not raise.
    data = {"train": "train.jsonl", "system_prompt": "Think."}
    for reward, sections, word in (
        ("own:chat", {"data": data}, "gives 1 to all"),
        ("own:backwards", {}, "the sum of"),
        ("own:shorter", {}, "for empty ones"),
    ):
        said = perl("reward", "check", write_recipe(["12", "13"], rewards={reward: 1}, **sections), "--json")
        assert (said.code, word in json.loads(said.out)["rewards"][0]["problem"]) == (1, True)


def test_a_training_tries_custom_rewards_before_a_model_is_loaded(perl, monkeypatch):
    monkeypatch.syspath_prepend(".")
    Path("own.py").write_text(REWARDS, encoding="utf-8")
    weightless = Path("weightless")
    weightless.mkdir()
    for file in BASE_FOLDER.iterdir():
        if file.suffix != ".safetensors":
            (weightless / file.name).write_bytes(file.read_bytes())
    sections = {"model": {"name": "weightless"}, "train": {"max_steps": 1}}
    said = perl("train", write_recipe(["12", "13"] * 8, rewards={"own:nested": 1}, **sections))
    assert said.code == 2
    assert "rewards.own:nested: failed for all" in said.err
    recipe = write_recipe(["12", "13"] * 8, rewards={"own:one": 1}, **sections)
    assert "own:one gives 1 to all" in perl("train", recipe, "--dry-run").err


def test_a_policy_is_asked_how_hard_the_problems_are_and_the_answers_become_a_column(perl):
    recipe = write_recipe([str(20 + i + 100) for i in range(8)], extends="quickstart", eval={"enabled": False})
    rows = [{"question": f"{20 + i}+{100}=", "gold": 120 + i, "source": "a\u2028b"} for i in range(8)]
    Path("train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = "data.train={name: train.jsonl, columns: {prompt: question, answer: gold}}"
    asked = ("reward", "check", recipe, columns, "--rollouts", "4", "--write", "hard.jsonl")
    # The column that it is to write need not be there yet.
    said = perl(*asked, "prompts.curriculum=-pass_rate", "--json")
    assert said.code == 0, said.err
    found = json.loads(said.out)["difficulty"]
    written = [json.loads(line) for line in Path("hard.jsonl").read_text().split("\n") if line]
    assert [{**row, "gold": int(row["gold"])} for row in written] == [
        {**row, "pass_rate": new["pass_rate"]} for row, new in zip(rows, written, strict=True)
    ]
    drawn = [json.loads(line) for line in Path("hard_completions/samples.jsonl").read_text().split("\n") if line]
    assert len(drawn) == 32
    for number, row in enumerate(written):  # judged again, one by one
        texts = [one["text"] for one in drawn if one["problem"] == str(number)]
        assert row["pass_rate"] == sum(check(str(row["gold"]), text).status == "right" for text in texts) / 4
    rates = [row["pass_rate"] for row in written]
    assert found["mean"] == pytest.approx(sum(rates) / 8)
    assert (found["never"], found["always"]) == (pytest.approx(rates.count(0) / 8), pytest.approx(rates.count(1) / 8))
    assert (found["policy"], found["problems"], found["rollouts"]) == ("sandbox:base", 8, 4)
    # The same again draws nothing; more completions draw the rest; some problems alone are some rows.
    for count, there, options in ((4, 32, ()), (5, 32, ()), (4, 0, ("--n", "2"))):
        Path("hard.jsonl").unlink()
        again = perl(*asked[:-4], "--rollouts", str(count), *options, *asked[-2:])
        assert again.code == 0, again.err
        assert (f"{there} of {8 * count} completions are there already" in again.err) == bool(there)
    some = [json.loads(line) for line in Path("hard.jsonl").read_text().split("\n") if line]
    assert [row["question"] for row in some] == ["20+100=", "24+100="]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("quickstart", "--adapter", "zoo:lora"), "--adapter: is about a policy that is asked"),
        (
            ("quickstart", "--rollouts", "2", "--write", "hard.csv"),
            "--write: hard.csv would be JSON lines (hard.jsonl)",
        ),
        (("quickstart", "--rollouts", "2", "--write", "rows.jsonl"), "--write: rows.jsonl is there already"),
        (("quickstart", "--rollouts", "2", "--write", "absent/hard.jsonl"), "--write: no such folder: absent"),
        (("quickstart", "--rollouts", "2", "--adapter", "./absent"), "--adapter: ./absent: no such folder"),
        (("quickstart", "--rollouts", "2", "peft.adapter=./absent"), "peft.adapter: ./absent: no such folder"),
        (("quickstart", "rewards.acuracy=1"), "did you mean accuracy?"),
        (("quickstart", "data.train.columns.answer=gold"), "has no column 'gold'"),
        (("quickstart", "data.train.columns.answer=null"), "no gold answers to check"),
        (("quickstart", "data.chat=false", "data.system_prompt=Think."), "data.system_prompt: a system prompt needs"),
    ],
)
def test_a_mistake_is_one_line(arguments, words, mistake):
    write_rows("rows.jsonl", ["1", "2"])
    recipe, *further = arguments
    assert words in mistake("reward", "check", recipe, "data.train=rows.jsonl", *further)
    assert Path("rows.jsonl").read_text().count("\n") == 2
    for wrong in ("try 7", "try 7 8 --yaml", "try 7 --jsn", "check quickstart --n 0"):
        mistake("reward", *wrong.split())
