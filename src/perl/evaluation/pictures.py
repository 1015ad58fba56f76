"""An empty picture, and one written into a file, without a screen.

size -> Figure -> .png

Imports matplotlib when a picture is drawn.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from perl.errors import MissingExtraError, missing_extra

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_figure(width: float, height: float, needed_for: str) -> "Figure":
    """A white picture.

    Args:
        width: In inches.
        height: In inches.
        needed_for: What needs matplotlib, for the error.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        problem = missing_extra("matplotlib", "plots", needed_for)
        raise MissingExtraError(problem.message, hint=problem.hint) from None
    return Figure(figsize=(width, height), layout="constrained", facecolor="white")


def save_figure(figure: "Figure", picture: Path, dpi: float | None = None) -> Path:
    """Writes a picture, into a folder that is made for it.

    Args:
        figure: As :func:`new_figure` gave it.
        picture: The file.
        dpi: Dots an inch; None: the library's.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    picture.parent.mkdir(parents=True, exist_ok=True)
    FigureCanvasAgg(figure)  # draws without a screen
    figure.savefig(picture, dpi=dpi or "figure")
    return picture
