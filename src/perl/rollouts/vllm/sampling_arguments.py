"""How vLLM draws tokens, in the words that its library and its servers have in common.

Request, EngineSampling -> arguments
"""

from typing import Any

from perl.rollouts.engine import EngineSampling, Request


def sampling_arguments(request: Request, sampling: EngineSampling) -> dict[str, Any]:
    """Every field is set, so that the model's generation_config never applies."""
    same = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    return {name: getattr(sampling, name) for name in same} | {
        "n": request.count,
        "seed": request.seed,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "max_tokens": request.most_tokens(sampling),
        # The end tokens of the generation_config are ordinary tokens unless the request names them.
        "ignore_eos": True,
        "stop_token_ids": list(sampling.end_token_ids),
        "logprobs": 0,
    }
