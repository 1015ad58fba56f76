"""The folder of a job that was sent to verl, as it is found again.

JOB -> FoundJob -> the folder of a step's policy

What was sent must still be there as it was: each file that ``job.json`` names has the hash that it names, but for those
that may be changed.
"""

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from perl.errors import Mistake, RunFolderError, raise_all
from perl.launch.verl.job_files import ADAPTER, CHECKPOINTS, FORMAT, FREE, FURTHER, JOB, LOG, RUN
from perl.launch.verl.shards import inside
from perl.policy.saved.adapter import CONFIG, WEIGHTS
from perl.recipe import Recipe
from perl.run.facts import RECIPE
from perl.run.files import parse_mapping, read_regular, sha256_of

_LATEST = "latest_checkpointed_iteration.txt"
_STEP = re.compile(r"global_step_(\d{1,9})")
_ACTOR = "actor"
_AGAIN = "perl export-verl writes a new job; what verl trained of the old one belongs to the old files"
_MOST_SHOWN = 8


class SentJob(BaseModel):
    """What ``job.json`` says.

    Attributes:
        format: Of this layout.
        perl_version: Version of perl-rl that wrote it.
        verl_version: Version of verl that it was written for.
        base: Public name of the base.
        base_fingerprint: SHA-256 of its weights; None: it was not known where the job was made.
        base_dtype: Type in which that was taken; None: any.
        method: As in ``peft.method``.
        rank: Of the LoRA that verl trains.
        alpha: Ours; rsLoRA's scale is alpha / sqrt(rank).
        verl_alpha: As verl has it, whose scale is alpha / rank; None: the adapter that it begins from says.
        strategy: ``fsdp``, ``fsdp2`` or ``megatron``.
        rollout: What writes the rollouts.
        steps_per_batch: Optimizer steps of one of verl's steps, which are batches of rollouts.
        checkpoints: Folder of verl's checkpoints, in the job's.
        log: File of verl's metrics, in the job's folder.
        earlier_log: File with the metrics of earlier starts.
        files: Name of a file in the job's folder -> SHA-256.
    """

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    format: Annotated[int, Field(ge=FORMAT, le=FORMAT)]
    perl_version: str = ""
    verl_version: Annotated[str, Field(pattern=r"^[\w.+-]{1,40}$")]
    base: str
    base_fingerprint: str | None = None
    base_dtype: str | None = None
    method: str
    rank: Annotated[int, Field(ge=1)]
    alpha: float | None = None
    verl_alpha: Annotated[float, Field(allow_inf_nan=False)] | None = None
    strategy: Annotated[str, Field(pattern=r"^(fsdp|fsdp2|megatron)$")]
    rollout: str | None = None
    steps_per_batch: Annotated[int, Field(ge=1)] = 1
    checkpoints: str = CHECKPOINTS
    log: str = LOG
    earlier_log: str | None = None
    files: Mapping[str, str]


@dataclass(frozen=True)
class FoundJob:
    """A job's folder, unchanged since it was sent.

    Attributes:
        path: The folder.
        sent: What was sent.
        recipe: The recipe that it was made of.
        sha256: Of ``job.json``.
    """

    path: Path
    sent: SentJob
    recipe: Recipe
    sha256: str

    @property
    def checkpoints(self) -> Path:
        """The folder of verl's checkpoints."""
        return inside(self.path / self.sent.checkpoints, self.path)

    @property
    def logs(self) -> list[Path]:
        """The files of verl's metrics, in order; verl begins a new one at each start."""
        names = [name for name in (self.sent.earlier_log, self.sent.log) if name is not None]
        return [inside(self.path / name, self.path) for name in names]

    @property
    def begins_from(self) -> str | None:
        """The adapter that verl began from, as the job holds it; None: a new one."""
        if self.recipe.peft.adapter is None:
            return None
        held = inside(self.path / ADAPTER, self.path)
        return str(held) if held.is_dir() else self.recipe.peft.adapter

    @property
    def further(self) -> list[str]:
        """Overrides that were given to run.sh beside the job's, of all of its starts, each once.

        Raises:
            RunFolderError: They cannot be read.
        """
        file = inside(self.path / FURTHER, self.path)
        try:
            lines = read_regular(file).decode("utf-8", errors="replace").splitlines()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise RunFolderError(f"cannot be read: {error}", str(file)) from None
        return list(dict.fromkeys(line.strip() for line in lines if line.strip()))

    @property
    def start_changed(self) -> bool:
        """Whether run.sh, which may be changed, is another than was exported."""
        file, sent = inside(self.path / RUN, self.path), self.sent.files.get(RUN)
        return sent is not None and not (file.is_file() and sha256_of(file) == sent)


def find_job(path: str | Path) -> FoundJob:
    """Reads a job's folder.

    Raises:
        RunFolderError: It is absent, malformed, or a file is not as it was sent.
        RecipeError: Its recipe cannot be read.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise RunFolderError("no such folder", str(path))
    file = inside(folder / JOB, folder)
    try:
        sent = SentJob.model_validate(parse_mapping(read_regular(file)))
    except FileNotFoundError:
        raise RunFolderError(
            f"holds no job for verl: it has no {JOB}", str(path), "perl export-verl makes one"
        ) from None
    except ValidationError as error:
        raise RunFolderError(_explained(error.errors()[0]), str(file)) from None
    except (OSError, ValueError) as error:
        raise RunFolderError(f"cannot be read: {error}", str(file)) from None
    _check_files(folder, sent)
    return FoundJob(folder, sent, Recipe.of_run(folder / RECIPE), sha256_of(file))


def find_step(job: FoundJob, step: int | None) -> tuple[int, Path]:
    """A step's number and the folder of its policy.

    Args:
        job: The job.
        step: Which; None: the one that verl wrote last.

    Raises:
        RunFolderError: There is no such checkpoint; names those that are there.
    """
    there = {int(match[1]): path for path in job.checkpoints.glob("*") if (match := _STEP.fullmatch(path.name))}
    steps = sorted(number for number, path in there.items() if (path / _ACTOR).is_dir())
    if not steps:
        raise RunFolderError(
            "verl has written no checkpoint", str(job.checkpoints), "start the job, or wait for its first"
        )
    wanted = step if step is not None else _latest(job, steps)
    if wanted not in steps:
        shown = ", ".join(map(str, steps[-_MOST_SHOWN:]))
        more = f"the last of {len(steps)}: " if len(steps) > _MOST_SHOWN else ""
        raise RunFolderError(f"has no checkpoint of step {wanted}", str(job.checkpoints), f"there are {more}{shown}")
    return wanted, inside(there[wanted] / _ACTOR, job.path)


def newest_step(job: FoundJob) -> int:
    """The number of the newest complete checkpoint, of verl's steps; 0: there is none."""
    with suppress(RunFolderError):
        return find_step(job, None)[0]
    return 0


def _latest(job: FoundJob, steps: list[int]) -> int:
    """The step that verl calls the latest complete one; what it does not say when it saves in the background."""
    file = inside(job.checkpoints / _LATEST, job.path)
    if not file.is_file():
        return steps[-1]
    said = read_regular(file)[:40].decode("utf-8", errors="replace").strip()
    if not said.isdecimal():
        raise RunFolderError(f"names no step: {said!r}", str(file), "--step names one")
    return int(said)


def _check_files(folder: Path, sent: SentJob) -> None:
    """What was sent is as it was: all files that are not, a line each."""
    if RECIPE not in sent.files:
        raise RunFolderError(f"files: {RECIPE} is not among them", str(folder / JOB), _AGAIN)
    found = []
    begun = [f"{ADAPTER}/{name}" for name in (CONFIG, WEIGHTS)]
    for name in begun:
        if (folder / name).is_file() and name not in sent.files:
            found.append(Mistake(f"was not sent: {JOB} does not name it", str(folder / name), _AGAIN))
    for name, expected in sent.files.items():
        if name in FREE:
            continue
        file = inside(folder / name, folder)
        if not file.is_file():
            found.append(Mistake("was sent and is absent", str(file), _AGAIN))
        elif (now := sha256_of(file)) != expected:
            what = f"was changed since it was sent: SHA-256 {now[:12]} now, {expected[:12]} then"
            found.append(Mistake(what, str(file), _AGAIN))
    raise_all(RunFolderError, found)


def _explained(error: Any) -> str:  # noqa: ANN401 (pydantic's)
    place = ".".join(str(part)[:60] for part in error["loc"])
    if place == "format":
        return f"is of another format than {FORMAT}: another version of perl-rl wrote it"
    return f"{place}: {error['msg']}"
