"""A plan where the Hub cannot be reached: of a base whose sizes ship with perl, and of prompts that are estimated.

Recipe -> Plan, with what it assumes

A folder with a config stands for the base, characters that are counted for its tokenizer. What trains refuses it.
"""

import json
import random
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Sequence, Split
from transformers import PreTrainedTokenizerFast

from perl.errors import DataError, ModelError
from perl.policy.bases import BASES, shipped_config
from perl.policy.hub_files import is_out_of_reach
from perl.recipe import Recipe
from perl.recipe.agent_section import AgentSection
from perl.recipe.recipe import DEFAULT_REWARDS
from perl.recipe.sections import DataSection
from perl.training.inputs import read_inputs
from perl.training.plan import Plan, make_plan
from perl.training.prepare import plan_of, planned_arguments

CHARACTERS_OF_A_TOKEN = 4
"""Of problems in words (3.9 of GSM8K with SmolLM2's tokenizer); LaTeX has more tokens (2.6 characters in MATH-500)."""
_CHAT = "{% for m in messages %}<|im_start|>{{m.role}}\n{{m.content}}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"


def plan_or_assume(recipe: Recipe, *, runs_here: bool = True, engine_here: bool = True) -> Plan:
    """The plan of a recipe as it stands; without the Hub of what ships with perl, as its ``assumed`` says.

    Args and errors are those of :func:`perl.training.prepare.plan_of`.
    """
    try:
        return plan_of(recipe, runs_here=runs_here, engine_here=engine_here)
    except ModelError as error:
        of_the_base = error.mistakes[0].where == "model.name" and is_out_of_reach(error)
        if not of_the_base or recipe.model.name not in BASES:
            raise
    try:
        return assumed_plan(recipe, runs_here=runs_here, engine_here=engine_here)
    except DataError as error:
        if not is_out_of_reach(error):
            raise
    return assumed_plan(recipe, data_here=False, runs_here=runs_here, engine_here=engine_here)


def assumed_plan(recipe: Recipe, *, data_here: bool = True, runs_here: bool = True, engine_here: bool = True) -> Plan:
    """The plan of a recipe on one of :data:`perl.policy.bases.BASES`, its tokens estimated, or all of its data."""
    with TemporaryDirectory() as folder:
        shipped_config(recipe.model.name).save_pretrained(folder)
        there = replace(
            recipe,
            model=recipe.model.model_copy(update={"name": folder, "revision": None}),
            agent=AgentSection(),
            data=recipe.data.model_copy(update={"thinking": None}),
            eval=recipe.eval.model_copy(update={"enabled": False}),
        )
        if not data_here:  # nor the columns that its rewards need
            there = replace(there, data=_assumed_data(Path(folder) / "prompts.jsonl"), rewards=DEFAULT_REWARDS)
        arguments = planned_arguments(there, runs_here=runs_here, engine_here=engine_here)
        plan = make_plan(there, arguments, read_inputs(there, arguments, _counting(), runs_here=runs_here))
    sizes = f"{recipe.model.name} is not here: its sizes are those that ship with perl"
    lengths = f"prompts of {plan.mean_prompt:.0f} tokens on average, up to {plan.longest_prompt}"
    data = f"its data is not here: {len(plan.problems.train):,} {lengths}"
    counted = f"{CHARACTERS_OF_A_TOKEN} characters of a prompt are a token"
    tools = ("the texts of its tools and what they answer are not counted",) if recipe.agent.acts else ()
    return replace(plan, recipe=recipe, assumed=(sizes, counted if data_here else data, *tools))


def _counting() -> PreTrainedTokenizerFast:
    """A tokenizer that cuts a text into parts of so many characters; the first of them stands for all."""
    words = Tokenizer(WordLevel({chr(number): number for number in range(256)}, "?"))
    parts = Split(Regex(rf"[\s\S]{{1,{CHARACTERS_OF_A_TOKEN}}}"), "isolated")
    words.pre_tokenizer = Sequence([parts, Split(Regex(r"(?<=[\s\S])[\s\S]+"), "removed")])
    return PreTrainedTokenizerFast(tokenizer_object=words, chat_template=_CHAT)


def _assumed_data(file: Path) -> DataSection:
    """Of 161 tokens on average, as problems in words have; one of 200 has 500. So many that any step has enough."""
    draw = random.Random(0)  # noqa: S311 (no secret)
    lengths = 10 * [*(draw.randint(120, 200) for _ in range(199)), 500]
    texts = [str(number).ljust(CHARACTERS_OF_A_TOKEN * length, ".") for number, length in enumerate(lengths)]
    rows = [{"prompt": text, "answer": str(number)} for number, text in enumerate(texts)]
    file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return DataSection.model_validate({"train": str(file), "chat": False})
