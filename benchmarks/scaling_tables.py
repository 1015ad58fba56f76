"""The tables of ``scaling.py``: each says of its numbers whether they are measured, assumed or derived.

measured, constants, derived -> lines
"""

from collections.abc import Mapping, Sequence
from typing import Any

from scaling_model import COMMON, HALF, MOST_SHARE, TRANSPORTS, Costs

_SHOWN = (("ray", False), ("ray", True), ("nfs_by_server", False))
"""Of the steps, transport and whether rollouts are sampled ahead; the JSON has the others."""


def print_measured(found: Mapping[str, Any], costs: Costs) -> None:
    """What was measured, and the constants."""
    sizes = sorted({size for row in found["pool"] for size in row["syncs"]}, key=int)
    heads = " ".join(f"{f'sync {int(size) / 1e6:.0f} MB':>15}" for size in sizes)
    print(f"\nMEASURED here, on {found['cores']} shared cores: ServerPool and fake servers on loopback;")
    print("the servers load nothing; seconds of the clock (processor seconds of the main process)")
    print(
        f"{'servers':>7} {'connect':>15} {heads} {'requests':>8} {'batch':>15} {'us/token':>8} "
        f"{'peak connections':>16} {'late, lost, again':>17} {'load':>5}"
    )
    for row in found["pool"]:
        syncs = " ".join(f"{_both(row['syncs'].get(size)):>15}" for size in sizes)
        counts = ", ".join(str(row["counts"][name]) for name in ("servers_late", "servers_lost", "requests_retried"))
        print(
            f"{row['servers']:>7,} {_both(row['connect']):>15} {syncs} {row['requests_of_a_sync']:>8.1f} "
            f"{_both(row['batch']):>15} {row['cpu_us_per_token']:>8.1f} {row['peak_connections']:>16,} {counts:>17} "
            f"{row['load_average']:>5.1f}" + (f"  measured {row['taken']}" if "taken" in row else "")
        )
    least = found["pool"][0]["batch"]["requests"]
    print("requests: to each server in a sync")
    print(f"batch: {least} requests, or one a server if that is more, of 8 completions of 256 tokens, written in 1 s;")
    print(
        "us/token: processor microseconds of the main process for each of its tokens; late, lost, again: servers that"
    )
    print("were late with an update, or lost, requests that were sent again; load: processes that wanted the cores")
    _print_agents(found.get("agents") or (), sizes)
    print("\nCONSTANTS: value, unit, whether it is measured here, of a data sheet or assumed, and how")
    for name, constant in costs.constants.items():
        print(f"  {name:12} {constant}")
    for name, points in (("ask", costs.asking), ("tell", costs.telling)):
        line = ", ".join(f"{servers:,}: {seconds:.2f}" for servers, seconds in points)
        who = "" if name == "ask" else ", by agents on their nodes"
        print(
            f"  {name + '(S)':12} measured: processor seconds of a sync to S servers{who}, less those to one: {line};"
        )
    print("               between them in a straight line")


def _print_agents(rows: Sequence[Mapping[str, Any]], sizes: Sequence[str]) -> None:
    print(
        "\nMEASURED here: the same with agents, eight actors of a Ray cluster of this machine that share its cores with"
    )
    print("servers and main process; requests: to each server in a sync, by the main process and by an agent")
    heads = " ".join(f"{f'sync {int(size) / 1e6:.0f} MB':>15}" for size in sizes)
    print(f"{'servers':>7} {heads} {'requests':>12} {'late, lost':>10} {'load':>5}")
    for row in rows:
        syncs = " ".join(f"{_both(row['syncs'].get(size)):>15}" for size in sizes)
        counts = ", ".join(str(row["counts"][name]) for name in ("servers_late", "servers_lost"))
        requests = f"{row['requests_of_a_sync']:.1f}, {row['requests_of_agents']:.1f}"
        print(f"{row['servers']:>7,} {syncs} {requests:>12} {counts:>10} {row['load_average']:>5.1f}")


def _both(row: Mapping[str, float] | None) -> str:
    return "-" if row is None else f"{row['seconds']:.2f} ({row['cpu_seconds']:.2f})"


def print_derived(derived: Mapping[str, Any], run: str) -> None:
    """What follows from them.

    Args:
        derived: Syncs, steps and knees.
        run: Recipe and GPU of the steps.
    """
    _print_syncs(derived["syncs"])
    size = derived["adapter_bytes"]
    print(f"\nDERIVED: seconds of a step of {run} from `perl plan`, with the sync above of its own adapter,")
    print(f"{size / 1e6:.0f} MB, in place of the plan's. The middle of a range is its geometric mean. GPUs are divided")
    print(
        "into those that train and those that serve in the way with the shortest step. Rollouts, training: the plan's"
    )
    for series in derived["steps"]:
        if series["bytes"] == int(size) and (series["transport"], series["ahead"]) in _SHOWN:
            _print_steps(series)
    _print_knees(derived["steps"])


def _print_syncs(syncs: Sequence[Mapping[str, Any]]) -> None:
    print("\nDERIVED: seconds of a sync; 1/8 of the GPUs train, the others serve, one GPU a server")
    print(f"  each: {COMMON}, and")
    for transport in TRANSPORTS.values():
        print(f"  {transport.label + ':':17} {transport.formula}")
    print("  a: bytes of the adapter, S: servers, K: nodes with servers, eight on each")
    print(f"{'GPUs':>5} {'S':>4} {'K':>4} {'MB':>4} " + " ".join(f"{one.label:>16}" for one in TRANSPORTS.values()))
    cells = {(row["gpus"], row["bytes"], row["transport"]): row for row in syncs}
    for gpus in sorted({row["gpus"] for row in syncs}):
        for size in sorted({row["bytes"] for row in syncs}):
            row = cells[gpus, size, "ray"]
            seconds = " ".join(f"{cells[gpus, size, name]['seconds']:>16.2f}" for name in TRANSPORTS)
            print(f"{gpus:>5,} {row['servers']:>4} {row['nodes']:>4} {size / 1e6:>4.0f} {seconds}")


def _print_steps(series: Mapping[str, Any]) -> None:
    when = "a step ahead" if series["ahead"] else "on policy"
    print(f"\n{series['prompts']:,} prompts x 8, rollouts {when}, {TRANSPORTS[series['transport']].label}")
    print(
        f"{'GPUs':>5} {'train':>5} {'serve':>5} {'rollouts':>9} {'training':>9} {'sync':>7} {'step':>9} {'range':>16} "
        f"{'of half as many':>15} {'sync of step':>12}"
    )
    for row in series["rows"]:
        low, high = row["range"]
        before = "" if row["of_half_as_many"] is None else f"{row['of_half_as_many']:.0%}"
        parts = " ".join(f"{row[name]:>9.1f}" for name in ("rollouts", "training"))
        print(
            f"{row['gpus']:>5,} {row['trainers']:>5} {row['servers']:>5} {parts} {row['sync']:>7.2f} "
            f"{row['step']:>9.1f} {f'{low:.0f} to {high:.0f}':>16} {before:>15} {row['sync_share']:>12.1%}"
        )


def _print_knees(steps: Sequence[Mapping[str, Any]]) -> None:
    most = steps[0]["rows"][-1]["gpus"]
    print(f"\nDERIVED: knees. First: the fewest GPUs on which a sync is more than {MOST_SHARE:.0%} of a step.")
    print(f"Second: GPUs from which on twice as many take more than {HALF:.0%} of the time. none: not up to {most:,}")
    print(f"{'prompts':>7} {'MB':>4} {'rollouts':12} " + " ".join(f"{one.label:>16}" for one in TRANSPORTS.values()))
    knees: dict[tuple[int, int, bool], list[str]] = {}
    for series in steps:
        cell = f"{series['sync_knee'] or 'none'}, {series['halving_knee'] or 'none'}"
        knees.setdefault((series["prompts"], series["bytes"], series["ahead"]), []).append(cell)
    for (prompts, size, ahead), row in sorted(knees.items()):
        shown = " ".join(f"{cell:>16}" for cell in row)
        print(f"{prompts:>7,} {size / 1e6:>4.0f} {'a step ahead' if ahead else 'on policy':12} {shown}")
