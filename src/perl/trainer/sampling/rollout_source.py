"""RolloutSource: completions from an engine that receives the adapter, not the model.

prompts, policy -> update -> engine -> completions with the log-probabilities they were sampled with

The engine has the policy of the last optimizer step before it samples, or, where rollouts are sampled ahead, one of a
known number of steps before.
"""

import contextlib
import copy
import itertools
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from accelerate.utils import broadcast_object_list

from perl.errors import BrokenPromiseError, PerlError, ProcessError, RecipeError, RolloutError, warn
from perl.recipe.rollout_section import RolloutSection
from perl.rollouts.engine import Engine, EngineSampling, Pending, Request, Sampled, Update
from perl.rollouts.hf_engine import TransformersEngine
from perl.rollouts.open_engine import EngineSettings, open_engine
from perl.rollouts.parity_check import GapJudge, ParityCheck
from perl.rollouts.sync import base_update, choose_form, make_update
from perl.run.devices import threads_for
from perl.run.joint_work import joined
from perl.run.shards import is_sharded
from perl.trainer.arguments.config import own_setting
from perl.trainer.live import LiveTrainer, Position, mode_of, most
from perl.trainer.sampling.generation import Opening, Prompts, tokens_left
from perl.trainer.sampling.given_rewards import EarlyVerdicts
from perl.trainer.sampling.rollouts_ahead import LaterPrompts, LookAhead, TokenSteps

logger = logging.getLogger("perl")

_T = TypeVar("_T")

_MOST_PROMPTS = 100_000  # that are looked at to find the longest one


@dataclass(frozen=True)
class _Ahead:
    """Rollouts that were begun before their step: whose prompts, in what step."""

    prompt_ids: list[list[int]]
    pending: Pending
    step: int


class RolloutSource:
    """Samples from the policy without ever writing to its base. Owns the engine and what is sampled ahead.

    Attributes:
        rollout: What samples, and how it gets the policy.
        is_served: Whether an engine samples; else TRL does, with transformers.
        sampling: How it draws tokens.
        verdicts: Compares answers as soon as a group is there, where a reward does so.
        inputs: The examples whose prompts are sampled next, one for each completion.
        gap: What is usual with this engine; None: none was opened.
        token_steps: From how many optimizer steps the policy came that sampled each token of the latest completions.
        steps_behind: Of the oldest policy that rollouts are from, since this was set to 0.
    """

    def __init__(
        self,
        live: LiveTrainer,
        rollout: RolloutSection,
        sampling: EngineSampling,
        prompts: Prompts,
        position: Position,
        *,
        later: Callable[[], LaterPrompts | None] = lambda: None,
    ) -> None:
        """Takes what a training samples with; an engine is opened with the first rollouts.

        Args:
            live: The training.
            rollout: What samples.
            sampling: How.
            prompts: How they become tokens.
            position: Where the training is among its micro-batches.
            later: Gives the prompts of epochs that have not begun; None: nothing is sampled beyond an epoch's end.
        """
        self._live, self.rollout, self.sampling, self._prompts = live, rollout, sampling, prompts
        self._position, self.is_served = position, rollout.capabilities.takes_updates
        self.verdicts = EarlyVerdicts(prompts)
        self.inputs: Sequence[dict[str, Any]] = []
        self.gap: GapJudge | None = None
        self.steps_behind = 0
        self._engine: Engine | None = None
        self._parity_check: ParityCheck
        self._versions = itertools.count()
        self._syncs, self._loaded_step, self._told = 0, -1, False
        self._ahead: deque[_Ahead] = deque()
        self._sight = LookAhead(live, position, prefetch=rollout.prefetch, bound=rollout.max_staleness, later=later)
        self._in_turn = True
        self.token_steps = TokenSteps()
        self._failed = False  # without rollouts, or without an engine that has the policy
        if self.is_served:
            self._sync_plan = choose_form(live.policy, rollout.sync)
            if rollout.in_flight == "continue" and self._sync_plan.form == "merged":
                what = f"continue needs an adapter that is served beside the base, and here {self._sync_plan.why}"
                raise RecipeError(what, "rollout.in_flight", "finish")

    @property
    def engine(self) -> Engine:
        """What samples; open from the first rollouts of a training or evaluation until it is given back."""
        if self._engine is None:
            raise RuntimeError("no engine is open")
        return self._engine

    @property
    def asleep_bytes(self) -> int:
        """Bytes of the device that an engine in this process takes again when it wakes."""
        return 0 if self._engine is None else self._engine.asleep_bytes

    @contextlib.contextmanager
    def serving(self, keep_last_step: Callable[[], None]) -> Iterator[None]:
        """While a training samples: where rollouts are missing its last whole step is kept; the engine is given back.

        Args:
            keep_last_step: Writes a checkpoint of it.
        """
        self._failed = False
        try:
            yield
        except (RolloutError, BrokenPromiseError):
            if self._failed:
                keep_last_step()
            raise
        finally:
            self.close()

    def end_training(self) -> None:
        """The error that comes next ends the training, and its last whole step is kept."""
        self._failed = True

    def close(self) -> None:
        """Gives the engine back; the next rollouts open it again."""
        self._ahead.clear()
        self._sight.clear()
        if self._engine is not None:
            self._engine.close()
        self._engine = None
        self.verdicts.close()

    def policy_changed(self) -> None:
        """The policy is another one within the same step: the engine no longer has it."""
        self._loaded_step = -1

    def policy_engine(self, prompt_ids: Sequence[int], batch_size: int) -> Engine:
        """What samples from the policy as it is now, for a score between steps; called on every process.

        Args:
            prompt_ids: On which an engine that is not open yet is proven.
            batch_size: Completions that transformers write at a time.
        """
        if not self.is_served:
            return TransformersEngine(self._live.policy, self._prompts.processing_class, batch_size)
        self.sync([list(prompt_ids)])
        return self.engine

    def look_ahead(self, epoch_iterator: Iterator[Any], num_batches: int) -> Iterator[Any]:
        """What an optimizer step takes from the data loader, which is read as far ahead as rollouts are sampled.

        Args:
            epoch_iterator: The data loader's.
            num_batches: Micro-batches of the step.
        """
        return self._sight.window(epoch_iterator, num_batches) if self.rollout.prefetch else epoch_iterator

    def begin_step(self) -> None:
        """An optimizer step begins: what may be sampled ahead from now on is begun, where no new rollouts are due.

        Where they are due that happens with them. Each process must call it, with the policy ready for training.
        """
        inputs = None if self._position.rollouts_due else self._sight.next_inputs(len(self._ahead))
        if inputs is None:
            return
        self.sync(self._tokens(inputs))
        self._begin_ahead()

    def complete(self, prompt_ids: list[list[int]]) -> tuple[list[list[int]], list[list[float | None]]]:
        """A completion of each prompt by the engine, and the log-probabilities they were sampled with.

        A prompt that leaves no room for a token has an empty completion.
        """
        started = time.perf_counter()
        lefts = [self._left(ids) for ids in prompt_ids]
        asked = [ids for ids, left in zip(prompt_ids, lefts, strict=True) if left != 0]
        now = self._live.state.global_step
        later = not prompt_ids or isinstance(prompt_ids[0], Opening)  # turns of conversations, never sampled ahead
        with self.out_of_turn() if later else contextlib.nullcontext():
            answers, step = self.rollouts(asked) if most(self._live.accelerator, len(asked)) else ([], now)
        written, nothing = iter(answers), Sampled((), (), "")
        sampled = [nothing if left == 0 else next(written) for left in lefts]
        behind = most(self._live.accelerator, now - min(self.token_steps.note(sampled, step), default=now))
        metrics, seconds = self._live._metrics[mode_of(self._live.model)], time.perf_counter() - started
        metrics["rollout/seconds"].append(seconds)
        metrics["rollout/tokens_per_second"].append(sum(len(s.token_ids) for s in answers) / max(seconds, 1e-9))
        metrics["rollout/steps_behind"].append(float(behind))
        for name, count in self.engine.counts.items():
            metrics[f"rollout/{name}"].append(float(count))
        self.steps_behind = max(self.steps_behind, behind)
        return [list(s.token_ids) for s in sampled], [list(s.log_probs) for s in sampled]

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """While transformers sample, with as many threads as fit the model; logs the seconds that it takes."""
        started = time.perf_counter()
        with threads_for(self._live.policy):
            yield
        self._live._metrics[mode_of(self._live.model)]["rollout/seconds"].append(time.perf_counter() - started)

    def rollouts(self, prompt_ids: list[list[int]]) -> tuple[list[Sampled], int]:
        """The completions of these prompts, and the step of the policy they are from."""
        training = self._live.model.training
        ready = self._ahead.popleft() if training and self._ahead else None
        if most(self._live.accelerator, int(ready is not None and ready.prompt_ids != prompt_ids)):
            ready = None
            self._ahead.clear()
            if not self._told:
                self._told, why = True, "a template tells the time, or an environment adds to the question"
                warn("PRL367", "what was sampled ahead is thrown away, its prompts have other tokens now: %s", why)
        self.sync(prompt_ids)
        if ready is None:
            pending = self._begin(prompt_ids, self.inputs)
            ready = _Ahead(prompt_ids, pending, self._live.state.global_step)
        groups = self._together(ready.pending.result)
        if training and self._in_turn:
            self._begin_ahead()
        self.engine.sleep()
        return [completion for group in groups for completion in group], ready.step

    @contextlib.contextmanager
    def out_of_turn(self) -> Iterator[None]:
        """While completions of other prompts are sampled: what was sampled ahead waits, and no more is begun."""
        kept, self._ahead, self._in_turn = self._ahead, deque(), False
        try:
            yield
        finally:
            self._ahead, self._in_turn = kept, True

    def forget_ahead(self) -> None:
        """Drops what was sampled ahead."""
        self._ahead.clear()

    def sync(self, prompt_ids: Sequence[Sequence[int]] | None = None) -> None:
        """Gives the engine the policy as it is now, unless it has it.

        The first time it must prove that the adapter is applied, with a policy of random numbers.

        Args:
            prompt_ids: Of which the first is the parity check's, if no engine is open yet.
        """
        if self._engine is not None and self._loaded_step == self._live.state.global_step:
            return
        first = self._engine is None
        if first:
            self._open(prompt_ids or [self._parity_check.request.prompt_ids])
        started = time.perf_counter()
        update = self._load("v")
        metrics = self._live._metrics[mode_of(self._live.model)]
        metrics["sync/seconds"].append(time.perf_counter() - started)
        metrics["sync/bytes"].append(float(update.nbytes))
        self._loaded_step = self._live.state.global_step
        self._syncs = 0 if first else self._syncs + 1
        # The second is the first after a step.
        due = self._syncs < 2 or (self.rollout.check_every and self._syncs % self.rollout.check_every == 0)
        if due:
            metrics["sync/logp_diff"].append(self._prove(first))

    def leave_servers_that_fail(self, what: str, tolerance: float) -> bool:
        """The parity check, out of turn and as strict as this run's rounding allows; whether servers were left.

        Args:
            what: Why it is made.
            tolerance: In nats.
        """
        self.sync()  # rollouts may serve several steps
        strict = copy.copy(self._parity_check)
        strict.tolerance = min(strict.tolerance, tolerance)
        passed: list[float] = []

        def judge() -> dict[str, str]:
            differences, failures = strict.compare(answers)
            passed.extend(differences.values())
            failed = {name: str(error) for name, error in failures.items()}
            if failed and not passed:
                raise RolloutError(f"{what}, and the parity check fails: {' '.join(failed.values())}")
            return failed

        answers = self._together(lambda: self.engine.trial(strict.request, strict.sampling))
        self.engine.sleep()
        failed = self._drop(self._together(judge))
        for reason in failed.values():
            warn("PRL317", "the rollouts are made again without a server that fails the parity check: %s", reason)
        self._live._metrics["train"]["sync/logp_diff"] += passed
        return bool(failed)

    def _begin(self, prompt_ids: Sequence[Sequence[int]], inputs: Sequence[dict[str, Any]]) -> Pending:
        """Asks the engine; a group is judged as soon as it is there."""
        asked = [(tuple(ids), self._left(ids)) for ids in prompt_ids]
        more: dict[str, Any] = {"continues": self.rollout.in_flight == "continue"}
        requests = [
            Request(ids, len(list(same)), longest=left, **more) for (ids, left), same in itertools.groupby(asked)
        ]
        on_group = self.verdicts.on_group(requests, inputs)
        return self._together(lambda: self.engine.start(requests, self.sampling, on_group))

    def _left(self, prompt_ids: Sequence[int]) -> int | None:
        longest, of_a_turn = self.sampling.max_completion_length, own_setting(self._live.args, "agent_max_turn_length")
        return tokens_left(prompt_ids, longest, of_a_turn)

    def _begin_ahead(self) -> None:
        """Begins rollouts of the next steps, with the policy that the engine has: all that may be begun and is not."""
        while (inputs := self._sight.next_inputs(len(self._ahead))) is not None:
            prompt_ids = self._tokens(inputs)
            self._ahead.append(_Ahead(prompt_ids, self._begin(prompt_ids, inputs), self._live.state.global_step))

    def _tokens(self, inputs: Sequence[dict[str, Any]]) -> list[list[int]]:
        return self._prompts.tokenize([row["prompt"] for row in inputs])

    def _open(self, prompt_ids: Sequence[Sequence[int]]) -> None:
        """Opens the engine and proves that what it is given takes effect."""
        self._name = str(broadcast_object_list([f"perl-{secrets.token_hex(4)}"])[0])
        prompt = broadcast_object_list([list(prompt_ids[0])])[0]
        args, accelerator, policy = self._live.args, self._live.accelerator, self._live.policy
        # A recipe's plan knows it. Servers must hold it, and one that does not would end the run when it comes; so that
        # of a script is looked for, in the prompts with the longest text. None: what the base allows.
        longest: int | None = args.vllm_max_model_length
        if longest is None and self.rollout.capabilities.needs_servers:
            prompt_tokens = self._prompts.longest(max(map(len, prompt_ids)), _MOST_PROMPTS)
            longest = prompt_tokens + self.sampling.max_completion_length
        settings = EngineSettings(
            name=self._name,
            folder=Path(args.output_dir) / "sync",
            longest=longest,
            seed=args.seed + accelerator.num_processes * self._live.state.global_step,
            processes=joined(),
            memory_share=args.vllm_gpu_memory_utilization,
        )
        self._engine = self._together(lambda: open_engine(self.rollout, self._sync_plan, policy, settings))
        if self._together(lambda: self.engine.foreign_weights()):  # servers hold an earlier run's
            name = f"{self._name}-base"
            made = base_update(policy, name) if accelerator.is_main_process or is_sharded(policy) else None
            self._together(lambda: self.engine.load(made or Update(name, "merged")))
        if accelerator.is_main_process:
            logger.info("rollouts from %s; %s", self.rollout.backend, self._sync_plan)
        sampling, tolerance = self.sampling, self.rollout.tolerance
        self._parity_check = ParityCheck(
            policy, prompt, sampling.temperature, sampling.max_completion_length, tolerance
        )
        with self._parity_check.far_from_base():
            self._load("probe")
            self._prove(first=True)
        self.gap = GapJudge(self._parity_check.tolerance)

    def _load(self, kind: str) -> Update:
        """Makes the policy's update and gives it to the engine."""
        name, form = f"{self._name}-{kind}{next(self._versions)}", self._sync_plan.form
        self.token_steps.loaded(name, self._live.state.global_step)
        needed = self.rollout.capabilities.in_process or self._live.accelerator.is_main_process

        def load() -> Update:
            # Merged weights take all processes' shards.
            made = needed or is_sharded(self._live.policy)
            update = make_update(self._live.policy, form, name) if made else Update(name, form)
            proven = self.rollout.capabilities.needs_servers
            self.engine.load(replace(update, proof=self._parity_check.proof()) if proven else update)
            return update

        return self._together(load)

    def _prove(self, first: bool) -> float:
        """The engine's difference from the policy, in nats; an error if it is more than rounding.

        Args:
            first: Nothing was sampled yet: a server that does not answer like the policy ends the run. Later on it is
                left, as long as another one does.
        """

        def judge() -> tuple[float, dict[str, str]]:
            differences, failures = self._parity_check.compare(answers)
            if failures and (first or not differences):
                raise next(iter(failures.values()))
            return max(differences.values()), {name: str(error) for name, error in failures.items()}

        check = self._parity_check
        answers = self._together(lambda: self.engine.trial(check.request, check.sampling))
        difference, failures = self._together(judge)
        self._drop(failures)
        return difference

    def _drop(self, failures: dict[str, str]) -> dict[str, str]:
        """Leaves the servers that failed on the main process, on all processes; their reasons by address."""
        found: dict[str, str] = broadcast_object_list([failures])[0]
        if found:
            self.engine.drop(found)
        return found

    def _together(self, work: Callable[[], _T]) -> _T:
        """Runs ``work`` on every process; a failure of one is raised on all of them.

        Raises:
            BrokenPromiseError: The engine does not have the policy.
            RolloutError: Any other reason, one kind on all processes, so that all keep the last step.
            PerlError: That reason itself, where there is no step to keep.
        """
        self._failed = False
        try:
            with joined().failing_together():
                result = work()
            joined().meet()
        except ProcessError:
            raise  # there are not all of them left to keep it
        except BrokenPromiseError:
            self._failed = True
            raise
        except PerlError as error:
            self._failed = True
            if self._live.state.global_step == 0:
                raise
            first, *more = error.mistakes
            alike = RolloutError(first.message, first.where, first.hint, tuple(more))
            alike.already_reported, alike.origin = error.already_reported, error.origin
            raise alike from error
        return result
