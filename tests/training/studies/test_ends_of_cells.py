"""How cells end and what follows: begun once more, a choice without them, files that were changed since."""

import contextlib
import json
import signal
from pathlib import Path

import pytest

import perl
from perl.cli.study import command
from perl.errors import InterruptedRunError, PerlError, RecipeError
from perl.training.studies import account, run_study
from perl.training.studies.carry_out import carry_out
from perl.training.studies.cells import Candidate, cells_of
from perl.training.studies.conduct import Conduct, add_usage, noted_scores, usage_rows, used
from perl.training.studies.written_plan import load_study

STUDY = {
    "recipe": "quickstart",
    "overrides": {"train.max_steps": 12},
    "grid": {"train.learning_rate": [1e-3, 1e-2]},
    "seeds": {"choose": [0], "score": [3, 4]},
}
FIRST, SECOND = cells_of(load_study(STUDY).candidates, [0], "choose")
KILLED, STOPPED, LOST, FAILED = -signal.SIGKILL, 130, "lost", 1


class Pretending:
    """In the place of what starts cells: writes what a run would, and ends as it is told.

    Args:
        ends: Name -> how its processes end, one after the other; then with success.
        scores: Name -> score.
        rewards: Name -> reward of every step.
    """

    base = None

    def __init__(self, ends=(), scores=(), rewards=()):
        self.ends = {name: list(each) for name, each in dict(ends).items()}
        self.scores, self.rewards = dict(scores), dict(rewards)
        self.sent, self.running, self.at_once = [], [], 0

    def begin(self, job):
        self.sent.append(job.name)
        self.running.append(job)
        self.at_once = max(self.at_once, len(self.running))

    def next(self):
        job = self.running.pop(0)
        left = self.ends.get(job.name)
        end = left.pop(0) if left else (STOPPED if job.until else 0)
        folder, log = Path(job.output), Path(job.log)
        for place in (folder, log.parent):
            place.mkdir(parents=True, exist_ok=True)
        with log.open("a") as printed:
            printed.write("error: its node is gone\n" if end == LOST else "error: it is no good\n")
        steps = job.until if job.until and end == STOPPED and not left else 2 if end else 12
        reward = self.rewards.get(job.name, 0.5)
        (folder / "metrics.jsonl").write_text(
            "".join(json.dumps({"step": step, "reward": reward}) + "\n" for step in range(1, steps + 1))
        )
        score = {"adapter": self.scores.get(job.name, 0.25), "n": 8, "k": 4}
        facts = {"status": "interrupted" if end else "done", "eval": {} if end else {"a": score}}
        (folder / "run.json").write_text(json.dumps(facts))
        return {
            "name": job.name,
            "code": 1 if end == LOST else end,
            "cpu": 2.0,
            "peak": 0,
            "lost": end == LOST,
        }

    def stop(self):
        pass

    end = stop


@pytest.fixture
def studied(tmp_path, monkeypatch):
    """Carries STUDY out with a stand-in."""

    def study(pretending, **changed):
        @contextlib.contextmanager
        def crew(*_):
            yield lambda: pretending

        monkeypatch.setattr(run_study, "crew", crew)
        return perl.study({**STUDY, **changed}, tmp_path / "out")

    return study


def rows_of(tmp_path):
    return json.loads((tmp_path / "out" / "results.json").read_text())["cells"]


def edited(path, **facts):
    path.write_text(json.dumps({**json.loads(path.read_text()), **facts}))


def test_a_cell_that_was_ended_from_outside_is_begun_once_more(tmp_path):
    names = ("lora", "ia3", "hra", "vera", "oft")
    five = cells_of([Candidate({"peft.method": name}) for name in names], [0], "score")
    each = [cell.name for cell in five]
    ends = {each[0]: [LOST], each[1]: [LOST, LOST], each[2]: [KILLED, KILLED], each[3]: [STOPPED], each[4]: [FAILED]}
    pretending, told = Pretending(ends), []
    conduct = Conduct(tmp_path, "quickstart", at_once=2)
    ended = carry_out(conduct, lambda: pretending, five, noted=lambda seen: told.append(dict(seen)))
    assert [pretending.sent.count(name) for name in each] == [2, 2, 2, 2, 1]
    assert pretending.at_once == pytest.approx(2)
    assert [ended[name].status for name in each] == ["done", "lost", "failed", "done", "failed"]
    assert [ended[name].reason for name in each] == [
        "",
        "its node is gone",
        "its process was ended by SIGKILL again, perhaps for want of memory",
        "",
        "it is no good",
    ]
    assert used(conduct) == pytest.approx(9 * 2.0)
    assert [len(seen) for seen in told] == pytest.approx([0, 1, 2, 3, 4, 5, 5])
    assert told[-1] == ended
    assert noted_scores(tmp_path) == pytest.approx({each[0]: 0.25, each[3]: 0.25})


def test_a_cell_that_is_stopped_before_its_rung_is_not_paused(tmp_path):
    (cell,) = cells_of([Candidate({"peft.method": "lora"})], [0], "choose")
    pretending = Pretending({cell.name: [STOPPED, -signal.SIGTERM]})
    conduct = Conduct(tmp_path, "quickstart")
    ended = carry_out(conduct, lambda: pretending, [cell], {cell.name: 6})
    assert ended[cell.name].reason == "its process was ended by SIGTERM again, perhaps for want of memory"
    ended = carry_out(conduct, lambda: pretending, [cell], {cell.name: 6})
    assert ended[cell.name].status == "paused"
    assert pretending.sent.count(cell.name) == pytest.approx(3)


def test_the_choice_is_kept_with_its_scores_and_is_not_made_anew(studied, tmp_path):
    out, scores = tmp_path / "out", {FIRST.name: 0.5, SECOND.name: 0.75}
    result = studied(Pretending({SECOND.name: [KILLED, KILLED]}, scores))
    assert result.chosen["the recipe"].candidate.settings == {"train.learning_rate": pytest.approx(1e-3)}
    assert "1 cell failed while choosing: the choice was made without them" in (out / "report.md").read_text()
    assert [row.score for row in result.rows] == [pytest.approx(0.5), None, *[pytest.approx(0.25)] * 2]
    chosen, run = (out / "chosen.json").read_text(), out / "cells" / "choose" / FIRST.name / "run.json"
    for changed in (chosen.replace("0.001", "0.01"), chosen.replace("failed", "done"), "{}", "[]", "no JSON"):
        (out / "chosen.json").write_text(changed)
        with pytest.raises(PerlError, match="is not the choice that this study made: its hash differs"):
            studied(Pretending())
    (out / "chosen.json").unlink()
    with pytest.raises(PerlError, match="is gone, and cells were scored by the choice in it"):
        studied(Pretending())
    (out / "chosen.json").write_text(chosen)
    edited(run, eval={"a": {"adapter": 0.1, "n": 8, "k": 4}})  # it counts no more
    again = Pretending()
    assert studied(again).chosen["the recipe"].scores[FIRST.candidate.key] == pytest.approx(0.5)
    assert again.sent == []
    assert rows_of(tmp_path)[0]["score"] == pytest.approx(0.5)


def test_a_cell_whose_score_changed_is_refused_and_trained_again_when_it_is_deleted(studied, tmp_path, caplog):
    out = tmp_path / "out"
    studied(Pretending())
    scored = rows_of(tmp_path)[-1]["name"]
    folder = out / "cells" / "score" / scored
    for score in (0.99, 2.0, None, "x"):
        edited(folder / "run.json", eval={"a": {"adapter": score, "n": 8, "k": 4}})
        (out / "results.json").unlink(missing_ok=True)  # which is not what it is found by
        what = "scored 0.25 when it ended and 0.99 now" if score == 0.99 else "its scores are not what a run writes"
        with pytest.raises(PerlError, match=f"{what}.*delete this folder, and the same command trains the cell again"):
            studied(Pretending())
    for path in sorted(folder.iterdir()):
        path.unlink()
    folder.rmdir()
    again = Pretending(scores={scored: 0.5})
    result = studied(again)
    assert again.sent == [scored]
    assert result.rows[-1].score == pytest.approx(0.5)
    results = json.loads((out / "results.json").read_text())
    results["cells"][0]["score"] = 1.0
    (out / "results.json").write_text(json.dumps(results))
    assert studied(Pretending()).rows[0].score == pytest.approx(0.25)
    assert "results.json was changed by hand" in caplog.text


@pytest.mark.parametrize("halving", [None, {"at": [0.5]}])
def test_nothing_is_chosen_while_a_cell_that_chooses_is_lost_or_the_budget_is_used_up(studied, tmp_path, halving):
    pretending = Pretending({SECOND.name: [LOST, LOST]})
    with pytest.raises(PerlError, match="1 cell lost twice while choosing, so nothing is chosen and scored"):
        studied(pretending, halving=halving)
    assert not (tmp_path / "out" / "chosen.json").exists()
    assert [row["status"] for row in rows_of(tmp_path)] == ["paused" if halving else "done", "lost"]
    with pytest.raises(PerlError, match="1 cell not begun while choosing, so nothing is chosen and scored"):
        studied(Pretending(), halving=halving, budget=5.0)
    assert not (tmp_path / "out" / "chosen.json").exists()
    assert rows_of(tmp_path)[1]["reason"] == "the budget was used up"
    result = studied(Pretending(), halving=halving, budget=500.0)
    assert [row.score for row in result.rows if row.stage == "score"] == pytest.approx([0.25, 0.25])


@pytest.mark.parametrize(("budget", "scored", "code"), [(500.0, 2, 0), (5.0, 1, 1)])
def test_a_study_whose_budget_left_cells_out_does_not_end_as_done(studied, tmp_path, capsys, budget, scored, code):
    studied(Pretending(), budget=500.0, seeds={"choose": [0], "score": [3]})  # sets the stand-in
    file = tmp_path / "mine.yaml"
    file.write_text(json.dumps({**STUDY, "budget": budget}))
    assert command([str(file), "--output", str(tmp_path / "told")], standalone_mode=False) == code
    rows = json.loads((tmp_path / "told" / "results.json").read_text())["cells"]
    assert sum(row["score"] is not None for row in rows if row["stage"] == "score") == scored
    assert capsys.readouterr().out.count("not begun: ") == 2 - scored


def test_with_no_candidate_left_nothing_is_chosen_and_the_same_command_tries_again(studied, tmp_path):
    ends = {FIRST.name: [FAILED], SECOND.name: [KILLED, KILLED]}
    with pytest.raises(PerlError, match=r"no candidate of any arm was trained .*0\.001_seed-0: it is no good"):
        studied(Pretending(ends))
    assert [row["status"] for row in rows_of(tmp_path)] == ["failed", "failed"]
    assert len(studied(Pretending()).rows) == pytest.approx(4)


def test_halving_looks_only_at_cells_that_reached_the_rung(studied):
    pretending = Pretending({SECOND.name: [FAILED]}, rewards={FIRST.name: 0.1, SECOND.name: 0.9})
    result = studied(pretending, halving={"at": [0.5]})
    assert {row.name: row.status for row in result.rows if row.stage == "choose"} == {
        FIRST.name: "done",
        SECOND.name: "failed",
    }
    assert pretending.sent[:3] == [FIRST.name, SECOND.name, FIRST.name]


def test_the_report_says_what_is_in_hand_while_a_study_goes_on_and_how_it_was_left(studied, tmp_path, monkeypatch):
    out, seen = tmp_path / "out", []

    class Stopped(Pretending):
        def begin(self, job):
            super().begin(job)
            Path(job.output).mkdir(parents=True)
            (Path(job.output) / "run.json").write_text('{"status": "running"}')

        def next(self):
            if self.running[0].name != SECOND.name:
                return super().next()
            seen.extend((row["status"], row["reason"]) for row in rows_of(tmp_path))
            raise InterruptedRunError("stopped", str(out))

    monkeypatch.setattr(account, "_WRITTEN_SECONDS", 0.0)
    with pytest.raises(InterruptedRunError):
        studied(Stopped(scores={FIRST.name: 0.5}), at_once=2)
    assert seen == [("done", ""), ("in hand", "")]
    left = [(row["status"], row["reason"], row["score"]) for row in rows_of(tmp_path)]
    assert left == [
        ("done", "", pytest.approx(0.5)),
        ("interrupted", "the same command goes on with it", None),
    ]
    assert "Cells that failed or have not ended: 1." in (out / "report.md").read_text()


def test_a_row_below_a_line_that_was_cut_short_is_read(tmp_path):
    (tmp_path / "usage.jsonl").write_text('{"name": "a", "cpu": 1.0}\n{"name": "b", "cp')
    add_usage(tmp_path, {"name": "c", "cpu": 2.5})
    add_usage(tmp_path, {"name": "d", "cpu": 0.5})
    assert used(Conduct(tmp_path, "quickstart")) == pytest.approx(4.0)
    assert [row["name"] for row in usage_rows(tmp_path)] == ["a", "c", "d"]


def test_a_study_without_anything_to_score_is_refused_and_other_problems_are_another_plan(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "p.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' * 4)
    own = {"train.max_steps": 2, "data.train": "a/p.jsonl", "data.eval": None}
    with pytest.raises(RecipeError, match="nothing scores a cell: no problems are held out, and no tasks are named"):
        load_study({**STUDY, "overrides": own})
    with_tasks = {**STUDY, "overrides": {**own, "data.eval": "b/p.jsonl", "eval.tasks": ["b/p.jsonl"]}}
    before = load_study(with_tasks).plan()["files"]
    assert len(before) == pytest.approx(2)
    for folder in ("a", "b"):
        (tmp_path / folder / "p.jsonl").write_text('{"prompt": "1+2=", "answer": "3"}\n')
        after = load_study(with_tasks).plan()["files"]
        assert after != before
        before = after
