"""The same training twice: by TRL's trainer, which is the oracle, and by ours.

kinds of groups, options -> fixed rollouts, a tiny random Qwen3, an adapter off its start -> the adapter after each step

Run by torchrun it trains with both trainers in several processes and writes what each of them finds.
"""

import copy
import math
import os
import sys
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import AdaLoraConfig, IA3Config, LNTuningConfig, LoraConfig, PeftConfig, get_peft_model
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, PrinterCallback, Qwen3Config, Qwen3ForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from perl import PeftGRPOTrainer, PeftRLConfig
from tests.oracles.rollouts import (
    EOS,
    GENERATIONS,
    LONGEST,
    MIXED,
    PAD,
    ROWS,
    VOCABULARY,
    Kinds,
    preset_reward,
    rollout_function,
    rollout_table,
)

STEPS = 3

TARGETS = ["k_proj", "down_proj"]
NORMS = ["input_layernorm", "post_attention_layernorm", "q_norm", "k_norm", "model.norm"]
LORA = {"task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8}
ADAPTERS: dict[str, PeftConfig] = {
    "lora": LoraConfig(**LORA, target_modules=TARGETS),
    "lora everywhere": LoraConfig(**LORA, target_modules="all-linear"),
    "dora": LoraConfig(**LORA, target_modules=TARGETS, use_dora=True),
    "adalora": AdaLoraConfig(
        task_type="CAUSAL_LM",
        target_modules=TARGETS,
        init_r=5,
        target_r=4,
        total_step=STEPS,
        tinit=0,
        tfinal=1,
        orth_reg_weight=0.05,
    ),
    "ia3": IA3Config(
        task_type="CAUSAL_LM", target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]
    ),
    "ln": LNTuningConfig(task_type="CAUSAL_LM", target_modules=NORMS),
}
# Learning rates with which three steps move the adapter by some percent of its norm, far above the rounding of its
# elements; and what a loss that is a sum over tokens, or is divided by the longest length, wants of them.
RATES = {"lora": 0.5, "lora everywhere": 0.3, "dora": 0.5, "adalora": 0.5, "ia3": 10.0, "ln": 3.0}
SHARE_OF_RATE = {"luspo": 0.1, "dr_grpo": 3.0}
# Arguments of a trainer on a CPU that draws nothing at random and reports to nobody.
QUIET = {
    "use_cpu": True,
    "bf16": False,
    "activation_checkpointing": False,
    "dataloader_pin_memory": False,
    "report_to": [],
    "disable_tqdm": True,
    "save_strategy": "no",
    "logging_steps": 1,
}
# Standard deviation of what is added to the adapter before the first step.
OFFSET = 0.1


class OracleTrainer(GRPOTrainer):
    """TRL's trainer without what rounding makes of groups whose rewards agree: advantages, and a deviation that counts.

    With AdaLoRA, which TRL does not run, it does what PEFT's documentation asks of a training loop.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.live_rows: list[int] = []
        self.spurious: list[float] = []
        self.adalora = next((c for c in self.model.peft_config.values() if isinstance(c, AdaLoraConfig)), None)
        if self.adalora is not None:
            self.add_callback(Allocation(self.model))

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.rewards_NK = super()._calculate_rewards(*args, **kwargs)
        return self.rewards_NK

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        rewards_PG = self.rewards_NK[:, 0].view(-1, self.num_generations)
        agree_N = (rewards_PG == rewards_PG[:, :1]).all(dim=1).repeat_interleave(self.num_generations)
        same = [len(set(group)) == 1 for group in rewards_PG.tolist()]
        self._metrics["train"]["frac_reward_zero_std"][-1] = sum(same) / len(same)
        first = self.accelerator.process_index * len(inputs)
        agree_N = agree_N[first : first + len(inputs)]
        self.spurious.append((output["advantages"].abs() * agree_N).max().item())
        output["advantages"] = output["advantages"].masked_fill(agree_N, 0.0)
        self.live_rows.append(int(output["advantages"].count_nonzero()))
        return output

    def _compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        loss = super()._compute_loss(model, inputs)
        if self.adalora is None:
            return loss
        columns = [p.T if "lora_A" in name else p for name, p in model.named_parameters() if ".lora_" in name]
        columns = [factor for factor in columns if factor.size(1) == self.adalora.init_r]  # not the singular values
        distances = [torch.linalg.norm(factor.T @ factor - torch.eye(factor.size(1))) for factor in columns]
        share = self.adalora.orth_reg_weight / self.current_gradient_accumulation_steps
        return loss + share * sum(distances) / len(distances)


class Allocation(TrainerCallback):
    """PEFT's ``update_and_allocate`` after each optimizer step."""

    def __init__(self, policy: Any) -> None:
        self.policy = policy

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        self.policy.base_model.update_and_allocate(state.global_step + 1)


class NoEngine:
    """Where vLLM would be. The rollouts are fixed, so nothing has to be kept in step."""

    def sync_weights(self) -> None:
        pass


class Diary(TrainerCallback):
    """Moves the adapter off its start, so that every tensor has a gradient, and keeps it after each step."""

    def __init__(self, policy: Any, offset: float) -> None:
        self.trained = {name: p for name, p in policy.named_parameters() if p.requires_grad}
        self.offset = offset
        self.pages: list[dict[str, torch.Tensor]] = []

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        displace(self.trained, self.offset)
        self.on_step_end()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.pages.append({name: p.detach().clone() for name, p in self.trained.items()})


def displace(tensors: dict[str, torch.Tensor], offset: float) -> None:
    generator = torch.Generator().manual_seed(23)
    with torch.no_grad():
        for tensor in tensors.values():
            tensor += offset * torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)


@dataclass(frozen=True)
class Training:
    """The adapter's tensors before the first step and after each, and what was logged.

    Attributes:
        live_rows: By TRL, in each batch of rollouts: rows with an advantage.
        spurious: By TRL, in each batch of rollouts: the largest advantage of a row whose group's rewards agree.
    """

    pages: list[dict[str, torch.Tensor]]
    history: list[dict[str, float]]
    live_rows: list[int] = field(default_factory=list)
    spurious: list[float] = field(default_factory=list)

    def update(self, first: int = 0, last: int = -1) -> dict[str, torch.Tensor]:
        """What the steps from ``first`` to ``last`` have added to each tensor."""
        return {name: self.pages[last][name] - start for name, start in self.pages[first].items()}


@cache
def base(dtype: torch.dtype) -> Qwen3ForCausalLM:
    """Weights large enough for attention and logits to depend on the tokens."""
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        initializer_range=0.15,
        tie_word_embeddings=False,
        pad_token_id=PAD,
        eos_token_id=EOS,
    )
    torch.manual_seed(0)
    return Qwen3ForCausalLM(config).to(dtype)


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCABULARY)}, unk_token="t0"))  # noqa: S106
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    pad, end = (AddedToken(word, single_word=True, special=True) for word in ("t0", "t1"))  # no part of t17
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token=pad, eos_token=end, padding_side="left")


def train(
    trainer_class: type[GRPOTrainer],
    *,
    kinds: Kinds = MIXED,
    adapter: str = "lora",
    continued: bool = False,
    dtype: torch.dtype = torch.float32,
    log_probs: bool = False,
    tools: bool = False,
    engine: bool = False,
    **options: Any,
) -> Training:
    """Three plain SGD steps, if ``options`` do not say otherwise.

    Args:
        trainer_class: TRL's trainer or ours.
        kinds: Of the groups of each step.
        adapter: A key of ``ADAPTERS``.
        continued: Whether the adapter is given on a PeftModel, off its start, instead of as a config.
        dtype: Of the base and the adapter.
        log_probs: Whether the rollouts say with which log-probabilities they were sampled.
        tools: Whether some tokens are a tool's.
        engine: Whether the trainer must take the rollouts for vLLM's, and correct for its numbers.
        **options: Fields of ``GRPOConfig``, and for our trainer of ``PeftRLConfig``. ``model``: instead of the tiny
            Qwen3; a copy of it is trained.
    """
    model = copy.deepcopy(options.pop("model", None) or base(dtype))
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    arguments = {
        **QUIET,
        "optim": "sgd",
        "learning_rate": RATES[adapter] * SHARE_OF_RATE.get(options.get("loss_type", ""), 1.0),
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "max_steps": STEPS,
        "num_generations": GENERATIONS,
        "per_device_train_batch_size": ROWS // processes // options.get("gradient_accumulation_steps", 1),
        "max_completion_length": LONGEST,
        "shuffle_dataset": False,
        "seed": 11,
        **options,
    }
    table, config = rollout_table(kinds), copy.deepcopy(ADAPTERS[adapter])
    if continued:
        torch.manual_seed(11)
        model, config = get_peft_model(model, config), None
        displace({name: p for name, p in model.named_parameters() if p.requires_grad}, OFFSET)
    trainer = trainer_class(
        model=model,
        reward_funcs=preset_reward,
        args=(PeftRLConfig if issubclass(trainer_class, PeftGRPOTrainer) else GRPOConfig)("run", **arguments),
        train_dataset=Dataset.from_dict({"prompt": list(table)}),
        processing_class=tokenizer(),
        peft_config=config,
        rollout_func=rollout_function(table, log_probs=log_probs or engine, tools=tools),
    )
    if engine:
        trainer.use_vllm, trainer.vllm_generation, trainer._last_loaded_step = True, NoEngine(), -1
    trainer.remove_callback(PrinterCallback)
    diary = Diary(trainer.accelerator.unwrap_model(trainer.model), 0.0 if continued else OFFSET)
    trainer.add_callback(diary)  # the last one: a new adapter must start at the base until its trainer has looked
    torch.manual_seed(3)  # both draw the order of rows from it
    trainer.train()
    of_trl = (trainer.live_rows, trainer.spurious) if isinstance(trainer, OracleTrainer) else ()
    return Training(diary.pages, trainer.state.log_history, *of_trl)


def norm(tensors: dict[str, torch.Tensor]) -> float:
    return math.sqrt(sum(tensor.double().pow(2).sum().item() for tensor in tensors.values()))


def relative_difference(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    if ours.keys() != theirs.keys():
        raise ValueError("other tensors")
    return norm({name: ours[name] - theirs[name] for name in ours}) / norm(theirs)


# Two groups a process; in the second step all rows of the second process are dead.
SHARDED: Kinds = (("live", "half", "tenths", "live"), ("live", "cut", "dyadic", "tenths"), MIXED[2])


def main() -> None:
    """``two_trainers.py FOLDER LOSS...`` writes a file for each process, trainer and loss type."""
    folder, *losses = sys.argv[1:]
    torch.set_num_threads(1)
    for loss in losses:
        options = {"kinds": SHARDED, "loss_type": loss, "gradient_accumulation_steps": 2}
        for name, found in (
            ("theirs", train(OracleTrainer, **options)),
            ("ours", train(PeftGRPOTrainer, **options)),
            ("ours-in-many-passes", train(PeftGRPOTrainer, **options, train_tokens_per_microbatch=50)),
        ):
            file = Path(folder) / f"{name}-{loss}-{os.environ['RANK']}.pt"
            torch.save((found.pages, found.history, found.live_rows, found.spurious), file)


if __name__ == "__main__":
    main()
