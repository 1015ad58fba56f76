"""What cannot be trained on a base that is quantised as it is loaded, refused by name before there is one.

recipe sections, or an Adaptation -> problems

Imports neither PEFT nor torch.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from perl.errors import Mistake, ModelError, missing_extra
from perl.methods.registry import METHODS, Method
from perl.methods.settings import Adaptation
from perl.recipe.quantisations import EXTRA, QUANTISATIONS

_Located = tuple[tuple[str, ...], Mistake]
_WITHOUT = "or leave model.quantization out"
IN_PROCESS = "vLLM in this process holds the ordinary base, and rollouts would be another policy's than the trained one"
"""Why it cannot sample for a quantised one."""


def quantization_mistakes(sections: Mapping[str, Any]) -> list[_Located]:
    """What a recipe asks for beside ``model.quantization`` and cannot have.

    Args:
        sections: The recipe's valid sections by name.

    Returns:
        Key path and problem.
    """
    model, peft, rollout = (sections.get(name) for name in ("model", "peft", "rollout"))
    if model is None or model.quantization is None:
        return []
    found: list[_Located] = []
    package = QUANTISATIONS[model.quantization].package
    if not package.installed:
        missing = missing_extra(package.pip, EXTRA, model.quantization)
        found.append((("model", "quantization"), missing))
    found += _of_adapter(peft, model.quantization) if peft is not None else []
    if rollout is not None and not rollout.capabilities.quantised_base:
        hint = f"transformers, vllm-server with servers of the quantised base, {_WITHOUT}"
        found.append((("rollout", "backend"), Mistake(IN_PROCESS, hint=hint)))
    if rollout is not None and rollout.capabilities.needs_servers and rollout.sync == "merged":
        found.append((("rollout", "sync"), Mistake("a quantised base takes no merged weights", hint="auto or adapter")))
    return found


def check_on_quantised(how: Adaptation, quantization: str) -> None:
    """Refuses a method that cannot stand on a quantised base.

    Args:
        how: How the base is adapted.
        quantization: A name of ``model.quantization``, or what a base was quantised to otherwise.

    Raises:
        ModelError: Says why.
    """
    why = how.method.off_quantised(quantization)
    if not why and getattr(how.config, "modules_to_save", None):
        why = "modules_to_save trains the base's own weights"
    if why:
        raise ModelError(_said(how.method.name, why, quantization), "peft.method", _instead(how.method, quantization))


def _of_adapter(peft: Any, quantization: str) -> Iterator[_Located]:  # noqa: ANN401 (the section)
    method = METHODS.get(peft.method) if peft.type is None else None
    why = method.off_quantised(quantization) if method is not None else ""
    if method is not None and why:
        yield ("peft", "method"), Mistake(_said(method.name, why, quantization), hint=_instead(method, quantization))
    if str(peft.type).upper() == "LN_TUNING":
        why = _said("LN_TUNING", METHODS["ln_tuning"].off_quantised(quantization), quantization)
        yield ("peft", "type"), Mistake(why, hint=f"LORA, {_WITHOUT}")
    if peft.kwargs.get("modules_to_save"):
        what = "trains the base's own weights, which a quantised base has not"
        yield ("peft", "kwargs", "modules_to_save"), Mistake(what, hint=f"leave it out, {_WITHOUT}")


def _said(method: str, why: str, quantization: str) -> str:
    return f"{method} cannot stand on a base quantised to {quantization}: {why}"


def _instead(method: Method, quantization: str) -> str:
    """Another method, or another way to quantise that this one stands on."""
    ways = [name for name in QUANTISATIONS if name != quantization and not method.off_quantised(name)]
    others = f"model.quantization: {' or '.join(ways)}, " if ways else ""
    return f"lora, {others}{_WITHOUT}"
