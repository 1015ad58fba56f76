"""Completions that several versions may write, one after the other: what there is of them, and what is left to ask for.

request -> parts, each of one version -> Sampled, with the version of each token

A request is stopped when a version is loaded. What was written until then is kept, with the log-probabilities that it
was drawn with; the rest is asked for after the prompt and those tokens, whose KV cache the new version computes anew.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from perl.rollouts.engine import EngineSampling, Request, Sampled
from perl.rollouts.vllm.answers import Part


@dataclass
class Growth:
    """A completion so far.

    Attributes:
        token_ids: Its tokens.
        log_probs: Of each, by the version that drew it.
        versions: That drew each.
        finished: Nothing is left to write.
    """

    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float | None] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    finished: bool = False


class GrowingGroup:
    """The completions of a request.

    Attributes:
        finished: Whether all of them are whole.
    """

    def __init__(self, request: Request, sampling: EngineSampling) -> None:
        """Has no token yet."""
        self._request, self._longest = request, request.most_tokens(sampling)
        self._growths = [Growth() for _ in range(request.count)]

    @property
    def finished(self) -> bool:
        """See the class."""
        return all(growth.finished for growth in self._growths)

    def add(self, places: Sequence[int], parts: Sequence[Part], version: str) -> list[int]:
        """Adds what a version has written.

        Args:
            places: Of the completions in the group.
            parts: For each of these completions, what came.
            version: Its name.

        Returns:
            Those of the places that are not finished.
        """
        for place, part in zip(places, parts, strict=True):
            growth = self._growths[place]
            growth.token_ids += part.token_ids
            growth.log_probs += part.log_probs
            growth.versions += [version] * len(part.token_ids)
            growth.finished = part.ended is not None
        return [place for place in places if not self._growths[place].finished]

    def left(self, places: Sequence[int]) -> list[tuple[tuple[int, ...], Request]]:
        """What to ask for, of completions that are not finished: their places, and the request.

        Those that have no token yet are asked for together, each other one after its own tokens.
        """
        begun = [place for place in places if self._growths[place].token_ids]
        fresh = tuple(place for place in places if not self._growths[place].token_ids)
        found = [(fresh, replace(self._request, count=len(fresh)))] if fresh else []
        for place in begun:
            written = tuple(self._growths[place].token_ids)
            prompt_ids = (*self._request.prompt_ids, *written)
            found.append(
                ((place,), replace(self._request, prompt_ids=prompt_ids, count=1, longest=self._longest - len(written)))
            )
        return found

    def sampled(self) -> list[Sampled]:
        """All completions; each is named after the version that wrote its end."""
        return [
            Sampled(tuple(g.token_ids), tuple(g.log_probs), g.versions[-1], tuple(g.versions)) for g in self._growths
        ]
