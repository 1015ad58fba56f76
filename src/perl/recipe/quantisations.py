"""What a base can be quantised to as it is loaded, a row each, which all other rooms read.

name -> Quantisation

Imports neither torch nor the packages that quantise. A row says what is kept of a weight; what is computed with it is
the product with the number that it stands for, in the type of all else. So a completion's log-probs do not depend on
the rows beside it, which those of bitsandbytes' LLM.int8 do: it rounds activations too, and which of them depends on
the whole batch (docs/methods.md).
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from perl.recipe.optional_packages import RequiredPackage

Quantization = Literal["nf4", "int8", "fp8"]
QUANTIZATIONS: tuple[Quantization, ...] = get_args(Quantization)
"""What a base can be quantised to as it is loaded."""
EXTRA = "quantised"
_BITSANDBYTES = RequiredPackage(("bitsandbytes",), "bitsandbytes", EXTRA)
_TORCHAO = RequiredPackage(("torchao",), "torchao", EXTRA)


@dataclass(frozen=True)
class Quantisation:
    """A way to keep the weights of a base's linear layers; embeddings, norms and the head stay as they are.

    Attributes:
        name: As in ``model.quantization``.
        summary: What is kept of a weight, in one line.
        bits: Of a weight's code.
        package: That does it.
        weight_bytes: Of a weight with its part of what is kept for a block of weights.
        row_bytes: What is kept for each output besides.
        devices: Types of the devices that it is tested on, or that its package says it runs on.
        served_as: Options of ``vllm serve`` for a server with the same numbers.
        keeps_shape: Whether a parameter still has the shape of its weight.
        weight_only: Name of torchao's config; empty: another package quantises.
    """

    name: Quantization
    summary: str
    bits: int
    package: RequiredPackage
    weight_bytes: float
    row_bytes: float
    devices: tuple[str, ...]
    served_as: Mapping[str, str]
    keeps_shape: bool = True
    weight_only: str = ""

    def runs_on(self, device: str) -> bool:
        """Whether such a base is computed on a type of device."""
        return device in self.devices


def _by_torchao(name: Quantization, kept: str, config: str, row_bytes: float) -> Quantisation:
    """A row with 8 bits a weight and a scale for each output."""
    as_json = json.dumps({"_type": config, "_version": 2, "_data": {}})
    options = {"--quantization": "torchao", "--hf-overrides": json.dumps({"quantization_config_dict_json": as_json})}
    summary, devices = f"8 bits a weight: {kept}, a scale for each output", ("cpu", "cuda")
    return Quantisation(name, summary, 8, _TORCHAO, 1.0, row_bytes, devices, options, weight_only=config)


_ROWS = (
    Quantisation(
        "nf4",
        "4 bits a weight, as QLoRA has them: NF4 in blocks of 64, their scales quantised too",
        bits=4,
        package=_BITSANDBYTES,
        # half a byte a weight, a byte for 64 of them, a float32 for 256 of those
        weight_bytes=0.5 + 1 / 64 + 4 / (64 * 256),
        row_bytes=0.0,
        devices=("cpu", "cuda", "xpu", "hpu"),
        served_as={"--quantization": "bitsandbytes"},
        keeps_shape=False,
    ),
    # the scale, and a zero that symmetric codes do not use
    _by_torchao("int8", "whole numbers", "Int8WeightOnlyConfig", row_bytes=4.0 + 1.0),
    _by_torchao("fp8", "float8 (e4m3)", "Float8WeightOnlyConfig", row_bytes=4.0),
)

QUANTISATIONS: Mapping[str, Quantisation] = {row.name: row for row in _ROWS}


def quantised_by(quantization: str) -> str:
    """The package that quantised a base, by pip's name.

    Args:
        quantization: A name from the table; or what a script's own config is called, which of torchao begins with the
            name of a class.
    """
    known = QUANTISATIONS.get(quantization)
    if known is not None:
        return known.package.pip
    return (_TORCHAO if quantization[:1].isupper() else _BITSANDBYTES).pip


def in_few_bits(quantization: str | None) -> str:
    """What follows a base's name: it was quantised as it was loaded, and is another one than its name says.

    Args:
        quantization: A name from the table, or what a script's own config is called; None: it is the ordinary base.
    """
    if quantization is None:
        return ""
    known = QUANTISATIONS.get(quantization)
    if known is not None:
        return f" in {known.bits} bits ({quantization})"
    named = re.search(r"(?:int|float|fp|nf)(\d)", quantization.lower())  # Int8WeightOnly-..., Float8..., llm-int8
    return f" in {named[1]} bits ({quantization})" if named else f" quantised ({quantization})"


def quantised_base(quantization: str) -> str:
    """How a sentence calls such a base: ``a base in 8 bits (int8)``."""
    return f"a base{in_few_bits(quantization)}"
