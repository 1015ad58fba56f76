"""A list holds what was asked for, in the order asked for, and unknown values last."""

import csv
import io

import pytest

from perl.errors import PerlError
from perl.zoo.listing import (
    Filter,
    as_csv,
    as_markdown,
    as_plain,
    as_records,
    columns_of,
    ordered,
    row_of,
    select,
    tasks_of,
)
from tests.zoo.entries import reported, score, seeds, theirs, trained

LORA = trained("a-lora", score(0.5), score(0.3, "products", base=None, base_stderr=None), seeds=seeds(0.6, 0.4))
VERA = trained("b-vera", score(0.7, stderr=None), method="vera", tokens=99)
PAPER = reported("c-paper", theirs(0.9, "products"), notes=["one", "two"])
NOTHING = reported("d-nothing", base="Someone/Base-1.5B", method="lora")
ALL = [LORA, VERA, PAPER, NOTHING]
ROWS = [row_of(entry) for entry in ALL]


def names(rows):
    return [row["name"].value for row in rows]


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (Filter(), "abcd"),
        (Filter(base="base"), "abcd"),
        (Filter(base="BASE-1.5b"), "d"),
        (Filter(method="lora"), "ad"),
        (Filter(method="LoRA", provenance="reported"), "d"),
        (Filter(task="products"), "ac"),
        (Filter(provenance="reproduced"), ""),
    ],
)
def test_filters(wanted, expected):
    assert "".join(entry.name[0] for entry in select(ALL, wanted)) == expected


def test_a_method_is_not_part_of_another_ones_name():
    plus = trained("e-plus", method="lora_plus")
    assert select([LORA, plus], Filter(method="lora")) == [LORA]
    assert select([LORA, plus], Filter(method="lora_plus")) == [plus]


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        (Filter(method="verra"), "--method: no entry of the zoo has the method 'verra' (did you mean vera?)"),
        (Filter(method="ora"), "--method: no entry of the zoo has the method 'ora' (did you mean lora?)"),
        (Filter(task="sum"), "--task: no entry of the zoo has the task 'sum' (did you mean sums?)"),
        (Filter(base="Quen"), "--base: no entry of the zoo has the base 'Quen'"),
    ],
)
def test_a_filter_that_no_entry_could_pass_is_a_mistake(wanted, said):
    with pytest.raises(PerlError) as caught:
        select(ALL, wanted)
    assert str(caught.value).startswith(said)


def test_tasks_come_with_the_most_used_first():
    assert tasks_of(ALL) == ["products", "sums"]
    assert tasks_of([*ALL, trained("e", score(0.1))]) == ["sums", "products"]


@pytest.mark.parametrize(
    ("by", "reverse", "expected"),
    [
        (None, False, "abcd"),
        ("name", True, "dcba"),
        ("sums", False, "bacd"),
        ("sums", True, "abcd"),
        ("tokens", False, "bacd"),
        ("tokens", True, "abcd"),
        ("method", False, "cadb"),
    ],
)
def test_scores_go_down_all_else_up_and_unknown_values_are_last(by, reverse, expected):
    assert "".join(name[0] for name in names(ordered(ROWS, by, reverse=reverse))) == expected


def test_sorting_by_what_is_not_there_is_a_mistake():
    with pytest.raises(PerlError, match=r"--sort: nothing is called 'prodcts' \(did you mean products\?\)"):
        ordered(ROWS, "prodcts")


def test_a_row_says_all_that_is_known():
    row = {name: cell.text for name, cell in row_of(LORA).items() if cell.text != "-"}
    assert row == {
        "name": "a-lora",
        "provenance": "trained-here",
        "base": "sandbox:base",
        "method": "lora",
        "algorithm": "dapo",
        "rank": "2",
        "seed": "0",
        "seeds": "3",
        "steps": "50",
        "tokens": "123,456",
        "parameters": "19,456",
        "size": "81.2 kB",
        "created": "2026-01-31",
        "notes": "0",
        "scores": "sums 50.0 ± 1.0 (+1)",
        "sums": "50.0 ± 1.0",
        "sums.base": "40.0 ± 1.2",
        "sums.gain": "+10.0",
        "sums.stderr": "1.0",
        "products": "30.0 ± 1.0",
        "products.stderr": "1.0",
    }


def test_columns_are_chosen_and_a_task_brings_its_own():
    assert columns_of(None, None, ROWS)[:4] == ["name", "provenance", "base", "method"]
    with_task = columns_of(None, "sums", ROWS)
    assert with_task[4:7] == ["sums", "sums.base", "sums.gain"]
    assert "scores" not in with_task
    assert columns_of("name, products ,sums.stderr", "sums", ROWS) == ["name", "products", "sums.stderr"]


@pytest.mark.parametrize(
    ("asked", "said"),
    [("name,sise", "no column 'sise' (did you mean size?)"), ("qqqqq", "there are: ")],
)
def test_a_column_that_is_not_there_is_a_mistake(asked, said):
    with pytest.raises(PerlError) as caught:
        columns_of(asked, None, ROWS)
    assert said in str(caught.value)


def test_the_three_forms():
    columns = ["name", "sums", "tokens"]
    assert as_plain(ROWS, columns).splitlines() == [
        "name             sums   tokens",
        "a-lora     50.0 ± 1.0  123,456",
        "b-vera           70.0       99",
        "c-paper             -        -",
        "d-nothing           -        -",
    ]
    assert as_markdown(ROWS, columns).splitlines()[:3] == [
        "| name | sums | tokens |",
        "| --- | ---: | ---: |",
        "| a-lora | 50.0 ± 1.0 | 123,456 |",
    ]
    assert list(csv.reader(io.StringIO(as_csv(ROWS, columns))))[:4] == [
        columns,
        ["a-lora", "0.5", "123456"],
        ["b-vera", "0.7", "99"],
        ["c-paper", "", ""],
    ]
    assert as_records(ROWS[:1], columns) == [{"name": "a-lora", "sums": 0.5, "tokens": 123456}]
    assert as_records(ROWS[2:3], None)[0]["products"] == 0.9


def test_what_others_wrote_steers_neither_terminal_nor_markdown_nor_spreadsheet():
    hostile = reported("e", method="=1+1|\x1b[31m<b>\n*x*")
    rows = [row_of(hostile)]
    assert as_plain(rows, ["method"]).splitlines() == ["method", "=1+1| [31m<b> *x*"]
    assert as_markdown(rows, ["method"]).splitlines()[2] == r"| =1+1\| \[31m\<b\> \*x\* |"
    assert list(csv.reader(io.StringIO(as_csv(rows, ["method"]))))[1] == ["'=1+1| [31m<b> *x*"]


def test_a_task_called_like_a_fact_does_not_take_its_place():
    rows = [row_of(reported("e", theirs(0.5, "name"), theirs(0.6, "provenance")))]
    assert as_records(rows, ["name", "provenance"]) == [{"name": "e", "provenance": "reported"}]
