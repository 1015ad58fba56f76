"""An adapter on disk, on the Hub or in the zoo, looked at before its weights or any model are loaded.

path, Hub id[@revision] or zoo:NAME -> SavedAdapter

Weights are safetensors only. Whoever made the files, they are read as untrusted data.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from peft import PeftConfig
from safetensors import SafetensorError, safe_open

from perl.errors import Mistake, ModelError, PerlError, first_line
from perl.policy.saved.config import check_ranks, is_name_of_a_base, read_config
from perl.policy.saved.download import CONFIG as CONFIG
from perl.policy.saved.download import WEIGHTS as WEIGHTS
from perl.policy.saved.download import fetch_adapter, zoo_adapter
from perl.zoo.catalogue import PREFIX

BASE_FINGERPRINT = "base_sha256"
"""Key in the header of the weights: fingerprint of the base that the adapter was trained on."""
BASE_DTYPE = "base_dtype"
"""Key in the header of the weights: type in which that base was loaded, hence the fingerprint taken."""
BASE_QUANTIZATION = "base_quantization"
"""Key in the header of the weights: what that base was quantised to as it was loaded; absent: it was not."""
START = "perl_start"
"""Key in the header of the weights: the method whose start (its anchor) is the second half of the adapter's rank."""

_LARGEST_HEADER = 32_000_000  # bytes; 40,000 tensors of a mixture of experts have 6 million
_NUMBERS, _WHOLE = ("F64", "F32", "F16", "BF16"), ("I32", "I64", "U8", "I16")
POSITIONS = "shira_indices"
"""How the names of the tensors end that say where in W the numbers of SHiRA belong; torch does not look at them."""
# Those of the only other tensors that hold whole numbers: torch refuses what points out of a matrix.
_PLACES = (POSITIONS, "supertuning_indices", "_topk_indices")
_LONGEST_LINE = 300


@dataclass(frozen=True)
class SavedAdapter:
    """What is known of a saved adapter without loading it.

    Attributes:
        name: As the user wrote it.
        shapes: Tensor name -> shape.
        base_fingerprint: Of the base it was trained on, if it was saved by this package.
        base_dtype: Type of that base's numbers, if its fingerprint is known.
        base_quantization: What that base was quantised to as it was loaded, as far as is known; None: it was not.
        start: The method on whose start it was trained, if half of its rank is that start.
        foreign_base: How a downloaded adapter names its base, if that is a path or an address: it counts for nothing.
    """

    name: str
    folder: Path
    config: PeftConfig
    shapes: dict[str, tuple[int, ...]]
    base_fingerprint: str | None
    base_dtype: str | None = None
    start: str | None = None
    foreign_base: str | None = None
    base_quantization: str | None = None

    @property
    def weights(self) -> Path:
        """The file with the tensors."""
        return self.folder / WEIGHTS


def find_adapter(name: str, base: str | None = None) -> SavedAdapter:
    """Finds an adapter and reads its config and the header of its weights.

    Args:
        name: A folder, a Hub id with an optional ``@revision``, or ``zoo:NAME``.
        base: Public name of the base it is meant for; None: do not compare.

    Raises:
        ModelError: It is absent or malformed, its weights are pickles, or it names another base.
    """
    folder, is_ours = _folder(name)
    for file in (CONFIG, WEIGHTS):
        if not (folder / file).is_file():
            hint = "its weights are pickles; save it again with PEFT" if (folder / "adapter_model.bin").exists() else ""
            raise ModelError(f"{name} holds no adapter: {file} is absent", "peft.adapter", hint)
    try:
        config = read_config(folder)
        metadata, shapes = _header(folder / WEIGHTS)
        check_ranks(config, max((side for shape in shapes.values() for side in shape), default=0))
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        reason = f"PEFT has no type {error}" if isinstance(error, KeyError) else first_line(error)
        shown = "".join(c if c.isprintable() else "?" for c in reason)[:_LONGEST_LINE]  # a terminal obeys some
        raise ModelError(f"{name} cannot be read: {shown}", "peft.adapter") from error
    foreign = None
    if not is_ours and config.base_model_name_or_path and not is_name_of_a_base(config.base_model_name_or_path):
        foreign, config.base_model_name_or_path, config.revision = config.base_model_name_or_path, None, None
    made_for = config.base_model_name_or_path
    if base and made_for and made_for != base and is_public(made_for) and is_public(base):
        raise ModelError(f"{name} was made for {made_for}, not for {base}", "peft.adapter", f"model.name: {made_for}")
    fingerprint, dtype, start = (metadata.get(key) for key in (BASE_FINGERPRINT, BASE_DTYPE, START))
    quantization = metadata.get(BASE_QUANTIZATION)
    if quantization is not None and re.fullmatch(r"[\w-]{1,40}", quantization) is None:
        quantization = "unknown"  # which may be shown, as whatever an untrusted header says may not
    return SavedAdapter(name, folder, config, shapes, fingerprint, dtype, start, foreign, quantization)


def public_adapter(name: str) -> str:
    """An adapter's name without anything of this machine: of a folder the last part, which is no name on the Hub."""
    path = Path(name).expanduser()
    return path.resolve().name if path.is_dir() else name


def _folder(name: str) -> tuple[Path, bool]:
    """Where the files are, and whether that is a folder of the user's own."""
    try:
        if name.startswith(PREFIX):
            return zoo_adapter(name), False
        local = Path(name).expanduser()
        if local.is_dir():
            of_a_run = (local / "run.json").is_file()  # a run is named where its adapter is meant
            return local / "adapter" if of_a_run else local, True
        if name.startswith((".", "/", "~")) or name.count("/") != 1:
            raise ModelError(f"{name}: no such folder, and not a name on the Hub (user/name)")
        if name.startswith("runs/"):  # where runs are written, and nobody's name on the Hub
            raise ModelError(f"{name}: no such folder", "", "the folder of a run or an adapter; on the Hub: user/name")
        repository, _, revision = name.partition("@")
        return fetch_adapter(repository, revision or None), False
    except PerlError as error:
        problem = error.mistakes[0]
        raise ModelError(str(Mistake(problem.message, problem.where)), "peft.adapter", problem.hint) from error


def _header(path: Path) -> tuple[dict[str, str], dict[str, tuple[int, ...]]]:
    """What the header of the weights says: remarks, and the tensors' shapes."""
    with path.open("rb") as raw:
        size = int.from_bytes(raw.read(8), "little")
    if size > _LARGEST_HEADER:
        raise ValueError(f"the header of {WEIGHTS} has {size:,} bytes, at most {_LARGEST_HEADER:,} are read")
    shapes = {}
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
        for key in file.keys():  # noqa: SIM118 (no mapping)
            if not key.isprintable() or len(key) > _LONGEST_LINE:
                raise ValueError(f"{WEIGHTS} has a tensor with the name {key!r:.60}")
            tensor = file.get_slice(key)
            kind = tensor.get_dtype()
            known = _WHOLE if key.endswith(_PLACES) else _NUMBERS
            if kind not in known:
                raise ValueError(f"{key} holds numbers of type {kind}, an adapter's are {', '.join(known)}")
            shapes[key] = tuple(tensor.get_shape())
    return metadata, shapes


def is_public(name: str) -> bool:
    """Whether a base's name says which model it is: the sandbox's or a Hub id, not a path."""
    a_path = name.startswith((".", "/", "~")) or Path(name).expanduser().exists()
    return name.startswith("sandbox:") or (name.count("/") == 1 and not a_path)
