"""A run that outlives its machine: kept in a store at each checkpoint, brought from there by another machine.

RUN with a new checkpoint -> a state in ``engine.storage``; ``--resume-from``: the newest whole state -> RUN

A state is the run folder with its newest checkpoint alone. It is put aside when the checkpoint is whole (files are
linked, logs copied) and sent by a separate thread: the training neither waits for the store nor fails with it.
"""

import contextlib
import logging
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel, ValidationError

from perl.errors import PerlError, RunFolderError, first_line, warn
from perl.hub.stores import MANIFEST, Store, store_at
from perl.policy.checkpoint import latest_checkpoint, latest_step, step_of
from perl.recipe import Recipe
from perl.recipe.recipe import is_first_process
from perl.recipe.sections import EngineSection
from perl.run.files import new_folder, sha256_of, write_text
from perl.run.folder import STORED_AS, Run, check_folder, held, in_use, name_in_storage, run_of
from perl.run.host import Host, hosted_by

logger = logging.getLogger("perl")

RESUME_FROM = "--resume-from"
LONGEST_WAIT = 600.0
"""Seconds that the end of a run waits for what is being sent."""
_STORAGE = "engine.storage"
_OUTGOING, _BROUGHT = ".outgoing", ".brought"
# Of a run folder: made anew where they are needed, or another push's; hidden files are of this machine.
_LEFT_OUT = ("checkpoints", "outbox", "plots", "sync")


class _Manifest(BaseModel, strict=True):
    """What is written last of a state: whose it is, and the SHA-256 of each file."""

    run: str
    step: int
    files: dict[str, str]


class StoredRun(Host):
    """Hands each new state of a run to a thread that sends it, the newest where several wait.

    Attributes:
        sent: States that are there.
        failed: That could not be sent.
        size: Bytes of those that were sent.
    """

    def __init__(self, run_folder: Path, store: Store) -> None:
        """Sends nothing yet; what an earlier start has not sent is of an older state."""
        self.sent = self.failed = self.size = 0
        self._store, self._outgoing = store, run_folder / _OUTGOING
        self._name = name_in_storage(run_folder)
        self._waiting: list[tuple[int, Path]] = []
        self._changed, self._over = threading.Condition(), False
        self._thread = threading.Thread(target=self._work, name="perl-storing", daemon=True)
        shutil.rmtree(self._outgoing, ignore_errors=True)
        self._thread.start()

    def saved(self, folder: Path) -> None:
        """See :class:`perl.run.host.Host`; never fails."""
        newest = latest_checkpoint(folder / "checkpoints")
        if newest is None:
            return
        state = self._outgoing / str(time.monotonic_ns())
        try:
            with new_folder(state) as staged:
                _put_aside(folder, newest, staged)
        except OSError as error:
            self._tell_failure(step_of(newest), error)
            return
        with self._changed:
            for _, older in self._waiting:
                shutil.rmtree(older, ignore_errors=True)
            self._waiting = [(step_of(newest), state)]
            self._changed.notify()

    def close(self) -> None:
        """Waits for what is being sent, within reason, and says what became of all."""
        with self._changed:
            self._over = True
            self._changed.notify()
        self._thread.join(LONGEST_WAIT)
        if self._thread.is_alive():
            warn("PRL308", "%s: the newest state is not there after %.0f s", self._store.name, LONGEST_WAIT)
        shutil.rmtree(self._outgoing, ignore_errors=True)
        if self.sent or self.failed:
            text = "kept in %s: %d states, %s bytes; %d failed"
            logger.info(text, self._store.name, self.sent, f"{self.size:,}", self.failed)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._over)
                if not self._waiting:
                    return
                step, folder = self._waiting.pop()
            began = time.monotonic()
            try:
                size = _send(self._store, self._name, step, folder)
            except Exception as error:  # noqa: BLE001 (whatever a store's client raises, the training goes on)
                self._tell_failure(step, error)
            else:
                self.sent, self.size = self.sent + 1, self.size + size
                seconds = time.monotonic() - began
                logger.info("step %d is kept: %s bytes in %.1f s, %s", step, f"{size:,}", seconds, self._store.name)
            shutil.rmtree(folder, ignore_errors=True)

    def _tell_failure(self, step: int, error: BaseException) -> None:
        self.failed += 1
        text = "%s: step %d is not kept there (failure %d of this start): %s; the next checkpoint is sent in its place"
        reason = error.mistakes[0].message if isinstance(error, PerlError) else first_line(error)
        warn("PRL308", text, self._store.name, step, self.failed, reason)


def _put_aside(run: Path, checkpoint: Path, staged: Path) -> None:
    """What is sent, as it is now: a log grows while it is sent, a checkpoint may be deleted."""
    left_out = [run / name for name in _LEFT_OUT]
    for path in run.iterdir():
        if path.is_dir() and path not in left_out and not path.name.startswith("."):
            shutil.copytree(path, staged / path.name, copy_function=_put)
        elif path.is_file() and not path.name.startswith("."):
            _put(str(path), str(staged / path.name))
    shutil.copytree(checkpoint, staged / "checkpoints" / checkpoint.name, copy_function=_put)


def _put(source: str, target: str) -> None:
    """Links what is large and only ever replaced; copies the rest, of which some grows: logs, a tracker's events."""
    if source.endswith(".safetensors"):
        with contextlib.suppress(OSError):  # a file system without links
            os.link(source, target)
            return
    shutil.copyfile(source, target)


def _send(store: Store, name: str, step: int, folder: Path) -> int:
    """Sends a state and drops those before the one that it follows; how many bytes it has."""
    manifest = _Manifest(run=name, step=step, files=_sums_of(folder))
    there = store.states()
    before = max((one for one, whole in there.items() if whole and one < step), default=None)
    drop = [one for one in there if one not in (step, before)]
    store.put(step, folder, manifest.model_dump_json(indent=1).encode(), drop)
    return sum((folder / file).stat().st_size for file in manifest.files)


@contextlib.contextmanager
def kept(run: Run, engine: EngineSection) -> Iterator[None]:
    """Inside, the run's states go where its recipe says, at the end that of a run that is done; all are waited for."""
    if engine.storage is None or engine.on_ray or not is_first_process():
        yield
        return
    keeping = StoredRun(run.path, store_at(engine.storage, _STORAGE))
    try:
        with hosted_by(keeping):
            yield
        run.record(status="done")  # which the folder's owner says a moment later
        keeping.saved(run.path)
    finally:
        keeping.close()


def check_kept(recipe: Recipe, run: Run) -> None:
    """Before weights are loaded: whether the run can be kept where its recipe says.

    Raises:
        PerlError: It cannot be written, or holds another run, or a later step of this one.
    """
    storage = recipe.engine.storage
    if storage is None or recipe.engine.on_ray:
        return
    store = store_at(storage, _STORAGE)
    store.prepare()
    newest = max((step for step, whole in store.states().items() if whole), default=0)
    there = _manifest(store, newest) if newest else None
    if there is not None:
        here, hint = latest_step(run.checkpoints), f"{RESUME_FROM} {storage} goes on with it, or another {_STORAGE}"
        if there.run != name_in_storage(run.path):
            raise PerlError(f"holds step {newest} of another run, {there.run}", store.name, hint)
        if newest > here:
            raise PerlError(f"holds step {newest} of this run, and its folder here step {here}", store.name, hint)
    logger.info("each checkpoint is kept in %s, the two newest; run %s", store.name, name_in_storage(run.path))


def _manifest(store: Store, step: int) -> _Manifest | None:
    """A state's manifest; None where it is none."""
    with contextlib.suppress(ValidationError):
        found = _Manifest.model_validate_json(store.manifest(step))
        return found if found.step == step else None
    return None


def bring(place: str, recipe: Recipe) -> None:
    """Makes the run folder hold the newest whole state of a store, unless it is as far by itself.

    Args:
        place: The store.
        recipe: Of the run, which must be the one that is kept there.

    Raises:
        PerlError: The store cannot be read, or holds no whole state.
        RunFolderError: It holds a run of another recipe, or the run folder holds another run.
    """
    check_folder(recipe)
    folder, store = recipe.output_dir, store_at(place, RESUME_FROM)
    with contextlib.suppress(RunFolderError):
        if Run.read(folder).status == "done":
            return
    states, staged = store.states(), folder / _BROUGHT
    with held(folder, in_use(folder)):
        try:
            for step in sorted(states, reverse=True):
                manifest = _manifest(store, step) if states[step] else None
                if manifest is not None and _is_here(manifest, folder):
                    return
                shutil.rmtree(staged, ignore_errors=True)
                staged.mkdir()
                wrong = "it was not sent whole" if manifest is None else _fetched(store, manifest, staged)
                if manifest is not None and not wrong:
                    _check_recipe(staged, recipe, place)
                    _take(staged, folder, manifest.run)
                    logger.info("step %d of %s was brought from %s", step, manifest.run, store.name)
                    return
                warn("PRL328", "%s: step %d is not used: %s", store.name, step, wrong)
        finally:
            shutil.rmtree(staged, ignore_errors=True)
    raise PerlError("holds no whole checkpoint of a run" if states else "holds no checkpoint of a run", place)


def _is_here(manifest: _Manifest, folder: Path) -> bool:
    """Whether a run folder is as far as a state.

    Raises:
        RunFolderError: It is of another run.
    """
    here, own = latest_step(folder / "checkpoints"), folder / STORED_AS
    if here and (not own.is_file() or own.read_text(encoding="utf-8").strip() != manifest.run):
        raise RunFolderError(f"holds another run than {manifest.run}", str(folder), "choose another with --output")
    return here >= manifest.step


def _check_recipe(staged: Path, recipe: Recipe, place: str) -> None:
    try:
        run_of(staged, recipe)
    except RunFolderError as error:
        raise error.moved(lambda _: place) from None


def _fetched(store: Store, manifest: _Manifest, staged: Path) -> str:
    """Brings a state; what is wrong with it, empty: nothing."""
    store.fetch(manifest.step, staged)
    (staged / MANIFEST).unlink()  # of this state, which the next one has anew
    there = _sums_of(staged)
    for name in sorted({*there, *manifest.files}):
        if name not in there:
            return f"{name} is missing"
        if name not in manifest.files:
            return f"{name} was not sent with it"
        if there[name] != manifest.files[name]:
            return f"{name} has another SHA-256 than when it was sent"
    return ""


def _sums_of(folder: Path) -> dict[str, str]:
    """The SHA-256 of each file by its path in a folder."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {path.relative_to(folder).as_posix(): sha256_of(path) for path in files}


def _take(staged: Path, folder: Path, name: str) -> None:
    """Moves a state into a run folder, over an older one; a kill leaves a folder that the next start understands."""
    older = [path for path in folder.iterdir() if not path.name.startswith(".")]
    for path in sorted(older, key=lambda path: path.name == "recipe.yaml"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    write_text(folder / STORED_AS, f"{name}\n")
    for path in sorted(staged.iterdir(), key=lambda path: path.name != "recipe.yaml"):
        os.replace(path, folder / path.name)
