"""ResumeState: checkpoints that are complete, or do not count, and from which training resumes bit for bit.

checkpoint -> the policy, the reference, the counters and the rollouts, as they were

Rollouts of another number of processes are dealt out again. What counts is which rows an optimizer step trains on;
which process runs a row is of no account. So the rows of each step are put together, in the order of the processes, and
divided anew.
"""

import contextlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers.trainer_utils import rotate_checkpoints

from perl.errors import ModelError, warn
from perl.policy.checkpoint import (
    drop_other_ranks,
    latest_step,
    load_trainer_state,
    reference_of,
    save_policy,
    save_trainer_state,
    seal,
    unseal,
)
from perl.policy.reference import Reference
from perl.run.host import host
from perl.run.joint_work import gather_files, joined
from perl.trainer.live import LiveTrainer, Position, generation_interval
from perl.trainer.prompts.refill import padded
from perl.trainer.prompts.selection import PromptSelection
from perl.trainer.step import optimizer_state as states
from perl.trainer.step.critic_training import CriticTraining

_PROMPTS = "prompts.safetensors"
# Counters beside TRL's.
_PROCESSES, _ACCUMULATION, _TEACHER = "world_size", "gradient_accumulation_steps", "teacher"
_INTERVAL = "generation_interval"


class ResumeState:
    """What a checkpoint holds beside transformers' files: TRL forgets its counter and rollouts that are not used up."""

    def __init__(
        self,
        live: LiveTrainer,
        position: Position,
        reference: Reference | None,
        *,
        teacher: str | None = None,
        critic: CriticTraining | None = None,
        prompts: PromptSelection | None = None,
    ) -> None:
        """Takes what a checkpoint is of.

        Args:
            live: The training.
            position: Where it is among its micro-batches.
            reference: What the KL divergence is measured against; None: the loss has no such term.
            teacher: What makes it another one (:func:`perl.policy.teacher.teacher_identity`); None: there is none.
            critic: What is trained beside the policy; None: nothing.
            prompts: What chooses them; None: they come in TRL's order.
        """
        self._live, self._position, self._reference = live, position, reference
        self._teacher, self._critic, self._prompts = teacher, critic, prompts

    def chosen(self, asked: str | bool | None) -> str | bool | None:
        """The checkpoint to resume from; for True the newest *complete* one in ``output_dir``, if there is one.

        The main process looks for it: what another one lists may be older.
        """
        if asked is not True:
            return asked
        folder = Path(self._live.args.output_dir)
        step = joined().by_main(lambda: latest_step(folder))
        return str(folder / f"checkpoint-{step}") if step else True

    def restore(self, checkpoint: str | bool | None) -> None:
        """Puts TRL's counter and rollouts back, before the first step.

        Another number of processes than wrote the checkpoint takes the same prompts: a step has as many, whoever runs
        them, and TRL's counter goes by the micro-batches of a step. Rollouts that are not used up, which there are only
        where several steps train on the same ones, are divided anew, so that each step trains on the rows that it would
        have; where that cannot be done exactly, they are made anew from the prompts that they were of. Where a batch of
        rollouts is of another number of steps than before, a new one begins.

        Raises:
            ModelError: The checkpoint is of a training by another teacher, or with another critic or none, or another
                choice of prompts.
        """
        if self._prompts is not None:
            if not isinstance(checkpoint, str):
                self._position.to_next_rollouts()  # what is left of an earlier training's would make each batch late
            self._prompts.begin()
        if isinstance(checkpoint, str):
            folder, args = Path(checkpoint), self._live.args
            if self._critic is not None:
                self._critic.check(folder)
            counters, rollouts = load_trainer_state(folder, args.process_index, args.device)
            self._check_teacher(folder, counters.get(_TEACHER))
            written = counters.get(_PROCESSES, args.world_size), counters.get(_ACCUMULATION, self._accumulation)
            if written != (args.world_size, self._accumulation):
                rollouts = self._redivided(folder, *written)
            micro_step = counters.get("micro_step", self._position.micro_batch)
            file, hint = folder / _PROMPTS, "leave prompts as they were, or start anew"
            if file.is_file() == (self._prompts is None):
                how = "chose prompts" if file.is_file() else "took prompts as they come"
                raise ModelError(f"{folder} was written by a training that {how}", "prompts", hint)
            if self._prompts is not None:
                self._prompts.restore(states.read_state(file), lambda count: count * self._accumulation // written[1])
            self._position.move(micro_step * self._accumulation // written[1], rollouts)
            interval = generation_interval(args)
            if counters.get(_INTERVAL, interval) * self._accumulation != interval * written[1]:
                self._position.to_next_rollouts()  # a batch of another size begins at its begin
        self._position.begin_step()

    @property
    def _accumulation(self) -> int:
        return int(self._live.args.gradient_accumulation_steps)

    def _check_teacher(self, checkpoint: Path, written: str | None) -> None:
        """Refuses a checkpoint of a training by another teacher, or by one where here is none."""
        if written == self._teacher:
            return
        then, now = ("no teacher" if one is None else f"teacher {one[:12]}" for one in (written, self._teacher))
        raise ModelError(
            f"{checkpoint} was written with {then}, here is {now}: its adapter, hint or system prompt has changed",
            "teacher",
            "put the teacher back as it was, or start anew",
        )

    def _redivided(self, folder: Path, processes: int, accumulation: int) -> list[dict[str, torch.Tensor]] | None:
        """Unused rollouts of so many processes with so many micro-batches a step, as this one needs them."""
        args = self._live.args
        windows = [load_trainer_state(folder, rank, args.device)[1] for rank in range(processes)]
        written = [window for window in windows if window is not None]
        if not written:
            return None
        steps = max(args.steps_per_generation // self._accumulation, 1)
        own = None
        if len(written) == processes and max(len(written[0]) // accumulation, 1) == steps:
            how = {"rank": args.process_index, "processes": args.world_size}
            own = redivided(written, steps, **how, micro_batches=args.steps_per_generation)
        if own is None and self._live.accelerator.is_main_process:
            what = "%s holds rollouts of %d processes, which %d cannot share exactly; they are made anew"
            warn("PRL327", what, folder, processes, args.world_size)
        return own

    def keep_last_step(self, save: Callable[[], None]) -> None:
        """Has a checkpoint of the last whole step written, if it has none, after an error that ended the next one.

        Only for errors that all processes raise at the same place, before anything of the next step is trained on.
        """
        step = self._live.state.global_step
        kept = (Path(self._live.args.output_dir) / f"checkpoint-{step}").is_dir()
        self._live.accelerator.wait_for_everyone()  # one would find what another has begun to write
        if step == 0 or kept:
            return
        self._position.return_to_step_begin()
        save()

    @contextlib.contextmanager
    def completing(self, folder: Path) -> Iterator[None]:
        """Adds to what transformers writes as a checkpoint meanwhile, seals it, and only then deletes older ones.

        Args:
            folder: Of the checkpoints.
        """
        args, state = self._live.args, self._live.state
        checkpoint = folder / f"checkpoint-{state.global_step}"
        if args.should_save:
            unseal(checkpoint)
        yield
        if args.should_save:
            reference = self._reference
            snapshot = {} if reference is None or reference.is_the_base else reference.snapshot  # a base is made anew
            save_policy(checkpoint, self._live.policy, snapshot, "" if reference is None else reference.spec)
            if self._critic is not None:
                self._critic.save(checkpoint)
            if self._prompts is not None:
                states.write_state(checkpoint / _PROMPTS, self._prompts.state())
        counters = {
            "micro_step": self._position.micro_batch,
            _PROCESSES: args.world_size,
            _ACCUMULATION: self._accumulation,
            _INTERVAL: generation_interval(args),
            **({} if self._teacher is None else {_TEACHER: self._teacher}),
        }
        rollouts = self._position.rollouts
        used_up = self._position.micro_batch % generation_interval(args) == 0
        # Rows with images hold more than tensors; a run that resumes among those generates them anew.
        plain = all(isinstance(value, torch.Tensor) for batch in rollouts or () for value in batch.values())
        save_trainer_state(checkpoint, counters, None if used_up or not plain else rollouts, args.process_index)
        self._live.accelerator.wait_for_everyone()
        if host().keeps_files:
            gather_files(checkpoint, joined())
            if not args.should_save:  # from now on the main process's is the one that counts
                shutil.rmtree(checkpoint, ignore_errors=True)
        if args.should_save:
            drop_other_ranks(checkpoint, args.world_size)
            seal(checkpoint)
            rotate_checkpoints(
                output_dir=str(folder),
                save_total_limit=args.save_total_limit,
                best_model_checkpoint=state.best_model_checkpoint,
                use_mtime=False,
            )

    def save_optimizer(self, checkpoint: Path, optimizer: torch.optim.Optimizer, scheduler: Any) -> None:  # noqa: ANN401
        """Writes an optimizer's and a scheduler's state, by the names of the parameters; every process must call it."""
        state = states.named_state(optimizer, self._live.policy)
        if self._live.args.should_save:
            states.write_state(checkpoint / states.OPTIMIZER, state)
            states.write_state(checkpoint / states.SCHEDULER, dict(scheduler.state_dict()))

    def load_optimizer(self, checkpoint: Path, optimizer: torch.optim.Optimizer, scheduler: Any) -> None:  # noqa: ANN401
        """Puts back what :meth:`save_optimizer` wrote, unless only the model was saved.

        Raises:
            ModelError: It is of other parameters.
        """
        if not (checkpoint / states.OPTIMIZER).is_file():
            return
        state, schedule = (states.read_state(checkpoint / name) for name in (states.OPTIMIZER, states.SCHEDULER))
        states.load_named_state(optimizer, self._live.policy, state)
        places = states.group_places(optimizer, self._live.policy, state["groups"])
        states.load_scheduler_state(scheduler, schedule, places, len(state["groups"]))

    def save_random(self, checkpoint: Path) -> None:
        """Writes where this process's random numbers are."""
        states.save_random_state(checkpoint, self._live.args.process_index, self._live.args.device)

    def load_random(self, checkpoint: Path) -> None:
        """Puts back what :meth:`save_random` wrote, unless only the model was saved.

        Of a process that the checkpoint does not know they start anew, by the seed, its number and the step.
        """
        args = self._live.args
        known = states.load_random_state(checkpoint, args.process_index, args.device)
        if not known and states.has_random_state(checkpoint):
            states.seed_random_state(args.seed, args.process_index, self._live.state.global_step)

    def save_scaler(self, checkpoint: Path) -> None:
        """Writes by how much half precision's losses are scaled, where they are."""
        scaler = getattr(self._live.accelerator, "scaler", None)
        if scaler is not None and self._live.args.should_save:
            states.write_state(checkpoint / states.SCALER, scaler.state_dict())

    def load_scaler(self, checkpoint: Path) -> None:
        """Puts back what :meth:`save_scaler` wrote."""
        scaler = getattr(self._live.accelerator, "scaler", None)
        if scaler is not None and (checkpoint / states.SCALER).is_file():
            scaler.load_state_dict(states.read_state(checkpoint / states.SCALER))

    def load_roles(self, checkpoint: Path, snapshot: dict[str, torch.Tensor]) -> None:
        """Puts the critic and the reference back. The base and the policy at the start, this process has found again.

        Raises:
            ModelError: The reference moves along and the checkpoint does not hold it, or it holds no such critic.
        """
        reference = self._reference
        if self._critic is not None:
            self._critic.load(checkpoint)
        if reference is None or reference.is_the_base:
            return
        written = reference_of(checkpoint)
        if written == reference.spec:
            reference.load(snapshot)
        elif reference.every is not None:
            was = f"was written with the reference {written}" if written else "does not say what its reference was"
            raise ModelError(
                f"{checkpoint} {was}, so that {reference.spec} cannot go on from it",
                "train.reference",
                f"resume with {written or 'base'}, or start anew",
            )


Window = list[dict[str, torch.Tensor]]


def redivided(windows: Sequence[Window], steps: int, *, rank: int, processes: int, micro_batches: int) -> Window | None:
    """The micro-batches of one process.

    Args:
        windows: The micro-batches of a generation batch, of each process that wrote them.
        steps: Optimizer steps that train on different parts of the generation batch.
        rank: Number of the process that goes on.
        processes: How many go on.
        micro_batches: How many each of them needs.

    Returns:
        None where it cannot be done exactly: rows that do not divide, or values of a whole generation batch that differ
        from process to process.
    """
    if not windows or micro_batches % steps or any(len(window) != len(windows[0]) for window in windows):
        return None
    if len(windows[0]) % steps:
        return None
    each, batches = len(windows[0]) // steps, [batch for window in windows for batch in window]
    shared = {name: value for name, value in batches[0].items() if value.ndim == 0}
    if any(not torch.equal(batch[name], value) for batch in batches for name, value in shared.items()):
        return None
    parts: Window = []
    for step in range(steps):
        together = _together([batch for window in windows for batch in window[step * each : (step + 1) * each]])
        rows = len(next(iter(together.values()), ()))
        count = processes * (micro_batches // steps)
        if not rows or rows % count:
            return None
        size = rows // count
        first = rank * (micro_batches // steps)
        for i in range(first, first + micro_batches // steps):
            parts.append(shared | {name: t[i * size : (i + 1) * size] for name, t in together.items()})
    return parts


def _together(batches: Window) -> dict[str, torch.Tensor]:
    """The rows of micro-batches, padded to the longest: prompts on the left, as TRL has them, all else on the right."""
    rows = {}
    for name, tensor in batches[0].items():
        tensors = [batch[name] for batch in batches]
        if tensor.ndim == 0:
            continue
        if tensor.ndim > 1:
            width = max(t.size(1) for t in tensors)
            left = name.startswith("prompt")
            tensors = [padded(t, width, left=left) for t in tensors]
        rows[name] = torch.cat(tensors)
    return rows
