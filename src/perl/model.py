"""Loads the base once, says what it is, attaches an adapter, counts what trains.

ModelSection -> tokenizer, base; PeftConfig -> adapter on it

The base's weights are never written after this. Knows nothing of data, rewards or training.
"""

import contextlib
import copy
import hashlib
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.constants import HF_HUB_OFFLINE
from peft import PeftConfig, PeftModel, get_peft_model
from peft.tuners.tuners_utils import check_target_module_exists
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from perl.errors import ModelError, PerlError, Problem, missing_extra
from perl.hub_lookup import look_up
from perl.recipe.sections import ModelSection
from perl.sandbox import BASE_FOLDER, BASE_NAME, is_sandbox, model_folder

# What PEFT puts into the names of the base's parameters; an expert's wrappers stand one in another.
_WRAPPERS = re.compile(r"\.(base_layer|original_module|token_adapter)(?=\.)")


def resolve_model(name: str) -> str:
    """What transformers should load for a model's name: a folder for the sandbox's, else the name itself.

    Raises:
        ModelError: The sandbox has no such model.
    """
    if is_sandbox(name):
        return str(model_folder(name))
    folder = Path(name).expanduser()
    return str(folder) if folder.is_dir() else name


def load_tokenizer(section: ModelSection) -> PreTrainedTokenizerBase:
    """The base's tokenizer, padding on the left as generation needs it.

    Raises:
        ModelError: There is no such model, or the Hub cannot be reached.
    """
    with _explained(section):
        tokenizer = AutoTokenizer.from_pretrained(
            resolve_model(section.name), revision=section.revision, padding_side="left", trust_remote_code=False
        )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_base(section: ModelSection, device: torch.device) -> PreTrainedModel:
    """The base on its device, in evaluation mode.

    Raises:
        ModelError: There is no such model, or the Hub cannot be reached.
    """
    with _explained(section):
        model = AutoModelForCausalLM.from_pretrained(
            resolve_model(section.name),
            revision=section.revision,
            dtype=_dtype(section, device),
            attn_implementation=section.attn_implementation,
            use_safetensors=True,
            trust_remote_code=False,
        )
    return model.to(device).eval()


def load_empty_base(section: ModelSection) -> PreTrainedModel:
    """The base's architecture without its weights (on the meta device): enough to count and to name modules.

    Raises:
        ModelError: There is no such model, the Hub cannot be reached, or an attention package is missing.
    """
    _check_exists(section)
    if "flash_attention" in (section.attn_implementation or "") and not importlib.util.find_spec("flash_attn"):
        problem = missing_extra("flash-attn", "flash", f"attn_implementation {section.attn_implementation}")
        raise ModelError(problem.message, "model.attn_implementation", problem.hint)
    with _explained(section):
        config = AutoConfig.from_pretrained(
            resolve_model(section.name), revision=section.revision, trust_remote_code=False
        )
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, trust_remote_code=False)


def attach_adapter(model: PreTrainedModel, config: PeftConfig) -> PeftModel:
    """The base with a new trainable adapter; the base's parameters are frozen.

    Raises:
        ModelError: The adapter would touch no module, or has nothing to train.
    """
    check_targets(model, config)
    try:
        policy = get_peft_model(model, config)
    except (ValueError, TypeError, RuntimeError) as error:  # NotImplementedError among them
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        hint = f"the linear layers are {', '.join(_linear_names(model))}; or all-linear"
        where = "peft.target_modules" if reason.startswith("Target module") else "peft.kwargs"
        raise ModelError(f"PEFT refuses: {reason}", where, hint if where == "peft.target_modules" else "") from error
    check_trainable(policy)
    return policy


def check_targets(model: PreTrainedModel, config: PeftConfig) -> None:
    """Refuses target modules that the model does not have; PEFT alone ignores a name as long as another one matches.

    Raises:
        ModelError: With the names that exist.
    """
    targets = getattr(config, "target_modules", None)
    if targets is None or targets == "all-linear":
        return
    modules = [name for name, _ in model.named_modules() if name]
    wanted = [targets] if isinstance(targets, str) else sorted(targets)
    missing = [name for name in wanted if not _matches(config, name, modules)]
    if missing:
        known = _linear_names(model)
        raise ModelError(
            f"{', '.join(missing)} match no module of {type(model).__name__}",
            "peft.target_modules",
            f"the linear layers are {', '.join(known)}; or all-linear",
        )


def check_trainable(model: nn.Module) -> None:
    """Refuses a model in which nothing would be trained.

    Raises:
        ModelError: No parameter requires a gradient.
    """
    if trainable_parameters(model) == 0:
        raise ModelError(
            "the model has no trainable parameters: training would change nothing",
            hint="load an adapter with is_trainable=True, or pass a peft_config that matches some layer",
        )


def trainable_parameters(model: nn.Module) -> int:
    """Number of parameters that require a gradient."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def total_parameters(model: nn.Module) -> int:
    """Number of parameters, tied ones once."""
    return sum(parameter.numel() for parameter in model.parameters())


def base_fingerprint(model: nn.Module) -> str:
    """SHA-256 over names, shapes, types and bytes of the base's parameters, the same with and without an adapter."""
    digest = hashlib.sha256()
    for name, parameter in sorted(_base_parameters(model)):
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def eos_token_ids(model: PreTrainedModel | PeftModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Every token that ends a completion: the tokenizer's and those the model declares (end of turn)."""
    declared = model.generation_config.eos_token_id
    declared = [] if declared is None else [declared] if isinstance(declared, int) else list(declared)
    own = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return tuple(dict.fromkeys([*own, *declared]))


def base_identity(model: nn.Module) -> tuple[str, str | None]:
    """The base's public name (Hub id, sandbox name, or the path the user gave) and the commit that was loaded."""
    base: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    name = str(base.config.name_or_path)
    commit = getattr(base.config, "_commit_hash", None)
    return (BASE_NAME if name == str(BASE_FOLDER) else name), commit


def _base_parameters(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The base's parameters under the names they have without an adapter."""
    prefix = model.base_model.prefix if isinstance(model, PeftModel) else None
    for name, parameter in model.named_parameters():
        if prefix is None:
            yield name, parameter
        elif prefix not in name and "modules_to_save" not in name and "trainable_tokens_" not in name:
            yield _WRAPPERS.sub("", name.removeprefix("base_model.model.")), parameter


def _matches(config: PeftConfig, target: str, modules: list[str]) -> bool:
    """Whether one target, as PEFT reads it, names a module."""
    alone = copy.copy(config)
    alone.target_modules = target if isinstance(config.target_modules, str) else {target}
    return any(check_target_module_exists(alone, name) for name in modules)


def _linear_names(model: nn.Module) -> list[str]:
    """Last parts of the names of linear layers, without the output head."""
    head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    return sorted(
        {name.rsplit(".", 1)[-1] for name, m in model.named_modules() if isinstance(m, nn.Linear) and m is not head}
    )


def _dtype(section: ModelSection, device: torch.device) -> torch.dtype | str:
    if section.dtype != "auto":
        return getattr(torch, section.dtype)
    return torch.float32 if device.type == "cpu" else "auto"


def _check_exists(section: ModelSection) -> None:
    if is_sandbox(section.name) or Path(section.name).expanduser().is_dir():
        return
    if section.name.startswith((".", "/", "~")):
        raise ModelError(f"{section.name}: no such folder", "model.name", f"{BASE_NAME} needs no network")
    answer = look_up("model", section.name, section.revision)
    if isinstance(answer, Problem):
        hint = f"{answer.hint}; {BASE_NAME} needs no network" if answer.hint else f"{BASE_NAME} needs no network"
        raise ModelError(answer.message, "model.name", hint)


@contextlib.contextmanager
def _explained(section: ModelSection) -> Iterator[None]:
    """Turns what transformers raises for a model that cannot be had into one line."""
    try:
        yield
    except PerlError:
        raise
    except (OSError, ValueError, SafetensorError) as error:
        local = Path(section.name).expanduser().is_dir()
        what = "holds no model that can be loaded" if local else "cannot be loaded"
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        hint = f"{BASE_NAME} needs no network"
        if HF_HUB_OFFLINE and not local:
            hint = f"HF_HUB_OFFLINE is set, so only what is cached can be loaded; {hint}"
        raise ModelError(f"{section.name} {what}: {reason}", "model.name", hint) from error
