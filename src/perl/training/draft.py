"""A recipe for somebody's model, data and device: ``perl.new_recipe``, what ``perl new`` calls.

model, data, device -> recipe that has been planned -> file

Nothing is written before data and model have been read, the sizes fit and the recipe has passed what a dry run checks.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from perl.data import read_source
from perl.errors import PerlError, RecipeError, raise_all
from perl.methods.registry import METHODS
from perl.policy.model import load_empty_base
from perl.recipe import Recipe
from perl.recipe.plain_yaml import plain_value
from perl.recipe.sections import ModelSection, RewardSetting
from perl.rewards import reward_mistakes
from perl.rewards.named import JUDGES, NAMED_REWARDS
from perl.run.devices import threads_kept
from perl.run.files import write_file
from perl.sandbox import is_sandbox
from perl.trainer.alarms.of_optimizer import usual_rate
from perl.training.draft_data import held_out_of, sources_of, with_columns
from perl.training.draft_sizes import GENERATIONS, choose_sizes
from perl.training.draft_text import BOXED, Draft, draft_text
from perl.training.forecast import make_forecast
from perl.training.forecast_text import summary_lines
from perl.training.hardware import Hardware, cpu, hardware_named, this_machine
from perl.training.lengths import lengths_of
from perl.training.plan import Plan, make_plan
from perl.training.run_shape import Setup
from perl.training.stages import read_recipe

_STEPS, _STEPS_ON_CPU = 200, 50
_LENGTH, _LENGTH_ON_SMALL, _LENGTH_ON_CPU = 1024, 768, 128
_RANK, _RANK_ON_CPU = 16, 8
_MOST_EPOCHS = 10
_SMALL = 16e9
_RECIPE_SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True)
class NewRecipe:
    """A recipe that has been planned.

    Attributes:
        text: The file, with comments.
        recipe: The same, checked; :func:`perl.train` takes it.
        path: Where it was written; None: nowhere.
        summary: What it needs and takes, a line each, as far as that can be derived.
    """

    text: str
    recipe: Recipe
    path: Path | None
    summary: tuple[str, ...]

    def __str__(self) -> str:
        """The file's text."""
        return self.text


def new_recipe(
    model: str,
    data: str | Mapping[str, Any],
    output: str | Path | None = None,
    *,
    prompt: str | None = None,
    answer: str | None = None,
    reward: str | Sequence[str] = (),
    gpu: str | float | None = None,
    force: bool = False,
) -> NewRecipe:
    """Writes a commented recipe for a model, data and a device, of sizes that fit there by ``perl plan``'s estimates.

    Args:
        model: Hub id, folder, or ``sandbox:base``.
        data: ``sandbox:TASK``, a file or a Hub data set; or a mapping as ``data.train`` has it, or of two, ``train``
            and ``eval``.
        output: File to write, ending in .yaml; None: nothing is written.
        prompt: Column of the question; None: the first usual name that the data has.
        answer: Column of the gold answer; None: likewise, and none where there is a reward that needs none.
        reward: Names of rewards, ``package.module:function`` for your own; none: ``accuracy``.
        gpu: A name as ``T4`` or ``H100``, gigabytes as ``24``, or ``cpu``; None: what this machine has.
        force: Whether a file that is there may be replaced.

    Raises:
        PerlError: Data or model cannot be read, nothing fits, or the file is there. Then nothing is written.

    Example:
        ``perl.train(perl.new_recipe("sandbox:base", "sandbox:chain", gpu="cpu").recipe)``
    """
    path = None if output is None else check_output(output, force=force)
    _find_rewards_beside(path)
    device = device_named(None if gpu is None else str(gpu))
    names = _names_of(reward)
    sources = sources_of(data)
    train = with_columns(sources["train"], prompt, answer, judged=_judged(names))
    held_out = held_out_of(train, sources.get("eval"))
    rewards = tuple(_importable(name, path) for name in names) or ("accuracy",)
    with threads_kept():
        draft = _drafted(model, train, held_out, rewards, device)
        text = draft_text(draft)
        plan = _planned(draft, text, path)
        summary = _summary(plan, device) if draft.sizes.memory is not None else ()
    if path is not None:
        _write(path, text, force=force)
    return NewRecipe(text, plan.recipe, path, summary)


def _names_of(reward: str | Sequence[str]) -> tuple[str, ...]:
    names = (reward,) if isinstance(reward, str) or not isinstance(reward, Sequence) else tuple(reward)
    for name in names:
        if not isinstance(name, str):
            raise PerlError(f"must be the name of a reward, not {name!r:.60}", "reward", "package.module:function")
    return names


def check_output(output: str | Path, *, force: bool) -> Path:
    """Where a recipe may be written.

    Raises:
        PerlError: The file is there, its folder is not, or it would not be found as a recipe.
    """
    if not isinstance(output, str | os.PathLike):
        raise PerlError(f"must be a file, not {output!r:.60}", "output")
    path = Path(output).expanduser()
    if path.suffix not in _RECIPE_SUFFIXES:
        raise PerlError("a recipe's file ends in .yaml", str(output), f"{output}.yaml")
    if path.is_dir():
        raise PerlError("is a folder", str(path), f"{path / 'recipe.yaml'}")
    if not path.parent.is_dir():
        raise PerlError("no such folder", str(path.parent))
    if path.exists() and not force:
        raise PerlError("is there already, and is not overwritten", str(path), "another name, or --force")
    if path.is_symlink() and not path.exists():
        raise PerlError(f"is a link to {os.readlink(path)}, which is not there", str(path), "another name")
    return path


def check_reward(name: str, output: str | Path | None) -> None:
    """Imports a reward.

    Args:
        name: As :func:`new_recipe` takes it.
        output: Where the recipe will be written; None: here.

    Raises:
        RecipeError: There is no such reward, or it cannot be imported.
    """
    path = None if output is None else Path(output).expanduser()
    _find_rewards_beside(path or Path("recipe.yaml"))
    mistakes = reward_mistakes({"rewards": {_importable(name, path): RewardSetting(weight=1.0)}})
    raise_all(RecipeError, [replace(mistake, where="reward") for _, mistake in mistakes])


def _find_rewards_beside(path: Path | None) -> None:
    """Lets modules be imported from a recipe's folder, where `perl train` looks for its rewards."""
    if path is not None and str(path.parent.absolute()) not in sys.path:
        sys.path.append(str(path.parent.absolute()))


def check_model(name: str) -> None:
    """Reads a model's config.

    Raises:
        PerlError: It cannot be loaded.
    """
    load_empty_base(ModelSection(name=name))


def device_named(gpu: str | None) -> Hardware:
    """The device that a person names: ``T4``, ``24``, ``24GB``, ``cpu``; None: what is here.

    Raises:
        PerlError: There is no such device.
    """
    if gpu is None:
        return this_machine() if torch.cuda.is_available() else cpu()
    plain = gpu.strip().lower()
    number = plain.removesuffix("b").removesuffix("gi").removesuffix("g").strip()
    try:
        gigabytes = float(number)
    except ValueError:
        return hardware_named(plain)
    if not 1 <= gigabytes <= 1024:
        raise PerlError(f"no GPU has {gigabytes:g} GB", "gpu", "gigabytes as it is sold with, as 24")
    return hardware_named(None, gigabytes)


def _judged(rewards: Sequence[str]) -> bool:
    """Whether a reward of the package needs gold answers; of a custom one nobody knows."""
    return not rewards or any(NAMED_REWARDS.get(name) in JUDGES for name in rewards)


def _importable(name: str, path: Path | None) -> str:
    """``folder/my_rewards.py:score`` as ``my_rewards:score``, which lies here or beside the recipe."""
    file, colon, function = name.rpartition(":")
    if not colon or not file.endswith(".py"):
        return name
    beside = {Path.cwd().resolve(), Path.cwd().resolve() if path is None else path.parent.resolve()}
    found = Path(file).expanduser().resolve()
    if not found.is_file():
        raise RecipeError(f"no such file: {file}", "reward", "my_rewards.py:function")
    if found.parent not in beside:
        raise RecipeError(f"{file} does not lie beside the recipe", "reward", "put the two into one folder")
    return f"{found.stem}:{function}"


def _drafted(
    model: str, train: dict[str, Any], held_out: dict[str, Any] | None, rewards: tuple[str, ...], device: Hardware
) -> Draft:
    """The recipe's numbers, from a plan with the shortest completion there can be."""
    data = {"train": train, **({} if held_out is None else {"eval": held_out, "drop_overlap": True})}
    length = _LENGTH_ON_CPU if device.on_cpu else _LENGTH_ON_SMALL if device.memory < _SMALL else _LENGTH
    rank = _RANK_ON_CPU if device.on_cpu else _RANK
    answers = train.get("columns", {"answer": "answer"})["answer"]
    asked: dict[str, Any] = {
        "model": {"name": model, **({} if device.on_cpu else {"dtype": "bfloat16" if device.bfloat16 else "float16"})},
        "peft": {"method": "lora", "rank": rank, "alpha": 2 * rank},
        "data": data,
        "rewards": dict.fromkeys(rewards, 1.0),
        "train": {"prompts_per_step": 1, "num_generations": GENERATIONS, "max_steps": 1},
        "rollout": {"max_completion_length": 1, "backend": "transformers"},
        "eval": {"enabled": answers is not None},
        "engine": {"device": "cpu" if device.on_cpu else "auto"},
    }
    probe = make_plan(read_recipe(asked), runs_here=False)
    config = load_empty_base(probe.recipe.model).config.get_text_config()
    context = getattr(config, "max_position_embeddings", None)
    room = None if context is None else context - probe.longest_prompt
    template = _template(probe, rewards)
    if template is not None:
        asked["data"]["prompt_template"] = template
    if room is not None:  # the template takes some of it
        room = max(room - (len(probe.tokenizer(BOXED)["input_ids"]) if template else 0), 1)
    asked["rollout"]["max_completion_length"] = length = length if room is None else min(length, room)
    plan = make_plan(read_recipe(asked), runs_here=False)
    sizes = choose_sizes(plan, device)
    heldout = plan.problems.heldout
    most_steps = max(_MOST_EPOCHS * len(plan.problems.train) // sizes.prompts, 1)
    return Draft(
        model=model,
        train=train,
        held_out=held_out,
        rewards=rewards,
        problems=len(plan.problems.train),
        scored=heldout is not None and "solution" in heldout.column_names,
        template=template,
        length=length,
        context=room,
        rate=usual_rate(METHODS["lora"].learning_rate, getattr(config, "hidden_size", None)) or 1e-5,
        steps=min(_STEPS_ON_CPU if device.on_cpu else _STEPS, most_steps),
        device=device,
        sizes=sizes,
        plain_bytes=2 * plan.total_parameters,
        rank=rank,
    )


def _template(plan: Plan, rewards: tuple[str, ...]) -> str | None:
    """How an instructed model is asked for an answer that can be found; the sandbox's model is not instructed."""
    source = plan.recipe.data.train
    if is_sandbox(source.name) or is_sandbox(plan.recipe.model.name) or plan.tokenizer.chat_template is None:
        return None
    first = read_source(source, "train", "data.train")[0][0]
    plain = isinstance(first.get(source.columns.prompt), str)
    return BOXED if plain and _judged(rewards) else None


def _planned(draft: Draft, text: str, path: Path | None) -> Plan:
    """The plan of the recipe that the text is, after everything that a dry run checks."""
    values = plain_value(text)
    _check_meant(values, draft)
    recipe = replace(read_recipe(values), name="recipe" if path is None else path.stem)
    return make_plan(recipe, engine_here=False)


def _check_meant(values: Mapping[str, Any], draft: Draft) -> None:
    """Compares what is read from the text with what was meant, which anybody's names stand in.

    Raises:
        RecipeError: They differ; names the key.
    """
    meant: dict[tuple[str, ...], Any] = {
        ("model", "name"): draft.model,
        ("data", "train"): draft.train,
        ("data", "eval"): draft.held_out,
        ("data", "prompt_template"): draft.template,
        ("rewards",): dict.fromkeys(draft.rewards, 1.0),
    }
    for path, wanted in meant.items():
        read: Any = values
        for key in path:
            read = read.get(key)
        wanted = {k: v for k, v in wanted.items() if v is not None} if isinstance(wanted, Mapping) else wanted
        if read != wanted:
            raise RecipeError(f"{wanted!r} would be read as {read!r}", ".".join(path), "another name")


def _summary(plan: Plan, device: Hardware) -> tuple[str, ...]:
    setup = Setup(plan.recipe.batch, 1, device, (plan.recipe.engine.strategy,), lengths_of(plan))
    return tuple(summary_lines(make_forecast(plan, setup)))


def _write(path: Path, text: str, *, force: bool) -> None:
    """Writes the file; without ``force`` only if it is still not there."""
    try:
        if force:
            write_file(path.resolve(), lambda staged: staged.write_text(text, encoding="utf-8"))
            return
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        check_output(path, force=False)
        raise
    except OSError as error:
        raise PerlError(f"cannot be written: {os.strerror(error.errno or 0)}", str(path)) from None
