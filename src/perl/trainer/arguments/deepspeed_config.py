"""Which of DeepSpeed's stages a run uses, from its strategy or from a configuration that the user has.

strategy, deepspeed argument -> the strategy, and the configuration for transformers

Knows nothing of models; imports DeepSpeed only where it is used.
"""

import copy
import importlib
import importlib.util
import json
from pathlib import Path
from typing import Any

from transformers import TrainingArguments

from perl.errors import MissingExtraError, RecipeError, missing_extra, raise_all

ZERO2 = "zero2"
# The rest follows from the trainer's arguments.
_CONFIG: dict[str, Any] = {
    "zero_optimization": {"stage": 2},
    "train_micro_batch_size_per_gpu": "auto",
    "train_batch_size": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
}
# What a configuration may say that is said elsewhere here.
_ELSEWHERE = {"optimizer": "optim and learning_rate", "scheduler": "lr_scheduler_type and warmup_steps"}
_COMPILED_EXCHANGE = "deepspeed_shm_comm"


def chosen_deepspeed(strategy: str, given: Any, *, processes: int) -> tuple[str, Any]:  # noqa: ANN401 (transformers')
    """The strategy of a run and the configuration that transformers is given, None without DeepSpeed.

    Args:
        strategy: As asked for; DDP where nobody asked.
        given: The ``deepspeed`` argument: None, a mapping, its JSON text, or the path of a file.
        processes: Of the run; a single one keeps the whole optimizer.

    Raises:
        RecipeError: The configuration cannot be read, is of another stage than 1 or 2, or contradicts the strategy.
        MissingExtraError: DeepSpeed is not installed.
    """
    if not given and (strategy != ZERO2 or processes == 1):
        return strategy, None
    config = _read(given) if given else _CONFIG
    check_stage(config.get("zero_optimization", {}).get("stage", 0))
    if strategy not in ("ddp", ZERO2):
        raise RecipeError(f"a configuration of DeepSpeed is not {strategy}", "deepspeed", "leave it out")
    for section, ours in _ELSEWHERE.items():
        if section in config:
            raise RecipeError(f"its section {section} would be another one than the trainer's", "deepspeed", ours)
    if not importlib.util.find_spec("deepspeed"):
        raise_all(MissingExtraError, [missing_extra("deepspeed", "deepspeed", "strategy zero2")])
    return ZERO2, given or copy.deepcopy(_CONFIG)


def check_stage(stage: int) -> None:
    """Refuses a stage that divides the parameters, and none at all.

    Raises:
        RecipeError: Says which stages there are.
    """
    if stage == 3:
        what = "ZeRO-3 divides the parameters of adapters too, which no method here is proven with"
        raise RecipeError(what, "deepspeed", "strategy: fsdp2, which shards the frozen base")
    if stage not in (1, 2):
        raise RecipeError(f"stage {stage} of ZeRO shares nothing", "deepspeed", "stage 2, or leave it out")


def check_agreement(args: TrainingArguments) -> None:
    """Refuses a configuration that contradicts the trainer's arguments, which transformers finds when it trains.

    Raises:
        RecipeError: Names both values of the first one.
    """
    found = getattr(getattr(args, "hf_deepspeed_config", None), "mismatches", [])
    if found:
        raise RecipeError(found[0].lstrip("- "), "deepspeed", 'write "auto" there')


def exchange_by_gloo() -> None:
    """Has processes on CPUs exchange by gloo, as they do with DDP, in place of an exchange that is compiled at start.

    Compiling takes minutes, in each process of a first run, and needs a compiler; what it saves is time of an exchange
    that is small beside a step on a CPU.
    """
    importlib.import_module("deepspeed.ops").__compatible_ops__[_COMPILED_EXCHANGE] = False


def _read(given: Any) -> dict[str, Any]:  # noqa: ANN401 (transformers')
    """The configuration as a mapping.

    Raises:
        RecipeError: It cannot be read.
    """
    if isinstance(given, dict):
        return given
    try:
        text = str(given)
        config = json.loads(text if text.lstrip().startswith("{") else Path(text).expanduser().read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise RecipeError(f"{given} cannot be read: {error}", "deepspeed", "a JSON file of DeepSpeed") from error
    if not isinstance(config, dict):
        raise RecipeError(f"{given} is no configuration of DeepSpeed", "deepspeed", "a JSON object")
    return config
