"""Spectra: every measure beside numpy's own decompositions, and updates beside what plain PEFT merges."""

import copy

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from perl.policy.attach import continue_adapter, without_harmless_warnings
from perl.policy.model import load_base
from perl.policy.saved.adapter import find_adapter
from perl.policy.spectrum import BINS, measure, pool, updates_of_adapter
from perl.recipe.sections import ModelSection
from perl.sandbox import BASE_FOLDER

pytestmark = [
    pytest.mark.filterwarnings("ignore:Model (has|with) `tie_word_embeddings=True`"),
    pytest.mark.filterwarnings("ignore:Input and output embeddings are no longer tied"),
]
SHAPES = [(24, 40), (40, 24), (24, 24)]


def random_pair(shape, rank=None):
    torch.manual_seed(sum(shape))
    dense = torch.randn(shape, dtype=torch.float64)
    update = dense if rank is None else torch.randn(shape[0], rank).double() @ torch.randn(rank, shape[1]).double()
    return torch.randn(shape) / 5, 1e-3 * update


def degrees(Q1, Q2):
    return np.degrees(np.arccos(np.clip(np.linalg.svd(Q1.T @ Q2, compute_uv=False), 0, 1)))


@pytest.mark.parametrize("rank", [None, 3])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_measure_is_what_dense_decompositions_give(shape, rank):
    weight, update = random_pair(shape, rank)
    found = measure("q_proj", weight, update, 0.25)
    W, D = weight.double().numpy(), update.numpy()
    U, S, Vt = np.linalg.svd(W, full_matrices=False)
    U2, S2, Vt2 = np.linalg.svd(W + D, full_matrices=False)
    k, total = len(S) // 4, (D**2).sum()
    left, right = ((U.T @ D) ** 2).sum(1), ((D @ Vt.T) ** 2).sum(0)
    assert (found.chance, found.weights, found.matrix) == (k / len(S), W.size, True)
    assert (found.norm, found.base_norm) == pytest.approx((np.linalg.norm(D), np.linalg.norm(W)), rel=1e-9)
    assert found.stable_rank == pytest.approx(total / np.linalg.norm(D, 2) ** 2, rel=1e-9)
    assert (found.energy.left, found.energy.right) == pytest.approx((left[:k].sum() / total, right[:k].sum() / total))
    assert found.base_energy == pytest.approx((S[:k] ** 2).sum() / (S**2).sum())
    assert found.shift == pytest.approx(np.linalg.norm(S2 - S) / np.linalg.norm(S), rel=1e-6)
    assert found.angle.left == pytest.approx(degrees(U[:, :k], U2[:, :k]).max(), rel=1e-4)
    assert found.angle.right == pytest.approx(degrees(Vt[:k].T, Vt2[:k].T).max(), rel=1e-4)
    places = np.arange(len(S)) * BINS // len(S)
    for bins, values in ((found.left_bins, left / total), (found.right_bins, right / total)):
        np.testing.assert_allclose(bins, np.bincount(places, values), atol=1e-12)
    np.testing.assert_allclose(found.base_bins, np.bincount(places, S**2) / (S**2).sum(), atol=1e-12)


def test_modules_are_pooled_as_blocks_of_one_update():
    spectra = [measure(f"layers.{i}.q_proj", *random_pair(shape, 3), 0.25) for i, shape in enumerate(SHAPES)]
    found = pool("all", spectra)
    energies, bases = (np.array([getattr(one, name) ** 2 for one in spectra]) for name in ("norm", "base_norm"))
    assert found.energy.left == pytest.approx(np.average([one.energy.left for one in spectra], weights=energies))
    assert found.size == pytest.approx(np.sqrt(energies.sum() / bases.sum()))
    np.testing.assert_allclose(found.right_bins, np.average([s.right_bins for s in spectra], axis=0, weights=energies))
    assert found.shift**2 == pytest.approx(np.average([one.shift**2 for one in spectra], weights=bases))
    weights = [one.weights for one in spectra]
    assert found.unchanged == pytest.approx(np.average([one.unchanged for one in spectra], weights=weights))
    assert found.stable_rank == pytest.approx(np.mean([one.stable_rank for one in spectra]))
    assert found.angle.right == max(one.angle.right for one in spectra)


def merged_minus_base(base, policy, names):
    """As plain PEFT merges, in float64."""
    merged = policy.double().merge_and_unload()
    weights = {name: base.get_submodule(name).weight.double() for name in names}
    return {name: merged.get_submodule(name).weight.detach() - weight for name, weight in weights.items()}


@pytest.mark.parametrize("method", ["lora", "dora", "pissa", "adalora", "ia3", "vera"])
def test_the_update_that_is_read_is_what_plain_peft_adds_to_the_base(method):
    saved = find_adapter(f"zoo:sandbox-{method}")
    found, left_out = updates_of_adapter(continue_adapter(load_base(ModelSection(), torch.device("cpu")), saved).eval())
    chosen = [one for one in found if ".3." in one]
    assert chosen
    assert left_out == []
    base = AutoModelForCausalLM.from_pretrained(BASE_FOLDER, dtype=torch.float32)
    with without_harmless_warnings():
        policy = PeftModel.from_pretrained(copy.deepcopy(base), saved.folder)
    expected = merged_minus_base(base, policy, chosen)
    for one in chosen:
        weight, update = found[one]()
        assert torch.equal(weight.float(), base.get_submodule(one).weight)
        assert (norm := expected[one].norm()) > 0
        assert (update.double() - expected[one]).norm() / norm < 2e-6
