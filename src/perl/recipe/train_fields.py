"""Names, types and sentences of every training argument, read from sources without importing them.

sources of transformers, TRL and perl.trainer.config -> TrainField

A recipe's ``train`` section takes any field of ``PeftRLConfig``. Importing that class costs seconds (torch,
transformers, TRL); a mistyped key must be refused at once and against the versions that are installed. Hence the
dataclasses are parsed, not imported.
"""

import ast
import functools
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, create_model

from perl.algorithms.estimators import ADVANTAGES

# From the base class to ours: a later class overrides the fields of an earlier one.
_CLASSES = (
    ("transformers", "training_args.py", "TrainingArguments"),
    ("trl", "trainer/base_config.py", "_BaseConfig"),
    ("trl", "trainer/grpo_config.py", "GRPOConfig"),
    ("perl", "trainer/config.py", "PeftRLConfig"),
)
REFERENCE_PATTERN = r"base|initial|rolling:[1-9]\d*"
"""What ``train.reference`` may say."""


def _reference(spec: str) -> str:
    if re.fullmatch(REFERENCE_PATTERN, spec) is None:
        raise ValueError(f"must be base, initial, or rolling:N with N >= 1, not {spec!r}")
    return spec


CHOICES: dict[str, tuple[str, ...]] = {
    "scale_rewards": ("group", "batch", "none"),
    "importance_sampling_level": ("token", "sequence"),
    "vllm_importance_sampling_mode": ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
    "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
    "advantage_estimator": tuple(ADVANTAGES),
    "kl_estimator": ("k1", "k2", "k3"),
    "dppo_divergence": ("tv", "kl"),
}
"""Arguments that are one of these words, which the sources state in their text only."""

# Bounds that the sources state in words only. Whatever else is impossible, PeftRLConfig refuses before a model loads.
_BATCH = ("prompts_per_step", "per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation")
_AT_LEAST_ONE, _COUNT = Annotated[int, Field(ge=1)], Annotated[int, Field(ge=0)]
_POSITIVE, _NOT_NEGATIVE = Annotated[float, Field(gt=0, allow_inf_nan=False)], Annotated[float, Field(ge=0)]
_SHARE = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
_NARROWED: dict[str, Any] = {
    # of most estimators two generations
    **dict.fromkeys(("num_generations", "max_steps", "critic_rank", "num_iterations"), _AT_LEAST_ONE),
    **dict.fromkeys((*_BATCH, "save_total_limit"), _AT_LEAST_ONE | None),
    **dict.fromkeys(("critic_warmup_steps", "flat_reward_steps", "seed"), _COUNT),
    **dict.fromkeys(("num_train_epochs", "logging_steps", "save_steps", "cov_kl_weight"), _POSITIVE),
    **dict.fromkeys(("learning_rate", "value_clip"), _POSITIVE | None),
    **dict.fromkeys(("warmup_steps", "weight_decay", "max_grad_norm", "beta", "epsilon"), _NOT_NEGATIVE),
    **dict.fromkeys(("dppo_threshold", "epsilon_high"), _NOT_NEGATIVE | None),
    **dict.fromkeys(("gae_gamma", "gae_lambda"), _SHARE),
    "train_tokens_per_microbatch": _COUNT | None,
    "entropy_weight": Annotated[float, Field(allow_inf_nan=False)],
    "critic_learning_rate": Annotated[float, Field(ge=0, allow_inf_nan=False)] | None,
    "cov_fraction": Annotated[float, Field(gt=0, le=1)],
    "reference": Annotated[str, AfterValidator(_reference)] | None,
    **{name: Literal[words] for name, words in CHOICES.items()},
    "scale_rewards": Literal[CHOICES["scale_rewards"]] | bool,
}
# Fields that a recipe must not set: what they would do to a run, and where to say it instead.
REFUSED: dict[str, str] = {
    "auto_find_batch_size": "a smaller batch would break the prompt groups; set train.per_device_train_batch_size",
    "disable_tqdm": "use --quiet",
    "hub_token": "a token must not stand in a file that is saved with the run; use `hf auth login`",
    "model_init_kwargs": "the model section holds them",
    "process_reward_kwargs": "write rewards: {process_reward: {weight: 0.5, args: {model: ...}}}",
    "process_reward_weight": "write rewards: {process_reward: {weight: 0.5, args: {model: ...}}}",
    "push_to_hub": "hub: {repo_id: user/name, push: end} does it",
    "remove_unused_columns": "rewards need the columns, the gold answer among them",
    "resume_from_checkpoint": "run the same command again, it resumes by itself",
    "reward_weights": "write each weight in rewards, as {accuracy: 1.0, format: 0.2}",
    "save_only_model": "a checkpoint without the optimizer's state cannot be resumed exactly",
    "sync_ref_model": "write train.reference: rolling:N",
    "trust_remote_code": "code from a model's repository is not executed",
    "use_cpu": "write engine.device: cpu",
    "use_vllm": "write rollout.backend: vllm",
    "vllm_mode": "write rollout.backend: vllm or vllm-server",
    **{f"vllm_server_{name}": "write rollout.servers: [URL, ...]" for name in ("base_url", "host", "port")},
    "vllm_server_timeout": "write rollout.server_timeout",
}
_PLAIN_TYPES = {"int": int, "float": float, "bool": bool, "str": str, "dict": dict, "list": list}


@dataclass(frozen=True)
class TrainField:
    """One training argument.

    Attributes:
        annotation: Its type; enumerations of transformers appear as ``str``, foreign classes as ``Any``.
        help: Its sentence, empty if the source builds it at run time.
        default: Its value where nobody sets it; None also if the source computes it.
        computed: Whether it does.
    """

    name: str
    annotation: Any
    help: str
    default: Any = None
    computed: bool = False


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
                fields[name] = TrainField(name, _type_of(node.annotation), _help_of(value), default, computed=not known)
    return fields


def train_annotation(name: str) -> Any:  # noqa: ANN401 (a type or a union of types)
    """The type that a recipe's value of an argument is checked against."""
    return _NARROWED.get(name, train_fields()[name].annotation)


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
    """The constant that a field is set to, or the constant ``default`` of a ``field(...)``, and whether it is one."""
    if isinstance(node, ast.Call):
        given = next((keyword.value for keyword in node.keywords if keyword.arg == "default"), None)
        if given is None:
            return None, False
        node = given
    try:
        return ast.literal_eval(node), True
    except ValueError:
        return None, False


def _help_of(node: ast.expr) -> str:
    """The constant ``help`` of a ``field(metadata={...})``."""
    for inner in ast.walk(node):
        for key, value in zip(inner.keys, inner.values, strict=True) if isinstance(inner, ast.Dict) else ():
            if isinstance(key, ast.Constant) and key.value == "help" and isinstance(value, ast.Constant):
                return str(value.value)
    return ""
