"""The best adapter and what it scored belong together, whenever a kill comes."""

from types import SimpleNamespace

import pytest
from perl.training.callbacks.task_scores import TaskScores

from perl.run.facts import read_best


class KillError(Exception):
    """The process ends here."""


def _scored(folder, step, value, save):
    scores = TaskScores(lambda: {"eval/sums/avg@1": value}, lambda _: None, save, 1, None, folder)
    scores.on_step_end(None, SimpleNamespace(global_step=step), None)


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
        changed.setattr(f"perl.training.callbacks.task_scores.{at}", killed)
        with pytest.raises(KillError):
            _scored(folder, 2, 0.5, _save("of step 2"))
    assert ((folder / "adapter" / "weights").read_text(), read_best(folder)["step"]) == ("of step 1", 1)
    _scored(folder, 2, 0.5, _save("of step 2"))
    assert ((folder / "adapter" / "weights").read_text(), read_best(folder)["step"]) == ("of step 2", 2)
