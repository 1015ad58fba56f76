"""The critic: an adapter of its own and a value head on the policy's base, outside of the policy's modules.

policy -> Critic; Critic, policy -> the base with the critic's adapter, for a while; Critic <-> its tensors

Guards, engines, snapshots, saved adapters and the policy's optimizer look at the policy's modules and never see it. It
acts through hooks on the base's own linear layers while the policy's adapter is off, so that it goes with every method
whose base is found that way. Shapes: S states, D hidden size, R rank.
"""

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional

from perl.errors import ModelError
from perl.methods.names import is_of_the_base, name_in_base
from perl.policy.attach import base_only
from perl.policy.checkpoint import readable
from perl.policy.model import base_of
from perl.run.folder import write_text

SCALE = 2.0
"""s of s B A: LoRA's alpha over its rank, as this package's LoRA has it."""
WEIGHTS, ABOUT = "critic.safetensors", "critic.json"
_HEAD, _BIAS = "value_head.weight", "value_head.bias"
_DOWN, _UP = ".lora_A.weight", ".lora_B.weight"
_RANK = "rank"


class Critic:
    """Values of states: s B (A x) beside each linear layer of the base but the output head, then a linear value head.

    Starts at the value 0 everywhere: B and the head are 0.

    Attributes:
        tensors: Its parameters by name, float32 (float64 on a base in that); a layer's have the name that the base
            gives the layer, followed by ``.lora_A.weight`` (R, in) and ``.lora_B.weight`` (out, R).
        rank: R.
    """

    def __init__(self, policy: nn.Module, *, rank: int, seed: int) -> None:
        """Makes a new one.

        Args:
            policy: With its adapter; not changed.
            rank: Of each layer's update.
            seed: Of the draw of A, which no other random number depends on.

        Raises:
            ModelError: The policy has no adapter to switch off, so that nothing can stand beside it; or the base has no
                linear layers.
        """
        if not isinstance(policy, PeftModel):
            what = "without an adapter the policy is the base, and a critic has no frozen base to stand on"
            raise ModelError(what, "peft.method", "any method but full, or another algorithm")
        self._policy, self.rank = policy, rank
        self._layers = linear_layers(policy)
        generator, self.tensors = torch.Generator().manual_seed(seed), dict[str, nn.Parameter]()
        for name, layer in self._layers.items():
            bound = 1 / math.sqrt(layer.in_features)  # as LoRA's A: Kaiming's uniform draw with a = sqrt(5)
            drawn_RI = torch.rand(rank, layer.in_features, generator=generator) * (2 * bound) - bound
            like = _float_like(layer.weight)
            self.tensors[name + _DOWN] = nn.Parameter(drawn_RI.to(like))
            self.tensors[name + _UP] = nn.Parameter(like.new_zeros(layer.out_features, rank))
        like = _float_like(base_of(policy).get_output_embeddings().weight)
        width = base_of(policy).config.get_text_config().hidden_size
        self.tensors[_HEAD], self.tensors[_BIAS] = (nn.Parameter(like.new_zeros(size)) for size in ((1, width), (1,)))

    @property
    def parameters(self) -> list[nn.Parameter]:
        """What trains."""
        return list(self.tensors.values())

    def values(self, hidden_SD: torch.Tensor) -> torch.Tensor:
        """(S,) values of the states with these last hidden states, in the type of the parameters."""
        head_1D, bias_1 = self.tensors[_HEAD], self.tensors[_BIAS]
        with torch.autocast(hidden_SD.device.type, enabled=False):  # a value is a difference of rewards away from right
            found: torch.Tensor = functional.linear(hidden_SD.to(head_1D), head_1D, bias_1).squeeze(-1)
        return found

    @contextlib.contextmanager
    def in_place_of(self, policy: nn.Module) -> Iterator[None]:
        """The base with the critic's adapter in the place of the policy's, forward and backward.

        A backward pass that computes activations again belongs inside.

        Args:
            policy: That the critic was made for; afterwards it is itself again.
        """
        with contextlib.ExitStack() as hooked, base_only(policy):
            for name, layer in self._layers.items():
                hook = _added(self.tensors[name + _DOWN], self.tensors[name + _UP])
                hooked.callback(layer.register_forward_hook(hook).remove)
            yield

    def state(self) -> dict[str, torch.Tensor]:
        """Copies of the tensors."""
        return {name: tensor.detach().cpu().clone() for name, tensor in self.tensors.items()}

    def save(self, file: Path) -> None:
        """Writes the tensors as they are."""
        file.parent.mkdir(parents=True, exist_ok=True)
        save_file(self.state(), file, {_RANK: str(self.rank)})

    @torch.no_grad()
    def load(self, file: Path) -> None:
        """Puts back what :meth:`save` wrote.

        Raises:
            ModelError: It is of a critic of another shape.
        """
        with readable(file), safe_open(file, framework="pt") as opened:
            rank = int((opened.metadata() or {}).get(_RANK, self.rank))
            shapes = {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
            self._check(file, rank, shapes)
            for name, tensor in self.tensors.items():
                tensor.copy_(opened.get_tensor(name))

    def export(self, folder: Path, about: Mapping[str, Any]) -> None:
        """Writes ``critic.safetensors`` and ``critic.json`` into a folder.

        Args:
            folder: Made if it is not there.
            about: What the description says besides the shape: of which base, trained how.
        """
        self.save(folder / WEIGHTS)
        shape = {"rank": self.rank, "scale": SCALE, "layers": len(self._layers), "form": "value of the state before"}
        write_text(folder / ABOUT, json.dumps({**about, **shape}, indent=1) + "\n")

    def _check(self, file: Path, rank: int, shapes: Mapping[str, tuple[int, ...]]) -> None:
        if rank != self.rank:
            what = f"holds a critic of rank {rank}, and this one has rank {self.rank}"
            raise ModelError(f"{file} {what}", "train.critic_rank", f"{rank}, or start anew")
        own = {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}
        if shapes == own:
            return
        name = min(name for name in shapes.keys() | own.keys() if shapes.get(name) != own.get(name))
        there, here = (_shape(known.get(name)) for known in (shapes, own))
        what = f"{file} holds a critic of another base: {name} is {there} there, {here} here"
        raise ModelError(what, "model.name", "the base that it was trained on")


def critic_parameters(base: nn.Module, rank: int) -> int:
    """Number of parameters of a critic for a base, which may be without weights."""
    of_layers = sum(rank * (layer.in_features + layer.out_features) for layer in linear_layers(base).values())
    return of_layers + int(base_of(base).config.get_text_config().hidden_size) + 1


def linear_layers(policy: nn.Module) -> dict[str, nn.Linear]:
    """The base's own linear layers by their names in the base, without the output head, inside of any adapter's.

    Raises:
        ModelError: There are none: the base's layers are of another kind, beside which a critic's adapter cannot stand.
    """
    head = base_of(policy).get_output_embeddings()
    heads = {name_in_base(name) for name, module in policy.named_modules() if module is head}
    found = {
        name_in_base(name): module
        for name, module in policy.named_modules()
        if isinstance(module, nn.Linear)
        and is_of_the_base(policy, f"{name}.weight")
        and name_in_base(name) not in heads
    }
    if not found:
        what = f"a critic stands beside linear layers, and {type(base_of(policy)).__name__} has none"
        raise ModelError(what, "model.name", "a base with linear layers, or an algorithm without a critic")
    return found


def _added(down_RI: nn.Parameter, up_OR: nn.Parameter) -> Callable[..., torch.Tensor]:
    """A layer's hook: output + s B (A x), each product in the parameters' type, or in autocast's where that is on."""

    def add(_: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        within_NR = functional.linear(inputs[0].to(down_RI.dtype), down_RI)
        return output + SCALE * functional.linear(within_NR, up_OR).to(output.dtype)

    return add


def _float_like(weight: torch.Tensor) -> torch.Tensor:
    """An empty tensor on the weight's device, in float32 or, like a weight in that, float64."""
    return torch.empty(0, dtype=torch.float64 if weight.dtype == torch.float64 else torch.float32, device=weight.device)


def _shape(shape: tuple[int, ...] | None) -> str:
    return "not" if shape is None else " x ".join(str(size) for size in shape)
