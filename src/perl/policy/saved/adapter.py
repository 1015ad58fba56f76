"""An adapter on disk, on the Hub or in the zoo, looked at before its weights or any model are loaded.

path, Hub id[@revision] or zoo:NAME -> SavedAdapter

Weights are safetensors only. Whoever made the files, they are read as untrusted data: what names code, asks for absurd
sizes or cannot be shown to a person is refused with one line.
"""

import dataclasses
import json
import math
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peft import PeftConfig
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from safetensors import SafetensorError, safe_open

from perl.errors import Mistake, ModelError, PerlError, first_line, warn
from perl.policy.saved.download import CONFIG as CONFIG
from perl.policy.saved.download import LARGEST_CONFIG, fetch_adapter, zoo_adapter
from perl.policy.saved.download import WEIGHTS as WEIGHTS
from perl.sandbox import is_sandbox
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

MOST_ENTRIES = 4_000
"""Of a list or mapping; PEFT shortens lists of modules when it saves them."""
# Keys that make some library import or run what they name.
_NAMES_CODE = ("auto_map", "trust_remote_code", "custom_pipeline", "custom_generate", "_target_")
# Libraries of which PEFT may be told to import a module.
_KNOWN_LIBRARIES = re.compile(r"(transformers|peft)(\.\w+)*", re.ASCII)
# Sizes that some side of a tensor in the file must have.
_RANKS = ("r", "init_r", "target_r", "num_vectors", "num_virtual_tokens")
_USUAL_RANK = 4096
_NAMES_OF_MODULES = ("target_modules", "exclude_modules", "modules_to_save", "feedforward_modules", "layers_pattern")
_ON_THE_HUB = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", re.ASCII)
_LONGEST_NAME = 250


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
    check_patterns(config, "peft.adapter")
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


def read_config(folder: Path) -> PeftConfig:
    """Reads the config of an adapter.

    Raises:
        ValueError: It is malformed, or nothing should be built from it.
        KeyError: PEFT has no such type; its name.
        TypeError: PEFT refuses an argument.
    """
    path = folder / CONFIG
    size = path.stat().st_size
    if size > LARGEST_CONFIG:
        raise ValueError(f"{CONFIG} has {size:,} bytes, at most {LARGEST_CONFIG:,} are read")
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        _check_values(facts)
    except RecursionError:
        raise ValueError(f"{CONFIG} is nested too deeply") from None
    if not isinstance(facts, dict):
        raise ValueError(f"{CONFIG} is not a mapping")
    if not facts.get("peft_type"):
        raise ValueError(f"{CONFIG} names no peft_type")
    check_facts(facts)
    for name in ("base_model_name_or_path", "revision"):
        said = facts.get(name)
        if not isinstance(said, str | None) or any(len(part) > _LONGEST_NAME for part in (said or "").split("/")):
            raise ValueError(f"{CONFIG}: {name} is no name")
    kind = facts["peft_type"]
    if not isinstance(kind, str) or kind not in PEFT_TYPE_TO_CONFIG_MAPPING:
        raise KeyError(str(kind)[:60])
    # What this PEFT does not know it ignores; where that is set to something, the adapter may be another one.
    fields = {field.name for field in dataclasses.fields(PEFT_TYPE_TO_CONFIG_MAPPING[kind])} | {"runtime_config"}
    unknown = sorted(name for name, value in facts.items() if name not in fields and value not in (None, False, [], {}))
    if unknown:
        shown = ", ".join(name[:40] for name in unknown[:5])
        warn("PRL330", "%s: this version of PEFT does not know %s and ignores it", CONFIG, shown)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Unexpected keyword arguments")  # said above
        warnings.filterwarnings("ignore", ".*runtime_config")
        warnings.filterwarnings("ignore", "Specified to not save")  # which bases are drawn again is in the config
        try:
            return PeftConfig.from_pretrained(str(folder))
        except (AttributeError, LookupError, ArithmeticError, RuntimeError) as error:  # of values it does not look at
            raise ValueError(f"PEFT refuses {CONFIG}: {type(error).__name__}: {error}") from error


def check_facts(facts: Mapping[str, Any]) -> None:
    """Refuses what no adapter may say, one that is read and one that is attached: it could not be read again.

    Raises:
        ValueError: It is of the wrong kind, names code, or makes another base.
    """
    for name in _NAMES_OF_MODULES:
        value = facts.get(name)
        names = value if isinstance(value, list) else [value]
        if value is not None and not all(isinstance(one, str) for one in names):
            raise ValueError(f"{CONFIG}: {name} is neither a name nor a list of names")
    for name in _RANKS:
        if isinstance(facts.get(name), bool) or not isinstance(facts.get(name), int | None):
            raise ValueError(f"{CONFIG}: {name} is no whole number")
    for name, value in facts.items():
        if name.endswith("_pattern") and name not in _NAMES_OF_MODULES and not isinstance(value, dict | None):
            raise ValueError(f"{CONFIG}: {name} is not a mapping")
    mapping = facts.get("auto_mapping") or {}
    library = mapping.get("parent_library") if isinstance(mapping, dict) else mapping  # which PEFT imports
    if library and not (isinstance(library, str) and _KNOWN_LIBRARIES.fullmatch(library)):
        raise ValueError(f"{CONFIG}: auto_mapping names {library!r:.60}, which is no part of transformers")
    if facts.get("megatron_config") or facts.get("megatron_core") not in (None, "megatron.core"):
        raise ValueError(f"{CONFIG}: megatron_core would import a module that it names; such an adapter is not loaded")
    if facts.get("layer_replication"):
        raise ValueError(f"{CONFIG}: layer_replication makes another base, with layers repeated")


def check_ranks(config: PeftConfig, largest_side: int) -> None:
    """Refuses a rank that no tensor in the file has, before an adapter of that size is built.

    Args:
        config: The adapter's.
        largest_side: Of any tensor in its file.

    Raises:
        ValueError: The config asks for more.
    """
    asked = {name: getattr(config, name, None) for name in _RANKS}
    asked |= {f"rank_pattern.{name}": rank for name, rank in (getattr(config, "rank_pattern", None) or {}).items()}
    for name, rank in asked.items():
        if isinstance(rank, int) and not 0 <= rank <= max(_USUAL_RANK, largest_side):
            raise ValueError(f"{CONFIG} asks for {name} {rank:,}, the largest side of a tensor is {largest_side:,}")


def is_name_of_a_base(name: str) -> bool:
    """Whether an untrusted name of a base can be looked up: on the Hub or in the sandbox, no path and no address."""
    return is_sandbox(name) or (_ON_THE_HUB.fullmatch(name) is not None and ".." not in name)


def _check_values(value: Any, key: str = "") -> None:  # noqa: ANN401 (JSON)
    """Refuses what no document may hold, and what is inside of it."""
    if not key.isprintable() or (isinstance(value, str) and not value.isprintable()):
        raise ValueError(f"{CONFIG}: {key!r:.60} holds control characters")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{CONFIG}: {key} is {value}, which is no number")
    if isinstance(value, dict | list) and len(value) > MOST_ENTRIES:
        raise ValueError(f"{CONFIG}: {key:.60} has {len(value):,} entries, at most {MOST_ENTRIES:,} are read")
    if key.rpartition(".")[2] in _NAMES_CODE and value:
        raise ValueError(f"{CONFIG}: {key} would run code that it names; such an adapter is not loaded")
    items: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, inner in items:
        _check_values(inner, f"{key}.{name}" if key else str(name))


def check_patterns(config: PeftConfig, where: str) -> None:
    """Refuses malformed patterns, which PEFT would raise a traceback for.

    Args:
        config: The adapter's.
        where: Where the adapter is named.

    Raises:
        ModelError: With the first such pattern.
    """
    for text in _patterns(config):
        try:
            re.compile(text)
        except (re.error, OverflowError, RecursionError) as error:
            raise ModelError(f"{text!r:.80} in its config is no pattern: {error}", where) from None


def _patterns(config: PeftConfig) -> Iterator[str]:
    for name in ("target_modules", "exclude_modules", "feedforward_modules", "layers_pattern", "modules_to_save"):
        value = getattr(config, name, None) or ()
        if isinstance(value, str):
            yield value
        elif name in ("layers_pattern", "modules_to_save"):
            yield from map(str, value)
    for name, value in vars(config).items():
        if name.endswith("_pattern") and isinstance(value, dict):
            yield from value


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
