"""Problems arrive with their questions, answers and further columns whatever form they are stored in."""

import csv
import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from perl.data import load_problem_set, prompt_text
from perl.errors import DataError
from perl.recipe.sections import DataSection

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


@pytest.mark.parametrize("name", FORMATS)
def test_every_kind_of_file_holds_the_same_problems(name):
    assert train_rows(train=write(name, ROWS)) == [
        {"prompt": row["prompt"], "solution": row["answer"], "answer": row["answer"], "level": row["level"]}
        for row in ROWS
    ]


@pytest.mark.parametrize("name", FORMATS)
def test_a_file_that_was_changed_is_read_anew(name):
    write(name, ROWS[:3])
    assert len(train_rows(train=name)) == 3
    write(name, ROWS[3:5])
    assert [row["prompt"] for row in train_rows(train=name)] == ["3+3=", "4+4="]


@pytest.mark.parametrize("name", FORMATS)
def test_answers_that_are_numbers_become_their_text(name):
    rows = train_rows(train=write(name, [{"prompt": "a", "answer": 42}, {"prompt": "b", "answer": -7}]))
    assert [row["solution"] for row in rows] == ["42", "-7"]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.parquet"])
@pytest.mark.parametrize(
    "answer",
    ["007", "1.50", " 12 ", "1e5", "12:30", "2024-01-15", "2024-01-15 00:00:00", "true", "None", "½", "#### 4"],
)
def test_answers_that_are_text_stay_as_they_are(name, answer):
    (row,) = train_rows(train=write(name, [{"prompt": "a", "answer": answer}]))
    assert row["solution"] == answer


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_a_long_whole_number_keeps_its_digits(name):
    (row,) = train_rows(train=write(name, [{"prompt": "20!*9=", "answer": 21896118072576921600}]))
    assert row["solution"] == "21896118072576921600"


def test_a_file_may_have_letters_of_any_language():
    rows = [{"prompt": "Wie groß ist π? 多少?", "answer": "größer", "level": "é"}]
    for name in FORMATS:
        assert train_rows(train=write(name, rows)) == [
            {"prompt": rows[0]["prompt"], "solution": "größer", "answer": "größer", "level": "é"}
        ]


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


def test_held_out_problems_may_be_of_another_source():
    write("other.jsonl", [{"prompt": "what?", "answer": "that"}])
    found = problems(train="sandbox:addition", eval="other.jsonl")
    assert found.heldout.to_list() == [{"prompt": "what?", "solution": "that", "answer": "that"}]
    assert found.heldout_name == "other"
    assert problems(train="other.jsonl", eval="sandbox:chain").heldout_name == "sandbox:chain"


def test_a_file_alone_has_no_held_out_problems():
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
    (line,) = found.renamed
    assert "data.train" in line
    assert "solution as original_solution" in line
    assert "gold answer, from answer" in line


def test_a_column_that_is_called_like_its_part_in_a_problem_stands_there_once():
    rows = [{"problem": "1+1=", "answer": "2", "solution": "It is two.", "id": "x1"}]
    columns = {"prompt": "problem", "answer": "solution"}
    found = problems(train={"name": write("rows.jsonl", rows), "columns": columns})
    assert found.train.to_list() == [
        {"prompt": "1+1=", "solution": "It is two.", "problem": "1+1=", "id": "x1", "answer": "2"}
    ]
    assert not found.renamed


def test_a_prompt_that_is_not_the_question_is_kept_under_a_name_that_is_free():
    rows = [{"question": "1+1=", "prompt": "Be brief.", "original_prompt": "Be brief!", "answer": "2"}]
    columns = {"prompt": "question"}
    (row,) = train_rows(train={"name": write("rows.jsonl", rows), "columns": columns})
    assert row["prompt"] == row["question"] == "1+1="
    assert (row["original_prompt"], row["original_original_prompt"]) == ("Be brief!", "Be brief.")


def test_without_an_answer_column_there_is_no_solution():
    rows = [{"prompt": "tell me", "answer": "x"}, {"prompt": "more", "answer": None}]
    found = train_rows(train={"name": write("rows.jsonl", rows), "columns": {"answer": None}})
    assert found == rows


def test_without_an_answer_column_a_column_named_solution_is_just_a_column():
    rows = [{"prompt": "tell me", "solution": 3}, {"prompt": "more", "solution": 4}]
    found = train_rows(train={"name": write("rows.jsonl", rows), "columns": {"answer": None}})
    assert found == rows


def test_each_source_has_its_own_columns():
    write("a.jsonl", [{"q": "1+1=", "a": "2"}])
    write("b.jsonl", [{"question": "2+2=", "result": "4"}])
    found = problems(
        train={"name": "a.jsonl", "columns": {"prompt": "q", "answer": "a"}},
        eval={"name": "b.jsonl", "columns": {"prompt": "question", "answer": "result"}},
    )
    assert found.train.to_list() == [{"prompt": "1+1=", "solution": "2", "q": "1+1=", "a": "2"}]
    assert found.heldout.to_list() == [{"prompt": "2+2=", "solution": "4", "question": "2+2=", "result": "4"}]


def test_columns_named_like_the_trainers_reward_arguments_get_another_name_and_all_others_keep_theirs():
    reserved = ["completion", "completions", "completion_ids", "prompts", "trainer_state", "log_extra", "log_metric"]
    kept = {"level": 3, "tags": ["a", "b"], "meta": {"page": 7}}
    rows = [{"prompt": "1+1=", "answer": "2", **dict.fromkeys(reserved, "x"), **kept}]
    renamed = {f"original_{name}": "x" for name in reserved}
    expected = {"prompt": "1+1=", "solution": "2", "answer": "2", **renamed, **kept}
    assert train_rows(train=write("rows.jsonl", rows)) == [expected]


@pytest.mark.parametrize(("limit", "count"), [(1, 1), (4, 4), (6, 6), (100, 6)])
def test_a_limit_takes_the_first_rows(limit, count):
    rows = train_rows(train={"name": write("rows.jsonl", ROWS), "limit": limit})
    assert [row["prompt"] for row in rows] == [row["prompt"] for row in ROWS[:count]]


def test_rows_beyond_the_limit_are_not_checked():
    write("rows.jsonl", [*ROWS, {"prompt": "?", "answer": None}])
    assert len(train_rows(train={"name": "rows.jsonl", "limit": 6})) == 6
    assert "1 of 7 rows of rows.jsonl have no answer, first row 7" in message_of(train="rows.jsonl")


def test_chat_prompts_are_one_message_of_the_user():
    assert train_rows(chat=True, train=write("rows.jsonl", ROWS[:1]))[0]["prompt"] == [
        {"role": "user", "content": "0+0="}
    ]


@pytest.mark.parametrize("chat", [True, False])
def test_the_recipe_decides_between_chat_and_plain_if_it_says_so(chat):
    section = DataSection.model_validate({"train": write("rows.jsonl", ROWS[:1]), "chat": chat})
    prompt = load_problem_set(section, chat=not chat).train[0]["prompt"]
    assert prompt == ([{"role": "user", "content": "0+0="}] if chat else "0+0=")


def test_a_system_prompt_comes_before_every_question():
    write("heldout.jsonl", [{"prompt": "9+9=", "answer": "18"}])
    found = problems(True, train=write("rows.jsonl", ROWS[:2]), eval="heldout.jsonl", system_prompt="Be brief.")
    for rows, question in ((found.train, "0+0="), (found.heldout, "9+9=")):
        assert rows[0]["prompt"] == [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": question},
        ]


def test_a_system_prompt_without_chat_messages_is_refused():
    message = message_of(train=write("rows.jsonl", ROWS), system_prompt="Be brief.")
    assert message.startswith("data.system_prompt: ")
    assert "data.chat: true" in message


@pytest.mark.parametrize("chat", [True, False])
def test_a_template_surrounds_the_question_with_text_and_other_columns(chat):
    template = "{level} {{x}}: {prompt}\nAnswer?"
    prompts = [row["prompt"] for row in train_rows(chat, train=write("rows.jsonl", ROWS[:2]), prompt_template=template)]
    assert [prompt_text(prompt) for prompt in prompts] == ["L0 {x}: 0+0=\nAnswer?", "L1 {x}: 1+1=\nAnswer?"]


def test_braces_of_a_question_are_left_alone():
    rows = [{"prompt": "the set {1, 2} and {level}", "answer": "2", "level": "{prompt}"}]
    assert train_rows(train=write("rows.jsonl", rows), prompt_template="{level}|{prompt}")[0]["prompt"] == (
        "{prompt}|the set {1, 2} and {level}"
    )


@pytest.mark.parametrize("template", ["{prompt} {unit}", "{prompt} {}", "{prompt} {", "{prompt} {0}"])
def test_a_template_that_cannot_be_filled_is_refused(template):
    message = message_of(train=write("rows.jsonl", ROWS), prompt_template=template)
    assert message.startswith("data.prompt_template: ")
    assert "prompt, answer, level" in message


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


def test_a_template_that_would_do_nothing_to_messages_is_refused():
    write("rows.jsonl", [{"prompt": CONVERSATION, "answer": "3"}])
    assert message_of(train="rows.jsonl", prompt_template="Solve: {prompt}").startswith("data.prompt_template: ")


def test_overlap_is_an_error_unless_it_may_be_dropped():
    write("heldout.jsonl", [{"prompt": " 1+1=", "answer": "2"}, {"prompt": "4+4=\n", "answer": "8"}])
    write("rows.jsonl", ROWS)
    message = message_of(train="rows.jsonl", eval="heldout.jsonl")
    assert message.startswith("data.eval: 2 training prompts are also held out, e.g. '1+1='")
    found = problems(train="rows.jsonl", eval="heldout.jsonl", drop_overlap=True)
    assert found.train["prompt"][:] == ["0+0=", "2+2=", "3+3=", "5+5="]
    assert found.train["solution"][:] == ["0", "4", "6", "10"]
    assert len(found.heldout) == 2


def test_overlap_is_seen_through_chat_messages_and_templates():
    write("heldout.jsonl", ROWS[2:3])
    found = problems(
        True, train=write("rows.jsonl", ROWS), eval="heldout.jsonl", system_prompt="S", prompt_template="Q: {prompt}",
        drop_overlap=True,
    )  # fmt: skip
    assert len(found.train) == 5
    assert not [p for p in found.train["prompt"] if "2+2=" in prompt_text(p)]


def test_a_set_that_is_all_held_out_is_refused_even_if_it_may_be_dropped():
    message = message_of(train=write("rows.jsonl", ROWS), eval="rows.jsonl", drop_overlap=True)
    assert message.startswith("data.eval: every training prompt is also held out")


def test_the_words_of_a_prompt_are_the_same_in_either_form():
    assert prompt_text("1+1=") == prompt_text([{"role": "user", "content": "1+1="}]) == "1+1="
    assert prompt_text([{"role": "system", "content": "S"}, {"role": "user", "content": None}]) == "S\n"
    assert prompt_text(None) == prompt_text(5) == ""


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_answers_of_different_kinds_become_their_text(name):
    answers = [4, "four", 2.5, True, -1]
    rows = train_rows(train=write(name, [{"prompt": f"{i}?", "answer": answer} for i, answer in enumerate(answers)]))
    assert [row["solution"] for row in rows] == ["4", "four", "2.5", "True", "-1"]
