"""The loss of a model's routers over packed rows against transformers' over padded ones, and in a step of a trainer."""

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

from perl import PeftGRPOTrainer, PeftRLConfig
from perl.packing.forward import choose_passes, score_beside
from perl.packing.router import balances
from perl.policy.model import load_tokenizer
from perl.recipe.sections import ModelSection
from tests.packing.families import make
from tests.packing.test_forward import ALONE, COLUMNS, GROUPS, ROWS


@pytest.mark.parametrize("name", ["Qwen3Moe", "Mixtral", "GptOss", "Qwen3_5MoeText", "GraniteMoeHybrid"])
def test_it_is_that_of_padded_rows_however_they_are_run_and_so_is_its_gradient(name):
    model = make(name).train()
    assert choose_passes(model, padding_free=True, share=True).shared
    longest = max(row.tokens for row in ROWS)
    tokens = [torch.cat([row.prompt, row.completion[:-1]]) for row in ROWS]
    ids = torch.stack([torch.nn.functional.pad(row, (0, longest - len(row))) for row in tokens])
    mask = torch.stack([(torch.arange(longest) < len(row)).long() for row in tokens])
    expected = model(input_ids=ids, attention_mask=mask, output_router_logits=True).aux_loss
    wanted = gradient(expected, model)
    assert expected > 0
    for packed, groups in ((False, ALONE), (True, ALONE), (True, GROUPS)):
        *_, found = score_beside(
            model, ROWS, groups, packed=packed, columns=COLUMNS, entropy="none", beside=None, balance=True
        )
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
        assert (gradient(found, model) - wanted).norm() <= 1e-5 * wanted.norm()


def gradient(loss, model):
    parts = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    return torch.cat([torch.zeros(0), *(part.flatten() for part in parts if part is not None)])


def letters(completions, **_):
    return [sum(map(str.isalpha, text)) / 8 for text in completions]


def trained(kind, arguments, tmp_path, **settings):
    """A training of two steps and what it logged."""
    tokenizer = load_tokenizer(ModelSection())
    model = make("Qwen3Moe", vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, bos_token_id=None)
    args = arguments(
        str(tmp_path / kind.__name__),
        **{"max_steps": 2, "per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 6},
        **{
            "learning_rate": 1.0,
            "optim": "sgd",
            "report_to": [],
            "use_cpu": True,
            "logging_steps": 1,
            "seed": 1,
            "bf16": False,
        },
        **{"router_aux_loss_coef": 5.0, "activation_checkpointing": False, **settings},
    )
    trainer = kind(
        model=model,
        reward_funcs=letters,
        args=args,
        train_dataset=Dataset.from_list([{"prompt": f"{i}+{i}="} for i in range(8)]),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=True),
    )
    trainer.train()
    tensors = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
    steps = [entry for entry in trainer.state.log_history if "aux_loss" in entry][:2]  # our summary repeats the last
    return trainer, tensors, [entry["aux_loss"] for entry in steps]


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing.*is deprecated:FutureWarning")  # called by TRL
def test_a_step_of_ours_has_it_as_trls_has(tmp_path):
    """Apart from the last token of a completion, which TRL's routers see and ours are not given."""
    ours, adapter, logged = trained(PeftGRPOTrainer, PeftRLConfig, tmp_path)
    assert ours.step_is_ours
    _, theirs, expected = trained(GRPOTrainer, GRPOConfig, tmp_path)
    assert logged == pytest.approx(expected, rel=0.02)
    moved = torch.cat([t.flatten() for n, t in sorted(theirs.items()) if "lora_B" in n])
    found = torch.cat([t.flatten() for n, t in sorted(adapter.items()) if "lora_B" in n])
    assert torch.nn.functional.cosine_similarity(found, moved, dim=0) > 0.98
    _, without, none = trained(PeftGRPOTrainer, PeftRLConfig, tmp_path / "0", router_aux_loss_coef=0.0)
    assert none == []
    other = torch.cat([t.flatten() for n, t in sorted(without.items()) if "lora_B" in n])
    assert torch.nn.functional.cosine_similarity(other, moved, dim=0) < 0.9


def test_accumulated_micro_batches_have_it_once(tmp_path):
    """Its share of the step's tokens each: the sum is that of one micro-batch, as far as their routers agree."""
    _, _, one = trained(PeftGRPOTrainer, PeftRLConfig, tmp_path)
    _, _, four = trained(PeftGRPOTrainer, PeftRLConfig, tmp_path / "4", train_tokens_per_microbatch=12)
    assert four[0] == pytest.approx(one[0], rel=0.1)


def test_a_model_without_that_loss_has_none():

    assert balances(make("Qwen3Moe"))
    assert not balances(make("Glm4Moe"))
