"""The section ``eval`` of a recipe: on what base and adapter are scored, and how.

YAML mapping -> EvalSection, EvalTask
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_serializer, model_validator

from perl.recipe.section import Section

SCORER_SECONDS = 10.0
"""What a reward that is a scorer may take for a completion, unless somebody says otherwise; as in training."""
FIRST_HELD_OUT = 256
"""How many held-out problems are scored unless a recipe says otherwise."""


class EvalTask(Section):
    """One task of ``eval.tasks``; its name alone stands for one without further keys."""

    name: str = Field(min_length=1, description="From `perl eval --list-tasks`, my.jsonl, my_tasks.py[:NAME], my.yaml.")
    limit: int | None = Field(None, ge=1, description="Score its first problems only; null: all [default: eval.limit].")
    columns: dict[str, str] | None = Field(
        None, description="Of a data file: prompt, answer, id, choices -> the column that holds it."
    )
    scorer: str | None = Field(
        None, min_length=1, description="Of a data file: math, choice, exact, normalised, or a reward, as my.py:f>=0.5."
    )
    few_shot: int = Field(0, ge=0, description="Solved examples before every question, drawn by eval.seed.")

    @model_validator(mode="before")
    @classmethod
    def _name_alone(cls, value: object) -> object:
        if not isinstance(value, str | Mapping | EvalTask):
            shown = "null" if value is None else repr(value)
            raise ValueError(f"must be a name, or {{name: ..., limit: ...}}, not {shown:.60}")
        return {"name": value} if isinstance(value, str) else value

    @model_serializer
    def _as_written(self) -> str | dict[str, Any]:
        given = {key: getattr(self, key) for key in type(self).model_fields if key in self.model_fields_set}
        return self.name if given.keys() == {"name"} else given


class EvalSection(Section):
    """How base and adapter are scored: on the held-out problems and on benchmark tasks, under one protocol."""

    enabled: bool = Field(True, description="false: no evaluation.")
    tasks: list[EvalTask] = Field(
        [],
        description="Benchmark tasks too: names from `perl eval --list-tasks` and files as in `perl eval --tasks`, or "
        "{name: ..., limit: ..., columns: ..., scorer: ..., few_shot: ...}.",
    )
    scorer_timeout: float = Field(
        SCORER_SECONDS,
        ge=0,
        le=86_400,
        allow_inf_nan=False,
        description="Seconds that a reward as a scorer may take for a completion; 0: no limit, and no worker process.",
    )
    data: str | None = Field(
        None, min_length=1, description="Folder with the tasks' data as JSON lines; None: the Hub."
    )
    every: int | None = Field(
        None, ge=1, description="Score the policy on the tasks every N steps too, and keep the best adapter."
    )
    best: str | None = Field(
        None, description="By which score the best is known, as aime24/avg@16; None: the mean of all avg@k."
    )
    k: int = Field(4, ge=1, description="Completions a problem; the score is their mean (avg@k).")
    limit: Annotated[int, Field(ge=1)] | Literal["auto"] | None = Field(
        "auto",
        description="Score the first so many problems only, of those held out and of each task; null: all; auto: "
        f"{FIRST_HELD_OUT} of those held out, all of a task.",
    )
    temperature: float = Field(1.0, ge=0, allow_inf_nan=False, description="Softmax temperature; 0: greedy.")
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus sampling.")
    max_completion_length: int | None = Field(None, ge=1, description="None: as in rollout.")
    batch_size: int = Field(256, ge=1, description="Completions generated at a time.")
    seed: int = Field(0, ge=0, description="Seed of the sampling, the same for base and adapter.")

    @property
    def limit_of_heldout(self) -> int | None:
        """How many of the held-out problems are scored; None: all."""
        return FIRST_HELD_OUT if self.limit == "auto" else self.limit

    @property
    def limit_of_tasks(self) -> int | None:
        """How many problems are scored of a task that has no limit of its own; None: all."""
        return None if self.limit == "auto" else self.limit

    @model_validator(mode="after")
    def _check_every(self) -> "EvalSection":
        self.only_if(bool(self.tasks), "is about tasks: name some, as in eval.tasks: [aime24]", "every", "best")
        self.only_if(self.enabled, "needs eval.enabled: true", "every", "best")
        self.only_if(self.every is not None, "needs eval.every, the steps between two scores", "best")
        return self
