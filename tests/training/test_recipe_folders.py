"""The field's recipes: each says where it is from, is planned, and trains a step of a tiny model."""

import json
import re

import pytest
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForTokenClassification

from perl.errors import PerlError
from perl.recipe.assets import packaged_recipes
from perl.sandbox import BASE_FOLDER, is_sandbox
from perl.training.forecast import answer
from perl.training.prepare import prepare, read_recipe, training_arguments
from perl.training.stages import train
from tests.conftest import CHECKOUT

IN_FOLDERS = {name: path for name, path in packaged_recipes().items() if "/" in name}
FOLDERS = sorted({name.partition("/")[0] for name in IN_FOLDERS})
# Those that verl trains are exported in tests/verl/test_settings.py.
HERE = [name for name in IN_FOLDERS if not name.startswith("to-verl/")]
# Of every folder: what is special in it.
SAMPLE = (
    *("areal/gsm8k", "countdown/perl-dora", "countdown/ppo", "gsm8k/gspo", "gsm8k/tinylora-7b"),
    *("lora-without-regret/smollm3", "open-r1/qwen2.5-1.5b", "perl-paper/lora", "perl-paper/literal/layernorm"),
    *("prml/clip", "prml/process", "still/full", "tina/open-rs3", "trlx/base", "verl/base"),
)
# Updates of each batch of rollouts, where there is more than one.
UPDATES = {
    **{name: 4 for name in ("gsm8k/gspo", "prml/clip", "prml/kl-updates-4", "prml/updates-4")},
    **{name: 2 for name in ("countdown/grpo", "countdown/ppo", "still/base", "still/full", "verl/qwen3-8b")},
    **{name: 16 for name in ("trlx/base", "trlx/sandbox")},
}
# Of these a step is trained in every run of the tests, of the others at night: their code paths are no other ones.
TRAINED = ("countdown/ppo", "gsm8k/gspo", "still/full")
LIVELY = "def score(completions, **_):\n    return [float(sum(map(ord, str(text))) % 7) for text in completions]\n"


LABELS = ("Source", "Hardware", "Published", "Differs")


def head_of(name):
    """What a recipe says about itself: label -> text, and which recipe it extends."""
    lines = IN_FOLDERS[name].read_text(encoding="utf-8").splitlines()
    end = next(i for i, line in enumerate(lines) if not line.startswith("#"))
    said = {}
    for line in lines[2:end]:
        label, colon, text = line.removeprefix("# ").partition(": ")
        if colon and label in LABELS:
            said[label] = text
        else:
            said[list(said)[-1]] += line.removeprefix("#")
    extended = [line.removeprefix("extends: ") for line in lines if line.startswith("extends: ")]
    return said, extended[0] if extended else None


def test_a_recipe_says_where_it_is_from_what_it_runs_on_what_came_of_it_and_what_differs():
    """A line that is as in the recipe that it extends is left out; a base has all, and says that we did not run it."""
    for name, path in IN_FOLDERS.items():
        said, extended = head_of(name)
        assert {"Source", "Published"} <= set(said), name
        assert path.stat().st_size < 4096, name
        assert path.read_text(encoding="utf-8").splitlines()[1] == "#", name
        while extended in IN_FOLDERS:
            above, extended = head_of(extended)
            said = {**above, **said, "Published": f"{above['Published']} {said['Published']}"}
        # Its name, so that a copy anywhere extends the same.
        assert extended is None or extended in packaged_recipes(), name
        assert set(said) == set(LABELS), name
        assert "Not run here." in said["Published"] or "Measured" in said["Published"], name


def test_every_folder_is_sampled_and_its_page_lists_it():
    assert {name.partition("/")[0] for name in SAMPLE} == {*FOLDERS} - {"to-verl"}
    page = (CHECKOUT / "docs" / "recipes.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `([a-z0-9-]+)/` \| (\d+) \|", page, re.MULTILINE))
    assert {name: int(count) for name, count in rows.items()} == {
        folder: sum(name.startswith(f"{folder}/") for name in IN_FOLDERS) for folder in FOLDERS
    }


def test_a_folder_or_a_slip_is_answered_with_what_is_in_it():
    for name, said in {"perl-paper": "is a folder of ", "perl-paper/lorra": "did you mean perl-paper/lora?"}.items():
        with pytest.raises(PerlError, match=re.escape(said)):
            read_recipe(name)


def problems_like(source, part, count):
    """Rows with the columns of a data set: additions of the sandbox, and numbers to make a target of."""
    columns = source.columns.model_dump()
    for i in range(count):
        row = {"nums": [i, i + 1], "target": 2 * i + 1 + (100000 if part == "eval" else 0)}
        if columns["prompt"] is not None:
            row = {columns["prompt"]: f"{i}+{i + (1 if part == 'eval' else 0)}="}
        if columns["answer"] is not None:
            row[columns["answer"]] = f"#### {2 * i}" if source.name == "openai/gsm8k" else str(2 * i)
        yield row


def local_data(recipe, folder, count):
    """Overrides: files with the columns that the recipe's data sets have."""
    for part, source in (("train", recipe.data.train), ("eval", recipe.data.eval)):
        if source is None or is_sandbox(source.name):
            continue
        file = folder / f"{part}.jsonl"
        file.write_text("\n".join(map(json.dumps, problems_like(source, part, count))), encoding="utf-8")
        written = ", ".join(f"{ours}: {theirs or 'null'}" for ours, theirs in source.columns.model_dump().items())
        yield f"data.{part}={{name: {file}, columns: {{{written}}}}}"


def small(**sizes):
    """The config of a tiny Qwen2."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 2}
    return Qwen2Config(vocab_size=128, max_position_embeddings=65536, **heads, **sizes)


def process_model(recipe, folder):
    """Overrides: a tiny model that scores steps, where the recipe has one."""
    if "process_reward" not in recipe.rewards:
        return []
    config = small(hidden_size=16, intermediate_size=16)
    config.num_labels = 2
    Qwen2ForTokenClassification(config).save_pretrained(folder / "process")
    AutoTokenizer.from_pretrained(BASE_FOLDER).save_pretrained(folder / "process")
    arguments = "rewards.process_reward.args"
    return [f"{arguments}.model={folder / 'process'}", f"{arguments}.step_token='='"]


@pytest.mark.parametrize("name", [*SAMPLE, "a100-7b-vllm", "fsdp2-32b"])
def test_it_is_planned_with_a_tiny_model_and_files_of_its_columns(name, tmp_path, monkeypatch):
    assert_planned(name, tmp_path, monkeypatch)


@pytest.mark.nightly
def test_every_other_recipe_is_planned_too(tmp_path, monkeypatch):
    for name in HERE:
        if name not in SAMPLE:
            folder = tmp_path / name.replace("/", "-")
            folder.mkdir()
            assert_planned(name, folder, monkeypatch)


def assert_planned(name, tmp_path, monkeypatch):
    installed = "perl.recipe.rollout_section.Capabilities.installed"
    monkeypatch.setattr(installed, property(lambda _: True))  # vLLM is not here
    recipe, base = read_recipe(name), []
    if not is_sandbox(recipe.model.name):
        small(hidden_size=64, intermediate_size=128).save_pretrained(tmp_path / "base")
        AutoTokenizer.from_pretrained(BASE_FOLDER).save_pretrained(tmp_path / "base")
        base = [f"model.name={tmp_path / 'base'}", "model.dtype=auto", "engine.device=cpu"]
    count = recipe.batch.prompts_per_step * UPDATES.get(name, 1) + 8
    tiny = read_recipe(name, [*base, *local_data(recipe, tmp_path, count), *process_model(recipe, tmp_path)])
    for kept in ("peft", "rollout", "eval"):
        assert getattr(tiny, kept) == getattr(recipe, kept)
    plan = prepare(tiny)
    assert plan.steps == recipe.train["max_steps"]
    assert plan.problems.heldout is not None
    assert plan.trainable_parameters > 0
    found = [training_arguments(tiny, str(tmp_path / "out"))]
    if name in UPDATES:  # what `perl plan` reckons with
        found.append(answer(tiny, gpu="H100").plan.arguments)
    for arguments in found:
        updates = arguments.steps_per_generation * arguments.num_iterations / arguments.gradient_accumulation_steps
        assert updates == UPDATES.get(name, 1)


@pytest.mark.parametrize(
    "name", [name if name in TRAINED else pytest.param(name, marks=pytest.mark.nightly) for name in SAMPLE]
)
def test_it_trains_a_step_of_the_tiny_model_with_its_own_rewards(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "lively.py").write_text(LIVELY, encoding="utf-8")
    recipe = read_recipe(name)
    rows, steps = 2 * recipe.train["num_generations"], 2 if recipe.peft.method == "adalora" else 1
    overrides = [
        *("model.name=sandbox:base", "model.dtype=auto", "data.system_prompt=null", "rewards.lively:score=1.0"),
        *(f"rewards.{reward}.weight={setting.weight}" for reward, setting in recipe.rewards.items()),
        *("rollout.backend=transformers", "rollout.servers=[]", "rollout.prefetch=0"),
        *("rollout.max_completion_length=8", "rollout.temperature=3"),  # so that completions differ
        *("engine.processes=null", "engine.strategy=ddp", "engine.device=cpu", "engine.threads=1"),
        *(f"train.max_steps={steps}", "train.warmup_steps=0", "train.prompts_per_step=2", "train.save_strategy=no"),
        *(f"train.per_device_train_batch_size={rows}", f"train.output_dir={tmp_path / 'out'}", "eval.enabled=false"),
        *local_data(recipe, tmp_path, 64),
        *process_model(recipe, tmp_path),
    ]
    if "soft_overlong" in recipe.rewards:
        overrides.append("rewards.soft_overlong.args={max_completion_len: 8, soft_punish_cache: 4}")
    run = train(read_recipe(name, overrides))
    assert (run.facts["status"], run.facts["steps"]) == ("done", steps)
    logged, *_ = [
        row for row in map(json.loads, (run.path / "metrics.jsonl").read_text().splitlines()) if "reward" in row
    ]
    acting = {reward.split(":")[-1] for reward, setting in recipe.rewards.items() if setting.weight}
    assert all(any(reward in key for key in logged) for reward in acting), sorted(logged)
