"""Peak memory of each process of a 1 GB base under FSDP2 with 1, 2 and 4 processes: a table and a picture.

Run as ``python benchmarks/sharded_memory.py`` on a CPU. A random Llama-shaped base of 262 million parameters in
float32 is loaded as a run loads it under FSDP2 (transformers' own ``DistributedConfig``, over gloo), frozen, given a
LoRA by PEFT, and run forward and backward once over 64 tokens.

What is measured: anonymous resident memory (``RssAnon`` of ``/proc/self/status``) every two milliseconds, above that
of the process once everything is imported. Pages of the checkpoint's file, which the system drops when it likes, are
not in it. A checkpoint that is read in its own type stays in such pages on a CPU; so this one is in bfloat16 and is
converted to float32 as it is read, and each process has numbers of its own, as on a GPU.

The plan's part and gathered layers are printed with what one process holds beside the base. Prints a table; writes
``results/sharded_memory.json`` and ``docs/sharded_memory.png``. ``--quick``: a base of 4 MB.
"""

import argparse
import ctypes
import json
import os
import platform
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from result_lines import as_lines

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", TQDM_DISABLE="1")

import torch
from peft import LoraConfig, get_peft_model
from torch.multiprocessing import spawn
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.distributed import DistributedConfig

from perl.run.folder import installed_versions
from perl.training.decoder import ModelSharing, Types, base_bytes, decoder_of, weight_bytes

HERE = Path(__file__).parent
WORLDS = (1, 2, 4)
MIB = 2**20
M_MMAP_THRESHOLD = -3  # of malloc.h
SECONDS_BETWEEN = 0.002


def config_of(*, quick: bool) -> LlamaConfig:
    """1.05 GB in float32, or 4 MB."""
    width, layers = (64, 4) if quick else (1024, 18)
    return LlamaConfig(
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=8192,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )


def resident() -> int:
    """Bytes of this process's anonymous pages."""
    text = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024 * next(int(line.split()[1]) for line in text if line.startswith("RssAnon"))


@contextmanager
def peak(found: dict[str, Any], name: str, before: int) -> Iterator[None]:
    """Notes the peak of anonymous memory while something runs, and what is left afterwards."""
    most, ended = [0], threading.Event()

    def watch() -> None:
        while not ended.wait(SECONDS_BETWEEN):
            most[0] = max(most[0], resident())

    thread = threading.Thread(target=watch)
    thread.start()
    yield
    ended.set()
    thread.join()
    after = resident()
    found[name] = {"peak": max(most[0], after) - before, "after": after - before}


def one_process(rank: int, world: int, folder: str) -> None:
    """Loads, attaches, runs; writes what it took."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**16)  # freed tensors go back to the system at once
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    options: dict[str, Any] = {}
    if world > 1:
        store = torch.distributed.FileStore(f"{folder}/meeting-of-{world}", world)
        torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=world)
        options["distributed_config"] = DistributedConfig(fsdp_size=world)
    torch.randn(64, 64) @ torch.randn(64, 64)  # what the first product sets up is no model's
    found: dict[str, Any] = {}
    before = resident()
    with peak(found, "loading", before):
        base = AutoModelForCausalLM.from_pretrained(f"{folder}/model", dtype=torch.float32, **options)
        base.requires_grad_(False)
    with peak(found, "step", before):
        policy = get_peft_model(base, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
        tokens = torch.arange(64).unsqueeze(0)
        policy(input_ids=tokens, labels=tokens).loss.backward()
    (Path(folder) / f"{world}-{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    if world > 1:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def measure(config: LlamaConfig) -> list[dict[str, Any]]:
    """A row for each number of processes."""
    model, types = decoder_of(config), Types(weights=4, compute=4)
    if model is None:
        raise RuntimeError("not a model that plans know")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(f"{folder}/model")
        for world in WORLDS:
            spawn(one_process, (world, folder), nprocs=world)
            ranks = [json.loads((Path(folder) / f"{world}-{rank}.json").read_text()) for rank in range(world)]
            part, gathered = base_bytes(model, types, ModelSharing("fsdp2", world))
            largest = max(model.head_parameters, model.hidden * model.inner) * 4
            rows.append(
                {
                    "processes": world,
                    "base": weight_bytes(model, types),
                    "largest_tensor": largest,
                    "planned": {"part": part, "gathered": gathered},
                    "ranks": ranks,
                }
            )
    return rows


def held(row: dict[str, Any], phase: str, when: str) -> int:
    """Of the process that holds most."""
    return max(rank[phase][when] for rank in row["ranks"])


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Bars by number of processes, and the whole base as a line."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 3.4), layout="constrained")
    series = [("peak while loading", "loading", "peak", "#1f4e79"), ("after loading", "loading", "after", "#8fb4d9")]
    series.append(("peak of a step", "step", "peak", "#c55a11"))
    for place, (label, phase, when, colour) in enumerate(series):
        places = [index + 0.27 * (place - 1) for index in range(len(rows))]
        bars = axes.bar(places, [held(r, phase, when) / MIB for r in rows], width=0.25, color=colour, label=label)
        axes.bar_label(bars, fmt="%.0f", padding=2, fontsize=8)
    axes.axhline(rows[0]["base"] / MIB, color="grey", linewidth=1, linestyle="--")
    axes.text(
        len(rows) - 0.55, rows[0]["base"] / MIB, "the whole base", fontsize=8, va="bottom", ha="right", color="grey"
    )
    names = [f"{row['processes']} process{'es' if row['processes'] > 1 else ''}" for row in rows]
    axes.set_xticks(range(len(rows)), names)
    axes.set_ylabel("MiB of the process that holds most")
    axes.set_ylim(0, 1.18 * max(held(r, "step", "peak") for r in rows) / MIB)
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Measures, prints and draws."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a base of 4 MB, nothing is written but --output")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "sharded_memory.json")
    asked = parser.parse_args()
    rows = measure(config_of(quick=asked.quick))
    besides = held(rows[0], "step", "peak") - rows[0]["base"]  # adapter and activations, alike for all
    print(f"{'processes':>9} {'base':>7} {'part':>7} {'loading':>8} {'loaded':>7} {'step':>7} {'planned':>8}   MiB")
    for row in rows:
        planned = row["planned"]
        numbers = [row["base"], row["base"] / row["processes"]]
        numbers += [held(row, *what) for what in (("loading", "peak"), ("loading", "after"), ("step", "peak"))]
        numbers.append(planned["part"] + planned["gathered"] + besides)
        shown = " ".join(f"{n / MIB:>{w},.0f}" for n, w in zip(numbers, (7, 7, 8, 7, 7, 8), strict=True))
        print(f"{row['processes']:>9} {shown}")
    facts = {"taken": time.strftime("%Y-%m-%d"), "versions": installed_versions()}
    asked.output.write_text(as_lines({"rows": rows, **facts}) + "\n", encoding="utf-8")
    if not asked.quick:
        draw(rows, HERE.parent / "docs" / "sharded_memory.png")


if __name__ == "__main__":
    main()
