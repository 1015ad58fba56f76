"""Which run of a tracker belongs to a training, kept beside its checkpoints.

arguments -> Place; Place -> trackers.json: the run's identity, what it was given already

Written by the main process only.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trl import GRPOConfig

from perl.run.files import write_text
from perl.run.warned import warn

FILE = "trackers.json"
_UNNAMED = "huggingface"
"""transformers' name of a project that nobody has named."""


@dataclass(frozen=True)
class Place:
    """Where a training is tracked.

    Attributes:
        folder: That holds ``trackers.json``: the run folder, or a script's ``output_dir``.
        project: Project or experiment; None: a script's that has not named any.
        name: The run's.
        recipe: The resolved recipe's file; None: a script's.
    """

    folder: Path
    project: str | None
    name: str
    recipe: Path | None = None

    @property
    def of_a_recipe(self) -> bool:
        """Whether the folder belongs to one training for good, so that its first step is never another's."""
        return self.recipe is not None


def place_of(args: GRPOConfig) -> Place:
    """Where the training of these arguments is tracked."""
    output, named = Path(args.output_dir), args.project if args.project != _UNNAMED else None
    if not getattr(args, "of_a_recipe", False):
        return Place(output, named, args.run_name or output.resolve().name)
    folder = output.parent  # that of checkpoints lies in the run folder
    return Place(folder, named, args.run_name or folder.resolve().name, folder / "recipe.yaml")


def known(place: Place, tracker: str) -> dict[str, Any]:
    """What is kept of a tracker's run; empty before there is one."""
    facts = _read(place.folder / FILE).get(tracker)
    return dict(facts) if isinstance(facts, dict) else {}


def note(place: Place, tracker: str, **facts: Any) -> None:  # noqa: ANN401 (JSON values)
    """Adds facts of a tracker's run."""
    every = _read(place.folder / FILE)
    _write(place, every | {tracker: {**known(place, tracker), **facts}})


def forget(place: Place, tracker: str) -> None:
    """Makes the next run of a tracker a new one."""
    _write(place, {name: facts for name, facts in _read(place.folder / FILE).items() if name != tracker})


def forget_after(place: Place, tracker: str, step: int) -> None:
    """Drops what a tracker was given after a step: it has dropped it too."""
    tables = {name: [s for s in steps if s <= step] for name, steps in given_tables(place, tracker).items()}
    note(place, tracker, tables=tables, logged=min(step, last_logged(place, tracker)))


def note_table(place: Place, tracker: str, name: str, step: int) -> None:
    """Notes that a tracker was given a table up to a step, if its run is kept at all."""
    if known(place, tracker):
        tables = given_tables(place, tracker)
        note(place, tracker, tables={**tables, name: [*tables.get(name, []), step]})


def given_tables(place: Place, tracker: str) -> dict[str, list[int]]:
    """The last steps of the tables that a tracker was given, by the tables' names."""
    tables = known(place, tracker).get("tables")
    return {str(name): list(steps) for name, steps in tables.items()} if isinstance(tables, dict) else {}


def last_logged(place: Place, tracker: str) -> int:
    """The last step that a tracker was given."""
    step = known(place, tracker).get("logged", 0)
    return step if isinstance(step, int) else 0


def _read(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        warn("PRL344", "%s: %s; trackers begin new runs", file, error)
        return {}
    return found if isinstance(found, dict) else {}


def _write(place: Place, every: Mapping[str, Any]) -> None:
    place.folder.mkdir(parents=True, exist_ok=True)
    write_text(place.folder / FILE, json.dumps(every, indent=2) + "\n")
