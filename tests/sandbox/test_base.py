"""The sandbox's base is small, loads without a network or a path of its maker, and solves in two styles."""

import json
import string

import pytest
import torch
from safetensors.torch import load_file
from sandbox_models import make_model, make_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Qwen3ForCausalLM

from perl.data import render_prompts
from perl.sandbox import BASE_FOLDER, load_problems
from tests.completing import Drawing, complete

LARGEST_WEIGHTS = 2_500_000
PARAMETERS = 804_224
PRINTABLE = "".join(chr(code) for code in range(32, 127))


@pytest.fixture(scope="module")
def base():
    return AutoModelForCausalLM.from_pretrained(BASE_FOLDER, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(BASE_FOLDER)


def strings_in(value):
    """Every text in a JSON value, keys included."""
    if isinstance(value, dict):
        return [text for item in (*value.keys(), *value.values()) for text in strings_in(item)]
    if isinstance(value, list):
        return [text for item in value for text in strings_in(item)]
    return [value] if isinstance(value, str) else []


def test_plain_transformers_loads_a_qwen3_of_the_documented_size_from_a_small_file(base):
    assert type(base) is Qwen3ForCausalLM
    assert AutoConfig.from_pretrained(BASE_FOLDER).architectures == ["Qwen3ForCausalLM"]
    assert base.lm_head.weight.data_ptr() == base.model.embed_tokens.weight.data_ptr()
    hidden, heads, keys, size, inner, layers, words = (
        getattr(base.config, name)
        for name in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size",
                     "num_hidden_layers", "vocab_size")
    )  # fmt: skip
    attention = hidden * size * (2 * heads + 2 * keys) + 2 * size  # queries, outputs, keys, values; norms of a head
    expected = layers * (attention + 3 * hidden * inner + 2 * hidden) + words * hidden + hidden
    assert sum(parameter.numel() for parameter in base.parameters()) == expected == PARAMETERS
    file = (BASE_FOLDER / "model.safetensors").stat().st_size
    assert 2 * expected <= file <= LARGEST_WEIGHTS


def test_the_files_hold_what_pretraining_makes_with_every_weight_finite(base, tokenizer):
    stored = load_file(BASE_FOLDER / "model.safetensors")
    made, loaded = make_model(), dict(base.named_parameters())
    assert {n: p.shape for n, p in made.named_parameters()} == {n: p.shape for n, p in loaded.items()}
    assert set(stored) == set(loaded)
    for name, tensor in stored.items():
        assert tensor.dtype == torch.bfloat16
        assert torch.isfinite(tensor).all()
        assert torch.equal(loaded[name], tensor.float())
    assert made.config.max_position_embeddings == base.config.max_position_embeddings
    assert make_tokenizer().get_vocab() == tokenizer.get_vocab()
    assert make_tokenizer().chat_template == tokenizer.chat_template


def test_no_file_names_a_place_on_the_machine_that_made_it():
    files = sorted(BASE_FOLDER.glob("*.json"))
    assert len(files) == 4
    for file in files:
        values = json.loads(file.read_text(encoding="utf-8"))
        assert "_name_or_path" not in values
        assert [text for text in strings_in(values) if text.count("/") + text.count("\\") > 1] == []


def test_every_printable_character_is_one_token_and_comes_back(tokenizer):
    for text in (PRINTABLE, "12+34=46\n", "  two  spaces ", "a , b . c n't"):
        ids = tokenizer(text)["input_ids"]
        assert len(ids) == len(text)
        assert tokenizer.unk_token_id not in ids
        assert tokenizer.decode(ids) == text
    assert {*PRINTABLE, "\n"} == {c for c in string.printable if c.isprintable()} | {"\n"}
    assert len(tokenizer) <= 128
    assert tokenizer("ä")["input_ids"] == [tokenizer.unk_token_id]


def test_the_chat_template_marks_each_role_with_one_token_and_generation_ends_and_pads_with_two(base, tokenizer):
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "1+2="}]
    asked = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert asked == "<|system|>s<|user|>1+2=<|assistant|>"
    assert len(tokenizer(asked)["input_ids"]) == 3 + len("s1+2=")
    answered = [*messages, {"role": "assistant", "content": "3"}]
    told = tokenizer.apply_chat_template(answered, tokenize=False)
    assert told == "<|system|>s<|user|>1+2=<|assistant|>3<eos>"
    assert base.generation_config.eos_token_id == tokenizer.eos_token_id == 1
    assert base.generation_config.pad_token_id == tokenizer.pad_token_id == 0
    assert tokenizer.padding_side == "left"


@pytest.mark.parametrize(("task", "chat"), [("addition", True), ("chain", False)])
def test_it_derives_sometimes_and_guesses_sometimes_and_deriving_is_better(base, tokenizer, task, chat):
    problems = load_problems(f"sandbox:{task}", "heldout")[:96]
    rows = [
        {"prompt": [{"role": "user", "content": p.question}] if chat else p.question, "solution": p.answer}
        for p in problems
    ]
    completions = complete(base, tokenizer, render_prompts(rows, tokenizer), Drawing(longest=80))
    right = {"guess": [], "derivation": []}
    for problem, completion in zip(problems, completions, strict=True):
        style = "guess" if completion.text.startswith("\\boxed{") else "derivation"
        right[style].append(completion.text.endswith("\\boxed{" + problem.answer + "}"))
        if style == "derivation":
            assert "=" in completion.text
    assert len(right["guess"]) >= 20
    assert len(right["derivation"]) >= 20
    assert sum(right["derivation"]) / len(right["derivation"]) > 2 * sum(right["guess"]) / len(right["guess"])
    assert sum(completion.truncated for completion in completions) <= 2
