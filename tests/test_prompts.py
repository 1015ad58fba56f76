"""A prompt is rendered token for token as TRL's trainer renders it."""

import shutil
from pathlib import Path

import datasets
import pytest
import yaml
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from perl import PeftGRPOTrainer, PeftRLConfig
from perl.data import load_problem_set, render_prompts
from perl.errors import DataError
from perl.recipe import load_recipe
from perl.recipe.sections import DataSection
from perl.sandbox import BASE_FOLDER
from perl.training.prepare import prepare

MESSAGES = [
    [{"role": "user", "content": "12+34="}],
    [{"role": "system", "content": "abc"}, {"role": "user", "content": "1+1="}],
    [
        {"role": "user", "content": "1+1="},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "2+3="},
    ],
]
TEXTS = ["12+34=", "a longer text, with\nlines", "<|user|>1+1=<|assistant|>"]


@pytest.fixture(scope="module")
def plain_tokenizer():
    return AutoTokenizer.from_pretrained(BASE_FOLDER)


def fed_by_trl(prompts, **arguments):
    """The token ids that TRL's own trainer makes of prompts before it generates."""
    trainer = GRPOTrainer(
        model=str(BASE_FOLDER),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=GRPOConfig(
            "out", use_cpu=True, bf16=False, activation_checkpointing=False, report_to=[], disable_tqdm=True,
            dataloader_pin_memory=False, **arguments,
        ),
        train_dataset=datasets.Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
    )  # fmt: skip
    return [tuple(ids) for ids in trainer._tokenize_prompts(prompts)[0]]


def rendered(prompts, tokenizer):
    return [prompt.token_ids for prompt in render_prompts([{"prompt": prompt} for prompt in prompts], tokenizer)]


def problem_set():
    """Prompts as a recipe's data set holds them."""
    section = DataSection.model_validate(
        {"train": {"name": "sandbox:addition", "limit": 3}, "system_prompt": "be brief"}
    )
    return [row["prompt"] for row in load_problem_set(section, chat=True).train]


@pytest.mark.parametrize(
    "prompts_of", [lambda: MESSAGES, lambda: TEXTS, problem_set], ids=["messages", "text", "problem set"]
)
def test_token_ids_are_those_that_trl_feeds_in_any_order(tokenizer, prompts_of):
    prompts = prompts_of()
    expected = fed_by_trl(prompts)
    assert rendered(prompts, tokenizer) == expected
    assert rendered(prompts[::-1], tokenizer) == expected[::-1]


def test_messages_end_where_the_completion_begins_and_text_is_tokenized_as_it_is(tokenizer, plain_tokenizer):
    for messages, ids in zip(MESSAGES, rendered(MESSAGES, tokenizer), strict=True):
        text = plain_tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        assert text.endswith("<|assistant|>")
        assert list(ids) == plain_tokenizer(text, add_special_tokens=False)["input_ids"]
    for text, ids in zip(TEXTS, rendered(TEXTS, tokenizer), strict=True):
        assert list(ids) == plain_tokenizer(text)["input_ids"]


def test_a_script_asks_parts_of_text_as_text_and_no_prompt_that_ends_with_the_assistant():
    trainer = PeftGRPOTrainer(
        model="sandbox:base",
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=PeftRLConfig("out", use_cpu=True, report_to=[], peft_method="lora"),
        train_dataset=datasets.Dataset.from_list([{"prompt": MESSAGES[0]}] * 8),
    )
    parts = [{"role": "user", "content": [{"type": "text", "text": "12+"}, {"type": "text", "text": "34="}]}]
    assert trainer._tokenize_prompts([parts])[0] == trainer._tokenize_prompts(MESSAGES[:1])[0]
    with pytest.raises(DataError, match="end with the assistant's"):
        trainer._tokenize_prompts([MESSAGES[0], MESSAGES[2][:2]])


def test_a_prompt_keeps_its_content_and_its_answer(tokenizer):
    first, second = render_prompts(
        [{"prompt": MESSAGES[1], "solution": "2", "level": 3}, {"prompt": "1+1="}], tokenizer
    )
    assert first.content == tuple(MESSAGES[1])
    assert first.solution == "2"
    assert (second.content, second.solution) == ("1+1=", None)


def test_arguments_of_the_chat_template_count_in_the_plan_as_they_do_in_training(plain_tokenizer):
    shutil.copytree(BASE_FOLDER, "base")
    template = Path("base/chat_template.jinja")
    text = template.read_text(encoding="utf-8")
    template.write_text("{% if careful %}<|system|>think hard{% endif %}" + text, encoding="utf-8")
    recipe = {
        "model": {"name": "base"},
        "data": {"train": {"name": "sandbox:addition", "limit": 16}},
        "rollout": {"max_completion_length": 8},
        "engine": {"device": "cpu", "threads": 2},
    }
    without = prepare(load_recipe(recipe)).longest_prompt
    careful = {"train": {"chat_template_kwargs": {"careful": True}}}
    with_it = prepare(load_recipe(yaml.safe_load(yaml.safe_dump({**recipe, **careful})))).longest_prompt
    added = len(plain_tokenizer("<|system|>think hard", add_special_tokens=False)["input_ids"])
    assert with_it == without + added
