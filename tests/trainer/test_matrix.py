"""What users do with a trainer holds in every type and way in which they do it.

``make test`` takes every value with one process and with two, the nightly tests every pair of values. The full cross is
``python benchmarks/matrix.py``; its outcome is kept beside the other results.
"""

import json

import pytest

from tests import warm
from tests.trainer.user_matrix import DONE, VALUES, Cell, every_cell, every_value, pairs_of, pairwise, take

PARTS = {name: DONE for name in ("trains", "proves", "scores", "resumes", "goes on", "again")}
COVER = pairwise()
DAILY = [cell for count in (1, 2) for cell in every_value([cell for cell in COVER if cell.processes == count])]

pytestmark = [
    pytest.mark.filterwarnings("ignore:Unsupported layer type"),  # PEFT's, of a norm that it does not list
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing_:FutureWarning"),  # TRL uses transformers' old names
]


def in_its_tier(cell: Cell):
    return pytest.param(cell, marks=[] if cell in DAILY else pytest.mark.nightly)


def test_the_cells_that_are_taken_hold_every_pair_of_values_and_those_of_every_day_each_value():
    assert set().union(*map(pairs_of, COVER)) == set().union(*map(pairs_of, every_cell()))
    assert len(COVER) <= 30
    for count in (1, 2):
        daily = [cell for cell in DAILY if cell.processes == count]
        for taken, values in zip(zip(*daily, strict=True), VALUES[:-1], strict=False):
            assert set(taken) == set(values)
        assert len(daily) <= 6


@pytest.mark.parametrize(
    "cell", [in_its_tier(c) for c in COVER if c.processes == 1], ids=lambda cell: "-".join(cell[:4])
)
def test_one_process(cell, tmp_path):
    assert take(cell, tmp_path) == PARTS


@pytest.mark.parametrize("daily", [True, pytest.param(False, marks=pytest.mark.nightly)], ids=["daily", "the others"])
def test_two_processes(daily, tmp_path):
    cells = [",".join(map(str, cell)) for cell in COVER if cell.processes == 2 and (cell in DAILY) == daily]
    done = warm.run_distributed(["-m", "tests.trainer.user_matrix", str(tmp_path), *cells], tmp_path)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in (tmp_path / "found.jsonl").read_text().splitlines()]
    assert len(found) == len(cells)
    assert [(cell, outcome) for *cell, outcome in found if outcome != PARTS] == []
