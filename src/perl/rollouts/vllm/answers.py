"""What a vLLM server is asked and reports: records, errors, answers read, and completions that grow.

Request -> arguments; answer -> tokens with log-probabilities, or an error; parts, each of one version -> Sampled

A request that continues is stopped when a version is loaded. What was written until then is kept, with the
log-probabilities that it was drawn with; the rest is asked for after the prompt and those tokens, whose KV cache the
new version computes anew.

Requests are sent in ``http.py``.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import httpx2

from perl.errors import RolloutError
from perl.rollouts.engine import EngineSampling, Request, Sampled

# Reasons for which a completion is whole.
_ENDS = ("stop", "length")


@dataclass
class Part:
    """What came of a completion.

    Attributes:
        token_ids: Tokens.
        log_probs: Of each.
        ended: Why the completion ends with them; None: it does not.
        versions: That drew each token, where there may be several.
    """

    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float | None] = field(default_factory=list)
    ended: str | None = None
    versions: list[str] = field(default_factory=list)

    def sampled(self, version: str) -> Sampled:
        """The completion, of one version."""
        return Sampled(tuple(self.token_ids), tuple(self.log_probs), version)


class ServerDownError(Exception):
    """A server does not answer, or not what it should.

    Attributes:
        answered: It did answer, so that the request itself may be what it cannot stand.
        timed_out: It was given up, after a time that was set here.
    """

    def __init__(self, reason: str, answered: bool = False, timed_out: bool = False) -> None:
        """Says what happened."""
        super().__init__(" ".join(reason.split())[:300])
        self.answered, self.timed_out = answered, timed_out


class AccessError(RolloutError):
    """A server refuses access, or has a certificate that is not trusted: repeating the request does not help."""

    code = "PRL211"


class ChangedServerError(ServerDownError):
    """A server is not the one that was proven: what it wrote meanwhile is worth nothing."""


@dataclass(frozen=True)
class ServerFacts:
    """What a server reports of itself.

    Attributes:
        version: Of vLLM.
        base_name: Name under which the base is served.
        longest: Tokens of prompt and completion together, at most.
        adapters: Names of adapters that are loaded.
        loads_adapters: It was started so that it can be given adapters.
        takes_weights: It was started so that it can be given weights.
        on_cpu: It computes on a CPU, by what it reports of its memory.
        replicas: Copies of the model that share its address, as far as it reports them.
    """

    version: str
    base_name: str
    longest: int
    adapters: frozenset[str]
    loads_adapters: bool
    takes_weights: bool
    on_cpu: bool = False
    replicas: int = 1


@dataclass(frozen=True)
class ServerIdentity:
    """What makes a server itself, at a moment.

    Attributes:
        process: When it was started, to a microsecond; None: it is not reported.
        base: Name and path of the model that it was started with.
        adapters: Names of the adapters that it serves, with the folder that each was read from.
        weights: Label of the weights that take the place of the base's; None: there are none.
        longest: Tokens of prompt and completion together, at most.
    """

    process: str | None
    base: tuple[str, str]
    adapters: Mapping[str, str]
    weights: str | None
    longest: int


def sampling_arguments(request: Request, sampling: EngineSampling) -> dict[str, Any]:
    """How tokens are drawn, in the words that vLLM's library and its servers have in common.

    Every field is set, so that the model's generation_config never applies.
    """
    same = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    return {name: getattr(sampling, name) for name in same} | {
        "n": request.count,
        "seed": request.seed,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "max_tokens": request.most_tokens(sampling),
        # The end tokens of the generation_config are ordinary tokens unless the request names them.
        "ignore_eos": True,
        "stop_token_ids": list(sampling.end_token_ids),
        "logprobs": 0,
    }


def read_choices(text: str, parts: Sequence[Part]) -> None:
    """Adds what an answer, or a line of one that is streamed, brings; a completion that was aborted is an error.

    Args:
        text: JSON.
        parts: Of all completions that were asked for.
    """
    try:
        choices = json.loads(text)["choices"]
        numbered = [(parts[int(choice["index"])], choice) for choice in choices]
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ServerDownError(f"gave something else than completions: {text[:100]}", answered=True) from error
    for part, choice in numbered:
        token_ids = choice.get("token_ids") or []
        log_probs = (choice.get("logprobs") or {}).get("token_logprobs") or []
        if len(log_probs) != len(token_ids):
            raise ServerDownError("gave a completion without a log-probability for each token", answered=True)
        part.token_ids += map(int, token_ids)
        part.log_probs += [None if p is None or math.isnan(p) else float(p) for p in log_probs]
        part.ended = choice.get("finish_reason")
        if part.ended is not None and (part.ended not in _ENDS or not part.token_ids):
            raise ServerDownError(f"ended a completion by {part.ended}", answered=True)


def json_object(answer: httpx2.Response) -> dict[str, Any]:
    """The answer's fields; empty unless it is a JSON object."""
    try:
        fields = answer.json()
    except ValueError:
        return {}
    return fields if isinstance(fields, dict) else {}


def message_of(answer: httpx2.Response) -> str:
    """The message of an error's answer."""
    fields = json_object(answer)
    error = fields.get("error")
    message = error.get("message") if isinstance(error, dict) else fields.get("detail")
    if message is None and answer.text.lstrip().startswith("<"):
        message = "with a web page, as no vLLM does"
    return " ".join(str(message or answer.text or answer.reason_phrase).split())[:500]


class GrowingGroup:
    """The completions of a request.

    Attributes:
        finished: Whether all of them are whole.
    """

    def __init__(self, request: Request, sampling: EngineSampling) -> None:
        """Has no token yet."""
        self._request, self._longest = request, request.most_tokens(sampling)
        self._growths = [Part() for _ in range(request.count)]

    @property
    def finished(self) -> bool:
        """See the class."""
        return all(growth.ended for growth in self._growths)

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
            growth.ended = part.ended
        return [place for place in places if not self._growths[place].ended]

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
