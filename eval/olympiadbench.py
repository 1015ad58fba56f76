"""OlympiadBench, mathematics in English, text only, open answers: 674 problems (He et al. 2024, arXiv:2402.14008).

Data: ``Hothan/OlympiadBench``, subset ``OE_TO_maths_en_COMP`` (MIT). The gold is the first entry of ``final_answer``; a
gold with several values lists them in it. Fifteen relay problems refer to a number that the text does not give, so no
model reaches 100%.

lighteval's own ``olympiad_bench`` compares text with text and cuts at 2,048 tokens; its scores are not comparable.
Contamination: contests of many years, on the web since.
"""

from perl.evaluation.scoring.task import BOXED_SOURCE, Task

TASKS = (
    Task(
        name="olympiadbench",
        title="OlympiadBench (maths, en)",
        repository="Hothan/OlympiadBench",
        subset="OE_TO_maths_en_COMP",
        split="train",
        revision="91184b52131e7fc9455fef848035173aea8cc01a",
        file="olympiadbench.jsonl",
        source=f"Hothan/OlympiadBench, OE_TO_maths_en_COMP, {BOXED_SOURCE}",
        answer=("final_answer", "answer"),
    ),
)
