"""The sandbox's tasks: 500 held-out problems each, made on the spot, for its models and their adapters.

Arithmetic for ``sandbox:base``, a secret code (``cipher``) for ``sandbox:copyist``. No data set, no network, no
licence. The prompt is the question itself in the base's chat template, as in training; one question in ten, by a hash
of its text, is held out from every training set and from the base's own training.
"""

from perl.evaluation.scoring.task import Task
from perl.sandbox import PREFIX
from perl.sandbox.tasks import TASKS as SANDBOX

TASKS = tuple(
    Task(
        name=f"{PREFIX}{name}",
        title=f"Sandbox {name}",
        repository=f"{PREFIX}{name}",
        split="heldout",
        file=f"sandbox_{name}.jsonl",
        prompt="{problem}",
        source="made by perl.sandbox, the held-out split",
        examples="train",
    )
    for name in SANDBOX
)
