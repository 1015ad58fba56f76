"""PPO in a few plain lines: advantages by their definition, a critic of merged weights, TRL's trainer with both.

rewards, values -> advantages; base, factors -> values; rollouts -> TRL's training with a critic beside it
"""

import copy
import math
from typing import Any, ClassVar

import torch
from transformers import TrainerCallback

from perl import PeftGRPOTrainer
from perl.policy.critic import Critic
from tests.oracles.own_algorithms import PlainLosses
from tests.oracles.two_trainers import base, displace

Rows = list[list[float]]
# Adam divides by a root of squares that are all rounding where a gradient is 0; a large epsilon does not let it.
SETTINGS: dict[str, Any] = {
    "loss_type": "dapo",
    "gradient_accumulation_steps": 2,
    "adam_epsilon": 1e-2,
    "max_grad_norm": 0.5,
    "optim": "sgd",
}
CRITIC: dict[str, Any] = {"advantage_estimator": "gae", "critic_rank": 4, "critic_learning_rate": 0.05}


def advantages(rewards: Rows, values: Rows, masks: list[list[int]], gamma: float, lambda_: float) -> Rows:
    """A_t = sum_l (gamma lambda)^l (r_{t+l} + gamma V_{t+l+1} - V_{t+l}) over the tokens that count, 0 elsewhere."""
    found = []
    for reward, value, mask in zip(rewards, values, masks, strict=True):
        places = [t for t, counts in enumerate(mask) if counts]
        errors = [
            reward[t] + gamma * (value[places[i + 1]] if i + 1 < len(places) else 0.0) - value[t]
            for i, t in enumerate(places)
        ]
        row = [0.0] * len(mask)
        for i, t in enumerate(places):
            row[t] = sum((gamma * lambda_) ** (j - i) * errors[j] for j in range(i, len(places)))
        found.append(row)
    return found


def whitened(rows: Rows, masks: list[list[int]], epsilon: float = 1e-4) -> Rows:
    """Minus the mean, over the unbiased deviation, of the tokens that count."""
    tokens = [v for row, mask in zip(rows, masks, strict=True) for v, m in zip(row, mask, strict=True) if m]
    mean = sum(tokens) / len(tokens)
    deviation = math.sqrt(sum((v - mean) ** 2 for v in tokens) / (len(tokens) - 1))
    return [
        [(v - mean) / (deviation + epsilon) if m else 0.0 for v, m in zip(row, mask, strict=True)]
        for row, mask in zip(rows, masks, strict=True)
    ]


class MergedCritic:
    """A model of its own whose weights are W + 2 B A, row by row and without packing; the factors have the gradient."""

    def __init__(self, model: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> None:
        self.model = copy.deepcopy(model).requires_grad_(False)
        self.tensors = {name: t.detach().clone().requires_grad_(True) for name, t in tensors.items()}

    def values(self, prompts: list[list[int]], completions: list[list[int]]) -> list[torch.Tensor]:
        """Of the state before each token of each completion."""
        weights = dict(self.model.named_parameters())
        for name in [name for name in self.tensors if name.endswith("lora_B.weight")]:
            layer = name.removesuffix(".lora_B.weight")
            update = 2.0 * self.tensors[name] @ self.tensors[f"{layer}.lora_A.weight"]
            weights[f"{layer}.weight"] = weights[f"{layer}.weight"] + update
        found = []
        for prompt, completion in zip(prompts, completions, strict=True):
            ids = torch.tensor([[*prompt, *completion]])
            asked = {"input_ids": ids, "output_hidden_states": True}
            hidden = torch.func.functional_call(self.model, weights, kwargs=asked).hidden_states[-1][0]
            states = hidden[len(prompt) - 1 : len(prompt) - 1 + len(completion)]
            found.append(states @ self.tensors["value_head.weight"][0] + self.tensors["value_head.bias"][0])
        return found


class Steps(TrainerCallback):
    """The critic's step beside the policy's."""

    def __init__(self, trainer: "PlainPPO") -> None:
        self.trainer = trainer

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.trainer.begin()

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.trainer.critic_step()


class PlainPPO(PlainLosses):
    """TRL's trainer with advantages of a critic, the clipped loss, and the critic's own step."""

    start: ClassVar[dict[str, torch.Tensor]] = {}
    gamma, lambda_, clip = 1.0, 0.95, 0.2

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.add_callback(Steps(self))
        self.tokens = 0

    def begin(self) -> None:
        self.critic = MergedCritic(base(torch.float32), self.start)
        of_adam = {"lr": CRITIC["critic_learning_rate"], "eps": self.args.adam_epsilon, "weight_decay": 0.0}
        self.of_critic = torch.optim.AdamW(self.critic.tensors.values(), **of_adam)
        type(self).trained = self.critic

    def critic_step(self) -> None:
        tensors = list(self.critic.tensors.values())
        for tensor in tensors:
            tensor.grad = None if tensor.grad is None else tensor.grad / self.tokens
        torch.nn.utils.clip_grad_norm_(tensors, self.args.max_grad_norm)
        self.of_critic.step()
        self.of_critic.zero_grad()
        self.tokens = 0

    def _values(self, batch: dict[str, Any]) -> torch.Tensor:
        pairs = [(batch[f"{part}_ids"], batch[f"{part}_mask"]) for part in ("prompt", "completion")]
        prompts, completions = ([row[kept.bool()].tolist() for row, kept in zip(*pair, strict=True)] for pair in pairs)
        found = self.critic.values(prompts, completions)
        width = batch["completion_ids"].size(1)
        return torch.stack([torch.nn.functional.pad(values, (0, width - len(values))) for values in found])

    def _old(self, batch: dict[str, Any]) -> torch.Tensor:
        if "old_per_token_logps" in batch:
            return batch["old_per_token_logps"]
        ids, masks = (
            torch.cat([batch[f"{part}_{kind}"] for part in ("prompt", "completion")], dim=1) for kind in ("ids", "mask")
        )
        with torch.no_grad():
            hook = self._get_per_token_logps_and_entropies
            return hook(self.model, ids, masks, batch["completion_ids"].size(1))[0]

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        mask = output["completion_mask"] * output.get("tool_mask", 1)
        values = self._values(output).detach()
        rewards = torch.zeros(mask.shape)
        for row, reward in enumerate(self.rewards_NK[:, 0]):
            rewards[row, mask[row].nonzero().max()] = reward
        if "ref_per_token_logps" in output:
            rewards -= self.args.beta * (self._old(output) - output.pop("ref_per_token_logps")) * mask
        found = advantages(rewards.tolist(), values.tolist(), mask.tolist(), self.gamma, self.lambda_)
        output["advantages"] = torch.tensor(whitened(found, mask.tolist()))
        output["old_values"], output["returns"] = values, torch.tensor(found) + values
        return output

    def _compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        mask, returns = (inputs["completion_mask"] * inputs.get("tool_mask", 1)).bool(), inputs["returns"]
        values, old = self._values(inputs), inputs["old_values"]
        near = torch.minimum(torch.maximum(values, old - self.clip), old + self.clip)
        loss = torch.maximum((values - returns) ** 2, (near - returns) ** 2)[mask].sum() / 2
        loss.backward()
        self.tokens += int(mask.sum())
        return super()._compute_loss(model, inputs)

    def _objective(
        self,
        log_p: torch.Tensor,  # noqa: ARG002
        old: torch.Tensor,  # noqa: ARG002
        ratio: torch.Tensor,
        advantages: torch.Tensor,
    ) -> torch.Tensor:
        bounded = ratio.clamp(1 - self.args.epsilon, 1 + self.args.epsilon)
        return -torch.minimum(ratio * advantages, bounded * advantages)


class Ours(PeftGRPOTrainer):
    """Ours, whose critic starts off 0 where ``offset`` says so, and can be looked at afterwards."""

    offset = 0.1
    seen: ClassVar[list["Ours"]] = []

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.critic_training is not None:
            displace(self.critic_training.critic.tensors, self.offset)
        type(self).seen.append(self)
        self.start = None if self.critic_training is None else self.critic_training.critic.state()
        self.rollouts: list[dict[str, Any]] = []

    @property
    def critic(self) -> Critic:
        """What is trained beside the policy."""
        assert self.critic_training is not None
        return self.critic_training.critic

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        self.rollouts.append({name: t.clone() for name, t in output.items() if isinstance(t, torch.Tensor)})
        return output


def ours(offset: float = 0.1) -> type[Ours]:
    """A class of its own, with an empty record."""
    return type("WithCritic", (Ours,), {"seen": [], "offset": offset, "__module__": __name__})
