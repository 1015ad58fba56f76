"""``perl plan`` prints what a run costs, loads no weights, and refuses what cannot run in a line."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from typing import NamedTuple

import pytest

from perl.cli import commands
from perl.policy import model as policy_model
from perl.recipe.sections import STRATEGIES

ON_TWO = ("train.per_device_train_batch_size=null", "--processes", "2")


class Said(NamedTuple):
    """What a command left behind."""

    code: int
    out: str
    err: str


@pytest.fixture
def perl(capsys, monkeypatch) -> Callable[..., Said]:
    """A command in this process, in which no weights can be loaded."""

    def refuse(*_, **__):
        raise AssertionError("weights are loaded")

    monkeypatch.setattr(policy_model.AutoModelForCausalLM, "from_pretrained", refuse)

    def run(*arguments: str, command: str = "plan") -> Said:
        code = commands.run([command, *arguments], "perl")
        return Said(code, *capsys.readouterr())

    return run


def planned(said: Said) -> dict:
    assert (said.code, said.err) == (0, "")
    return json.loads(said.out)


def test_all_strategies_are_compared_and_the_one_that_is_asked_for_stands_alone(perl):
    found = planned(perl("quickstart", *ON_TWO, "--json"))
    assert tuple(found["strategies"]) == STRATEGIES
    assert (found["processes"], found["nodes"], found["completions_per_step"]) == (2, 1, 64)
    ddp, zero2, fsdp2 = (found["strategies"][name] for name in STRATEGIES)
    assert fsdp2["memory"]["base"] == ddp["memory"]["base"] / 2
    trained = found["trained_parameters"]
    assert zero2["memory"]["optimizer"] == 16 * trained / 2
    assert ddp["memory"]["optimizer"] == 8 * trained
    assert zero2["memory"]["gradients"] == 4 * trained == ddp["memory"]["gradients"] / 2
    assert zero2["bytes"]["averaged"] == 1.5 * ddp["bytes"]["averaged"]
    assert ddp["bytes"]["gathered"] == 0 < fsdp2["bytes"]["gathered"]
    assert ddp["bytes"]["averaged"] == 4 * found["trained_parameters"]
    for name in ("--strategy", "engine.strategy=fsdp2"):
        asked = (name, "fsdp2") if name.startswith("--") else (name,)
        alone = planned(perl("quickstart", *ON_TWO, *asked, "--json"))
        assert alone["strategies"] == {"fsdp2": fsdp2}


def test_the_text_says_what_is_derived_and_names_the_bottleneck(perl):
    said = perl("quickstart", "--gpu", "t4")
    assert (said.code, said.err) == (0, "")
    for part in ("of a process (derived)", "a step (derived)", "bottleneck", "fits", "T4: 65 TFLOP/s", "assumed: half"):
        assert part in said.out, part
    assert "measured" not in said.out
    in_float32 = perl("quickstart", "model.dtype=float32", "train.bf16=false", "--gpu", "A100", "--memory", "60").out
    assert "60 GB: 19.5 TFLOP/s in float32" in in_float32
    assert "memory as given" in in_float32
    given = perl("quickstart", "--completion-tokens", "20").out
    assert "completions 20 on average" in given
    assert "as given" in given


def test_servers_are_counted_and_what_keeps_the_trainer_busy_is_said(perl):
    servers = ("rollout.backend=vllm-server", "rollout.servers=[http://a:8000,http://b:8000]", "engine.device=auto")
    found = planned(perl("quickstart", *servers, "engine.threads=null", "--gpu", "H100", "--json"))
    assert found["serving"]["engines"] == 2
    assert found["serving"]["samples_to_keep_the_trainer_busy"] is None  # a tiny model trains faster than any server
    column = found["strategies"]["ddp"]
    assert column["process_flops"]["rollouts"] == 0
    assert column["bytes"]["synced"] == 2 * found["trained_parameters"]
    text = perl("quickstart", *servers, "engine.threads=null", "--gpu", "H100").out
    assert "2 cannot keep the trainer busy" in text


@pytest.mark.parametrize("served", [False, True], ids=["in the process", "servers"])
def test_what_a_generation_takes_is_divided_by_the_steps_that_it_serves(perl, served):
    servers = ("rollout.backend=vllm-server", "rollout.servers=[http://a:8000]", "engine.device=auto")
    further = (*servers, "engine.threads=null") if served else ON_TWO
    once, twice = (
        planned(perl("quickstart", *further, "--gpu", "H100", f"train.num_iterations={count}", "--json"))["strategies"]
        for count in (1, 2)
    )
    for strategy in STRATEGIES:
        one, two = once[strategy], twice[strategy]
        for part in ("rollouts", "verifier", "sync"):
            halved = [value / 2 for value in one["seconds"][part]["range"]]
            assert two["seconds"][part]["range"] == pytest.approx(halved)
        for name in ("gathered_for_rollouts", "synced"):
            assert two["bytes"][name] == one["bytes"][name] / 2
        assert two["process_flops"]["rollouts"] == one["process_flops"]["rollouts"] / 2
        assert two["process_flops"]["training"] == one["process_flops"]["training"]
        assert two["bytes"]["averaged"] == one["bytes"]["averaged"]
        assert two["memory"] == one["memory"]


def test_a_run_that_was_made_gives_its_lengths(perl, tmp_path):
    rows = [{"completions/mean_length": 12.0, "completions/max_length": 30.0, "step_time": 1.5}]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = planned(perl("quickstart", "--run", str(tmp_path), "--json"))
    assert (found["tokens"]["completion"], found["tokens"]["longest_completion"]) == (12, 30)
    assert "measured" in found["tokens"]["source"]
    assert "1.5 s a step of that run" in perl("quickstart", "--run", str(tmp_path)).out


def test_what_is_measured_takes_the_place_of_data_sheets(perl):
    found = planned(perl("quickstart", "--measure", "--json"))
    assert set(found["measured"]) == {"products", "bandwidth", "token"}
    assert all(value > 0 for value in found["measured"].values())
    seconds = found["strategies"]["ddp"]["seconds"]
    assert {name for name, part in seconds.items() if part["measured"]} == {"rollouts", "training"}


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("--processes", "200"), ("train.prompts_per_step", "64 completions", "200", "at most 64 processes")),
        (("--processes", "3"), ("train.prompts_per_step", "64 completions", "3 processes")),
        (("--gpu", "h1000"), ("--gpu", "h1000", "did you mean H100")),
        ((*ON_TWO, "--nodes", "3"), ("--nodes", "2 processes on 3 nodes")),
        (("--completion-tokens", "100"), ("--completion-tokens", "1 to 64")),
        (("--run", "nowhere"), ("nowhere", "not a run folder")),
        (("peft.method=loraa",), ("peft.method", "did you mean lora")),
    ],
)
def test_what_cannot_run_is_refused_in_one_line(perl, arguments, parts):
    said = perl("quickstart", *arguments)
    assert said.code == 2
    assert said.err.count("\n") == 1, said.err
    for part in parts:
        assert part in said.err


def flops_of(said: Said) -> dict[str, float]:
    return planned(said)["strategies"]["ddp"]["process_flops"]


@pytest.mark.parametrize(
    ("more", "strategy"),
    [((), "ddp"), ((*ON_TWO, "--strategy", "zero2"), "zero2"), (("engine.device=auto", *ON_TWO), "ddp")],
    ids=["a CPU", "two processes", "GPUs"],
)
def test_a_dry_run_says_the_memory_and_the_time_of_the_plan(perl, more, strategy):
    said = perl("quickstart", *more, "--dry-run", command="train")
    assert said.code == 0, said.err
    (needs,) = [line for line in said.out.splitlines() if line.startswith("# needs ")]
    (time,) = [line for line in said.out.splitlines() if line.startswith("# time ")]
    found = planned(perl("quickstart", *more, "--json"))["strategies"][strategy]
    shown = re.search(r"([\d.]+) MiB( a process \(\w+\))? at least, fits", needs)
    assert float(shown[1]) == pytest.approx(found["memory"]["least"] / 2**20, abs=0.051)
    assert (shown[2] is not None) == ("--processes" in more)
    assert ("of GPUs it needs one from 16 GB" in needs) == ("engine.device=auto" in more)
    low, high = re.search(r"([\d.e-]+) to ([\d.e-]+) s a step", time).groups()
    assert [float(low), float(high)] == pytest.approx(found["step_seconds"], rel=0.05)
    first, last = (60 * int(m) + int(s) for m, s in re.findall(r"(\d+):(\d\d)", time))
    assert [first, last] == pytest.approx([50 * seconds for seconds in found["step_seconds"]], abs=0.51)


def test_what_runs_beside_the_policy_is_counted(perl):
    plain = flops_of(perl("quickstart", "algorithm=bnpo", "--json"))
    greedy = flops_of(perl("quickstart", "algorithm=remax", "--json"))
    assert greedy["rollouts"] == pytest.approx(plain["rollouts"] * 9 / 8)  # one more for each 8
    assert greedy["training"] == plain["training"]
    critic = flops_of(perl("quickstart", "algorithm=ppo", "--json"))
    # The same layers forward and backward, and once more forward, without the head.
    assert 1.5 * plain["training"] < critic["training"] < 2.5 * plain["training"]
    assert critic["scoring"] > plain["scoring"]
    taught = flops_of(perl("quickstart", "algorithm=opd", "teacher.hint=It is {answer}.", "--json"))
    assert 1.2 * plain["training"] < taught["training"] < 2 * plain["training"]
    assert taught["rollouts"] == plain["rollouts"]


@pytest.mark.parametrize("command", ["plan", "train"])
def test_the_options_for_processes_are_checked_as_a_recipes_keys_before_torch_is_imported(command):
    mistakes = {
        ("--processes", "two"): ("engine.processes", "whole number", "'two'"),
        ("--processes", "0"): ("engine.processes", "1", "not 0"),
        ("--strategy", "fdsp2"): ("engine.strategy", "did you mean fsdp2?"),
    }
    code = "import sys; from perl.cli.commands import run; "
    code += f"codes = [run(['{command}', 'quickstart', *given], 'perl') for given in {list(mistakes)}]; "
    code += "assert codes == [2, 2, 2]; assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("error")]
    for line, parts in zip(lines, mistakes.values(), strict=True):
        assert all(part in line for part in parts), line
