"""The rows of one optimizer step, distributed over micro-batches by tokens instead of by rows.

padded micro-batches as TRL cuts them -> Window -> MicroBatch, each with the weight its tokens have in the loss

Only rows of one window, those between two optimizer updates, change places; each keeps the weight that the micro-batch
it came in gave it, so the sum of the gradients is the same. A zero-advantage sample adds exactly nothing and is left
out. Pure functions of tensors. Shapes: N rows (samples: a prompt with a completion), n of a micro-batch, T columns of
the completions.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from perl.packing.rows import Row, common_beginning

# Advantages this far below the largest are rounding, not signal: the gradient would be lost in the sum's last bit.
ZERO_ADVANTAGE = 1e-6
TAUGHT_IDS, TAUGHT_MASK = "prompt_ids_of_teacher", "prompt_mask_of_teacher"
"""The prompts as a teacher sees them, (N, .) each, padded on the left as prompts are."""
SELECTED = "selected_tokens"
"""(N, T) bool: the tokens that a loss treats apart."""
SHOWN = "shown_row"
"""(N, 1) from 1, the place of a row in the group of completions that a log shows; 0 of the others."""
SAMPLED_STEP = "sampled_step"
"""(N, T) int64, the optimizer steps that the policy which sampled a token had taken."""
STEPS_BEHIND = "steps_behind"
"""Of a whole generation batch: steps between the oldest policy that sampled of it and the one that it was made at."""
# Values a row or a token brings along, under the names of TRL's micro-batches.
_COLUMNS = (
    *("old_per_token_logps", "ref_per_token_logps", "sampling_per_token_logps"),
    *("old_values", "returns"),  # a critic's
    *(SELECTED, SHOWN, SAMPLED_STEP),
)


@dataclass(frozen=True)
class Window:
    """The accumulation window of an optimizer step: the rows between two updates, on this process.

    Attributes:
        rows: N prompts and completions.
        mask_NT: (N, T) 1 where the policy wrote a token that counts.
        weights_NT: (N, T) float32, of the tokens in the loss of the optimizer step.
        advantages: (N, 1) or (N, T) float.
        values: Other numbers of the rows, (N, T) or (N, 1), under TRL's names.
        micro_batch_N: (N,) int64, the micro-batch in which TRL would have put the row.
    """

    rows: tuple[Row, ...]
    mask_NT: torch.Tensor
    weights_NT: torch.Tensor
    advantages: torch.Tensor
    values: Mapping[str, torch.Tensor]
    micro_batch_N: torch.Tensor


@dataclass(frozen=True)
class MicroBatch:
    """Rows that go through the model together.

    Attributes:
        rows: n of them.
        groups: Indices into ``rows``, by group: members of one have the same prompt, to be run once.
        mask_NT: As in :class:`Window`, of these rows, cut to their longest completion; so are the next three.
        weights_NT: 0 everywhere in a micro-batch that only keeps step with those of other processes.
        advantages: (n, 1) or (n, T).
        values: (n, T) or (n, 1).
        micro_batch_N: (n,).
        packed: Whether they go end to end; else padded to the longest.
        counts: Whether the rows belong in the metrics.
    """

    rows: tuple[Row, ...]
    groups: tuple[tuple[int, ...], ...]
    mask_NT: torch.Tensor
    weights_NT: torch.Tensor
    advantages: torch.Tensor
    values: Mapping[str, torch.Tensor]
    micro_batch_N: torch.Tensor
    packed: bool = True
    counts: bool = True

    @property
    def tokens(self) -> int:
        """Tokens that are run, padding included."""
        again = (len(self.groups) - 1) * common_beginning(self.rows, self.groups) if self.packed else 0
        return int(self.cost(0.0)) - again

    def cost(self, copy_cost: float) -> float:
        """In tokens of a budget, as in :func:`micro_batches`; what all prompts begin with counts for each of them."""
        if not self.packed:
            return len(self.rows) * max(row.tokens for row in self.rows)
        return sum(_group_cost([self.rows[index] for index in group], copy_cost) for group in self.groups)


def rows_of(
    inputs: Mapping[str, Any], mask_NT: torch.Tensor, width_of: Callable[[int], int] = lambda _: 0
) -> list[Row]:
    """The rows of a padded batch, prompts padded on the left and completions on the right.

    Args:
        inputs: ``prompt_ids``, ``prompt_mask``, ``completion_ids``, ``completion_mask`` of (N, .) each; with a teacher
            perhaps its prompts too.
        mask_NT: (N, T) 1 where a token is to be scored.
        width_of: From :func:`perl.packing.rope.rope_width`.
    """
    prompt_lengths = inputs["prompt_mask"].sum(dim=1).tolist()
    lengths = inputs["completion_mask"].sum(dim=1).tolist()
    scored_NT = mask_NT.bool().cpu()
    width = inputs["prompt_ids"].size(1)
    rope = width_of(width + inputs["completion_ids"].size(1))
    rows = []
    for index, (prompt_length, length) in enumerate(zip(prompt_lengths, lengths, strict=True)):
        prompt = inputs["prompt_ids"][index, width - int(prompt_length) :]
        completion = inputs["completion_ids"][index, : int(length)]
        taught = None  # the prompt as the teacher sees it, if that is another one
        if TAUGHT_IDS in inputs:
            taught = inputs[TAUGHT_IDS][index][inputs[TAUGHT_MASK][index].bool()]
        rows.append(Row(prompt, completion, scored_NT[index, : int(length)], rope, taught))
    return rows


def join(
    micro_batches: Sequence[Mapping[str, Any]],
    weights: Sequence[torch.Tensor],
    width_of: Callable[[int], int] = lambda _: 0,
) -> Window:
    """One window from its micro-batches.

    Args:
        micro_batches: In order, as TRL prepares them.
        weights: (n, T) of each, from :func:`perl.algorithms.losses.token_weights`.
        width_of: From :func:`perl.packing.rope.rope_width`.
    """
    masks = [batch["completion_mask"] * batch.get("tool_mask", 1) for batch in micro_batches]
    rows = [row for batch, mask in zip(micro_batches, masks, strict=True) for row in rows_of(batch, mask, width_of)]
    columns = max(mask.size(1) for mask in masks)
    advantages = [a.unsqueeze(1) if a.dim() == 1 else a for a in (batch["advantages"] for batch in micro_batches)]
    sizes = torch.tensor([mask.size(0) for mask in masks], device=masks[0].device)
    return Window(
        rows=tuple(rows),
        mask_NT=_stacked(masks, columns),
        weights_NT=_stacked(weights, columns),
        advantages=_stacked(advantages, columns),
        values={
            name: _stacked([batch[name] for batch in micro_batches], columns)
            for name in _COLUMNS
            if micro_batches[0].get(name) is not None
        },
        micro_batch_N=torch.arange(len(masks), device=sizes.device).repeat_interleave(sizes),
    )


def rows_with_gradient(
    window: Window, *, largest_advantage: float, skip: bool, selected_act: bool = False
) -> list[int]:
    """Rows that have a gradient.

    Args:
        window: The rows.
        largest_advantage: Of the whole generation batch, as a magnitude.
        skip: Whether a zero-advantage sample adds nothing: no KL, no entropy term.
        selected_act: Whether selected tokens have a gradient whatever the advantage.

    Returns:
        Indices. A row whose tokens are all masked out never has a gradient.
    """
    trained_N = window.mask_NT.any(dim=1)
    if skip:
        acts_N = have_advantage(window.advantages, largest_advantage)
        if selected_act and SELECTED in window.values:
            acts_N |= window.values[SELECTED].any(dim=1)
        trained_N &= acts_N
    return trained_N.nonzero().flatten().tolist()


def have_advantage(advantages: torch.Tensor, largest: float | torch.Tensor) -> torch.Tensor:
    """(N,) bool, of (N,), (N, 1) or (N, T) advantages: whether a row has one that is not lost beside the largest."""
    # max_t |A_t| > 1e-6 max over the generation batch
    return advantages.abs().view(len(advantages), -1).amax(dim=1) > ZERO_ADVANTAGE * largest


def micro_batches(
    window: Window, chosen: Sequence[int], *, budget: int, packed: bool, share: bool, copy_cost: float = 0.0
) -> list[MicroBatch]:
    """Distributes rows over micro-batches.

    Args:
        window: The rows.
        chosen: Indices of those to run.
        budget: Tokens in a micro-batch; a longer row gets one of its own. 0: as the micro-batches came.
        packed: Whether rows will be packed; if not, padding counts as tokens and rows of like length go together.
        share: Whether prompts are run once for all their completions in a micro-batch.
        copy_cost: What a token of a shared prompt costs for each completion that sees it, in tokens of the budget.

    Returns:
        The micro-batches, the one that costs most first: if memory does not suffice, that shows at once.
    """
    if budget == 0:
        by_origin, origins = dict[int, list[int]](), window.micro_batch_N.tolist()
        for index in chosen:
            by_origin.setdefault(origins[index], []).append(index)
        own = [by_origin[origin] for origin in sorted(by_origin)]
        bins = [_groups([window.rows[index] for index in one], one, share=share) for one in own]
    else:
        bins = token_batches(window.rows, chosen, budget=budget, packed=packed, share=share, copy_cost=copy_cost)
    found = [_cut(window, members, packed=packed) for members in bins]
    return sorted(found, key=lambda batch: batch.cost(copy_cost), reverse=True)


def idle_micro_batch(window: Window, *, packed: bool) -> MicroBatch:
    """A micro-batch that adds exactly zero to every gradient: the shortest row, with weight 0.

    For a window of zero-advantage samples alone, where TRL's optimizer takes a step with zero gradients, and for a
    process that has run out of rows while others, with which it exchanges gradients, have not.
    """
    shortest = min(range(len(window.rows)), key=lambda index: window.rows[index].tokens)
    batch = _cut(window, [[shortest]], packed=packed)
    return replace(batch, weights_NT=torch.zeros_like(batch.weights_NT), counts=False)


def group_tokens(rows: Sequence[Row]) -> int:
    """Tokens that are run for rows with one prompt: P + sum of (C - 1) over the completions that differ."""
    prompt = rows[0].prompt.numel()
    return prompt + sum(row.tokens - prompt for row in _distinct(rows))


def _distinct(rows: Sequence[Row]) -> list[Row]:
    """Of rows with one prompt those that are run: one for each completion."""
    return list({row.run.tobytes(): row for row in rows}.values())


def _group_cost(rows: Sequence[Row], copy_cost: float) -> float:
    """The tokens that are run, and what the keys of a shared prompt cost that attention copies for each completion."""
    seeing = sum(row.completion.numel() > 1 for row in _distinct(rows)) if len(rows) > 1 else 0  # the last is not run
    return group_tokens(rows) + copy_cost * seeing * rows[0].prompt.numel()


def token_batches(
    rows: Sequence[Row],
    chosen: Iterable[int] | None = None,
    *,
    budget: int,
    packed: bool,
    share: bool,
    copy_cost: float = 0.0,
) -> list[list[list[int]]]:
    """Rows distributed over forward passes, each with rows of one width, whose rotary factors are the same.

    Args:
        rows: All of them.
        chosen: Indices of those to run; None: of all.
        budget: As in :func:`micro_batches`, but not 0; so are the next three.
        packed: See there.
        share: See there.
        copy_cost: See there.

    Returns:
        Lists of groups of indices into ``rows``.
    """
    by_width: dict[int, list[int]] = {}
    for index in range(len(rows)) if chosen is None else chosen:
        by_width.setdefault(rows[index].width, []).append(index)
    bins: list[list[list[int]]] = []
    for same in by_width.values():
        if packed:
            bins += _fill(rows, _groups([rows[index] for index in same], same, share=share), budget, copy_cost)
        else:
            bins += _fill_padded(rows, same, budget)
    return bins


def renumbered(groups: Sequence[Sequence[int]]) -> tuple[list[int], tuple[tuple[int, ...], ...]]:
    """The rows of a micro-batch: their indices in order, and its groups as indices into those."""
    indices = [index for group in groups for index in group]
    place = {index: position for position, index in enumerate(indices)}
    return indices, tuple(tuple(place[index] for index in group) for group in groups)


def _groups(rows: Sequence[Row], indices: Iterable[int], *, share: bool) -> list[list[int]]:
    """Indices of rows by prompt, or each by itself."""
    if not share:
        return [[index] for index in indices]
    by_prompt: dict[bytes, list[int]] = {}
    for row, index in zip(rows, indices, strict=True):
        by_prompt.setdefault(row.prompt.cpu().numpy().tobytes(), []).append(index)
    return list(by_prompt.values())


def _fill(rows: Sequence[Row], groups: list[list[int]], budget: int, copy_cost: float) -> list[list[list[int]]]:
    """First fit, longest first; a group that is too long is divided, which costs its prompt once more."""

    def cost(group: list[int]) -> float:
        return _group_cost([rows[index] for index in group], copy_cost)

    pieces = []
    for group in groups:
        piece: list[int] = []
        for index in sorted(group, key=lambda i: -rows[i].tokens):
            if piece and cost([*piece, index]) > budget:
                pieces.append(piece)
                piece = []
            piece.append(index)
        pieces.append(piece)
    bins: list[tuple[float, list[list[int]]]] = []
    for needed, piece in sorted(((cost(piece), piece) for piece in pieces), reverse=True):
        for slot, (filled, members) in enumerate(bins):
            if filled + needed <= budget:
                bins[slot] = (filled + needed, [*members, piece])
                break
        else:
            bins.append((needed, [piece]))
    return [members for _, members in bins]


def _fill_padded(rows: Sequence[Row], indices: Iterable[int], budget: int) -> list[list[list[int]]]:
    """Rows by falling length, cut where the next one would take the rectangle over the budget."""
    bins: list[list[list[int]]] = []
    for index in sorted(indices, key=lambda i: -rows[i].tokens):
        if not bins or rows[bins[-1][0][0]].tokens * (len(bins[-1]) + 1) > budget:
            bins.append([])
        bins[-1].append([index])
    return bins


def _cut(window: Window, groups: list[list[int]], *, packed: bool) -> MicroBatch:
    """The rows of some groups, and their columns up to the longest completion."""
    indices, own = renumbered(groups)
    rows = tuple(window.rows[index] for index in indices)
    columns = max(row.completion.numel() for row in rows)
    chosen = torch.tensor(indices, device=window.mask_NT.device)

    def cut(values: torch.Tensor) -> torch.Tensor:
        values = values[chosen]
        return values if values.size(1) == 1 else values[:, :columns]

    return MicroBatch(
        rows=rows,
        groups=own,
        mask_NT=window.mask_NT[chosen][:, :columns],
        weights_NT=window.weights_NT[chosen][:, :columns],
        advantages=cut(window.advantages),
        values={name: cut(values) for name, values in window.values.items()},
        micro_batch_N=window.micro_batch_N[chosen],
        packed=packed,
    )


def _stacked(parts: Sequence[torch.Tensor], columns: int) -> torch.Tensor:
    """Rectangles one under the other, zeros on the right of the narrower ones; single columns stay single."""
    if all(part.size(1) == 1 for part in parts) and columns != 1:
        return torch.cat(list(parts))
    return torch.cat([torch.nn.functional.pad(part, (0, columns - part.size(1))) for part in parts])
