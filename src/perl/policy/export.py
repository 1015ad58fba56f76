"""A trained adapter in another form: a plain LoRA, or the base with the update added.

run or adapter folder -> folder that PEFT, transformers or a server loads

Exact or refused: what is written is loaded again on a clean base and compared with the adapter.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from peft import PeftModel
from peft.tuners.lora.layer import ParamWrapper
from peft.utils.other import ModulesToSaveWrapper, TrainableTokensWrapper
from transformers import PreTrainedModel

from perl.errors import BrokenPromiseError, ModelError, RunFolderError, warn
from perl.methods.base_parameters import name_in_base
from perl.methods.delta import EXACT, adapted_layers, low_rank_update, merged_parameters
from perl.methods.settings import method_of
from perl.policy.attach import continue_adapter
from perl.policy.fingerprint import base_dtype, source_fingerprint
from perl.policy.guards import RELOAD_TOLERANCE, check_saved_model
from perl.policy.model import base_parameters, clean_base, load_base, load_tokenizer, resolve_model
from perl.policy.multimodal import auto_class, copy_processor
from perl.policy.reference import random_tokens
from perl.policy.save_adapter import largest_difference, log_probs_in_float32, reload_difference, write_lora
from perl.policy.saved.adapter import BASE_DTYPE, BASE_FINGERPRINT, CONFIG, SavedAdapter, find_adapter
from perl.recipe import Recipe
from perl.recipe.sections import ModelSection
from perl.run.facts import RECIPE, run_above
from perl.run.files import new_folder
from perl.run.folder import Run
from perl.run.progress import live_line

Form = Literal["lora", "merged"]
# The same in nats for a merged model in half precision. How far rounding moves log-probabilities depends on the model,
# so this finds no more than an update that is absent or in the wrong place; that the files hold the rounded weights is
# compared bit for bit.
_HALF_TOLERANCE = 1.0


@dataclass(frozen=True)
class Export:
    """What was written.

    Attributes:
        path: The folder.
        largest_rank: Of the LoRA's layers; None for a merged model.
        difference: Largest difference of a token's log-probability from the adapter's, in nats, over random tokens.
    """

    path: Path
    form: Form
    largest_rank: int | None
    difference: float


def export(
    source: str | Path,
    form: Form,
    destination: str | Path | None = None,
    dtype: str = "float32",
    base: str | None = None,
) -> Export:
    """Writes a trained adapter as a plain LoRA, or merged into its base.

    Args:
        source: A run folder, or an adapter's folder or Hub id.
        form: ``lora``: factors that PEFT and servers load on the published base, where the update has a low rank.
            ``merged``: the whole model, each changed weight added up in float64 and rounded once.
        destination: Folder to write, replaced if it exists; None: ``SOURCE-FORM``.
        dtype: Type of a merged model's weights.
        base: The base; None: the one that the run or the adapter names.

    Raises:
        PerlError: There is no such adapter or base, or the form cannot be exact; says what error could be reached.
        BrokenPromiseError: What was written does not give the adapter's log-probabilities.
    """
    folder, model_section = _located(str(source), base)
    saved = find_adapter(folder)
    if saved.base_quantization is not None:
        where = f"{saved.name} was trained on a base quantised to {saved.base_quantization}"
        warn("PRL302", "%s; the export is for the unquantised base, on which it is another policy", where)
    policy = continue_adapter(load_base(model_section, torch.device("cpu"), with_towers=True), saved).eval()
    target = Path(destination) if destination else Path(f"{str(source).rstrip('/').split('@')[0]}-{form}")
    with new_folder(target) as staged:
        largest: int | None = None
        ids = random_tokens(policy)
        if form == "lora":
            largest = _write_lora(policy, saved, staged)
            difference = reload_difference(policy, staged, ids)
        else:
            merged = merge(policy, getattr(torch, dtype))
            merged.save_pretrained(staged)
            check_saved_model(merged, staged)  # the files hold it
            load_tokenizer(model_section).save_pretrained(staged)
            copy_processor(resolve_model(model_section.name), model_section.revision, staged)
            kind = auto_class(merged.config)
            written = kind.from_pretrained(staged, dtype="auto", use_safetensors=True).eval()
            difference = largest_difference(log_probs_in_float32(policy, ids), log_probs_in_float32(written, ids))
        tolerance = RELOAD_TOLERANCE if form == "lora" or dtype == "float32" else _HALF_TOLERANCE
        if not difference <= tolerance:
            what = f"what was exported differs from the adapter by {difference:.2e} nats"
            raise BrokenPromiseError(f"{what} (at most {tolerance:.0e})")
    return Export(target, form, largest, difference)


def merge(policy: PeftModel, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The base with the active adapter's update added, as a new model; the policy's base is left alone.

    Args:
        policy: The model with its adapter.
        dtype: Type of the result; each changed weight is added up in float64 and rounded once.
    """
    adapter = policy.active_adapter
    state = {name: p.detach() for name, p in base_parameters(policy)}
    layers = list(adapted_layers(policy))  # parameters of one module have layers of one name
    with live_line(len(layers), "merging") as line:
        for name, layer in layers:
            for part, tensor in merged_parameters(layer, adapter).items():
                state[f"{name}.{part}"] = tensor.to(dtype)
            line.update()
    for name, module in policy.named_modules():
        if isinstance(module, ModulesToSaveWrapper) and adapter in module.modules_to_save:
            for part, tensor in module.modules_to_save[adapter].named_parameters():
                state[f"{name_in_base(name)}.{part}"] = tensor.detach()
        elif isinstance(module, TrainableTokensWrapper):
            state[f"{name_in_base(name)}.weight"] = module.token_adapter.get_merged_weights([adapter]).detach()
    return _assembled(policy, {name: t.to(dtype) if t.is_floating_point() else t for name, t in state.items()})


def _assembled(policy: PeftModel, state: Mapping[str, torch.Tensor]) -> PreTrainedModel:
    """A model of the base's kind with these weights; tied ones that were trained apart are tied no longer."""
    merged = clean_base(policy)
    merged.config = copy.deepcopy(merged.config)  # it is the base's
    head = merged.get_output_embeddings()
    names = {module: name for name, module in merged.named_modules()}
    embeddings, output = (f"{names[m]}.weight" for m in (merged.get_input_embeddings(), head))
    present = dict(state)
    if getattr(merged.config, "tie_word_embeddings", False):  # the whole model's own, which transformers goes by
        own_head = present.get(output)
        base_embeddings = dict(base_parameters(policy))[embeddings]
        changed = present[embeddings]
        if own_head is not None or not torch.equal(changed, base_embeddings.to(changed.dtype)):
            merged.config.get_text_config().tie_word_embeddings = merged.config.tie_word_embeddings = False
            present[output] = own_head if own_head is not None else base_embeddings.to(changed.dtype).clone()
            head.weight = torch.nn.Parameter(present[output], requires_grad=False)
    merged.load_state_dict(present, strict=False, assign=True)
    merged.tie_weights()
    return merged.eval()


def _write_lora(policy: PeftModel, source: SavedAdapter, folder: Path) -> int:
    """Writes the factors of every layer, or refuses with the error that factors could reach."""
    adapter, factors = policy.active_adapter, {}
    layers = dict(adapted_layers(policy))
    method = method_of(policy.peft_config[adapter])
    with live_line(len(layers), "factorising") as line:
        for name, layer in layers.items():
            inner = layer.get_base_layer()
            of_module = isinstance(layer, ParamWrapper) or isinstance(inner, torch.nn.Embedding)
            if of_module or inner.weight.dim() != 2:
                what = f"{method.name} changes {name}, which is no linear layer, so it is no LoRA"
                raise ModelError(what, "--as", "use --as merged")
            factors[name] = low_rank_update(layer, adapter)
            line.update()
    worst = max(factors, key=lambda name: factors[name].error)
    if factors[worst].error > EXACT:
        best = f"the best factors of rank {factors[worst].rank} leave out {factors[worst].error:.1%} of {worst}"
        raise ModelError(f"the update of {method.name} has no low rank: {best}", "--as", "use --as merged")
    for name, layer in layers.items():  # IA3 and RoAd scale outputs, so they are no LoRA, whatever the matrix is
        bias = getattr(layer.get_base_layer(), "bias", None)
        if bias is not None and not torch.allclose(merged_parameters(layer, adapter)["bias"], bias.double(), atol=1e-7):
            raise ModelError(f"{method.name} changes the bias of {name}, so it is no LoRA", "--as", "use --as merged")
    # The base it was trained on, in the type of then; loading it in another one does not make it another base. Of what
    # that was quantised to nothing is said: these factors are proven on the ordinary one, where they are to be loaded.
    facts = {BASE_FINGERPRINT: source.base_fingerprint, BASE_DTYPE: source.base_dtype}
    if source.base_fingerprint is None:
        facts = {BASE_FINGERPRINT: source_fingerprint(policy), BASE_DTYPE: base_dtype(policy)}
    write_lora(policy, factors, folder, facts)
    return max(factor.rank for factor in factors.values())


def _located(source: str, base: str | None) -> tuple[str, ModelSection]:
    """The adapter's place and its base."""
    path = Path(source).expanduser()
    if (path / "run.json").is_file():
        run = Run.read(path)
        if run.facts.get("method") == "full":
            raise RunFolderError("trained the model itself, there is no adapter to export", source)
        model = Recipe.of_run(path / RECIPE).model
        return str(run.adapter), ModelSection(name=base or model.name, revision=model.revision)
    above = run_above(path, 2) if path.is_dir() else None
    if above:  # a checkpoint's own config names a folder by its last part
        model = Recipe.of_run(above / RECIPE).model
        return source, ModelSection(name=base or model.name, revision=model.revision if base is None else None)
    config: Any = find_adapter(source).config
    name = base or config.base_model_name_or_path
    if not name:
        raise ModelError(f"{source} does not say which base it belongs to ({CONFIG})", "--base", "name it")
    return source, ModelSection(name=name, revision=config.revision if base is None else None)
