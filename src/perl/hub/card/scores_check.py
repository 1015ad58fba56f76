"""Are results those of the adapter that lies beside them, said in our words, and is its base the one that it names?

results, config, SHA-256 or header of the weights -> contradictions, a line each

Results name what was scored: its weights, its config, its base, and a policy that follows from the three.
"""

import io
import json
import re
from collections.abc import Iterator
from typing import Any

from perl.errors import Mistake, PerlError
from perl.evaluation.few_shot import titled
from perl.evaluation.protocol import PRESETS, asking_of
from perl.evaluation.results import HELD_OUT, Results
from perl.evaluation.task import all_tasks
from perl.hub.card.card_facts import CardFacts
from perl.hub.card.facts import RUN_FACTS, RunFacts
from perl.hub.card.form import shown
from perl.hub.card.names import shown as public
from perl.hub.card.published import SCORES, Files
from perl.policy.name import adapter_config_digest, adapter_policy_name
from perl.policy.saved.adapter import BASE_FINGERPRINT, BASE_QUANTIZATION, CONFIG, WEIGHTS
from perl.recipe.rollout_section import ENGINES

_AGAIN = "perl eval scores the one that is there"
_LARGEST_HEADER = 32_000_000  # bytes
_ORDINARY = "the ordinary base"
_PRESETS = {*PRESETS, "recipe", "script"}
_WORD = re.compile(r"[\w./:+-]{1,200}")


def policy_mistakes(
    results: Results, config: bytes | None, weights_sha256: str | None, where: str = SCORES
) -> Iterator[Mistake]:
    """Whether results name the policy that weights, config and base give.

    Args:
        results: Read from a file, which may hold anything.
        config: The ``adapter_config.json`` beside them; None: there is none.
        weights_sha256: Of the weights beside them; None: unknown.
        where: Names the results.
    """
    subject = results.subject
    sha, base_sha = subject.get("adapter_sha256"), str(subject.get("base_sha256"))
    if weights_sha256 is not None and sha != weights_sha256:
        whose = "of a base alone" if sha is None else f"of another adapter: sha256 {str(sha)[:12]}"
        yield Mistake(f"is {whose}, the weights beside it have {weights_sha256[:12]}", where, _AGAIN)
    if config is None or sha is None:
        return
    try:
        digest = adapter_config_digest(config)
        name = adapter_policy_name(config, str(weights_sha256 or sha), base_sha)
    except ValueError as error:
        yield Mistake(f"cannot be named: {shown(str(error))}", CONFIG)
        return
    if subject.get("adapter_config_sha256") != digest:
        named = shown(str(subject.get("adapter_config_sha256")), 12)
        yield Mistake(f"is of another {CONFIG}: sha256 {named}, the one beside it has {digest[:12]}", where, _AGAIN)
    elif subject.get("policy") != name and weights_sha256 in (None, sha):
        named = shown(str(subject.get("policy")), 12)
        yield Mistake(f"names the policy {named}, weights, config and base give {name[:12]}", where, _AGAIN)


def base_mistakes(results: Results, facts: CardFacts) -> Iterator[Mistake]:
    """Whether results are of the base that the adapter was trained on, at its commit, quantised alike.

    Args:
        results: Of the adapter.
        facts: Of the same adapter's files.
    """
    subject = results.subject
    if public(str(subject.get("base"))) != facts.base:
        message = f"is of another base: {shown(str(subject.get('base')))}, {CONFIG} says {shown(facts.base)}"
        yield Mistake(message, SCORES, _AGAIN)
    elif facts.revision is not None and subject.get("base_revision") not in (None, facts.revision):
        message = f"is of another revision of the base: {subject['base_revision']}, {CONFIG} says {facts.revision}"
        yield Mistake(message, SCORES, _AGAIN)
    quantization = subject.get("base_quantization")
    if quantization != facts.quantization:
        named, right = (shown(str(word or _ORDINARY)) for word in (quantization, facts.quantization))
        yield Mistake(f"is of another base: {named}, {RUN_FACTS} says {right}", SCORES, _AGAIN)


def words_mistakes(results: Results) -> Iterator[Mistake]:
    """Where results say in a text of their own what ``perl eval`` says in words of a list: a card shows these.

    Args:
        results: Of the adapter.
    """
    said: dict[str, tuple[object, set[str]]] = {
        "protocol.preset": (results.protocol.preset, _PRESETS),
        "engine.backend": (results.engine.get("backend"), set(ENGINES)),
    }
    for task in results.tasks:
        known = all_tasks().get(task.name)
        titles = (known.title if known else task.name, task.name + HELD_OUT)
        said[f"{task.name}: title"] = (task.title, {titled(title, task.few_shot) for title in titles})
    for where, (word, words) in said.items():
        if word not in words:
            yield Mistake(f"{where} is {shown(str(word))!r}, which perl eval does not say", SCORES, _AGAIN)
    for name, value in {**results.engine, **asking_of(results.subject)}.items():
        if _WORD.fullmatch(name) is None or (isinstance(value, str) and _WORD.fullmatch(value) is None):
            yield Mistake(f"{shown(name)} is {shown(str(value))!r}, which is not a word", SCORES, _AGAIN)


def header_mistakes(files: Files, run: RunFacts) -> Iterator[Mistake]:
    """Whether the header of the weights names the quantisation that the run reports, where the weights are at hand.

    Args:
        files: Of the adapter; its weights may be there and not read.
        run: Of ``perl_run.json``.
    """
    try:
        header = _header(files)
    except PerlError as error:
        yield from error.mistakes
        return
    if BASE_FINGERPRINT not in header:  # not at hand, or saved by another program, which names no base
        return
    trained = header.get(BASE_QUANTIZATION)
    if trained != run.quantization:
        named, right = (shown(str(word or _ORDINARY)) for word in (run.quantization, trained))
        message = f"says that it was trained on {named}, the header of {WEIGHTS} says on {right}"
        yield Mistake(message, f"{RUN_FACTS}: quantization", "perl push writes it anew")


def _header(files: Files) -> dict[str, Any]:
    """The remarks in the header of the weights; empty where they were not read."""
    held = files.get(WEIGHTS)
    if held is None:
        return {}
    try:
        with io.BytesIO(held) if isinstance(held, bytes) else held.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if size > _LARGEST_HEADER:
                raise ValueError(f"its header has {size:,} bytes")
            header = json.loads(file.read(size))
        return dict(header.get("__metadata__") or {})
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise PerlError(f"is not safetensors: {type(error).__name__}", WEIGHTS) from None
