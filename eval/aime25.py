"""AIME 2025: 30 competition problems for high schools, whose answers are whole numbers from 0 to 999.

Data: ``yentinglin/aime_2025``, from the two contests of February 2025; the problems are the MAA's, the data set
declares no licence. ``aime25`` asks as lighteval 0.13 does, ``aime25_boxed`` with one plain sentence.

Contamination: newer than the data of bases published before February 2025, Qwen2.5 among them; on the web since.
"""

from perl.evaluation.scoring.task import LIGHTEVAL_AIME_PROMPT, LIGHTEVAL_SOURCE, Task, boxed

_LIGHTEVAL = Task(
    name="aime25",
    title="AIME 2025 (lighteval's prompt)",
    repository="yentinglin/aime_2025",
    split="train",
    file="aime25.jsonl",
    source=f"yentinglin/aime_2025 (MAA, AIME 2025 I and II), {LIGHTEVAL_SOURCE}",
    revision="6f71d77b0b89b9dabe07ab466c51df33f514df7f",
    prompt=LIGHTEVAL_AIME_PROMPT,
    version=2,
    lighteval="aime25",
)
TASKS = (_LIGHTEVAL, boxed(_LIGHTEVAL, "AIME 2025"))
