"""The picture has a panel a task, shows every problem, and needs only matplotlib."""

import subprocess
import sys
from fractions import Fraction

import numpy as np
import pytest
from matplotlib.image import imread

from perl.evaluation.figure import draw_problems, paired_shares
from tests.evaluations import results, task_result

DOTS_AN_INCH = 120
BLUE, ORANGE, GREY = (31, 95, 168), (200, 100, 30), (128, 128, 128)
MIXED = task_result("sums", ["1100", "0000", "1111", "1000"], ["1110", "0000", "1100", "1111"])


def pixels_of(picture):
    return (imread(picture)[..., :3] * 255).astype(int)


def amount(picture, color, alpha=0.85):
    """Pixels of points of a colour, as they look on white."""
    seen = np.array([round(255 - alpha * (255 - part)) for part in color])
    return int((abs(pixels_of(picture) - seen).max(axis=-1) <= 4).sum())


def test_shares_of_a_problem_are_pairs():
    half, three = Fraction(1, 2), Fraction(3, 4)
    assert paired_shares(MIXED) == [(half, three), (0, 0), (1, half), (Fraction(1, 4), 1)]
    assert paired_shares(task_result("sums", None, ["10"])) == []


@pytest.mark.parametrize(
    ("base", "adapter", "color"),
    [("1100", "1110", BLUE), ("1100", "1000", ORANGE), ("1100", "0011", GREY)],
)
def test_the_colour_and_the_place_of_a_point_say_which_policy_is_better(tmp_path, base, adapter, color):
    picture = draw_problems(results(task_result("sums", [base], [adapter])), tmp_path)
    found = {other: amount(picture, other) for other in (BLUE, ORANGE, GREY)}
    assert found[color] > 20
    assert found[BLUE] + found[ORANGE] == (found[color] if color != GREY else 0)
    if color == GREY:  # of the diagonal
        return
    corners = [("0000", "1111", BLUE), ("1111", "0000", ORANGE)]  # up left, down right
    drawn = [draw_problems(results(task_result("sums", [one], [other])), tmp_path / one) for one, other, _ in corners]
    (top, left), (bottom, right) = (place_of(one, hue) for one, (*_, hue) in zip(drawn, corners, strict=True))
    expected = bottom + adapter.count("1") / 4 * (top - bottom), left + base.count("1") / 4 * (right - left)
    assert place_of(picture, color) == pytest.approx(expected, abs=2)
    assert top < bottom
    assert left < right


def place_of(picture, color):
    """Row and column of the middle of a point."""
    seen = np.array([round(255 - 0.85 * (255 - part)) for part in color])
    rows, columns = np.nonzero(abs(pixels_of(picture) - seen).max(axis=-1) <= 4)
    return (rows.min() + rows.max()) / 2, (columns.min() + columns.max()) / 2


def inked(picture, color, alpha=0.85):
    """How many pixels a point of a colour covers, those at its edge in part: by their darkest channel."""
    pixels = pixels_of(picture)
    part = color.index(min(color))
    points = abs(pixels - np.array([round(255 - alpha * (255 - one)) for one in color])).max(axis=-1) <= 4
    rows, columns = np.argwhere(points).min(axis=0) - 2, np.argwhere(points).max(axis=0) + 3
    around = pixels[rows[0] : columns[0], rows[1] : columns[1], part]
    return float((255 - around).sum() / (alpha * (255 - color[part])))


@pytest.mark.parametrize(("count", "tolerance"), [(1, 0.2), (2, 0.2), (4, 0.2), (16, 0.4)])  # digits stand in the last
def test_the_area_of_a_point_is_24_square_points_for_each_problem_in_its_place(tmp_path, count, tolerance):
    picture = draw_problems(results(task_result("sums", ["0000"] * count, ["1100"] * count)), tmp_path)
    expected = np.pi / 4 * 24 * count * (DOTS_AN_INCH / 72) ** 2
    assert inked(picture, BLUE) == pytest.approx(expected, rel=tolerance)


@pytest.mark.parametrize(("panels", "columns", "rows"), [(1, 1, 1), (2, 2, 1), (3, 3, 1), (4, 2, 2), (5, 3, 2)])
def test_panels_stand_in_rows(tmp_path, panels, columns, rows):
    tasks = [task_result(f"task {i}", ["1100", "0000"], ["1111", "1000"]) for i in range(panels)]
    one = pixels_of(draw_problems(results(tasks[0]), tmp_path / "one")).shape
    many = pixels_of(draw_problems(results(*tasks), tmp_path / "many")).shape
    assert many[1] == columns * one[1]
    assert (many[0] == one[0]) == (rows == 1)


def test_without_a_base_the_shares_are_bars(tmp_path):
    def bars(*rows):
        """Heights in pixels of the columns, from the left."""
        picture = draw_problems(results(task_result("sums", None, rows)), tmp_path / str(len(rows)) / rows[-1])
        blue = (pixels_of(picture) == BLUE).all(axis=-1).sum(axis=0)
        return blue[blue > 0]

    one = bars("1111", "1111", "1111", "1111")
    # Best first: a quarter of the width each, as high as the share is; the bar of a problem never solved is not there.
    found = bars("1100", "0000", "1000", "1111")
    expected = np.repeat([1.0, 0.5, 0.25], len(one) // 4) * one.max()
    assert len(found) == pytest.approx(len(one) * 3 / 4, abs=3)
    middles = [len(one) // 8, len(one) * 3 // 8, len(one) * 5 // 8]
    assert [found[middle] for middle in middles] == pytest.approx([expected[middle] for middle in middles], abs=2)


def test_five_hundred_problems_are_drawn_into_the_folder(tmp_path):
    base = [f"{i % 65536:016b}" for i in range(0, 500 * 97, 97)]
    problems = results(task_result("sums", base, base[::-1]), task_result("all", base))
    picture = draw_problems(problems, tmp_path / "run" / "eval")
    assert picture == tmp_path / "run" / "eval" / "problems.png"
    assert picture.read_bytes().startswith(b"\x89PNG\r\n")
    assert amount(picture, BLUE) > 1000
    assert amount(picture, ORANGE) > 1000


def test_without_matplotlib_the_extra_is_named(checkout):
    code = (
        "import sys\nsys.modules['matplotlib'] = None\n"
        "from pathlib import Path\nfrom perl.errors import MissingExtraError\n"
        "from perl.evaluation.figure import draw_problems\nfrom tests.evaluations import results, task_result\n"
        "try:\n    draw_problems(results(task_result(adapter=['10'])), Path('.'))\n"
        "except MissingExtraError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=checkout)
    assert done.stdout.strip() == "drawing problems needs the package matplotlib (pip install 'perl-rl[plots]')"
