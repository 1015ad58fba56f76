"""What the output folder of a script says, which has no ``run.json``.

folder -> facts of perl_run.json; rows of the newest checkpoint

A trainer without callbacks writes no ``metrics.jsonl``; what it logged is in its checkpoints.
"""

import contextlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from perl.errors import PerlError, RunFolderError
from perl.run.facts import CARD_FACTS, RUN_FACTS
from perl.run.strict_json import parse_mapping

_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_STATE = "trainer_state.json"
_LARGEST_STATE = 100_000_000
_FACTS = (
    *("base", "revision", "quantization", "method", "seed", "loss", "ratio_level", "algorithm", "overridden"),
    *("settings", "rewards", "trainable_parameters", "total_parameters", "seconds", "versions"),
)


def is_script(folder: Path) -> bool:
    """Whether a folder is the output folder of a script's trainer."""
    return (folder / CARD_FACTS).is_file() and not (folder / RUN_FACTS).exists()


def script_facts(folder: Path) -> Mapping[str, Any]:
    """The facts in ``perl_run.json``, by the names that ``run.json`` has for them.

    Raises:
        RunFolderError: It cannot be read.
    """
    from perl.hub.card.run_facts import read_run_facts  # with PEFT, which a recipe's run can be watched without

    try:
        known = read_run_facts((folder / CARD_FACTS).read_bytes()).model_dump(mode="json", exclude_none=True)
    except OSError as error:
        raise RunFolderError(f"cannot be read: {error.strerror or error}", str(folder / CARD_FACTS)) from None
    except PerlError as error:
        raise RunFolderError(str(error.mistakes[0]), str(folder)) from None
    facts = {name: known[name] for name in _FACTS if name in known}
    return facts | ({"steps": known["step"]} if "step" in known else {})


def checkpoints_of(folder: Path) -> list[Path]:
    """The checkpoints of a training, those of a recipe's run too, the newest first."""
    found = [*(folder / "checkpoints").glob("checkpoint-*"), *folder.glob("checkpoint-*")]
    numbered = [(int(match[1]), path) for path in found if (match := _CHECKPOINT.fullmatch(path.name))]
    return [path for _, path in sorted(numbered, reverse=True)]


def checkpoint_rows(folder: Path) -> list[dict[str, Any]]:
    """The rows that a script's newest readable checkpoint knows; none without one."""
    for checkpoint in checkpoints_of(folder):
        with contextlib.suppress(OSError, ValueError):
            file = checkpoint / _STATE
            if file.stat().st_size <= _LARGEST_STATE:
                rows = parse_mapping(file.read_bytes(), finite=False).get("log_history")
                return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    return []
