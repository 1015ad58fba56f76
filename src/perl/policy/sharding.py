"""A base in shards over the processes of a run (FSDP2): how it is loaded, how an adapter is put on it.

name -> base of which each process holds a part -> an adapter put on it, whole on each

Only the frozen base is in shards, by transformers' own loading; the adapter is attached afterwards and stays whole on
every process. So what is trained, saved, synced and resumed is the same as with DDP.
"""

import contextlib
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from accelerate import Accelerator
from peft import PeftConfig, PeftModel
from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, TrainingArguments
from transformers.distributed import DistributedConfig

from perl.errors import ModelError, RecipeError, first_line
from perl.methods.base_parameters import name_in_base
from perl.methods.registry import Method
from perl.recipe.engine_section import processes_of_copy
from perl.recipe.recipe import processes_of_node, world_size
from perl.recipe.sections import Strategy
from perl.run.shards import gathered, is_sharded

FSDP2: Strategy = "fsdp2"


def loaded_in_shards(strategy: str, shards: str | int) -> dict[str, Any]:
    """Arguments of ``from_pretrained`` with which each process reads and keeps its part of the base; else none.

    Args:
        strategy: Of the run; the processes have joined, and all ask at once.
        shards: ``engine.shards``: processes that share a copy of the base.

    Raises:
        RecipeError: Nodes have different numbers of processes, or processes of a node are not numbered in a row.
    """
    if not _is_divided(strategy):
        return {}
    world = torch.distributed.get_world_size()
    size = processes_of_copy(shards, world, processes_of_node())
    own, each = (size, int(os.environ.get("LOCAL_RANK", 0)) % size), [(0, 0)] * world
    torch.distributed.all_gather_object(each, own)
    if size < world and str(shards) == "node" and each != [(size, rank % size) for rank in range(world)]:
        what = "the nodes have different numbers of processes, or theirs do not follow each other"
        raise RecipeError(what, "shards", "all, or a number of processes")
    return {"distributed_config": DistributedConfig(fsdp_size=size, dp_replicate_size=world // size)}


def _is_divided(strategy: str) -> bool:
    """Whether the processes, which have joined, are several and hold parts of the base."""
    joined = torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
    return strategy == FSDP2 and joined


def shard(model: PreTrainedModel, shards: str | int) -> None:
    """Makes a base that each process holds whole into one of which each holds a part, in place.

    Args:
        model: The base.
        shards: ``engine.shards``.

    Raises:
        ModelError: transformers cannot divide it, or it has an adapter already.
    """
    if is_sharded(model):
        return
    config = loaded_in_shards(FSDP2, shards).get("distributed_config")
    if config is None:
        return
    if isinstance(model, PeftModel):
        what = "a model that has its adapter already cannot be divided over processes"
        raise ModelError(what, "strategy", "pass the base or its name, with peft_config or PeftRLConfig(adapter=...)")
    with divisible():
        type(model).maybe_distribute_model(model, config, type(model).prepare_distribute_model(config)[2])
    settle(model)


@contextlib.contextmanager
def divisible() -> Iterator[None]:
    """What transformers raises for a model that it cannot divide is one line.

    Raises:
        ModelError: With transformers' reason.
    """
    try:
        yield
    except (ValueError, NotImplementedError) as error:
        if "FSDP" not in str(error) and "fsdp" not in str(error):
            raise
        raise ModelError(f"cannot be divided: {first_line(error)}", "model.name", "strategy ddp") from error


def shard_like(model: PreTrainedModel, base: PreTrainedModel) -> None:
    """Divides a model without weights as a base is, so that it can be given the base's shards; in place.

    The base gives back what it has gathered of them; so all processes must ask at once.
    """
    manager: Any = getattr(base, "_mesh_manager", None)
    if manager is not None:
        for module in base.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        type(model).maybe_distribute_model(model, base.config.distributed_config, manager)


def settle(base: PreTrainedModel) -> None:
    """Freezes a base that was loaded in shards, and runs a token through it; before anything else uses it.

    FSDP2 looks at both when it first gathers a tensor: whether it is trained, and which module is the outermost one,
    past which some of PEFT's models call what is inside.
    """
    if is_sharded(base):
        base.requires_grad_(False)
        with torch.no_grad():
            base(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=base.device), use_cache=False)


@contextlib.contextmanager
def whole_targets(model: nn.Module, config: PeftConfig) -> Iterator[None]:
    """While PEFT puts an adapter on a base: it finds each layer that it adapts whole, one at a time.

    DoRA, for one, takes the lengths of the rows of W.

    Args:
        model: The base.
        config: Of the adapter.
    """
    tuner = PEFT_TYPE_TO_TUNER_MAPPING.get(config.peft_type)
    put = getattr(tuner, "_create_and_replace", None)
    if put is None or not is_sharded(model):
        yield
        return

    def on_whole(self: Any, config: Any, name: str, target: nn.Module, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 (PEFT's)
        with gathered(target):
            put(self, config, name, target, *args, **kwargs)

    with mock.patch.object(tuner, "_create_and_replace", on_whole):
        yield


def check_on_shards(method: Method, strategy: str) -> None:
    """Refuses a method that trains the base's own tensors where these are in shards, over several processes.

    Raises:
        RecipeError: Names the strategies that it runs with.
    """
    if strategy == FSDP2 and world_size() > 1 and method.trains_the_bases:
        what = f"{method.name} trains the base's own tensors, which are in shards under fsdp2"
        raise RecipeError(what, "strategy", "ddp")


def check_config(model: nn.Module, config: PeftConfig) -> None:
    """Refuses an adapter that would train modules or tokens of a sharded base whole.

    Raises:
        ModelError: Names the first one.
    """
    modules, tokens = (getattr(config, name, None) for name in ("modules_to_save", "trainable_token_indices"))
    if (modules or tokens) and is_sharded(model):
        raise _part_of_base(modules[0] if modules else "embeddings")


def check_whole_adapter(policy: nn.Module) -> None:
    """Refuses what would train a part of a sharded base.

    Raises:
        ModelError: Names the first such tensor.
    """
    trained = ((name, p) for name, p in policy.named_parameters() if p.requires_grad)
    part = next((name for name, p in trained if isinstance(p, DTensor)), None)
    if part is not None:
        raise _part_of_base(name_in_base(part))


def _part_of_base(name: str) -> ModelError:
    what = f"{name} is a part of the base, which is in shards under fsdp2 and cannot be trained there"
    return ModelError(what, "engine.strategy", "ddp")


def check_push(strategy: str, *, asked: bool) -> None:
    """Refuses to push from a script whose base is in shards: the one process that pushes cannot prove the adapter.

    Args:
        strategy: Of the run.
        asked: Whether it is to be pushed.

    Raises:
        RecipeError: Says how it is pushed.
    """
    if asked and _is_divided(strategy):
        hint = "trainer.save_adapter(FOLDER), then perl push FOLDER; a recipe pushes by itself"
        raise RecipeError("under fsdp2 one process cannot prove the adapter before it is pushed", "push_to_hub", hint)


def strategy_of(accelerator: Accelerator, model: nn.Module) -> Strategy | None:
    """How the processes of a run share the work, as it is; None: there is one process.

    Args:
        accelerator: The trainer's.
        model: Without wrappers.
    """
    if is_sharded(model):
        return FSDP2
    return "ddp" if accelerator.num_processes > 1 else None


def check_taken(asked: str, found: Strategy | None) -> None:
    """Compares how processes share the work with how they were asked to, before the first step.

    A script may pass a base that it has divided itself, whatever its arguments say.

    Args:
        asked: Of the arguments.
        found: From :func:`strategy_of`.

    Raises:
        ModelError: Names both.
    """
    if found is not None and asked != found and asked != "ddp":
        what = f"{asked} is asked for, and the processes share the work by {found}"
        raise ModelError(what, "strategy", "torch.distributed must have been initialised, as torchrun's scripts do")


def check_strategy(args: TrainingArguments) -> None:
    """Refuses launchers' ways to put the adapter in shards too, before there is a model.

    Raises:
        RecipeError: Names them.
    """
    asked = None
    if getattr(args, "deepspeed_plugin", None) is not None:
        asked = "DeepSpeed"
    if args.fsdp or os.environ.get("ACCELERATE_USE_FSDP") == "true":
        asked = "accelerate's FSDP"
    if asked is not None:
        what = f"{asked} would share what is trained too, and nothing here is proven with it"
        hint = "use fsdp2: engine.strategy in a recipe, PeftRLConfig(strategy=...) in a script, and leave it out there"
        raise RecipeError(what, "strategy", hint)
