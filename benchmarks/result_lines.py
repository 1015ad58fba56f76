"""Results as JSON that a diff shows well: a line for each row of numbers.

Numbers of a benchmark -> text of its file in results/
"""

import json
from typing import Any


def as_lines(result: Any, indent: str = "") -> str:  # noqa: ANN401 (any JSON)
    """JSON in which a list or an object stands on one line if it holds no other, and else each item on its own.

    Args:
        result: What ``json.dumps`` takes; keys are text.
        indent: Of the line that it begins on.
    """
    items = list(result.values()) if isinstance(result, dict) else result if isinstance(result, list | tuple) else ()
    if not any(isinstance(item, dict | list | tuple) for item in items):
        return json.dumps(result, ensure_ascii=False)
    names = [f"{json.dumps(str(name))}: " for name in result] if isinstance(result, dict) else [""] * len(items)
    inner = f"{indent} "
    lines = [f"{inner}{name}{as_lines(item, inner)}" for name, item in zip(names, items, strict=True)]
    first, last = "{}" if isinstance(result, dict) else "[]"
    return f"{first}\n" + ",\n".join(lines) + f"\n{indent}{last}"
