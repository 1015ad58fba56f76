"""Problems arrive with their questions, answers and further columns whatever form they are stored in."""

import csv
import gzip
import json
import re
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import yaml

from perl.data import load_problem_set, prompt_text, render_prompts
from perl.data.overlap import near_copies
from perl.errors import DataError, RecipeError
from perl.evaluation.tasks.own_tasks import file_task
from perl.evaluation.tasks.task_data import load_task_data
from perl.policy.model import load_tokenizer
from perl.recipe import load_recipe
from perl.recipe.sections import DataSection, ModelSection
from perl.training.prepare import plan_of

FORMATS = ["rows.jsonl", "rows.json", "rows.csv", "rows.parquet"]
ROWS = [{"prompt": f"{i}+{i}=", "answer": str(2 * i), "level": f"L{i}"} for i in range(6)]


def write(name, rows):
    path = Path(name)
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows), encoding="utf-8")
    elif path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    return name


def problems(chat=False, **section):
    return load_problem_set(DataSection.model_validate(section), chat=chat)


def train_rows(chat=False, **section):
    return problems(chat, **section).train.to_list()


def message_of(**section):
    with pytest.raises(DataError) as caught:
        problems(**section)
    return str(caught.value)


def test_problems_of_the_sandbox_that_have_levels_have_a_column_of_them_and_others_have_none():
    rows = problems(train="sandbox:cipher_levels", eval="sandbox:cipher").train.to_list()
    assert [row["level"] for row in rows] == [sum(map(str.isalpha, row["prompt"])) for row in rows]
    assert set(problems(train="sandbox:chain").train.column_names) == {"prompt", "solution", "answer"}


LETTERS = [{"prompt": "Wie groß ist π? 多少?", "answer": "größer", "level": "é"}]


@pytest.mark.parametrize("name", FORMATS)
def test_every_kind_of_file_holds_the_same_problems_and_is_read_anew_once_it_changed(name):
    for rows in (ROWS, LETTERS, ROWS[3:5]):
        assert train_rows(train=write(name, rows)) == [
            {"prompt": row["prompt"], "solution": row["answer"], "answer": row["answer"], "level": row["level"]}
            for row in rows
        ]


LONG = 21896118072576921600  # more digits than a float holds
TEXTS = ("007", "1.50", " 12 ", "1e5", "12:30", "2024-01-15", "2024-01-15 00:00:00", "true", "None", "½", "#### 4")
TEXTS += ("NA", "null", "nan", "9007199254740993")
# Answers in a file's own types, the formats that have such types, and their text.
ANSWERS = (
    (FORMATS, [42, -7], ["42", "-7"]),
    (FORMATS[:3], [2**53 + 1, 0.5], ["9007199254740993", "0.5"]),
    (("rows.parquet",), [b"007"], ["007"]),
    (("rows.jsonl", "rows.json"), [LONG], [str(LONG)]),
    (("rows.jsonl", "rows.json"), [4, "four", 2.5, True, -1], ["4", "four", "2.5", "True", "-1"]),
    *((FORMATS, [text], [text]) for text in TEXTS),
)
NUMBERS = ("1.10", "1e3", "-0", "9007199254740993", "0.1234567890123456789", "Infinity", '[1.10, "x"]')


def test_answers_become_their_text_and_text_stays_as_it_is():
    wrong = []
    for names, answers, texts in ANSWERS:
        for name in names:
            rows = train_rows(train=write(name, [{"prompt": f"{i}?", "answer": one} for i, one in enumerate(answers)]))
            found = [row["solution"] for row in rows]
            if found != texts:
                wrong.append((name, answers, found))
    lines = [f'{{"prompt": "{i}?", "answer": {number}}}' for i, number in enumerate(NUMBERS)]
    Path("rows.jsonl").write_text("\n".join(lines), encoding="utf-8")
    Path("rows.json").write_text(f"[{','.join(lines)}]", encoding="utf-8")
    for name in ("rows.jsonl", "rows.json"):
        assert [row["solution"] for row in train_rows(train=name)] == [n.replace('"', "'") for n in NUMBERS]
    short = pyarrow.table({"prompt": ["a", "b"], "answer": pyarrow.array([0.1, 2.5], pyarrow.float32())})
    pyarrow.parquet.write_table(short, "rows.parquet")
    assert [row["solution"] for row in train_rows(train="rows.parquet")] == ["0.1", "2.5"]
    assert [question.gold for question in load_task_data(file_task("rows.parquet")).questions] == ["0.1", "2.5"]
    assert wrong == []


def test_what_looks_like_another_value_stays_what_was_written():
    answers = pyarrow.array([[0.1, 0.2], [0.5]], pyarrow.list_(pyarrow.float32()))
    maps = pyarrow.array([[("a", 1)], []], pyarrow.map_(pyarrow.string(), pyarrow.int64()))  # no data set holds them
    table = pyarrow.table({"prompt": pyarrow.array([0.1, 2.5], pyarrow.float32()), "answer": answers, "m": maps})
    pyarrow.parquet.write_table(table, "rows.parquet")
    rows = [{"prompt": "0.1", "solution": "[0.1, 0.2]"}, {"prompt": "2.5", "solution": "0.5"}]
    assert [{key: row[key] for key in rows[0]} for row in train_rows(train="rows.parquet")] == rows
    Path("rows.json").write_text('[{"prompt": 1.10, "answer": ["2"]}, {"prompt": "x", "answer": NaN}]')
    assert "1 of 2 rows of rows.json have no answer, first row 2" in message_of(train="rows.json")
    (row,) = train_rows(train={"name": "rows.json", "limit": 1})
    assert (row["prompt"], row["solution"]) == ("1.10", "2")
    messages = [{"role": "user", "content": "1+1="}]
    write("chat.csv", [{"prompt": json.dumps(messages), "answer": "2"}])
    assert train_rows(train="chat.csv", chat=True)[0]["prompt"] == messages


# Values of a column beside one another, in JSON; None: the row lacks it.
KINDS = {
    "objects": [{"x": 1}, {"y": "t"}, {"x": [{"z": None}, {}]}],
    "mixed": [1, "7", "007", 0.5, None, True, {"a": [1, 2.0]}, [], "null"],
    "exact": [0.12345678901234568, LONG, "x"],
    "plain": ["a", None, "b"],
    "keys in another order": [{"a": 1, "b": 2}, {"b": 3, "a": 4}],
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_values_of_json_stay_what_they_are_whatever_else_is_in_their_column(name, kind):
    values = KINDS[kind]
    rows = [{"prompt": "no value"}, *({"prompt": f"{i}?", "value": value} for i, value in enumerate(values))]
    found = problems(train={"name": write(name, rows), "columns": {"answer": None}}).train
    assert repr([row["value"] for row in found]) == repr([None, *values])
    assert repr(found.select([2, 1])["value"][:]) == repr([values[1], values[0]])


def test_a_column_of_a_csv_file_holds_numbers_only_where_their_text_says_all_of_it():
    Path("rows.csv").write_text(
        "prompt,answer,n,id,x,yes,mixed,none\n1,2,1,007,0.5,True,1,\n2,2,,7,1e-05,False,0.5,\n3,2,3,8,2.0,,a,\n"
    )
    kept = [{key: row[key] for key in ("n", "id", "x", "yes", "mixed", "none")} for row in train_rows(train="rows.csv")]
    assert kept == [
        {"n": 1, "id": "007", "x": 0.5, "yes": True, "mixed": "1", "none": ""},
        {"n": None, "id": "7", "x": 1e-05, "yes": False, "mixed": "0.5", "none": ""},
        {"n": 3, "id": "8", "x": 2.0, "yes": None, "mixed": "a", "none": ""},
    ]


BROKEN = (
    ("prompt,answer\n1,é\n".encode("latin-1"), ["line 2, byte 17", "save it as UTF-8"]),
    ("prompt,answer\n1,2\n".encode("utf-16"), ["line 1, byte 1", "save it as UTF-8"]),
    ("prompt,answer\n1,2\n".encode("utf-16-le"), ["save it as UTF-8"]),
    (b"prompt,answer\n1,2\n3\n", ["line 3", "2"]),
    (b"prompt,answer\n1,2,3\n", ["line 2", "2"]),
    (b'prompt,answer\n"1,2\n', ["unexpected end"]),
    (b"prompt,answer,answer\n1,2,3\n", ["two columns", "answer, answer"]),
)


@pytest.mark.parametrize(("content", "said"), BROKEN)
def test_a_file_that_cannot_be_read_right_is_refused_in_one_line_that_says_where(content, said):
    Path("rows.CSV").write_bytes(content)
    message = message_of(train="rows.CSV")
    assert [part for part in ("data.train: rows.CSV cannot be read: ", *said) if part not in message] == []


def test_what_looks_like_rows_and_is_none_says_what_it_is():
    Path("one.json").write_text('{\n"rows": [{"prompt": "1+1="}],\n"n": 1}', encoding="utf-8")
    assert "it is one object, of rows, n; a file is a list of objects" in message_of(train="one.json")
    Path("folder").mkdir()
    write("folder/rows.csv", ROWS)
    Path("rows.tsv").touch()
    for name in ("rows.tsv", "https://x.org/rows.csv"):
        assert "is no data set of the Hub" in message_of(train=name) or "no such file" in message_of(train=name)
    assert "data.train: folder is a folder (name a file in it, as folder/rows.csv; a data set of" in message_of(
        train="folder"
    )
    Path("rows.csv").write_text("prompt, answer\n1,2\n", encoding="utf-8")
    assert "it has prompt, ' answer' (did you mean ' answer'?)" in message_of(train="rows.csv")


@pytest.mark.parametrize("task", ["addition", "multiplication", "chain"])
def test_the_sandbox_holds_right_answers_and_keeps_its_splits_apart(task):
    found = problems(train=f"sandbox:{task}")
    for rows in (found.train, found.heldout):
        assert set(rows.column_names) == {"prompt", "solution", "answer"}
        for row in list(rows)[:200]:
            assert str(eval(row["prompt"].removesuffix("="), {})) == row["solution"]  # noqa: S307 (our own arithmetic)
    assert len(set(found.train["prompt"])) == len(found.train) > 1000
    assert len(set(found.heldout["prompt"])) == len(found.heldout) > 100
    assert not set(found.train["prompt"]) & set(found.heldout["prompt"])
    assert found.heldout_name == f"sandbox:{task}"


def test_held_out_problems_are_the_sandboxs_another_sources_or_none():
    write("other.jsonl", [{"prompt": "what?", "answer": "that"}])
    found = problems(train="sandbox:addition", eval="other.jsonl")
    assert found.heldout.to_list() == [{"prompt": "what?", "solution": "that", "answer": "that"}]
    assert found.heldout_name == "other"
    assert problems(train="other.jsonl", eval="sandbox:chain").heldout_name == "sandbox:chain"
    found = problems(train=write("rows.jsonl", ROWS))
    assert (found.heldout, found.heldout_name) == (None, None)


@pytest.mark.parametrize("name", FORMATS)
def test_columns_are_mapped_and_every_column_of_the_file_is_kept(name):
    rows = [{"problem": "1+1=", "answer": "2", "solution": "It is two.", "id": "x1"}]
    columns = {"prompt": "problem", "answer": "answer"}
    found = problems(train={"name": write(name, rows), "columns": columns})
    (row,) = found.train.to_list()
    own = {"problem": "1+1=", "id": "x1", "original_solution": "It is two."}
    assert row == {"prompt": "1+1=", "solution": "2", "answer": "2", **own}
    assert (found.own_names, found.renamed) == ({"solution": "original_solution"}, ())


# Row of a file, its columns, the problem that it is, and whether a column has another name to every reward.
RESERVED = ("completion", "completions", "completion_ids", "prompts", "trainer_state", "log_extra", "log_metric")
KEPT = {"level": 3, "tags": ["a", "b"], "meta": {"page": 7}}
COLUMNS = {
    "the answer is called solution": (
        {"problem": "1+1=", "answer": "2", "solution": "It is two.", "id": "x1"},
        {"prompt": "problem", "answer": "solution"},
        {"prompt": "1+1=", "solution": "It is two.", "problem": "1+1=", "id": "x1", "answer": "2"},
        False,
    ),
    "the prompt is not the question": (
        {"question": "1+1=", "prompt": "Be brief.", "original_prompt": "Be brief!", "answer": "2"},
        {"prompt": "question"},
        {
            **{"prompt": "1+1=", "question": "1+1=", "solution": "2", "answer": "2"},
            **{"original_prompt": "Be brief!", "original_original_prompt": "Be brief."},
        },
        False,
    ),
    "no answer column": (
        {"prompt": "tell me", "answer": "x"},
        {"answer": None},
        {"prompt": "tell me", "answer": "x"},
        False,
    ),
    "no answer column, and a column named solution": (
        {"prompt": "tell me", "solution": 3},
        {"answer": None},
        {"prompt": "tell me", "solution": 3},
        False,
    ),
    "columns named like the trainer's reward arguments": (
        {"prompt": "1+1=", "answer": "2", **dict.fromkeys(RESERVED, "x"), **KEPT},
        {},
        {"prompt": "1+1=", "solution": "2", "answer": "2", **{f"original_{n}": "x" for n in RESERVED}, **KEPT},
        True,
    ),
}


@pytest.mark.parametrize("case", COLUMNS)
def test_a_column_keeps_its_name_unless_a_problem_or_the_trainer_has_another_use_for_it(case):
    row, columns, expected, renamed = COLUMNS[case]
    found = problems(train={"name": write("rows.jsonl", [row]), "columns": columns})
    assert found.train.to_list() == [expected]
    assert bool(found.renamed) == renamed
    own = {name: found.train[0][stored] for name, stored in found.own_names.items()}
    assert own == {name: row[name] for name in own}
    assert all(name in own or found.train[0].get(name) == value for name, value in row.items() if name not in RESERVED)


def test_a_data_file_lies_beside_the_recipe_that_names_it_or_else_where_the_command_runs():
    Path("recipes").mkdir()
    Path("recipes/my.yaml").write_text("data: {train: rows.jsonl, eval: {name: here.jsonl}}", encoding="utf-8")
    for name in ("recipes/rows.jsonl", "rows.jsonl", "here.jsonl"):
        write(name, ROWS)
    data = load_recipe("recipes/my.yaml").data
    assert (data.train.name, data.eval.name) == ("recipes/rows.jsonl", "here.jsonl")
    assert load_recipe("recipes/my.yaml", ["data.train=rows.jsonl"]).data.train.name == "rows.jsonl"


def test_each_source_has_its_own_columns():
    write("a.jsonl", [{"q": "1+1=", "a": "2"}])
    write("b.jsonl", [{"question": "2+2=", "result": "4"}])
    found = problems(
        train={"name": "a.jsonl", "columns": {"prompt": "q", "answer": "a"}},
        eval={"name": "b.jsonl", "columns": {"prompt": "question", "answer": "result"}},
    )
    assert found.train.to_list() == [{"prompt": "1+1=", "solution": "2", "q": "1+1=", "a": "2"}]
    assert found.heldout.to_list() == [{"prompt": "2+2=", "solution": "4", "question": "2+2=", "result": "4"}]


def test_a_limit_takes_the_first_rows_and_those_beyond_it_are_not_checked():
    write("rows.jsonl", [*ROWS, {"prompt": "?", "answer": None}])
    for limit in (1, 4, 6):
        rows = train_rows(train={"name": "rows.jsonl", "limit": limit})
        assert [row["prompt"] for row in rows] == [row["prompt"] for row in ROWS[:limit]]
    for more in ({}, {"limit": 100}):
        message = message_of(train={"name": "rows.jsonl", **more})
        assert "1 of 7 rows of rows.jsonl have no answer, first row 7" in message
    assert len(train_rows(train={"name": write("rows.csv", ROWS), "limit": 100})) == len(ROWS)


@pytest.mark.parametrize("chat", [True, False])
def test_chat_prompts_are_one_message_of_the_user_and_the_recipe_decides_if_it_says_so(chat):
    name = write("rows.jsonl", ROWS[:1])
    expected = [{"role": "user", "content": "0+0="}] if chat else "0+0="
    assert load_problem_set(DataSection.model_validate({"train": name}), chat=chat).train[0]["prompt"] == expected
    section = DataSection.model_validate({"train": name, "chat": chat})
    assert load_problem_set(section, chat=not chat).train[0]["prompt"] == expected


def test_a_system_prompt_comes_before_every_question():
    write("heldout.jsonl", [{"prompt": "9+9=", "answer": "18"}])
    found = problems(True, train=write("rows.jsonl", ROWS[:2]), eval="heldout.jsonl", system_prompt="Be brief.")
    for rows, question in ((found.train, "0+0="), (found.heldout, "9+9=")):
        assert rows[0]["prompt"] == [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": question},
        ]


def test_answered_examples_come_before_every_question_as_turns_or_as_text_in_the_same_template():
    template, examples = "Q: {prompt}", [{"prompt": "1+1=", "answer": "2"}, {"prompt": "2+2=", "answer": "4"}]
    asked = {"train": write("rows.jsonl", ROWS[:1]), "prompt_template": template, "examples": examples}
    assert train_rows(False, **asked)[0]["prompt"] == "Q: 1+1= 2\n\nQ: 2+2= 4\n\nQ: 0+0="
    turns = [("user", "Q: 1+1="), ("assistant", "2"), ("user", "Q: 2+2="), ("assistant", "4"), ("user", "Q: 0+0=")]
    expected = [{"role": role, "content": text} for role, text in (("system", "S"), *turns)]
    assert train_rows(True, system_prompt="S", **asked)[0]["prompt"] == expected


@pytest.mark.parametrize("chat", [True, False])
def test_a_template_surrounds_the_question_with_text_and_other_columns_and_leaves_its_braces_alone(chat):
    template = "{level} {{x}}: {prompt}\nAnswer?"
    rows = [*ROWS[:2], {"prompt": "the set {1, 2} and {level}", "answer": "2", "level": "{prompt}"}]
    prompts = [row["prompt"] for row in train_rows(chat, train=write("rows.jsonl", rows), prompt_template=template)]
    assert [prompt_text(prompt) for prompt in prompts] == [
        "L0 {x}: 0+0=\nAnswer?",
        "L1 {x}: 1+1=\nAnswer?",
        "{prompt} {x}: the set {1, 2} and {level}\nAnswer?",
    ]


CONVERSATION = [
    {"role": "user", "content": "1+1="},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "+1"},
]


def test_prompts_that_are_messages_stay_as_they_are():
    write("rows.jsonl", [{"prompt": CONVERSATION, "answer": "3"}])
    assert train_rows(True, train="rows.jsonl")[0]["prompt"] == CONVERSATION
    assert train_rows(True, train="rows.jsonl", system_prompt="S")[0]["prompt"] == [
        {"role": "system", "content": "S"},
        *CONVERSATION,
    ]


PARTS = [{"type": "text", "text": "1+"}, {"type": "text", "text": "1="}]
SAID = {"user": "1+1=", "assistant": "2", "system": "S"}


def messages(*roles):
    return [{"role": role, "content": SAID.get(role, "x")} for role in roles]


def test_parts_of_text_become_text_and_keys_without_a_value_go():
    write("rows.jsonl", [{"prompt": [{"role": "user", "content": PARTS, "name": None}], "answer": "2"}])
    assert train_rows(True, train="rows.jsonl")[0]["prompt"] == messages("user")


# A prompt that no conversation goes on from, and what stands in the message.
UNASKABLE = (
    (messages("user", "assistant"), "end with the assistant's"),
    (messages("system"), "end with the system's"),
    (messages("user", "user"), "messages 1 and 2"),
    (messages("system", "system", "user"), "message 2"),
    (messages("user", "system", "user"), "message 2"),
    (messages("human"), "'human'"),
    ([{"from": "human", "value": "1+1="}], "role"),
    ([{"role": "user", "content": " "}], "ask nothing"),
    ([{"role": "user", "content": None}], "message 1"),
    ([{"role": "user", "content": [{"type": "image"}]}], "not text"),
    ({"role": "user", "content": "1+1="}, "a list of messages"),
)


@pytest.mark.parametrize(("prompt", "said"), UNASKABLE)
def test_a_conversation_that_cannot_be_answered_is_refused_by_its_row_wherever_it_is_asked(prompt, said):
    good = {"prompt": messages("user"), "answer": "2"}
    message = message_of(train=write("rows.jsonl", [good, {"prompt": prompt, "answer": "2"}]))
    assert message.startswith("data.train.columns.prompt: row 2 of rows.jsonl: ")
    assert said in message
    if isinstance(prompt, list):
        tokenizer = load_tokenizer(ModelSection())
        with pytest.raises(DataError, match=re.escape(said)):
            render_prompts([{"prompt": prompt}], tokenizer)
        with pytest.raises(DataError, match=re.escape(said)):
            load_task_data(file_task("rows.jsonl"))


# What is set, the key that is named, and what stands in the message.
REFUSED = (
    ({"train": "mixed.jsonl"}, "data.train: ", "row 2 of mixed.jsonl"),
    ({"train": "system.jsonl", "chat": True, "system_prompt": "S"}, "data.system_prompt: ", "row 1 of system.jsonl"),
    ({"train": "rows.jsonl", "system_prompt": "Be brief."}, "data.system_prompt: ", "data.chat: true"),
    *(
        ({"train": "rows.jsonl", "prompt_template": template}, "data.prompt_template: ", "prompt, answer, level")
        for template in ("{prompt} {unit}", "{prompt} {}", "{prompt} {", "{prompt} {0}")
    ),
    ({"train": "chat.jsonl", "prompt_template": "Solve: {prompt}"}, "data.prompt_template: ", "chat messages"),
    ({"train": "chat.jsonl", "examples": [{"prompt": "1+1=", "answer": "2"}]}, "data.examples: ", "chat messages"),
    (
        {"train": "rows.jsonl", "eval": "rows.jsonl", "drop_overlap": True},
        "data.eval: ",
        "every training prompt is also held out",
    ),
)


@pytest.mark.parametrize(("section", "key", "said"), REFUSED)
def test_what_would_do_nothing_or_leave_nothing_is_refused_with_its_key(section, key, said):
    write("rows.jsonl", ROWS)
    write("chat.jsonl", [{"prompt": CONVERSATION, "answer": "3"}])
    write("mixed.jsonl", [{"prompt": CONVERSATION, "answer": "3"}, ROWS[0]])
    write("system.jsonl", [{"prompt": messages("system", "user"), "answer": "2"}])
    message = message_of(**section)
    assert message.startswith(key)
    assert said in message


def test_overlap_is_an_error_unless_it_may_be_dropped_and_is_seen_through_chat_messages_and_templates():
    write("heldout.jsonl", [{"prompt": " 1+1=", "answer": "2"}, {"prompt": "4+4=\n", "answer": "8"}])
    write("rows.jsonl", ROWS)
    message = message_of(train="rows.jsonl", eval="heldout.jsonl")
    assert message.startswith("data.eval: 2 training prompts are also held out, e.g. '1+1='")
    found = problems(train="rows.jsonl", eval="heldout.jsonl", drop_overlap=True)
    assert found.train["prompt"][:] == ["0+0=", "2+2=", "3+3=", "5+5="]
    assert found.train["solution"][:] == ["0", "4", "6", "10"]
    assert len(found.heldout) == 2
    write("heldout.jsonl", ROWS[2:3])
    found = problems(
        True, train=write("rows.jsonl", ROWS), eval="heldout.jsonl", system_prompt="S", prompt_template="Q: {prompt}",
        drop_overlap=True,
    )  # fmt: skip
    assert len(found.train) == 5
    assert not [p for p in found.train["prompt"] if "2+2=" in prompt_text(p)]


COPIES = (
    "what IS  5! + x\u00b2 ?",
    "What is 5! + x2.",
    "\ufeffWhat\u00a0is 5!\u200b + x\u00b2 ?\n",
    "\uff37hat is 5! + x\u00b2",
    "What is 5!+$x\u00b2$ \u3164\ufe0f\u2800?\x7f",
)


@pytest.mark.parametrize("copy", COPIES)
def test_a_held_out_problem_is_known_however_it_is_typed(copy):
    train = write("rows.jsonl", [{"prompt": "What is 5! + x\u00b2?", "answer": "1"}, *ROWS])
    write("heldout.jsonl", [{"prompt": copy, "answer": "1"}, {"prompt": "What is 5 + x\u00b2?", "answer": "1"}])
    assert "1 training prompts are also held out" in message_of(train=train, eval="heldout.jsonl")
    assert problems(train=train, eval="heldout.jsonl", drop_overlap=True).rows == [1, 2, 3, 4, 5, 6]


TOM = "Tom has 5 apples and buys 7 more at the market on Monday. He gives 3 of them to Anna. How many are left?"
ASKED = "Answer step by step, and put the last number into a box at the very end of your text: "


def test_a_near_copy_has_most_runs_of_words_that_are_not_everybodys():
    heldout = [TOM, ASKED + "1+2=", ASKED + "2+3=", ASKED + "3+4="]
    other = TOM.replace("Tom", "Ann").replace("apples", "pears").replace("Monday", "Friday")
    near = {TOM.replace("are left", "has he left"): [0], f"Once more: {TOM}": [0], other: [], ASKED + "1+1=": []}
    assert {text: near_copies(heldout, ["something else", text]) for text in near} == near


def test_data_that_may_not_be_meant_is_warned_of(caplog):
    rows = [{"prompt": f"{i}+1=", "answer": "2"} for i in range(8)]
    write("train.jsonl", [*rows, {"prompt": TOM, "answer": "2"}])
    write("more.jsonl", [*rows, {"prompt": "7+1= ", "answer": "8"}])
    write("heldout.jsonl", [{"prompt": TOM.replace("are left", "has he left"), "answer": "9"}])
    said = []
    for data in ({"train": "train.jsonl", "eval": "heldout.jsonl"}, {"train": "more.jsonl"}):
        caplog.clear()
        tasks = {"eval": {"tasks": ["train.jsonl"]}} if "eval" in data else {}
        recipe = {"model": {"name": "sandbox:base"}, "data": data, "train": {"prompts_per_step": 8}, **tasks}
        plan_of(load_recipe(recipe))
        said.append([record.getMessage() for record in caplog.records if record.code == "PRL311"])
    (alike, near, task), (unscored, repeated) = said
    assert "nothing is held out, so neither base nor adapter is scored" in unscored
    assert "all 9 gold answers are '2'" in alike
    assert near.startswith("data.eval: 1 of 1 problems are training problems, or nearly")
    assert task.startswith("eval.tasks: train: 9 of 9 problems are training problems")
    assert "1 of 9 problems repeat an earlier one, 1 of them with another gold answer" in repeated


def test_the_words_of_a_prompt_are_the_same_in_either_form():
    assert prompt_text("1+1=") == prompt_text([{"role": "user", "content": "1+1="}]) == "1+1="
    assert prompt_text([{"role": "system", "content": "S"}, {"role": "user", "content": None}]) == "S\n"
    assert prompt_text(None) == prompt_text(5) == ""


def test_a_question_that_no_column_holds_is_asked_out_of_others():
    rows = [{"nums": [i, i + 1, 3], "target": 2 * i, "prompt": f"row {i}"} for i in range(4)]
    none = {"prompt": None, "answer": None}
    section = {
        "train": {"name": write("rows.jsonl", rows), "columns": none},
        "eval": {"name": write("more.jsonl", [{"nums": [9], "target": 9}]), "columns": none},
        "prompt_template": "Make {target} of {nums}, as {{1 + 2}}.",
    }
    found = problems(**section)
    assert found.train["prompt"][:2] == ["Make 0 of [0, 1, 3], as {1 + 2}.", "Make 2 of [1, 2, 3], as {1 + 2}."]
    assert found.train["nums"][1] == [1, 2, 3]
    assert found.train["original_prompt"][1] == "row 1"
    assert found.heldout["prompt"][0] == "Make 9 of [9], as {1 + 2}."
    chat = problems(True, **section).train["prompt"][0]
    assert chat == [{"role": "user", "content": "Make 0 of [0, 1, 3], as {1 + 2}."}]
    with pytest.raises(DataError, match="also held out"):
        problems(**{**section, "eval": section["train"]})
    with pytest.raises(DataError, match="the template cannot be filled: KeyError"):
        problems(**{**section, "prompt_template": "Make {goal}."})


@pytest.mark.parametrize("name", FORMATS)
def test_a_share_of_the_problems_is_held_out_by_their_texts_whatever_their_order_and_template(name):
    rows = [{"prompt": f"{i}+{i}=", "answer": str(2 * i)} for i in range(200)]
    rows += [{"prompt": f" {i}+{i}= ", "answer": str(2 * i)} for i in range(100)]  # copies stay together
    found = problems(train=write(name, rows), eval="25%", prompt_template="Q: {prompt}")
    held, trained = (
        [re.sub(r"[Q: ]", "", prompt) for prompt in part["prompt"]] for part in (found.heldout, found.train)
    )
    assert sorted(held + trained) == sorted(row["prompt"].strip() for row in rows)
    assert not set(held) & set(trained)
    # 200 texts: four standard deviations are 24.
    assert abs(len(set(held)) - 50) <= 24
    assert [rows[i]["prompt"].strip() for i in found.rows] == trained
    assert found.heldout_name == "rows"
    other = problems(train={"name": write(name, rows[::-1]), "limit": 290}, eval={"name": "25 %"})
    assert {prompt.strip() for prompt in other.heldout["prompt"]} <= set(held)


def test_a_share_is_of_the_problems_to_train_on_and_of_enough_of_them():
    name = write("rows.jsonl", ROWS)
    assert "data.eval: a share of 0.001 of 6 problems holds out none of them" in message_of(train=name, eval="0.1%")
    for section, words in (
        ({"train": "sandbox:chain", "eval": "10%"}, "eval: a task of the sandbox holds out"),
        (
            {"train": name, "eval": {"name": "other.jsonl", "share": 0.1}},
            "eval: share is of the problems of data.train",
        ),
        ({"train": {"name": name, "share": 0.1}}, "train: share is of data.eval"),
        ({"train": {"name": name, "split": "trian"}}, "train.split: of a data set of the Hub"),
        ({"train": "sandbox:chain", "eval": {"name": name, "revision": "a"}}, "eval.revision: of a data set"),
        ({"train": name, "eval": "110%"}, "eval: must be less than 1, not 1.1"),
        ({"train": name, "eval": {"share": None}}, "eval.name: is required"),
        ({"train": name, "eval": {"name": "10%", "limit": 2}}, "eval: share is of the problems of data.train"),
    ):
        with pytest.raises(RecipeError, match=re.escape(f"data.{words}")):
            load_recipe({"data": section})
    recipe = load_recipe({"data": {"train": name, "eval": "50%"}})
    for said in ("share=0.5", "share=50%", "name=0.5"):
        assert load_recipe({"data": {"train": name}}, [f"data.eval.{said}"]).data == recipe.data
    assert load_recipe(recipe.as_dict()).data == recipe.data
    assert recipe.data.eval == recipe.data.train.model_copy(update={"share": 0.5})


def test_the_values_of_a_data_set_on_the_hub_are_those_of_its_files(hub, monkeypatch, caplog):
    lines = (
        b'{"prompt": "a", "answer": 0.10, "tests": {"x": 1}}\n{"prompt": "b", "answer": "None", "tests": {"y": 2}}\n'
    )
    hub.create(
        "user/lines", {"train.jsonl": lines, "test.jsonl.gz": gzip.compress(b'{"prompt": "c", "answer": 7.0}\n')}
    )
    cells = b",prompt,answer\n0,a,007\n1,b,None\n2,c,9007199254740993\n"
    tabs = cells.replace(b",", b"\t").replace(b"a\t", b'"a, b"\t')
    subsets = {"cells": {"data_files": "cells.csv"}, "tabs": {"data_files": "tabs.tsv", "sep": "\t"}}
    card = yaml.safe_dump({"configs": [{"config_name": name, **facts} for name, facts in subsets.items()]})
    hub.create("user/cells", {"cells.csv": cells, "tabs.tsv": tabs, "README.md": f"---\n{card}---\n".encode()})
    for offline in (False, True):
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
        both = problems(train="user/lines", eval="user/lines")
        assert [(row["solution"], row["tests"]) for row in both.train] == [("0.10", {"x": 1}), ("None", {"y": 2})]
        assert both.heldout["solution"] == ["7.0"]
        for subset, first in (("cells", "a"), ("tabs", "a, b")):
            rows = train_rows(train={"name": "user/cells", "subset": subset})
            assert [row["solution"] for row in rows] == ["007", "None", "9007199254740993"]
            assert rows[0]["prompt"] == first
    assert caplog.records == []


def test_what_our_reader_cannot_take_of_a_hub_data_set_the_library_reads_with_a_warning(hub, caplog):
    uneven = b"prompt,answer,note\na,1,x\nb,2\n"
    hub.create("user/uneven", {"train.csv": uneven})
    for split, reason in (("train", "line 3 has not as many cells"), ("train[1:]", "train[1:] is no whole split")):
        caplog.clear()
        rows = train_rows(train={"name": "user/uneven", "split": split})
        assert [row["solution"] for row in rows] == ["1", "2"][-len(rows) :]
        assert [record.code for record in caplog.records if reason in record.getMessage()] == ["PRL311"]
    with pytest.raises(DataError, match=r"user/uneven cannot be loaded: .*validation"):
        problems(train={"name": "user/uneven", "split": "validation"})
