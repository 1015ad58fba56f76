"""AIME 2024: 30 competition problems for high schools, whose answers are whole numbers from 0 to 999.

Data: ``HuggingFaceH4/aime_2024``, from the two contests of February 2024; the problems are the MAA's, the data set
declares no licence. ``aime24`` asks as lighteval 0.13 does, ``aime24_boxed`` with one plain sentence.

Contamination: problems and solutions have been on the web since February 2024, before the data of most current bases
was collected; Wu et al. 2025 (arXiv:2507.10532) doubt gains of Qwen2.5 on it. AIME 2025 is the safer comparison.
"""

from perl.evaluation.scoring.task import LIGHTEVAL_AIME_PROMPT, LIGHTEVAL_SOURCE, Task, boxed

_LIGHTEVAL = Task(
    name="aime24",
    title="AIME 2024 (lighteval's prompt)",
    repository="HuggingFaceH4/aime_2024",
    split="train",
    file="aime24.jsonl",
    source=f"HuggingFaceH4/aime_2024 (MAA, AIME 2024 I and II), {LIGHTEVAL_SOURCE}",
    revision="2fe88a2f1091d5048c0f36abc874fb997b3dd99a",
    prompt=LIGHTEVAL_AIME_PROMPT,
    version=2,
    lighteval="aime24",
)
TASKS = (_LIGHTEVAL, boxed(_LIGHTEVAL, "AIME 2024"))
