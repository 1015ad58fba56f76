"""The table holds what was asked for, in the order asked for, and says the same in every form."""

import csv
import io
import json

import pytest

from perl.errors import PerlError
from perl.run.tables import as_records, printed
from perl.zoo.table import columns_of, ordered, row_of, select, tasks_of
from tests.zoo.entries import reported, score, seeds, theirs, trained

LORA = trained("a-lora", score(0.5), score(0.3, "products", base=None, base_stderr=None), seeds=seeds(0.6, 0.4))
VERA = trained("b-vera", score(0.7, stderr=None), method="vera", tokens=99)
PAPER = reported("c-paper", theirs(0.9, "products"), notes=["one", "two"])
NOTHING = reported("d-nothing", base="Someone/Base-1.5B", method="lora")
ALL = [LORA, VERA, PAPER, NOTHING]
ROWS = [row_of(entry) for entry in ALL]


def first_letters(rows):
    return "".join(row["name"].text[0] for row in rows)


def test_rows_are_selected_and_ordered_and_what_no_row_has_is_a_mistake():
    for wanted, expected in (
        ({}, "abcd"),
        ({"base": "BASE-1.5b"}, "d"),
        ({"method": "LoRA", "base": "BASE-1.5b"}, "d"),
        ({"task": "products"}, "ac"),
    ):
        assert first_letters(select(ROWS, **wanted)) == expected, wanted
    assert tasks_of(ALL) == ["products", "sums"]  # the most used first
    for by, reverse, expected in (  # scores go down, all else up, unknown values last
        (None, False, "abcd"),
        ("name", True, "dcba"),
        ("sums", False, "bacd"),
        ("sums", True, "abcd"),
        ("tokens", True, "abcd"),
        ("method", False, "cadb"),
    ):
        assert first_letters(ordered(ROWS, by, reverse=reverse)) == expected, (by, reverse)
    assert columns_of("name, products ,sums.error", "sums", ROWS) == ["name", "products", "sums.error"]
    for function, said in (
        (lambda: select(ROWS, method="verra"), "--method: no entry of the zoo has the method 'verra' (did you mean v"),
        (lambda: select(ROWS, method="ora"), "--method: no entry of the zoo has the method 'ora' (did you mean lora?)"),
        (lambda: select(ROWS, task="sum"), "--task: no entry of the zoo has the task 'sum' (did you mean sums?)"),
        (lambda: ordered(ROWS, "prodcts"), "--sort: no column 'prodcts' (did you mean products?)"),
        (lambda: columns_of("name,sise", None, ROWS), "--columns: no column 'sise' (did you mean size?)"),
    ):
        with pytest.raises(PerlError) as caught:
            function()
        assert str(caught.value).startswith(said)


def test_a_row_says_all_that_is_known():
    row = {name: cell.text for name, cell in row_of(LORA).items() if cell.text != "-"}
    known = {"settings": "rank 2", "seeds": "3", "tokens": "123,456", "shipped": "yes", "size": "81.2 kB", "notes": "0"}
    known |= {"sha256": "a" * 64, "reward": "0.200 at step 1, 0.500 at step 4", "scores": "sums 50.0 ± 10.0 (+1)"}
    known |= {"sums": "50.0 ± 10.0", "sums.base": "40.0 ± 1.2", "sums.gain": "+10.0", "sums.error": "10.0"}
    known |= {"products": "30.0 ± 1.0", "products.error": "1.0"}
    assert known.items() <= row.items()
    as_they_are = {"name", "provenance", "base", "method", "algorithm", "seed", "steps", "parameters", "created"}
    assert row.keys() == known.keys() | as_they_are


def test_every_form_holds_the_same_and_what_others_wrote_steers_none_of_their_readers():
    columns = ["name", "sums", "tokens"]
    assert printed(ROWS, columns).splitlines() == [
        "name              sums   tokens",
        "a-lora     50.0 ± 10.0  123,456",
        "b-vera            70.0       99",
        "c-paper              -        -",
        "d-nothing            -        -",
    ]
    assert printed(ROWS, columns, "markdown").splitlines()[:3] == [
        "| name | sums | tokens |",
        "| --- | ---: | ---: |",
        "| a-lora | 50.0 ± 10.0 | 123,456 |",
    ]
    assert list(csv.reader(io.StringIO(printed(ROWS, columns, "csv"))))[:4] == [
        columns, ["a-lora", "0.5", "123456"], ["b-vera", "0.7", "99"], ["c-paper", "", ""],
    ]  # fmt: skip
    assert json.loads(printed(ROWS, columns, "json"))[0] == {"name": "a-lora", "sums": 0.5, "tokens": 123_456}
    assert as_records(ROWS)[2]["products"] == 0.9
    for hostile, style, said in (
        ("[x](javascript:x)|y", "markdown", r"\[x\](javascript:x)\|y"),
        ("=HYPERLINK(1)", "csv", "'=HYPERLINK(1)"),
        ("line\nbreak\x1b[2J", None, "line break [2J"),
    ):
        text = printed([row_of(reported("a", method=hostile))], ["method"], style)
        assert said in text
        assert hostile not in text.replace(f"'{hostile}", "")
