"""A critic on disk, looked at before its numbers or any model are loaded.

critic.safetensors -> SavedCritic -> refused, or one that fits

An exported critic says of which base it is; that of a checkpoint does not, since the policy beside it does.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import nn

from perl.errors import ModelError, first_line
from perl.policy.model import base_dtype, base_identity, base_of, is_the_base, public_name, source_fingerprint
from perl.policy.quantised import quantisation_of
from perl.policy.saved.adapter import BASE_DTYPE, BASE_QUANTIZATION, is_public

WEIGHTS, ABOUT = "critic.safetensors", "critic.json"
WHERE = "train.critic_adapter"
"""The setting that names the critic to start from."""
BASE, REVISION, FINGERPRINT, RANK = "base", "revision", "base_fingerprint", "rank"
"""Keys in the header of the weights and in the description, beside two that an adapter's header has."""
_FOLDER_OF_A_RUN = "critic"


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
        there, here = (_shown(known.get(name)) for known in (self.shapes, shapes))
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

    def check_base(self, policy: nn.Module) -> None:
        """Refuses a critic that was trained on other weights, as far as its file tells; all processes must ask at once.

        Raises:
            ModelError: Names both.
        """
        fingerprint, dtype = self.header.get(FINGERPRINT), self.header.get(BASE_DTYPE)
        if fingerprint is None or is_the_base(policy, fingerprint, dtype):
            return
        base, now = self.header.get(BASE) or "a base", str(source_fingerprint(policy))
        here = public_name(*base_identity(policy))[0]
        then_in, now_in = f" in {dtype}" if dtype else "", f" in {base_dtype(policy)}"
        what = f"{self.name} was trained on other weights of {base} ({fingerprint[:12]}{then_in} then, "
        raise ModelError(f"{what}{now[:12]}{now_in} of {here} here)", WHERE, "the base that it names, in that type")


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
        fingerprint: From :func:`perl.policy.model.source_fingerprint`; None: it is taken now.
    """
    name, revision = public_name(*base_identity(policy))
    facts = {
        BASE: name,
        REVISION: revision,
        FINGERPRINT: fingerprint or source_fingerprint(policy),
        BASE_DTYPE: base_dtype(policy),
        BASE_QUANTIZATION: quantisation_of(base_of(policy)),
    }
    return {key: fact for key, fact in facts.items() if fact is not None}


def _shown(shape: tuple[int, ...] | None) -> str:
    return "not" if shape is None else " x ".join(str(size) for size in shape)
