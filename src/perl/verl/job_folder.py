"""The folder of a job: what its files are called, and the job as it is found again.

JOB -> Job, unchanged since it was written -> its overrides, the folder of a step's policy

Read beside verl too, where neither torch's newest version nor TRL is.
"""

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from perl.errors import Mistake, RunFolderError, raise_all
from perl.recipe import Recipe
from perl.run.files import parse_mapping, read_regular, sha256_of

VERL_VERSION = "0.9.1"
"""The version whose configuration a job is written for."""
FORMAT = 1
"""Of ``job.json``; raised with a change that readers must know of."""
FOLDER = "@FOLDER@"
"""Stands for the job's folder in its overrides; run.sh puts the path in its place."""
JOB, OVERRIDES, RUN, README, RECIPE = "job.json", "overrides.txt", "run.sh", "README.txt", "recipe.yaml"
TRAIN, EVAL, REWARDS, REWARD_FILES = "train.parquet", "eval.parquet", "rewards.py", "reward_files"
BASE, ADAPTER, CHECKPOINTS = "base", "adapter", "checkpoints"
"""A model of the sandbox; the adapter to start from; what verl saves."""
LOG, EARLIER = "verl_metrics.jsonl", "verl_metrics.earlier.jsonl"
"""verl's log, which it begins anew at each start; those of earlier starts of a job."""
_LATEST = "latest_checkpointed_iteration.txt"
_STEP = re.compile(r"global_step_(\d{1,9})")
_ACTOR = "actor"
_AGAIN = "export the recipe again: what verl trains belongs to the files that were exported"
_MOST_SHOWN = 8


class JobFacts(BaseModel):
    """What ``job.json`` says.

    Attributes:
        format: Of this layout.
        perl_version: Version of perl-rl that wrote it.
        verl_version: Version of verl that it was written for.
        base: Public name of the base.
        base_fingerprint: SHA-256 of its weights in float32; None: they were too large to be read.
        strategy: ``fsdp`` or ``fsdp2``.
        rollout: What writes the rollouts.
        steps_per_batch: Optimizer steps of one of verl's steps, which are batches of rollouts.
        files: Name of a file in the job's folder -> SHA-256.
    """

    model_config = ConfigDict(strict=True, frozen=True)

    format: Annotated[int, Field(ge=FORMAT, le=FORMAT)] = FORMAT
    perl_version: str
    verl_version: Annotated[str, Field(pattern=r"^[\w.+-]{1,40}$")] = VERL_VERSION
    base: str
    base_fingerprint: str | None
    strategy: Annotated[str, Field(pattern=r"^fsdp2?$")]
    rollout: str
    steps_per_batch: Annotated[int, Field(ge=1)]
    files: Mapping[str, str]


@dataclass(frozen=True)
class Job:
    """A job's folder, unchanged since it was written.

    Attributes:
        path: The folder.
        facts: What ``job.json`` says.
    """

    path: Path
    facts: JobFacts

    @property
    def recipe(self) -> Recipe:
        """The recipe that it was made of."""
        return Recipe.of_run(self.path / RECIPE)

    @property
    def overrides(self) -> list[str]:
        """What verl is told, with the folder's path in its places."""
        lines = (self.path / OVERRIDES).read_text(encoding="utf-8").splitlines()
        return [line.replace(FOLDER, str(self.path)) for line in lines]

    @property
    def newest_step(self) -> int:
        """The number of the newest complete checkpoint, of verl's steps; 0: there is none."""
        with suppress(RunFolderError):
            return self.find_step(None)[0]
        return 0

    def find_step(self, step: int | None) -> tuple[int, Path]:
        """A step's number and the folder of its policy.

        Args:
            step: Which; None: the one that verl calls its latest complete one.

        Raises:
            RunFolderError: There is no such checkpoint; names those that are there.
        """
        folder = self.path / CHECKPOINTS
        there = {int(found[1]): path for path in folder.glob("*") if (found := _STEP.fullmatch(path.name))}
        steps = sorted(number for number, path in there.items() if (path / _ACTOR).is_dir())
        if not steps:
            hint = "start the job, or wait for its first"
            raise RunFolderError("verl has written no checkpoint", str(folder), hint)
        if step is None:
            latest = folder / _LATEST  # absent where verl saves in the background
            said = latest.read_text(encoding="utf-8").strip() if latest.is_file() else str(steps[-1])
            step = int(said) if said.isdecimal() else 0
        if step not in steps:
            shown = f"there are {', '.join(map(str, steps[-_MOST_SHOWN:]))}"
            raise RunFolderError(f"has no checkpoint of step {step}", str(folder), shown)
        return step, there[step] / _ACTOR


def find_job(path: str | Path) -> Job:
    """Reads a job's folder.

    Raises:
        RunFolderError: It is absent, malformed, or a file is not as it was written; all that are not.
    """
    folder = Path(path).expanduser().absolute()
    if not folder.is_dir():
        raise RunFolderError("no such folder", str(path))
    file = folder / JOB
    try:
        facts = JobFacts.model_validate(parse_mapping(read_regular(file)))
    except FileNotFoundError:
        what = f"holds no job for verl: it has no {JOB}"
        raise RunFolderError(what, str(path), "perl export-verl makes one") from None
    except ValidationError as error:
        first = error.errors()[0]
        what = f"{'.'.join(map(str, first['loc']))}: {first['msg']}; did another version of perl-rl write it?"
        raise RunFolderError(what, str(file), _AGAIN) from None
    except (OSError, ValueError) as error:
        raise RunFolderError(f"cannot be read: {error}", str(file)) from None
    found = []
    for name, digest in facts.files.items():
        if not (folder / name).is_file():
            found.append(Mistake("was exported and is absent", str(folder / name), _AGAIN))
        elif sha256_of(folder / name) != digest:
            found.append(Mistake("was changed since it was exported", str(folder / name), _AGAIN))
    raise_all(RunFolderError, found)
    return Job(folder, facts)
