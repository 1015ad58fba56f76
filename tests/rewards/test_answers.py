r"""The final answer is the last balanced box after the reasoning, else the last announced one, else there is none."""

import random

import pytest

from perl.rewards.answers import completion_text, conclusion, extract_answer, gold_answer, last_boxed
from tests.oracles.answer_cases import WITHOUT_ANSWER, last_box

FINAL_ANSWERS = {
    r"\boxed{5}": "5",
    r"first \boxed{4}, no: \boxed{5}. Done": "5",
    r"put it in \boxed{}: The answer is 5": "5",
    r"\boxed{5}, as \boxed{} asks": "5",
    r"\boxed 5": "5",
    r"so $\boxed5$.": "5",
    r"$\boxed\frac{1}{2}$": r"\frac{1}{2}",
    r"$\boxed -1.5 \text{ m}$": "-1.5",
    r"$\boxed{3}$, $\boxed{5}$ and $\boxed{7}$": "3, 5, 7",
    r"Hence $x=\boxed{1}$ or $x = \boxed{-2}$.": "x= 1, x = -2",
    r"\boxed{5}\n\boxed{5}": "5",
    r"\boxed{35 cm} is the side. Therefore, \boxed{4}": "4",
    "The matrix is $5$.": "5",
    "Let $a$ be 3. Then $b$ is known. Therefore, the sum is 5.": "5",
    "We get\n\nthe sum: **5**.": "5",
    "Let $a$ be 3. Then we look at it.": None,
    r"\boxed{\frac{1}{2}}": r"\frac{1}{2}",
    r"\boxed{\text{a {nested {set}} }}": r"\text{a {nested {set}} }",
    r"\boxed{a \boxed{5} b}": "5",
    "\\boxed\n{5}": "5",
    "- \\boxed{3}\n- \\boxed{5}": "3, 5",
    "1. $\\boxed{3}$\n2. $\\boxed{5}$": "3, 5",
    **dict.fromkeys([r"\boxed{5}<|im_end|>\boxed{6}", "Answer: 5<|endoftext|>\nAnswer: 6"], "5"),
    **dict.fromkeys(["### Final Answer\n\n5", "**Final Answer**\n5", "# Answer\r\n$5$", "Final answer\n5\n"], "5"),
    **dict.fromkeys(["The final answer is therefore 5.", "The answer is `5`", "The answer is, thus, 5."], "5"),
    "**Answer**\n\nAs we know, 2 + 3 makes five whole things. Therefore, the sum is 5.": "5",
    r"\boxed{5} and then \boxed{\frac{6}{7}": "5",
    r"\boxed{5}}}} {": "5",
    r"\boxed {5}": "5",
    r"\fbox{5}": "5",
    r"\boxed{\{1,2\}}": r"\{1,2\}",
    r"\\boxed{5}": None,
    "The answer is 5": "5",
    "Answer: 5\n": "5",
    "First I thought the answer is 4. But the answer is 5.": "5",
    "**Final Answer**: $x = 5$.": "x = 5",
    "The answer is $5$, as 3 + 2 = 5.": "5",
    r"The answer is $\$18.90$.": r"\$18.90",
    r"The final answer is \[ \frac{1}{2} \]": r"\frac{1}{2}",
    "The solution is x = 2\nthat is all": "x = 2",
    "Answer: the smallest value of $N$ is $5$": "5",
    "<answer> 12 </answer>": "12",
    "\u7b54\u6848\uff1a 42\u3002": "42",
    "The answer is 5\nThe answer is \n": "5",
    "the answers are many": None,
    "#### 5\nThat is all.": "5",
    "The answer is 4 but \\boxed{5}\nAnswer: 6": "5",
    "<think>the answer is 4</think>\nThe answer is 5": "5",
    "<think>a</think> \\boxed{4} <think>b</think> \\boxed{5}": "5",
    **dict.fromkeys(WITHOUT_ANSWER),
}


def test_the_final_answer_of_a_completion_is_found_or_there_is_none():
    assert {completion: extract_answer(completion) for completion in FINAL_ANSWERS} == FINAL_ANSWERS


def test_the_last_box_is_the_one_that_brackets_match():
    found = 0
    for _ in range(1000):
        text = "".join(random.choices(["\\boxed{", "{", "}", "5", "\\boxed,"], k=random.randint(1, 12)))
        assert last_boxed(text) == last_box(text), text
        found += last_box(text) is not None
    assert found > 100


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("  42 ", "42"),
        ("She has 3 + 4 = <<3+4=7>>7.\n#### 7", "7"),
        (r"Then $x$ is \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"first \boxed{1}, then \boxed{2}", "2"),
        ("work #### ", ""),
        ("", ""),
    ],
)
def test_a_gold_answer_may_stand_in_a_solution(gold, answer):
    assert gold_answer(gold) == answer


@pytest.mark.parametrize(
    ("text", "rest"),
    [("a", "a"), ("<think>a</think>b", "b"), ("a</think>b</think>c", "c"), ("<think>a", ""), ("", "")],
)
def test_the_conclusion_is_what_follows_the_reasoning(text, rest):
    assert conclusion(text) == rest


def test_chat_messages_are_read_as_their_text():
    messages = [{"role": "assistant", "content": "so \\boxed{"}, {"role": "assistant", "content": None}]
    assert completion_text([*messages, {"role": "assistant", "content": "4}"}]) == "so \\boxed{4}"
    told = {"role": "tool", "name": "page", "content": "\\boxed{7}"}
    assert completion_text([*messages, told]) == ""
    assert completion_text([*messages, told, {"role": "assistant", "content": "so 8"}]) == "so 8"
    assert completion_text("text") == "text"
    assert completion_text([]) == ""
