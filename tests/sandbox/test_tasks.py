"""The sandbox's problems have the answer their question asks for, and never change split."""

import hashlib
import itertools
import math
import random
import re
import string
import zlib
from collections import Counter

import numpy as np
import pytest
from sandbox_models import careful_completion, sloppy_completion

from perl.errors import DataError, ModelError
from perl.sandbox import (
    BASE_FOLDER,
    HELDOUT_COUNT,
    MODELS,
    TRAIN_COUNT,
    is_sandbox,
    load_problems,
    model_folder,
    model_name,
)
from perl.sandbox.tasks import TASKS, Problem, problems, split_of, stream
from tests.oracles.sandbox_tasks import CODE, derivation_of, value_of

NAMES = ["sandbox:base", "sandbox:copyist", "sandbox:caller"]
SPLITS = ("train", "heldout")
# SHA-256 over the first problems: results are comparable between versions only while these stand.
FIRST_PROBLEMS = {
    ("addition", "train"): "c8ac21fd65dc868dd5f9f3ab0148d9a33b8b6579341818e62b1ee1233587a0aa",
    ("addition", "heldout"): "3ad192b9450ff5f69e6aebdbb4d93f258ff97f36e657e0f4437843633be8c39e",
    ("multiplication", "train"): "659c08d7adb40470141581122767a68c8c1ccbe705e236a5f93b0692713d781b",
    ("multiplication", "heldout"): "1993d77d0ff51ae4919e01091daeb10922cbc5b6e3ee4fb0a0ee2418c10cc3b1",
    ("chain", "train"): "438bd6025e616b0893ed220e5549cf6f245a6c5975a5d08fa322abdfc124c025",
    ("chain", "heldout"): "890121c1c131a3574b7c098ebba42074e7231ad7ddbe4f9f87e855d430c43db9",
    ("sums", "train"): "2e16760422df3e65582a2dcef3bbef60bea8ead806abb6d49a57f5d915cfcc5b",
    ("sums", "heldout"): "23e7d3832c861e2c5cf0e62576fe6bd3f52def7cfaa3d32b9ca30875441e9ee8",
    ("stories", "train"): "0bb16b72e240cee14b1b7ea83538004f27be1c42f664003d3d4273c8682d6acb",
    ("stories", "heldout"): "fd16afc3401b4d3b6cf47026097dcfbe6a70e68726fed29a5a06b6206abcbacc",
    ("products", "train"): "6d7f2b066aee29db4fe02165d10e2f6241102cdf9b59bb95882ec5b9c5dee246",
    ("products", "heldout"): "dc85f11891aed4f529c59c3fc59442b47441c9b1d3176bd1d8762062abb74950",
    ("books", "train"): "1356783a7e0f3e9f5052d5363830531078c6246508fdd8e211bf4cc8e093c75d",
    ("books", "heldout"): "6912e7935c6accadf7a71952e028e4d423f88756c11e82a66223c9dca242321b",
    ("cipher", "train"): "861370c7e6316b797a6791b056bf84f108d72da89f3afb42a5c54fdc98126cba",
    ("cipher", "heldout"): "159dddb0840ec06b2682942452ada499e799b15c70d2ce6123a26db3fad7acd0",
    ("cipher_levels", "train"): "ba89f35b53af04f8d9f6bd48fb67f23d1e3fc5efdadd002a2460ea296b999132",
    ("cipher_levels", "heldout"): "1aa67ab5d157dd617aafd4475cee53d550ae260b413a8cb09823bdfa41cf6d05",
}

every_task = pytest.mark.parametrize("task", TASKS)
arithmetic = pytest.mark.parametrize("task", ["addition", "multiplication", "chain"])


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
    assert all(p.question.endswith("?" if task in ("sums", "stories", "books") else "=") for p in some)


@arithmetic
def test_a_careful_completion_derives_as_by_hand_and_boxes_the_answer(task):
    for problem in load_problems(f"sandbox:{task}", "heldout"):
        derivation = derivation_of(task, problem.question)
        assert careful_completion(problem) == f"{derivation} \\boxed{{{value_of(problem.question.removesuffix('='))}}}"
        assert problem.derivation == derivation
        steps = derivation.split(" ")
        if task == "chain":
            assert 3 <= len(steps) <= 5
            assert all(0 <= int(step.rpartition("=")[2]) <= 99 for step in steps)


@every_task
def test_one_problem_in_ten_is_held_out_and_none_of_them_is_trained_on_whatever_the_seed(task):
    counts = {split: len({p.question for p in load_problems(f"sandbox:{task}", split)}) for split in SPLITS}
    assert counts == {"train": TRAIN_COUNT, "heldout": HELDOUT_COUNT} == {"train": 4000, "heldout": 500}
    heldout = {p.question for p in load_problems(f"sandbox:{task}", "heldout")}
    for seed in (0, 1, 7):
        training = {p.question for p in problems(task, "train", 2000, seed=seed)}
        assert heldout.isdisjoint(training)
        assert {split_of(question) for question in training} == {"train"}
    assert {split_of(question) for question in heldout} == {"heldout"}
    rng = random.Random(0)
    questions = {TASKS[task](rng).question for _ in range(5000)}
    share = sum(split_of(question) == "heldout" for question in questions) / len(questions)
    # A binomial's share is within 4 standard errors of 1 in 10, but once in 16,000 times.
    assert abs(share - 0.1) <= 4 * math.sqrt(0.1 * 0.9 / len(questions))


def test_a_list_holds_each_problem_once_up_to_all_that_there_are_where_the_stream_repeats_them(monkeypatch):
    monkeypatch.setitem(TASKS, "tiny", lambda rng: Problem(f"{rng.randint(0, 9)}=", "", ""))
    of_task = {
        "tiny": [f"{n}=" for n in range(10)],
        "multiplication": [f"{a}*{b}=" for a in range(100, 1000) for b in range(2, 10)],
    }
    for task, split in (("tiny", "train"), ("multiplication", "heldout")):
        every = {q for q in of_task[task] if (zlib.crc32(q.encode()) % 10 == 0) is (split == "heldout")}
        drawn = {problem.question for problem in itertools.islice(stream(task, split, seed=0), 200)}
        assert drawn <= every
        listed = [problem.question for problem in problems(task, split, len(every))]
        assert sorted(listed) == sorted(every)
    few = sum(zlib.crc32(q.encode()) % 10 != 0 for q in of_task["tiny"])
    with pytest.raises(ValueError, match=f"tiny has only {few} different train problems, 11 were asked for"):
        problems("tiny", "train", 11)


@every_task
def test_the_same_seed_gives_the_same_problems_those_of_every_version_and_another_seed_others(task):
    assert problems(task, "train", 50) == problems(task, "train", 50)
    assert problems(task, "train", 80)[:50] == problems(task, "train", 50)
    assert problems(task, "train", 50, seed=1) != problems(task, "train", 50)
    for split in SPLITS:
        assert fingerprint(problems(task, split, 100)) == FIRST_PROBLEMS[task, split], split


@arithmetic
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


def test_words_of_the_cipher_have_as_many_letters_as_their_level_at_any_place_and_every_digit_is_of_two_or_three():
    assert sorted(CODE) == list(string.ascii_lowercase)
    assert sorted(Counter(CODE.values()).values()) == [2] * 4 + [3] * 6
    for task, levels in (("cipher", [6]), ("cipher_levels", [1, 2, 3, 4, 5, 6])):
        drawn = load_problems(f"sandbox:{task}", "train")
        letters = [[character.isalpha() for character in problem.question[1:-1]] for problem in drawn]
        assert {len(problem.answer) for problem in drawn} == {6}
        assert [sum(of_word) for of_word in letters] == [problem.level for problem in drawn]
        shares = [sum(problem.level == level for problem in drawn) / len(drawn) for level in levels]
        assert shares == pytest.approx([1 / len(levels)] * len(levels), abs=0.03)
        by_place = np.mean(letters, axis=0)
        np.testing.assert_allclose(by_place, np.mean(levels) / 6, atol=0.03)


def test_unknown_names_are_refused_with_the_nearest_and_only_the_prefix_makes_a_name_the_sandboxs():
    with pytest.raises(DataError, match=r"no task 'adition'.*did you mean addition"):
        load_problems("sandbox:adition", "train")
    with pytest.raises(ModelError, match=r"no model 'sandbox:bass'.*did you mean sandbox:base"):
        model_folder("sandbox:bass")
    assert model_folder("sandbox:base") == BASE_FOLDER
    assert [model_name(str(model_folder(name))) for name in MODELS] == list(MODELS) == NAMES
    assert model_name("user/name") == "user/name"
    assert is_sandbox("sandbox:addition")
    assert not any(is_sandbox(name) for name in ("user/sandbox", "sandbox/base", "sandbox", "my-sandbox:base"))
