"""What every section of a recipe is: frozen, strict, with no unknown key.

YAML mapping -> Section
"""

from pydantic import BaseModel


class Section(BaseModel, extra="forbid", frozen=True, strict=True):
    """A group of settings; unknown keys and wrong types are refused, nothing is converted silently."""

    def only_if(self, holds: bool, what: str, *keys: str) -> None:
        """Refuses settings that mean something only where something holds.

        Args:
            holds: Whether it does.
            what: Is said of the first that is not as usual.
            keys: The settings.

        Raises:
            SettingError: One is set in vain.
        """
        for key in keys if not holds else ():
            if getattr(self, key) != type(self).model_fields[key].default:
                raise SettingError(key, what)


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
