"""A small model is given as many CPU threads as it is large enough for, and the process keeps the number it had."""

import pytest
import torch
from datasets import Dataset
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM

import perl
from perl.errors import DataError
from perl.evaluation.protocol import Protocol
from perl.evaluation.request import EvalSettings, plan_evaluation
from perl.policy.model import load_base, load_tokenizer
from perl.recipe.sections import ModelSection
from perl.rollouts.engine import Request
from perl.rollouts.hf_engine import TransformersEngine
from perl.run import threads
from perl.run.threads import fitting_threads, threads_for, threads_kept, use_threads
from perl.sandbox import load_problems
from perl.trainer.config import PeftRLConfig
from perl.trainer.trainer import PeftGRPOTrainer
from tests.saved_adapters import save_adapter

ALL = 4


@pytest.fixture(autouse=True)
def _a_machine_of_four_processors(monkeypatch):
    """Nobody has chosen a number of threads."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(threads, "_defaults", lambda: {ALL})
    monkeypatch.setattr(threads, "_asked", False)  # a test before may have planned a recipe that asks
    torch.set_num_threads(ALL)


def base():
    return load_base(ModelSection(), torch.device("cpu"))


def of_width(width, vocabulary=64):
    config = Qwen2Config(
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=vocabulary,
    )
    return Qwen2ForCausalLM(config)


def test_threads_grow_with_the_largest_matrix_of_a_layer_and_not_with_embeddings():
    found = []
    for width in (64, 256, 360, 364, 444, 512, 724):
        model = of_width(width)
        layers = dict(model.model.layers.named_parameters())
        largest = max(parameter.numel() for parameter in layers.values())
        assert fitting_threads(model) == min(max(1, largest // 2**18), ALL), width
        found.append(fitting_threads(model))
    assert found == [1, 1, 1, 2, 3, 4, 4]
    assert fitting_threads(of_width(32, vocabulary=40_000)) == 1
    wrapped = nn.Sequential(of_width(32, vocabulary=40_000))  # as processes of a distributed run wrap theirs
    assert fitting_threads(wrapped) == 1


def test_a_number_that_someone_chose_is_left_alone(monkeypatch):
    model = of_width(32)
    assert fitting_threads(model) == 1
    with threads_kept():
        use_threads(ALL)
        assert fitting_threads(model) == ALL
    assert fitting_threads(model) == 1
    torch.set_num_threads(3)
    assert fitting_threads(model) == 3
    torch.set_num_threads(ALL)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        with monkeypatch.context() as patch:
            patch.setenv(name, str(ALL))
            assert fitting_threads(model) == ALL


def test_afterwards_the_process_has_what_it_had():
    model = of_width(32)
    with threads_for(model):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == ALL
    with pytest.raises(RuntimeError), threads_for(model):
        raise RuntimeError
    assert torch.get_num_threads() == ALL
    with threads_kept():
        use_threads(2)
        assert torch.get_num_threads() == 2
    assert torch.get_num_threads() == ALL
    with pytest.raises(DataError):
        perl.train({"engine": {"device": "cpu", "threads": 2}, "data": {"train": "nowhere.jsonl"}})
    assert torch.get_num_threads() == ALL


def drawn(monkeypatch, count, asked=False):
    """The token ids that the sandbox's base writes with so many threads, either fitting ones or those asked for."""
    model, tokenizer = base(), load_tokenizer(ModelSection())
    seen = set()
    model.register_forward_hook(lambda *_: seen.add(torch.get_num_threads()))
    prompts = [tokenizer(problem.question)["input_ids"] for problem in load_problems("sandbox:addition", "heldout")[:8]]
    sampling = Protocol(preset="x", temperature=1.0, k=1, max_new_tokens=24).sampling(24, (tokenizer.eos_token_id,))
    requests = [Request(tuple(ids), 2, seed) for seed, ids in enumerate(prompts)]
    with monkeypatch.context() as patch:
        if asked:
            patch.setenv("OMP_NUM_THREADS", str(count))
        groups = TransformersEngine(model, tokenizer).start(requests, sampling).result()
    assert seen == {count}
    assert torch.get_num_threads() == ALL
    return [[sample.token_ids for sample in group] for group in groups]


def test_sampling_takes_fewer_threads_and_draws_the_same(monkeypatch):
    assert drawn(monkeypatch, 1) == drawn(monkeypatch, ALL, asked=True)


def test_a_script_trains_with_few_threads_and_its_rewards_have_all(tmp_path, caplog):
    in_rewards, in_model = set(), set()

    def reward(completions, **_):
        in_rewards.add(torch.get_num_threads())
        return [float(len(completion) % 3) for completion in completions]

    rows = [{"prompt": problem.question} for problem in load_problems("sandbox:addition", "train")[:8]]
    settings = {"prompts_per_step": 2, "num_generations": 2, "max_steps": 1, "max_completion_length": 8, "beta": 0.1}
    arguments = PeftRLConfig(str(tmp_path), use_cpu=True, report_to=[], disable_tqdm=True, **settings)
    trainer = PeftGRPOTrainer("sandbox:base", reward, arguments, Dataset.from_list(rows))
    trainer.model.get_base_model().model.register_forward_hook(lambda *_: in_model.add(torch.get_num_threads()))
    trainer.train()
    assert in_rewards == {ALL}
    assert 1 in in_model
    assert torch.get_num_threads() == ALL
    (line,) = [message for message in caplog.messages if "CPU threads" in message]
    assert "1 of 4" in line
    assert "OMP_NUM_THREADS" in line


def planned(adapter, **settings):
    chosen = EvalSettings(limit=1, max_new_tokens=4, lighteval=False, device="cpu", **settings)
    return plan_evaluation(str(adapter), None, ["sandbox:addition"], 1, None, "out", chosen)


def test_an_evaluation_computes_with_the_threads_that_are_set_or_else_the_runs_or_else_fitting_ones(
    tmp_path, monkeypatch
):
    seen = []
    start = TransformersEngine.start

    def noted(self, *arguments):
        seen.append(fitting_threads(self._model))
        return start(self, *arguments)

    run = tmp_path / "run"
    save_adapter(run / "adapter")
    assert planned(run / "adapter").threads is None
    (run / "run.json").write_text('{"status": "done"}', encoding="utf-8")
    for asked, taken in ((2, 2), (64, ALL)):
        (run / "recipe.yaml").write_text(f"engine: {{threads: {asked}}}\n", encoding="utf-8")
        assert planned(run).threads == taken
        assert planned(run / "adapter").threads == taken
    assert planned(run, threads=3).threads == 3

    monkeypatch.setattr(TransformersEngine, "start", noted)
    save_adapter(tmp_path / "adapter")
    scores = []
    for count in (None, 2, 3):
        chosen = EvalSettings(
            limit=2, max_new_tokens=12, lighteval=False, base_cache=False, device="cpu", threads=count
        )
        results = perl.evaluate(tmp_path / "adapter", None, ["sandbox:addition"], 2, output=f"{count}", settings=chosen)
        scores.append(results.task("sandbox:addition").problems)
        assert torch.get_num_threads() == ALL
    assert seen == [1, 1, 2, 2, 3, 3]
    assert scores[0] == scores[1] == scores[2]
