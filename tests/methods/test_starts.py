"""An adapter that starts on the base's weights starts there exactly; base and policy stay what they were."""

import copy
import functools

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.layer import LoraLayer
from transformers import AutoModelForCausalLM

from perl.errors import ModelError, PerlError
from perl.methods.registry import METHODS
from perl.methods.settings import adaptation
from perl.policy.attach import attach_adapter
from perl.policy.fingerprint import base_fingerprint
from perl.recipe.sections import PeftSection
from perl.sandbox import BASE_FOLDER

PROBE = torch.tensor([[6, 7, 78, 8, 9, 96, 10, 1], [12, 13, 14, 77, 96, 5, 78, 1]])
STARTS = [name for name, method in METHODS.items() if method.starts]
ANCHORED = ["pissa", "milora", "olora"]
RANK = 4


@functools.cache
def published(dtype):
    return AutoModelForCausalLM.from_pretrained(BASE_FOLDER, dtype=dtype).eval()


def base(dtype=torch.float32):
    return copy.deepcopy(published(dtype))


def policy_of(name, model=None, **settings):
    section = PeftSection(method=name, **{"rank": RANK, **settings})
    return attach_adapter(base() if model is None else model, adaptation(section)).eval()


def logits(model):
    with torch.no_grad():
        return model(input_ids=PROBE).logits


def start_of(policy):
    """(W, A, B, scale) of each adapted layer."""
    layers = [m for m in policy.modules() if isinstance(m, LoraLayer)]
    assert len(layers) == 4 * 7
    for layer in layers:
        A, B = layer.lora_A["default"].weight.data, layer.lora_B["default"].weight.data
        yield layer.get_base_layer().weight.data, A, B, layer.scaling["default"]


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("settings", [{}, {"alpha": 10.0}, {"alpha": 6.0, "kwargs": {"use_rslora": True}}], ids=str)
@pytest.mark.parametrize(("name", "part"), [("pissa", slice(None, RANK)), ("milora", slice(-RANK, None))])
def test_the_start_is_the_chosen_singular_triples(name, part, settings):
    for W, A, B, scale in start_of(policy_of(name, **settings)):
        U, S, V = torch.linalg.svd(W, full_matrices=False)
        close(scale * B @ A, U[:, part] * S[part] @ V[part])
        close(B.T @ B, torch.diag(S[part] / scale))
        close(A @ A.T, torch.diag(S[part] / scale))


@pytest.mark.parametrize("settings", [{}, {"alpha": 10.0}], ids=str)
def test_olora_starts_on_the_first_columns_of_the_qr_decomposition(settings):
    for W, A, B, scale in start_of(policy_of("olora", **settings)):
        Q, R = torch.linalg.qr(W)
        close(B @ A, Q[:, :RANK] @ R[:RANK])
        close(B.T @ B, torch.eye(RANK))
        assert scale == settings.get("alpha", RANK) / RANK


@pytest.mark.parametrize(("name", "part"), [("rlpo", slice(None, RANK)), ("milora_plus", slice(-RANK, None))])
def test_A_starts_as_right_singular_vectors_and_B_at_zero(name, part):
    for W, A, B, _ in start_of(policy_of(name)):
        S = torch.linalg.svdvals(W)[part]
        close(A @ A.T, torch.eye(RANK))
        # W A^T has the chosen singular values as its columns' lengths, and orthogonal columns.
        close(A @ W.T @ W @ A.T, torch.diag(S**2))
        assert not B.any()


@pytest.mark.parametrize(("name", "dtype"), [*((name, torch.float32) for name in STARTS), ("pissa", torch.bfloat16)])
def test_the_policy_starts_as_the_base_bit_for_bit_and_leaves_its_weights_alone(name, dtype):
    model = base(dtype)
    before = base_fingerprint(model)
    policy = policy_of(name, model)
    assert next(policy.parameters()).dtype == dtype
    assert torch.equal(logits(policy), logits(base(dtype)))
    assert base_fingerprint(policy) == before
    assert name in {*ANCHORED, "milora_plus", "rlpo", "slicefine"}  # whose starts are computed above


def descend(model, steps):
    """Plain gradient descent on a fixed linear function of the logits."""
    weights = torch.randn((*PROBE.shape, 128), generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        (model(input_ids=PROBE).logits * weights).mean().backward()
        optimizer.step()


@pytest.mark.parametrize("alpha", [RANK, 2.5 * RANK])
@pytest.mark.parametrize("name", ["pissa", "olora"])
def test_training_goes_the_way_of_peft_which_writes_the_start_into_the_base(name, alpha):
    config = LoraConfig(r=RANK, lora_alpha=alpha, target_modules="all-linear", init_lora_weights=name)
    theirs = get_peft_model(base(), config)
    ours = policy_of(name, alpha=alpha)
    for policy in (theirs, ours):
        descend(policy, steps=4)
    torch.testing.assert_close(logits(ours), logits(theirs), rtol=0, atol=1e-4)
    assert (logits(ours) - logits(base())).abs().max() > 0.05


@pytest.mark.parametrize(("name", "flag"), [("pissa", "use_rslora"), ("milora", "use_dora"), ("olora", "use_rslora")])
def test_a_start_with_another_flag_of_lora_is_exact_or_refused(name, flag):
    """In a recipe or in a config of PEFT; neither writes to the base."""
    before = base_fingerprint(base())
    config = LoraConfig(r=RANK, target_modules="all-linear", **{flag: True})
    config.init_lora_weights = name if name != "milora" else "pissa_niter_4"
    for attach in (lambda model: policy_of(name, model, kwargs={flag: True}), lambda m: attach_adapter(m, config)):
        model = base()
        try:
            policy = attach(model)
        except PerlError:
            assert base_fingerprint(model) == before
            continue
        assert base_fingerprint(policy) == before
        assert torch.equal(logits(policy), logits(base()))
        descend(policy, steps=1)
        assert all(p.grad is not None for p in policy.parameters() if p.requires_grad)


@pytest.mark.parametrize("name", ["pissa", "rlpo"])
def test_a_rank_that_a_layer_does_not_have_is_refused(name):
    with pytest.raises(ModelError) as caught:
        policy_of(name, rank=65)
    (line,) = str(caught.value).splitlines()
    assert line.startswith("peft.rank: model.layers.0.self_attn.k_proj is 64 x 128 and has no 65 singular triples")


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize("name", ["pissa", "slicefine"])
def test_a_layer_that_is_not_linear_is_refused(name):
    with pytest.raises(ModelError, match=r"^peft\.target_modules: model\.embed_tokens is no linear layer") as caught:
        policy_of(name, target_modules=["embed_tokens"])
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("position", [0, 7, 124])
def test_slicefine_changes_the_chosen_columns_and_no_others(position):
    model = base()
    before = {name: m.weight.clone() for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    policy = policy_of("slicefine", model, kwargs={"slice_position": position})
    descend(policy, steps=1)
    after = {name: m.weight for name, m in policy.merge_and_unload().named_modules() if name in before}
    for name, W in before.items():
        changed = (after[name] != W).any(0).nonzero().flatten().tolist()
        assert changed == ([] if name == "lm_head" else list(range(position, position + RANK)))


@pytest.mark.parametrize("position", [-1, 125, 1.5], ids=str)
def test_a_slice_position_that_does_not_exist_is_refused_with_where_it_could_start(position):
    with pytest.raises(PerlError) as caught:
        policy_of("slicefine", kwargs={"slice_position": position})
    (line,) = str(caught.value).splitlines()
    assert line.startswith("peft.kwargs.slice_position: ")
    if position == 125:
        assert line.endswith(
            "model.layers.0.self_attn.q_proj has 128 inputs, so a slice of 4 cannot start at 125 (between 0 and 124)"
        )
