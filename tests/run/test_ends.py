"""Begin and end of a run are means of steps with their standard errors."""

import math

import pytest

from perl.run.ends import ends, shown


@pytest.mark.parametrize(("count", "steps"), [(1, 1), (2, 1), (3, 1), (4, 2), (19, 9), (20, 10), (500, 10)])
def test_ends_are_means_of_up_to_ten_steps_that_do_not_overlap(count, steps):
    values = [math.sin(step) + step / 10 for step in range(count)]
    first, last = ends(values)
    assert (first.steps, last.steps) == (steps, steps)
    for mean, own in ((first, values[:steps]), (last, values[count - steps :])):
        assert mean.value == pytest.approx(sum(own) / steps, rel=1e-12)
        squares = sum((value - mean.value) ** 2 for value in own)
        expected = (squares / (steps - 1) / steps) ** 0.5 if steps > 1 else math.nan
        assert mean.error == pytest.approx(expected, rel=1e-9, nan_ok=True)


def test_what_a_person_reads():
    assert shown([]) == "not scored"
    assert shown([0.25]) == "0.250 -> 0.250 (first and last step)"
    assert shown([0.0, 0.5, 1.0, 1.0]) == "0.250 ± 0.250 -> 1.000 ± 0.000 (means of 2 steps)"
