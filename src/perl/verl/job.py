"""Writes the folder of a job for verl: all that it needs but the model, verl and this package.

Handover, Settings -> recipe.yaml, train.parquet, eval.parquet, rewards.py, overrides.txt, run.sh, job.json, README.txt
"""

import json
import re
import shlex
import shutil
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perl.errors import DataError, Mistake, RecipeError, RunFolderError, raise_all
from perl.policy.saved.adapter import CONFIG, WEIGHTS
from perl.rewards.one_by_one import settings_text
from perl.run.code import code_files
from perl.run.files import new_folder, sha256_of
from perl.run.folder import installed_versions
from perl.sandbox import is_sandbox, model_folder
from perl.verl.job_folder import (
    ADAPTER,
    BASE,
    CHECKPOINTS,
    EARLIER,
    EVAL,
    JOB,
    LOG,
    OVERRIDES,
    README,
    RECIPE,
    REWARD_FILES,
    REWARDS,
    RUN,
    TRAIN,
    VERL_VERSION,
    JobFacts,
)
from perl.verl.settings import Handover, Settings, ranks
from perl.verl.table import CANNOT, cannot_go

if TYPE_CHECKING:
    from datasets import Dataset

_REWARDS_PY = f'''\
"""The rewards of this job, as verl asks for them. Made by perl export-verl; perl must be installed beside verl."""

import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER / "{REWARD_FILES}"))

from perl.rewards.one_by_one import scorer  # noqa: E402

_score = scorer(FOLDER)


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):
    """Weighted sum of the recipe's rewards, and each of them."""
    return _score(solution_str, ground_truth, extra_info or {{}})
'''

_RUN_SH = f"""\
#!/usr/bin/env bash
# Trains this job with verl {VERL_VERSION}. Run it where verl and perl are installed. All that verl is told is in
# {OVERRIDES}, which is made of the recipe: more goes into engine.overrides, and the recipe is exported again.
set -euo pipefail
if [ $# -gt 0 ]; then echo "error: run.sh takes no arguments: set engine.overrides and export again" >&2; exit 2; fi
folder="$(cd "$(dirname "${{BASH_SOURCE[0]}}")" && pwd)"
cd "$folder"
python="${{PYTHON:-python}}"

# What would go wrong later goes wrong now, before a GPU is taken.
"$python" -m perl.verl.check_job "$folder"

# verl begins its log anew each time: what an earlier start wrote is kept in front of it.
if [ -s {LOG} ]; then cat {LOG} >> {EARLIER}; fi
export VERL_FILE_LOGGER_PATH="$folder/{LOG}"

# Bash 5.2 would put what was found in the place of an & of the folder's path.
shopt -u patsub_replacement 2> /dev/null || true
mapfile -t overrides < {OVERRIDES}
exec "$python" -m verl.trainer.main_ppo "${{overrides[@]//@FOLDER@/$folder}}"
"""
# Folders of installed packages, whatever Python, user or system they are of.
_SITES = {"site-packages", "dist-packages"}
# Arguments that no trainer but this package's hands to a reward function.
_ONLY_HERE = ("completion_ids", "trainer_state", "environments")


def write_job(job: Handover, told: Settings, folder: Path, fingerprint: str | None) -> None:
    """Writes a job's folder, whole or not at all.

    Args:
        job: The recipe with its data.
        told: What verl is told.
        folder: To make.
        fingerprint: Of the base; None: it is not known.

    Raises:
        RunFolderError: It exists.
        OSError: It cannot be written.
        DataError: A column holds what is no JSON, so that no reward function could get it.
    """
    check_free(folder)
    recipe, data = job.recipe, job.recipe.data
    with new_folder(folder) as staged:
        write_rows(job.train, staged / TRAIN, data.train.name, "train")
        heldout = job.heldout or job.train.select(range(1))
        write_rows(heldout, staged / EVAL, (data.eval or data.train).name, "eval")
        texts = {
            RECIPE: recipe.to_yaml(),
            REWARDS: _REWARDS_PY,
            "rewards.json": settings_text(recipe.rewards, job.arguments.max_completion_length, job.own_names),
            OVERRIDES: "\n".join(told.lines) + "\n",
            RUN: _RUN_SH,
            README: _readme(job, told),
        }
        for file, text in texts.items():
            (staged / file).write_text(text, encoding="utf-8")
        (staged / RUN).chmod(0o755)
        for path, source in reward_files(recipe.rewards).items():
            place = staged / REWARD_FILES / path
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, place)
        if is_sandbox(recipe.model.name):
            shutil.copytree(model_folder(recipe.model.name), staged / BASE)
        if job.saved is not None:
            # As a plain LoRA without dropout, which is the same adapter.
            (staged / ADAPTER).mkdir()
            rank, alpha = ranks(job.adapter)
            config = json.loads((job.saved.folder / CONFIG).read_text(encoding="utf-8"))
            plain = {"use_rslora": False, "lora_dropout": 0.0, "inference_mode": False}
            config |= {"r": rank, "lora_alpha": alpha, **plain}
            (staged / ADAPTER / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
            shutil.copyfile(job.saved.weights, staged / ADAPTER / WEIGHTS)
        files = sorted(path for path in staged.rglob("*") if path.is_file() and path.name != README)
        facts = JobFacts(
            perl_version=installed_versions()["perl-rl"],
            base=recipe.model.name,
            base_fingerprint=fingerprint,
            strategy=recipe.engine.strategy,
            rollout=recipe.engine.rollout or "vllm",
            steps_per_batch=job.steps_per_batch,
            files={path.relative_to(staged).as_posix(): sha256_of(path) for path in files},
        )
        (staged / JOB).write_text(facts.model_dump_json(indent=2) + "\n", encoding="utf-8")


def check_free(folder: Path) -> None:
    """Refuses a folder that exists.

    Raises:
        RunFolderError: It does.
    """
    if folder.exists():
        raise RunFolderError("exists already", str(folder), "another -o DIR: a job is never written over another")


def write_rows(problems: "Dataset", path: Path, source: str, split: str) -> None:
    """Writes problems as the rows that verl reads.

    Args:
        problems: With ``prompt`` (text or chat messages) and perhaps ``solution``.
        path: The Parquet file.
        source: What the problems are called.
        split: ``train`` or ``eval``.

    Raises:
        DataError: A column holds what is no JSON.
    """
    import pyarrow  # type: ignore[import-untyped]
    import pyarrow.parquet  # type: ignore[import-untyped]

    rows: list[dict[str, Any]] = []
    try:
        for index, row in enumerate(problems):
            # Columns go as JSON, since Parquet needs a common type; beside them whether prompts are text.
            prompt, columns = row["prompt"], json.dumps(dict(row), ensure_ascii=False)
            plain = isinstance(prompt, str)
            said = [{"role": "user", "content": prompt}] if plain else prompt
            row_of_verl = {
                "data_source": source,
                "prompt": [{"role": message["role"], "content": message["content"]} for message in said],
                "ability": "perl",
                "reward_model": {"style": "rule", "ground_truth": row.get("solution") or ""},
                "extra_info": {"index": index, "split": split, "plain": plain, "columns": columns},
            }
            rows.append(row_of_verl)
    except TypeError as error:
        what = f"a column cannot be handed to verl's workers: {error}"
        raise DataError(what, f"data.{split}", "text, numbers, lists and mappings can") from None
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def submit_line(folder: Path) -> str:
    """How the job is handed to a Ray cluster, all of whose machines see the folder by the same path."""
    return f"ray job submit --address http://HEAD:8265 -- bash {shlex.quote(f'{folder}/{RUN}')}"


def _readme(job: Handover, told: Settings) -> str:
    """What a person reads first: how it is started, and what is not as in ``perl train``."""
    engine = job.recipe.engine
    return "\n".join(
        [
            f"{job.recipe.name}: a job for verl {VERL_VERSION}, made by perl-rl",
            f"{engine.nodes or 1} x {engine.gpus or 1} GPUs, {engine.strategy}, rollouts by {engine.rollout or 'vllm'}",
            "",
            "On one machine, where verl and perl are installed:  bash run.sh",
            f"On a Ray cluster whose machines all see this folder:  {submit_line(Path('THIS_FOLDER'))}",
            "Only what could go wrong, without a GPU:  python -m perl.verl.check_job .",
            f"Checkpoints are in {CHECKPOINTS}/, the log in {LOG} ({EARLIER}: of earlier starts).",
            "",
            "What is not as in perl train:",
            *(f"- {note}" for note in told.notes),
            "",
        ]
    )


def check_rewards(needs: Mapping[str, Iterable[str]]) -> None:
    """Refuses rewards that cannot be asked for one completion's text.

    Args:
        needs: Name of a reward -> arguments that it insists on.

    Raises:
        RecipeError: With each of them.
    """
    rows = {name: row for row in CANNOT["rewards"] for name in row["names"]}
    found = [cannot_go(rows[name]["why"], f"rewards.{name}", rows[name]["instead"]) for name in needs if name in rows]
    for name, asked in needs.items():
        missing = [argument for argument in asked if argument in _ONLY_HERE]
        if missing and ":" in name:
            what = f"its reward functions get no {', '.join(missing)}"
            found.append(cannot_go(what, f"rewards.{name}", "give it a default, or score the text"))
    raise_all(RecipeError, found)


def _file_of(module: str) -> Path:
    return Path(getattr(sys.modules.get(module), "__file__", None) or "").resolve()


def _comes_with_packages(module: str) -> bool:
    """Whether a module is part of Python, of this package, or of one that is installed."""
    known = module.partition(".")[0] in {"perl", *sys.stdlib_module_names}
    place = getattr(sys.modules.get(module), "__file__", None) or ""
    return known or bool(_SITES & {*Path(place).parts, *Path(place).resolve().parts})


def reward_files(names: Iterable[str]) -> dict[str, Path]:
    """The files that the modules of custom rewards are, by their place in the job's folder.

    Args:
        names: Of a recipe's rewards, whose modules are imported already.

    Raises:
        RecipeError: A module is neither installed nor a file that can be carried.
    """
    found: dict[str, Path] = {}
    mistakes: list[Mistake] = []
    for name in names:
        module, colon, _ = name.partition(":")
        if not colon or _comes_with_packages(module):
            continue
        if _file_of(module).suffix != ".py":
            what = f"{module} is no file of Python, and is not installed"
            mistakes.append(cannot_go(what, f"rewards.{name}", "put the function into a .py file"))
            continue
        ahead = [module]
        while ahead:
            root, files = code_files(f"{ahead.pop()}:")
            found |= {file.relative_to(root).as_posix(): file for file in files}
            # What is imported from another folder of sys.path.
            texts = "\n".join(files.values())
            named = set(re.findall(r"^\s*(?:import|from)\s+([\w.]+)", texts, re.MULTILINE))
            others = {one for one in named & sys.modules.keys() if not _comes_with_packages(one)}
            ahead += [one for one in others if _file_of(one).suffix == ".py" and _file_of(one) not in found.values()]
    raise_all(RecipeError, mistakes)
    return found
