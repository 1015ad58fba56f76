"""Writes what `perl plan` derives at the head of recipes for GPUs, and for one of them into `docs/scaling.md`.

Run as ``python docs/plan_recipes.py``. The Hub is not asked: models are of the sizes that their published configs have,
without weights, and prompts stand for those of the data set by their number of tokens (161 on average, up to 500).
"""

import json
import random
import re
import tempfile
import textwrap
from pathlib import Path

from transformers import (
    AutoTokenizer,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3_5Config,
    Qwen3MoeConfig,
)

from perl.recipe.assets import packaged_recipes
from perl.sandbox import BASE_FOLDER
from perl.training.forecast import Forecast, answer
from perl.training.forecast_text import forecast_lines
from perl.training.hardware import GIB
from perl.training.prepare import read_recipe

PAGE = Path(__file__).parent / "scaling.md"
SHOWN = "node-7b"
"""On the page."""
NOT_RUN = "# Derived, not run: we have not trained it yet, and no score is known for it."


def qwen(
    layers: int, hidden: int, inner: int, heads: tuple[int, int], vocabulary: int = 152064, *, tied: bool = False
) -> Qwen2Config:
    """The sizes of a Qwen2."""
    return Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        tie_word_embeddings=tied,
    )


def llama_70b() -> LlamaConfig:
    """The sizes of Llama 3.3."""
    return LlamaConfig(
        vocab_size=128256,
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        tie_word_embeddings=False,
    )


def qwen35(layers: int, hidden: int, inner: int, heads: tuple[int, int], values: int) -> Qwen3_5Config:
    """The sizes of a Qwen3.5, of whose layers every fourth has attention; it also sees."""
    text = {
        **{"num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": inner, "vocab_size": 248320},
        **{"num_attention_heads": heads[0], "num_key_value_heads": heads[1], "head_dim": 256},
        **{"linear_num_key_heads": 16, "linear_num_value_heads": values, "max_position_embeddings": 32768},
    }
    config = Qwen3_5Config(text_config=text, tie_word_embeddings=True)
    config.architectures = ["Qwen3_5ForConditionalGeneration"]
    return config


def gemma3_1b() -> Gemma3TextConfig:
    """The sizes of Gemma 3 1B."""
    sizes = {"num_hidden_layers": 26, "hidden_size": 1152, "intermediate_size": 6912, "vocab_size": 262144}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "sliding_window": 512}
    return Gemma3TextConfig(**sizes, **heads, tie_word_embeddings=True)


def gpt_oss_20b() -> GptOssConfig:
    """The sizes of gpt-oss-20b."""
    return GptOssConfig(num_hidden_layers=24, num_local_experts=32)


def qwen3_30b() -> Qwen3MoeConfig:
    """The sizes of Qwen3-30B-A3B."""
    sizes = {"num_hidden_layers": 48, "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128}
    return Qwen3MoeConfig(**sizes, **heads, num_experts=128, num_experts_per_tok=8, tie_word_embeddings=False)


# Recipes whose head has the figures of a plan: sizes of the model, and the GPU.
HEADED: dict[str, tuple[PretrainedConfig, str]] = {
    "t4-0.5b": (qwen(24, 896, 4864, (14, 2), 151936, tied=True), "T4"),
    "t4-3b-int8": (qwen(36, 2048, 11008, (16, 2), 151936, tied=True), "T4"),
    "rtx-1.5b-vllm": (qwen(28, 1536, 8960, (12, 2), 151936, tied=True), "RTX 4090"),
    "rtx-7b-nf4": (qwen(28, 3584, 18944, (28, 4)), "RTX 4090"),
    "a100-14b-nf4": (qwen(48, 5120, 13824, (40, 8)), "A100 40GB"),
    "h100-32b-nf4": (qwen(64, 5120, 27648, (40, 8)), "H100"),
    "pair-14b": (qwen(48, 5120, 13824, (40, 8)), "H100"),
    "node-32b-nf4": (qwen(64, 5120, 27648, (40, 8)), "H100"),
    "node-70b-nf4": (llama_70b(), "H100"),
    "t4-1.5b-nf4": (qwen(28, 1536, 8960, (12, 2), 151936, tied=True), "T4"),
    "a100-7b-vllm": (qwen(28, 3584, 18944, (28, 4)), "A100 80GB"),
    "r1-distill-1.5b-lora": (qwen(28, 1536, 8960, (12, 2), 151936), "H100"),
    "node-1.5b": (qwen(28, 1536, 8960, (12, 2), 151936), "H100"),
    "node-7b": (qwen(28, 3584, 18944, (28, 4)), "H100"),
    "fsdp2-32b": (qwen(64, 5120, 27648, (40, 8)), "H100"),
    "fsdp2-70b": (llama_70b(), "H100"),
    "qwen3.5-0.8b": (qwen35(24, 1024, 3584, (8, 2), 16), "RTX 4090"),
    "qwen3.5-4b-nf4": (qwen35(32, 2560, 9216, (16, 4), 32), "RTX 4090"),
    "qwen3.5-4b": (qwen35(32, 2560, 9216, (16, 4), 32), "H100"),
    "gemma3-1b": (gemma3_1b(), "RTX 4090"),
    "gpt-oss-20b": (gpt_oss_20b(), "H100"),
    "qwen3-30b-a3b": (qwen3_30b(), "H100"),
}


def write_prompts(path: Path) -> None:
    """Digits, one a token of the sandbox's tokenizer."""
    draw = random.Random(0)  # noqa: S311 (no secret)
    lengths = [*(draw.randint(120, 200) for _ in range(199)), 500]
    rows = [{"prompt": "".join(draw.choices("0123456789", k=length)), "solution": "1"} for length in lengths]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")


def forecast(name: str, config: PretrainedConfig, gpu: str, folder: Path) -> Forecast:
    """What a packaged recipe costs on a GPU, with stand-ins for model and data."""
    config.get_text_config().max_position_embeddings, config.dtype = 32768, "bfloat16"
    config.save_pretrained(folder)
    AutoTokenizer.from_pretrained(BASE_FOLDER).save_pretrained(folder)
    write_prompts(folder / "prompts.jsonl")
    data = f"{{name: {folder / 'prompts.jsonl'}, columns: {{prompt: prompt, answer: solution}}}}"
    stand_ins = [f"model.name={folder}", f"data.train={data}", "data.eval=null", "data.prompt_template=null"]
    plain = ["data.chat=false", "data.drop_overlap=false", "data.thinking=null"]
    recipe = read_recipe(name, [*stand_ins, *plain])
    return answer(recipe, gpu=gpu)


def figures(name: str, folder: Path) -> str:
    """The lines at the head of a recipe that say what it needs."""
    config, gpu = HEADED[name]
    found = forecast(name, config, gpu, folder)
    memory = next(iter(found.strategies.values())).memory
    parts = {"base": memory.weights, "adapter": memory.adapter, "vLLM": memory.engine, "rollouts": memory.cache}
    shown = ", ".join(f"{part} {size / GIB:.1f}" for part, size in parts.items() if size)
    recomputed = ", activations computed again" if memory.plan.recompute else ""
    text = (
        f"`perl plan {name} --gpu '{gpu}'`: {memory.least / GIB:.1f} of {memory.available / GIB:.1f} GiB at least "
        f"({shown}), passes of {memory.plan.tokens:,} tokens{recomputed}, with prompts of 161 tokens on average, up to "
        "500."
    )
    return "\n".join([*textwrap.wrap(text, 117, initial_indent="# ", subsequent_indent="# "), NOT_RUN])


def with_figures(recipe: str, lines: str) -> str:
    """A recipe's text with these lines after its first sentence, in the place of earlier ones."""
    rest = re.sub(rf"# `perl plan .*?{re.escape(NOT_RUN)}\n(#\n)?", "", recipe, count=1, flags=re.DOTALL)
    sentence, _, rest = rest.partition("\n#\n")
    further = "" if rest.startswith("model:") else "#\n"
    return f"{sentence}\n#\n{lines}\n{further}{rest}"


def block(folder: Path) -> str:
    """The plan that stands on the page, with its command."""
    config, gpu = HEADED[SHOWN]
    lines = forecast_lines(forecast(SHOWN, config, gpu, folder))
    text = "\n".join(lines).replace(str(folder), read_recipe(SHOWN).model.name)
    return f"```bash\nperl plan {SHOWN} --gpu {gpu}\n```\n\n```text\n{text}\n```"


def main() -> None:
    """Puts the plan and each head into its place."""
    with tempfile.TemporaryDirectory() as folder:
        text = block(Path(folder))
    place = rf"```bash\nperl plan {SHOWN} --gpu .*?\n```\n\n```text\n.*?\n```"
    page = re.sub(place, lambda _: text, PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    PAGE.write_text(page, encoding="utf-8")
    for name in HEADED:
        path = packaged_recipes()[name]
        with tempfile.TemporaryDirectory() as folder:
            lines = figures(name, Path(folder))
        path.write_text(with_figures(path.read_text(encoding="utf-8"), lines), encoding="utf-8")


if __name__ == "__main__":
    main()
