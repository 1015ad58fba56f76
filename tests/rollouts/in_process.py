"""Run by the Python that has vLLM: an engine in this process is given what a trainer would give it.

``in_process.py FOLDER`` reads FOLDER/given.pt and writes FOLDER/found.pt: the engine's numbers, and what the process
was like before and after each call. Nothing is compared here.
"""

import dataclasses
import gc
import hashlib
import logging
import os
import random
import signal
import sys
import time
from pathlib import Path

import numpy
import torch

from perl.errors import PerlError
from perl.rollouts.engine import Request, Update
from perl.rollouts.vllm.in_process import InProcessEngine

PROCESS_SETTINGS = {
    "random": lambda: digest(random.getstate()),
    "numpy": lambda: digest(numpy.random.get_state()[1].tolist()),
    "torch": lambda: digest(torch.get_rng_state().tolist()),
    "default dtype": torch.get_default_dtype,
    "default device": torch.get_default_device,
    "threads": torch.get_num_threads,
    "set_num_threads": lambda: torch.set_num_threads.__name__,
    "precision": torch.get_float32_matmul_precision,
    "gradients": torch.is_grad_enabled,
    "signals": lambda: [repr(signal.getsignal(number)) for number in sorted(signal.valid_signals())],
    "environment": lambda: dict(os.environ),
    "log handlers": lambda: [repr(handler) for name in (None, "vllm") for handler in logging.getLogger(name).handlers],
    "log records": lambda: repr(logging.getLogRecordFactory()),
    "excepthook": lambda: repr(sys.excepthook),
    "frozen objects": gc.get_freeze_count,
    "processors": lambda: sorted(os.sched_getaffinity(0)),
    "group": torch.distributed.is_initialized,
}


class GivenUp(Exception):
    """Raised by the receiver of a group."""


def digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()


def process() -> dict[str, object]:
    return {name: read() for name, read in PROCESS_SETTINGS.items()}


def answers(engine: InProcessEngine, given: dict, update: Update | None = None) -> dict:
    """What the engine writes under an update: after the text, and completions of a prompt it has seen."""
    seconds = time.perf_counter()
    if update is not None:
        engine.load(update)
    seconds = time.perf_counter() - seconds
    sampled = engine.start([Request(given["long_prompt"], 2)], given["sampling"]).result()
    written = engine.trial(Request(given["text"], 2), given["sampling"])
    return {"written": written, "sampled": sampled, "load_seconds": seconds}


def adapters(given: dict) -> dict:
    """Everything that is asked of an engine with a LoRA slot."""
    found: dict = {"process": [("before", process())]}
    engine = InProcessEngine(
        given["model"], dtype="float32", max_model_len=given["length"], max_lora_rank=given["rank"], seed=3
    )
    found["process"].append(("built", process()))
    cache = engine._llm.llm_engine.vllm_config.cache_config
    found["cached_prefix"] = cache.block_size if cache.enable_prefix_caching else None
    found["answers"] = [answers(engine, given)]
    found["drawn_again"] = engine.start([Request(given["long_prompt"], 2)], given["sampling"]).result()
    found["process"].append(("sampled", process()))
    for update in given["adapters"]:
        kept = {name: tensor.clone() for name, tensor in update.tensors.items()}
        found["answers"].append(answers(engine, given, update))
        found["answers"][-1]["kept"] = all(torch.equal(kept[name], t) for name, t in update.tensors.items())
    found["process"].append(("loaded", process()))
    found.update(groups(engine, given))
    found["seeded"] = seeded(engine, given)
    try:
        engine.load(given["stranger"])
    except PerlError as error:
        found["stranger"] = str(error)
    found["nothing"] = engine.start([], given["sampling"]).result()
    engine.sleep()
    engine.sleep()
    found["rested"] = engine.trial(Request(given["text"], 2), given["sampling"])
    engine.close()
    engine.close()
    found["process"].append(("closed", process()))
    return found


def groups(engine: InProcessEngine, given: dict) -> dict:
    """Several prompts at once: who is told of what, and when; and what is left after the receiver raised."""
    told: list[tuple] = []
    vllm = engine._llm.llm_engine

    def tell(position: int, group: list) -> None:
        told.append((position, list(group), vllm.get_num_unfinished_requests(), process()))

    def give_up(position: int, _: list) -> None:
        raise GivenUp(position)

    before = process()
    result = engine.start(given["requests"], given["likeliest"], tell).result()
    try:
        engine.start(given["requests"], given["likeliest"], give_up)
        given_up = None
    except GivenUp as error:
        given_up = error.args[0]
    left = vllm.get_num_unfinished_requests()
    try:
        engine.start([*given["requests"], Request(tuple([5] * given["length"]), 1)], given["likeliest"])
        refused = None
    except PerlError as error:
        refused = str(error)
    again = engine.start(given["requests"], given["likeliest"]).result()
    return {
        "before": before,
        "told": told,
        "result": result,
        "given_up": given_up,
        "left": left,
        "refused": refused,
        "again": again,
    }


def seeded(engine: InProcessEngine, given: dict) -> dict:
    """A prompt whose completions have seeds: alone, one at a time, beside others without; and greedy."""
    prompt, likeliest = given["requests"][0].prompt_ids, dataclasses.replace(given["sampling"], temperature=0.0)

    def ask(*requests: Request, sampling: object = given["sampling"]) -> list[list[tuple[int, ...]]]:
        return [[c.token_ids for c in group] for group in engine.start(requests, sampling).result()]

    four = Request(prompt, 4, seed=20)
    return {
        "alone": ask(four)[0],
        "one by one": [ids for (ids,) in ask(*(Request(prompt, 1, seed=20 + i) for i in range(4)))],
        "among": ask(*given["requests"], four, *given["requests"])[len(given["requests"])],
        "other": ask(Request(prompt, 4, seed=40))[0],
        "greedy": ask(Request(prompt, 1), sampling=likeliest)[0],
    }


def merged(given: dict) -> list[dict]:
    """An engine without LoRA, a second one in this process."""
    engine = InProcessEngine(given["model"], dtype="float32", max_model_len=given["length"], seed=3)
    found = [answers(engine, given)]
    found += [answers(engine, given, update) for update in given["merged"]]
    engine.close()
    return found


def experts(given: dict) -> dict[str, list]:
    """What engines of models with experts write: at first, and with each update."""
    found = {}
    for name, (model, updates) in given["experts"].items():
        engine = InProcessEngine(model, dtype="float32", max_model_len=128)
        found[name] = []
        for update in (None, *updates):
            if update is not None:
                engine.load(update)
            found[name].append(engine.trial(Request(given["text"], 2), given["sampling"]))
        engine.close()
    return found


def one_of_several(given: dict) -> dict:
    """One of the processes of a distributed run, which has its group already."""
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    engine = InProcessEngine(
        given["model"], dtype="float32", max_model_len=given["length"], max_lora_rank=given["rank"]
    )
    of_the_base = answers(engine, given)
    found = {"of_the_base": of_the_base, **answers(engine, given, given["adapters"][rank])}
    engine.close()
    total = torch.tensor([rank + 1.0])
    torch.distributed.all_reduce(total)
    found["sum"] = float(total)
    torch.distributed.destroy_process_group()
    return found


def main() -> None:
    folder = Path(sys.argv[1])
    given = torch.load(folder / "given.pt", weights_only=False)
    torch.manual_seed(5)
    if "RANK" in os.environ:
        torch.save(one_of_several(given), folder / f"found-{os.environ['RANK']}.pt")
    else:
        found = {"adapters": adapters(given), "merged": merged(given), "experts": experts(given)}
        torch.save(found, folder / "found.pt")


if __name__ == "__main__":
    main()
