"""AMC 12 of 2023: 40 competition problems for high schools, reworded so that each answer is a number.

Data: ``math-ai/amc23``, the form of Qwen2.5-Math's evaluation (MIT): 22 problems of AMC 12A and 18 of AMC 12B without
their five choices. The problems are the MAA's, the data set declares no licence.

Contamination: on the web since November 2023, before the data of most current bases was collected.
"""

from perl.evaluation.scoring.task import BOXED_SOURCE, Task

TASKS = (
    Task(
        name="amc23",
        title="AMC 2023",
        repository="math-ai/amc23",
        split="test",
        revision="80815d37005feb82cd7f8fbc6901d5d3eff43057",
        file="amc23.jsonl",
        source=f"math-ai/amc23 (MAA, AMC 12A and 12B 2023), {BOXED_SOURCE}",
    ),
)
