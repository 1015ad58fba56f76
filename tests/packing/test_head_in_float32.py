"""TRL's ``cast_lm_head_to_fp32`` on a base in half precision: the adapter belongs to the base as it is published."""

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM

from perl import PeftGRPOTrainer, PeftRLConfig
from perl.policy.attach import continue_adapter
from perl.policy.guards import RELOAD_TOLERANCE
from perl.policy.model import base_fingerprint, clean_base, evaluating
from perl.policy.precision import in_float32
from perl.policy.reference import token_log_probs
from perl.policy.save_adapter import reload_difference
from perl.policy.saved.adapter import find_adapter
from perl.rewards import accuracy_reward
from perl.sandbox import load_problems
from tests.trainer.untied_bases import write_untied_base

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
