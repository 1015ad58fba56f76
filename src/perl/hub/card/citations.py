"""The papers that an adapter's method and loss come from.

method, loss -> references
"""

import re

from perl.algorithms.named import ALGORITHMS
from perl.algorithms.registry import GRPO, GSPO, LOSSES
from perl.methods.registry import METHODS

_PAPER = re.compile(r"^.*?arXiv:\d{4}\.\d{4,5}")


def loss_name(algorithm: str | None, named: str | None = None) -> str:
    """What people call it: the algorithm, where the run names one, else the loss."""
    if named in ALGORITHMS:
        return ALGORITHMS[named].title
    return LOSSES[algorithm].title if algorithm in LOSSES else algorithm or "GRPO"


def references(
    method: str | None, algorithm: str | None, ratio_level: str | None = None, named: str | None = None
) -> list[tuple[str, str]]:
    """What is cited, and as what: ``("method lora", "Hu et al. 2021, arXiv:2106.09685")``.

    Args:
        method: As in ``peft.method``.
        algorithm: The loss, as in ``train.loss_type``.
        ratio_level: As in ``train.importance_sampling_level``.
        named: The algorithm, where the run names one.
    """
    found = []
    row = METHODS.get(method or "")
    paper = _PAPER.match(row.source) if row else None
    if paper:
        found.append((f"method {method}", paper[0]))
    name = ALGORITHMS.get(named or "")
    if name is not None and name.paper is not None:
        found.append((f"algorithm {name.title}", name.paper.reference))
    if name is None or name.sets["advantage_estimator"] == "group":
        found.append(("group-relative advantages (GRPO)", GRPO.reference))
    loss = LOSSES.get(algorithm or "grpo")
    if loss is not None and loss.paper is not None and loss.paper != GRPO:
        found.append((f"loss {loss.title}", loss.paper.reference))
    if ratio_level == "sequence":
        found.append(("importance ratio of the whole sequence (GSPO)", GSPO.reference))
    cited = name.paper.reference if name is not None and name.paper is not None else None
    return [(what, paper) for what, paper in found if paper != cited or what.startswith("algorithm ")]


def linked(reference: str) -> str:
    """A reference in Markdown, its arXiv number a link."""
    return re.sub(r"arXiv:(\d{4}\.\d{4,5})", r"[arXiv:\1](https://arxiv.org/abs/\1)", reference)
