"""A recipe for somebody's model, data and device: ``perl.new_recipe``, what ``perl new`` calls.

model, data, device -> recipe that has been planned -> file

Nothing is written before data and model have been read, the sizes fit and the recipe has passed what a dry run checks.
"""

import contextlib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from perl.data import read_source
from perl.errors import ModelError, PerlError, RecipeError
from perl.methods.registry import METHODS
from perl.recipe import Recipe
from perl.recipe.agent_section import AgentSection
from perl.recipe.batch_plan import plan_batch
from perl.recipe.plain_yaml import plain_value
from perl.recipe.quantisations import EXTRA, QUANTISATIONS
from perl.recipe.rollout_section import TRANSFORMERS, VLLM
from perl.recipe.sections import DataSource
from perl.rewards.named import JUDGES, NAMED_REWARDS
from perl.rollouts.agents.environments import find_agent
from perl.rollouts.agents.template import environment_text
from perl.run.devices import threads_kept
from perl.run.files import write_text
from perl.sandbox import is_sandbox
from perl.trainer.alarms.of_policy import usual_rate
from perl.training.forecast import make_forecast
from perl.training.forecast_text import bytes_text, first_prompt, summary_lines
from perl.training.hardware import GIB, Hardware, cpu, hardware_named, this_machine
from perl.training.memory_estimate import MemoryEstimate
from perl.training.new_data import data_section, recipe_text, worked_tokens
from perl.training.plan import Plan
from perl.training.prepare import read_recipe
from perl.training.run_shape import PlanSetup, lengths_of, memory_on, shape_of
from perl.training.without_hub import plan_or_assume

BOXED = "{prompt}\n\nPlease reason step by step, and put your final answer within \\boxed{{}}."
"""Around the question, where answers are judged."""
_STEPS, _STEPS_ON_CPU = 200, 50
_LENGTH, _LENGTH_ON_SMALL, _LENGTH_ON_CPU = 1024, 768, 128
_RANK, _RANK_ON_CPU = 16, 8
_GENERATIONS = 8
_MOST_EPOCHS = 10
_SMALL = 16e9
# Prompts of a step, and fewer ones, where the base as it is published or quantised does not fit with these.
_PROMPTS, _FEWER = (16, 8), (4, 2, 1)
_UNKNOWN_PROMPTS = 8
_ELSEWHERE = "What it costs elsewhere: `perl plan FILE --gpu NAME`. Every other setting: `perl recipes --settings`."
# Of the memory that there is; estimates are of what is needed at least.
_TAKEN = 0.9


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


@dataclass(frozen=True)
class Sizes:
    """How large a first run is.

    Attributes:
        prompts: Of an optimizer step.
        quantization: As ``model.quantization``.
        backend: As ``rollout.backend``.
        memory: What it needs; None: the model's layers are not known to the formulas, and nothing was estimated.
    """

    prompts: int
    quantization: Any = None
    backend: Any = TRANSFORMERS.name
    memory: MemoryEstimate | None = None

    @property
    def needs(self) -> str:
        """For a person to read."""
        memory = self.memory
        if memory is None:
            return "What it needs is not estimated for models of this kind; a first step shows it."
        parts = {"base": memory.weights, "adapter with its optimizer": memory.adapter}
        parts |= {"vLLM": memory.engine, "rollouts": memory.cache, "driver and libraries": memory.context}
        shown = ", ".join(f"{name} {bytes_text(size)}" for name, size in parts.items() if size)
        return f"Derived from the model's config: {bytes_text(memory.least)} at least ({shown})."


def new_recipe(  # noqa: PLR0913 (each is an option of the command)
    model: str,
    data: str | Mapping[str, Any],
    output: str | Path | None = None,
    *,
    prompt: str | None = None,
    answer: str | None = None,
    reward: str | Sequence[str] = (),
    environment: str | None = None,
    gpu: str | float | None = None,
    force: bool = False,
) -> NewRecipe:
    """Writes a commented recipe for a model, data and a device, of sizes that fit there by ``perl plan``'s estimates.

    Args:
        model: Hub id, folder, or ``sandbox:base``.
        data: ``sandbox:TASK``, a file or a Hub data set; or a mapping as ``data.train`` has it, or as ``data``.
        output: File to write, ending in .yaml; None: nothing is written.
        prompt: Column of the question; None: the first usual name that the data has.
        answer: Column of the gold answer; None: likewise, and none where there is a reward that needs none.
        reward: Names of rewards, ``module:function`` for your own; none: ``accuracy``.
        environment: ``file.py`` or ``file.py:Class``, beside the recipe; a file that is not there is begun with one.
        gpu: A name as ``T4`` or ``H100``, gigabytes as ``24``, or ``cpu``; None: what this machine has.
        force: Whether a file that is there may be replaced.

    Raises:
        PerlError: Data or model cannot be read, nothing fits, or the file is there. Then nothing is written.

    Example:
        ``perl.train(perl.new_recipe("sandbox:base", "sandbox:chain", gpu="cpu").recipe)``
    """
    path = None if output is None else _checked_output(Path(output).expanduser(), force=force)
    if path is not None and str(path.parent.absolute()) not in sys.path:
        sys.path.append(str(path.parent.absolute()))  # where `perl train` looks for its rewards
    device = hardware_named(str(gpu)) if gpu is not None else this_machine() if torch.cuda.is_available() else cpu()
    agent, begun = (None, None) if environment is None else _environment(environment, path)
    usual = ("accuracy",) if agent is None or not hasattr(find_agent(agent).environments[None], "get_reward") else ()
    rewards = ((reward,) if isinstance(reward, str) else tuple(reward)) or usual
    judged = any(NAMED_REWARDS.get(name) in JUDGES for name in rewards)  # of a custom reward nobody knows
    named = {role: column for role, column in (("prompt", prompt), ("answer", answer)) if column is not None}
    section = data_section(data, named, judged=judged)
    with threads_kept(), _taken_back(begun):
        values = _smallest(model, section, rewards, device, judged=judged)
        values |= {} if agent is None else {"agent": {"environment": environment_of(agent, path), "max_turns": 4}}
        plan = plan_or_assume(read_recipe(values), runs_here=False)
        if plan.tokenizer.chat_template is None and section.get("prompt_template") is None:  # it is not instructed
            values["data"].pop("prompt_template", None)
        sizes, notes = _sized(values, plan, device)
        where = "a CPU" if device.on_cpu else f"one {device.name} of {bytes_text(device.memory)}"
        head = f"{model} on {section['train']['name']} with LoRA and GRPO, for {where}; begun by `perl new`."
        text = recipe_text(values, {"": f"{head}\n\n{sizes.needs}\n{_ELSEWHERE}", **notes})
        if plain_value(text) != values:
            raise RecipeError("the recipe's text would be read as something else", "data", "other names of columns")
        recipe = replace(read_recipe(values), name="recipe" if path is None else path.stem)
        plan = plan_or_assume(recipe, engine_here=False)
        costs = () if sizes.memory is None else summary_lines(make_forecast(plan, _setup(plan, device)))
        asked = [f"assumed  {line}" for line in plan.assumed] or [first_prompt(plan)]
        summary = (*([] if begun is None else [f"begun    {begun}"]), *asked, *costs)
    if path is not None:
        write_text(_checked_output(path, force=force).resolve(), text)
    return NewRecipe(text, plan.recipe, path, summary)


@contextlib.contextmanager
def _taken_back(begun: Path | None) -> Iterator[None]:
    """Where what follows fails a file that was begun is removed."""
    try:
        yield
    except BaseException:
        if begun is not None:
            begun.unlink()
        raise


def _environment(named: str, recipe: Path | None) -> tuple[AgentSection, Path | None]:
    """The section with an environment of this name; its file, where there was none and it was written.

    Args:
        named: As :func:`new_recipe` takes it.
        recipe: Beside which the file lies, where it is not found from here.
    """
    file, _, name = named.partition(":")
    if not file.endswith(".py"):
        return AgentSection(environment=named), None
    beside = Path() if recipe is None else recipe.parent
    path = Path(file) if Path(file).exists() else beside / file
    begun = None if path.exists() else path
    if begun is not None:
        name = name or "Environment"
        write_text(path, environment_text(name))
    kinds = re.findall(r"^class (\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    if not name and len(kinds) != 1:
        raise PerlError(f"{file} has the classes {', '.join(kinds) or 'none'}", "agent", f"{file}:Class")
    return AgentSection(environment=f"{path}:{name or kinds[0]}"), begun


def environment_of(agent: AgentSection, recipe: Path | None) -> str:
    """The environment as the recipe names it: a file relative to the recipe's folder where it lies in there."""
    file, _, name = str(agent.environment).rpartition(":")
    if not file.endswith(".py") or recipe is None:
        return str(agent.environment)
    path, folder = Path(file).resolve(), recipe.parent.resolve()
    return f"{path.relative_to(folder) if path.is_relative_to(folder) else path}:{name}"


def _checked_output(path: Path, *, force: bool) -> Path:
    """Refuses a file that is there, whose folder is not, or that would not be found as a recipe."""
    if path.suffix not in (".yaml", ".yml"):
        raise PerlError("a recipe's file ends in .yaml", str(path), f"{path}.yaml")
    if not path.parent.is_dir():
        raise PerlError("no such folder", str(path.parent))
    if path.exists() and not force:
        raise PerlError("is there already, and is not overwritten", str(path), "another name, or --force")
    return path


def _smallest(
    model: str, data: dict[str, Any], rewards: Sequence[str], device: Hardware, *, judged: bool
) -> dict[str, Any]:
    """The recipe with as few and short completions as there can be, which is planned for lengths and counts."""
    source, asks = DataSource(**data["train"]), not is_sandbox(model) and data.get("prompt_template") is None
    if judged and asks and not is_sandbox(source.name):  # of an instructed model, for an answer that can be found
        first = read_source(source, "train", "data.train")[0][0].get(source.columns.prompt)
        data = {**data, "prompt_template": BOXED} if isinstance(first, str) else data
    rank = _RANK_ON_CPU if device.on_cpu else _RANK
    return {
        "model": {"name": model, **({} if device.on_cpu else {"dtype": "bfloat16" if device.bfloat16 else "float16"})},
        "peft": {"method": "lora", "rank": rank, "alpha": 2 * rank},
        "data": data,
        **({"rewards": dict.fromkeys(rewards, 1.0)} if rewards else {}),
        "train": {"prompts_per_step": 1, "num_generations": _GENERATIONS, "max_steps": 1},
        "rollout": {"backend": TRANSFORMERS.name, "max_completion_length": 1},
        "eval": {"enabled": data["train"].get("columns", {"answer": "answer"})["answer"] is not None},
        "engine": {"device": "cpu" if device.on_cpu else "auto"},
    }


def _sized(values: dict[str, Any], plan: Plan, device: Hardware) -> tuple[Sizes, dict[str, str]]:
    """Gives the recipe sizes that fit; those, and what is said of its keys."""
    config = plan.config.get_text_config()
    context = getattr(config, "max_position_embeddings", None)
    room = None if context is None else max(context - plan.longest_prompt, 1)
    usual = _LENGTH_ON_CPU if device.on_cpu else _LENGTH_ON_SMALL if device.memory < _SMALL else _LENGTH
    length = max(usual, min(worked_tokens(plan.problems.train, plan.tokenizer), 4 * usual))
    length = plan.arguments.max_completion_length = length if room is None else min(length, room)
    sizes, problems = choose_sizes(plan, device), len(plan.problems.train)
    rate = usual_rate(METHODS["lora"].learning_rate, getattr(config, "hidden_size", None)) or 1e-5
    steps = min(_STEPS_ON_CPU if device.on_cpu else _STEPS, max(_MOST_EPOCHS * problems // sizes.prompts, 1))
    values["model"] |= {} if sizes.quantization is None else {"quantization": sizes.quantization}
    values["train"] = {
        "prompts_per_step": sizes.prompts,
        "num_generations": _GENERATIONS,
        "max_steps": steps,
        "learning_rate": float(f"{rate:.0e}"),
        "lr_scheduler_type": "constant",
        "beta": 0.0,
        **({} if device.on_cpu or device.bfloat16 else {"fp16": True, "bf16": False}),
        "save_steps": max(steps // 10, 1),
    }
    backend = {} if device.on_cpu else {"backend": sizes.backend}
    values["rollout"] = {**backend, "max_completion_length": length}
    heldout = plan.problems.heldout
    if values["eval"]["enabled"] and heldout is not None:
        values["eval"] = {"k": 1, "limit": 256, "batch_size": sizes.prompts * _GENERATIONS}
    elif values["eval"]["enabled"]:
        del values["eval"]
    notes = {
        "data.train.name": f"{problems:,} problems",
        "train.prompts_per_step": f"x num_generations = {sizes.prompts * _GENERATIONS} completions a step",
        "train.max_steps": f"{steps * sizes.prompts / problems:.2g} times through the {problems:,} problems",
        "rollout.max_completion_length": f"tokens{', as the data has worked solutions' if length > usual else ''}; "
        f"the context has room for {room or length:,}",
    }
    if sizes.quantization is not None:
        row, published = QUANTISATIONS[sizes.quantization], bytes_text(2 * plan.total_parameters)
        notes["model.quantization"] = (
            f"linear layers in {row.bits} bits, by {row.package.pip}: as published the base takes {published}"
        )
    return sizes, notes


def choose_sizes(plan: Plan, device: Hardware) -> Sizes:
    """The largest of the usual sizes that fits: a base as it is published rather than quantised, many prompts first.

    Args:
        plan: Of a run without quantisation, for one process.
        device: That it is to train on.

    Raises:
        PerlError: Nothing fits.
    """
    most = len(plan.problems.train)
    memory = None
    # Of the fewest bits, where its package is installed.
    bits = next((name for name in ("nf4", "int8") if QUANTISATIONS[name].package.installed), None)
    candidates = [Sizes(prompts, backend=VLLM.name) for prompts in _PROMPTS] if VLLM.installed else []
    either = (None, bits) if bits else (None,)
    candidates += [Sizes(prompts, how) for counts in (_PROMPTS, _FEWER) for how in either for prompts in counts]
    if device.on_cpu:
        candidates = [Sizes(prompts) for prompts in (*_PROMPTS[1:], *_FEWER)]
    for candidate in candidates:
        sizes = replace(candidate, prompts=min(candidate.prompts, most))
        # The same plan with these sizes: neither data nor model is read again.
        model = plan.recipe.model.model_copy(update={"quantization": sizes.quantization})
        rollout = plan.recipe.rollout.model_copy(update={"backend": sizes.backend})
        batch = plan_batch(prompts_per_step=sizes.prompts, num_generations=_GENERATIONS)
        changed = replace(plan, recipe=replace(plan.recipe, model=model, rollout=rollout, batch=batch))
        try:
            shape = shape_of(changed, on_cpu=device.on_cpu)
            memory = memory_on(changed, _setup(changed, device), shape, "ddp", device.memory)
        except ModelError:  # costs of such a model are not derived
            return Sizes(min(_UNKNOWN_PROMPTS, most))
        if memory.fits and memory.least <= _TAKEN * memory.available:
            return replace(sizes, memory=memory)
    assert memory is not None  # noqa: S101 (there are candidates)
    hint = "a larger one, a smaller model, or several: docs/scaling.md"
    if not device.on_cpu and bits != "nf4":
        hint = f"in 4 bits it takes less: pip install 'perl-rl[{EXTRA}]'; else {hint}"
    needs = f"{memory.least / GIB:.1f} GiB at least, and has {memory.available / GIB:.1f}"
    raise PerlError(f"{plan.recipe.model.name} does not fit {device.name}: it needs {needs}", "gpu", hint)


def _setup(plan: Plan, device: Hardware) -> PlanSetup:
    return PlanSetup(plan.recipe.batch, device, ("ddp",), lengths_of(plan))
