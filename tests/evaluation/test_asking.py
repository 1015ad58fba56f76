"""Another chat template, and the thinking mode of one, change what the model is asked; what cannot be is refused."""

from pathlib import Path

import pytest

from perl.errors import PerlError
from perl.evaluation.drawing.request import EvalSettings, plan_evaluation
from perl.evaluation.tasks.questions import set_template
from perl.policy.model import load_tokenizer
from perl.recipe.sections import ModelSection

PLAIN = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
SWITCHED = PLAIN + "{% if SWITCH is defined and not SWITCH %}//{% endif %}{% if SWITCH %}??{% endif %}"


@pytest.fixture
def tokenizer():
    return load_tokenizer(ModelSection())


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
