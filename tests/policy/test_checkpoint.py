"""Checkpoints count when they are whole, and a saved adapter is the trained one for plain PEFT on a fresh base."""

import json
import math
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, VeraConfig
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from trl.trainer.utils import split_tensor_dict

from perl.errors import BrokenPromiseError
from perl.methods import adalora
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
from perl.policy.logprobs import token_log_probs
from perl.policy.model import base_fingerprint, base_identity, load_base
from perl.policy.save_adapter import reload_difference, write_adapter
from perl.recipe.sections import ModelSection, PeftSection
from perl.sandbox import BASE_FOLDER

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


def test_a_checkpoint_is_complete_once_it_is_sealed():
    path = checkpoint(5, sealed=False)
    assert not is_complete(path)
    seal(path)
    assert is_complete(path)


def test_a_checkpoint_that_is_written_and_sealed_again_is_complete():
    path = checkpoint(5)
    (path / "another").write_text("file")
    seal(path)
    assert is_complete(path)


@pytest.mark.parametrize("name", ["weights.safetensors", "nested/state.json", "empty"])
def test_a_checkpoint_that_misses_a_file_is_not_complete(name):
    path = checkpoint(5)
    (path / name).unlink()
    assert not is_complete(path)


def test_a_checkpoint_with_a_truncated_file_is_not_complete():
    path = checkpoint(5)
    (path / "weights.safetensors").write_bytes(b"012345678")
    assert not is_complete(path)


def test_a_checkpoint_with_a_truncated_list_of_files_is_not_complete():
    path = checkpoint(5)
    manifest = path / "complete.json"
    manifest.write_text(manifest.read_text()[:-5])
    assert not is_complete(path)


def test_a_folder_that_does_not_exist_is_not_complete():
    assert not is_complete(Path("checkpoint-3"))


def test_the_latest_checkpoint_is_the_one_with_the_largest_number():
    for step in (9, 100, 20):
        checkpoint(step)
    assert latest_checkpoint(Path("checkpoints")) == Path("checkpoints/checkpoint-100")
    assert step_of(Path("checkpoints/checkpoint-100")) == 100


def test_the_latest_checkpoint_is_a_complete_one():
    for step in (9, 20):
        checkpoint(step)
    (checkpoint(100) / "weights.safetensors").write_bytes(b"")
    checkpoint(101, sealed=False)
    assert latest_checkpoint(Path("checkpoints")) == Path("checkpoints/checkpoint-20")


def test_what_is_not_a_checkpoint_is_not_the_latest():
    folder = Path("checkpoints")
    folder.mkdir()
    assert latest_checkpoint(folder) is None
    assert latest_checkpoint(Path("nowhere")) is None
    checkpoint(7).rename(folder / "checkpoint-best")
    assert latest_checkpoint(folder) is None


def test_discarding_deletes_exactly_the_incomplete_checkpoints():
    folder = Path("checkpoints")
    for step in (5, 10):
        checkpoint(step)
    checkpoint(15, sealed=False)
    (checkpoint(20) / "empty").unlink()
    (folder / "notes.txt").touch()
    discard_incomplete(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoint-10", "checkpoint-5", "notes.txt"]


def test_discarding_leaves_folders_that_are_no_checkpoints():
    checkpoint(5, sealed=False).rename("checkpoints/checkpoint-best")
    discard_incomplete(Path("checkpoints"))
    assert Path("checkpoints/checkpoint-best/weights.safetensors").is_file()


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


@pytest.mark.parametrize("micro_batches", [1, 2, 12])
def test_unused_rollouts_come_back_as_they_were(micro_batches):
    window = rollouts(micro_batches)
    save_trainer_state(Path(), {"micro_step": 7, "other": 2}, window, rank=0)
    counters, loaded = load_trainer_state(Path(), 0, CPU)
    assert counters == {"micro_step": 7, "other": 2}
    assert len(loaded) == micro_batches
    for ours, theirs in zip(loaded, window, strict=True):
        assert ours.keys() == theirs.keys()
        for name, tensor in theirs.items():
            assert ours[name].dtype == tensor.dtype
            assert torch.equal(ours[name], tensor)


def test_each_process_keeps_its_own_rollouts_and_the_first_one_the_counters():
    for rank in (1, 0):
        save_trainer_state(Path(), {"micro_step": rank}, [{"x": torch.tensor([rank])}], rank)
    for rank in (0, 1):
        counters, window = load_trainer_state(Path(), rank, CPU)
        assert counters == {"micro_step": 0}
        assert window[0]["x"].item() == rank
    assert load_trainer_state(Path(), 2, CPU) == ({"micro_step": 0}, None)


def test_without_unused_rollouts_there_are_only_counters():
    save_trainer_state(Path(), {"micro_step": 7}, None, rank=0)
    assert load_trainer_state(Path(), 0, CPU) == ({"micro_step": 7}, None)


def test_a_checkpoint_of_plain_trl_has_neither():
    assert load_trainer_state(Path(), 0, CPU) == ({}, None)


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
@pytest.mark.parametrize("trains_modules", [False, True], ids=["adapter", "modules too"])
@pytest.mark.parametrize("method", ADAPTERS)
def test_plain_peft_loads_the_saved_adapter_on_a_fresh_base(method, trains_modules):
    policy = policy_of(method, modules_to_save=whole(method) if trains_modules else None)
    write_adapter(policy, Path("adapter"), "sandbox:base", None)
    loaded = PeftModel.from_pretrained(base_for(method), "adapter").eval()
    torch.testing.assert_close(log_probs(loaded), log_probs(policy), rtol=0, atol=1e-5)
    assert (log_probs(policy) - log_probs(base())).abs().max() > 0.1


@pytest.mark.parametrize("method", ADAPTERS)
def test_the_adapter_is_two_files_without_a_path_of_this_machine(method):
    write_adapter(policy_of(method), Path("adapter"), "sandbox:base", "0123abc")
    assert sorted(files(Path("adapter"))) == ["adapter_config.json", "adapter_model.safetensors"]
    text = Path("adapter/adapter_config.json").read_text()
    config = json.loads(text)
    assert str(BASE_FOLDER.parent) not in text
    assert (config["base_model_name_or_path"], config["revision"]) == ("sandbox:base", "0123abc")
    assert not any(isinstance(value, str) and value.startswith("/") for value in config.values())


def test_the_sandboxes_base_is_named_and_not_the_folder_it_is_loaded_from():
    policy = policy_of()
    assert policy.get_base_model().config.name_or_path == str(BASE_FOLDER)
    write_adapter(policy, Path("adapter"), *base_identity(policy))
    config = json.loads(Path("adapter/adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == ("sandbox:base", None)


@pytest.mark.parametrize("method", ADAPTERS)
def test_the_same_adapter_gives_the_same_bytes(method):
    policy = policy_of(method, modules_to_save=[*whole(method), "q_norm" if method != "ln_tuning" else "v_proj"])
    for folder in ("one", "other", "third"):
        write_adapter(policy, Path(folder), "sandbox:base", None, "f" * 64)
    assert files(Path("one")) == files(Path("other")) == files(Path("third"))


@pytest.mark.parametrize("method", ["lora", "pissa"])
def test_the_same_training_gives_the_same_bytes(method):
    for folder in ("one", "other"):
        torch.manual_seed(3)
        write_adapter(policy_of(method), Path(folder), "sandbox:base", None, "f" * 64)
    assert files(Path("one")) == files(Path("other"))


@pytest.mark.parametrize("method", ADAPTERS)
def test_the_header_of_the_weights_says_which_base_they_belong_to(method):
    policy = policy_of(method)
    fingerprint = base_fingerprint(policy)
    for folder, known in (("adapter", fingerprint), ("unknown", None)):
        write_adapter(policy, Path(folder), "sandbox:base", None, known)
    start = {"perl_start": method} if method in ANCHORED else {}  # half of its rank is its start
    with safe_open("adapter/adapter_model.safetensors", framework="pt") as file:
        dtype = "float64" if method in ANCHORED else "float32"  # of base_for
        known = {"base_sha256": base_fingerprint(base_for(method)), "base_dtype": dtype}
        assert file.metadata() == {**known, "format": "pt", **start}
    with safe_open("unknown/adapter_model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt", **start}


@pytest.mark.parametrize("method", sorted(ANCHORED))
def test_an_adapter_that_starts_on_the_bases_weights_is_saved_as_a_lora_of_twice_the_rank(method):
    policy = policy_of(method)
    assert len(list(anchored_layers(policy))) == 28
    write_adapter(policy, Path("adapter"), "sandbox:base", None)
    config = json.loads(Path("adapter/adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 8, 8)
    assert config["init_lora_weights"] is True
    shapes = {name: t.shape for name, t in load_file("adapter/adapter_model.safetensors").items()}
    assert len(shapes) == 2 * 28
    assert all(shape[0 if "lora_A" in name else 1] == 8 for name, shape in shapes.items())


def test_names_are_in_alphabetical_order_in_the_config():
    write_adapter(policy_of(modules_to_save=["q_norm", "norm"]), Path("adapter"), "sandbox:base", None)
    config = json.loads(Path("adapter/adapter_config.json").read_text())
    # Whole names: PEFT would take "norm" for the ending of any other name, "q_norm" too.
    assert config["modules_to_save"] == [*(f"model.layers.{i}.self_attn.q_norm" for i in range(4)), "model.norm"]
    assert len(config["target_modules"]) == 7
    assert config["target_modules"] == sorted(config["target_modules"])
    assert list(config) == sorted(config)


def test_the_order_in_which_targets_are_named_does_not_show():
    contents = []
    for targets in (["q_proj", "v_proj", "up_proj"], ["up_proj", "v_proj", "q_proj"]):
        torch.manual_seed(0)
        policy = attach_adapter(base(), LoraConfig(target_modules=targets, task_type="CAUSAL_LM"))
        write_adapter(policy, Path("adapter"), "sandbox:base", None)
        contents.append(files(Path("adapter")))
    assert contents[0] == contents[1]


def test_saving_leaves_the_policy_as_it_was():
    policy = policy_of()
    before, config = log_probs(policy), policy.peft_config["default"].to_dict()
    write_adapter(policy, Path("adapter"), "someone/model", "0123abc")
    assert torch.equal(log_probs(policy), before)
    assert policy.peft_config["default"].to_dict() == config


def test_an_older_adapter_is_replaced_and_nothing_is_left_beside_it():
    Path("adapter").mkdir()
    Path("adapter/old.bin").touch()
    Path(".adapter.tmp").mkdir()
    Path(".adapter.tmp/half.safetensors").touch()
    write_adapter(policy_of(), Path("adapter"), "sandbox:base", None)
    assert sorted(files(Path("adapter"))) == ["adapter_config.json", "adapter_model.safetensors"]
    assert [path.name for path in Path().iterdir()] == ["adapter"]


def test_only_the_active_adapter_is_saved():
    policy = policy_of()
    policy.add_adapter("ref", policy.peft_config["default"])
    before = log_probs(policy)
    write_adapter(policy, Path("adapter"), "sandbox:base", None)
    assert sorted(files(Path("adapter"))) == ["adapter_config.json", "adapter_model.safetensors"]
    loaded = PeftModel.from_pretrained(base(), "adapter").eval()
    torch.testing.assert_close(log_probs(loaded), before, rtol=0, atol=1e-5)


def test_an_adapter_under_another_name_is_saved_like_any_other():
    write_adapter(policy_of(), Path("start"), "sandbox:base", None)
    policy = PeftModel.from_pretrained(base(), "start", adapter_name="mine", is_trainable=True)
    move(policy)
    write_adapter(policy, Path("adapter"), "sandbox:base", None)
    assert sorted(files(Path("adapter"))) == ["adapter_config.json", "adapter_model.safetensors"]
    loaded = PeftModel.from_pretrained(base(), "adapter").eval()
    torch.testing.assert_close(log_probs(loaded), log_probs(policy), rtol=0, atol=1e-5)


@pytest.mark.parametrize("method", ADAPTERS)
def test_an_adapter_that_was_saved_well_is_no_distance_away(method):
    policy = policy_of(method, modules_to_save=whole(method))
    write_adapter(policy, Path("adapter"), "sandbox:base", None)
    assert reload_difference(policy, Path("adapter"), PROBE) <= (1e-5 if method in ANCHORED else 1e-6)


def tampered(change) -> Path:
    write_adapter(policy_of(), Path("adapter"), "sandbox:base", None)
    file = Path("adapter/adapter_model.safetensors")
    tensors = load_file(file)
    change(tensors, next(name for name in tensors if "layers.3.mlp.down_proj.lora_B" in name))
    save_file(tensors, file)
    return Path("adapter")


def test_the_distance_of_a_tampered_adapter_is_that_of_its_log_probabilities():
    policy = policy_of()
    torch.manual_seed(0)
    adapter = tampered(lambda tensors, name: tensors[name].add_(0.02))
    expected = (log_probs(PeftModel.from_pretrained(base(), adapter).eval()) - log_probs(policy)).abs().max().item()
    assert expected > 0.01
    assert reload_difference(policy, adapter, PROBE) == pytest.approx(expected, abs=1e-5)


def test_an_adapter_with_numbers_that_are_none_is_infinitely_far_away():
    adapter = tampered(lambda tensors, name: tensors[name].fill_(math.nan))
    assert reload_difference(policy_of(), adapter, PROBE) == math.inf


@pytest.mark.filterwarnings("ignore:Found missing adapter keys")  # PEFT says it too
def test_an_adapter_that_misses_a_tensor_is_far_away():
    adapter = tampered(lambda tensors, name: tensors.pop(name))
    torch.manual_seed(0)
    assert reload_difference(policy_of(), adapter, PROBE) > 0.01


@pytest.mark.parametrize("training", [True, False])
def test_comparing_leaves_the_policy_as_it_was(training):
    policy = policy_of(modules_to_save=["norm"])
    write_adapter(policy, Path("adapter"), "sandbox:base", None)
    policy.train(training)
    before = {name: (p.detach().clone(), p.requires_grad) for name, p in policy.named_parameters()}
    reload_difference(policy, Path("adapter"), PROBE)
    after = dict(policy.named_parameters())
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], p) and after[name].requires_grad == g for name, (p, g) in before.items())
    assert list(policy.peft_config) == ["default"]
    assert policy.active_adapter == "default"
    assert policy.training is training


def test_a_comparison_that_fails_leaves_the_policy_training():
    policy = policy_of().train()
    with pytest.raises(Exception, match="nowhere"):
        reload_difference(policy, Path("nowhere"), PROBE)
    assert policy.training
    assert policy.active_adapter == "default"
    assert list(policy.peft_config) == ["default"]


@pytest.mark.parametrize("method", ADAPTERS)
def test_a_policy_comes_back_from_a_checkpoint_bit_for_bit(method):
    policy = policy_of(method, modules_to_save=whole(method))
    before = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    own = {name: tensor.clone() for name, tensor in adapter_tensors(policy).items()}
    save_policy(Path(), policy, {})
    torch.manual_seed(7)  # parts that are drawn at random are others
    other = attach_adapter(base_for(method), adaptation(section(method, modules_to_save=whole(method)))).eval()
    trainable = [name for name, p in other.named_parameters() if p.requires_grad]
    assert not torch.equal(log_probs(other), log_probs(policy))
    assert load_policy(Path(), other) == {}
    assert other.state_dict().keys() == before.keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in other.state_dict().items())
    assert all(torch.equal(tensor, own[name]) for name, tensor in adapter_tensors(other).items())
    assert torch.equal(log_probs(other), log_probs(policy))
    assert [name for name, p in other.named_parameters() if p.requires_grad] == trainable


def test_adalora_comes_back_with_its_ranks_and_importances():
    policy = policy_of("adalora").train()
    adalora.set_schedule(policy, 10)
    for step in range(1, 7):
        policy(input_ids=PROBE, labels=PROBE).loss.backward()
        adalora.allocate(policy, step)
    assert sum(adalora.ranks(policy)) < 6 * 28  # ranks have been taken away
    save_policy(Path(), policy, {})
    other = policy_of("adalora")
    load_policy(Path(), other)
    assert sorted(adalora.ranks(other)) == sorted(adalora.ranks(policy))
    state, expected = adalora.allocator_state(other), adalora.allocator_state(policy)
    assert state.keys() == expected.keys()
    assert len(state) > 28
    assert all(torch.equal(tensor, expected[name]) for name, tensor in state.items())


def test_the_snapshot_of_a_reference_comes_back_with_the_policy():
    policy = policy_of()
    snapshot = {name: torch.randn(p.shape) for name, p in policy.named_parameters() if p.requires_grad}
    save_policy(Path(), policy, snapshot, "rolling:3")
    assert reference_of(Path()) == "rolling:3"
    loaded = load_policy(Path(), policy)
    assert loaded.keys() == snapshot.keys()
    assert all(torch.equal(tensor, snapshot[name]) for name, tensor in loaded.items())


def test_a_checkpoint_of_plain_trl_holds_no_policy_of_ours():
    policy = policy_of()
    before = log_probs(policy)
    assert load_policy(Path(), policy) is None
    assert reference_of(Path()) is None
    assert torch.equal(log_probs(policy), before)


@pytest.mark.parametrize("other", ["dora", "vera", "rank"])
def test_a_checkpoint_of_another_adapter_is_refused_and_changes_nothing(other):
    policy = policy_of()
    if other == "rank":
        save_policy(Path(), attach_adapter(base(), adaptation(PeftSection(rank=5))), {})
    else:
        save_policy(Path(), policy_of(other), {})
    before = log_probs(policy)
    with pytest.raises(BrokenPromiseError, match="the checkpoint holds another adapter: base_model"):
        load_policy(Path(), policy)
    assert torch.equal(log_probs(policy), before)
