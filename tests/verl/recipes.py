"""Recipes for the tests of what goes to verl, each with the sandbox's base."""

from dataclasses import replace
from types import MappingProxyType

from perl.methods.settings import adaptation
from perl.recipe import Recipe
from perl.recipe.sections import PeftSection
from perl.training.on_verl import VerlExport, planned_here, read_for_verl
from perl.training.prepare import training_arguments
from perl.verl.settings import Settings, settings

TRAIN = {"prompts_per_step": 4, "num_generations": 4, "max_steps": 8, "lr_scheduler_type": "constant", "seed": 7}
ALGORITHMS = {
    **dict.fromkeys(("grpo", "dr_grpo", "rloo", "reinforce_pp", "gspo", "cispo", "ppo"), ({}, {})),
    "dapo": ({"mask_truncated_completions": False}, {"refill": 2.0}),
}
"""Name -> what of ``train`` goes only so, and which prompts."""
ENGINES = {"fsdp": {"gpus": 4, "nodes": 2, "parallel": {"context": 2}}, "fsdp2": {"gpus": 4, "offload": True}}


def recipe(**sections: dict) -> Recipe:
    """A small recipe that goes, with other sections, or further keys of ``train``, in their places."""
    train = {**TRAIN, **sections.pop("train", {})}
    return read_for_verl({"train": train, "rollout": {"max_completion_length": 32}, **sections})


def of_algorithm(name: str, strategy: str = "fsdp2", rollout: str = "vllm") -> Recipe:
    """A recipe of an algorithm's name on one of verl's engines."""
    train, prompts = ALGORITHMS[name]
    engine = {"name": "verl", "strategy": strategy, "rollout": rollout, **ENGINES[strategy]}
    chosen = {"prompts": prompts} if prompts else {}
    return recipe(algorithm=name, train=dict(train), engine=engine, **chosen)


def told(export: VerlExport, of: Recipe) -> Settings:
    """What verl is told of another recipe with the same data and adapter, without reading them again."""
    arguments = training_arguments(planned_here(of), "none")
    if not arguments.learning_rate_asked:
        arguments.learning_rate = export.job.arguments.learning_rate
    config = export.job.adapter if of.peft == PeftSection() else adaptation(of.peft).config
    changed = {"recipe": of, "arguments": arguments, "steps": arguments.max_steps, "adapter": config}
    return settings(replace(export.job, **changed))


def with_train(of: Recipe, **fields: object) -> Recipe:
    """The recipe with other fields of ``train``."""
    return replace(of, train=MappingProxyType({**of.train, **fields}))
