"""What an engine must draw and report, by plain forward passes of transformers, one text or token at a time.

model, tokens -> log-probabilities; model, prompt -> the likeliest completion; logits -> the next token's distribution
"""

import torch


def logits_after(model, tokens) -> torch.Tensor:
    """(V) of the next token, without cache or padding."""
    with torch.no_grad():
        return model(torch.tensor([list(tokens)]), use_cache=False).logits[0, -1]


def plain_log_probs(model, tokens, temperature: float = 1.0) -> torch.Tensor:
    """(T-1) float32: log p(token t+1 | tokens up to t)."""
    ids = torch.tensor([list(tokens)])
    with torch.no_grad():
        logits_TV = model(ids, use_cache=False).logits[0, :-1].double() / temperature
    log_probs_TV = logits_TV - logits_TV.logsumexp(-1, keepdim=True)
    return log_probs_TV[torch.arange(len(ids[0]) - 1), ids[0, 1:]].float()


def likeliest_completion(model, prompt, length: int, ends: tuple[int, ...]) -> tuple[int, ...]:
    """The likeliest token after all before it, until an end token or the length."""
    written: list[int] = []
    while len(written) < length and not (written and written[-1] in ends):
        written.append(int(logits_after(model, (*prompt, *written)).argmax()))
    return tuple(written)


def chances(logits: torch.Tensor, before: tuple[int, ...], how) -> list[float]:
    """The distribution of the next token, one number after another."""
    scores = [float(score) for score in logits.double()]
    for token in set(before):
        scores[token] *= how.repetition_penalty if scores[token] < 0 else 1 / how.repetition_penalty
    weights = torch.tensor([score / how.temperature for score in scores], dtype=torch.float64).softmax(0).tolist()
    order = sorted(range(len(weights)), key=lambda token: -weights[token])
    if how.top_k:
        order = order[: how.top_k]
    whole, mass, nucleus = sum(weights[token] for token in order), 0.0, []
    for token in order:
        if mass < how.top_p * whole:
            nucleus.append(token)
        mass += weights[token]
    kept = {token for token in nucleus if weights[token] >= how.min_p * weights[order[0]]}
    left = sum(weights[token] for token in kept)
    return [weight / left if token in kept else 0.0 for token, weight in enumerate(weights)]
