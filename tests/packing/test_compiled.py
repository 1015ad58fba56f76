"""Compiled layers beside the same layers as they were written: numbers, gradients, references, names; no new graphs."""

import copy
import logging
import shutil

import pytest
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from torch._dynamo.utils import counters

import perl.packing.compiled
from perl import PeftGRPOTrainer, PeftRLConfig
from perl.errors import ModelError, RecipeError
from perl.packing.attention import use_packed_attention
from perl.packing.compiled import check_compiler, compile_layers
from perl.packing.forward import choose_passes, score
from perl.packing.fused_lora import fuse_lora
from perl.packing.head import LogitSettings, add_scored_forward, head_log_probs
from perl.packing.memory import measure
from perl.packing.rows import Row
from perl.policy.reference import Reference
from tests.oracles.rollouts import VOCABULARY
from tests.oracles.two_trainers import base, relative_difference, train
from tests.packing.families import make as make_family
from tests.packing.test_forward import GROUPS, ROWS, alone, gradients

COLUMNS = 12
# What torch's compiler uses of itself and of Python and warns of.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:torch"),
]


@pytest.fixture(scope="module", autouse=True)
def _traced():
    """Graphs are made and run, forward and backward, but no code is generated for them, which takes long."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(perl.packing.compiled, "_BACKEND", "aot_eager")
        yield


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


def make_policy(*, checkpointing: bool = False):
    torch.manual_seed(2)
    lora = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    model = copy.deepcopy(base(torch.float32))
    model.model.layers = model.model.layers[:1]
    model.config.num_hidden_layers, model.config.layer_types = 1, ["full_attention"]
    policy = get_peft_model(model, lora).train()
    assert fuse_lora(policy) == 7
    add_scored_forward(model, LogitSettings())
    assert use_packed_attention(model) is None
    if checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    return policy


def compiled_twin(policy):
    """A copy with the same tensors whose layers are compiled."""
    twin = make_policy(checkpointing=policy.get_base_model().is_gradient_checkpointing)
    twin.load_state_dict(policy.state_dict())
    assert compile_layers(twin.get_base_model(), packed=True) is None
    return twin


def run(policy, seed: int, *, shared: bool = True) -> torch.Tensor:
    """(N, T) log-probabilities of rows whose number and lengths come from the seed."""
    generator = torch.Generator().manual_seed(seed)
    prompt, lengths = torch.arange(2, 5 + seed % 3), torch.randint(2, COLUMNS, (3 + seed % 4,), generator=generator)
    rows = [
        Row(prompt, torch.randint(VOCABULARY, (n,), generator=generator), torch.ones(n, dtype=torch.bool))
        for n in lengths.tolist()
    ]
    groups = [list(range(len(rows)))] if shared else [[index] for index in range(len(rows))]
    return score(policy, rows, groups, packed=True, columns=COLUMNS)[0]


def with_gradient(policy, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    policy.zero_grad()
    log_probs = run(policy, seed)
    (log_probs * torch.linspace(-1, 1, COLUMNS)).sum().backward()
    return log_probs.detach(), torch.cat([p.grad.flatten() for p in policy.parameters() if p.requires_grad])


def assert_close(found, expected, relative=1e-5):
    assert (found - expected).norm() <= relative * expected.norm()


@pytest.fixture(scope="module")
def pair():
    """A policy, and its twin whose layers are compiled and have seen every kind of pass once."""
    policy = make_policy()
    twin = compiled_twin(policy)
    before = graphs()
    measure(twin, packed=True)  # the first pass of a run on a GPU, under hooks on what is kept
    with torch.no_grad():
        run(twin, 0)
        with twin.disable_adapter():
            run(twin, 0)
    assert graphs() > before
    return policy, twin


def test_compiled_layers_have_the_numbers_and_the_gradient_of_those_as_they_were_written(monkeypatch):
    """Traced alone; what runs the graphs of forward and backward passes is in the tests of the night."""
    monkeypatch.setattr(perl.packing.compiled, "_BACKEND", "eager")
    policy = make_policy()
    twin, before = compiled_twin(policy), graphs()
    for seed in (1, 2):
        for found, expected in zip(with_gradient(twin, seed), with_gradient(policy, seed), strict=True):
            assert_close(found, expected)
    assert graphs() > before


@pytest.mark.parametrize("names", [("Qwen3", "Mistral", "GptOss"), ("Qwen3_5Text", "GraniteMoeHybrid", "Lfm2")])
def test_compiled_layers_of_one_family_after_another_have_windows_sinks_and_states(names, monkeypatch):
    """A graph of one family is not another's, whatever code they share."""
    monkeypatch.setattr(perl.packing.compiled, "_BACKEND", "eager")
    for name in names:
        model = make_family(name).train()
        expected = alone(model)
        wanted = gradients(model, expected)
        assert choose_passes(model, padding_free=True, share=True).shared
        assert compile_layers(model, packed=True) is None
        found, _ = score(model, ROWS, GROUPS, packed=True, columns=expected.size(1))
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)
        assert (gradients(model, found) - wanted).norm() <= 1e-5 * wanted.norm()


@pytest.mark.nightly
@pytest.mark.parametrize("seed", [1, 2])
def test_rows_of_other_lengths_have_the_same_numbers_and_gradient_and_no_new_graph(pair, seed):
    before = graphs()
    (expected, expected_gradient), (found, gradient) = (with_gradient(policy, seed) for policy in pair)
    assert_close(found, expected)
    assert_close(gradient, expected_gradient)
    with torch.no_grad():
        assert_close(run(pair[1], seed, shared=False), expected)
    assert graphs() == before


@pytest.mark.nightly
def test_the_reference_is_not_the_policy_that_was_compiled(pair):
    before = graphs()
    policy, twin = pair
    other = Reference(twin, "initial")
    for tensor in other.snapshot.values():
        tensor.mul_(1.5)
    with torch.no_grad():
        expected = [run(policy, 4)]
        with policy.disable_adapter():
            expected.append(run(policy, 4))
        trained = [p for p in policy.parameters() if p.requires_grad]
        torch._foreach_mul_([p.data for p in trained], 1.5)
        expected.append(run(policy, 4))
        torch._foreach_div_([p.data for p in trained], 1.5)
        for reference, wanted in zip((None, Reference(twin, "base"), other), expected, strict=True):
            if reference is None:
                assert_close(run(twin, 4), wanted)
                continue
            with reference.in_place_of(twin):
                assert_close(run(twin, 4), wanted)
        assert_close(run(twin, 4), expected[0])
    assert all((one - two).norm() > 0.1 for one, two in [expected[:2], expected[1:]])
    assert graphs() == before


@pytest.mark.nightly
def test_rollouts_and_names_are_those_of_the_layers_as_they_were_written(pair):
    before = graphs()
    policy, twin = pair
    tokens = torch.tensor([[3, 4, 5]])
    for mode in (True, False):
        written = [
            p.train(mode).generate(
                input_ids=tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=5, do_sample=False
            )
            for p in pair
        ]
        assert torch.equal(*written)
    policy.train(), twin.train()
    assert graphs() == before
    assert list(twin.state_dict()) == list(policy.state_dict())
    assert list(get_peft_model_state_dict(twin)) == list(get_peft_model_state_dict(policy))
    assert [type(m).__name__ for m in twin.modules()] == [type(m).__name__ for m in policy.modules()]


@pytest.mark.nightly
def test_checkpointing_and_autocast_change_a_compiled_policy_as_they_change_another():
    policy = make_policy(checkpointing=True)
    twin = compiled_twin(policy)
    with torch.autocast("cpu", torch.bfloat16):
        expected, found = with_gradient(policy, 6), with_gradient(twin, 6)
        before = graphs()
        with_gradient(twin, 7)
    assert_close(found[0], expected[0], 1e-2)  # rounded in other places, where operations are joined
    assert_close(found[1], expected[1], 3e-2)
    assert graphs() == before


@pytest.mark.nightly
def test_two_steps_of_a_compiled_policy_are_those_of_another():
    options = {"max_steps": 2, "loss_type": "grpo", "gradient_accumulation_steps": 4}
    before = graphs()
    plain = train(PeftGRPOTrainer, **options).update()
    assert graphs() == before
    found = train(PeftGRPOTrainer, **options, compile_layers=True, fused_head=True).update()
    assert graphs() > before
    assert found.keys() == plain.keys()
    assert relative_difference(found, plain) <= 1e-5


@pytest.mark.parametrize(
    ("options", "why"),
    [
        *(({"packed": False}, "padded"), ({"packed": True, "whole": False}, "shards"), ({"packed": True}, "none")),
        ({"packed": True}, "quantised"),
    ],
    ids=["padded", "shards", "none", "quantised"],
)
def test_what_is_not_compiled_has_a_reason_and_stays(options, why):
    model = copy.deepcopy(base(torch.float32)) if why == "quantised" else torch.nn.Linear(2, 2)
    model.hf_quantizer = object() if why == "quantised" else None
    kinds = [type(module) for module in model.modules()]
    assert why in compile_layers(model, **options)
    assert [type(module) for module in model.modules()] == kinds


def test_a_run_with_padded_rows_says_that_nothing_is_compiled(caplog):
    with caplog.at_level(logging.WARNING, "perl"):
        train(PeftGRPOTrainer, max_steps=1, gradient_accumulation_steps=4, compile_layers=True, padding_free=False)
    assert "layers are not compiled: its rows are padded [PRL322]" in caplog.messages


@pytest.mark.parametrize("other", [{"torch_compile": True}, {"torch_compile_backend": "inductor"}], ids=str)
def test_a_model_is_not_compiled_twice(other):
    with pytest.raises(RecipeError, match=r"compile_layers.*torch_compile"):
        PeftRLConfig("run", use_cpu=True, compile_layers=True, **other)


def test_a_machine_without_a_compiler_is_refused_in_one_line(monkeypatch):
    def broken(*_):
        raise RuntimeError("no C++ compiler found\nand much more")

    monkeypatch.setattr(perl.packing.compiled, "_BACKEND", broken)
    with pytest.raises(ModelError, match="no C\\+\\+ compiler found") as error:
        check_compiler(torch.device("cpu"))
    assert "\n" not in str(error.value)


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler, which torch's generated code needs on a CPU")
def test_generated_code_has_the_numbers_of_the_head_as_it_was_written(monkeypatch):
    monkeypatch.setattr(perl.packing.compiled, "_BACKEND", "inductor")
    check_compiler(torch.device("cpu"))
    settings = LogitSettings(temperature=0.7, scale=1.5, softcap=4.0)
    weight, bias, found = torch.randn(53, 8), torch.randn(53), []
    for compiled in (False, True):
        for tokens in (40, 100):
            generator = torch.Generator().manual_seed(1)
            hidden = torch.randn(tokens, 8, generator=generator).requires_grad_()
            targets = torch.randint(53, (tokens,), generator=generator)
            log_probs, entropies = head_log_probs(
                hidden, weight, bias, targets, settings, fused=True, compiled=compiled
            )
            log_probs.square().sum().backward()
            found.append((log_probs.detach(), entropies, hidden.grad))
    for plain, generated in zip(found[:2], found[2:], strict=True):
        for one, other in zip(generated, plain, strict=True):
            assert_close(one, other, 1e-6)
