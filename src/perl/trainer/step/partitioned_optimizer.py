"""What processes share in an optimizer step: the mean of their gradients, and with ZeRO stage 2 the optimizer itself.

model with a gradient on each process -> the mean gradient on all, once all passes are through
trainer whose accelerator runs DeepSpeed -> the same gradients, guards and files; an optimizer in shares

DeepSpeed's engine would also run forward and backward passes, clip, step inside the last backward pass, cast the model
for half precision and write pickles of its own. Here it divides the optimizer, and the rest is done once for every
strategy: gradients are added up on each process and averaged when all passes of a step are through, so that a step can
be run again on too little memory, methods and guards find them where DDP has them, and half precision is autocast's.
The price: until the step each process holds the whole gradient, which is as large as what is trained.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from transformers import Trainer

from perl.errors import ModelError, RecipeError
from perl.trainer.live import LiveTrainer

# Of torch's optimizers those that treat every number by itself, so that a share of all numbers moves as in the whole.
_BY_NUMBER = ("Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Adadelta", "ASGD", "Rprop", "SGD")


class PartitionedOptimizer(torch.optim.Optimizer):
    """DeepSpeed's optimizer with the parameters and the state of an ordinary one.

    Attributes:
        engine: DeepSpeed's.
    """

    def __init__(self, engine: Any) -> None:  # noqa: ANN401 (DeepSpeed's)
        """Takes the optimizer out of an engine, whose passes are not used."""
        self.engine, self._zero = engine, engine.optimizer
        groups = zip(self._shares.param_groups, self._zero.bit16_groups, strict=True)
        super().__init__([{**group, "params": list(whole)} for group, whole in groups], self._shares.defaults)
        for hook in self._zero._grad_acc_hooks:  # they take each gradient away as it comes
            hook.remove()
        self._zero._grad_acc_hooks.clear()
        # This process's part of each parameter that it has numbers of: ranges of DeepSpeed's share. Each is moved by
        # itself, so that one without a gradient stays.
        self._parts: dict[torch.nn.Parameter, torch.Tensor] = {}
        flats = self._zero.single_partition_of_fp32_groups
        for group, flat, share in zip(self.param_groups, flats, self._shares.param_groups, strict=True):
            for parameter in group["params"]:
                if parameter._hp_mapping is not None:  # DeepSpeed's
                    self._parts[parameter] = _range(flat.detach(), parameter._hp_mapping.hp_fragment_address)
            share["params"] = [self._parts[parameter] for parameter in group["params"] if parameter in self._parts]
        self._shares.register_step_pre_hook(self._take_gradients)  # after a method's, which changes gradients

    def step(self, closure: None = None) -> None:  # type: ignore[override]  # noqa: ARG002
        """Moves this process's share, then exchanges what was moved; gradients stay."""
        for group, share in zip(self.param_groups, self._shares.param_groups, strict=True):
            share.update({key: value for key, value in group.items() if key != "params"})
        self._take_parameters()
        self._shares.step()
        for i, _ in enumerate(self.param_groups):
            self._zero._update_model_bit16_weights(i)  # where somebody gave a parameter another tensor
        for part in self._parts.values():
            part.grad = None
        self._zero.update_lp_params()

    def state_dict(self) -> dict[str, Any]:
        """As of an ordinary optimizer; every process must ask, and the first one receives the tensors."""
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        own = [self._shares.state.get(self._parts[p], {}) if p in self._parts else {} for p in parameters]
        single = [{key: _single(value) for key, value in kept.items()} for kept in own]
        each: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(each, single)
        state = {}
        for number, (parameter, kept) in enumerate(zip(parameters, own, strict=True)):
            known: dict[str, Any] = next((process[number] for process in each if process[number]), {})
            state[number] = {
                key: self._gathered(parameter, kept.get(key), told) if isinstance(told, torch.dtype) else told
                for key, told in known.items()
            }
        numbers = iter(range(len(parameters)))
        groups = [{**group, "params": [next(numbers) for _ in group["params"]]} for group in self.param_groups]
        return {"state": {number: kept for number, kept in state.items() if kept}, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the state of an ordinary optimizer, of which this process keeps its share, and nothing of its own."""
        self._shares.state.clear()
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
            on_device = bool(group.get("fused") or group.get("capturable"))
            for parameter, number in zip(group["params"], saved["params"], strict=True):
                if parameter in self._parts and number in state_dict["state"]:
                    kept = state_dict["state"][number].items()
                    self._shares.state[self._parts[parameter]] = {
                        key: _part(parameter, value, on_device=on_device) for key, value in kept
                    }

    @property
    def _shares(self) -> torch.optim.Optimizer:
        """The optimizer that moves the shares."""
        optimizer: torch.optim.Optimizer = self._zero.optimizer
        return optimizer

    @torch.no_grad()
    def _take_gradients(self, *_: Any) -> None:  # noqa: ANN401 (the optimizer and its arguments)
        for parameter, part in self._parts.items():
            part.grad = None if parameter.grad is None else _numbers(parameter, parameter.grad).clone()

    @torch.no_grad()
    def _take_parameters(self) -> None:
        """What was written to parameters since the last step, as a method does that masks some of their numbers."""
        for parameter, part in self._parts.items():
            part.copy_(_numbers(parameter, parameter))

    def _gathered(self, parameter: torch.nn.Parameter, value: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        """What is kept of each of a parameter's numbers, from the processes that have some of them."""
        whole = torch.zeros(parameter.numel(), dtype=dtype, device=parameter.device)
        if value is not None:
            _numbers(parameter, whole).copy_(value)
        torch.distributed.all_reduce(whole)  # of zeros and one process's numbers
        if torch.distributed.get_rank() == 0:
            return whole.view(parameter.shape).cpu()
        return whole.new_empty(0, device="cpu")


class _OwnGradients:
    """In the place of accelerate's wrapper of DeepSpeed's engine: gradients and their norm as with DDP."""

    def __init__(self, model: torch.nn.Module, largest_norm: float) -> None:
        self.engine = SimpleNamespace(destroy=lambda: None)  # accelerate destroys it when training begins again
        self._exchange = Exchange([p for p in model.parameters() if p.requires_grad], None)
        self._largest_norm = largest_norm or float("inf")

    def backward(self, loss: torch.Tensor, sync_gradients: bool = True, **_: Any) -> None:  # noqa: ANN401
        """Adds up the gradients of a pass; after the last one of a step of TRL's they are averaged."""
        loss.backward()
        if sync_gradients:
            average_gradients(self._exchange)

    def get_global_grad_norm(self) -> torch.Tensor:
        """The norm of all gradients, which are no longer than asked afterwards."""
        return clip_grad_norm_(self._exchange.parameters, self._largest_norm)


def partition_optimizer(trainer: Trainer) -> None:
    """Has accelerate's DeepSpeed divide a trainer's optimizer, and do nothing else.

    Args:
        trainer: New, once the libraries' constructors are through.

    Raises:
        ModelError: What is trained is of several types.
        RecipeError: Its optimizer cannot be divided, or half precision needs DeepSpeed's own.
    """
    accelerator, args = trainer.accelerator, trainer.args
    if args.fp16:
        raise RecipeError("losses are not scaled under zero2", "fp16", "bf16, or strategy: ddp")
    types = {str(p.dtype).removeprefix("torch.") for p in trainer.model.parameters() if p.requires_grad}
    rounded, what = sorted(types & {"bfloat16", "float16"}), ""
    if rounded:
        what = f"zero2 would keep copies of what is trained in {rounded[0]}, which no other strategy goes on with"
    elif len(types) > 1:
        what = f"zero2 shares numbers of one type, and what is trained is {' and '.join(sorted(types))}"
    if what:
        raise ModelError(what, "strategy", "ddp, or the model in float32 with bf16: true")
    plugin = accelerator.state.deepspeed_plugin
    for half in ("bf16", "fp16"):
        plugin.deepspeed_config[half] = {"enabled": False}  # the engine would cast the model, base and adapter
    sizes = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}
    plugin.deepspeed_config.update(sizes, train_batch_size=accelerator.num_processes)  # its passes are not run
    plugin.hf_ds_config._dtype = torch.float32  # to which transformers rounds advantages and log-probabilities
    if args.deepspeed:
        os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)  # accelerate's, of which later trainers would hear
    if args.bf16:
        torch.set_autocast_dtype(args.device.type, torch.bfloat16)  # that of a GPU is float16
        accelerator.native_amp = True
    trainer.model.to(args.device)
    trainer.is_deepspeed_enabled = False  # transformers would load, save and clip by the engine
    accelerator._prepare_deepspeed = partial(_prepared, trainer, accelerator._prepare_deepspeed)


def check_divisible(optimizer: type[torch.optim.Optimizer]) -> None:
    """Refuses an optimizer that looks at more than a number by itself.

    Raises:
        RecipeError: Names it.
    """
    if not optimizer.__module__.startswith("torch.optim") or optimizer.__name__ not in _BY_NUMBER:
        name = optimizer.__name__
        what = f"zero2 gives each process a share of all numbers, and {name} looks at whole tensors or blocks"
        raise RecipeError(what, "optim", "adamw_torch, or strategy: ddp")


def _prepared(trainer: Trainer, theirs: Callable[..., Any], *objects: Any) -> Any:  # noqa: ANN401 (accelerate's)
    """What accelerate makes of a model and its optimizer; of anything else what it would."""
    if not any(isinstance(thing, torch.optim.Optimizer) for thing in objects):
        return theirs(*objects)
    model, optimizer = objects
    if not isinstance(optimizer, PartitionedOptimizer):
        check_divisible(type(optimizer))
        engine, _ = theirs(model, optimizer)
        optimizer = PartitionedOptimizer(engine)
    accelerator = trainer.accelerator
    accelerator.deepspeed_engine_wrapped = _OwnGradients(model, trainer.args.max_grad_norm)
    return accelerator.prepare_model(model, device_placement=False, evaluation_mode=True), optimizer


def _numbers(parameter: torch.nn.Parameter, whole: torch.Tensor) -> torch.Tensor:
    """Of numbers as many as a parameter's, those of this process's part of it."""
    return _range(whole.detach().reshape(-1), parameter._hp_mapping.lp_fragment_address)  # type: ignore[attr-defined]


def _part(parameter: torch.nn.Parameter, value: Any, *, on_device: bool) -> Any:  # noqa: ANN401 (of any optimizer)
    """This process's part of what is kept of a parameter: of what is kept of each number, or all of it."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.ndim and value.shape == parameter.shape:
        return _numbers(parameter, value).to(parameter.device, copy=True)
    return value.to(parameter.device if on_device else "cpu", copy=True)


def _single(value: Any) -> Any:  # noqa: ANN401 (of any optimizer)
    """What all processes may be told of what is kept: a single number itself, of one for each number its type."""
    if isinstance(value, torch.Tensor):
        return value.dtype if value.ndim else value.detach().cpu()
    return value


def _range(flat: torch.Tensor, address: Any) -> torch.Tensor:  # noqa: ANN401 (DeepSpeed's)
    return flat.narrow(0, address.start, address.numel)


# Numbers that are exchanged at once: enough that the exchange runs at full speed, few beside a model's gradients.
_AT_ONCE = 2**24


@dataclass(frozen=True)
class Exchange:
    """Whose gradients the processes average, and in which group; None: of all processes."""

    parameters: list[nn.Parameter]
    group: torch.distributed.ProcessGroup | None


def exchange_of(live: LiveTrainer, model: nn.Module) -> Exchange | None:
    """What is left to exchange after passes that did not; None: nothing, there is one process.

    Args:
        live: The training.
        model: As it is trained, compiled or not: wrapped by DDP, or with its base in shards and its adapter whole.
    """
    inner = getattr(model, "_orig_mod", model)
    if isinstance(inner, DistributedDataParallel) and not live.shares_optimizer:
        named = [p for name, p in inner.module.named_parameters() if name not in inner.parameters_to_ignore]
        return Exchange([p for p in named if p.requires_grad], inner.process_group)
    if live.shares_optimizer or not live.whole_tensors:
        return Exchange([p for p in live.policy.parameters() if p.requires_grad], None)
    return None


@contextlib.contextmanager
def unexchanged(live: LiveTrainer, model: nn.Module) -> Iterator[None]:
    """For a backward pass after which gradients are added up on this process only."""
    state = live.accelerator.gradient_state
    state._set_sync_gradients(False)
    try:
        if live.shares_optimizer or not live.whole_tensors:
            yield
        else:
            with live.accelerator.no_sync(model=model):
                yield
    finally:
        state._set_sync_gradients(True)


@torch.no_grad()
def average_gradients(exchange: Exchange) -> None:
    """Gives every process the mean of all processes' gradients, as DDP does at the end of a backward pass.

    For backward passes that did not: whether all of them succeeded everywhere is known only afterwards. A parameter
    without a gradient on some process counts as zero there; one without a gradient on all stays without.

    Args:
        exchange: Every process of its group must ask.
    """
    parameters, group = exchange.parameters, exchange.group
    world = torch.distributed.get_world_size(group)
    if not parameters:
        return
    present = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32, device=parameters[0].device)
    torch.distributed.all_reduce(present, torch.distributed.ReduceOp.MAX, group=group)
    for same in _buckets([p for p, anywhere in zip(parameters, present.tolist(), strict=True) if anywhere]):
        for parameter in same:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [p.grad for p in same if p.grad is not None]
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        flat /= world  # before the sum, as DDP: half precision must not overflow
        torch.distributed.all_reduce(flat, group=group)
        for gradient, mean in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(mean.view_as(gradient))


def _buckets(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Parameters in order, those of a bucket of one type on one device."""
    buckets: list[list[nn.Parameter]] = []
    filled, kind = 0, None
    for parameter in parameters:
        own = (parameter.dtype, parameter.device)
        if not buckets or own != kind or filled + parameter.numel() > _AT_ONCE:
            buckets.append([])
            filled, kind = 0, own
        buckets[-1].append(parameter)
        filled += parameter.numel()
    return buckets
