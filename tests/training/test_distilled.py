"""Runs with a teacher and without a reward, from a recipe to a card; the student becomes better at a task."""

import json

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

import perl
from perl.cli.commands import run
from perl.errors import BrokenPromiseError, PerlError
from perl.hub.card.published import public_recipe
from perl.recipe import load_recipe
from perl.run.files import sha256_of
from perl.sandbox import BASE_FOLDER, BASE_NAME
from perl.training.prepare import prepare, read_recipe
from tests.saved_adapters import save_adapter

SHORT = {
    **{"extends": "quickstart", "rewards": {"accuracy": None}, "algorithm": "opd"},
    **{"rollout": {"max_completion_length": 8}, "eval": {"enabled": False}},
    "engine": {"device": "cpu", "threads": 1},
    "train": {"max_steps": 2, "prompts_per_step": 2, "num_generations": 2, "per_device_train_batch_size": 4},
}

GOES_ON = ("peft.adapter=./short", "peft.method=lora", "peft.rank=null", "peft.alpha=null")


def metrics_of(run):
    return [json.loads(line) for line in run.metrics.read_text().splitlines()]


def test_perl_train_with_a_teacher_and_no_reward(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def command(*arguments):
        assert run(list(arguments), "perl") == 0
        return capsys.readouterr()

    save_adapter(tmp_path / "teacher", seed=3)
    given = ["algorithm=opd", "rewards.accuracy=null", f"teacher.adapter={tmp_path / 'teacher'}", "teacher.hint=Hm."]
    small = [f"train.{key}={value}" for key, value in SHORT["train"].items()]
    given += [*small, "train.save_steps=1", "rollout.max_completion_length=8", "eval.limit=4", "eval.k=1"]
    planned = command("train", "quickstart", *given, "--dry-run")
    lines = [line.removeprefix("# ") for line in planned.out.splitlines()]
    assert "teacher  the base with another adapter, a hint; KL over the vocabulary" in planned.out
    assert "rewards  none: the teacher alone" in lines
    done = command("train", "quickstart", *given, "--output", "run")
    facts = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (facts["status"], facts["algorithm"], facts["rewards"]) == ("done", "opd", {})
    assert facts["settings"]["teacher"] == "the base with another adapter, a hint; KL over the vocabulary x 1"
    digest = sha256_of(tmp_path / "teacher" / "adapter_model.safetensors")
    assert facts["settings"]["teacher adapter SHA-256"] == digest
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["teacher/kl"] > 0 and row["rows/trained_fraction"] == 1 for row in rows)
    card = (tmp_path / "run" / "adapter" / "README.md").read_text()
    assert "| teacher | the base with another adapter, a hint; KL over the vocabulary x 1 |" in card
    assert f"| teacher adapter SHA-256 | {digest} |" in card
    assert "mean reward" not in card
    assert 'Only the teacher saw:\n\n```json\n{"hint": "Hm."}\n```' in card
    assert "arXiv:2306.13649" in card[card.index("## Citation") :]
    ends = f"KL to the teacher {rows[0]['teacher/kl']:.3f} -> {rows[1]['teacher/kl']:.3f}"
    assert f", {ends} (first and last step)\n" in done.out
    assert "reward 0.000" not in done.out + done.err
    saved = load_recipe(tmp_path / "run" / "recipe.yaml")
    assert (saved.algorithm, saved.rewards, saved.teacher.hint) == ("opd", {}, "Hm.")
    assert str(tmp_path) not in public_recipe(saved)
    command("train", "quickstart", *given, "--output", "run")


@pytest.mark.nightly
def test_a_run_without_a_gradient_in_any_step_fails(tmp_path):
    greedy = {**SHORT, "algorithm": None, "rewards": {"accuracy": 1.0}}  # so that the completions of a prompt agree
    for _ in range(2):  # the same command again, which goes on from the last step, fails too
        with pytest.raises(BrokenPromiseError, match=r"nothing was trained: there was no gradient in any of 2 steps"):
            perl.train(greedy, ["rollout.top_k=1", "train.save_steps=1"], tmp_path / "run")
    facts = json.loads((tmp_path / "run" / "run.json").read_text())
    assert facts["status"] == "failed"
    assert not (tmp_path / "run" / "adapter").exists()


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings")
@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        ([], "teacher: opd has nobody to learn from"),
        (["teacher.hint='{answer}'", "data.train.name=./q.jsonl"], "teacher.hint: contains {answer}"),
        (["teacher.system_prompt=x", "data.chat=false"], "teacher.system_prompt: a system prompt needs chat messages"),
        (["teacher.hint=" + "x" * 1100], "teacher.hint: the teacher's longest prompt has"),
        (["teacher.hint=x", "peft.method=full", *GOES_ON[2:]], "teacher: the base itself is trained"),
        (["teacher.hint=x", "engine.strategy=fsdp2", "engine.processes=2"], "teacher: a base in shards"),
        (["teacher.hint='{prompt}'"], "teacher: is the policy itself, asked what the policy is asked"),
        (["teacher.adapter=./short", *GOES_ON], "teacher: is the policy itself"),
        (["teacher.adapter=./other"], "teacher.adapter: other was made for somebody/model"),
        (["teacher.adapter=./wide"], "teacher.adapter: wide does not fit this base"),
        (["teacher.adapter=./head"], "teacher.adapter: the teacher's adapter is on the head"),
        (["teacher.hint=x", "peft.target_modules=.*(q_proj|lm_head)"], "peft: the adapter is on the head"),
    ],
)
def test_what_cannot_be_taught_is_refused_before_a_model_is_loaded(overrides, line, monkeypatch, tmp_path):
    save_adapter(tmp_path / "other", base="somebody/model")
    save_adapter(tmp_path / "wide")
    save_adapter(tmp_path / "short")
    config = json.loads((tmp_path / "wide" / "adapter_config.json").read_text())
    (tmp_path / "wide" / "adapter_config.json").write_text(json.dumps({**config, "r": 8}))
    (tmp_path / "q.jsonl").write_text("".join(json.dumps({"prompt": f"{n}+1="}) + "\n" for n in range(8)))
    if "teacher.adapter=./head" in overrides:
        model = AutoModelForCausalLM.from_pretrained(BASE_FOLDER, dtype=torch.float32)
        on_head = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj", "lm_head"])
        get_peft_model(model, on_head).save_pretrained(tmp_path / "head", save_embedding_layers=False)
    if "data.train.name=./q.jsonl" in overrides:
        overrides = [*overrides, "data.train.columns.answer=null"]
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)
    with pytest.raises(PerlError) as caught:
        prepare(read_recipe(SHORT, overrides))
    assert "\n" not in str(caught.value)
    assert line in str(caught.value)


@pytest.mark.nightly
def test_accuracy_may_be_watched_without_being_rewarded(tmp_path):
    run = perl.train(SHORT, ["rewards.accuracy=0.0", "teacher.hint=The answer is {answer}."], tmp_path / "run")
    rows = metrics_of(run)
    assert all("rewards/accuracy/mean" in row and row["reward"] == 0 for row in rows)
    assert all(row["loss"] == pytest.approx(row["teacher/kl"], rel=1e-5) for row in rows)


LEARNING = {
    **SHORT,
    "rollout": {"max_completion_length": 64},
    "eval": {"limit": 128, "k": 1},
    "train": {
        **{"max_steps": 10, "prompts_per_step": 8, "num_generations": 4, "per_device_train_batch_size": 32},
        "learning_rate": 5e-3,
    },
}


@pytest.mark.nightly
def test_a_fresh_adapter_learns_from_one_that_was_trained_with_rewards(tmp_path):
    rewarded = ["eval.enabled=false", "train.num_generations=4", "train.max_steps=40"]
    perl.train("quickstart", [*rewarded, "train.per_device_train_batch_size=32"], tmp_path / "teacher")
    taught = {**LEARNING, "teacher": {"adapter": str(tmp_path / "teacher")}, "model": {"name": BASE_NAME}}
    run = perl.train(taught, ["train.seed=1"], tmp_path / "run")
    scores, rows = run.facts["eval"]["sandbox:addition"], metrics_of(run)
    assert scores["base"] < 0.75
    assert scores["adapter"] > max(0.85, scores["base"] + 0.1)
    assert rows[-1]["teacher/kl"] < 0.5 * rows[0]["teacher/kl"]
    assert rows[-1]["teacher/agreement"] > rows[0]["teacher/agreement"]
