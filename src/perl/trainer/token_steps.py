"""TokenSteps: how many optimizer steps the policy had taken that sampled each token.

updates by name, completions -> a column of rollouts
"""

from collections.abc import Sequence

import torch

from perl.rollouts.engine import Sampled


class TokenSteps:
    """Of the latest completions. Several updates may have written one, where requests continue."""

    def __init__(self, keep: int) -> None:
        """Knows no update yet.

        Args:
            keep: Newest updates to know of; at least as many as are loaded while a completion is written.
        """
        self._keep = keep
        self._step_of: dict[str, int] = {}
        self._latest: list[list[int]] = []

    def loaded(self, name: str, step: int) -> None:
        """An update is of the policy after so many optimizer steps."""
        self._step_of[name] = step
        for old in list(self._step_of)[: -self._keep]:
            del self._step_of[old]

    def note(self, sampled: Sequence[Sampled], step: int) -> list[int]:
        """Takes completions; the steps of all their tokens.

        Args:
            sampled: In the order of the prompts.
            step: Of the update that they were begun with, for tokens of one that is not known by its name.
        """
        self._latest = []
        for one in sampled:
            versions = one.versions or (one.version,) * len(one.token_ids)
            self._latest.append([self._step_of.get(version, step) for version in versions])
        return [step for steps in self._latest for step in steps]

    def column(self, completion_ids: torch.Tensor, now: int) -> torch.Tensor:
        """(N, T) int64, of the latest completions.

        Args:
            completion_ids: (N, T), as TRL pads them. A conversation's turns, of which there are fewer, are of now.
            now: Optimizer steps that the policy has taken.
        """
        steps_NT = torch.full_like(completion_ids, now)
        if len(self._latest) == len(steps_NT):
            for row_T, steps in zip(steps_NT, self._latest, strict=True):
                row_T[: len(steps)] = row_T.new_tensor(steps)
        return steps_NT
