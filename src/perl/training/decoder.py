"""The sizes of a decoder that a run's cost depends on, from the model's config alone.

config of a model -> Decoder: parameters, bytes of weights, bytes of a cached token

Of decoders as Llama, Mistral, Qwen2 and Qwen3 have them. What memory, FLOPs and traffic are derived from.
"""

from dataclasses import dataclass
from typing import Any

import torch

from perl.recipe import Recipe
from perl.recipe.quantisations import QUANTISATIONS, Quantisation

# Whose layers are counted here.
_KNOWN = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True)
class Decoder:
    """The sizes of a decoder that memory depends on.

    Attributes:
        layers: That follow one another.
        hidden: Width of the residual stream.
        inner: Width inside the MLP.
        queries: Numbers of all heads of a token's query.
        keys: Of a token's key, and of its value.
        heads: Of the query.
        head_size: Numbers of a head.
        vocabulary: Words.
        tied: Whether the head is the embedding.
        normed_heads: Whether queries and keys are normalised, as in Qwen3.
        biases: Numbers in a layer's biases.
    """

    layers: int
    hidden: int
    inner: int
    queries: int
    keys: int
    heads: int
    head_size: int
    vocabulary: int
    tied: bool
    normed_heads: bool
    biases: int

    @property
    def linear_parameters(self) -> int:
        """Weights of the matrices inside the layers, which quantising changes."""
        attention = 2 * self.hidden * (self.queries + self.keys)
        return self.layers * (attention + 3 * self.hidden * self.inner)

    @property
    def parameters(self) -> int:
        """All, a tied head once."""
        norms = 2 * self.hidden + (2 * self.head_size if self.normed_heads else 0)
        embeddings = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return self.linear_parameters + self.layers * (norms + self.biases) + self.hidden + embeddings

    @property
    def head_parameters(self) -> int:
        """Of the output head, V x d; of the embedding too."""
        return self.vocabulary * self.hidden

    @property
    def outputs(self) -> int:
        """Numbers that the linear layers make of a token, summed over the layers; of magnitudes that a DoRA adds."""
        return self.layers * (self.queries + 2 * self.keys + 2 * self.hidden + 2 * self.inner)

    def factor_products(self, rank: int) -> int:
        """Multiplications of B A, as PEFT's DoRA forms it in every forward pass: of A by a unit matrix, B by that."""
        to_inner = self.hidden * (3 * self.hidden + self.queries + 2 * self.keys + 2 * (self.hidden + self.inner))
        return (
            self.layers
            * rank
            * (to_inner + self.queries * (self.queries + self.hidden) + self.inner * (self.inner + self.hidden))
        )

    def lora_parameters(self, rank: int) -> int:
        """Of a LoRA on every linear layer."""
        attention = (self.hidden + self.queries) * 2 + (self.hidden + self.keys) * 2
        return self.layers * rank * (attention + 3 * (self.hidden + self.inner))


@dataclass(frozen=True)
class Types:
    """Bytes of a number.

    Attributes:
        weights: Of the base, and of the residual stream.
        compute: That products are taken in: autocast's, else the weights'.
        quantised: How the layers' matrices are quantised; None: they are not.
    """

    weights: int = 2
    compute: int = 2
    quantised: Quantisation | None = None


def decoder_of(config: Any) -> Decoder | None:  # noqa: ANN401 (a config of transformers)
    """The sizes in a model's config; None for a model that is not known here."""
    if config.model_type not in _KNOWN:
        return None
    heads, key_heads = config.num_attention_heads, config.num_key_value_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    queries, keys = heads * head_size, key_heads * head_size
    biases = queries + 2 * keys if config.model_type == "qwen2" else 0
    if getattr(config, "attention_bias", False):
        biases = queries + 2 * keys + config.hidden_size
    if getattr(config, "mlp_bias", False):
        biases += 2 * config.intermediate_size + config.hidden_size
    return Decoder(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        inner=config.intermediate_size,
        queries=queries,
        keys=keys,
        heads=heads,
        head_size=head_size,
        vocabulary=config.vocab_size,
        tied=bool(config.tie_word_embeddings),
        normed_heads=config.model_type == "qwen3",
        biases=biases,
    )


def weight_bytes(model: Decoder, types: Types) -> float:
    """The base's weights; of a quantised one the embedding, the head and the norms are not."""
    linear = model.linear_parameters
    rest, how = (model.parameters - linear) * types.weights, types.quantised
    if how is None:
        return rest + linear * types.weights
    return rest + linear * how.weight_bytes + model.outputs * how.row_bytes


def cached_bytes(model: Decoder, types: Types) -> int:
    """Keys and values of a token in a cache of rollouts."""
    return 2 * model.layers * model.keys * types.compute


def types_of(recipe: Recipe, base: Any) -> Types:  # noqa: ANN401 (a config of transformers)
    """The types of a recipe's numbers on a GPU."""
    name = recipe.model.dtype if recipe.model.dtype != "auto" else getattr(base, "dtype", None) or "float32"
    weights = (getattr(torch, name) if isinstance(name, str) else name).itemsize
    mixed = recipe.train.get("bf16") is not False or bool(recipe.train.get("fp16"))
    return Types(weights, 2 if mixed else weights, quantised=QUANTISATIONS.get(recipe.model.quantization or ""))


def types_on_cpu(recipe: Recipe, base: Any) -> Types:  # noqa: ANN401 (a config of transformers)
    """The same on a CPU, where ``auto`` is float32 and nothing is mixed unless it is asked for."""
    found = types_of(recipe, base)
    weights = 4 if recipe.model.dtype == "auto" else found.weights
    return Types(weights, 2 if recipe.train.get("bf16") else weights, quantised=found.quantised)
