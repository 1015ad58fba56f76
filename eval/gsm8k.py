"""GSM8K: the 1,319 test problems of grade school arithmetic by Cobbe et al. 2021 (arXiv:2110.14168).

Data: ``openai/gsm8k``, MIT licence. ``gsm8k`` asks as lighteval 0.13 does: "Question: ... Answer:", 256 tokens, ended
by "Question:", which suits bases rather than chat models. ``gsm8k_boxed`` asks for a box and leaves the length open.

Contamination: on the web since 2021 and rewritten in many synthetic training sets.
"""

from perl.evaluation.scoring.task import LIGHTEVAL_SOURCE, Task, boxed

_LIGHTEVAL = Task(
    name="gsm8k",
    title="GSM8K (lighteval's prompt)",
    repository="openai/gsm8k",
    split="test",
    file="gsm8k_test.jsonl",
    source=f"openai/gsm8k, main, test, {LIGHTEVAL_SOURCE}",
    subset="main",
    revision="740312add88f781978c0658806c59bc2815b9866",
    prompt="Question: {problem}\nAnswer:",
    version=0,
    max_new_tokens=256,
    stop=("Question:",),
    lighteval="gsm8k",
    examples="train",
)
TASKS = (_LIGHTEVAL, boxed(_LIGHTEVAL, "GSM8K"))
