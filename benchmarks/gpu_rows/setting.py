"""What a row is given.

device, sizes, folders -> Setting

A row is a function of a setting and of arguments of its own. It returns its numbers; "says" is what is printed of them,
"skipped" why it was not taken, "ok" whether a check held.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

Numbers = dict[str, Any]
GIB = 2**30


@dataclass(frozen=True)
class Setting:
    """How rows are run.

    Attributes:
        device: Where.
        tiny: Whether models are a toy's size.
        folder: To write in; deleted afterwards.
        base: Folder of a base that was asked for.
    """

    device: torch.device
    tiny: bool
    folder: Path
    base: Path | None = None

    @property
    def on_cuda(self) -> bool:
        """Whether there is a GPU."""
        return self.device.type == "cuda"

    def settle(self) -> None:
        """Waits until the device has done all that it was given."""
        if self.on_cuda:
            torch.cuda.synchronize(self.device)
