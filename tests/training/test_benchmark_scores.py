"""The best adapter and what it scored belong together, whenever a kill comes."""

from types import SimpleNamespace

import pytest
from transformers import TrainerState

from perl.errors import PerlError
from perl.evaluation.scoring.protocol import Protocol
from perl.run.facts import read_best
from perl.training.callbacks.benchmark_scores import BenchmarkScores, Questions


class KillError(Exception):
    """The process ends here."""


def _scored(folder, step, value, save):
    class Planned(BenchmarkScores):
        def score(self):
            return {"eval/sums/avg@1": value, "eval/sums/avg@1_stderr": 0.5}

        @property
        def trainer(self):
            return SimpleNamespace(note=lambda _: None, save_adapter=save)

    scores = Planned(["sandbox:chain"], 1, 1, folder=folder.parent, questions=Questions((), Protocol()))
    scores.on_train_begin(SimpleNamespace(output_dir="."), TrainerState(), None)
    scores.on_step_end(None, TrainerState(global_step=step), None)


def _save(text):
    def save(place):
        place.mkdir(parents=True)
        (place / "weights").write_text(text)

    return save


@pytest.mark.parametrize("at", ["write_text", "replace_folder", None])
def test_a_kill_while_a_better_one_is_kept_pairs_no_weights_with_anothers_step(at, tmp_path, monkeypatch):
    folder = tmp_path / "best"
    _scored(folder, 1, 0.25, _save("of step 1"))
    if at is None:  # killed between the older one's end and its arrival: it is found again
        folder.rename(tmp_path / ".best.tmp")
        _scored(folder, 2, 0.125, _save("of step 2"))
        assert ((folder / "adapter" / "weights").read_text(), read_best(folder)["step"]) == ("of step 1", 1)
        return

    def killed(*_):
        raise KillError

    with monkeypatch.context() as changed:
        changed.setattr(f"perl.training.callbacks.benchmark_scores.{at}", killed)
        with pytest.raises(KillError):
            _scored(folder, 2, 0.5, _save("of step 2"))
    assert ((folder / "adapter" / "weights").read_text(), read_best(folder)["step"]) == ("of step 1", 1)
    _scored(folder, 2, 0.5, _save("of step 2"))
    assert ((folder / "adapter" / "weights").read_text(), read_best(folder)["step"]) == ("of step 2", 2)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({"tasks": ["aime42"]}, "BenchmarkScores(tasks[0]): there is no task 'aime42' (did you mean aime24?)"),
        ({"tasks": [{"name": "aime24", "few_shot": 9}], "limit": 8}, "Scores(limit): a limit of 8 is below the 9"),
        ({"tasks": [{"name": "aime24", "limits": 8}]}, "BenchmarkScores(tasks[0].limits): unknown key"),
        ({"tasks": ["aime24"], "k": 0}, "BenchmarkScores(k): must be greater than or equal to 1, not 0"),
        ({"tasks": ["aime24"], "best": "aime24/avg@5"}, "no score 'aime24/avg@5' (did you mean aime24/avg@4?)"),
    ],
)
def test_what_cannot_be_scored_is_one_line_before_there_is_a_trainer(arguments, line):
    with pytest.raises(PerlError) as raised:
        BenchmarkScores(**arguments)
    assert line in str(raised.value)
    assert len(raised.value.mistakes) == 1
