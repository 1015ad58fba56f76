"""Draws the rooms of the package and which of them imports which: ``python docs/draw_rooms.py``.

src/perl/*.py, layers in pyproject.toml -> docs/rooms.svg

The file holds the graph that it shows as JSON, so that a test can tell when the picture is out of date.
"""

import ast
import json
import tomllib
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DOCS = Path(__file__).resolve().parent
CHECKOUT = DOCS.parent
SVG = DOCS / "rooms.svg"
DESCRIPTION = "{http://purl.org/dc/elements/1.1/}description"

# Kind of room -> its colour.
COLOURS = {
    "a run": "#35618f",
    "what is generated and judged": "#b3541e",
    "what is computed": "#7a4a8c",
    "model and adapter": "#2f7d5b",
    "what others see": "#a8324a",
    "shared by all": "#5f6b76",
}
# Room -> its kind, and what it does.
ROOMS = {
    "cli": ("a run", "one module per command: parse, call one function, print"),
    "reports": ("what others see", "run folders to a page and a live view"),
    "callbacks": ("a run", "the public door to trainer callbacks"),
    "doctor": ("a run", "what keeps a run from starting here, and codes explained"),
    "training": ("a run", "recipe to finished run; start here: stages.py"),
    "launch": ("a run", "several processes: started, compared, ended together"),
    "trainer": ("a run", "PeftGRPOTrainer, and all that depends on TRL's internals"),
    "hub": ("what others see", "cards, pushes, zoo entries; the gate for published files"),
    "evaluation": ("what is generated and judged", "policy to score: base and adapter, paired"),
    "verl": ("a run", "a recipe as a job for verl, and back"),
    "rewards": ("what is generated and judged", "completions to verdicts to rewards"),
    "rollouts": ("what is generated and judged", "prompts to completions; adapter to engine"),
    "packing": ("what is computed", "log-probs of packed rows; why a step is fast"),
    "algorithms": ("what is computed", "advantages, losses, importance weights"),
    "data": ("shared by all", "data sets to checked problems to prompts"),
    "policy": ("model and adapter", "base + adapter: load, attach, reference, save"),
    "zoo": ("what others see", "entries of known adapters, ranked"),
    "methods": ("model and adapter", "one row per PEFT method"),
    "sandbox": ("shared by all", "a tiny base and its tasks"),
    "run": ("shared by all", "the run folder, devices, threads"),
    "recipe": ("a run", "YAML to Recipe; all mistakes at once"),
    "types": ("shared by all", "records between stages"),
    "errors": ("shared by all", "the error model"),
}
BOX_WIDTH, BOX_HEIGHT = 2.3, 0.7
STEP = 1.0  # from one box to the next, to the right and down


def draw() -> None:
    """Writes the picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    graph = read_graph()
    rooms = list(graph)
    width, height = len(rooms) * STEP + BOX_WIDTH + 6.2, len(rooms) * STEP + 1.6
    style = {"svg.hashsalt": "rooms", "svg.fonttype": "none", "font.family": "sans-serif"}
    with pyplot.rc_context(style):
        figure, axes = pyplot.subplots(figsize=(width * 0.5, height * 0.5))
        axes.set(xlim=(-0.6, width - 0.6), ylim=(height - 1.4, -0.2))
        axes.set_axis_off()
        for room in rooms:
            _draw_imports(axes, rooms, room, graph[room])
        for position, room in enumerate(rooms):
            _draw_room(axes, position, room)
        _draw_legend(axes, width)
        figure.subplots_adjust(0, 0, 1, 1)
        described = json.dumps(graph)
        figure.savefig(SVG, metadata={"Description": described, "Date": None}, facecolor="white")
        pyplot.close(figure)


def read_graph() -> dict[str, list[str]]:
    """Room -> the rooms that it imports, both in the order of the layers.

    Raises:
        ValueError: ``ROOMS`` and the layers in pyproject.toml differ.
    """
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))
    layers = next(c["layers"] for c in project["tool"]["importlinter"]["contracts"] if c["type"] == "layers")
    if set(layers) != set(ROOMS):
        raise ValueError(f"ROOMS in {Path(__file__).name} and pyproject.toml differ: {set(layers) ^ set(ROOMS)}")
    imported = {room: _imported_by(room) for room in layers}
    return {room: [other for other in layers if other in imported[room]] for room in layers}


def drawn_graph() -> dict[str, list[str]]:
    """The graph that ``docs/rooms.svg`` shows."""
    described = next(ElementTree.parse(SVG).iter(DESCRIPTION))  # noqa: S314 (our own file)
    return json.loads(described.text or "")


def _imported_by(room: str) -> set[str]:
    """The other rooms that a room imports, inside functions and for type checkers too."""
    place = CHECKOUT / "src" / "perl" / room
    files = sorted(place.rglob("*.py")) if place.is_dir() else [place.with_suffix(".py")]
    names = set()
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names |= {f"{node.module}.{alias.name}" for alias in node.names}
    imported = {name.split(".")[1] for name in names if name.startswith("perl.")}
    return (imported & set(ROOMS)) - {room}


def _draw_room(axes: "Axes", position: int, room: str) -> None:
    """A box on the diagonal, with what the room does to its right."""
    from matplotlib.patches import FancyBboxPatch

    kind, purpose = ROOMS[room]
    left, middle = position * STEP, position * STEP + BOX_HEIGHT / 2
    corner = (left, position * STEP)
    rounded = "round,pad=0,rounding_size=0.16"
    axes.add_patch(FancyBboxPatch(corner, BOX_WIDTH, BOX_HEIGHT, boxstyle=rounded, fc=COLOURS[kind], ec="none"))
    label = {"va": "center_baseline", "size": 11}
    axes.text(left + BOX_WIDTH / 2, middle, room, color="white", weight="bold", ha="center", **label)
    axes.text(left + BOX_WIDTH + 0.25, middle, purpose, color="#333333", **label)


def _draw_imports(axes: "Axes", rooms: list[str], room: str, imported: list[str]) -> None:
    """A line down from a room, with a dot and an arrow to the right for each room that it imports."""
    if not imported:
        return
    colour = COLOURS[ROOMS[room][0]]
    position = rooms.index(room)
    across = position * STEP + 0.5
    rows = [rooms.index(other) for other in imported]
    axes.plot([across, across], [position + BOX_HEIGHT, max(rows) + BOX_HEIGHT / 2], color=colour, lw=1.1, alpha=0.55)
    heights = [row * STEP + BOX_HEIGHT / 2 for row in rows]
    rights = [row * STEP for row in rows]
    axes.hlines(heights, across, rights, color="#c9ced3", lw=0.9, zorder=0)
    dots = {"color": colour, "mec": "white", "mew": 0.8}
    axes.plot([across] * len(rows), heights, marker="o", ms=6.5, linestyle="none", **dots)
    axes.plot([right - 0.12 for right in rights], heights, marker=">", ms=5, linestyle="none", color="#8a929a")


def _draw_legend(axes: "Axes", width: float) -> None:
    """What colours, dots and arrows mean, in the empty corner."""
    left = width - 7.4
    for row, (kind, colour) in enumerate(COLOURS.items()):
        height = 0.35 + 0.62 * row
        axes.plot([left], [height], marker="s", ms=10, color=colour)
        axes.text(left + 0.4, height, kind, va="center_baseline", size=10.5, color="#333333")
    note = "Down from a room, right at a dot:\na room that it imports.\nImports go downwards only."
    axes.text(left - 0.2, 0.35 + 0.62 * len(COLOURS), note, va="top", size=10.5, color="#333333", linespacing=1.5)


if __name__ == "__main__":
    draw()
