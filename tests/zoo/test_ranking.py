"""Adapters are ranked within a protocol; those that errors cannot tell apart share their ranks."""

import itertools
import math
from fractions import Fraction

import pytest

from perl.errors import PerlError
from perl.zoo.listing import as_plain
from perl.zoo.ranking import COLUMNS, differ, ends_of, error_of, fisher_p, rank_task
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


def of_rights(right, count, k=1):
    """A score of problems of which so many were always right and the others never."""
    error = math.sqrt(right / count * (1 - right / count) / (count - 1))
    return score(right / count, stderr=error, n=count, k=k)


def apart(one, other):
    return differ(one, ends_of(trained("a", one), one), other, ends_of(trained("b", other), other))


@pytest.mark.parametrize("k", [1, 4])
def test_all_of_thirty_is_not_shown_to_be_better_than_26(k):
    full, nearly, half = of_rights(30, 30, k), of_rights(26, 30, k), of_rights(15, 30, k)
    assert not apart(full, nearly)
    assert not apart(nearly, full)
    assert apart(full, half)
    assert ranks(trained("full", full), trained("nearly", nearly)) == {"full": "1-2", "nearly": "1-2"}
    assert ranks(trained("full", full), trained("half", half)) == {"full": "1", "half": "2"}


@pytest.mark.parametrize("errors", [(0.01, 0.01), (0.02, 0.008)])
def test_where_scores_spread_they_differ_from_two_errors_of_the_difference_on(errors):
    one = score(0.5, stderr=errors[0], n=2000, k=16)
    reach = math.hypot(*errors)
    assert not apart(one, score(0.5 + 1.94 * reach, stderr=errors[1], n=2000, k=16))
    assert apart(one, score(0.5 + 2.1 * reach, stderr=errors[1], n=2000, k=16))


def exact_p(one, of_one, other, of_other):
    """Fisher's p value in fractions: tables with these margins that are no more likely than this one."""

    def ways(count):
        return math.comb(of_one, count) * math.comb(of_other, one + other - count)

    every = [ways(count) for count in range(one + other + 1)]
    return Fraction(sum(way for way in every if way <= ways(one)), sum(every))


def test_no_adapter_is_better_where_fishers_exact_test_denies_it():
    assert fisher_p(30, 30, 26, 30) == pytest.approx(0.112, abs=1e-3)
    for one, other in itertools.product(range(31), repeat=2):
        expected = exact_p(one, 30, other, 30)
        assert fisher_p(one, 30, other, 30) == pytest.approx(float(expected))
        if expected > Fraction(1, 20):
            assert not apart(of_rights(one, 30), of_rights(other, 30))


@pytest.mark.parametrize(
    ("one", "of_one", "other", "of_other"),
    [(1187, 1319, 132, 1319), (132, 1319, 1187, 1319), (1319, 1319, 0, 1319), (700, 1319, 660, 1319), (490, 500, 1, 9)],
)
def test_p_of_whole_benchmarks_is_that_of_integers(one, of_one, other, of_other):
    tables = {
        count: math.comb(of_one, count) * math.comb(of_other, one + other - count)
        for count in range(max(0, one + other - of_other), min(one + other, of_one) + 1)
    }
    expected = Fraction(sum(ways for ways in tables.values() if ways <= tables[one]), sum(tables.values()))
    assert fisher_p(one, of_one, other, of_other) == pytest.approx(float(expected), rel=1e-6, abs=1e-300)


def test_adapters_far_apart_on_a_whole_benchmark_are_ranked():
    best, worst = of_rights(1187, 1319), of_rights(132, 1319)
    assert ranks(trained("best", best), trained("worst", worst)) == {"best": "1", "worst": "2"}


@pytest.mark.parametrize(("counts", "k"), [((30, 30), 1), ((30, 30), 4), ((12, 60), 4), ((100, 100), 4)])
def test_equal_adapters_are_told_apart_less_than_one_time_in_twenty(counts, k):
    """Counted over all outcomes. With k above 1 all completions of a problem agree, which spreads scores the most."""
    scores = [[of_rights(right, count, k) for right in range(count + 1)] for count in counts]
    ends = [[ends_of(trained("a", one), one) for one in of] for of in scores]
    told = [
        [differ(one, its, other, others) for other, others in zip(scores[1], ends[1], strict=True)]
        for one, its in zip(scores[0], ends[0], strict=True)
    ]
    for share in (0.01, 0.03, 0.1, 0.25, 0.33, 0.5, 0.9, 0.97):
        chances = [
            [math.comb(count, right) * share**right * (1 - share) ** (count - right) for right in range(count + 1)]
            for count in counts
        ]
        wrong = math.fsum(
            chances[0][one] * chances[1][other]
            for one, row in enumerate(told)
            for other, is_told in enumerate(row)
            if is_told
        )
        assert wrong <= 0.05


def test_without_a_number_of_problems_an_error_says_nothing():
    assert not apart(score(0.1, n=None), score(0.9, n=None))
    assert not apart(score(0.1, n=1), score(0.9, n=1))


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
    (note,) = [note for note in found.notes() if "standard error" in note]
    assert note.endswith(": c.")


def test_without_any_error_all_share_all_ranks():
    found = rank_task([reported("a", theirs(0.9)), reported("b", theirs(0.002))], "sums")
    assert {r.rank for r in found.ranked} == {"1-2"}
    assert any(note.startswith("No score has a known standard error and number of problems") for note in found.notes())


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
