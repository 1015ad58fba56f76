"""What runs on a GPU only, without one: each call of torch.cuda under a stand-in for it, and what each GPU is given."""

import ast
import functools
import importlib.util
import inspect
import re
import sys
import types
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import perl
from perl.errors import ModelError
from perl.evaluation.drawing.request import EvalSettings
from perl.evaluation.drawing.request import _engine as engine_of_evaluation
from perl.packing.attention import KernelCall, machine_of, why_by_segment
from perl.packing.head import memory_of, tile_rows
from perl.packing.in_step import InStep
from perl.packing.memory import free_bytes
from perl.policy.model import _check_spread, load_base, load_tokenizer
from perl.policy.quantised import half_precision, has_bfloat16
from perl.recipe import load_recipe
from perl.recipe.rollout_section import RolloutSection
from perl.recipe.sections import ModelSection
from perl.rollouts.engine import EngineSampling, Request
from perl.rollouts.hf_engine import TransformersEngine
from perl.rollouts.vllm import in_process
from perl.run.devices import processor_name
from perl.trainer.arguments.rollout_choice import choose_backend
from perl.trainer.step.optimizer_step import OptimizerStep
from perl.training import difficulty, measured_rates
from perl.training.hardware import GIB, HARDWARE, this_machine
from tests.trainer import test_optimizer_step as steps

PACKAGE = Path(perl.__file__).parent
GPU = torch.device("cuda")
# Each function that calls torch.cuda, and the test that runs all of its calls; the fixture ``cuda`` sees that it does.
CALLS = {
    "evaluation/evaluate.py evaluate": "test_random_states_of_all_gpus_are_afterwards_what_they_were",
    "evaluation/drawing/request.py _engine": "test_an_engine_is_chosen_by_whether_there_is_a_gpu",
    "packing/attention.py machine_of": "test_what_a_gpu_is_given",
    "packing/in_step.py InStep.run": "test_a_process_without_memory_gives_it_back_and_stays_in_step",
    "packing/memory.py free_bytes": "test_memory_of_a_sleeping_engine_is_not_free_and_the_allocators_is",
    "policy/model.py _check_spread": "test_parts_of_a_base_beside_the_gpus_are_refused",
    "policy/quantised.py has_bfloat16": "test_what_a_gpu_is_given",
    "rollouts/hf_engine.py TransformersEngine.start": "test_a_batch_that_did_not_fit_gives_its_memory_back",
    "rollouts/vllm/in_process.py InProcessEngine._wake": "test_vllm_sleeps_wakes_and_ends_with_the_memory_there",
    "rollouts/vllm/in_process.py InProcessEngine.close": "test_vllm_sleeps_wakes_and_ends_with_the_memory_there",
    "rollouts/vllm/in_process.py _free_bytes": "test_vllm_sleeps_wakes_and_ends_with_the_memory_there",
    "rollouts/vllm/in_process.py module": "test_vllm_gets_and_leaves_the_random_states_of_all_gpus",
    "run/devices.py processor_name": "test_what_a_gpu_is_given",
    "trainer/step/log_prob_passes.py LogProbPasses._score_all": "test_what_did_not_fit_gives_its_memory_back",
    "trainer/step/optimizer_step.py OptimizerStep._train_critic": "test_a_critic_that_did_not_fit_gives_memory_back",
    "trainer/step/optimizer_step.py OptimizerStep.run_window": "test_what_did_not_fit_gives_its_memory_back",
    "trainer/arguments/rollout_choice.py choose_backend": "test_an_engine_is_chosen_by_whether_there_is_a_gpu",
    "training/difficulty.py _engine": "test_an_engine_is_chosen_by_whether_there_is_a_gpu",
    "training/difficulty.py pass_rates": "test_random_states_of_all_gpus_are_afterwards_what_they_were",
    "training/hardware.py this_machine": "test_a_card_that_is_not_listed_is_taken_for_one_of_its_memory",
    "training/measured_rates.py measure_rates": "test_a_model_that_free_memory_does_not_hold_is_not_measured",
    "training/new_recipe.py new_recipe": "test_a_recipe_is_for_the_gpu_that_is_here_or_for_the_cpu",
}


@functools.cache
def calls_in_package() -> dict[str, set[tuple[str, int, str]]]:
    """File and function -> file, line and name of what it takes of torch.cuda."""
    found = defaultdict(set)

    def look(node, path, where):
        for child in ast.iter_child_nodes(node):
            inside = [*where, child.name] if isinstance(child, ast.FunctionDef | ast.ClassDef) else where
            if isinstance(child, ast.Attribute) and ast.unparse(child.value) == "torch.cuda":
                place = f"{path.relative_to(PACKAGE).as_posix()} {'.'.join(inside) or 'module'}"
                found[place].add((str(path), child.lineno, child.attr))
            look(child, path, inside)

    for path in PACKAGE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        # Under another name it would not be found.
        assert not re.search(r"(from|import) torch\.cuda|from torch import .*\bcuda\b|torch\.cuda(?!\.\w)", text), path
        if "torch.cuda." in text:
            look(ast.parse(text), path, [])
    return found


def test_every_call_of_torch_cuda_has_a_test_that_runs_it():
    assert calls_in_package().keys() == CALLS.keys()
    assert all("cuda" in inspect.signature(globals()[test]).parameters for test in CALLS.values())


@pytest.fixture
def cuda(monkeypatch, request):
    """Stands for torch.cuda, real but for what a test puts into it; of that it notes who takes it, by file and line."""
    real, taken = torch.cuda, set()

    class StandIn(types.ModuleType):
        def __getattribute__(self, name):
            own = super().__getattribute__("__dict__")
            if name not in own:
                return getattr(real, name)
            caller = sys._getframe(1)
            taken.add((caller.f_code.co_filename, caller.f_lineno, name))
            return own[name]

    monkeypatch.setattr(torch, "get_device_module", inspect.unwrap(torch.get_device_module))  # which keeps the real one
    monkeypatch.setattr(torch, "cuda", StandIn("torch.cuda"))
    yield torch.cuda
    for place in (place for place, test in CALLS.items() if test == request.function.__name__):
        assert calls_in_package()[place] <= taken, f"{place}: {calls_in_package()[place] - taken} did not run"


def as_on(cuda, monkeypatch, seen, capability, gib, hip=None) -> None:
    """What torch says of a GPU."""
    properties = SimpleNamespace(total_memory=gib * GIB, major=capability[0], minor=capability[1])
    monkeypatch.setattr(sys.modules["torch.cuda"], "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.version, "cuda", None if hip else "13.0")
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    cuda.is_available, cuda.current_device = (lambda: True), (lambda: 0)
    cuda.get_device_name, cuda.get_device_capability = (lambda *_: seen), (lambda *_: capability)
    cuda.get_device_properties = lambda *_: properties
    cuda.is_bf16_supported = sys.modules["torch.cuda"].is_bf16_supported  # torch's own, which asks for the properties


# Name, capability, GiB, ROCm; row of the table of hardware; why not the kernel; whether the kernel takes heads of 200;
# tokens of a tile of logits with a vocabulary of 151,936.
GPUS = [
    ("Tesla V100-SXM2-16GB", (7, 0), 15.8, None, None, "7.0, below 8.0", False, 64),
    ("Tesla T4", (7, 5), 14.6, None, "T4", "7.5, below 8.0", False, 64),
    ("NVIDIA A100-SXM4-80GB", (8, 0), 79.2, None, "A100 80GB", None, True, 384),
    ("NVIDIA A100-PCIE-40GB", (8, 0), 39.4, None, "A100 40GB", None, True, 256),
    ("NVIDIA A10", (8, 6), 22.0, None, "A10", None, False, 128),
    ("NVIDIA L4", (8, 9), 22.0, None, "L4", None, False, 128),
    ("NVIDIA GeForce RTX 4090", (8, 9), 23.5, None, "RTX 4090", None, False, 128),
    ("NVIDIA GeForce RTX 4090 Laptop GPU", (8, 9), 15.7, None, None, None, False, 64),
    ("NVIDIA H100 80GB HBM3", (9, 0), 79.1, None, "H100", None, True, 384),
    ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", (9, 0), 9.8, None, None, None, True, 64),
    ("NVIDIA B200", (10, 0), 178.4, None, None, None, True, 384),
    ("NVIDIA GeForce RTX 5090", (12, 0), 31.4, None, None, None, False, 192),
    ("AMD Instinct MI250X", (9, 0), 64.0, "7.1", None, "ROCm", False, 384),  # gfx90a
    ("AMD Instinct MI300X", (9, 4), 191.5, "7.1", None, "ROCm", False, 384),  # gfx942
    ("AMD Radeon RX 7900 XTX", (11, 0), 24.0, "7.1", None, "ROCm", False, 128),  # gfx1100
]


@pytest.mark.parametrize(
    ("seen", "capability", "gib", "hip", "row", "why", "wide", "tile"), GPUS, ids=[gpu[0] for gpu in GPUS]
)
def test_what_a_gpu_is_given(cuda, monkeypatch, seen, capability, gib, hip, row, why, wide, tile):  # noqa: PLR0913
    as_on(cuda, monkeypatch, seen, capability, gib, hip)
    bfloat16 = capability >= (8, 0)
    for dtype, size, runs in ((torch.float32, 128, False), (torch.float16, 200, wide), (torch.bfloat16, 128, not why)):
        reason = why_by_segment(machine_of(GPU), dtype, size, size, KernelCall(grouped=True))
        assert (reason is None) == runs
    assert (why or "") in (reason or "")
    assert has_bfloat16(GPU) == bfloat16
    assert half_precision(None, GPU) == half_precision(torch.float32, GPU)
    assert half_precision(None, GPU) == (torch.bfloat16 if bfloat16 else torch.float16)
    assert half_precision(torch.float16, GPU) == torch.float16
    here = this_machine()
    assert (here.name, here.memory, here.bfloat16) == (row or seen, gib * GIB, bfloat16)
    assert row is None or here.bandwidth == HARDWARE[row].bandwidth
    assert processor_name(GPU) == seen
    memory = inspect.unwrap(memory_of)(GPU)
    assert memory == int(gib * GIB)
    assert tile_rows(151_936, memory) == tile


def test_a_card_that_is_not_listed_is_taken_for_one_of_its_memory(cuda, monkeypatch):
    as_on(cuda, monkeypatch, "NVIDIA L40S", (8, 9), 44.4)
    assert this_machine().source == "assumed as of A100 80GB"
    assert this_machine().peak == HARDWARE["A100 80GB"].peak
    cuda.is_available = lambda: False
    assert this_machine() == HARDWARE["A100 80GB"]


def test_memory_of_a_sleeping_engine_is_not_free_and_the_allocators_is(cuda):
    total, reserved, allocated, cache = 80 * GIB, 20 * GIB, 3 * GIB, 26 * GIB
    cuda.mem_get_info = lambda: (total - reserved, total)
    cuda.memory_reserved, cuda.memory_allocated = (lambda: reserved), (lambda: allocated)
    assert free_bytes(0) == total - allocated
    assert free_bytes(cache) == total - allocated - cache


class ReachedError(Exception):
    """What comes next is of no interest."""


def reach(*_, **__):
    raise ReachedError


def test_a_model_that_free_memory_does_not_hold_is_not_measured(cuda, monkeypatch):
    """Its weights may take 0.4 of that."""
    shape = SimpleNamespace(model=None, types=None)
    for name, value in {"accelerator": GPU, "shape_of": shape, "weight_bytes": 10}.items():
        monkeypatch.setattr(measured_rates, name, lambda *_, value=value, **__: value)
    monkeypatch.setattr(measured_rates, "memory_on", reach)
    setup = SimpleNamespace(strategies=["ddp"], device=HARDWARE["T4"])
    for free, error in ((24, ModelError), (26, ReachedError)):
        cuda.mem_get_info = lambda free=free: (free, 80)
        with pytest.raises(error):
            measured_rates.measure_rates(None, setup)


def test_an_engine_is_chosen_by_whether_there_is_a_gpu(cuda, monkeypatch):
    monkeypatch.setattr("perl.recipe.rollout_section.Capabilities.installed", True)
    for name in ("check_served", "choose_form", "check_version"):
        monkeypatch.setattr(f"perl.trainer.arguments.rollout_choice.{name}", lambda *_: None)
    monkeypatch.setattr("importlib.metadata.version", lambda _: "")
    recipe, on_cpu = (load_recipe("quickstart", [f"engine.device={device}"]) for device in ("auto", "cpu"))
    args = SimpleNamespace(rollout_backend="auto", use_transformers_continuous_batching=False, use_cpu=False)
    cpu_args = SimpleNamespace(**{**vars(args), "use_cpu": True})
    for there, backend in ((True, "vllm"), (False, "transformers")):
        cuda.is_available = lambda there=there: there
        found = [
            engine_of_evaluation(EvalSettings()),
            choose_backend(RolloutSection(), SimpleNamespace(args=args, policy=None)),
            difficulty._engine(recipe, RolloutSection()),
        ]
        assert [how.backend for how in found] == [backend] * 3
        chosen_for_cpu = [
            engine_of_evaluation(EvalSettings(device="cpu")),
            choose_backend(RolloutSection(), SimpleNamespace(args=cpu_args, policy=None)),
            difficulty._engine(on_cpu, RolloutSection()),
        ]
        assert [how.backend for how in chosen_for_cpu] == ["transformers"] * 3


@pytest.mark.parametrize("there", [True, False])
def test_a_recipe_is_for_the_gpu_that_is_here_or_for_the_cpu(cuda, monkeypatch, there):
    cuda.is_available = lambda: there
    monkeypatch.setattr(f"perl.training.new_recipe.{'this_machine' if there else 'cpu'}", reach)
    with pytest.raises(ReachedError):
        perl.new_recipe("sandbox:base", "sandbox:chain")


def test_random_states_of_all_gpus_are_afterwards_what_they_were(cuda, monkeypatch, tmp_path):
    states = {0: "first", 1: "second"}
    cuda.device_count, cuda.get_rng_state = (lambda: 2), states.get
    cuda.set_rng_state = lambda state, device: states.update({device: state})

    def draw(*_, **__):
        states.update({0: "moved", 1: "moved"})
        raise ReachedError

    monkeypatch.setattr("perl.evaluation.evaluate.plan_adapters", draw)
    with pytest.raises(ReachedError):
        perl.evaluate(None, base="sandbox:base", tasks=["sandbox:addition"])
    assert states == {0: "first", 1: "second"}
    for name in ("plan_of", "_subject", "_evaluation"):
        monkeypatch.setattr(difficulty, name, lambda *_: SimpleNamespace(subject=None, device=None))
    monkeypatch.setattr(difficulty.BaseInMemory, "policies", draw)
    with pytest.raises(ReachedError):
        difficulty.pass_rates(load_recipe("quickstart"), 1, tmp_path)
    assert states == {0: "first", 1: "second"}


def test_parts_of_a_base_beside_the_gpus_are_refused(cuda):
    base = SimpleNamespace(hf_device_map={"model.layers.0": 0, "model.layers.1": "cpu"})
    cuda.is_available = lambda: False
    _check_spread(base)
    cuda.is_available = lambda: True
    with pytest.raises(ModelError, match=r"1 of 2 parts .* the first is model\.layers\.1"):
        _check_spread(base)
    _check_spread(SimpleNamespace(hf_device_map={"": 0}))


@pytest.fixture
def events(cuda):
    """Notes what is called; the cache is emptied outside of a handler, whose error would hold the tensors of a pass."""
    found = []

    def empty():
        assert sys.exc_info() == (None, None, None)
        found.append("empty")

    cuda.empty_cache = empty
    return found


def noting(events, *names):
    return {name: lambda *_, name=name, **__: events.append(name) for name in names}


def test_what_did_not_fit_gives_its_memory_back(cuda, events, caplog, monkeypatch):  # noqa: ARG001
    with pytest.warns(FutureWarning, match="gradient_checkpointing"):  # TRL's own
        steps.test_activations_are_computed_again_before_a_run_ends_for_want_of_memory(caplog)
    assert set(events) == {"empty"}
    events.clear()
    steps.test_rollouts_that_do_not_fit_are_scored_in_shorter_passes_with_the_same_numbers(caplog, monkeypatch)
    assert len(events) == caplog.text.count("rollouts are scored again with")


def test_a_critic_that_did_not_fit_gives_memory_back(cuda, events):  # noqa: ARG001
    fits = iter([False, True])
    critic = noting(events, "rehearse", "drop_gradients", "step")
    critic = SimpleNamespace(**critic, rows_with_value=list, accumulate=lambda _: next(fits))
    passes = SimpleNamespace(plan=lambda *_: [], tokens=8)
    step = {"_critic": critic, "_passes": passes, "_any": bool, **noting(events, "_save_memory")}
    OptimizerStep._train_critic(SimpleNamespace(**step), [])
    assert events == ["rehearse", "drop_gradients", "_save_memory", "empty", "rehearse", "step"]


def test_a_process_without_memory_gives_it_back_and_stays_in_step(cuda, events):  # noqa: ARG001
    notes = noting(events, "a+", "a-", "b+", "b-", "c+", "c-")
    first, *others = (SimpleNamespace(unshard=notes[f"{n}+"], reshard=notes[f"{n}-"]) for n in "abc")
    step = object.__new__(InStep)
    base = SimpleNamespace(**noting(events, "reset_iter_state"))
    vars(step).update(_base=base, _modules=[], _begun=[], _orders={"training": (first, *others)})

    def cramped():
        step._begun.append(first)
        raise torch.OutOfMemoryError

    assert step.run("training", [cramped, reach]) is None
    assert " ".join(events) == "reset_iter_state empty b+ b- c+ c- a+ a- b+ b- c+ c-"


def test_a_batch_that_did_not_fit_gives_its_memory_back(cuda, events):  # noqa: ARG001
    base, rows = load_base(ModelSection(), torch.device("cpu")), []

    def cramped(_, __, named):
        rows.append(named["input_ids"].size(0))
        if rows[-1] > 1:
            raise torch.OutOfMemoryError

    base.register_forward_pre_hook(cramped, with_kwargs=True)
    engine = TransformersEngine(base, load_tokenizer(ModelSection()), 4)
    sampling = EngineSampling(temperature=1.0, max_completion_length=2, end_token_ids=(1,))
    groups = engine.start([Request((5, 6, 7 + seed), 1, seed) for seed in range(4)], sampling).result()
    assert (len(groups), rows[:3], len(events)) == (4, [4, 2, 1], 2)


def test_vllm_sleeps_wakes_and_ends_with_the_memory_there(cuda, events):
    free = iter([10, 35])
    cuda.is_available, cuda.mem_get_info = (lambda: True), (lambda: (next(free), 80))
    core = SimpleNamespace(engine_core=SimpleNamespace(batch_queue=[]), **noting(events, "shutdown"))
    calls = noting(events, "sleep", "release_kv_cache_memory", "wake_up")
    engine = object.__new__(in_process.InProcessEngine)
    vars(engine).update(_llm=SimpleNamespace(llm_engine=SimpleNamespace(engine_core=core), **calls), _settings=[])
    vars(engine).update(_sleeps=True, _asleep=False, _own_group=True)
    engine.sleep()
    assert engine.asleep_bytes == 35 - 10
    engine._wake()
    engine._wake()
    assert engine.asleep_bytes == 0
    engine.close()
    engine.close()
    assert events == ["sleep", "release_kv_cache_memory", "empty", "wake_up", "shutdown", "empty"]
    cuda.is_available = lambda: False
    assert in_process._free_bytes() == 0


def test_vllm_gets_and_leaves_the_random_states_of_all_gpus(cuda):
    states = ["first", "second"]
    cuda.get_rng_state_all, cuda.set_rng_state_all = states.copy, lambda found: states.__setitem__(slice(None), found)
    spec = importlib.util.spec_from_file_location("read_again", in_process.__file__)  # it takes both as it is read
    again = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(again)
    engine = object.__new__(again.InProcessEngine)
    engine._settings = []
    for vllms in (["first", "second"], ["of", "vLLM"]):
        with engine._as_vllm():
            assert states == vllms
            states[:] = ["of", "vLLM"]
        assert states == ["first", "second"]
