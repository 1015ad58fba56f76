"""PromptSelection: what a trainer does between the rewards of a generation batch and its advantages.

rollouts, rewards -> memory; groups without variance -> groups of other prompts
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from perl.algorithms.advantages import agreeing_groups, weighted_rewards
from perl.errors import BrokenPromiseError, RolloutError
from perl.trainer.live import LiveTrainer, Metrics, Position
from perl.trainer.prompts.choice import PromptChoice, seen_of
from perl.trainer.prompts.memory import Seen
from perl.trainer.prompts.refill import Batch, Examples, Refill, Rollouts, Shape

# Generation batches in a row without any variance, refills included, after which a training has nothing to learn from.
_GIVES_UP = 5

Sample = Callable[[Examples], tuple[Rollouts, torch.Tensor]]


@dataclass(frozen=True)
class Groups:
    """How rewards of completions become those of groups.

    Attributes:
        generations: Completions of a prompt.
        weights_K: Of the reward functions.
        each: Whether rewards are compared function by function, and not their sum.
    """

    generations: int
    weights_K: torch.Tensor
    each: bool

    def rewards(self, rewards_NK: torch.Tensor) -> torch.Tensor:
        """(P, G) weighted sums; NaN: a completion has none."""
        return weighted_rewards(self._grouped(rewards_NK), self.weights_K)

    def flat(self, rewards_NK: torch.Tensor) -> torch.Tensor:
        """(P,) whether all rewards of a group agree, of those that there are; what is in no sum does not count."""
        if not self.each:
            return agreeing_groups(self.rewards(rewards_NK))
        rewards_PGK = self._grouped(rewards_NK)
        counts = [k for k, weight in enumerate(self.weights_K.tolist()) if weight]
        return torch.stack([agreeing_groups(rewards_PGK[..., k]) for k in counts]).all(dim=0)

    def _grouped(self, rewards_NK: torch.Tensor) -> torch.Tensor:
        return rewards_NK.cpu().view(-1, self.generations, rewards_NK.size(1))


@dataclass(frozen=True)
class Around:
    """What a selection reads and writes of its trainer.

    Attributes:
        position: Where the training is among its micro-batches.
        metrics: Where metrics go.
        logs: Gives TRL's table of completions.
        end: Says that the error that comes next ends the training, whose last whole step is kept.
    """

    position: Position
    metrics: Metrics
    logs: Callable[[], Mapping[str, Any]]
    end: Callable[[], None]


class PromptSelection:
    """Looks at the rewards of each generation batch of a training, before advantages are made of them.

    Attributes:
        choice: Of prompts.
        refills: Whether groups without variance are replaced.
    """

    def __init__(
        self,
        live: LiveTrainer,
        choice: PromptChoice,
        data: Sequence[dict[str, Any]],
        *,
        cap: float,
        shape: Shape,
        groups: Groups,
        around: Around,
    ) -> None:
        """Takes what it works with.

        Args:
            live: The training.
            choice: Of prompts.
            data: The training data.
            cap: As of :class:`perl.trainer.prompts.refill.Refill`; 0: nothing is replaced.
            shape: Of a generation batch.
            groups: How rewards are compared.
            around: Of its trainer.
        """
        self.choice, self.refills = choice, cap > 0
        self._live, self._data, self._cap, self._shape = live, data, cap, shape
        self._groups, self._around = groups, around
        self._in_vain = 0, 0  # generation batches in a row without any variance, and their groups

    @property
    def batch(self) -> int:
        """Number of the generation batch that is made now."""
        return self._around.position.micro_batch // self._each

    def selected(self, inputs: Examples, rollouts: Rollouts, rewards_NK: torch.Tensor, sample: Sample) -> Batch:
        """The generation batch to train on.

        Args:
            inputs: The examples of this process.
            rollouts: Of this process.
            rewards_NK: Of all processes.
            sample: Makes rollouts of further examples, with the rewards of all processes.

        Raises:
            BrokenPromiseError: The examples are not those that were chosen.
            RolloutError: Nothing has varied for so long that nothing will.
        """
        number, groups = self.batch, len(rewards_NK) // self._shape.generations
        made = Batch(
            inputs, rollouts, rewards_NK, list(self.choice.chosen(number, groups)), self._latest(len(rewards_NK))
        )
        self._check_examples(made)
        metrics, extra = self._around.metrics("train"), list[Batch]()
        batch = made
        if self.refills:
            refill = Refill(
                self._cap,
                flat=self._groups.flat,
                others=lambda count, without: self.choice.others(number, count, without),
                sample=lambda prompts: self._sampled(prompts, sample),
                tokens=self._tokens,
            )
            batch, extra, logged = refill.refilled(made, self._shape)
            batch = self._counted(batch)
            for name, value in logged.items():
                metrics[name].append(value)
            self._show(batch)
        seen = [one for each in (made, *extra) for one in self._seen(each)]
        for name, share in self.choice.note(number, seen).items():
            metrics[name].append(share)
        self._give_up(batch, len(seen))
        return batch

    @property
    def _each(self) -> int:
        args = self._live.args
        return int(args.steps_per_generation * args.num_iterations)

    def _seen(self, batch: Batch) -> list[Seen]:
        return seen_of(batch.prompts, self._groups.rewards(batch.rewards_NK), self._groups.flat(batch.rewards_NK))

    def _check_examples(self, batch: Batch) -> None:
        """Rewards are remembered of the prompts that were chosen: whoever changed the order would teach it nonsense."""
        rows, generations = len(batch.inputs), self._shape.generations
        for row in range(0, rows, generations):
            chosen = self._data[batch.prompts[(self._shape.process * rows + row) // generations]]
            if batch.inputs[row].get("prompt") != chosen.get("prompt"):
                raise BrokenPromiseError(
                    "the data loader's prompts are not those that were chosen: does a subclass replace the data loader?"
                )

    def _sampled(self, prompts: list[int], sample: Sample) -> Batch:
        """Rollouts of further prompts, of which nothing is logged as of the batch's own."""
        each = len(prompts) // self._shape.processes
        own = prompts[self._shape.process * each : (self._shape.process + 1) * each]
        examples = [dict(self._data[index]) for index in own for _ in range(self._shape.generations)]
        metrics, tables = self._around.metrics("train"), self._tables()
        values = {name: list(found) for name, found in metrics.items()}
        rows = {name: list(table) for name, table in tables.items()}
        rollouts, rewards_NK = sample(examples)
        shown = self._latest(len(rewards_NK))
        for name in metrics.keys() - {"num_tokens"}:  # which counts all tokens of the training
            metrics[name][:] = values.get(name, [])
            if not metrics[name]:
                del metrics[name]
        self._write(rows)
        return Batch(examples, rollouts, rewards_NK, prompts, shown)

    def _tokens(self, batch: Batch) -> int:
        accelerator = self._live.accelerator
        own = torch.as_tensor(batch.rollouts["completion_mask"].sum()).to(accelerator.device)
        return int(accelerator.reduce(own, reduction="sum"))

    def _counted(self, batch: Batch) -> Batch:
        """With the number of tokens by which a loss divides."""
        if "num_items_in_batch" not in batch.rollouts:
            return batch
        mask_NT = batch.rollouts["completion_mask"] * batch.rollouts.get("tool_mask", 1)
        total = self._live.accelerator.gather(mask_NT.sum()).sum()
        return replace(batch, rollouts=batch.rollouts | {"num_items_in_batch": total})

    def _tables(self) -> dict[str, Any]:
        """The columns of TRL's table of completions."""
        logs = self._around.logs()
        columns = {name: logs[name] for name in ("prompt", "completion", "advantages")}
        return columns | {f"{kind}/{name}": rows for kind in ("rewards", "extra") for name, rows in logs[kind].items()}

    def _latest(self, rows: int) -> dict[str, list[Any]]:
        return {name: list(table)[-rows:] for name, table in self._tables().items()}

    def _write(self, rows: Mapping[str, list[Any]]) -> None:
        for name, table in self._tables().items():
            table.clear()
            table.extend(rows.get(name, ()))

    def _show(self, batch: Batch) -> None:
        """Puts the rows of a batch in the place of the latest ones, where a column has one for each of them."""
        count = len(batch.rewards_NK)
        for name, table in self._tables().items():
            if len(new := batch.shown.get(name, ())) == count <= len(table):
                kept = list(table)[:-count]
                table.clear()
                table.extend([*kept, *new])

    def _give_up(self, batch: Batch, sampled: int) -> None:
        """Ends a training in which no group has variance, however many are sampled."""
        batches, groups = self._in_vain
        varies = not bool(self._groups.flat(batch.rewards_NK).all())
        self._in_vain = (0, 0) if varies else (batches + 1, groups + sampled)
        if self.refills and self._in_vain[0] >= _GIVES_UP:
            self._around.end()
            raise RolloutError(
                f"the rewards of none of {self._in_vain[1]} groups differ, in {self._in_vain[0]} generation batches "
                "and what was sampled in their place",
                "prompts.refill",
                "there is nothing to learn from: look at `perl reward check`, at other data, or a higher temperature",
            )
