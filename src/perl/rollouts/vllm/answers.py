"""What a vLLM server is and reports: records, errors, and answers read; how access is given.

answer -> tokens with log-probabilities, ServerFacts, Standing, or an error; ServerAddress -> key, certificates

Requests are sent in ``http.py``.
"""

import json
import math
import os
import re
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx2

from perl.errors import PerlError, RolloutError
from perl.recipe.server_address import DEFAULT_KEY, ServerAddress

Answer = tuple[tuple[int, ...], tuple[float | None, ...]]
"""Tokens of a completion, and their log-probabilities."""
# Reasons for which a completion is whole.
_ENDS = ("stop", "length")


@dataclass
class Part:
    """What came of a completion.

    Attributes:
        token_ids: Tokens.
        log_probs: Of each.
        ended: Why the completion ends with them; None: it does not.
    """

    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float | None] = field(default_factory=list)
    ended: str | None = None


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


class AdapterGoneError(Exception):
    """A server does not know an adapter, so it was restarted, or someone unloaded it."""


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
class Standing:
    """What makes a server itself, at a moment.

    Attributes:
        process: When it was started, to a microsecond; None: it is not reported.
        base: Name and path of the model that it was started with.
        adapters: Names of the adapters that it serves, with the folder that each was read from.
        weights: Label of the weights that take the place of the base's; None: it can be given none.
    """

    process: str | None
    base: tuple[str, str]
    adapters: Mapping[str, str]
    weights: str | None


def key_of(address: ServerAddress) -> str | None:
    """The key that a server's variable holds; a variable that was named must be set."""
    name = address.key_env or DEFAULT_KEY
    key = os.environ.get(name, "").strip()
    if not key and address.key_env is not None:
        raise PerlError(f"the variable {name}, which is to hold the key of {address.url}, is not set")
    if not all("!" <= letter <= "~" for letter in key):  # what a header can hold; the key itself is not for logs
        raise PerlError(f"what {name} holds is not a valid key: it has spaces or letters that HTTP cannot send")
    return key or None


def trust_of(address: ServerAddress) -> ssl.SSLContext | bool:
    """Whose certificates are believed; they are read only where they are needed."""
    if address.ca_file is None:
        return address.url.startswith("https://")
    try:
        return ssl.create_default_context(cafile=os.path.expanduser(address.ca_file))
    except OSError as error:
        reason = "it holds no certificate" if isinstance(error, ssl.SSLError) else error.strerror
        raise PerlError(f"{address.ca_file}: {reason}", "ca_file", f"certificates (PEM) for {address.url}") from None


def read_answer(choice: dict[str, Any]) -> Answer:
    """A completion, if it is whole: one that was aborted on the server does not count."""
    if choice.get("finish_reason") not in _ENDS:
        raise ServerDownError(f"ended a completion by {choice.get('finish_reason')}", answered=True)
    token_ids, log_probs = _tokens_of(choice)
    if not token_ids:
        raise ServerDownError("gave a completion without a log-probability for each token", answered=True)
    return tuple(token_ids), tuple(log_probs)


def read_chunk(text: str, parts: Sequence[Part]) -> None:
    """Adds what a line of a stream brings.

    Args:
        text: JSON.
        parts: Of all completions that were asked for.
    """
    try:
        choices = json.loads(text)["choices"]
        numbered = [(parts[int(choice["index"])], choice) for choice in choices]
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ServerDownError(f"streams something else than completions: {text[:100]}", answered=True) from error
    for part, choice in numbered:
        token_ids, log_probs = _tokens_of(choice)
        part.token_ids += token_ids
        part.log_probs += log_probs
        part.ended = choice.get("finish_reason")
        if part.ended is not None and (part.ended not in _ENDS or not part.token_ids):
            raise ServerDownError(f"ended a completion by {part.ended}", answered=True)


def _tokens_of(choice: dict[str, Any]) -> tuple[list[int], list[float | None]]:
    """Tokens and their log-probabilities, as many of them."""
    token_ids = choice.get("token_ids") or []
    scores = (choice.get("logprobs") or {}).get("token_logprobs") or []
    if len(scores) != len(token_ids):
        raise ServerDownError("gave a completion without a log-probability for each token", answered=True)
    log_probs = (None if score is None else float(score) for score in scores)
    return list(map(int, token_ids)), [None if p is None or math.isnan(p) else p for p in log_probs]


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


def ranks_of_refusal(message: str) -> tuple[int, int] | None:
    """The rank of an adapter and the largest that the server was started for, where it refuses it for that."""
    found = re.search(r"LoRA rank (\d+) is greater than max_lora_rank (\d+)", message)
    return (int(found[1]), int(found[2])) if found else None
