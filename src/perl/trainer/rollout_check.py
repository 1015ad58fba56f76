"""CheckedGRPOTrainer: no step is trained on rollouts that are unusually far from the policy, but for a parity check.

log-probabilities of a step's tokens by engine and trainer -> train, or new rollouts, or an end that keeps the last step

The parity check (``parity_check.py``) asks engines now and then, and knows nothing of a server that was replaced in
between. This looks at all tokens of every step. One of the six modules that know TRL's and transformers' private
methods; each override says which method it replaces and why.
"""

import copy
import logging
from collections.abc import Sequence
from typing import Any

from perl.errors import BrokenPromiseError, RolloutError
from perl.rollouts.engine import Sampled
from perl.rollouts.gap import GapJudge
from perl.trainer.rollout_source import ServedGRPOTrainer

logger = logging.getLogger("perl")

GAP = "sampling/sampling_logp_difference/mean"
"""How far the engine's log-probabilities of a step's tokens are from the trainer's, in nats."""
# How often a step's rollouts are made again although every engine passes the parity check.
_MOST_REPEATS = 2


class CheckedGRPOTrainer(ServedGRPOTrainer):
    """GRPOTrainer that compares what was sampled with its own policy before it takes a step."""

    _gap: GapJudge | None = None
    _logged: dict[str, int]
    _repeats = 0
    _behind = 0

    def begin_window(self) -> None:
        """Remembers what was logged before the rollouts of an optimizer step, which may have to be made again."""
        self._behind = 0
        self._logged = {name: len(values) for name, values in self._metrics["train"].items()}

    def make_again(self, asked: Sequence[Any]) -> list[dict[str, Any]]:
        """The micro-batches of an optimizer step with new rollouts of the same prompts; see :meth:`rollouts_stand`.

        Args:
            asked: What the data loader gave for each of them.
        """
        self._forget_window()
        end, begin = self._step, self._step_begins_at[0]
        self._step, self._buffered_inputs = begin, None
        batches = []
        for inputs in asked:
            batches.append(self._prepare_inputs(inputs))
            self._step += 1
        self._step = end
        return batches

    def rollouts_stand(self, gap: float | None) -> bool:
        """Whether a step may be trained on its rollouts; called on every process before the optimizer's step.

        Where the engine's log-probabilities are unusually far from the trainer's, the parity check runs at once. A
        server that fails it is left until another process answers there.

        Args:
            gap: Mean difference over all of the step's tokens, in nats; None: nothing was compared.

        Returns:
            False: The rollouts have to be made again, by the servers that are left.

        Raises:
            RolloutError: Nothing is left that answers like the policy, or the rollouts are another's again and again.
        """
        judge, behind, metrics = self._gap, self._behind, self._metrics["train"]
        if gap is None or judge is None:  # resumed rollouts, of which a part was judged before, need no engine
            return True
        limit = judge.limit(behind)
        metrics["sync/gap_limit"].append(limit)
        if not judge.is_usual(gap, behind):
            what = f"log-probabilities of the rollouts differ by {gap:.1e} nats from the trainer's, above {limit:.1e}"
            logger.warning("%s: the parity check runs before they are trained on", what)
            if self._leave_servers_that_fail(what, judge.limit()):
                return False
            if judge.is_no_rounding(gap, behind):
                self._repeats += 1
                if self._repeats <= _MOST_REPEATS:
                    return False
                hint = "does an address lead to several servers? If it is rounding raise rollout.tolerance"
                self._without_rollouts, self._repeats = True, 0  # so that the last whole step is kept
                raise RolloutError(f"{what}, again and again, though the engine passes the parity check", hint=hint)
        judge.accept(gap, behind)
        self._repeats = 0
        return True

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Extends TRL's rollouts: judged here where the loss is TRL's, which has compared them; else in the step."""
        if not self.model.training or self.step_is_ours or self.correction is None:
            return super()._generate_and_score_completions(inputs)
        while True:
            self.begin_window()
            output = super()._generate_and_score_completions(inputs)
            if self.rollouts_stand(self._metrics["train"][GAP][-1]):
                return output
            self._forget_window()

    def _open(self, prompt_ids: Sequence[Sequence[int]]) -> None:
        """Extends the start of an engine: what is usual with it is not known yet."""
        super()._open(prompt_ids)
        self._gap = GapJudge(self._canary.tolerance)

    def _log_rollouts(self, sampled: Sequence[Sampled], seconds: float, steps_behind: int) -> None:
        """Extends the log: remembers the oldest policy that a step's rollouts are from."""
        super()._log_rollouts(sampled, seconds, steps_behind)
        self._behind = max(self._behind, steps_behind)

    def _forget_window(self) -> None:
        """Nothing is left of a step's rollouts but that they were made again."""
        metrics = self._metrics["train"]
        for name in [name for name in metrics if not name.startswith("sync/")]:
            del metrics[name][self._logged.get(name, 0) :]
            if not metrics[name]:
                del metrics[name]
        if self._ahead and self._sync_plan.form == "merged":  # weights must not change under requests, of any process
            self._together(lambda: [ahead.pending.result() for ahead in self._ahead])
        self._ahead.clear()  # they may be as wrong
        self._step_begins_at = self._step_begins_at[0], None
        self._behind = 0
        metrics["rollout/made_again"].append(1.0)
        self._logged["rollout/made_again"] = len(metrics["rollout/made_again"])

    def _leave_servers_that_fail(self, what: str, tolerance: float) -> bool:
        """The parity check, as strict as this run's rounding allows; whether servers were left."""
        self._sync([self._canary.request.prompt_ids])  # rollouts may serve several steps
        strict = copy.copy(self._canary)
        strict.tolerance = min(strict.tolerance, tolerance)
        passed: list[float] = []

        def ask() -> dict[str, str]:
            failed: dict[str, str] = {}
            if self.rollout.backend == "vllm-server" and not self.accelerator.is_main_process:
                return failed
            for name, completions in self.engine.trial(strict.request, strict.sampling).items():
                try:
                    passed.append(strict.check({name: completions}))
                except BrokenPromiseError as error:
                    failed[name] = str(error)
            self.engine.sleep()
            if failed and not passed:
                raise RolloutError(f"{what}, and the parity check fails: {' '.join(failed.values())}")
            return failed

        failed = self._drop(self._together(ask))
        for reason in failed.values():
            logger.warning("the rollouts are made again without a server that fails the parity check: %s", reason)
        self._metrics["train"]["sync/logp_diff"] += passed
        return bool(failed)
