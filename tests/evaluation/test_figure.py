"""The picture has a panel a task, shows every problem, and needs only matplotlib."""

import subprocess
import sys

import numpy as np
import pytest
from matplotlib.image import imread

from perl.evaluation.scoring.figure import draw_problems
from tests.evaluations import results, task_result

BLUE, ORANGE, GREY = (31, 95, 168), (200, 100, 30), (128, 128, 128)


def pixels_of(picture):
    return (imread(picture)[..., :3] * 255).astype(int)


def amount(picture, color, alpha=0.85):
    """Pixels of points of a colour, as they look on white."""
    seen = np.array([round(255 - alpha * (255 - part)) for part in color])
    return int((abs(pixels_of(picture) - seen).max(axis=-1) <= 4).sum())


@pytest.mark.parametrize(
    ("base", "adapter", "color"), [("1100", "1110", BLUE), ("1100", "1000", ORANGE), ("1100", "0011", GREY)]
)
def test_the_colour_of_a_point_says_which_policy_is_better(tmp_path, base, adapter, color):
    picture = draw_problems(results(task_result("sums", [base], [adapter])), tmp_path)
    found = {other: amount(picture, other) for other in (BLUE, ORANGE, GREY)}
    assert found[color] > 20
    assert found[BLUE] + found[ORANGE] == (found[color] if color != GREY else 0)


def test_without_matplotlib_the_extra_is_named(checkout):
    code = (
        "import sys\nsys.modules['matplotlib'] = None\n"
        "from pathlib import Path\nfrom perl.errors import MissingExtraError\n"
        "from perl.evaluation.scoring.figure import draw_problems\nfrom tests.evaluations import results, task_result\n"
        "try:\n    draw_problems(results(task_result(base=['10'], adapter=['11'])), Path('.'))\n"
        "except MissingExtraError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=checkout)
    assert done.stdout.strip() == "drawing problems needs the package matplotlib (pip install 'perl-rl[plots]')"
