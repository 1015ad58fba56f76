"""HMMT February 2025: 30 problems of the Harvard-MIT tournament, harder than AIME, with exact closed-form answers.

Data: ``MathArena/hmmt_feb_2025`` (CC BY-NC-SA 4.0), collected by Balunovic et al. 2025 (arXiv:2505.23281); the problems
are HMMT's.

Contamination: newer than the data of bases published before February 2025; on the web since.
"""

from perl.evaluation.scoring.task import BOXED_SOURCE, Task

TASKS = (
    Task(
        name="hmmt_feb_2025",
        title="HMMT February 2025",
        repository="MathArena/hmmt_feb_2025",
        split="train",
        revision="6fdc4277120810ff75aa22d2d5489b91f7a262a1",
        file="hmmt_feb_2025.jsonl",
        source=f"MathArena/hmmt_feb_2025 (HMMT), {BOXED_SOURCE}",
        identifier=("id", "problem_idx"),
    ),
)
