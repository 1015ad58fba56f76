"""The learning curves show what was logged, leave out what was not, and need only matplotlib."""

import json
import subprocess
import sys

import numpy as np
import pytest
from matplotlib.image import imread

from perl.trainer.callbacks.plots import draw_curves, read_reports

WITHOUT_MATPLOTLIB = "import sys\nsys.modules['matplotlib'] = None\n"


def write_metrics(path, *absent, steps=20, **extra):
    """A metrics file as the recorder writes it, without some quantities."""
    rows = []
    for step in range(1, steps + 1):
        row = {
            "step": step,
            "reward": step / steps,
            "completions/mean_length": 20.0 + step,
            "entropy": 1.0 / step,
            "kl": 0.001 * step,
            "num_tokens": 100.0 * step,
            **extra,
        }
        rows.append({name: value for name, value in row.items() if name not in absent})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def has_ink(picture, rows, columns):
    """Whether anything is drawn in a part of the picture, given as shares of its height and width."""
    pixels = imread(picture)[..., :3]
    height, width = pixels.shape[:2]
    part = pixels[int(rows[0] * height) : int(rows[1] * height), int(columns[0] * width) : int(columns[1] * width)]
    return bool((part < 0.99).any())


def size_of(picture):
    return imread(picture).shape[:2]


def test_four_quantities_make_four_panels(tmp_path):
    picture = draw_curves(write_metrics(tmp_path / "metrics.jsonl"), tmp_path / "run" / "plots", "a title")
    assert picture == tmp_path / "run" / "plots" / "curves.png"
    assert picture.read_bytes().startswith(b"\x89PNG\r\n")
    for rows in ((0.15, 0.5), (0.55, 1.0)):
        for columns in ((0.0, 0.5), (0.5, 1.0)):
            assert has_ink(picture, rows, columns)


@pytest.mark.parametrize("how", ["absent", "null"])
def test_a_quantity_that_was_not_logged_has_no_panel(tmp_path, how):
    if how == "absent":
        metrics = write_metrics(tmp_path / "metrics.jsonl", "kl")
    else:
        metrics = write_metrics(tmp_path / "metrics.jsonl", kl=None)
    picture = draw_curves(metrics, tmp_path, "no KL")
    assert has_ink(picture, (0.55, 1.0), (0.0, 0.45))
    assert not has_ink(picture, (0.55, 1.0), (0.55, 1.0))


def test_the_picture_grows_with_its_panels(tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    four = size_of(draw_curves(write_metrics(metrics), tmp_path, "t"))
    two = size_of(draw_curves(write_metrics(metrics, "kl", "entropy"), tmp_path, "t"))
    one = size_of(draw_curves(write_metrics(metrics, "kl", "entropy", "completions/mean_length"), tmp_path, "t"))
    assert four[1] == two[1] == 2 * one[1]
    assert four[0] > two[0] == one[0]


def test_the_title_is_drawn(tmp_path):
    metrics = write_metrics(tmp_path / "metrics.jsonl")
    untitled = imread(draw_curves(metrics, tmp_path / "a", " "))
    titled = imread(draw_curves(metrics, tmp_path / "b", "quickstart: lora on sandbox:base"))
    assert not np.array_equal(untitled, titled)


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_short_run_can_be_drawn(tmp_path, steps):
    metrics = write_metrics(tmp_path / "metrics.jsonl", steps=steps)
    assert draw_curves(metrics, tmp_path, "short").stat().st_size > 0


def test_a_step_that_could_not_be_scored_is_a_gap(tmp_path):
    metrics = write_metrics(tmp_path / "metrics.jsonl", steps=5)
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    rows[2]["reward"] = None
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [report.reward for report in read_reports(metrics)] == [0.2, 0.4, None, 0.8, 1.0]
    assert draw_curves(metrics, tmp_path, "gap").is_file()


def test_only_training_steps_are_read_in_order(tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    rows = [
        {"step": 1, "reward": 0.5, "completions/mean_length": 7.0, "num_tokens": 10.0},
        {"step": 1, "eval_reward": 0.9},
        {"step": 2, "loss": 0.1},
        {"step": 3, "reward": 0.75, "kl": 0.25},
    ]
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    reports = read_reports(metrics)
    assert [(r.step, r.reward, r.length, r.kl, r.tokens) for r in reports] == [
        (1, 0.5, 7.0, None, 10.0),
        (3, 0.75, None, 0.25, 0.0),
    ]


def test_an_older_picture_is_replaced(tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    first = draw_curves(write_metrics(metrics, steps=5), tmp_path, "t").read_bytes()
    second = draw_curves(write_metrics(metrics, steps=9), tmp_path, "t").read_bytes()
    assert first != second


def test_without_matplotlib_the_error_says_what_to_install(tmp_path):
    metrics = write_metrics(tmp_path / "metrics.jsonl")
    code = WITHOUT_MATPLOTLIB + (
        "from pathlib import Path\n"
        "from perl.trainer.callbacks.plots import draw_curves\n"
        "from perl.errors import MissingExtraError\n"
        "try:\n"
        f"    draw_curves(Path({str(metrics)!r}), Path('plots'), 't')\n"
        "except MissingExtraError as error:\n"
        "    print(isinstance(error, ImportError), error.exit_code, error)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "True 2 drawing curves needs the package matplotlib (pip install 'perl-rl[plots]')\n"
    assert not (tmp_path / "plots").exists()


def test_a_run_without_matplotlib_is_done_and_says_that_nothing_was_drawn(tmp_path):
    code = WITHOUT_MATPLOTLIB + (
        "from perl.cli.main import run_commands\n"
        "sys.exit(run_commands(['train', 'quickstart', 'train.max_steps=1', 'train.prompts_per_step=2',\n"
        "    'train.num_generations=2', 'train.per_device_train_batch_size=4', 'eval.enabled=false',\n"
        "    'engine.threads=1'], 'perl'))\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "drawing curves needs the package matplotlib" in result.stderr
    assert "curves   not drawn: pip install 'perl-rl[plots]'" in result.stdout
    run = tmp_path / "runs" / "quickstart"
    assert json.loads((run / "run.json").read_text())["status"] == "done"
    assert not (run / "plots").exists()
