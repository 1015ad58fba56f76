"""Samples of before: those in an evaluation's folder, and a base's in the user's cache for all adapters on it.

file of samples, problems, protocol -> samples that may be taken for new ones, judged as of now

A file may have been edited, and a verdict may be an older verifier's: nothing is taken from it that can be computed
again. A base's completions are kept in a file named by all that they depend on: what their key names (weights, prompts,
sampling, seed, engine, type of numbers), and the device, the attention and the versions of the packages that draw.
"""

import contextlib
import logging
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from perl.errors import PerlError
from perl.evaluation.draw import TaskRequest
from perl.evaluation.protocol import Protocol, short_hash
from perl.evaluation.samples import NOT_JUDGED, Place, Sample, SampleFile
from perl.rewards.verifier import Judging
from perl.run.folder import installed_versions
from perl.run.warned import warn

logger = logging.getLogger("perl")

VARIABLE = "PERL_CACHE"
"""Environment variable with the folder that holds caches."""
_DRAWING = ("torch", "transformers", "vllm", "bitsandbytes", "torchao")


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
    found: Mapping[Place, Sample], wanted: TaskRequest, protocol: Protocol, judging: Judging | None = None
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
    dropped = [
        place
        for place, sample in found.items()
        if sample.task != wanted.task
        or sample.problem not in known
        or sample.seed != protocol.seed_of(*sample.place)
        or not sample.may_be_of(wanted.max_new_tokens)
    ]
    gone = set(dropped)
    kept = [s for place, s in found.items() if place not in gone and s.problem in asked and s.index < protocol.k]
    if not wanted.judged:
        return StoredSamples({sample.place: sample for sample in kept}, 0, dropped)
    questions = {one.problem: one.as_question for one in wanted.asked}
    texts = [sample.text for sample in kept]
    verdicts = wanted.scorer.verdicts([questions[sample.problem] for sample in kept], texts, judging or Judging())
    samples = [sample.judged(verdict) for sample, verdict in zip(kept, verdicts, strict=True)]
    otherwise = sum(old != new and old.status != NOT_JUDGED for old, new in zip(kept, samples, strict=True))
    return StoredSamples({sample.place: sample for sample in samples}, otherwise, dropped)


@dataclass(frozen=True)
class SampleStore:
    """Where a policy's samples on a task are kept.

    Attributes:
        name: In a log.
        key: Names the policy and the way it was asked.
        file: In the evaluation's folder.
        cache: Of bases; None: these samples are kept in the folder alone.
    """

    name: str
    key: str
    file: SampleFile
    cache: SampleFile | None = None

    def read(self, wanted: TaskRequest, protocol: Protocol, judging: Judging | None) -> Mapping[Place, Sample]:
        """Those that are there, corrected where that is due; those of the cache are put into the folder's file too."""
        found = self.file.read(self.key)
        if self.cache is not None:
            found |= self._taken(self.cache, set(wanted.places(protocol.k)) - found.keys())
        stored = stored_samples(found, wanted, protocol, judging)
        if stored.dropped or any(found[place] != sample for place, sample in stored.samples.items()):
            self.file.correct(self.key, stored.samples, stored.dropped)
        if stored.dropped:
            why = "another seed, a length that cannot be, an unknown problem"
            line = "%s: not drawn by this evaluation (%s), hence dropped: %d stored completions"
            warn("PRL305", line, self.name, why, len(stored.dropped))
        if stored.judged_otherwise:
            line = "%s: judged again, %d of %d stored verdicts are others now"
            warn("PRL305", line, self.name, stored.judged_otherwise, len(stored.samples))
        return stored.samples

    def append(self, sample: Sample) -> None:
        """Adds a sample; a kill right after does not lose it."""
        self.file.append(self.key, [sample])
        if self.cache is not None:
            with _may_fail(self.cache.path):
                self.cache.append(self.key, [sample])

    def _taken(self, cache: SampleFile, wanted: Collection[Place]) -> dict[Place, Sample]:
        """Of the cache's samples those that are wanted, without their verdicts."""
        taken: dict[Place, Sample] = {}
        with _may_fail(cache.path):
            cache.path.parent.mkdir(parents=True, exist_ok=True)
            every = cache.read(self.key)
            taken = {p: replace(s, status=NOT_JUDGED, extracted=None) for p, s in every.items() if p in wanted}
        if taken:
            self.file.append(self.key, taken.values())
            logger.info("%s: %d completions were drawn before and are taken from the cache", self.name, len(taken))
        return taken


def base_cache(key: str, device: str, attention: str | None) -> SampleFile:
    """The file of a base's completions, in ``$PERL_CACHE/bases``, else ``perl-rl/bases`` in the user's cache.

    Args:
        key: Under which the samples are kept.
        device: Type of the device that draws.
        attention: ``attn_implementation`` that was asked for; None: transformers' choice.
    """
    usual = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "perl-rl"
    folder = Path(os.environ.get(VARIABLE) or usual).expanduser() / "bases"
    versions = {name: found for name, found in installed_versions(_DRAWING).items() if name in _DRAWING}
    facts = {"key": key, "device": device, "attention": attention, "versions": versions}
    return SampleFile(folder / f"{short_hash(facts)}.jsonl")


@contextlib.contextmanager
def _may_fail(file: Path) -> Iterator[None]:
    """A cache that cannot be read or written costs a line, not an evaluation."""
    try:
        yield
    except (OSError, PerlError) as error:
        reason = error.mistakes[0].message if isinstance(error, PerlError) else error.strerror or error
        warn("PRL365", "%s: %s; the base's completions are not shared with other evaluations", file, reason)
