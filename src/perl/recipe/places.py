"""Where a setting belongs that was written without its section, in another one, or under another tool's name.

``learning_rate`` -> ``train.learning_rate``
"""

import difflib
from collections import defaultdict
from collections.abc import Mapping

from perl.algorithms.train_fields import train_fields
from perl.recipe.sections import FIELD_OF_SETTING, SECTION_NAMES, SECTIONS

REFUSED: dict[str, str] = {
    "auto_find_batch_size": "a smaller batch would break the prompt groups; set train.per_device_train_batch_size",
    "disable_tqdm": "use --quiet",
    "max_tool_calling_iterations": "write agent.max_turns, which is one more",
    "hub_token": "a token must not stand in a file that is saved with the run; use `hf auth login`",
    "model_init_kwargs": "the model section holds them",
    "process_reward_kwargs": "write rewards: {process_reward: {weight: 0.5, args: {model: ...}}}",
    "process_reward_weight": "write rewards: {process_reward: {weight: 0.5, args: {model: ...}}}",
    "push_to_hub": "hub: {repo_id: user/name, push: end} does it",
    "remove_unused_columns": "rewards need the columns, the gold answer among them",
    "resume_from_checkpoint": "run the same command again, it resumes by itself",
    "reward_weights": "write each weight in rewards, as {accuracy: 1.0, format: 0.2}",
    "save_only_model": "a checkpoint without the optimizer's state cannot be resumed exactly",
    "sync_ref_model": "write train.reference: rolling:N",
    "trust_remote_code": "code from a model's repository is not executed",
    "use_cpu": "write engine.device: cpu",
    "use_vllm": "write rollout.backend: vllm",
    "vllm_mode": "write rollout.backend: vllm or vllm-server",
    **{f"vllm_server_{name}": "write rollout.servers: [URL, ...]" for name in ("base_url", "host", "port")},
    "vllm_server_timeout": "write rollout.server_timeout",
}
"""Training arguments that a recipe must not set, and where to say instead what they would do to a run."""

# What other tools, papers and people call our settings.
_CALLED = {
    "train.learning_rate": ("lr",),
    "train.max_steps": ("steps",),
    "train.num_train_epochs": ("epochs", "num_epochs"),
    "train.prompts_per_step": ("batch_size",),
    "train.num_generations": ("group_size", "num_samples"),
    "train.beta": ("kl_coef", "kl_beta"),
    "train.epsilon": ("clip_ratio",),
    "train.output_dir": ("output",),
    "peft.rank": ("r", "lora_r", "lora_rank"),
    "peft.alpha": ("lora_alpha",),
    "peft.dropout": ("lora_dropout",),
    "model.name": ("base", "base_model", "model_name", "model_name_or_path"),
    "model.dtype": ("torch_dtype", "precision"),
    "model.quantization": ("load_in_4bit", "load_in_8bit"),
    "data.train": ("dataset",),
    "data.train.name": ("dataset_name",),
    "rollout.max_completion_length": ("max_length", "max_tokens", "max_new_tokens"),
    "engine.device": ("cuda",),
    "agent.environment": ("environment_factory", "env"),
    "engine.processes": ("gpu", "gpus", "num_gpus", "n_gpus", "num_processes", "world_size"),
}
_OTHER_NAMES = {name: place for place, names in _CALLED.items() for name in names}
_OTHER_SECTIONS = {
    **dict.fromkeys(("adapter", "lora"), "peft"),
    **dict.fromkeys(("generation", "sampling"), "rollout"),
    **dict.fromkeys(("grpo", "optimizer", "training"), "train"),
    **{"dataset": "data", "evaluation": "eval", "reward": "rewards"},
}
# What earlier versions of TRL had, and what is done now.
_GONE = {
    "max_prompt_length": "leave it out: prompts are never cut, and --dry-run shows the longest",
    "use_liger_loss": "leave it out: the loss never holds all logits",
    "vllm_guided_decoding_regex": "did you mean vllm_structured_outputs_regex?",
}
_CLOSE = 0.8


def places_of(name: str) -> list[str]:
    """Every ``section.key`` of a setting, by its name or one very like it.

    Args:
        name: As somebody wrote it, as an option too: ``--learning-rate``.
    """
    plain = name.lstrip("-").replace("-", "_")
    known: dict[str, list[str]] = defaultdict(list)
    for place in _every_place(set(FIELD_OF_SETTING.values())):
        known[place.partition(".")[2]].append(place)
    for (section, key), field in FIELD_OF_SETTING.items():  # by the name that a script gives it
        if field not in known:
            known[field].append(f"{section}.{key}")
    if plain in _OTHER_NAMES:
        return [_OTHER_NAMES[plain]]
    if plain in known and plain not in SECTION_NAMES:
        return known[plain]
    if difflib.get_close_matches(plain, SECTION_NAMES, n=1, cutoff=_CLOSE):
        return []
    return [place for key in difflib.get_close_matches(plain, known, n=1, cutoff=_CLOSE) for place in known[key]]


def place_hint(name: str) -> str:
    """``did you mean train.learning_rate?``, or nothing where no section has such a setting."""
    places = places_of(name)
    return f"did you mean {' or '.join(places)}?" if places else ""


def hint_for_section(name: str, value: object) -> str:
    """What was meant by a section that does not exist, or nothing.

    Args:
        name: As written, ``learning_rate``, ``lora`` or ``train.learning_rate``.
        value: What is written in it.
    """
    section, dot, key = name.partition(".")
    if dot:
        deeper = section in ("data", "rewards") and "." in key
        places = [name] if deeper or name in _every_place(set()) else places_of(key.rpartition(".")[2])
        return f"dots are for the command line; in a file: {_nested(places[0])}" if places else ""
    if isinstance(value, Mapping) and len(value) == 1 and section not in _OTHER_SECTIONS:
        return place_hint(str(next(iter(value))))
    if isinstance(value, Mapping):
        return f"did you mean {_OTHER_SECTIONS[section]}?" if section in _OTHER_SECTIONS else ""
    return place_hint(name)


def hint_for_key(section: str, name: str) -> str:
    """What was meant by a key that a section does not have, where another section has it; or nothing."""
    if "." in name:
        nested = _nested(f"{section}.{name}")
        return f"dots are for the command line; in a file: {nested}"
    if section == "train" and name in _GONE:
        return _GONE[name]
    places = places_of(name)
    exact = [place for place in places if place.rpartition(".")[2] == name or name in _OTHER_NAMES]
    exact += [f"{home}.{key}" for (home, key), field in FIELD_OF_SETTING.items() if field == name]
    return f"did you mean {' or '.join(dict.fromkeys(exact))}?" if exact else ""


def _every_place(elsewhere: set[str]) -> list[str]:
    """Every ``section.key``, without those of ``train`` that have their home elsewhere."""
    train = [f"train.{name}" for name in set(train_fields()) - set(REFUSED) - elsewhere]
    return train + [f"{section}.{key}" for section, model in SECTIONS.items() for key in model.model_fields]


def _nested(place: str) -> str:
    """``train.learning_rate`` as a file has it: ``train: {learning_rate: ...}``."""
    *above, key = place.split(".")
    return "".join(f"{part}: {{" for part in above) + f"{key}: ..." + "}" * len(above)
