"""What transformers' generation configs ask for, as sampling; and the config of a loop that draws by itself.

GenerationConfig -> EngineSampling, or why there is none
"""

from transformers import GenerationConfig

from perl.rollouts.engine import EngineSampling

# Set even where it changes nothing: transformers fills what is left open from the model's generation_config.json, and
# a repetition penalty or a cut-off there would sample from another policy than the one that is trained or scored.
_NEUTRAL_GREEDY = {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0}
_NEUTRAL = {**_NEUTRAL_GREEDY, "min_p": 0.0, "typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0}
# What it takes for unset where one token is left; it would warn of values of the model's generation config.
_UNSET = {"temperature": 1.0, "top_p": 1.0, "top_k": 50, "num_beams": 1, "num_return_sequences": 1}

# What an engine's sampling has of them too.
_DRAWN_BY = ("repetition_penalty", "min_p")
# What a generation config may have and any loop does: how tokens are drawn, and what says nothing of it.
_KNOWN = frozenset(
    [
        *(*_NEUTRAL, *_UNSET, "do_sample", "max_length", "max_new_tokens"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "cache_implementation", "use_cache", "disable_compile"),
        *("transformers_version", "_from_model_config", "output_attentions", "output_hidden_states"),
    ]
)


def more_than_sampling(config: GenerationConfig) -> str | None:
    """Which fields of a generation config ask for more than what a token is drawn by; None: there is none."""
    asked = {name for name, value in config.to_diff_dict().items() if name not in _KNOWN and value is not None}
    return f"its generation config has {', '.join(sorted(asked))}" if asked else None


def sampling_of(config: GenerationConfig) -> EngineSampling | None:
    """How a trainer's generation config draws tokens; None: it asks for something else.

    Args:
        config: Complete, as :func:`fill_with_neutral` leaves it.
    """
    others = {**_NEUTRAL, "num_beams": 1, "num_return_sequences": 1}
    neutral = all(getattr(config, name) in (None, value) for name, value in others.items() if name not in _DRAWN_BY)
    if more_than_sampling(config) or not (neutral and config.do_sample and config.temperature):
        return None
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    return EngineSampling(
        temperature=config.temperature,
        max_completion_length=config.max_new_tokens,
        end_token_ids=tuple(end for end in ends if end is not None),
        top_p=1.0 if config.top_p is None else config.top_p,
        top_k=config.top_k or 0,
        min_p=config.min_p or 0.0,
        repetition_penalty=config.repetition_penalty,
    )


def fill_with_neutral(config: GenerationConfig) -> None:
    """Sets every sampling field that is left open to the value that changes nothing."""
    for name, value in _NEUTRAL.items():
        if getattr(config, name, None) is None:
            setattr(config, name, value)


def of_last_processor(sampling: EngineSampling, padding: int | None) -> GenerationConfig:
    """Of a loop whose last processor leaves one token.

    Args:
        sampling: The length, and what ends a completion.
        padding: What fills up the others.
    """
    return GenerationConfig(
        max_new_tokens=sampling.max_completion_length,
        eos_token_id=list(sampling.end_token_ids),
        pad_token_id=padding,
        do_sample=False,
        **_NEUTRAL_GREEDY,
        **_UNSET,
    )
