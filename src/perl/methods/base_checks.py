"""What cannot be trained on a base that is quantised as it is loaded, or in shards over processes (FSDP2).

recipe sections, or an Adaptation -> problems, before there is a base

Imports neither PEFT nor torch.
"""

from collections.abc import Mapping
from typing import Any

from perl.errors import Mistake, ModelError, RecipeError, missing_extra
from perl.methods.registry import METHODS, Method
from perl.methods.settings import Adaptation
from perl.recipe.engine_section import processes_of_copy
from perl.recipe.quantisations import EXTRA, QUANTISATIONS, quantised_base
from perl.recipe.recipe import launched, processes_of_node, world_size

_Located = tuple[tuple[str, ...], Mistake]
_WITHOUT = "or leave model.quantization out"
IN_PROCESS = "vLLM in this process holds the ordinary base, and rollouts would be another policy's than the trained one"
"""Why it cannot sample for a quantised one."""
_UNSHARDED = "engine.strategy ddp"
# Keys of ``train`` by which transformers and DeepSpeed share the work in other ways.
_OTHER_WAYS = ("fsdp", "fsdp_config", "deepspeed")


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
    if peft is not None:
        method = METHODS.get(peft.method) if peft.type is None else None
        why = method.off_quantised(model.quantization) if method is not None else ""
        if method is not None and why:
            mistake = Mistake(_said(method.name, why, model.quantization), hint=_instead(method, model.quantization))
            found.append((("peft", "method"), mistake))
        if str(peft.type).upper() == "LN_TUNING":
            why = _said("LN_TUNING", METHODS["ln_tuning"].off_quantised(model.quantization), model.quantization)
            found.append((("peft", "type"), Mistake(why, hint=f"LORA, {_WITHOUT}")))
        if peft.kwargs.get("modules_to_save"):
            what = "trains the base's own weights, which a quantised base has not"
            found.append((("peft", "kwargs", "modules_to_save"), Mistake(what, hint=f"leave it out, {_WITHOUT}")))
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


def _said(method: str, why: str, quantization: str) -> str:
    return f"{method} cannot stand on a base quantised to {quantization}: {why}"


def _instead(method: Method, quantization: str) -> str:
    """Another method, or another way to quantise that this one stands on."""
    ways = [name for name in QUANTISATIONS if name != quantization and not method.off_quantised(name)]
    others = f"model.quantization: {' or '.join(ways)}, " if ways else ""
    return f"lora, {others}{_WITHOUT}"


def strategy_mistakes(sections: Mapping[str, Any]) -> list[_Located]:
    """What a recipe for several processes asks for beside ``engine.strategy: fsdp2`` and cannot have.

    Args:
        sections: The recipe's valid sections by name.

    Returns:
        Key path and mistake.
    """
    engine, peft, model, train = (sections.get(name) for name in ("engine", "peft", "model", "train"))
    if engine is None or engine.strategy != "fsdp2":
        return []
    processes = world_size() if launched() else engine.processes or 1
    if processes == 1:  # which holds the whole base
        return []
    found: list[_Located] = []
    try:
        processes_of_copy(engine.shards, processes, processes_of_node() if launched() else processes)
    except RecipeError as error:
        found.append((("engine", "shards"), error.mistakes[0]))
    if peft is not None:
        method = METHODS.get("ln_tuning" if str(peft.type).upper() == "LN_TUNING" else peft.method)
        if method is not None and method.trains_the_bases and (peft.type is None or method.name == "ln_tuning"):
            what = f"{method.name} trains the base's own tensors, which are in shards under fsdp2"
            found.append((("peft", "method" if peft.type is None else "type"), Mistake(what, hint=_UNSHARDED)))
        what = "trains parts of the base, which is in shards under fsdp2"
        asked = {"modules_to_save", "trainable_token_indices"} & {name for name, given in peft.kwargs.items() if given}
        mistake = Mistake(what, hint=f"leave it out, or {_UNSHARDED}")
        found += [(("peft", "kwargs", key), mistake) for key in sorted(asked)]
    if model is not None and model.quantization is not None:
        what = f"{quantised_base(model.quantization)} cannot be in shards, which fsdp2 makes of it"
        found.append((("model", "quantization"), Mistake(what, hint=f"leave it out, or {_UNSHARDED}")))
    for key in _OTHER_WAYS:
        if (train or {}).get(key):
            found.append((("train", key), Mistake("is another way than engine.strategy fsdp2", hint="leave it out")))
    return found
