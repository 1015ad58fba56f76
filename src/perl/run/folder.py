"""The run folder: what is in it, whose it is, and what became of it.

Recipe -> Run: OUT/{recipe.yaml, run.json, metrics.jsonl, samples.jsonl, adapter/, checkpoints/, plots/}

Every file is written whole or not at all, so a kill at any moment leaves a folder that the next start understands.
"""

import errno
import fcntl
import json
import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout

from perl import __version__
from perl.errors import InterruptedRunError, PerlError, RunFolderError
from perl.recipe import Recipe
from perl.recipe.batch_plan import NUMBERS, plan_batch
from perl.recipe.quantisations import quantised_by
from perl.run.facts import parse_run_facts
from perl.run.files import read_regular, write_text

LOCK = ".lock"
STORED_AS = ".in-storage"
"""File of a run folder: what the run is called where ``engine.storage`` keeps it."""
VERL_JOB = "job"
"""Folder of a run that verl trains: the job that it was handed, with its checkpoints and its log."""
_PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate", "datasets")
# Seconds for which a dry run may hold a folder that it looks at.
_A_LOOK = 0.5
# Settings that say where things are or go, or when a run ends, not what is done: a run may go on with others.
_OF_ENGINE = ("name", "address", "restarts", "storage", "processes", "strategy", "threads", "python")
_PLACES = (
    *("alarms", "hub", "train.output_dir", "eval.scorer_timeout"),
    *(f"rollout.{key}" for key in ("servers", "server_timeout", "sync_folder", "sync_folder_on_servers")),
    *(f"engine.{key}" for key in _OF_ENGINE),
)
# How a step is cut into micro-batches.
_CUTS = ("prompts_per_step", "per_device_train_batch_size", "gradient_accumulation_steps")


@dataclass
class Run:
    """A run folder and the facts in its ``run.json``.

    Attributes:
        path: The folder.
        facts: What ``run.json`` says; see :meth:`record`.
    """

    path: Path
    facts: dict[str, Any] = field(default_factory=dict)
    _started: float = field(default_factory=time.monotonic, repr=False)
    _seconds_before: float = field(default=0.0, repr=False)
    _follows: bool = field(default=False, repr=False)

    @classmethod
    def read(cls, path: str | Path) -> "Run":
        """The run in a folder.

        Raises:
            RunFolderError: There is none.
        """
        path = Path(path)
        try:
            facts = parse_run_facts(read_regular(path / "run.json"))
        except FileNotFoundError:
            what = "holds no run: it has no run.json" if path.is_dir() else "no such folder"
            raise RunFolderError(what, str(path)) from None
        except (OSError, ValueError) as error:
            raise RunFolderError(f"holds no run: run.json: {error}", str(path)) from None
        return cls(path, facts, _seconds_before=float(facts.get("seconds", 0.0)))

    @property
    def status(self) -> str:
        """``running``, ``done``, ``failed`` or ``interrupted``."""
        return str(self.facts.get("status", "new"))

    @property
    def adapter(self) -> Path:
        """The trained adapter and its card; of a run without an adapter, the model."""
        return self.path / ("model" if self.facts.get("method") == "full" else "adapter")

    @property
    def critic(self) -> Path:
        """PPO's critic, of a run that trained one; never a part of the adapter."""
        return self.path / "critic"

    @property
    def card(self) -> Path:
        """The adapter's model card."""
        return self.adapter / "README.md"

    @property
    def checkpoints(self) -> Path:
        """Training states, one folder a checkpoint."""
        return self.path / "checkpoints"

    @property
    def plots(self) -> Path:
        """Learning curves as PNG."""
        return self.path / "plots"

    @property
    def metrics(self) -> Path:
        """One JSON object a logged step."""
        return self.path / "metrics.jsonl"

    @property
    def samples(self) -> Path:
        """One JSON object a completion: a group of each logged step."""
        return self.path / "samples.jsonl"

    @property
    def alarms(self) -> Path:
        """One JSON object an alarm: step, code, name, value, limit, line, whether it stopped the run."""
        return self.path / "alarms.jsonl"

    def elapsed(self) -> float:
        """Wall seconds spent on this run, earlier starts included."""
        return round(self._seconds_before + time.monotonic() - self._started, 3)

    def record(self, **facts: Any) -> None:  # noqa: ANN401 (JSON values)
        """Adds facts and writes ``run.json``, with the time spent so far; one that is followed is not written."""
        self.facts.update(facts)
        if self._follows:
            return
        if self.status != "done":
            self.facts |= {"seconds": self.elapsed(), "updated": _now()}
        write_text(self.path / "run.json", json.dumps(self.facts, indent=2) + "\n")


def unwritable(path: Path, reason: str) -> RunFolderError:
    """The error of a folder in which nothing can be written."""
    return RunFolderError(f"cannot be written: {reason}", str(path), "choose another with --output")


def in_use(path: Path) -> RunFolderError:
    """The error of a folder that another process holds."""
    return RunFolderError("another process is training here", str(path), "choose another with --output")


@contextmanager
def open_run(recipe: Recipe) -> Iterator[Run]:
    """The recipe's run folder, locked; new, or the one to resume.

    While the block runs the status is ``running``; leaving it normally keeps what was recorded, an exception makes it
    ``interrupted`` or ``failed``.

    Raises:
        RunFolderError: The folder cannot be written, is in use, or holds something else.
    """
    path = recipe.output_dir
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise unwritable(path, error.strerror or str(error)) from None
    with held(path, in_use(path)):
        run = run_of(path, recipe)
        versions = installed_versions(quantization=recipe.model.quantization)
        if run is None:
            write_text(path / "recipe.yaml", recipe.to_yaml())
            run, batch = Run(path), recipe.batch
            started_with = {"processes": batch.world_size, "prompts_per_step": batch.prompts_per_step}
            begun = {"started_with": started_with, "created": _now(), "git_commit": git_commit()}
            run.record(status="running", steps=0, **begun, versions=versions)
        elif run.status != "done":
            run.record(status="running", versions=versions)
        with _kept_honest(run):
            yield run


@contextmanager
def held(path: Path, refusal: RunFolderError) -> Iterator[None]:
    """Holds a folder for this process, made where it is absent; where another process has it, the refusal is raised."""
    path.mkdir(parents=True, exist_ok=True)
    try:
        taken = FileLock(path / LOCK, timeout=_A_LOOK).acquire()
    except Timeout:
        raise refusal from None
    with taken:
        yield


def name_in_storage(folder: Path) -> str:
    """What a run is called in storage, where others may have runs of the same name; made where it has no name yet."""
    remembered = folder / STORED_AS
    if not remembered.is_file():
        write_text(remembered, f"{folder.resolve().name}-{secrets.token_hex(4)}\n")
    return remembered.read_text(encoding="utf-8").strip()


def check_folder(recipe: Recipe) -> None:
    """Refuses what :func:`open_run` would refuse, in the same words, without writing or making anything.

    Raises:
        RunFolderError: The folder cannot be written, is in use, or holds something else.
    """
    path = recipe.output_dir
    reason = _why_unwritable(path)
    if reason is not None:
        raise unwritable(path, os.strerror(reason))
    if not path.exists():
        return
    if is_held(path / LOCK):
        raise in_use(path)
    run_of(path, recipe)


def _why_unwritable(path: Path) -> int | None:
    """The number of the error that making the folder, or a file in it, would end with."""
    try:
        if path.exists() and not path.is_dir():
            return errno.EEXIST
        there = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    except OSError as error:  # a folder on the way may not be looked into, or has too long a name
        return error.errno
    if not there.is_dir():
        return errno.ENOTDIR
    return None if os.access(there, os.W_OK | os.X_OK) else errno.EACCES


def is_held(lock: Path) -> bool:
    """Whether a process holds a lock: a shared one, asked for and given back at once, is the only way to know."""
    try:
        with lock.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # there is none, or a disk without locks
        return False
    return False


def follow_run(recipe: Recipe) -> Run:
    """The run folder as the other processes of a distributed run see it: they read, the first one writes."""
    return Run(recipe.output_dir, _follows=True)


def installed_versions(further: Sequence[str] = (), *, quantization: str | None = None) -> dict[str, str]:
    """Versions of the packages that a result depends on; of this one also where it is only on the path.

    Args:
        further: Packages that are named only where they are installed.
        quantization: What the base was quantised to as it was loaded; None: it was not.
    """
    versions = {"perl-rl": __version__, **dict.fromkeys(_PACKAGES, "not installed")}
    for package in (*_PACKAGES, *further, *([quantised_by(quantization)] if quantization is not None else [])):
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions


def git_commit() -> str | None:
    """The commit of the folder the run was started in, with ``-dirty`` if it was changed; None outside git."""
    git = shutil.which("git")
    if git is None:
        return None
    command = [git, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    described = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 (a fixed command)
    return described.stdout.strip() or None


def run_of(path: Path, recipe: Recipe) -> Run | None:
    """The run of this recipe that a folder holds; None where one begins: in a new folder, or after one without work.

    Nothing is written.

    Raises:
        RunFolderError: The folder holds something else, or a run of another recipe.
    """
    if not (path / "recipe.yaml").exists():
        strangers = sorted(p.name for p in path.iterdir() if not p.name.startswith("."))
        if strangers:
            raise RunFolderError(
                f"is not empty and holds no run: {', '.join(strangers[:3])}", str(path), "choose another with --output"
            )
        return None
    try:
        saved = yaml.safe_load((path / "recipe.yaml").read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise RunFolderError(f"its recipe.yaml cannot be read: {error}", str(path)) from None
    run = Run.read(path) if (path / "run.json").exists() else Run(path)
    different = _differences_of_runs(saved, recipe, run)
    if not different:
        return run
    work = (run.adapter, *run.checkpoints.glob("*"), *(path / VERL_JOB / "checkpoints").glob("*"))
    if not any(one.exists() for one in work) and not (run.metrics.is_file() and run.metrics.stat().st_size):
        return None  # it got as far as no training step, and its corrected recipe may replace it
    hint = _hint_at_longer(saved, recipe, run) if len(different) == 1 else None
    what = f"holds a run of another recipe: {'; '.join(different[:3])}"
    raise RunFolderError(what, str(path), hint or "choose another with --output")


def _hint_at_longer(saved: Mapping[str, Any], recipe: Recipe, run: Run) -> str | None:
    """How a run is trained for longer, if that is all that a recipe asks for: its steps are its schedule."""
    lengths = [(saved["train"].get(name), recipe.train.get(name)) for name in ("max_steps", "num_train_epochs")]
    known = [pair for pair in lengths if all(isinstance(number, int | float) for number in pair)]
    if not any(there < here for there, here in known):
        return None
    if run.status != "done":
        return "its steps are its schedule: finish it as it is, or choose another with --output"
    setting = f"model.name={run.adapter}"
    if run.facts.get("method") != "full":  # an adapter brings its settings with it
        setting = f"peft.adapter={run.path}"
    return f"its steps are its schedule; to train it further: `perl train RECIPE {setting} --output ANOTHER`"


def _differences_of_runs(saved: Mapping[str, Any], recipe: Recipe, run: Run) -> list[str]:
    """Settings of a run that differ from a recipe's.

    Another number of processes than the run was started with cuts the same step into other micro-batches. Then the
    numbers that say how are not compared, but what they come to: prompts a step.
    """
    engine, here, found = saved.get("engine"), recipe.engine.name, []
    there = engine.get("name") if isinstance(engine, Mapping) else None
    if there != here and "verl" in (there, here):  # neither goes on from the other's checkpoints
        found.append(f"engine.name is {there or 'local'} there, {here} here")
    train, known = saved.get("train"), run.facts.get("started_with", {})
    if known.get("processes") == recipe.batch.world_size or not isinstance(train, Mapping):
        return found + differences(saved, recipe.as_dict())
    then = known.get("prompts_per_step")
    if not then:
        with suppress(PerlError, TypeError, ValueError):  # it was changed by hand
            numbers = {name: train.get(name) for name in NUMBERS}
            then = plan_batch(**numbers, world_size=int(known.get("processes"))).prompts_per_step
    uncut = {"train": {name: value for name, value in recipe.train.items() if name not in _CUTS}}
    found += differences(
        {**saved, "train": {name: value for name, value in train.items() if name not in _CUTS}},
        {**recipe.as_dict(), **uncut},
    )
    if then not in (None, recipe.batch.prompts_per_step):
        found.append(f"train.prompts_per_step comes to {then} there, {recipe.batch.prompts_per_step} here")
    return found


@contextmanager
def _kept_honest(run: Run) -> Iterator[None]:
    """Records how the block ended."""
    done_before = run.status == "done"
    try:
        yield
    except (KeyboardInterrupt, InterruptedRunError):
        with suppress(OSError):  # on a full disk what ended the block is told, and the next start goes on all the same
            run.record(status="interrupted")
        raise
    except BaseException as error:
        with suppress(OSError):
            run.record(status="failed", error=f"{type(error).__name__}: {error}")
        raise
    if not done_before:
        run.facts.pop("error", None)
        run.facts["seconds"] = run.elapsed()
        run.record(status="done")


def differences(saved: Mapping[str, Any], wanted: Mapping[str, Any], path: str = "") -> list[str]:
    """Settings that differ, as ``train.learning_rate is 0.001 there, 0.002 here``; where things lie does not count."""
    found = []
    for key in dict.fromkeys([*saved, *wanted]):
        here = f"{path}{key}"
        there, now = saved.get(key), wanted.get(key)
        if here in _PLACES or there == now:
            continue
        if isinstance(there, Mapping) and isinstance(now, Mapping):
            found += differences(there, now, f"{here}.")
        else:
            found.append(f"{here} is {there} there, {now} here")
    return found


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
