"""A base that is not as it is published is refused by what was changed; one that was only loaded otherwise is not."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AttentionInterface, AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from perl.errors import ModelError
from perl.policy.model import load_base
from perl.policy.published import check_published
from perl.recipe.sections import ModelSection
from perl.sandbox import BASE_FOLDER


class Doubled(torch.nn.Linear):
    """A head of another kind."""

    def forward(self, hidden):
        return 2 * super().forward(hidden)


def adapted(model):
    return get_peft_model(model, LoraConfig(target_modules=["q_proj"], init_lora_weights=False))


def untied(model):
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())


AttentionInterface.register("mine", lambda *given, **options: sdpa_attention_forward(*given, **options))
CHANGES = {
    r"layers.0.mlp.up_proj.weight has other": lambda m: m.model.layers[0].mlp.up_proj.weight.data[0, 0].add_(1e-3),
    r"config.vocab_size is 128 there, 132 here": lambda m: m.resize_token_embeddings(132),
    r"lm_head.weight is not tied": untied,
    r"lm_head is replaced": lambda m: setattr(m.lm_head, "__class__", Doubled),
    r"passes give other": lambda m: m.model.layers[0].register_forward_hook(lambda _, __, out: out * 1.1),
    r"inv_freq has other": lambda m: m.model.rotary_emb.inv_freq.mul_(1.01),
    r"layers.2.\S+ is absent": lambda m: setattr(m.model, "layers", m.model.layers[:2]),
    r"config.rope_parameters.rope_theta": lambda m: m.config.rope_parameters.update(rope_theta=5.0),
    r"gate_proj.bias is in none": lambda m: setattr(
        m.model.layers[0].mlp.gate_proj, "bias", torch.nn.Parameter(torch.zeros(()))
    ),
    r"passes give other \S+ \(leave": lambda m: m.model.layers[0].register_forward_hook(  # on long rows alone
        lambda _, __, out: out * 1.1 if out.shape[1] > 100 else out
    ),
    r"attn_implementation mine is a function of your own": lambda m: m.set_attn_implementation("mine"),
    r"attention_dropout is 0.0 in the config, 0.3 here": lambda m: setattr(
        m.model.layers[0].self_attn, "attention_dropout", 0.3
    ),
    r"embed_tokens.weight is in torch.bfloat16, most": lambda m: m.float().lm_head.to(torch.bfloat16),
    r"q_proj.weight has other": lambda m: adapted(m).merge_and_unload(),  # into the model itself
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_script_changed_on_a_base_is_named(change):
    model = AutoModelForCausalLM.from_pretrained(BASE_FOLDER)
    CHANGES[change](model)
    with pytest.raises(ModelError, match=change):
        check_published(model, loaded_here=False)


@pytest.mark.parametrize("options", [{}, {"dtype": torch.bfloat16}, {"dtype": torch.float16, "use_cache": False}])
def test_how_a_base_is_loaded_is_no_change(options):
    model = AutoModelForCausalLM.from_pretrained(BASE_FOLDER, **options)
    model.enable_input_require_grads()
    model.lm_head.float()
    assert not check_published(model, loaded_here=False)
    assert not check_published(adapted(copy.deepcopy(model)), loaded_here=False)


def test_a_model_that_was_moved_to_another_type_has_its_frequencies_exact_again():
    loaded = AutoModelForCausalLM.from_pretrained(BASE_FOLDER, dtype=torch.bfloat16)
    moved = AutoModelForCausalLM.from_pretrained(BASE_FOLDER, dtype=torch.float32).to(torch.bfloat16)
    assert not check_published(moved, loaded_here=False)
    ids = torch.arange(12)[None]
    assert torch.equal(moved(ids).logits, loaded(ids).logits)


def test_layers_that_hold_codes_and_experts_that_lie_one_by_one_in_a_file_are_compared(tmp_path):
    policy = adapted(load_base(ModelSection(quantization="nf4"), torch.device("cpu")))
    assert not check_published(policy, loaded_here=False)
    policy.get_base_model().model.layers[1].mlp.up_proj.weight.data[:800] += 1
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.up_proj\.weight has other"):
        check_published(policy, loaded_here=False)
    sizes = {"vocab_size": 32, "hidden_size": 16, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 16}
    counts = {"num_hidden_layers": 1, "num_experts": 3, "moe_intermediate_size": 8, "num_experts_per_tok": 1}
    nameless = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **counts))
    assert "no name" in check_published(nameless, loaded_here=False)
    nameless.save_pretrained(tmp_path)
    experts = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not check_published(experts, loaded_here=False)
    experts.model.layers[0].mlp.experts.down_proj.data[2] += 1
    with pytest.raises(ModelError, match=r"experts\.2\.down_proj"):
        check_published(experts, loaded_here=False)
