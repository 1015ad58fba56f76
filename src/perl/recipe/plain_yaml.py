"""Plain YAML: the scalars of YAML 1.2's core schema, no tags, no aliases.

text <-> values

PyYAML reads YAML 1.1, where ``1e-5`` is text, ``no`` is false and ``010`` is 8. Knows nothing of recipes.
"""

import re
from collections.abc import Mapping
from typing import Any

import yaml

from perl.errors import RecipeError


class PlainLoader(yaml.SafeLoader):
    """Safe YAML whose plain scalars are those of YAML 1.2's core schema."""

    yaml_implicit_resolvers = {}  # noqa: RUF012 (as in PyYAML)


class PlainDumper(yaml.SafeDumper):
    """Quotes what a reader of YAML 1.1 or 1.2 would take for another value."""

    yaml_implicit_resolvers = {k: list(v) for k, v in yaml.SafeDumper.yaml_implicit_resolvers.items()}  # noqa: RUF012


def _whole_number(loader: PlainLoader, node: yaml.ScalarNode) -> int:
    text = str(loader.construct_scalar(node))
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
    """
    return yaml.load(text, Loader=PlainLoader)  # noqa: S506 (a SafeLoader with fewer types)


def refuse_tags(text: str, file: str) -> None:
    """Refuses tags and aliases, which are more than plain values.

    Raises:
        RecipeError: With the line.
    """
    for token in yaml.scan(text, Loader=PlainLoader):
        where = f"{file}:{token.start_mark.line + 1}"
        if isinstance(token, yaml.TagToken):
            raise RecipeError("not plain YAML: a tag", where, "write the value itself")
        if isinstance(token, yaml.AliasToken):
            raise RecipeError("not plain YAML: an alias", where, "to share settings use `extends`")
