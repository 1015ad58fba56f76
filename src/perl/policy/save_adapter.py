"""The adapter by itself, as plain PEFT loads it on the pristine base.

policy -> adapter/, read back and compared

Written beside its place and only then moved there; weights are safetensors, the config holds no path of this machine.
"""

import copy
import json
import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model_state_dict
from safetensors.torch import save_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from perl.methods.anchor import anchored_layers
from perl.methods.base_parameters import name_in_base
from perl.methods.delta import LowRank, low_rank_update
from perl.methods.hooks import hooks_of
from perl.policy.attach import without_harmless_warnings
from perl.policy.fingerprint import base_dtype
from perl.policy.model import base_identity, base_of, clean_base, evaluating, public_name
from perl.policy.multimodal import copy_processor, towers
from perl.policy.precision import in_float32
from perl.policy.quantised import quantisation_of
from perl.policy.reference import token_log_probs
from perl.policy.saved.adapter import BASE_DTYPE, BASE_FINGERPRINT, BASE_QUANTIZATION, CONFIG, START, WEIGHTS
from perl.policy.sharding import whole_targets
from perl.run.files import new_folder, write_text
from perl.run.products import by_torch
from perl.run.shards import is_sharded, whole_state


def write_adapter(
    policy: PeftModel, destination: Path, base: str, revision: str | None, fingerprint: str | None = None
) -> None:
    """Saves the active adapter so that plain PEFT loads it on the pristine base.

    An adapter that starts on parts of the base's weights is written as the plain LoRA of twice its rank that it is.

    Args:
        policy: The model; only its active adapter is written, as safetensors, without pickles or other adapters.
        destination: The folder; an older one there is replaced once the new one is whole.
        base: Public name of the base, written into the config instead of the path it was loaded from.
        revision: Commit of the base, or None.
        fingerprint: Of the base, if it is known; goes into the header of the weights.
    """
    with new_folder(destination) as staged:
        write_adapter_files(policy, staged, base, revision, fingerprint)


def write_adapter_files(
    policy: PeftModel, folder: Path, base: str, revision: str | None, fingerprint: str | None = None
) -> None:
    """As :func:`write_adapter`, into a folder that may hold other files."""
    factors = {
        name_in_base(name): low_rank_update(layer, policy.active_adapter) for name, layer in anchored_layers(policy)
    }
    facts = {BASE_FINGERPRINT: fingerprint, BASE_QUANTIZATION: quantisation_of(base_of(policy))}
    if fingerprint is not None:
        facts[BASE_DTYPE] = base_dtype(policy)
    if factors:
        facts[START] = getattr(policy, "start", None)
        _write(*as_lora(policy, factors), folder, base, revision, facts)
        return
    own = policy.peft_config[policy.active_adapter]
    pattern = getattr(own, "rank_pattern", None)
    # The base's embeddings never change, so they are never part of the adapter.
    with without_harmless_warnings():
        tensors = _from_peft(policy)
    config = copy.deepcopy(own)  # PEFT renames a pattern of ranks as it saves
    if pattern is not None:
        own.rank_pattern = pattern
    _write(config, hooks_of(policy).as_loaded(policy, tensors), folder, base, revision, facts)


def write_lora(
    policy: PeftModel, factors: Mapping[str, LowRank], folder: Path, facts: Mapping[str, str | None]
) -> None:
    """Writes factors as a plain LoRA for the ordinary base.

    Args:
        policy: As in :func:`as_lora`.
        factors: As in :func:`as_lora`.
        folder: As in :func:`write_adapter_files`.
        facts: What the header says: keys of :mod:`perl.policy.saved.adapter`; None: nothing.
    """
    _write(*as_lora(policy, factors), folder, *base_identity(policy), facts)


def _write(
    config: PeftConfig,
    tensors: Mapping[str, torch.Tensor],
    folder: Path,
    base: str,
    revision: str | None,
    facts: Mapping[str, str | None],
) -> None:
    config.base_model_name_or_path, config.revision = public_name(base, revision)
    config.inference_mode, config.task_type, config.auto_mapping = True, "CAUSAL_LM", None
    metadata = {"format": "pt"} | {name: fact for name, fact in facts.items() if fact is not None}
    save_file({name: t.detach().clone().contiguous() for name, t in tensors.items()}, folder / WEIGHTS, metadata)
    sort_metadata(folder / WEIGHTS)
    config.save_pretrained(str(folder))
    # PEFT writes sets in any order; the same adapter should give the same file.
    written = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    for key in ("target_modules", "exclude_modules", "modules_to_save"):
        if isinstance(written.get(key), list):
            written[key] = sorted(written[key])
    write_text(folder / CONFIG, json.dumps(written, indent=2, sort_keys=True) + "\n")


def write_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, destination: Path) -> None:
    """Saves a whole model with its tokenizer, as safetensors; an older one there is replaced once this one is whole."""
    with new_folder(destination) as staged:
        model.save_pretrained(staged)
        tokenizer.save_pretrained(staged)
        if towers(model):
            copy_processor(str(model.config.name_or_path), getattr(model.config, "_commit_hash", None), staged)


def as_lora(policy: PeftModel, factors: Mapping[str, LowRank]) -> tuple[LoraConfig, dict[str, torch.Tensor]]:
    """Factors as a plain LoRA: its config, and its tensors under the names PEFT reads.

    The scale is in B, so that alpha is the rank and the rank may differ from layer to layer. What the adapter holds
    beside its layers (modules trained whole, embeddings of single tokens) goes with it.

    Args:
        policy: Where the factors come from.
        factors: Name of a layer in the base -> its update.
    """
    source = policy.peft_config[policy.active_adapter]
    ranks = {name: factor.rank for name, factor in factors.items()}
    usual = Counter(ranks.values()).most_common(1)[0][0]
    others = {name: rank for name, rank in ranks.items() if rank != usual}
    config = LoraConfig(
        r=usual,
        lora_alpha=usual,
        target_modules=sorted(factors),
        rank_pattern=others,
        alpha_pattern=dict(others),
        modules_to_save=source.modules_to_save,
        trainable_token_indices=getattr(source, "trainable_token_indices", None),
    )
    tensors = {}
    for name, factor in factors.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = factor.A_RI
        tensors[f"base_model.model.{name}.lora_B.weight"] = factor.B_OR
    prefix = policy.base_model.prefix
    saved = _from_peft(policy)
    return config, tensors | {name: t for name, t in saved.items() if prefix not in name}


def _from_peft(policy: PeftModel) -> dict[str, torch.Tensor]:
    """The adapter's tensors under the names that PEFT gives them in a file.

    Where the base is in shards they are collected here: ``state_dict`` of one process alone would put FSDP2's tensors
    away while the others still use them.
    """
    state = whole_state(policy) if is_sharded(policy) else None
    return get_peft_model_state_dict(policy, state, adapter_name=policy.active_adapter, save_embedding_layers=False)


def sort_metadata(weights: Path) -> None:
    """Safetensors writes the pairs of its metadata in any order; the same adapter should give the same file."""
    with weights.open("r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        file.seek(8)
        file.write(text.ljust(length))


def reload_difference(policy: PeftModel, adapter: Path, input_ids_BT: torch.Tensor) -> float:
    """How far a saved adapter, loaded by plain PEFT on a clean base, is from the one in memory.

    The clean base is another model over the same weights, so this costs an adapter, not a model. Both compute in
    float32, whatever the weights are and autocast says: rounding is no difference, and hides none.

    Args:
        policy: The trained model.
        adapter: Folder of the saved adapter.
        input_ids_BT: (B, T) int64 probe without padding.

    Returns:
        Largest difference of any token's log-probability, in nats; infinity if either is not a number.
    """
    with evaluating(policy), by_torch():  # the clean base has some of its modules
        # First: an adapter whose config asks for it is loaded by changing the base, which is the policy's too.
        expected_BT = log_probs_in_float32(policy, input_ids_BT)
        with without_harmless_warnings():
            clean = clean_base(policy)
            with whole_targets(clean, PeftConfig.from_pretrained(str(adapter))):
                reloaded = PeftModel.from_pretrained(clean, str(adapter)).eval()
        return largest_difference(log_probs_in_float32(reloaded, input_ids_BT), expected_BT)


def log_probs_in_float32(model: torch.nn.Module, input_ids_BT: torch.Tensor) -> torch.Tensor:
    """(B, T-1) log p(token t+1 | tokens up to t) of rows without padding, computed in float32."""
    with in_float32(model):
        return token_log_probs(model, input_ids_BT, torch.ones_like(input_ids_BT))


def largest_difference(one_BT: torch.Tensor, other_BT: torch.Tensor) -> float:
    """Of any two entries, without their signs; infinity if one is not a number."""
    difference = (one_BT - other_BT).abs().max().item()
    return math.inf if math.isnan(difference) else difference
