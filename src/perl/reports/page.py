"""Runs as one page for a browser, which needs no network and nothing beside it.

run folders -> Report -> HTML

Whatever a run says (prompts, completions, names, its recipe) is in the page as data, which its script writes into text
nodes; the page forbids itself all but its own two scripts. Styles may stand at elements, where plotly puts them;
nothing that they name can be loaded.
"""

import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perl.errors import MissingExtraError, RunFolderError, missing_extra
from perl.reports.page_data import page_data
from perl.reports.run_log import read_runs
from perl.run.files import write_text
from perl.run.tables import html_templates, plain

if TYPE_CHECKING:
    from perl.run.folder import Run

_TEMPLATES = Path(__file__).parent / "templates"
# Of a page in a notebook.
_HEIGHT = "860px"


@dataclass(frozen=True)
class Report:
    """A page about runs; a notebook shows it inline.

    Attributes:
        html: The page.
        data: What it shows, as plain values.
        path: Where it was written; None: nowhere.
    """

    html: str
    data: Mapping[str, Any]
    path: Path | None = None

    def save(self, path: str | PathLike[str]) -> Path:
        """Writes the page.

        Args:
            path: A file in a folder that exists; an older one is replaced.

        Raises:
            OSError: It cannot be written.
        """
        return _written(Path(path), self.html)

    def __str__(self) -> str:
        """A line a run, and where the page is."""
        lines = []
        for run in self.data["runs"]:
            found = [f"; {name} {of}" for name, of in run["outcome"].items() if name == "reward" or "avg@" in name]
            lines.append(f"{run['name']}: {run['state']}{''.join(found)}")
        lines += [f"{run['name']}: {note}" for run in self.data["runs"] for note in run["notes"]]
        size = len(self.html.encode()) / 1e6
        return "\n".join([*lines, f"report   {self.path} ({size:.1f} MB)"] if self.path is not None else lines)

    def __repr__(self) -> str:
        """Not the page itself, which has megabytes."""
        return f"<Report of {', '.join(run['name'] for run in self.data['runs'])}>"

    def _repr_html_(self) -> str:
        """The page in a frame of its own, from which nothing reaches the notebook."""
        page = html.escape(self.html, quote=True)
        style = f"width: 100%; height: {_HEIGHT}; border: 1px solid #ccc"
        return f'<iframe sandbox="allow-scripts" title="report" style="{style}" srcdoc="{page}"></iframe>'


def report(
    runs: "str | PathLike[str] | Run | Sequence[str | PathLike[str] | Run]", output: str | PathLike[str] | None = None
) -> Report:
    """Makes a page of one or several runs, finished or not, or of the output folders of scripts.

    Args:
        runs: Folders with a ``metrics.jsonl``, or runs.
        output: File to write; None: none, as in a notebook.

    Returns:
        The page.

    Raises:
        RunFolderError: A folder holds no run, or no step is logged yet.
        OSError: The file cannot be written.
        MissingExtraError: plotly is not installed.

    Example:
        ``perl.report(["runs/lora", "runs/dora"], "report.html")``
    """
    many: Sequence[Any] = runs if isinstance(runs, Sequence) and not isinstance(runs, str) else [runs]
    if output is not None:
        _check_place(Path(output))
    try:
        from plotly.offline import get_plotlyjs  # draws the charts
    except ImportError:
        missing = missing_extra("plotly", "plots", "a report")
        raise MissingExtraError(missing.message, hint=missing.hint) from None
    data = page_data(read_runs([Path(getattr(run, "path", run)) for run in many]))
    page = page_of(data, str(get_plotlyjs()))
    return Report(page, data, None if output is None else _written(Path(output), page))


def page_of(data: Mapping[str, Any], library: str) -> str:
    """The page that shows data.

    Args:
        data: As of :func:`perl.reports.page_data.page_data`.
        library: The script that draws charts.
    """
    environment = html_templates(_TEMPLATES)
    # JSON that ends no script element and begins no tag, whatever is in it.
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    names = [plain(run["name"]) for run in data["runs"]]
    return environment.get_template("report.html.jinja").render(
        title=f"{names[0]}: report" if len(names) == 1 else f"{len(names)} runs: report",
        data=text.encode("utf-8", "surrogatepass").decode("utf-8", "replace"),
        style=_text("report.css"),
        library=library,
        script=_text("report.js"),
    )


def _text(name: str) -> str:
    return (_TEMPLATES / name).read_text(encoding="utf-8")


def _check_place(path: Path) -> None:
    """Refuses a file that cannot be there, before anything is read."""
    if path.is_dir():
        raise RunFolderError("is a folder", str(path), "name a file, as report.html")
    if not path.parent.is_dir():
        raise RunFolderError("no such folder", str(path.parent), "make it, or name another file with --output")


def _written(path: Path, page: str) -> Path:
    _check_place(path)
    write_text(path, page)
    return path
