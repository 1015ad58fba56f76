"""Adapters are ranked within a protocol; those that errors cannot tell apart share their ranks."""

import math

import pytest

from perl.errors import PerlError
from perl.zoo.listing import as_plain
from perl.zoo.ranking import COLUMNS, differ, error_of, rank_task
from tests.zoo.entries import OTHER_PROTOCOL, PROTOCOL, reported, score, seeds, theirs, trained


def ranks(*entries, **options):
    return {found.entry.name: found.rank for found in rank_task(entries, "sums", **options).ranked}


def test_scores_that_errors_tell_apart_have_ranks_of_their_own():
    assert ranks(trained("low", score(0.5)), trained("high", score(0.7)), trained("mid", score(0.6))) == {
        "high": "1",
        "mid": "2",
        "low": "3",
    }


def test_ties_are_ranges_and_need_not_be_chains():
    # 3 points are no difference at a standard error of 1.2 each, 6 points are.
    entries = [
        trained(name, score(value, stderr=0.012)) for name, value in zip("abcd", (0.5, 0.53, 0.56, 0.9), strict=True)
    ]
    assert ranks(*entries) == {"d": "1", "c": "2-3", "b": "2-4", "a": "3-4"}


@pytest.mark.parametrize(("difference", "expected"), [(1.959, False), (1.961, True)])
def test_the_limit_is_1_96_standard_errors_of_the_difference(difference, expected):
    assert differ(0.5, 0.03, 0.5 + difference * math.hypot(0.03, 0.04), 0.04) is expected


def test_equal_scores_tie_even_without_any_error():
    assert ranks(trained("a", score(0.5, stderr=0.0)), trained("b", score(0.5, stderr=0.0))) == {"a": "1-2", "b": "1-2"}


def test_the_spread_over_seeds_counts_where_it_is_larger():
    steady = trained("steady", score(0.5), seeds=seeds(0.501, 0.499))
    shaky = trained("shaky", score(0.56), seeds=seeds(0.46, 0.66))
    assert error_of(steady, steady.scores[0]) == 0.01
    assert error_of(shaky, shaky.scores[0]) == pytest.approx(0.1)
    assert ranks(steady, shaky) == {"shaky": "1-2", "steady": "1-2"}
    assert ranks(steady, trained("shaky", score(0.56))) == {"shaky": "1", "steady": "2"}


def test_seeds_give_an_error_where_there_is_no_other():
    entry = trained("a", score(0.5, stderr=None), seeds=seeds(0.6))
    assert error_of(entry, entry.scores[0]) == pytest.approx(math.sqrt(0.005))
    other = trained("a", score(0.5, stderr=None), seeds=seeds(0.6, task="products"))
    assert error_of(other, other.scores[0]) is None


def test_a_score_without_an_error_is_told_apart_from_none():
    found = rank_task(
        [trained("a", score(0.9)), trained("b", score(0.1)), trained("c", score(0.5, stderr=None))], "sums"
    )
    assert {r.entry.name: r.rank for r in found.ranked} == {"a": "1-2", "c": "1-3", "b": "2-3"}
    assert "No standard error is known, so not to be told apart from any other: c." in found.notes()


def test_without_any_error_all_share_all_ranks():
    found = rank_task([reported("a", theirs(0.9)), reported("b", theirs(0.002))], "sums")
    assert {r.rank for r in found.ranked} == {"1-2"}
    assert "No score has a standard error: none can be told apart from any other." in found.notes()


def test_other_protocols_are_named_and_not_ranked():
    entries = [
        trained("a", score(0.5)),
        trained("b", score(0.6)),
        trained("hot", score(0.99, protocol_hash=OTHER_PROTOCOL)),
        reported("paper", theirs(0.9)),
        trained("elsewhere", score(0.9, "products")),
    ]
    found = rank_task(entries, "sums")
    assert found.protocol == PROTOCOL
    assert [r.entry.name for r in found.ranked] == ["b", "a"]
    assert found.others == {OTHER_PROTOCOL: ("hot",), "avg@32 reported by A paper, Table 1": ("paper",)}
    assert f"Not ranked, measured otherwise ({OTHER_PROTOCOL}): hot." in found.notes()
    assert ranks(*entries, protocol="9999") == {"hot": "1"}
    assert ranks(*entries, protocol="PAPER") == {"paper": "1"}


def test_of_two_groups_of_one_size_the_measured_one_is_ranked():
    entries = [reported("a", theirs(0.9, metric="0 first by name")), trained("b", score(0.5))]
    assert ranks(*entries) == {"b": "1"}


def test_other_bases_are_said():
    found = rank_task([trained("a", score(0.5)), trained("b", score(0.6), base="someone/else")], "sums")
    assert "The bases are not the same: sandbox:base, someone/else." in found.notes()


@pytest.mark.parametrize(
    ("task", "protocol", "said"),
    [
        ("sum", None, "no entry of the zoo has a score on 'sum' (did you mean sums?)"),
        ("sums", "77", f"--protocol 77: no score on sums was measured so (there are: {PROTOCOL})"),
    ],
)
def test_nothing_to_rank_is_a_mistake(task, protocol, said):
    with pytest.raises(PerlError) as caught:
        rank_task([trained("a", score(0.5))], task, protocol)
    assert str(caught.value) == said


def test_the_table_shows_the_error_that_was_used():
    found = rank_task([trained("a", score(0.5), seeds=seeds(0.6)), trained("b", score(0.9))], "sums")
    assert as_plain(found.rows(), COLUMNS).splitlines() == [
        "rank  name  method  base               score  base score   gain  mean over seeds",
        "   1  b     lora    sandbox:base  90.0 ± 1.0  40.0 ± 1.2  +50.0                -",
        "   2  a     lora    sandbox:base  50.0 ± 7.1  40.0 ± 1.2  +10.0         55.0 (2)",
    ]
