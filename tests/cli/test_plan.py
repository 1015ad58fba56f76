"""``perl plan`` prints what a run costs, loads no weights, and refuses what cannot run in a line."""

import json
import re
import subprocess
import sys
from functools import partial

import pytest
from transformers import AutoModelForCausalLM

from perl.recipe.sections import STRATEGIES
from perl.training import measured_rates

LOADED = AutoModelForCausalLM.from_pretrained
ON_TWO = ("train.per_device_train_batch_size=null", "--processes", "2")


@pytest.fixture(autouse=True)
def _no_weights(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("weights are loaded")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", refuse)


@pytest.fixture
def plan(perl):
    return partial(perl, "plan", "quickstart")


def planned(said) -> dict:
    assert (said.code, said.err) == (0, "")
    return json.loads(said.out)


def test_all_strategies_are_compared_and_the_one_that_is_asked_for_stands_alone(plan):
    found = planned(plan(*ON_TWO, "--json"))
    assert tuple(found["strategies"]) == STRATEGIES
    assert (found["processes"], found["completions_per_step"]) == (2, 64)
    ddp, fsdp2 = (found["strategies"][name]["memory"] for name in STRATEGIES)
    assert fsdp2["base"] == ddp["base"] / 2
    trained = found["trained_parameters"]
    assert ddp["optimizer"] == 8 * trained
    assert ddp["gradients"] == 4 * trained
    for name in ("--strategy", "engine.strategy=fsdp2"):
        asked = (name, "fsdp2") if name.startswith("--") else (name,)
        alone = planned(plan(*ON_TWO, *asked, "--json"))
        assert alone["strategies"] == {"fsdp2": found["strategies"]["fsdp2"]}


def test_within_nodes_only_gradients_cross_and_with_one_copy_of_the_base_every_pass_does(plan):
    on_four = (*ON_TWO[:-1], "4", "--per-node", "2")
    found = planned(plan(*on_four, "--json"))
    ddp, node = (found["strategies"][name] for name in STRATEGIES)
    assert (found["processes_of_node"], ddp["processes_of_copy"], node["processes_of_copy"]) == (2, 1, 2)
    gradients = 2 * 3 / 4 * 4 * found["trained_parameters"]  # a ring of four, float32
    assert ddp["bytes_into_node"] == node["bytes_into_node"] == gradients
    said = plan(*on_four, "--strategy", "fsdp2", "engine.shards=all")
    assert re.search(r"^parts of the base +4$", said.out, flags=re.MULTILINE)
    everywhere = planned(plan(*on_four, "--strategy", "fsdp2", "engine.shards=all", "--json"))["strategies"]["fsdp2"]
    assert everywhere["memory"]["base"] == node["memory"]["base"] / 2
    # Of whole bases: one a token that is written, one for the reference, two a pass but for the head, which stays.
    scored = found["tokens"]["longest_completion"] + 1
    gathered = (everywhere["bytes_into_node"] - gradients) / (3 / 4 * ddp["memory"]["base"])
    assert scored + node["micro_batches"] < gathered < scored + 2 * node["micro_batches"]
    assert re.search(r"^into a node \(derived\) .*iB$", said.out, flags=re.MULTILINE)
    said = plan(*on_four[:-1], "3")
    assert (said.code, "4 processes do not make nodes of 3" in said.err) == (2, True)


def test_the_text_says_what_is_derived_and_names_the_bottleneck(plan):
    said = plan("--gpu", "t4")
    assert (said.code, said.err) == (0, "")
    for part in ("of a process (derived)", "seconds (derived)", "bottleneck", "fits", "T4: 14.7 GiB", "assumed: half"):
        assert part in said.out, part
    assert "measured" not in said.out
    given = plan("--completion-tokens", "20", "--gpu", "24GB").out
    assert "completions 20 on average" in given
    assert "as given" in given
    assert "L4: 22.0 GiB" in given


def test_what_servers_write_is_no_work_of_a_process_and_more_of_them_take_no_longer(plan):
    asked = ("rollout.backend=vllm-server", "engine.device=auto", "engine.threads=null", "--gpu", "H100", "--json")
    one, two = (
        planned(plan(f"rollout.servers=[{addresses}]", *asked))["strategies"]["ddp"]
        for addresses in ("http://a:8000", "http://a:8000,http://b:8000")
    )
    assert one["process_flops"]["rollouts"] == two["process_flops"]["rollouts"] == 0
    assert all(more <= fewer for more, fewer in zip(two["step_seconds"], one["step_seconds"], strict=True))


def test_a_run_that_was_made_gives_its_lengths(plan, tmp_path):
    rows = [{"completions/mean_length": 12.0, "completions/max_length": 30.0, "step_time": 1.5}]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = planned(plan("--run", str(tmp_path), "--json"))
    assert (found["tokens"]["completion"], found["tokens"]["longest_completion"]) == (12, 30)
    assert "measured" in found["tokens"]["source"]
    assert "1.5 s a step of that run" in plan("--run", str(tmp_path)).out


@pytest.mark.parametrize("weights", ["its own", "random"])
def test_what_is_measured_takes_the_place_of_data_sheets(plan, weights, monkeypatch, tmp_path):
    if weights == "random":
        monkeypatch.setattr(measured_rates, "resolve_model", lambda _: str(tmp_path))
    else:
        monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", LOADED)
    said = plan("--measure", "train.max_steps=20")
    assert (said.code, said.err) == (0, "")
    assert re.search(
        r"^measured [\d.,]+ GFLOP/s in passes of a process, [\d.,]+ ms for a token", said.out, re.MULTILINE
    )
    assert "seconds (measured)" in said.out


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("--processes", "200"), ("train.prompts_per_step", "64 completions", "200", "at most 64 processes")),
        (("--gpu", "h1000"), ("--gpu", "h1000", "did you mean H100")),
        (("--completion-tokens", "100"), ("--completion-tokens", "1 to 64")),
        (("--run", "nowhere"), ("nowhere", "no step of a run")),
        (("peft.method=loraa",), ("peft.method", "did you mean lora")),
    ],
)
def test_what_cannot_run_is_refused_in_one_line(plan, arguments, parts):
    said = plan(*arguments)
    assert said.code == 2
    assert said.err.count("\n") == 1, said.err
    for part in parts:
        assert part in said.err


def flops_of(said) -> dict[str, float]:
    return planned(said)["strategies"]["ddp"]["process_flops"]


@pytest.mark.parametrize(
    ("more", "strategy"),
    [((), "ddp"), (("engine.device=auto", *ON_TWO, "--strategy", "fsdp2"), "fsdp2")],
    ids=["a CPU", "two GPUs"],
)
def test_a_dry_run_says_the_memory_and_the_time_of_the_plan(plan, perl, more, strategy):
    said = perl("train", "quickstart", *more, "--dry-run")
    assert said.code == 0, said.err
    (needs,) = [line for line in said.out.splitlines() if line.startswith("# needs ")]
    (time,) = [line for line in said.out.splitlines() if line.startswith("# time ")]
    found = planned(plan(*more, "--json"))["strategies"][strategy]
    shown = re.search(r"([\d.]+) MiB( a process \(\w+\))? at least, fits", needs)
    assert float(shown[1]) == pytest.approx(found["memory"]["least"] / 2**20, abs=0.051)
    assert (shown[2] is not None) == ("--processes" in more)
    assert ("of GPUs it needs one from 16 GB" in needs) == ("engine.device=auto" in more)
    low, high = re.search(r"([\d.e-]+) to ([\d.e-]+) s a step", time).groups()
    assert [float(low), float(high)] == pytest.approx(found["step_seconds"], rel=0.05)
    first, last = (60 * int(m) + int(s) for m, s in re.findall(r"(\d+):(\d\d)", time))
    assert [first, last] == pytest.approx([50 * seconds for seconds in found["step_seconds"]], abs=0.51)


def test_what_runs_beside_the_policy_is_counted(plan):
    plain = flops_of(plan("algorithm=bnpo", "--json"))
    greedy = flops_of(plan("algorithm=remax", "--json"))
    assert greedy["rollouts"] == pytest.approx(plain["rollouts"] * 9 / 8)  # one more for each 8
    assert greedy["training"] == plain["training"]
    critic = flops_of(plan("algorithm=ppo", "--json"))
    # The same layers forward and backward, and once more forward, without the head.
    assert 1.5 * plain["training"] < critic["training"] < 2.5 * plain["training"]
    assert critic["scoring"] > plain["scoring"]
    taught = flops_of(plan("algorithm=opd", "teacher.hint=It is {answer}.", "--json"))
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
