"""What cannot be trained on a base that is in shards over the processes of a run (FSDP2), refused before there is one.

recipe sections -> mistakes

Imports neither PEFT nor torch.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from perl.errors import Mistake
from perl.methods.registry import METHODS
from perl.recipe.quantisations import quantised_base
from perl.recipe.recipe import launched, world_size

_Located = tuple[tuple[str, ...], Mistake]
_HINT = "engine.strategy ddp or zero2"
# Keys of ``train`` by which transformers and DeepSpeed share the work in other ways.
_OTHER_WAYS = ("fsdp", "fsdp_config", "deepspeed")


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
    if (world_size() if launched() else engine.processes or 1) == 1:  # which holds the whole base
        return []
    found = list(_of_adapter(peft)) if peft is not None else []
    if model is not None and model.quantization is not None:
        what = f"{quantised_base(model.quantization)} cannot be in shards, which fsdp2 makes of it"
        found.append((("model", "quantization"), Mistake(what, hint=f"leave it out, or {_HINT}")))
    for key in _OTHER_WAYS:
        if (train or {}).get(key):
            found.append((("train", key), Mistake("is another way than engine.strategy fsdp2", hint="leave it out")))
    return found


def _of_adapter(peft: Any) -> Iterator[_Located]:  # noqa: ANN401 (the section)
    method = METHODS.get("ln_tuning" if str(peft.type).upper() == "LN_TUNING" else peft.method)
    if method is not None and method.trains_the_bases and (peft.type is None or method.name == "ln_tuning"):
        key = "method" if peft.type is None else "type"
        what = f"{method.name} trains the base's own tensors, which are in shards under fsdp2"
        yield ("peft", key), Mistake(what, hint=_HINT)
    for key in ("modules_to_save", "trainable_token_indices"):
        if (peft.kwargs or {}).get(key):
            what = "trains parts of the base, which is in shards under fsdp2"
            yield ("peft", "kwargs", key), Mistake(what, hint=f"leave it out, or {_HINT}")
