"""Spectra: every measure beside numpy's own decompositions, every method's update beside what plain PEFT merges."""

import copy
import gc
import json
import math
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, Qwen2Config, Qwen2ForCausalLM

import perl
from perl.methods.delta import LowRank
from perl.methods.registry import METHODS
from perl.policy.attach import without_harmless_warnings
from perl.policy.model import base_fingerprint, load_empty_base
from perl.policy.saved.adapter import find_adapter
from perl.policy.spectra import updates as updates_module
from perl.policy.spectra.against import compare_updates
from perl.policy.spectra.checkpoint import checkpoint_fingerprint, open_checkpoint
from perl.policy.spectra.measures import (
    BINS,
    directions_of,
    measure,
    norms_of,
    principal_energy,
    principal_space,
    unchanged_share,
)
from perl.policy.spectra.pooled import pool
from perl.policy.spectra.updates import updates_of_adapter, updates_of_model
from perl.recipe.sections import ModelSection
from perl.sandbox import BASE_FOLDER

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse invariant checks"),
    pytest.mark.filterwarnings("ignore:Model (has|with) `tie_word_embeddings=True`"),
    pytest.mark.filterwarnings("ignore:Input and output embeddings are no longer tied"),
]
SHAPES = [(12, 40), (40, 12), (24, 24)]
ADAPTERS = [name for name, method in METHODS.items() if method.config]


def random_update(shape, kind):
    torch.manual_seed(sum(shape))
    weight = torch.randn(shape) / 5
    if kind == "dense":
        return weight, 1e-3 * torch.randn(shape, dtype=torch.float64)
    return weight, LowRank(torch.randn(3, shape[1]), 1e-3 * torch.randn(shape[0], 3))


def as_numpy(update):
    return (update.B_OR.double() @ update.A_RI.double() if isinstance(update, LowRank) else update.double()).numpy()


def spearman(values):
    ranks = np.argsort(np.argsort(values))
    return np.corrcoef(ranks, np.arange(len(values)))[0, 1]


def degrees(Q1, Q2):
    return np.degrees(np.arccos(np.clip(np.linalg.svd(Q1.T @ Q2, compute_uv=False), 0, 1)))


@pytest.mark.parametrize("kind", ["dense", "factors"])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_measure_is_what_dense_decompositions_give(shape, kind):
    weight, update = random_update(shape, kind)
    found = measure("q_proj", weight, update, 0.25)
    W, D = weight.double().numpy(), as_numpy(update)
    U, S, Vt = np.linalg.svd(W, full_matrices=False)
    U2, S2, Vt2 = np.linalg.svd(W + D, full_matrices=False)
    k, total = len(S) // 4, (D**2).sum()
    left, right = ((U.T @ D) ** 2).sum(1), ((D @ Vt.T) ** 2).sum(0)
    spectral = np.linalg.svd(D, compute_uv=False)
    assert (found.directions, found.sides, found.numbers) == (k, len(S), W.size)
    assert found.norm == pytest.approx(math.sqrt(total), rel=1e-9)
    assert found.base_norm == pytest.approx(np.linalg.norm(W), rel=1e-12)
    assert found.stable_rank == pytest.approx(total / spectral[0] ** 2, rel=1e-9)
    assert (found.energy.left, found.energy.right) == pytest.approx((left[:k].sum() / total, right[:k].sum() / total))
    assert found.base_energy == pytest.approx((S[:k] ** 2).sum() / (S**2).sum())
    assert (found.trend.left, found.trend.right) == pytest.approx((spearman(left / S**2), spearman(right / S**2)))
    outside = 1 - (right if shape[0] <= shape[1] else left).sum() / total
    assert found.outside == pytest.approx(outside, abs=1e-9)
    assert found.nss == pytest.approx(np.linalg.norm(S2 - S) / np.linalg.norm(S), rel=1e-6)
    for side, angles in (("left", degrees(U[:, :k], U2[:, :k])), ("right", degrees(Vt[:k].T, Vt2[:k].T))):
        assert getattr(found.angle, side) == pytest.approx(angles.max(), rel=1e-4)
        assert getattr(found.mean_angle, side) == pytest.approx(angles.mean(), rel=1e-4)
    places = np.arange(len(S)) * min(BINS, len(S)) // len(S)
    np.testing.assert_allclose(found.left_bins, np.bincount(places, left) / total, atol=1e-12)
    np.testing.assert_allclose(found.base_bins, np.bincount(places, S**2) / (S**2).sum(), atol=1e-12)
    # The callback's way to the same numbers.
    norm2, largest2 = norms_of(update)
    assert norm2 / largest2 == pytest.approx(found.stable_rank)
    energy = principal_energy(weight, update, principal_space(weight, 0.25))
    assert (energy.left / norm2, energy.right / norm2) == pytest.approx(
        (found.energy.left, found.energy.right), rel=1e-5
    )


def test_a_norms_weight_is_measured_as_the_diagonal_matrix_that_it_is():
    torch.manual_seed(1)
    w, delta = 1 + 0.3 * torch.randn(30), 0.1 * torch.randn(30)
    found, dense = measure("norm", w, delta, 0.2), measure("norm", torch.diag(w), torch.diag(delta).double(), 0.2)
    for name in ("norm", "base_norm", "stable_rank", "base_energy", "nss"):
        assert getattr(found, name) == pytest.approx(getattr(dense, name), rel=1e-6)
    assert found.energy.left == pytest.approx(dense.energy.right)
    assert found.trend.left == pytest.approx(dense.trend.left)
    assert found.angle.left == pytest.approx(dense.angle.left, abs=1e-4)
    assert found.mean_angle.left == pytest.approx(dense.mean_angle.left, abs=1e-4)
    np.testing.assert_allclose(found.left_bins, dense.left_bins, atol=1e-7)


def test_an_update_along_known_directions_has_its_energy_there():
    torch.manual_seed(2)
    U, V = (torch.linalg.qr(torch.randn(n, 20, dtype=torch.float64)).Q for n in (20, 50))
    W = (U * torch.linspace(5, 1, 20, dtype=torch.float64)) @ V.T
    for j, energy in ((0, 1.0), (19, 0.0)):
        found = measure("up_proj", W, LowRank(V[:, j : j + 1].T * 1e-3, U[:, j : j + 1]), 0.1)
        assert (found.energy.left, found.energy.right) == pytest.approx((energy, energy), abs=1e-6)
        assert found.stable_rank == pytest.approx(1.0)
        assert found.left_bins[j] == pytest.approx(1.0, abs=1e-6)
        # It scales a singular value and turns nothing.
        assert max(found.angle.left, found.angle.right) < 1e-4
        assert found.nss == pytest.approx(1e-3 / torch.linspace(5, 1, 20).norm().item(), rel=1e-5)
    none = measure("up_proj", W, torch.zeros(20, 50, dtype=torch.float64))
    assert (none.stable_rank, none.energy, none.outside, none.unchanged) == (None, None, None, 1.0)
    assert none.nss == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("size", [1e-5, 1e-3, 1e-1])
def test_the_unchanged_share_is_that_of_equal_bfloat16_numbers(size):
    torch.manual_seed(3)
    weight = torch.randn(64, 48).bfloat16()
    update = LowRank(torch.randn(2, 48), size * torch.randn(64, 2))
    merged = (weight.double() + update.B_OR.double() @ update.A_RI.double()).bfloat16()
    expected = (merged == weight).double().mean().item()
    assert 0 < expected < 1
    assert unchanged_share(weight, update) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("kinds", [("factors", "factors"), ("factors", "dense"), ("dense", "dense")])
def test_two_updates_are_compared_by_cosine_and_angles_as_dense_decompositions_give_them(kinds):
    (_, one), (_, other) = (random_update((18, 45), kind) for kind in kinds)
    if kinds[0] == kinds[1] == "factors":
        other = LowRank(one.A_RI[:2] + 0.1 * torch.randn(2, 45), torch.randn(18, 2))
    found = compare_updates("q_proj", one, other)
    D, E = as_numpy(one), as_numpy(other)
    assert found.cosine == pytest.approx((D * E).sum() / np.linalg.norm(D) / np.linalg.norm(E), rel=1e-6)
    k = min(np.linalg.matrix_rank(D, tol=1e-8), np.linalg.matrix_rank(E, tol=1e-8), 16)
    (U, _, Vt), (U2, _, Vt2) = (np.linalg.svd(m, full_matrices=False) for m in (D, E))
    assert found.directions == k
    np.testing.assert_allclose(found.left_angles, degrees(U[:, :k], U2[:, :k]), atol=1e-3)
    np.testing.assert_allclose(found.right_angles, degrees(Vt[:k].T, Vt2[:k].T), atol=1e-3)
    assert found.overlap.left == pytest.approx((np.linalg.norm(U[:, :k].T @ U2[:, :k]) ** 2) / k, rel=1e-5)
    assert (found.chance.left, found.chance.right) == pytest.approx((k / 18, k / 45))
    same = compare_updates("q_proj", one, one)
    assert (same.cosine, same.overlap.left, same.overlap.right) == pytest.approx((1.0, 1.0, 1.0))


def test_modules_are_pooled_as_blocks_of_one_update():
    spectra = [measure(f"layers.{i}.q_proj", *random_update(shape, "factors"), 0.25) for i, shape in enumerate(SHAPES)]
    found = pool("all", spectra)
    energies = np.array([one.norm**2 for one in spectra])
    assert found.energy.left == pytest.approx(np.average([one.energy.left for one in spectra], weights=energies))
    assert found.size == pytest.approx(math.sqrt(energies.sum() / sum(one.base_norm**2 for one in spectra)))
    numbers = [one.numbers for one in spectra]
    assert found.unchanged == pytest.approx(np.average([one.unchanged for one in spectra], weights=numbers))
    assert found.stable_rank == pytest.approx(np.mean([one.stable_rank for one in spectra]))
    assert found.angle.right == max(one.angle.right for one in spectra)


def dense(update):
    return update.B_OR.double() @ update.A_RI.double() if isinstance(update, LowRank) else update.double()


def merged_minus_base(base, policy, names):
    """As plain PEFT merges, in float64."""
    merged = policy.double().merge_and_unload()
    weights = {name: base.get_submodule(name).weight.double() for name in names}
    return {name: merged.get_submodule(name).weight.detach() - weight for name, weight in weights.items()}


@pytest.mark.parametrize("method", ADAPTERS)
def test_the_update_that_is_read_is_what_plain_peft_adds_to_the_base(method):
    name = f"sandbox-{method.replace('_', '-')}"
    saved = find_adapter(f"zoo:{name}")
    section = ModelSection()
    model = load_empty_base(section)
    found = updates_of_adapter(saved, model, open_checkpoint(section, model))
    chosen = [one for one in found.modules if ".3." in one]
    assert chosen
    base = AutoModelForCausalLM.from_pretrained(BASE_FOLDER, dtype=torch.float32)
    with without_harmless_warnings():
        policy = PeftModel.from_pretrained(copy.deepcopy(base), saved.folder)
    expected = merged_minus_base(base, policy, chosen)
    for one in chosen:
        read = found.read(one)
        assert torch.equal(read.weight.float(), base.get_submodule(one).weight)
        norm = expected[one].norm()
        assert norm > 0
        assert (dense(read.update) - expected[one]).norm() / norm < 2e-6


def tiny(folder, tied):
    """A model with biases, in several files."""
    torch.manual_seed(5)
    config = Qwen2Config(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=64, tie_word_embeddings=tied,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape)
    model.save_pretrained(folder, max_shard_size="20KB")
    return model


def trained(model, folder, **config):
    """An adapter of plain PEFT's that is no longer at its start, saved."""
    policy = get_peft_model(model, LoraConfig(r=3, task_type="CAUSAL_LM", **config)).eval()
    torch.manual_seed(6)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter += 0.05 * torch.randn(parameter.shape)
    policy.save_pretrained(folder)
    return policy


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`")  # so the base's lie beside them
@pytest.mark.parametrize("tied", [False, True])
def test_shards_embeddings_and_modules_that_were_trained_whole_are_read(tied):
    base = tiny("tiny", tied)
    assert Path("tiny/model.safetensors.index.json").is_file()
    policy = trained(
        Qwen2ForCausalLM.from_pretrained("tiny"), "adapter", target_modules=["q_proj", "embed_tokens"],
        modules_to_save=["lm_head"],
    )  # fmt: skip
    section = ModelSection(name="tiny")
    model = load_empty_base(section)
    found = updates_of_adapter(find_adapter("adapter"), model, open_checkpoint(section, model))
    names = ["model.embed_tokens", *(f"model.layers.{i}.self_attn.q_proj" for i in range(2)), "lm_head"]
    assert list(found.modules) == names
    expected = merged_minus_base(base, policy, names)
    for name in names:
        torch.testing.assert_close(dense(found.read(name).update), expected[name], rtol=1e-4, atol=1e-6)


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False")
def test_a_weight_that_is_kept_transposed_is_read_as_out_times_in():
    torch.manual_seed(7)
    base = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=64)).eval()
    base.save_pretrained("gpt2")
    policy = trained(GPT2LMHeadModel.from_pretrained("gpt2"), "adapter", target_modules=["c_attn"])
    section = ModelSection(name="gpt2")
    model = load_empty_base(section)
    found = updates_of_adapter(find_adapter("adapter"), model, open_checkpoint(section, model))
    (name,) = found.modules
    read = found.read(name)
    assert tuple(read.weight.shape) == (96, 32)
    expected = merged_minus_base(base, policy, [name])[name].T
    torch.testing.assert_close(dense(read.update), expected, rtol=1e-4, atol=1e-6)
    assert torch.equal(read.weight, base.transformer.h[0].attn.c_attn.weight.T)


def test_a_model_that_was_trained_itself_is_compared_with_its_base():
    base = tiny("tiny", tied=False)
    after = Qwen2ForCausalLM.from_pretrained("tiny")
    with torch.no_grad():
        after.model.layers[1].mlp.up_proj.weight += 0.01
        after.model.norm.weight[3] += 1.0
    after.save_pretrained("after")
    model = load_empty_base(ModelSection(name="tiny"))
    files = [open_checkpoint(ModelSection(name=name), model) for name in ("after", "tiny")]
    found = updates_of_model(*files, model)
    assert len(found.modules) == 1 + 2 * 9 + 1 + 1  # embeddings, layers, the last norm, the head
    up = measure("up", *(getattr(found.read("model.layers.1.mlp.up_proj"), part) for part in ("weight", "update")))
    assert up.norm == pytest.approx(0.01 * math.sqrt(48 * 32), rel=1e-5)
    assert up.stable_rank == pytest.approx(1.0, rel=1e-5)
    assert found.read("model.norm").update.tolist() == pytest.approx([0.0] * 3 + [1.0] + [0.0] * 28)
    assert found.read("lm_head").update.abs().max() == 0
    assert checkpoint_fingerprint(files[1], model, torch.float32) == base_fingerprint(base)


def test_no_more_than_one_module_is_held_at_a_time(monkeypatch):
    alive, most = [], []
    plain = updates_module._Adapter.read

    def watched(self, name):
        gc.collect()
        most.append(sum(one() is not None for one in alive))
        found = plain(self, name)
        alive.append(weakref.ref(found.weight.untyped_storage()))
        alive.append(weakref.ref(found.update.B_OR))
        return found

    monkeypatch.setattr(updates_module._Adapter, "read", watched)
    found = perl.spectrum("zoo:sandbox-lora", modules="mlp")
    assert len(found.modules) == 12
    # The one before is let go as the next one takes its name.
    assert max(most) <= 2
    assert most[-1] == most[1]
    assert json.loads(json.dumps(found.to_dict()))["pooled"]["modules"] == 12
    assert directions_of(128, 0.1) == found.modules[0].directions
