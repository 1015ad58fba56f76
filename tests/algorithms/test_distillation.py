"""The reverse KL divergence and its derivative, and the same through a head by tiles of tokens, against autograd."""

import itertools

import pytest
import torch

from perl.packing import divergence as module
from perl.packing.divergence import head_divergence, reverse_kl
from perl.packing.head import HeadStates, LogitSettings
from tests.oracles import distillation as oracle
from tests.oracles.covering import most_pairs

TOKENS, WIDTH, VOCABULARY = 11, 7, 23
TOP_KS = [0, 1, 4, VOCABULARY - 1, VOCABULARY, 1000]


def logits(seed, spread=2.0):
    generator = torch.Generator().manual_seed(seed)
    return spread * torch.randn(TOKENS, VOCABULARY, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("top_k", TOP_KS)
def test_value_and_derivative_are_autograds(top_k):
    student, teacher = logits(1).requires_grad_(), logits(2)
    expected = oracle.reverse_kl(student, teacher, top_k)
    weights = torch.linspace(-1, 2, TOKENS, dtype=torch.float64)
    (slope,) = torch.autograd.grad((weights * expected).sum(), student)
    found = reverse_kl(student.detach().clone(), teacher.clone(), top_k=top_k)
    assert (found.per_token_S - expected).abs().max() <= 1e-12
    assert (weights[:, None] * found.slope_SV - slope).abs().max() <= 1e-12
    assert torch.equal(found.agrees_S, student.argmax(-1) == teacher.argmax(-1))


def test_far_apart_and_certain_distributions_have_finite_numbers():
    student = torch.tensor([[80.0, 0.0, -90.0], [0.0, 200.0, 0.0]])
    for top_k in (0, 1, 2):
        found = reverse_kl(student.clone(), -student, top_k=top_k)
        assert torch.isfinite(found.per_token_S).all()
        assert torch.isfinite(found.slope_SV).all()
        assert (found.per_token_S > 50).all()


SETTINGS = [
    LogitSettings(),
    LogitSettings(temperature=0.7, scale=1.5),
    LogitSettings(temperature=1.3, softcap=2.0),
]


@pytest.mark.parametrize(
    ("with_bias", "settings", "top_k", "rows"),
    most_pairs(list(itertools.product((False, True), SETTINGS, (0, 4), (1, 4, 100))), 9),
    ids=str,
)
def test_through_the_head_by_tiles_value_and_gradient_are_autograds(with_bias, settings, top_k, rows, monkeypatch):
    monkeypatch.setattr(module, "tile_rows", lambda *_: 2 * rows)
    torch.manual_seed(3)
    hidden, teacher = (torch.randn(TOKENS, WIDTH, dtype=torch.float64) for _ in range(2))
    weight = torch.randn(VOCABULARY, WIDTH, dtype=torch.float64)
    bias = torch.randn(VOCABULARY, dtype=torch.float64) if with_bias else None
    hidden.requires_grad_()

    def plain(states):
        z = states @ weight.T if bias is None else states @ weight.T + bias
        z = z * settings.scale
        z = z if settings.softcap is None else settings.softcap * torch.tanh(z / settings.softcap)
        return z / settings.temperature

    expected = oracle.reverse_kl(plain(hidden), plain(teacher), top_k)
    weights = torch.linspace(-1, 2, TOKENS, dtype=torch.float64)
    (gradient,) = torch.autograd.grad((weights * expected).sum(), hidden)
    found, agrees = head_divergence(HeadStates(hidden, weight, bias, settings), teacher, top_k=top_k)
    (own,) = torch.autograd.grad((weights * found).sum(), hidden)
    assert (found - expected).abs().max() <= 1e-10
    assert (own - gradient).abs().max() <= 1e-10
    assert torch.equal(agrees.bool(), plain(hidden).argmax(-1) == plain(teacher).argmax(-1))
    with torch.no_grad():
        assert torch.equal(head_divergence(HeadStates(hidden, weight, bias, settings), teacher, top_k=top_k)[0], found)


def test_the_logits_that_are_there_at_once_do_not_grow_with_the_tokens(monkeypatch):
    monkeypatch.setattr(module, "tile_rows", lambda *_: 8)
    original, seen = module.reverse_kl, []

    def counted(student, teacher, **options):
        seen.append((tuple(student.shape), tuple(teacher.shape)))
        return original(student, teacher, **options)

    monkeypatch.setattr(module, "reverse_kl", counted)
    weight, kept = torch.randn(VOCABULARY, WIDTH), {}
    for tokens in (10, 400):
        seen.clear()
        hidden = torch.randn(tokens, WIDTH, requires_grad=True)
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, to=saved: to.append(t.numel()) or t, lambda t: t):
            head_divergence(HeadStates(hidden, weight, None, LogitSettings()), torch.randn(tokens, WIDTH))
        assert {shape for pair in seen for shape in pair} <= {(4, VOCABULARY), (2, VOCABULARY)}
        kept[tokens] = sum(saved)
    assert kept == {10: 10 * WIDTH, 400: 400 * WIDTH}  # one vector a token for the backward pass


def test_in_half_precision_only_the_products_are_rounded():
    torch.manual_seed(3)
    hidden, teacher, weight = (torch.randn(n, WIDTH, dtype=torch.bfloat16) for n in (TOKENS, TOKENS, VOCABULARY))
    hidden.requires_grad_()
    found, _ = head_divergence(HeadStates(hidden, weight, None, LogitSettings()), teacher)
    rounded = [(states @ weight.T).detach().double() for states in (hidden, teacher)]
    assert found.dtype == torch.float32
    assert (found - oracle.reverse_kl(*rounded)).abs().max() <= 1e-5
    found.sum().backward()
    assert hidden.grad.dtype == torch.bfloat16


def test_a_head_that_is_trained_is_refused():
    weight = torch.randn(VOCABULARY, WIDTH, requires_grad=True)
    with pytest.raises(ValueError, match="head is trained"):
        head_divergence(HeadStates(torch.randn(2, WIDTH), weight, None, LogitSettings()), torch.randn(2, WIDTH))
