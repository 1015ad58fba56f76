"""HMMT February 2025: 30 problems of the Harvard-MIT tournament, harder than AIME, with exact closed-form answers.

Data: ``MathArena/hmmt_feb_2025`` (CC BY-NC-SA 4.0), collected by Balunovic et al. 2025 (arXiv:2505.23281); the problems
are HMMT's.

Contamination: newer than the data of bases published before February 2025; on the web since.
"""

from perl.evaluation.task import BOXED_PROMPT, Task, tables_on_demand

TASKS = (
    Task(
        name="hmmt_feb_2025",
        title="HMMT February 2025",
        repository="MathArena/hmmt_feb_2025",
        subset=None,
        split="train",
        revision="6fdc4277120810ff75aa22d2d5489b91f7a262a1",
        file="hmmt_feb_2025.jsonl",
        prompt=BOXED_PROMPT,
        version=1,
        max_new_tokens=None,
        stop=(),
        lighteval=None,
        source="MathArena/hmmt_feb_2025 (HMMT), asked as Qwen2.5-Math's evaluation does",
        identifier=("id", "problem_idx"),
    ),
)

__getattr__ = tables_on_demand(TASKS)
