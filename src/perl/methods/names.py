"""Names that PEFT gives to parameters, and those the base has without it.

name in a policy -> name in the base
"""

import re

from peft import PeftModel
from torch import nn

# What PEFT puts into the names of the base's parameters; an expert's wrappers stand one in another.
_WRAPPERS = re.compile(r"\.(base_layer|original_module|token_adapter)(?=\.|$)")
# Parts of names that are the adapter's and do not carry its prefix.
_ADDED_PARTS = ("modules_to_save", "trainable_tokens_", ".ranknum.")


def is_of_the_base(model: nn.Module, name: str) -> bool:
    """Whether a parameter of this name is the base's, not the adapter's."""
    if not isinstance(model, PeftModel):
        return True
    added = (model.base_model.prefix, *_ADDED_PARTS)
    return not any(part in name for part in added)


def name_in_base(name: str) -> str:
    """A parameter's or module's name as it is without an adapter."""
    return _WRAPPERS.sub("", name.removeprefix("base_model.model."))
