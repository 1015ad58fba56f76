"""Are results those of the adapter that lies beside them, and said in our words?

results, config, SHA-256 of the weights -> contradictions, a line each

Results name what was scored: its weights, its config, its base, and a policy that follows from the three.
"""

import re
from collections.abc import Iterator

from perl.errors import Mistake
from perl.evaluation.scoring.protocol import PRESETS, asking_of
from perl.evaluation.scoring.results import HELD_OUT, Results
from perl.evaluation.scoring.task import all_tasks
from perl.evaluation.tasks.few_shot import titled
from perl.hub.card.facts import VERSION
from perl.hub.card.form import shown
from perl.hub.card.published import SCORES
from perl.policy.name import adapter_config_digest, adapter_policy_name
from perl.policy.saved.adapter import CONFIG
from perl.recipe.rollout_section import ENGINES

_AGAIN = "perl eval scores the one that is there"
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
    commit = {"base_revision": results.subject.get("base_revision")}
    for package, version in results.versions.items():
        if _WORD.fullmatch(package) is None or re.fullmatch(VERSION, version) is None:
            yield Mistake(f"{shown(package)} {shown(version)} is not a version", SCORES, _AGAIN)
    for name, value in {**results.engine, **asking_of(results.subject), **commit}.items():
        if _WORD.fullmatch(name) is None or (isinstance(value, str) and _WORD.fullmatch(value) is None):
            yield Mistake(f"{shown(name)} is {shown(str(value))!r}, which is not a word", SCORES, _AGAIN)
