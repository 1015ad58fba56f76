"""The section of a recipe that gives the policy tools, or an environment to act in.

YAML mapping -> AgentSection
"""

from pydantic import Field, model_validator

from perl.recipe.section import Section, SettingError


class AgentSection(Section):
    """Tools that the policy may call, and how long a conversation with them may be."""

    environment: str | dict[str, str] | None = Field(
        None,
        description="Class whose public methods are tools, as module:Class or file.py:Class; or several by name, of "
        "which the data's column environment names one.",
    )
    tools: list[str] = Field([], description="Functions that are tools, as module:function or file.py:function.")
    max_turns: int = Field(
        8, ge=1, description="Turns of the policy in a conversation: TRL's max_tool_calling_iterations, and one."
    )
    max_turn_length: int | None = Field(
        None, ge=1, description="Tokens of one turn. None: what rollout.max_completion_length leaves the conversation."
    )
    max_result_length: int = Field(
        512, ge=1, description="Tokens of what one call answers; the rest is cut off, and said to be."
    )
    call_timeout: float = Field(
        20.0,
        gt=0,
        le=86_400,
        allow_inf_nan=False,
        description="Seconds that a call, a reset or a reward of an environment may take.",
    )
    isolate: bool = Field(
        False, description="Run each environment in a process of its own, which is killed where a call overruns."
    )
    success: float = Field(
        1.0, allow_inf_nan=False, description="Reward of an environment from which on a conversation is scored right."
    )

    @model_validator(mode="after")
    def _check_environment(self) -> "AgentSection":
        if self.environment == {}:
            raise SettingError("environment", "names none: leave it out, or name one")
        alone = self.environment is None and bool(self.tools)
        self.only_if(not alone, "is a setting of environments, and there are tools alone", "isolate", "success")
        return self

    @property
    def paths(self) -> list[str]:
        """Every class and function that is named."""
        several = self.environment
        kinds = list(several.values()) if isinstance(several, dict) else [several] if several else []
        return [*kinds, *self.tools]

    @property
    def acts(self) -> bool:
        """Whether there is any tool."""
        return bool(self.environment or self.tools)
