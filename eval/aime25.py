"""AIME 2025: 30 competition problems for high schools, whose answers are whole numbers from 0 to 999.

Data: ``yentinglin/aime_2025``, from the two contests of February 2025; the problems are the MAA's, the data set
declares no licence. ``aime25`` asks as lighteval 0.13 does, ``aime25_boxed`` with one plain sentence.

Contamination: newer than the data of bases published before February 2025, Qwen2.5 among them; on the web since.
"""

from perl.evaluation.task import BOXED_PROMPT, Task, tables_on_demand

_DATA = "yentinglin/aime_2025 (MAA, AIME 2025 I and II)"
_LIGHTEVAL_PROMPT = (
    "\nSolve the following math problem efficiently and clearly.  The last line of your response should be of the "
    "following format: 'Therefore, the final answer is: $\\boxed{ANSWER}$. I hope it is correct' (without quotes) "
    "where ANSWER is just the final number or expression that solves the problem. Think step by step before "
    "answering.\n\n{problem}\n"
)

TASKS = (
    Task(
        name="aime25",
        title="AIME 2025 (lighteval)",
        repository="yentinglin/aime_2025",
        subset=None,
        split="train",
        revision="6f71d77b0b89b9dabe07ab466c51df33f514df7f",
        file="aime25.jsonl",
        prompt=_LIGHTEVAL_PROMPT,
        version=2,
        max_new_tokens=None,
        stop=(),
        lighteval="aime25",
        source=f"{_DATA}, asked as lighteval 0.13 does",
    ),
    Task(
        name="aime25_boxed",
        title="AIME 2025",
        repository="yentinglin/aime_2025",
        subset=None,
        split="train",
        revision="6f71d77b0b89b9dabe07ab466c51df33f514df7f",
        file="aime25.jsonl",
        prompt=BOXED_PROMPT,
        version=1,
        max_new_tokens=None,
        stop=(),
        lighteval=None,
        source=f"{_DATA}, asked as Qwen2.5-Math's evaluation does",
    ),
)

__getattr__ = tables_on_demand(TASKS)
