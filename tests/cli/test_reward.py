r"""``perl reward`` says what the verifier makes of an answer, and which gold answers of a recipe are no answers."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from perl.cli.reward import command
from perl.rewards import check
from perl.sandbox import HELDOUT_COUNT, TRAIN_COUNT, load_problems

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


def tried(*arguments, **options):
    """The rows that `perl reward try` prints, by their first word."""
    result = CliRunner().invoke(command, ["try", *arguments], **options)
    assert result.exit_code == 0, result.output
    return dict(line.split(maxsplit=1) for line in result.output.splitlines())


VERDICTS = (
    ("1/2", r"so it is \boxed{0.5}", "right", "0.5", "1/2"),
    ("12", "The answer is 13.", "wrong", "13", "12"),
    ("12", "I do not know", "no answer", "none", "12"),
    ("\\frac{1}{", r"\boxed{3}", "unparsable gold", "3", "\\frac{1}{"),
    ("9 - 2\n#### 7", "#### 7", "right", "7", "7"),
    (r"we get \boxed{\frac{1}{2}}", r"\boxed{\frac12}", "right", r"\frac12", r"\frac{1}{2}"),
    ("-5", r"\boxed{-5}", "right", "-5", "-5"),
    ("-5", "-5", "no answer", "none", "-5"),
    ("a\nb", "", "no answer", "none", "a b"),
)


def test_try_prints_status_answer_and_gold_answer_also_of_stdin_and_as_json(perl_command):
    for gold, completion, status, extracted, understood in VERDICTS:
        rows = tried(gold, completion)
        assert float(rows.pop("seconds")) >= 0.0
        assert rows == {"status": status, "extracted": extracted, "gold": understood}
    assert tried("7", "-", input=b"\xff\xfe \\boxed{7\xff}")["status"] == "wrong"  # bytes that are no text
    assert tried("7", "\\boxed{\x1b[31m8\x07}")["extracted"] == "[31m8"  # nothing that a terminal would act on
    result = perl_command("reward", "try", "7", "-", input="first 9,\nthen \\boxed{7}\n")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.splitlines()[:3] == ["status     right", "extracted  7", "gold       7"]
    result = perl_command("reward", "try", "--json", "-12", "so\n\\boxed{ 11\n+ 1 }")
    assert (result.returncode, result.stderr) == (0, "")
    row = json.loads(result.stdout)
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
        "False",
    ]
    assert len(load_problems("sandbox:addition", "train")) == TRAIN_COUNT


def test_a_gold_answer_that_cannot_be_read_is_listed_with_its_row_in_the_file(perl_command):
    result = perl_command("reward", "check", write_recipe(ROWS))
    assert (result.returncode, result.stderr) == (1, "")
    lines = result.stdout.splitlines()
    assert lines[0].startswith("train  train.jsonl: 7 gold answers, ")
    assert lines[0].endswith(", 1 only letter for letter")
    assert lines[1:] == [
        "  row 4: unparsable gold: \\frac{1}{",
        "1 row gives right completions no reward: drop or rewrite it",
    ]
    # What stands after #### is the gold answer, but a completion with that text has another one in its box.
    result = perl_command("reward", "check", write_recipe(["#### 7", "the first \\boxed{8} is no #### 7"]), "--json")
    assert result.returncode == 1
    ((train,), rewards) = json.loads(result.stdout).values()
    assert train["failing"] == [{"row": 2, "gold": "the first \\boxed{8} is no #### 7", "status": "wrong"}]
    assert (train["right"], train["unreadable"], rewards) == (1, 0, [])
    # Also where overlapping rows are dropped, and of the column that training takes.
    recipe = write_recipe(["1", "2", "\\frac{1}{", "4"])
    Path("eval.jsonl").write_text(json.dumps({"prompt": "question  1", "answer": "1"}) + "\n")
    result = perl_command("reward", "check", recipe, "data.eval=eval.jsonl", "data.drop_overlap=true", "--json")
    assert (result.returncode, result.stderr) == (1, "")
    train = json.loads(result.stdout)["sets"][0]
    assert (train["problems"], [row["row"] for row in train["failing"]]) == (3, [3])
    refused = perl_command("reward", "check", recipe, "data.eval=eval.jsonl")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "1 training prompts are also held out" in refused.stderr
    rows = [{"prompt": f"{i}?", "answer": str(i), "gold2": "\\frac{1}{" if i == 2 else str(i)} for i in range(4)]
    Path("two.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = "data: {train: two.jsonl, eval: null}\nrewards: {accuracy: {columns: {solution: gold2}}}\n"
    Path("mapped.yaml").write_text(recipe)
    for overrides in ([], ["data.train.columns.answer=null"]):
        ended = perl_command("reward", "check", "mapped.yaml", *overrides, "--json")
        assert ended.returncode == 1, ended.stderr
        (checked,) = json.loads(ended.stdout)["sets"]
        assert [row["row"] for row in checked["failing"]] == [3]


def test_at_most_twenty_rows_are_listed_but_all_as_json_and_n_rows_are_taken_evenly(perl_command):
    recipe = write_recipe(["1", *[f"\\frac{{{i}}}{{" for i in range(23)]])
    lines = perl_command("reward", "check", recipe).stdout.splitlines()
    assert [line.split(":")[0] for line in lines[1:21]] == [f"  row {row}" for row in range(2, 22)]
    assert lines[21:] == ["  and 3 more", "23 rows give right completions no reward: drop or rewrite them"]
    result = perl_command("reward", "check", recipe, "--json")
    assert (result.returncode, result.stderr) == (1, "")
    ((train,), _) = json.loads(result.stdout).values()
    assert [row["row"] for row in train["failing"]] == list(range(2, 25))
    assert (train["problems"], train["checked"], train["unreadable"]) == (24, 24, 23)
    recipe = write_recipe([*[f"\\frac{{{i}}}{{" for i in range(10)]], eval={"enabled": False})
    write_rows("eval.jsonl", ["1", "2"])
    Path("eval.jsonl").write_text(Path("eval.jsonl").read_text().replace("question", "held out"))
    result = perl_command("reward", "check", recipe, "data.eval=eval.jsonl", "--n", "4", "--json")
    assert (result.returncode, result.stderr) == (1, "")
    train, held = json.loads(result.stdout)["sets"]
    assert [row["row"] for row in train["failing"]] == [i * 10 // 4 + 1 for i in range(4)] == [1, 3, 6, 8]
    assert (train["role"], train["problems"], train["checked"]) == ("train", 10, 4)
    assert (held["role"], held["name"], held["problems"], held["checked"], held["right"]) == ("eval", "eval", 2, 2, 2)
    plain = perl_command("reward", "check", recipe, "--n", "4").stdout
    assert plain.startswith("train  train.jsonl: 4 of 10 gold answers, ")


def test_other_rewards_are_listed_with_what_they_give_the_boxed_gold_answers(perl_command):
    Path("own.py").write_text(REWARDS, encoding="utf-8")
    names = ("length", "level", "asks_for_more", "strict", "fails", "nothing", "slow")
    rewards = {"accuracy": 1, "format": 1, "repetition_penalty": 1, **{f"own:{name}": 1 for name in names}}
    rewards["process_reward"] = {"weight": 1, "args": {"model": "nobody/nothing", "positive": "+", "negative": "-"}}
    result = perl_command("reward", "check", write_recipe(["12", "123"], rewards=rewards), "--json")
    assert result.returncode == 0, result.stderr
    found = {row["name"]: (row["mean"], row["skipped"]) for row in json.loads(result.stdout)["rewards"]}
    assert list(found) == [name for name in rewards if name != "accuracy"]
    assert found["format"] == (1.0, "")
    lengths = [len(f"\\boxed{{{gold}}}") for gold in (12, 123)]
    assert found["own:length"] == (pytest.approx(sum(lengths) / len(lengths)), "")
    assert found["own:level"] == (0.5, "")
    assert found["own:slow"] == (2.0, "")
    reasons = {name: skipped for name, (mean, skipped) in found.items() if mean is None}
    assert set(reasons) == {
        "repetition_penalty", "own:asks_for_more", "own:strict", "own:fails", "own:nothing", "process_reward"
    }  # fmt: skip
    assert "completion_ids" in reasons["repetition_penalty"]
    assert "colour" in reasons["own:asks_for_more"]
    assert "**kwargs" in reasons["own:strict"]
    assert "2 of 2" in reasons["own:fails"]
    assert "not today" in reasons["own:fails"]
    assert "None" in reasons["own:nothing"]
    assert "model" in reasons["process_reward"]
    lines = perl_command("reward", "check", "recipe.yaml").stdout.splitlines()
    assert "reward format of the training set's boxed gold answers: mean 1.000" in lines
    assert any(line.startswith("reward process_reward of the training set's boxed") for line in lines)
    # Messages where the prompts are some.
    recipe = write_recipe(["12"], rewards={"own:chat": 1})
    result = perl_command("reward", "check", recipe, "data.system_prompt=Think.", "--json")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["rewards"] == [{"name": "own:chat", "mean": 1.0, "skipped": ""}]


def test_a_policy_is_asked_how_hard_the_problems_are_and_the_answers_become_a_column(perl_command):
    recipe = write_recipe([str(20 + i + 100) for i in range(8)], extends="quickstart", eval={"enabled": False})
    rows = [{"question": f"{20 + i}+{100}=", "gold": 120 + i, "source": "a\u2028b"} for i in range(8)]
    Path("train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = "data.train={name: train.jsonl, columns: {prompt: question, answer: gold}}"
    asked = ("reward", "check", recipe, columns, "--rollouts", "4", "--write", "hard.jsonl")
    # The column that it is to write need not be there yet.
    result = perl_command(*asked, "prompts.curriculum=-pass_rate", "--json")
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)["difficulty"]
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
        again = perl_command(*asked[:-4], "--rollouts", str(count), *options, *asked[-2:])
        assert again.returncode == 0, again.stderr
        assert (f"{there} of {8 * count} completions are there already" in again.stderr) == bool(there)
    some = [json.loads(line) for line in Path("hard.jsonl").read_text().split("\n") if line]
    assert [row["question"] for row in some] == ["20+100=", "24+100="]


ASKED = (
    (("--adapter", "zoo:lora"), "--adapter: is about a policy that is asked"),
    (("--write", "hard.jsonl"), "--write: is about a policy that is asked"),
    (("--rollouts", "2", "--write", "hard.csv"), "--write: hard.csv would be JSON lines (hard.jsonl)"),
    (("--rollouts", "2", "--write", "rows.jsonl"), "--write: rows.jsonl is there already"),
    (("--rollouts", "2", "--write", "absent/hard.jsonl"), "--write: no such folder: absent"),
    (("--rollouts", "2", "--adapter", "./absent"), "--adapter: ./absent: no such folder"),
    (("--rollouts", "2", "peft.adapter=./absent"), "peft.adapter: ./absent: no such folder"),
)


@pytest.mark.parametrize(("options", "words"), ASKED)
def test_a_policy_that_cannot_be_asked_is_one_line(options, words, perl_command):
    write_rows("rows.jsonl", ["1", "2"])
    result = perl_command("reward", "check", "quickstart", "data.train=rows.jsonl", *options)
    assert (result.returncode, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert words in line
    assert Path("rows.jsonl").read_text().count("\n") == 2


MISTAKES = (
    (("absent.yaml",), "no such file"),
    (("quikstart",), "did you mean quickstart?"),
    (("quickstart", "peft.rnak=4"), "did you mean rank?"),
    (("quickstart", "rewards.acuracy=1"), "did you mean accuracy?"),
    (("quickstart", "data.train=absent.jsonl"), "data.train: no such file: absent.jsonl"),
    (("quickstart", "data.train=rows.jsonl", "data.train.columns.answer=gold"), "has no column 'gold'"),
    (("quickstart", "data.train=rows.jsonl", "data.train.columns.answer=null"), "no gold answers to check"),
    (("quickstart", "data.train=empty.jsonl"), "is empty"),
    (("quickstart", "data.chat=false", "data.system_prompt=Think."), "data.system_prompt: a system prompt needs"),
)


def test_a_mistake_in_the_recipe_or_its_data_is_one_line(perl_command):
    write_rows("rows.jsonl", ["1"])
    Path("empty.jsonl").touch()
    for arguments, words in MISTAKES:
        result = perl_command("reward", "check", *arguments)
        assert (result.returncode, result.stdout) == (2, ""), arguments
        (line,) = result.stderr.splitlines()
        assert line.startswith("error: ")
        assert words in line, arguments
    wrong_use = (("try",), ("try", "7"), ("try", "7", "8", "9"), ("try", "7", "8", "--yaml"), ("try", "7", "--jsn"))
    for arguments in (*wrong_use, ("check", "quickstart", "--n", "0")):
        assert CliRunner().invoke(command, arguments).exit_code == 2, arguments
