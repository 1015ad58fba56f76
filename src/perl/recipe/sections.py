"""The sections of a recipe: every setting once, with its type, bound, default and sentence.

YAML mapping -> Section

``train`` is not here: its fields are those of ``PeftRLConfig`` (``trainer/arguments/config.py``).
"""

import re
import string
from pathlib import PurePath
from typing import Any, Literal

from pydantic import Field, model_validator

from perl.recipe.agent_section import AgentSection
from perl.recipe.engine_section import STRATEGIES as STRATEGIES
from perl.recipe.engine_section import EngineSection as EngineSection
from perl.recipe.engine_section import Strategy as Strategy
from perl.recipe.eval_section import EvalSection
from perl.recipe.quantisations import Quantization
from perl.recipe.rollout_section import RolloutSection
from perl.recipe.section import Section, SettingError


class ModelSection(Section):
    """The base model, loaded once and never written."""

    name: str = Field("sandbox:base", description="Hub id, local folder, or sandbox:base.")
    revision: str | None = Field(None, description="Branch, tag or commit on the Hub.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="auto: float32 on a CPU, the checkpoint's own type elsewhere."
    )
    attn_implementation: str | None = Field(None, description="As in transformers; flash_attention_2 needs [flash].")
    quantization: Quantization | None = Field(
        None,
        description="The linear layers in 4 bits as QLoRA has them (nf4), or in 8 (int8, fp8); needs [quantised]. "
        "None: as they are published.",
    )


class PeftSection(Section):
    """The adapter. What a setting means to a method, and its default there, is in ``perl methods``."""

    method: str = Field("lora", description="A name from `perl methods`.")
    type: str | None = Field(
        None, description="Instead of a method: a type of the installed PEFT; all other keys are its config, verbatim."
    )
    adapter: str | None = Field(
        None,
        min_length=1,
        description="Continue training this adapter: a run, a folder, or a Hub id with an optional @revision.",
    )
    rank: int | None = Field(None, ge=1, description="Rank of the update; None: the method's default.")
    alpha: float | None = Field(None, gt=0, description="Scale of the update; None: the method's default.")
    dropout: float = Field(0.0, ge=0, lt=1, description="Adapter dropout; rollouts have none, so leave it at 0.")
    target_modules: str | list[str] | None = Field(
        None,
        description="Names or a regular expression; None: the method's default, mostly all-linear, which leaves "
        "lm_head out.",
    )
    kwargs: dict[str, Any] = Field({}, description="Further arguments of the method's PEFT config, verbatim.")

    @model_validator(mode="before")
    @classmethod
    def _verbatim(cls, value: Any) -> Any:  # noqa: ANN401 (whatever the YAML holds)
        """With a type, keys that are not ours are arguments of PEFT's config."""
        if not isinstance(value, dict) or value.get("type") is None:
            return value
        own = {key: item for key, item in value.items() if key in cls.model_fields}
        further = {key: item for key, item in value.items() if key not in cls.model_fields}
        given = own.get("kwargs", {})
        return {**own, "kwargs": {**given, **further}} if isinstance(given, dict) else value


class Columns(Section):
    """Which columns of the data set hold what."""

    prompt: str | None = Field(
        "prompt",
        description="The question: text, or chat messages; null: none holds it, and data.prompt_template asks it out "
        "of others.",
    )
    answer: str | None = Field("answer", description="The gold answer; null if no reward needs one.")


_PERCENT, _SHARE = re.compile(r"(\d+(?:\.\d+)?) ?%"), re.compile(r"0?\.\d+")
# Endings of names that are files, not data sets of the Hub.
DATA_FILE_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")


def is_data_file(name: str | PurePath) -> bool:
    """Whether a data set's name is that of a file."""
    return PurePath(name).suffix.lower() in DATA_FILE_SUFFIXES


def as_share(said: Any) -> float | None:  # noqa: ANN401 (whatever the YAML holds)
    """10% or 0.1 as a number; None: it is no share."""
    if percent := _PERCENT.fullmatch(str(said)):
        return float(percent[1]) / 100
    return float(said) if isinstance(said, float) or _SHARE.fullmatch(str(said)) else None


class DataSource(Section):
    """One set of problems. A bare name is short for ``{name: ...}``."""

    name: str = Field(min_length=1, description="sandbox:TASK, a .jsonl/.json/.csv/.parquet file, or a Hub data set.")
    subset: str | None = Field(None, description="Configuration of a Hub data set.")
    split: str | None = Field(None, description="Split of a Hub data set; None: train for training, else test.")
    revision: str | None = Field(None, description="Branch, tag or commit on the Hub.")
    columns: Columns = Field(Columns(), description="Column mapping.")
    limit: int | None = Field(None, ge=1, description="Take only the first rows.")
    share: float | None = Field(
        None, gt=0, lt=1, description="Of data.eval: the part of data.train that is held out; data.eval: 10% is short."
    )

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:  # noqa: ANN401 (whatever the YAML holds)
        return {"name": value} if isinstance(value, str) else value


class AnsweredQuestion(Section):
    """A question and its answer, shown before every question."""

    prompt: str = Field(min_length=1, description="The question.")
    answer: str = Field(min_length=1, description="What a model should answer.")


THINKING_SWITCHES = ("enable_thinking", "thinking")
"""What chat templates call the switch of their thinking mode: Qwen3 and most others; DeepSeek-V3.1 and Granite."""


class DataSection(Section):
    """Problems to train on, and problems held out."""

    train: DataSource = Field(DataSource(name="sandbox:addition"), description="Problems to train on.")
    eval: DataSource | None = Field(
        None,
        description="Held-out problems, or a share of data.train as 10%; None: those of the sandbox task, or none for "
        "other data.",
    )
    prompt_template: str | None = Field(
        None,
        description="Text around the question; must contain {prompt}, may contain other columns. Where no column "
        "holds the question, all of it.",
    )
    system_prompt: str | None = Field(None, description="System message put before every question.")
    examples: list[AnsweredQuestion] = Field(
        [], description="Answered questions before every question: earlier turns of a chat, or text above it."
    )
    chat: bool | None = Field(None, description="Chat messages or plain text; None: as the tokenizer's template says.")
    thinking: bool | None = Field(
        None, description="The chat template's thinking mode, on or off; None: the template's default."
    )
    drop_overlap: bool = Field(False, description="Drop training prompts that are also held out, instead of stopping.")

    @model_validator(mode="before")
    @classmethod
    def _from_percent(cls, value: Any) -> Any:  # noqa: ANN401 (whatever the YAML holds)
        """``eval: 10%`` is that share of what is trained on, as is ``eval: {share: 0.1}``."""
        given, train = (value.get(role) if isinstance(value, dict) else None for role in ("eval", "train"))
        own = {"name": given} if isinstance(given, str | float) else given
        if not isinstance(own, dict) or not isinstance(train, str | dict):
            return value
        share = as_share(own["name"] if "name" in own else own.get("share"))
        if share is None or ("name" in own and "share" in own):
            return value
        whole = {"name": train} if isinstance(train, str) else train
        return {**value, "eval": {**whole, **{key: own[key] for key in own if key != "name"}, "share": share}}

    @model_validator(mode="after")
    def _check_share(self) -> "DataSection":
        if self.train.share is not None:
            raise SettingError("train", "share is of data.eval")
        for role, source in (("train", self.train), ("eval", self.eval)):
            given = [key for key in ("subset", "split", "revision") if source is not None and getattr(source, key)]
            if source is not None and given and (is_data_file(source.name) or source.name.startswith("sandbox:")):
                what = f"of a data set of the Hub, and {source.name} is none: leave it out"
                raise SettingError(f"{role}.{given[0]}", what)
        if self.eval is not None and self.eval.share is not None:
            if self.train.name.startswith("sandbox:"):
                raise SettingError("eval", "a task of the sandbox holds out problems of its own: leave it out")
            if self.eval.model_copy(update={"share": None}) != self.train:
                raise SettingError("eval", "share is of the problems of data.train, with no other key: data.eval: 10%")
        return self

    @model_validator(mode="after")
    def _check_template(self) -> "DataSection":
        named = {source.columns.prompt is not None for source in (self.train, self.eval) if source is not None}
        if len(named) > 1:
            raise SettingError("eval", "columns.prompt is null for one of data.train and data.eval, not for the other")
        if named == {False} and self.prompt_template is None:
            raise SettingError("prompt_template", "no column holds the question (columns.prompt: null): ask it here")
        if self.prompt_template is not None and ("{prompt}" in self.prompt_template) not in named:
            how = "must contain {prompt}" if True in named else "no column holds a {prompt} (columns.prompt: null)"
            raise SettingError("prompt_template", how)
        try:
            fields = list(string.Formatter().parse(self.prompt_template or ""))
        except ValueError:  # a brace alone, which is said with the names of the columns
            return self
        for _, name, form, conversion in fields:  # a width would make a text as long as it says
            if form or conversion or set(name or "") & set(".["):
                raise SettingError("prompt_template", f"{{{name}...}}: a column's name stands alone between braces")
        return self


class HubSection(Section):
    """Where the adapter is published on the Hub, and when."""

    repo_id: str | None = Field(
        None, pattern=r"^[\w.-]+/[\w.-]+$", description="user/name, on the card too; `perl push` sends it there."
    )
    push: Literal["end", "every_save", "best"] | None = Field(
        None,
        description="end: the trained adapter, when it is scored; every_save: each checkpoint too, as a revision; "
        "best: the one that scored best; None: never by itself.",
    )
    private: bool = Field(False, description="Create the repository so that only you see it.")

    @model_validator(mode="after")
    def _check_repo(self) -> "HubSection":
        self.only_if(self.repo_id is not None, "needs hub.repo_id, as in repo_id: user/name", "push", "private")
        return self


# Not of LaTeX (\frac{a}{b}) or of a template ({{a}}).
_ALONE_IN_BRACES = re.compile(r"(?<![\w\\{}^])\{(\w+)\}(?!\})")
_MEANT = {
    **dict.fromkeys(("prompt", "prompts", "question", "problem", "promt"), "prompt"),
    **dict.fromkeys(("answer", "answers", "solution", "gold", "gold_answer", "anwser", "awnser"), "answer"),
}


class TeacherSection(Section):
    """Whom the policy learns from token by token, on its own completions: the same base with another adapter or prompt.

    Without an adapter, a hint or a system prompt there is no teacher.
    """

    adapter: str | None = Field(
        None,
        min_length=1,
        description="Adapter of the teacher on the run's own base: a run, a folder, or a Hub id with an optional "
        "@revision; None: the base.",
    )
    hint: str | None = Field(
        None,
        min_length=1,
        description="Text that only the teacher sees: before the question, or in its place where it contains {prompt}; "
        "{answer} is the gold answer.",
    )
    system_prompt: str | None = Field(
        None,
        min_length=1,
        description="System message that only the teacher sees, in the place of the policy's; {answer} is the gold "
        "answer.",
    )
    weight: float = Field(
        1.0, gt=0, allow_inf_nan=False, description="What KL(policy || teacher) of each token is multiplied by."
    )
    top_k: int = Field(
        0, ge=0, description="Compare the policy's so many likeliest tokens and the rest as one; 0: the vocabulary."
    )

    @property
    def acts(self) -> bool:
        """Whether there is a teacher."""
        return any(getattr(self, key) is not None for key in ("adapter", "hint", "system_prompt"))

    @property
    def changes_prompts(self) -> bool:
        """Whether the teacher sees other prompts than the policy."""
        return self.hint is not None or self.system_prompt is not None

    @property
    def shown(self) -> str:
        """Who teaches and how, in one line without what is written in the recipe."""
        what = {"another adapter": self.adapter, "a hint": self.hint, "a system prompt": self.system_prompt}
        over = f"the {self.top_k} likeliest tokens" if self.top_k else "the vocabulary"
        return f"the base with {', '.join(k for k, value in what.items() if value)}; KL over {over} x {self.weight:g}"

    @model_validator(mode="after")
    def _check_words(self) -> "TeacherSection":
        """Refuses a word in braces that can only be meant for one of ours; any other braces are the text's own."""
        self.only_if(self.acts, "needs a teacher: an adapter, a hint or a system_prompt", "weight", "top_k")
        for key in ("hint", "system_prompt"):
            for word in _ALONE_IN_BRACES.findall(getattr(self, key) or ""):
                meant = _MEANT.get(word.lower())
                if meant is not None and word != meant:
                    raise SettingError(key, f"{{{word}}} stays as it is: did you mean {{{meant}}}?")
        if self.system_prompt is not None and "{prompt}" in self.system_prompt:
            raise SettingError("system_prompt", "{prompt} is not known here: the question follows; or use teacher.hint")
        return self


MEMORY_WORDS, REFILL_WORDS = "those without variance rest", "groups without variance are refilled"
"""How a card says that prompts are remembered, and that groups are replaced."""


class PromptsSection(Section):
    """Which prompts are sampled. As they come, each once an epoch, where nothing is set."""

    memory: bool = Field(
        False, description="Remember what each prompt gave: one whose group had no variance rests, and comes back."
    )
    explore: float = Field(
        0.5, gt=0, le=1, description="Factor on a prompt's chance for each group without variance in a row."
    )
    floor: float = Field(0.05, gt=0, le=1, description="Smallest chance of a prompt to be drawn when its turn comes.")
    refill: float = Field(
        0.0,
        ge=0,
        le=100,
        description="Replace groups without variance by groups of other prompts (DAPO's dynamic sampling): at most so "
        "many more prompts, relative to those of a step; 0: not.",
    )
    curriculum: str | None = Field(
        None,
        min_length=1,
        description="Column of the data with a number for each prompt: those with the smallest come first; -COLUMN: "
        "those with the largest.",
    )
    curriculum_start: float = Field(0.25, gt=0, le=1, description="Share of the prompts that may be drawn at first.")
    curriculum_until: float = Field(0.5, ge=0, le=1, description="Share of the training after which all may be.")

    @property
    def acts(self) -> bool:
        """Whether prompts are chosen."""
        return self.memory or self.refill > 0 or self.curriculum is not None

    @property
    def shown(self) -> str:
        """How prompts are chosen, in one line without the column's name, which may be anything."""
        found = []
        if self.memory:
            found.append(f"{MEMORY_WORDS} (explore {self.explore:g}, floor {self.floor:g})")
        if self.refill:
            found.append(f"{REFILL_WORDS} (at most {self.refill:g} x a batch more)")
        if self.curriculum is not None:
            of_all = f"{self.curriculum_start:g} of them at first, all after {self.curriculum_until:g} of the training"
            found.append(f"easy first by a column ({of_all})")
        return "; ".join(found)

    @model_validator(mode="after")
    def _check_acts(self) -> "PromptsSection":
        self.only_if(self.memory, "needs memory: true", "explore", "floor")
        self.only_if(self.curriculum is not None, "needs a curriculum", "curriculum_start", "curriculum_until")
        return self


AlarmName = Literal[
    "samples_masked",
    "completions_truncated",
    "rewards_flat",
    "entropy_collapse",
    "ratios_clipped",
    "engine_drift",
    "kl_explosion",
    "gradient_explosion",
    "gradient_zero",
    "learning_rate",
    "heldout_falling",
    "length_gaming",
]
"""The rows of ``trainer/alarms/table.py``, which a recipe is read without."""


class AlarmsSection(Section):
    """Which signs of an unhealthy training end it. All of them are said, whatever stands here."""

    stop: list[AlarmName] = Field(
        [], description="Alarms that end the run, with a checkpoint and exit code 1; names from docs/alarms.md."
    )

    @property
    def acts(self) -> bool:
        """Whether any does."""
        return bool(self.stop)


class RewardSetting(Section):
    """One reward: its weight in the sum, and its own arguments. A bare number is short for ``{weight: ...}``."""

    weight: float = Field(1.0, allow_inf_nan=False, description="Factor of this reward in the sum.")
    args: dict[str, Any] = Field({}, description="Arguments handed to the reward function.")
    columns: dict[str, str] = Field({}, description="Argument: column of the data set, where their names differ.")
    workers: int | None = Field(
        None,
        ge=1,
        description="Call your own function for each sample by itself, in this many killable processes of a machine.",
    )
    timeout_seconds: float | None = Field(
        None,
        gt=0,
        le=86_400,
        description="Wall time of a sample in a worker (0.8 of it as CPU time), then it has no reward; None: 10.",
    )
    max_failures: int | None = Field(
        None,
        ge=0,
        description="Samples that your own function may fail on, None: 16; one more stops the run, with a checkpoint.",
    )

    @model_validator(mode="before")
    @classmethod
    def _from_weight(cls, value: Any) -> Any:  # noqa: ANN401
        return {"weight": value} if isinstance(value, int | float) and not isinstance(value, bool) else value

    @model_validator(mode="after")
    def _check_workers(self) -> "RewardSetting":
        what = "needs workers: a function in the training process cannot be interrupted"
        self.only_if(self.workers is not None, what, "timeout_seconds")
        return self


SECTIONS: dict[str, type[Section]] = {
    "model": ModelSection,
    "peft": PeftSection,
    "data": DataSection,
    "rollout": RolloutSection,
    "eval": EvalSection,
    "hub": HubSection,
    "engine": EngineSection,
    "teacher": TeacherSection,
    "alarms": AlarmsSection,
    "prompts": PromptsSection,
    "agent": AgentSection,
}
SECTION_NAMES = (*SECTIONS, "rewards", "train")

# Settings of rollouts that TRL's GRPOConfig has under the same names.
_OF_TRL = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_completion_length")
# Fields of PeftRLConfig whose home in a recipe is another section than `train`.
FIELD_OF_SETTING: dict[tuple[str, str], str] = {
    ("model", "quantization"): "quantization",
    ("engine", "strategy"): "strategy",
    ("engine", "shards"): "shards",
    **{("peft", key): "adapter" if key == "adapter" else f"peft_{key}" for key in PeftSection.model_fields},
    **{("rollout", key): key if key in _OF_TRL else f"rollout_{key}" for key in RolloutSection.model_fields},
    **{("teacher", key): f"teacher_{key}" for key in TeacherSection.model_fields},
    **{("prompts", key): f"prompt_{key}" for key in PromptsSection.model_fields},
    **{("agent", key): f"agent_{key}" for key in ("max_turn_length", "max_result_length", "call_timeout")},
}
