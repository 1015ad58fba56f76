"""What ``lighteval custom`` is told of a model: a name, and behind commas settings.

``user/adapter,temperature=1,seed=3`` -> adapter, base, EvalSettings
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, get_args, get_type_hints

from perl.errors import Mistake, PerlError, did_you_mean, raise_all
from perl.evaluation.request import EvalSettings

OF_THE_PROTOCOL = ("temperature", "top_p", "max_new_tokens", "system_prompt", "seed")
"""Settings that a preset has too."""
_NUMBERS: dict[str, type[float] | type[int]] = {
    "temperature": float,
    "top_p": float,
    "max_new_tokens": int,
    "seed": int,
    "batch_size": int,
}
_CHOSEN = ("device", "dtype", "quantization")
_MODEL = "MODEL"
# What other commands call its parts.
_PLACES = {"model.name": "base", "model.quantization": "quantization", "--adapter": "", "peft.adapter": ""}


def parse_model_name(text: str) -> tuple[str | None, str | None, EvalSettings]:
    """``user/adapter,temperature=1,seed=3`` -> adapter, base and settings.

    Raises:
        PerlError: With every setting that is unknown or cannot be read.
    """
    first, *others = text.split(",")
    adapter, given = (None, [first, *others]) if "=" in first else (first, others)
    known = ("preset", *OF_THE_PROTOCOL, *_CHOSEN, "batch_size")
    base: str | None = None
    found: dict[str, Any] = {}
    mistakes: list[Mistake] = []
    for one in given:
        name, _, value = one.partition("=")
        if name == "base":
            base = value
        elif name not in known:
            mistakes.append(Mistake(f"unknown setting {name!r}", _MODEL, did_you_mean(name, ("base", *known))))
        else:
            try:
                found[name] = _value(name, value)
            except ValueError as error:
                mistakes.append(Mistake(str(error), f"{_MODEL}: {name}"))
    raise_all(PerlError, mistakes)
    return adapter, base, EvalSettings(**found)


def _value(name: str, text: str) -> float | int | str:
    """A setting's value.

    Raises:
        ValueError: It is none, with what it may be.
    """
    if name in _NUMBERS:
        try:
            return _NUMBERS[name](text)
        except ValueError:
            raise ValueError(f"{text!r} is not a number") from None
    if name in _CHOSEN and text not in (choices := get_args(get_type_hints(EvalSettings)[name])):
        raise ValueError(f"{text!r} is none of {', '.join(map(str, choices))}")
    return text


@contextmanager
def named_as_model() -> Iterator[None]:
    """A mistake names the part of the model's name where other commands would name an option."""
    try:
        yield
    except PerlError as error:
        raise error.moved(_part) from error


def _part(where: str) -> str:
    part = _PLACES.get(where, where.removeprefix("--").replace("-", "_") if where.startswith("--") else None)
    return where if part is None else f"{_MODEL}: {part}" if part else _MODEL
