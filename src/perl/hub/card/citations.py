"""The papers that an adapter's method and loss come from.

method, loss -> references
"""

import re

from perl.methods.registry import METHODS

_PAPER = re.compile(r"^.*?arXiv:\d{4}\.\d{4,5}")
GRPO = "Shao et al. 2024, arXiv:2402.03300"
GSPO = "Zheng et al. 2025, arXiv:2507.18071"
# What TRL's loss types are called, and where they come from. Its BNPO is older than the paper of that name
# (arXiv:2506.02864), and another loss: a mean over the tokens of a micro-batch.
LOSSES = {
    "grpo": ("GRPO", GRPO),
    "bnpo": ("BNPO", None),
    "dapo": ("DAPO", "Yu et al. 2025, arXiv:2503.14476"),
    "dr_grpo": ("Dr. GRPO", "Liu et al. 2025, arXiv:2503.20783"),
    "cispo": ("CISPO", "MiniMax 2025, arXiv:2506.13585"),
    "sapo": ("SAPO", "Gao et al. 2025, arXiv:2511.20347"),
    "luspo": ("LUSPO", "Liu et al. 2026, arXiv:2602.05261"),
    "vespo": ("VESPO", "Shen et al. 2026, arXiv:2602.10693"),
}


def loss_name(algorithm: str | None) -> str:
    """What people call it."""
    return LOSSES[algorithm][0] if algorithm in LOSSES else algorithm or "GRPO"


def references(method: str | None, algorithm: str | None, ratio_level: str | None = None) -> list[tuple[str, str]]:
    """What is cited, and as what: ``("method lora", "Hu et al. 2021, arXiv:2106.09685")``.

    Args:
        method: As in ``peft.method``.
        algorithm: The loss, as in ``train.loss_type``.
        ratio_level: As in ``train.importance_sampling_level``.
    """
    found = []
    row = METHODS.get(method or "")
    paper = _PAPER.match(row.source) if row else None
    if paper:
        found.append((f"method {method}", paper[0]))
    found.append(("group-relative advantages (GRPO)", GRPO))
    name, source = LOSSES.get(algorithm or "grpo", ("", None))
    if source and source != GRPO:
        found.append((f"loss {name}", source))
    if ratio_level == "sequence":
        found.append(("importance ratio of the whole sequence (GSPO)", GSPO))
    return found


def linked(reference: str) -> str:
    """A reference in Markdown, its arXiv number a link."""
    return re.sub(r"arXiv:(\d{4}\.\d{4,5})", r"[arXiv:\1](https://arxiv.org/abs/\1)", reference)
