"""Refill: groups without variance are replaced by groups of other prompts (DAPO's dynamic sampling).

rollouts, their rewards -> further rollouts -> rollouts with fewer zero-advantage groups

Yu et al. 2025 (DAPO, arXiv:2503.14476, section 3.2) sample prompts until a batch is full of groups whose accuracy is
neither 0 nor 1. Here at most so many are sampled as a setting says, any rewards that agree count, and only groups
without variance are given up: what the others add to the gradient stays what it was.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from perl.errors import BrokenPromiseError

Rollouts = dict[str, Any]
Examples = list[dict[str, Any]]

# Of a column of rollouts, what stands where a row has no token; 0 elsewhere.
_LEFT = ("prompt_ids", "prompt_mask")
_TOKENS = ("prompt_ids", "completion_ids")


@dataclass(frozen=True)
class GenerationBatch:
    """A generation batch.

    Attributes:
        inputs: The examples of this process, one for each completion.
        rollouts: Of this process, as TRL makes them.
        rewards_NK: Of all processes.
        prompts: Index in the data of each group's prompt, of all processes.
        shown: What is shown of each completion, of all processes, by column.
        tokens: Of all completions, of all processes; 0: not counted.
    """

    inputs: Examples
    rollouts: Rollouts
    rewards_NK: torch.Tensor
    prompts: list[int]
    shown: Mapping[str, list[Any]] = field(default_factory=dict)
    tokens: int = 0


@dataclass(frozen=True)
class BatchLayout:
    """How a generation batch lies on the processes.

    Attributes:
        generations: Completions of a prompt.
        processes: How many there are.
        process: Number of this one.
        pad_token_id: Fills rows.
    """

    generations: int
    processes: int
    process: int
    pad_token_id: int

    def pairs(self, flat_P: torch.Tensor, offered_flat_P: torch.Tensor) -> list[tuple[int, int]]:
        """Group that is given up -> group that takes its place, both of one process and counted over all."""
        found: list[tuple[int, int]] = []
        each, offered = len(flat_P) // self.processes, len(offered_flat_P) // self.processes
        for process in range(self.processes):
            lost = flat_P[process * each : (process + 1) * each].nonzero().flatten() + process * each
            own = offered_flat_P[process * offered : (process + 1) * offered]
            live = (~own).nonzero().flatten() + process * offered
            found += zip(lost.tolist(), live.tolist(), strict=False)
        return found

    def rows(self, group: int) -> range:
        """Rows of a group, counted over all processes."""
        return range(group * self.generations, (group + 1) * self.generations)

    def own_rows(self, group: int, groups: int) -> range | None:
        """Rows of a group on this process; None: it is another one's.

        Args:
            group: Counted over all processes.
            groups: Of all processes.
        """
        each = groups // self.processes
        return self.rows(group - self.process * each) if group // each == self.process else None


def extra_prompts(cap: float, groups: int, processes: int) -> int:
    """Prompts that may be sampled besides: a share of a generation batch's, rounded up to as many for each process."""
    return math.ceil(round(cap * groups / processes, 9)) * processes


def replaced(
    batch: GenerationBatch, offered: GenerationBatch, pairs: Sequence[tuple[int, int]], layout: BatchLayout
) -> GenerationBatch:
    """A generation batch with some groups exchanged for others; all else is as it was, padding apart.

    Args:
        batch: Whose groups are given up.
        offered: Whose groups take their place.
        pairs: As of :meth:`BatchLayout.pairs`.
        layout: Of both.
    """
    inputs, rewards_NK, prompts = list(batch.inputs), batch.rewards_NK.clone(), list(batch.prompts)
    shown = {name: list(rows) for name, rows in batch.shown.items()}
    lost, taken = list[int](), list[int]()
    for old, new in pairs:
        rewards_NK[list(layout.rows(old))] = offered.rewards_NK[list(layout.rows(new))]
        prompts[old] = offered.prompts[new]
        for name, rows in shown.items():
            if len(rows) == len(rewards_NK) and len(others := offered.shown.get(name, ())) == len(offered.rewards_NK):
                rows[layout.rows(old).start : layout.rows(old).stop] = [others[row] for row in layout.rows(new)]
        here, there = layout.own_rows(old, len(batch.prompts)), layout.own_rows(new, len(offered.prompts))
        if here is not None and there is not None:
            lost += here
            taken += there
            for row, other in zip(here, there, strict=True):
                inputs[row] = offered.inputs[other]
    rollouts = dict(batch.rollouts)
    for name, own in batch.rollouts.items():
        if isinstance(own, torch.Tensor) and own.dim() > 0 and len(own) == len(batch.inputs):
            if name not in offered.rollouts:
                raise BrokenPromiseError(
                    f"rollouts have {name} sometimes and sometimes not, so that none can be replaced"
                )
            pair: tuple[torch.Tensor, ...] = own.clone(), offered.rollouts[name]
            if own.dim() > 1:  # both are padded to the wider one
                width, fill = max(one.size(1) for one in pair), layout.pad_token_id if name in _TOKENS else 0
                pair = tuple(padded(one, width, left=name in _LEFT, fill=fill) for one in pair)
            rollouts[name], source = pair
            rollouts[name][lost] = source[taken]
    return GenerationBatch(inputs, rollouts, rewards_NK, prompts, shown, batch.tokens)


def padded(rows: torch.Tensor, width: int, *, left: bool, fill: int = 0) -> torch.Tensor:
    """Rows (N, T, ...) with as many columns."""
    missing = width - rows.size(1)
    ends = (0, 0) * (rows.dim() - 2) + ((missing, 0) if left else (0, missing))
    return torch.nn.functional.pad(rows, ends, value=fill)


def refilled(
    batch: GenerationBatch,
    layout: BatchLayout,
    cap: float,
    *,
    flat: Callable[[torch.Tensor], torch.Tensor],
    replacements: Callable[[int, set[int]], list[int]],
    sample: Callable[[list[int]], GenerationBatch],
) -> tuple[GenerationBatch, list[GenerationBatch], Mapping[str, float]]:
    """A generation batch with what takes the place of its groups without variance, up to a cap.

    Args:
        batch: As it was sampled.
        layout: Of it.
        cap: Of :func:`extra_prompts`.
        flat: (P,) which groups have no variance, of rewards (N, K).
        replacements: So many prompts, without those of a set.
        sample: A generation batch of prompts, counted over all processes.

    Returns:
        It; what was sampled besides; what is logged of that.
    """
    started, groups, extra = time.perf_counter(), len(batch.prompts), list[GenerationBatch]()
    left = extra_prompts(cap, groups, layout.processes)
    tried, replaced_groups = set(batch.prompts), 0
    flat_P = flat(batch.rewards_NK)
    first_flat = int(flat_P.sum())
    while flat_P.any():
        # Each process replaces its own, so each samples as many as the one with the most of them.
        needed = int(flat_P.view(layout.processes, -1).sum(dim=1).max())
        each = min(needed, left // layout.processes)
        asked = replacements(each * layout.processes, tried) if each else []
        asked = asked[: len(asked) // layout.processes * layout.processes]
        if not asked:
            break
        offered = sample(asked)
        extra.append(offered)
        left, tried = left - len(asked), tried | set(asked)
        pairs = layout.pairs(flat_P, flat(offered.rewards_NK))
        batch = replaced(batch, offered, pairs, layout)
        replaced_groups += len(pairs)
        flat_P = flat(batch.rewards_NK)
    return (
        batch,
        extra,
        {
            "refill/groups": float(replaced_groups),
            "refill/flat_before": first_flat / groups,
            "refill/flat_after": int(flat_P.sum()) / groups,
            "refill/samples": float(layout.generations * sum(len(one.prompts) for one in extra)),
            "refill/tokens": float(sum(one.tokens for one in extra)),
            "refill/seconds": time.perf_counter() - started if extra else 0.0,
        },
    )
