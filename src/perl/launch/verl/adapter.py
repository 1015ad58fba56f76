"""The adapter in verl's words: rank, alpha, targets, or a saved one to start from.

Handover -> overrides, what cannot be said; saved adapter -> the plain LoRA that it is equal to
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from perl.launch.verl.can_go import method_refusal, plain_alpha
from perl.launch.verl.handover import Handover
from perl.launch.verl.hydra import FOLDER
from perl.launch.verl.job_files import ADAPTER
from perl.launch.verl.objective import Mapped
from perl.methods.registry import ALL_LINEAR, LARGEST_RANK
from perl.policy.saved.adapter import CONFIG, WEIGHTS

_MODEL = "actor_rollout_ref.model"
_MEGATRON: Mapping[str, str] = MappingProxyType(
    {
        "q_proj": "linear_q",
        "k_proj": "linear_k",
        "v_proj": "linear_v",
        "o_proj": "linear_proj",
        "gate_proj": "linear_fc1_gate",
        "up_proj": "linear_fc1_up",
        "down_proj": "linear_fc2",
    }
)
"""Layer of a model on the Hub -> the layer of Megatron-Bridge's canonical LoRA, which has factors of its own for it."""
_KWARGS = ("target_parameters", "exclude_modules")
# What PEFT's config of a plain LoRA has, so that verl's is the same adapter.
_PLAIN: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "use_dora": (False,),
        "lora_bias": (False,),
        "bias": ("none",),
        "modules_to_save": (None, []),
        "rank_pattern": (None, {}),
        "alpha_pattern": (None, {}),
        "layers_to_transform": (None,),
        "trainable_token_indices": (None, [], {}),
        "layer_replication": (None,),
    }
)


def adapter(job: Handover) -> Mapped:
    """The overrides of what is trained.

    Args:
        job: The recipe with its adapter's config.
    """
    mapped, config = Mapped(), job.adapter
    if job.saved is None and job.recipe.peft.type is None and method_refusal(job.recipe.peft.method):
        return mapped  # refused by its name, which says more than what it is made of
    _check(job, mapped)
    if mapped.mistakes:
        return mapped
    rank, alpha = ranks(config)
    targets: Any = config.target_modules
    targets = sorted(targets) if isinstance(targets, set | list | tuple) else targets
    merge = bool(job.recipe.engine.merge or job.recipe.rollout.sync == "merged")
    mapped.overrides[f"{_MODEL}.lora.merge"] = merge
    if rank > LARGEST_RANK and not merge:
        mapped.refuse("peft.rank", f"vLLM serves ranks up to {LARGEST_RANK}", "engine.merge: true")
    if job.megatron:
        _of_megatron(job, mapped, rank, alpha, targets)
        return mapped
    if job.rollout == "sglang" and isinstance(targets, str) and targets != ALL_LINEAR and not merge:
        mapped.refuse("peft.target_modules", "SGLang takes names, no expression", "a list of names")
    mapped.overrides |= {
        f"{_MODEL}.lora_rank": rank,
        f"{_MODEL}.lora_alpha": alpha,
        f"{_MODEL}.target_modules": targets,
    }
    for key in _KWARGS:
        if job.recipe.peft.kwargs.get(key) is not None:
            there = f"{_MODEL}.{key}" if key == "exclude_modules" else f"+{_MODEL}.{key}"
            mapped.overrides[there] = job.recipe.peft.kwargs[key]
    if job.saved is not None:
        mapped.overrides[f"{_MODEL}.lora_adapter_path"] = f"{FOLDER}/{ADAPTER}"
    return mapped


def ranks(config: Any) -> tuple[int, float | int]:  # noqa: ANN401 (PEFT's LoraConfig)
    """Rank and alpha of the plain LoRA that an adapter is equal to; a whole alpha as a whole number."""
    alpha = plain_alpha(config.r, config.lora_alpha, rslora=bool(config.use_rslora))
    return config.r, int(alpha) if float(alpha).is_integer() else alpha


def _check(job: Handover, mapped: Mapped) -> None:
    where = "peft.adapter" if job.saved is not None else "peft.kwargs"
    config = job.adapter
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    if kind != "LORA" or (job.saved is not None and job.saved.start is not None):
        what = f"the adapter is a {kind}{' with a start of its own' if kind == 'LORA' else ''}"
        mapped.refuse(where, what, "perl export --as lora, then that folder")
        return
    for key, plain in _PLAIN.items():
        if getattr(config, key, plain[0]) not in plain:
            place = f"{where}.{key}" if where == "peft.kwargs" else where
            mapped.refuse(place, f"{key}: verl has no key for it", "a plain LoRA")
    for key in job.recipe.peft.kwargs:
        if key not in _KWARGS and key not in _PLAIN:
            mapped.refuse(f"peft.kwargs.{key}", "verl has no key for it", f"{' and '.join(_KWARGS)} go")
    if job.saved is None:
        return
    if job.megatron:
        what = "Megatron starts from adapters of Megatron-Bridge's own format"
        mapped.refuse("peft.adapter", what, "engine.strategy: fsdp2")
    in_loss = job.arguments.beta and job.arguments.reference != "base"
    if in_loss:
        what = "verl's reference is the base, not the adapter that is continued"
        mapped.refuse("train.reference", what, "base, or train.beta: 0")


def _of_megatron(job: Handover, mapped: Mapped, rank: int, alpha: float, targets: str | Sequence[str]) -> None:
    names = list(_MEGATRON) if targets == ALL_LINEAR else targets
    unknown = [name for name in ([names] if isinstance(names, str) else names) if name not in _MEGATRON]
    if unknown:
        what = f"{', '.join(unknown)}: Megatron-Bridge names the layers of its own models"
        mapped.refuse("peft.target_modules", what, f"all-linear, or some of {', '.join(_MEGATRON)}")
        return
    if job.recipe.peft.kwargs:
        mapped.refuse("peft.kwargs", "Megatron's LoRA has no such arguments", "engine.strategy: fsdp2")
    place = f"{_MODEL}.lora"
    mapped.overrides |= {
        f"{place}.type": "canonical_lora",  # factors for each layer, as PEFT's; its other kind shares A over q, k, v
        f"{place}.rank": rank,
        f"{place}.alpha": alpha,
        f"{place}.dropout": 0.0,
        f"{place}.target_modules": [_MEGATRON[name] for name in names],
        f"{place}.lora_A_init_method": "kaiming",
        f"{place}.lora_B_init_method": "zero",
    }
    mapped.notes.append("adapter: Megatron-Bridge's canonical LoRA, weights in bfloat16 with float32 main copies")


def write_plain(job: Handover, folder: Path) -> None:
    """Writes the adapter that is continued as a plain LoRA without dropout, which is the same adapter.

    Args:
        job: Has a saved adapter.
        folder: To make.
    """
    if job.saved is None:
        return
    folder.mkdir()
    rank, alpha = ranks(job.adapter)
    config = json.loads((job.saved.folder / CONFIG).read_text(encoding="utf-8"))
    config |= {"r": rank, "lora_alpha": alpha, "use_rslora": False, "lora_dropout": 0.0, "inference_mode": False}
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    shutil.copyfile(job.saved.weights, folder / WEIGHTS)
