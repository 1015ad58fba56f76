r"""The verifier finds the final answer, compares numbers exactly, and gives up only where it says so."""

import json
import random
import signal
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path

import pytest

from perl.rewards import check
from perl.rewards.verifier import extract_answer, is_plain, last_boxed, same_answer

CHECKOUT = Path(__file__).resolve().parent.parent.parent
RANDOM = random.Random(0)
PUBLIC_DATA = CHECKOUT.parent / "shared" / "data"


@pytest.fixture(autouse=True)
def _the_same_numbers_in_every_test():
    RANDOM.seed(0)


def rows_of(name):
    path = PUBLIC_DATA / name
    if not path.is_file():
        pytest.skip(f"the public data set {name} is not beside the checkout")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").strip().split("\n")]


def boxed(answer):
    return f"so it is \\boxed{{{answer}}}"


@contextmanager
def no_hang(seconds=5):
    """Interrupts a computation that would take minutes; one that ends takes milliseconds."""

    def give_up(*_):
        raise AssertionError("still computing")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def grouped(number):
    return f"{number:,}"


def with_point(number, digits):
    """An exact decimal of a fraction whose denominator divides a power of ten."""
    scaled = number * 10**digits
    assert scaled.denominator == 1
    sign, body = ("-" if scaled < 0 else ""), str(abs(scaled.numerator)).rjust(digits + 1, "0")
    return f"{sign}{body[:-digits]}.{body[-digits:]}" if digits else f"{sign}{body}"


def ways_to_write(number):
    """Different strings that all mean this number."""
    times = RANDOM.randint(1, 9)
    ways = {f"{number.numerator * times}/{number.denominator * times}", f"{number.numerator} / {number.denominator}"}
    ways.add(f"${number.numerator}/{number.denominator}$")
    for digits in range(6):
        if (number * 10**digits).denominator == 1:
            text = with_point(number, digits)
            ways |= {text, text + "0" if digits else text, f" {text} ", f"${text}$", f"{text}."}
            if number >= 0:
                ways.add(f"+{text}")
            if text.startswith("0."):
                ways.add(text[1:])
    if number.denominator == 1:
        ways.add(grouped(number.numerator))
    return ways


def random_number():
    kind = RANDOM.randrange(3)
    sign = RANDOM.choice([1, -1])
    if kind == 0:
        return Fraction(sign * RANDOM.randint(0, 10 ** RANDOM.randint(1, 12)))
    if kind == 1:
        return Fraction(sign * RANDOM.randint(0, 10**6), 10 ** RANDOM.randint(1, 5))
    return Fraction(sign * RANDOM.randint(1, 999), RANDOM.randint(2, 99))


def test_a_number_is_right_however_it_is_written():
    for _ in range(400):
        number = random_number()
        ways = sorted(ways_to_write(number))
        golds = [way for way in ways if "$" not in way]
        for way in ways:
            gold = RANDOM.choice(golds)
            verdict = check(gold, boxed(way))
            assert verdict.status == "right", (gold, way)
            assert verdict.extracted == way.strip()


def test_another_number_is_wrong_however_it_is_written():
    for _ in range(400):
        number = random_number()
        other = number + RANDOM.choice([1, -1, Fraction(1, 10), Fraction(-1, 97), Fraction(1, 10**9)])
        for way in ways_to_write(other):
            assert check(str(number), boxed(way)).status == "wrong", (number, way)


def test_numbers_are_compared_exactly():
    assert check("1/3", boxed("0.3333333333333333")).status == "wrong"
    assert check("0.1", boxed("0.1000000000000000055511151231257827")).status == "wrong"
    assert check("9007199254740993", boxed("9007199254740992")).status == "wrong"
    assert check("9007199254740993", boxed("9,007,199,254,740,993")).status == "right"


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("50%", "50%"),
        ("50%", "50"),
        ("50%", "0.5"),
        ("50%", "1/2"),
        ("50", "50%"),
        ("1/2", "50 %"),
        ("0.5", r"50\%"),
        ("12.5%", "1/8"),
        ("100%", "1"),
        ("1,250%", "12.5"),
    ],
)
def test_a_percentage_is_its_number_or_its_fraction(gold, answer):
    assert check(gold, boxed(answer)).status == "right"


@pytest.mark.parametrize(
    ("gold", "answer"),
    [("50%", "5"), ("50%", "51%"), ("50%", "500%"), ("100%", "1%"), ("1%", "100%"), ("50%", "5000%"), ("0.5", "5%")],
)
def test_another_percentage_is_wrong(gold, answer):
    assert check(gold, boxed(answer)).status == "wrong"


@pytest.mark.parametrize(
    "answer", ["1,23", "12,34", "1234,567", ",123", "1,234,56", "1.2.3", "1//2", "/2", "3/", "1/2/3"]
)
def test_what_only_looks_like_a_number_is_none(answer):
    for gold in ("123", "1234", "1234567", "123456", "1.23", "1/2", "3", "2"):
        assert check(gold, boxed(answer)).status == "wrong"
    assert check(answer, boxed(answer)).status == "right"


@pytest.mark.parametrize(
    ("gold", "answer"),
    [("34", "3 4"), ("11/2", "1 1/2"), ("12", "1, 2"), ("57", "5 + 7"), ("100", "10 0"), ("-5", "- - 5")],
)
def test_several_numbers_are_not_one(gold, answer):
    assert check(gold, boxed(answer)).status == "wrong"


@pytest.mark.parametrize("answer", ["1/0", "0/0", "5/0.0"])
def test_nothing_is_divided_by_zero(answer):
    assert check("5", boxed(answer)).status == "wrong"
    assert check(answer, boxed("5")).status == "wrong"


@pytest.mark.parametrize(
    "hostile", ["__import__('os').system('touch pwned')", "9**9**9", "open('pwned','w')", "1e999999999"]
)
def test_nothing_is_evaluated(hostile):
    with no_hang():
        assert check("5", boxed(hostile)).status == "wrong"
        assert check(hostile.replace("_", ""), boxed("5")).status in {"wrong", "unparsable_gold"}
    assert not Path("pwned").exists()


@pytest.mark.parametrize(
    ("gold", "answer"),
    [("Yes", "yes"), ("Monday", "MONDAY"), ("New  York", "new york"), ("größer", "GRÖSSER"), ("(A)", "(a)")],
)
def test_words_are_compared_whatever_their_case_and_spaces(gold, answer):
    assert check(gold, boxed(answer)).status == "right"


@pytest.mark.parametrize(
    ("gold", "answer"), [("yes", "no"), ("Monday", "Mon day"), ("A", "B"), ("5", "five"), ("5", "5 cm")]
)
def test_other_words_are_wrong(gold, answer):
    assert check(gold, boxed(answer)).status == "wrong"


def test_comparing_does_not_depend_on_the_order():
    answers = ["5", "5.0", "50%", "1/2", "0.5", "yes", "Yes", "1,000", "1000", "-1/2", "", "x y", "100%", "1"]
    for one in answers:
        assert same_answer(one, one)
        for other in answers:
            assert same_answer(one, other) == same_answer(other, one)


@pytest.mark.parametrize("gold", ["\\frac{1}{2}", "$5$", "x^2", "a_1", "{1,2}", "\\pi", "", "   ", "work #### "])
def test_a_gold_answer_that_cannot_be_compared_is_said_and_never_wrong(gold):
    for completion in (boxed("5"), boxed(gold), "no answer at all"):
        assert check(gold, completion).status == "unparsable_gold"


@pytest.mark.parametrize("gold", ["5", "-5.25", "1,000", "1/2", "50%", "yes", "New York", "(A)", "12:30", "3 cm"])
def test_numbers_and_words_are_plain(gold):
    assert is_plain(gold)
    assert check(gold, boxed(gold)).status == "right"


def test_a_gold_answer_of_gsm8k_is_what_stands_after_the_hashes():
    assert check("She has 3 + 4 = <<3+4=7>>7.\n#### 7", boxed("7")).status == "right"
    assert check("#### 1,250", "#### 1250").status == "right"


@pytest.mark.parametrize(
    ("completion", "extracted"),
    [
        (r"\boxed{5}", "5"),
        (r"first \boxed{4}, no: \boxed{5}. Done", "5"),
        (r"\boxed{ 5 }", "5"),
        (r"\boxed{}", ""),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\text{a {nested {set}} }}", r"\text{a {nested {set}} }"),
        (r"\boxed{a \boxed{5} b}", "5"),
        (r"\boxed{5} and then \boxed{6", "5"),
        (r"\boxed{5} and then \boxed{\frac{6}{7}", "5"),
        (r"\boxed{5}}}} {", "5"),
        ("The answer is 5", "5"),
        ("the ANSWER IS: 5.", "5"),
        ("Answer: 5\n", "5"),
        ("answer is 4\nso the answer is 5", "5"),
        ("First I thought the answer is 4. But the answer is 5.", "5"),
        ("work\n#### 5", "5"),
        ("#### 5\nThat is all.", "5"),
        ("The answer is 4 but \\boxed{5}\nAnswer: 6", "5"),
        ("<think>\\boxed{4}</think> \\boxed{5}", "5"),
        ("<think>the answer is 4</think>\nThe answer is 5", "5"),
        ("<think>a</think> \\boxed{4} <think>b</think> \\boxed{5}", "5"),
    ],
)
def test_the_final_answer_is_found(completion, extracted):
    assert extract_answer(completion) == extracted


@pytest.mark.parametrize(
    "completion",
    [
        "",
        " ",
        "42",
        "I do not know",
        r"\boxed{5",
        r"\boxed 5",
        "boxed{5}",
        r"<think>\boxed{5}</think> well",
        "<think>#### 5</think>",
    ],
)
def test_without_a_final_answer_there_is_none(completion):
    assert extract_answer(completion) is None
    verdict = check("5", completion)
    assert (verdict.status, verdict.extracted, verdict.right) == ("no_answer", None, False)


def test_the_last_box_is_the_one_that_brackets_match():
    """Against a search that tries every pair of a box and a later brace."""

    def by_trial(text):
        found = None
        for start in range(len(text)):
            if text.startswith("\\boxed{", start):
                inside = start + len("\\boxed{")
                for end in range(inside, len(text)):
                    content = text[inside:end]
                    depths = [content[:i].count("{") - content[:i].count("}") for i in range(len(content) + 1)]
                    if text[end] == "}" and depths[-1] == 0 and min(depths) >= 0:
                        found = content
                        break
        return found

    found = 0
    for _ in range(1000):
        text = "".join(RANDOM.choices(["\\boxed{", "{", "}", "5", "\\boxed"], k=RANDOM.randint(1, 12)))
        assert last_boxed(text) == by_trial(text), text
        found += by_trial(text) is not None
    assert found > 100


MANY = 30_000


@pytest.mark.parametrize(
    "completion",
    [
        "\\boxed{" * MANY,
        "\\boxed{5} " + "\\boxed{" * MANY,
        "{" * MANY + "\\boxed{5}",
        "\\boxed{" + "{" * MANY + "5" + "}" * MANY + "}",
        "\\boxed{" + "9" * MANY + "}",
        "\\boxed{" + "1/" * MANY + "}",
        "\\boxed{" + "1," * MANY + "}",
        "\\boxed{5" + "%" * MANY + "}",
        "\\boxed{" + "%" * 150 + "}",
        "####" + "\n" * MANY * 8,
        "####" + " " * MANY * 8,
        "#### 5" + " " * MANY * 8 + "x",
        "answer is" + "\n" * MANY * 8,
        "answer" + " " * MANY * 8,
        "answer:" * MANY,
        "#" * MANY,
        "answer: \n" * MANY,
        "</think>" * MANY,
        "the answer is " * MANY + "5",
    ],
    ids=lambda text: text[:12].strip() + "..." + text[-12:].strip(),
)
def test_a_hostile_completion_does_not_hang(completion):
    with no_hang():
        verdict = check("5", completion)
    assert verdict.status in {"right", "wrong", "no_answer"}
    assert verdict.seconds >= 0


def test_random_text_gets_a_verdict():
    pieces = [
        "\\boxed{",
        "}",
        "{",
        "####",
        "answer is",
        ":",
        "5",
        "-",
        "/",
        ",",
        ".",
        "%",
        " ",
        "\n",
        "</think>",
        "$",
        "\\",
    ]
    statuses = set()
    for _ in range(3000):
        gold, text = ("".join(RANDOM.choices(pieces, k=RANDOM.randint(0, 12))) for _ in range(2))
        statuses.add(check(gold, text).status)
    assert statuses == {"right", "wrong", "no_answer", "unparsable_gold"}


@pytest.mark.parametrize("name", ["gsm8k_test.jsonl", "gsm8k_train.jsonl"])
def test_gsm8k_answers_are_plain_and_their_own_solutions_right(name):
    rows = rows_of(name)
    assert len(rows) > 1000
    for row in rows:
        assert is_plain(row["answer"]), row["id"]
        as_published = f"{row['solution']}\n#### {row['answer']}"
        assert check(row["answer"], as_published).status == "right", row["id"]
        assert check(as_published, boxed(row["answer"])).status == "right", row["id"]
        assert check(row["answer"], boxed(int(row["answer"]) + 1)).status == "wrong", row["id"]


@pytest.mark.parametrize("name", ["aime24.jsonl", "aime25.jsonl", "amc23.jsonl"])
def test_answers_of_competitions_are_plain(name):
    rows = rows_of(name)
    assert len(rows) >= 30
    assert all(is_plain(row["answer"]) for row in rows)


def test_no_wrong_answer_of_other_verifiers_test_suites_is_right():
    rows = [row for row in rows_of("verifier_cases.jsonl") if row["tier"] in {"core", "unsafe"}]
    statuses = []
    for row in rows:
        completion = boxed(row["pred"]) if row["pred_form"] == "answer" else row["pred"]
        status = check(row["gold"], completion).status
        assert row["expected"] or status != "right", row["id"]
        statuses.append((row["expected"], status))
    assert statuses.count((True, "right")) > 100
    assert statuses.count((False, "wrong")) > 200
