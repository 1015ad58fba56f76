"""Where a setting belongs that was written without its section, in another one, or under another tool's name.

``learning_rate`` -> ``train.learning_rate``
"""

import difflib
from collections import defaultdict
from collections.abc import Mapping

from perl.recipe.sections import FIELD_OF_SETTING, SECTION_NAMES, SECTIONS
from perl.recipe.train_fields import REFUSED, train_fields

# What other tools, papers and people call our settings.
_OTHER_NAMES = {
    "lr": "train.learning_rate",
    "steps": "train.max_steps",
    "epochs": "train.num_train_epochs",
    "num_epochs": "train.num_train_epochs",
    "batch_size": "train.prompts_per_step",
    "group_size": "train.num_generations",
    "num_samples": "train.num_generations",
    "kl_coef": "train.beta",
    "kl_beta": "train.beta",
    "clip_ratio": "train.epsilon",
    "output": "train.output_dir",
    "r": "peft.rank",
    "lora_r": "peft.rank",
    "lora_rank": "peft.rank",
    "lora_alpha": "peft.alpha",
    "lora_dropout": "peft.dropout",
    "base": "model.name",
    "base_model": "model.name",
    "model_name": "model.name",
    "model_name_or_path": "model.name",
    "torch_dtype": "model.dtype",
    "precision": "model.dtype",
    "load_in_4bit": "model.quantization",
    "load_in_8bit": "model.quantization",
    "dataset": "data.train",
    "dataset_name": "data.train.name",
    "max_length": "rollout.max_completion_length",
    "max_tokens": "rollout.max_completion_length",
    "max_new_tokens": "rollout.max_completion_length",
    "cuda": "engine.device",
    "gpu": "engine.processes",
    "gpus": "engine.processes",
    "num_gpus": "engine.processes",
    "n_gpus": "engine.processes",
    "num_processes": "engine.processes",
    "world_size": "engine.processes",
}
_OTHER_SECTIONS = {
    "adapter": "peft",
    "lora": "peft",
    "dataset": "data",
    "evaluation": "eval",
    "generation": "rollout",
    "sampling": "rollout",
    "grpo": "train",
    "optimizer": "train",
    "training": "train",
    "reward": "rewards",
}
_CLOSE = 0.8


def places_of(name: str) -> list[str]:
    """Every ``section.key`` of a setting, by its name or one very like it.

    Args:
        name: As somebody wrote it, as an option too: ``--learning-rate``.
    """
    plain = name.lstrip("-").replace("-", "_")
    known: dict[str, list[str]] = defaultdict(list)
    for key in set(train_fields()) - set(FIELD_OF_SETTING.values()) - set(REFUSED):
        known[key].append(f"train.{key}")
    for section, model in SECTIONS.items():
        for key in model.model_fields:
            known[key].append(f"{section}.{key}")
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
        places = [name] if deeper or name in _every_place() else places_of(key.rpartition(".")[2])
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
    places = places_of(name)
    exact = [place for place in places if place.rpartition(".")[2] == name or name in _OTHER_NAMES]
    exact += [f"{home}.{key}" for (home, key), field in FIELD_OF_SETTING.items() if field == name]
    return f"did you mean {' or '.join(dict.fromkeys(exact))}?" if exact else ""


def _every_place() -> set[str]:
    train = {f"train.{name}" for name in set(train_fields()) - set(REFUSED)}
    return train | {f"{section}.{key}" for section, model in SECTIONS.items() for key in model.model_fields}


def _nested(place: str) -> str:
    """``train.learning_rate`` as a file has it: ``train: {learning_rate: ...}``."""
    *above, key = place.split(".")
    return "".join(f"{part}: {{" for part in above) + f"{key}: ..." + "}" * len(above)
