"""An environment to begin with: the file that ``perl new --environment`` writes.

file name -> the text of a class whose methods are tools
"""

TEXT = '''\
"""An environment: its public methods are the tools that the model may call.

Each needs a type for every argument, and a docstring that says what it does, with a line for each argument under
Args: that is what the model is shown. Try it in Python before you train on it.
"""


class {name}:
    def reset(self, **row):
        """Begins a conversation. `row` has the columns of your data: the question is in row["prompt"], as messages.

        Returns None, or text that is added to the end of the question.
        """
        self.gold, self.given = str(row.get("answer", "")), ""

    def calculate(self, a: float, sign: str, b: float) -> float:
        """Calculates with two numbers.

        Args:
            a: The first number.
            sign: One of + - * /
            b: The second number.
        """
        return {{"+": a + b, "-": a - b, "*": a * b, "/": a / b if b else float("nan")}}[sign]

    def answer(self, text: str) -> str:
        """Gives the answer to the question.

        Args:
            text: The answer.
        """
        self.given = text
        return "noted"

    def get_reward(self) -> float:
        """What the conversation was worth, once it has ended; leave this out if a reward of the recipe says that."""
        return float(self.given.strip() == self.gold)
'''


def environment_text(name: str) -> str:
    """The text of a file with an environment.

    Args:
        name: Of the class.
    """
    return TEXT.format(name=name)
