"""The reverse KL divergence from a teacher, token by token, over the vocabulary or the student's likeliest tokens.

logits of student and teacher at the same places -> divergence in nats, its derivative by the student's logits

Pure functions of tensors. Shapes: S tokens, V vocabulary, K tokens of the student.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Divergence:
    """A student beside its teacher, token by token.

    Attributes:
        per_token_S: (S,) KL(student || teacher) in nats, 0 or more.
        slope_SV: (S, V) its derivative by the student's logits; None where it was not wanted.
        agrees_S: (S,) bool, whether both find the same token the likeliest.
    """

    per_token_S: torch.Tensor
    slope_SV: torch.Tensor | None
    agrees_S: torch.Tensor


@torch.no_grad()
def reverse_kl(
    student_logits_SV: torch.Tensor, teacher_logits_SV: torch.Tensor, *, top_k: int = 0, with_slope: bool = True
) -> Divergence:
    """KL(student || teacher) of each token's distribution.

    With p of the student, q of the teacher: KL = sum_v p_v (log p_v - log q_v), over the vocabulary. With ``top_k`` K
    the events are the K likeliest tokens of the student, and any other token: one event that has the rest of p and of
    q. That is never more than the whole divergence, never negative, and 0 only where both agree on all K. Either way
    dKL / dz_v = p_v (r_v - KL), r_v the log-ratio of the event that v belongs to.

    Args:
        student_logits_SV: (S, V) float32 or float64, tempered as they are sampled from; overwritten.
        teacher_logits_SV: (S, V) likewise, at the same temperature; overwritten.
        top_k: K; 0, or V and more: the whole vocabulary.
        with_slope: Whether the derivative is wanted.

    Returns:
        The divergence; no gradient is recorded.

    Source: Agarwal et al. 2023 (GKD), arXiv:2306.13649, section 3, reverse KL, as loss of a token (not of what follows
        it: nothing goes back through the sampling); the rest as one event: TRL 1.16's ``add_tail_bucket``, taken there
        from 1 - sum of the K, here from the others themselves.
    """
    agrees_S = student_logits_SV.argmax(dim=-1) == teacher_logits_SV.argmax(dim=-1)
    # log p = z - log sum_v exp z_v
    log_p_SV = student_logits_SV.sub_(student_logits_SV.logsumexp(dim=-1, keepdim=True))
    log_q_SV = teacher_logits_SV.sub_(teacher_logits_SV.logsumexp(dim=-1, keepdim=True))
    if 0 < top_k < log_p_SV.size(-1):
        ratio_SV = _ratios_of_events(log_p_SV, log_q_SV, top_k)
    else:
        ratio_SV = torch.sub(log_p_SV, log_q_SV, out=log_q_SV)
    p_SV = log_p_SV.exp_()
    # sum_v p_v r_v: the tokens of an event have its log-ratio, and together its probability
    kl_S = torch.linalg.vecdot(p_SV, ratio_SV)
    slope_SV = ratio_SV.sub_(kl_S.unsqueeze(-1)).mul_(p_SV) if with_slope else None
    return Divergence(kl_S, slope_SV, agrees_S)


def _ratios_of_events(log_p_SV: torch.Tensor, log_q_SV: torch.Tensor, top_k: int) -> torch.Tensor:
    """(S, V) log-ratio of the event that each token belongs to; takes ``log_q_SV`` for the result."""
    top_SK = log_p_SV.topk(top_k, dim=-1).indices
    ratio_SK = log_p_SV.gather(-1, top_SK) - log_q_SV.gather(-1, top_SK)
    log_rest_p_S, log_rest_q_S = (
        values_SV.scatter(-1, top_SK, -torch.inf).logsumexp(dim=-1, keepdim=True) for values_SV in (log_p_SV, log_q_SV)
    )
    rest_S1 = log_rest_p_S - log_rest_q_S
    ratio_SV = log_q_SV.copy_(rest_S1.expand_as(log_q_SV))
    return ratio_SV.scatter_(-1, top_SK, ratio_SK)
