"""Writes what `perl plan` derives for the recipes of many GPUs into `docs/scaling.md`.

Run as ``python docs/plan_recipes.py``. The Hub is not asked: models are of the sizes that their published configs have,
without weights, and prompts stand for those of the data set by their number of tokens (161 on average, up to 500).
"""

import json
import random
import re
import tempfile
from pathlib import Path

from transformers import AutoTokenizer, LlamaConfig, PretrainedConfig, Qwen2Config

from perl.sandbox import BASE_FOLDER
from perl.training.forecast_text import forecast_lines
from perl.training.question import Question, answer
from perl.training.stages import read_recipe

PAGE = Path(__file__).parent / "scaling.md"
GPU = "H100"


def qwen(layers: int, hidden: int, inner: int, heads: tuple[int, int], vocabulary: int = 152064) -> Qwen2Config:
    """The sizes of a Qwen2."""
    return Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        tie_word_embeddings=False,
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


SIZES: dict[str, PretrainedConfig] = {
    "node-1.5b": qwen(28, 1536, 8960, (12, 2), 151936),
    "node-7b": qwen(28, 3584, 18944, (28, 4)),
    "fsdp2-32b": qwen(64, 5120, 27648, (40, 8)),
    "fsdp2-70b": llama_70b(),
}


def write_prompts(path: Path) -> None:
    """Digits, one a token of the sandbox's tokenizer."""
    draw = random.Random(0)  # noqa: S311 (no secret)
    lengths = [*(draw.randint(120, 200) for _ in range(199)), 500]
    rows = [{"prompt": "".join(draw.choices("0123456789", k=length)), "solution": "1"} for length in lengths]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")


def planned(name: str, folder: Path) -> str:
    """The plan of a packaged recipe with stand-ins for model and data."""
    config = SIZES[name]
    config.max_position_embeddings, config.dtype = 32768, "bfloat16"
    config.save_pretrained(folder)
    AutoTokenizer.from_pretrained(BASE_FOLDER).save_pretrained(folder)
    write_prompts(folder / "prompts.jsonl")
    data = f"{{name: {folder / 'prompts.jsonl'}, columns: {{prompt: prompt, answer: solution}}}}"
    stand_ins = [f"model.name={folder}", f"data.train={data}", "data.eval=null", "data.prompt_template=null"]
    recipe = read_recipe(name, [*stand_ins, "data.chat=false", "data.drop_overlap=false"])
    lines = forecast_lines(answer(recipe, Question(gpu=GPU)))
    return "\n".join(lines).replace(str(folder), read_recipe(name).model.name)


def block(name: str, text: str) -> str:
    """As it stands on the page."""
    return f"```\n$ perl plan {name} --gpu {GPU}\n{text}\n```"


def main() -> None:
    """Puts each plan into its place."""
    page = PAGE.read_text(encoding="utf-8")
    for name in SIZES:
        with tempfile.TemporaryDirectory() as folder:
            text = block(name, planned(name, Path(folder)))
        page = re.sub(rf"```\n\$ perl plan {re.escape(name)} .*?\n```", lambda _, new=text: new, page, flags=re.DOTALL)
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
