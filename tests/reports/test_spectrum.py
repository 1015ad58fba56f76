"""`perl spectrum`: its table, its files, its picture, and the line for what it cannot read."""

import json
import re
import shutil
import struct
from pathlib import Path

import pytest
from peft import PromptTuningConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import perl
from perl.cli.main import run_commands
from perl.sandbox import BASE_FOLDER
from tests.saved_adapters import save_adapter

LORA = "zoo:sandbox-lora"


@pytest.fixture
def command(capsys):
    """Runs `perl spectrum` in this process: exit code, what it printed, what it complained of."""

    def run(*arguments):
        code = run_commands(["spectrum", *map(str, arguments)], "perl")
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


def test_the_table_the_json_and_the_picture_say_the_same(command):
    code, out, err = command(LORA, "-o", "out", "--by", "layer", "--modules", r"layers\.(1|3)\.")
    assert (code, err) == (0, "")
    heading, columns, *rows = out.splitlines()
    assert heading.startswith("zoo:sandbox-lora (lora) on sandbox:base: 14 modules, 393,216 weights; ")
    assert re.split(r"  +", columns.strip())[:4] == ["modules", "size", "stable rank", "unchanged"]
    found = json.loads(Path("out/spectrum.json").read_text())
    assert [row["name"] for row in found["layers"]] == ["1", "3"]
    for row, shown in zip([*found["layers"], found["pooled"]], rows, strict=False):
        cells = shown.split()
        assert cells[0] == row["name"]
        assert float(cells[3]) == pytest.approx(row["stable_rank"], abs=0.006)
        assert float(cells[4]) == pytest.approx(100 * row["unchanged"], abs=0.06)
        assert [float(c) for c in cells[5:7]] == pytest.approx(
            [100 * row["energy"][side] for side in ("left", "right")], abs=0.06
        )
    sizes = {path.name: struct.unpack(">II", path.read_bytes()[16:24]) for path in Path("out").glob("*.png")}
    assert sizes.keys() == {"spectrum.png"}
    assert min(sizes["spectrum.png"]) > 300


def test_what_pissa_starts_on_is_seen_in_its_update(command):
    found = perl.spectrum("zoo:sandbox-pissa").pooled
    assert found.energy.right > 0.5 > found.chance
    code, out, _ = command("zoo:sandbox-pissa", "--json")
    assert code == 0
    assert json.loads(out)["pooled"]["energy"]["right"] == pytest.approx(found.energy.right)


def test_a_run_is_read_and_one_of_the_model_itself_is_the_difference_of_two_models():
    save_adapter("adapter", size=0.02)
    Path("run").mkdir()
    shutil.move("adapter", "run/adapter")
    Path("run/recipe.yaml").write_text(perl.Recipe.load("quickstart").to_yaml())
    Path("run/run.json").write_text(json.dumps({"method": "lora", "status": "done"}))
    lora = perl.spectrum("run")
    assert (lora.adapter, lora.method, len(lora.modules)) == ("run", "lora", 28)
    # The same policy as a whole model has the same update.
    from perl.policy.export import export

    export("run/adapter", "merged", "merged")
    shutil.copytree("run", "full", ignore=shutil.ignore_patterns("adapter"))
    shutil.move("merged", "full/model")
    Path("full/run.json").write_text(json.dumps({"method": "full", "status": "done"}))
    full = perl.spectrum("full", modules="q_proj$")
    assert full.method == "full"
    of_lora = [one for one in lora.modules if one.name.endswith("q_proj")]
    assert [one.norm for one in full.modules] == pytest.approx([one.norm for one in of_lora], rel=1e-4)
    assert [one.left_bins for one in full.modules] == [pytest.approx(one.left_bins, abs=1e-4) for one in of_lora]


def prompts() -> None:
    model = AutoModelForCausalLM.from_pretrained(BASE_FOLDER)
    config = PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM")
    get_peft_model(model, config).save_pretrained("prompts")


def other_base() -> None:
    shutil.copytree(BASE_FOLDER, "other")
    tensors = load_file("other/model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"] + 1
    save_file(tensors, "other/model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("make", "arguments", "said"),
    [
        (None, ["absent"], "absent: no such folder"),
        (prompts, ["prompts"], "PROMPT_TUNING"),
        (other_base, [LORA, "--base", "other"], "was trained on other weights of sandbox:base"),
        (None, [LORA, "--modules", "("], r"--modules: '\(' is not a regular expression"),
        (None, [LORA, "--modules", "q_prog"], "--modules: 'q_prog' fits no changed module .there are: down_proj"),
        (None, [LORA, "--principal", "1.5"], "--principal: must be above 0 and below 1, not 1.5"),
        (lambda: Path("file").touch(), [LORA, "-o", "file"], "file: cannot be written"),
    ],
)
def test_bad_input_is_one_line(make, arguments, said, command):
    if make is not None:
        make()
    code, _, err = command(*arguments)
    assert code == 2
    (line,) = err.strip().splitlines()
    assert re.search(said, line), line
