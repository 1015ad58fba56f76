"""How completions are drawn for a score, and how many: what two scores must share to be compared.

preset, the user's settings, the base's generation settings -> Protocol
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from transformers import AutoConfig, GenerationConfig

from perl.errors import PerlError, did_you_mean
from perl.policy.model import resolve_model
from perl.recipe.sections import ModelSection
from perl.rollouts.engine import EngineSampling

DEFAULT_PRESET = "perl"
DEFAULT_MAX_NEW_TOKENS = 32_768
SHAPING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Settings that shape the distribution which tokens are drawn from."""


@dataclass(frozen=True)
class Protocol:
    """The settings of an evaluation.

    Attributes:
        preset: Where settings that nobody gave come from.
        temperature: Softmax temperature; 0: the likeliest token (greedy).
        top_p: Nucleus.
        top_k: 0: all tokens.
        min_p: Tokens below this share of the best one are dropped.
        repetition_penalty: 1: none.
        max_new_tokens: Tokens after which a completion is cut off; None: the task's own number, else 32,768. Never more
            than the model's context leaves.
        k: Completions a problem.
        seed: From which each sample's own seed is derived.
        system_prompt: Message before every question; None: none.
    """

    preset: str = DEFAULT_PRESET
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_new_tokens: int | None = None
    k: int = 16
    seed: int = 0
    system_prompt: str | None = None

    def drawn(self) -> dict[str, Any]:
        """What a completion depends on, beside model, question and seed."""
        return {name: getattr(self, name) for name in (*SHAPING, "max_new_tokens", "system_prompt")}

    def hash(self, task: Mapping[str, Any]) -> str:
        """Sixteen hexadecimal digits that two results share if they may be compared.

        Not of the seed, which is another draw of the same protocol.

        Args:
            task: What identifies the task, its prompt and its data.
        """
        return short_hash({**self.drawn(), "k": self.k, **task})

    def sampling(self, max_new_tokens: int, end_token_ids: tuple[int, ...]) -> EngineSampling:
        """For an engine."""
        shape = {name: getattr(self, name) for name in SHAPING}
        return EngineSampling(max_completion_length=max_new_tokens, end_token_ids=end_token_ids, **shape)

    def seed_of(self, task: str, problem: str, index: int) -> int:
        """The seed of one sample: its own, and the same for every model, engine and order of problems."""
        digest = hashlib.sha256(f"{self.seed}\n{task}\n{problem}\n{index}".encode()).digest()
        return int.from_bytes(digest[:4], "big") >> 1

    def __str__(self) -> str:
        """One line for a person."""
        drawn = "greedy" if self.temperature == 0 else f"temperature {self.temperature:g}, top_p {self.top_p:g}"
        more = [
            f"{name} {getattr(self, name):g}"
            for name, neutral in (("top_k", 0), ("min_p", 0.0), ("repetition_penalty", 1.0))
            if getattr(self, name) != neutral
        ]
        longest = "the task's" if self.max_new_tokens is None else f"{self.max_new_tokens}"
        system = "no system prompt" if self.system_prompt is None else "a system prompt"
        return ", ".join([drawn, *more, f"max_new_tokens {longest}", f"k {self.k}", system])


_FRACTIONS = ("temperature", "top_p", "min_p", "repetition_penalty")
# Published protocols. What one leaves open comes from the base's generation settings.
PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        # DeepSeek-R1's (arXiv:2501.12948, section 3) and open-r1's, which most reasoning models are reported with.
        "perl": {"temperature": 0.6, "top_p": 0.95, "max_new_tokens": 32_768, "k": 16},
        # PeRL's own evaluation scripts (arXiv:2512.23165): no system prompt, AIME with k 32, MATH-500 with k 4.
        "perl-paper": {
            "temperature": 0.7,
            "top_p": 0.9,
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "max_new_tokens": 31_744,
            "k": 32,
        },
        "greedy": {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "k": 1},
        # Nothing of ours: as the base's generation_config.json says.
        "base": {},
    }
)


def resolve_protocol(
    preset: str = DEFAULT_PRESET, given: Mapping[str, Any] | None = None, of_the_base: Mapping[str, Any] | None = None
) -> Protocol:
    """The protocol: what the user gave, else the preset's, else the base's generation settings, else neutral.

    Args:
        preset: A name of :data:`PRESETS`.
        given: Settings by name; None: not given.
        of_the_base: Its generation settings, by transformers' names.

    Raises:
        PerlError: No such preset, or a value that makes no sense.
    """
    if preset not in PRESETS:
        raise PerlError(f"no preset {preset!r}", "--preset", did_you_mean(preset, PRESETS))
    chosen = {name: value for name, value in (given or {}).items() if value is not None}
    settings = of_the_base or {}
    base = {name: settings[name] for name in SHAPING if settings.get(name) is not None}
    if "top_k" in base:
        base["top_k"] = max(0, base["top_k"])  # -1 is vLLM's word for all tokens
    if settings.get("do_sample") is False:
        base.setdefault("temperature", 0.0)
    found = {**base, **PRESETS[preset], **chosen}
    # As JSON has them, so that 1 and 1.0 are one protocol.
    found |= {name: float(found[name]) for name in _FRACTIONS if name in found}
    protocol = replace(Protocol(preset=preset), **found)
    _check(protocol, explicit_k="k" in chosen)
    return replace(protocol, k=1) if protocol.temperature == 0 and "k" not in chosen else protocol


def task_facts(
    name: str,
    version: int,
    prompt: str,
    data: str | None,
    max_new_tokens: int,
    scorer: str | None = None,
    examples: str | None = None,
    asking: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """What identifies a task, its prompt and its data in :meth:`Protocol.hash`.

    Args:
        name: The task's.
        version: Of the way of asking.
        prompt: As the task has it.
        data: SHA-256 of the problems.
        max_new_tokens: As they were asked.
        scorer: What judges, a user's reward with digits of its code; None: training's verifier, which is not named.
        examples: How many stand before each question, and their SHA-256; None: there are none.
        asking: A thinking mode and a chat template that somebody asked for, see
            :func:`asked_facts`; not the base's own, which differ from base to base.
    """
    facts = {"task": name, "task_version": version, "prompt": prompt, "data": data, "max_new_tokens": max_new_tokens}
    more = {"scorer": scorer, "few_shot": examples, **(asking or {})}
    return {**facts, **{key: value for key, value in more.items() if value is not None}}


ASKED = ("thinking", "chat_template_given")
"""What results say of how questions were put, beside the hash of the template that was in force."""


def asked_facts(template: str | None, *, thinking: bool | None) -> dict[str, str]:
    """What was asked for in place of the base's own way, as results say it.

    Args:
        template: Hash of a template that was given; None: the base's own stayed.
        thinking: Whether the template was told to think; None: it was told nothing.
    """
    switch = None if thinking is None else "on" if thinking else "off"
    given = {"thinking": switch, "chat_template_given": template}
    return {name: value for name, value in given.items() if value is not None}


def asking_of(subject: Mapping[str, str | None]) -> dict[str, str]:
    """The same from what results say of their subject."""
    found = {name: subject.get(name) for name in ASKED}
    return {name: value for name, value in found.items() if value is not None}


def short_hash(facts: Mapping[str, Any]) -> str:
    """Sixteen hexadecimal digits of facts, whatever their order."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def _check(protocol: Protocol, *, explicit_k: bool) -> None:
    bounds: dict[str, tuple[float, float]] = {
        "temperature": (0, 100),
        "top_p": (0, 1),
        "top_k": (0, float("inf")),
        "min_p": (0, 1),
        "repetition_penalty": (0, 100),
        "k": (1, 100_000),
        "max_new_tokens": (1, float("inf")),
        "seed": (0, float("inf")),
    }
    for name, (least, most) in bounds.items():
        value = getattr(protocol, name)
        zero = name in ("top_p", "repetition_penalty") and value == 0
        if value is not None and (not least <= value <= most or zero):
            where = f"--{name.replace('_', '-')}"
            bound = f"at least {least:g}" if most == float("inf") else f"{least:g} to {most:g}"
            raise PerlError(f"{value:g} is out of range", where, f"{bound}, not 0" if zero else bound)
    if protocol.temperature == 0 and protocol.k > 1 and explicit_k:
        raise PerlError(f"{protocol.k} greedy completions of a problem are all the same", "--k", "1, or a temperature")


def generation_settings(section: ModelSection) -> Mapping[str, Any]:
    """What the base's ``generation_config.json`` says; without one its config, as of a model that is loaded."""
    name = resolve_model(section.name)
    try:
        found = GenerationConfig.from_pretrained(name, revision=section.revision)
    except OSError:
        found = GenerationConfig.from_model_config(AutoConfig.from_pretrained(name, revision=section.revision))
    settings: dict[str, Any] = found.to_diff_dict()
    return settings
