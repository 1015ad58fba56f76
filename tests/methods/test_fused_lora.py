"""A fused LoRA layer gives PEFT's numbers, keeps less for backward, and leaves all it does not know to PEFT."""

import copy
import math
import pickle

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from peft.helpers import disable_input_dtype_casting
from peft.tuners.lora.layer import Linear
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from perl.adapter import attach_adapter
from perl.methods.delta import adapted_layers, low_rank_update
from perl.methods.fused_lora import FusedLinear, fuse_lora
from perl.methods.settings import adaptation
from perl.recipe.sections import PeftSection
from perl.sandbox import BASE_FOLDER

PROBE = torch.tensor([[6, 7, 78, 8, 9, 96, 10, 1], [12, 13, 14, 77, 96, 5, 78, 1]])
INPUTS, OUTPUTS = 24, 40


class Projection(nn.Module):
    """The smallest base with a layer to adapt."""

    def __init__(self, bias: bool = False):
        super().__init__()
        self.proj = nn.Linear(INPUTS, OUTPUTS, bias=bias)

    def forward(self, x):
        return self.proj(x)


def fill(policy: nn.Module, seed: int = 1) -> None:
    """An adapter away from its start, so that B's product is not 0."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in policy.named_parameters():
        if "lora_" in name:
            with torch.no_grad():
                values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.copy_(values / math.sqrt(parameter.shape[-1]))


def adapted(rank=4, scaling=2.0, bias=False, dtype=torch.float32, **options) -> PeftModel:
    base = Projection(bias).to(dtype)
    policy = get_peft_model(base, LoraConfig(r=rank, lora_alpha=rank * scaling, target_modules=["proj"], **options))
    fill(policy)
    return policy


def layer_of(policy) -> Linear:
    return next(m for m in policy.modules() if isinstance(m, Linear))


def twins(policy: nn.Module) -> tuple[nn.Module, nn.Module]:
    """PEFT's and ours; ours fused in every LoRA layer."""
    fused = copy.deepcopy(policy)
    assert fuse_lora(fused) == sum(isinstance(m, Linear) for m in fused.modules()) > 0
    return policy, fused


def results(policy, x, output_gradient=None, run=None) -> dict[str, torch.Tensor]:
    """Output and gradients of everything that needs one; the input is a new leaf with x's strides."""
    policy.zero_grad()
    x = x.detach().requires_grad_(x.is_floating_point())
    y = (policy if run is None else run)(x)
    if output_gradient is None:
        output_gradient = torch.randn(y.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    y.backward(output_gradient.to(y.dtype))
    gradients = {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}
    return {"y": y.detach(), "x": x.grad, **gradients}


def error(ours, theirs) -> float:
    """Relative, in the Frobenius norm."""
    ours, theirs = ours.detach().double(), theirs.detach().double()
    return float((ours - theirs).norm() / theirs.norm())


def assert_close(ours, theirs, tolerance) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype, name
        assert error(ours[name], tensor) <= tolerance, name


def saved_bytes(policy, run) -> int:
    """Bytes that a forward pass keeps for backward, every storage once, the policy's own left out."""
    own = {t.untyped_storage().data_ptr() for t in (*policy.parameters(), *policy.buffers())}
    storages = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = run()
    kept = sum(storage.nbytes() for storage in storages.values())
    del y
    return kept


def is_fused(y) -> bool:
    """Whether an output was computed by the fused function; it must need a gradient."""
    return "_LoraLinear" in type(y.grad_fn).__name__


# ------------------------------------------------------------------------------------------------ the same numbers

SHAPES = [(7,), (1,), (3, 5), (1, 1), (2, 3, 5), (0,), (0, 5)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scaling", [1.0, 2.0, 0.5, 3.0, 1 / 3])
@pytest.mark.parametrize("bias", [False, True])
def test_float32_output_is_pefts_bit_for_bit_and_gradients_to_rounding(shape, scaling, bias):
    theirs, ours = twins(adapted(scaling=scaling, bias=bias))
    x = torch.randn(*shape, INPUTS)
    expected, got = results(theirs, x), results(ours, x)
    assert torch.equal(got["y"], expected["y"])
    if x.numel():
        assert_close(got, expected, 1e-6)
    else:
        assert {n: t.shape for n, t in got.items()} == {n: t.shape for n, t in expected.items()}


@pytest.mark.parametrize("rank", [1, 3, 128, 256, 320])
@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_output_is_pefts_bit_for_bit_at_every_rank_and_irrational_scale(rank, rslora, dtype):
    theirs, ours = twins(adapted(rank=rank, use_rslora=rslora, dtype=dtype))
    x = torch.randn(65, INPUTS, dtype=dtype)
    expected, got = results(theirs, x), results(ours, x)
    assert torch.equal(got["y"], expected["y"])
    assert_close(got, expected, 1e-6 if dtype == torch.float32 else 1e-13)


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(INPUTS, 5).T,
        torch.randn(5, 3, INPUTS).transpose(0, 1),
        torch.randn(3, INPUTS, 5).transpose(1, 2),
        torch.randn(3, 5, 2 * INPUTS)[..., ::2],
        torch.randn(1, 1, INPUTS).expand(3, 5, INPUTS),
    ],
    ids=["transposed", "batch_second", "features_first", "strided", "expanded"],
)
def test_inputs_that_are_not_contiguous(x):
    theirs, ours = twins(adapted())
    expected, got = results(theirs, x), results(ours, x)
    assert torch.equal(got["y"], expected["y"])
    assert_close(got, expected, 1e-6)
    theirs, ours = theirs.to(torch.bfloat16), ours.to(torch.bfloat16)
    assert_close(results(ours, x.to(torch.bfloat16)), results(theirs, x.to(torch.bfloat16)), 1e-2)


def test_output_gradients_that_are_not_contiguous():
    theirs, ours = twins(adapted())
    x = torch.randn(3, 5, INPUTS)
    for gradient in (torch.randn(5, 3, OUTPUTS).transpose(0, 1), torch.tensor(1.0).expand(3, 5, OUTPUTS)):
        assert_close(results(ours, x, gradient), results(theirs, x, gradient), 1e-6)


def test_gradients_agree_with_finite_differences():
    _, policy = twins(adapted(rank=2, scaling=3.0, bias=True, dtype=torch.float64))
    layer = layer_of(policy)
    layer.base_layer.bias.requires_grad_(True)
    trained = [p for p in policy.parameters() if p.requires_grad]
    assert len(trained) == 3
    x = torch.randn(2, 3, INPUTS, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, *_: policy(x), (x, *trained), fast_mode=False)


def test_a_base_bias_that_trains_has_its_gradient():
    theirs, ours = twins(adapted(bias=True))
    for policy in (theirs, ours):
        layer_of(policy).base_layer.bias.requires_grad_(True)
    x = torch.randn(3, 5, INPUTS)
    expected = results(theirs, x)
    assert any(name.endswith("base_layer.bias") for name in expected)
    assert_close(results(ours, x), expected, 1e-6)


@pytest.mark.parametrize("frozen", [["lora_A"], ["lora_B"], ["lora_A", "lora_B"]])
@pytest.mark.parametrize("x_needs_gradient", [True, False])
def test_only_what_is_needed_gets_a_gradient(frozen, x_needs_gradient):
    theirs, ours = twins(adapted())
    gradients = []
    for policy in (theirs, ours):
        for name, parameter in policy.named_parameters():
            parameter.requires_grad_("lora_" in name and not any(part in name for part in frozen))
        x = torch.randn(3, 5, INPUTS, generator=torch.Generator().manual_seed(3)).requires_grad_(x_needs_gradient)
        y = policy(x)
        assert y.requires_grad == (x_needs_gradient or len(frozen) < 2)
        if y.requires_grad:
            assert is_fused(y) == (policy is ours)
            y.square().sum().backward()
        parameters = {"x": x, **dict(policy.named_parameters())}
        gradients.append({name: p.grad for name, p in parameters.items() if p.grad is not None})
    assert_close(gradients[1], gradients[0], 1e-6)


def test_nothing_is_kept_without_gradients():
    theirs, ours = twins(adapted())
    x = torch.randn(3, 5, INPUTS)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(ours(x), theirs(x))
            assert saved_bytes(ours, lambda: ours(x)) == 0


def test_a_second_derivative_is_refused_instead_of_wrong():
    _, ours = twins(adapted())
    x = torch.randn(3, INPUTS, requires_grad=True)
    (gradient,) = torch.autograd.grad(ours(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


# --------------------------------------------------------------------------------------------------- precisions

HALF, FULL = torch.bfloat16, torch.float32


def rounding(policy, x, autocast) -> dict[str, float]:
    """How far every number is from the same in float64, where the inputs are the same rounded ones."""

    def run(leaf):
        with torch.autocast("cpu", dtype=HALF, enabled=autocast):
            return policy(leaf)

    gradient = torch.randn(*x.shape[:-1], OUTPUTS, generator=torch.Generator().manual_seed(5)).to(HALF)
    got = results(policy, x, gradient, run)
    exact = results(copy.deepcopy(policy).double(), x.double(), gradient)
    for name, parameter in policy.named_parameters():
        assert name not in got or got[name].dtype == parameter.dtype
    assert got["x"].dtype == x.dtype
    return {name: error(tensor, exact[name]) for name, tensor in got.items()}


@pytest.mark.parametrize(
    ("base", "adapter", "x", "autocast"),
    [
        (FULL, FULL, FULL, True),
        (FULL, FULL, HALF, True),
        (HALF, FULL, HALF, True),
        (HALF, HALF, HALF, True),
        (HALF, FULL, HALF, False),
        (HALF, HALF, HALF, False),
        (FULL, HALF, FULL, False),
    ],
)
@pytest.mark.parametrize("scaling", [2.0, 16 / math.sqrt(8)])
def test_half_precision_is_no_further_from_float64_than_pefts(base, adapter, x, autocast, scaling):
    """Output and dx have fewer roundings here; dA and dB have as many as PEFT's, so they differ by chance only."""
    policy = adapted(rank=8, scaling=scaling, bias=True)
    layer_of(policy).base_layer.to(base)
    layer_of(policy).lora_A.to(adapter)
    layer_of(policy).lora_B.to(adapter)
    x_BTI = torch.randn(8, 200, INPUTS).to(x)
    theirs, ours = (rounding(policy, x_BTI, autocast) for policy in twins(policy))
    assert ours.keys() == theirs.keys()
    for name in theirs:
        assert ours[name] <= theirs[name] * (1.15 if "lora_" in name else 1.05), name


@pytest.mark.parametrize(("base", "adapter"), [(HALF, FULL), (FULL, HALF)])
@pytest.mark.parametrize("scaling", [2.0, 1 / 3])
def test_branches_of_two_dtypes_give_pefts_output_bit_for_bit(base, adapter, scaling):
    policy = adapted(scaling=scaling)
    layer_of(policy).base_layer.to(base)
    layer_of(policy).lora_A.to(adapter)
    layer_of(policy).lora_B.to(adapter)
    theirs, ours = twins(policy)
    x = torch.randn(3, 50, INPUTS, dtype=base)
    assert is_fused(ours(x))
    assert torch.equal(ours(x), theirs(x))
    assert ours(x).dtype == base


@pytest.mark.parametrize("forward_too", [True, False])
def test_backward_inside_autocast(forward_too):
    """Not recommended by torch, and done; here the precision is then the forward pass's."""
    theirs, ours = twins(adapted())
    x = torch.randn(3, 50, INPUTS)
    gradients = []
    for outer, policy in ((False, ours), (True, ours), (False, theirs)):
        policy.zero_grad()
        with torch.autocast("cpu", dtype=HALF, enabled=forward_too):
            loss = policy(x).float().square().sum()
        with torch.autocast("cpu", dtype=HALF, enabled=outer):
            loss.backward()
        gradients.append({name: p.grad for name, p in policy.named_parameters() if p.grad is not None})
    for name in gradients[0]:
        assert torch.equal(gradients[0][name], gradients[1][name])
    assert_close(gradients[0], gradients[2], 2e-2 if forward_too else 1e-6)


def test_float64_under_autocast_is_left_to_peft():
    theirs, ours = twins(adapted(dtype=torch.float64))
    x = torch.randn(3, INPUTS, dtype=torch.float64)
    with torch.autocast("cpu", dtype=HALF):
        y = ours(x)
        assert torch.equal(y, theirs(x))
    assert y.dtype == torch.float64
    assert not is_fused(y)


# ---------------------------------------------------------------------------------------------- what is left to PEFT


def assert_left_to_peft(theirs, ours, x, **arguments) -> None:
    y = ours(x, **arguments)
    assert not is_fused(y)
    torch.manual_seed(7)
    expected = theirs(x, **arguments)
    torch.manual_seed(7)
    assert torch.equal(ours(x, **arguments), expected)


def x_leaf() -> torch.Tensor:
    return torch.randn(4, INPUTS, requires_grad=True)


@pytest.mark.parametrize("options", [{"use_dora": True}, {"lora_bias": True}], ids=lambda options: next(iter(options)))
def test_dora_and_biases_of_the_adapter_are_not_eligible(options):
    policy = adapted(bias=True, **options)
    assert fuse_lora(policy) == 0
    assert type(layer_of(policy)) is Linear


def test_other_layers_are_not_eligible():
    class OwnLinear(nn.Linear):
        """Might do anything."""

    base = nn.Sequential()
    base.embed, base.conv, base.own = nn.Embedding(9, INPUTS), nn.Conv1d(3, 4, 1), OwnLinear(INPUTS, 5)
    base.plain = nn.Linear(INPUTS, 5)
    policy = get_peft_model(base, LoraConfig(r=2, target_modules=["embed", "conv", "own", "plain"]))
    assert fuse_lora(policy) == 1
    assert [name for name, m in policy.named_modules() if type(m) is FusedLinear] == ["base_model.model.plain"]


def test_subclasses_of_pefts_layer_and_replaced_forward_passes_are_not_eligible():
    class OwnLoraLinear(Linear):
        """Might do anything."""

    policy = adapted()
    layer_of(policy).__class__ = OwnLoraLinear
    assert fuse_lora(policy) == 0
    policy = adapted()
    layer = layer_of(policy)
    layer.forward = layer.forward
    assert fuse_lora(policy) == 0


@pytest.mark.parametrize("method", ["pissa", "olora", "milora", "dora"])
def test_variants_of_our_own_methods_are_not_eligible(method):
    model = AutoModelForCausalLM.from_pretrained(BASE_FOLDER, dtype=torch.float32)
    policy = attach_adapter(model, adaptation(PeftSection(method=method, rank=4)))
    assert fuse_lora(policy) == 0


def test_dropout_is_pefts_in_training_and_none_in_evaluation():
    theirs, ours = twins(adapted(lora_dropout=0.5))
    x = x_leaf()
    assert_left_to_peft(theirs.train(), ours.train(), x)
    y = ours.eval()(x)
    assert is_fused(y)
    assert torch.equal(y, theirs.eval()(x))


def test_adapter_switched_off_and_on_again():
    theirs, ours = twins(adapted())
    x = x_leaf()
    with theirs.disable_adapter(), ours.disable_adapter():
        assert_left_to_peft(theirs, ours, x)
        assert torch.equal(ours(x), layer_of(ours).base_layer(x))
    y = ours(x)
    assert is_fused(y)
    assert torch.equal(y, theirs(x))


def test_merged_and_unmerged():
    theirs, ours = twins(adapted())
    x = x_leaf()
    before = ours(x)
    theirs.merge_adapter()
    ours.merge_adapter()
    assert_left_to_peft(theirs, ours, x)
    theirs.unmerge_adapter()
    ours.unmerge_adapter()
    assert is_fused(ours(x))
    assert torch.equal(ours(x), theirs(x))
    assert error(ours.merge_and_unload()(x), before) < 1e-6


def test_the_active_adapter_of_several_is_fused_and_several_at_once_are_not():
    policy = adapted()
    policy.add_adapter("second", LoraConfig(r=6, lora_alpha=3, target_modules=["proj"]))
    fill(policy, seed=2)
    theirs, ours = twins(policy)
    x = x_leaf()
    outputs = []
    for name in ("default", "second"):
        for each in (theirs, ours):
            each.set_adapter(name)
        y = ours(x)
        assert is_fused(y)
        assert torch.equal(y, theirs(x))
        outputs.append(y)
    assert not torch.equal(*outputs)
    for each in (theirs, ours):
        each.base_model.set_adapter(["default", "second"])
    assert_left_to_peft(theirs, ours, x)
    for each in (theirs, ours):
        each.base_model.set_adapter("default")
        with pytest.warns(UserWarning, match="active adapter to second"):
            each.delete_adapter("default")
    assert is_fused(ours(x))
    assert torch.equal(ours(x), outputs[1])


def test_an_adapter_of_another_kind_that_is_added_later_is_left_to_peft():
    theirs, ours = twins(adapted())
    for policy in (theirs, ours):
        policy.add_adapter("second", LoraConfig(r=4, target_modules=["proj"], use_dora=True))
        fill(policy, seed=2)
        policy.set_adapter("second")
    assert_left_to_peft(theirs, ours, x_leaf())


def test_mixed_batches_are_pefts():
    policy = adapted()
    policy.add_adapter("second", LoraConfig(r=6, target_modules=["proj"]))
    fill(policy, seed=2)
    theirs, ours = (each.eval() for each in twins(policy))
    assert_left_to_peft(theirs, ours, x_leaf(), adapter_names=["default", "second", "__base__", "default"])


@pytest.mark.parametrize("part", ["base_layer", "lora_A", "lora_B"])
@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
def test_hooks_on_inner_layers_are_called_until_they_are_removed(part, kind):
    _, ours = twins(adapted())
    layer = layer_of(ours)
    inner = layer.base_layer if part == "base_layer" else getattr(layer, part)["default"]
    calls = []
    handle = getattr(inner, f"register_{kind}_hook")(lambda *_: calls.append(kind))
    ours(x_leaf()).sum().backward()
    assert calls == [kind]
    handle.remove()
    assert is_fused(ours(x_leaf()))


def test_a_forward_pass_that_is_replaced_inside_is_called():
    """As accelerate does where it offloads weights."""
    _, ours = twins(adapted())
    base = layer_of(ours).base_layer
    original, calls = base.forward, []

    def forward(x):
        calls.append(x)
        return original(x)

    base.forward = forward
    ours(x_leaf())
    assert len(calls) == 1


def test_hooks_on_the_layer_itself_see_input_and_output():
    _, ours = twins(adapted())
    seen = []
    layer_of(ours).register_forward_hook(lambda _, inputs, output: seen.append((inputs[0], output)))
    x = x_leaf()
    y = ours(x)
    assert seen[0][0] is x
    assert seen[0][1] is y
    assert is_fused(y)


def test_a_base_that_trains_and_a_weight_that_is_no_parameter_are_left_to_peft():
    theirs, ours = twins(adapted())
    for policy in (theirs, ours):
        layer_of(policy).base_layer.weight.requires_grad_(True)
    assert_left_to_peft(theirs, ours, x_leaf())
    assert "base_model.model.proj.base_layer.weight" in results(ours, x_leaf())

    theirs, ours = twins(adapted())
    for policy in (theirs, ours):  # as sharding does for the time of a forward pass
        base = layer_of(policy).base_layer
        weight = base._parameters.pop("weight")
        base.weight = weight.detach() * 2
    assert_left_to_peft(theirs, ours, x_leaf())


def test_a_scale_that_trains_is_left_to_peft():
    theirs, ours = twins(adapted())
    for policy in (theirs, ours):
        layer_of(policy).scaling["default"] = torch.tensor(2.0, requires_grad=True)
    assert_left_to_peft(theirs, ours, x_leaf())


def test_casting_that_peft_is_told_to_leave_out_is_left_out():
    theirs, ours = twins(adapted())
    with disable_input_dtype_casting(theirs), disable_input_dtype_casting(ours):
        assert_left_to_peft(theirs, ours, x_leaf())


def test_one_dimension_is_pefts():
    theirs, ours = twins(adapted())
    assert_left_to_peft(theirs, ours, torch.randn(INPUTS, requires_grad=True))


# ------------------------------------------------------------------------------------------------ the policy as it was


def test_fusing_twice_is_fusing_once():
    policy = adapted()
    layer = layer_of(policy)
    before = {name: tensor.data_ptr() for name, tensor in policy.state_dict().items()}
    assert fuse_lora(policy) == fuse_lora(policy) == 1
    assert layer_of(policy) is layer
    assert isinstance(layer, Linear)
    assert {name: tensor.data_ptr() for name, tensor in policy.state_dict().items()} == before
    assert get_peft_model_state_dict(policy).keys() == get_peft_model_state_dict(adapted()).keys()


def test_copies_and_pickles_are_fused_and_stand_alone():
    _, ours = twins(adapted())
    x = x_leaf()
    before = ours(x)
    for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):  # noqa: S301 (our own)
        assert is_fused(other(x))
        assert torch.equal(other(x), before)
        fill(other, seed=9)
        assert not torch.equal(other(x), before)
    assert torch.equal(ours(x), before)


def test_the_update_as_matrices_is_the_same():
    theirs, ours = twins(adapted())
    for (name, ours_layer), (other, theirs_layer) in zip(adapted_layers(ours), adapted_layers(theirs), strict=True):
        assert name == other
        a, b = low_rank_update(ours_layer, "default"), low_rank_update(theirs_layer, "default")
        assert torch.equal(a.A_RI, b.A_RI)
        assert torch.equal(a.B_OR, b.B_OR)


# ------------------------------------------------------------------------------------------------------ whole models

SIZES = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
MODELS = {
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, attention_bias=True)),
}


def language_model(kind="qwen3", dtype=torch.float32, **options) -> PeftModel:
    torch.manual_seed(0)
    policy = get_peft_model(
        MODELS[kind]().to(dtype), LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", **options)
    )
    fill(policy)
    return policy.train()


def model_results(policy, autocast=False) -> dict[str, torch.Tensor]:
    policy.zero_grad()
    with torch.autocast("cpu", dtype=HALF, enabled=autocast):
        logits = policy(input_ids=PROBE, use_cache=False).logits
    logits.float().log_softmax(-1)[..., 5].sum().backward()
    return {"logits": logits.detach(), **{n: p.grad.clone() for n, p in policy.named_parameters() if p.requires_grad}}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("rslora", [False, True])
def test_logits_of_a_model_are_pefts_bit_for_bit(kind, rslora):
    theirs, ours = twins(language_model(kind, use_rslora=rslora))
    expected, got = model_results(theirs), model_results(ours)
    assert torch.equal(got["logits"], expected["logits"])
    assert_close(got, expected, 3e-6)
    theirs, ours = theirs.double(), ours.double()
    expected, got = model_results(theirs), model_results(ours)
    assert torch.equal(got["logits"], expected["logits"])
    # The loss takes its log-probabilities in float32, so the gradient that comes in is that of equal logits.
    assert_close(got, expected, 1e-13)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("autocast", [False, True])
def test_gradient_checkpointing_changes_no_bit(reentrant, autocast):
    _, ours = twins(language_model())
    expected = model_results(ours, autocast)
    ours.enable_input_require_grads()
    ours.get_base_model().activation_checkpointing_enable({"use_reentrant": reentrant})
    got = model_results(ours, autocast)
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(got[name], tensor), name


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_one_layer(reentrant):
    theirs, ours = twins(adapted())
    x = torch.randn(3, 5, INPUTS)
    got = results(ours, x, run=lambda leaf: checkpoint(ours, leaf, use_reentrant=reentrant))
    assert_close(got, results(theirs, x), 1e-6)


@pytest.mark.parametrize(("frozen", "kept"), [("lora_A", 4), ("lora_B", INPUTS)])
def test_a_frozen_half_is_kept_nothing_for(frozen, kept):
    """LoRA-FA freezes A: then A x is enough."""
    theirs, ours = twins(adapted(rank=4))
    for policy in (theirs, ours):
        getattr(layer_of(policy), frozen)["default"].weight.requires_grad_(False)
    x = torch.randn(100, INPUTS, requires_grad=True)
    assert saved_bytes(ours, lambda: ours(x)) == saved_bytes(theirs, lambda: theirs(x)) == 100 * kept * 4


@pytest.mark.parametrize(
    ("base", "adapter", "autocast", "share"),
    [(FULL, FULL, False, 1), (FULL, FULL, True, 2 / 3), (HALF, FULL, True, 2 / 5), (HALF, FULL, False, 1 / 5)],
)
def test_projections_of_one_input_keep_it_once(base, adapter, autocast, share):
    """As q, k and v do. PEFT keeps a copy for each, in the dtype it is cast to, unless all is float32."""
    policy = nn.Sequential()
    policy.q, policy.k, policy.v = (adapted(rank=1, dtype=base) for _ in range(3))
    for module in policy.modules():
        if isinstance(module, Linear):
            module.lora_A.to(adapter)
            module.lora_B.to(adapter)
    theirs, ours = twins(policy)
    x = torch.randn(500, INPUTS, dtype=base, requires_grad=True) * 1  # no leaf, whose casts autocast would share

    def run(policy):
        with torch.autocast("cpu", dtype=HALF, enabled=autocast):
            return [projection(x) for projection in policy]

    kept, pefts = (saved_bytes(each, lambda each=each: run(each)) for each in (ours, theirs))
    computed_in = HALF if autocast else adapter
    assert kept == 500 * (INPUTS * base.itemsize + 3 * computed_in.itemsize)
    assert kept <= share * pefts


@pytest.mark.parametrize(("dtype", "autocast"), [(FULL, False), (FULL, True), (HALF, True), (HALF, False)])
def test_a_model_keeps_less_for_backward_where_dtypes_differ_and_as_much_where_not(dtype, autocast):
    theirs, ours = twins(language_model(dtype=dtype))

    def run(policy):
        with torch.autocast("cpu", dtype=HALF, enabled=autocast):
            return policy(input_ids=PROBE.repeat(8, 8), use_cache=False).logits

    kept, pefts = (saved_bytes(each, lambda each=each: run(each)) for each in (ours, theirs))
    assert kept == pefts if dtype == FULL and not autocast else kept < 0.95 * pefts
