"""EarlyVerdicts: answers are compared as soon as their group is there, while others are still being written.

groups of completions, examples -> verdicts, which the reward asks for later and finds
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from perl.errors import RewardError
from perl.rewards.verifier import Judging, check_all
from perl.rollouts.engine import OnGroup, Request, Sampled
from perl.trainer.prompt_tokens import Prompts


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
        starts = [0]
        for request in requests:
            starts.append(starts[-1] + request.count)
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
