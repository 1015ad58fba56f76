"""Minerva's science questions: 272 problems of undergraduate science and mathematics with short answers.

Data: ``math-ai/minervamath``, the form of Qwen2.5-Math's evaluation (MIT) of the OCWCourses set of Lewkowycz et al.
2022 (arXiv:2206.14858), which was taken from MIT OpenCourseWare (CC BY-NC-SA 4.0).

Golds are as their authors wrote them: some are rounded, some carry no unit, some are expressions in Python's notation
(``np.arcsin(10/13)``). A correct answer to more digits may count as wrong; differences between models keep their
meaning.
Contamination: the courses have been on the web for many years.
"""

from perl.evaluation.scoring.task import BOXED_SOURCE, Task

TASKS = (
    Task(
        name="minerva",
        title="Minerva (OCWCourses)",
        repository="math-ai/minervamath",
        split="test",
        revision="ee46ddc498933b1977577953250ca5c66be64f96",
        file="minerva_math.jsonl",
        source=f"math-ai/minervamath (MIT OpenCourseWare), {BOXED_SOURCE}",
    ),
)
