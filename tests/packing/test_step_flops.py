"""The benchmark's FLOPs: the counter against the formula and against sums worked out by hand."""

import pytest
import step_flops
import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.packing.test_attention import COMMON

RANK, PROMPT, COMPLETION = 3, 5, 7
TOKENS = PROMPT + COMPLETION
# By hand, for the model below. A layer: q 16x16, k and v 16x8, o 16x16, gate, up and down 16x24; two layers.
BLOCK = 2 * (256 + 2 * 128 + 256 + 3 * 384)
ADAPTER = 2 * RANK * (32 + 24 + 24 + 32 + 3 * 40)
# The first layer's q, k and v, and their A, pass no gradient on to the embeddings.
TO_EMBEDDINGS = 256 + 2 * 128 + 3 * RANK * 16
HEAD = 16 * 40
PAIRS = TOKENS * (TOKENS + 1) // 2
ATTENTION = 2 * 16 * 4 * PAIRS  # layers x heads x head_dim; two products, two operations each


def base() -> Qwen3ForCausalLM:
    """Two layers with grouped-query attention."""
    torch.manual_seed(0)
    sizes = {**COMMON, "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "head_dim": 4}
    return Qwen3ForCausalLM(Qwen3Config(**sizes, tie_word_embeddings=False))


def with_lora(model: Qwen3ForCausalLM) -> torch.nn.Module:
    """The same with an adapter on all linear layers."""
    return get_peft_model(model, LoraConfig(r=RANK, target_modules="all-linear", task_type="CAUSAL_LM"))


def scored(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Something of the logits where completion tokens are predicted."""
    predicting = torch.arange(PROMPT - 1, TOKENS - 1)
    return model(input_ids=ids, logits_to_keep=predicting, use_cache=False).logits.logsumexp(-1).sum()


@pytest.mark.filterwarnings("ignore")
def test_a_full_pass_is_what_was_worked_out_by_hand():
    model, ids = with_lora(base()), torch.arange(TOKENS).unsqueeze(0)
    with step_flops.counter() as executed:
        scored(model, ids).backward()
    forward = 2 * (BLOCK + ADAPTER) * TOKENS + 2 * HEAD * COMPLETION + ATTENTION
    backward = 2 * (BLOCK + 2 * ADAPTER - TO_EMBEDDINGS) * TOKENS + 2 * HEAD * COMPLETION + 2 * ATTENTION
    scores_again = ATTENTION / 2
    assert executed.get_total_flops() == forward + backward + scores_again


@pytest.mark.filterwarnings("ignore")
def test_the_formula_is_a_full_pass_without_the_second_computation_of_scores():
    model = base()
    size = step_flops.model_size(model, RANK)
    with step_flops.counter() as executed:
        scored(with_lora(model), torch.arange(TOKENS).unsqueeze(0)).backward()
    ideal = step_flops.ideal_flops(size, [step_flops.Group(PROMPT, (COMPLETION,))], with_reference=False)
    assert ideal == executed.get_total_flops() - ATTENTION / 2


def test_a_reference_adds_a_forward_pass_of_the_base():
    model, ids = base(), torch.arange(TOKENS).unsqueeze(0)
    with step_flops.counter() as executed, torch.no_grad():
        scored(model, ids)
    size, group = step_flops.model_size(model, RANK), step_flops.Group(PROMPT, (COMPLETION,))
    without = step_flops.ideal_flops(size, [group], with_reference=False)
    assert step_flops.ideal_flops(size, [group], with_reference=True) - without == executed.get_total_flops()
