"""Clip-Cov and KL-Cov on plain numbers (arXiv:2505.22617, section 4.2), and put into TRL's trainer.

log-probs and advantages of tokens -> covariances -> selected tokens -> loss; rollouts -> TRL's training with that loss
"""

from typing import Any, ClassVar

import numpy
import torch

from perl import PeftGRPOTrainer
from tests.oracles.own_algorithms import PlainLosses

Rows = list[list[float]]
Token = tuple[int, int]
# Of some hundred tokens some are selected.
CLIP = {"loss_type": "clip_cov", "epsilon": 1.0, "cov_fraction": 0.05, "cov_low": 0.2, "cov_high": 2.0}
KL = {"loss_type": "kl_cov", "cov_fraction": 0.05, "cov_kl_weight": 1.0}


def covariances(log_probs: Rows, advantages: Rows, mask: list[list[int]]) -> dict[Token, float]:
    """By row and column of the tokens that count."""
    tokens = [(n, t) for n, row in enumerate(mask) for t, counts in enumerate(row) if counts]
    p = sum(log_probs[n][t] for n, t in tokens) / len(tokens)
    a = sum(advantages[n][t] for n, t in tokens) / len(tokens)
    return {(n, t): (log_probs[n][t] - p) * (advantages[n][t] - a) for n, t in tokens}


def selected(found: dict[Token, float], plain: dict[str, Any], seed: int, step: int, first: int = 0) -> set[Token]:
    """The tokens that a loss treats apart; Clip-Cov's lot of each token is drawn by its row and column."""
    count = max(1, int(plain["cov_fraction"] * len(found)))
    if plain["loss_type"] == "kl_cov":
        return set(sorted(found, key=lambda token: -found[token])[:count])
    within = [token for token, value in found.items() if plain["cov_low"] < value < plain["cov_high"]]
    lots = {(n, t): numpy.random.default_rng([seed, step, first + n]).random(t + 1)[t] for n, t in within}
    return set(sorted(within, key=lambda token: -lots[token])[:count])


class PlainSelection(PlainLosses):
    """TRL's trainer with the loss that ``plain`` names, of one process."""

    shares: ClassVar[list[float]] = []

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        ids, masks = (
            torch.cat([output[f"{part}_{kind}"] for part in ("prompt", "completion")], dim=1)
            for kind in ("ids", "mask")
        )
        with torch.no_grad():
            hook = self._get_per_token_logps_and_entropies
            old = hook(self.model, ids, masks, output["completion_ids"].size(1))[0]
        mask = output["completion_mask"] * output.get("tool_mask", 1)
        advantages = output["advantages"].unsqueeze(1).expand(mask.shape)
        found = covariances(old.double().tolist(), advantages.double().tolist(), mask.tolist())
        apart = selected(found, self.plain, self.args.seed, self.state.global_step)
        type(self).shares.append(len(apart) / len(found))
        output["apart"] = torch.zeros(mask.shape)
        for token in apart:
            output["apart"][token] = 1.0
        output["step"] = torch.tensor(self.state.global_step)
        return output

    def _compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        self.apart = inputs["apart"]
        if int(inputs["step"]) == self.state.global_step:  # the policy is the old one, but for rounding
            inputs = {name: value for name, value in inputs.items() if name != "old_per_token_logps"}
        return super()._compute_loss(model, inputs)

    def _objective(
        self, log_p: torch.Tensor, old: torch.Tensor, ratio: torch.Tensor, advantages: torch.Tensor
    ) -> torch.Tensor:
        if self.plain["loss_type"] == "kl_cov":
            return -ratio * advantages + self.plain["cov_kl_weight"] * (log_p - old).abs() * self.apart
        clipped = ratio.clamp(1 - self.plain["epsilon"], 1 + self.plain["epsilon"])
        return -torch.min(ratio * advantages, clipped * advantages) * (1 - self.apart)


class Recording(PeftGRPOTrainer):
    """Ours, which keeps its selected tokens: of each generation batch a mask and how long completions are."""

    seen: ClassVar[list[tuple[torch.Tensor, torch.Tensor]]] = []

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        if "selected_tokens" in output:
            type(self).seen.append((output["selected_tokens"].clone(), output["completion_mask"].clone()))
        return output


def recording() -> type[Recording]:
    """With an empty record."""
    return type("Ours", (Recording,), {"seen": [], "__module__": __name__})


def places(seen: tuple[torch.Tensor, torch.Tensor], first: int = 0) -> list[Token]:
    """Row and column of the selected tokens."""
    return [(first + n, t) for n, t in seen[0].nonzero().tolist()]
