"""The memory that `perl spectrum` needs of a base of 7B shapes: ``python benchmarks/spectrum_memory.py FOLDER``.

shapes -> a base whose file is sparse, a LoRA of all its layers -> seconds and peak memory of the first layers

Layers that are measured have random numbers, the others none: the file says 15 GB and takes 0.5 GB a measured layer.
Each number of layers is measured in a process of its own, whose peak (``ru_maxrss``) counts pages of the files too.
"""

import argparse
import json
import os
import resource
import struct
import subprocess
import sys
import time
from pathlib import Path

HIDDEN, INNER, KV, LAYERS, VOCABULARY, RANK = 3584, 18944, 512, 28, 152064, 32
SHAPES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (KV, HIDDEN),
    "self_attn.v_proj": (KV, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}


def make_base(folder: Path, filled: int) -> None:
    """Qwen2.5-7B's architecture; ``filled`` layers have numbers."""
    import torch

    config = {
        **{"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "torch_dtype": "bfloat16"},
        **{"hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": LAYERS, "vocab_size": VOCABULARY},
        **{"num_attention_heads": 28, "num_key_value_heads": 4, "tie_word_embeddings": False},
    }
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN), "lm_head.weight": (VOCABULARY, HIDDEN)}
    for layer in range(LAYERS):
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in SHAPES.items()}
        shapes |= {
            f"model.layers.{layer}.self_attn.{n}_proj.bias": (s,) for n, s in (("q", HIDDEN), ("k", KV), ("v", KV))
        }
    header, offset = {}, 0
    for name, shape in shapes.items():
        size = 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + offset)
        for name, place in header.items():
            if any(name.startswith(f"model.layers.{layer}.") for layer in range(filled)):
                numbers = 0.02 * torch.randn(place["shape"])
                file.seek(8 + len(text) + place["data_offsets"][0])
                file.write(numbers.bfloat16().view(torch.int16).numpy().tobytes())


def make_adapter(folder: Path, base: Path) -> None:
    """A LoRA of all linear layers, as plain PEFT saves it."""
    import torch
    from peft import LoraConfig
    from safetensors.torch import save_file

    names = [name.rpartition(".")[2] for name in SHAPES]
    LoraConfig(
        r=RANK, lora_alpha=2 * RANK, target_modules=names, task_type="CAUSAL_LM", base_model_name_or_path=str(base)
    ).save_pretrained(folder)
    tensors = {}
    for layer in range(LAYERS):
        for name, (outputs, inputs) in SHAPES.items():
            key = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{key}.lora_A.weight"] = (torch.rand(RANK, inputs) - 0.5) / inputs**0.5
            tensors[f"{key}.lora_B.weight"] = 1e-3 * torch.randn(outputs, RANK)
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})


def measure(folder: Path, layers: int, kind: str) -> None:
    """Prints one line of JSON."""
    import perl

    started, computed = time.monotonic(), time.process_time()
    pattern = rf"layers\.({'|'.join(map(str, range(layers)))})\..*{kind}"
    found = perl.spectrum(folder / "adapter", modules=pattern, device="cpu")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    line = {"layers": layers, "modules": len(found.modules), "seconds": time.monotonic() - started, "peak_gib": peak}
    line["cpu_seconds"] = time.process_time() - computed
    line |= {"stable_rank": found.pooled.stable_rank, "unchanged": found.pooled.unchanged}
    print(json.dumps(line))


def main() -> None:
    """Makes what is not there, then measures each number of layers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--kind", default="", help="Regular expression of the modules; empty: all seven of a layer.")
    parser.add_argument("--measure", type=int, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.measure:
        measure(asked.folder, asked.measure, asked.kind)
        return
    if not asked.folder.exists():
        make_base(asked.folder / "base", max(asked.layers))
        make_adapter(asked.folder / "adapter", asked.folder / "base")
    for layers in asked.layers:
        command = [sys.executable, __file__, str(asked.folder), "--kind", asked.kind, "--measure", str(layers)]
        subprocess.run(command, check=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})  # noqa: S603


if __name__ == "__main__":
    main()
