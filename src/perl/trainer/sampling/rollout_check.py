"""RolloutCheck: no step is trained on rollouts that are unusually far from the policy, but for a parity check.

log-probabilities of a step's tokens by engine and trainer -> train, or new rollouts, or an end that keeps the last step
log-probabilities of the group that a log shows -> its tokens, and how far the two are apart for each

The parity check (``rollouts/parity_check.py``) asks engines now and then, and misses a server that was replaced in
between. This looks at all tokens of every step.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from perl.errors import RolloutError, warn
from perl.packing.micro_batches import SHOWN, STEPS_BEHIND
from perl.trainer.live import LiveTrainer, Position
from perl.trainer.sampling.rollout_source import RolloutSource

GAP = "sampling/sampling_logp_difference/mean"
"""How far the engine's log-probabilities of a step's tokens are from the trainer's, in nats."""
# How often a step's rollouts are made again although every engine passes the parity check.
_MOST_REPEATS = 2


class RolloutCheck:
    """Compares what was sampled with the policy before a step is taken."""

    def __init__(self, live: LiveTrainer, source: RolloutSource, position: Position) -> None:
        """Takes the training, what samples its rollouts, and where it is among its micro-batches."""
        self._live, self._source, self._position = live, source, position
        self._logged: dict[str, int] = {}
        self._repeats = 0

    def begin(self) -> None:
        """Remembers what was logged before the rollouts of an optimizer step, which may have to be made again."""
        left = None if self._position.rollouts_due else self._position.rollouts
        self._source.steps_behind = 0 if left is None else int(left[0].get(STEPS_BEHIND, 0))
        self._logged = {name: len(values) for name, values in self._live._metrics["train"].items()}

    def make_again(self, asked: Sequence[Any]) -> list[dict[str, Any]]:
        """The micro-batches of an optimizer step with new rollouts of the same prompts; see :meth:`stands`.

        Args:
            asked: What the data loader gave for each of them.
        """
        self._forget()
        end = self._position.micro_batch
        self._position.return_to_step_begin()
        batches = []
        for inputs in asked:
            batches.append(self._live._prepare_inputs(inputs))
            self._position.advance()
        self._position.move(end, self._position.rollouts)
        return batches

    def judged(self, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Rollouts that may be trained on, where TRL's own code has compared them with the policy.

        Args:
            make: Samples them.
        """
        while True:
            self.begin()
            rollouts = make()
            if self.accepts(self._live._metrics["train"][GAP][-1]):
                return rollouts
            self._forget()

    def accepts(self, gap: float | None) -> bool:
        """Whether a step may be trained on its rollouts; called on every process before the optimizer's step.

        Where the engine's log-probabilities are unusually far from the trainer's, the parity check runs at once. A
        server that fails it is left until another process answers there.

        Args:
            gap: Mean difference over all of the step's tokens, in nats; None: nothing was compared.

        Returns:
            False: The rollouts have to be made again, by the servers that are left.

        Raises:
            RolloutError: Nothing is left that answers like the policy, or the rollouts are another's again and again.
        """
        usual, behind = self._source.gap, self._source.steps_behind
        if gap is None or usual is None:  # resumed rollouts, of which a part was judged before, need no engine
            return True
        limit = usual.limit(behind)
        self._live._metrics["train"]["sync/gap_limit"].append(limit)
        if not usual.is_usual(gap, behind):
            what = f"log-probabilities of the rollouts differ by {gap:.1e} nats from the trainer's, above {limit:.1e}"
            warn("PRL317", "%s: the parity check runs before they are trained on", what)
            if self._source.leave_servers_that_fail(what, usual.limit()):
                return False
            if usual.is_no_rounding(gap, behind):
                self._repeats += 1
                if self._repeats <= _MOST_REPEATS:
                    return False
                hint = "does an address lead to several servers? If it is rounding raise rollout.tolerance"
                self._repeats = 0
                self._source.end_training()
                raise RolloutError(f"{what}, again and again, though the engine passes the parity check", hint=hint)
        usual.accept(gap, behind)
        self._repeats = 0
        return True

    def _forget(self) -> None:
        """Nothing is left of a step's rollouts but that they were made again."""
        metrics = self._live._metrics["train"]
        for name in [name for name in metrics if not name.startswith("sync/")]:
            del metrics[name][self._logged.get(name, 0) :]
            if not metrics[name]:
                del metrics[name]
        self._source.forget_ahead()  # they may be as wrong
        self._source.steps_behind = 0
        self._position.forget_rollouts()
        metrics["rollout/made_again"].append(1.0)
        self._logged["rollout/made_again"] = len(metrics["rollout/made_again"])


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
        mask_NT = rollouts["completion_mask"]
        shown = generations if self._main else 0  # with a column of zeros, as a checkpoint's rollouts are divided again
        for ids, length in zip(rollouts["completion_ids"][:shown], mask_NT.sum(dim=1).tolist(), strict=False):
            self._token_ids.append(ids[: int(length)].tolist())
        numbers_N = torch.arange(1, len(sampled_NT) + 1, device=mask_NT.device)
        rollouts[SHOWN] = torch.where(numbers_N <= shown, numbers_N, 0).unsqueeze(1)
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
