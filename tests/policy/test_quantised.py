"""Adapters on a base that bitsandbytes quantised: whose they are, that they train, that what is saved was trained."""

import hashlib
import shutil

import pytest
import torch
from datasets import Dataset
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from perl import PeftGRPOTrainer, PeftRLConfig
from perl.errors import ModelError
from perl.methods.base_parameters import base_weight, is_packed
from perl.methods.settings import adaptation
from perl.policy.attach import attach_adapter, continue_adapter
from perl.policy.fingerprint import base_fingerprint, is_the_base, source_fingerprint
from perl.policy.guards import RELOAD_TOLERANCE, check_saved_adapter
from perl.policy.model import evaluating
from perl.policy.quantised import prepare_layers
from perl.policy.reference import token_log_probs
from perl.policy.save_adapter import write_adapter
from perl.policy.saved.adapter import find_adapter
from perl.recipe.sections import PeftSection
from perl.rewards import accuracy_reward
from perl.sandbox import BASE_FOLDER, load_problems
from tests.rollouts.policies import perturbed, policy_of

bitsandbytes = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed, there is no quantised base")
# PyTorch's own, once a process, about how PEFT makes SHiRA's sparse matrix.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")

PROBE = torch.arange(40).reshape(2, 20)
NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


def config(how=None, **further):
    return BitsAndBytesConfig(**{**(how or {**NF4, "bnb_4bit_compute_dtype": torch.float32}), **further})


def quantised(folder=BASE_FOLDER, dtype=torch.float32, how=None, **further):
    model = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=config(how, **further), dtype=dtype, device_map="cpu"
    )
    prepare_layers(model)
    return model


def ordinary(folder=BASE_FOLDER, dtype=torch.float32):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def of_the_file(dtype):
    """A fingerprint counted from the checkpoint alone."""
    digest = hashlib.sha256()
    for name, tensor in sorted(load_file(BASE_FOLDER / "model.safetensors").items()):
        numbers = tensor.to(dtype)
        digest.update(f"{name} {tuple(numbers.shape)} {dtype}".encode() + numbers.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def changed(folder, name, row=3):
    """A copy of the sandbox's base with one number of one tensor moved."""
    shutil.copytree(BASE_FOLDER, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors[name][row, 0] += 1
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("how", [None, {**NF4, "bnb_4bit_use_double_quant": True}, {"load_in_8bit": True}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_fingerprint_of_a_quantised_base_is_its_checkpoints(how, dtype):
    base = quantised(dtype=dtype, how=how)
    assert source_fingerprint(base) == of_the_file(dtype)
    assert base_fingerprint(base) != of_the_file(dtype)
    policy = perturbed(attach_adapter(base, adaptation(PeftSection(rank=2))))
    assert source_fingerprint(policy) == of_the_file(dtype) == source_fingerprint(ordinary(dtype=dtype))
    for other in (torch.float32, torch.bfloat16):
        assert is_the_base(policy, of_the_file(other))
        assert is_the_base(policy, of_the_file(other), str(other).removeprefix("torch."))


def test_a_base_quantised_from_other_weights_is_another_base(tmp_path):
    other = quantised(changed(tmp_path / "other", "model.layers.1.mlp.up_proj.weight"))
    assert source_fingerprint(other) != of_the_file(torch.float32)
    assert not is_the_base(other, of_the_file(torch.float32), "float32")
    policy = policy_of("lora", quantised())
    write_adapter(policy, tmp_path / "adapter", "sandbox:base", None, source_fingerprint(policy))
    with pytest.raises(ModelError, match=r"was trained on other weights of sandbox:base"):
        continue_adapter(other, find_adapter(str(tmp_path / "adapter")))


def test_the_checkpoint_is_found_in_several_files_and_in_the_hubs_cache_and_one_that_is_gone_is_trusted(
    tmp_path, monkeypatch
):
    ordinary().save_pretrained(tmp_path / "parts", max_shard_size="400KB")
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 2
    assert source_fingerprint(quantised(tmp_path / "parts")) == of_the_file(torch.float32)
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "models--someone--model"
    shutil.copytree(BASE_FOLDER, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    base = quantised()
    base.config.name_or_path, base.config._commit_hash = "someone/model", commit
    assert source_fingerprint(base) == of_the_file(torch.float32)
    base.config._commit_hash = commit[::-1]  # which is not there
    assert source_fingerprint(base) is None
    policy = policy_of("lora", base)
    assert is_the_base(policy, of_the_file(torch.float32))
    write_adapter(policy, tmp_path / "adapter", "sandbox:base", None, source_fingerprint(policy))
    assert find_adapter(str(tmp_path / "adapter")).base_fingerprint is None


def everything_of(policy):
    """Parameters, buffers, modes and configs of a policy, to the bit."""
    numbers = {n: (t.data_ptr(), t.requires_grad, t.detach().clone()) for n, t in policy.named_parameters()}
    numbers |= {n: (t.data_ptr(), False, t.clone()) for n, t in policy.named_buffers()}
    modes = {name: (id(module), module.training) for name, module in policy.named_modules()}
    return numbers, modes, policy.active_adapters, set(policy.peft_config)


def same(one, other):
    (numbers, *rest), (numbers_then, *rest_then) = one, other
    assert rest == rest_then
    assert numbers.keys() == numbers_then.keys()
    for name, (place, trains, tensor) in numbers.items():
        assert (place, trains) == numbers_then[name][:2]
        assert torch.equal(tensor, numbers_then[name][2])


@pytest.mark.parametrize(
    ("method", "how"),
    [("lora", None), ("dora", None), ("oft", None), ("vera", None), ("lora", {"load_in_8bit": True})],
    ids=str,
)
def test_a_saved_adapter_is_compared_on_the_same_quantised_base_which_stays_as_it_is(method, how, tmp_path):
    policy = policy_of(method, quantised(how=how)).train()
    write_adapter(policy, tmp_path / "adapter", "sandbox:base", None)
    before = everything_of(policy)
    assert check_saved_adapter(policy, tmp_path / "adapter", PROBE) <= RELOAD_TOLERANCE
    same(everything_of(policy), before)


@pytest.fixture
def repacking(monkeypatch):
    """bitsandbytes as on a CPU with AVX512-BF16, where it repacks layers for inference."""
    monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: True)


def gradients(policy):
    ids = PROBE.to(torch.long)
    (-token_log_probs(policy.train(), ids, torch.ones_like(ids)).mean()).backward()
    return {name: p.grad.clone() for name, p in policy.named_parameters() if p.requires_grad}


@pytest.mark.usefixtures("repacking")
def test_passes_in_evaluation_mode_do_not_change_the_gradient():
    """Against the same adapter on an ordinary base that has the numbers for which the quantised ones stand."""
    base = quantised()
    dequantised = ordinary()
    with torch.no_grad():
        for name, layer in base.named_modules():
            if hasattr(layer, "quant_state"):
                dequantised.get_submodule(name).weight.copy_(base_weight(layer))
    torch.manual_seed(0)
    policy = policy_of("lora", base)
    torch.manual_seed(0)
    plain = policy_of("lora", dequantised)
    with torch.no_grad(), evaluating(policy):
        policy(PROBE)
    assert not any(getattr(p.quant_state, "packing_format_for_cpu", False) for p in base.parameters() if is_packed(p))
    expected = gradients(plain)
    for name, gradient in gradients(policy).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=1e-6)


@pytest.mark.usefixtures("repacking")
def test_a_base_that_was_repacked_before_is_refused(tmp_path):
    base = AutoModelForCausalLM.from_pretrained(
        BASE_FOLDER, quantization_config=config(), dtype=torch.float32, device_map="cpu"
    )
    layer = base.model.layers[0].self_attn.q_proj
    layer.weight.data, _ = bitsandbytes.functional._convert_weight_packed_for_cpu(
        layer.weight.data, layer.weight.quant_state
    )
    with pytest.raises(ModelError, match=r"repacked model\.layers\.0\.self_attn\.q_proj .*load the base again"):
        trainer(tmp_path, model=base)


def varied(completions, **_):
    return [float(len(str(completion)) % 7) for completion in completions]


def trainer(folder, *, model="sandbox:base", how=None, **changes):
    settings = {
        "use_cpu": True, "bf16": False, "prompts_per_step": 2, "num_generations": 4, "per_device_train_batch_size": 8,
        "max_completion_length": 12, "max_steps": 3, "learning_rate": 1e-2, "report_to": [], "save_strategy": "no",
        "disable_tqdm": True, "beta": 0.1,
    }  # fmt: skip
    chosen = load_problems("sandbox:addition", "train")[:16]
    data = Dataset.from_list([{"prompt": p.question, "solution": p.answer} for p in chosen])
    return PeftGRPOTrainer(
        model=model,
        reward_funcs=[accuracy_reward, varied],
        args=PeftRLConfig(str(folder), **{**settings, **changes}),
        train_dataset=data,
        eval_dataset=data.select(range(2)),
        quantization_config=how,
    )


def steps_of(trained):
    return [entry for entry in trained.state.log_history if "grad_norm" in entry]


def weights_of(trained):
    return get_peft_model_state_dict(trained.policy)


@pytest.fixture(scope="module")
def three_steps(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    trained = trainer(folder, how=config(), eval_strategy="steps", eval_steps=1)
    before = base_fingerprint(trained.policy)
    trained.train()
    assert base_fingerprint(trained.policy) == before
    trained.save_adapter(folder / "adapter")
    return trained, folder


def test_a_script_trains_on_nf4_and_saves_what_it_trained(three_steps):
    trained, folder = three_steps
    assert [entry["grad_norm"] > 0 for entry in steps_of(trained)] == [True] * 3
    assert {p.dtype for p in trained.policy.parameters() if p.requires_grad} == {torch.float32}
    there = PeftModel.from_pretrained(quantised(), str(folder / "adapter")).eval()
    with torch.no_grad():
        log_probs = [token_log_probs(model.eval(), PROBE, torch.ones_like(PROBE)) for model in (there, trained.policy)]
    torch.testing.assert_close(*log_probs, rtol=0, atol=1e-4)
    saved = find_adapter(str(folder / "adapter"))
    assert (saved.base_fingerprint, saved.base_dtype) == (of_the_file(torch.float32), "float32")
    assert saved.config.base_model_name_or_path == "sandbox:base"
