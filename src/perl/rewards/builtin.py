r"""The named rewards: functions with TRL's signature.

completions, columns of the data set -> one number a completion

Completions come as text or as chat messages. Knows nothing of models or of how rewards are weighted.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from perl.rewards.verifier import check, last_boxed

Completions = Sequence[str] | Sequence[Sequence[dict[str, Any]]]
LogMetric = Callable[[str, float], None]


def accuracy_reward(
    completions: Completions,
    solution: Sequence[str | None],
    log_metric: LogMetric | None = None,
    **_: Any,  # noqa: ANN401
) -> list[float | None]:
    r"""1 for a completion whose final answer is the gold answer, else 0.

    Args:
        completions: Text, or lists of chat messages.
        solution: Gold answers, one a completion.
        log_metric: TRL's logger; gets the fraction of each verdict that is neither right nor wrong.

    Returns:
        1.0, 0.0, or None where the gold answer cannot be compared (the completion then has no say in its group).
    """
    verdicts = [check(gold or "", text) for gold, text in zip(solution, map(completion_text, completions), strict=True)]
    if log_metric is not None and verdicts:
        counts = Counter(verdict.status for verdict in verdicts)
        for status in ("no_answer", "unparsable_gold"):
            log_metric(f"reward/accuracy/{status}_frac", counts[status] / len(verdicts))
    return [None if verdict.status == "unparsable_gold" else float(verdict.right) for verdict in verdicts]


def format_reward(completions: Completions, **_: Any) -> list[float]:  # noqa: ANN401
    r"""1 for a completion that ends in exactly one ``\boxed{}`` with something in it, else 0."""
    return [float(_is_well_formed(completion_text(completion))) for completion in completions]


def _is_well_formed(text: str) -> bool:
    boxed = last_boxed(text)
    if not boxed or not boxed.strip() or text.count("\\boxed{") != 1:
        return False
    return text.rstrip(" .$\n").endswith(f"\\boxed{{{boxed}}}")


def completion_text(completion: str | Sequence[dict[str, Any]]) -> str:
    """What the model wrote, whichever form it comes in."""
    if isinstance(completion, str):
        return completion
    return "".join(str(message.get("content") or "") for message in completion)
