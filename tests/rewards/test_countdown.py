r"""The countdown reward is exact, judged by expressions of known value; nothing that a model writes is evaluated."""

import itertools
import json
import random
import sys
from fractions import Fraction
from pathlib import Path

import pytest

from perl.rewards.countdown import countdown_reward
from tests.oracles.alarm import no_hang

PUBLIC_DATA = Path(__file__).resolve().parent.parent.parent.parent / "shared" / "data" / "countdown_test.jsonl"


def tagged(answer):
    return f"<think>\nlet me see\n</think>\n<answer>{answer}</answer>"


def reward_of(answer, target, numbers, **arguments):
    (reward,) = countdown_reward([tagged(answer)], [target], [numbers], **arguments)
    return reward


def combined(left, right):
    """Both orders and all operations of two expressions, each a text with the value it is built to have."""
    for (a, x), (b, y) in ((left, right), (right, left)):
        yield f"({a}+{b})", x + y
        yield f"({a} - {b})", x - y
        yield f"({a}*{b})", x * y
        if y != 0:
            yield f"({a} / {b})", x / y


def every_expression(parts):
    """All expressions over (text, value) parts that use each part once."""
    if len(parts) == 1:
        yield parts[0]
        return
    for i, j in itertools.combinations(range(len(parts)), 2):
        rest = [part for k, part in enumerate(parts) if k not in (i, j)]
        for new in combined(parts[i], parts[j]):
            yield from every_expression([*rest, new])


def leaves(numbers):
    return [(str(number), Fraction(number)) for number in numbers]


def rows():
    if not PUBLIC_DATA.is_file():
        pytest.skip("the public data set countdown_test.jsonl is not beside the checkout")
    return [json.loads(line) for line in PUBLIC_DATA.read_text(encoding="utf-8").strip().split("\n")]


def test_published_answers_are_right_and_wrong_for_another_target():
    found = rows()
    assert len(found) > 200
    answers, numbers = [tagged(row["answer"]) for row in found], [row["numbers"] for row in found]
    targets = [row["target"] for row in found]
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
        parts = leaves(numbers)
        while len(parts) > 1:
            left, right = (parts.pop(random.randrange(len(parts))) for _ in range(2))
            parts.append(random.choice(list(combined(left, right))))
        ((text, value),) = parts
        shuffled = random.sample(numbers, count)
        assert reward_of(text, value, shuffled) == 1.0
        assert reward_of(text, value + Fraction(1, 10**9), shuffled) == 0.1
        assert reward_of(text, value, [*shuffled, 1]) == 0.1
        assert reward_of(text, value, shuffled[1:]) == 0.1
        assert reward_of(text, value, [shuffled[0] + 1, *shuffled[1:]]) == 0.1
        assert reward_of(f"{text}+0", value, shuffled) == 0.1


def test_values_are_exact():
    assert reward_of("1/3*3", 1, [1, 3, 3]) == 1.0
    assert reward_of("(10000000000000001-10000000000000000)*5", 5, [10**16 + 1, 10**16, 5]) == 1.0
    assert reward_of("10000000000000001/10000000000000000", 1, [10**16 + 1, 10**16]) == 0.1
    assert reward_of("8/(3-8/3)", 24, [3, 3, 8, 8]) == 1.0
    assert reward_of("1-2-3", -4, [1, 2, 3]) == 1.0
    assert reward_of("1+2*3", 7, [1, 2, 3]) == 1.0
    assert reward_of("24/2/3", 4, [2, 3, 24]) == 1.0


@pytest.mark.parametrize(
    "answer",
    [
        "(1+2)*8",
        " ( 1 + 2 ) * 8 ",
        "\n(1+2)\n* 8\n",
        "\t(1+2)*\t8",
        "(1+2)*8 = 24",
        "(1+2)*8=24",
        r"(1+2) \times 8",
        r"(1+2)\times8",
        r"(1+2) \cdot 8 = 24",
        "(1+2) \u00d7 8",
        "(1+2)\u00b78",
        "8*(2+1)",
        "+8*(2+1)",
        "-8*(-2-1)",
        "(((1+2)))*(8)",
        "(2+1)*8",
    ],
)
def test_ways_to_write_a_right_answer(answer):
    assert reward_of(answer, 24, [8, 2, 1]) == 1.0


@pytest.mark.parametrize("answer", [r"48 \div 2", "48\u00f72", "48 / 2", "48/2 = 24"])
def test_ways_to_write_a_division(answer):
    assert reward_of(answer, 24, [2, 48]) == 1.0


def test_minus_may_be_the_sign_of_typography():
    assert reward_of("26 \u2212 2", 24, [2, 26]) == 1.0
    assert reward_of("2-26 = -24", -24, [2, 26]) == 1.0


@pytest.mark.parametrize(
    "answer",
    [
        "(1+2)*8 = 25",
        "(1+2)*8 = 24 = 24",
        "(1+2)*8 =",
        "24 = (1+2)*8",
        "(1+2)*8 = 3*8",
        "= 24",
        "=",
        "24",
        "",
        " ",
        "()",
        "1+2",
        "(1+2)*8*1",
        "(1+2)*8+1-1",
        "3*8",
        "12*2",
        "(1+2)8",
        "(1+2)(8)",
        "(1+2)*8.0",
        "(1+2)*+",
        "(1+2)*8)",
        "((1+2)*8",
        "(1+2)*8;",
        "1+2,8",
        "(1,2,8)",
        "[1+2]*8",
        "(1+2)*8 or 0",
        "so (1+2)*8",
        "8*(2+1) # 24",
        "(1+2)*0x8",
        "(1+2)*08",
        "(1+2)*8_",
        "1+2*8",
        "x",
    ],
)
def test_an_answer_that_is_not_right_gets_the_format_score(answer):
    assert reward_of(answer, 24, [1, 2, 8]) == 0.1
    assert reward_of(answer, 24, [1, 2, 8], format_score=0) == 0.0


@pytest.mark.parametrize(
    ("answer", "numbers"),
    [
        ("2**3*3", [2, 3, 3]),
        ("2* *3*3", [2, 3, 3]),
        (r"2\times\times3*3", [2, 3, 3]),
        ("49//2", [2, 49]),
        ("49/ /2", [2, 49]),
        ("49%25", [25, 49]),
        ("8|16", [8, 16]),
        ("3<<3", [3, 3]),
        ("~-25", [25]),
        ("23+True", [1, 23]),
        ("24j", [24]),
        ("2_4", [24]),
        ("0x18", [24]),
        ("0b11000", [24]),
        ("2.4e1", [24]),
        ("24.0", [24]),
        ("'24'", [24]),
        ("24 if 24 else 24", [24, 24, 24]),
        ("abs(24)", [24]),
        ("(lambda: 24)()", [24]),
        ("[24][0]", [0, 24]),
        ("24,", [24]),
    ],
)
def test_python_that_is_no_countdown_is_not_right(answer, numbers):
    assert reward_of(answer, 24, numbers) == 0.1


@pytest.mark.parametrize("answer", ["24/0", "24/(3-3)", "0/0", "24+1/(3-3)*0", "1/(1/0)"])
def test_nothing_is_divided_by_zero(answer):
    numbers = [int(digits) for digits in answer.translate(str.maketrans("/()+-*", "      ")).split()]
    assert reward_of(answer, 24, numbers) == 0.1
    assert reward_of(answer, 0, numbers) == 0.1


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("<answer>20+4</answer>", 1.0),
        ("<answer>20*4</answer> no: <answer>20+4</answer>", 1.0),
        ("<answer>20+4</answer> no: <answer>20*4</answer>", 0.1),
        ("<answer>20*4 <answer>20+4</answer>", 1.0),
        ("<answer>20+4</answer></answer>", 1.0),
        ("<answer>20+4</answer> <answer>20*4", 1.0),
        ("<think><answer>20*4</answer></think><answer>20+4</answer>", 1.0),
        ("<think><answer>20+4</answer></think><answer>20*4</answer>", 0.1),
        (r"so \boxed{20+4}", 1.0),
        (r"so $\boxed{20+4=24}$.", 1.0),
        (r"\boxed{20*4} no: \boxed{20+4}", 1.0),
        (r"<answer>20+4</answer> \boxed{20*4}", 1.0),
        (r"<answer>20*4</answer> \boxed{20+4}", 0.1),
        (r"<answer>\boxed{20+4}</answer>", 0.1),
        (r"<think>a</think>\boxed{20+4}", 1.0),
        (r"\boxed{}", 0.1),
        ("<answer></answer>", 0.1),
        ("", 0.0),
        ("20+4", 0.0),
        ("The answer is 20+4", 0.0),
        ("<answer>20+4", 0.0),
        ("20+4</answer>", 0.0),
        ("</answer>20+4<answer>", 0.0),
        (r"\boxed{20+4", 0.0),
        (r"<think>\boxed{20+4}</think> well", 0.0),
        ("<think><answer>20+4</answer></think>", 0.0),
        ("<Answer>20+4</Answer>", 0.0),
    ],
)
def test_the_answer_is_in_the_last_tags_after_the_reasoning_or_else_in_the_last_box(completion, reward):
    assert countdown_reward([completion], [24], [[4, 20]]) == [reward]
    messages = [{"role": "assistant", "content": completion}]
    assert countdown_reward([messages], [24], [[4, 20]]) == [reward]


MANY = 100_000


@pytest.mark.parametrize(
    "hostile",
    [
        "__import__('os').system('touch pwned')",
        "open('pwned','w')",
        "().__class__.__bases__[0].__subclasses__()",
        "(lambda:open('pwned','w'))()",
        'f\'{open("pwned","w")}\'',
        "9**9**9",
        "9**9**9**9**9",
        "9" * MANY,
        "9" * 499,
        "*".join(["9"] * 250),
        "(" * MANY,
        "(" * MANY + "24" + ")" * MANY,
        "(" * 249 + "24" + ")" * 249,
        "-" * MANY + "24",
        "-" * 498 + "24",
        "1+" * MANY + "1",
        "1+" * 249 + "1",
        "+" * 499,
        "[" * 499,
        " " * MANY + "24",
        "\n" * MANY,
        "=" * MANY,
        "24" + "=24" * MANY,
        "\\times" * MANY,
        "\u0662\u0664",
        "\uff12\uff14",
        "\u00b2\u2074",
        "24\x00",
        "\x00",
        "2\u00004",
        "24\ud800",
        "24\u2028",
        "\u200b24",
        "24\\",
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
    ["<answer>" * MANY, "</answer>" * MANY, "<answer></answer>" * MANY, "</think>" * MANY, "\\boxed{" * MANY],
    ids=lambda text: text[:12],
)
def test_hostile_tags_do_not_hang(completion):
    with no_hang():
        assert countdown_reward([completion], [24], [[24]]) == [0.1 if "<answer></answer>" in completion else 0.0]


def test_a_deep_answer_near_the_end_of_the_stack_is_not_an_error():
    def at_depth(depth, answer):
        return at_depth(depth - 1, answer) if depth else reward_of(answer, 24, [4, 20])

    used, frame = 0, sys._getframe()
    while frame is not None:
        frame, used = frame.f_back, used + 1
    depth = sys.getrecursionlimit() - used - 60
    assert depth > 0
    assert at_depth(depth, "20+4") == 1.0
    assert at_depth(depth, "-" * 490 + "20+4") == 0.1


def test_as_deep_as_a_person_writes_is_read():
    assert reward_of("(" * 50 + "24" + ")" * 50, 24, [24]) == 1.0
    assert reward_of("+".join(["1"] * 24), 24, [1] * 24) == 1.0


@pytest.mark.parametrize("deep", ["+".join(["1"] * 150), "1-(" * 110 + "1+1" + ")" * 110, "-" * 150 + "1"])
def test_deeper_than_anybody_writes_is_not_read(deep):
    numbers = [1] * deep.count("1")
    targets = range(-200, 200)
    assert countdown_reward([tagged(deep)] * 400, targets, [numbers] * 400) == [0.1] * 400


def test_a_row_that_is_no_countdown_has_no_say():
    completions = [tagged("20+4")] * 4
    rewards = countdown_reward(completions, [24, None, 24, None], [[4, 20], [4, 20], None, None])
    assert rewards == [1.0, None, None, None]


@pytest.mark.parametrize("score", [-0.1, 1, 1.5, float("nan"), "0.1", None])
def test_a_format_score_is_less_than_a_right_answer_even_for_an_empty_batch(score):
    with pytest.raises(ValueError, match="format_score must be a number of at least 0 and below 1"):
        countdown_reward([], [], [], format_score=score)


def test_the_reward_is_called_as_trl_calls_it():
    batch = {"completions": [tagged("20*4")], "target": [24], "numbers": [[4, 20]], "completion_ids": [[1]]}
    batch |= {"prompts": ["p"], "solution": ["20+4"], "trainer_state": None, "log_extra": print, "log_metric": print}
    assert countdown_reward(**batch, format_score=0.2) == [0.2]
    assert countdown_reward([], [], []) == []
    with pytest.raises(ValueError, match="zip"):
        countdown_reward([tagged("24")] * 2, [24], [[24]] * 2)
