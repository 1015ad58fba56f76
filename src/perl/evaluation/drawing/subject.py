"""What is to be evaluated: an adapter and the base beside it, found before any weights are loaded.

run folder, checkpoint, adapter folder, Hub id, zoo:NAME, or a base alone -> Subject
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from perl.errors import ModelError, PerlError, RunFolderError, warn
from perl.policy.checkpoint import latest_checkpoint
from perl.policy.name import adapter_config_digest, model_config_digest, policy_name, weights_digest
from perl.policy.saved.adapter import CONFIG, SavedAdapter, find_adapter
from perl.recipe import Recipe
from perl.recipe.quantisations import QUANTIZATIONS
from perl.recipe.sections import ModelSection
from perl.run.facts import RECIPE, run_above
from perl.run.files import sha256_of
from perl.run.folder import Run
from perl.sandbox import is_sandbox

_WHOLE_MODEL = "config.json"


@dataclass(frozen=True)
class Subject:
    """A policy and the base it is compared with.

    Attributes:
        name: What results call it: a Hub id, ``zoo:NAME``, or the last part of a path.
        base: The base, with its revision.
        adapter: What is put on the base; None: nothing.
        model: A model that was itself trained on the base; None: there is none.
        adapter_sha256: Of the adapter's weights, the file that will be pushed; or of the model's.
        config_sha256: Of what the adapter's config, or the model's, says of the policy.
        folder: Where results go if nobody says: a run's beside its adapter, others below ``evals/``.
        threads: CPU threads that the run's recipe asks for.
    """

    name: str
    base: ModelSection
    adapter: SavedAdapter | None
    model: ModelSection | None
    adapter_sha256: str | None
    config_sha256: str | None
    folder: Path
    threads: int | None = None

    def policy(self, base_sha256: str) -> str:
        """The policy's one name, on a base of these weights."""
        return policy_name(base_sha256, self.adapter_sha256, self.config_sha256)

    @property
    def trained(self) -> bool:
        """Whether there is something beside the base."""
        return self.adapter is not None or self.model is not None


QuantizationChoice = Literal["auto", "none", "nf4", "int8", "fp8"]


def find_subject(
    adapter: str | None, base: str | None = None, dtype: str = "auto", quantization: QuantizationChoice = "auto"
) -> Subject:
    """Finds what a user named.

    An adapter that was trained on a quantised base is put on a base that is quantised likewise, unless someone says
    otherwise: on the ordinary one it is another policy, of another name.

    Args:
        adapter: A run folder, a checkpoint or an adapter's folder, a Hub id with an optional ``@revision``, or
            ``zoo:NAME``; None: the base alone.
        base: Hub id with an optional ``@revision``, or folder; None: the one that the adapter names.
        dtype: Type of the base's weights.
        quantization: Of the base; ``auto``: as the adapter was trained, ``none``: the ordinary base.

    Raises:
        PerlError: There is no such thing, it is a whole model, or nobody says which base it belongs to.
    """
    subject = _found(adapter, base, dtype)
    if quantization == "auto":
        return subject
    section = subject.base.model_copy(update={"quantization": None if quantization == "none" else quantization})
    if subject.adapter is not None and subject.adapter.base_quantization != section.quantization:
        bases = [_named(subject.adapter.base_quantization), _named(section.quantization)]
        warn("PRL302", "%s was trained on %s, and is scored on %s", subject.name, *bases)
    return replace(subject, base=section)


def _named(quantization: str | None) -> str:
    return "the ordinary base" if quantization is None else f"a base quantised to {quantization}"


def _found(adapter: str | None, base: str | None, dtype: str) -> Subject:
    """As :func:`find_subject`, the base quantised as the adapter was trained."""
    given = _section(base, dtype) if base is not None else None
    if adapter is None:
        if given is None:
            raise PerlError("nothing to evaluate is named", "--adapter", "or --base for a base alone")
        name = given.name if is_sandbox(given.name) else _short(given.name)
        return Subject(name, given, None, None, None, None, Path("evals") / name.replace(":", "-"))
    path = Path(adapter).expanduser()
    if (path / "run.json").is_file():
        return _of_run(path, given, dtype)
    if (path / _WHOLE_MODEL).is_file() and not (path / CONFIG).is_file():
        raise ModelError(f"{adapter} is a whole model, not an adapter", "--adapter", f"--base {adapter}")
    try:
        saved = find_adapter(str(path) if path.is_dir() else adapter)
    except ModelError as error:
        mistake = error.mistakes[0]
        hint = mistake.hint or f"a whole model is evaluated with --base {adapter}"
        raise ModelError(mistake.message, "--adapter", hint) from None
    run = run_above(path, 2) if path.is_dir() else None  # a Hub id lies nowhere here
    recipe = None if run is None else Recipe.of_run(run / RECIPE)
    section = _base_of(saved, given, recipe, dtype)
    name = _short(adapter)
    folder = Path("evals") / name.replace(":", "-")
    threads = recipe.engine.threads if recipe is not None else None
    return Subject(name, section, saved, None, *adapter_digests(saved), folder, threads)


def adapter_digests(saved: SavedAdapter) -> tuple[str, str]:
    """Of an adapter's weights, and of what its config says of the policy."""
    return sha256_of(saved.weights), adapter_config_digest((saved.folder / CONFIG).read_bytes())


def model_digests(folder: Path) -> tuple[str, str]:
    """As :func:`adapter_digests`, of a whole model's folder.

    Raises:
        ModelError: They cannot be read.
    """
    try:
        return weights_digest(folder), model_config_digest((folder / _WHOLE_MODEL).read_bytes())
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder} cannot be read: {error}", "--adapter") from None


def _of_run(path: Path, given: ModelSection | None, dtype: str) -> Subject:
    """The adapter of a run that is done, or the model if that was trained itself."""
    run, recipe = Run.read(path), Recipe.of_run(path / "recipe.yaml")
    threads = recipe.engine.threads
    if not run.adapter.is_dir():
        checkpoint = latest_checkpoint(run.checkpoints)
        hint = f"--adapter {checkpoint}" if checkpoint else "perl train finishes it"
        raise RunFolderError(f"has no trained adapter yet, it is {run.status}", str(path), hint)
    name = path.resolve().name
    if run.facts.get("method") == "full":
        section, model = given or _with_dtype(recipe.model, dtype), ModelSection(name=str(run.adapter))
        return Subject(name, section, None, model, *model_digests(run.adapter), path / "evals", threads)
    saved = find_adapter(str(run.adapter))
    section = _base_of(saved, given, recipe, dtype)
    return Subject(name, section, saved, None, *adapter_digests(saved), path / "evals", threads)


def _with_dtype(section: ModelSection, dtype: str) -> ModelSection:
    """The section with another type of weights, unless that is left open."""
    return section if dtype == "auto" else section.model_copy(update={"dtype": dtype})


def _section(name: str, dtype: str) -> ModelSection:
    folder = Path(name).expanduser()
    local = folder.is_dir()
    if local and not (folder / _WHOLE_MODEL).is_file():
        adapter = (folder / CONFIG).is_file()
        hint = f"--adapter {name}" if adapter else "the folder of a whole model, or a name on the Hub"
        raise ModelError(f"{name} {'is an adapter' if adapter else f'has no {_WHOLE_MODEL}'}", "--base", hint)
    repository, _, revision = (name, "", "") if local else name.partition("@")
    return _with_dtype(ModelSection(name=repository, revision=revision or None), dtype)


def _base_of(saved: SavedAdapter, given: ModelSection | None, recipe: Recipe | None, dtype: str) -> ModelSection:
    """The given base, else the run's, else the one that an adapter names; quantised as the adapter was trained on it.

    A base that was quantised as no recipe can say is taken as published.
    """
    name, was = saved.config.base_model_name_or_path, saved.base_quantization
    if given is None and recipe is not None:
        given = _with_dtype(recipe.model, dtype)
    if given is None and saved.foreign_base:
        what = f"{saved.name} names its base by a place on another machine, {saved.foreign_base[:100]}"
        raise ModelError(what, "--base", "name the one it belongs to")
    if given is None and not name:
        raise ModelError(f"{saved.name} does not say in its {CONFIG} which base it belongs to", "--base", "name it")
    section = given or _with_dtype(ModelSection(name=name, revision=saved.config.revision), dtype)
    known = was if was in QUANTIZATIONS else None
    if was != known:
        warn("PRL302", "%s was trained on %s, and is scored on %s", saved.name, _named(was), _named(known))
    return section.model_copy(update={"quantization": known})


def _short(name: str) -> str:
    """What results call it: of a folder the last parts that say something, else the Hub's name."""
    path = Path(name).expanduser()
    if not path.exists():
        return name
    path = path.resolve()
    if path.name == "adapter" or path.name.startswith("checkpoint-"):
        run = path.parent.parent if path.parent.name == "checkpoints" else path.parent
        return run.name if path.name == "adapter" else f"{run.name}-{path.name}"
    return path.name
