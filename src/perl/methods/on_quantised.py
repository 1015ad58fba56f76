"""What cannot be trained on a base that is quantised as it is loaded, refused by name before there is one.

recipe sections, or an Adaptation -> problems

Imports neither PEFT nor torch.
"""

import importlib.util
from collections.abc import Iterator, Mapping
from typing import Any

from perl.errors import Mistake, ModelError, missing_extra
from perl.methods.registry import METHODS
from perl.methods.settings import Adaptation

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
    if importlib.util.find_spec("bitsandbytes") is None:
        missing = missing_extra("bitsandbytes", "quantised", model.quantization)
        found.append((("model", "quantization"), missing))
    found += _of_adapter(peft) if peft is not None else []
    if rollout is not None and not rollout.capabilities.quantised_base:
        hint = f"transformers, vllm-server with servers of the quantised base, {_WITHOUT}"
        found.append((("rollout", "backend"), Mistake(IN_PROCESS, hint=hint)))
    if rollout is not None and rollout.capabilities.needs_servers and rollout.sync == "merged":
        found.append((("rollout", "sync"), Mistake("a quantised base takes no merged weights", hint="auto or adapter")))
    return found


def check_on_quantised(how: Adaptation) -> None:
    """Refuses a method that cannot stand on a quantised base.

    Raises:
        ModelError: Says why.
    """
    why = how.method.off_quantised
    if not why and getattr(how.config, "modules_to_save", None):
        why = "modules_to_save trains the base's own weights"
    if why:
        raise ModelError(_said(how.method.name, why), "peft.method", f"lora, {_WITHOUT}")


def _of_adapter(peft: Any) -> Iterator[_Located]:  # noqa: ANN401 (the section)
    method = METHODS.get(peft.method) if peft.type is None else None
    if method is not None and method.off_quantised:
        yield ("peft", "method"), Mistake(_said(method.name, method.off_quantised), hint=f"lora, {_WITHOUT}")
    if str(peft.type).upper() == "LN_TUNING":
        why = _said("LN_TUNING", METHODS["ln_tuning"].off_quantised)
        yield ("peft", "type"), Mistake(why, hint=f"LORA, {_WITHOUT}")
    if peft.kwargs.get("modules_to_save"):
        what = "trains the base's own weights, which a quantised base has not"
        yield ("peft", "kwargs", "modules_to_save"), Mistake(what, hint=f"leave it out, {_WITHOUT}")


def _said(method: str, why: str) -> str:
    return f"{method} cannot stand on a quantised base: {why}"
