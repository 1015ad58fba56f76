"""ZeRO stage 2 by DeepSpeed: each process keeps and moves a share of the optimizer; all else is as with DDP.

trainer whose accelerator runs DeepSpeed -> the same gradients, guards and files; an optimizer in shares

DeepSpeed's engine would also run forward and backward passes, clip, step inside the last backward pass, cast the model
for half precision and write pickles of its own. Here it divides the optimizer, and the rest is done once for every
strategy: gradients are added up on each process and averaged when all passes of a step are through, so that a step can
be run again on too little memory, methods and guards find them where DDP has them, and half precision is autocast's.
The price: until the step each process holds the whole gradient, which is as large as what is trained.
"""

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.nn.utils import clip_grad_norm_
from transformers import Trainer

from perl.errors import ModelError, RecipeError
from perl.trainer.exchange import Exchange, average_gradients

# Of torch's optimizers those that treat every number by itself, so that a share of all numbers moves as in the whole.
_BY_NUMBER = ("Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Adadelta", "ASGD", "Rprop", "SGD")
# Beside an optimizer's own state: the float32 copy of a parameter in half precision.
_MASTER = "float32_copy"


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
        self._shares.register_step_pre_hook(self._take_gradients)  # after a method's, which changes gradients

    def step(self, closure: None = None) -> None:  # type: ignore[override]  # noqa: ARG002
        """Moves this process's share, then exchanges what was moved; gradients stay."""
        for group, _, share in self._groups():
            share.update({key: value for key, value in group.items() if key != "params"})
        for group, flat, _ in self._groups():
            # Without a gradient a step must not count, as while a critic warms up: Adam corrects by their number.
            moves = any(parameter.grad is not None for parameter in group["params"])
            flat.grad = torch.zeros_like(flat) if moves else None
        self._take_parameters()
        self._shares.step()
        for i, (_, flat, _) in enumerate(self._groups()):
            flat.grad = None
            self._zero._update_model_bit16_weights(i)  # where somebody gave a parameter another tensor
        self._zero.update_lp_params()

    def state_dict(self) -> dict[str, Any]:
        """As of an ordinary optimizer; every process must ask, and the first one receives the tensors."""
        state: dict[int, dict[str, Any]] = {}
        groups = []
        for group, flat, _ in self._groups():
            kept: dict[str, Any] = dict(self._shares.state.get(flat, {}))
            if group["params"][0].dtype != flat.dtype:
                kept[_MASTER] = flat.detach()
            first = len(state)
            for parameter in group["params"]:
                state[len(state)] = {key: self._gathered(parameter, flat, value) for key, value in kept.items()}
            groups.append({**group, "params": list(range(first, len(state)))})
        return {"state": {number: kept for number, kept in state.items() if kept}, "param_groups": groups}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the state of an ordinary optimizer, of which this process keeps its share."""
        for (group, flat, _), saved in zip(self._groups(), state_dict["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
            kept = [state_dict["state"].get(number, {}) for number in saved["params"]]
            share = {key: self._share(group, flat, kept, key) for key in dict.fromkeys(k for own in kept for k in own)}
            if _MASTER in share:
                flat.copy_(share.pop(_MASTER))
            if share:
                self._shares.state[flat] = share

    @property
    def _shares(self) -> torch.optim.Optimizer:
        """The optimizer that moves the shares."""
        optimizer: torch.optim.Optimizer = self._zero.optimizer
        return optimizer

    def _groups(self) -> Iterator[tuple[Any, Any, Any]]:
        """Each group with its parameters, this process's share of their numbers, and the share's own group."""
        return zip(
            self.param_groups, self._zero.single_partition_of_fp32_groups, self._shares.param_groups, strict=True
        )

    @torch.no_grad()
    def _take_gradients(self, *_: Any) -> None:  # noqa: ANN401 (the optimizer and its arguments)
        for group, flat, _ in self._groups():
            for parameter in group["params"]:
                if parameter.grad is not None and flat.grad is not None:
                    _copy(parameter, parameter.grad, flat.grad)

    @torch.no_grad()
    def _take_parameters(self) -> None:
        """What was written to parameters since the last step, as a method does that masks some of their numbers."""
        for group, flat, _ in self._groups():
            for parameter in group["params"]:
                if parameter.dtype == flat.dtype:
                    _copy(parameter, parameter, flat)

    def _gathered(self, parameter: torch.nn.Parameter, flat: torch.Tensor, value: Any) -> Any:  # noqa: ANN401
        """What is kept of a parameter, from the shares of all processes; numbers are of the whole share."""
        if not isinstance(value, torch.Tensor) or value.shape != flat.shape:
            return value.clone() if isinstance(value, torch.Tensor) else value
        whole = torch.zeros(parameter.numel(), dtype=value.dtype, device=value.device)
        part = parameter._hp_mapping  # type: ignore[attr-defined]  # DeepSpeed's
        if part is not None:
            _range(whole, part.lp_fragment_address).copy_(_range(value, part.hp_fragment_address))
        whole = whole.to(parameter.device)
        torch.distributed.all_reduce(whole)  # of zeros and one process's numbers
        if torch.distributed.get_rank() == 0:
            return whole.view(parameter.shape).cpu()
        return whole.new_empty(0, device="cpu")

    def _share(self, group: dict[str, Any], flat: torch.Tensor, kept: list[dict[str, Any]], key: str) -> Any:  # noqa: ANN401
        """This process's numbers of what is kept of a group's parameters under a key; of single numbers the largest.

        A parameter of which nothing was kept had no gradient yet and counts as zero.
        """
        pairs = [(p, own[key]) for p, own in zip(group["params"], kept, strict=True) if key in own]
        parameter, value = pairs[0]
        if isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.ndim:
            share = torch.zeros_like(flat, dtype=value.dtype)
            for parameter, value in pairs:
                _copy(parameter, value, share)
            return share
        largest = max((value for _, value in pairs), key=float)
        if not isinstance(largest, torch.Tensor):
            return largest
        on_device = group.get("fused") or group.get("capturable")
        return largest.to(flat.device if on_device else "cpu", copy=True)


class _OwnGradients:
    """In the place of accelerate's wrapper of DeepSpeed's engine: gradients and their norm as with DDP."""

    def __init__(self, model: torch.nn.Module, largest_norm: float) -> None:
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
    if types & {"bfloat16", "float16"}:
        what = f"zero2 would keep copies of what is trained in {types.pop()}, which no other strategy goes on with"
        raise ModelError(what, "strategy", "ddp, or the model in float32 with bf16: true")
    if len(types) > 1:
        what = f"zero2 shares numbers of one type, and what is trained is {' and '.join(sorted(types))}"
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


def _copy(parameter: torch.nn.Parameter, whole: torch.Tensor, share: torch.Tensor) -> None:
    """Copies the part of a parameter's numbers that this process has into its share of the group's numbers."""
    part = parameter._hp_mapping  # type: ignore[attr-defined]  # DeepSpeed's
    if part is not None:
        numbers = _range(whole.detach().reshape(-1), part.lp_fragment_address)
        _range(share, part.hp_fragment_address).copy_(numbers)


def _range(flat: torch.Tensor, address: Any) -> torch.Tensor:  # noqa: ANN401 (DeepSpeed's)
    return flat.narrow(0, address.start, address.numel)
