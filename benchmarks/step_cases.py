"""What benchmarks of a training step measure: lengths of prompts and completions, the models, the rollouts.

Case, Scale -> random model, rollouts of random tokens

Everything is drawn with fixed seeds; nothing is read from the Hub. Knows nothing of trainers.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from step_flops import Group
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

END = 1  # the token that ends a completion; 0 is padding


@dataclass(frozen=True)
class Case:
    """What is trained on; lengths in tokens.

    Attributes:
        name: As it is asked for and printed.
        prompts: Shortest and longest prompt, uniform.
        completions: Shortest and longest completion.
        lognormal: Mean and sigma of a lognormal that is cut to those; None: uniform.
        dead: Share of groups whose rewards agree.
        beta: Weight of the KL term.
        vocabulary: Size of the head.
        widths: Of the models that the case is run with; None: all.
        generations: Completions of a prompt.
    """

    name: str
    prompts: tuple[int, int]
    completions: tuple[int, int]
    lognormal: tuple[float, float] | None = None
    dead: float = 0.0
    beta: float = 0.0
    vocabulary: int = 8192
    widths: tuple[int, ...] | None = None
    generations: int = 8

    def shorter(self, times: int) -> "Case":
        """The same with lengths divided, and the vocabulary of a toy."""
        return replace(
            self,
            prompts=(max(self.prompts[0] // times, 2), max(self.prompts[1] // times, 2)),
            completions=(max(self.completions[0] // times, 2), max(self.completions[1] // times, 2)),
            lognormal=(self.lognormal[0] / times, self.lognormal[1]) if self.lognormal else None,
            vocabulary=self.vocabulary // (4 * times),
        )


REASONING = Case("reasoning", (48, 96), (4, 512), lognormal=(96.0, 0.9), dead=0.4)
CASES = (
    REASONING,
    replace(REASONING, name="reasoning-kl", beta=0.04),
    replace(REASONING, name="reasoning-all-live", dead=0.0),
    Case("short", (24, 32), (24, 32)),
    Case("long-prompts", (480, 640), (40, 72)),
    replace(REASONING, name="reasoning-large-head", vocabulary=32768, widths=(256,)),
)


@dataclass(frozen=True)
class Scale:
    """The model and the batch.

    Attributes:
        width: Of the residual stream.
        architecture: transformers' name.
        shape: The rest of the model's config.
        groups: Prompts in a step.
        rows: Of TRL's micro-batches.
        arguments: Of both trainers, in addition.
        bf16: Whether weights are bfloat16.
    """

    width: int
    architecture: str
    shape: dict[str, Any]
    groups: int
    rows: int
    arguments: dict[str, Any]
    bf16: bool = False


def cpu_scale(width: int, *, quick: bool) -> Scale:
    """A small Qwen3."""
    shape = {
        "intermediate_size": 3 * width,
        "num_hidden_layers": 1 if quick else 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": width // 8,
        "tie_word_embeddings": False,
    }
    arguments = {"use_cpu": True, "bf16": False, "gradient_checkpointing": False}
    return Scale(width, "qwen3", shape, groups=2 if quick else 8, rows=8, arguments=arguments)


@dataclass(frozen=True)
class Rollout:
    """A prompt, its completions, their rewards."""

    prompt: list[int]
    completions: list[list[int]]
    rewards: list[float]

    @property
    def lengths(self) -> Group:
        """What FLOPs depend on."""
        return Group(len(self.prompt), tuple(map(len, self.completions)), live=len(set(self.rewards)) > 1)


def draw_rollouts(case: Case, groups: int) -> list[Rollout]:
    """Random tokens; dead groups are spread evenly, live ones hold a right and a wrong completion."""
    generator = torch.Generator().manual_seed(1)

    def tokens(length: int) -> list[int]:
        return torch.randint(END + 1, case.vocabulary, (length,), generator=generator).tolist()

    rollouts = []
    for group in range(groups):
        prompt = int(torch.randint(case.prompts[0], case.prompts[1] + 1, (1,), generator=generator))
        lengths = torch.randint(case.completions[0], case.completions[1] + 1, (case.generations,), generator=generator)
        if case.lognormal:
            mean, sigma = case.lognormal
            logs = torch.tensor(mean).log() - sigma**2 / 2 + sigma * torch.randn(case.generations, generator=generator)
            lengths = logs.exp().long().clamp(*case.completions)
        dead = int((group + 1) * case.dead) > int(group * case.dead)
        right = 0 if dead else int(torch.randint(1, case.generations, (1,), generator=generator))
        rewards = [float(place < right) for place in torch.randperm(case.generations, generator=generator).tolist()]
        rollouts.append(Rollout(tokens(prompt), [[*tokens(n - 1), END] for n in lengths.tolist()], rewards))
    return rollouts


def make_base(case: Case, scale: Scale, *, empty: bool = False) -> PreTrainedModel:
    """A random model, the same each time; or one without weights, for its shapes."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        scale.architecture,
        vocab_size=case.vocabulary,
        hidden_size=scale.width,
        max_position_embeddings=case.prompts[1] + case.completions[1],
        pad_token_id=0,
        eos_token_id=END,
        **scale.shape,
    )
    with torch.device("meta" if empty else "cpu" if scale.arguments["use_cpu"] else "cuda"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if scale.bf16 else torch.float32)


def make_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """A word for each token; nothing is read from the Hub."""
    names = [f"t{token}" for token in range(vocabulary)]
    words = Tokenizer(models.WordLevel({name: token for token, name in enumerate(names)}, unk_token=names[0]))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token=names[0], eos_token=names[END], padding_side="left"
    )
