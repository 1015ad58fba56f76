"""The head on chosen tokens against log_softmax over all logits and TRL's heads, also in float32 over bfloat16."""

import copy

import pytest
import torch
from datasets import Dataset
from live_bytes import LiveBytes
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    FalconH1Config,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from trl.trainer.utils import add_fused_lm_head

import perl.packing.head
from perl import PeftGRPOTrainer, PeftRLConfig
from perl.packing.head import LogitSettings, add_scored_forward, head_bytes, head_log_probs, logit_settings
from perl.packing.rows import Row, ScoredTokens, pad_right
from perl.policy.attach import continue_adapter
from perl.policy.fingerprint import base_fingerprint
from perl.policy.guards import RELOAD_TOLERANCE
from perl.policy.model import clean_base, evaluating
from perl.policy.precision import in_float32
from perl.policy.reference import token_log_probs
from perl.policy.save_adapter import reload_difference
from perl.policy.saved.adapter import find_adapter
from perl.rewards import accuracy_reward
from perl.sandbox import load_problems
from tests.packing.families import make
from tests.packing.test_attention import COMMON
from tests.trainer.untied_bases import write_untied_base

VOCABULARY, WIDTH = 97, 12
SETTINGS = {
    "plain": LogitSettings(),
    "temperature": LogitSettings(temperature=0.7),
    "scale": LogitSettings(scale=0.0625),
    "softcap": LogitSettings(softcap=3.0),
    "all of them": LogitSettings(temperature=1.3, scale=1.5, softcap=4.0, float32=True),
}


def problem(tokens=300, dtype=torch.float64, bias=True, trains=False):
    """Hidden states with a gradient, a head, targets, and a factor for each token's log-probability and entropy."""
    generator = torch.Generator().manual_seed(5)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    hidden = normal(tokens, WIDTH).requires_grad_()
    weight = normal(VOCABULARY, WIDTH).requires_grad_(trains)
    biases = normal(VOCABULARY).requires_grad_(trains) if bias else None
    targets = torch.randint(VOCABULARY, (tokens,), generator=generator)
    return hidden, weight, biases, targets, normal(tokens), normal(tokens)


def by_hand(hidden, weight, bias, targets, settings):
    """log_softmax of all logits."""
    logits = hidden @ weight.T + (0.0 if bias is None else bias)
    logits = logits * settings.scale
    if settings.softcap is not None:
        logits = settings.softcap * torch.tanh(logits / settings.softcap)
    log_probs = torch.log_softmax(logits / settings.temperature, dim=-1)
    return log_probs.gather(1, targets.unsqueeze(1)).squeeze(1), -(log_probs.exp() * log_probs).sum(dim=1)


def assert_close(found, expected, relative):
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.double() - theirs.double()).norm() <= relative * theirs.double().norm()


@pytest.mark.parametrize("trains", [True, False], ids=["head trains", "head frozen"])
@pytest.mark.parametrize("entropy", ["none", "value", "gradient"])
@pytest.mark.parametrize("settings", SETTINGS)
def test_an_entropy_and_a_head_that_trains_get_their_gradients(settings, entropy, trains):
    hidden, weight, bias, targets, factors, entropy_factors = problem(dtype=torch.float32, trains=trains)
    log_probs, entropies = head_log_probs(hidden, weight, bias, targets, SETTINGS[settings], entropy=entropy)
    expected, expected_entropies = by_hand(hidden, weight, bias, targets, SETTINGS[settings])
    loss, expected_loss = (log_probs * factors).sum(), (expected * factors).sum()
    assert (entropies is None) == (entropy == "none")
    assert ("_Head" in type(log_probs.grad_fn).__name__) == (not trains and entropy != "gradient")  # else not fused
    if entropy != "none":
        assert_close([entropies], [expected_entropies], 1e-5)
        assert entropies.requires_grad == (entropy == "gradient")
    if entropy == "gradient":
        loss, expected_loss = (
            loss + (entropies * entropy_factors).sum(),
            expected_loss + (expected_entropies * entropy_factors).sum(),
        )
    tensors = [tensor for tensor in (hidden, weight, bias) if tensor.requires_grad]
    assert len(tensors) == (3 if trains else 1)
    found = torch.autograd.grad(loss, tensors)
    assert_close((log_probs, *found), (expected, *torch.autograd.grad(expected_loss, tensors)), 1e-5)


@pytest.mark.parametrize("entropy", ["none", "value"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("settings", SETTINGS)
def test_fused_or_by_trls_kernel_the_numbers_and_the_gradient_are_those_of_all_logits(settings, dtype, entropy):
    hidden, weight, bias, targets, factors, _ = problem(dtype=dtype)
    exact = [tensor.detach().double() for tensor in (hidden, weight, bias)]
    exact[0].requires_grad_()
    expected = by_hand(*exact, targets, SETTINGS[settings])
    expected_gradient = torch.autograd.grad((expected[0] * factors.double()).sum(), exact[0])
    # Of 8 bits of a bfloat16: logits are rounded once, slopes once, and the gradient where it is handed back.
    limit = 1e-5 if dtype == torch.float32 else 1e-2
    for fused in (True, False):
        log_probs, entropies = head_log_probs(
            hidden, weight, bias, targets, SETTINGS[settings], entropy=entropy, fused=fused
        )
        assert (type(log_probs.grad_fn).__name__ == "_HeadBackward") == fused
        assert log_probs.dtype == torch.float32
        gradient = torch.autograd.grad((log_probs * factors.float()).sum(), hidden)
        assert_close((log_probs, *gradient), (expected[0], *expected_gradient), limit)
        if entropy == "value":
            assert_close([entropies], [expected[1]], limit)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("autocast", [False, True])
def test_what_a_fused_pass_holds_is_what_is_planned_for_it(stored, autocast, monkeypatch):
    memory, vocabulary, width, tokens = 2**28, 1000, 16, 600
    monkeypatch.setattr(perl.packing.head, "memory_of", lambda _: memory)
    compute = torch.bfloat16 if autocast else stored
    hidden = torch.randn(tokens, width, dtype=stored, requires_grad=True)
    weight, targets = torch.randn(vocabulary, width, dtype=stored), torch.zeros(tokens, dtype=torch.long)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), LiveBytes() as live:
        kept = head_log_probs(hidden, weight, None, targets, LogitSettings(), fused=True)
    slopes = 4 * tokens * width
    held = head_bytes((vocabulary, width), stored, compute, memory, fused=True)
    assert len(kept) == 2
    assert live.peak - slopes == pytest.approx(held, rel=0.06)
    # A base of 1.5B on a GPU of 80 GB: tiles of 384 tokens; all weights of its head where autocast rounds them.
    sizes = (151_936, 1536)
    known = head_bytes(sizes, torch.float32, torch.bfloat16, 80 * 2**30, fused=True)
    assert known == 384 * 151_936 * 14 + 2 * 151_936 * 1536


@pytest.mark.parametrize("entropy", ["none", "value", "gradient"])
def test_no_tokens_give_no_numbers_and_a_gradient_of_zero(entropy):
    hidden, weight, bias, targets, *_ = problem(tokens=0, dtype=torch.float32)
    source = torch.randn(4, WIDTH, requires_grad=True)
    log_probs, _ = head_log_probs(
        torch.cat([hidden, source[:0]]), weight, bias, targets, LogitSettings(), entropy=entropy
    )
    assert log_probs.shape == (0,)
    log_probs.sum().backward()
    assert source.grad.tolist() == [[0.0] * WIDTH] * 4


@pytest.mark.parametrize("entropy", ["value", "gradient"])
def test_a_float32_head_on_a_bfloat16_model_rounds_its_inputs_only(entropy):
    hidden, weight, bias, targets, factors, _ = problem(dtype=torch.bfloat16)
    exact = [tensor.detach().float() for tensor in (hidden, weight, bias)]
    exact[0].requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):  # the head stays out of it
        found, entropies = head_log_probs(
            hidden, weight, bias, targets, LogitSettings(temperature=0.7, float32=True), entropy=entropy
        )
    expected = by_hand(*exact, targets, LogitSettings(temperature=0.7))
    assert found.dtype == torch.float32
    assert_close((found, entropies), expected, 1e-5)
    gradient = torch.autograd.grad((found * factors.float()).sum(), hidden)
    assert gradient[0].dtype == torch.bfloat16
    assert_close(gradient, torch.autograd.grad((expected[0] * factors.float()).sum(), exact[0]), 4e-3)


TINY = {**COMMON, "vocab_size": VOCABULARY, "initializer_range": 0.3}
GPT2 = {"vocab_size": VOCABULARY, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.3}
MODELS = {
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**GPT2, bos_token_id=0, eos_token_id=1)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**TINY)),
    "gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(**TINY, final_logit_softcapping=2.0)),
    "cohere": lambda: CohereForCausalLM(CohereConfig(**TINY, logit_scale=0.25)),
    "granite": lambda: GraniteForCausalLM(GraniteConfig(**TINY, logits_scaling=3.0)),
}


@pytest.mark.parametrize("float32", [False, True], ids=["head as it is", "float32 head"])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_scores_tokens_as_with_trls_fused_head_and_as_its_own_logits_do(name, float32):
    model = MODELS[name]().eval()
    rows = [
        Row(torch.randint(2, VOCABULARY, (p,)), torch.randint(2, VOCABULARY, (c,)), torch.ones(c).bool())
        for p, c in ((3, 6), (5, 2), (1, 1))
    ]
    ids = torch.nn.utils.rnn.pad_sequence([torch.cat([row.prompt, row.completion]) for row in rows], batch_first=True)
    labels = torch.full_like(ids, -100)
    for index, row in enumerate(rows):
        labels[index, len(row.prompt) : len(row.prompt) + len(row.completion)] = row.completion
    mask = torch.tensor([[int(t <= row.tokens) for t in range(ids.size(1))] for row in rows])
    wanted = labels[:, 1:] != -100
    with torch.no_grad():
        logits = model(ids, attention_mask=mask).logits[:, :-1].double() / 0.7
    every = torch.log_softmax(logits, dim=-1)
    add_fused_lm_head(model, temperature=0.7, cast_lm_head_to_fp32=float32, outputs=("log_probs", "entropy"))
    theirs = model(ids, attention_mask=mask, labels=labels, fused_lm_head=True)
    add_scored_forward(model, logit_settings(model.config, temperature=0.7, float32=float32))
    batch = pad_right(rows)
    log_probs, entropies = model(batch.input_ids, attention_mask=batch.attention_mask, scored=batch.scored)
    expected = every.gather(-1, labels[:, 1:].clamp(min=0).unsqueeze(-1)).squeeze(-1)[wanted]
    for ours, trls, plain in (
        (log_probs, theirs.log_probs[wanted], expected),
        (entropies, theirs.entropy[wanted], -(every.exp() * every).sum(-1)[wanted]),
    ):
        torch.testing.assert_close(ours, trls, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(ours.double(), plain, rtol=1e-5, atol=1e-5)


def test_settings_come_from_the_config_under_all_of_their_names():
    def found(**options):
        return logit_settings(PreTrainedConfig(**options), temperature=0.5, float32=True)

    assert found() == LogitSettings(temperature=0.5, float32=True)
    assert found(logit_scale=None, lm_head_multiplier=0.25).scale == 0.25
    assert found(logit_scale=0.0, output_multiplier=3.0).scale == 0.0
    assert found(output_multiplier=0.5).scale == 0.5
    assert found(logits_scaling=8.0).scale == 0.125
    assert found(final_logit_softcapping=30.0).softcap == 30.0
    assert logit_settings(FalconH1Config(lm_head_multiplier=0.75), temperature=1.0, float32=False).scale == 0.75
    clova = PreTrainedConfig(logits_scaling=8.0)
    clova.model_type = "hyperclovax"
    assert logit_settings(clova, temperature=1.0, float32=False).scale == 8.0


def test_single_tokens_that_train_in_a_tied_head_too_have_their_numbers_and_gradient():
    tied = Qwen2ForCausalLM(Qwen2Config(**TINY, tie_word_embeddings=True))
    policy = get_peft_model(tied, LoraConfig(target_modules=["q_proj"], trainable_token_indices=[3, 7]))
    trained = tied.get_input_embeddings().token_adapter.trainable_tokens_delta["default"]
    trained.data += 1
    ids = torch.tensor([[5, 7, 3, 9]])
    expected = policy(input_ids=ids).logits.log_softmax(-1)[0, [0, 1, 2], [7, 3, 9]]
    wanted = torch.autograd.grad(expected.sum(), trained)
    add_scored_forward(tied, LogitSettings())
    found, _ = policy(
        input_ids=ids, scored=ScoredTokens(torch.arange(3), ids[0, 1:], torch.zeros(3).long(), torch.arange(3), 4)
    )
    assert_close((found, *torch.autograd.grad(found.sum(), trained)), (expected, *wanted), 1e-5)


def test_virtual_tokens_in_front_are_not_scored_and_other_calls_are_as_they_were():
    model = MODELS["qwen2"]().eval()
    ids, embeddings = torch.randint(2, VOCABULARY, (2, 6)), torch.randn(2, 3, 32)
    inputs = torch.cat([embeddings, model.get_input_embeddings()(ids)], dim=1)
    before = model(inputs_embeds=inputs).logits
    add_scored_forward(model, LogitSettings())
    assert torch.equal(model(inputs_embeds=inputs).logits, before)
    scored = ScoredTokens(
        torch.tensor([1, 4, 9]), torch.tensor([7, 8, 9]), torch.tensor([0, 0, 1]), torch.tensor([0, 3, 2]), 6
    )
    log_probs, _ = model(inputs_embeds=inputs, scored=scored)
    expected = torch.log_softmax(before, dim=-1)[[0, 0, 1], [3 + 1, 3 + 4, 3 + 3], [7, 8, 9]]
    torch.testing.assert_close(log_probs, expected, rtol=1e-5, atol=1e-5)


PROBE = torch.arange(40).reshape(2, 20)


@pytest.fixture(scope="module")
def untied(tmp_path_factory):
    return write_untied_base(tmp_path_factory.mktemp("bases") / "untied")


def varied(completions, **_):
    return [float(len(str(completion)) % 7) for completion in completions]


def trainer(model, folder, *, cast, dtype="bfloat16", **changes):
    settings = {
        "use_cpu": True, "bf16": False, "prompts_per_step": 2, "num_generations": 4, "per_device_train_batch_size": 8,
        "max_completion_length": 12, "max_steps": 2, "learning_rate": 1e-2, "report_to": [],
        "save_strategy": "no", "disable_tqdm": True, "cast_lm_head_to_fp32": cast,
        "model_init_kwargs": {"dtype": dtype},
    }  # fmt: skip
    chosen = load_problems("sandbox:addition", "train")[:8]
    data = Dataset.from_list([{"prompt": p.question, "solution": p.answer} for p in chosen])
    args = PeftRLConfig(str(folder), **{**settings, **changes})
    return PeftGRPOTrainer(model=model, reward_funcs=[accuracy_reward, varied], args=args, train_dataset=data)


def loaded(folder, dtype):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


@pytest.fixture(scope="module")
def trained(untied, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    trainer_ = trainer(untied, folder, cast=True)
    trainer_.train()
    trainer_.save_adapter(folder / "adapter")
    return trainer_, folder / "adapter"


def test_the_saved_adapter_carries_the_fingerprint_of_the_base_as_it_is_published(trained, untied):
    trainer_, adapter = trained
    assert trainer_.policy.get_base_model().lm_head.weight.dtype == torch.float32
    saved = find_adapter(str(adapter))
    assert saved.base_fingerprint == base_fingerprint(loaded(untied, torch.bfloat16))
    assert saved.base_dtype == "bfloat16"


def test_the_saved_adapter_is_compared_under_the_same_head(trained):
    trainer_, adapter = trained
    assert reload_difference(trainer_.policy, adapter, PROBE) <= RELOAD_TOLERANCE
    with torch.no_grad(), trainer_.policy.disable_adapter(), evaluating(trainer_.policy):
        expected = token_log_probs(trainer_.policy, PROBE, torch.ones_like(PROBE))
    clean = clean_base(trainer_.policy)
    torch.testing.assert_close(token_log_probs(clean, PROBE, torch.ones_like(PROBE)), expected, rtol=0, atol=0)
    assert not any("lora" in name for name, _ in clean.named_parameters())


@pytest.mark.parametrize(("cast", "dtype"), [(True, "bfloat16"), (False, "float32")])
def test_it_is_continued_where_it_was_with_and_without_the_cast(trained, untied, tmp_path, cast, dtype):
    trainer_ = trainer(untied, tmp_path, cast=cast, dtype=dtype, adapter=str(trained[1]), max_steps=1)
    plain = loaded(untied, getattr(torch, dtype))
    if cast:  # by the user, too
        plain.lm_head.float()
    continued = continue_adapter(plain, find_adapter(str(trained[1]))).eval()
    mask = torch.ones_like(PROBE)
    with evaluating(trainer_.policy), in_float32(trainer_.policy), in_float32(continued):
        found = token_log_probs(trainer_.policy, PROBE, mask)
        torch.testing.assert_close(found, token_log_probs(continued, PROBE, mask), rtol=0, atol=1e-4)
    trainer_.train()
    assert trainer_.state.log_history[0]["grad_norm"] > 0


def test_a_copy_of_a_model_computes_with_its_own_weights():
    model = make("Llama")
    again = copy.deepcopy(model)
    with torch.no_grad():
        again.lm_head.weight.zero_()
        assert again(torch.arange(5)[None]).logits.abs().max() == 0
        assert model(torch.arange(5)[None]).logits.abs().max() > 0
