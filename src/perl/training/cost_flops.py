"""FLOPs that are executed for a step, rollouts included.

sizes of a model, lengths of prompts and completions, how rows are run -> FLOPs

A product of an m x k with a k x n matrix counts 2 m k n; what is elementwise is not counted. With N_b weights in the
layers' matrices, N_l in the adapter, V d in the head, d_a = heads x head_dim over L layers, and D tokens that are run:
forward 2 (N_b + N_l) D, backward 2 (N_b + 2 N_l) D, since the base has no gradient of its own; attention 4 d_a L for
each pair of a query and a key that it sees. Sizes are those of a LoRA on all linear layers but the head.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from perl.packing.micro_batches import group_tokens, renumbered, token_batches
from perl.packing.rows import Row, common_beginning
from perl.trainer.step.log_prob_passes import FORWARD_ONLY
from perl.training.decoder import Decoder

# Products over (queries, keys) that a kernel computes: scores and output; in the backward pass the scores again, and
# the gradients of queries, keys, values and probabilities.
FORWARD_PRODUCTS, BACKWARD_PRODUCTS = 2, 5


@dataclass(frozen=True)
class ModelSize:
    """What the formulas need of a model.

    Attributes:
        block: N_b, weights of the linear layers without the head.
        adapter: N_l, weights of a LoRA on all of them.
        to_embeddings: N_f and the adapter's A beside it: weights that a gradient to the embeddings would go through.
        head: V x d.
        attention: d_a x L, heads x head_dim, summed over the layers.
        each_pass: Multiplications of every forward pass, however many tokens it has: a DoRA's product of its factors.
    """

    block: int
    adapter: int
    to_embeddings: int
    head: int
    attention: int
    each_pass: int = 0

    @property
    def reference(self) -> "ModelSize":
        """With the adapter switched off."""
        return replace(self, adapter=0, each_pass=0)


@dataclass(frozen=True)
class Group:
    """The lengths of a prompt and its completions, in tokens.

    Attributes:
        live: Whether its rewards differ, so that it has a gradient.
        common: Tokens of the prompt with which those of all groups begin.
    """

    prompt: int
    completions: tuple[int, ...]
    live: bool = True
    common: int = 0


@dataclass(frozen=True)
class Execution:
    """How a process runs the rows of a step.

    Attributes:
        budget: Tokens in a micro-batch.
        packed: Whether rows go end to end; else padded to the longest.
        shared: Whether a prompt is run once for all its completions in a micro-batch.
        masked: Whether completions see a shared prompt through a mask, segment by segment, so that each query is
            multiplied with all keys.
        recompute: Whether activations are computed again in the backward pass.
        fused_head: Whether the head takes two products for each scored token; else three.
        reference: Whether there is a KL term, so a pass of the reference.
        old: Whether the old policy's log-probabilities take a pass of their own.
        critic: Sizes of the base with a critic's adapter and no head: its values take a pass, and its training one
            more; None: there is no critic.
        teacher: Sizes of the base with a teacher's adapter, whose divergence each micro-batch takes; None: no teacher.
    """

    budget: int
    packed: bool = True
    shared: bool = True
    masked: bool = False
    recompute: bool = False
    fused_head: bool = False
    reference: bool = False
    old: bool = False
    critic: ModelSize | None = None
    teacher: ModelSize | None = None

    @property
    def takes_all(self) -> bool:
        """Whether every row has a gradient, whatever its rewards."""
        return self.reference or self.critic is not None or self.teacher is not None


@dataclass(frozen=True)
class StepFlops:
    """What one process executes in a step.

    Attributes:
        training: Forward and backward passes, and what a teacher adds to them.
        scoring: Passes without gradient: reference, old policy, the critic's values.
        rollouts: Of its share of the completions, where transformers write them in the process.
        micro_batches: Forward and backward passes.
        scored: Passes without gradient.
        tokens: That the training passes run.
    """

    training: float
    scoring: float
    rollouts: float
    micro_batches: int
    scored: int
    tokens: int

    @property
    def in_training(self) -> float:
        """Without the rollouts."""
        return self.training + self.scoring


def size_of(model: Decoder, rank: int, *, dora: bool = False) -> ModelSize:
    """The sizes of a model with a LoRA, or a DoRA, of this rank on all linear layers but the head."""
    return ModelSize(
        block=model.active_parameters,
        adapter=model.lora_parameters(rank),
        to_embeddings=model.hidden * (model.queries + 2 * model.keys) + 3 * rank * model.hidden,
        head=model.head_parameters,
        attention=model.queries * model.attention_layers,
        each_pass=model.factor_products(rank) if dora else 0,
    )


def attention_pairs(queries: int, keys: int, *, causal: bool, at_end: bool = False) -> int:
    """Pairs of a query and a key that it sees.

    Args:
        queries: Number of queries.
        keys: Number of keys.
        causal: Whether query i sees the keys up to its own.
        at_end: Whether the queries stand at the end of the keys (varlen), not at their beginning (sdpa).
    """
    if not causal:
        return queries * keys
    if at_end and queries > keys:
        queries = keys  # the first ones see nothing
    offset = keys - queries if at_end else 0
    growing = min(queries, keys - offset)  # queries that see one key more than the one before
    return growing * offset + growing * (growing + 1) // 2 + (queries - growing) * keys


def executed_flops(size: ModelSize, groups: Sequence[Group], how: Execution) -> StepFlops:
    """What a process executes of a step's training half.

    Args:
        size: The model's.
        groups: Of its rows; without KL term, critic and teacher those without a gradient are left out.
        how: The rows are run.
    """
    rows = _rows_of([group for group in groups if group.live or how.takes_all])
    batches = _micro_batches(rows, how, how.budget)
    trained = [size] if how.critic is None else [size, how.critic]
    training = sum(_pass_flops(sizes, rows, batch, how, gradient=True) for sizes in trained for batch in batches)
    if how.teacher is not None:
        # Its layers, forward; of the head its logits, the policy's, their slope.
        layers, completed = replace(how.teacher, head=0), sum(row.completion.numel() for row in rows)
        training += sum(_pass_flops(layers, rows, batch, how, gradient=False) for batch in batches)
        training += 3 * 2 * how.teacher.head * completed
    all_rows = _rows_of(groups)
    found = _micro_batches(all_rows, how, FORWARD_ONLY * how.budget)
    wanted = ((size.reference, how.reference), (size, how.old), (how.critic, True))
    scored = [sizes for sizes, runs in wanted if sizes is not None and runs]
    scoring = sum(_pass_flops(sizes, all_rows, batch, how, gradient=False) for sizes in scored for batch in found)
    tokens = sum(_tokens(rows, batch, how) for batch in batches)
    return StepFlops(training, scoring, 0.0, len(trained) * len(batches), len(scored) * len(found), tokens)


def largest_pass(groups: Sequence[Group], how: Execution) -> int:
    """Tokens of the longest micro-batch of these rows."""
    rows = _rows_of(groups)
    return max((_tokens(rows, batch, how) for batch in _micro_batches(rows, how, how.budget)), default=0)


def generation_flops(
    size: ModelSize,
    rows: int,
    prompt: int,
    completion: int,
    *,
    prompts: int | None = None,
    padded: bool = True,
    common: int = 0,
) -> float:
    """Of completions that are written together, all as long as the longest: those that end are padded meanwhile.

    Args:
        size: The model's; the adapter is not merged.
        rows: Completions.
        prompt: Tokens of the longest prompt, to which the others are padded.
        completion: Of the longest completion.
        prompts: That are read, where an engine reads the prompt of a group once; None: each completion's.
        padded: Whether prompts differ in length, so that a mask has all pairs of their tokens computed.
        common: Tokens that all prompts begin with, read once.
    """
    linear, steps = 2 * (size.block + size.adapter), max(completion - 1, 0)
    read = rows if prompts is None else prompts
    # The prompt gives the first token; each later step reads one token and sees all before it.
    pairs = attention_pairs(prompt - common, prompt, causal=not (padded or common), at_end=True)
    prefill = read * (linear * (prompt - common) + 2 * size.head + 4 * size.attention * pairs)
    if common:
        prefill += linear * common + 2 * size.head + 4 * size.attention * attention_pairs(common, common, causal=True)
    seen = steps * prompt + steps * (steps + 1) // 2
    written = rows * (steps * (linear + 2 * size.head) + 4 * size.attention * seen)
    return prefill + written + 2 * size.each_pass * ((2 if common else 1) + steps)


def _rows_of(groups: Sequence[Group]) -> list[Row]:
    """Rows of these lengths, with tokens that tell groups and completions apart and stand for nothing."""
    rows = []
    for number, group in enumerate(groups):
        prompt = torch.full((group.prompt,), number, dtype=torch.int32)
        prompt[: group.common] = -1
        for place, length in enumerate(group.completions):
            tokens = torch.full((length,), place, dtype=torch.int32)
            rows.append(Row(prompt, tokens, tokens.bool()))
    return rows


def _micro_batches(rows: Sequence[Row], how: Execution, budget: int) -> list[list[list[int]]]:
    return token_batches(rows, budget=budget, packed=how.packed, share=how.packed and how.shared) if rows else []


def _tokens(rows: Sequence[Row], batch: Sequence[Sequence[int]], how: Execution) -> int:
    if how.packed:
        again = (len(batch) - 1) * common_beginning(rows, batch)
        return sum(group_tokens([rows[index] for index in members]) for members in batch) - again
    indices, _ = renumbered(batch)
    return len(indices) * max(rows[index].tokens for index in indices)


def _pass_flops(
    size: ModelSize, rows: Sequence[Row], batch: Sequence[Sequence[int]], how: Execution, *, gradient: bool
) -> float:
    """Of one micro-batch: forward, and with a gradient backward."""
    tokens, pairs = _tokens(rows, batch, how), _pairs(rows, batch, how)
    scored = sum(rows[index].completion.numel() for members in batch for index in members)
    forward = 2 * (size.block + size.adapter) * tokens + 2 * size.each_pass
    attention = 2 * size.attention * pairs  # of one product
    total = forward + FORWARD_PRODUCTS * attention + 2 * size.head * scored
    if not gradient:
        return float(total)
    total += 2 * (size.block + 2 * size.adapter - size.to_embeddings) * tokens + BACKWARD_PRODUCTS * attention
    total += (2 if how.fused_head else 4) * size.head * scored
    if how.recompute:
        total += forward + FORWARD_PRODUCTS * attention
    return float(total)


def _pairs(rows: Sequence[Row], batch: Sequence[Sequence[int]], how: Execution) -> int:
    """Pairs of queries and keys that a layer's attention multiplies."""
    if not how.packed:
        indices, _ = renumbered(batch)
        return len(indices) * max(rows[index].tokens for index in indices) ** 2
    common = common_beginning(rows, batch)
    pairs, causal = attention_pairs(common, common, causal=True), not (common and how.masked)
    for members in batch:
        prompt = rows[members[0]].prompt.numel()
        if len(members) == 1:
            tokens = rows[members[0]].tokens
            pairs += attention_pairs(tokens - common, tokens, causal=causal, at_end=True)
            continue
        pairs += attention_pairs(prompt - common, prompt, causal=causal, at_end=True)
        for index in members:
            length = rows[index].tokens - prompt
            pairs += attention_pairs(length, prompt + length, causal=not how.masked, at_end=True)
    return pairs
