"""GSM8K: the 1,319 test problems of grade school arithmetic by Cobbe et al. 2021 (arXiv:2110.14168).

Data: ``openai/gsm8k``, MIT licence. ``gsm8k`` asks as lighteval 0.13 does: "Question: ... Answer:", 256 tokens, ended
by "Question:", which suits bases rather than chat models. ``gsm8k_boxed`` asks for a box and leaves the length open.

Contamination: on the web since 2021 and rewritten in many synthetic training sets.
"""

from perl.evaluation.task import BOXED_PROMPT, Task, tables_on_demand

_DATA = "openai/gsm8k, main, test"

TASKS = (
    Task(
        name="gsm8k",
        title="GSM8K (lighteval)",
        repository="openai/gsm8k",
        subset="main",
        split="test",
        revision="740312add88f781978c0658806c59bc2815b9866",
        file="gsm8k_test.jsonl",
        prompt="Question: {problem}\nAnswer:",
        version=0,
        max_new_tokens=256,
        stop=("Question:",),
        lighteval="gsm8k",
        source=f"{_DATA}, asked as lighteval 0.13 does",
    ),
    Task(
        name="gsm8k_boxed",
        title="GSM8K",
        repository="openai/gsm8k",
        subset="main",
        split="test",
        revision="740312add88f781978c0658806c59bc2815b9866",
        file="gsm8k_test.jsonl",
        prompt=BOXED_PROMPT,
        version=1,
        max_new_tokens=None,
        stop=(),
        lighteval=None,
        source=f"{_DATA}, asked as Qwen2.5-Math's evaluation does",
    ),
)

__getattr__ = tables_on_demand(TASKS)
