"""A trainer that samples from real vLLM servers: from its policy, at every step, whatever happens to them."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import perl
from perl import PeftGRPOTrainer, PeftRLConfig
from perl.errors import BrokenPromiseError
from perl.evaluation.drawing.request import EvalSettings
from perl.evaluation.scoring.results import read_results
from perl.policy.fingerprint import base_fingerprint
from perl.rewards import accuracy_reward
from perl.sandbox import BASE_FOLDER, load_problems
from tests import warm
from tests.ports import free_port
from tests.servers import VllmProcess, absent
from tests.trainer.test_trainer import problems

SMALL = {
    "use_cpu": True,
    "prompts_per_step": 2,
    "num_generations": 4,
    "per_device_train_batch_size": 8,
    "max_completion_length": 24,
    "max_steps": 3,
    "learning_rate": 1e-2,
    "lr_scheduler_type": "constant",
    "report_to": [],
    "save_strategy": "no",
    "disable_tqdm": True,
}


UNTIED = "untied"


@pytest.fixture(scope="module")
def own_server(tmp_path_factory):
    """Of this module's own: it takes weights, and of adapters the part that is about ``o_proj``; folder and address.

    Its base has a head of its own: vLLM for CPUs keeps a packed copy of one that is tied to the embeddings, and cannot
    be given another.
    """
    if absent():
        pytest.skip(absent())
    folder = tmp_path_factory.mktemp("own")
    untied = AutoModelForCausalLM.from_pretrained(BASE_FOLDER, dtype=torch.float32)
    untied.config.tie_word_embeddings = False
    untied.lm_head.weight = torch.nn.Parameter(untied.lm_head.weight.detach().clone())
    untied.save_pretrained(folder / UNTIED)
    AutoTokenizer.from_pretrained(BASE_FOLDER).save_pretrained(folder / UNTIED)
    lora = ("--enable-lora", "--max-lora-rank", "16", "--lora-target-modules", "o_proj")
    server = VllmProcess(folder / "server", ("--model", str(folder / UNTIED), *lora))
    try:
        yield str(folder / UNTIED), server.wait().url
    finally:
        server.kill()


class Seen:
    """A reward that gives each completion another number, so that all are trained on, and keeps the prompts."""

    __name__ = "seen"

    def __init__(self):
        self.prompts, self.count = [], 0

    def __call__(self, prompts, completions, **_):
        self.prompts.append([prompt[0]["content"] for prompt in prompts])
        self.count += len(completions)
        return [float(position % 4) for position in range(len(completions))]


def trainer(folder, urls, reward=accuracy_reward, rows=16, model="sandbox:base", **changes) -> PeftGRPOTrainer:
    args = PeftRLConfig(
        str(folder), **{**SMALL, "rollout_backend": "vllm-server", "rollout_servers": list(urls), **changes}
    )
    return PeftGRPOTrainer(model=model, reward_funcs=reward, args=args, train_dataset=problems(rows))


def logged(trained, name):
    return [row[name] for row in trained.state.log_history if name in row and "train_runtime" not in row]


def assert_sampled_from_the_policy(trained, steps=3):
    """The engine's log-probability of every token is the trainer's, at every step."""
    assert trained.state.global_step == steps
    assert len(logged(trained, "sampling/sampling_logp_difference/mean")) == steps
    assert max(logged(trained, "sampling/sampling_logp_difference/mean")) < 1e-4
    assert max(logged(trained, "sampling/sampling_logp_difference/max")) < 2e-3
    assert logged(trained, "sync/logp_diff")[:2] == pytest.approx([0, 0], abs=1e-4)
    assert logged(trained, "sampling/corrected_fraction") == [0.0] * steps
    assert logged(trained, "rollout/steps_behind") == [0.0] * steps


@pytest.mark.parametrize(
    "method", ["lora", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("pissa", "vera"))]
)
def test_every_step_samples_from_the_adapter_of_that_step(tmp_path, vllm_server, method):
    sizes = {"peft_rank": 64} if method == "vera" else {}
    trained = trainer(tmp_path, [vllm_server], Seen(), peft_method=method, beta=0.04, **sizes)
    before = base_fingerprint(trained.policy)
    trained.train()
    assert_sampled_from_the_policy(trained)
    assert base_fingerprint(trained.policy) == before
    moved = trained.policy_log_probs(*probe()) - trained.reference_log_probs(*probe())
    assert moved.abs().mean() > 1e-3  # far more than what engine and trainer differ by


def probe():
    ids = torch.tensor([[9, 4, 13, 5, 10, 15, 22, 31]])
    return ids, torch.ones_like(ids)


ATTENTION, MLP = ["q_proj", "k_proj", "v_proj", "o_proj"], ["gate_proj", "up_proj", "down_proj"]
NORMS = ["input_layernorm", "post_attention_layernorm", "q_norm", "k_norm", "norm"]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("method", "sent", "changes"),
    [
        ("dora", [*ATTENTION, *MLP], {}),
        ("ia3", [*ATTENTION[:3], "down_proj"], {}),  # vLLM has queries, keys and values in one matrix
        ("full", [*ATTENTION, *MLP, *NORMS, "embed_tokens", "lm_head"], {"learning_rate": 1e-4}),
        ("lora", ["o_proj"], {"peft_target_modules": ["o_proj"]}),
    ],
)
def test_an_engine_gets_the_weights_that_a_method_changes_or_its_factors(tmp_path, own_server, method, sent, changes):
    """Whatever it was sent before, by a training with another method."""
    model, url = own_server
    trained = trainer(tmp_path, [url], Seen(), model=model, peft_method=method, beta=0.04, **changes)
    trained.train()
    assert_sampled_from_the_policy(trained)
    tensors = [p for n, p in AutoModelForCausalLM.from_pretrained(model).named_parameters() if n.split(".")[-2] in sent]
    rank = trained.args.peft.rank or 16
    numbers = sum(rank * sum(p.shape) if method == "lora" else p.numel() for p in tensors)
    assert logged(trained, "sync/bytes") == [4.0 * numbers] * 3  # in float32


@pytest.mark.nightly
def test_an_engine_that_does_not_apply_the_adapter_ends_the_run_before_it_samples(tmp_path, own_server):
    seen, (model, url) = Seen(), own_server
    with pytest.raises(BrokenPromiseError, match="answers like the base, not like the policy"):
        trainer(tmp_path, [url], seen, model=model, peft_target_modules=["q_proj", "v_proj"]).train()
    assert not seen.prompts


def test_an_engine_with_other_weights_ends_the_run_before_it_samples(tmp_path, vllm_server):
    other = AutoModelForCausalLM.from_pretrained(BASE_FOLDER, dtype=torch.float32)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    other.save_pretrained(tmp_path / "other")
    AutoTokenizer.from_pretrained(BASE_FOLDER).save_pretrained(tmp_path / "other")
    seen = Seen()
    with pytest.raises(BrokenPromiseError, match="does not answer like the policy"):
        trainer(tmp_path / "run", [vllm_server], seen, model=str(tmp_path / "other")).train()
    assert not seen.prompts


@pytest.mark.nightly
def test_two_processes_sample_from_one_policy(tmp_path, vllm_server):
    settings = [
        "data.train.limit=8",  # two steps are an epoch
        "train.max_steps=5",
        "train.prompts_per_step=4",
        "train.num_generations=4",
        "train.per_device_train_batch_size=4",
        "train.learning_rate=1e-2",
        "rollout.max_completion_length=24",
        "rollout.backend=vllm-server",
        f"rollout.servers=[{vllm_server}]",
        "rollout.prefetch=1",
        "eval.enabled=false",
        "engine.threads=1",
    ]
    done = warm.run_distributed(["-m", "perl", "train", "quickstart", *settings, "--output", "run"], tmp_path)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["rollout/steps_behind"] for row in rows] == [0, 1, 1, 1, 1]
    assert [row["sampling/staleness/max"] for row in rows] == [0, 1, 1, 1, 1]
    assert rows[0]["sampling/sampling_logp_difference/mean"] < 1e-4
    assert [row["sync/logp_diff"] < 1e-4 for row in rows[:2]] == [True, True]


@pytest.mark.nightly
@pytest.mark.parametrize("method", ["lora", "dora"])
def test_the_command_that_is_printed_starts_a_server_that_the_recipe_can_use(tmp_path, perl_command, method):
    if absent():
        pytest.skip(absent())
    port = free_port()
    printed = perl_command("rollout", "command", "quickstart", f"peft.method={method}", "--port", str(port))
    assert printed.returncode == 0, printed.stderr
    words = printed.stdout.split()
    variables = dict(word.split("=", 1) for word in words if word.isupper() or word.split("=")[0].isupper())
    program = words[len(variables) :]
    assert program[:3] == ["python", "-m", "vllm.entrypoints.openai.api_server"]
    flags = [flag for flag in program[3:] if flag not in ("--enforce-eager", "--no-enable-chunked-prefill")]
    server = VllmProcess(tmp_path / "server", tuple(flags), variables, port)
    try:
        server.wait()
        settings = [
            "rollout.backend=vllm-server",
            f"rollout.servers=[{server.url}]",
            f"peft.method={method}",
            "train.max_steps=1",
            "eval.enabled=false",
        ]
        checked = perl_command("rollout", "check", "quickstart", *settings)
        assert checked.returncode == 0, checked.stderr
        assert server.url in checked.stdout
        assert "0.32" in checked.stdout
        trained = perl_command("train", "quickstart", *settings, "--output", "run")
        assert trained.returncode == 0, trained.stderr
    finally:
        server.kill()


TASK = "sandbox:chain"
QUESTIONS = 200  # of 500


@pytest.mark.nightly
def test_scores_between_steps_and_at_the_end_come_from_the_server(lone_server, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "perl.evaluation.tasks.task_data.load_problems", lambda name, split: load_problems(name, split)[:QUESTIONS]
    )
    monkeypatch.setattr("perl.evaluation.reporting.lighteval_installed", lambda: False)  # it takes ten seconds a policy
    recipe = {
        "extends": "quickstart",
        "train": {"max_steps": 2, "prompts_per_step": 2, "num_generations": 4, "per_device_train_batch_size": 8},
        "rollout": {"backend": "vllm-server", "servers": [lone_server], "max_completion_length": 24},
        "eval": {"tasks": [TASK], "every": 2, "k": 1, "temperature": 0.0, "max_completion_length": 24},
    }
    run = perl.train(recipe, output_dir=tmp_path / "run")
    results = read_results(run.path / "eval")
    assert results.engine["backend"] == "vllm-server"
    assert results.engine["logp_diff"] < 2e-3
    rows = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    (between,) = [row[f"eval/{TASK}/avg@1"] for row in rows if f"eval/{TASK}/avg@1" in row]
    found = results.task(TASK)
    assert between == pytest.approx(found.adapter.accuracy, abs=0.01)  # rounding may turn a greedy token
    settings = EvalSettings(preset="greedy", max_new_tokens=24, lighteval=False, batch_size=256)
    own = perl.evaluate(run.adapter, tasks=[TASK], output=tmp_path / "own", settings=settings).task(TASK)
    for who in ("base", "adapter"):
        pairs = [(getattr(a, who), getattr(b, who)) for a, b in zip(found.problems, own.problems, strict=True)]
        assert sum(one == other for one, other in pairs) >= 0.97 * len(pairs)
