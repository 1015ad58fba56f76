"""Studies as they are written: which cells they have, and what is refused in one line before anything runs."""

import pytest

from perl.errors import RecipeError, RunFolderError
from perl.training.studies.cells import cells_of
from perl.training.studies.plan import load_study, opened
from perl.training.studies.results import Chosen, finalists

FILE = """\
recipe: quickstart
overrides: {train.max_steps: 2}
grid:
  peft.method: [lora, ia3]
  peft.rank: [4, 8]
  train.learning_rate: [1e-3, 1e-2]
seeds: {choose: [0, 1], score: [5, 6, 7]}
baseline: {peft.method: ia3}
"""


def written(tmp_path, text=FILE):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    return path


def test_a_setting_that_a_method_does_not_have_makes_no_cells(tmp_path):
    study = load_study(written(tmp_path))
    assert [one.title for one in study.candidates] == ["lora, rank 4"] * 2 + ["lora, rank 8"] * 2 + ["ia3"] * 2
    assert [recipe.peft.rank for recipe in study.recipes[:4]] == [4, 4, 8, 8]
    rates = [recipe.train["learning_rate"] for recipe in study.recipes]
    assert rates == pytest.approx([1e-3, 1e-2] * 3)
    cells = cells_of(study.candidates, study.file.seeds.score, "score")
    assert len({cell.name for cell in cells}) == len(cells) == 18
    assert cells[0].name == "lora_rank-4_learning_rate-0.001_seed-5"
    assert cells[0].overrides == ("peft.method=lora", "peft.rank=4", "train.learning_rate=0.001", "train.seed=5")
    assert study.command(cells[0]).startswith("OMP_NUM_THREADS=1 perl train quickstart train.max_steps=2 peft.method=")


def test_a_list_of_grids_has_the_cells_of_all(tmp_path):
    grids = "  - {peft.method: [lora], peft.rank: [1, 1]}\n  - {peft.method: [ia3], train.learning_rate: [1e-2, 1]}\n"
    text = FILE[: FILE.index("  peft.method")] + grids + FILE[FILE.index("seeds") :]
    found = load_study(written(tmp_path, text)).candidates
    assert [one.settings for one in found] == [
        {"peft.method": "lora", "peft.rank": 1},
        {"peft.method": "ia3", "train.learning_rate": pytest.approx(1e-2)},
        {"peft.method": "ia3", "train.learning_rate": 1},
    ]


@pytest.mark.parametrize(
    ("before", "after", "line"),
    [
        ("peft.rank: [4", "peft.rnak: [4", "mine.yaml:5: grid.peft.rnak: unknown key (did you mean rank?)"),
        ("max_steps: 2", "max_stpes: 2", "mine.yaml:2: overrides.train.max_stpes: unknown key"),
        ("[4, 8]", "[]", "mine.yaml:3: grid: peft.rank needs a list of values"),
        ("[5, 6, 7]", "[5, 1]", "mine.yaml:7: seeds.score: [1] choose too"),
        ("[5, 6, 7]", "[5, 5]", "mine.yaml:7: seeds.score: a seed stands twice"),
        ("[5, 6, 7]", "[5, 4294967296]", "mine.yaml:7: seeds.score"),
        ("peft.rank: [4", "rank: [4", "mine.yaml:3: grid: rank is no key of a recipe"),
        ("peft.rank: [4", "eval.k: [4", "mine.yaml:3: grid: eval.k: what cells are scored by is the same for all"),
        ("recipe: quickstart\n", "", "mine.yaml: recipe: is required"),
        ("baseline: {peft.method", "baseline: {peft.methd", "mine.yaml:8: baseline: peft.methd does not vary: it is"),
        ("choose: [0, 1], ", "", "mine.yaml:7: seeds: choose: train.learning_rate is chosen"),
        ("baseline", "tune: []\nbaseline", "mine.yaml:7: seeds: nothing is chosen"),
        ("{peft.method: ia3}", "{peft.method: dora}", "mine.yaml:8: baseline: is none of the compared"),
        ("{peft.method: ia3}", "{peft.method: lora}", "mine.yaml:8: baseline: is 2 of the compared"),
        ("recipe: quickstart", "recipe: quikstart", "mine.yaml:1: recipe: no recipe named 'quikstart' (did you mean"),
        ("baseline", "basline", "mine.yaml:8: basline: unknown key (did you mean baseline?)"),
        ("train.max_steps: 2", "train: {max_steps: 2}", "mine.yaml:2: overrides: train is no key of a recipe: section"),
        ("train.max_steps: 2", "train.seed: 2", "mine.yaml:2: overrides"),
        ("train.max_steps: 2", "peft.rank: 2", "mine.yaml:2: overrides: peft.rank varies too"),
        ("seeds", "halving: {at: [0.5, 1.2]}\nseeds", "mine.yaml:7: halving.at"),
        ("max_steps: 2", "max_steps: 2, eval.enabled: false", "mine.yaml:1: recipe: cells are compared by"),
    ],
)
def test_mistakes_are_one_line_with_file_and_key(tmp_path, monkeypatch, before, after, line):
    monkeypatch.chdir(tmp_path)
    assert before in FILE
    written(tmp_path, FILE.replace(before, after, 1))
    with pytest.raises(RecipeError) as raised:
        load_study("mine.yaml")
    assert any(str(mistake).startswith(line) for mistake in raised.value.mistakes), str(raised.value)


def test_halving_needs_a_number_of_steps(tmp_path):
    (tmp_path / "epochs.yaml").write_text("train: {num_train_epochs: 1}\n")
    text = FILE.replace("quickstart", "epochs.yaml").replace("train.max_steps: 2", "train.beta: 0") + "halving: {}\n"
    with pytest.raises(RecipeError, match=r"mine.yaml:9: halving: needs a number of steps"):
        load_study(written(tmp_path, text))


def test_a_study_without_anything_to_score_is_refused(tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' * 4)
    own = f"{{train.max_steps: 2, data.train: {tmp_path / 'p.jsonl'}, data.eval: null}}"
    with pytest.raises(RecipeError, match="nothing scores a cell: no problems are held out, and no tasks are named"):
        load_study(written(tmp_path, FILE.replace("{train.max_steps: 2}", own)))


def test_another_plan_over_cells_is_refused(tmp_path):
    folder, study = tmp_path / "out", load_study(written(tmp_path))
    other = load_study(written(tmp_path, FILE.replace("[0, 1]", "[0, 2]")))
    with opened(other, folder), pytest.raises(RunFolderError, match="another process works"), opened(study, folder):
        pass
    with opened(study, folder):  # nothing had been trained
        (folder / "cells").mkdir()
    with opened(load_study(written(tmp_path, FILE + "at_once: 4\n")), folder):
        pass  # how many train at once is no part of the plan
    with pytest.raises(RunFolderError, match="planned otherwise: seeds changed"), opened(other, folder):
        pass
    (folder / "plan.json").write_text("[]")
    with pytest.raises(RunFolderError, match="holds no plan of a study"), opened(study, folder):
        pass
    (folder / "plan.json").unlink()
    with pytest.raises(RunFolderError, match="is not empty and holds no study: cells"), opened(study, folder):
        pass


def test_what_is_scored_is_each_choice_and_each_arm_with_the_baselines_settings_as_far_as_it_has_them(tmp_path):
    text = FILE.replace("baseline", "tune: [peft.rank, train.learning_rate]\nbaseline").replace("ia3}", "lora}")
    study = load_study(written(tmp_path, text))
    lora, ia3 = study.arms
    chosen = {"lora": Chosen(lora[2], {}), "ia3": Chosen(ia3[1], {})}
    assert [one.settings for one in finalists(study, chosen)] == [
        {"peft.method": "lora", "peft.rank": 8, "train.learning_rate": pytest.approx(1e-3)},
        {"peft.method": "ia3", "train.learning_rate": pytest.approx(1e-2)},
        {"peft.method": "ia3", "train.learning_rate": pytest.approx(1e-3)},
    ]
    unnamed = load_study(written(tmp_path, text[: text.index("baseline")]))
    assert unnamed.baseline == "lora"
    assert len(finalists(unnamed, chosen)) == 2
