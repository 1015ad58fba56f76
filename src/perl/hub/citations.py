"""The papers that an adapter's method and loss come from.

method, loss -> references
"""

import re

from perl.methods.registry import METHODS

_PAPER = re.compile(r"^.*?arXiv:\d{4}\.\d{4,5}")
GRPO = "Shao et al. 2024, arXiv:2402.03300"
# What TRL's loss types are called, and where they come from.
LOSSES = {
    "grpo": ("GRPO", GRPO),
    "bnpo": ("BNPO", "Xiao et al. 2025, arXiv:2506.02864"),
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


def references(method: str | None, algorithm: str | None) -> list[tuple[str, str]]:
    """What is cited, and as what: ``("method lora", "Hu et al. 2021, arXiv:2106.09685")``."""
    found = []
    row = METHODS.get(method or "")
    paper = _PAPER.match(row.source) if row else None
    if paper:
        found.append((f"method {method}", paper[0]))
    found.append(("group-relative advantages (GRPO)", GRPO))
    if algorithm in LOSSES and algorithm != "grpo":
        name, source = LOSSES[algorithm]
        found.append((f"loss {name}", source))
    return found


def linked(reference: str) -> str:
    """A reference in Markdown, its arXiv number a link."""
    return re.sub(r"arXiv:(\d{4}\.\d{4,5})", r"[arXiv:\1](https://arxiv.org/abs/\1)", reference)
