"""ServedGRPOTrainer: TRL's trainer whose rollouts come from an engine that is given the adapter, not the model.

prompts, policy -> update -> engine -> completions with the log-probabilities they were sampled with

The engine has the policy of the last optimizer step before it samples, or, where rollouts are sampled ahead, one of a
known number of steps before. One of the six modules that know TRL's and transformers' private methods; each override
says which method it replaces and why.
"""

import contextlib
import copy
import importlib.metadata
import importlib.util
import itertools
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from accelerate.utils import broadcast_object_list
from datasets import Dataset
from transformers.trainer_utils import TrainOutput

from perl.errors import BrokenPromiseError, Mistake, ModelError, PerlError, RecipeError, RewardError, RolloutError
from perl.methods.on_quantised import IN_PROCESS
from perl.packing.attention import without_packed_attention
from perl.policy.model import base_of
from perl.policy.quantised import was_quantised
from perl.recipe.sections import RolloutSection
from perl.rewards.verifier import Judging, check_all
from perl.rollouts.conversation import Opening, tokens_left
from perl.rollouts.engine import Engine, EngineSampling, Pending, Request, Sampled, Update
from perl.rollouts.hf_engine import TransformersEngine, fill_with_neutral
from perl.rollouts.open_engine import EngineSettings, open_engine
from perl.rollouts.parity_check import ParityCheck
from perl.rollouts.sync import SyncPlan, choose_form, make_update
from perl.rollouts.vllm.version import check_version
from perl.run.threads import threads_for
from perl.trainer.config import check_sampling
from perl.trainer.log_prob_passes import PackedGRPOTrainer

logger = logging.getLogger("perl")

_T = TypeVar("_T")

# Prompts that are tokenized to find the longest one: those with the longest text.
_LONGEST_TEXTS, _MOST_PROMPTS = 64, 100_000


@dataclass(frozen=True)
class _Ahead:
    """Rollouts that were begun before their step: whose prompts, in what step."""

    prompt_ids: list[list[int]]
    pending: Pending
    step: int


class ServedGRPOTrainer(PackedGRPOTrainer):
    """GRPOTrainer that samples from vLLM without ever writing to its base.

    Attributes:
        rollout: What samples, and how it gets the policy.
        judging: How answers are compared, where a reward does so; comparisons begin as soon as a group is there.
    """

    rollout: RolloutSection
    judging: Judging | None = None
    _engine: Engine | None = None
    _canary: ParityCheck
    _sync_plan: SyncPlan
    _inputs: Sequence[dict[str, Any]]
    _syncs: int
    _without_rollouts: bool = False

    def prepare_rollouts(self, how: RolloutSection) -> None:
        """Chooses what samples; called once the model and the arguments are complete.

        Raises:
            RecipeError: The engine would not sample from the policy that the loss is about.
            ModelError: It cannot be given this model.
        """
        self.rollout = how if how.backend != "auto" else how.model_copy(update={"backend": self._best_backend(how)})
        self._versions = itertools.count()
        self._ahead: deque[_Ahead] = deque()
        self._upcoming: list[Any] = []
        self._window_start, self._in_sight = 0, list[Any]()
        self._iterator: Iterator[Any] | None = None
        self._judge: ThreadPoolExecutor | None = None
        if self.rollout.backend == "transformers":
            self.use_vllm = False
            fill_with_neutral(self.generation_config)
            return
        self._check_served(self.rollout)
        self._sync_plan = choose_form(self.policy, self.rollout.sync)
        # From here on TRL's own code takes this for a run whose rollouts come with log-probabilities from vLLM.
        self.use_vllm, self.vllm_mode, self._last_loaded_step = True, "server", -1

    @property
    def engine(self) -> Engine:
        """What samples; open from the first rollouts of a training or evaluation until it is given back."""
        if self._engine is None:
            raise RuntimeError("no engine is open")
        return self._engine

    def train(self, *args: Any, **kwargs: Any) -> TrainOutput:  # noqa: ANN401 (transformers')
        """Extends ``train``: without rollouts, or without an engine that has the policy, the last whole step is kept.

        Afterwards the engine is given back.
        """
        self._without_rollouts = False
        try:
            return super().train(*args, **kwargs)
        except (RolloutError, BrokenPromiseError):
            if self._without_rollouts:
                self.keep_last_step()
            raise
        finally:
            self.close_engine()

    def policy_engine(self, prompt_ids: Sequence[int], batch_size: int) -> Engine:
        """What samples from the policy as it is now, for a score between steps; called on every process.

        Args:
            prompt_ids: On which an engine that is not open yet is proven.
            batch_size: Completions that transformers write at a time.
        """
        if not self.use_vllm:
            return TransformersEngine(self.policy, self.processing_class, batch_size)
        if self._sync_plan.form == "merged":  # weights must not change under requests
            self._together(lambda: [ahead.pending.result() for ahead in self._ahead])
        self._sync([list(prompt_ids)])
        return self.engine

    def asleep_bytes(self) -> int:
        """Extends the passes' plan of memory: what an engine in this process takes again when it wakes."""
        return 0 if self._engine is None else self._engine.asleep_bytes

    def close_engine(self) -> None:
        """Gives the engine back; the next rollouts open it again."""
        self._ahead.clear()
        self._upcoming, self._iterator = [], None
        if self._engine is not None:
            self._engine.close()
        self._engine = None
        if self._judge is not None:
            self._judge.shutdown(wait=False, cancel_futures=True)
        self._judge = None

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device) -> Any:  # noqa: ANN401
        """Extends ``Trainer.get_batch_samples``: looks as far ahead as rollouts are sampled ahead."""
        every = self.args.steps_per_generation * self.num_iterations
        if not self.rollout.prefetch:
            return super().get_batch_samples(epoch_iterator, num_batches, device)
        if self._iterator is not epoch_iterator:  # of another epoch
            self._iterator, self._upcoming = epoch_iterator, []
            self._ahead.clear()
        wanted = num_batches + every * self.rollout.prefetch
        self._upcoming += itertools.islice(epoch_iterator, max(0, wanted - len(self._upcoming)))
        self._window_start, self._in_sight = self._step, list(self._upcoming)
        now, self._upcoming = self._upcoming[:num_batches], self._upcoming[num_batches:]
        return super().get_batch_samples(iter(now), num_batches, device)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Extends TRL's rollouts: remembers whose they are, so that answers are compared as they come."""
        self._inputs = inputs
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        return output

    def _generate_single_turn(
        self,
        prompt_ids: list[list[int]],
        images: Any,  # noqa: ANN401 (TRL's)
        multimodal_fields: Any,  # noqa: ANN401
        num_generations: int,
        has_tool_images: bool = False,
    ) -> tuple[list[list[int]], list[list[float | None]] | None]:
        """Replaces TRL's generation by the engine's; with transformers the model's weights are not cast for it."""
        if not self.use_vllm:
            with self._as_transformers_wants_it(), threads_for(self.policy):
                result: tuple[list[list[int]], None] = super()._generate_single_turn(
                    prompt_ids, images, multimodal_fields, num_generations, has_tool_images
                )
            return result
        started = time.perf_counter()
        asked = [ids for ids in prompt_ids if tokens_left(ids, self.max_completion_length) != 0]
        answers, step = self._rollouts(asked) if asked else ([], self.state.global_step)
        self._log_rollouts(answers, time.perf_counter() - started, self.state.global_step - step)
        written, nothing = iter(answers), Sampled((), (), "")
        full = [tokens_left(ids, self.max_completion_length) == 0 for ids in prompt_ids]
        sampled = [nothing if is_full else next(written) for is_full in full]
        return [list(s.token_ids) for s in sampled], [list(s.log_probs) for s in sampled]

    def _tool_call_loop(self, prompts: Any, prompt_ids: list[list[int]], *args: Any) -> Any:  # noqa: ANN401 (TRL's)
        """Extends TRL's conversations: a turn is asked for what its prompt has left, not for a whole completion."""
        return super()._tool_call_loop(prompts, [Opening(ids) for ids in prompt_ids], *args)

    @contextlib.contextmanager
    def _as_transformers_wants_it(self) -> Iterator[None]:
        """For continuous batching, which knows attention by name; TRL would cast the adapter for it, for good."""
        if not self.use_transformers_continuous_batching:
            yield
            return
        half = self.args.bf16, self.args.fp16
        self.args.bf16 = self.args.fp16 = False
        try:
            with without_packed_attention(base_of(self.policy)):
                yield
        finally:
            self.args.bf16, self.args.fp16 = half

    def _rollouts(self, prompt_ids: list[list[int]]) -> tuple[list[Sampled], int]:
        """The completions of these prompts, and the step of the policy they are from."""
        training = self.model.training
        ready = self._ahead.popleft() if training and self._ahead else None
        if self._most(int(ready is not None and ready.prompt_ids != prompt_ids)):
            ready = None  # a template that tells the time has other tokens now
            self._ahead.clear()
        if self._sync_plan.form == "merged":  # weights must not change under requests, of any process
            under_way = [*self._ahead, *([ready] if ready else [])]
            self._together(lambda: [ahead.pending.result() for ahead in under_way])
        self._sync(prompt_ids)
        if ready is None:
            pending = self._begin(prompt_ids, self._inputs)
            ready = _Ahead(prompt_ids, pending, self.state.global_step)
        groups = self._together(ready.pending.result)
        if training and self.rollout.prefetch:
            self._begin_ahead()
        self.engine.sleep()
        return [completion for group in groups for completion in group], ready.step

    def _begin(self, prompt_ids: Sequence[Sequence[int]], inputs: Sequence[dict[str, Any]]) -> Pending:
        """Asks the engine; a group is judged as soon as it is there."""
        asked = [(tuple(ids), tokens_left(ids, self.max_completion_length)) for ids in prompt_ids]
        requests = [Request(ids, len(list(same)), longest=left) for (ids, left), same in itertools.groupby(asked)]
        starts = list(itertools.accumulate((r.count for r in requests), initial=0))
        judging = self.judging if len(prompt_ids) == len(inputs) else None  # else a conversation goes on
        self._judge = judge = self._judge or ThreadPoolExecutor(1, thread_name_prefix="perl-verdicts")

        def compare(index: int, group: Sequence[Sampled]) -> None:
            if judging is not None:
                golds = [row.get(judging.solution) for row in inputs[starts[index] : starts[index + 1]]]
                judge.submit(self._compare, golds, [list(s.token_ids) for s in group], judging)

        return self._together(lambda: self.engine.start(requests, self._engine_sampling(), compare))

    def _compare(self, golds: list[Any], token_ids: list[list[int]], judging: Judging) -> None:
        """Verdicts ahead of the reward, which asks for the same ones and finds them."""
        texts = self.processing_class.batch_decode(token_ids, skip_special_tokens=True)
        try:
            check_all(golds, texts, timeout_seconds=judging.timeout_seconds, workers=judging.workers)
        except RewardError:
            return  # the reward will say so

    def _begin_ahead(self) -> None:
        """Begins the rollouts of the next steps, as many as are asked for and not begun yet."""
        every = self.args.steps_per_generation * self.num_iterations
        last = self.state.max_steps * self.args.gradient_accumulation_steps
        position = self._step - self._window_start
        for ahead in range(len(self._ahead) + 1, self.rollout.prefetch + 1):
            index = position + ahead * every
            if index >= len(self._in_sight) or self._step + ahead * every >= last:
                return
            inputs = self._in_sight[index]
            prompt_ids, _, _ = self._tokenize_prompts(copy.deepcopy([row["prompt"] for row in inputs]))
            self._ahead.append(_Ahead(prompt_ids, self._begin(prompt_ids, inputs), self.state.global_step))

    def _sync(self, prompt_ids: Sequence[Sequence[int]]) -> None:
        """Gives the engine the policy as it is now, unless it has it.

        The first time it must prove that it binds what it is given, with a policy of random numbers.
        """
        if self._engine is not None and self._last_loaded_step == self.state.global_step:
            return
        first = self._engine is None
        if first:
            self._open(prompt_ids)
        started = time.perf_counter()
        update = self._load("v")
        metrics = self._metrics["train" if self.model.training else "eval"]
        metrics["sync/seconds"].append(time.perf_counter() - started)
        metrics["sync/bytes"].append(float(update.nbytes))
        self._last_loaded_step = self.state.global_step
        self._syncs = 0 if first else self._syncs + 1
        # The second is the first after a step.
        due = self._syncs < 2 or (self.rollout.check_every and self._syncs % self.rollout.check_every == 0)
        if self._most(int(due or self.engine.unproven)):
            metrics["sync/logp_diff"].append(self._prove(first))

    def _open(self, prompt_ids: Sequence[Sequence[int]]) -> None:
        """Opens the engine and proves that what it is given takes effect."""
        run = broadcast_object_list([f"perl-{secrets.token_hex(4)}"])[0]
        self._name = str(run)
        prompt = broadcast_object_list([list(prompt_ids[0])])[0]
        longest = self._longest_text(prompt_ids)
        self._engine = self._together(lambda: self._opened(longest))
        if self.accelerator.is_main_process:
            logger.info("rollouts from %s; %s", self.rollout.backend, self._sync_plan)
        self._canary = ParityCheck(
            self.policy, prompt, self.temperature, self.max_completion_length, self.rollout.tolerance
        )
        with self._canary.far_from_base():
            self._load("probe")
            self._prove(first=True)

    def _longest_text(self, prompt_ids: Sequence[Sequence[int]]) -> int | None:
        """Tokens of the longest prompt with its completion; None: what the base allows.

        A recipe's plan knows it. Servers must hold it, and one that does not would end the run when it comes; so that
        of a script is looked for, in the prompts with the longest text.
        """
        known: int | None = self.args.vllm_max_model_length
        if known is not None or self.rollout.backend != "vllm-server":
            return known
        longest = max(map(len, prompt_ids))
        if isinstance(self.train_dataset, Dataset) and self.environment_factories is None:
            prompts = sorted(self.train_dataset[:_MOST_PROMPTS]["prompt"], key=lambda prompt: len(str(prompt)))
            ids, _, _ = self._tokenize_prompts(copy.deepcopy(prompts[-_LONGEST_TEXTS:]))
            longest = max(longest, *map(len, ids))
        return longest + int(self.max_completion_length)

    def _opened(self, longest: int | None) -> Engine:
        settings = EngineSettings(
            name=self._name,
            folder=Path(self.args.output_dir) / "sync",
            longest=longest,
            seed=self.args.seed + self.accelerator.num_processes * self.state.global_step,
            leads=self.accelerator.is_main_process,
            memory_share=self.args.vllm_gpu_memory_utilization,
        )
        return open_engine(self.rollout, self._sync_plan, self.policy, settings)

    def _load(self, kind: str) -> Update:
        """Makes the policy's update and gives it to the engine."""
        name = f"{self._name}-{kind}{next(self._versions)}"
        needed = self.rollout.backend == "vllm" or self.accelerator.is_main_process

        def load() -> Update:
            form = self._sync_plan.form
            update = make_update(self.policy, form, name) if needed else Update(name, form)
            served = self.rollout.backend == "vllm-server"
            self.engine.load(replace(update, proof=self._canary.proof()) if served else update)
            return update

        return self._together(load)

    def _prove(self, first: bool) -> float:
        """The engine's difference from the policy, in nats; an error if it is more than rounding.

        Args:
            first: Nothing was sampled yet: a server that does not answer like the policy ends the run. Later on it is
                left, as long as another one does.
        """

        def ask() -> tuple[float, dict[str, str]]:
            if self.rollout.backend == "vllm-server" and not self.accelerator.is_main_process:
                return 0.0, {}
            answers = self.engine.trial(self._canary.request, self._canary.sampling)
            differences, failures = self._canary.compare(answers)
            if failures and (first or not differences):
                raise next(iter(failures.values()))
            return max(differences.values()), {name: str(error) for name, error in failures.items()}

        difference, failures = self._together(ask)
        self._drop(failures)
        return difference

    def _drop(self, failures: dict[str, str]) -> dict[str, str]:
        """Leaves the servers that failed on the main process, on all processes; their reasons by address."""
        found: dict[str, str] = broadcast_object_list([failures])[0]
        if found:
            self.engine.drop(found)
        return found

    def _together(self, work: Callable[[], _T]) -> _T:
        """Does something that may fail for want of an engine; if it fails on one process, it fails on all alike."""
        result, error = None, None
        try:
            result = work()
        except PerlError as problem:
            error = problem
        worst = self._most(0 if error is None else 2 if isinstance(error, BrokenPromiseError) else 1)
        self._without_rollouts = worst > 0
        if worst == 2:
            broken = error if isinstance(error, BrokenPromiseError) else None
            raise broken or BrokenPromiseError("another process of this run cannot go on, see its log")
        if worst and error is not None and self.state.global_step == 0:
            raise error
        if worst:  # one kind on all of them, so that all keep the last step
            others = Mistake("another process of this run has no rollouts, see its log")
            first, *more = error.mistakes if error is not None else (others,)
            raise RolloutError(first.message, first.where, first.hint, tuple(more)) from error
        return result  # type: ignore[return-value]  # there is one, since nothing failed

    def _engine_sampling(self) -> EngineSampling:
        return EngineSampling(
            temperature=self.temperature,
            max_completion_length=self.max_completion_length,
            end_token_ids=tuple(self.eos_token_ids),
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p or 0.0,
            repetition_penalty=self.repetition_penalty,
        )

    def _log_rollouts(self, sampled: Sequence[Sampled], seconds: float, steps_behind: int) -> None:
        metrics = self._metrics["train" if self.model.training else "eval"]
        tokens = sum(len(s.token_ids) for s in sampled)
        metrics["rollout/seconds"].append(seconds)
        metrics["rollout/tokens_per_second"].append(tokens / max(seconds, 1e-9))
        metrics["rollout/steps_behind"].append(float(steps_behind))
        for name, count in self.engine.counts.items():
            metrics[f"rollout/{name}"].append(float(count))

    def _load_best_model(self) -> None:
        """Extends the trainer's: the engine no longer has the policy."""
        super()._load_best_model()
        self._last_loaded_step = -1

    def _best_backend(self, how: RolloutSection) -> Literal["vllm", "transformers"]:
        """``vllm`` where there is a GPU, it is installed, and nothing that is asked for stands against it."""
        known = torch.cuda.is_available() and importlib.util.find_spec("vllm") is not None
        if not known or not hasattr(self.args, "rollout_backend") or self.use_transformers_continuous_batching:
            return "transformers"
        try:
            check_version(importlib.metadata.version("vllm"))
            self._check_served(how.model_copy(update={"backend": "vllm"}))
            choose_form(self.policy, how.sync)
        except PerlError as reason:
            logger.info("rollouts from transformers: %s", reason)
            return "transformers"
        return "vllm"

    def _check_served(self, how: RolloutSection) -> None:
        """Refuses what an engine cannot do."""
        what = f"rollout.backend {how.backend}"
        check_sampling(self.args, how)
        if self.max_completion_length is None:
            raise RecipeError(
                "is open, and an engine must be told", "rollout.max_completion_length", "a number of tokens"
            )
        if how.backend == "vllm" and was_quantised(base_of(self.policy)):
            raise ModelError(IN_PROCESS, what, "transformers, or vllm-server with servers of the quantised base")
        if self.rollout_func is not None:
            raise RecipeError("a rollout_func samples by itself", what, "leave one of them out")
        if self._is_vlm:
            raise ModelError("prompts may hold images, which it is not given", what, "transformers")
        if not self.whole_tensors:
            raise ModelError("it needs each tensor of the adapter whole and runs with DDP, not in shards", what)
        if self.args.vllm_tensor_parallel_size > 1 and how.backend == "vllm":
            raise RecipeError(
                "one GPU holds the engine in this process", "train.vllm_tensor_parallel_size", "vllm-server"
            )
        conversations = bool(self.tools) or self.environment_factories is not None
        if how.prefetch and conversations:
            raise RecipeError("conversations with tools cannot be sampled ahead", "rollout.prefetch", "0")
        if conversations and self.accelerator.num_processes > 1:
            raise RecipeError("conversations with tools go on by themselves in each process", what, "transformers")
        every, steps = self.args.steps_per_generation * self.num_iterations, self.args.gradient_accumulation_steps
        if how.prefetch and every > steps:
            problem = (
                f"rollouts that last {every} micro-batches, of which a step takes {steps}, would be older than asked"
            )
            raise RecipeError(problem, "rollout.prefetch", "0")
