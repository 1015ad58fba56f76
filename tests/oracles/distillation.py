"""Distillation on a student's own tokens in a few lines: whole softmaxes, plain models, autograd.

logits -> divergence; two separate models, rows -> loss
"""

import torch


def reverse_kl(student: torch.Tensor, teacher: torch.Tensor, top_k: int = 0) -> torch.Tensor:
    """(S,) KL(student || teacher) of (S, V) logits; with ``top_k`` its tokens one by one and all others as one."""
    p, q = student.softmax(-1), teacher.softmax(-1)
    if 0 < top_k < p.size(-1):
        parts = []
        for p_row, q_row in zip(p, q, strict=True):
            best = set(p_row.topk(top_k).indices.tolist())
            rest = [v for v in range(len(p_row)) if v not in best]
            chosen = sorted(best)
            p_events, q_events = (torch.cat([row[chosen], row[rest].sum()[None]]) for row in (p_row, q_row))
            parts.append((p_events * (p_events / q_events).log()).sum())
        return torch.stack(parts)
    return (p * (p / q).log()).sum(-1)


def row_logits(model: torch.nn.Module, prompt: list[int], completion: list[int], temperature: float) -> torch.Tensor:
    """(T, V) tempered logits that predict a completion, of a row by itself without padding."""
    ids = torch.tensor([[*prompt, *completion]])
    return model(input_ids=ids).logits[0, len(prompt) - 1 : -1] / temperature


def divergences(
    student: torch.nn.Module,
    teacher: torch.nn.Module,
    rows: list[tuple[list[int], list[int], list[int]]],
    temperature: float,
    top_k: int = 0,
) -> list[torch.Tensor]:
    """(T,) of each row: a prompt, the prompt as the teacher sees it, a completion; gradients reach the student only."""
    found = []
    for prompt, taught, completion in rows:
        with torch.no_grad():
            theirs = row_logits(teacher, taught, completion, temperature)
        found.append(reverse_kl(row_logits(student, prompt, completion, temperature), theirs, top_k))
    return found
