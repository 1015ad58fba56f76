"""A Mac's CPU; processes divide what a machine has; a small model gets as many threads as it is large enough for."""

import logging

import pytest
import torch
from datasets import Dataset
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM

import perl
from perl.errors import DataError, PerlError, RecipeError
from perl.evaluation.drawing.request import EvalSettings, plan_evaluation
from perl.evaluation.scoring.protocol import Protocol
from perl.policy.model import load_base, load_tokenizer
from perl.recipe import load_recipe
from perl.recipe.sections import ModelSection
from perl.rewards.process import model as process_model
from perl.rollouts.engine import Request
from perl.rollouts.hf_engine import TransformersEngine
from perl.run import devices
from perl.run.devices import accelerator, check_device, fitting_threads, threads_for, threads_kept, use_threads
from perl.run.launched import own_share
from perl.sandbox import load_problems
from perl.trainer.arguments.config import PeftRLConfig
from perl.trainer.trainer import PeftGRPOTrainer

ALL = 4


@pytest.fixture
def mac(monkeypatch):
    """What torch and transformers are told by a Mac."""
    devices._say_that_mps_is_not_used.cache_clear()
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("mps"))
    monkeypatch.setattr("transformers.training_args.is_torch_mps_available", lambda *_: True)


@pytest.mark.usefixtures("mac")
def test_everything_on_a_mac_computes_on_its_cpu_with_one_line_and_its_gpu_is_refused(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "perl"):
        runs = [PeftRLConfig(str(tmp_path), report_to=[]) for _ in range(2)]
        assert accelerator() is None
        plan = plan_evaluation(None, "sandbox:base", ["sandbox:chain"], 1, None, tmp_path, EvalSettings())
        found = {plan.device, process_model._device("auto"), *(args.device for args in runs)}
    assert {device.type for device in found} == {"cpu"}
    (line,) = [record.getMessage() for record in caplog.records]
    assert "mps" in line
    with pytest.raises(PerlError, match=r"engine\.device.*auto"):
        load_recipe("quickstart", ["engine.device=mps"])
    with pytest.raises(RecipeError, match=r"mps.*use_cpu=True"):
        check_device(torch.device("mps"))
    check_device(torch.device("cuda"))


@pytest.mark.parametrize(("count", "processes"), [(1, 1), (13, 1), (3, 2), (13, 8), (2, 8)])
def test_processes_together_take_what_there_is_and_at_least_one_each(monkeypatch, count, processes):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    shares = []
    for number in range(processes):
        monkeypatch.setenv("LOCAL_RANK", str(number))
        shares.append(own_share(count))
    assert sum(shares) == max(count, processes)
    assert max(shares) - min(shares) <= 1


@pytest.fixture
def four_processors(monkeypatch):
    """On which nobody has chosen a number of threads."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "LOCAL_WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(devices, "_defaults", lambda: {ALL})
    monkeypatch.setattr(devices, "_asked", False)  # a test before may have planned a recipe that asks
    torch.set_num_threads(ALL)


def of_width(width, vocabulary=64):
    config = Qwen2Config(
        hidden_size=width, intermediate_size=4 * width, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=4, vocab_size=vocabulary,
    )  # fmt: skip
    return Qwen2ForCausalLM(config)


@pytest.mark.usefixtures("four_processors")
def test_threads_grow_with_the_largest_matrix_of_a_layer_and_not_with_embeddings(monkeypatch):
    for width, threads in ((64, 1), (360, 1), (364, 2), (444, 3), (724, 4)):
        model = of_width(width)
        largest = max(parameter.numel() for parameter in model.model.layers.parameters())
        assert fitting_threads(model) == min(max(1, largest // 2**18), ALL) == threads
    small, large = of_width(32, vocabulary=40_000), model
    assert fitting_threads(nn.Sequential(small)) == 1  # as processes of a distributed run wrap theirs
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert fitting_threads(large) == 2
    monkeypatch.setenv("OMP_NUM_THREADS", str(ALL))
    assert fitting_threads(small) == ALL


@pytest.mark.usefixtures("four_processors")
def test_a_number_that_someone_chose_is_left_alone_and_afterwards_the_process_has_what_it_had():
    model = of_width(32)
    with threads_for(model):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == ALL
    with threads_kept():
        use_threads(2)
        assert fitting_threads(model) == torch.get_num_threads() == 2
    assert (fitting_threads(model), torch.get_num_threads()) == (1, ALL)
    torch.set_num_threads(3)
    assert fitting_threads(model) == 3
    with pytest.raises(DataError):
        perl.train({"engine": {"device": "cpu", "threads": 2}, "data": {"train": "nowhere.jsonl"}})
    assert torch.get_num_threads() == 3


def drawn(monkeypatch, count, asked=False):
    """The token ids that the sandbox's base writes with so many threads, either fitting ones or those asked for."""
    model, tokenizer = load_base(ModelSection(), torch.device("cpu")), load_tokenizer(ModelSection())
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
    return [[sample.token_ids for sample in group] for group in groups]


@pytest.mark.usefixtures("four_processors")
def test_sampling_takes_fewer_threads_and_draws_the_same(monkeypatch):
    assert drawn(monkeypatch, 1) == drawn(monkeypatch, ALL, asked=True)


@pytest.mark.usefixtures("four_processors")
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
    (line,) = [message for message in caplog.messages if "CPU threads" in message]
    assert "1 of 4" in line
    assert "OMP_NUM_THREADS" in line


def planned(adapter, **settings):
    chosen = EvalSettings(limit=1, max_new_tokens=4, lighteval=False, device="cpu", **settings)
    return plan_evaluation(str(adapter), None, ["sandbox:addition"], 1, None, "out", chosen)
