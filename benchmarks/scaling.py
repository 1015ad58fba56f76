"""What more GPUs bring, from 8 to 1,024: seconds of a sync and of a step, and where either stops to pay.

Run as ``python benchmarks/scaling.py`` on a CPU, with 1 to 1,024 fake vLLM servers on loopback. Nothing runs on a GPU
or on two machines; every number that is printed is one of three kinds, and says so:

* measured here: the project's ``ServerPool`` with so many fake servers (connect, a sync, a batch of rollouts,
  connections), and with agents on the servers' nodes, which are actors of a Ray cluster of this machine; seconds a byte
  to serialise and write an adapter, seconds a token to read an answer, Ray's object store on one node;
* assumed, or of a data sheet: rates of file systems and networks, what vLLM takes to load an adapter;
* derived: a sync by five transports, from these (``scaling_model.py`` has the formulas); and a step of the recipe
  ``node-7b`` on H100s, from what ``perl plan`` derives, with that sync in the place of the plan's.

Prints tables, writes ``results/scaling.json`` and ``results/scaling.png``. ``--quick`` measures up to 64 servers and no
Ray, derives steps of the smaller batch alone, takes the rest from the stored results, and writes nothing unless it is
told where.
"""

import argparse
import importlib.util
import json
import os
import re
import resource
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")

import torch
from scaling_measured import measure_agent, measure_agents, measure_answer, measure_bytes, measure_pool, measure_ray
from scaling_model import (
    ASSUMED,
    COMMON,
    SHARES,
    TRANSPORTS,
    Constant,
    Costs,
    halving_knee,
    nodes_of,
    step_range,
    sync_knee,
    sync_parts,
    sync_seconds,
)
from scaling_picture import draw
from scaling_tables import print_derived, print_measured

from perl.recipe.batch_plan import plan_batch
from perl.run.folder import installed_versions
from perl.training.cost_time import Part
from perl.training.forecast import Forecast, make_forecast

RESULTS = Path(__file__).parent / "results" / "scaling.json"
SERVERS, QUICK_SERVERS = (1, 8, 64, 256, 1024), (1, 8, 64)
GPUS = (8, 16, 32, 64, 128, 256, 512, 1024)
SIZES = (37_000_000, 414_000_000)
"""Bytes of an adapter: a LoRA of rank 16 in bfloat16 on all linear layers, of a base of 1.5B and of 70B."""
RECIPE, GPU = "node-7b", "H100"
PROMPTS = (32, 1024)
"""A step, with eight completions each: the recipe's, and a batch that many GPUs can share."""
SERVED = 7 / 8
"""Of the GPUs, in the table of syncs: those that serve."""


def measure(quick: bool) -> dict[str, Any]:
    """Everything that one machine can tell."""
    sizes = SIZES[:1] if quick else SIZES
    pool = []
    for servers in QUICK_SERVERS if quick else SERVERS:
        pool.append(measure_pool(servers, sizes, repeats=1 if quick or servers > max(QUICK_SERVERS) else 3))
        print(f"measured with {servers} servers", flush=True)
    alone = pool[0]["syncs"][str(sizes[-1])]["seconds"] / sizes[-1]
    of_bytes = measure_bytes(sizes[-1]) | {"folder": alone}
    found = {"pool": pool, "bytes": of_bytes, "answer": measure_answer(), "agent": measure_agent()}
    if not quick:
        found["ray"] = measure_ray(sizes[-1])
        found["agents"] = measure_agents(SERVERS, sizes)
    return found | {
        "taken": time.strftime("%Y-%m-%d"),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg(),
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "versions": installed_versions(),
    }


def with_stored(found: Mapping[str, Any], stored: Mapping[str, Any] | None) -> dict[str, Any]:
    """What a quick run has not measured, from an earlier whole run."""
    if stored is None:
        return dict(found)
    known = {row["servers"] for row in found["pool"]}
    earlier = [row | {"taken": stored["taken"]} for row in stored["pool"] if row["servers"] not in known]
    kept = {name: found.get(name) or stored.get(name) for name in ("ray", "agents")}
    return dict(found) | {"pool": [*found["pool"], *earlier], **kept}


def with_quiet(found: Mapping[str, Any], stored: Mapping[str, Any]) -> dict[str, Any]:
    """Seconds a byte and a token of an earlier run, which are of the clock, where this one was not alone here."""
    return dict(found) | {name: stored[name] for name in ("bytes", "answer", "ray")}


def costs_of(found: Mapping[str, Any]) -> Costs:
    """The constants of the model, with where each is from."""
    here = f"on {found['cores']} shared cores"
    measured = {
        "folder": (found["bytes"]["folder"], "s/byte", "a sync to one fake server: its folder, on a local disk"),
        "ray_agent": (found["agent"], "s", "processor seconds of an agent for its requests, least of 20"),
        "serialise": (found["bytes"]["serialise"], "s/byte", "safetensors.save of an adapter, least of 5"),
        "answer": (found["answer"], "s/token", "json.loads and read_answer of an answer as vLLM gives it, least of 5"),
    }
    ray = found.get("ray")
    if ray:
        measured["ray_put"] = ray["put"], "s/byte", f"ray.put, Ray {ray['version']}, least of 5"
        measured["ray_take"] = ray["take"], "s/byte", "ray.get and write to memory by an actor, same node, least of 5"
        measured["ray_call"] = ray["call"], "s", "one of 256 calls of an actor, same node"
    agents = found.get("agents")
    constants = {
        name: Constant(value, unit, "measured", f"{how}, {here}") for name, (value, unit, how) in measured.items()
    }
    return Costs(ASSUMED | constants, _beyond_one(found["pool"]), _beyond_one(agents) if agents else ())


def _beyond_one(rows: Sequence[Mapping[str, Any]]) -> list[tuple[int, float]]:
    """Processor seconds of the main process for so many servers, less those for one."""
    seconds = {row["servers"]: row["syncs"][str(SIZES[0])]["cpu_seconds"] for row in rows}
    least = seconds[min(seconds)]
    return [(servers, max(seconds[servers] - least, 0.0)) for servers in sorted(seconds) if servers > 1]


@dataclass(frozen=True)
class Split:
    """GPUs that train and GPUs that serve, with what the plan derives of a step on them.

    Attributes:
        tokens: Of completions in a step, for each process that trains.
    """

    gpus: int
    trainers: int
    servers: int
    parts: Mapping[str, Part]
    tokens: float


def all_splits(batches: Sequence[int]) -> tuple[dict[int, list[Split]], float]:
    """Of each batch (prompts a step), each number of GPUs divided in each way; and the bytes of the recipe's adapter.

    The model has its published sizes and no weights, and prompts stand for the data's.
    """
    path = Path(__file__).parent.parent / "docs" / "plan_recipes.py"
    spec = importlib.util.spec_from_file_location("plan_recipes", path)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(path)
    recipes = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(recipes)
    with tempfile.TemporaryDirectory() as folder:
        plan: Forecast = recipes.forecast(RECIPE, recipes.SIZES[RECIPE], GPU, Path(folder))
        found = {prompts: [split for gpus in GPUS for split in _splits(plan, prompts, gpus)] for prompts in batches}
    return found, plan.strategies["ddp"].traffic.synced


def _splits(plan: Forecast, prompts: int, gpus: int) -> list[Split]:
    recipe, found = plan.plan.recipe, []
    most = prompts * plan.setup.batch.num_generations
    for trainers in sorted({max(int(gpus * share), 1) for share in SHARES if gpus * share <= most}):
        servers = gpus - trainers
        batch = plan_batch(
            prompts_per_step=prompts, num_generations=plan.setup.batch.num_generations, world_size=trainers
        )
        served = recipe.rollout.model_copy(update={"servers": [f"http://{n}:8000" for n in range(servers)]})
        setup = replace(plan.setup, batch=batch, nodes=nodes_of(trainers), strategies=("ddp",))
        forecast = make_forecast(replace(plan.plan, recipe=replace(recipe, rollout=served)), setup)
        tokens = batch.completions_per_step * setup.lengths.completion / trainers
        found.append(Split(gpus, trainers, servers, forecast.strategies["ddp"].parts, tokens))
    return found


def steps_of(
    found: Sequence[Split], costs: Costs, transport: str, nbytes: float, *, ahead: bool
) -> list[dict[str, Any]]:
    """A row for each number of GPUs, divided in the way with the shortest step."""
    rows: dict[int, dict[str, Any]] = {}
    for split in found:
        sync = sync_seconds(transport, costs, nbytes, split.servers)
        step = step_range(split.parts, sync, costs["answer"] * split.tokens, ahead=ahead)
        row = {
            "gpus": split.gpus,
            "trainers": split.trainers,
            "servers": split.servers,
            "rollouts": split.parts["rollouts"].seconds.middle,
            "training": split.parts["training"].seconds.middle,
            "sync": sync,
            "step": step.middle,
            "range": list(step),
            "sync_share": sync / step.middle,
        }
        if split.gpus not in rows or step.middle < rows[split.gpus]["step"]:
            rows[split.gpus] = row
    for gpus, row in rows.items():
        row["of_half_as_many"] = row["step"] / rows[gpus // 2]["step"] if gpus // 2 in rows else None
    return list(rows.values())


def derive(costs: Costs, batches: Sequence[int]) -> dict[str, Any]:
    """Syncs, steps of these batches, and knees."""
    syncs = [
        {"gpus": gpus, "servers": servers, "nodes": nodes_of(servers), "bytes": size, "transport": name}
        | {"parts": (parts := sync_parts(name, costs, size, servers)), "seconds": sum(parts.values())}
        for gpus in GPUS
        for servers in [int(gpus * SERVED)]
        for size in SIZES
        for name in TRANSPORTS
    ]
    by_batch, own = all_splits(batches)
    series = []
    for prompts, found in by_batch.items():
        for size in (SIZES[0], int(own), SIZES[1]):
            for name in TRANSPORTS:
                for ahead in (False, True):
                    rows = steps_of(found, costs, name, size, ahead=ahead)
                    steps = {row["gpus"]: row["step"] for row in rows}
                    knees = {
                        "sync_knee": sync_knee(steps, {row["gpus"]: row["sync"] for row in rows}),
                        "halving_knee": halving_knee(steps),
                    }
                    key = {"prompts": prompts, "bytes": size, "transport": name, "ahead": ahead}
                    series.append(key | knees | {"rows": rows})
    return {"syncs": syncs, "adapter_bytes": own, "steps": series}


def _as_text(results: Mapping[str, Any]) -> str:
    """JSON with a row in a line and four digits of a number."""
    return re.sub(r"\{[^{}]*\}", lambda row: " ".join(row[0].split()), json.dumps(_rounded(results), indent=1)) + "\n"


def _rounded(found: Any) -> Any:  # noqa: ANN401 (JSON)
    if isinstance(found, Mapping):
        return {name: _rounded(value) for name, value in found.items()}
    if isinstance(found, list | tuple):
        return [_rounded(value) for value in found]
    return float(f"{found:.4g}") if isinstance(found, float) else found


def main() -> None:
    """Measures, derives, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="up to 64 servers, one size, no Ray; nothing is written")
    parser.add_argument("--stored", action="store_true", help="derive again from the stored measurements")
    parser.add_argument("--quiet-bytes", action="store_true", help="seconds a byte and a token as stored")
    parser.add_argument("--output", type=Path, help="JSON; a picture is put beside it")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    began = time.monotonic()
    stored = json.loads(RESULTS.read_text(encoding="utf-8"))["measured"] if RESULTS.is_file() else None
    found = stored if asked.stored and stored else measure(asked.quick)
    whole = with_stored(found, stored) if asked.quick else found
    if asked.quiet_bytes and stored:
        whole = with_quiet(whole, stored)
    costs = costs_of(whole)
    derived = derive(costs, PROMPTS[:1] if asked.quick else PROMPTS)
    print_measured(whole, costs)
    print_derived(derived, f"{RECIPE} on {GPU}")
    output = asked.output or (None if asked.quick else RESULTS)
    if output is not None:
        constants = {name: asdict(constant) for name, constant in costs.constants.items()}
        formulas = {"each": COMMON} | {name: transport.formula for name, transport in TRANSPORTS.items()}
        assumed = {"constants": constants, "asking": costs.asking, "telling": costs.telling, "formulas": formulas}
        output.write_text(_as_text({"measured": whole, **assumed, "derived": derived}), encoding="utf-8")
        draw(whole, derived, output.with_suffix(".png"))
    print(f"\n{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
