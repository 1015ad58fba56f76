r"""The countdown reward is exact, judged by expressions of known value; nothing that a model writes is evaluated."""

import json
import random
from fractions import Fraction
from pathlib import Path

import pytest

from perl.rewards.countdown import countdown_reward
from tests.oracles.alarm import no_hang
from tests.oracles.countdown import every_expression, leaves, random_chain, random_expression, value_by_python

PUBLIC_DATA = Path(__file__).resolve().parent.parent.parent.parent / "shared" / "data" / "countdown_test.jsonl"


def tagged(answer):
    return f"<think>\nlet me see\n</think>\n<answer>{answer}</answer>"


def reward_of(answer, target, numbers, **arguments):
    (reward,) = countdown_reward([tagged(answer)], [target], [numbers], **arguments)
    return reward


def rows():
    if not PUBLIC_DATA.is_file():
        pytest.skip("the public data set countdown_test.jsonl is not beside the checkout")
    return [json.loads(line) for line in PUBLIC_DATA.read_text(encoding="utf-8").strip().split("\n")]


def test_numbers_of_a_csv_file_are_numbers():
    assert [reward_of("44+19+35", target, ["44", "19", "35"]) for target in ("98", 98.0, "97")] == [1.0, 1.0, 0.1]


def test_published_answers_are_right_for_what_they_are_worth_and_wrong_for_another_target():
    found = rows()
    assert len(found) > 200
    answers, numbers = [tagged(row["answer"]) for row in found], [row["numbers"] for row in found]
    targets = [value_by_python(row["answer"].partition("=")[0]) for row in found]
    assert targets == [row["target"] for row in found]
    assert countdown_reward(answers, targets, numbers) == [1.0] * len(found)
    assert countdown_reward(answers, [target + 1 for target in targets], numbers) == [0.1] * len(found)


def test_published_problems_are_solved_by_exactly_what_a_search_finds():
    for row in random.sample(rows(), 8):
        built = list(every_expression(leaves(row["numbers"])))
        rewards = countdown_reward(
            [tagged(text) for text, _ in built], [row["target"]] * len(built), [row["numbers"]] * len(built)
        )
        assert rewards == [1.0 if value == row["target"] else 0.1 for _, value in built]
        assert 1.0 in rewards


@pytest.mark.parametrize("count", [1, 2, 4, 6])
def test_an_expression_is_right_exactly_if_it_was_built_to_be(count):
    for _ in range(300):
        numbers = [random.randint(0, 12) for _ in range(count)]
        text, value = random_expression(numbers, random)
        shuffled = random.sample(numbers, count)
        assert reward_of(text, value, shuffled) == 1.0
        assert reward_of(text, value + Fraction(1, 10**9), shuffled) == 0.1
        assert reward_of(text, value, [*shuffled, 1]) == 0.1
        assert reward_of(text, value, shuffled[1:]) == 0.1
        assert reward_of(text, value, [shuffled[0] + 1, *shuffled[1:]]) == 0.1
        assert reward_of(f"{text}+0", value, shuffled) == 0.1


def test_values_are_exact_and_operators_bind_as_in_arithmetic():
    large = [10**16 + 1, 10**16]
    chains = {
        "1/3*3": [1, 3, 3],
        f"({large[0]}-{large[1]})*5": [*large, 5],
        f"{large[0]}/{large[1]}": large,
        "8/(3-8/3)": [3, 3, 8, 8],
        "1-2-3": [1, 2, 3],
        "1+2*3": [1, 2, 3],
        "24/2/3": [2, 3, 24],
    }
    for _ in range(500):
        numbers = [random.randint(0, 20) for _ in range(random.randint(2, 6))]
        chains[random_chain(numbers, random)] = numbers
    undefined = 0
    for chain, numbers in chains.items():
        value = value_by_python(chain)
        undefined += value is None
        expected = [0.1, 0.1] if value is None else [1.0, 0.1]
        target = value or Fraction(0)
        assert [reward_of(chain, t, numbers) for t in (target, target + Fraction(1, 10**16))] == expected, chain
    assert 5 < undefined < 100


SIGNS = {  # as Python writes an operator -> as people do
    "*": ["*", " * ", r"\times", r" \times ", r" \cdot ", "\u00d7", "\u00b7", " \u00d7 ", "\t*\t"],
    "/": ["/", " / ", r" \div ", "\u00f7"],
    "-": ["-", " - ", " \u2212 ", "\u2212"],
    "+": ["+", " + ", "\n+ "],
}


def test_a_right_answer_is_right_however_it_is_written():
    wrong = []
    for _ in range(400):
        numbers = [random.randint(1, 12) for _ in range(random.randint(1, 4))]
        text, value = random_expression(numbers, random)
        answer = "".join(random.choice(SIGNS.get(sign, [sign])) for sign in text)
        if random.random() < 0.3:
            answer = random.choice(["+", "", " ", "(", "\n"]) + answer
            answer += ")" * (answer.count("(") - answer.count(")")) + random.choice(["", " ", "\n"])
        if value.denominator == 1:
            answer += random.choice(["", f" = {value}", f"={value}", f" = {value} "])
        if reward_of(answer, value, numbers) != 1.0:
            wrong.append((answer, value))
    for answer, numbers in (("-8*(-2-1)", [1, 2, 8]), ("(((1+2)))*(8)", [1, 2, 8]), ("2-26 = -24", [2, 26])):
        if reward_of(answer, -24 if "26" in answer else 24, numbers) != 1.0:
            wrong.append(answer)
    assert wrong == []


GAME, ONE_NUMBER = [1, 2, 8], [24]
NOT_RIGHT = [  # for the target 24: numbers, answers
    (
        GAME,
        [
            *("(1+2)*8 = 25", "(1+2)*8 = 24 = 24", "(1+2)*8 =", "24 = (1+2)*8", "(1+2)*8 = 3*8", "= 24", "=", "24"),
            *("", " ", "()", "1+2", "(1+2)*8*1", "(1+2)*8+1-1", "3*8", "12*2", "(1+2)8", "(1+2)(8)", "(1+2)*8.0"),
            *("(1+2)*+", "(1+2)*8)", "((1+2)*8", "(1+2)*8;", "1+2,8", "(1,2,8)", "[1+2]*8", "(1+2)*8 or 0"),
            *("so (1+2)*8", "8*(2+1) # 24", "(1+2)*0x8", "(1+2)*08", "(1+2)*8_", "1+2*8", "x"),
        ],
    ),
    ([2, 3, 3], ["2**3*3", "2* *3*3", r"2\times\times3*3"]),
    ([2, 49], ["49//2", "49/ /2"]),
    ([25, 49], ["49%25"]),
    ([8, 16], ["8|16"]),
    ([3, 3], ["3<<3"]),
    ([25], ["~-25"]),
    ([1, 23], ["23+True"]),
    (ONE_NUMBER, ["24j", "2_4", "0x18", "0b11000", "2.4e1", "24.0", "'24'", "abs(24)", "(lambda: 24)()", "24,"]),
    ([24, 24, 24], ["24 if 24 else 24"]),
    ([0, 24], ["[24][0]", "24/0"]),
    ([3, 3, 24], ["24/(3-3)"]),
    ([0, 0], ["0/0"]),
    ([0, 1, 3, 3, 24], ["24+1/(3-3)*0"]),
    ([0, 1, 1], ["1/(1/0)"]),
]


def test_an_answer_that_is_not_right_gets_the_format_score_and_nothing_is_divided_by_zero_or_run_as_python():
    rows = [(answer, numbers) for numbers, answers in NOT_RIGHT for answer in answers]
    for score in (0.1, 0.2, 0):
        for target in (24, 0):
            found = [reward_of(answer, target, numbers, format_score=score) for answer, numbers in rows]
            assert [row for row, reward in zip(rows, found, strict=True) if reward != score] == []


ANSWERS = {
    "<answer>20+4</answer>": 1.0,
    "<answer>20+4</answer> no: <answer>20*4</answer>": 0.1,
    "<answer>20*4 <answer>20+4</answer>": 1.0,
    "<think><answer>20+4</answer></think><answer>20*4</answer>": 0.1,
    r"so $\boxed{20+4=24}$.": 1.0,
    r"\boxed{20*4} no: \boxed{20+4}": 1.0,
    r"<answer>20*4</answer> \boxed{20+4}": 0.1,
    r"<answer>\boxed{20+4}</answer>": 0.1,
    "<answer></answer>": 0.1,
    "": 0.0,
    "20+4": 0.0,
    "<answer>20+4": 0.0,
    "</answer>20+4<answer>": 0.0,
    r"\boxed{20+4": 0.0,
    r"<think>\boxed{20+4}</think> well": 0.0,
    "<think><answer>20+4</answer></think>": 0.0,
}


def test_the_answer_is_in_the_last_tags_after_the_reasoning_or_else_in_the_last_box():
    rewards = countdown_reward(list(ANSWERS), [24] * len(ANSWERS), [[4, 20]] * len(ANSWERS))
    assert dict(zip(ANSWERS, rewards, strict=True)) == ANSWERS


MANY = 100_000


@pytest.mark.parametrize(
    "hostile",
    [
        "__import__('os').system('touch pwned')",
        "(lambda:open('pwned','w'))()",
        "9**9**9",
        "9" * MANY,
        "*".join(["9"] * 250),
        "(" * MANY,
        "(" * 249 + "24" + ")" * 249,
        "-" * 498 + "24",
        "1+" * 249 + "1",
        "=" * MANY,
        "24" + "=24" * MANY,
        "\u0662\u0664",
        "24\u2028",
        "24\r\n#",
        "{" * MANY,
    ],
    ids=lambda text: ascii(text[:20]),
)
def test_hostile_answers_are_never_evaluated_never_right_and_never_hang(hostile):
    boxed = f"\\boxed{{{hostile}}}"
    with no_hang():
        rewards = countdown_reward([tagged(hostile), boxed, hostile], [24] * 3, [[24]] * 3)
    assert rewards[0] in (0.1, 1.0)
    assert (rewards[0] == 1.0) == (hostile == "24\u2028")
    assert rewards[1] in ((0.0,) if hostile[0] == "{" else (rewards[0], 0.0))
    assert rewards[2] == 0.0
    assert not Path("pwned").exists()


@pytest.mark.parametrize(
    "completion",
    ["<answer>" * MANY, "<answer></answer>" * MANY, "\\boxed{" * MANY],
    ids=lambda text: text[:12],
)
def test_hostile_tags_do_not_hang(completion):
    with no_hang():
        assert countdown_reward([completion], [24], [[24]]) == [0.1 if "<answer></answer>" in completion else 0.0]


def test_an_example_without_target_or_numbers_has_no_reward():
    completions = [tagged("20+4")] * 4
    rewards = countdown_reward(completions, [24, None, 24, None], [[4, 20], [4, 20], None, None])
    assert rewards == [1.0, None, None, None]


@pytest.mark.parametrize("score", [-0.1, 1, float("nan"), "0.1"])
def test_a_format_score_is_less_than_a_right_answer_even_for_an_empty_batch(score):
    with pytest.raises(ValueError, match="format_score must be a number of at least 0 and below 1"):
        countdown_reward([], [], [], format_score=score)
