"""Rows of many families packed, with prompts shared, beside each row alone and beside padded rows.

family x {float32, bfloat16} -> relative difference of the gradient from that of rows alone; times that packed rows are
as fast as padded ones, forward and backward

    python benchmarks/families.py [FAMILY...]

Random models of ``tests/packing/families.py``: the tiny ones for gradients, wider ones (256, vocabulary of 4096) for
speed, by CPU seconds of one thread, the two ways in turns, the least of three. Two workloads: 4 prompts of 64 tokens
with 4 completions of 16 to 160 each, and 4 prompts of 96 tokens with 8 completions of 3 to 12. A difference in bfloat16
stands beside that of padded rows from rows alone: what rounding alone does. Prints a table and writes
``results/families.json``.
"""

import argparse
import json
import sys
import time
import warnings
from pathlib import Path

import torch
import transformers
from result_lines import as_lines
from torch import nn

from perl.packing.forward import choose_passes, score
from perl.packing.micro_batches import renumbered, token_batches
from perl.packing.rows import Row
from perl.run.tables import plain_table

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "families.json"
sys.path.insert(0, str(ROOT))
from tests.packing.families import PACKED, PADDED, make  # noqa: E402 (of the checkout)

WIDE = {
    **{"hidden_size": 256, "intermediate_size": 512, "vocab_size": 4096, "n_embd": 256, "max_position_embeddings": 512},
    **{"mamba_d_head": 64, "mamba_headdim": 64, "mamba_head_dim": 64, "mamba_d_ssm": 512, "n_positions": 512},
    **{"linear_key_head_dim": 32, "linear_value_head_dim": 64, "linear_head_dim": 32, "moe_intermediate_size": 128},
    **{"mamba_d_state": 32, "ssm_state_size": 32, "mamba_chunk_size": 64, "chunk_size": 64, "sliding_window": 64},
    **{"shared_expert_intermediate_size": 128, "vocab_size_per_layer_input": 4096, "attention_chunk_size": 512},
}
BUDGET = 4096  # tokens of a pass


def workload(prompts: int, length: int, completions: int, shortest: int, longest: int) -> list[Row]:
    """Rows of random tokens, by prompt."""
    generator = torch.Generator().manual_seed(0)

    def tokens(count: int) -> torch.Tensor:
        return torch.randint(2, 64, (count,), generator=generator)

    asked = [tokens(length) for _ in range(prompts)]
    counts = torch.randint(shortest, longest + 1, (prompts * completions,), generator=generator).tolist()
    rows = [(asked[index // completions], tokens(count)) for index, count in enumerate(counts)]
    return [Row(prompt, written, torch.ones(len(written), dtype=torch.bool)) for prompt, written in rows]


def passes(model: nn.Module, rows: list[Row], *, packed: bool, share: bool, budget: int = BUDGET) -> float:
    """Forward and backward passes over all rows; CPU seconds."""
    model.zero_grad()
    batches = token_batches(rows, budget=budget, packed=packed, share=share)
    columns = max(row.completion.numel() for row in rows)
    begin = time.process_time()
    for groups in batches:
        indices, own = renumbered(groups)
        log_probs_NT, _ = score(model, [rows[i] for i in indices], own, packed=packed, columns=columns, entropy="none")
        log_probs_NT.sum().backward()
    return time.process_time() - begin


def gradient(model: nn.Module, rows: list[Row], *, packed: bool, share: bool, budget: int = BUDGET) -> torch.Tensor:
    """Of the sum of all log-probabilities, in float64."""
    passes(model, rows, packed=packed, share=share, budget=budget)
    return torch.cat([p.grad.flatten().double() for p in model.parameters() if p.grad is not None])


def differences(name: str, dtype: torch.dtype) -> tuple[str, float, float | None]:
    """Why a tiny model's rows are not packed, how far its gradients are from those of rows alone: padded, packed."""
    model = make(name).to(dtype)
    how = choose_passes(model, padding_free=True, share=True)
    rows = workload(3, 20, 3, 2, 40 if how.longest is None else how.longest - 20)
    alone = gradient(model, rows, packed=False, share=False, budget=1)

    def apart(*, packed: bool) -> float:
        found = gradient(model, rows, packed=packed, share=packed and how.shared)
        return float(f"{(found - alone).norm() / alone.norm():.2g}")

    return how.why, apart(packed=False), apart(packed=True) if how.packed else None


def speed(name: str) -> dict[str, float]:
    """Times that packed rows are as fast as padded ones, by workload."""
    settings = PACKED[name]
    wide = {key: value for key, value in WIDE.items() if key in settings}
    model = make(name, **wide, **({"head_dim": 64} if name == "Mamba2" else {}))
    how, found = choose_passes(model, padding_free=True, share=True), {}
    for work, sizes in {"long": (4, 64, 4, 16, 160), "short": (4, 96, 8, 3, 12)}.items():
        rows = workload(*sizes)
        turns = [
            (passes(model, rows, packed=False, share=False), passes(model, rows, packed=True, share=how.shared))
            for _ in range(4)
        ][1:]
        padded, packed = (min(times) for times in zip(*turns, strict=True))
        found[work] = round(padded / packed, 2)
    return found


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", choices=[[], *PACKED, *PADDED], metavar="FAMILY", help="all if left out")
    names = parser.parse_args().families or [*PACKED, *PADDED]
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    head = ["family", "float32", "bfloat16", "(padded)", "long", "short"]
    for name in names:
        why, padded, packed = differences(name, torch.float32)
        _, padded_half, packed_half = differences(name, torch.bfloat16)
        times = {} if why else speed(name)
        gradients = {"float32": packed, "padded": padded, "bfloat16": packed_half, "padded bfloat16": padded_half}
        results[name] = {"why not": why, **gradients, **times}
        print(name, results[name], flush=True)
        RESULTS.write_text(as_lines(results) + "\n")
    keys = ("float32", "bfloat16", "padded bfloat16", "long", "short")
    lines = [[name, *(str(results[name].get(key, "-")) for key in keys)] for name in names]
    print("\n".join(plain_table([head, *lines])))


if __name__ == "__main__":
    main()
