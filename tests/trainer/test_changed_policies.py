"""What a script changes on a policy, and whoever loads its adapter would not have, is refused."""

import logging
import re

import pytest
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoTokenizer

from perl import PeftGRPOTrainer
from perl.errors import ModelError, RecipeError
from perl.methods.registry import METHODS
from perl.sandbox import BASE_FOLDER
from tests.a_few_methods import each
from tests.rollouts.policies import PROBE, base
from tests.trainer.test_trainer import arguments, problems

LORA = {"r": 2, "task_type": "CAUSAL_LM", "target_modules": ["q_proj"]}


def made(folder, model, **others):
    given = others.pop("settings", {})
    args = arguments(folder, max_steps=given.pop("max_steps", 1), max_completion_length=4, **given)
    return PeftGRPOTrainer(
        model,
        reward_funcs=lambda completions, **_: [*range(len(completions))],
        args=args,
        train_dataset=problems(8),
        **others,
    )


def scale(policy, by=3.0):
    for layer in policy.modules():
        if isinstance(getattr(layer, "scaling", None), dict):
            layer.set_scale("default", by)


def put_hook(module, factor):
    module.register_forward_hook(lambda _, __, out: out * factor)


CHANGES = {
    "scaling is 12.0, and 4.0": scale,
    "norm.weight has other": lambda p: p.get_base_model().model.norm.weight.data.mul_(1.3),
    "inv_freq has other": lambda p: p.get_base_model().model.rotary_emb.inv_freq.mul_(1.3),
    "passes give other": lambda p: put_hook(p.get_base_model().model.layers[0].mlp, 1.3),
    "a hook of your own changes": lambda p: put_hook(
        p.get_base_model().model.layers[0].self_attn.q_proj.lora_B["default"], 2
    ),
}


@pytest.mark.parametrize("said", CHANGES)
def test_what_is_changed_after_the_trainer_was_made_or_after_training_is_refused(said, tmp_path):
    trainer = made(tmp_path, "sandbox:base", peft_config=LoraConfig(**LORA))
    norm = trainer.policy.get_base_model().model.norm
    for module in (norm, *(m for m in trainer.policy.modules() if hasattr(m, "lora_A"))):
        put_hook(module, 1.0)  # which changes nothing
    trainer.train()
    trainer.save_adapter(tmp_path / "adapter")
    CHANGES[said](trainer.policy)
    for call in (trainer.train, lambda: trainer.save_adapter(tmp_path / "other")):
        with pytest.raises(ModelError, match=said):
            call()
    assert (tmp_path / "other" / "adapter_config.json").is_file()  # nothing is lost
    reloaded = PeftModel.from_pretrained(base(), tmp_path / "adapter").eval()
    assert reloaded(PROBE).logits.isfinite().all()


def test_a_peft_model_whose_layers_are_not_as_its_config_makes_them_is_refused(tmp_path):
    patterns = {"alpha_pattern": {"layers.1.self_attn.q_proj": 64, ".*proj": 8}}
    changed = get_peft_model(base(), LoraConfig(**LORA))
    scale(changed)
    other = get_peft_model(base(), LoraConfig(**LORA, **patterns))
    for policy, said in ((changed, "scaling is 12.0, and 4.0"), (other, "lora_alpha is 64, and 8")):
        with pytest.raises(ModelError, match=said):
            made(tmp_path, policy)
    on_head = LoraConfig(**LORA | {"target_modules": ["q_proj", "lm_head"]})
    with pytest.raises(RecipeError, match="TRL reads the weights of lm_head"):
        made(tmp_path, "sandbox:base", peft_config=on_head)


@pytest.mark.parametrize("method", each([name for name, method in METHODS.items() if method.config]))
def test_no_training_changes_what_is_compared(method, tmp_path, monkeypatch):
    settings = {"peft_method": method, "peft_rank": None, "max_steps": METHODS[method].fewest_steps or 1}
    trainer = made(tmp_path, base(), settings=settings)
    monkeypatch.setattr("perl.policy.as_configured.check_published", lambda *_, **__: pytest.fail("proven again"))
    trainer.train()
    trainer.save_adapter(tmp_path / "adapter")


def test_a_tokenizer_that_is_not_the_bases_is_said_once(tmp_path, caplog):
    tokenizer = AutoTokenizer.from_pretrained(BASE_FOLDER, padding_side="left")
    trainer = made(tmp_path, base(), peft_config=LoraConfig(**LORA), processing_class=tokenizer)
    trainer.save_adapter(tmp_path / "adapter")
    assert not re.search("the tokenizer has another", caplog.text)
    tokenizer.chat_template = "{{ messages }}"
    with caplog.at_level(logging.WARNING):
        trainer.save_adapter(tmp_path / "adapter")
        trainer.save_adapter(tmp_path / "adapter")
    assert caplog.text.count("the tokenizer has another chat template than the base's") == 1
