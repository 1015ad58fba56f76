"""Our own JSON files, which a kill may have cut short, a person may have edited and another version may have written.

text -> plain values, or what is wrong with them

Whatever is wrong is a ``ValueError`` of one line.
"""

import json
from typing import Any, NoReturn

_LARGEST = 2**63
_DEEPEST = 64


def parse_json(text: str | bytes, *, finite: bool = True) -> Any:  # noqa: ANN401 (JSON)
    """The value that a text holds: numbers below 2**63, texts of Unicode, nothing nested without end.

    Args:
        text: Of a file.
        finite: Refuse infinities and NaN, as Python writes them.

    Raises:
        ValueError: It is no such JSON.
    """
    try:
        decoded = text.decode("utf-8") if isinstance(text, bytes) else text
        value = json.loads(decoded, parse_constant=_no_number if finite else None)
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    _check(value, 0, finite=finite)
    return value


def parse_mapping(text: str | bytes, *, finite: bool = True) -> dict[str, Any]:
    """As :func:`parse_json`, of a text that must hold a mapping.

    Raises:
        ValueError: It holds none.
    """
    value = parse_json(text, finite=finite)
    if not isinstance(value, dict):
        raise ValueError("it is not a mapping")
    return value


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")


def _check(value: Any, depth: int, *, finite: bool) -> None:  # noqa: ANN401 (JSON)
    if depth > _DEEPEST:
        raise ValueError("it is nested too deeply")
    if isinstance(value, dict):
        for key, inner in value.items():
            _check_text(key)
            _check(inner, depth + 1, finite=finite)
    elif isinstance(value, list):
        for inner in value:
            _check(inner, depth + 1, finite=finite)
    elif isinstance(value, str):
        _check_text(value)
    elif isinstance(value, int if not finite else int | float) and not abs(value) < _LARGEST:
        raise ValueError("a number in it is too large")


def _check_text(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError("a text in it is not Unicode") from None
