"""A base in half precision whose output head is not its embeddings.

folder -> folder of a model with random weights and the sandbox's tokenizer
"""

from pathlib import Path

import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from perl.sandbox import BASE_FOLDER


def write_untied_base(folder: Path, dtype: torch.dtype = torch.bfloat16) -> str:
    """Writes one as large as the sandbox's; its name is returned."""
    config = Qwen3Config.from_pretrained(BASE_FOLDER, tie_word_embeddings=False)
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).to(dtype).save_pretrained(folder)
    AutoTokenizer.from_pretrained(BASE_FOLDER).save_pretrained(folder)
    return str(folder)
