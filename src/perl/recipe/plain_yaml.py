"""Plain YAML: the scalars of YAML 1.2's core schema, no tags, no aliases.

text <-> values

PyYAML reads YAML 1.1, where ``1e-5`` is text, ``no`` is false and ``010`` is 8.
"""

import re
from collections.abc import Mapping
from typing import Any

import yaml

from perl.errors import RecipeError

_DEEPEST = 30
_MOST_DIGITS = 1000  # Python writes none of 4,300 and more
_OPENING = (
    yaml.FlowSequenceStartToken,
    yaml.FlowMappingStartToken,
    yaml.BlockSequenceStartToken,
    yaml.BlockMappingStartToken,
)
_CLOSING = (yaml.FlowSequenceEndToken, yaml.FlowMappingEndToken, yaml.BlockEndToken)


class PlainLoader(yaml.SafeLoader):
    """Safe YAML whose plain scalars are those of YAML 1.2's core schema."""

    yaml_implicit_resolvers = {}  # noqa: RUF012 (as in PyYAML)


class PlainDumper(yaml.SafeDumper):
    """Quotes what a reader of YAML 1.1 or 1.2 would take for another value."""

    yaml_implicit_resolvers = {k: list(v) for k, v in yaml.SafeDumper.yaml_implicit_resolvers.items()}  # noqa: RUF012


def _whole_number(loader: PlainLoader, node: yaml.ScalarNode) -> int:
    text = str(loader.construct_scalar(node))
    if len(text) > _MOST_DIGITS:
        raise ValueError(f"a number of more than {_MOST_DIGITS:,} digits")
    return int(text, 0) if text.startswith(("0o", "0x")) else int(text)


for _tag, _pattern, _first in (
    ("null", r"^(?:null|Null|NULL|~|)$", ["n", "N", "~", ""]),
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", list("tTfF")),
    ("int", r"^(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$", list("-+0123456789")),
    (
        "float",
        r"^[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?$"
        r"|^[-+]?\.(?:inf|Inf|INF)$|^\.(?:nan|NaN|NAN)$",
        list("-+0123456789."),
    ),
):
    for _class in (PlainLoader, PlainDumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), _first)
PlainLoader.add_constructor("tag:yaml.org,2002:int", _whole_number)


def dump(values: Mapping[str, Any]) -> str:
    """Values as YAML that reads back as the same values."""
    return yaml.dump(values, Dumper=PlainDumper, sort_keys=False, allow_unicode=True)


def plain_value(text: str) -> Any:  # noqa: ANN401 (a YAML value)
    """The value that a text stands for.

    Raises:
        yaml.YAMLError: It is not plain YAML.
        ValueError: It holds a number of very many digits.
    """
    return yaml.load(text, Loader=PlainLoader)  # noqa: S506 (a SafeLoader with fewer types)


def refuse_tags(text: str, file: str) -> None:
    """Refuses tags and aliases, which are more than plain values, and lists and mappings within each other without end.

    Raises:
        RecipeError: With the line.
    """
    depth = 0
    for token in yaml.scan(text, Loader=PlainLoader):
        where = f"{file}:{token.start_mark.line + 1}"
        depth += isinstance(token, _OPENING)
        depth -= isinstance(token, _CLOSING)
        if depth > _DEEPEST:  # PyYAML's time grows with the square of the depth
            raise RecipeError(f"not plain YAML: nested too deeply, {_DEEPEST} levels at most", where)
        if isinstance(token, yaml.TagToken):
            raise RecipeError("not plain YAML: a tag", where, "write the value itself")
        if isinstance(token, yaml.AliasToken):
            raise RecipeError("not plain YAML: an alias", where, "to share settings use `extends`")
