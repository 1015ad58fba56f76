"""Stored samples that may be taken for new ones: drawn with the seeds of this evaluation, judged as of now.

samples of a file, problems, protocol -> samples that are kept, and how many are not

A file may have been edited, and a verdict may be an older verifier's: nothing is taken from it that can be computed
again.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from perl.evaluation.draw import TaskRequest
from perl.evaluation.protocol import Protocol
from perl.evaluation.samples import NOT_JUDGED, Place, Sample
from perl.rewards.verifier import Judging


@dataclass(frozen=True)
class StoredSamples:
    """What a file holds of a task.

    Attributes:
        samples: That are wanted, with verdicts of now; not those of problems beyond a limit, which stay in the file.
        judged_otherwise: How many of these had another verdict or another answer in the file.
        dropped: Places of samples that this evaluation cannot have drawn.
    """

    samples: Mapping[Place, Sample]
    judged_otherwise: int
    dropped: Collection[Place]


def stored_samples(
    found: Mapping[Place, Sample],
    wanted: TaskRequest,
    protocol: Protocol,
    judging: Judging | None = None,
) -> StoredSamples:
    """Judges stored samples again, and drops what was not drawn like this.

    Args:
        found: All that a file holds under the key of this task.
        wanted: The task; where it is judged later, verdicts stay as they are stored.
        protocol: How its completions are drawn, and how many.
        judging: The limits of a comparison; None: the usual ones.
    """
    asked = {one.problem for one in wanted.asked}
    known = asked | {one.problem for one in wanted.further}
    dropped = [place for place, sample in found.items() if not _may_be_drawn(sample, known, wanted, protocol)]
    gone = set(dropped)
    some = [sample for place, sample in found.items() if place not in gone and sample.problem in asked]
    kept = [sample for sample in some if sample.index < protocol.k]
    if not wanted.judged:
        return StoredSamples({sample.place: sample for sample in kept}, 0, dropped)
    judging = judging or Judging()
    questions = {one.problem: one.as_question for one in wanted.asked}
    texts = [sample.text for sample in kept]
    verdicts = wanted.scorer.verdicts([questions[sample.problem] for sample in kept], texts, judging)
    samples = [sample.judged(verdict) for sample, verdict in zip(kept, verdicts, strict=True)]
    otherwise = sum(old != new and old.status != NOT_JUDGED for old, new in zip(kept, samples, strict=True))
    return StoredSamples({sample.place: sample for sample in samples}, otherwise, dropped)


def _may_be_drawn(sample: Sample, known: Collection[str], wanted: TaskRequest, protocol: Protocol) -> bool:
    """Whether a sample is of this task, has its own seed and a length that a completion can have."""
    if sample.task != wanted.task or sample.problem not in known:
        return False
    if sample.seed != protocol.seed_of(*sample.place):
        return False
    return sample.may_be_of(wanted.max_new_tokens)
