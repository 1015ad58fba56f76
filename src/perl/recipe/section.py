"""What every section of a recipe is: frozen, strict, with no unknown key.

YAML mapping -> Section
"""

from pydantic import BaseModel


class Section(BaseModel, extra="forbid", frozen=True, strict=True):
    """A group of settings; unknown keys and wrong types are refused, nothing is converted silently."""


class SettingError(ValueError):
    """Two settings of a section contradict each other."""

    def __init__(self, key: str, message: str) -> None:
        """Names one of them.

        Args:
            key: The one that was written and is to be changed.
            message: What is wrong.
        """
        super().__init__(f"{key}: {message}")
        self.key, self.message = key, message
