"""How prompts are chosen is checked and said before a model loads; a forecast counts what a refill may sample."""

import json

import pytest

from perl.errors import PerlError
from perl.training.forecast_text import plan_lines
from perl.training.prepare import prepare, read_recipe


@pytest.fixture
def levels(tmp_path, monkeypatch):
    """A file of problems with a level each; of one row it is text."""
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b), "level": a} for a in range(10, 16) for b in range(20, 24)]
    for name, found in (
        ("levels", rows),
        ("text", [{**rows[0], "level": "easy"}, *({**r, "level": "1"} for r in rows)]),
    ):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found), encoding="utf-8")
    return ["data.train=levels.jsonl", "eval.enabled=false", "train.report_to=[]"]


REFUSED = (
    (["prompts.curriculum=levle"], "prompts.curriculum: the data has no column 'levle' (did you mean level?)"),
    (["data.train=text.jsonl", "prompts.curriculum=level"], "in row 1, which is not a finite number"),
    (["prompts.memory=true", "train.prompts_per_step=24"], "chooses among 24 prompts"),
    (["prompts.refill=1", "algorithm=reinforce_pp"], "prompts.refill: replaces groups whose rewards agree"),
)


@pytest.mark.parametrize(("changes", "words"), REFUSED)
def test_an_impossible_choice_is_refused_before_a_model_loads(changes, words, levels, monkeypatch, tmp_path):
    monkeypatch.setattr("perl.training.policy_stage.load_base", lambda *_, **__: pytest.fail("a model was loaded"))
    with pytest.raises(PerlError) as refused:
        prepare(read_recipe("quickstart", [*levels, *changes], tmp_path / "run"))
    assert words in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1


def test_a_plan_says_how_prompts_are_chosen_and_what_is_sampled_at_most(levels, tmp_path):
    def lines(*changes):
        found = list(plan_lines(prepare(read_recipe("quickstart", [*levels, *changes], tmp_path / "run"))))
        return {line[:8].strip(): line[9:] for line in found if line[:8].strip()}, found

    shown, _ = lines()
    assert "prompts" not in shown
    assert shown["steps"] == "50 (3,200 completions in all)"
    shown, every = lines("prompts.memory=true", "prompts.refill=0.3", "prompts.curriculum=-level")
    assert shown["prompts"].count(";") == 2
    assert shown["steps"] == "50 (at least 3,200 completions in all)"
    # 0.3 x 8 prompts are 3, rounded up, of 8 completions each
    (most,) = [line for line in every if "in the place of" in line]
    assert most.strip() == "up to 88 completions in the place of 64 of a batch of rollouts"
