"""Rows without padding: prompts and completions end to end in one row, what several of them share once.

rows -> Batch (tokens, where each segment begins, which hidden state predicts which token)

Pure functions of tensors. Shapes: N rows, L tokens that are run, S tokens that
are scored, T columns of a rectangle of completions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy
import torch

Numbers = numpy.ndarray[Any, numpy.dtype[numpy.int64]]
LEAST_COMMON = 16
"""Tokens: fewer that all prompts begin with are not worth a segment of their own."""


@dataclass(frozen=True, eq=False)
class Row:
    """A prompt and its completion, without padding.

    Attributes:
        prompt: (P,) int64, P >= 1.
        completion: (C,) int64.
        scored: (C,) bool on the CPU: tokens whose log-probability is wanted.
        width: What the rotary factors of the batch it came in stand for (:func:`perl.packing.rope.rope_width`); rows of
            different widths are not run together. 0: factors are always the same.
        taught: The prompt as a teacher sees it, with a hint; None: as the policy does.
    """

    prompt: torch.Tensor
    completion: torch.Tensor
    scored: torch.Tensor
    width: int = 0
    taught: torch.Tensor | None = None

    @property
    def tokens(self) -> int:
        """Tokens that are run when the row stands alone: the last of the completion predicts nothing."""
        return self.prompt.numel() + max(self.completion.numel() - 1, 0)

    @cached_property
    def run(self) -> Numbers:
        """The tokens of the completion that are run, to be compared with those of other rows with this prompt."""
        return self.completion[:-1].cpu().numpy()

    @cached_property
    def asked(self) -> Numbers:
        """The tokens of the prompt, to be compared with those of others."""
        return self.prompt.cpu().numpy()


@dataclass(frozen=True)
class Segment:
    """Consecutive tokens of the packed row that attend to each other, each to those before it.

    Attributes:
        start: Position of the first.
        length: How many.
        prefixes: Start and length of each segment that all of them see besides, whole: what all prompts begin with,
            the rest of a prompt.
        rows: How many rows have it.
    """

    start: int
    length: int
    prefixes: tuple[tuple[int, int], ...] = ()
    rows: int = 1

    @cached_property
    def prefix_length(self) -> int:
        """Tokens that are seen besides."""
        return sum(length for _, length in self.prefixes)


@dataclass(frozen=True, eq=False)
class Wave:
    """Segments that run at once, padded on the right to the longest of them.

    Attributes:
        starts: Of the n segments.
        tokens: (n x T,) int64, the position of each of their tokens, L where there is none.
        follows: For each the start of the last segment that it sees besides; empty: they see none.
        followed: Whether others see them besides; they are of one length then.
    """

    starts: tuple[int, ...]
    tokens: torch.Tensor
    follows: tuple[int, ...]
    followed: bool


@dataclass(frozen=True)
class Layout:
    """The segments of a packed row, in order; together they cover it."""

    segments: tuple[Segment, ...]
    device: torch.device

    def on(self, device: torch.device) -> "Layout":
        """The same segments with their tensors on another device; made once for each."""
        return self if device == self.device else self._elsewhere.setdefault(device, Layout(self.segments, device))

    @cached_property
    def _elsewhere(self) -> dict[torch.device, "Layout"]:
        return {}

    @cached_property
    def shares(self) -> bool:
        """Whether any segment sees another one besides."""
        return any(segment.prefix_length for segment in self.segments)

    def mask(self, prefix: int, length: int, window: int | None = None) -> torch.Tensor:
        """(C, P + C) bool, of C tokens behind P others: what each sees, the last ``window`` tokens if not None."""
        key = (prefix, length, window)
        if key not in self._masks:
            seen = torch.ones(length, prefix + length, dtype=torch.bool, device=self.device).tril(prefix)
            self._masks[key] = seen if window is None else seen.triu(prefix - window + 1)
        return self._masks[key]

    @cached_property
    def _masks(self) -> dict[tuple[int, int, int | None], torch.Tensor]:
        return {}

    @cached_property
    def counts(self) -> torch.Tensor:
        """(1, L) float32, in how many rows each token stands."""
        parts = [torch.full((segment.length,), float(segment.rows)) for segment in self.segments]
        return torch.cat(parts).unsqueeze(0).to(self.device)

    @cached_property
    def query_ends(self) -> torch.Tensor:
        """(segments + 1,) int32 cumulative lengths, as variable-length attention kernels take them."""
        return self._ends([segment.length for segment in self.segments])

    @cached_property
    def key_ends(self) -> torch.Tensor:
        """(segments + 1,) int32 cumulative lengths of what each segment sees, its prefix included."""
        return self._ends([segment.prefix_length + segment.length for segment in self.segments])

    @cached_property
    def keys(self) -> torch.Tensor:
        """Positions of all that the segments see, one after the other, prefixes first."""
        parts = []
        for segment in self.segments:
            seen = (*segment.prefixes, (segment.start, segment.length))
            parts += [torch.arange(start, start + length) for start, length in seen]
        return torch.cat(parts).to(self.device)

    def with_past(self, before: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions of so many tokens that each segment follows, L for none, and its own; and which are its own, (L,).

        What stands in front of a segment of the row may be another one, which it does not see.
        """
        if before not in self._pasts:
            takes, own, length = [], [], 0
            for segment in self.segments:
                seen = [torch.arange(start, start + count) for start, count in segment.prefixes]
                past = torch.cat([torch.full((before,), self.tokens), *seen])[-before:] if before else torch.arange(0)
                takes += [past, torch.arange(segment.start, segment.start + segment.length)]
                own.append(torch.arange(length + before, length + before + segment.length))
                length += before + segment.length
            self._pasts[before] = torch.cat(takes).to(self.device), torch.cat(own).to(self.device)
        return self._pasts[before]

    @cached_property
    def _pasts(self) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        return {}

    def waves(self, chunk: int) -> tuple[Wave, ...]:
        """The segments by what they follow and their lengths, the first without any before them.

        Args:
            chunk: Tokens that a scan takes at once: those of about as many chunks run together.
        """
        if chunk not in self._waves:
            followed = {start for segment in self.segments for start, _ in segment.prefixes}
            alike: dict[tuple[int, bool, int], list[Segment]] = {}
            for segment in self.segments:
                leads = segment.start in followed
                size = segment.length if leads else _rounded(-(-segment.length // chunk))
                alike.setdefault((len(segment.prefixes), not leads, size), []).append(segment)
            self._waves[chunk] = tuple(self._wave(alike[key], followed=not key[1]) for key in sorted(alike))
        return self._waves[chunk]

    def _wave(self, segments: Sequence[Segment], *, followed: bool) -> Wave:
        longest = max(segment.length for segment in segments)
        columns_T = torch.arange(longest)
        lengths, starts = (torch.tensor([[getattr(s, name)] for s in segments]) for name in ("length", "start"))
        tokens_NT = torch.where(columns_T < lengths, starts + columns_T, self.tokens)
        follows = tuple(segment.prefixes[-1][0] for segment in segments if segment.prefixes)
        return Wave(tuple(s.start for s in segments), tokens_NT.flatten().to(self.device), follows, followed)

    @cached_property
    def _waves(self) -> dict[int, tuple[Wave, ...]]:
        return {}

    def scanned(self, chunk: int) -> torch.Tensor:
        """(L,) where each token stands in the waves' tokens, end to end."""
        order = torch.cat([wave.tokens for wave in self.waves(chunk)])
        places = torch.empty(self.tokens + 1, dtype=torch.long, device=self.device)
        places[order] = torch.arange(order.numel(), device=self.device)
        return places[:-1]

    @cached_property
    def tokens(self) -> int:
        """L, of all segments."""
        return sum(segment.length for segment in self.segments)

    @cached_property
    def longest(self) -> tuple[int, int]:
        """The longest segment without and with its prefix."""
        return max(s.length for s in self.segments), max(s.prefix_length + s.length for s in self.segments)

    def _ends(self, lengths: list[int]) -> torch.Tensor:
        return torch.tensor([0, *lengths]).cumsum(0).to(self.device, torch.int32)


@dataclass(frozen=True)
class ScoredTokens:
    """The tokens whose log-probabilities are wanted.

    Attributes:
        predictors: (S,) int64, index into the flattened (rows x columns) hidden states of the one that predicts.
        targets: (S,) int64, the token.
        rows: (S,) int64, the row it belongs to.
        columns: (S,) int64, its place in the completion.
        width: Columns of the input that was built, in case a model puts virtual tokens in front.
    """

    predictors: torch.Tensor
    targets: torch.Tensor
    rows: torch.Tensor
    columns: torch.Tensor
    width: int

    def rectangle(self, values_S: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        """(S,) values of the scored tokens as (N, T), zeros elsewhere; differentiable."""
        empty_NT = values_S.new_zeros(rows, columns)
        place = (self.rows.to(values_S.device), self.columns.to(values_S.device))  # the head may be elsewhere
        return empty_NT.index_put(place, values_S)


@dataclass(frozen=True)
class PackedBatch:
    """What goes through the model at once.

    Attributes:
        input_ids: (1, L) packed, or (N, L) padded on the right, int64.
        position_ids: Same shape; None where the model numbers the positions itself.
        attention_mask: Same shape, 0 for padding; None if packed.
        layout: The segments if packed; None if padded.
        scored: Which log-probabilities come out.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor | None
    attention_mask: torch.Tensor | None
    layout: Layout | None
    scored: ScoredTokens


def _rounded(chunks: int) -> int:
    """Up to one of four numbers in each octave: waves run one after another, and more of them than that cost time."""
    step = 1 << max(chunks.bit_length() - 3, 0)
    return -(-chunks // step) * step


def pack(rows: Sequence[Row], groups: Sequence[Sequence[int]]) -> PackedBatch:
    """Puts rows end to end, without padding.

    Args:
        rows: N rows; the order of ``Scored.rows``.
        groups: Every row's index once, by group. The rows of a group of two or more have the same prompt, which is
            run once; every completion sees it and itself, and counts positions from its end. So is what several of
            them begin with, as conversations do that call the same tool: the group is a tree. Where there is such a
            group, what all prompts begin with is run once too.

    Returns:
        The packed row.

    Source: shared prompts as in PrefixGrouper, arXiv:2506.05433, section 3: same outputs, same gradients.
    """
    builder = _Builder(rows[0].prompt.device)
    common = common_beginning(rows, groups)
    if common:
        builder.add([rows[0].prompt[:common]], position=0, rows=sum(map(len, groups)))
    prefixes = ((0, common),) if common else ()
    for group in groups:
        first, rest = rows[group[0]], rows[group[0]].prompt[common:]
        if len(group) == 1:
            begin = builder.add([rest, first.completion[:-1]], position=common, prefixes=prefixes)
            builder.score(first, group[0], torch.arange(begin + rest.numel() - 1, builder.length))
            continue
        length = first.prompt.numel()
        prompt = builder.add([rest], position=common, prefixes=prefixes, rows=len(group))
        last = torch.tensor([prompt + rest.numel() - 1])
        seen = (*prefixes, (prompt, rest.numel()))
        _branch(builder, {index: rows[index] for index in group}, 0, length, seen, last)
    return builder.packed()


def _branch(
    builder: "_Builder",
    rows: Mapping[int, Row],
    begin: int,
    position: int,
    prefixes: tuple[tuple[int, int], ...],
    before: torch.Tensor,
) -> None:
    """Adds completions as a tree: what several of them go on with is run once, then what each has alone.

    Args:
        builder: Gets the segments.
        rows: By their index; their completions are one up to ``begin``.
        begin: Tokens of the completions that are there already.
        position: Of the prompt's end.
        prefixes: What all of them see.
        before: (1 + begin,) where the prompt's last token is, and those tokens.
    """
    clusters: dict[bytes, dict[int, Row]] = {}
    for index, row in rows.items():
        clusters.setdefault(row.run[begin : begin + LEAST_COMMON].tobytes(), {})[index] = row
    for cluster in clusters.values():
        runs = [row.run[begin:] for row in cluster.values()]
        shared = min(run.size for run in runs)
        same = (numpy.stack([run[:shared] for run in runs]) == runs[0][:shared]).all(axis=0)
        shared = shared if same.all() else int(same.argmin())
        tokens = next(iter(cluster.values())).completion[begin : begin + shared]
        start = builder.add([tokens], position=position + begin, prefixes=prefixes, rows=len(cluster))
        places, end = torch.cat([before, torch.arange(start, start + shared)]), begin + shared
        for index, row in cluster.items():
            if row.run.size == end:
                builder.score(row, index, places)
        longer = {index: row for index, row in cluster.items() if row.run.size > end}
        if longer:
            _branch(builder, longer, end, position, (*prefixes, (start, shared)), places)


def common_beginning(rows: Sequence[Row], groups: Sequence[Sequence[int]]) -> int:
    """How many tokens, run once, the prompts of all groups begin with; each has at least one more.

    0: too few, a single group, or none of two rows, as where nothing is to be shared.
    """
    prompts = [rows[group[0]].asked for group in groups]
    length = min(prompt.size for prompt in prompts) - 1
    if len(prompts) == 1 or length < LEAST_COMMON or all(len(group) == 1 for group in groups):
        return 0
    same = (numpy.stack([prompt[:length] for prompt in prompts]) == prompts[0][:length]).all(axis=0)
    count = length if same.all() else int(same.argmin())
    return count if count >= LEAST_COMMON else 0


def pad_right(rows: Sequence[Row]) -> PackedBatch:
    """The same rows as a rectangle, padded on the right to the longest of them.

    Causal models need no more for the same numbers: what stands to the right of a token does not reach it, and
    positions count from the row's first token.
    """
    width = max(row.tokens for row in rows)
    builder = _Builder(rows[0].prompt.device)
    ids_NL = rows[0].prompt.new_zeros(len(rows), width)
    mask_NL = torch.zeros_like(ids_NL)
    for index, row in enumerate(rows):
        ids_NL[index, : row.tokens] = torch.cat([row.prompt, row.completion[:-1]])
        mask_NL[index, : row.tokens] = 1
        prompt_end = index * width + row.prompt.numel()
        builder.score(row, index, torch.arange(prompt_end - 1, prompt_end + row.completion.numel()))
    return PackedBatch(ids_NL, None, mask_NL, None, builder.scored(width))


class _Builder:
    """Collects segments and scored tokens; all indices are made on the CPU and moved once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.length = 0
        self.tokens: list[torch.Tensor] = []
        self.positions: list[torch.Tensor] = []
        self.segments: list[Segment] = []
        self.predictors: list[torch.Tensor] = []
        self.targets: list[torch.Tensor] = []
        self.rows: list[torch.Tensor] = []
        self.columns: list[torch.Tensor] = []

    def add(
        self,
        tokens: list[torch.Tensor],
        *,
        position: int,
        prefixes: tuple[tuple[int, int], ...] = (),
        rows: int = 1,
    ) -> int:
        """Appends a segment; returns where it begins."""
        start, length = self.length, sum(part.numel() for part in tokens)
        if length:
            self.tokens.extend(tokens)
            self.positions.append(torch.arange(position, position + length))
            self.segments.append(Segment(start, length, prefixes, rows))
            self.length += length
        return start

    def score(self, row: Row, index: int, places: torch.Tensor) -> None:
        """Wants a row's scored tokens; ``places`` are where its prompt's last token and its completion's are run."""
        columns = row.scored.nonzero().flatten()
        self.predictors.append(places[columns])  # the hidden state before a token predicts it
        self.targets.append(row.completion[columns.to(row.completion.device)])
        self.rows.append(torch.full_like(columns, index))
        self.columns.append(columns)

    def packed(self) -> PackedBatch:
        ids_1L = torch.cat(self.tokens).unsqueeze(0)
        positions_1L = torch.cat(self.positions).to(self.device).unsqueeze(0)
        layout = Layout(tuple(self.segments), self.device)
        return PackedBatch(ids_1L, positions_1L, None, layout, self.scored(self.length))

    def scored(self, width: int) -> ScoredTokens:
        indices = torch.stack([torch.cat(self.predictors), torch.cat(self.rows), torch.cat(self.columns)])
        predictors, rows, columns = indices.to(self.device)
        return ScoredTokens(predictors, torch.cat(self.targets), rows, columns, width)
