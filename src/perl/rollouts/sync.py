"""What an engine needs to answer like the policy: a LoRA, or the weights that the adapter changes.

policy -> SyncPlan, once; policy -> Update, after each step

A LoRA is exact for every method that keeps its update as factors; the update of any other is added to the weights of
the layers it changes, in float64, and rounded once. The base is only read. When and how an update is
sent is the engine's part.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from peft import PeftModel
from peft.tuners.hra.layer import HRALayer
from peft.tuners.lora.layer import ParamWrapper
from peft.utils.other import ModulesToSaveWrapper, TrainableTokensWrapper
from torch import nn
from transformers.core_model_loading import revert_weight_conversion

from perl.errors import BrokenPromiseError, ModelError
from perl.methods.anchor import anchor_of
from perl.methods.base_parameters import base_weight, is_packed, name_in_base, number_count
from perl.methods.delta import LowRank, adapted_layers, balanced, closed_form, merged_parameters
from perl.methods.registry import LARGEST_RANK
from perl.methods.settings import method_of
from perl.policy.attach import without_harmless_warnings
from perl.policy.model import base_identity, base_of, base_parameters, public_name
from perl.policy.precision import compute_dtype
from perl.policy.save_adapter import as_lora
from perl.rollouts.engine import Form, Update
from perl.run.shards import whole

SyncSetting = Literal["auto", "adapter", "merged"]

# Layers that vLLM keeps as one matrix and loads again only together, by the last part of their names.
_FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("query", "key", "value"),
    ("wq", "wk", "wv"),
    ("w1", "w3"),
    ("in_proj_qkv", "in_proj_z"),
    ("in_proj_b", "in_proj_a"),
)
# Experts that a checkpoint has joined and vLLM loads again only one by one, by model type: its loader of GPT-OSS
# (``_load_weights_other``) copies joined ones into tensors that are thrown away, without a word.
_ONE_BY_ONE = {"gpt_oss": re.compile(r"(.*\.mlp\.experts)\.((?:gate_up|down)_proj(?:_bias)?)")}


@dataclass(frozen=True)
class SyncPlan:
    """What an engine will be given after each step.

    Attributes:
        why: The reason for the form, as a clause.
        nbytes: Bytes of an update.
        tensors: Tensors of an update.
        largest_rank: Of the LoRA's layers; None for merged weights.
    """

    form: Form
    why: str
    nbytes: int
    tensors: int
    largest_rank: int | None = None

    def __str__(self) -> str:
        """One line for a person."""
        what = f"a LoRA of rank {self.largest_rank}" if self.form == "adapter" else "merged weights"
        return f"an update is {what}, {self.nbytes / 1e6:.3g} MB in {self.tensors} tensors: {self.why}"


def choose_form(policy: nn.Module, setting: SyncSetting = "auto") -> SyncPlan:
    """Decides, before training, in what form an engine gets the policy.

    ``auto`` is the adapter wherever it can be served exactly: every layer that the adapter changes is linear and keeps
    its update as factors, and nothing is trained whole. That depends on the layers, not on the numbers in them, so the
    decision holds for every step.

    Args:
        policy: The model with its adapter, or a model that is trained itself.
        setting: ``rollout.sync``.

    Raises:
        ModelError: The requested form cannot be exact, or an engine has no tensor for what is trained.
    """
    obstacle = _no_lora(policy)
    if setting == "adapter" and obstacle is not None:
        raise ModelError(f"{obstacle}, so no LoRA can be served", "rollout.sync", "use rollout.sync: merged")
    if setting != "merged" and obstacle is None:
        factors = dict(_factors(policy))
        numbers = sum(f.A_RI.numel() + f.B_OR.numel() for f in factors.values())
        largest = max(f.rank for f in factors.values())
        why = "every layer's update is an exact LoRA"
        return SyncPlan("adapter", why, numbers * compute_dtype(policy).itemsize, 2 * len(factors), largest)
    changed, usual = _changed(policy), compute_dtype(policy)
    nbytes = sum(number_count(tensor) * _own_dtype(tensor, usual).itemsize for tensor in changed.values())
    sent = published(policy, {name: torch.empty(t.shape, device="meta") for name, t in changed.items()})
    return SyncPlan("merged", obstacle or "rollout.sync requests it", nbytes, len(sent))


def make_update(policy: nn.Module, form: Form, name: str) -> Update:
    """The policy as it is now, in the form that was chosen.

    Args:
        policy: As in :func:`choose_form`.
        form: Of the plan.
        name: Of this version, never used before.

    Raises:
        ModelError: An engine has no tensor for what is trained.
        BrokenPromiseError: The adapter is no longer the LoRA that the plan relied on.
    """
    if form == "merged":
        return merged_update(policy, name)
    if not isinstance(policy, PeftModel):
        raise ModelError("a model that is trained itself has no adapter", "rollout.sync", "use rollout.sync: merged")
    return adapter_update(policy, name)


def adapter_update(policy: PeftModel, name: str) -> Update:
    """The active adapter as a plain LoRA, scale and anchor in its factors, in the type the policy computes in.

    Its shapes are the same at every step, also at the start, where the update is 0. The tensors are copies, where the
    adapter is.

    Args:
        policy: The model with its adapter.
        name: As in :func:`make_update`.

    Raises:
        BrokenPromiseError: Some layer no longer keeps its update as factors.
    """
    dtype, factors = compute_dtype(policy), dict(_factors(policy))
    config_of_policy = policy.peft_config[policy.active_adapter]
    pattern = getattr(config_of_policy, "rank_pattern", None)
    with without_harmless_warnings():
        config, tensors = as_lora(policy, factors)
    if pattern is not None:
        config_of_policy.rank_pattern = pattern  # PEFT renames it while it collects the adapter's tensors
    config.base_model_name_or_path, config.revision = public_name(*base_identity(policy))
    config.inference_mode = True
    # VeRA's shared matrices, which PEFT saves beside the layers' vectors, are no part of a LoRA.
    parts = {key: t for key, t in tensors.items() if key.endswith((".lora_A.weight", ".lora_B.weight"))}
    copies = {key: t.detach().to(dtype, copy=True).contiguous() for key, t in parts.items()}
    plain = {key: sorted(value) if isinstance(value, set) else value for key, value in config.to_dict().items()}
    return Update(name, "adapter", copies, json.loads(json.dumps(plain)))  # as PEFT writes it into its file


def merged_update(policy: nn.Module, name: str) -> Update:
    """The parameters of the layers that the adapter changes, as the base names them, with the adapter added.

    Each weight is added up in float64 beside the base, layer by layer, and rounded once to its type. Layers that vLLM
    loads only together are complete, those that did not change as the base has them. Of a quantised base the weights
    are those that its numbers stand for.

    Args:
        policy: As in :func:`choose_form`. Of a model that is trained itself, the tensors are the model's, not copies:
            they have to be read before the next step.
        name: As in :func:`make_update`.

    Raises:
        ModelError: The embeddings are trained apart from a head that shares them, for which an engine has one tensor.
    """
    if not isinstance(policy, PeftModel):
        return base_update(policy, name)
    changed, usual, merged = _changed(policy), compute_dtype(policy), dict(_trained_whole(policy))
    for layer_name, layer in adapted_layers(policy):
        for part, tensor in merged_parameters(layer, policy.active_adapter).items():
            key = f"{layer_name}.{part}"
            merged[key] = tensor.to(_own_dtype(changed[key], usual))  # at once: in float64 there is one layer at a time
    tensors = _as_the_base(policy, {key: merged.get(key, base) for key, base in changed.items()})
    return Update(name, "merged", published(policy, tensors))


def base_update(policy: nn.Module, name: str) -> Update:
    """Every parameter of the base itself, tied ones once, for a server that holds other weights.

    Args:
        policy: As in :func:`merged_update`.
        name: As in :func:`make_update`.
    """
    return Update(name, "merged", published(policy, _as_the_base(policy, dict(base_parameters(policy)))))


def published(policy: nn.Module, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors under the names and in the form that engines load: as the base's checkpoint has them, but for GPT-OSS.

    transformers joins the experts of a layer, and renames a few families' modules, as it loads them.
    """
    base = base_of(policy)
    found: dict[str, torch.Tensor] = revert_weight_conversion(base, tensors)
    joined = _ONE_BY_ONE.get(base.config.model_type)
    sent: dict[str, torch.Tensor] = {}
    for name, tensor in found.items():
        part = joined and joined.fullmatch(name)
        sent |= {f"{part[1]}.{i}.{part[2]}": one for i, one in enumerate(tensor)} if part else {name: tensor}
    return {name: tensor.contiguous() for name, tensor in sent.items()}


def without_effect(update: Update) -> Update:
    """An adapter of the same shapes under which every layer computes what the base does.

    Args:
        update: As an adapter: A and B of each layer.
    """
    tensors = {name: torch.zeros_like(t) if "lora_B" in name else t for name, t in update.tensors.items()}
    return replace(update, tensors=tensors)


def _no_lora(policy: nn.Module) -> str | None:
    """Why the policy cannot be served as a LoRA, or None."""
    if not isinstance(policy, PeftModel):
        return "method full trains every weight"
    for name, module in policy.named_modules():
        if isinstance(module, (ModulesToSaveWrapper, TrainableTokensWrapper)):
            return f"{name_in_base(name)} is trained itself"
    adapter = policy.active_adapter
    method = getattr(policy, "start", None) or method_of(policy.peft_config[adapter]).name
    head = base_of(policy).get_output_embeddings()
    for name, layer in adapted_layers(policy):
        factors = closed_form(layer, adapter)
        if factors is None:
            linear = isinstance(layer.get_base_layer(), nn.Linear)
            return f"the update of {method} has no low rank" if linear else f"{method} changes {name}, not linear"
        if factors.rank > LARGEST_RANK:
            return f"the update of {name} has rank {factors.rank}, and vLLM serves {LARGEST_RANK} at most"
        if layer is head:
            return f"{name} is the head"
    return None


def _factors(policy: PeftModel) -> Iterator[tuple[str, LowRank]]:
    """Each changed layer's update, of the method's full rank."""
    adapter, half = policy.active_adapter, compute_dtype(policy).itemsize < torch.float32.itemsize
    for name, layer in adapted_layers(policy):
        factors = closed_form(layer, adapter)
        if factors is None:
            raise BrokenPromiseError(f"the update of {name} is no longer kept as factors")
        # Rounded as they are, factors whose products cancel would give the engine another policy.
        cancels = isinstance(layer, HRALayer) or anchor_of(layer, adapter) is not None
        yield name, balanced(factors) if half and cancels else factors


def _changed(policy: nn.Module) -> dict[str, torch.Tensor]:
    """What merged weights are sent of: names, and what the base has there, completed to what vLLM loads together."""
    base = dict(base_parameters(policy))
    if not isinstance(policy, PeftModel):
        return base
    names: list[str] = []
    for name, layer in adapted_layers(policy):
        # Of a module that is sent in part vLLM takes the rest from memory that nobody has written: experts go with all
        # their matrices and biases.
        inner, whole_tree = layer.get_base_layer(), not isinstance(layer, ParamWrapper)
        names += [f"{name}.{part}" for part, _ in inner.named_parameters(recurse=whole_tree)]
    names += [name for name, _ in _trained_whole(policy)]
    _refuse_torn_ties(policy, names)
    for name in list(names):
        layer, _, part = name.rpartition(".")
        parent, _, last = layer.rpartition(".")
        together = next((group for group in _FUSED if last in group), ())
        names += [f"{parent}.{sibling}.{part}" for sibling in together]
    wanted = dict.fromkeys(names)
    # A head of its own is not among the parameters of a base whose head is tied.
    return {name: base[name] for name in base if name in wanted}


def _trained_whole(policy: PeftModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters of modules that are trained whole, and embeddings of which single tokens are."""
    adapter = policy.active_adapter
    for name, module in policy.named_modules():
        if isinstance(module, ModulesToSaveWrapper) and adapter in module.modules_to_save:
            for part, tensor in module.modules_to_save[adapter].named_parameters():
                yield f"{name_in_base(name)}.{part}", tensor.detach()
        elif isinstance(module, TrainableTokensWrapper):
            yield f"{name_in_base(name)}.weight", module.token_adapter.get_merged_weights([adapter]).detach()


def _refuse_torn_ties(policy: PeftModel, changed: list[str]) -> None:
    """An engine has one tensor for embeddings and head if the base ties them; trained apart they are two."""
    base = base_of(policy)
    if not getattr(base.config, "tie_word_embeddings", False):
        return
    names, adapter = {module: name_in_base(name) for name, module in policy.named_modules()}, policy.active_adapter
    embeddings, head = base.get_input_embeddings(), base.get_output_embeddings()
    torn = {f"{names.get(embeddings)}.weight", f"{names.get(head)}.weight"} & set(changed)
    if isinstance(embeddings, TrainableTokensWrapper) and isinstance(head, TrainableTokensWrapper):
        as_one = head.token_adapter.tied_adapter is embeddings.token_adapter
    elif isinstance(embeddings, ModulesToSaveWrapper) and isinstance(head, ModulesToSaveWrapper):
        as_one = head.modules_to_save[adapter].weight is embeddings.modules_to_save[adapter].weight
    else:
        as_one = False
    if not torn or as_one:
        return
    raise ModelError(
        f"{min(torn)} is trained apart from what it is tied to, and vLLM has one tensor for both",
        "peft.kwargs",
        "set ensure_weight_tying: true, or leave it out",
    )


def _as_the_base(policy: nn.Module, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors by name, each in the type that the base has there; quantised ones as what their numbers stand for."""
    base, usual = dict(base_parameters(policy)), compute_dtype(policy)
    modules = {name_in_base(name): module for name, module in base_of(policy).named_modules()}  # the innermost is last
    found = {}
    for name, given in tensors.items():
        held = modules[name.rpartition(".")[0]]
        tensor = base_weight(held) if is_packed(given) else whole(given.detach())
        found[name] = tensor.to(_own_dtype(base[name], usual)).contiguous()
    return found


def _own_dtype(parameter: torch.Tensor, usual: torch.dtype) -> torch.dtype:
    return usual if is_packed(parameter) else parameter.dtype
