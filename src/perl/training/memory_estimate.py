"""What a run will need of a GPU, from the model's config alone: for recipes and plans, before there is a model.

config, types, rank, lengths -> weights, adapter, cache of rollouts, tokens of a pass

Arithmetic only: :mod:`perl.packing.memory` measures the same on the real model before the first step, and its figures
count. Of decoders as Llama, Mistral, Qwen2 and Qwen3 have them, with a LoRA or a DoRA on all linear layers; others are
not estimated. All sizes are bytes.
"""

from dataclasses import dataclass, replace

import torch

from perl.packing.divergence import divergence_bytes
from perl.packing.head import head_bytes
from perl.packing.memory import CPU_TOKENS, MemoryPlan, TokenBytes, plan_memory
from perl.training.counted import CountedDecoder
from perl.training.decoder import (
    ALONE,
    Decoder,
    ModelSharing,
    TrainedBytes,
    Types,
    base_bytes,
    cached_bytes,
    trained_bytes,
    weight_bytes,
)
from perl.training.hardware import GIB

# The CUDA context and the libraries' memory, not measured yet; and what Python and the libraries hold of a CPU's memory
# when a run has read its recipe and its data, before it loads a model: 0.66 to 0.70 GiB were measured.
_CONTEXT, _CONTEXT_ON_CPU = 0.6 * GIB, 0.7 * GIB
# A CPU's heap keeps what rollouts and passes have freed, in gaps that larger tensors do not fit into: 1.2 to 1.5 times
# what they hold at once was taken in steps of a real model (docs/real-model.md).
_HEAP = 1.5
_FLOAT32 = 4
# Linear layers of a decoder layer; each keeps A x for the gradient of B.
_LINEARS = 7


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
class GpuWork:
    """What a run does on a GPU.

    Attributes:
        longest_row: Tokens of the longest prompt with its completion.
        completions: That transformers write at once; 0: something else writes them.
        engine_share: Of the device's memory, for vLLM in this process.
        attention: How.
        fused_head: Whether the head's derivative is taken in its forward pass.
        fixed_tokens: Tokens of a micro-batch, where the recipe sets them.
        teacher: Numbers of the teacher's adapter, 0 where the teacher is the base; None: no teacher.
        pass_tokens: Of the longest micro-batch at the lengths that are reckoned with, on a CPU, where the budget is a
            number; None: it is full.
        dora: Whether the LoRA's weights are decomposed.
    """

    longest_row: int
    completions: int = 0
    engine_share: float = 0.0
    attention: Attention = Attention()
    fused_head: bool = False
    fixed_tokens: int | None = None
    pass_tokens: int | None = None
    dora: bool = False
    teacher: int | None = None


@dataclass(frozen=True)
class MemoryEstimate:
    """What one process holds of its GPU's memory, or of the machine's.

    Attributes:
        weights: The base's, or this process's part.
        gathered: Under FSDP2 what is whole for a while: layers, the head.
        trained: Adapter, gradients, optimizer.
        cache: Keys and values of the rollouts that transformers write at once; 0 with another engine.
        engine: What vLLM in this process takes, its copy of the base included.
        engine_needs: What it must have at least: that copy, and the cache of one row.
        head: What the head holds while it computes: a tile of logits.
        per_token: What a pass keeps for the backward pass, the tile of logits included.
        plan: Tokens of a pass, and whether activations are computed again.
        longest_row: Tokens of the longest prompt with its completion.
        in_a_pass: Tokens that a micro-batch must hold: of the longest row, or as many as the recipe sets.
        available: Bytes that there are.
        context: Bytes of the driver's context and the libraries.
        teacher: Of the teacher's adapter, in float32; its states are in ``per_token``, its logits in ``head``.
        on_cpu: Whether it is the machine's memory, whose heap has gaps; torch's allocator on a GPU gives passes what
            rollouts have freed.
    """

    weights: float
    gathered: float
    trained: TrainedBytes
    cache: float
    engine: float
    engine_needs: float
    head: float
    per_token: TokenBytes
    plan: MemoryPlan
    longest_row: int
    in_a_pass: int
    available: float
    context: float
    teacher: float = 0.0
    on_cpu: bool = False

    @property
    def adapter(self) -> float:
        """With gradient and Adam's averages."""
        return self.trained.total

    @property
    def least(self) -> float:
        """Held while the shortest pass is run that may be, or while rollouts are written, whichever is more."""
        always = self.context + self.weights + self.adapter + self.teacher + self.engine + self.gathered
        a_pass = self.of_pass(recompute=self.plan.recompute)
        return always + (_HEAP * (a_pass + self.cache) if self.on_cpu else max(a_pass, self.cache))

    @property
    def fits(self) -> bool:
        """Whether that is less than there is, and an engine in this process has what it needs."""
        return self.least <= self.available and self.engine >= self.engine_needs

    def of_pass(self, *, recompute: bool) -> float:
        """Of the shortest pass that may be: activations and the tile of logits."""
        return self.per_token.of_pass(self.in_a_pass, self.longest_row, recompute=recompute)

    def activations(self, *, recompute: bool) -> float:
        """The same without the tile."""
        return self.of_pass(recompute=recompute) - self.head


def token_bytes(model: Decoder, types: Types, rank: int, attention: Attention, *, dora: bool = False) -> TokenBytes:
    """What a token of a packed pass keeps until the backward pass, as :func:`perl.packing.memory.measure` counts it.

    Args:
        model: The base.
        types: Of its numbers.
        rank: Of the LoRA, without dropout.
        attention: How packed rows are attended to. No kernel that it may reach keeps scores.
        dora: Whether its weights are decomposed: what base and LoRA make of a token is kept for the magnitudes.
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
    if types.quantised:  # each LoRA keeps a copy of its input in the type that is computed in
        inputs = compute * (5 * model.hidden + model.queries + model.inner)
        mlp = compute * 3 * model.inner  # gate, its activation, up
    else:  # fused: q, k and v keep one input, gate and up another one
        # What the segments return is copied together.
        inputs = stream * 2 * model.hidden + (0 if kernel else compute * model.queries)
        mlp = compute * 4 * model.inner  # and their product, the input of down
    kept_of_layers = layers * (norms + attended + inputs + mlp + compute * _LINEARS * rank)
    if isinstance(model, CountedDecoder):
        kept_of_layers = layers * (norms + compute * _LINEARS * rank) + model.attention_layers * attended
        kept_of_layers += stream * model.given + compute * model.kept
    # Rotary factors and positions; the last norm is there for the first one's, whose input has no gradient; the head
    # keeps a float32 gradient of its input.
    kept = float(kept_of_layers + 2 * stream * model.head_size + 24 + 4 * model.hidden)
    # Autocast's copies of A and B, which the fused layers do without; the largest matrix as numbers, one at a time.
    fixed = float(compute * model.lora_parameters(rank)) if types.quantised else 0.0
    unpacked = compute * model.inner * model.hidden if types.quantised else 0
    if dora:
        kept += 2 * compute * model.outputs
        # Of the largest matrix B A, its sum with W, its square; the unit matrix that A is taken of, autocast's copy.
        unpacked += 3 * compute * model.inner * model.hidden
        unpacked += (_FLOAT32 + (compute if compute < _FLOAT32 else 0)) * model.inner**2
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


def estimate_memory(
    model: Decoder,
    types: Types,
    rank: int,
    work: GpuWork,
    available: float,
    sharing: ModelSharing = ALONE,
    *,
    trained: int | None = None,
    on_cpu: bool = False,
) -> MemoryEstimate:
    """What a run needs of one GPU, or of this machine's memory for a process on its CPU.

    Args:
        model: The base.
        types: Of its numbers.
        rank: Of the LoRA on all linear layers; what another method keeps for its gradient is taken to be that of one.
        work: What is done there.
        available: Bytes that there are.
        sharing: How the processes share it.
        trained: Parameters that train; None: of that LoRA.
        on_cpu: Whether there is no GPU.
    """
    count = model.lora_parameters(rank) if trained is None else trained
    held = trained_bytes(count)
    context = _CONTEXT_ON_CPU if on_cpu else _CONTEXT
    engine = work.engine_share * available
    of_row = cached_bytes(model, types) * work.longest_row + _FLOAT32 * model.state_numbers
    weights, gathered = base_bytes(model, types, sharing)
    stored, compute = (torch.float32 if size == _FLOAT32 else torch.bfloat16 for size in (types.weights, types.compute))
    sizes, of_gpu = (model.vocabulary, model.hidden), None if on_cpu else int(available)
    head = float(head_bytes(sizes, stored, compute, of_gpu, fused=work.fused_head or on_cpu))
    per_token, teacher = token_bytes(model, types, rank, work.attention, dora=work.dora), 0.0
    if work.teacher is not None:
        # Of each token, as if all were of completions, the teacher's last hidden state, once more in the student's
        # order, and the slope in float32.
        states, teacher = model.hidden * (2 * types.weights + _FLOAT32), float(_FLOAT32 * work.teacher)
        per_token = replace(per_token, kept=per_token.kept + states, recomputed=per_token.recomputed + states)
        head = max(head, float(divergence_bytes(sizes, stored, compute, of_gpu)))
    per_token = replace(per_token, fixed=per_token.fixed + head)
    if on_cpu:  # activations are kept, whatever memory there is; a row is not cut
        in_a_pass = max(work.pass_tokens or work.fixed_tokens or CPU_TOKENS, work.longest_row)
        plan = MemoryPlan(max(work.fixed_tokens or CPU_TOKENS, work.longest_row), recompute=False)
    else:
        in_a_pass = max(work.fixed_tokens or 0, work.longest_row)
        free = available - context - weights - gathered - held.parameters - teacher - engine
        plan = plan_memory(free, count, per_token, longest_row=work.longest_row)
        plan = plan if not work.fixed_tokens else MemoryPlan(in_a_pass, plan.recompute)
    return MemoryEstimate(
        weights=weights,
        gathered=gathered,
        trained=held,
        cache=float(of_row * work.completions),
        engine=engine,
        engine_needs=weight_bytes(model, types) + of_row if engine else 0.0,
        head=head,
        per_token=per_token,
        plan=plan,
        longest_row=work.longest_row,
        in_a_pass=in_a_pass,
        available=available,
        context=context,
        teacher=teacher,
        on_cpu=on_cpu,
    )
