"""Tiny random models of the families that people train."""

import warnings

import torch
import transformers

from perl.packing.head import add_scored_forward, logit_settings

VOCABULARY = 64
TOKENS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1}
WIDTHS = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
COMMON = {**TOKENS, **WIDTHS, "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.2}
HEADS = {**COMMON, "head_dim": 8}
STILL = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
GPT2 = {**TOKENS, **STILL, "n_positions": 128, "n_embd": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.2}
WINDOW = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
GEMMA3N = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
SHARED = {**EXPERTS, "shared_expert_intermediate_size": 16}
LATENT = {"num_key_value_heads": 4, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "kv_lora_rank": 8}
STATES = {"layer_types": ["linear_attention", "full_attention"], "linear_conv_kernel_dim": 4}
DELTA = {"linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_num_value_heads": 4, "linear_value_head_dim": 8}
KIMI = {**HEADS, **STATES, **LATENT, **EXPERTS, "linear_num_heads": 4, "linear_head_dim": 8}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 2, "mamba_chunk_size": 16}
SPACE = {"n_groups": 2, "chunk_size": 16}

PACKED = {
    "Qwen3": HEADS,
    "Llama": {**COMMON, "rope_theta": 100.0},
    "Qwen2": COMMON,
    "GPT2": GPT2,
    "Cohere": {**COMMON, "logit_scale": 0.25},
    "SmolLM3": HEADS,
    "Llama4Text": {**HEADS, "attention_chunk_size": 32, "num_local_experts": 2, "intermediate_size_mlp": 32},
    # sliding windows
    "Mistral": {**COMMON, "sliding_window": 6},
    "Phi3": {**COMMON, "sliding_window": 6},
    "Olmo3": {**COMMON, **WINDOW},
    "Cohere2": {**HEADS, **WINDOW},
    "Exaone4": {**HEADS, **WINDOW},
    "Gemma3Text": {**HEADS, **WINDOW},
    "Gemma3nText": {
        **{**HEADS, **GEMMA3N, "num_hidden_layers": 3, "num_kv_shared_layers": 1, "laurel_rank": 4},
        **{"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention", "full_attention"]},
        "activation_sparsity_pattern": [0.5, 0.0, 0.0],
    },
    "Gemma4Text": {**HEADS, **WINDOW, **GEMMA3N, "num_kv_shared_layers": 0, "global_head_dim": 8},
    # soft caps, sinks
    "Gemma2": {**HEADS, **WINDOW, "final_logit_softcapping": 5.0, "attn_logit_softcapping": 5.0},
    "GptOss": {**HEADS, **WINDOW, **LOCAL},
    # experts
    "Qwen3Moe": {**HEADS, **EXPERTS},
    "Mixtral": {**COMMON, **LOCAL},
    "Glm4Moe": {**HEADS, **ROUTED},
    "DeepseekV3": {**COMMON, **LATENT, **ROUTED, "q_lora_rank": 8},
    # gated delta rule, Kimi's
    "Qwen3_5Text": {**HEADS, **STATES, **DELTA},
    "Qwen3_5MoeText": {**HEADS, **STATES, **DELTA, **SHARED},
    "Qwen3Next": {**HEADS, **STATES, **DELTA, **SHARED},
    "OlmoHybrid": {**COMMON, **STATES, **DELTA},
    "KimiLinear": KIMI,
    "BailingHybrid": {**KIMI, "q_lora_rank": 8},
    # Mamba-2
    "Mamba2": {
        **TOKENS,
        **SPACE,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_heads": 8,
        "head_dim": 8,
        "state_size": 8,
    },
    "Bamba": {**COMMON, **MAMBA, "attn_layer_indices": [1]},
    "GraniteMoeHybrid": {**COMMON, **MAMBA, **LOCAL, "layer_types": ["mamba", "attention"]},
    "NemotronH": {
        **{**HEADS, **SPACE, "layers_block_type": ["mamba", "attention"]},
        **{"mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8},
    },
    "FalconH1": {**COMMON, **MAMBA, "mamba_d_ssm": 64},
    "Zamba2": {
        **{**COMMON, **SPACE, "num_hidden_layers": 3, "layers_block_type": ["mamba", "hybrid", "mamba"]},
        **{"mamba_d_state": 8, "mamba_headdim": 8, "mamba_ngroups": 2, "n_mamba_heads": 8, "num_mem_blocks": 1},
    },
    # short convolutions
    "Lfm2": {**COMMON, "layer_types": ["conv", "full_attention"]},
    "Lfm2Moe": {**COMMON, **EXPERTS, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "Lfm3": {**COMMON, "layer_types": ["conv", "full_attention"]},
}
PADDED = {  # and why
    "Mamba": ({**TOKENS, "hidden_size": 32, "state_size": 4, "num_hidden_layers": 2}, "Mamba-1 layers"),
    "Jamba": ({**COMMON, "attn_layer_offset": 1, "attn_layer_period": 2, "num_experts": 1}, "Mamba-1 layers"),
    "MiniMax": ({**HEADS, **LOCAL, "layer_types": STATES["layer_types"]}, "not known here"),
}


def make(name: str, **options) -> transformers.PreTrainedModel:
    """A random model in which biases and sinks show, prepared for packed rows."""
    if name in MULTIMODAL:
        model = make_multimodal(name)
        add_scored_forward(model, logit_settings(model.config, temperature=0.9, float32=False))
        return model
    settings = PACKED.get(name) or PADDED[name][0]
    config = getattr(transformers, f"{name}Config")(**{**settings, **options})
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Mamba's, that its kernels are not installed
        model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # biases begin at zero, where they show nothing
                parameter += 0.1 * torch.randn_like(parameter)
    add_scored_forward(model, logit_settings(model.config, temperature=0.9, float32=False))
    return model


SEES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
SIGLIP = {**SEES, "image_size": 28, "patch_size": 14}
QWEN_SEES = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "out_hidden_size": 32}
QWEN_SEES |= {"deepstack_visual_indexes": [], "num_position_embeddings": 16}
ROTATED = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
IMAGES = {"image_token_id": 60, "video_token_id": 61, "vision_start_token_id": 62, "vision_end_token_id": 63}
GEMMA_IMAGES = {"image_token_id": 60, "boi_token_id": 61, "eoi_token_id": 62}
MULTIMODAL = {  # text, vision, others
    "Qwen3_5": ({**HEADS, **STATES, **DELTA}, QWEN_SEES, IMAGES),
    "Qwen3VL": ({**HEADS, "rope_parameters": ROTATED}, QWEN_SEES, IMAGES),
    "Gemma3": ({**HEADS, **WINDOW}, SIGLIP, {"mm_tokens_per_image": 4, "image_token_index": 60, "boi_token_index": 61}),
    "Gemma4": (PACKED["Gemma4Text"], {**SIGLIP, "num_key_value_heads": 4, "head_dim": 8}, GEMMA_IMAGES),
    "Lfm2Vl": ({**PACKED["Lfm2"], "model_type": "lfm2"}, {**SIGLIP, "num_patches": 16}, {"image_token_id": 60}),
    "Mistral3": (
        {**COMMON, "model_type": "mistral"},
        {**SIGLIP, "model_type": "pixtral", "head_dim": 8},
        {"image_token_index": 60},
    ),
}


def make_multimodal(name: str, vocabulary: int = VOCABULARY, **tokens: int) -> transformers.PreTrainedModel:
    """A random model that also sees; ``tokens`` are settings of its text."""
    text, vision, others = MULTIMODAL[name]
    text = {**text, "vocab_size": vocabulary, **tokens}
    text |= {"vocab_size_per_layer_input": vocabulary} if "vocab_size_per_layer_input" in text else {}
    vision = {"model_type": "siglip2_vision_model", **vision} if name == "Lfm2Vl" else vision
    config = getattr(transformers, f"{name}Config")(text_config=text, vision_config=vision, **others)
    torch.manual_seed(1)
    return transformers.AutoModelForImageTextToText.from_config(config).eval()
