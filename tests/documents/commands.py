"""Which commands of the documents run without a network, a GPU, vLLM and further machines, and what the others need.

command -> the reason why it is not run here, or None
"""

import re
from collections.abc import Sequence

# Their pages show what they print, which another test compares.
OF_PLANS = "needs configs of the Hub: tests/training/test_recipes.py does, with the same sizes"
# The first that fits counts. Each row must fit a command, see test_commands.py.
_NEEDS = (
    (r"^(\w+/bin/)?(pip|uv pip|python3\.\d+ -m venv)\b|/bin/pip ", "installs packages: tests/test_wheel.py does"),
    (r"^echo 'transformers", "installs packages: tests/test_wheel.py does"),
    (r"^make ", "is what CI runs"),
    (r"^perl import-verl", "needs what verl has trained on GPUs: tests/verl/test_import.py makes it"),
    (
        r"^(vllm|torchrun|srun|sbatch|accelerate|ray|for i in|CUDA_VISIBLE_DEVICES)",
        "needs GPUs, vLLM or several machines",
    ),
    (r"rollout check|rollout\.servers=|^perl (train|eval) .*--processes 8\b", "needs GPUs or vLLM servers"),
    (r"^perl plan (node|fsdp2)-\S+ --gpu H100$", OF_PLANS),
    (r"^bash \S+/run\.sh$", "needs verl and GPUs"),
    (r"aime|math_500|gsm8k|Qwen/|nf4|node-\d|r1-distill|fsdp2|a100|--hub\b", "needs weights or problems of the Hub"),
    (r"SmolLM2", "downloads 93 MB: tests/test_real_model.py does"),
    (r"acquire|copyist", "takes minutes: tests/training/test_acquire.py does, every night"),
    (r"^trainer/bin/perl", "needs an environment that a line above makes"),
    (r"^perl zoo render$", "writes into the checkout: tests/zoo do"),
)
_QUICK = re.compile(
    r"^perl (recipes|methods( [a-z_]+)?|algorithms( \w+)?|explain \w+|reward (try|check)(?!.*--rollouts)"
    r"|zoo (list|rank|show)|spectrum zoo:|rollout command|plan (?!.*--measure)|eval --list-tasks"
    r"|(train|study) \S+ (.* )?--dry-run)"
)
# What they print depends on a policy that was trained or asked.
_LEARNED = re.compile(
    r"^perl (train|eval|watch|report|compare|push|export|spectrum runs|zoo verify|card|plan|doctor"
    r"|reward check .*--rollouts)"
)


def need(command: str) -> str | None:
    """What a command needs that a CPU without a network lacks; None: it runs here."""
    return next((reason for pattern, reason in _NEEDS if re.search(pattern, command)), None)


def unused_needs(commands: Sequence[str]) -> list[str]:
    """Patterns that no command fits."""
    return [pattern for pattern, _ in _NEEDS if not any(re.search(pattern, command) for command in commands)]


def is_quick(command: str) -> bool:
    """Whether it trains nothing and asks no model, and needs no shell."""
    return need(command) is None and bool(_QUICK.match(command)) and not re.search(r"[|>&;$]", command)


def is_learned(command: str) -> bool:
    """Whether the numbers that it prints may differ a little on another processor."""
    return bool(_LEARNED.match(command))
