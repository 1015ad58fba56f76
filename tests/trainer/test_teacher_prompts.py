"""A teacher's prompt is the policy's with a hint before the question or around it, or with another system message."""

import copy

import pytest

from perl.errors import DataError
from perl.recipe.sections import TeacherSection
from perl.trainer.step.teaching import check_answers, teacher_prompt

CHAT = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "1+1="}]
TALK = [*CHAT, {"role": "assistant", "content": "2"}, {"role": "user", "content": "and 2+2="}]


def prompt_of(prompt, section, **columns):
    before = copy.deepcopy(prompt)
    found = teacher_prompt({"prompt": prompt, **columns}, TeacherSection(**section))
    assert prompt == before
    return found


def test_a_hint_stands_before_the_question():
    assert prompt_of("1+1=", {"hint": "It is 2."}) == "It is 2.\n1+1="
    found = prompt_of(CHAT, {"hint": "It is 2."})
    assert found == [CHAT[0], {"role": "user", "content": "It is 2.\n\n1+1="}]
    found = prompt_of(TALK, {"hint": "It is 4."})
    assert found[:-1] == TALK[:-1]
    assert found[-1]["content"] == "It is 4.\n\nand 2+2="


def test_a_hint_may_contain_question_and_answer_and_any_other_brace():
    hint = r"{prompt} (it is {answer}, write \boxed{x} or {other})"
    expected = r"1+{answer}= (it is 2, write \boxed{x} or {other})"
    assert prompt_of("1+{answer}=", {"hint": hint}, solution="2") == expected
    assert prompt_of("1+{answer}=", {"hint": hint}, answer=2) == expected
    assert prompt_of("1+1=", {"hint": "{answer}"}, solution="{prompt}", answer="no") == "{prompt}\n1+1="
    with pytest.raises(DataError, match=r"^teacher\.hint: [^\n]*no gold answer[^\n]*$"):
        prompt_of("1+1=", {"hint": "{answer}"})
    check_answers(["prompt", "answer"], TeacherSection(hint="{answer}"))
    check_answers(["prompt"], TeacherSection(hint="x"))


def test_a_system_prompt_takes_the_place_of_the_policys():
    section = {"system_prompt": "You know that it is 2."}
    system = {"role": "system", "content": "You know that it is 2."}
    assert prompt_of(CHAT, section) == prompt_of(CHAT[1:], section) == [system, CHAT[1]]
    both = prompt_of(CHAT, {**section, "hint": "h"})
    assert both == [system, {"role": "user", "content": "h\n\n1+1="}]
    with pytest.raises(DataError, match=r"^teacher\.system_prompt: [^\n]*chat messages[^\n]*$"):
        prompt_of("1+1=", section)
    with pytest.raises(DataError, match=r"^teacher\.hint: [^\n]*no text of a user[^\n]*$"):
        prompt_of(CHAT[:1], {"hint": "h"})


def test_a_system_prompt_may_tell_the_answer():
    section = {"system_prompt": r"It is {answer}, as \boxed{x}."}
    system = {"role": "system", "content": r"It is {prompt}, as \boxed{x}."}
    assert prompt_of(CHAT, section, solution="{prompt}") == [system, CHAT[1]]
    both = prompt_of(CHAT, {**section, "hint": "{answer}: {prompt}"}, answer=2)
    assert [message["content"] for message in both] == [r"It is 2, as \boxed{x}.", "2: 1+1="]
    with pytest.raises(DataError, match=r"^teacher\.system_prompt: [^\n]*no gold answer[^\n]*$"):
        prompt_of(CHAT, section)
    with pytest.raises(DataError, match=r"^teacher\.system_prompt: [^\n]*only prompt, other"):
        check_answers(["prompt", "other"], TeacherSection(**section))


def test_without_a_hint_the_prompt_is_the_policys():
    assert prompt_of("1+1=", {"adapter": "x"}) == "1+1="
    assert prompt_of(TALK, {"adapter": "x"}) == TALK
