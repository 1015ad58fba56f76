"""What users do with a trainer holds in every type and way in which they do it.

``make test`` takes one cell with one process, the nightly tests every pair of values. The full cross
is ``python benchmarks/matrix.py``; its outcome is kept beside the other results.
"""

import json
import os
from pathlib import Path

import pytest
import user_matrix
from user_matrix import DONE, Cell, every_cell, take

from tests import warm
from tests.oracles.covering import most_pairs, pairs_of

PARTS = {name: DONE for name in ("trains", "proves", "scores", "resumes", "goes on", "again")}
COVER = [Cell(*cell) for cell in most_pairs(every_cell(), 21)]
ALONE, TOGETHER = ([cell for cell in COVER if cell.processes == count] for count in (1, 2))

pytestmark = [
    pytest.mark.filterwarnings("ignore:Unsupported layer type"),  # PEFT's, of a norm that it does not list
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing_:FutureWarning"),  # TRL uses transformers' old names
]


def test_the_cells_of_every_night_hold_every_pair_of_values():
    assert set().union(*map(pairs_of, COVER)) == set().union(*map(pairs_of, every_cell()))


@pytest.mark.parametrize(
    "cell",
    [
        Cell("autocast", "name", "dora", "two iterations", 1),
        *(pytest.param(cell, marks=pytest.mark.nightly) for cell in ALONE),
    ],
    ids=lambda cell: "-".join(cell[:4]),
)
def test_one_process(cell, tmp_path):
    assert take(cell, tmp_path) == PARTS


@pytest.mark.parametrize(
    "cells",
    [
        pytest.param([Cell("bfloat16", "model", "lora", "beta", 2)], id="one", marks=pytest.mark.nightly),
        pytest.param(TOGETHER, id="every pair", marks=pytest.mark.nightly),
    ],
)
def test_two_processes(cells, tmp_path):
    written = [",".join(map(str, cell)) for cell in cells]
    path = os.pathsep.join(filter(None, (str(Path(user_matrix.__file__).parent), os.environ.get("PYTHONPATH"))))
    command = ["-m", "user_matrix", str(tmp_path), *written]
    done = warm.run_distributed(command, tmp_path, 2, {**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in (tmp_path / "found.jsonl").read_text().splitlines()]
    assert len(found) == len(cells)
    assert [(cell, outcome) for *cell, outcome in found if outcome != PARTS] == []
