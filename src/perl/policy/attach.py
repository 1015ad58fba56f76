"""Puts an adapter on the base: a new one, or one that is continued. The base's weights are not written.

base, Adaptation -> policy; SavedAdapter -> policy; policy <-> its tensors
"""

import contextlib
import copy
import warnings
from collections.abc import Iterator, Mapping

import torch
from peft import PeftConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel

from perl.algorithms.registry import function_at
from perl.errors import BrokenPromiseError, ModelError, first_line, warn
from perl.methods import starts
from perl.methods.anchor import lift_anchor, without_anchor
from perl.methods.base_parameters import is_of_the_base, name_in_base
from perl.methods.butterflies import say_who_can_load, without_extension
from perl.methods.registry import METHODS, Method
from perl.methods.settings import Adaptation, check_task, initialisation_of, method_of
from perl.policy.fingerprint import base_dtype, is_the_base, source_fingerprint
from perl.policy.model import base_parameters, public_identity
from perl.policy.multimodal import keep_to_language
from perl.policy.quantised import keep_type
from perl.policy.saved.adapter import CONFIG, POSITIONS, SavedAdapter, check_facts, check_patterns
from perl.policy.sharding import check_config, check_whole_adapter, whole_targets
from perl.policy.targets import check_targets, leave_out_unreached, linear_names

# What PEFT warns of where nothing is wrong: LN tuning of a norm it does not list, BOFT that it loads without its CUDA
# extension, the ranks of a finished AdaLoRA taken for LoRA's, a layer without any rank left.
_HARMLESS = (
    "Unsupported layer type",
    "Failed to load the CUDA extension",
    "Setting boft_n_butterfly_factor",
    r"The following rank_pattern keys .*\.lora_E'",
    r"The following (rank|alpha)_pattern keys .*\.gate_up_proj'",  # PEFT's own, which are followed
    "Adapter .* LoRA tensor",
    "Specified to not save",
    "You have passed exclude_modules=",  # of towers that were let go
)
# What PEFT raises for values of a config that do not fit, of which it looks at few; NotImplementedError is among them.
_REFUSALS = (ValueError, TypeError, RuntimeError, AttributeError, LookupError, ArithmeticError, AssertionError)


def attach_adapter(model: PreTrainedModel, adaptation: Adaptation | PeftConfig) -> PeftModel:
    """The base with a new trainable adapter; the base's parameters are frozen.

    An initialisation that PEFT would write into the base's weights (PiSSA, OLoRA) is made beside them instead.

    Args:
        model: The base, with its weights.
        adaptation: A method with its config, or the config of any method.

    Raises:
        RecipeError: The config's method cannot be trained.
        ModelError: The adapter would touch no module, or has nothing to train.
    """
    if not isinstance(adaptation, Adaptation):
        adaptation = Adaptation(method_of(adaptation), adaptation)
    if adaptation.config is None:
        raise ValueError("method full has no adapter to attach")
    check_config(model, adaptation.config)
    with whole_targets(model, adaptation.config):
        policy = shaped_adapter(model, adaptation.config)
    say_who_can_load(adaptation.config)
    keep_type(policy)
    starts.unrounded_magnitudes(policy)
    if adaptation.method.starts:
        function_at(adaptation.method.starts)(policy, adaptation.options)
        policy.start = adaptation.method.name
    freeze_parts(policy, adaptation.method.frozen)
    check_trainable(policy)
    check_whole_adapter(policy)
    return policy


def shaped_adapter(model: PreTrainedModel, config: PeftConfig) -> PeftModel:
    """The base with a new adapter of the right names and shapes, whatever its numbers; the base may lack weights.

    Raises:
        ModelError: The adapter would touch no module.
    """
    config = _without_weight_init(config)
    # What is a file's or another process's own, where the config was read from one.
    config.inference_mode, config.base_model_name_or_path, config.auto_mapping = False, None, None
    check_task(config)
    facts = {name: sorted(value) if isinstance(value, set) else value for name, value in config.to_dict().items()}
    try:
        check_facts(facts)  # or nobody could read it once the adapter is saved
    except ValueError as error:
        raise ModelError(str(error).removeprefix(f"{CONFIG}: "), "peft.kwargs", "leave it out") from error
    check_patterns(config, "peft.kwargs")
    check_targets(model, config)
    keep_to_language(model, config)
    left_out = leave_out_unreached(model, config)
    if left_out and model.device.type != "meta":
        what = "peft.target_modules all-linear without %s: the model reads their weights past an adapter"
        warn("PRL329", what, ", ".join(left_out))
    if getattr(config, "modules_to_save", None):
        # In full; PEFT takes ``norm`` for the ending of any name, so for ``q_norm`` too.
        names = [(f".{name}", f".{module}") for name in config.modules_to_save for module, _ in model.named_modules()]
        config.modules_to_save = sorted({module[1:] for name, module in names if module.endswith(name)})
    return fresh_adapter(model, config, where="")


def continue_adapter(model: PreTrainedModel, saved: SavedAdapter, adaptation: Adaptation | None = None) -> PeftModel:
    """The base with a saved adapter, trainable.

    Args:
        model: The base, with its weights.
        saved: The adapter.
        adaptation: How to go on; None: as the adapter's own method does.

    Raises:
        RecipeError: The adapter's method cannot be trained.
        ModelError: The adapter was made for another base.
    """
    adaptation = adaptation or Adaptation(own_method(saved), saved.config)
    made_for = saved.config.base_model_name_or_path
    check_same_base(model, saved.name, made_for, saved.base_fingerprint, saved.base_dtype, "peft.adapter")
    check_config(model, saved.config)
    with whole_targets(model, saved.config):
        policy = shaped_saved_adapter(model, saved)
    keep_type(policy)
    check_whole_adapter(policy)
    _put_tensors(policy, saved)
    policy.start = saved.start or own_method(saved).name
    freeze_parts(policy, adaptation.method.frozen)
    check_trainable(policy)
    return policy


def shaped_saved_adapter(model: PreTrainedModel, saved: SavedAdapter) -> PeftModel:
    """The base with an adapter of a saved one's names and shapes, which its file must have; the base may lack weights.

    Raises:
        ModelError: The file does not fit the base, or holds what no adapter may.
    """
    own_method(saved)  # refuses what is no adapter of a method that is known here
    start = str(getattr(saved.config, "init_lora_weights", ""))
    if "_niter_" in start:
        what = f"{saved.name} started from a random decomposition ({start}) that cannot be made again"
        hint = "save it with PEFT's path_initial_model_for_weight_conversion where it was trained"
        raise ModelError(f"{what}: its policy is lost", "peft.adapter", hint)
    policy = fresh_adapter(model, without_anchor(saved.config) if saved.start else saved.config)
    _check_fits(policy, saved)
    _check_numbers(policy, saved)
    return policy


def check_same_base(
    model: nn.Module, name: str, made_for: str | None, fingerprint: str | None, dtype: str | None, where: str
) -> None:
    """Refuses what was trained on other weights than this base's, in whatever type either was loaded.

    Args:
        model: The base, with or without an adapter; all processes must ask at once.
        name: What was trained.
        made_for: Its base.
        fingerprint: Of that base's weights; None: nobody knows.
        dtype: In which they were then; None: it is not said.
        where: Where it is named.

    Raises:
        ModelError: The fingerprint is of other weights.
    """
    if fingerprint is None or is_the_base(model, fingerprint, dtype):
        return
    then, now = fingerprint[:12], str(source_fingerprint(model))[:12]
    dtype_then, dtype_now = dtype or "float32", base_dtype(model)
    hint = "load the base's revision that it names"
    if dtype_now not in ("float32", dtype_then):  # rounded when it was loaded, so what was there before is lost
        then, now = f"{then} in {dtype_then}" if dtype else then, f"{now} in {dtype_now}"
        may = "it was" if dtype else "it may have been"
        hint = f"{may} trained on the base in {dtype_then}: set model.dtype: {dtype_then}; or {hint}"
    weights = f"({then} then, {now} of {public_identity(model)[0]} here)"
    raise ModelError(f"{name} was trained on other weights of {made_for} {weights}", where, hint)


def fresh_adapter(
    model: nn.Module, config: PeftConfig, adapter_name: str = "default", where: str = "peft.adapter"
) -> PeftModel:
    """The model with an adapter of a finished one's config, whose numbers are still to come."""
    config = _without_weight_init(config)
    config.inference_mode, config.base_model_name_or_path = False, None  # PEFT warns of a base by another name
    if "Shira" in type(config).__name__:  # its sparse tensors go unchecked, as usual; said, so that torch does not warn
        torch.sparse.check_sparse_tensor_invariants.disable()
    without_extension(config)
    with _explained(model, where):
        return get_peft_model(model, config, adapter_name)


def _put_tensors(policy: PeftModel, saved: SavedAdapter) -> None:
    """The numbers of a saved adapter, with what it began from; tensors of the base in its file must be this base's."""
    own, base = load_file(saved.weights), dict(base_parameters(policy))
    for name in own.keys() - _tensors_in_file(policy).keys():
        if not torch.equal(own.pop(name).to(base[name_in_base(name)]), base[name_in_base(name)]):
            raise ModelError(f"{saved.name} brings other weights of the base: {name_in_base(name)}", "peft.adapter")
    if saved.start:
        own = lift_anchor(policy, own)
    elif method_of(saved.config).fixed.get("init_lora_weights"):  # plain PEFT decomposes again when it loads
        function_at(method_of(saved.config).starts)(policy, {})
    set_peft_model_state_dict(policy, own, low_cpu_mem_usage=False)
    # PEFT makes factors anew as it loads a pattern of ranks, in the base's type, in which small steps are lost.
    policy.base_model._cast_adapter_dtype(policy.active_adapter, autocast_adapter_dtype=True)


def own_method(saved: SavedAdapter) -> Method:
    """The method that a saved adapter was trained with, as far as its files tell."""
    return METHODS.get(saved.start or "") or method_of(saved.config)


def adapter_tensors(policy: PeftModel) -> dict[str, torch.Tensor]:
    """Every tensor that the adapter adds to the base, by name, frozen ones and buffers included; not copies."""
    own = f".{policy.active_adapter}"
    tensors = {name: p.data for name, p in policy.named_parameters() if not is_of_the_base(policy, name)}
    tensors |= {name: b for name, b in policy.named_buffers() if own in name}
    return tensors


def load_adapter_tensors(policy: PeftModel, saved: Mapping[str, torch.Tensor]) -> None:
    """Puts back what :func:`adapter_tensors` gave, bit for bit.

    Raises:
        BrokenPromiseError: The tensors are those of another adapter.
    """
    present = adapter_tensors(policy)
    different = [name for name, t in present.items() if name not in saved or saved[name].shape != t.shape]
    different += [name for name in saved if name not in present]
    if different:
        raise BrokenPromiseError(f"the checkpoint holds another adapter: {', '.join(sorted(different)[:3])}")
    with torch.no_grad():
        for name, tensor in present.items():
            tensor.copy_(saved[name])


@contextlib.contextmanager
def without_harmless_warnings() -> Iterator[None]:
    """Drops what PEFT warns of where nothing is wrong."""
    with warnings.catch_warnings():
        for about in _HARMLESS:
            warnings.filterwarnings("ignore", about)
        yield


def freeze_parts(policy: PeftModel, parts: tuple[str, ...]) -> None:
    """Freezes parts of the active adapter, by PEFT's names for them (``lora_A``)."""
    for layer in policy.modules():
        if isinstance(layer, BaseTunerLayer):
            for part in parts:
                for name, held in getattr(layer, part, {}).items():
                    if name == policy.active_adapter:
                        held.requires_grad_(False)


def check_trainable(model: nn.Module) -> None:
    """Refuses a model in which nothing would be trained.

    Raises:
        ModelError: No parameter requires a gradient.
    """
    if not any(parameter.requires_grad for parameter in model.parameters()):
        hint = "load an adapter with is_trainable=True, or pass a peft_config that matches some layer"
        raise ModelError("the model has no trainable parameters: training would change nothing", hint=hint)


def check_untouched_base(policy: PeftModel) -> None:
    """Refuses a policy of which more is trained than the one adapter that is saved, or whose base was written to.

    Raises:
        ModelError: Says what it is.
    """
    active, config = list(policy.base_model.active_adapters), policy.peft_config[policy.active_adapter]
    if active != [policy.active_adapter]:
        what = f"its active adapters are {', '.join(active) or 'none'}"
        what += f", and {policy.active_adapter} alone would be saved"
        raise ModelError(what, "model", f"model.set_adapter({policy.active_adapter!r})")
    own = [name for name, p in policy.named_parameters() if p.requires_grad and is_of_the_base(policy, name)]
    if own:
        what = f"{name_in_base(own[0])} of the base requires a gradient, and only the adapter is saved"
        raise ModelError(what, "model", "requires_grad_(False), or modules_to_save in the adapter's config")
    start = initialisation_of(config)
    if start is not None and start.writes:
        what = f"the initialisation {config.init_lora_weights!r} of this PeftModel has changed the weights of its base"
        what += ", so that the base's policy is lost and the adapter would belong to no published model"
        hint = "pass the base and peft_config=..., or the base and PeftRLConfig(adapter=...) to continue"
        raise ModelError(what, "model", hint)


def _without_weight_init(config: PeftConfig) -> PeftConfig:
    """The config with an initialisation that leaves the base alone; ``methods/starts.py`` makes the other."""
    config = copy.deepcopy(config)
    start = initialisation_of(config)
    if start is not None and start.writes:
        config.init_lora_weights = True
    return config


def _tensors_in_file(policy: PeftModel) -> dict[str, torch.Tensor]:
    """The adapter's tensors, by PEFT's names for them in a file."""
    with without_harmless_warnings():
        tensors: dict[str, torch.Tensor] = get_peft_model_state_dict(policy, save_embedding_layers=False)
    return tensors


def _check_fits(policy: PeftModel, saved: SavedAdapter) -> None:
    """Names and shapes in the file must be those that the base gives the adapter."""
    anchored = bool(saved.start)
    expected = {name: _shape_in_file(name, t, anchored=anchored) for name, t in _tensors_in_file(policy).items()}
    wrong = [
        f"{name} is {_shape(shape)} there, {_shape(expected[name])} here"
        for name, shape in saved.shapes.items()
        if name in expected and expected[name] != shape
    ]
    # The base's own, which PEFT may save beside an adapter on embeddings.
    of_base = {name for name, _ in base_parameters(policy)}
    others = [name for name in saved.shapes if name not in expected]
    wrong += [f"{n} is only there" for n in others if not (is_of_the_base(policy, n) and name_in_base(n) in of_base)]
    wrong += [f"{name} is only here" for name in expected if name not in saved.shapes]
    if wrong:
        base, more = saved.config.base_model_name_or_path, f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        what = f"{saved.name} does not fit this base, it was made for {base or 'another one'}: {wrong[0]}{more}"
        raise ModelError(what, "peft.adapter")


def _shape_in_file(name: str, tensor: torch.Tensor, *, anchored: bool) -> tuple[int, ...]:
    """The shape that a tensor of the adapter has in a file; with its anchor a factor has twice the rank."""
    shape = tuple(tensor.shape)
    if anchored and name.endswith("lora_A.weight"):
        return (2 * shape[0], shape[1])
    return (shape[0], 2 * shape[1]) if anchored and name.endswith("lora_B.weight") else shape


def _check_numbers(policy: PeftModel, saved: SavedAdapter) -> None:
    """Non-finite weights would spread into every completion; one tensor at a time, before a base is loaded.

    Positions in a matrix must lie in it: torch's sparse tensors go unchecked and write wherever they point.
    """
    with safe_open(saved.weights, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 (no mapping)
            values = file.get_tensor(name)
            if not values.is_floating_point():
                size = policy.get_submodule(name.rpartition(".")[0]).get_base_layer().weight.shape
                flat = getattr(saved.config, "num_vectors", size.numel())  # VBLoRA's bank
                ends = torch.tensor(size).unsqueeze(1) if name.endswith(POSITIONS) else flat
                if not ((values >= 0) & (values < ends)).all():
                    what = f"{saved.name} has positions outside of W ({_shape(size)}) in {name}"
                    raise ModelError(what, "peft.adapter")
            elif not (finite := torch.isfinite(values)).all():
                wrong = f"{int((~finite).sum()):,} of {values.numel():,} in {name}"
                raise ModelError(f"{saved.name} has weights that are not finite: {wrong}", "peft.adapter")


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(str(size) for size in shape)


@contextlib.contextmanager
def _explained(model: nn.Module, where: str = "") -> Iterator[None]:
    """Turns what PEFT raises for a config that the model does not allow into one line."""
    try:
        with without_harmless_warnings():
            yield
    except (*_REFUSALS, ImportError) as error:
        if isinstance(error, NotImplementedError) and "meta" in str(error):
            raise
        reason = first_line(error)
        on_targets = reason.startswith("Target module") or "target_modules" in reason
        hint = f"the linear layers are {', '.join(linear_names(model))}; or all-linear" if on_targets else ""
        place = where or ("peft.target_modules" if on_targets else "peft.kwargs")
        raise ModelError(f"PEFT refuses: {reason}", place, hint) from error
