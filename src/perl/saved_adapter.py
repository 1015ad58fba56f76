"""An adapter on disk or on the Hub, looked at before its weights or any model are loaded.

path or Hub id[@revision] -> SavedAdapter

Weights are safetensors only. Knows nothing of models in memory.
"""

from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from peft import PeftConfig
from safetensors import SafetensorError, safe_open

from perl.errors import ModelError, Problem
from perl.hub_lookup import look_up

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
BASE_FINGERPRINT = "base_sha256"
"""Key in the header of the weights: fingerprint of the base that the adapter was trained on."""
BASE_DTYPE = "base_dtype"
"""Key in the header of the weights: type in which that base was loaded, hence the fingerprint taken."""
START = "perl_start"
"""Key in the header of the weights: the method whose start (its anchor) is the second half of the adapter's rank."""


@dataclass(frozen=True)
class SavedAdapter:
    """What is known of a saved adapter without loading it.

    Attributes:
        name: As the user wrote it.
        shapes: Tensor name -> shape.
        base_fingerprint: Of the base it was trained on, if it was saved by this package.
        base_dtype: Type of that base's numbers, if its fingerprint is known.
        start: The method on whose start it was trained, if half of its rank is that start.
    """

    name: str
    folder: Path
    config: PeftConfig
    shapes: dict[str, tuple[int, ...]]
    base_fingerprint: str | None
    base_dtype: str | None = None
    start: str | None = None

    @property
    def weights(self) -> Path:
        """The file with the tensors."""
        return self.folder / WEIGHTS


def find_adapter(name: str, base: str | None = None) -> SavedAdapter:
    """Finds an adapter and reads its config and the header of its weights.

    Args:
        name: A folder, or a Hub id with an optional ``@revision``.
        base: Public name of the base it is meant for; None: do not compare.

    Raises:
        ModelError: There is none, it is not one, its weights are pickles, or it names another base.
    """
    folder = _folder(name)
    for file in (CONFIG, WEIGHTS):
        if not (folder / file).is_file():
            hint = "its weights are pickles; save it again with PEFT" if (folder / "adapter_model.bin").exists() else ""
            raise ModelError(f"{name} holds no adapter: {file} is absent", "peft.adapter", hint)
    try:
        config = PeftConfig.from_pretrained(str(folder))
        if config.peft_type is None:
            raise ValueError(f"{CONFIG} names no peft_type")
        with safe_open(folder / WEIGHTS, framework="pt") as file:
            metadata = file.metadata() or {}
            shapes = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118 (no mapping)
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        reason = f"PEFT has no type {error}" if isinstance(error, KeyError) else str(error).splitlines()[0]
        raise ModelError(f"{name} cannot be read: {reason}", "peft.adapter") from error
    made_for = config.base_model_name_or_path
    if base and made_for and made_for != base and _is_public(made_for) and _is_public(base):
        raise ModelError(f"{name} was made for {made_for}, not for {base}", "peft.adapter", f"model.name: {made_for}")
    facts = (metadata.get(key) for key in (BASE_FINGERPRINT, BASE_DTYPE, START))
    return SavedAdapter(name, folder, config, shapes, *facts)


def _folder(name: str) -> Path:
    local = Path(name).expanduser()
    if local.is_dir():
        return local
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise ModelError(f"{name}: no such folder, and not a name on the Hub (user/name)", "peft.adapter")
    repository, _, revision = name.partition("@")
    answer = look_up("model", repository, revision or None)
    if isinstance(answer, Problem):
        raise ModelError(answer.message, "peft.adapter", answer.hint)
    try:
        return Path(
            snapshot_download(repository, revision=answer or revision or None, allow_patterns=[CONFIG, WEIGHTS])
        )
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise ModelError(f"{name} cannot be had from the Hub: {reason}", "peft.adapter") from error


def _is_public(name: str) -> bool:
    """Whether a base's name says which model it is: the sandbox's or a Hub id, not a path."""
    a_path = name.startswith((".", "/", "~")) or Path(name).expanduser().exists()
    return name.startswith("sandbox:") or (name.count("/") == 1 and not a_path)
