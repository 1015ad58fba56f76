"""MATH-500: 500 problems of the MATH benchmark's test set, chosen by Lightman et al. 2023 (arXiv:2305.20050).

Data: ``HuggingFaceH4/MATH-500``; MATH is MIT licensed (Hendrycks et al. 2021, arXiv:2103.03874). ``math_500`` asks as
lighteval 0.13 does, for a last line "ANSWER: ...": its own score then misses answers that are words or complex numbers.
``math_500_boxed`` asks for a box and is what most reports mean by MATH-500.

Contamination: on the web since 2021. Given the first 60% of each problem, Qwen2.5-Math-7B writes the rest word for
word for more than half of them (Wu et al. 2025, arXiv:2507.10532): compare base and adapter, not bases of different
families.
"""

from perl.evaluation.scoring.task import LIGHTEVAL_SOURCE, Task, boxed

_LIGHTEVAL_PROMPT = (
    "Solve the following problem. The final line of your response MUST be of the following format:\n"
    '"ANSWER: $ANSWER" (without quotes) where $ANSWER is the final answer. Think step by step before answering.\n\n'
    "{problem}"
)
_LIGHTEVAL = Task(
    name="math_500",
    title="MATH-500 (lighteval's prompt)",
    repository="HuggingFaceH4/MATH-500",
    split="test",
    file="math_500.jsonl",
    source=f"HuggingFaceH4/MATH-500 (OpenAI's selection of MATH), {LIGHTEVAL_SOURCE}",
    revision="6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be",
    prompt=_LIGHTEVAL_PROMPT,
    version=2,
    max_new_tokens=32768,
    lighteval="math_500",
)
TASKS = (_LIGHTEVAL, boxed(_LIGHTEVAL, "MATH-500"))
