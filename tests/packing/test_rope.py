"""Rotary factors that depend on the longest position of a pass: each row has those of TRL's padded batch."""

import copy
from functools import cache

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from perl import PeftGRPOTrainer
from perl.packing.micro_batches import join, micro_batches, token_batches
from perl.packing.rope import of_width, rope_width
from tests.oracles.rollouts import EOS, PAD, VOCABULARY
from tests.oracles.two_trainers import OracleTrainer, Training, norm, relative_difference, train
from tests.packing.test_attention import COMMON
from tests.packing.test_micro_batches import micro_batch, some_window

pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing_:FutureWarning")  # TRL's

# Shorter than the longest rows and longer than others, so that passes differ in whether they exceed it.
USUAL = 16
# Large enough for factors, by which alone a pass could be told from another, to change log-probabilities by a lot.
SIZES = {
    **{**COMMON, "vocab_size": VOCABULARY, "intermediate_size": 64, "initializer_range": 0.15},
    **{"tie_word_embeddings": False, "pad_token_id": PAD, "bos_token_id": None, "eos_token_id": EOS},
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0}
LONG = {
    **{"rope_type": "longrope", "rope_theta": 100.0, "short_factor": [1.0] * 4, "long_factor": [8.0, 3.0, 6.0, 2.0]},
    **{"original_max_position_embeddings": USUAL, "partial_rotary_factor": 1.0},
}


@cache
def model(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    if name == "phi3":
        lengths = {"max_position_embeddings": 256, "original_max_position_embeddings": USUAL}
        return Phi3ForCausalLM(Phi3Config(**SIZES, **lengths, rope_parameters=LONG))
    if name == "llama":
        return LlamaForCausalLM(LlamaConfig(**SIZES, max_position_embeddings=USUAL, rope_parameters=DYNAMIC))
    if name == "plain":
        return LlamaForCausalLM(LlamaConfig(**SIZES, max_position_embeddings=USUAL))
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, max_position_embeddings=USUAL, rope_parameters=DYNAMIC))


ADAPTER = {"phi3": "lora everywhere", "llama": "lora", "qwen3": "lora"}
# Two optimizer steps on the rollouts of one generation, whose passes of some 30 tokens have rows of all lengths.
OPTIONS = {
    "continued": True,  # from a reference off the base, which is the policy itself until it moves
    "beta": 0.04,
    "gradient_accumulation_steps": 2,
    "per_device_train_batch_size": 6,
    "steps_per_generation": 4,
    "max_steps": 2,
    "epsilon": 1e-4,
}


@cache
def oracle(name: str) -> Training:
    return train(OracleTrainer, model=model(name), adapter=ADAPTER[name], **OPTIONS)


@pytest.mark.parametrize(
    ("name", "padding_free"), [("phi3", True), ("qwen3", False), pytest.param("llama", True, marks=pytest.mark.nightly)]
)
def test_the_update_is_trls_in_passes_of_any_length(name, padding_free):
    theirs = oracle(name)
    options = {**OPTIONS, "padding_free": padding_free, "train_tokens_per_microbatch": 30}
    ours = train(PeftGRPOTrainer, model=model(name), adapter=ADAPTER[name], **options)
    first = ours.history[0]
    assert first["tokens/passes"] >= 4
    assert first["kl"] == pytest.approx(0, abs=1e-6)  # the policy is its reference
    assert first["clip_ratio/region_mean"] == pytest.approx(0, abs=1e-6)  # and the old policy
    assert theirs.history[0]["kl"] == pytest.approx(0, abs=1e-6)
    for step in (1, 2):
        expected = theirs.update(0, step)
        assert norm(expected) > 1e-3
        assert relative_difference(ours.update(0, step), expected) <= 1e-5


@pytest.mark.parametrize("name", ["phi3", "llama", "qwen3"])
def test_factors_are_those_of_a_batch_of_that_width_whatever_is_run_and_was_run(name):
    short, long = torch.randint(2, VOCABULARY, (1, 9)), torch.randint(2, VOCABULARY, (1, 40))

    def logits(ids: torch.Tensor, width: int = 0) -> torch.Tensor:
        with torch.no_grad(), of_width(policy, width):
            return policy(ids).logits[:, :9]

    policy = copy.deepcopy(model(name))
    padded = torch.cat([short, torch.zeros(1, 21, dtype=torch.long)], dim=1)
    by_itself, of_30 = (fresh(ids).logits[:, :9] for ids, fresh in ((short, policy), (padded, copy.deepcopy(policy))))
    assert (of_30 - by_itself).abs().max() > 1e-2
    for _ in range(2):
        assert torch.allclose(logits(short, 30), of_30, atol=1e-5)
        assert torch.allclose(logits(short, USUAL), by_itself, atol=1e-5)
        logits(long)  # after which transformers' dynamic factors stay those of 40 tokens for a while
        assert torch.allclose(logits(padded, 30), of_30, atol=1e-5)
    before = copy.deepcopy(policy)
    logits(short, 30)
    rotary, then = policy.model.rotary_emb, before.model.rotary_emb
    assert torch.equal(rotary.inv_freq, then.inv_freq)
    assert rotary.rope_type == then.rope_type
    assert "forward" not in vars(rotary)


def test_widths_that_have_the_same_factors_are_one():
    assert [rope_width(model("plain"))(width) for width in (5, 500)] == [0, 0]
    assert [rope_width(model("phi3"))(width) for width in (5, 16, 17, 500)] == [16, 16, 17, 17]
    assert [rope_width(model("llama"))(width) for width in (5, 16, 17, 500)] == [16, 16, 17, 500]


@pytest.mark.parametrize(("packed", "share"), [(True, True), (True, False), (False, False)])
def test_rows_of_batches_of_different_width_are_not_run_together(packed, share):
    narrow, wide = micro_batch([(3, 4), (3, 2)], [1, 1]), micro_batch([(3, 9), (3, 1)], [1, 1])
    weights = [torch.ones(batch["completion_mask"].shape) for batch in (narrow, wide)]
    for width_of, passes in ((lambda width: width, 2), (lambda _: 0, 1)):
        window = join([narrow, wide], weights, width_of)
        made = micro_batches(window, range(4), budget=1000, packed=packed, share=share)
        assert len(made) == passes
        assert all(len({row.width for row in batch.rows}) == 1 for batch in made)
        assert len(token_batches(window.rows, budget=1000, packed=packed, share=share)) == passes
    assert {row.width for row in some_window().rows} == {0}
