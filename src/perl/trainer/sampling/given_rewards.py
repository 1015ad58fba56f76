"""The rewards that a trainer is given, whether any of them counts, and verdicts while others are still written.

reward functions, arguments -> reward functions and their weights, as TRL's constructor takes them
groups of completions, examples -> verdicts, which the reward asks for later and finds
"""

import inspect
import itertools
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import is_async_callable

from perl.errors import RewardError
from perl.rewards.custom import numbers_in
from perl.rewards.named import JUDGES
from perl.rewards.process.reward import with_process_reward
from perl.rewards.verifier import Judging, check_all, start_workers
from perl.rollouts.engine import OnGroup, Request, Sampled
from perl.trainer.arguments.argument_checks import check_signal
from perl.trainer.arguments.config import PeftRLConfig
from perl.trainer.overrides import MAY_NEED_NO_REWARD, is_replaced
from perl.trainer.sampling.generation import Prompts


def given_rewards(
    trainer: GRPOTrainer,
    reward_funcs: Any,  # noqa: ANN401 (TRL's signature)
    processing_classes: Any,  # noqa: ANN401
    args: GRPOConfig,
) -> tuple[Any, Any, list[float] | None]:
    """The rewards of a trainer, with the process reward of its arguments.

    Args:
        trainer: Not constructed yet; a subclass may make advantages of something else than rewards.
        reward_funcs: As TRL takes them.
        processing_classes: Likewise.
        args: Of the trainer.

    Returns:
        Reward functions, their processing classes and their weights, None: 1 each; as TRL's constructor takes them.

    Raises:
        RecipeError: Nothing would be taught, or settings act on nothing without a reward.
    """
    if any(judge in (reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]) for judge in JUDGES):
        start_workers()  # they import while the weights are read
    weights = args.reward_weights
    if isinstance(args, PeftRLConfig):
        if not reward_funcs and args.teacher.acts and not args.process_reward_weight:
            # Of TRL's arguments one is needed.
            reward_funcs, processing_classes, weights = [no_reward], None, weights or None
        else:
            made: Any = args.process_reward_kwargs  # text only until transformers has parsed it
            funcs, weights = with_process_reward(reward_funcs, weights, args.process_reward_weight, made)
            if isinstance(processing_classes, list) and funcs is not reward_funcs:
                processing_classes = [*processing_classes, None]
            reward_funcs = funcs
    if not is_replaced(trainer, *MAY_NEED_NO_REWARD):
        check_signal(args, weights, rewarded=reward_funcs != [no_reward])
    return reward_funcs, processing_classes, weights


def is_rewarded(trainer: GRPOTrainer) -> bool:
    """Whether any reward of a trainer counts; a teacher may teach alone."""
    return bool(trainer.reward_weights.any()) and no_reward not in trainer.reward_funcs


def no_reward(completions: Sequence[Any], **_: Any) -> list[float]:  # noqa: ANN401 (TRL's signature)
    """0 for every completion: stands for rewards where a teacher alone teaches."""
    return [0.0] * len(completions)


def unique_names(names: Sequence[str]) -> list[str]:
    """Names under which rewards are logged, the second of a name with a number: TRL would log the two as one."""
    found: list[str] = []
    for name in names:
        others = (f"{name}_{number}" for number in itertools.count(2))
        found.append(name if name not in found else next(one for one in others if one not in {*names, *found}))
    return found


def checked_reward(function: Any, name: str) -> Any:  # noqa: ANN401 (TRL's)
    """A reward function that raises RewardError, with its name, for what is no list of numbers; a model as it is.

    Args:
        function: As TRL calls it.
        name: That it is logged under.
    """
    if isinstance(function, torch.nn.Module):
        return function
    if is_async_callable(function):

        async def later(**given: Any) -> list[float | None]:  # noqa: ANN401
            return _rewards_of(await function(**_fitting(function, given, name)), name)

        return later
    return lambda **given: _rewards_of(function(**_fitting(function, given, name)), name)


def _fitting(function: Any, given: dict[str, Any], name: str) -> dict[str, Any]:  # noqa: ANN401
    """What a function is called with; it may ask for a column that the data does not have."""
    try:
        inspect.signature(function, follow_wrapped=False).bind(**given)  # a wrapper may name columns otherwise
    except ValueError:  # of a function in C, which does not say what it takes
        return given
    except TypeError as error:
        columns = ", ".join(sorted(given))
        raise RewardError(
            f"cannot be called: {error}", f"reward {name}", f"a column of that name; {columns}"
        ) from error
    return given


def _rewards_of(values: Any, name: str) -> list[float | None]:  # noqa: ANN401 (whatever is returned)
    hint = "a list of one number for each completion, None where it has no reward"
    try:
        found = numbers_in(values)
    except (TypeError, ValueError) as error:
        raise RewardError(str(error), f"reward {name}", hint) from error
    if found and all(value is not None and math.isnan(value) for value in found):
        raise RewardError("returned NaN for every completion", f"reward {name}", hint)
    return found


class EarlyVerdicts:
    """Compares in a thread of its own, which is started with the first rollouts.

    Attributes:
        judging: How answers are compared, where a reward does so; None: none does.
    """

    def __init__(self, prompts: Prompts) -> None:
        """Takes what has the tokenizer."""
        self.judging: Judging | None = None
        self._prompts = prompts
        self._thread: ThreadPoolExecutor | None = None

    def on_group(self, requests: Sequence[Request], inputs: Sequence[dict[str, Any]]) -> OnGroup:
        """What an engine calls with each group.

        Args:
            requests: Of the engine.
            inputs: The examples, one for each completion; of another number, since a conversation goes on, nothing is
                compared.
        """
        starts = [0, *itertools.accumulate(request.count for request in requests)]
        judging = self.judging if starts[-1] == len(inputs) else None
        self._thread = thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="perl-verdicts")

        def compare(index: int, group: Sequence[Sampled]) -> None:
            if judging is not None:
                golds = [row.get(judging.solution) for row in inputs[starts[index] : starts[index + 1]]]
                thread.submit(self._compare, golds, [list(s.token_ids) for s in group], judging)

        return compare

    def close(self) -> None:
        """Compares nothing more."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
        self._thread = None

    def _compare(self, golds: list[Any], token_ids: list[list[int]], judging: Judging) -> None:
        texts = self._prompts.processing_class.batch_decode(token_ids, skip_special_tokens=True)
        try:
            check_all(golds, texts, timeout_seconds=judging.timeout_seconds, workers=judging.workers)
        except RewardError:
            return  # the reward will raise it
