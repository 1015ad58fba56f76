"""Models of random weights and rows of random tokens for the stage ``correct``.

Nothing is read from the Hub; every draw has its own seed.
"""

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from perl.packing import Row

# About 50 million parameters, most of them in the embeddings: few layers, so that every method is set up quickly.
FIFTY_MILLION = {
    "vocab_size": 65536,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
TOY = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}

# Length of a prompt: those of its completions.
ROWS: dict[int, tuple[int, ...]] = {70: (300, 1, 161, 40), 1: (9, 2), 257: (129, 64), 33: (5,)}
SHORT_ROWS: dict[int, tuple[int, ...]] = {7: (3, 1, 16), 1: (9, 2), 20: (5,)}


def random_qwen3(*, tiny: bool, dtype: torch.dtype = torch.float32) -> Qwen3ForCausalLM:
    """The same numbers each time, rounded to the type; on the CPU. Its guesses are far from uniform."""
    torch.manual_seed(0)
    shape = TOY if tiny else FIFTY_MILLION
    config = Qwen3Config(
        **shape,
        initializer_range=0.1 if tiny else 0.05,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config).to(dtype)


def random_rows(vocabulary: int, device: torch.device, *, tiny: bool) -> tuple[list[Row], list[list[int]]]:
    """Rows of unequal lengths, some completions of one token, and which of them have their prompt in common."""
    generator = torch.Generator().manual_seed(5)

    def tokens(count: int) -> torch.Tensor:
        return torch.randint(2, vocabulary, (count,), generator=generator).to(device)

    lengths = (
        {7: (3, 1, 16), 1: (9, 2), 20: (5,)} if tiny else {70: (300, 1, 161, 40), 1: (9, 2), 257: (129, 64), 33: (5,)}
    )
    rows: list[Row] = []
    families: list[list[int]] = []
    for prompt_length, completions in lengths.items():
        prompt = tokens(prompt_length)
        families.append(list(range(len(rows), len(rows) + len(completions))))
        for count in completions:
            scored = torch.rand(count, generator=generator) < 0.9
            scored[0] = True
            rows.append(Row(prompt, tokens(count), scored))
    return rows, families
