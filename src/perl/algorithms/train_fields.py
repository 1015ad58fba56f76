"""Every training argument: name, type, bounds, default and sentence, read from sources without importing them.

sources of transformers, TRL and perl.trainer.arguments.config -> TrainField

A recipe's ``train`` section takes any field of ``PeftRLConfig``. Importing that class costs seconds (torch,
transformers, TRL); a mistyped key must be refused at once and against the versions that are installed. Hence the
dataclasses are parsed, not imported. Our own fields state all there is to know of them in their line of
``trainer/arguments/config.py``; what TRL and transformers state in words only, and words of a table, are in
``_NARROWED``.
"""

import ast
import functools
import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict, Union

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, create_model

from perl.algorithms.estimators import ADVANTAGES

# From the base class to ours: a later class overrides the fields of an earlier one.
_CLASSES = (
    ("transformers", "training_args.py", "TrainingArguments"),
    ("trl", "trainer/base_config.py", "_BaseConfig"),
    ("trl", "trainer/grpo_config.py", "GRPOConfig"),
    ("perl", "trainer/arguments/config.py", "PeftRLConfig"),
)
REFERENCE_PATTERN = r"base|initial|rolling:[1-9]\d*"
"""What ``train.reference`` may say."""


def _reference(spec: str) -> str:
    if re.fullmatch(REFERENCE_PATTERN, spec) is None:
        raise ValueError(f"must be base, initial, or rolling:N with N >= 1, not {spec!r}")
    return spec


# Bounds and words that the sources state in their text only. Whatever else is impossible, PeftRLConfig refuses before a
# model loads.
_WORDS: dict[str, tuple[str, ...]] = {
    "scale_rewards": ("group", "batch", "none"),
    "importance_sampling_level": ("token", "sequence"),
    "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
    "advantage_estimator": tuple(ADVANTAGES),
}
_BATCH = ("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation")
_AT_LEAST_ONE, _COUNT = Annotated[int, Field(ge=1)], Annotated[int, Field(ge=0)]
_POSITIVE, _NOT_NEGATIVE = Annotated[float, Field(gt=0, allow_inf_nan=False)], Annotated[float, Field(ge=0)]
_NARROWED: dict[str, Any] = {
    # of most estimators two generations
    **dict.fromkeys(("num_generations", "max_steps", "num_iterations"), _AT_LEAST_ONE),
    **dict.fromkeys((*_BATCH, "save_total_limit"), _AT_LEAST_ONE | None),
    **dict.fromkeys(("num_train_epochs", "logging_steps", "save_steps"), _POSITIVE),
    **dict.fromkeys(("warmup_steps", "weight_decay", "max_grad_norm", "beta", "epsilon"), _NOT_NEGATIVE),
    "seed": _COUNT,
    "learning_rate": _POSITIVE | None,
    "epsilon_high": _NOT_NEGATIVE | None,
    "reference": Annotated[str, AfterValidator(_reference)] | None,
    **{name: Literal[words] for name, words in _WORDS.items()},
    "scale_rewards": Literal[_WORDS["scale_rewards"]] | bool,
}
_PLAIN_TYPES = {"int": int, "float": float, "bool": bool, "str": str, "dict": dict, "list": list}


class Rules(TypedDict, total=False):
    """What the line of a field of ours says besides: bounds, and these.

    Attributes:
        words: Those that it is one of.
        part: Of what it is a part: the ``objective`` of any loss, or a ``critic``.
    """

    ge: float
    gt: float
    le: float
    finite: bool
    words: tuple[str, ...]
    part: str


@dataclass(frozen=True)
class TrainField:
    """One training argument.

    Attributes:
        annotation: Its type; enumerations of transformers appear as ``str``, foreign classes as ``Any``.
        help: Its sentence, empty if the source builds it at run time.
        default: Its value where nobody sets it; None also if the source computes it.
        computed: Whether it does.
        rules: Of our own fields, what else their line says.
        ours: Whether TRL's arguments lack it.
    """

    name: str
    annotation: Any
    help: str
    default: Any = None
    computed: bool = False
    rules: Mapping[str, Any] = field(default_factory=dict)
    ours: bool = False


@functools.cache
def train_fields() -> dict[str, TrainField]:
    """Every field of ``PeftRLConfig``, inherited ones included, in the order of definition."""
    fields: dict[str, TrainField] = {}
    for package, file, class_name in _CLASSES:
        for node in _dataclass_body(package, file, class_name):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
                if node.target.id.startswith("_"):
                    continue
                name, value = node.target.id, node.value
                default, known = _default_of(value)
                # What own(default, help, ...) says besides.
                keywords = value.keywords if isinstance(value, ast.Call) and _is_own(value) else []
                rules = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in keywords}
                ours = package == "perl" and name not in fields
                kind = _type_of(node.annotation)
                fields[name] = TrainField(name, kind, _help_of(value), default, not known, rules, ours)
    return fields


def defaults_of(part: str) -> dict[str, Any]:
    """The default of each of our own fields that are part of something, in the order of definition."""
    return {name: field.default for name, field in train_fields().items() if field.rules.get("part") == part}


def words_of_fields() -> dict[str, tuple[str, ...]]:
    """The fields that are one of several words -> these."""
    own = {name: field.rules["words"] for name, field in train_fields().items() if "words" in field.rules}
    return {**_WORDS, **own}


def train_annotation(name: str) -> Any:  # noqa: ANN401 (a type or a union of types)
    """The type that a recipe's value of an argument is checked against."""
    known = train_fields()[name]
    if name in _NARROWED or not known.rules.keys() & {"ge", "gt", "le", "finite", "words"}:
        return _NARROWED.get(name, known.annotation)
    if "words" in known.rules:
        return Literal[known.rules["words"]]
    optional = type(None) in getattr(known.annotation, "__args__", ())
    kind: Any = known.annotation.__args__[0] if optional else known.annotation
    bounds = {rule: bound for rule, bound in known.rules.items() if rule in ("ge", "gt", "le")}
    finite = Field(**bounds) if kind is int else Field(**bounds, allow_inf_nan=False)
    return Annotated[kind, finite] | None if optional else Annotated[kind, finite]


@functools.lru_cache
def train_model(names: tuple[str, ...]) -> type[BaseModel]:
    """A pydantic model of all training arguments that checks those given and refuses any other name."""
    definitions: dict[str, Any] = {
        name: (train_annotation(name) if name in names else Any, None) for name in train_fields()
    }
    return create_model("TrainSection", __config__=ConfigDict(extra="forbid", strict=True), **definitions)


def _dataclass_body(package: str, file: str, class_name: str) -> list[ast.stmt]:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise ImportError(f"{package} is not installed")
    source = Path(spec.origin).parent / file
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name == class_name:
            return node.body
    raise ImportError(f"{source} defines no {class_name}: this version of {package} is not supported")


def _type_of(node: ast.expr) -> Any:  # noqa: ANN401 (a type or a union of types)
    """The annotation as a type that pydantic can check."""
    match node:
        case ast.Name(id=name):
            # Not a plain type: an enumeration (given by its string value) or a class that YAML cannot write.
            return _PLAIN_TYPES.get(name, Any if name == "Any" or name.endswith("Config") else str)
        case ast.Constant(value=None):
            return None
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return Union[_type_of(left), _type_of(right)]  # noqa: UP007 (the operands are values here)
        case ast.Subscript(value=ast.Name(id="list"), slice=item):
            return list[_type_of(item)]  # type: ignore[misc]
        case ast.Subscript(value=ast.Name(id="dict"), slice=ast.Tuple(elts=[key, value])):
            return dict[_type_of(key), _type_of(value)]  # type: ignore[misc]
        case ast.Subscript(value=ast.Name(id="Literal"), slice=ast.Constant(value=value)):
            return Literal[value]
        case ast.Subscript(value=ast.Name(id="Literal"), slice=ast.Tuple(elts=values)):
            return Literal[tuple(ast.literal_eval(value) for value in values)]
        case _:
            return Any


def _default_of(node: ast.expr) -> tuple[Any, bool]:
    """The constant that a field is set to, or that is the default of a call, and whether it is one."""
    if isinstance(node, ast.Call):
        given = [keyword.value for keyword in node.keywords if keyword.arg == "default"]
        if not given and not _is_own(node):
            return None, False
        node = given[0] if given else node.args[0]
    try:
        return ast.literal_eval(node), True
    except ValueError:
        return None, False


def _is_own(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "own"


def _help_of(node: ast.expr) -> str:
    """The constant sentence of ``own(default, help)``, or ``help`` of a ``field(metadata={...})``."""
    if isinstance(node, ast.Call) and _is_own(node):
        return str(ast.literal_eval(node.args[1]))
    for inner in ast.walk(node):
        for key, value in zip(inner.keys, inner.values, strict=True) if isinstance(inner, ast.Dict) else ():
            if isinstance(key, ast.Constant) and key.value == "help" and isinstance(value, ast.Constant):
                return str(value.value)
    return ""
