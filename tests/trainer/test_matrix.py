"""What users do with a trainer holds in every type and way in which they do it: a cover of all pairs of values.

The full cross is ``python benchmarks/matrix.py``; its outcome is kept beside the other results.
"""

import json

import pytest

from tests import warm
from tests.trainer.user_matrix import DONE, every_cell, pairs_of, pairwise, take

PARTS = {name: DONE for name in ("trains", "proves", "scores", "resumes", "goes on", "again")}
COVER = pairwise()

pytestmark = [
    pytest.mark.filterwarnings("ignore:Unsupported layer type"),  # PEFT's, of a norm that it does not list
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing_:FutureWarning"),  # TRL uses transformers' old names
]


def test_the_cells_that_are_taken_hold_every_pair_of_values():
    assert set().union(*map(pairs_of, COVER)) == set().union(*map(pairs_of, every_cell()))
    assert len(COVER) <= 30


@pytest.mark.parametrize("cell", [cell for cell in COVER if cell.processes == 1], ids=lambda cell: "-".join(cell[:4]))
def test_one_process(cell, tmp_path):
    assert take(cell, tmp_path) == PARTS


def test_two_processes(tmp_path):
    cells = [",".join(map(str, cell)) for cell in COVER if cell.processes == 2]
    done = warm.run_distributed(["-m", "tests.trainer.user_matrix", str(tmp_path), *cells], tmp_path)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in (tmp_path / "found.jsonl").read_text().splitlines()]
    assert len(found) == len(cells)
    assert [(cell, outcome) for *cell, outcome in found if outcome != PARTS] == []
