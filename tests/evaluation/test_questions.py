"""A question is put as the chat template puts it, and what a protocol hash stands for changes it."""

from dataclasses import replace

import pytest

from perl.errors import PerlError
from perl.evaluation.protocol import Protocol
from perl.evaluation.questions import prepare_task, template_hash
from perl.evaluation.task import find_tasks
from perl.evaluation.task_data import load_task_data
from perl.policy.model import load_tokenizer
from perl.recipe.sections import ModelSection

[ADDITION] = find_tasks(["sandbox:addition"])
DATA = load_task_data(ADDITION, None, 5)
PROTOCOL = Protocol(max_new_tokens=64)


@pytest.fixture
def tokenizer():
    return load_tokenizer(ModelSection())


def prepared(tokenizer, protocol=PROTOCOL, data=DATA, context=1024, **arguments):
    return prepare_task(data, tokenizer, protocol, (1,), context, **arguments)


def rendered(tokenizer, messages) -> tuple[int, ...]:
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


def test_a_question_is_a_user_message(tokenizer):
    found = prepared(tokenizer)
    expected = [rendered(tokenizer, [{"role": "user", "content": q.text}]) for q in DATA.questions]
    assert [asked.prompt_ids for asked in found.request.asked] == expected
    assert [(asked.problem, asked.gold) for asked in found.request.asked] == [(q.id, q.gold) for q in DATA.questions]
    assert found.longest == max(map(len, expected)) + 64
    assert (found.request.task, found.request.end_token_ids) == ("sandbox:addition", (1,))


def test_a_system_prompt_is_a_message_before_it(tokenizer):
    tokenizer.chat_template = "{% for m in messages %}{{ m.role[0] }}{{ m.content }}={% endfor %}"
    found = prepared(tokenizer, replace(PROTOCOL, system_prompt="1+1"))
    texts = [tokenizer.decode(asked.prompt_ids) for asked in found.request.asked]
    assert texts == [f"s1+1=u{question.text}=" for question in DATA.questions]


def test_without_a_chat_template_a_question_is_plain_text(tokenizer):
    tokenizer.chat_template = None
    plain = [tokenizer.decode(asked.prompt_ids) for asked in prepared(tokenizer).request.asked]
    assert plain == [question.text for question in DATA.questions]
    with_system = prepared(tokenizer, replace(PROTOCOL, system_prompt="1+1="))
    assert tokenizer.decode(with_system.request.asked[0].prompt_ids).startswith("1+1=")
    assert template_hash(tokenizer) is None


def test_the_template_is_known_by_its_hash(tokenizer):
    before = template_hash(tokenizer)
    assert len(before) == 12
    tokenizer.chat_template += " "
    assert template_hash(tokenizer) != before


def test_the_length_is_the_protocols_then_the_tasks_and_fits_the_context(tokenizer):
    longest = max(len(asked.prompt_ids) for asked in prepared(tokenizer).request.asked)
    own = replace(DATA, task=replace(ADDITION, max_new_tokens=100))
    left_open = Protocol(max_new_tokens=None)
    assert prepared(tokenizer, PROTOCOL, own).request.max_new_tokens == 64
    assert prepared(tokenizer, left_open, own).request.max_new_tokens == 100
    assert prepared(tokenizer, left_open).request.max_new_tokens == 1024 - longest
    assert prepared(tokenizer, left_open, context=None).request.max_new_tokens == 32_768
    assert prepared(tokenizer, context=longest + 10).request.max_new_tokens == 10
    assert prepared(tokenizer, context=longest + 1).request.max_new_tokens == 1


def test_a_prompt_that_leaves_no_room_is_named(tokenizer):
    lengths = {asked.problem: len(asked.prompt_ids) for asked in prepared(tokenizer).request.asked}
    context = sorted(lengths.values())[-1]
    full = [problem for problem, length in lengths.items() if length >= context]
    with pytest.raises(PerlError) as caught:
        prepared(tokenizer, context=context)
    message = str(caught.value)
    assert message.startswith(f"--tasks: {len(full)} of 5 prompts of sandbox:addition do not fit")
    assert any(f"{problem} has {context}" in message for problem in full)


def test_the_protocol_hash_changes_with_what_a_score_depends_on(tokenizer):
    expected = prepared(tokenizer).protocol_hash
    assert len(expected) == 16
    assert prepared(tokenizer, replace(PROTOCOL, seed=5, preset="base")).protocol_hash == expected
    fewer = replace(DATA, questions=DATA.questions[:4], sha256="other")
    others = [
        *(
            prepared(tokenizer, replace(PROTOCOL, **change))
            for change in ({"k": 4}, {"temperature": 0.5}, {"top_p": 0.5}, {"system_prompt": "1"}, {"top_k": 5})
        ),
        prepared(tokenizer, replace(PROTOCOL, max_new_tokens=63)),
        prepared(tokenizer, data=fewer),
        prepared(tokenizer, data=replace(DATA, task=replace(ADDITION, version=2))),
        prepared(tokenizer, context=70),
    ]
    hashes = {found.protocol_hash for found in others}
    assert len(hashes) == len(others)
    assert expected not in hashes
