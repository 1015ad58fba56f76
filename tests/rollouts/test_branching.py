"""Completions that share what they have in common are those that transformers' own ``generate`` writes."""

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from perl.rollouts.branching import why_not_branching, write
from perl.rollouts.engine import EngineSampling, Request
from perl.rollouts.hf_engine import TransformersEngine
from perl.rollouts.next_token import _KEPT, as_the_policy, sampling_of, write_as_generate

END, VOCABULARY = 1, 61
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": END,
    "max_position_embeddings": 256,
}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {
    **{"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 12},
    **{"num_key_value_heads": 4, "head_dim": 8, "n_routed_experts": 4, "n_group": 1, "topk_group": 1},
    **{"first_k_dense_replace": 1, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 16},
}
CONVOLUTIONS = {"layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 3, "block_auto_adjust_ff_dim": False}
DELTA = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    **{"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    **{**EXPERTS, "shared_expert_intermediate_size": 16},
}
WINDOW = {"sliding_window": 6}
SLIDING = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], **WINDOW}
FAMILIES = {
    "llama": {},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256},
    "mistral": WINDOW,
    "gemma2": {**SLIDING, "query_pre_attn_scalar": 8},
    "deepseek_v3": LATENT,
    "lfm2": CONVOLUTIONS,
    "qwen3_next": DELTA,
}
BY_GENERATE = {"mamba": {"state_size": 4}, "phi3": {}, "minimax": {"layer_types": DELTA["layer_types"], **EXPERTS}}
SAMPLINGS = {
    "warm": EngineSampling(1.3, 18, (END, 7)),
    "greedy": EngineSampling(0.0, 18, (END, 7)),
    "all": EngineSampling(1.5, 18, (END, 7), top_p=0.95, top_k=20, min_p=0.01, repetition_penalty=1.2),
    # so cold that completions of one prompt begin alike
    "cold": EngineSampling(0.05, 18, (END, 7)),
}
PROMPTS = [(9, 4, 13, 5, 10, 15, 22, 31, 8, 12), (9, 4, 13), (3, 33, 12, 50, 41)]
SHOWN = tuple(range(3, 23))  # as examples that stand before every question


def model_of(kind: str, **more: object) -> torch.nn.Module:
    settings = {**SHAPE, **(FAMILIES | BY_GENERATE)[kind], **more}
    if kind in ("gpt2", "mamba"):
        settings = {name: settings[name] for name in settings if name not in ("head_dim", "num_key_value_heads")}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings), dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # so that the next token depends on those before it
            if parameter.ndim > 1:
                parameter *= 5
    return model


@pytest.fixture(scope="module", params=FAMILIES)
def model(request):
    return model_of(request.param)


def requests(shown: tuple[int, ...] = ()) -> list[Request]:
    """Groups, and the same prompt again in requests of one completion."""
    groups = [Request(shown + ids, 4, seed=10 * i) for i, ids in enumerate(PROMPTS)]
    return [*groups, *(Request(shown + PROMPTS[1], 1, seed=50 + i) for i in range(3))]


def drawn(model, tokenizer, sampling, asked=None, *, by_generate: bool = False, batch_size: int = 256):
    engine = TransformersEngine(model, tokenizer, batch_size)
    if by_generate:
        engine.why_by_generate = "to compare"
    else:
        assert engine.why_by_generate is None
    return engine.start(asked or requests(), sampling).result()


def close(found, expected) -> None:
    for group, other in zip(found, expected, strict=True):
        assert [s.token_ids for s in group] == [s.token_ids for s in other]
        for one, two in zip(group, other, strict=True):
            assert one.log_probs == pytest.approx(two.log_probs, abs=1e-4)


@pytest.mark.parametrize("shown", [(), SHOWN], ids=["apart", "alike"])
@pytest.mark.parametrize("way", SAMPLINGS)
def test_every_family_writes_what_generate_does(model, tokenizer, way, shown):
    expected = drawn(model, tokenizer, SAMPLINGS[way], requests(shown), by_generate=True)
    close(drawn(model, tokenizer, SAMPLINGS[way], requests(shown)), expected)
    lengths = {len(s.token_ids) for group in expected for s in group}
    assert max(lengths) > SHAPE["num_hidden_layers"]


@pytest.mark.parametrize("shown", [(), SHOWN], ids=["apart", "alike"])
def test_training_draws_what_generate_samples_with_the_same_random_numbers(model, shown):
    prompts = [shown + ids for ids in PROMPTS for _ in range(4)]
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    for how in (
        {"temperature": 1.3},
        {"temperature": 0.7, "top_k": 12, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.3},
    ):
        asked = {"top_k": 0, **how, "do_sample": True, "max_new_tokens": 18, "eos_token_id": [END, 7]}
        config = GenerationConfig(**asked, pad_token_id=0, disable_compile=True)
        torch.manual_seed(3)
        rows = model.generate(input_ids=ids, attention_mask=mask, generation_config=config)[:, width:].tolist()
        state = torch.get_rng_state()
        ends = [next((i + 1 for i, token in enumerate(row) if token in (END, 7)), len(row)) for row in rows]
        torch.manual_seed(3)
        with torch.no_grad():
            found = write_as_generate(model, prompts, 0, sampling_of(config))
        assert found == [row[:end] for row, end in zip(rows, ends, strict=True)]
        assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("kind", BY_GENERATE)
def test_a_model_whose_cache_is_another_one_is_left_to_generate(kind, tokenizer):
    model = model_of(kind)
    engine = TransformersEngine(model, tokenizer)
    assert engine.why_by_generate
    found = engine.start(requests(), SAMPLINGS["warm"]).result()
    close(found, drawn(model, tokenizer, SAMPLINGS["warm"], by_generate=True))


def test_adapters_that_see_rows_as_a_whole_are_left_to_generate():
    lora = get_peft_model(model_of("llama"), LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))
    assert why_not_branching(lora) is None
    prompts = get_peft_model(model_of("llama"), PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"))
    assert "as a whole" in why_not_branching(prompts)
    static = model_of("llama")
    static.generation_config.cache_implementation = "static"
    assert why_not_branching(static)


def test_a_generation_config_that_asks_for_more_is_left_to_generate():
    plain = {"do_sample": True, "max_new_tokens": 4, "eos_token_id": 1}
    assert sampling_of(GenerationConfig(**plain, temperature=0.5, top_k=0)) == EngineSampling(0.5, 4, (1,))
    for name, value in {"suppress_tokens": [3], "num_beams": 2, "typical_p": 0.5, "do_sample": False}.items():
        assert sampling_of(GenerationConfig(**{**plain, name: value})) is None, name


def test_no_field_of_a_models_generation_config_shapes_what_a_policy_writes(tokenizer):
    """Whatever fields the installed transformers has, and whichever of them would change what is sampled."""
    model, fields = model_of("llama"), vars(GenerationConfig()).keys() - set(_KEPT)
    own = model.generation_config
    for name in fields:
        setattr(own, name, 7)
    with as_the_policy(model):
        for name in fields:
            assert getattr(model.generation_config, name) == getattr(GenerationConfig(), name), name
    assert model.generation_config is own
    own = model.generation_config = GenerationConfig()
    expected = [drawn(model, tokenizer, SAMPLINGS["warm"], by_generate=way) for way in (True, False)]
    shaping = {"suppress_tokens": list(range(9, 60)), "min_new_tokens": 18, "bad_words_ids": [[9]], "num_beams": 3}
    for name, value in (shaping | {"stop_strings": ["1"], "forced_eos_token_id": 9, "max_time": 0.0}).items():
        model.generation_config = GenerationConfig(**{name: value})
        for number, way in enumerate((True, False)):
            assert drawn(model, tokenizer, SAMPLINGS["warm"], by_generate=way) == expected[number], name


class Scripted:
    """Gives completions tokens from a list, and remembers from which rows they went on."""

    def __init__(self, texts):
        self._texts, self.slots = texts, []

    def __call__(self, step, _scores, slots, rows):
        self.slots.append(slots.tolist())
        return torch.tensor([self._texts[row][step] for row in rows]), None


def test_what_begins_alike_is_run_once_and_what_has_ended_not_at_all():
    model = model_of("llama")
    # of one prompt two alike and one that leaves them at its third token, of another two that part at once
    texts = [(5, 6, 7, 8, END), (5, 6, 7, 8, END), (5, 6, 9, END), (5, 6, END), (4, 4, 4, 4, 4)]
    draw = Scripted(texts)
    prompts = [PROMPTS[0], PROMPTS[0], PROMPTS[0], PROMPTS[1], PROMPTS[1]]
    with torch.no_grad():
        written = write(
            model, prompts, padding=0, ends=(END,), longest=5, draw=draw, warp=lambda _tokens, _paddings, scores: scores
        )
    assert [tuple(ids) for ids in written.token_ids] == texts
    assert written.log_probs is None
    assert written.ran == [2, 3, 3, 3, 2]
    assert [len(set(slots)) for slots in draw.slots] == [2, 3, 3, 3, 2]


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_rotary_factors_are_those_of_the_longest_position_of_a_whole_prompt(kind, tokenizer):
    """A pass over what all prompts begin with would have those of a shorter one."""
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 22}
    rope |= {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4} if kind == "longrope" else {}
    more = {"rope_parameters": rope, "max_position_embeddings": 22 if kind == "dynamic" else 256}
    models = [model_of("llama", **more) for _ in range(2)]  # dynamic factors depend on what has run before
    ours, theirs = (
        drawn(model, tokenizer, EngineSampling(1.3, 2, ()), requests(SHOWN), by_generate=by)
        for model, by in zip(models, (False, True), strict=True)
    )
    close(ours, theirs)


def test_what_all_prompts_begin_with_is_read_once_unless_a_penalty_looks_at_their_tokens():
    model, ran = model_of("llama"), []
    hook = model.register_forward_pre_hook(
        lambda _, __, given: ran.append(tuple(given["input_ids"].shape)), with_kwargs=True
    )
    prompts = [list(SHOWN + ids) for ids in PROMPTS]
    for way in ("warm", "all"):
        with torch.no_grad():
            write_as_generate(model, prompts, 0, SAMPLINGS[way])
    hook.remove()
    rest = max(map(len, PROMPTS))
    assert ran[:2] == [(1, len(SHOWN)), (3, rest)]
    assert (3, len(SHOWN) + rest) in ran
