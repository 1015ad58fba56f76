"""GPQA Diamond: 198 questions of biology, physics and chemistry for experts (Rein et al. 2023, arXiv:2311.12022).

Data: ``Idavidrein/gpqa``, subset ``gpqa_diamond`` (CC BY 4.0), gated: accept its terms on the Hub first, and do not
post its questions where crawlers read them.

The prompt is that of lighteval's ``gpqa:diamond``. lighteval draws the order of the choices anew in each run; here a
hash of the question places the right one, so every run and every model sees the same letters.
"""

from perl.evaluation.scoring.task import Task

TASKS = (
    Task(
        name="gpqa_diamond",
        title="GPQA Diamond",
        repository="Idavidrein/gpqa",
        subset="gpqa_diamond",
        split="train",
        revision="633f5ee89ab8ad4522a9f850766b73f62147ffdd",
        file="gpqa_diamond.jsonl",
        prompt=(
            "Answer the following multiple choice question. The last line of your response should be of the following "
            "format: 'Answer: $LETTER' (without quotes) where LETTER is one of ABCD. Think step by step before "
            "answering.\n\n{problem}"
        ),
        max_new_tokens=32768,
        source="Idavidrein/gpqa, gpqa_diamond, asked as lighteval 0.13's gpqa:diamond, choices in a fixed order",
        problem=("Question",),
        identifier=("Record ID",),
        choices=("Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3"),
    ),
)
