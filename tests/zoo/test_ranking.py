"""Adapters are ranked within a protocol; those that errors cannot tell apart share their ranks."""

import math
import random
import statistics

import numpy
import pytest
from scipy import stats

from perl.errors import PerlError
from perl.zoo.ranking import differ, ends_of, rank_task
from tests.zoo.entries import OTHER_PROTOCOL, PROTOCOL, reported, score, seeds, theirs, trained


def ranks(*entries, **options):
    return {row["name"].text: row["rank"].text for row in rank_task(entries, "sums", **options).rows}


def of_rights(right, count, k=1):
    """A score of problems of which so many were always right and the others never."""
    error = math.sqrt(right / count * (1 - right / count) / (count - 1))
    return score(right / count, stderr=error, n=count, k=k)


def apart(one, other):
    return differ(one, ends_of(trained("a", one), one), other, ends_of(trained("b", other), other))


def row(values, **facts):
    return [trained(name, score(value, **facts)) for name, value in values.items()]


def test_scores_differ_from_two_errors_of_the_difference_on_and_ranks_follow():
    for errors in ((0.01, 0.01), (0.02, 0.008)):
        one = score(0.5, stderr=errors[0], n=2000, k=16)
        reach = math.hypot(*errors)
        assert not apart(one, score(0.5 + 1.94 * reach, stderr=errors[1], n=2000, k=16))
        assert apart(one, score(0.5 + 2.1 * reach, stderr=errors[1], n=2000, k=16))
    for n in (None, 1):  # without a number of problems an error says nothing
        assert not apart(score(0.1, n=n), score(0.9, n=n))
    full, nearly, half = of_rights(30, 30), of_rights(26, 30), of_rights(15, 30)
    assert not apart(full, nearly)  # all of thirty is not shown to be better than 26
    assert apart(full, half)
    one_size = [reported("a", theirs(0.9, metric="0 first by name")), trained("b", score(0.5))]
    for entries, expected in (
        (row({"low": 0.5, "high": 0.7, "mid": 0.6}), {"high": "1", "mid": "2", "low": "3"}),
        # 3 points are no difference at a standard error of 1.2 each, 6 points are: ties need not be chains.
        (row({"a": 0.5, "b": 0.53, "c": 0.56, "d": 0.9}, stderr=0.012), {"d": "1", "c": "2-3", "b": "2-4", "a": "3-4"}),
        (row({"a": 0.5, "b": 0.5}, stderr=0.0), {"a": "1-2", "b": "1-2"}),
        (one_size, {"b": "1"}),  # of two groups of one size the measured one
    ):
        assert ranks(*entries) == expected
    # The best rank is one more than those above by 1.96 errors of the difference, the worst leaves out those below.
    draw = random.Random(0)
    for _ in range(20):
        values, error = [draw.uniform(0.3, 0.7) for _ in range(8)], 1.96 * 0.02 * 2**0.5
        many = row({f"e{number}": value for number, value in enumerate(values)}, stderr=0.02, n=100_000, k=16)
        for found in rank_task(many, "sums").rows:
            gaps = [(other - found["score"].value) / error for other in values]
            if min(abs(abs(gap) - 1) for gap in gaps) > 0.02:  # the ends of an interval are not quite 1.96 errors away
                best, worst = 1 + sum(gap > 1 for gap in gaps), len(values) - sum(gap < -1 for gap in gaps)
                assert found["rank"].text == (str(best) if best == worst else f"{best}-{worst}")


@pytest.mark.parametrize(("counts", "k"), [((30, 30), 1), ((12, 60), 4), ((100, 100), 1)])
def test_equal_adapters_are_told_apart_less_than_one_time_in_twenty(counts, k):
    """Counted over all outcomes, beside the rule written anew with SciPy's beta quantiles.

    With k above 1 all completions of a problem agree, which spreads scores the most.
    """
    scores = [[of_rights(right, count, k) for right in range(count + 1)] for count in counts]
    ends = [[ends_of(trained("a", one), one) for one in of] for of in scores]
    told = [
        [differ(one, its, other, others) for other, others in zip(scores[1], ends[1], strict=True)]
        for one, its in zip(scores[0], ends[0], strict=True)
    ]
    expected = apart_by_hand(*counts)
    for share in (0.01, 0.03, 0.1, 0.25, 0.33, 0.5, 0.9, 0.97):
        chances = numpy.outer(*(stats.binom.pmf(range(count + 1), count, share) for count in counts))
        wrong = float(chances[numpy.array(told)].sum())
        assert wrong == pytest.approx(float(chances[expected].sum()), rel=1e-9, abs=1e-12)
        assert wrong <= 0.05


def apart_by_hand(of_one, of_other):
    """Rights of one and rights of the other -> whether Newcombe's interval with exact limits excludes 0."""

    def limits(count):
        rights = numpy.arange(count + 1)
        with numpy.errstate(invalid="ignore"):
            low = numpy.nan_to_num(stats.beta.ppf(0.025, rights, count - rights + 1))
            high = numpy.nan_to_num(stats.beta.ppf(0.975, rights + 1, count - rights), nan=1.0)
        return rights / count, low, high

    (p, low, high), (q, lower, higher) = limits(of_one), limits(of_other)
    apart = numpy.zeros((of_one + 1, of_other + 1), bool)
    for i, j in numpy.ndindex(apart.shape):
        down = (
            math.hypot(p[i] - low[i], higher[j] - q[j]) if p[i] > q[j] else math.hypot(high[i] - p[i], q[j] - lower[j])
        )
        apart[i, j] = abs(p[i] - q[j]) > down
    return apart


def test_the_error_is_the_larger_of_the_problems_and_the_seeds():
    for values in ((0.56, 0.46, 0.66), (0.5, 0.6), (0.1, 0.2, 0.4, 0.8)):
        spread = statistics.stdev(values)
        (found,) = rank_task([trained("a", score(values[0]), seeds=seeds(*values[1:]))], "sums").rows
        assert found["error"].value == pytest.approx(spread)
        assert [float(part) for part in found["score"].text.split(" ± ")] == pytest.approx(
            [100 * values[0], 100 * spread], abs=0.0501
        )
        mean, count = found["mean over seeds"].text.split(" ")
        assert float(mean) == pytest.approx(100 * statistics.mean(values), abs=0.0501)
        assert count == f"({len(values)})"
    steady = trained("steady", score(0.5), seeds=seeds(0.501, 0.499))
    assert steady.error(steady.scores[0]) == 0.01
    shaky = trained("shaky", score(0.56), seeds=seeds(0.46, 0.66))
    assert ranks(steady, shaky) == {"shaky": "1-2", "steady": "1-2"}
    assert ranks(steady, trained("shaky", score(0.56))) == {"shaky": "1", "steady": "2"}


def test_what_cannot_be_compared_is_noted_and_not_ranked_and_nothing_to_rank_is_a_mistake():
    known = [trained("a", score(0.9)), trained("b", score(0.1)), trained("c", score(0.5, stderr=None))]
    found = rank_task(known, "sums")
    assert ranks(*known) == {"a": "1-2", "c": "1-3", "b": "2-3"}
    (note,) = [note for note in found.notes if "standard error" in note]
    assert note.endswith(": c.")
    assert ranks(reported("a", theirs(0.9)), reported("b", theirs(0.002))) == {"a": "1-2", "b": "1-2"}
    entries = [
        trained("a", score(0.5)),
        trained("b", score(0.6), base="someone/else"),
        trained("hot", score(0.99, protocol_hash=OTHER_PROTOCOL)),
        reported("paper", theirs(0.9)),
        trained("elsewhere", score(0.9, "products")),
    ]
    found = rank_task(entries, "sums")
    assert (found.protocol, [row["name"].text for row in found.rows]) == (PROTOCOL, ["b", "a"])
    assert found.others == {OTHER_PROTOCOL: ("hot",), "avg@32 reported by A paper, Table 1": ("paper",)}
    assert f"Not ranked, measured otherwise ({OTHER_PROTOCOL}): hot." in found.notes
    assert "The bases are not the same: sandbox:base, someone/else." in found.notes
    assert ranks(*entries, protocol="PAPER") == {"paper": "1"}
    for task, protocol, said in (
        ("sum", None, "no entry of the zoo has a score on 'sum' (did you mean sums?)"),
        ("sums", "77", f"--protocol 77: no score on sums was measured so (there are: {PROTOCOL})"),
    ):
        with pytest.raises(PerlError) as caught:
            rank_task([trained("a", score(0.5))], task, protocol)
        assert str(caught.value) == said
