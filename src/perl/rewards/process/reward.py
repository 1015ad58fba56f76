r"""Process reward: a second, frozen model reads a completion step by step and scores how likely each step is right.

prompt, completion -> steps -> a score a step -> one number

Uses no gold answers and no random numbers. Imports torch only to look for a model.
"""

import functools
import math
import os
import re
import statistics
import threading
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from perl.errors import Mistake, RecipeError, raise_all
from perl.recipe.layers import Layer
from perl.recipe.validation import mistakes_of
from perl.rewards.answers import Completions, completion_text
from perl.rewards.process.model import ProcessModel, ProcessRewardSetting, load_process_model, pattern_of

_DEVICE = re.compile(r"auto|cpu|mps|(?:cuda|xpu|hpu|npu|mlu)(?::\d+)?")
_AGGREGATE: Mapping[str, Callable[[Sequence[float]], float]] = {
    "min": min,
    "mean": statistics.fmean,
    "last": itemgetter(-1),
    "product": math.prod,
}


def check_process_reward(arguments: Mapping[str, Any]) -> list[Mistake]:
    """What is wrong with the arguments of :func:`process_reward`, by argument; uses no network, loads no model."""
    mistakes: list[Mistake] = []
    try:
        ProcessRewardSetting.model_validate(dict(arguments))
    except ValidationError as error:
        mistakes += mistakes_of(error, ProcessRewardSetting, arguments, (), Layer())
    texts = {name: value for name, value in arguments.items() if isinstance(value, str)}
    try:
        pattern_of(texts.get("split", ""))
    except (ValueError, RuntimeError, re.error) as error:
        mistakes.append(Mistake(f"{texts['split']!r}: {error}", "split"))
    name, folder = texts.get("model", ""), Path(os.path.expanduser(texts.get("model", "")))
    if name.startswith((".", "/", "~")) and not folder.is_dir():
        mistakes.append(Mistake(f"{name!r}: no such folder", "model"))
    elif name and folder.is_dir() and not (folder / "config.json").is_file():
        mistakes.append(Mistake(f"{name!r}: holds no model, it has no config.json", "model"))
    if not _DEVICE.fullmatch(texts.get("device", "auto")):
        known = "no device; they are named as in PyTorch: auto, cpu, cuda, cuda:1, mps, xpu:0"
        mistakes.append(Mistake(f"{texts['device']!r}: {known}", "device"))
    if arguments.get("kind") == "token" and arguments.get("negative") is not None:
        mistakes.append(Mistake("is for causal models", "negative", "positive alone names a class"))
    return mistakes


@functools.wraps(ProcessRewardSetting, assigned=(), updated=())  # the signature, which recipes are checked against
def process_reward(model: str, **settings: Any) -> "ProcessReward":  # noqa: ANN401
    """A reward function whose model is loaded at the first call.

    Args:
        model: Hub id or local folder.
        **settings: The other fields of :class:`ProcessRewardSetting`.

    Raises:
        RecipeError: With every argument that is unknown or wrong.

    Source:
        Lightman et al. 2023, arXiv:2305.20050 (product, minimum); Wang et al. 2024, arXiv:2312.08935 (a tag and two
        tokens); Zhang et al. 2025, arXiv:2501.07301 (two classes at each separator).
    """
    arguments = {"model": model, **settings}
    raise_all(RecipeError, check_process_reward(arguments))
    return ProcessReward(ProcessRewardSetting(**arguments))


def with_process_reward(
    functions: Any,  # noqa: ANN401 (TRL's: one reward or a list)
    weights: list[float] | None,
    weight: float,
    arguments: Mapping[str, Any] | None,
) -> tuple[Any, list[float] | None]:
    """Reward functions and weights as TRL takes them, with a process reward at the end if its weight is not 0.

    Loads the models of all process rewards among them, so that a wrong name shows before the first rollouts.

    Raises:
        RecipeError: An argument is unknown or wrong.
        ModelError: A model cannot be loaded.
    """
    listed = list(functions) if isinstance(functions, list) else [] if functions is None else [functions]
    if weight:
        weights = [*(weights or [1.0] * len(listed)), weight]
        functions = listed = [*listed, process_reward(**(arguments or {}))]
    for function in listed:
        if isinstance(function, ProcessReward):
            function.load()
    return functions, weights


def split_steps(text: str, split: str) -> list[str]:
    r"""The steps of a completion, without white space around them or empty ones.

    Args:
        text: The completion.
        split: What stands between steps; between slashes a regular expression: ``/\n+|Step \d+:/``.
    """
    pattern = pattern_of(split)
    if pattern is None:
        parts = text.split(split)
    else:  # re.split would return the pattern's groups too
        cuts = [0, *(edge for match in pattern.finditer(text) for edge in match.span()), len(text)]
        parts = [text[start:end] for start, end in zip(cuts[::2], cuts[1::2], strict=True)]
    return [step for part in parts if (step := part.strip())]


class ProcessReward:
    """A reward function with TRL's signature that holds a model; calls from several threads take turns."""

    __name__ = "process_reward"  # what TRL logs it under

    def __init__(self, setting: ProcessRewardSetting) -> None:
        """Loads nothing."""
        self.setting = setting
        self._lock = threading.RLock()
        self._model: ProcessModel | None = None

    def load(self) -> ProcessModel:
        """The model, loaded unless it is there.

        Raises:
            ModelError: It cannot be loaded or is of another kind, or the device is not there.
        """
        with self._lock:
            if self._model is None:
                self._model = load_process_model(self.setting)
            return self._model

    def __call__(
        self,
        prompts: Completions,
        completions: Completions,
        log_metric: Callable[[str, float], None] | None = None,
        **_: Any,  # noqa: ANN401 (what else TRL hands to rewards)
    ) -> list[float | None]:
        """The aggregated scores of each completion's steps.

        Args:
            prompts: Text or chat messages, one a completion.
            completions: Text or chat messages.
            log_metric: TRL's logger; gets the mean number of steps, the mean score of a step, and the fractions of
                completions without steps, too long for the model, and with a non-finite score.

        Returns:
            Numbers from 0 to 1; None for those three. A completion is never scored in part: what was cut off could be
            wrong, and writing more would pay.
        """
        if not completions:
            return []
        steps = [split_steps(completion_text(completion), self.setting.split) for completion in completions]
        with self._lock:  # a fast tokenizer must not be used by two threads at once
            scores = self.load().scores(prompts, steps, self.setting.batch_size)
        judged = [row if row and all(map(math.isfinite, row)) else None for row in scores]
        if log_metric is not None:
            totals = {"steps": sum(map(len, steps)), "no_steps_frac": steps.count([]), "cut_frac": scores.count(None)}
            totals["nan_frac"] = judged.count(None) - totals["no_steps_frac"] - totals["cut_frac"]
            for name, total in totals.items():
                log_metric(f"reward/process_reward/{name}", total / len(steps))
            if every := [score for row in judged for score in row or ()]:
                log_metric("reward/process_reward/step_score", statistics.fmean(every))
        return [_AGGREGATE[self.setting.aggregation](row) if row else None for row in judged]
