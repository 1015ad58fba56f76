"""Every mistake a user can make is one line that says what is wrong and where, exit 2, before weights are loaded.

The base of these recipes is a folder without weights: a mistake that is found only after loading them would not be the
one that is reported.
"""

import csv
import datetime
import importlib.util
import json
import os
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from transformers import AutoTokenizer

from perl.cli.commands import run
from perl.errors import EXIT_FAILED
from perl.sandbox import BASE_FOLDER


def write_rows(name, rows):
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def test_the_recipe_without_a_mistake_is_planned_without_weights(capsys):
    assert run(["train", "sound.yaml", "--dry-run"], "perl") == 0
    assert "steps    1" in capsys.readouterr().out


def test_a_model_folder_may_start_at_the_home_folder(monkeypatch):
    monkeypatch.setenv("HOME", str(Path.cwd()))
    assert run(["train", "sound.yaml", "--dry-run", "model.name=~/weightless"], "perl") == 0


def test_absent_weights_are_one_line_once_nothing_else_is_wrong(mistake):
    line = mistake("sound.yaml")
    assert line.startswith("sound.yaml:1: model.name: weightless holds no model that can be loaded: ")
    assert "model.safetensors" in line


def test_weights_that_cannot_be_read_are_one_line(mistake):
    Path("weightless/model.safetensors").write_bytes(b"\xff" * 64)
    assert mistake("sound.yaml").startswith("sound.yaml:1: model.name: weightless holds no model that can be loaded: ")


@pytest.mark.parametrize("weights", ["absent", "unreadable"])
@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        ("peft: {rnak: 8}", "unknown key"),
        ("peft: {target_modules: [nope]}", "nope"),
        ("data: {train: absent.jsonl}", "absent.jsonl"),
        ("rollout: {max_completion_length: 1200}", "rollout.max_completion_length"),
    ],
)
def test_a_mistake_is_found_before_weights_are_loaded(mistake, weights, recipe, words):
    if weights == "unreadable":
        Path("weightless/model.safetensors").write_bytes(b"\xff" * 64)
    line = mistake(recipe=recipe)
    assert words in line
    assert "safetensors" not in line


def test_unknown_key(mistake):
    assert mistake(recipe="peft:\n  rnak: 8\n") == "recipe.yaml:3: peft.rnak: unknown key (did you mean rank?)"


def test_unknown_training_argument(mistake):
    line = mistake(recipe="train:\n  learning_rte: 1e-5\n")
    assert line == "recipe.yaml:3: train.learning_rte: unknown key (did you mean learning_rate?)"


def test_unknown_key_on_the_command_line(mistake):
    assert mistake("sound.yaml", "rollout.temprature=1") == (
        "command line: rollout.temprature: unknown key (did you mean temperature?)"
    )


def test_unknown_section(mistake):
    assert mistake(recipe="\nrolout: {top_k: 5}\n") == "recipe.yaml:3: rolout: unknown section (did you mean rollout?)"


def test_wrong_type(mistake):
    assert mistake(recipe="peft:\n  rank: eight\n") == "recipe.yaml:3: peft.rank: must be a whole number, not 'eight'"


def test_missing_recipe_file(mistake):
    line = mistake("my/recipe.yaml")
    assert line.startswith("my/recipe.yaml: no such file")
    assert "perl recipes" in line


def test_unknown_packaged_recipe(mistake):
    assert mistake("quickstrat") == "no recipe named 'quickstrat' (did you mean quickstart?)"


def test_yaml_with_a_python_tag(mistake):
    line = mistake(recipe="hub:\n  repo_id: !!python/object/apply:os.system ['touch pwned']\n")
    assert line.startswith("recipe.yaml:3: ")
    assert "tag" in line
    assert not Path("pwned").exists()


def test_a_recipe_that_extends_itself(mistake):
    Path("a.yaml").write_text("extends: b.yaml\n", encoding="utf-8")
    Path("b.yaml").write_text("model: {}\nextends: a.yaml\n", encoding="utf-8")
    assert mistake("a.yaml") == "b.yaml:2: extends: the recipe extends itself: a.yaml -> b.yaml -> a.yaml"


def test_unknown_reward(mistake):
    line = mistake(recipe="rewards:\n  acuracy: 1\n")
    assert line.startswith("recipe.yaml:3: rewards.acuracy: no reward 'acuracy' (did you mean accuracy?")
    assert "package.module:function" in line


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("my_rewards:lenght", ["my_rewards has no function 'lenght'", "did you mean length?"]),
        ("my_rewads:length", ["cannot import my_rewads", "current folder"]),
    ],
)
def test_unknown_function_of_ones_own(mistake, name, words):
    Path("my_rewards.py").write_text(
        "def length(completions, **_):\n    return [0.0] * len(completions)\n", encoding="utf-8"
    )
    line = mistake(recipe=f"rewards:\n  '{name}': 1\n")
    assert line.startswith(f"recipe.yaml:3: rewards.{name}: ")
    assert all(word in line for word in words)


def test_unknown_argument_of_a_reward(mistake):
    Path("with_limit.py").write_text(
        "def f(completions, limit=3, **_):\n    return [0.0] * len(completions)\n", encoding="utf-8"
    )
    line = mistake(recipe="rewards:\n  with_limit:f: {args: {limt: 4}}\n")
    assert (
        line
        == "recipe.yaml:3: rewards.with_limit:f.args.limt: with_limit:f has no argument 'limt' (did you mean limit?)"
    )


def test_reward_function_without_further_arguments(mistake):
    Path("too_narrow.py").write_text("def f(completions):\n    return [0.0] * len(completions)\n", encoding="utf-8")
    line = mistake(recipe="rewards: {'too_narrow:f': 1}\n")
    assert line.startswith("recipe.yaml:2: rewards.too_narrow:f: the function must accept **kwargs (")


def test_reward_function_that_needs_a_column_which_is_not_there(mistake):
    Path("needs_colour.py").write_text(
        "def f(completions, colour, **_):\n    return [0.0] * len(completions)\n", encoding="utf-8"
    )
    line = mistake(recipe="rewards: {'needs_colour:f': 1}\n")
    assert line.startswith(
        "recipe.yaml:2: rewards.needs_colour:f: needs the column 'colour', which the data does not have"
    )


def test_a_mapped_column_that_is_not_there(mistake):
    line = mistake(recipe="rewards: {accuracy: {columns: {solution: gold}}}\n")
    assert line.startswith("recipe.yaml:2: rewards.accuracy: needs the column 'gold', which the data does not have (")


def test_held_out_rows_that_lack_a_column_of_a_reward_which_evaluates_them(mistake):
    write_rows("heldout.jsonl", [{"prompt": "9+9=", "answer": "18"}])
    write_rows("coloured.jsonl", [{"prompt": f"{i}+1=", "answer": str(i + 1), "colour": "red"} for i in range(8)])
    Path("needs_colour.py").write_text("def f(completions, colour, **_): return [0.0] * len(completions)\n")
    recipe = "data: {train: coloured.jsonl, eval: heldout.jsonl}\nrewards: {'needs_colour:f': 1}\n"
    line = mistake(recipe=f"{recipe}train: {{eval_strategy: steps}}\n")
    assert "rewards.needs_colour:f: needs the column 'colour', which the held-out data does not have" in line


def test_a_column_that_no_worker_can_be_given(mistake):
    rows = [{"prompt": f"{i}+1=", "answer": str(i + 1), "day": datetime.date(2026, 1, 1)} for i in range(8)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), "days.parquet")
    Path("in_worker.py").write_text("def f(completions, **_): return [0.0]\n")
    line = mistake(recipe="data: {train: days.parquet}\nrewards: {'in_worker:f': {workers: 1}}\n")
    assert "rewards.in_worker:f: cannot be given to a worker process: " in line
    assert "day" in line


def test_accuracy_without_answers(mistake):
    line = mistake(recipe="data: {train: {columns: {answer: null}}}\n")
    assert line.startswith("rewards.accuracy: needs an answer")
    assert "data.train.columns.answer" in line


def test_num_generations_that_does_not_fit(mistake):
    Path("alone.yaml").write_text("train:\n  per_device_train_batch_size: 6\n  num_generations: 4\n", encoding="utf-8")
    line = mistake("alone.yaml")
    assert line.startswith("alone.yaml:3: train.num_generations: num_generations 4 does not fit 6 completions a step")
    assert "2, 3, 6" in line


def test_a_model_that_does_not_exist(mistake):
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    line = mistake(recipe="model: {name: nobody/no-such-model}\n")
    assert line.startswith("recipe.yaml:2: model.name: nobody/no-such-model cannot be loaded")
    assert "HF_HUB_OFFLINE" in line
    assert "sandbox:base" in line


def test_a_model_folder_that_does_not_exist(mistake):
    line = mistake(recipe="model: {name: ./models/absent}\n")
    assert line.startswith("recipe.yaml:2: model.name: ")
    assert "./models/absent" in line
    assert "no such folder" in line


def test_a_model_folder_that_holds_no_model(mistake):
    Path("hollow").mkdir()
    line = mistake(recipe="model: {name: hollow}\n")
    assert line.startswith("recipe.yaml:2: model.name: hollow holds no model that can be loaded: ")
    assert "sandbox:base" in line


@pytest.mark.parametrize("chat", ["null", "true"])
def test_messages_for_a_base_without_a_chat_template(mistake, chat):
    Path("weightless/chat_template.jinja").unlink()
    messages = [{"role": "user", "content": "1+1="}]
    rows = [{"prompt": messages if chat == "null" else "1+1=", "answer": "2"}] * 8
    write_rows("messages.jsonl", rows)
    line = mistake(recipe=f"data: {{train: messages.jsonl, chat: {chat}}}\n")
    assert line.startswith(("recipe.yaml:2: data.", "recipe.yaml:2: model.name: "))
    assert "template" in line


def test_a_sandbox_model_that_does_not_exist(mistake):
    line = mistake(recipe="model: {name: 'sandbox:bsae'}\n")
    assert line == "recipe.yaml:2: model.name: the sandbox has no model 'sandbox:bsae' (did you mean sandbox:base?)"


def test_a_data_set_that_does_not_exist(mistake):
    line = mistake(recipe="data: {train: nobody/no-such-data}\n")
    assert line.startswith("recipe.yaml:2: data.train: nobody/no-such-data cannot be loaded")
    assert "HF_HUB_OFFLINE" in line
    assert "sandbox:addition" in line


def test_a_sandbox_task_that_does_not_exist(mistake):
    line = mistake(recipe="data: {train: 'sandbox:adition'}\n")
    assert line.startswith("recipe.yaml:2: data")
    assert line.endswith("the sandbox has no task 'adition' (did you mean addition?)")


@pytest.mark.parametrize("role", ["train", "eval"])
def test_a_data_file_that_does_not_exist(mistake, role):
    assert mistake(recipe=f"data: {{{role}: folder/absent.jsonl}}\n").startswith(
        f"recipe.yaml:2: data.{role}: no such file: folder/absent.jsonl"
    )


def test_data_without_an_answer_column(mistake):
    write_rows("questions.jsonl", [{"question": f"{i}+1=", "gold_answer": str(i + 1)} for i in range(8)])
    line = mistake(recipe="data: {train: {name: questions.jsonl, columns: {prompt: question}}}\n")
    assert line.startswith("recipe.yaml:2: data.train.columns.answer: questions.jsonl has no column 'answer', it has ")
    assert "question, gold_answer" in line


def test_data_without_either_column_are_two_problems(mistakes):
    write_rows("questions.jsonl", [{"promt": f"{i}+1=", "answers": str(i + 1)} for i in range(8)])
    lines = mistakes(recipe="data: {train: questions.jsonl}\n")
    assert [line.split(": ")[1] for line in lines] == ["data.train.columns.prompt", "data.train.columns.answer"]
    assert "did you mean promt?" in lines[0]
    assert "did you mean answers?" in lines[1]


def write_empty(name):
    path = Path(name)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.table({"prompt": [], "answer": []}), path)
    elif path.suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerow(["prompt", "answer"])
    else:
        path.write_text({".json": "[]", ".jsonl": "\n\n"}[path.suffix], encoding="utf-8")


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.csv", "rows.parquet"])
def test_data_without_rows(mistake, name):
    write_empty(name)
    assert mistake(recipe=f"data: {{train: {name}}}\n").startswith(f"recipe.yaml:2: data.train: {name} is empty")


@pytest.mark.parametrize("name", ["bytes.jsonl", "bytes.json", "bytes.csv", "bytes.parquet"])
def test_data_without_bytes(mistake, name):
    Path(name).touch()
    assert mistake(recipe=f"data: {{train: {name}}}\n").startswith(f"recipe.yaml:2: data.train: {name} is empty")


def test_data_that_cannot_be_read(perl_command):
    Path("broken.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": "1+', encoding="utf-8")
    done = perl_command("train", "sound.yaml", "data.train=broken.jsonl")
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: command line: data.train: broken.jsonl cannot be read: ")


@pytest.mark.parametrize("answer", [None, "", "  "])
def test_a_row_without_an_answer(mistake, answer):
    rows = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(8)]
    rows[2]["answer"] = rows[5]["answer"] = answer
    write_rows("gaps.jsonl", rows)
    line = mistake(recipe="data: {train: gaps.jsonl}\n")
    assert line.startswith("recipe.yaml:2: data.train: 2 of 8 rows of gaps.jsonl have no answer, first row 3")


def test_a_row_without_a_question(mistake):
    write_rows("gaps.jsonl", [{"prompt": "1+1=", "answer": "2"}, {"prompt": " ", "answer": "3"}])
    assert mistake(recipe="data: {train: gaps.jsonl}\n").startswith(
        "recipe.yaml:2: data.train: 1 of 2 rows of gaps.jsonl have no question, first row 2"
    )


def test_answers_that_cannot_be_read(mistake):
    write_rows("latex.jsonl", [{"prompt": f"{i}?", "answer": r"\frac{1}{" if i == 3 else "2"} for i in range(8)])
    line = mistake(recipe="data: {train: latex.jsonl}\n")
    assert line.startswith("recipe.yaml:2: data.train: 1 of 8 gold answers cannot be read, e.g. ")
    assert r"\\frac{1}{" in line
    assert "perl reward check" in line


def test_training_prompts_that_are_held_out_too(mistake):
    write_rows("heldout.jsonl", [{"prompt": "3+1=", "answer": "4"}, {"prompt": " 5+1= ", "answer": "6"}])
    line = mistake(recipe="data: {eval: heldout.jsonl}\n")
    assert line.startswith("recipe.yaml:2: data.eval: 2 training prompts are also held out, e.g. '3+1='")
    assert "data.drop_overlap: true" in line


def test_too_few_problems_for_a_step(mistake):
    line = mistake(recipe="train: {prompts_per_step: 9}\n")
    assert line.startswith("sound.yaml:2: data.train: 8 training problems are too few for a step of 9 prompts")
    assert "train.prompts_per_step to 8" in line


def test_a_template_that_names_no_column(mistake):
    line = mistake(recipe="data: {prompt_template: '{prompt} in {unit}'}\n")
    assert line.startswith("recipe.yaml:2: data.prompt_template: the template cannot be filled")
    assert "unit" in line
    assert "prompt, answer" in line


def test_a_prompt_longer_than_the_models_context(mistake):
    write_rows("long.jsonl", [{"prompt": "1+" * 600 + "1=", "answer": "301"}, {"prompt": "1+1=", "answer": "2"}])
    line = mistake(recipe="data: {train: long.jsonl}\n")
    tokenizer = AutoTokenizer.from_pretrained(BASE_FOLDER)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "1+" * 600 + "1="}], add_generation_prompt=True, tokenize=False
    )
    assert f"the longest prompt has {len(tokenizer.encode(text))} tokens" in line
    assert "the model's 1024" in line
    assert "shorten or drop" in line


def test_a_completion_that_leaves_no_room_for_the_prompt(mistake, capsys):
    line = mistake(recipe="rollout: {max_completion_length: 1024}\n")
    assert line.startswith("recipe.yaml:2: rollout.max_completion_length: the longest prompt has ")
    room = int(line.rpartition("at most ")[2].rstrip(")"))
    assert run(["train", "sound.yaml", "--dry-run", f"rollout.max_completion_length={room}"], "perl") == 0
    capsys.readouterr()
    assert f"(at most {room})" in mistake("sound.yaml", f"rollout.max_completion_length={room + 1}")


def test_an_output_folder_that_cannot_be_written(mistake):
    Path("a_file").write_text("not a folder", encoding="utf-8")
    line = mistake("sound.yaml", "--output", "a_file/run")
    assert line.startswith("a_file/run: cannot be written: ")
    assert "--output" in line


def test_an_output_folder_that_holds_something_else(mistake):
    Path("thesis").mkdir()
    Path("thesis/chapter1.tex").write_text("mine", encoding="utf-8")
    line = mistake("sound.yaml", "--output", "thesis")
    assert line.startswith("thesis: is not empty and holds no run: chapter1.tex")
    assert [path.name for path in Path("thesis").iterdir() if not path.name.startswith(".")] == ["chapter1.tex"]


@pytest.mark.parametrize(
    ("package", "extra", "recipe", "key"),
    [
        ("wandb", "track", "train: {report_to: wandb}", "train.report_to"),
        ("wandb", "track", "train: {report_to: [wandb]}", "train.report_to"),
        ("flash_attn", "flash", "model: {attn_implementation: flash_attention_2}", "model.attn_implementation"),
    ],
)
def test_an_optional_package_that_is_not_installed(mistake, package, extra, recipe, key):
    if importlib.util.find_spec(package) is not None:
        pytest.skip(f"{package} is installed")
    line = mistake(recipe=recipe)
    assert key in line
    assert f"needs the package {package.replace('_', '-')}" in line
    assert f"pip install 'perl-rl[{extra}]'" in line


def test_vllm_in_this_process_that_is_not_installed(mistake):
    line = mistake(recipe="rollout: {backend: vllm}")
    assert "rollout.backend needs the package vllm" in line
    assert "pip install 'vllm>=0.32,<0.33', then pip install perl-rl once more" in line


@pytest.mark.parametrize(
    ("rollout", "said"),
    [
        ("{backend: vllm-server}", "backend vllm-server needs servers"),
        ("{servers: [http://localhost:1]}", "servers are used by backend vllm-server only"),
        ("{backend: vllm-server, servers: [localhost:1]}", "an address like http://localhost:8000"),
        ("{backend: vllm-server, servers: [http://a:1, http://a:1/]}", "the same server is named twice"),
        ("{prefetch: 1}", "prefetch needs backend vllm-server"),
        ("{backend: vllm-servers}", "did you mean vllm-server?"),
        ("{backend: vllm-server, servers: [http://localhost:1], top_p: 0.9}", "rollout.top_p: 0.9 cuts off"),
        ("{backend: vllm-server, servers: [http://localhost:1], sync: adapter}", "LoRA that vLLM serves"),
    ],
)
def test_rollouts_that_cannot_be_had_as_asked(mistake, rollout, said):
    assert said in mistake(recipe=f"peft: {{method: dora}}\nrollout: {rollout}")


def test_servers_that_do_not_answer(capsys):
    settings = "{backend: vllm-server, servers: [http://127.0.0.1:9], server_timeout: 2}"
    Path("recipe.yaml").write_text(f"extends: sound.yaml\nrollout: {settings}\n", encoding="utf-8")
    assert run(["train", "recipe.yaml"], "perl") == EXIT_FAILED
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert "no vLLM server answers, for 2 seconds: http://127.0.0.1:9" in line


def test_several_mistakes_are_all_said_at_once(mistakes):
    recipe = """\
rolout: {top_k: 5}
model: {nmae: x}
peft: {rank: 0}
data:
  train: {name: a.jsonl, limit: none}
rewards: {acuracy: 1}
train: {learning_rate: fast, push_to_hub: true}
"""
    lines = mistakes(recipe=recipe)
    assert {line.rsplit(" (", 1)[0].split(": ", 2)[1] for line in lines} == {
        "rolout",
        "model.nmae",
        "peft.rank",
        "data.train.limit",
        "rewards.acuracy",
        "train.learning_rate",
        "train.push_to_hub",
    }
    assert len(lines) == 7


def test_unknown_names_of_method_and_reward_are_said_with_unknown_keys(mistakes):
    lines = mistakes(recipe="peft: {method: lorra}\nrewards: {acuracy: 1}\ntrain: {sead: 1}\n")
    assert sorted(line.split(": ")[1] for line in lines) == ["peft.method", "rewards.acuracy", "train.sead"]


def test_a_reward_of_the_users_own_that_asks_for_a_name_with_two_meanings(mistake):
    rows = [{"problem": f"{i}+1=", "answer": str(i + 1), "solution": "We count on."} for i in range(8)]
    write_rows("worked.jsonl", rows)
    Path("of_two.py").write_text("def f(completions, solution=None, **_): return [0.0] * len(completions)\n")
    data = "data: {train: {name: worked.jsonl, columns: {prompt: problem}}}"
    line = mistake(recipe=f"{data}\nrewards: {{'of_two:f': 1}}\n")
    assert line.startswith("recipe.yaml:3: rewards.of_two:f: asks for solution, which is the gold answer here, but ")
    assert "columns: {solution: solution} for the gold answer, {solution: original_solution} for the column" in line
    for meant in ("solution", "original_solution"):
        rewards = f"rewards: {{'of_two:f': {{columns: {{solution: {meant}}}}}}}"
        Path("meant.yaml").write_text(f"extends: sound.yaml\n{data}\n{rewards}\n", encoding="utf-8")
        assert run(["train", "meant.yaml", "--dry-run", "-q"], "perl") == 0


def test_a_reward_gets_every_column_of_the_file_by_its_name():
    write_rows("asked.jsonl", [{"problem": f"{i}+1=", "answer": str(i + 1), "level": "easy"} for i in range(8)])
    Path("by_name.py").write_text("def f(completions, problem, answer, solution, level, **_): return [0.0]\n")
    recipe = "data: {train: {name: asked.jsonl, columns: {prompt: problem}}}\nrewards: {'by_name:f': 1}\n"
    Path("by_name.yaml").write_text(f"extends: sound.yaml\n{recipe}", encoding="utf-8")
    assert run(["train", "by_name.yaml", "--dry-run", "-q"], "perl") == 0


def test_a_reward_that_asks_for_the_prompt_by_the_name_of_its_column(mistake):
    Path("of_prompt.py").write_text("def f(completions, prompt, **_): return [0.0] * len(completions)\n")
    line = mistake(recipe="rewards: {'of_prompt:f': 1}\n")
    assert "needs the column 'prompt'" in line
    assert "prompts" in line


@pytest.mark.parametrize("dry_run", [(), ("--dry-run",)])
@pytest.mark.parametrize(
    ("module", "setting", "hint"),
    [
        ("deepspeed", "deepspeed: ds.json", "pip install deepspeed"),
        ("tensorboard", "report_to: tensorboard", "pip install tensorboard"),
        ("liger_kernel", "use_liger_kernel: true", "pip install liger-kernel"),
        ("bitsandbytes", "optim: paged_adamw_8bit", "pip install bitsandbytes"),
    ],
)
def test_a_package_that_a_training_argument_needs(mistake, module, setting, hint, dry_run):
    if importlib.util.find_spec(module) is not None:
        pytest.skip(f"{module} is installed")
    Path("ds.json").write_text("{}", encoding="utf-8")
    line = mistake(*dry_run, recipe=f"train: {{{setting}}}\n")
    assert line.startswith(f"recipe.yaml:2: train.{setting.split(':')[0]}: ")
    assert f"the package {hint.split()[-1]}" in line
    assert hint in line


def test_a_tracker_that_there_is_not(mistake):
    line = mistake("--dry-run", recipe="train: {report_to: [wandbb]}\n")
    assert line == "recipe.yaml:2: train.report_to: there is no tracker 'wandbb' (did you mean wandb?)"
