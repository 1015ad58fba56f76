"""Every PEFT method for three steps: it moves, is saved, and plain PEFT loads what was trained.

Setting -> a row a method

A random Qwen3 of 50 million parameters in bfloat16 on CUDA; a toy in float32 on a CPU, where a few methods stand for
all of them. What is compared is computed in float32.
"""

import math
import random
import shutil
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import PeftModel
from step_cases import make_tokenizer
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast, PrinterCallback

from gpu_stages.random_models import random_qwen3
from gpu_stages.setting import Row, Setting
from perl import PeftGRPOTrainer, PeftRLConfig
from perl.methods.registry import METHODS, Method
from perl.policy.guards import RELOAD_TOLERANCE, check_saved_adapter, check_saved_model
from perl.policy.precision import in_float32

GENERATIONS, PROMPTS, STEPS = 4, 4, 3
# Of the toy: a LoRA, one whose update is no LoRA, one that starts on the weights, norms, and no adapter at all.
STAND_FOR_ALL = ("lora", "dora", "pissa", "ln_tuning", "full")
# On CUDA PEFT builds an extension for it, and where that fails, once more for each layer: what time is left is its own.
SLOW = ("boft",)
LEAST_MOVED = 1e-3  # nats, ten times what a reload may differ by


def method_cases(setting: Setting) -> Iterator[Row]:
    """The row of each method, then which were left out."""
    names = [name for name in in_order() if not setting.tiny or name in STAND_FOR_ALL]
    base = setting.folder / "base"
    random_qwen3(tiny=setting.tiny, dtype=_dtype(setting)).save_pretrained(base)
    yield from setting.each({f"method {name}": partial(take, setting, METHODS[name], base) for name in names})
    if len(names) < len(METHODS):
        left = f"{len(METHODS) - len(names)} methods are left out with --tiny"
        yield {"case": "methods left out", "skipped": left}


def in_order() -> list[str]:
    """All methods, the slow ones last."""
    return [*(name for name in METHODS if name not in SLOW), *SLOW]


def take(setting: Setting, method: Method, base: Path) -> Row:
    """Trains, saves, and loads again by our guard and by plain PEFT."""
    folder = setting.folder / method.name
    trainer = _trainer(setting, method, base, folder)
    trainer.train()
    saved = folder / "saved"
    trainer.save_adapter(saved)
    ids = torch.randint(2, trainer.policy.config.vocab_size, (2, 40), generator=torch.Generator().manual_seed(2))
    ids = ids.to(setting.device)
    if method.config:
        guard = check_saved_adapter(trainer.policy, saved, ids)
    else:
        check_saved_model(trainer.policy, saved)
        guard = 0.0
    trained = log_probs(trainer.policy, ids)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    del trainer
    fresh = _load(base, setting)
    moved = float((log_probs(fresh, ids) - trained).abs().max())
    again = PeftModel.from_pretrained(fresh, str(saved)) if method.config else _load(saved, setting)
    reloaded = float((log_probs(again.to(setting.device), ids) - trained).abs().max())
    shutil.rmtree(folder)
    agree = reloaded <= RELOAD_TOLERANCE and guard <= RELOAD_TOLERANCE
    trained_well = moved >= LEAST_MOVED and len(losses) == STEPS and all(map(math.isfinite, losses))
    return {
        "difference": reloaded if math.isnan(reloaded) else max(reloaded, guard),
        "moved": moved,
        "tolerance": RELOAD_TOLERANCE,
        "guard": guard,
        "losses": losses,
        "ok": agree and trained_well,
    }


def log_probs(model: torch.nn.Module, ids_BT: torch.Tensor) -> torch.Tensor:
    """(B, T - 1) log-probabilities of the tokens, in float32 and without dropout, by the model's own forward."""
    model.eval()
    with in_float32(model):
        logits_BTV = model(input_ids=ids_BT, attention_mask=torch.ones_like(ids_BT)).logits.float()
    return logits_BTV[:, :-1].log_softmax(dim=-1).gather(2, ids_BT[:, 1:, None])[..., 0]


def _dtype(setting: Setting) -> torch.dtype:
    return torch.bfloat16 if setting.device.type == "cuda" else torch.float32


def _load(path: Path, setting: Setting) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path, dtype="auto").to(setting.device)


@cache
def _tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    return make_tokenizer(vocabulary)


def _trainer(setting: Setting, method: Method, base: Path, folder: Path) -> PeftGRPOTrainer:
    """As a script makes one, with completions of random tokens."""
    model = _load(base, setting)
    longest = 12 if setting.tiny else 128
    trainer = PeftGRPOTrainer(
        model=model,
        reward_funcs=_reward,
        args=PeftRLConfig(
            str(folder),
            use_cpu=setting.device.type == "cpu",
            bf16=setting.device.type == "cuda",
            peft_method=method.name,
            beta=0.04,
            learning_rate=2e-3 * min(method.rate, 4.0),
            num_generations=GENERATIONS,
            per_device_train_batch_size=PROMPTS * GENERATIONS,
            max_completion_length=longest,
            max_steps=STEPS,
            logging_steps=1,
            save_strategy="no",
            lr_scheduler_type="constant",
            report_to=[],
            disable_tqdm=True,
            seed=1,
        ),
        train_dataset=Dataset.from_dict({"prompt": [f"t{5 + i}" for i in range(PROMPTS)]}),
        processing_class=_tokenizer(model.config.vocab_size),
        rollout_func=partial(_rollouts, vocabulary=model.config.vocab_size, longest=longest),
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def _rollouts(prompts: list[str], _: Any, *, vocabulary: int, longest: int) -> dict[str, Any]:  # noqa: ANN401
    """The same completions for the same prompt at every call."""
    prompt_ids, completion_ids = [], []
    for place, prompt in enumerate(prompts):
        generator = random.Random(f"{prompt} {place % GENERATIONS}")  # noqa: S311 (no secret)
        prompt_ids.append([int(prompt[1:]), 7])
        length = generator.randrange(2, longest)
        completion_ids.append([generator.randrange(2, vocabulary) for _ in range(length)] + [1])
    return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": None}


def _reward(completion_ids: list[list[int]], **_: object) -> list[float]:
    """Something that differs in every group."""
    return [float(sum(ids) % 7) for ids in completion_ids]
