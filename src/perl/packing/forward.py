"""Rows through the model, packed where the model allows it: log-probs of their completions.

model, rows -> log-probs, entropies

Decides by itself whether a model can run packed rows: by what is known of its layers, then by comparing. Shapes: N
rows, T columns of the completions.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from peft import PeftModel, PeftType
from torch import nn
from transformers import PreTrainedModel

from perl.errors import first_line
from perl.packing.attention import use_packed_attention
from perl.packing.head import EntropyKind, HeadStates
from perl.packing.micro_batches import renumbered, token_batches
from perl.packing.rope import of_width
from perl.packing.rows import LEAST_COMMON, Row, ScoredTokens, pack, pad_right
from perl.packing.states import use_packed_states
from perl.policy.model import HALF, base_of, evaluating
from perl.policy.precision import compute_dtype, layers_of, tolerance_of

# Where configs keep the dropout of attention weights, which is off in the pass that compares.
_ATTENTION_DROPOUT = ("attention_dropout", "attn_pdrop", "attn_dropout", "attention_probs_dropout_prob")
# Layers of attention; all others carry a state from token to token.
_ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}
# Largest difference of a log-probability between a packed and a padded row in float32, in nats. In half precision two
# right passes differ by half a nat on a token that the model does not expect, so there the mean over tokens that it
# does expect is compared (`perl.policy.precision.tolerance_of`).
_TOLERANCE = 1e-3

# Tokens of a sliding window while rows are compared: fewer than they have.
_NARROW = 4

# Adapters that see a row as a whole; others act on each token by itself.
_BY_ROW = (PeftType.XLORA, PeftType.POLY)

MadeBeside = Callable[[ScoredTokens, HeadStates], tuple[torch.Tensor, ...]]
"""Makes tensors of (S, ...) each of the scored tokens and the head's states."""
Read = Callable[[torch.Tensor], torch.Tensor]
"""Makes (S,) numbers of (S, D) hidden states, as a critic's value head does."""


@dataclass(frozen=True)
class Passes:
    """How rows go through the model.

    Attributes:
        packed: End to end, without padding; else padded on the right to the longest of a pass.
        shared: A prompt once for the completions that share it; only packed.
        why: Why rows are not packed, or prompts not shared; empty if they are.
        longest: Tokens of the longest row that is packed, where a layer sees a row in chunks; None: any.
    """

    packed: bool
    shared: bool
    why: str = ""
    longest: int | None = None

    def packs(self, rows: Sequence[Row]) -> bool:
        """Whether these rows are packed: all of them see each other's whole past."""
        return self.packed and (self.longest is None or all(row.tokens <= self.longest for row in rows))


def score(
    model: nn.Module,
    rows: Sequence[Row],
    groups: Sequence[Sequence[int]],
    *,
    packed: bool,
    columns: int,
    entropy: EntropyKind = "value",
    read: Read | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """One pass of the model over some rows.

    Args:
        model: Prepared by :func:`perl.packing.head.add_scored_forward`; with or without wrappers.
        rows: N rows, of one width.
        groups: Indices of rows with one prompt, which is run once if ``packed``.
        packed: Whether the rows are packed.
        columns: T, of the result.
        entropy: Whether entropies are wanted, and with a gradient.
        read: What is wanted in the place of log-probabilities, of the hidden states that the tokens follow.

    Returns:
        (N, T) log-probabilities, 0 where a token is not scored, and (N, T) entropies in nats or None.
    """
    if read is not None:  # of hidden states alone, without logits
        scored, (values_S,) = _run(
            model, rows, groups, packed=packed, entropy="alone", beside=lambda _, states: (read(states.hidden_SD),)
        )
        return scored.rectangle(values_S, len(rows), columns), None
    log_probs_NT, entropies_NT, *_ = score_beside(
        model, rows, groups, packed=packed, columns=columns, entropy=entropy, beside=None
    )
    return log_probs_NT, entropies_NT


def score_beside(
    model: nn.Module,
    rows: Sequence[Row],
    groups: Sequence[Sequence[int]],
    *,
    packed: bool,
    columns: int,
    entropy: EntropyKind,
    beside: MadeBeside | None,
    balance: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None, tuple[torch.Tensor, ...], torch.Tensor | None]:
    """As :func:`score`, and what is made of the head's states besides.

    Args:
        model: As there; so are the next five.
        rows: See there.
        groups: See there.
        packed: See there.
        columns: See there.
        entropy: See there.
        beside: Scored tokens, states of the head -> tensors of (S,) each; None: nothing is made.
        balance: Whether the loss of the routers is wanted.

    Returns:
        (N, T) log-probabilities, entropies or None, what was made, (N, T) each, and the loss of the routers or None.
    """
    scored, found = _run(model, rows, groups, packed=packed, entropy=entropy, beside=beside, balance=balance)
    log_probs_S, entropies_S, *made = found
    balance_loss = made.pop() if balance else None

    def rectangle(values_S: torch.Tensor) -> torch.Tensor:
        return scored.rectangle(values_S, len(rows), columns)

    entropies_NT = None if entropies_S is None else rectangle(entropies_S)
    return rectangle(log_probs_S), entropies_NT, tuple(rectangle(values_S) for values_S in made), balance_loss


@torch.no_grad()
def last_hidden_states(
    model: nn.Module, rows: Sequence[Row], groups: Sequence[Sequence[int]], *, packed: bool
) -> tuple[torch.Tensor, ScoredTokens]:
    """The last hidden states that predict the scored tokens, without gradient and without logits.

    Args:
        model: As of :func:`score`; so are the others.
        rows: See there.
        groups: See there.
        packed: See there.

    Returns:
        (S, D), and which tokens they predict.
    """
    scored, (hidden_SD,) = _run(
        model, rows, groups, packed=packed, entropy="alone", beside=lambda _, states: (states.hidden_SD,)
    )
    return hidden_SD, scored


def _run(
    model: nn.Module,
    rows: Sequence[Row],
    groups: Sequence[Sequence[int]],
    *,
    packed: bool,
    entropy: EntropyKind | Literal["alone"],
    beside: MadeBeside | None,
    balance: bool = False,
) -> tuple[ScoredTokens, Any]:
    """One pass, and which tokens it scored; entropy and beside as in :func:`perl.packing.head.add_scored_forward`."""
    batch = pack(rows, groups) if packed else pad_right(rows)
    asked: dict[str, Any] = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
    if batch.layout is not None:
        # A mask of four dimensions is passed on to the layers as it is; ours look at the layout instead.
        nothing = torch.empty(1, 1, 0, 0, dtype=torch.bool, device=batch.input_ids.device)
        asked |= {"position_ids": batch.position_ids, "attention_mask": nothing, "packed_layout": batch.layout}
    if balance:
        asked["balance"] = True
    if beside is not None:
        asked["beside"] = partial(beside, batch.scored)
    with of_width(model, rows[0].width):
        return batch.scored, model(**asked, scored=batch.scored, entropy=entropy)


def whole_passes(passes: Sequence[Callable[[], torch.Tensor]]) -> list[torch.Tensor] | None:
    """The results of passes that a process runs by itself; None: memory did not suffice for one of them."""
    try:
        return [run() for run in passes]
    except torch.OutOfMemoryError:
        return None


@torch.no_grad()
def score_all(  # noqa: PLR0913 (what it hands on to two functions)
    model: nn.Module,
    rows: Sequence[Row],
    *,
    packed: bool,
    share: bool,
    budget: int,
    columns: int,
    copy_cost: float = 0.0,
    run: Callable[[Sequence[Callable[[], torch.Tensor]]], list[torch.Tensor] | None] = whole_passes,
    read: Read | None = None,
) -> torch.Tensor | None:
    """(N, T) log-probabilities of any number of rows without gradient, a budget of tokens at a time.

    ``copy_cost`` as in :func:`perl.packing.micro_batches.micro_batches`, ``read`` as in :func:`score`; ``run`` runs the
    passes, and gives None where memory did not suffice for one of them, as this function then does.
    """
    batches = token_batches(rows, budget=budget, packed=packed, share=share, copy_cost=copy_cost)

    def part(groups: Sequence[Sequence[int]]) -> torch.Tensor:
        indices, own = renumbered(groups)
        chosen = [rows[index] for index in indices]
        return score(model, chosen, own, packed=packed, columns=columns, entropy="none", read=read)[0]

    parts = run([partial(part, groups) for groups in batches])
    if not parts:
        return None if parts is None else torch.zeros(0, columns)
    result_NT = parts[0].new_zeros(len(rows), columns)
    for groups, part_NT in zip(batches, parts, strict=True):
        result_NT[torch.tensor(renumbered(groups)[0], device=part_NT.device)] = part_NT
    return result_NT


def choose_passes(policy: nn.Module, *, padding_free: bool, share: bool) -> Passes:
    """Whether a model's rows can be packed and its prompts shared; changes its attention implementation if so.

    Args:
        policy: Without wrappers; prepared by :func:`perl.packing.head.add_scored_forward`.
        padding_free: Whether packing is wanted.
        share: Whether sharing is wanted.
    """
    if not padding_free:
        return Passes(packed=False, shared=False)
    base = base_of(policy)
    config = base.config.get_text_config()
    types = set(getattr(config, "layer_types", None) or ())
    whys = {
        "it has an encoder": getattr(config, "is_encoder_decoder", False),
        "its attention uses dropout": _attention_drops_out(base),
    }
    by_row = next((why for why, holds in whys.items() if holds), None)
    why = adapter_by_row(policy) or by_row or use_packed_attention(base)
    why = why or (use_packed_states(base) if types - _ATTENTION_LAYERS else None) or _differs(policy, shared=False)
    if why:
        return Passes(packed=False, shared=False, why=why)
    why = _differs(policy, shared=True) if share else None
    return Passes(packed=True, shared=share and not why, why=why or "", longest=_sight(policy))


def _sight(policy: nn.Module) -> int | None:
    """How many tokens from its first on a row may have, where layers see chunks of it; None: any number."""
    config = base_of(policy).config.get_text_config()
    types = set(getattr(config, "layer_types", None) or ())
    return None if types == {"full_attention"} else getattr(config, "attention_chunk_size", None)


@contextlib.contextmanager
def _narrow_windows(model: PreTrainedModel) -> Iterator[None]:
    """Sliding windows of a few tokens, so that rows of a few more show whether they are kept."""
    holders: tuple[Any, ...] = (model.config.get_text_config(), *model.modules())
    windows = [(holder, getattr(holder, "sliding_window", None)) for holder in holders]
    wide = [(holder, window) for holder, window in windows if isinstance(window, int) and window > _NARROW]
    try:
        for holder, _ in wide:
            holder.sliding_window = _NARROW
        yield
    finally:
        for holder, window in wide:
            holder.sliding_window = window


def adapter_by_row(policy: nn.Module) -> str | None:
    """Why an adapter needs each row by itself, with the row's own arguments; None: it acts on tokens."""
    if not isinstance(policy, PeftModel):
        return None
    config = policy.active_peft_config
    if config.is_prompt_learning or config.peft_type in _BY_ROW:
        return f"{config.peft_type.value} adapts a row as a whole"
    if getattr(config, "alora_invocation_tokens", None):
        return "an activated LoRA looks for its tokens in each row"
    return None


def _attention_drops_out(model: PreTrainedModel) -> bool:
    config = model.config.get_text_config()
    return any(getattr(config, name, None) for name in _ATTENTION_DROPOUT)


def drops_out(policy: nn.Module) -> bool:
    """Whether a pass in training mode draws what it leaves out, for each row anew."""
    drawn = any(isinstance(module, nn.Dropout) and module.p > 0 for module in policy.modules())
    return drawn or _attention_drops_out(base_of(policy))


def _differs(policy: nn.Module, *, shared: bool) -> str | None:
    """Why packed rows do not give the numbers of padded ones; None if they do."""
    vocabulary = base_of(policy).config.get_text_config().vocab_size
    rows, groups = _probe(vocabulary, next(policy.parameters()).device, _sight(policy), shared=shared)
    columns = max(row.completion.numel() for row in rows)
    dtype = compute_dtype(policy)
    with evaluating(policy), _narrow_windows(base_of(policy)), torch.no_grad():
        if dtype in HALF:
            rows = [_continued(policy, row) for row in rows]
        expected, _ = score(policy, rows, groups, packed=False, columns=columns, entropy="none")
        try:
            found, _ = score(policy, rows, groups, packed=True, columns=columns, entropy="none")
        except Exception as error:  # noqa: BLE001 (a model's own code, of which any kind may come; rows are padded then)
            return first_line(error)
    differences_NT, limit = (found - expected).abs(), _TOLERANCE
    difference = differences_NT.max().item()
    if dtype in HALF:
        limit = tolerance_of(dtype, layers_of(policy))
        difference = differences_NT.sum().item() / sum(row.completion.numel() for row in rows)
    if difference <= limit:
        return None
    return f"with {'prompts shared' if shared else 'rows packed'} its log-probabilities change by {difference:.1e} nats"


def _continued(model: nn.Module, row: Row) -> Row:
    """The row with the tokens that the model itself would write in the place of its completion, the likeliest ones."""
    tokens = row.prompt
    for _ in range(row.completion.numel()):
        logits_V = model(input_ids=tokens[None], attention_mask=torch.ones_like(tokens)[None]).logits[0, -1]
        tokens = torch.cat([tokens, logits_V.argmax()[None]])
    return replace(row, completion=tokens[row.prompt.numel() :])


def _probe(
    vocabulary: int, device: torch.device, sight: int | None, *, shared: bool
) -> tuple[list[Row], list[list[int]]]:
    """A few rows of different lengths; if ``shared`` their prompts begin alike. The global random state stays."""
    generator = torch.Generator().manual_seed(0)

    def tokens(count: int) -> torch.Tensor:
        return torch.randint(vocabulary, (count,), generator=generator).to(device)

    lengths = {5: (3, 1, 6), 3: (9, 2)}  # of a prompt: of its completions
    rows, alike = [], tokens(LEAST_COMMON if shared and (sight is None or sight >= 2 * LEAST_COMMON) else 0)
    for length, counts in lengths.items():
        prompt = torch.cat([alike, tokens(length)])
        rows += [Row(prompt, tokens(count), torch.ones(count, dtype=torch.bool)) for count in counts]
    return rows, [[0, 1, 2], [3, 4]] if shared else [[index] for index in range(len(rows))]
