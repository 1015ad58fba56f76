"""What a run needs and takes, for a notebook: ``perl.plan``.

recipe -> forecast -> text, tables in HTML
"""

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perl.recipe import Recipe
from perl.run.tables import html_table
from perl.training.forecast import Forecast, answer
from perl.training.forecast_text import forecast_lines, forecast_tables, forecast_values, run_lines
from perl.training.prepare import read_recipe


@dataclass(frozen=True)
class ShownPlan:
    """What a run costs; ``str()`` is what ``perl plan`` prints, and a notebook shows a table.

    Attributes:
        forecast: Memory, FLOPs and seconds under each strategy.
    """

    forecast: Forecast

    @property
    def values(self) -> dict[str, Any]:
        """As plain values: bytes, FLOPs, seconds; as ``perl plan --json`` prints them."""
        return forecast_values(self.forecast)

    def __str__(self) -> str:
        """What ``perl plan`` prints."""
        return "\n".join(forecast_lines(self.forecast))

    def __repr__(self) -> str:
        """The text, as a console shows what was returned."""
        return str(self)

    def _repr_html_(self) -> str:
        """What is planned as text, and a table for memory and one for a step."""
        lines = html.escape("\n".join(run_lines(self.forecast)))
        tables = "".join(map(html_table, forecast_tables(self.forecast)))
        return f'<pre style="white-space: pre-wrap">{lines}</pre>{tables}'


def plan(
    recipe: str | Path | Mapping[str, Any] | Recipe,
    overrides: Sequence[str] = (),
    *,
    gpu: str | None = None,
    completion_tokens: int | None = None,
    run: str | Path | None = None,
    measure: bool = False,
    per_node: int | None = None,
) -> ShownPlan:
    """What a run costs in memory, FLOPs and time, before it is paid for; no weights are loaded.

    Args:
        recipe: A recipe file, the name of a packaged one, a mapping, or a :class:`perl.Recipe`.
        overrides: ``section.key=value``, as ``engine.processes=8``.
        gpu: What each process has: T4, L4, A10, RTX 4090, A100, H100, H200, gigabytes as 24, or CPU; None: what is
            here.
        completion_tokens: Of a completion on average; None: half of the most.
        run: Folder of an earlier run, whose completions' lengths are taken.
        measure: Run a few passes here, and plan with what they reach.
        per_node: Processes of a node; None: up to 8, on a CPU all.

    Raises:
        PerlError: The recipe, or what is asked of it, is impossible.

    Example:
        ``perl.plan("quickstart", ["train.num_generations=16"], gpu="A100")``
    """
    folder = None if run is None else str(run)
    read = read_recipe(recipe, overrides)
    found = answer(read, gpu=gpu, completion=completion_tokens, run=folder, measured=measure, per_node=per_node)
    return ShownPlan(found)
