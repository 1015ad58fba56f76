"""The folder of a job for verl: all that it needs but the model, verl and this package.

Handover -> recipe.yaml, train.parquet, eval.parquet, rewards.py, overrides.txt, run.sh, job.json, README.txt
"""

import json
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from perl.errors import RunFolderError
from perl.launch.verl.adapter import ranks, write_plain
from perl.launch.verl.handover import Handover
from perl.launch.verl.job_files import (
    ADAPTER,
    BASE,
    CHECKPOINTS,
    EARLIER,
    EVAL,
    FORMAT,
    FURTHER,
    JOB,
    LOG,
    OVERRIDES,
    README,
    RECIPE,
    REWARDS,
    RUN,
    TRAIN,
    VERL_VERSION,
)
from perl.launch.verl.overrides import Overrides
from perl.launch.verl.reward_files import FOLDER_OF_FILES, reward_files
from perl.launch.verl.rows import write_rows
from perl.run.files import new_folder, sha256_of
from perl.run.folder import installed_versions
from perl.sandbox import is_sandbox, model_folder

_REWARDS_PY = '''\
"""The rewards of this job, as verl asks for them. Made by perl export-verl; perl must be installed beside verl."""

import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER / "reward_files"))

from perl.rewards.one_by_one import scorer  # noqa: E402

_score = scorer(FOLDER)


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):
    """Weighted sum of the recipe's rewards, and each of them."""
    return _score(solution_str, ground_truth, extra_info or {})
'''

_RUN_SH = """\
#!/usr/bin/env bash
# Trains this job with verl {version}. Run it where verl and perl are installed; more arguments are further overrides.
set -euo pipefail
folder="$(cd "$(dirname "${{BASH_SOURCE[0]}}")" && pwd)"
cd "$folder"
python="${{PYTHON:-python}}"

# What would go wrong later goes wrong now, before a GPU is taken.
"$python" -m perl.launch.verl.check_job "$folder" "$@"

# verl begins its log anew each time: what an earlier start wrote is kept in front of it.
if [ -s {log} ]; then cat {log} >> {earlier}; fi
export VERL_FILE_LOGGER_PATH="$folder/{log}"

# What is told beside the job's overrides is kept: perl import-verl states it.
for further in "$@"; do printf '%s\n' "$further" >> {further}; done

# Bash 5.2 would put what was found in the place of an & of the folder's path.
shopt -u patsub_replacement 2> /dev/null || true
mapfile -t overrides < {overrides}
exec "$python" -m verl.trainer.main_ppo "${{overrides[@]//@FOLDER@/$folder}}" "$@"
"""


def write_job(job: Handover, made: Overrides, settings: str, folder: Path) -> Path:
    """Writes a job's folder, whole or not at all.

    Args:
        job: The recipe with its data.
        made: What verl is told.
        settings: Text of ``rewards.json``.
        folder: To make.

    Raises:
        RunFolderError: It exists, or cannot be written.
    """
    check_free(folder)
    try:
        with new_folder(folder) as staged:
            _write(job, made, settings, staged)
    except OSError as error:
        raise RunFolderError(f"cannot be written: {error.strerror or error}", str(folder)) from error
    return folder


def check_free(folder: Path) -> None:
    """Refuses a folder that exists.

    Raises:
        RunFolderError: It does.
    """
    if folder.exists():
        raise RunFolderError("exists already", str(folder), "another -o DIR: a job is never written over another")


def _write(job: Handover, made: Overrides, settings: str, folder: Path) -> None:
    name = job.recipe.data.train.name
    write_rows(job.train, folder / TRAIN, name, "train")
    heldout = job.heldout if job.heldout is not None else job.train.select(range(1))
    write_rows(heldout, folder / EVAL, job.recipe.data.eval.name if job.recipe.data.eval else name, "eval")
    texts = {
        RECIPE: job.recipe.to_yaml(),
        REWARDS: _REWARDS_PY,
        "rewards.json": settings,
        OVERRIDES: "\n".join(made.lines) + "\n",
        RUN: _RUN_SH.format(version=VERL_VERSION, log=LOG, earlier=EARLIER, overrides=OVERRIDES, further=FURTHER),
        README: readme(job, made),
    }
    for file, text in texts.items():
        (folder / file).write_text(text, encoding="utf-8")
    (folder / RUN).chmod(0o755)
    for path, source in reward_files(job.recipe.rewards).items():
        place = folder / FOLDER_OF_FILES / path
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, place)
    if is_sandbox(job.recipe.model.name):
        shutil.copytree(model_folder(job.recipe.model.name), folder / BASE)
    write_plain(job, folder / ADAPTER)
    (folder / JOB).write_text(json.dumps(job_facts(job, _sums(folder)), indent=2) + "\n", encoding="utf-8")


def _sums(folder: Path) -> dict[str, str]:
    """SHA-256 of each file of a folder, by its path."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): sha256_of(path) for path in files}


def job_facts(job: Handover, files: Mapping[str, str]) -> dict[str, Any]:
    """What ``job.json`` says: what is trained, on what, by whom, and where the way back finds it.

    Args:
        job: The recipe with its data.
        files: Name -> SHA-256 of each file of the job.
    """
    rank, verl_alpha = ranks(job.adapter)
    config: Any = job.adapter
    targets = config.target_modules
    recipe = job.recipe
    return {
        "format": FORMAT,
        "perl_version": _version(),
        "verl_version": VERL_VERSION,
        "name": recipe.name,
        "base": recipe.model.name,
        "revision": recipe.model.revision,
        "base_fingerprint": job.fingerprint,
        "base_dtype": "float32",
        "method": "rslora" if config.use_rslora else "lora",
        "rank": rank,
        "alpha": config.lora_alpha,
        "verl_alpha": verl_alpha,
        "use_rslora": bool(config.use_rslora),
        "target_modules": targets if isinstance(targets, str) else sorted(targets),
        "continued": recipe.peft.adapter,
        "strategy": recipe.engine.strategy,
        "rollout": job.rollout,
        "algorithm": recipe.algorithm,
        "seed": job.arguments.seed,
        "steps": job.steps,
        "steps_per_batch": job.steps_per_batch,
        "checkpoints": CHECKPOINTS,
        "log": LOG,
        "earlier_log": EARLIER,
        "files": dict(files),
    }


def _version() -> str:
    """Of this package."""
    return installed_versions()["perl-rl"]


def submit_line(folder: Path) -> str:
    """How the job is handed to a Ray cluster, all of whose machines see the folder by the same path."""
    return f"ray job submit --address http://HEAD:8265 -- bash {shlex.quote(f'{folder}/{RUN}')}"


def readme(job: Handover, made: Overrides) -> str:
    """What a person reads first: how it is started, what differs, what nothing reads there."""
    engine = job.recipe.engine
    lines = [
        f"{job.recipe.name}: a job for verl {VERL_VERSION}, made by perl {_version()}",
        "",
        f"{engine.nodes or 1} x {engine.gpus or 1} GPUs, {engine.strategy}, rollouts by {job.rollout}.",
        "",
        "On one machine, where verl and perl are installed:  bash run.sh",
        "On a Ray cluster whose machines all see this folder:",
        "  ray job submit --address http://HEAD:8265 -- bash THIS_FOLDER/run.sh",
        "Only what could go wrong, without a GPU:  python -m perl.launch.verl.check_job .",
        "",
        f"Checkpoints are in {CHECKPOINTS}/, the log in {LOG} ({EARLIER}: of earlier starts).",
        "",
        "What is not as in perl train:",
        *(f"- {note}" for note in made.notes),
    ]
    return "\n".join(lines) + "\n"
