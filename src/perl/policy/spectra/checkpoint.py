"""Tensors of a model's checkpoint by name, read from its safetensors one at a time.

base -> Checkpoint -> one tensor

Nothing is loaded but the tensor that is asked for, so that a model needs no more memory than its largest matrix.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from perl.errors import ModelError, first_line
from perl.policy.model import digest_tensors, resolve_model
from perl.recipe.sections import ModelSection

_NUMBERS = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True)
class Checkpoint:
    """Where the tensors of a model are.

    Attributes:
        name: The model's, for errors.
        files: Name of a tensor -> the file that holds it.
        prefix: What transformers may put before a name, or leave out (``model``).
        tied: Parameter -> the one that it shares its numbers with.
    """

    name: str
    files: Mapping[str, Path]
    prefix: str = ""
    tied: Mapping[str, str] = field(default_factory=dict)

    def key(self, parameter: str) -> str | None:
        """The name of a model's parameter in the files; None: they have none."""
        of_it = [parameter, self.tied.get(parameter, parameter)]
        forms = [
            form for name in of_it for form in (name, name.removeprefix(f"{self.prefix}."), f"{self.prefix}.{name}")
        ]
        return next((form for form in forms if form in self.files), None)

    def tensor(self, parameter: str) -> torch.Tensor:
        """A parameter's numbers.

        Args:
            parameter: Its name in the model.

        Raises:
            ModelError: The files do not hold it under this name, it cannot be read, or it holds codes.
        """
        key = self.key(parameter)
        if key is None:
            raise ModelError(
                f"the files of {self.name} hold no {parameter}: transformers names or joins its tensors differently",
                hint="save it with transformers (save_pretrained) and name that folder as --base",
            )
        try:
            with safe_open(self.files[key], framework="pt") as file:
                kind = file.get_slice(key).get_dtype()
                if kind not in _NUMBERS:
                    raise ModelError(
                        f"{self.name} is published in quantised form: {key} holds {kind}", hint="name the ordinary base"
                    )
                found: torch.Tensor = file.get_tensor(key)
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{self.files[key]} cannot be read: {first_line(error)}") from error
        return found


def open_checkpoint(section: ModelSection, model: PreTrainedModel) -> Checkpoint:
    """Finds a model's files: a folder's, the sandbox's, or the Hub's, from its cache where they are there.

    Args:
        section: Which model.
        model: Its architecture, without weights.

    Raises:
        ModelError: There are no safetensors, or the model is published in quantised form.
    """
    if getattr(model.config, "quantization_config", None) is not None:
        raise ModelError(f"{section.name} is published in quantised form", "--base", "name the ordinary base")
    place = resolve_model(section.name)
    try:
        files = _files(place, section.revision)
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"the files of {section.name} cannot be read: {first_line(error)}", "--base") from error
    if not files:
        raise ModelError(f"{section.name} has no {SAFE_WEIGHTS_NAME} here", "--base", "a base is read as safetensors")
    tied: Any = getattr(model, "all_tied_weights_keys", None) or {}
    return Checkpoint(section.name, files, model.base_model_prefix, dict(tied))


def checkpoint_fingerprint(checkpoint: Checkpoint, model: PreTrainedModel, dtype: torch.dtype) -> str | None:
    """A base's fingerprint as :func:`perl.policy.model.base_fingerprint` has it, tensor by tensor from its files.

    Args:
        checkpoint: The base's files.
        model: Its architecture, without weights.
        dtype: In which it would be loaded.

    Returns:
        None where the files do not say it: names that differ, or parts that transformers keeps in float32.
    """
    names = sorted(name for name, _ in model.named_parameters())
    kept = [*(getattr(model, "_keep_in_fp32_modules", None) or ()), *(model._keep_in_fp32_modules_strict or ())]
    if any(checkpoint.key(name) is None for name in names) or (kept and dtype != torch.float32):
        return None
    return digest_tensors(((name, checkpoint.tensor(name)) for name in names), dtype)


def _files(place: str, revision: str | None) -> dict[str, Path]:
    whole = _file(place, revision, SAFE_WEIGHTS_NAME)
    if whole is not None:
        with safe_open(whole, framework="pt") as file:
            return dict.fromkeys(file.keys(), whole)
    index = _file(place, revision, SAFE_WEIGHTS_INDEX_NAME)
    if index is None:
        return {}
    places: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    parts = {part: _file(place, revision, part) for part in sorted(set(places.values()))}
    absent = [part for part, path in parts.items() if path is None]
    if absent:
        raise ValueError(f"{absent[0]} is absent")
    return {key: path for key, part in places.items() if (path := parts[part]) is not None}


def _file(place: str, revision: str | None, name: str) -> Path | None:
    folder = Path(place).expanduser()
    if folder.is_dir():
        return folder / name if (folder / name).is_file() else None
    try:
        return Path(hf_hub_download(place, name, revision=revision))
    except (OSError, ValueError):  # not there; that the Hub has such a model is known by now
        return None
