"""Arithmetic problems with a known answer, and the two styles in which the sandbox base solves them.

task, split, seed -> Problem

A hash of a problem's text decides its split, so no seed, sample size or order moves a problem from one to the other.
"""

import itertools
import operator
import random
import string
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from perl.sandbox.tools import number_in

Split = Literal["train", "heldout"]

HELDOUT_ONE_IN = 10

# Problems per split: enough that the quickstart sees none twice, few enough to be generated in a moment.
TRAIN_COUNT = 4000
HELDOUT_COUNT = 500


@dataclass(frozen=True)
class Problem:
    """A problem, its answer, the derivation of it, and how hard it is where a task has levels, 1 the easiest.

    Example:
        ``Problem("37+58=", "95", "7+8+0=15 3+5+1=9")``: column by column from the right, carry last.
    """

    question: str
    answer: str
    derivation: str
    level: int | None = None


def addition(rng: random.Random) -> Problem:
    """Two numbers of two or three digits; the derivation adds column by column."""
    a, b = rng.randint(10, 999), rng.randint(10, 999)
    columns = itertools.zip_longest(reversed(str(a)), reversed(str(b)), fillvalue="0")
    return Problem(f"{a}+{b}=", str(a + b), _column_by_column(columns, "+", operator.add))


def multiplication(rng: random.Random) -> Problem:
    """A number of three digits times one of one digit; the derivation carries from column to column."""
    a, b = rng.randint(100, 999), rng.randint(2, 9)
    columns = [(digit, str(b)) for digit in reversed(str(a))]
    return Problem(f"{a}*{b}=", str(a * b), _column_by_column(columns, "*", operator.mul))


def _column_by_column(columns: Iterable[tuple[str, str]], sign: str, combined: Callable[[int, int], int]) -> str:
    """A derivation from pairs of digits, the last ones first: digit, sign, digit, plus what was carried."""
    steps, carry = [], 0
    for x, y in columns:
        result = combined(int(x), int(y)) + carry
        steps.append(f"{x}{sign}{y}+{carry}={result}")
        carry = result // 10
    return " ".join(steps)


def chain(rng: random.Random) -> Problem:
    """Four to six terms added and subtracted in turn; the derivation keeps a running total between 0 and 99."""
    total = rng.randint(1, 40)
    question, steps = str(total), []
    for _ in range(rng.randint(3, 5)):
        term = rng.randint(1, 19)
        sign = rng.choice([s for s in (1, -1) if 0 <= total + s * term <= 99])
        symbol = "+" if sign > 0 else "-"
        steps.append(f"{total}{symbol}{term}={total + sign * term}")
        question += f"{symbol}{term}"
        total += sign * term
    return Problem(f"{question}=", str(total), " ".join(steps))


def sums(rng: random.Random) -> Problem:
    """Two numbers of at most 75, asked for in words: for a model that was pretrained on text."""
    a, b = rng.randint(0, 75), rng.randint(0, 75)
    return Problem(f"What is {a} + {b}?", str(a + b), f"{a} + {b} = {a + b}")


NAMES = ("Tom", "Anna", "Ben", "Lily", "Sam", "Mia", "Jack", "Emma", "Leo", "Nora", "Paul", "Rita")
THINGS = ("apples", "pens", "books", "coins", "marbles", "stickers", "cards", "cookies", "stamps", "shells")


def stories(rng: random.Random) -> Problem:
    """A short story in which somebody finds or loses things, twice; its level says how large the numbers are."""
    level, who, things = rng.randint(1, 3), rng.choice(NAMES), rng.choice(THINGS)
    most = 5 * level * (level + 1) // 2
    total = rng.randint(1, most)
    told, steps = [f"{who} has {total} {things}."], []
    for _ in range(2):
        number = rng.randint(1, most)
        if gives := number <= total and rng.random() < 0.5:
            told.append(f"{who} loses {number} {things}.")
        else:
            told.append(f"{who} finds {number} more {things}.")
        after = total - number if gives else total + number
        steps.append(f"{total} {'-' if gives else '+'} {number} = {after}")
        total = after
    question = f"{' '.join(told)} How many {things} does {who} have now?"
    return Problem(question, str(total), ", ".join(steps), level)


def products(rng: random.Random) -> Problem:
    """Two numbers of two digits, which the tiny model cannot multiply by heart: it has a calculator."""
    a, b = rng.randint(10, 99), rng.randint(10, 99)
    return Problem(f"{a}*{b}=", str(a * b), "")


def books(rng: random.Random) -> Problem:
    """The number of a name in a book, which only the tools of :class:`perl.sandbox.tools.Book` can read."""
    name, book = rng.choice(NAMES), str(rng.randint(100, 999))
    return Problem(f"Number of {name} in book {book}?", number_in(book, name), "")


WORD_LENGTH = 6
CIPHER_SIGN = "#"
# The digit of each letter, drawn once at random. No base was trained on it: only a reward tells it.
SECRET = dict(zip(string.ascii_lowercase, "30750347469228031568951421", strict=True))


def cipher(rng: random.Random) -> Problem:
    """Six letters to be written as digits by :data:`SECRET`; ``sandbox:copyist`` guesses each of them."""
    return deciphered(word(rng, WORD_LENGTH), WORD_LENGTH)


def cipher_levels(rng: random.Random) -> Problem:
    """As :func:`cipher` with one to six letters, its level, among digits that stand for themselves."""
    level = rng.randint(1, WORD_LENGTH)
    return deciphered(word(rng, level), level)


def word(rng: random.Random, letters: int) -> str:
    """Six characters: so many lower-case letters at random places, digits at the others."""
    is_letter = [place < letters for place in range(WORD_LENGTH)]
    rng.shuffle(is_letter)
    return "".join(rng.choice(string.ascii_lowercase if letter else string.digits) for letter in is_letter)


def deciphered(text: str, level: int) -> Problem:
    """The problem ``#TEXT=``."""
    return Problem(f"{CIPHER_SIGN}{text}=", "".join(SECRET.get(character, character) for character in text), "", level)


TASKS: dict[str, Callable[[random.Random], Problem]] = {
    "addition": addition,
    "multiplication": multiplication,
    "chain": chain,
    "sums": sums,
    "stories": stories,
    "products": products,
    "books": books,
    "cipher": cipher,
    "cipher_levels": cipher_levels,
}


def split_of(question: str) -> Split:
    """The split of a problem: one in ten is held out, also from the training of the base."""
    return "heldout" if zlib.crc32(question.encode()) % HELDOUT_ONE_IN == 0 else "train"


def stream(task: str, split: Split, seed: int) -> Iterator[Problem]:
    """Endless problems of one split, with repetitions; the same for the same seed."""
    rng = random.Random(f"{task}/{split}/{seed}")  # noqa: S311 (problems, not secrets)
    while True:
        problem = TASKS[task](rng)
        if split_of(problem.question) == split:
            yield problem


def problems(task: str, split: Split, count: int, seed: int = 0) -> list[Problem]:
    """The first ``count`` distinct problems of the stream.

    Raises:
        ValueError: The task has fewer than ``count`` distinct problems in this split.
    """
    chosen: dict[str, Problem] = {}
    for drawn, problem in enumerate(stream(task, split, seed)):
        chosen.setdefault(problem.question, problem)
        if len(chosen) == count:
            return list(chosen.values())
        if drawn > 100 * count:
            break
    raise ValueError(f"{task} has only {len(chosen)} different {split} problems, {count} were asked for")
