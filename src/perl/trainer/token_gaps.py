"""How far the trainer's log-probs are from the engine's, token by token, of the completions that a log shows.

rollouts of a batch, log-probs of its optimizer steps -> tokens and gaps of the first group

It runs no pass of its own: it keeps what the loss was computed with. A completion that no step ran, since its advantage
is zero, has no gaps.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch

from perl.packing.micro_batches import SHOWN

# Nats are shown with so many decimals.
_DECIMALS = 5


class TokenGaps:
    """Log-probs of the trainer less the engine's, of the newest group; of nothing where transformers sample."""

    def __init__(self, *, main: bool) -> None:
        """Has nothing yet.

        Args:
            main: Whether this is the main process, whose first rows a log shows.
        """
        self._main = main
        self._token_ids: list[list[int]] = []
        self._found: list[tuple[torch.Tensor, torch.Tensor]] = []

    def begin(self, rollouts: dict[str, Any], generations: int) -> None:
        """New rollouts: says in a column beside them which rows are of the group that a log shows.

        Args:
            rollouts: TRL's padded tensors, with ``sampling_per_token_logps`` if the engine gave log-probs.
            generations: Completions of a group.
        """
        self._token_ids, self._found = [], []
        sampled_NT = rollouts.get("sampling_per_token_logps")
        if sampled_NT is None:
            return
        mask_NT, rows = rollouts["completion_mask"], len(sampled_NT)
        if not self._main:  # a checkpoint's rollouts are divided again by the same columns on every process
            rollouts[SHOWN] = torch.zeros(rows, 1, dtype=torch.int64, device=mask_NT.device)
            return
        lengths = mask_NT.sum(dim=1).tolist()
        for ids, length in zip(rollouts["completion_ids"][:generations], lengths, strict=False):
            self._token_ids.append(ids[: int(length)].tolist())
        numbers_N = torch.arange(1, rows + 1, device=mask_NT.device)
        rollouts[SHOWN] = torch.where(numbers_N <= generations, numbers_N, 0).unsqueeze(1)
        old_NT = rollouts.get("old_per_token_logps")
        if old_NT is not None:  # zeros of rows that were not run
            run_N1 = old_NT.any(dim=1, keepdim=True)
            self.add(rollouts[SHOWN] * run_N1, old_NT, sampled_NT, mask_NT * rollouts.get("tool_mask", 1))

    def add(
        self, shown_N1: torch.Tensor | None, old_NT: torch.Tensor, sampled_NT: torch.Tensor, mask_NT: torch.Tensor
    ) -> None:
        """Log-probs of a micro-batch.

        Args:
            shown_N1: Which rows are shown, as :meth:`begin` put it beside them; None: it was made elsewhere.
            old_NT: The trainer's, of the policy that sampled.
            sampled_NT: The engine's.
            mask_NT: 1 where the policy wrote a token.
        """
        if shown_N1 is not None and self._token_ids:
            gaps_NT = (old_NT - sampled_NT).detach().masked_fill(mask_NT == 0, math.nan)
            self._found.append((shown_N1, gaps_NT))  # kept on the device: nothing waits for it

    def rows(self, processing_class: Any) -> Mapping[int, dict[str, Any]]:  # noqa: ANN401 (a tokenizer or processor)
        """Place in the group -> ``tokens`` as text and ``gaps`` in nats, None where nothing was compared.

        Args:
            processing_class: Of the policy.
        """
        found: dict[int, dict[str, Any]] = {}
        for shown_N1, gaps_NT in self._found:
            for row, number in enumerate(shown_N1.flatten().tolist()):
                index = int(number) - 1
                if not 0 <= index < len(self._token_ids):
                    continue
                ids = self._token_ids[index]
                gaps = [round(gap, _DECIMALS) + 0.0 if math.isfinite(gap) else None for gap in gaps_NT[row].tolist()]
                tokens = processing_class.batch_decode([[one] for one in ids])
                # A micro-batch is as wide as its longest completion; a shorter one's end is nothing.
                found[index] = {"tokens": tokens, "gaps": (gaps + [None] * len(ids))[: len(ids)]}
        return found
