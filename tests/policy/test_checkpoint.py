"""Checkpoints count when they are whole, and a saved adapter is the trained one for plain PEFT on a fresh base."""

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, VeraConfig
from safetensors import safe_open
from safetensors.torch import load_file
from trl.trainer.utils import split_tensor_dict

from perl.errors import BrokenPromiseError
from perl.methods.anchor import anchored_layers
from perl.methods.registry import METHODS
from perl.methods.settings import adaptation
from perl.policy.attach import adapter_tensors, attach_adapter
from perl.policy.checkpoint import (
    discard_incomplete,
    is_complete,
    latest_checkpoint,
    load_policy,
    load_trainer_state,
    reference_of,
    save_policy,
    save_trainer_state,
    seal,
    step_of,
)
from perl.policy.fingerprint import base_fingerprint
from perl.policy.model import base_identity, load_base
from perl.policy.reference import token_log_probs
from perl.policy.save_adapter import reload_difference, write_adapter
from perl.recipe.sections import ModelSection, PeftSection
from perl.sandbox import BASE_FOLDER
from tests.a_few_methods import each

CPU = torch.device("cpu")
PROBE = torch.tensor([[6, 7, 78, 8, 9, 96, 10, 1], [12, 13, 14, 77, 96, 5, 78, 1]])
ADAPTERS = [name for name, method in METHODS.items() if method.config]
# Saved as the plain LoRA of twice the rank that they are: the same policy, but for the order of additions.
ANCHORED = {"pissa", "milora", "olora"}
# What PEFT itself says when it loads LN tuning of a norm it does not list, and BOFT without its CUDA extension.
plain_peft = pytest.mark.filterwarnings(
    "ignore:Unsupported layer type", "ignore:Failed to load the CUDA extension", "ignore:Setting boft_n_butterfly"
)


def checkpoint(step: int, folder: Path = Path("checkpoints"), sealed: bool = True) -> Path:
    path = folder / f"checkpoint-{step}"
    (path / "nested").mkdir(parents=True)
    (path / "weights.safetensors").write_bytes(b"0123456789")
    (path / "nested" / "state.json").write_text("{}")
    (path / "empty").touch()
    if sealed:
        seal(path)
    return path


def test_a_checkpoint_is_complete_if_it_is_sealed_and_whole():
    path = checkpoint(5, sealed=False)
    assert not is_complete(path)
    seal(path)
    assert is_complete(path)
    (path / "another").write_text("file")
    seal(path)  # again
    assert is_complete(path)
    whole_files = files(path)
    damages = {"weights.safetensors": b"012345678", "complete.json": whole_files["complete.json"][:-5]}
    for name, damage in (
        *((name, None) for name in ("weights.safetensors", "nested/state.json", "empty")),
        *damages.items(),
    ):
        (path / name).unlink() if damage is None else (path / name).write_bytes(damage)
        assert not is_complete(path), name
        (path / name).write_bytes(whole_files[name])
        assert is_complete(path)
    assert not is_complete(Path("checkpoint-3"))


def test_only_complete_checkpoints_are_found_and_survive_a_discarding():
    folder = Path("checkpoints")
    assert latest_checkpoint(Path("nowhere")) is None
    folder.mkdir()
    assert latest_checkpoint(folder) is None
    checkpoint(7).rename(folder / "checkpoint-best")
    assert latest_checkpoint(folder) is None
    for step in (9, 100, 20):
        checkpoint(step)
    assert latest_checkpoint(folder) == folder / "checkpoint-100"
    assert step_of(folder / "checkpoint-100") == 100
    (folder / "checkpoint-100" / "weights.safetensors").write_bytes(b"")
    checkpoint(101, sealed=False)
    assert latest_checkpoint(folder) == folder / "checkpoint-20"
    (folder / "notes.txt").touch()
    discard_incomplete(folder)
    kept = ["checkpoint-20", "checkpoint-9", "checkpoint-best", "notes.txt"]
    assert sorted(path.name for path in folder.iterdir()) == kept
    assert (folder / "checkpoint-best" / "weights.safetensors").is_file()


def rollouts(micro_batches: int) -> list[dict[str, torch.Tensor]]:
    """Micro-batches as TRL makes them: views of one tensor, and a number that all of them share."""
    rows = 2 * micro_batches
    whole = {
        "completion_ids": torch.arange(rows * 3).view(rows, 3),
        "advantages": torch.randn(rows),
        "kept": torch.rand(rows, 3) > 0.5,
        "transposed": torch.randn(3, rows).t(),
        "num_items_in_batch": torch.tensor(17),
    }
    return split_tensor_dict(whole, micro_batches)


def test_unused_rollouts_come_back_to_the_process_that_kept_them_as_they_were():
    assert load_trainer_state(Path(), 0, CPU) == ({}, None)  # a checkpoint of plain TRL has neither
    save_trainer_state(Path(), {"micro_step": 7}, None, rank=0)
    assert load_trainer_state(Path(), 0, CPU) == ({"micro_step": 7}, None)
    for micro_batches in (1, 2, 12):
        windows = [rollouts(micro_batches), rollouts(micro_batches)]
        for rank in (1, 0):
            save_trainer_state(Path(), {"micro_step": rank, "other": 2}, windows[rank], rank)
        for rank in (0, 1):
            counters, loaded = load_trainer_state(Path(), rank, CPU)
            assert counters == {"micro_step": 0, "other": 2}  # the main process's
            for ours, theirs in zip(loaded, windows[rank], strict=True):
                assert ours.keys() == theirs.keys()
                for name, tensor in theirs.items():
                    assert ours[name].dtype == tensor.dtype
                    assert torch.equal(ours[name], tensor)
    assert load_trainer_state(Path(), 2, CPU) == ({"micro_step": 0, "other": 2}, None)


def base():
    return load_base(ModelSection(), CPU)


def base_for(method: str):
    """In double precision where an adapter is saved in another form, so that the order of additions hardly counts."""
    return base().double() if method in ANCHORED else base()


def section(method: str, **kwargs) -> PeftSection:
    """A small adapter of the method."""
    rank = {"rank": 4} if "rank" in METHODS[method].settings else {}
    return PeftSection(method=method, **rank, kwargs=kwargs)


def policy_of(method: str = "lora", **kwargs) -> PeftModel:
    """A policy whose adapter is no longer the identity."""
    return move(attach_adapter(base_for(method), adaptation(section(method, **kwargs))))


def whole(method: str) -> list[str]:
    """Modules to train whole beside an adapter: those that the method does not adapt, by names it does not use."""
    return {"ln_tuning": ["o_proj"], "delora": ["model.norm"]}.get(method, ["norm"])


def move(policy: PeftModel, seed: int = 0) -> PeftModel:
    size = 0.5 if isinstance(policy.active_peft_config, VeraConfig) else 0.05  # VeRA's vectors scale small matrices
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter += size * torch.randn(parameter.shape, generator=generator)
    return policy.eval()


def log_probs(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return token_log_probs(model, PROBE, torch.ones_like(PROBE))


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@plain_peft
@pytest.mark.parametrize("method", each(ADAPTERS))
def test_plain_peft_loads_the_saved_adapter_on_a_fresh_base(method):
    """It is two files without a path of this machine, always the same bytes, whose header names the base."""
    Path("adapter").mkdir()
    Path("adapter/old.bin").touch()  # an older one, which is replaced
    Path(".adapter.tmp").mkdir()
    policy = policy_of(method, modules_to_save=None if method in ("lora", "oft") else whole(method))
    write_adapter(policy, Path("adapter"), "sandbox:base", "0123abc")
    assert sorted(files(Path("adapter"))) == ["adapter_config.json", "adapter_model.safetensors"]
    text = Path("adapter/adapter_config.json").read_text()
    config = json.loads(text)
    assert str(BASE_FOLDER.parent) not in text
    assert (config["base_model_name_or_path"], config["revision"]) == ("sandbox:base", "0123abc")
    assert not any(isinstance(value, str) and value.startswith("/") for value in config.values())
    fingerprint = base_fingerprint(policy)
    for folder in ("one", "other"):
        write_adapter(policy, Path(folder), "sandbox:base", None, fingerprint)
    assert files(Path("one")) == files(Path("other"))
    assert sorted(path.name for path in Path().iterdir()) == ["adapter", "one", "other"]
    start = {"perl_start": method} if method in ANCHORED else {}  # half of its rank is its start
    dtype = "float64" if method in ANCHORED else "float32"  # of base_for
    known = {"base_sha256": base_fingerprint(base_for(method)), "base_dtype": dtype}
    for folder, expected in (("one", known), ("adapter", {})):
        with safe_open(f"{folder}/adapter_model.safetensors", framework="pt") as file:
            assert file.metadata() == {**expected, "format": "pt", **start}
    before = log_probs(policy)
    assert (before - log_probs(base())).abs().max() > 0.1
    loaded = PeftModel.from_pretrained(base_for(method), "one").eval()
    torch.testing.assert_close(log_probs(loaded), before, rtol=0, atol=1e-5)
    assert reload_difference(policy, Path("one"), PROBE) <= (1e-5 if method in ANCHORED else 1e-6)


def test_the_same_training_gives_the_same_bytes_with_public_names_in_alphabetical_order():
    for method in ("lora", "pissa"):
        for folder in ("one", "other"):
            torch.manual_seed(3)
            write_adapter(policy_of(method), Path(folder), "sandbox:base", None, "f" * 64)
        assert files(Path("one")) == files(Path("other")), method
    for folder, targets in (("one", ["q_proj", "v_proj", "up_proj"]), ("other", ["up_proj", "v_proj", "q_proj"])):
        torch.manual_seed(0)
        policy = attach_adapter(base(), LoraConfig(target_modules=targets, task_type="CAUSAL_LM"))
        write_adapter(policy, Path(folder), "sandbox:base", None)
    assert files(Path("one")) == files(Path("other"))  # the order in which targets are named does not show
    policy = policy_of(modules_to_save=["q_norm", "norm"])
    assert policy.get_base_model().config.name_or_path == str(BASE_FOLDER)
    write_adapter(policy, Path("adapter"), *base_identity(policy))
    config = json.loads(Path("adapter/adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == ("sandbox:base", None)
    # Whole names: PEFT would take "norm" for the ending of any other name, "q_norm" too.
    assert config["modules_to_save"] == [*(f"model.layers.{i}.self_attn.q_norm" for i in range(4)), "model.norm"]
    assert len(config["target_modules"]) == 7
    assert config["target_modules"] == sorted(config["target_modules"])
    assert list(config) == sorted(config)


@pytest.mark.parametrize("method", sorted(ANCHORED))
def test_an_adapter_that_starts_on_the_bases_weights_is_saved_as_a_lora_of_twice_the_rank(method):
    start, policy = attach_adapter(base_for(method), adaptation(section(method))), policy_of(method)
    write_adapter(policy, Path("adapter"), "sandbox:base", None)
    config = json.loads(Path("adapter/adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 8, 8)
    assert config["init_lora_weights"] is True
    saved = load_file("adapter/adapter_model.safetensors")
    assert len(saved) == 2 * 28
    scale = policy.active_peft_config.lora_alpha / policy.active_peft_config.r
    for name, _ in anchored_layers(policy):
        now, then = (model.get_submodule(name) for model in (policy, start))
        # The update is s (B A - B0 A0), by the factors that the same start gives anew.
        product, product0 = (layer.lora_B.default.weight @ layer.lora_A.default.weight for layer in (now, then))
        A_RI, B_OR = saved[f"{name}.lora_A.weight"], saved[f"{name}.lora_B.weight"]
        assert (len(A_RI), B_OR.size(1)) == (8, 8)
        expected = scale * (product - product0).detach()
        torch.testing.assert_close(B_OR.double() @ A_RI.double(), expected, rtol=0, atol=1e-6)


def test_saving_and_comparing_leave_the_policy_as_it_was():
    policy = policy_of(modules_to_save=["norm"]).train()
    before = {name: (p.detach().clone(), p.requires_grad) for name, p in policy.named_parameters()}
    config = policy.peft_config["default"].to_dict()
    write_adapter(policy, Path("adapter"), "someone/model", "0123abc")
    reload_difference(policy, Path("adapter"), PROBE)
    with pytest.raises(Exception, match="nowhere"):  # nor does a comparison that fails
        reload_difference(policy, Path("nowhere"), PROBE)
    after = dict(policy.named_parameters())
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], p) and after[name].requires_grad == g for name, (p, g) in before.items())
    assert {name: held.to_dict() for name, held in policy.peft_config.items()} == {"default": config}
    assert policy.active_adapter == "default"
    assert policy.training


def test_only_the_active_adapter_is_saved_under_whatever_name():
    write_adapter(policy_of(), Path("start"), "sandbox:base", None)
    named = move(PeftModel.from_pretrained(base(), "start", adapter_name="mine", is_trainable=True))
    beside = policy_of()
    beside.add_adapter("ref", beside.peft_config["default"])
    for policy in (named, beside):
        before = log_probs(policy)
        write_adapter(policy, Path("adapter"), "sandbox:base", None)
        assert sorted(files(Path("adapter"))) == ["adapter_config.json", "adapter_model.safetensors"]
        loaded = PeftModel.from_pretrained(base(), "adapter").eval()
        torch.testing.assert_close(log_probs(loaded), before, rtol=0, atol=1e-5)


@pytest.mark.parametrize("method", each(ADAPTERS))
def test_a_policy_and_its_reference_come_back_from_a_checkpoint_bit_for_bit(method):
    policy = policy_of(method, modules_to_save=whole(method))
    before = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    own = {name: tensor.clone() for name, tensor in adapter_tensors(policy).items()}
    snapshot = {name: torch.randn(p.shape) for name, p in policy.named_parameters() if p.requires_grad}
    save_policy(Path(), policy, snapshot, "rolling:3")
    torch.manual_seed(7)  # parts that are drawn at random are others
    other = attach_adapter(base_for(method), adaptation(section(method, modules_to_save=whole(method)))).eval()
    trainable = [name for name, p in other.named_parameters() if p.requires_grad]
    assert not torch.equal(log_probs(other), log_probs(policy))
    loaded = load_policy(Path(), other)
    assert (reference_of(Path()), loaded.keys()) == ("rolling:3", snapshot.keys())
    assert all(torch.equal(tensor, snapshot[name]) for name, tensor in loaded.items())
    assert other.state_dict().keys() == before.keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in other.state_dict().items())
    assert all(torch.equal(tensor, own[name]) for name, tensor in adapter_tensors(other).items())
    assert torch.equal(log_probs(other), log_probs(policy))
    assert [name for name, p in other.named_parameters() if p.requires_grad] == trainable


def test_a_checkpoint_of_another_adapter_or_of_plain_trl_changes_nothing():
    policy = policy_of()
    before = log_probs(policy)
    assert load_policy(Path(), policy) is None
    assert reference_of(Path()) is None
    assert torch.equal(log_probs(policy), before)
    others = (policy_of("dora"), policy_of("vera"), attach_adapter(base(), adaptation(PeftSection(rank=5))))
    for other in others:
        save_policy(Path(), other, {})
        with pytest.raises(BrokenPromiseError, match="the checkpoint holds another adapter: base_model"):
            load_policy(Path(), policy)
        assert torch.equal(log_probs(policy), before)
