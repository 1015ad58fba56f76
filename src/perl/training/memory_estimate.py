"""What a run will need of a GPU, from the model's config alone: for recipes and plans, before there is a model.

config, types, rank, lengths -> weights, adapter, cache of rollouts, tokens of a pass

Arithmetic only: :mod:`perl.packing.memory` measures the same on the real model before the first step, and its figures
count. Of decoders as Llama, Mistral, Qwen2 and Qwen3 have them, with a LoRA on all linear layers; others are not
estimated. All sizes are bytes.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from peft import LoraConfig, PeftConfig

from perl.packing.attention import KERNEL_CALL, Machine, needs_every_head
from perl.packing.head import head_bytes
from perl.packing.memory import BYTES_PER_TRAINED, MemoryPlan, TokenBytes, plan_memory
from perl.recipe import Recipe
from perl.trainer.config import PeftRLConfig

GIB = 2**30
# What is there of GPUs as they are sold: a T4, an L4 or A10G, an L40S or A6000, an A100 or H100.
GPUS = {"16 GB": 14.7 * GIB, "24 GB": 22.0 * GIB, "48 GB": 44.4 * GIB, "80 GB": 79.2 * GIB}
# Whose layers are counted here.
_KNOWN = ("llama", "mistral", "qwen2", "qwen3")
# The CUDA context and the libraries' memory; not measured yet.
_CONTEXT = 0.6 * GIB
_FLOAT32 = 4
# NF4 with doubly quantised scales: half a byte a weight, a byte for 64 of them, a float32 for 256 of those.
_NF4 = 0.5 + 1 / 64 + 4 / (64 * 256)
# Linear layers of a decoder layer; each keeps A x for the gradient of B.
_LINEARS = 7


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
        """Weights of the matrices inside the layers, which NF4 quantises."""
        attention = 2 * self.hidden * (self.queries + self.keys)
        return self.layers * (attention + 3 * self.hidden * self.inner)

    @property
    def parameters(self) -> int:
        """All, a tied head once."""
        norms = 2 * self.hidden + (2 * self.head_size if self.normed_heads else 0)
        embeddings = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return self.linear_parameters + self.layers * (norms + self.biases) + self.hidden + embeddings

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
        nf4: Whether the layers' matrices are in 4 bits.
    """

    weights: int = 2
    compute: int = 2
    nf4: bool = False


@dataclass(frozen=True)
class Attention:
    """How packed rows are attended to, as :func:`perl.packing.attention.packed_attention` decides it on a machine.

    Attributes:
        kernel: Whether one call takes all segments, which begins with compute capability 8.0; else SDPA takes each.
        grouped: Whether keys and values are given as they are; else repeated, once for each head of the query.
        shared: Whether completions in a pass see one prompt.
    """

    kernel: bool = True
    grouped: bool = True
    shared: bool = False


@dataclass(frozen=True)
class Work:
    """What a run does on a GPU.

    Attributes:
        longest_row: Tokens of the longest prompt with its completion.
        completions: That transformers write at once; 0: something else writes them.
        engine_share: Of the device's memory, for vLLM in this process.
        attention: How.
        fused_head: Whether the head's derivative is taken in its forward pass.
        fixed_tokens: Tokens of a micro-batch, where the recipe sets them.
    """

    longest_row: int
    completions: int = 0
    engine_share: float = 0.0
    attention: Attention = Attention()
    fused_head: bool = False
    fixed_tokens: int | None = None


@dataclass(frozen=True)
class MemoryEstimate:
    """What a GPU will hold.

    Attributes:
        weights: The base's.
        adapter: With gradient and Adam's averages.
        cache: Keys and values of the rollouts that transformers write at once; 0 with another engine.
        engine: What vLLM in this process takes, its copy of the base included.
        per_token: What a pass keeps for the backward pass, the tile of logits included.
        plan: Tokens of a pass, and whether activations are computed again.
        longest_row: Tokens of the longest prompt with its completion.
        in_a_pass: Tokens that a micro-batch must hold: of the longest row, or as many as the recipe sets.
        gpu: Its name in :data:`GPUS`.
    """

    weights: float
    adapter: float
    cache: float
    engine: float
    per_token: TokenBytes
    plan: MemoryPlan
    longest_row: int
    in_a_pass: int
    gpu: str

    @property
    def least(self) -> float:
        """Held while the shortest pass is run that may be, or while rollouts are written, whichever is more."""
        passes = self.per_token.of_pass(self.in_a_pass, self.longest_row, recompute=self.plan.recompute)
        return _CONTEXT + self.weights + self.adapter + self.engine + max(passes, self.cache)

    @property
    def fits(self) -> bool:
        """Whether that is less than there is."""
        return self.least <= GPUS[self.gpu]


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
    return (model.parameters - linear) * types.weights + linear * (_NF4 if types.nf4 else types.weights)


def cached_bytes(model: Decoder, types: Types) -> int:
    """Keys and values of a token in a cache of rollouts."""
    return 2 * model.layers * model.keys * types.compute


def token_bytes(model: Decoder, types: Types, rank: int, attention: Attention) -> TokenBytes:
    """What a token of a packed pass keeps until the backward pass, as :func:`perl.packing.memory.measure` counts it.

    Args:
        model: The base.
        types: Of its numbers.
        rank: Of the LoRA, without dropout.
        attention: How packed rows are attended to. No kernel that it may reach keeps scores.
    """
    stream, compute, layers = types.weights, types.compute, model.layers
    kernel = attention.kernel
    norms = 2 * (4 * model.hidden + 4)  # each keeps what it divides in float32, and by what
    if model.normed_heads:
        norms += 4 * (model.queries + model.keys) + 4 * (model.heads + model.keys // model.head_size)
    seen = compute * 2 * (model.keys if attention.grouped else model.queries)  # k and v
    attended = compute * 2 * model.queries + seen + 4 * model.heads  # q, result; its normaliser
    by_segment = attention.shared and not kernel
    if by_segment:  # a completion's keys are copied behind the prompt's
        attended += seen
    if types.nf4:  # each LoRA keeps a copy of its input in the type that is computed in
        inputs = compute * (5 * model.hidden + model.queries + model.inner)
        mlp = compute * 3 * model.inner  # gate, its activation, up
    else:  # fused: q, k and v keep one input, gate and up another one
        # What the segments return is copied together.
        inputs = stream * 2 * model.hidden + (0 if kernel else compute * model.queries)
        mlp = compute * 4 * model.inner  # and their product, the input of down
    layer = norms + attended + inputs + mlp + compute * _LINEARS * rank
    # Rotary factors and positions; the last norm is there for the first one's, whose input has no gradient; the head
    # keeps a float32 gradient of its input.
    kept = float(layers * layer + 2 * stream * model.head_size + 24 + 4 * model.hidden)
    # Autocast's copies of A and B, which the fused layers do without; the largest matrix as numbers, one at a time.
    fixed = float(compute * model.lora_parameters(rank)) if types.nf4 else 0.0
    unpacked = compute * model.inner * model.hidden if types.nf4 else 0
    pair = float(compute * layers) if by_segment else 0.0  # the mask of a completion and its prompt, as numbers
    return TokenBytes.of_layers(
        layers,
        inputs=stream * layers * model.hidden,
        kept=kept,
        fixed=fixed,
        besides=unpacked,
        pair=pair,
        copy=float(layers * seen) if attention.shared else 0.0,
    )


def estimate_memory(model: Decoder, types: Types, rank: int, gpu: str, work: Work) -> MemoryEstimate:
    """What a run needs of one GPU.

    Args:
        model: The base.
        types: Of its numbers.
        rank: Of the LoRA on all linear layers.
        gpu: One of :data:`GPUS`.
        work: What is done there.
    """
    trained = model.lora_parameters(rank)
    weights, engine = weight_bytes(model, types), work.engine_share * GPUS[gpu]
    stored, compute = (torch.float32 if size == _FLOAT32 else torch.bfloat16 for size in (types.weights, types.compute))
    sizes = (model.vocabulary, model.hidden)
    head = head_bytes(sizes, stored, compute, int(GPUS[gpu]), fused=work.fused_head)
    per_token = token_bytes(model, types, rank, work.attention)
    per_token = replace(per_token, fixed=per_token.fixed + head)
    in_a_pass = max(work.fixed_tokens or 0, work.longest_row)
    free = GPUS[gpu] - _CONTEXT - weights - _FLOAT32 * trained - engine
    plan = plan_memory(free, trained, per_token, longest_row=work.longest_row)
    return MemoryEstimate(
        weights=weights,
        adapter=float((_FLOAT32 + BYTES_PER_TRAINED) * trained),
        cache=float(cached_bytes(model, types) * work.longest_row * work.completions),
        engine=engine,
        per_token=per_token,
        plan=plan if not work.fixed_tokens else MemoryPlan(in_a_pass, plan.recompute),
        longest_row=work.longest_row,
        in_a_pass=in_a_pass,
        gpu=gpu,
    )


def recipe_estimates(
    recipe: Recipe,
    arguments: PeftRLConfig,
    base: Any,  # noqa: ANN401 (a config of transformers)
    adapter: PeftConfig | None,
    longest_row: int,
) -> list[MemoryEstimate]:
    """The same run on each of :data:`GPUS`; none for a run on the CPU, an unknown model, or another method than LoRA.

    Args:
        recipe: Of the run.
        arguments: Of its trainer.
        base: The model's config.
        adapter: The adapter's.
        longest_row: Tokens of the longest prompt with its completion.
    """
    model = decoder_of(base)
    if recipe.engine.device == "cpu" or model is None or adapter is None or not _is_plain(adapter):
        return []
    engine = recipe.rollout.capabilities
    work = Work(
        longest_row,
        completions=0 if engine.takes_updates else arguments.generation_batch_size,
        engine_share=arguments.vllm_gpu_memory_utilization if engine.in_process else 0.0,
        attention=attention_of(arguments, fp16=bool(recipe.train.get("fp16"))),
        fused_head=bool(arguments.fused_head),
        fixed_tokens=arguments.train_tokens_per_microbatch,
    )
    return [estimate_memory(model, types_of(recipe, base), adapter.r, gpu, work) for gpu in GPUS]


def attention_of(arguments: PeftRLConfig, *, fp16: bool) -> Attention:
    """Of a run on a GPU, with the torch that is installed."""
    shared = bool(arguments.padding_free and arguments.share_prompts)
    if fp16:  # for GPUs without bfloat16, which have no kernel either
        return Attention(kernel=False, grouped=not needs_every_head(Machine("cuda")), shared=shared)
    return Attention(grouped=KERNEL_CALL is not None and KERNEL_CALL.grouped, shared=shared)


def _is_plain(adapter: PeftConfig) -> bool:
    """Whether an adapter is a LoRA on all linear layers and no more."""
    if type(adapter) is not LoraConfig or adapter.target_modules != "all-linear":
        return False
    return not (adapter.use_dora or adapter.lora_dropout or adapter.modules_to_save)


def types_of(recipe: Recipe, base: Any) -> Types:  # noqa: ANN401 (a config of transformers)
    """The types of a recipe's numbers on a GPU."""
    name = recipe.model.dtype if recipe.model.dtype != "auto" else getattr(base, "dtype", None) or "float32"
    weights = (getattr(torch, name) if isinstance(name, str) else name).itemsize
    mixed = recipe.train.get("bf16") is not False or bool(recipe.train.get("fp16"))
    return Types(weights, 2 if mixed else weights, nf4=recipe.model.quantization == "nf4")


def described(estimates: list[MemoryEstimate]) -> str:
    """A line for a plan, of the same run on GPUs of several sizes, the smallest first."""
    fitting = [estimate for estimate in estimates if estimate.fits]
    if not fitting:
        return f"more than {estimates[-1].gpu} (estimated)"
    first = fitting[0]
    parts = {"weights": first.weights, "adapter": first.adapter, "vLLM": first.engine, "rollouts": first.cache}
    shown = ", ".join(f"{name} {value / GIB:.1f}" for name, value in parts.items() if value)
    passes = (f"{e.plan.tokens:,}{' recomputed' if e.plan.recompute else ''} on {e.gpu}" for e in fitting)
    return f"{first.least / GIB:.1f} GiB at least (estimated: {shown}); tokens in a pass: {', '.join(passes)}"
