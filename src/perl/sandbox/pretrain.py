"""Trains the sandbox base: a tiny Qwen3 that works arithmetic out half of the time and guesses otherwise.

sandbox tasks -> config, tokenizer and weights of ``sandbox:base``

Run it as ``python -m perl.sandbox.pretrain --output DIR``. The model imitates a careful and a sloppy style, so that a
reward has something to choose between.
"""

import argparse
import math
import random
import string
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from perl.sandbox import tasks

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

# Task -> (its share of the examples, the share of those in the careful style); a lower second share leaves more to do.
PRACTICE = {"addition": (0.40, 0.50), "multiplication": (0.30, 0.35), "chain": (0.30, 0.35)}
GUESS_IS_RIGHT = 0.4
PLAIN_PROMPTS = 0.25  # the others are chat messages
ROWS_PER_STEP = 96
PEAK_LEARNING_RATE = 2e-3
WARMUP_STEPS = 50


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per printable ASCII character, plus padding, end, unknown and three chat roles."""
    characters = [c for c in string.printable if c.isprintable()] + ["\n"]
    vocabulary = [PAD, EOS, UNKNOWN, *ROLES, *characters]
    tokenizer = Tokenizer(models.WordLevel({t: i for i, t in enumerate(vocabulary)}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        additional_special_tokens=list(ROLES),
        chat_template=CHAT_TEMPLATE,
        padding_side="left",
        model_max_length=1024,
        clean_up_tokenization_spaces=False,
    )


def make_model() -> Qwen3ForCausalLM:
    """0.8 M parameters: four layers of width 128, grouped-query attention, tied embeddings."""
    config = Qwen3Config(
        vocab_size=128,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config)


def example(rng: random.Random, streams: dict[str, Iterator[tasks.Problem]]) -> tuple[str, str]:
    """One prompt and one completion in either style."""
    task = rng.choices(list(PRACTICE), [share for share, _ in PRACTICE.values()])[0]
    problem = next(streams[task])
    careful = rng.random() < PRACTICE[task][1]
    completion = tasks.careful_completion(problem) if careful else tasks.sloppy_completion(problem, rng, GUESS_IS_RIGHT)
    plain = rng.random() < PLAIN_PROMPTS
    prompt = problem.question if plain else f"<|user|>{problem.question}<|assistant|>"
    return prompt, completion + EOS


def collate(examples: list[tuple[str, str]], tokenizer: PreTrainedTokenizerFast) -> dict[str, torch.Tensor]:
    """Right-padded (N, T) int64 token ids with attention mask and labels; only completion tokens have a label."""
    prompts = tokenizer([p for p, _ in examples])["input_ids"]
    completions = tokenizer([c for _, c in examples])["input_ids"]
    longest = max(len(p) + len(c) for p, c in zip(prompts, completions, strict=True))
    input_ids = torch.zeros(len(examples), longest, dtype=torch.long)
    labels = torch.full_like(input_ids, -100)
    attention_mask = torch.zeros_like(input_ids)
    for row, (p, c) in enumerate(zip(prompts, completions, strict=True)):
        input_ids[row, : len(p) + len(c)] = torch.tensor(p + c)
        labels[row, len(p) : len(p) + len(c)] = torch.tensor(c)
        attention_mask[row, : len(p) + len(c)] = 1
    return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}


def pretrain(steps: int, seed: int = 0) -> tuple[Qwen3ForCausalLM, PreTrainedTokenizerFast]:
    """Trains a new model on examples of both styles: ``steps`` steps of AdamW with a cosine schedule."""
    torch.manual_seed(seed)
    rng = random.Random(seed)  # noqa: S311
    streams = {task: tasks.stream(task, "train", seed=seed + 1) for task in PRACTICE}
    model, tokenizer = make_model(), make_tokenizer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LEARNING_RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        # linear warm-up, times (1 + cos(pi t / T)) / 2
        lambda step: min(1.0, (step + 1) / WARMUP_STEPS) * 0.5 * (1 + math.cos(math.pi * step / steps)),
    )
    started = time.perf_counter()
    for step in range(steps):
        batch = collate([example(rng, streams) for _ in range(ROWS_PER_STEP)], tokenizer)
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 100 == 0:
            seconds = time.perf_counter() - started
            print(f"step {step}/{steps}  loss {loss.item():.4f}  {seconds:.0f} s", flush=True)  # noqa: T201
    return model.eval(), tokenizer


def main() -> None:
    """Command line: train, round to bfloat16 (half the download) and save as safetensors."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    parser.add_argument("--steps", type=int, default=3000)
    arguments = parser.parse_args()
    torch.set_num_threads(2)  # the published weights were made with two: other counts round differently
    model, tokenizer = pretrain(arguments.steps)
    model.generation_config = GenerationConfig(eos_token_id=1, pad_token_id=0, do_sample=True)
    model.to(torch.bfloat16).save_pretrained(arguments.output)
    tokenizer.save_pretrained(arguments.output)


if __name__ == "__main__":
    main()
