"""What a run tells of one of its adapters and no other published file holds.

Candidate -> RunFacts
"""

import contextlib
import json
from dataclasses import asdict
from typing import Any

from huggingface_hub import HfApi, constants

from perl.errors import PerlError, RunFolderError
from perl.hub.card.candidate import RunAdapter, recipe_of
from perl.hub.card.facts import Licence, RunFacts, made_facts, plain_word, showable_settings
from perl.hub.card.names import is_hub_name, label
from perl.hub.card.public_recipe import without_paths
from perl.policy.hub_files import HUB_ERRORS
from perl.policy.model import public_name
from perl.run.folder import Run
from perl.sandbox import is_sandbox

LICENCE_SECONDS = 5.0
"""A card is not worth waiting longer for the Hub."""
_SANDBOX_LICENCE = "apache-2.0"


def run_facts(
    candidate: RunAdapter, repo_id: str | None = None, steps: list[int] | None = None, licence: Licence | None = None
) -> RunFacts:
    """What a run tells of one of its adapters.

    Args:
        candidate: The adapter.
        repo_id: Where it will lie on the Hub; None: where the run's recipe says.
        steps: Of the run's checkpoints that are published too.
        licence: Of the base; None: the Hub is asked, unless it is offline.
    """
    run, known, whole_run = candidate.run, candidate.run.facts, candidate.which == "final"
    recipe = recipe_of(run)
    if not isinstance(known.get("base"), str):
        raise RunFolderError("does not say in its run.json which base it trained on", str(run.path))
    base, revision = public_name(str(known["base"]), known.get("revision"))
    repo_id = repo_id or (recipe.hub.repo_id if recipe else known.get("repo_id"))
    data, settings = known.get("data") or {}, known.get("settings") or {}
    # Of an adapter that lies on this machine the last part of its path, as its recipe.
    continued = {"continues": without_paths(settings["continues"])} if "continues" in settings else {}
    licence = licence or base_licence(base, revision)
    same = ("quantization", "method", "seed", "loss", "ratio_level", "algorithm")
    facts = {
        **{name: known.get(name) for name in (*same, "trainable_parameters", "total_parameters")},
        "name": repo_id or plain_word(run.path.resolve().name),
        "repo_id": repo_id,
        "base": label(base),
        "revision": revision,
        "licence": asdict(licence) if licence is not None else None,
        "data_version": data.get("train"),
        "step": candidate.step,
        "overridden": known.get("overridden") or {},
        "settings": showable_settings(settings | continued),
        "rewards": without_paths(known.get("rewards") or {}),
        "seconds": (known.get("seconds") if run.status == "done" else run.elapsed()) if whole_run else None,
        "hardware": hardware_of(known.get("hardware") or {}),
        "rewards_changed": [step for step in known.get("rewards_changed") or [] if step < candidate.step],
        "reload_difference": known.get("reload_difference") if whole_run else None,
        "chat": _is_chat(run),
        "checkpoints": list(steps or []),
        "versions": known.get("versions") or {},
    }
    return made_facts(facts, str(run.path / "run.json"))


def base_licence(base: str, revision: str | None) -> Licence | None:
    """The licence of a base, as its own card on the Hub has it; None where that is not known within a moment."""
    if is_sandbox(base):
        return Licence(_SANDBOX_LICENCE)
    if constants.HF_HUB_OFFLINE or not is_hub_name(base):
        return None
    try:
        card = HfApi().model_info(base, revision=revision, timeout=LICENCE_SECONDS).card_data
    except HUB_ERRORS:
        return None
    found = card.get("license") if card else None
    if card is None or not isinstance(found, str):
        return None
    try:
        name = card.get("license_name")
        licence = {"identifier": found, "name": plain_word(name) if name else None, "link": card.get("license_link")}
        return made_facts({"base": base, "licence": licence}, base).licence
    except (PerlError, TypeError):  # an untrusted card may hold anything
        return None


def hardware_of(found: dict[str, Any]) -> str | None:
    """Processors as ``1 x NVIDIA H100``; None: it is not known."""
    if not found.get("device"):
        return None
    named, plain = (f"{found.get('count', 1)} x {name}" for name in (found["device"], "processor"))
    with contextlib.suppress(PerlError):
        return made_facts({"base": "any", "hardware": named}, "hardware").hardware
    return plain


def _is_chat(run: Run) -> bool | None:
    """Whether questions were chat messages, as what was logged knows it."""
    if not run.samples.is_file():
        return None
    with run.samples.open("rb") as file:
        first = file.readline()
    try:  # what is not UTF-8 is a ValueError too
        return isinstance(json.loads(first)["prompt"], list) if first else None
    except (ValueError, KeyError, TypeError, RecursionError):  # a line that a kill cut short
        return None
