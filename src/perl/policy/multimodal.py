"""The language model in a checkpoint that also sees or hears, which is all that text needs.

config -> the class its checkpoint was published for; model -> its towers: all beside its language model and head

The whole class is loaded, whatever is trained: under the names of its modules an adapter is saved, and published
checkpoints, PEFT and servers have the same. Its towers are let go where no image comes.
"""

import re
import shutil
from pathlib import Path
from typing import Any

import transformers
from peft import PeftConfig
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel
from transformers.utils.hub import cached_file

_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")


def auto_class(config: PreTrainedConfig) -> Any:  # noqa: ANN401 (a class with from_pretrained and from_config)
    """What loads a checkpoint under the names that it was published with, as TRL chooses too."""
    named = getattr(transformers, (config.architectures or [""])[0], None)
    whole = AutoModelForImageTextToText._model_mapping.get(type(config), None)
    return AutoModelForImageTextToText if named is not None and named is whole else AutoModelForCausalLM


def loader_of(model: nn.Module) -> str | None:
    """The name of the class that loads a model, where it is not AutoModelForCausalLM."""
    sees = bool(towers(model) or dropped_towers(model))
    whole = AutoModelForImageTextToText._model_mapping.get(type(getattr(model, "config", None)), None)
    return AutoModelForImageTextToText.__name__ if sees and whole and isinstance(model, whole) else None


def towers(model: nn.Module) -> list[str]:
    """Names of the parts of a model that text does not need; none of a model of text alone."""
    config = getattr(model, "config", None)
    if not isinstance(model, PreTrainedModel) or config is None or config.get_text_config() is config:
        return []
    inner, language = model.base_model, model.get_decoder()
    parts = dict(inner.named_children())
    if inner is model or language not in parts.values():
        return []
    return [f"{model.base_model_prefix}.{name}" for name, part in parts.items() if part is not language]


def drop_towers(model: PreTrainedModel) -> None:
    """Lets go of a model's towers, and notes their names; text gives the numbers that it gave."""
    names = towers(model)
    for name in names:
        parent, _, last = name.rpartition(".")
        delattr(model.get_submodule(parent), last)
    model.dropped_towers = [*dropped_towers(model), *names]


def dropped_towers(model: nn.Module) -> list[str]:
    """Names of the towers that a model was loaded without."""
    names: list[str] = getattr(model, "dropped_towers", [])
    return names


def freeze_towers(model: nn.Module) -> list[str]:
    """Takes a model's towers out of training; returns the names of what was trained there."""
    trained = []
    for tower in towers(model):
        for name, parameter in model.get_submodule(tower).named_parameters():
            if parameter.requires_grad:
                trained.append(f"{tower}.{name}")
                parameter.requires_grad_(False)
    return trained


def copy_processor(source: str, revision: str | None, folder: Path) -> None:
    """Puts the settings of a checkpoint's processor beside a model that is written, as far as it has them."""
    for name in _PROCESSOR_FILES:
        found = cached_file(
            source,
            name,
            revision=revision,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
            _raise_exceptions_for_gated_repo=False,
        )
        if found is not None and not (folder / name).exists():
            shutil.copyfile(found, folder / name)


def keep_to_language(model: nn.Module, config: PeftConfig) -> None:
    """Keeps an adapter off the towers that its targets would match by the last parts of their names.

    Also where the towers were let go: whoever loads the adapter may hold them. Targets that are a pattern or name a
    part of a tower, and modules that are left out already, are taken as they are given.

    Args:
        model: The base.
        config: Changed if its base has towers.
    """
    targets, asked = getattr(config, "target_modules", None), getattr(config, "exclude_modules", "")
    if asked or not hasattr(config, "exclude_modules") or (isinstance(targets, str) and targets != "all-linear"):
        return
    held = towers(model)
    names = [name.rpartition(".")[2] for name in (*held, *dropped_towers(model))]
    modules = [name for name, _ in model.named_modules()] if held and targets != "all-linear" else []
    for target in targets or () if modules else ():
        named = [name for name in modules if f".{name}".endswith(f".{target}")]
        if named and all(name.startswith(tuple(f"{tower}." for tower in held)) for name in named):
            return
    if names and not any(name in target for target in targets or () for name in names):
        config.exclude_modules = rf"(?:.*\.)?(?:{'|'.join(map(re.escape, names))})(?:\..*)?"
