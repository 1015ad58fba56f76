"""A spectrum as a table for a terminal.

FoundSpectra -> lines
"""

from collections.abc import Callable, Sequence

from perl.policy.spectra.against import Agreement
from perl.policy.spectra.measures import Sides
from perl.policy.spectra.pooled import Pooled, kind_of, layer_of
from perl.reports.spectra_found import By, FoundSpectra
from perl.run.tables import percent, plain, plain_table

_COLUMNS = (
    *("", "modules", "size", "stable rank", "unchanged", "energy out", "in", "chance", "base"),
    *("trend out", "in", "angle out", "in", "shift"),
)
_AGAINST = ("", "modules", "cosine", "directions", "overlap out", "chance", "overlap in", "chance", "nearest", "mean")


def spectrum_lines(report: FoundSpectra, by: By = "kind") -> list[str]:
    """The lines: what it is of, a row for each group and one for all, and the comparison where there is one.

    Args:
        report: What was found.
        by: What a row is of.
    """
    pooled = report.pooled
    share = f"{100 * report.principal:g} %"
    heading = (
        f"{plain(report.adapter)} ({plain(report.method)}) on {plain(report.base)}: {len(report.modules)} modules, "
        f"{sum(one.numbers for one in report.modules):,} weights; energy in the first {share} of W's directions"
    )
    rows = report.rows(by)
    shown = [_COLUMNS, *(_row(row) for row in rows), *([_row(pooled)] if len(rows) > 1 else [])]
    lines = [heading, *plain_table(shown)]
    if report.left_out:
        lines.append(
            f"left out: {', '.join(map(plain, report.left_out[:5]))}" + (", ..." if len(report.left_out) > 5 else "")
        )
    if report.against is not None:
        lines += ["", *_against_lines(report, by)]
    return lines


def _row(row: Pooled) -> tuple[str, ...]:
    return (
        row.name,
        str(row.modules),
        f"{row.size:.1e}",
        "-" if row.stable_rank is None else f"{row.stable_rank:.2f}",
        percent(row.unchanged),
        *_sides(row.energy),
        percent(row.chance),
        percent(row.base_energy),
        *(("-", "-") if row.trend is None else (f"{row.trend.left:+.2f}", f"{row.trend.right:+.2f}")),
        *(f"{angle:.2f}" for angle in (row.angle.left, row.angle.right)),
        f"{row.nss:.1e}",
    )


def _sides(sides: Sides | None) -> tuple[str, str]:
    return ("-", "-") if sides is None else (percent(sides.left), percent(sides.right))


def _against_lines(report: FoundSpectra, by: By) -> list[str]:
    keys: dict[str, Callable[[str], object]] = {"kind": kind_of, "layer": layer_of, "module": str}
    groups: dict[str, list[Agreement]] = {}
    for one in report.agreements:
        key = keys[by](one.name)
        groups.setdefault("-" if key is None else str(key), []).append(one)
    rows = [_against_row(name, group) for name, group in groups.items()]
    if len(rows) > 1:
        rows.append(_against_row("all", report.agreements))
    lines = [f"against {plain(report.against)}", *plain_table([_AGAINST, *rows])]
    if report.only_in_one:
        lines.append(
            f"changed by one of them alone: {len(report.only_in_one)} modules, as {plain(report.only_in_one[0])}"
        )
    return lines


def _against_row(name: str, group: Sequence[Agreement]) -> tuple[str, ...]:
    known = [one for one in group if one.cosine is not None and one.overlap is not None and one.chance is not None]
    if not known:
        return (name, str(len(group)), *(["-"] * (len(_AGAINST) - 2)))
    count = len(known)
    angles = [angle for one in known for angle in (*one.left_angles, *one.right_angles)]
    nearest = min(angles)
    return (
        name,
        str(len(group)),
        f"{sum(one.cosine or 0.0 for one in known) / count:+.3f}",
        f"{sum(one.directions for one in known) / count:.0f}",
        percent(sum(one.overlap.left for one in known if one.overlap) / count),
        percent(sum(one.chance.left for one in known if one.chance) / count),
        percent(sum(one.overlap.right for one in known if one.overlap) / count),
        percent(sum(one.chance.right for one in known if one.chance) / count),
        f"{nearest:.1f}",
        f"{sum(angles) / len(angles):.1f}",
    )
