"""Losses and advantages that TRL's trainer lacks, put into it: a padded loss in a few lines, advantages by plain loops.

rollouts -> TRL's training with another loss, or other advantages
"""

from typing import Any, ClassVar

import torch
from trl.experimental.gmpo import GMPOTrainer

from perl import PeftGRPOTrainer
from tests.oracles.advantages import estimated, penalised
from tests.oracles.two_trainers import OracleTrainer

EPSILON = 1e-4


class PlainLosses(OracleTrainer):
    """TRL's trainer with a loss of its own, of the fields that ``plain`` holds."""

    plain: ClassVar[dict[str, Any]] = {}

    def _compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        attended = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        columns = inputs["completion_ids"].size(1)
        log_p, entropies, *_ = self._get_per_token_logps_and_entropies(
            model, ids, attended, columns, compute_entropy=True
        )
        if "entropy_weight" in self.plain:
            log_p, entropies = _from_logits(model, ids, attended, columns)
        mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
        old = inputs.get("old_per_token_logps", log_p.detach())
        advantages = inputs["advantages"]
        advantages = advantages.unsqueeze(1) if advantages.dim() == 1 else advantages
        ratio = (log_p - old).exp()
        per_token = self._objective(log_p, old, ratio, advantages)
        if self.beta and "ref_per_token_logps" in inputs:
            gap = log_p - inputs["ref_per_token_logps"]
            kl = {"k1": gap, "k2": gap**2 / 2, "k3": (-gap).exp() + gap - 1}[self.plain.get("kl_estimator", "k3")]
            per_token = per_token + self.beta * kl * (ratio if self.args.use_bias_correction_kl else 1)
        per_token = per_token - self.plain.get("entropy_weight", 0.0) * entropies
        tokens = inputs["num_items_in_batch"].clamp(min=1.0) / self.accelerator.num_processes
        tokens = tokens * self.current_gradient_accumulation_steps / self.args.steps_per_generation
        self._metrics["train"]["entropy"].append(entropies[mask.bool()].mean().item())
        return (per_token * mask).sum() / tokens

    def _objective(
        self, log_p: torch.Tensor, old: torch.Tensor, ratio: torch.Tensor, advantages: torch.Tensor
    ) -> torch.Tensor:
        name = self.plain.get("loss_type")
        if name == "reinforce":
            return -advantages * log_p
        if name != "dppo":  # dapo without clipping
            return -advantages * ratio
        p, q = log_p.detach().exp(), old.exp()
        far = (p - q).abs()
        if self.plain.get("dppo_divergence") == "kl":
            far = q * (q / p).log() + (1 - q) * ((1 - q) / (1 - p)).log()
        keep = ~((far > self.plain["dppo_threshold"]) & (((advantages > 0) & (p > q)) | ((advantages < 0) & (p < q))))
        return -advantages * ratio * keep


def _from_logits(
    model: torch.nn.Module, ids: torch.Tensor, attended: torch.Tensor, columns: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies of the last columns by autograd through the whole softmax."""
    positions = (attended.cumsum(dim=1) - 1).clamp(min=0)
    logits = model(input_ids=ids, attention_mask=attended, position_ids=positions).logits[:, -columns - 1 : -1]
    log_all = logits.log_softmax(dim=-1)
    log_p = log_all.gather(2, ids[:, -columns:].unsqueeze(2)).squeeze(2)
    return log_p, -(log_all.exp() * log_all).sum(dim=-1)


class TRLsGMPO(GMPOTrainer, OracleTrainer):
    """TRL's own GMPO, without advantages out of rounding."""


class PlainAdvantages(OracleTrainer):
    """TRL's trainer with the advantages of a plain loop over the rewards of all processes."""

    estimator = ""
    seen: ClassVar[list[list[float]]] = []

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        lengths = self.accelerator.gather((output["completion_mask"] * output.get("tool_mask", 1)).sum(dim=1))
        groups, sizes = (values.view(-1, self.num_generations).tolist() for values in (self.rewards_NK[:, 0], lengths))
        rows = estimated(self.estimator, groups, sizes, EPSILON)
        flat = torch.tensor([value for row in rows for value in row])
        type(self).seen.append(flat.tolist())
        first = self.accelerator.process_index * len(inputs)
        output["advantages"] = flat[first : first + len(inputs)]
        return output


class PlainPenalty(PlainLosses):
    """TRL's trainer, whose advantages are those of ``estimator`` with the divergence taken off, token by token."""

    estimator = ""

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        groups = self.rewards_NK[:, 0].view(-1, self.num_generations).tolist()
        mask = output["completion_mask"] * output.get("tool_mask", 1)
        divergences = (output["old_per_token_logps"] - output.pop("ref_per_token_logps")).tolist()
        rows = penalised(self.estimator, groups, divergences, mask.tolist(), self.args.beta, EPSILON)
        output["advantages"] = torch.tensor(rows)
        return output


class Recording(PeftGRPOTrainer):
    """Ours, which keeps the advantages that it has logged, rollout for rollout."""

    seen: ClassVar[list[list[float]]] = []

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        rows = len(inputs) * self.accelerator.num_processes
        type(self).seen.append(list(self._logs["advantages"])[-rows:])
        return output


def trainers(estimator: str) -> tuple[type[PlainAdvantages], type[Recording]]:
    """Both, with empty records."""
    plain = type("Plain", (PlainAdvantages,), {"estimator": estimator, "seen": []})
    return plain, type("Ours", (Recording,), {"seen": [], "__module__": __name__})
