"""A short run on a quantised base, as values of a recipe."""


def recipe(*, quantization="nf4", peft=None, **sections):
    return {
        "model": {"name": "sandbox:base", "quantization": quantization},
        "peft": {"rank": 2} if peft is None else peft,
        "data": {"train": "sandbox:addition"},
        "rewards": {"accuracy": 1.0},
        "rollout": {"max_completion_length": 24},
        "train": {"max_steps": 4, "prompts_per_step": 2, "num_generations": 4, "learning_rate": 2e-3, "save_steps": 2},
        "eval": {"k": 2, "limit": 8, "max_completion_length": 24},
        "engine": {"device": "cpu", "threads": 1},
    } | sections
