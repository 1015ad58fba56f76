"""Tools for conversations in the sandbox: a calculator, and a book of numbers that only its tools can read.

a problem of ``sandbox:products`` -> multiply; a problem of ``sandbox:books`` -> Book
"""

import zlib


def multiply(a: int, b: int) -> int:
    """Multiplies two numbers.

    Args:
        a: One.
        b: The other.
    """
    return a * b


class Book:
    """A book of numbers; ``sandbox:books`` asks for one of them, which nobody can know without looking it up."""

    def reset(self, prompt: list[dict[str, str]], **_: object) -> None:
        """Opens the book that the question names."""
        words = prompt[-1]["content"].rstrip("?").split()
        self.name, self.book, self.answered = words[2], words[-1], ""

    def find(self, name: str) -> str:
        """Finds the number of a name.

        Args:
            name: The name.
        """
        return number_in(self.book, name)

    def answer(self, number: str) -> str:
        """Answers the question.

        Args:
            number: The answer.
        """
        self.answered = str(number)
        return "noted"

    def get_reward(self) -> float:
        """1 for the right number, 0 for another or none."""
        return float(self.answered == number_in(self.book, self.name))


def number_in(book: str, name: str) -> str:
    """The four digits of a name in a book."""
    return f"{zlib.crc32(f'{book}/{name}'.encode()) % 9000 + 1000}"
