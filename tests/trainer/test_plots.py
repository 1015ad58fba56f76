"""The learning curves show what was logged, leave out what was not, and need only matplotlib."""

import json
import sys

import pytest
from matplotlib.image import imread

from perl.cli.main import run_commands
from perl.errors import MissingExtraError
from perl.trainer.callbacks.step_logs import draw_plots


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


def draw_curves(*arguments):
    return draw_plots(*arguments)[0]


def has_ink(picture, rows, columns):
    """Whether anything is drawn in a part of the picture, given as shares of its height and width."""
    pixels = imread(picture)[..., :3]
    height, width = pixels.shape[:2]
    part = pixels[int(rows[0] * height) : int(rows[1] * height), int(columns[0] * width) : int(columns[1] * width)]
    return bool((part < 0.99).any())


def size_of(picture):
    return imread(picture).shape[:2]


@pytest.mark.parametrize(
    ("absent", "empty", "panels"),
    [((), (), 4), (("kl",), (), 3), ((), ("kl", "entropy"), 2), (("kl",), ("entropy", "completions/mean_length"), 1)],
)
def test_each_quantity_that_was_logged_has_a_panel(tmp_path, absent, empty, panels):
    metrics = write_metrics(tmp_path / "metrics.jsonl", *absent, **dict.fromkeys(empty))
    picture = draw_curves(metrics, tmp_path / "run" / "plots", "a title")
    assert picture == tmp_path / "run" / "plots" / "curves.png"
    four = size_of(draw_curves(write_metrics(metrics), tmp_path, "t"))
    rows, columns = (panels + 1) // 2, min(panels, 2)
    height, width = size_of(picture)
    assert (height == four[0], height < four[0], width) == (rows == 2, rows == 1, four[1] * columns / 2)
    inked = [
        has_ink(picture, (row / rows + 0.15 / rows, (row + 1) / rows), (column / columns, (column + 0.9) / columns))
        for row in range(rows)
        for column in range(columns)
    ]
    assert sum(inked) == panels


def test_every_reward_and_every_score_has_a_panel_of_its_own(tmp_path):
    rows = [
        {"step": step, "reward": 0.5, "rewards/accuracy/mean": 0.1 * step, "rewards/my_reward/mean": -1.0, "loss": 0.0}
        for step in range(1, 7)
    ]
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [picture.name for picture in draw_plots(metrics, tmp_path, "t")] == ["curves.png", "rewards.png"]
    assert [picture.name for picture in draw_plots(metrics, tmp_path, "t", rewarded=False)] == ["curves.png"]
    for step in (3, 6):
        scores = {"eval/aime24/avg@4": 0.2, "eval/aime24/avg@4_stderr": 0.05, "eval/aime24/pass@4": 0.5}
        rows[step - 1] |= scores | {"eval/aime24/truncated": 0.0, "eval/gsm8k/avg@4": 0.7}
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    pictures = draw_plots(metrics, tmp_path, "t")
    assert [picture.name for picture in pictures] == ["curves.png", "rewards.png", "scores.png"]
    two, three = size_of(pictures[1]), size_of(pictures[2])
    assert (two[1], two[0] < three[0]) == (three[1], True)  # three scores stand in two lines


def test_lines_that_are_cut_short_or_hold_no_number_are_gaps(tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    rows = [{"step": 1, "reward": 0.5}, {"step": 1, "eval_reward": 0.9}, {"step": 3, "reward": None, "entropy": 0.5}]
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 4, "rew')
    assert draw_curves(metrics, tmp_path, "gap").is_file()


@pytest.fixture
def without_matplotlib(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)


@pytest.mark.usefixtures("without_matplotlib")
def test_without_matplotlib_the_error_names_what_to_install(tmp_path):
    with pytest.raises(MissingExtraError, match=r"matplotlib .*pip install 'perl-rl\[plots\]'") as raised:
        draw_curves(write_metrics(tmp_path / "metrics.jsonl"), tmp_path / "plots", "t")
    assert raised.value.exit_code == 2
    assert not (tmp_path / "plots").exists()


@pytest.mark.usefixtures("without_matplotlib")
def test_a_run_without_matplotlib_is_done_and_says_that_nothing_was_drawn(tmp_path, capsys):
    settings = ["train.max_steps=1", "train.prompts_per_step=2", "train.num_generations=2"]
    settings += ["train.per_device_train_batch_size=4", "eval.enabled=false", "engine.threads=1"]
    assert run_commands(["train", "quickstart", *settings], "perl") == 0
    printed = capsys.readouterr()
    assert "drawing curves needs the package matplotlib" in printed.err
    assert "curves   not drawn: pip install 'perl-rl[plots]'" in printed.out
    run = tmp_path / "runs" / "quickstart"
    assert json.loads((run / "run.json").read_text())["status"] == "done"
    assert not (run / "plots").exists()
