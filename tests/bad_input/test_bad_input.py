"""Every mistake a user can make is one line that says what is wrong and where, exit 2, before weights are loaded.

The base of these recipes is a folder without weights: a mistake that is found only after loading them would not be the
one that is reported.
"""

import datetime
import importlib.util
import json
import os
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from perl.cli.commands import run
from perl.errors import EXIT_FAILED
from perl.recipe import load_recipe
from perl.sandbox import BASE_FOLDER
from perl.training.prepare import plan_of


def write_rows(name, rows):
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


SOUND_RUN = ("train", "sound.yaml", "--dry-run")
SUMS = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(8)]
ONE_REWARD = "def {name}(completions{further}, **_):\n    return [0.0] * len(completions)\n"


def write_reward(module, name="f", further=""):
    Path(f"{module}.py").write_text(ONE_REWARD.format(name=name, further=further), encoding="utf-8")


def test_weights_are_looked_at_last(mistake, capsys, monkeypatch):
    """A recipe without a mistake is planned without them; only if all else is right are absent ones an error."""
    assert run(SOUND_RUN, "perl") == 0
    assert "steps    1" in capsys.readouterr().out
    monkeypatch.setenv("HOME", str(Path.cwd()))
    assert run([*SOUND_RUN, "model.name=~/weightless"], "perl") == 0
    capsys.readouterr()
    start = "sound.yaml:1: model.name: weightless holds no model that can be loaded: "
    absent = mistake("sound.yaml")
    assert absent.startswith(start)
    assert "model.safetensors" in absent
    for recipe, word in (
        ("peft: {target_modules: [nope]}", "nope"),
        ("data: {train: absent.jsonl}", "absent.jsonl"),
        ("rollout: {max_completion_length: 1200}", "rollout.max_completion_length"),
    ):
        line = mistake(recipe=recipe)
        assert word in line
        assert "safetensors" not in line


SERVER = "backend: vllm-server, servers: [http://localhost:1]"
ROLLOUTS = (
    ("{backend: vllm-server}", "rollout.backend: vllm-server needs servers"),
    ("{prefetch: 1}", "rollout.prefetch: needs backend vllm-server"),
    (f"{{{SERVER}, sync: adapter}}", "LoRA that vLLM serves"),
)


def test_mistakes_in_what_a_recipe_says_are_named_with_key_line_and_fix(refuses):
    Path("a.yaml").write_text("extends: b.yaml\n", encoding="utf-8")
    Path("b.yaml").write_text("model: {}\nextends: a.yaml\n", encoding="utf-8")
    Path("alone.yaml").write_text("train:\n  per_device_train_batch_size: 6\n  num_generations: 4\n", encoding="utf-8")
    Path("a_file").write_text("not a folder", encoding="utf-8")
    Path("thesis").mkdir()
    Path("thesis/chapter1.tex").write_text("mine", encoding="utf-8")
    unfitting = "train.num_generations: num_generations 4 does not fit 6 completions a step"
    unknown = "unknown key (did you mean"
    tag = "hub:\n  repo_id: !!python/object/apply:os.system ['touch pwned']\n"
    refuses([
        ("peft:\n  rnak: 8\n", f"recipe.yaml:3: peft.rnak: {unknown} rank?)\n"),
        (("sound.yaml", "rollout.temprature=1"), f"command line: rollout.temprature: {unknown} temperature?)\n"),
        ("\nrolout: {top_k: 5}\n", "recipe.yaml:3: rolout: unknown section (did you mean rollout?)\n"),
        ("peft:\n  rank: eight\n", "recipe.yaml:3: peft.rank: must be a whole number, not 'eight'\n"),
        (("my/recipe.yaml",), "my/recipe.yaml: no such file", "perl recipes"),
        (tag, "recipe.yaml:3: ", "tag"),
        (("a.yaml",), "b.yaml:2: extends: the recipe extends itself: a.yaml -> b.yaml -> a.yaml\n"),
        (("alone.yaml",), f"alone.yaml:3: {unfitting}", "2, 3, 6"),
        ("train: {prompts_per_step: 9}\n",
         "sound.yaml:2: data.train: 8 training problems are too few for a step of 9 prompts",
         "train.prompts_per_step to 8"),
        (("--dry-run", *with_recipe("tracker", "train: {report_to: [wandbb]}\n")),
         "tracker.yaml:2: train.report_to: there is no tracker 'wandbb' (did you mean wandb?)\n"),
        *((f"peft: {{method: dora}}\nrollout: {rollout}", "", word) for rollout, word in ROLLOUTS),
        # What a command line says of a packaged recipe is not that recipe's mistake.
        (("quickstart", "rollout.backend=vllm-server"), "command line: rollout.backend: vllm-server needs servers"),
        (("quickstart", "peft.method=lroa"), "command line: peft.method: no method 'lroa' (did you mean lora?)"),
        (("quickstart", "train.optim=adamw_trch"), "command line: train.optim: there is no 'adamw_trch' (did you mean"),
        (("sound.yaml", "--output", "a_file/run"), "a_file/run: cannot be written: ", "--output"),
        (("sound.yaml", "--output", "thesis"), "thesis: is not empty and holds no run: chapter1.tex"),
    ])  # fmt: skip
    assert not Path("pwned").exists()
    assert [path.name for path in Path("thesis").iterdir() if not path.name.startswith(".")] == ["chapter1.tex"]


def with_recipe(name, text):
    """The argument that names a further recipe like the sound one."""
    Path(f"{name}.yaml").write_text(f"extends: sound.yaml\n{text}", encoding="utf-8")
    return (f"{name}.yaml",)


@pytest.mark.parametrize(
    ("recipe", "keys"),
    [
        (
            """\
rolout: {top_k: 5}
model: {nmae: x}
peft: {rank: 0}
data:
  train: {name: a.jsonl, limit: none}
rewards: {acuracy: 1}
train: {learning_rate: fast, push_to_hub: true}
""",
            ["data.train.limit", "model.nmae", "peft.rank", "rewards.acuracy", "rolout", "train.learning_rate",
             "train.push_to_hub"],
        ),
        ("data: {train: misnamed.jsonl}\n", ["data.train.columns.answer", "data.train.columns.prompt"]),
    ],
    ids=["keys and values", "columns"],
)  # fmt: skip
def test_several_mistakes_are_all_reported_at_once(mistakes, recipe, keys):
    write_rows("misnamed.jsonl", [{"promt": f"{i}+1=", "answers": str(i + 1)} for i in range(8)])
    lines = mistakes(recipe=recipe)
    assert sorted(line.rsplit(" (", 1)[0].split(": ", 2)[1] for line in lines) == keys
    if keys[0] == "data.train.columns.answer":
        assert [line.split(": ")[1] for line in lines] == keys[::-1]
        assert "did you mean promt?" in lines[0]
        assert "did you mean answers?" in lines[1]


def test_mistakes_about_rewards_are_named_with_the_reward_and_the_fix(refuses):
    write_reward("my_rewards", "length")
    write_reward("with_limit", further=", limit=3")
    write_reward("needs_colour", further=", colour")
    write_reward("of_prompt", further=", prompt")
    write_reward("in_worker")
    Path("too_narrow.py").write_text("def f(completions):\n    return [0.0] * len(completions)\n", encoding="utf-8")
    write_rows("heldout.jsonl", [{"prompt": "9+9=", "answer": "18"}])
    write_rows("coloured.jsonl", [{**row, "colour": "red"} for row in SUMS])
    days = [{**row, "day": datetime.date(2026, 1, 1)} for row in SUMS]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(days), "days.parquet")
    coloured = "data: {train: coloured.jsonl, eval: heldout.jsonl}\ntrain: {eval_strategy: steps}\n"
    absent = "which the data does not have"
    refuses([
        ("rewards:\n  acuracy: 1\n", "recipe.yaml:3: rewards.acuracy: no reward 'acuracy' (did you mean accuracy?",
         "package.module:function"),
        ("rewards:\n  'my_rewads:length': 1\n", "recipe.yaml:3: rewards.my_rewads:length: ",
         "cannot import my_rewads", "current folder"),
        ("rewards:\n  with_limit:f: {args: {limt: 4}}\n",
         "recipe.yaml:3: rewards.with_limit:f.args.limt: with_limit:f has no argument 'limt' (did you mean limit?)\n"),
        ("rewards: {'too_narrow:f': 1}\n",
         "recipe.yaml:2: rewards.too_narrow:f: the function must accept **kwargs ("),
        ("rewards: {'needs_colour:f': 1}\n",
         f"recipe.yaml:2: rewards.needs_colour:f: needs the column 'colour', {absent}"),
        (f"{coloured}rewards: {{'needs_colour:f': 1}}\n", "",
         "rewards.needs_colour:f: needs the column 'colour', which the held-out data does not have"),
        ("data: {train: days.parquet}\nrewards: {'in_worker:f': {workers: 1}}\n", "",
         "rewards.in_worker:f: cannot be given to a worker process: ", "day"),
        ("rewards: {'of_prompt:f': 1}\n", "", "needs the column 'prompt'", "prompts"),
    ])  # fmt: skip


def test_a_reward_gets_every_column_by_its_name_and_a_name_with_two_meanings_is_told(caplog):
    write_rows("worked.jsonl", [{"problem": row["prompt"], **row, "solution": "We count on."} for row in SUMS])
    write_reward("of_two", further=", solution=None")
    data = "data: {train: {name: worked.jsonl, columns: {prompt: problem}}}"
    said = "rewards.of_two:f: solution is the data set's column of that name; the gold answer, from answer, is answer"
    for columns, told in (("", True), ("solution: solution", False), ("solution: original_solution", False)):
        caplog.clear()
        given = with_recipe("meant", f"{data}\nrewards: {{'of_two:f': {{columns: {{{columns}}}}}}}\n")
        with caplog.at_level("WARNING", logger="perl"):
            plan_of(load_recipe(given[0]))
        assert (said in caplog.text) == told
    write_rows("asked.jsonl", [{"problem": f"{i}+1=", "answer": str(i + 1), "level": "easy"} for i in range(8)])
    Path("by_name.py").write_text("def f(completions, problem, answer, solution, level, **_): return [0.0]\n")
    asked = "data: {train: {name: asked.jsonl, columns: {prompt: problem}}}\nrewards: {'by_name:f': 1}\n"
    assert run(["train", *with_recipe("by_name", asked), "--dry-run", "-q"], "perl") == 0


def test_models_that_cannot_be_loaded_are_named_with_the_reason(refuses):
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    Path("hollow").mkdir()
    at = "recipe.yaml:2: model.name: "
    refuses([
        ("model: {name: nobody/no-such-model}\n", f"{at}nobody/no-such-model cannot be loaded", "HF_HUB_OFFLINE",
         "sandbox:base"),
        ("model: {name: hollow}\n", f"{at}hollow holds no model that can be loaded: ", "sandbox:base"),
        ("model: {name: 'sandbox:bsae'}\n",
         f"{at}the sandbox has no model 'sandbox:bsae' (did you mean sandbox:base?)\n"),
    ])  # fmt: skip
    Path("weightless/chat_template.jinja").unlink()  # and those that cannot read messages
    write_rows("messages.jsonl", [{"prompt": [{"role": "user", "content": "1+1="}], "answer": "2"}] * 8)
    refuses([("data: {train: messages.jsonl, chat: null}\n", "recipe.yaml:2: ", "template")])


def test_data_that_is_absent_empty_or_unreadable_is_named(refuses):
    rows = [
        ("data: {train: nobody/no-such-data}\n", "recipe.yaml:2: data.train: nobody/no-such-data cannot be loaded",
         "HF_HUB_OFFLINE", "sandbox:addition"),
        ("data: {train: 'sandbox:adition'}\n", "recipe.yaml:2: data.train: ",
         "the sandbox has no task 'adition' (did you mean addition?)\n"),
        ("data: {eval: folder/absent.jsonl}\n", "recipe.yaml:2: data.eval: no such file: folder/absent.jsonl"),
    ]  # fmt: skip
    Path("rows.json").write_text("[]", encoding="utf-8")  # of the kind, without a row
    Path("rows.csv").write_text("prompt,answer\n", encoding="utf-8")
    pyarrow.parquet.write_table(pyarrow.table({"prompt": [], "answer": []}), "rows.parquet")
    Path("bytes.jsonl").touch()
    for name in ("rows.json", "rows.csv", "rows.parquet", "bytes.jsonl"):
        rows.append((f"data: {{train: {name}}}\n", f"recipe.yaml:2: data.train: {name} is empty"))
    Path("broken.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": "1+', encoding="utf-8")
    broken = ("sound.yaml", "data.train=broken.jsonl")
    refuses([*rows, (broken, "command line: data.train: broken.jsonl cannot be read: ")])


def test_examples_that_cannot_be_trained_on_are_counted_and_named(refuses):
    answers = {2: None, 5: " "}
    write_rows("unanswered.jsonl", [{**row, "answer": answers.get(i, "1")} for i, row in enumerate(SUMS)])
    write_rows("columns.jsonl", [{"question": f"{i}+1=", "gold_answer": str(i + 1)} for i in range(8)])
    write_rows("gaps.jsonl", [{"prompt": "1+1=", "answer": "2"}, {"prompt": " ", "answer": "3"}])
    write_rows("latex.jsonl", [{"prompt": f"{i}?", "answer": r"\frac{1}{" if i == 3 else "2"} for i in range(8)])
    write_rows("heldout.jsonl", [{"prompt": "3+1=", "answer": "4"}, {"prompt": " 5+1= ", "answer": "6"}])
    refuses([
        ("data: {train: unanswered.jsonl}\n",
         "recipe.yaml:2: data.train: 2 of 8 rows of unanswered.jsonl have no answer, first row 3"),
        ("data: {train: {name: columns.jsonl, columns: {prompt: question}}}\n",
         "recipe.yaml:2: data.train.columns.answer: columns.jsonl has no column 'answer', it has ",
         "question, gold_answer"),
        ("data: {train: gaps.jsonl}\n",
         "recipe.yaml:2: data.train: 1 of 2 rows of gaps.jsonl have no question, first row 2"),
        ("data: {train: latex.jsonl}\n", "recipe.yaml:2: data.train: 1 of 8 gold answers cannot be read, e.g. ",
         r"\\frac{1}{", "perl reward check"),
        ("data: {eval: heldout.jsonl}\n",
         "recipe.yaml:2: data.eval: 2 training prompts are also held out, e.g. '3+1='", "data.drop_overlap: true"),
        ("data: {prompt_template: '{prompt} in {unit}'}\n",
         "recipe.yaml:2: data.prompt_template: the template cannot be filled", "unit", "prompt, answer"),
    ])  # fmt: skip


def test_prompt_and_completion_must_fit_into_the_context_and_the_room_that_is_left_is_named(mistake, capsys):
    context = json.loads((BASE_FOLDER / "config.json").read_text())["max_position_embeddings"]
    line = mistake(recipe="rollout: {max_completion_length: 1024}\n")
    longest = int(line.partition("recipe.yaml:2: rollout.max_completion_length: the longest prompt has ")[2].split()[0])
    room = int(line.rpartition("at most ")[2].rstrip(")"))
    assert room == context - longest
    assert run([*SOUND_RUN, f"rollout.max_completion_length={room}"], "perl") == 0
    assert f"tokens   prompts up to {longest}, completions up to {room}\n" in capsys.readouterr().out
    assert f"(at most {room})" in mistake("sound.yaml", f"rollout.max_completion_length={room + 1}")
    write_rows("long.jsonl", [{"prompt": "1+" * 600 + "1=", "answer": "301"}, {"prompt": "1+1=", "answer": "2"}])
    assert "shorten or drop" in mistake(recipe="data: {train: long.jsonl}\n")


def test_an_optional_package_that_is_not_installed_is_named_with_how_to_install_it(refuses):
    """Of those that happen to be installed here nothing is checked."""
    track, flash = "pip install 'perl-rl[track]'", "pip install 'perl-rl[flash]'"
    rows = {
        "wandb": [("train: {report_to: wandb}", "", "train.report_to", "needs the package wandb", track)],
        "flash_attn": [
            ("model: {attn_implementation: flash_attention_2}", "", "model.attn_implementation",
             "needs the package flash-attn", flash),
        ],
    }  # fmt: skip
    for module, setting, package, installed in (
        ("bitsandbytes", "optim: paged_adamw_8bit", "bitsandbytes", "bitsandbytes"),
    ):
        text, key = f"train: {{{setting}}}\n", f"train.{setting.split(':')[0]}"
        words = (f"the package {package}", f"pip install {installed}")
        dry = ("--dry-run", *with_recipe(package, text))
        rows[module] = [(text, f"recipe.yaml:2: {key}: ", *words), (dry, f"{package}.yaml:2: {key}: ", *words)]
    absent = [row for module, found in rows.items() if importlib.util.find_spec(module) is None for row in found]
    assert absent
    refuses([
        *absent,
        ("rollout: {backend: vllm}", "", "rollout.backend needs the package vllm",
         "pip install 'vllm>=0.28,<0.33', then pip install perl-rl again"),
    ])  # fmt: skip


def test_servers_that_do_not_answer(capsys):
    settings = "{backend: vllm-server, servers: [http://127.0.0.1:9], server_timeout: 2}"
    assert run(["train", *with_recipe("recipe", f"rollout: {settings}\n")], "perl") == EXIT_FAILED
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert "no vLLM server answers, for 2 seconds: http://127.0.0.1:9" in line
