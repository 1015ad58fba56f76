"""PromptSelection: what a trainer does between the rewards of a generation batch and its advantages.

rollouts, rewards -> memory; groups without variance -> groups of other prompts
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from perl.algorithms.advantages import agreeing_groups, nan_std, weighted_rewards
from perl.errors import BrokenPromiseError, ModelError, RolloutError
from perl.trainer.live import LiveTrainer, Metrics, Position, generation_interval
from perl.trainer.prompts.choice import PromptChoice, outcomes_of
from perl.trainer.prompts.memory import PromptOutcome
from perl.trainer.prompts.refill import BatchLayout, Examples, GenerationBatch, Refill, Rollouts

# Generation batches in a row without any variance, refills included, after which a training has nothing to learn from.
_GIVES_UP = 5

Sample = Callable[[Examples], tuple[Rollouts, torch.Tensor]]


@dataclass(frozen=True)
class RewardGroups:
    """How rewards of completions become those of groups.

    Attributes:
        generations: Completions of a prompt.
        weights_K: Of the reward functions.
        each: Whether rewards are compared function by function, and not their sum.
        advantages: (P, G) advantages of (P, G) rewards; None: they are 0 where rewards agree, and nowhere else.
    """

    generations: int
    weights_K: torch.Tensor
    each: bool
    advantages: Callable[[torch.Tensor], torch.Tensor] | None = None

    def rewards(self, rewards_NK: torch.Tensor) -> torch.Tensor:
        """(P, G) weighted sums; NaN: a completion has none."""
        return weighted_rewards(self._grouped(rewards_NK), self.weights_K)

    def flat(self, rewards_NK: torch.Tensor) -> torch.Tensor:
        """(P,) whether a group has no signal: its rewards agree, those that there are and count, or no advantage."""
        if not self.each:
            rewards_PG = self.rewards(rewards_NK)
            flat_P = agreeing_groups(rewards_PG)
            return flat_P if self.advantages is None else flat_P | (self.advantages(rewards_PG) == 0).all(dim=1)
        rewards_PGK = self._grouped(rewards_NK)
        counts = [k for k, weight in enumerate(self.weights_K.tolist()) if weight]
        return torch.stack([agreeing_groups(rewards_PGK[..., k]) for k in counts]).all(dim=0)

    def _grouped(self, rewards_NK: torch.Tensor) -> torch.Tensor:
        return rewards_NK.cpu().view(-1, self.generations, rewards_NK.size(1))


@dataclass(frozen=True)
class SelectionHooks:
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
        shape: BatchLayout,
        groups: RewardGroups,
        hooks: SelectionHooks,
    ) -> None:
        """Takes what it works with.

        Args:
            live: The training.
            choice: Of prompts.
            data: The training data.
            cap: As of :class:`perl.trainer.prompts.refill.Refill`; 0: nothing is replaced.
            shape: Of a generation batch.
            groups: How rewards are compared.
            hooks: Of its trainer.
        """
        self.choice, self.refills = choice, cap > 0
        self._live, self._data, self._cap, self._shape = live, data, cap, shape
        self._groups, self._hooks = groups, hooks
        self._in_vain: dict[int, int] = {}  # generation batches in a row without any variance -> their groups
        self._origin = 0  # micro-batches that this training began after
        self._first: dict[str, float] | None = None

    @property
    def batch(self) -> int:
        """Number of the generation batch that is made now, in this training."""
        return (self._hooks.position.micro_batch - self._origin) // self._each

    def begin(self) -> None:
        """A training begins; what an earlier one of the same trainer has seen stays known."""
        self._origin, self._in_vain = self._hooks.position.micro_batch, {}
        self.choice.begin()

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds, with what another training would count otherwise."""
        return {
            "choice": self.choice.state(),
            "origin": self._origin,
            "in_vain": {str(number): groups for number, groups in self._in_vain.items()},
            "counts": self._counts(),
        }

    def restore(self, state: Mapping[str, Any], scale: Callable[[int], int]) -> None:
        """Goes on as :meth:`state` was taken.

        Args:
            state: Of a checkpoint.
            scale: The number of micro-batches here of so many there.

        Raises:
            ModelError: It is of a training that counts or remembers otherwise.
        """
        for name, now in self._counts().items():
            if (then := state["counts"][name]) != now:
                what = f"the checkpoint was written with {name.format(then)}, here is {name.format(now)}"
                raise ModelError(what, "prompts", "leave prompts and batches as they were, or start anew")
        self._origin, self._in_vain = scale(state["origin"]), {int(k): n for k, n in state["in_vain"].items()}
        self.choice.restore(state["choice"])

    def log_first(self) -> None:
        """Logs the rewards of what was drawn first, as a training without refill does; not of what is trained on."""
        if self.refills and self._first is not None:
            for name, value in self._first.items():
                self._hooks.metrics("train")[name][-1] = value

    def _counts(self) -> dict[str, Any]:
        """What the numbers of generation batches depend on."""
        memory = self.choice.memory
        return {
            "a memory of prompts: {}": "no" if memory is None else f"yes, {memory.lag} generation batches behind",
            "{} training prompts": len(self._data),
            "{} updates of each generation batch": int(self._live.args.num_iterations),
            "{} completions in a generation batch": int(self._live.args.generation_batch_size),
        }

    def selected(
        self, inputs: Examples, rollouts: Rollouts, rewards_NK: torch.Tensor, sample: Sample
    ) -> GenerationBatch:
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
        made = GenerationBatch(
            inputs, rollouts, rewards_NK, list(self.choice.chosen(number, groups)), self._latest(len(rewards_NK))
        )
        self._check_examples(made)
        self.choice.begin_batch(number)
        rewards_PG = self._groups.rewards(rewards_NK)
        self._first = {
            "reward": rewards_PG.nanmean().item(),
            "reward_std": nan_std(rewards_PG.view(1, -1)).item(),
            "rows/unscored": float(rewards_PG.isnan().sum()),
        }
        metrics, extra = self._hooks.metrics("train"), list[GenerationBatch]()
        batch = made
        if self.refills:
            refill = Refill(
                self._cap,
                flat=self._groups.flat,
                replacements=lambda count, without: self.choice.replacements(number, count, without),
                sample=lambda prompts: self._sampled(prompts, sample),
            )
            batch, extra, logged = refill.refilled(made, self._shape)
            batch = self._counted(batch)
            for name, value in logged.items():
                metrics[name].append(value)
            self._show(batch)
        seen = [one for each in (made, *extra) for one in self._seen(each)]
        for name, share in self.choice.note(number, seen).items():
            metrics[name].append(share)
        self._give_up(number, batch, len(seen))
        return batch

    @property
    def _each(self) -> int:
        return generation_interval(self._live.args)

    def _seen(self, batch: GenerationBatch) -> list[PromptOutcome]:
        return outcomes_of(batch.prompts, self._groups.rewards(batch.rewards_NK), self._groups.flat(batch.rewards_NK))

    def _check_examples(self, batch: GenerationBatch) -> None:
        """Rewards are remembered of the prompts that were chosen: they must be those of the examples."""
        rows, generations = len(batch.inputs), self._shape.generations
        for row in range(0, rows, generations):
            chosen = self._data[batch.prompts[(self._shape.process * rows + row) // generations]]
            if batch.inputs[row].get("prompt") != chosen.get("prompt"):
                raise BrokenPromiseError(
                    "the data loader's prompts are not those that were chosen: does a subclass replace the data loader?"
                )

    def _sampled(self, prompts: list[int], sample: Sample) -> GenerationBatch:
        """Rollouts of further prompts, of which nothing is logged as of the batch's own."""
        each = len(prompts) // self._shape.processes
        own = prompts[self._shape.process * each : (self._shape.process + 1) * each]
        examples = [dict(row) for row in map(self._data.__getitem__, own) for _ in range(self._shape.generations)]
        metrics, tables = self._hooks.metrics("train"), self._tables()
        values = {name: list(found) for name, found in metrics.items()}
        rows = {name: list(table) for name, table in tables.items()}
        rollouts, rewards_NK = sample(examples)
        shown, count = self._latest(len(rewards_NK)), len(rewards_NK)
        tokens = round(metrics["completions/mean_length"][-1] * count)  # of what was written, masked out or not
        for name in metrics.keys() - {"num_tokens"}:  # which counts all tokens of the training
            metrics[name][:] = values.get(name, [])
            if not metrics[name]:
                del metrics[name]
        self._write(rows)
        return GenerationBatch(examples, rollouts, rewards_NK, prompts, shown, tokens)

    def _counted(self, batch: GenerationBatch) -> GenerationBatch:
        """With the number of tokens by which a loss divides."""
        if "num_items_in_batch" not in batch.rollouts:
            return batch
        mask_NT = batch.rollouts["completion_mask"] * batch.rollouts.get("tool_mask", 1)
        total = self._live.accelerator.gather(mask_NT.sum()).sum()
        return replace(batch, rollouts=batch.rollouts | {"num_items_in_batch": total})

    def _tables(self) -> dict[str, Any]:
        """The columns of TRL's table of completions."""
        logs = self._hooks.logs()
        columns = {name: logs[name] for name in ("prompt", "completion", "advantages")}
        return columns | {f"{kind}/{name}": rows for kind in ("rewards", "extra") for name, rows in logs[kind].items()}

    def _latest(self, rows: int) -> dict[str, list[Any]]:
        return {name: list(table)[-rows:] for name, table in self._tables().items()}

    def _write(self, rows: Mapping[str, list[Any]]) -> None:
        for name, table in self._tables().items():
            table.clear()
            table.extend(rows.get(name, ()))

    def _show(self, batch: GenerationBatch) -> None:
        """Puts the rows of a batch in the place of the latest ones, where a column has one for each of them."""
        count = len(batch.rewards_NK)
        for name, table in self._tables().items():
            if len(new := batch.shown.get(name, ())) == count <= len(table):
                kept = list(table)[:-count]
                table.clear()
                table.extend([*kept, *new])

    def _give_up(self, number: int, batch: GenerationBatch, sampled: int) -> None:
        """Ends a training in which no group has variance, however many are sampled."""
        if not bool(self._groups.flat(batch.rewards_NK).all()):
            self._in_vain = {}
            return
        self._in_vain[number] = sampled  # a batch that is made again counts once
        if self.refills and len(self._in_vain) >= _GIVES_UP:
            batches, groups, self._in_vain = len(self._in_vain), sum(self._in_vain.values()), {}
            self._hooks.end()
            raise RolloutError(
                f"all rewards were equal within each of {groups} groups, in {batches} generation batches with refills",
                "prompts.refill",
                "there is nothing to learn from: look at `perl reward check`, at other data, or a higher temperature",
            )
