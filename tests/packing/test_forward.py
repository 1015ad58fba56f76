"""Rows packed, padded and with shared prompts against the model on each row alone; which models may be packed."""

import copy
import functools

import pytest
import torch
import transformers
from peft import PrefixTuningConfig, PromptTuningConfig, get_peft_model
from torch import nn

import perl.packing.attention
from perl.packing.attention import use_packed_attention
from perl.packing.forward import Passes, choose_passes, score, score_all
from perl.packing.head import LogitSettings, add_scored_forward, logit_settings
from perl.packing.rows import LEAST_COMMON, Row, pack
from tests.packing.families import MULTIMODAL, PACKED, PADDED, TOKENS, VOCABULARY, make

COLUMNS = 9


def some_rows() -> tuple[list[Row], list[list[int]]]:
    """Shared prompts, one of a single token; a tool's tokens; a completion of one token, one of none."""
    generator = torch.Generator().manual_seed(4)

    def tokens(count):
        return torch.randint(2, VOCABULARY, (count,), generator=generator)

    prompts = {"long": tokens(6), "short": tokens(1), "own": tokens(4)}
    rows = [
        (name, tokens(count))
        for name, count in zip(
            ["long", "short", "long", "own", "short", "long", "long"], [9, 5, 1, 7, 3, 0, 8], strict=True
        )
    ]
    masks = [torch.arange(len(completion)) % 4 != 2 for _, completion in rows]
    return [Row(prompts[name], c, m) for (name, c), m in zip(rows, masks, strict=True)], [[6, 0, 2, 5], [3], [1, 4]]


ROWS, GROUPS = some_rows()
ALONE = [[index] for index in range(len(ROWS))]
FACTORS = torch.randn(len(ROWS), COLUMNS, generator=torch.Generator().manual_seed(9))


def alone(model, rows=ROWS, columns=COLUMNS) -> torch.Tensor:
    """(N, T) a log_softmax over the logits of each row by itself."""
    result = torch.zeros(len(rows), columns)
    for index, row in enumerate(rows):
        ids = torch.cat([row.prompt, row.completion]).unsqueeze(0)
        log_probs = torch.log_softmax(model(ids).logits[0] / 0.9, dim=-1)
        for column in row.scored.nonzero().flatten().tolist():
            result[index, column] = log_probs[len(row.prompt) + column - 1, row.completion[column]]
    return result


def gradients(model, log_probs) -> torch.Tensor:
    model.zero_grad()
    (log_probs * FACTORS).sum().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("name", PACKED | PADDED | MULTIMODAL)
def test_a_row_has_the_same_numbers_and_gradient_alone_padded_packed_and_behind_a_shared_prompt(name):
    model = make(name).train()  # no dropout in any of them
    expected = alone(model)
    expected_gradient = gradients(model, expected)
    ways = [(False, ALONE)] + ([(True, ALONE), (True, ALONE[::-1]), (True, GROUPS)] if name not in PADDED else [])
    found = choose_passes(model, padding_free=True, share=True)
    assert (found.packed, found.shared) == (name not in PADDED, name not in PADDED), found.why
    for packed, groups in ways:
        log_probs, entropies = score(model, ROWS, groups, packed=packed, columns=COLUMNS)
        torch.testing.assert_close(log_probs, expected, rtol=0, atol=2e-5)
        assert ((entropies > 0) == (expected != 0)).all()
        gradient = gradients(model, log_probs)
        assert (gradient - expected_gradient).norm() <= 1e-5 * expected_gradient.norm()


def test_padding_is_done_where_it_is_requested_and_prompts_are_shared_where_they_may():
    model = make("Llama")
    before = model.config._attn_implementation
    assert choose_passes(model, padding_free=False, share=True) == Passes(packed=False, shared=False)
    assert model.config._attn_implementation == before
    assert choose_passes(model, padding_free=True, share=False) == Passes(packed=True, shared=False)


@pytest.mark.parametrize("name", PADDED)
def test_a_model_that_cannot_be_packed_is_refused_with_a_reason_and_goes_on_as_before(name):
    model = make(name).eval()
    with torch.no_grad():
        before = alone(model)
        found = choose_passes(model, padding_free=True, share=True)
        assert (found.packed, found.shared) == (False, False)
        assert PADDED[name][1] in found.why
        assert torch.equal(alone(model), before)


@pytest.mark.parametrize(
    ("kind", "reason"), [(PromptTuningConfig, "PROMPT_TUNING"), (PrefixTuningConfig, "PREFIX_TUNING")]
)
def test_virtual_tokens_are_refused_and_their_rows_padded(kind, reason):
    policy = get_peft_model(make("Llama"), kind(task_type="CAUSAL_LM", num_virtual_tokens=3)).eval()
    found = choose_passes(policy, padding_free=True, share=True)
    assert not found.packed
    assert reason in found.why
    with torch.no_grad():
        together, _ = score(policy, ROWS, ALONE, packed=False, columns=COLUMNS)
        for index, row in enumerate(ROWS):
            one, _ = score(policy, [row], [[0]], packed=False, columns=COLUMNS)
            torch.testing.assert_close(together[index], one[0], rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", ["Qwen3", "Llama"])
def test_completions_that_are_run_once_have_the_log_probs_and_the_gradient_of_each(name):
    policy = make(name).train()
    assert choose_passes(policy, padding_free=True, share=True).shared
    prompt, written = torch.randint(2, VOCABULARY, (5,)), [torch.randint(2, VOCABULARY, (n,)) for n in (7, 4)]
    chosen = [written[0], written[1], written[0], torch.cat([written[0][:-1], written[1][:1]]), written[1]]
    rows = [Row(prompt, ids, torch.ones(len(ids), dtype=torch.bool)) for ids in chosen]
    weights_NT = torch.randn(len(rows), COLUMNS)
    found, seen = [], []
    for groups, packed in (([[i] for i in range(5)], False), ([list(range(5))], True)):
        log_probs_NT, entropies_NT = score(policy, rows, groups, packed=packed, columns=COLUMNS)
        seen.append((log_probs_NT.detach(), entropies_NT))
        parts = torch.autograd.grad((log_probs_NT * weights_NT).sum(), list(policy.parameters()), allow_unused=True)
        found.append(torch.cat([part.flatten() for part in parts if part is not None]))
    for one, other in zip(*seen, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=2e-5)
    assert (found[1] - found[0]).norm() <= 1e-5 * found[0].norm()


@pytest.mark.parametrize(
    "name", ["Qwen3", "Gemma2", "GptOss", "Qwen3Moe", "Qwen3_5Text", "Bamba", "Lfm2", "KimiLinear"]
)
def test_completions_run_as_a_tree_have_the_log_probs_and_the_gradient_of_each_alone(name):
    model, draw = make(name).train(), torch.Generator().manual_seed(5)

    def tokens(count):
        return torch.randint(2, VOCABULARY, (count,), generator=draw)

    prompt, stem, middle = tokens(5), tokens(LEAST_COMMON + 4), tokens(LEAST_COMMON + 2)
    deep = [torch.cat([stem, middle, tokens(count)]) for count in (3, 7)]
    ends = [torch.cat([stem, tokens(4)]), torch.cat([stem, tokens(1)]), torch.cat([stem[:9], tokens(20)]), deep[0]]
    completions = [*deep, *ends, tokens(6)]
    rows = [Row(prompt, one, torch.arange(len(one)) % 5 != 3) for one in completions]
    columns = max(map(len, completions))
    factors = torch.randn(len(rows), columns, generator=draw)

    def made(log_probs):
        model.zero_grad()
        (log_probs * factors).sum().backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    expected = alone(model, rows, columns)
    gradient = made(expected)
    choose_passes(model, padding_free=True, share=True)
    packed = pack(rows, [list(range(len(rows)))])
    # stem, middle, what each has alone but the last token; the deep one that comes twice is run once
    assert packed.input_ids.numel() == 5 + len(stem) + len(middle) + 2 + 6 + 3 + (9 + 19) + 5
    assert max(len(segment.prefixes) for segment in packed.layout.segments) == 3
    log_probs, _ = score(model, rows, [list(range(len(rows)))], packed=True, columns=columns)
    torch.testing.assert_close(log_probs, expected, rtol=0, atol=2e-5)
    assert (made(log_probs) - gradient).norm() <= 1e-5 * gradient.norm()


def test_rows_longer_than_a_chunk_of_attention_are_padded():
    model = make("Llama4Text", attention_chunk_size=16).eval()
    found = choose_passes(model, padding_free=True, share=True)
    prompt = torch.randint(2, VOCABULARY, (12,))
    rows = [Row(prompt, torch.randint(2, VOCABULARY, (c,)), torch.ones(c).bool()) for c in (5, 6)]
    assert [row.tokens for row in rows] == [16, 17]
    assert found.packs(rows[:1])
    assert not found.packs(rows)
    with torch.no_grad():
        for packs, chosen in ((True, rows[:1]), (False, rows)):
            found_log_probs, _ = score(model, chosen, [[i] for i in range(len(chosen))], packed=packs, columns=COLUMNS)
            torch.testing.assert_close(found_log_probs, alone(model, chosen), rtol=0, atol=2e-5)


def test_a_window_that_packed_attention_is_not_told_of_shows_however_wide_it_is(monkeypatch):
    model = make("Mistral", sliding_window=4096)
    assert choose_passes(model, padding_free=True, share=True).packed
    assert model.config.sliding_window == model.model.layers[0].self_attn.config.sliding_window == 4096
    attend = perl.packing.attention.packed_attention
    blind = functools.partial(attend, scores=perl.packing.attention.PLAIN)
    monkeypatch.setattr(perl.packing.attention, "packed_attention", lambda *args: blind(*args[:4]))
    assert "nats" in choose_passes(model, padding_free=True, share=True).why


@pytest.mark.parametrize("name", ["Qwen3", "Mamba"])
def test_choosing_leaves_the_random_state_and_every_modules_mode_as_they_were(name):
    model = make(name).train()
    next(module for name, module in model.named_modules() if name.endswith("layers.0")).eval()  # someone froze it
    modes, state = [module.training for module in model.modules()], torch.get_rng_state()
    parameters = copy.deepcopy(list(model.parameters()))
    choose_passes(model, padding_free=True, share=True)
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in model.modules()] == modes
    assert all(p.grad is None and torch.equal(p, q) for p, q in zip(model.parameters(), parameters, strict=True))


class Silent(nn.Module):
    """A layer that cannot run packed rows, and does not say why."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args, **kwargs):
        if "packed_layout" in kwargs:
            raise self.error
        return self.inner(*args, **kwargs)


@pytest.mark.parametrize("error", [NotImplementedError(), RuntimeError("a\nb")], ids=repr)
def test_a_model_that_fails_on_packed_rows_in_any_way_is_padded(error):
    model = make("Qwen3")
    model.model.layers[1].self_attn = Silent(model.model.layers[1].self_attn)
    model.model.layers[1].self_attn.error = error
    found = choose_passes(model, padding_free=True, share=True)
    assert not found.packed
    assert found.why


@pytest.mark.parametrize(
    ("packed", "share", "budget"),
    [(True, True, 1), (True, True, 25), (True, False, 12), (False, False, 25), (True, True, 10**6)],
)
def test_any_budget_gives_the_numbers_of_one_pass(budget, packed, share):
    model = make("Qwen3").eval()
    assert use_packed_attention(model) is None
    with torch.no_grad():
        found = score_all(model, ROWS, packed=packed, share=share, budget=budget, columns=COLUMNS)
        torch.testing.assert_close(found, alone(model), rtol=0, atol=2e-5)
        assert score_all(model, [], packed=packed, share=share, budget=budget, columns=COLUMNS).shape == (0, COLUMNS)


def test_rows_of_which_nothing_is_scored_give_zeros_and_a_gradient_of_zero():
    model = make("Qwen3")
    add_scored_forward(model, LogitSettings())
    assert use_packed_attention(model) is None
    rows = [ROWS[5], Row(ROWS[0].prompt, ROWS[0].completion, ROWS[0].scored & False)]
    for packed in (True, False):
        log_probs, _ = score(model, rows, [[0], [1]], packed=packed, columns=COLUMNS)
        assert log_probs.tolist() == [[0.0] * COLUMNS] * 2
        log_probs.sum().backward()
    assert all(p.grad is None or p.grad.abs().max() == 0 for p in model.parameters())
    assert model.model.layers[0].self_attn.q_proj.weight.grad is not None


def deep_in_half(scale: float) -> transformers.PreTrainedModel:
    """A bfloat16 model of 28 layers whose logits have the standard deviation of a trained model's."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 28, "num_attention_heads": 4}
    config = transformers.Qwen3Config(**{**TOKENS, **sizes}, num_key_value_heads=2, head_dim=32)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "embed" not in name:
                parameter.normal_(std=parameter.size(1) ** -0.5)
        model.lm_head.weight.mul_(scale)
    model = model.to(torch.bfloat16).eval()
    add_scored_forward(model, logit_settings(model.config, temperature=1.0, float32=False))
    return model


def rounds_elsewhere(query, key, value, layout, scores):
    """Right packed attention that rounds at another place, as another kernel does."""
    exact = perl.packing.attention._by_segment(query.float(), key.float(), value.float(), layout, scores)
    return exact.to(query.dtype)


def sees_its_neighbours(query, key, value, _, scores):
    """Wrong packed attention: each row sees all rows before it."""
    attended = nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scores.scaling, enable_gqa=True
    )
    return attended.transpose(1, 2).contiguous()


@pytest.mark.nightly
def test_in_half_precision_another_kernels_rounding_is_no_reason_to_pad_and_a_neighbour_is(monkeypatch):
    model = deep_in_half(5.0)
    monkeypatch.setattr(perl.packing.attention, "packed_attention", rounds_elsewhere)
    assert choose_passes(model, padding_free=True, share=True) == Passes(packed=True, shared=True)
    monkeypatch.setattr(perl.packing.attention, "packed_attention", sees_its_neighbours)
    how = choose_passes(model, padding_free=True, share=True)
    assert not how.packed
    assert "its log-probabilities change by" in how.why
