"""A list holds what was asked for, in the order asked for, and unknown values last."""

import csv
import io
import re

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


def test_a_filter_keeps_what_was_asked_for_and_what_no_entry_has_is_a_mistake():
    for wanted, expected in (
        (Filter(), "abcd"),
        (Filter(base="base"), "abcd"),
        (Filter(base="BASE-1.5b"), "d"),
        (Filter(method="lora"), "ad"),
        (Filter(method="LoRA", provenance="reported"), "d"),
        (Filter(task="products"), "ac"),
        (Filter(provenance="reproduced"), ""),
    ):
        assert "".join(entry.name[0] for entry in select(ALL, wanted)) == expected, wanted
    plus = trained("e-plus", method="lora_plus")  # of which another method's name is a part
    assert select([LORA, plus], Filter(method="lora")) == [LORA]
    assert select([LORA, plus], Filter(method="lora_plus")) == [plus]
    assert not mistakes_of(
        lambda wanted: select(ALL, wanted),
        (
            ((Filter(method="verra"),), "--method: no entry of the zoo has the method 'verra' (did you mean vera?)"),
            ((Filter(method="ora"),), "--method: no entry of the zoo has the method 'ora' (did you mean lora?)"),
            ((Filter(task="sum"),), "--task: no entry of the zoo has the task 'sum' (did you mean sums?)"),
            ((Filter(base="Quen"),), "--base: no entry of the zoo has the base 'Quen'"),
        ),
    )


def mistakes_of(function, rows):
    """Of arguments and what the message must begin with, those whose message does not."""
    wrong = []
    for arguments, said in rows:
        with pytest.raises(PerlError) as caught:
            function(*arguments)
        wrong += [] if str(caught.value).startswith(said) else [(arguments, str(caught.value))]
    return wrong


def test_the_order_of_tasks_and_rows():
    """Tasks: the most used first. Rows: scores go down, all else up, unknown values last."""
    assert tasks_of(ALL) == ["products", "sums"]
    assert tasks_of([*ALL, trained("e", score(0.1))]) == ["sums", "products"]
    for by, reverse, expected in (
        (None, False, "abcd"),
        ("name", True, "dcba"),
        ("sums", False, "bacd"),
        ("sums", True, "abcd"),
        ("tokens", False, "bacd"),
        ("tokens", True, "abcd"),
        ("method", False, "cadb"),
    ):
        assert "".join(name[0] for name in names(ordered(ROWS, by, reverse=reverse))) == expected, (by, reverse)
    assert not mistakes_of(
        ordered, [((ROWS, "prodcts"), "--sort: nothing is called 'prodcts' (did you mean products?)")]
    )


def test_a_row_says_all_that_is_known_and_columns_are_chosen():
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
    assert columns_of(None, None, ROWS)[:4] == ["name", "provenance", "base", "method"]
    with_task = columns_of(None, "sums", ROWS)
    assert with_task[4:7] == ["sums", "sums.base", "sums.gain"]
    assert "scores" not in with_task
    assert columns_of("name, products ,sums.stderr", "sums", ROWS) == ["name", "products", "sums.stderr"]
    absent = (("name,sise", None, ROWS), "--columns: no column 'sise' (did you mean size?)")
    assert not mistakes_of(columns_of, [absent, (("qqqqq", None, ROWS), "--columns: no column 'qqqqq' (there are: ")])


def test_shown_scores_are_the_percentages_of_the_shares():
    for thousandths in range(0, 1001, 7):
        share, base = thousandths / 1000, (1000 - thousandths) / 1000
        shown = {name: cell.text for name, cell in row_of(trained("a", score(share, base=base))).items()}
        adapter, beside, gain = (
            re.fullmatch(r"([+-]?[\d.]+)(?: ± [\d.]+)?", shown[f"sums{of}"])[1] for of in ("", ".base", ".gain")
        )
        assert float(adapter) == pytest.approx(100 * share, abs=0.0501)
        assert float(beside) == pytest.approx(100 * base, abs=0.0501)
        assert float(gain) == pytest.approx(100 * (share - base), abs=0.0501)


def test_the_three_forms_hold_the_same_and_what_others_wrote_steers_none_of_their_readers():
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
    # A task that is called like a fact does not take its place.
    alike = [row_of(reported("e", theirs(0.5, "name"), theirs(0.6, "provenance")))]
    assert as_records(alike, ["name", "provenance"]) == [{"name": "e", "provenance": "reported"}]
    hostile = reported("e", method="=1+1|\x1b[31m<b>\n*x*")
    rows = [row_of(hostile)]
    assert as_plain(rows, ["method"]).splitlines() == ["method", "=1+1| [31m<b> *x*"]
    assert as_markdown(rows, ["method"]).splitlines()[2] == r"| =1+1\| \[31m\<b\> \*x\* |"
    assert list(csv.reader(io.StringIO(as_csv(rows, ["method"]))))[1] == ["'=1+1| [31m<b> *x*"]
