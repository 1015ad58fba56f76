"""Studies as they are written: which cells they have, and what is refused in one line before anything runs."""

import json

import pytest

from perl.errors import RecipeError, RunFolderError
from perl.training.studies.cells import at_baseline, candidates, cells_of
from perl.training.studies.written_plan import load_study, opened, plan_hash, step_of

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


def test_a_list_of_grids_has_the_cells_of_all(tmp_path):
    text = FILE.replace(
        "  peft.method: [lora, ia3]\n  peft.rank: [4, 8]\n", "  - peft.method: [lora]\n    peft.rank: [1]\n"
    )
    text = text.replace(
        "  train.learning_rate: [1e-3, 1e-2]\n", "  - peft.method: [ia3]\n    train.learning_rate: [1e-2, 1]\n"
    )
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
        ("ia3]\n  peft", "ia4]\n  peft", "mine.yaml:4: grid.peft.method: no method 'ia4' (did you mean ia3?)"),
        ("max_steps: 2", "max_stpes: 2", "mine.yaml:2: overrides.train.max_stpes: unknown key"),
        ("[4, 8]", "[]", "mine.yaml:3: grid: peft.rank has no value"),
        ("[4, 8]", "[4, 4]", "mine.yaml:3: grid: two cells are equal: lora, rank 4, learning rate 0.001"),
        ("[5, 6, 7]", "[5, 1]", "mine.yaml:7: seeds.score: [1] choose too"),
        ("[5, 6, 7]", "[]", "mine.yaml:7: seeds.score: needs 1 value or more, not []"),
        ("[5, 6, 7]", "[5, -6]", "mine.yaml:7: seeds.score: a seed is 0 to 2^32 - 1, not -6"),
        ("[5, 6, 7]", "[4294967296]", "mine.yaml:7: seeds.score: a seed is 0 to 2^32 - 1, not 4294967296"),
        ("peft.rank: [4", "rank: [4", "mine.yaml:3: grid: rank is no key of a recipe: section.key, as in peft.method"),
        ("peft.rank: [4", "pft.rank: [4", "mine.yaml:5: grid.pft.rank: unknown section"),
        ("peft.rank: [4", "eval.k: [4", "mine.yaml:3: grid: eval.k: what cells are scored by is the same for all"),
        ("recipe: quickstart\n", "", "mine.yaml: recipe: is required"),
        ("[lora, ia3]", "lora", "mine.yaml:3: grid: peft.method needs a list of values, as peft.method: [lora]"),
        ("method: [l", "methd: [l", "mine.yaml:4: grid.peft.methd: unknown key (did you mean method?)"),
        ("baseline: {peft.method", "baseline: {peft.methd", "mine.yaml:8: baseline: peft.methd does not vary: it is"),
        ("choose: [0, 1], ", "", "mine.yaml:7: seeds: choose: train.learning_rate is chosen"),
        ("{peft.method: ia3}", "{peft.method: dora}", "mine.yaml:8: baseline: is none of the compared"),
        ("{peft.method: ia3}", "{peft.method: lora}", "mine.yaml:8: baseline: is 2 of the compared"),
        ("recipe: quickstart", "recipe: quikstart", "mine.yaml:1: recipe: no recipe named 'quikstart' (did you mean"),
        ("baseline", "basline", "mine.yaml:8: basline: unknown key (did you mean baseline?)"),
        ("recipe: quickstart", "recipe: quickstart\nscore: best", "mine.yaml:2: score: best: no adapter is kept"),
        ("train.max_steps: 2", "train.seed: 2", "mine.yaml:2: overrides"),
        ("train.max_steps: 2", "train: {seed: 2}", "mine.yaml:2: overrides"),
        (
            "{train.max_steps: 2}",
            "{train.max_steps: 2, engine.processes: 2}\nhalving: {}",
            "mine.yaml:3: halving: pauses",
        ),
        (
            "{train.max_steps: 2}",
            "{train.max_steps: 2}\nhalving: {at: [0.5, 0.6]}",
            "mine.yaml:3: halving: at: of 2 steps [0.5, 0.6] are the steps [1, 1], which must grow and end before 2",
        ),
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


@pytest.mark.parametrize("source", [3, None, b"mine.yaml", ["mine.yaml"]])
def test_what_is_neither_a_file_nor_a_mapping_is_no_study(source):
    with pytest.raises(RecipeError, match=r"perl\.study\(source\): must be a file or a mapping, not "):
        load_study(source)


def test_another_plan_over_results_is_refused_and_kept_beside_if_asked(tmp_path):
    study, folder = load_study(written(tmp_path)), tmp_path / "out"
    with opened(study, folder) as first:
        pass
    quicker = load_study(written(tmp_path, FILE + "at_once: 4\nbudget: 60\n"))
    with opened(quicker, folder) as same:  # how it is carried out is no part of the plan
        assert same == first
    (folder / "cells" / "choose" / "one").mkdir(parents=True)
    (folder / "cells" / "choose" / "one" / "run.json").write_text("{}")
    other = load_study(written(tmp_path, FILE.replace("[0, 1]", "[0, 2]")))
    with pytest.raises(RunFolderError, match="the study was planned otherwise: seeds changed"), opened(other, folder):
        pass
    with opened(other, folder, new_plan=True) as second:
        assert second != first
    earlier = folder / f"earlier-{first[:8]}-1"
    assert (earlier / "plan.json").exists()
    assert (earlier / "cells" / "choose" / "one" / "run.json").exists()  # nothing of it counts as the new plan's
    assert not (folder / "cells").exists()
    changed = (folder / "plan.json").read_text().replace('"choose": [', '"choose": [9,', 1)
    (folder / "plan.json").write_text(changed)
    with pytest.raises(RunFolderError, match="its hash differs"), opened(other, folder):
        pass
    forged = json.loads(changed)
    forged["sha256"] = plan_hash(forged["plan"])  # a whole plan, and not the one of the study's file
    (folder / "plan.json").write_text(json.dumps(forged))
    (folder / "cells" / "choose" / "one").mkdir(parents=True)
    (folder / "cells" / "choose" / "one" / "run.json").write_text("{}")
    with pytest.raises(RunFolderError, match="planned otherwise: seeds changed"), opened(other, folder):
        pass


def test_grids_of_a_mapping_are_read_too():
    found = candidates(
        load_study({"recipe": "quickstart", "grid": {"train.beta": [0, 0.1]}, "seeds": {"score": [1]}}).file
    )
    assert [one.settings["train.beta"] for one in found] == pytest.approx([0, 0.1])


def test_the_baselines_settings_are_left_out_where_a_method_has_none_and_refused_where_they_cannot_be(tmp_path):
    study = load_study(written(tmp_path, FILE.replace("baseline", "tune: [peft.rank, train.learning_rate]\nbaseline")))
    lora, ia3 = (arm[0] for arm in study.arms)
    one = at_baseline(ia3, {"peft.rank": 8, "train.learning_rate": 0.01}, study.file.overrides)
    assert one.settings == {"peft.method": "ia3", "train.learning_rate": pytest.approx(0.01)}
    assert at_baseline(lora, {"peft.rank": 8}, {}).settings == {"peft.method": "lora", "peft.rank": 8}


def test_names_tell_keys_of_one_last_part_apart_and_arms_do_not_depend_on_the_order_of_keys():
    grid = [{"model.name": ["sandbox:base"]}, {"engine.name": ["local"]}]
    study = load_study({"recipe": "quickstart", "grid": grid, "seeds": {"score": [1]}})
    assert len({cell.name for cell in cells_of(study.candidates, [1], "score")}) == len(study.arms) == 2
    blocks = [
        {"peft.method": ["lora"], "peft.rank": [4], "train.learning_rate": [1e-3]},
        {"train.learning_rate": [1e-2], "peft.rank": [4], "peft.method": ["lora"]},
    ]
    study = load_study(
        {
            "recipe": "quickstart",
            "grid": blocks,
            "tune": ["train.learning_rate"],
            "seeds": {"choose": [0], "score": [1]},
        }
    )
    assert [len(arm) for arm in study.arms] == [2]


def test_an_absent_study_is_told_of_the_studies_beside_it(tmp_path):
    written(tmp_path)
    (tmp_path / "recipe.yaml").write_text("train: {max_steps: 2}\n")
    with pytest.raises(RecipeError, match=r"no such file \(beside it there is mine.yaml\)$"):
        load_study(tmp_path / "mien.yaml")


def test_the_shares_of_halving_are_steps_from_the_first_on():
    assert [step_of(share, 10) for share in (0.01, 0.25, 0.5, 0.96)] == pytest.approx([1, 2, 5, 10])


def test_halving_needs_a_number_of_steps(tmp_path):
    (tmp_path / "epochs.yaml").write_text("train: {num_train_epochs: 1}\n")
    with pytest.raises(RecipeError, match=r"mine.yaml:\d+: halving: needs a number of steps"):
        load_study(
            written(
                tmp_path,
                FILE.replace("quickstart", "epochs.yaml").replace("train.max_steps: 2", "train.beta: 0")
                + "halving: {}\n",
            )
        )
