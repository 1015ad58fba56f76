"""The chat templates of fifteen families: what is rendered is sampled from, scored and trained, token for token."""

import re
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import trl
import yaml
from datasets import Dataset
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from perl import PeftGRPOTrainer, PeftRLConfig, train
from perl.data import render_prompts, thinking_arguments
from perl.errors import DataError, PerlError
from perl.evaluation.drawing.request import EvalSettings, plan_evaluation
from perl.evaluation.scoring.results import read_results
from perl.evaluation.tasks.questions import set_template
from perl.hub.cards import run_card
from perl.policy.model import eos_token_ids
from perl.recipe import load_recipe
from perl.sandbox import BASE_FOLDER
from perl.training.forecast_text import first_prompt
from perl.training.prepare import prepare
from tests.oracles.two_trainers import QUIET


class Family(NamedTuple):
    """What a template's own text, and the model's generation settings, say."""

    ends: str
    bos: str | None = None  # that the template writes
    switch: str | None = None
    drops: bool = False  # the thoughts of earlier turns
    text: str | None = None  # None: of the file that TRL installs


IM = "<|im_end|> <|endoftext|>"
BEGIN, DEEPSEEK = "<\uff5cbegin▁of▁sentence\uff5c>", "<\uff5cend▁of▁sentence\uff5c>"
# Written after their documentation, as short as what is tested here allows.
MISTRAL = """{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]{% else %} \
{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"""
DEEPSEEK_3_1 = """{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<\uff5cUser\uff5c>{{ m.content }}\
{% else %}<\uff5cAssistant\uff5c></think>{{ m.content.split('</think>')[-1] }}{{ eos_token }}\
{% endif %}{% endfor %}<\uff5cAssistant\uff5c>{{ '<think>' if thinking else '</think>' }}"""
GRANITE = """{% if messages[0].role != 'system' %}<|start_of_role|>system<|end_of_role|>You are Granite.\
{{ ' Write down your thoughts.' if thinking }}<|end_of_text|>{% endif %}{% for m in messages %}<|start_of_role|>\
{{ m.role }}<|end_of_role|>{{ m.content }}<|end_of_text|>{% endfor %}<|start_of_role|>assistant<|end_of_role|>"""
FAMILIES = {
    "qwen2_5": Family(IM),
    "qwen3": Family(IM, None, "enable_thinking", drops=True),
    "qwen3_instruct_2507": Family(IM),
    "qwen3_5_think": Family(IM, None, "enable_thinking", drops=True),
    "qwen3_8": Family(IM, None, "enable_thinking"),
    "llama3_2": Family("<|eot_id|> <|eom_id|> <|end_of_text|>", "<|begin_of_text|>"),
    "gemma3": Family("<end_of_turn> <eos>", "<bos>"),
    "gemma4_v5": Family("<turn|> <eos>", "<bos>", "enable_thinking"),
    "deepseek_r1_distill": Family(DEEPSEEK, BEGIN, drops=True),
    "deepseek 3.1": Family(DEEPSEEK, BEGIN, "thinking", drops=True, text=DEEPSEEK_3_1),
    "glm4moe": Family("<|endoftext|> <|user|> <|observation|>", None, "enable_thinking", drops=True),
    "gptoss": Family("<|return|> <|call|> <|endoftext|>"),
    "phi3_5": Family("<|end|> <|assistant|> <|endoftext|>"),
    "cohere2": Family("<|END_OF_TURN_TOKEN|>", "<BOS_TOKEN>"),
    "lfm2_2_5": Family("<|im_end|>", "<|startoftext|>", drops=True),
    "nemotron_3_nano": Family("<|im_end|> </s>", None, "enable_thinking", drops=True),
    "mistral": Family("</s>", "<s>", text=MISTRAL),
    "granite": Family("<|end_of_text|>", None, "thinking", text=GRANITE),
}
ASKED = [{"role": "user", "content": "1+1="}]
AGAIN = [*ASKED, {"role": "assistant", "content": "<think>\nOld.\n</think>\n\n2"}, {"role": "user", "content": "2+3="}]


def tokenizer(name: str) -> PreTrainedTokenizerFast:
    """A token a byte and one a mark; one before every text that is no conversation, and none that pads."""
    family, folder = FAMILIES[name], Path(trl.__file__).parent / "chat_templates"
    template = family.text or (folder / f"{name}.jinja").read_text(encoding="utf-8")
    bos, ends = family.bos or "<first>", family.ends.split()
    marks = re.findall(r"<[|\uff5c/]?[\w▁]+[|\uff5c]?>|\[/?[A-Z]+\]", template)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: n for n, letter in enumerate(letters)}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_special_tokens([AddedToken(mark, special=True) for mark in dict.fromkeys([bos, *ends, *marks])])
    special_tokens = [(bos, made.token_to_id(bos))]
    made.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=special_tokens)
    found = PreTrainedTokenizerFast(tokenizer_object=made, bos_token=bos, eos_token=ends[0], padding_side="left")
    found.chat_template = template
    return found


def asked(messages, words, **arguments) -> tuple[int, ...]:
    return render_prompts([{"prompt": messages}], words, arguments)[0].token_ids


@pytest.mark.parametrize("name", FAMILIES)
def test_a_conversation_has_the_templates_tokens_once_and_its_thinking_mode_or_none(name):
    family, words, where = FAMILIES[name], tokenizer(name), {"where": "data.thinking", "hint": "leave it out"}
    assert words("1")["input_ids"][0] == words.bos_token_id
    for messages in (ASKED, AGAIN):
        ids = asked(messages, words)
        assert [*ids] == words.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        text = words.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        assert words.decode(ids) == text
        assert ids.count(words.bos_token_id) == (family.bos is not None)
    assert ("Old." in text) is not family.drops  # of the last of them
    assert thinking_arguments(ASKED, words, None, {"a": 1}, **where) == {"a": 1}
    if family.switch is None:  # though some say thinking of something else
        with pytest.raises(DataError, match=r"data.thinking: the base has a chat template without a thinking mode"):
            thinking_arguments(ASKED, words, True, **where)
        return
    for mode in (True, False):
        found = thinking_arguments(ASKED, words, mode, **where)
        assert found == {family.switch: mode}
        text = words.apply_chat_template(ASKED, tokenize=False, add_generation_prompt=True, **found)
        both = {"enable_thinking": mode, "thinking": mode}  # as a card says it
        assert words.decode(asked(ASKED, words, **both)) == words.decode(asked(ASKED, words, **found)) == text
    if name == "granite":  # whose own system prompt says it
        with pytest.raises(DataError, match="without a thinking mode"):
            set_template(words, thinking=True, system="Hi.")


def ending_model(words: PreTrainedTokenizerFast, ends: list[int]) -> LlamaForCausalLM:
    """Writes any byte or mark, and an end with a chance of about a third; declares all ends but the tokenizer's own."""
    small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(words), **small, eos_token_id=ends[1:] or ends))
    with torch.no_grad():  # a feature that is there whatever is read
        model.model.embed_tokens.weight[:, 0] = 1.0
        model.lm_head.weight[ends, 0] = 1.2
    return model


STEP = {"per_device_train_batch_size": 32, "num_generations": 16, "max_completion_length": 6, "max_steps": 1}


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_sampled_is_trained_with_its_end_and_never_read_again_from_text(name):
    family, words, written, trained = FAMILIES[name], tokenizer(name), [], []
    ends, off = words.convert_tokens_to_ids(family.ends.split()), {family.switch: False} if family.switch else {}
    trainer = PeftGRPOTrainer(
        model=ending_model(words, ends),
        reward_funcs=lambda completion_ids, **_: [float(sum(ids)) for ids in completion_ids],
        args=PeftRLConfig("out", peft_method="lora", chat_template_kwargs=off, **STEP, **QUIET),
        train_dataset=Dataset.from_list([{"prompt": messages} for messages in (ASKED, AGAIN)]),
        processing_class=words,
    )
    write, train_on = trainer._generate_single_turn, trainer.run_micro_batch

    def writing(prompt_ids, *args, **kwargs):
        found = write(prompt_ids, *args, **kwargs)
        written.extend(zip(map(tuple, prompt_ids), map(tuple, found[0]), strict=True))
        return found

    def training(model, batch):
        for row, weights in zip(batch.rows, batch.weights_NT, strict=True):
            ids = row.completion[weights[: len(row.completion)] != 0]
            trained.append((tuple(row.prompt.tolist()), tuple(ids.tolist())))
        return train_on(model, batch)

    trainer._generate_single_turn, trainer.run_micro_batch = writing, training
    trainer.train()
    assert words.pad_token_id == ends[0]  # there was none, and what ends is trained all the same
    assert sorted(trained) == sorted(written)
    assert {prompt for prompt, _ in written} == {asked(one, words, **off) for one in (ASKED, AGAIN)}
    assert {ids[-1] for _, ids in written if len(ids) < 6} == set(ends)
    assert not any(set(ids[:-1]) & set(ends) for _, ids in written)
    assert any(words(words.decode(ids), add_special_tokens=False)["input_ids"] != [*ids] for _, ids in written)
    assert set(eos_token_ids(trainer.policy, words)) == set(ends)  # of scores


def recipe_with(switch: str = "", **changes):
    """A file, of the sandbox's base with more at the beginning of its template."""
    shutil.copytree(BASE_FOLDER, "base", dirs_exist_ok=True)
    own = (BASE_FOLDER / "chat_template.jinja").read_text(encoding="utf-8")
    Path("base/chat_template.jinja").write_text(switch + own, encoding="utf-8")
    recipe = {"model": {"name": "base"}, "rollout": {"max_completion_length": 64}, "engine": {"device": "cpu"}}
    recipe |= {"data": {"train": {"name": "sandbox:addition", "limit": 8}, "thinking": False}}
    recipe |= {"train": {"prompts_per_step": 2, "num_generations": 8, "max_steps": 1}, "eval": {"k": 1, "limit": 4}}
    recipe |= {name: {**recipe[name], **value} for name, value in changes.items()}
    Path("my.yaml").write_text(yaml.safe_dump(recipe))
    return load_recipe("my.yaml")


ON = {"chat_template_kwargs": {"enable_thinking": True}}
SWITCH = "{% if enable_thinking | default(true) %}<|system|>0{% endif %}"


def test_one_key_switches_training_its_scores_the_card_and_later_evaluations():
    run = train(recipe_with(SWITCH))
    plan = prepare(recipe_with(SWITCH))
    assert "<|system|>" not in first_prompt(plan)
    assert "thinking off" in first_prompt(plan)
    assert plan.arguments.chat_template_kwargs == {"enable_thinking": False}
    results = read_results(run.path / "eval")
    assert all(said in run_card(run) for said in ("'enable_thinking': False", "thinking off"))
    later = plan_evaluation(str(run.adapter), None, ["heldout"], 1, None, None, EvalSettings(device="cpu", limit=4))
    assert (results.subject["thinking"], later.asking) == ("off", {"thinking": "off"})
    [then], [now] = plan.tasks, later.tasks
    assert [one.prompt_ids for one in now.request.asked] == [one.prompt_ids for one in then.request.asked]
    assert results.tasks[0].protocol_hash == then.protocol_hash


def test_plain_text_that_begins_with_the_first_token_is_said_to_begin_with_two(caplog):
    for beginning, count in (("", 0), ("<s>", 1)):
        caplog.clear()
        recipe = recipe_with(data={"chat": False, "thinking": None, "prompt_template": beginning + "{prompt}"})
        tokenizer("mistral").save_pretrained("base")
        prepare(recipe)
        assert sum("begin with <s>" in one.getMessage() for one in caplog.records) == count


@pytest.mark.parametrize(
    ("switch", "changes", "line"),
    [
        ("", {}, r"data.thinking: the base has a chat template without a thinking mode \(enable_thinking or thinking"),
        (SWITCH, {"data": {"chat": False}}, r"data.thinking: the prompts are plain text"),
        (SWITCH, {"train": ON}, "train.chat_template_kwargs: enable_thinking: True contradicts data.thinking: false"),
    ],
)
def test_a_mode_that_cannot_be_is_one_line_before_a_model_is_loaded(switch, changes, line, monkeypatch):
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", None)
    with pytest.raises(PerlError, match=rf"my.yaml:\d+: {line}") as caught:
        prepare(recipe_with(switch, **changes))
    assert len(str(caught.value).splitlines()) == 1
