"""PromptSelection: what a trainer does between the rewards of a generation batch and its advantages.

PromptsSection, data -> PromptSelection, sampler
rollouts, rewards -> memory; groups without variance -> groups of other prompts
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from datasets import Dataset, IterableDataset
from numpy.typing import NDArray
from torch.utils.data import Sampler
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import RepeatSampler

from perl.algorithms.advantages import agreeing_groups, nan_std, weighted_rewards
from perl.algorithms.estimators import ADVANTAGES
from perl.algorithms.kl_place import KL_IN_REWARD, off_reward
from perl.algorithms.registry import function_at
from perl.errors import BrokenPromiseError, Mistake, ModelError, RecipeError, RolloutError, raise_all
from perl.recipe.sections import PromptsSection
from perl.trainer.arguments.argument_checks import has_teacher
from perl.trainer.arguments.config import own_setting, prompts_section
from perl.trainer.live import Position, generation_interval
from perl.trainer.overrides import may_hold_images
from perl.trainer.prompts.chances import Curriculum, PromptMemory, PromptOutcome, difficulties, ranked
from perl.trainer.prompts.choice import ChosenPrompts, PromptChoice, read_ahead
from perl.trainer.prompts.order import ResumableRepeatSampler
from perl.trainer.prompts.refill import BatchLayout, Examples, GenerationBatch, Rollouts, refilled
from perl.trainer.sampling.rollout_source import RolloutSource

# Generation batches in a row without any variance, refills included, after which a training has nothing to learn from.
_GIVES_UP = 5

Sample = Callable[[Examples], tuple[Rollouts, torch.Tensor]]


class PromptSelection:
    """Looks at the rewards of each generation batch of a training, before advantages are made of them.

    Attributes:
        choice: Of prompts.
    """

    def __init__(self, trainer: GRPOTrainer, position: Position, source: RolloutSource, choice: PromptChoice) -> None:
        """Takes what it works with.

        Args:
            trainer: Of the training.
            position: Where it is among its micro-batches.
            source: Of the rollouts.
            choice: Of prompts.
        """
        self._trainer, self._position, self._source, self.choice = trainer, position, source, choice
        self._data, self._cap = trainer.train_dataset, prompts_section(trainer.args).refill
        processes, process = trainer.accelerator.num_processes, trainer.accelerator.process_index
        self._layout = BatchLayout(trainer.num_generations, processes, process, trainer._tokenizer.pad_token_id)
        self._weights_K = trainer.reward_weights.detach().cpu()
        estimator = ADVANTAGES[own_setting(trainer.args, "advantage_estimator")]
        # Of an estimator that has groups without a signal though their rewards differ; None: of one that reads more.
        self._advantages = None if estimator.reads else function_at(estimator.function)
        self._in_vain: dict[int, int] = {}  # generation batches in a row without any variance -> their groups
        self._origin = 0  # micro-batches that this training began after
        self._first: dict[str, float] | None = None

    def _grouped(self, rewards_NK: torch.Tensor) -> torch.Tensor:
        """(P, G, K) rewards."""
        return rewards_NK.cpu().view(-1, self._layout.generations, rewards_NK.size(1))

    def _rewards(self, rewards_NK: torch.Tensor) -> torch.Tensor:
        """(P, G) weighted sums; NaN: a completion has none."""
        return weighted_rewards(self._grouped(rewards_NK), self._weights_K)

    def _flat(self, rewards_NK: torch.Tensor) -> torch.Tensor:
        """(P,) whether a group has no signal: its rewards agree, those that there are and count, or no advantage."""
        if self._trainer.multi_objective_aggregation == "normalize_then_sum":  # each function's are compared
            rewards_PGK = self._grouped(rewards_NK)
            counts = [k for k, weight in enumerate(self._weights_K.tolist()) if weight]
            return torch.stack([agreeing_groups(rewards_PGK[..., k]) for k in counts]).all(dim=0)
        rewards_PG = self._rewards(rewards_NK)
        flat_P = agreeing_groups(rewards_PG)
        return flat_P if self._advantages is None else flat_P | (self._advantages(rewards_PG) == 0).all(dim=1)

    def begin(self) -> None:
        """A training begins; what an earlier one of the same trainer has seen stays known."""
        self._origin, self._in_vain = self._position.micro_batch, {}
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
        if self._cap > 0 and self._first is not None:
            for name, value in self._first.items():
                self._trainer._metrics["train"][name][-1] = value

    def _counts(self) -> dict[str, Any]:
        """What the numbers of generation batches depend on."""
        memory = self.choice.memory
        return {
            "a memory of prompts: {}": "no" if memory is None else f"yes, {memory.lag} generation batches behind",
            "{} training prompts": len(self._data),
            "{} updates of each generation batch": int(self._trainer.args.num_iterations),
            "{} completions in a generation batch": int(self._trainer.args.generation_batch_size),
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
        # Of the generation batch that is made now, in this training.
        number = (self._position.micro_batch - self._origin) // generation_interval(self._trainer.args)
        rows, generations = len(inputs), self._layout.generations
        chosen, shown = list(self.choice.chosen(number, len(rewards_NK) // generations)), self._latest(len(rewards_NK))
        for row in range(0, rows, generations):
            problem = self._data[chosen[(self._layout.process * rows + row) // generations]]
            if inputs[row].get("prompt") != problem.get("prompt"):  # rewards are remembered of what was chosen
                raise BrokenPromiseError(
                    "the data loader's prompts are not those that were chosen: does a subclass replace the data loader?"
                )
        self.choice.begin_batch(number)
        rewards_PG = self._rewards(rewards_NK)
        self._first = {
            "reward": rewards_PG.nanmean().item(),
            "reward_std": nan_std(rewards_PG.view(1, -1)).item(),
            "rows/unscored": float(rewards_PG.isnan().sum()),
        }
        extra = list[GenerationBatch]()
        batch = made = GenerationBatch(inputs, rollouts, rewards_NK, chosen, shown)
        if self._cap > 0:
            batch, extra, logged = refilled(
                made,
                self._layout,
                self._cap,
                flat=self._flat,
                replacements=lambda count, without: self.choice.replacements(number, count, without),
                sample=lambda prompts: self._sampled(prompts, sample),
            )
            if "num_items_in_batch" in batch.rollouts:  # tokens by which a loss divides
                mask_NT = batch.rollouts["completion_mask"] * batch.rollouts.get("tool_mask", 1)
                total = self._trainer.accelerator.gather(mask_NT.sum()).sum()
                batch = replace(batch, rollouts=batch.rollouts | {"num_items_in_batch": total})
            self._trainer.note(logged)
            self._show(batch)
        # A group without any reward counts as flat, with a reward of NaN.
        seen = [
            PromptOutcome(*one)
            for each in (made, *extra)
            for one in zip(
                each.prompts,
                self._rewards(each.rewards_NK).nanmean(dim=1).tolist(),
                self._flat(each.rewards_NK).tolist(),
                strict=True,
            )
        ]
        self._trainer.note(self.choice.note(number, seen))
        self._give_up(number, batch, len(seen))
        return batch

    def _sampled(self, prompts: list[int], sample: Sample) -> GenerationBatch:
        """Rollouts of further prompts, of which nothing is logged as of the batch's own."""
        each = len(prompts) // self._layout.processes
        own = prompts[self._layout.process * each : (self._layout.process + 1) * each]
        examples = [dict(row) for row in map(self._data.__getitem__, own) for _ in range(self._layout.generations)]
        metrics = self._trainer._metrics["train"]
        values = {name: list(found) for name, found in metrics.items()}
        rows = {name: list(table) for name, table in self._tables().items()}
        rollouts, rewards_NK = sample(examples)
        shown, count = self._latest(len(rewards_NK)), len(rewards_NK)
        tokens = round(metrics["completions/mean_length"][-1] * count)  # of what was written, masked out or not
        for name in metrics.keys() - {"num_tokens"}:  # which counts all tokens of the training
            metrics[name][:] = values.get(name, [])
            if not metrics[name]:
                del metrics[name]
        for name, table in self._tables().items():
            table.clear()
            table.extend(rows.get(name, ()))
        return GenerationBatch(examples, rollouts, rewards_NK, prompts, shown, tokens)

    def _tables(self) -> dict[str, Any]:
        """The columns of TRL's table of completions."""
        logs = self._trainer._logs
        columns = {name: logs[name] for name in ("prompt", "completion", "advantages")}
        return columns | {f"{kind}/{name}": rows for kind in ("rewards", "extra") for name, rows in logs[kind].items()}

    def _latest(self, rows: int) -> dict[str, list[Any]]:
        return {name: list(table)[-rows:] for name, table in self._tables().items()}

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
        if not bool(self._flat(batch.rewards_NK).all()):
            self._in_vain = {}
            return
        self._in_vain[number] = sampled  # a batch that is made again counts once
        if self._cap > 0 and len(self._in_vain) >= _GIVES_UP:
            batches, groups, self._in_vain = len(self._in_vain), sum(self._in_vain.values()), {}
            self._source.end_training()
            raise RolloutError(
                f"all rewards were equal within each of {groups} groups, in {batches} generation batches with refills",
                "prompts.refill",
                "there is nothing to learn from: look at `perl reward check`, at other data, or a higher temperature",
            )


def made_selection(trainer: GRPOTrainer, position: Position, source: RolloutSource) -> PromptSelection | None:
    """What selects a trainer's prompts; None: they come in TRL's order.

    Raises:
        RecipeError: The settings do not fit the training.
        DataError: The column of a curriculum is absent, or holds something else than numbers.
    """
    section, args, data = prompts_section(trainer.args), trainer.args, trainer.train_dataset
    if not section.acts:
        return None
    if may_hold_images(trainer):
        raise RecipeError("exchanges rows of tokens, and these have images", "prompts", "a model of text")
    numbers_N = check_choice(section, args, data, trainer.accelerator.num_processes)
    memory = curriculum = None
    if section.memory:
        lag = read_ahead(args, own_setting(args, "rollout_prefetch"))
        memory = PromptMemory(len(data), explore=section.explore, floor=section.floor, lag=lag)
    if numbers_N is not None:
        least = args.generation_batch_size // trainer.num_generations
        curriculum = Curriculum(ranked(numbers_N), section.curriculum_start, section.curriculum_until, least)

    def progress(batch: int) -> float:
        steps = args.max_steps if args.max_steps > 0 else trainer.state.max_steps
        return batch * generation_interval(args) / max(1, steps * args.gradient_accumulation_steps)

    shuffled = trainer.shuffle_dataset
    choice = PromptChoice(
        len(data), args.seed, shuffled=shuffled, memory=memory, curriculum=curriculum, progress=progress
    )
    return PromptSelection(trainer, position, source, choice)


def check_choice(
    section: PromptsSection, args: GRPOConfig, data: Dataset | IterableDataset, processes: int
) -> NDArray[np.float64] | None:
    """The numbers by which a curriculum sorts prompts; None: there is no curriculum.

    Args:
        section: Acts.
        args: Of the trainer, TRL's or ours.
        data: Whose prompts are chosen from.
        processes: That the training has.

    Raises:
        RecipeError: What is wrong with the section for these arguments and data.
        DataError: The curriculum's column is absent, or holds no numbers.
    """
    size = len(data) if hasattr(data, "__len__") else None
    mistakes = _choice_mistakes(section, args, size, processes)
    raise_all(RecipeError, mistakes)
    if section.curriculum is None:
        return None
    return difficulties(data.column_names, section.curriculum, data.__getitem__, "prompts.curriculum")


def _choice_mistakes(section: PromptsSection, args: GRPOConfig, size: int | None, processes: int) -> list[Mistake]:
    """As :func:`check_choice` refuses them, of so many prompts; None: a stream."""
    found, generations = [], args.num_generations
    groups = args.generation_batch_size // generations
    rows = args.generation_batch_size // processes
    for key, does in (("refill", "replaces"), ("memory", "rests prompts of")):
        if not getattr(section, key):
            continue
        if generations == 1:
            what = f"{does} groups whose rewards agree, and a single completion is no group"
            found.append(Mistake(what, f"prompts.{key}", "leave it out"))
        elif taught_by := _teaches_too(args):
            what = f"{does} groups whose rewards agree, from which {taught_by} learns too"
            found.append(Mistake(what, f"prompts.{key}", "leave it out"))
    if section.refill and rows % generations:
        what = f"replaces whole groups, and the {rows} completions of a process are no whole groups of {generations}"
        found.append(Mistake(what, "prompts.refill", "batches of which each process has whole groups"))
    if args.ignore_data_skip:
        what = "starts the data again on resume, which chosen prompts cannot"
        found.append(Mistake(what, "ignore_data_skip", "leave it out"))
    if size is None:
        what = "chooses among prompts, and this data set is a stream"
        found.append(Mistake(what, "prompts", "a data set with a length"))
    elif size <= groups:
        what = f"chooses among {size} prompts, and a generation batch takes {groups}: there is nothing to choose"
        found.append(Mistake(what, "prompts", "more prompts, or a lower prompts_per_step"))
    return found


def sampler_of(trainer: GRPOTrainer, sampler: Sampler[int]) -> Sampler[int]:
    """TRL's sampler as one that can start in any epoch, or that takes chosen prompts; a subclass's own stays."""
    if type(sampler) is not RepeatSampler:
        if trainer.prompt_selection is not None:
            what = "chooses prompts, and this trainer has a sampler of its own"
            raise RecipeError(what, "prompts", "leave prompts out, or _get_train_sampler as it is")
        return sampler

    def epoch() -> int:
        return int(trainer.state.epoch or 0)

    if trainer.prompt_selection is None:
        return ResumableRepeatSampler(sampler, epoch_of=epoch)
    return ChosenPrompts(sampler, epoch, trainer.prompt_selection.choice)


def _teaches_too(args: Any) -> str:  # noqa: ANN401
    """What a group without variance teaches by, beside a KL term of the loss; empty: by nothing."""
    estimator = ADVANTAGES[own_setting(args, "advantage_estimator")]
    if estimator.flat != "0":
        return f"advantage_estimator: {estimator.name}"
    if off_reward(vars(args)):
        return KL_IN_REWARD
    return "a teacher" if has_teacher(args) else ""
