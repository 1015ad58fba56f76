"""A question is put as the chat template puts it; another template or thinking mode is another protocol."""

from dataclasses import replace
from pathlib import Path

import pytest

from perl.errors import PerlError
from perl.evaluation.drawing.request import EvalSettings, plan_evaluation
from perl.evaluation.scoring.protocol import Protocol
from perl.evaluation.scoring.task import find_tasks
from perl.evaluation.tasks.questions import prepare_task, prompts_hash, set_template
from perl.evaluation.tasks.task_data import load_task_data
from perl.policy.model import load_tokenizer
from perl.recipe.sections import ModelSection
from tests.oracles.evaluation import digest

[ADDITION, CHAIN] = find_tasks(["sandbox:addition", "sandbox:chain"])
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


@pytest.mark.parametrize(
    ("template", "system", "before", "after"),
    [
        ("{% for m in messages %}{{ m.role[0] }}{{ m.content }}={% endfor %}", "1+1", "s1+1=u", "="),
        (None, None, "", ""),  # plain text
        (None, "1+1=", "1+1=\n\n", ""),
    ],
    ids=["a template", "none", "none, with a system prompt"],
)
def test_a_system_prompt_stands_before_it_and_without_a_template_it_is_plain_text(
    tokenizer, template, system, before, after
):
    tokenizer.chat_template = template
    found = prepared(tokenizer, replace(PROTOCOL, system_prompt=system))
    expected = [tokenizer(f"{before}{question.text}{after}")["input_ids"] for question in DATA.questions]
    assert [list(asked.prompt_ids) for asked in found.request.asked] == expected


@pytest.mark.parametrize(
    ("given", "own", "room"), [(None, None, None), (None, 100, 5000), (64, 100, 80), (64, None, 10)]
)
def test_the_length_is_the_protocols_then_the_tasks_and_fits_the_context(tokenizer, given, own, room):
    longest = max(len(rendered(tokenizer, [{"role": "user", "content": q.text}])) for q in DATA.questions)
    data = replace(DATA, task=replace(ADDITION, max_new_tokens=own))
    context = None if room is None else longest + room
    found = prepared(tokenizer, Protocol(max_new_tokens=given), data, context)
    expected = min(given or own or 32_768, 10**9 if room is None else context - longest)
    assert found.request.max_new_tokens == expected
    assert found.longest == longest + expected


def test_the_protocol_hash_is_of_the_task_its_data_and_all_that_a_score_depends_on(tokenizer):
    fewer = replace(DATA, questions=DATA.questions[:4], sha256="other")
    changes = ({"k": 4}, {"temperature": 0.5}, {"top_p": 0.5}, {"system_prompt": "1"}, {"top_k": 5})
    cases = [
        (PROTOCOL, DATA, 64),
        (replace(PROTOCOL, seed=5, preset="base"), DATA, 64),  # the same
        *((replace(PROTOCOL, **change), DATA, 64) for change in changes),
        (replace(PROTOCOL, max_new_tokens=63), DATA, 63),
        (PROTOCOL, fewer, 64),
        (PROTOCOL, replace(DATA, task=replace(ADDITION, version=2)), 64),
    ]
    hashes = []
    for protocol, data, length in cases:
        hashes.append(prepared(tokenizer, protocol, data).protocol_hash)
        task = {"task": data.task.name, "task_version": data.task.version, "prompt": data.task.prompt}
        asked = {**protocol.drawn(), "k": protocol.k, "data": data.sha256, "max_new_tokens": length}
        assert hashes[-1] == digest({**task, **asked})
    cut = prepared(tokenizer, context=70)  # of the length, what it really was
    assert cut.request.max_new_tokens < 64
    assert len({*hashes, cut.protocol_hash}) == len(cases)


def test_a_limit_changes_neither_the_length_nor_what_samples_are_named_by(tokenizer):
    whole = prepared(tokenizer, Protocol(), load_task_data(CHAIN), 100)
    lengths = [len(asked.prompt_ids) for asked in whole.request.asked]
    some = next(i for i, length in enumerate(lengths) if length > lengths[0])  # the longest are further down
    few = prepared(tokenizer, Protocol(), load_task_data(CHAIN, None, some), 100)
    assert few.request.asked == whole.request.asked[:some]
    assert few.request.max_new_tokens == whole.request.max_new_tokens == 100 - max(lengths)
    assert prompts_hash(few.request) == prompts_hash(whole.request)
    assert few.protocol_hash != whole.protocol_hash
    right = replace(few.request, asked=tuple(replace(asked, gold="7") for asked in few.request.asked))
    assert prompts_hash(right) == prompts_hash(few.request)  # another gold is another verdict, no other completion
    other = replace(few.request, asked=tuple(replace(asked, prompt_ids=(1,)) for asked in few.request.asked))
    assert prompts_hash(other) != prompts_hash(few.request)


PLAIN = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
SWITCHED = PLAIN + "{% if SWITCH is defined and not SWITCH %}//{% endif %}{% if SWITCH %}??{% endif %}"


def planned(**settings):
    chosen = EvalSettings(limit=1, device="cpu", lighteval=False, max_new_tokens=8, **settings)
    return plan_evaluation(None, "sandbox:base", ["sandbox:addition"], 1, None, None, chosen)


def prompt_of(plan) -> str:
    return load_tokenizer(ModelSection()).decode(plan.tasks[0].request.asked[0].prompt_ids)


@pytest.mark.parametrize(
    ("switch", "thinking", "ends"), [("enable_thinking", True, "??"), ("thinking", False, "//"), ("thinking", None, "")]
)
def test_the_thinking_mode_is_switched_by_the_name_that_the_template_has(tokenizer, switch, thinking, ends):
    Path("t.jinja").write_text(SWITCHED.replace("SWITCH", switch))
    arguments = set_template(tokenizer, "t.jinja", thinking=thinking)
    assert arguments == ({} if thinking is None else {switch: thinking})
    asked = [{"role": "user", "content": "2+3="}]
    assert tokenizer.apply_chat_template(asked, tokenize=False, **arguments) == "2+3=" + ends


def test_a_template_of_a_file_is_what_the_model_is_asked_by_and_results_name_it():
    usual = planned()
    Path("t.jinja").write_text(PLAIN)
    other = planned(chat_template="t.jinja")
    question = other.tasks[0].data.questions[0].text
    assert prompt_of(other) == question
    assert prompt_of(usual) != question
    assert usual.template != other.template
    Path("t.jinja").write_text(SWITCHED.replace("SWITCH", "enable_thinking"))
    on, off = (planned(chat_template="t.jinja", thinking=thinking) for thinking in (True, False))
    assert on.tasks[0].request.asked[0].prompt_ids != off.tasks[0].request.asked[0].prompt_ids


@pytest.mark.parametrize(
    ("content", "thinking", "line"),
    [
        (None, None, "--chat-template: t.jinja cannot be read: No such file"),
        ("{{ raise_exception('no user') }}", None, "--chat-template: t.jinja cannot be rendered: no user"),
        ("hello", None, "--chat-template: t.jinja does not show the question to the model"),
        (PLAIN + " thinking", True, "--thinking: the base has a chat template without a thinking mode"),
    ],
    ids=["absent", "raising", "without the question", "without a switch"],
)
def test_a_template_that_cannot_be_used_is_one_line(content, thinking, line):
    if content is not None:
        Path("t.jinja").write_text(content)
    with pytest.raises(PerlError) as caught:
        planned(chat_template="t.jinja", thinking=thinking)
    assert str(caught.value).startswith(line)
    assert len(str(caught.value).splitlines()) == 1
