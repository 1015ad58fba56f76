"""Decompositions are exact, and kept for the next run where that is worth it."""

from pathlib import Path

import pytest
import torch

from perl.methods.decompositions import decompose, first_columns, first_triples, last_triples

LARGE = (512, 512)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    """Where results are kept unless somebody says otherwise."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "perl-rl" / "decompositions"


class Counting:
    """Stands for an expensive decomposition: the first rows, and how often it was asked."""

    __name__ = "counting"

    def __init__(self):
        self.calls = 0

    def __call__(self, weight, rank):
        self.calls += 1
        return {"rows": weight[:rank].clone(), "first": weight[:, :rank].clone()}


def same(one, other):
    assert one.keys() == other.keys()
    for name, factors in one.items():
        assert factors.keys() == other[name].keys()
        assert all(torch.equal(factors[part], other[name][part]) for part in factors)


def spectrum(*shape):
    """A matrix with known, well separated singular values, and its triples."""
    U, _ = torch.linalg.qr(torch.randn(shape[0], min(shape)))
    V, _ = torch.linalg.qr(torch.randn(shape[1], min(shape)))
    S = 2.0 ** -torch.arange(min(shape))
    return U * S @ V.T, U, S, V.T


@pytest.mark.parametrize("shape", [(8, 8), (12, 6), (6, 12)], ids=str)
@pytest.mark.parametrize(("decomposition", "part"), [(first_triples, slice(None, 3)), (last_triples, slice(-3, None))])
def test_triples_are_those_the_matrix_was_made_of(decomposition, part, shape):
    weight, U, S, V = spectrum(*shape)
    factors = decomposition(weight, 3)
    assert {name: tuple(t.shape) for name, t in factors.items()} == {"U": (shape[0], 3), "S": (3,), "V": (3, shape[1])}
    torch.testing.assert_close(factors["S"], S[part], rtol=1e-4, atol=1e-6)
    expected = U[:, part] * S[part] @ V[part]
    torch.testing.assert_close(factors["U"] * factors["S"] @ factors["V"], expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(factors["V"] @ factors["V"].T, torch.eye(3), rtol=0, atol=1e-5)


@pytest.mark.parametrize("shape", [(8, 8), (12, 6), (6, 12)], ids=str)
def test_columns_are_an_orthonormal_basis_of_the_first_columns_of_the_matrix(shape):
    weight = torch.randn(shape)
    factors = first_columns(weight, 3)
    Q, R = factors["Q"], factors["R"]
    torch.testing.assert_close(Q.T @ Q, torch.eye(3), rtol=0, atol=1e-5)
    torch.testing.assert_close(Q @ R[:, :3], weight[:, :3], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(R, Q.T @ weight, rtol=1e-4, atol=1e-5)


def test_a_second_call_gives_the_same_bytes_without_decomposing_again(cache):
    counting, weights = Counting(), {str(i): (torch.randn(LARGE), 3) for i in range(2)}
    first = decompose(weights, counting)
    kept = {path.name: path.read_bytes() for path in cache.iterdir()}
    assert counting.calls == len(kept) == 2
    assert all(name.endswith(".safetensors") and not name.startswith(".") for name in kept)
    same(decompose(weights, counting), first)
    assert counting.calls == 2
    assert {path.name: path.read_bytes() for path in cache.iterdir()} == kept
    same(decompose(weights, first_columns), decompose(weights, first_columns))
    assert decompose({}, first_triples) == {}


def test_another_weight_rank_shape_type_or_decomposition_is_decomposed_by_itself(cache):
    counting, weight = Counting(), torch.randn(LARGE)
    other = weight.clone()
    other[5, 5] += 1e-3
    of_the_same_bytes = [weight.view(256, 1024), weight.view(1024, 256), weight.view(torch.bfloat16)]
    variants = [(weight, 3), (weight, 4), (other, 3), (weight.bfloat16(), 3), *((w, 3) for w in of_the_same_bytes)]
    for variant, rank in variants:
        found = decompose({"w": (variant, rank)}, counting)["w"]
        torch.testing.assert_close(found["rows"], variant.float()[:rank], rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(found["first"], variant.float()[:, :rank], rtol=0, atol=0, equal_nan=True)
    assert counting.calls == len(variants)
    decompose({"w": (weight, 3)}, first_columns)
    assert len(list(cache.iterdir())) == len(variants) + 1


@pytest.mark.parametrize("left", [100, None])
def test_a_file_that_was_cut_short_is_made_anew_and_one_that_cannot_be_read_does_not_stop(cache, left):
    counting, weights = Counting(), {"w": (torch.randn(LARGE), 3)}
    first = decompose(weights, counting)
    (path,) = cache.iterdir()
    whole = path.read_bytes()
    if left is None:
        path.unlink()
        path.mkdir()
    else:
        path.write_bytes(whole[:left])
    same(decompose(weights, counting), first)
    assert counting.calls == 2
    assert left is None or path.read_bytes() == whole


@pytest.mark.parametrize("place", ["a file", "/proc/nowhere"])
def test_a_cache_that_cannot_be_written_does_not_stop(tmp_path, monkeypatch, place):
    (tmp_path / "a file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / place))  # an absolute place stays itself
    counting, weight = Counting(), torch.randn(LARGE)
    for calls in (1, 2):
        assert torch.equal(decompose({"w": (weight, 3)}, counting)["w"]["rows"], weight[:3])
        assert counting.calls == calls
