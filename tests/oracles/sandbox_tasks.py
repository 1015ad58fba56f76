"""The sandbox's problems solved from the text of their questions, and how hard all possible ones are.

question -> answer, derivation
"""

import binascii
import itertools
import re

# The secret code read digit by digit: the letters that each digit stands for.
CODE = {
    letter: str(digit)
    for digit, letters in enumerate(("beo", "qwz", "lmy", "afp", "gix", "drv", "js", "ch", "nt", "ku"))
    for letter in letters
}


def value_of(expression: str) -> int | str:
    """What an expression with one kind of precedence is worth, or a word in the secret code, from its text alone."""
    if expression.startswith("#"):
        return "".join(CODE.get(character, character) for character in expression[1:])
    if "in book" in expression:
        _, _, name, _, _, book = expression.rstrip("?").split()
        return str(binascii.crc32(f"{book}/{name}".encode("ascii")) % 9000 + 1000)
    if " has " in expression:
        sentences = [sentence.strip() for sentence in expression.split(".")[:-1]]
        return sum(int(re.search(r"\d+", s)[0]) * (-1 if " loses " in s else 1) for s in sentences)
    if "*" in expression:
        left, right = expression.split("*")
        return int(left) * int(right)
    return sum(int(term) for term in re.findall(r"[+-]?\d+", expression))


def derivation_of(task: str, question: str) -> str:
    """The steps that a person writes: columns from the right with what is carried, or a running total."""
    text = question.removesuffix("=")
    if task == "chain":
        terms = re.findall(r"[+-]?\d+", text)
        totals = list(itertools.accumulate(map(int, terms)))
        steps = zip(totals, terms[1:], totals[1:], strict=False)
        return " ".join(f"{before}{term}={after}" for before, term, after in steps)
    symbol = "+" if task == "addition" else "*"
    top, bottom = text.split(symbol)
    carry, steps = 0, []
    for place in range(max(len(top), len(bottom))):
        x = int(top[::-1][place : place + 1] or 0)
        y = int(bottom if symbol == "*" else bottom[::-1][place : place + 1] or 0)
        result = (x + y if symbol == "+" else x * y) + carry
        steps.append(f"{x}{symbol}{y}+{carry}={result}")
        carry = result // 10
    return " ".join(steps)
