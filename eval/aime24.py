"""AIME 2024: 30 competition problems for high schools, whose answers are whole numbers from 0 to 999.

Data: ``HuggingFaceH4/aime_2024``, from the two contests of February 2024; the problems are the MAA's, the data set
declares no licence. ``aime24`` asks as lighteval 0.13 does, ``aime24_boxed`` with one plain sentence.

Contamination: problems and solutions have been on the web since February 2024, before the data of most current bases
was collected; Wu et al. 2025 (arXiv:2507.10532) doubt gains of Qwen2.5 on it. AIME 2025 is the safer comparison.
"""

from perl.evaluation.task import BOXED_PROMPT, Task, tables_on_demand

_DATA = "HuggingFaceH4/aime_2024 (MAA, AIME 2024 I and II)"
_LIGHTEVAL_PROMPT = (
    "\nSolve the following math problem efficiently and clearly.  The last line of your response should be of the "
    "following format: 'Therefore, the final answer is: $\\boxed{ANSWER}$. I hope it is correct' (without quotes) "
    "where ANSWER is just the final number or expression that solves the problem. Think step by step before "
    "answering.\n\n{problem}\n"
)

TASKS = (
    Task(
        name="aime24",
        title="AIME 2024 (lighteval)",
        repository="HuggingFaceH4/aime_2024",
        subset=None,
        split="train",
        revision="2fe88a2f1091d5048c0f36abc874fb997b3dd99a",
        file="aime24.jsonl",
        prompt=_LIGHTEVAL_PROMPT,
        version=2,
        max_new_tokens=None,
        stop=(),
        lighteval="aime24",
        source=f"{_DATA}, asked as lighteval 0.13 does",
    ),
    Task(
        name="aime24_boxed",
        title="AIME 2024",
        repository="HuggingFaceH4/aime_2024",
        subset=None,
        split="train",
        revision="2fe88a2f1091d5048c0f36abc874fb997b3dd99a",
        file="aime24.jsonl",
        prompt=BOXED_PROMPT,
        version=1,
        max_new_tokens=None,
        stop=(),
        lighteval=None,
        source=f"{_DATA}, asked as Qwen2.5-Math's evaluation does",
    ),
)

__getattr__ = tables_on_demand(TASKS)
