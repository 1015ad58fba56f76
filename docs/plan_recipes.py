"""Writes what `perl plan` derives at the head of recipes for GPUs, and for one of them into `docs/scaling.md`.

Run as ``python docs/plan_recipes.py``. The Hub is not asked: models are of the sizes that ship with perl, and prompts
stand for those of the data set by their number of tokens (161 on average, up to 500).
"""

import re
import textwrap
from pathlib import Path

from perl.recipe.assets import packaged_recipes
from perl.training.forecast import Forecast, forecast_of
from perl.training.forecast_text import forecast_lines
from perl.training.hardware import GIB
from perl.training.prepare import read_recipe
from perl.training.without_hub import assumed_plan

PAGE = Path(__file__).parent / "scaling.md"
SHOWN = "node-7b"
"""On the page."""
NOT_RUN = "# Derived, not run: we have not trained it yet, and no score is known for it."


# Recipes whose head has the figures of a plan, and the GPU that they are for.
HEADED = {
    "t4-0.5b": "T4",
    "t4-3b-int8": "T4",
    "rtx-1.5b-vllm": "RTX 4090",
    "rtx-7b-nf4": "RTX 4090",
    "a100-14b-nf4": "A100 40GB",
    "h100-32b-nf4": "H100",
    "pair-14b": "H100",
    "node-32b-nf4": "H100",
    "node-70b-nf4": "H100",
    "t4-1.5b-nf4": "T4",
    "a100-7b-vllm": "A100 80GB",
    "r1-distill-1.5b-lora": "H100",
    "node-1.5b": "H100",
    "node-7b": "H100",
    "fsdp2-32b": "H100",
    "fsdp2-70b": "H100",
    "qwen3.5-0.8b": "RTX 4090",
    "qwen3.5-4b-nf4": "RTX 4090",
    "qwen3.5-4b": "H100",
    "gemma3-1b": "RTX 4090",
    "gpt-oss-20b": "H100",
    "qwen3-30b-a3b": "H100",
}


def forecast(name: str) -> Forecast:
    """What a packaged recipe costs on its GPU, with stand-ins for model and data."""
    return forecast_of(assumed_plan(read_recipe(name), data_here=False, runs_here=False), HEADED[name])


def figures(name: str) -> str:
    """The lines at the head of a recipe that say what it needs."""
    memory = next(iter(forecast(name).strategies.values())).memory
    parts = {"base": memory.weights, "adapter": memory.adapter, "vLLM": memory.engine, "rollouts": memory.cache}
    shown = ", ".join(f"{part} {size / GIB:.1f}" for part, size in parts.items() if size)
    recomputed = ", activations computed again" if memory.plan.recompute else ""
    text = (
        f"`perl plan {name} --gpu '{HEADED[name]}'`: {memory.least / GIB:.1f} of {memory.available / GIB:.1f} GiB at "
        f"least ({shown}), passes of {memory.plan.tokens:,} tokens{recomputed}, with prompts of 161 tokens on average, "
        "up to 500."
    )
    return "\n".join([*textwrap.wrap(text, 117, initial_indent="# ", subsequent_indent="# "), NOT_RUN])


def with_figures(recipe: str, lines: str) -> str:
    """A recipe's text with these lines after its first sentence, in the place of earlier ones."""
    rest = re.sub(rf"# `perl plan .*?{re.escape(NOT_RUN)}\n(#\n)?", "", recipe, count=1, flags=re.DOTALL)
    sentence, _, rest = rest.partition("\n#\n")
    further = "" if rest.startswith("model:") else "#\n"
    return f"{sentence}\n#\n{lines}\n{further}{rest}"


def block() -> str:
    """The plan that stands on the page, with its command."""
    text = "\n".join(forecast_lines(forecast(SHOWN)))
    return f"```bash\nperl plan {SHOWN} --gpu {HEADED[SHOWN]}\n```\n\n```text\n{text}\n```"


def main() -> None:
    """Puts the plan and each head into its place."""
    text = block()
    place = rf"```bash\nperl plan {SHOWN} --gpu .*?\n```\n\n```text\n.*?\n```"
    page = re.sub(place, lambda _: text, PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    PAGE.write_text(page, encoding="utf-8")
    for name in HEADED:
        path = packaged_recipes()[name]
        path.write_text(with_figures(path.read_text(encoding="utf-8"), figures(name)), encoding="utf-8")


if __name__ == "__main__":
    main()
