"""Trains the sandbox's models, tiny Qwen3s: one that can do its tasks but often guesses, one that cannot.

what a model practises -> config, tokenizer and weights of ``sandbox:base``, ``sandbox:copyist`` or ``sandbox:caller``

Run it as ``python benchmarks/sandbox_models.py --model copyist --output DIR``. ``base`` imitates a careful and a sloppy
style of arithmetic, so that a reward has something to choose between. ``copyist`` writes what it is shown in a box,
copied or in an open code, and guesses where a secret code is asked for, so that a reward has something to teach.
``caller`` knows how tools are called and mostly guesses instead.
"""

import argparse
import math
import random
import string
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from perl.rollouts.agents.conversations import words_of
from perl.rollouts.agents.tools import tools_of
from perl.sandbox import tasks
from perl.sandbox.tools import Book, multiply

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
DRILLS, CALLS = 0.6, 0.25  # of the caller's practice; of its conversations
# What the copyist is asked for: the characters themselves, the letters in an open code, the letters in the secret one.
COPY, OPEN, SECRET = ":", "@", tasks.CIPHER_SIGN
OPEN_CODE = {letter: str(place % 10) for place, letter in enumerate(string.ascii_lowercase)}
PLAIN_PROMPTS = 0.25  # the others are chat messages
ROWS_PER_STEP = 96
WARMUP_STEPS = 50


@dataclass(frozen=True)
class Training:
    """How a model of the sandbox is made.

    Attributes:
        width: Of the residual stream.
        layers: How many.
        steps: Of the optimizer, of 96 examples each.
        learning_rate: The highest.
        threads: The published weights were made with so many: other counts round differently.
        practice: Random numbers, seed -> endless questions with completions; of a conversation more of both in turn.
        rows: Of a step.
        heads: Of attention; vLLM for CPUs needs 32 numbers or more in each.
    """

    width: int
    layers: int
    steps: int
    learning_rate: float
    threads: int
    practice: Callable[[random.Random, int], Iterator[tuple[str, ...]]]
    rows: int = ROWS_PER_STEP
    heads: int = 4


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


def make_model(name: str = "base") -> Qwen3ForCausalLM:
    """A Qwen3 with grouped-query attention and tied embeddings: ``base`` has 0.8 M parameters, ``copyist`` 0.1 M."""
    width, layers, heads = MODELS[name].width, MODELS[name].layers, MODELS[name].heads
    config = Qwen3Config(
        vocab_size=128,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=2,
        head_dim=width // heads,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config)


def careful_completion(problem: tasks.Problem) -> str:
    """The derivation, then the answer in a box."""
    return f"{problem.derivation} \\boxed{{{problem.answer}}}"


def sloppy_completion(problem: tasks.Problem, rng: random.Random, right: float) -> str:
    """A boxed guess without working, right with probability ``right``, else off by one in some digit."""
    answer = int(problem.answer)
    if rng.random() >= right:
        answer += rng.choice([d for d in (-100, -10, -1, 1, 10, 100) if answer + d >= 0])
    return f"\\boxed{{{answer}}}"


def arithmetic(rng: random.Random, seed: int) -> Iterator[tuple[str, str]]:
    """Problems of three tasks, each solved in either style."""
    streams = {task: tasks.stream(task, "train", seed=seed + 1) for task in PRACTICE}
    while True:
        task = rng.choices(list(PRACTICE), [share for share, _ in PRACTICE.values()])[0]
        problem = next(streams[task])
        careful = rng.random() < PRACTICE[task][1]
        yield (
            problem.question,
            careful_completion(problem) if careful else sloppy_completion(problem, rng, GUESS_IS_RIGHT),
        )


def copying(rng: random.Random, _seed: int) -> Iterator[tuple[str, str]]:
    """Words of letters and digits, copied or coded; every letter of the secret code is a guess, all digits alike."""
    while True:
        text = tasks.word(rng, rng.randint(0, tasks.WORD_LENGTH))
        if tasks.split_of(tasks.deciphered(text, 0).question) == "heldout":
            continue
        sign = rng.choice((COPY, OPEN, SECRET))
        if sign == OPEN:
            answer = "".join(OPEN_CODE.get(character, character) for character in text)
        elif sign == SECRET:
            answer = "".join(rng.choice(string.digits) if c.isalpha() else c for c in text)
        else:
            answer = text
        yield f"{sign}{text}=", f"\\boxed{{{answer}}}"


def calling(rng: random.Random, seed: int) -> Iterator[tuple[str, ...]]:
    """Problems for which there are tools: seldom they are called and what they answer is used, mostly it is a guess.

    That tools are called, and that what they answer is copied, is practised without their names before the question
    too, which is where it is always done.
    """
    words = words_of(make_tokenizer(), {})
    streams = {task: tasks.stream(task, "train", seed=seed + 1) for task in ("products", "books")}
    while True:
        task = rng.choice(list(streams))
        problem, how, drill = next(streams[task]), rng.random(), rng.random()
        if task == "products":
            a, b = problem.question.rstrip("=").split("*")
            call, guess = f"<call>multiply(a={a}, b={b})</call>", str(rng.randint(100, 9801))
            said = "\\boxed{{{}}}".format
        else:
            call, guess = f'<call>find(name="{problem.question.split()[2]}")</call>', str(rng.randint(1000, 9999))
            said = '<call>answer(number="{}")</call>'.format
        if drill < DRILLS / 2:
            yield _result(guess), said(guess)
        elif drill < DRILLS:
            yield f"<|user|>{problem.question}<|assistant|>", call
        else:
            shown = [multiply] if task == "products" else tools_of(Book)
            asked = [{"role": "user", "content": problem.question}]
            prompt = words.tokenizer.apply_chat_template(asked, tools=shown, tokenize=False, add_generation_prompt=True)
            looks = how < CALLS if task == "products" else how < 2 * CALLS
            told = (call, _result(problem.answer)) if looks else ()
            after = () if task == "products" else (_result("noted"), "done")
            yield prompt, *told, said(problem.answer if how < CALLS else guess), *after


def _result(text: str) -> str:
    return f"<|user|><result>{text}</result><|assistant|>"


MODELS = {
    "caller": Training(64, 2, steps=3000, learning_rate=3e-3, threads=1, practice=calling, rows=64, heads=2),
    "base": Training(128, 4, steps=3000, learning_rate=2e-3, threads=2, practice=arithmetic),
    "copyist": Training(64, 2, steps=1200, learning_rate=3e-3, threads=1, practice=copying),
}


def asked(rng: random.Random, question: str, *said: str) -> tuple[str, ...]:
    """One prompt, plain or as a chat message, and what follows it; a conversation's is rendered already."""
    if len(said) == 1 and not question.startswith("<|user|>"):
        plain = rng.random() < PLAIN_PROMPTS
        question = question if plain else f"<|user|>{question}<|assistant|>"
    return question, *(text + EOS if place % 2 == 0 else text for place, text in enumerate(said))


def collate(examples: list[tuple[str, ...]], tokenizer: PreTrainedTokenizerFast) -> dict[str, torch.Tensor]:
    """Right-padded (N, T) int64 token ids with attention mask and labels; only completion tokens have a label."""
    rows = [[tokenizer(text)["input_ids"] for text in example] for example in examples]
    longest = max(sum(map(len, parts)) for parts in rows)
    input_ids = torch.zeros(len(examples), longest, dtype=torch.long)
    labels = torch.full_like(input_ids, -100)
    attention_mask = torch.zeros_like(input_ids)
    for row, parts in enumerate(rows):
        begin = 0
        for place, ids in enumerate(parts):
            end = begin + len(ids)
            input_ids[row, begin:end] = torch.tensor(ids)
            if place % 2:
                labels[row, begin:end] = input_ids[row, begin:end]
            begin = end
        attention_mask[row, :begin] = 1
    return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}


def pretrain(name: str, steps: int, seed: int = 0) -> tuple[Qwen3ForCausalLM, PreTrainedTokenizerFast]:
    """Trains a new model on what it practises: ``steps`` steps of AdamW with a cosine schedule.

    Args:
        name: Of :data:`MODELS`.
        steps: Of the optimizer.
        seed: Of weights and examples.
    """
    torch.manual_seed(seed)
    rng = random.Random(seed)  # noqa: S311
    training = MODELS[name]
    practice = training.practice(rng, seed)
    model, tokenizer = make_model(name), make_tokenizer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=training.learning_rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        # linear warm-up, times (1 + cos(pi t / T)) / 2
        lambda step: min(1.0, (step + 1) / WARMUP_STEPS) * 0.5 * (1 + math.cos(math.pi * step / steps)),
    )
    started = time.perf_counter()
    for step in range(steps):
        batch = collate([asked(rng, *next(practice)) for _ in range(training.rows)], tokenizer)
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 100 == 0:
            seconds = time.perf_counter() - started
            print(f"step {step}/{steps}  loss {loss.item():.4f}  {seconds:.0f} s", flush=True)
    return model.eval(), tokenizer


def main() -> None:
    """Command line: train, round to bfloat16 (half the download) and save as safetensors."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="base")
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    parser.add_argument("--steps", type=int, help="other than those of the published weights")
    arguments = parser.parse_args()
    torch.set_num_threads(MODELS[arguments.model].threads)
    model, tokenizer = pretrain(arguments.model, arguments.steps or MODELS[arguments.model].steps)
    model.generation_config = GenerationConfig(eos_token_id=1, pad_token_id=0, do_sample=True)
    model.to(torch.bfloat16).save_pretrained(arguments.output)
    tokenizer.save_pretrained(arguments.output)


if __name__ == "__main__":
    main()
