"""How cells end and what follows: begun once more, a choice without them, a study that was stopped."""

import json
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
from filelock import FileLock

import perl
from perl.cli.runs import study as command
from perl.errors import InterruptedRunError, PerlError, RecipeError
from perl.training.studies import processes
from perl.training.studies.cells import cells_of
from perl.training.studies.plan import load_study
from perl.training.studies.processes import CellProcesses

STUDY = {
    "recipe": "quickstart",
    "overrides": {"train.max_steps": 12},
    "grid": {"train.learning_rate": [1e-3, 1e-2]},
    "seeds": {"choose": [0], "score": [3, 4]},
}
FIRST, SECOND = cells_of(load_study(STUDY).candidates, [0], "choose")
KILLED, STOPPED, FAILED = -signal.SIGKILL, 130, 1


class Pretending:
    """In the place of what starts processes: each logs two steps whenever it is looked at, twelve in all.

    Args:
        ends: Name -> how its processes end, one after the other; then with success.
        scores: Name -> score.
        rewards: Name -> reward of every step.
        looked: Is called with the name whenever somebody looks at a process.
    """

    def __init__(self, ends=(), scores=(), rewards=(), looked=lambda _: None):
        self.ends = {name: list(each) for name, each in dict(ends).items()}
        self.scores, self.rewards, self.looked = dict(scores), dict(rewards), looked
        self.sent, self.running, self.at_once, self.threads = [], [], 0, set()

    def __call__(self, words, *, env, stdout, **_):
        folder = Path(words[words.index("-o") + 1])
        left = self.ends.get(folder.name)
        process = Process(self, folder, left.pop(0) if left else 0)
        if process.end:
            stdout.write(b"Traceback\nerror: it is no good\n")
        self.sent.append(folder.name)
        self.running.append(process)
        self.at_once = max(self.at_once, len(self.running))
        self.threads.add(env["OMP_NUM_THREADS"])
        return process


class Process:
    def __init__(self, of, folder, end):
        self.of, self.folder, self.end, self.returncode, self.asked = of, folder, end, None, False
        folder.mkdir(parents=True, exist_ok=True)
        self.log = folder / "metrics.jsonl"
        self.step = len(self.log.read_text().splitlines()) if self.log.exists() else 0
        self.write("running")

    def poll(self):
        if self.returncode is None:
            self.of.looked(self.folder.name)
            if self.asked or (self.end and self.step) or self.step == 12:
                self.returncode = STOPPED if self.asked else self.end
                self.of.running.remove(self)
                self.write("interrupted" if self.returncode else "done")
            else:
                self.step += 2
                self.write("running")
        return self.returncode

    def send_signal(self, number):
        assert number == signal.SIGTERM
        self.asked = True

    def write(self, status):
        name = self.folder.name
        rows = [{"step": step, "reward": self.of.rewards.get(name, 0.5)} for step in range(1, self.step + 1)]
        self.log.write_text("".join(json.dumps(row) + "\n" for row in rows))
        score = {"a": {"adapter": self.of.scores.get(name, 0.25), "n": 8, "k": 4}}
        facts = {"status": status, "eval": score if status == "done" else {}, "trainable_parameters": 7}
        (self.folder / "run.json").write_text(json.dumps(facts))


@pytest.fixture
def studied(tmp_path, monkeypatch):
    """Carries STUDY out with stand-ins of processes."""
    monkeypatch.setattr(processes, "_LOOK_SECONDS", 0.0)

    def study(pretending, **changed):
        monkeypatch.setattr(processes, "subprocess", SimpleNamespace(Popen=pretending, DEVNULL=None))
        return perl.study({**STUDY, **changed}, tmp_path / "out")

    return study


def rows_of(tmp_path):
    return json.loads((tmp_path / "out" / "results.json").read_text())["cells"]


def test_a_cell_that_was_ended_from_outside_is_begun_once_more(studied):
    grid, seeds = {"peft.method": ["lora", "ia3", "hra", "vera", "oft"]}, {"score": [0]}
    each = [cell.name for cell in cells_of(load_study({**STUDY, "grid": grid, "seeds": seeds}).candidates, [0], "")]
    ends = {each[0]: [KILLED], each[1]: [STOPPED], each[2]: [KILLED, KILLED], each[3]: [FAILED, FAILED]}
    pretending = Pretending(ends)
    result = studied(pretending, grid=grid, seeds=seeds, at_once=2, threads=3)
    assert [pretending.sent.count(name) for name in each] == [2, 2, 2, 1, 1]
    assert (pretending.at_once, pretending.threads) == (2, {"3"})
    assert [row.status for row in result.rows] == ["done", "done", "failed", "failed", "done"]
    assert "ended by SIGKILL" in result.rows[2].reason
    assert result.rows[3].reason == "it is no good"
    assert [row.score for row in result.rows] == [0.25, 0.25, None, None, 0.25]
    again = Pretending({each[3]: [FAILED]})
    assert [row.name for row in studied(again, grid=grid, seeds=seeds, threads=3).unfinished] == [each[3]]
    assert again.sent == each[2:4]


def test_the_choice_is_kept_with_its_scores_and_is_not_made_anew(studied, tmp_path):
    out, scores = tmp_path / "out", {FIRST.name: 0.5, SECOND.name: 0.75}
    result = studied(Pretending({SECOND.name: [FAILED]}, scores))
    assert result.chosen["the recipe"].candidate.settings == {"train.learning_rate": pytest.approx(1e-3)}
    assert "1 cell failed while choosing: the choice was made without them" in (out / "report.md").read_text()
    assert [row.score for row in result.rows] == [pytest.approx(0.5), None, *[pytest.approx(0.25)] * 2]
    assert json.loads((out / "chosen.json").read_text())["chosen"] == {"the recipe": {"train.learning_rate": 1e-3}}
    again = Pretending(scores=scores)
    assert studied(again).chosen["the recipe"].scores[FIRST.candidate.key] == pytest.approx(0.5)
    assert again.sent == []
    assert [row["status"] for row in rows_of(tmp_path)] == ["done", "failed", "done", "done"]
    (out / "chosen.json").write_text("{}")
    with pytest.raises(PerlError, match=r"chosen.json: is not what a study writes"):
        studied(again)


def test_with_no_candidate_left_nothing_is_chosen_and_the_same_command_tries_again(studied, tmp_path):
    with pytest.raises(PerlError, match=r"no candidate of any arm was trained .*0\.001_seed-0: it is no good"):
        studied(Pretending({FIRST.name: [FAILED], SECOND.name: [KILLED, KILLED]}))
    assert not (tmp_path / "out" / "chosen.json").exists()
    assert [row["status"] for row in rows_of(tmp_path)] == ["failed", "failed"]
    assert len(studied(Pretending()).rows) == 4


def test_halving_ends_the_worse_half_and_looks_only_at_cells_that_reached_the_rung(studied, tmp_path):
    grid = {"train.learning_rate": [1e-4, 1e-3, 1e-2, 1e-1]}
    names = [cell.name for cell in cells_of(load_study({**STUDY, "grid": grid}).candidates, [0], "choose")]
    rewards = dict(zip(names, (0.1, 0.3, 0.9, 0.2), strict=True))
    pretending = Pretending({names[2]: [FAILED]}, rewards=rewards)
    result = studied(pretending, grid=grid, halving={"at": [0.5], "keep": 0.25})
    statuses = {row.name: row.status for row in result.rows if row.stage == "choose"}
    assert statuses == dict(zip(names, ("ended early", "done", "failed", "ended early"), strict=True))
    assert pretending.sent[:5] == [*names, names[1]]
    steps = [len((tmp_path / "out/cells/choose" / name / "metrics.jsonl").read_text().splitlines()) for name in names]
    assert steps == [6, 12, 2, 6]


@pytest.mark.parametrize("halving", [None, {"at": [0.5]}])
def test_a_study_that_is_stopped_chooses_nothing_and_goes_on(studied, tmp_path, halving):
    def stop(name):
        if name == SECOND.name:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(InterruptedRunError, match=r"stopped; .* of 2 cells are done"):
        studied(Pretending(looked=stop), halving=halving)
    assert not (tmp_path / "out" / "chosen.json").exists()
    assert [row["status"] for row in rows_of(tmp_path)] == ["paused" if halving else "done", "interrupted"]
    assert "Cells that failed or have not ended: " in (tmp_path / "out" / "report.md").read_text()
    again = Pretending()
    result = studied(again, halving=halving)
    assert [row.score for row in result.rows if row.stage == "score"] == pytest.approx([0.25, 0.25])
    assert again.sent[0] == SECOND.name


def test_a_cell_that_a_killed_study_has_left_at_work_is_waited_for(tmp_path, monkeypatch):
    study = load_study({**STUDY, "at_once": 2})
    ours = CellProcesses(study, tmp_path)
    lock = FileLock(ours.run_of(FIRST) / ".lock")
    lock.acquire()
    seen = []

    def looked(name):
        seen.append(name)
        if len(seen) == 4:
            Process(pretending, ours.run_of(FIRST), 0).write("done")
            lock.release()

    pretending = Pretending(looked=looked)
    monkeypatch.setattr(processes, "_LOOK_SECONDS", 0.0)
    monkeypatch.setattr(processes, "subprocess", SimpleNamespace(Popen=pretending, DEVNULL=None))
    ours.train([FIRST, SECOND])
    assert pretending.sent == [SECOND.name]
    assert [ours.end_of(cell).status for cell in (FIRST, SECOND)] == ["done", "done"]


def test_a_command_whose_study_has_failed_cells_ends_with_code_1(studied, tmp_path, capsys):
    file = tmp_path / "mine.yaml"
    file.write_text(json.dumps({**STUDY, "seeds": {"choose": [0], "score": [3]}}))
    scored = FIRST.name.replace("seed-0", "seed-3")
    studied(Pretending())  # sets the stand-in
    for ends, code in (({scored: [FAILED]}, 1), ({}, 0)):
        processes.subprocess.Popen.ends = {name: list(each) for name, each in ends.items()}
        assert command([str(file), "--output", str(tmp_path / "told")], standalone_mode=False) == code
    printed = capsys.readouterr().out
    assert printed.count("failed: ") == 1
    assert printed.count("report   ") == 2


def test_cells_that_put_weights_into_shared_servers_train_one_at_a_time():
    served = {"rollout.backend": "vllm-server", "rollout.servers": ["http://127.0.0.1:1"]}
    study = {**STUDY, "overrides": served, "grid": {"peft.method": ["lora", "ia3"]}, "seeds": {"score": [1]}}
    with pytest.raises(RecipeError, match="at_once: ia3 puts its weights into the servers"):
        perl.study({**study, "at_once": 2}, "out")
    assert not Path("out").exists()
