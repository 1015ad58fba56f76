"""What a card says of a difference follows its interval and its p value, whichever is more careful."""

import re
from dataclasses import replace

import pytest

from perl.evaluation.scoring.metrics import Difference
from perl.evaluation.scoring.table import judged_together
from perl.hub.card.render import headline, reservations
from tests.evaluations import rows, task_result
from tests.oracles.mean_intervals import difference_ends

MARKS = ["0000", "1000", "1100", "1111"] * 5, ["1100", "1110", "1111", "1111"] * 5
BETTER = task_result("sums", *MARKS)


def test_a_difference_is_shown_unless_its_p_value_denies_it():
    assert "does not tell them apart" not in headline(judged_together([BETTER]))
    assert reservations(judged_together([BETTER])) == []
    shown = re.search(r"a difference of (\S+) \[(\S+), (\S+)\]\.$", headline(judged_together([BETTER]))).groups()
    expected = [100 * value for value in difference_ends(*(rows(texts) for texts in MARKS))]
    assert [float(text) for text in shown] == pytest.approx(expected, abs=0.0501)
    denied = judged_together([replace(BETTER, difference=Difference(0.125, 0.056, 0.006, 0.244, 0.125))])
    assert headline(denied).endswith("a difference of +12.5 [+0.6, +24.4], which does not tell them apart.")
    assert any("p value" in line for line in reservations(denied))
    loss = judged_together([replace(BETTER, difference=Difference(-0.125, 0.056, -0.244, -0.006, 0.125))])
    assert not any("worse" in line for line in reservations(loss))


def test_of_several_tasks_a_difference_must_be_as_rare_as_one_of_so_many():
    """Nine wins of ten and no loss, p = 2 / 2**9, among eleven tasks: 0.043; among fourteen: 0.055."""
    won = task_result("won", ["00"] * 10, ["11"] * 9 + ["00"])
    alike = task_result("alike", ["10", "01", "11"], ["01", "11", "10"])
    for count, told in ((1, True), (11, True), (14, False)):
        others = (replace(alike, name=f"alike-{i}", title=f"Alike {i}") for i in range(1, count))
        found = judged_together([won, *others])
        sentence = headline(found).split(" On ")[0]
        assert ("does not tell them apart" not in sentence) is told
        assert any(line.startswith("On Won it cannot be told") for line in reservations(found)) is not told
    assert "corrected for 14 tasks" in reservations(found)[0]
