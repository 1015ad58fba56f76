"""How cells end and what follows: begun once more, a choice without them, files that were changed since."""

import contextlib
import json
import signal

import pytest

import perl
from perl.errors import PerlError
from perl.training.studies import run_study
from perl.training.studies.carry_out import Conduct, carry_out, used
from perl.training.studies.cells import Candidate, cells_of
from perl.training.studies.written_plan import load_study

STUDY = {
    "recipe": "quickstart",
    "overrides": {"train.max_steps": 12},
    "grid": {"train.learning_rate": [1e-3, 1e-2]},
    "seeds": {"choose": [0], "score": [3, 4]},
}


def statuses(folder):
    return [cell["status"] for cell in json.loads((folder / "out" / "results.json").read_text())["cells"]]


class Losing:
    """In the place of what starts cells: loses or kills a cell some times, and trains none."""

    base = None

    def __init__(self, losses, folder, *, killed=False):
        self.losses, self.folder, self.killed, self.sent = losses, folder, killed, []

    def begin(self, job):
        self.sent.append(job.name)

    def next(self):
        name = self.sent[-1]
        lost = self.sent.count(name) <= self.losses.get(name, 0)
        if lost:
            log = self.folder / "logs" / f"{name}.log"
            log.parent.mkdir(exist_ok=True)
            with log.open("a") as printed:
                printed.write("error: its node is gone\n")
        code = (-signal.SIGKILL if self.killed else 1) if lost else 0
        return {"name": name, "code": code, "cpu": 2.0, "peak": 0, "lost": lost and not self.killed}

    def stop(self):
        pass

    end = stop


def test_a_lost_cell_is_sent_once_more_and_is_then_called_lost(tmp_path):
    three = cells_of([Candidate({"peft.method": name}) for name in ("lora", "ia3", "hra")], [0], "score")
    names = [cell.name for cell in three]
    losing = Losing({names[0]: 1, names[1]: 2}, tmp_path)
    ended = carry_out(Conduct(tmp_path, "quickstart"), lambda: losing, three)
    assert [losing.sent.count(name) for name in names] == pytest.approx([2, 2, 1])
    assert [ended[name].status for name in names] == ["done", "lost", "done"]
    assert ended[names[1]].reason == "its node is gone"
    assert used(Conduct(tmp_path, "quickstart")) == pytest.approx(5 * 2.0)


def test_a_cell_that_is_killed_twice_has_failed_and_how_cells_ended_is_told_as_they_do(tmp_path):
    cells = cells_of([Candidate({"peft.method": name}) for name in ("lora", "ia3")], [0], "score")
    killing = Losing({cells[0].name: 2, cells[1].name: 1}, tmp_path, killed=True)
    told = []
    ended = carry_out(
        Conduct(tmp_path, "quickstart"), lambda: killing, cells, noted=lambda seen: told.append(dict(seen))
    )
    assert [len(seen) for seen in told] == pytest.approx([0, 1, 2])
    assert told[-1] == ended
    assert [killing.sent.count(cell.name) for cell in cells] == pytest.approx([2, 2])
    assert ended[cells[1].name].status == "done"
    assert ended[cells[0].name].status == "failed"
    assert ended[cells[0].name].reason == "its process was ended by SIGKILL twice, perhaps for want of memory"


def test_a_choice_that_was_edited_is_refused_and_one_without_a_failed_cell_says_so(tmp_path, monkeypatch):
    first, second = cells_of(load_study(STUDY).candidates, [0], "choose")
    killing = Losing({second.name: 2}, tmp_path, killed=True)

    @contextlib.contextmanager
    def crew(*_):
        yield lambda: killing

    scores = {first.name: 0.5, second.name: 0.75}
    monkeypatch.setattr(run_study, "crew", crew)
    monkeypatch.setattr(run_study, "score_of", lambda folder, _: scores.get(folder.name, 0.25))
    out = tmp_path / "out"
    result = perl.study(STUDY, out)
    assert result.chosen["the recipe"].candidate.settings == {"train.learning_rate": pytest.approx(1e-3)}
    assert "1 cell that choose failed: the choice was made without them" in (out / "report.md").read_text()
    assert [row.score for row in result.rows if row.stage == "score"] == pytest.approx([0.25, 0.25])
    scores[first.name] = 0.125
    with pytest.raises(PerlError, match=r"scored 0\.5 when it ended and 0\.125 now: its files were changed"):
        perl.study(STUDY, out)
    scores[first.name] = 0.5
    chosen = (out / "chosen.json").read_text()
    for edited in (chosen.replace("0.001", "0.01"), chosen.replace("failed", "done"), "{}", "[]", "no JSON"):
        (out / "chosen.json").write_text(edited)
        with pytest.raises(PerlError, match="is not the choice that this study made: its hash differs"):
            perl.study(STUDY, out)
    (out / "chosen.json").write_text(chosen)
    assert perl.study(STUDY, out).chosen["the recipe"].scores == result.chosen["the recipe"].scores


@pytest.mark.parametrize("halving", [None, {"at": [0.5]}])
def test_nothing_is_chosen_while_a_cell_that_chooses_is_lost(tmp_path, monkeypatch, halving):
    study = {**STUDY, "halving": halving}
    name = cells_of(load_study(study).candidates, [0], "choose")[1].name
    losing = Losing({name: 2}, tmp_path / "out")

    @contextlib.contextmanager
    def crew(*_):
        yield lambda: losing

    monkeypatch.setattr(run_study, "crew", crew)
    with pytest.raises(PerlError, match="1 cells that choose were lost twice, so nothing is chosen and scored"):
        perl.study(study, tmp_path / "out")
    assert not (tmp_path / "out" / "chosen.json").exists()
    assert sorted(statuses(tmp_path)) == ["done", "lost"]
    assert losing.sent.count(name) == pytest.approx(2)
