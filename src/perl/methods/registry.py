"""One row a PEFT method: which settings it reads, with what defaults, and how its PEFT config is built.

PeftSection -> PeftConfig

Adding a method is adding a row. Importing this module imports neither PEFT nor torch, so that a recipe's method name is
checked at once. Knows nothing of models or training.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from perl.errors import Problem, RecipeError, did_you_mean
from perl.recipe.sections import PeftSection

if TYPE_CHECKING:
    from peft import PeftConfig


@dataclass(frozen=True)
class Method:
    """A PEFT method.

    Attributes:
        summary: What it trains, in one line.
        source: The paper it comes from.
        defaults: The settings it reads and their defaults; any other setting is refused, since it would do nothing.
        build: Makes the PEFT config from the settings and the user's further arguments.
    """

    name: str
    summary: str
    source: str
    defaults: Mapping[str, Any]
    build: "Callable[[Mapping[str, Any], Mapping[str, Any]], PeftConfig]"


def _lora_config(settings: Mapping[str, Any], further: Mapping[str, Any]) -> "PeftConfig":
    from peft import LoraConfig

    known = {f.name for f in dataclasses.fields(LoraConfig)}
    for name in further:
        if name not in known:
            raise RecipeError("LoraConfig has no such argument", f"peft.kwargs.{name}", did_you_mean(name, known))
    arguments = {
        "task_type": "CAUSAL_LM",
        "r": settings["rank"],
        "lora_alpha": settings["alpha"],
        "lora_dropout": settings["dropout"],
        "target_modules": settings["target_modules"],
    }
    for name in further:
        if name in arguments:
            raise RecipeError("is set by this package", f"peft.kwargs.{name}", "use the settings of the peft section")
    try:
        return LoraConfig(**arguments, **further)
    except (ValueError, TypeError, ImportError) as error:
        raise RecipeError(f"PEFT refuses: {error}", "peft.kwargs") from error


def _with(**fixed: Any) -> "Callable[[Mapping[str, Any], Mapping[str, Any]], PeftConfig]":  # noqa: ANN401
    """LoRA with some of its arguments fixed by the method."""

    def build(settings: Mapping[str, Any], further: Mapping[str, Any]) -> "PeftConfig":
        for name in fixed.keys() & further.keys():
            raise RecipeError("is what makes this method", f"peft.kwargs.{name}", "choose another peft.method")
        return _lora_config(settings, {**further, **fixed})

    return build


_LORA_DEFAULTS = {"rank": 16, "alpha": 32.0, "dropout": 0.0, "target_modules": "all-linear"}

METHODS: dict[str, Method] = {
    row.name: row
    for row in (
        Method(
            "lora",
            "W + (alpha/rank) B A, with B starting at zero",
            "Hu et al. 2021, arXiv:2106.09685",
            _LORA_DEFAULTS,
            _with(),
        ),
        Method(
            "rslora",
            "LoRA scaled by alpha/sqrt(rank), so that the update does not shrink as the rank grows",
            "Kalajdzievski 2023, arXiv:2312.03732; alpha 8 is LoRA's scale at rank 16",
            {**_LORA_DEFAULTS, "alpha": 8.0},
            _with(use_rslora=True),
        ),
        Method(
            "dora",
            "LoRA for the direction of each column of W, and a trained magnitude",
            "Liu et al. 2024, arXiv:2402.09353",
            _LORA_DEFAULTS,
            _with(use_dora=True),
        ),
    )
}

_UNSET = PeftSection()


def method_problems(sections: Mapping[str, Any]) -> list[tuple[tuple[str, ...], Problem]]:
    """What is wrong with the ``peft`` section that only this table knows.

    Args:
        sections: The recipe's valid sections by name.

    Returns:
        Key path and problem: an unknown method, or a setting that the method would ignore.
    """
    section = sections.get("peft")
    if section is None:
        return []
    if section.method not in METHODS:
        problem = Problem(f"no method {section.method!r}", hint=did_you_mean(section.method, METHODS))
        return [(("peft", "method"), problem)]
    method = METHODS[section.method]
    ignored = [name for name in _settings_of(section) if name not in method.defaults]
    return [(("peft", name), Problem(f"{method.name} has no {name}", hint="leave it out")) for name in ignored]


def resolved_settings(section: PeftSection) -> dict[str, Any]:
    """The settings that the method will use: those asked for, its defaults for the rest.

    Raises:
        RecipeError: There is no such method, or it would ignore a setting.
    """
    for path, problem in method_problems({"peft": section}):
        raise RecipeError(problem.message, ".".join(path), problem.hint)
    return {**METHODS[section.method].defaults, **_settings_of(section)}


def build_config(section: PeftSection) -> "PeftConfig":
    """The PEFT config of a method with these settings.

    Raises:
        RecipeError: There is no such method, it would ignore a setting, or PEFT has no such further argument.
    """
    settings = resolved_settings(section)
    return METHODS[section.method].build(settings, section.kwargs)


def _settings_of(section: PeftSection) -> dict[str, Any]:
    """The settings that differ from saying nothing."""
    return {
        name: getattr(section, name)
        for name in PeftSection.model_fields
        if name not in {"method", "kwargs"} and getattr(section, name) != getattr(_UNSET, name)
    }
