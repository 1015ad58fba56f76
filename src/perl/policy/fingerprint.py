"""Which base a model is: SHA-256 over its parameters, the same with and without an adapter, in any type.

model -> fingerprint, type; fingerprint -> whether the base is the one it was taken of

Of a multimodal checkpoint its language model counts: its towers may have been let go.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator

import torch
from torch import nn

from perl.methods.base_parameters import is_packed, parts_of
from perl.policy.model import HALF, base_of, base_parameters, empty_of, layer_of
from perl.policy.multimodal import towers
from perl.policy.quantised import quantised_fingerprint, source_tensors, was_quantised
from perl.run.shards import is_sharded, whole

# Types in which people load a base.
_LOADED_AS = ("bfloat16", "float32", "float16", "float64")


def source_fingerprint(model: nn.Module, dtype: torch.dtype | None = None) -> str | None:
    """SHA-256 of the base as its checkpoint has it, in the type in which it was loaded: what an adapter belongs to.

    That of a base which was quantised as it was loaded is the one that it has without quantisation: of its quantised
    layers the numbers in the checkpoint are taken. Of any other base it is :func:`base_fingerprint`.

    Args:
        model: The base, with or without an adapter.
        dtype: As in :func:`base_fingerprint`.

    Returns:
        None where the base was quantised and its checkpoint cannot be read tensor by tensor.
    """
    if not was_quantised(base_of(model)):
        return base_fingerprint(model, dtype)
    base = base_of(model)
    held = {name: p for name, p in base_parameters(model) if not name.startswith(_of_towers(base))}
    layers = {layer_of(name) for name, parameter in held.items() if is_packed(parameter)}
    shapes = {name: tuple(parameter.shape) for name, parameter in empty_of(base).named_parameters()}
    if not held.keys() <= shapes.keys():
        return None
    taken = {name: shapes[name] for name in held if layer_of(name) in layers}  # biases too, bitsandbytes rounds them
    source = source_tensors(str(base.config.name_or_path), getattr(base.config, "_commit_hash", None), taken)
    if source is None:
        return None
    loaded_as, every = getattr(torch, base_dtype(model)), _as_loaded(model)
    return digest_tensors(((n, next(source)[1].to(loaded_as) if n in taken else t) for n, t in every), dtype)


def base_fingerprint(model: nn.Module, dtype: torch.dtype | None = None) -> str:
    """SHA-256 over names, shapes, types and bytes of the base's parameters, the same with and without an adapter.

    A parameter that was made float32 in a base of half precision, and still holds its numbers of half precision, counts
    as it was loaded; so an output head that is computed in float32 makes it no other base.

    Args:
        model: The base, with or without an adapter.
        dtype: Type that floating numbers are rounded to first; None: as they were loaded.
    """
    return digest_tensors(_as_loaded(model), dtype)


def answering_fingerprint(model: nn.Module) -> str:
    """SHA-256 that names the base as it answers: a base that was quantised is not the one that it was made from.

    Scores, cards and the zoo name a base by it.

    Args:
        model: The base, with or without an adapter.
    """
    if not was_quantised(base_of(model)):
        return base_fingerprint(model)
    return quantised_fingerprint(base_of(model), source_fingerprint(model) or base_fingerprint(model))


def base_dtype(model: nn.Module) -> str:
    """Type of most of the base's floating numbers, as ``model.dtype`` has it: ``bfloat16``."""
    numbers: Counter[torch.dtype] = Counter()
    for _, parameter in base_parameters(model):
        if parameter.is_floating_point():
            numbers[parameter.dtype] += parameter.numel()
    return str(numbers.most_common(1)[0][0]).removeprefix("torch.")


def is_the_base(model: nn.Module, fingerprint: str, dtype: str | None = None) -> bool:
    """Whether a fingerprint is of the weights that this base was loaded from, in whatever type it was taken.

    Weights in float32 are rounded as loading them in half precision would; weights of a half-precision checkpoint are
    the same numbers in float32; a base that was quantised as it was loaded is the one without quantisation. Only a base
    that was rounded when it was loaded cannot be told from another one, and one whose checkpoint cannot be read is
    taken for the right one.

    Args:
        model: The base.
        fingerprint: As :func:`source_fingerprint` gave it for a base of any type.
        dtype: That type, if it is known.
    """
    now = source_fingerprint(model)
    if now in (None, fingerprint):
        return True
    present = {p.dtype for _, p in base_parameters(model) if p.is_floating_point()}
    others = [getattr(torch, name) for name in _LOADED_AS if dtype in (None, name)]
    return any(source_fingerprint(model, other) == fingerprint for other in others if present != {other})


def digest_tensors(tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype | None) -> str:
    """SHA-256 over tensors in the order in which they come, floating ones rounded to a type first.

    Args:
        tensors: By name, in the order of their names where it is to be a base's fingerprint.
        dtype: That type; None: each keeps its own.
    """
    digest = hashlib.sha256()
    for name, tensor in tensors:
        if dtype is not None and tensor.is_floating_point() and not is_packed(tensor):
            tensor = tensor.to(dtype)
        for part, plain in parts_of(name, tensor):
            digest.update(f"{part} {tuple(plain.shape)} {plain.dtype}".encode())
            digest.update(plain.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _as_loaded(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The base's parameters by name, each in the type in which it was loaded as far as its numbers tell."""
    base, usual = base_of(model), getattr(torch, base_dtype(model))
    # Parts of the names of what transformers loads in float32 whatever type is asked for.
    lists = ["_keep_in_fp32_modules_strict", *(["_keep_in_fp32_modules"] if usual == torch.float16 else [])]
    kept = {part.strip("*") for name in lists for part in getattr(base, name, None) or ()}
    held = sorted((name, p) for name, p in base_parameters(model) if not name.startswith(_of_towers(base)))
    sharded = is_sharded(base)
    biases = {f"{layer_of(name)}.bias" for name, p in held if is_packed(p)} if was_quantised(base) else set()
    for name, parameter in held:
        tensor = whole(parameter.detach())
        if sharded:  # a copy of what is whole now, which FSDP2 will want to give back
            tensor = tensor.clone()
        if is_packed(tensor):
            yield name, tensor
            continue
        if name in biases:  # bitsandbytes puts them into the type that it computes in, in the first pass
            tensor = tensor.to(torch.bfloat16)
        elif tensor.dtype == torch.float32 and usual in HALF and not any(part in name for part in kept):
            narrow = tensor.to(usual)
            tensor = narrow if torch.equal(narrow.to(tensor.dtype), tensor) else tensor
        yield name, tensor


def _of_towers(base: nn.Module) -> tuple[str, ...]:
    """What the names of parameters begin with that no fingerprint counts."""
    return tuple(f"{tower}." for tower in towers(base))
