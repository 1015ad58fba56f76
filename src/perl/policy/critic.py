"""The critic: an adapter of its own and a value head on the policy's base, outside of the policy's modules.

policy -> Critic; Critic, policy -> the base with the critic's adapter, for a while; Critic <-> its tensors

Guards, engines, snapshots, saved adapters and the policy's optimizer look at the policy's modules and never see it. It
acts through hooks on the base's own linear layers while the policy's adapter is off, so that it goes with every method
whose base is found that way. A saved one is looked at before its numbers are loaded; an exported critic says of which
base it is, that of a checkpoint does not, since the policy beside it does. Shapes: S states, D hidden size, R rank.
"""

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional

from perl.errors import ModelError, first_line
from perl.methods.base_parameters import is_of_the_base, name_in_base
from perl.policy.attach import check_same_base
from perl.policy.checkpoint import readable
from perl.policy.fingerprint import base_dtype, source_fingerprint
from perl.policy.model import base_of, public_identity
from perl.policy.quantised import quantisation_of
from perl.policy.reference import base_only
from perl.policy.save_adapter import sort_metadata
from perl.policy.saved.adapter import BASE_DTYPE, BASE_QUANTIZATION, is_public
from perl.run.files import new_folder, write_text

WEIGHTS, ABOUT = "critic.safetensors", "critic.json"
WHERE = "train.critic_adapter"
"""The setting that names the critic to start from."""
BASE, REVISION, FINGERPRINT, RANK = "base", "revision", "base_fingerprint", "rank"
"""Keys in the header of the weights and in the description, beside two that an adapter's header has."""
_FOLDER_OF_A_RUN = "critic"
SCALE = 2.0
"""s of s B A: LoRA's alpha over its rank, as this package's LoRA has it."""
_HEAD, _BIAS = "value_head.weight", "value_head.bias"
_DOWN, _UP = ".lora_A.weight", ".lora_B.weight"


@dataclass(frozen=True)
class SavedCritic:
    """What is known of a saved critic without loading it.

    Attributes:
        name: As the user wrote it, or the file.
        file: With its tensors.
        shapes: Tensor name -> shape.
        header: What else the file says: rank, and of an exported one the base's name, type and fingerprint.
    """

    name: str
    file: Path
    shapes: Mapping[str, tuple[int, ...]]
    header: Mapping[str, str]

    def check_shapes(self, rank: int, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Refuses a critic of other shapes than are needed.

        Args:
            rank: That is needed.
            shapes: Likewise, by name.

        Raises:
            ModelError: Names the rank, or the first tensor that differs.
        """
        self.check_rank(rank)
        if self.shapes == shapes:
            return
        name = min(n for n in self.shapes.keys() | shapes.keys() if self.shapes.get(n) != shapes.get(n))
        there, here = (" x ".join(map(str, known.get(name, ("not",)))) for known in (self.shapes, shapes))
        what = f"{self.name} holds a critic of another base: {name} is {there} there, {here} here"
        raise ModelError(what, "model.name", "the base that it was trained on")

    def check_rank(self, rank: int) -> None:
        """Refuses a critic of another rank than is needed.

        Raises:
            ModelError: Names both.
        """
        written = self.header.get(RANK, str(rank))
        if written != str(rank):
            what = f"{self.name} holds a critic of rank {written}, and this one has rank {rank}"
            raise ModelError(what, "train.critic_rank", f"{written}, or start anew")


def find_critic(name: str, base: str | None = None) -> SavedCritic:
    """An exported critic to start from.

    Args:
        name: A folder that one was exported to, or the run that did.
        base: Public name of the base it is meant for; None: do not compare.

    Raises:
        ModelError: It is absent or malformed, or names another base.
    """
    folder = Path(name).expanduser()
    if not (folder / WEIGHTS).is_file() and (folder / _FOLDER_OF_A_RUN).is_dir():
        folder = folder / _FOLDER_OF_A_RUN
    if not folder.is_dir():
        raise ModelError(f"{name}: no such folder", WHERE, "the folder critic/ of a run with algorithm: ppo")
    if not (folder / WEIGHTS).is_file():
        raise ModelError(f"{name} holds no critic: {WEIGHTS} is absent", WHERE)
    try:
        saved = read_critic(folder / WEIGHTS, name)
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelError(f"{name} cannot be read: {first_line(error)}", WHERE) from error
    made_for = saved.header.get(BASE)
    if base and made_for and made_for != base and is_public(made_for) and is_public(base):
        raise ModelError(f"{name} was made for {made_for}, not for {base}", WHERE, f"model.name: {made_for}")
    return saved


def read_critic(file: Path, name: str | None = None) -> SavedCritic:
    """The header of a critic's file, of an export or a checkpoint.

    Args:
        file: That there is.
        name: What the user called it; None: the file's.
    """
    with safe_open(file, framework="pt") as opened:
        shapes = {key: tuple(opened.get_slice(key).get_shape()) for key in opened.keys()}  # noqa: SIM118 (no mapping)
        return SavedCritic(name or str(file), file, shapes, opened.metadata() or {})


def facts_of_base(policy: nn.Module, fingerprint: str | None) -> dict[str, str]:
    """What an exported critic says of its base; all processes must ask at once where the fingerprint is not known.

    Args:
        policy: With its adapter.
        fingerprint: From :func:`perl.policy.fingerprint.source_fingerprint`; None: it is taken now.
    """
    name, revision = public_identity(policy)
    facts = {
        BASE: name,
        REVISION: revision,
        FINGERPRINT: fingerprint or source_fingerprint(policy),
        BASE_DTYPE: base_dtype(policy),
        BASE_QUANTIZATION: quantisation_of(base_of(policy)),
    }
    return {key: fact for key, fact in facts.items() if fact is not None}


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

    def save(self, file: Path, facts: Mapping[str, str] | None = None) -> None:
        """Writes the tensors as they are.

        Args:
            file: Its folder is made if it is not there.
            facts: What the file's header says of the base.
        """
        file.parent.mkdir(parents=True, exist_ok=True)
        save_file(self.state(), file, {**(facts or {}), RANK: str(self.rank)})
        sort_metadata(file)

    @torch.no_grad()
    def load(self, file: Path) -> None:
        """Puts back what :meth:`save` or :meth:`export` wrote; all processes must ask at once.

        Raises:
            ModelError: It is of a critic of another shape, was trained on other weights of the base, or is not finite.
        """
        saved = self.check(file)
        base, fingerprint = saved.header.get(BASE) or "a base", saved.header.get(FINGERPRINT)
        check_same_base(self._policy, saved.name, base, fingerprint, saved.header.get(BASE_DTYPE), WHERE)
        tensors = load_file(file)
        unusable = next((name for name, tensor in tensors.items() if not torch.isfinite(tensor).all()), None)
        if unusable is not None:
            raise ModelError(f"{file} holds numbers that are not finite, in {unusable}", WHERE)
        for name, tensor in tensors.items():
            self.tensors[name].copy_(tensor)

    def check(self, file: Path) -> SavedCritic:
        """Refuses a file whose header is of a critic of another shape, and reads no more of it.

        Raises:
            ModelError: Says how it differs, or that it cannot be read.
        """
        with readable(file):
            saved = read_critic(file)
        saved.check_shapes(self.rank, {name: tuple(tensor.shape) for name, tensor in self.tensors.items()})
        return saved

    def export(self, folder: Path, facts: Mapping[str, str], how: Mapping[str, Any]) -> None:
        """Writes ``critic.safetensors`` and ``critic.json`` into a folder.

        Args:
            folder: Replaced if it is there.
            facts: Of the base, from :func:`perl.policy.critic.facts_of_base`.
            how: It was trained, for the description.
        """
        shape = {RANK: self.rank, "scale": SCALE, "layers": len(self._layers), "form": "value of the state before"}
        with new_folder(folder) as staged:
            self.save(staged / WEIGHTS, facts)
            write_text(staged / ABOUT, json.dumps({**facts, **how, **shape}, indent=1) + "\n")


def critic_shapes(base: nn.Module, rank: int) -> dict[str, tuple[int, ...]]:
    """Shapes of a critic's parameters by name, for a base that may be without weights."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, layer in linear_layers(base).items():
        shapes[name + _DOWN], shapes[name + _UP] = (rank, layer.in_features), (layer.out_features, rank)
    return {**shapes, _HEAD: (1, int(base_of(base).config.get_text_config().hidden_size)), _BIAS: (1,)}


def critic_parameters(base: nn.Module, rank: int) -> int:
    """Number of parameters of a critic for a base, which may be without weights."""
    return sum(math.prod(shape) for shape in critic_shapes(base, rank).values())


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
