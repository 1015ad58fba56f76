"""The sizes of a decoder that a run's cost depends on, from the model's config alone, and a process's part of them.

config of a model -> Decoder: parameters, bytes of weights, bytes of a cached token; Sharing -> bytes of a process

Of decoders as Llama, Mistral, Qwen2 and Qwen3 have them. What memory and FLOPs are derived from. The adapter and its
gradient are whole in each process under every strategy; the base is whole but under FSDP2.
"""

from dataclasses import dataclass
from typing import Any

import torch

from perl.recipe import Recipe
from perl.recipe.quantisations import QUANTISATIONS, Quantisation
from perl.recipe.sections import Strategy

# Whose layers are counted here.
_KNOWN = ("llama", "mistral", "qwen2", "qwen3")
_FLOAT32 = 4
# Adam's two averages, of each trained number.
_ADAM = 8
# Of a base in shards: the layer that computes, the one that is fetched meanwhile, and the buffer that it arrives in.
_LAYERS_WHOLE = 3


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
    def active_parameters(self) -> int:
        """Weights inside the layers that a token is multiplied with: all of them, without experts."""
        return self.linear_parameters

    @property
    def attention_layers(self) -> int:
        """Layers with attention."""
        return self.layers

    @property
    def state_numbers(self) -> int:
        """Numbers of the states that a row carries from token to token."""
        return 0

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
    """The sizes in the config of a decoder as Llama has it; None for another model."""
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
    return 2 * model.attention_layers * model.keys * types.compute


def types_of(recipe: Recipe, base: Any, *, on_cpu: bool = False) -> Types:  # noqa: ANN401 (a config of transformers)
    """The types of a recipe's numbers; on a CPU ``auto`` is float32, and nothing is mixed unless it is asked for."""
    usual = "float32" if on_cpu else getattr(base, "dtype", None) or "float32"
    name = recipe.model.dtype if recipe.model.dtype != "auto" else usual
    weights = (getattr(torch, name) if isinstance(name, str) else name).itemsize
    bf16, fp16 = recipe.train.get("bf16"), bool(recipe.train.get("fp16"))
    mixed = bool(bf16) if on_cpu else bf16 is not False or fp16
    return Types(weights, 2 if mixed else weights, quantised=QUANTISATIONS.get(recipe.model.quantization or ""))


@dataclass(frozen=True)
class ModelSharing:
    """How the processes of a run share what each would hold alone.

    Attributes:
        strategy: ``ddp`` or ``fsdp2``.
        processes: How many there are.
        of_copy: That share a copy of the base, under ``fsdp2``; 0: all.
        of_node: On each node; 0: all.
    """

    strategy: Strategy = "ddp"
    processes: int = 1
    of_copy: int = 0
    of_node: int = 0

    @property
    def parts(self) -> int:
        """That a copy of the base is in."""
        return (self.of_copy or self.processes) if self.strategy == "fsdp2" else 1


ALONE = ModelSharing()
"""One process."""


@dataclass(frozen=True)
class TrainedBytes:
    """What a process holds of the adapter.

    Attributes:
        parameters: In float32, whole in each process under every strategy.
        gradients: Whole in each process.
        optimizer: Adam's two averages.
    """

    parameters: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.parameters + self.gradients + self.optimizer


def trained_bytes(trained: int) -> TrainedBytes:
    """What a process holds of so many trained parameters, all of them float32, however many processes there are."""
    return TrainedBytes(_FLOAT32 * trained, _FLOAT32 * trained, _ADAM * trained)


def base_bytes(model: Decoder, types: Types, sharing: ModelSharing) -> tuple[float, float]:
    """The part of the base that a process keeps, and what it holds besides while a pass runs.

    FSDP2 as transformers applies it: each layer is gathered for its turn, the next one while it computes, and both are
    copied out of the buffer that they arrive in; the head stays whole between the two passes. A world of one keeps
    nothing in shards.
    """
    weights = weight_bytes(model, types)
    if sharing.parts == 1:
        return weights, 0.0
    outside = model.head_parameters * (1 if model.tied else 2) * types.weights
    layer = (weights - outside) / model.layers
    part = weights / sharing.parts
    # However few layers there are, a process never holds more than the whole.
    return part, min(_LAYERS_WHOLE * layer + model.head_parameters * types.weights, weights - part)


def bytes_into_node(
    model: Decoder, types: Types, trained: int, sharing: ModelSharing, *, training: int, scoring: int
) -> float:
    """What a node receives from the others in a step, by rings: the gradients' sum, and a base in shards over nodes.

    A ring of n processes takes each byte that it gathers (n - 1) / n times into a node, each that it adds up twice as
    often. A pass gathers each layer for its turn, forward and backward; the last norm and the head stay in between.

    Args:
        model: The base.
        types: Of its numbers.
        trained: Parameters whose gradients are averaged, in float32.
        sharing: How the processes share.
        training: Passes of a process with a gradient.
        scoring: Those without, with one for each token that transformers write.
    """
    processes, parts = sharing.processes, sharing.parts
    of_node = sharing.of_node or processes
    if of_node >= processes:
        return 0.0
    into = 2 * (processes - 1) / processes * _FLOAT32 * trained
    if parts > 1 and of_node % parts:
        weights, kept = weight_bytes(model, types), (model.head_parameters + model.hidden) * types.weights
        into += (parts - 1) / parts * (training * (2 * weights - kept) + scoring * weights)
    return into
