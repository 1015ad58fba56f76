"""The sandbox's problems have the answer their question asks for, and never change split."""

import hashlib
import math
import random
import re

import pytest

from perl.errors import DataError, ModelError
from perl.sandbox import (
    BASE_FOLDER,
    HELDOUT_COUNT,
    TRAIN_COUNT,
    is_sandbox,
    load_problems,
    model_folder,
)
from perl.sandbox.tasks import (
    TASKS,
    Problem,
    careful_completion,
    problems,
    sloppy_completion,
    split_of,
    stream,
)

SPLITS = ("train", "heldout")
# SHA-256 over the first problems: results are comparable between versions only while these stand.
FIRST_PROBLEMS = {
    ("addition", "train"): "c8ac21fd65dc868dd5f9f3ab0148d9a33b8b6579341818e62b1ee1233587a0aa",
    ("addition", "heldout"): "3ad192b9450ff5f69e6aebdbb4d93f258ff97f36e657e0f4437843633be8c39e",
    ("multiplication", "train"): "659c08d7adb40470141581122767a68c8c1ccbe705e236a5f93b0692713d781b",
    ("multiplication", "heldout"): "1993d77d0ff51ae4919e01091daeb10922cbc5b6e3ee4fb0a0ee2418c10cc3b1",
    ("chain", "train"): "438bd6025e616b0893ed220e5549cf6f245a6c5975a5d08fa322abdfc124c025",
    ("chain", "heldout"): "890121c1c131a3574b7c098ebba42074e7231ad7ddbe4f9f87e855d430c43db9",
}

every_task = pytest.mark.parametrize("task", TASKS)


def value_of(expression: str) -> int:
    """What an expression with one kind of precedence is worth, computed from its text alone."""
    if "*" in expression:
        left, right = expression.split("*")
        return int(left) * int(right)
    return sum(int(term) for term in re.findall(r"[+-]?\d+", expression))


def steps_of(derivation: str) -> list[tuple[str, int]]:
    """Left side and result of every step."""
    found = [re.fullmatch(r"([-+*\d]+)=(\d+)", step) for step in derivation.split(" ")]
    assert all(found), derivation
    return [(match[1], int(match[2])) for match in found]


def value_of_step(left: str) -> int:
    """A column of a multiplication is a product plus a carry; every other step is a sum."""
    product, plus, carry = left.partition("+")
    return value_of(product) + int(carry) if "*" in product and plus else value_of(left)


def fingerprint(some: list[Problem]) -> str:
    text = "\n".join(f"{p.question}\t{p.answer}\t{p.derivation}" for p in some)
    return hashlib.sha256(text.encode()).hexdigest()


@every_task
@pytest.mark.parametrize("split", SPLITS)
def test_the_answer_is_what_the_question_asks(task, split):
    some = load_problems(f"sandbox:{task}", split)
    assert len(some) >= HELDOUT_COUNT
    wrong = [p for p in some if p.answer != str(value_of(p.question.removesuffix("=")))]
    assert wrong == []
    assert all(p.question.endswith("=") for p in some)


@every_task
def test_every_step_of_a_derivation_is_right(task):
    for problem in load_problems(f"sandbox:{task}", "heldout"):
        steps = steps_of(problem.derivation)
        assert [result for _, result in steps] == [value_of_step(left) for left, _ in steps], problem


@pytest.mark.parametrize(("task", "symbol"), [("addition", "+"), ("multiplication", "*")])
def test_columns_go_from_right_to_left_and_carry(task, symbol):
    for problem in load_problems(f"sandbox:{task}", "heldout"):
        a, b = problem.question.removesuffix("=").split(symbol)
        steps = steps_of(problem.derivation)
        carry, digits = 0, ""
        for place, (left, result) in enumerate(steps):
            x = a[::-1][place : place + 1] or "0"
            y = b if symbol == "*" else b[::-1][place : place + 1] or "0"
            assert left == f"{x}{symbol}{y}+{carry}", problem
            carry, digits = result // 10, str(result % 10) + digits
        assert len(steps) == max(len(a), len(b))
        assert str(int(f"{carry}{digits}")) == problem.answer


def test_a_chain_keeps_a_running_total_within_two_digits():
    for problem in load_problems("sandbox:chain", "heldout"):
        steps = steps_of(problem.derivation)
        first, *terms = re.findall(r"[+-]?\d+", problem.question)
        totals = [first, *(str(result) for _, result in steps)]
        assert [left for left, _ in steps] == [f"{t}{term}" for t, term in zip(totals[:-1], terms, strict=True)]
        assert totals[-1] == problem.answer
        assert all(0 <= int(total) <= 99 for total in totals)
        assert 3 <= len(terms) <= 5


@every_task
def test_a_split_holds_its_number_of_problems_and_none_held_out_is_trained_on_whatever_the_seed(task):
    counts = {split: len({p.question for p in load_problems(f"sandbox:{task}", split)}) for split in SPLITS}
    assert counts == {"train": TRAIN_COUNT, "heldout": HELDOUT_COUNT} == {"train": 4000, "heldout": 500}
    heldout = {p.question for p in load_problems(f"sandbox:{task}", "heldout")}
    for seed in (0, 1, 7):
        training = {p.question for p in problems(task, "train", 2000, seed=seed)}
        assert heldout.isdisjoint(training)
        assert {split_of(question) for question in training} == {"train"}
    assert {split_of(question) for question in heldout} == {"heldout"}


@every_task
def test_one_problem_in_ten_is_held_out(task):
    rng = random.Random(0)
    questions = {TASKS[task](rng).question for _ in range(5000)}
    share = sum(split_of(question) == "heldout" for question in questions) / len(questions)
    # A binomial's share is within 4 standard errors of 1 in 10, but once in 16,000 times.
    assert abs(share - 0.1) <= 4 * math.sqrt(0.1 * 0.9 / len(questions))
    assert 0.08 < share < 0.12


@every_task
def test_the_same_seed_gives_the_same_problems_those_of_every_version_and_another_seed_others(task):
    assert problems(task, "train", 50) == problems(task, "train", 50)
    assert problems(task, "train", 80)[:50] == problems(task, "train", 50)
    assert problems(task, "train", 50, seed=1) != problems(task, "train", 50)
    for split in SPLITS:
        assert fingerprint(problems(task, split, 100)) == FIRST_PROBLEMS[task, split], split


def test_the_stream_repeats_what_the_list_does_not_and_the_list_has_an_end(monkeypatch):
    monkeypatch.setitem(TASKS, "tiny", lambda rng: Problem(f"{rng.randint(0, 9)}=", "", ""))
    drawn = stream("tiny", "train", seed=0)
    few = {next(drawn).question for _ in range(200)}
    assert len(few) <= 10
    assert {p.question for p in problems("tiny", "train", len(few))} == few
    with pytest.raises(ValueError, match=r"tiny has only \d+ different train problems, 11 were asked for"):
        problems("tiny", "train", 11)


@every_task
def test_a_careful_completion_derives_and_boxes_the_answer(task):
    for problem in problems(task, "heldout", 50):
        assert careful_completion(problem) == problem.derivation + " \\boxed{" + problem.answer + "}"


@every_task
def test_a_sloppy_completion_is_a_bare_guess_as_right_as_asked(task):
    rng = random.Random(0)
    for share in (0.0, 0.4, 1.0):
        right = []
        for problem in problems(task, "train", 1000):
            guess = int(re.fullmatch(r"\\boxed\{(\d+)\}", sloppy_completion(problem, rng, share))[1])
            off = abs(guess - int(problem.answer))
            assert off in (0, 1, 10, 100)
            right.append(off == 0)
        assert sum(right) / len(right) == pytest.approx(share, abs=0.05 if 0 < share < 1 else 0)


def test_unknown_names_are_refused_with_the_nearest_and_only_the_prefix_makes_a_name_the_sandboxs():
    with pytest.raises(DataError, match=r"no task 'adition'.*did you mean addition"):
        load_problems("sandbox:adition", "train")
    with pytest.raises(ModelError, match=r"no model 'sandbox:bass'.*did you mean sandbox:base"):
        model_folder("sandbox:bass")
    assert model_folder("sandbox:base") == BASE_FOLDER
    assert is_sandbox("sandbox:addition")
    assert not any(is_sandbox(name) for name in ("user/sandbox", "sandbox/base", "sandbox", "my-sandbox:base"))
