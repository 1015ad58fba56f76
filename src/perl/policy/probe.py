"""The trained policy's log-probabilities on a few prompts, kept with the run.

policy on prompts -> probe.json -> was this adapter that policy?

With it an adapter is compared with the policy that was trained when that is in no memory any more: before it is
published, or after it was downloaded.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from perl.errors import RunFolderError
from perl.run.files import parse_mapping, write_text

PROBE = "probe.json"
_TYPE = "float32"


@dataclass(frozen=True)
class Probe:
    """Prompts and what the policy makes of them.

    Attributes:
        input_ids_BT: (B, T) int64, without padding.
        log_probs_BT: (B, T-1) float32, log p(token t+1 | tokens up to t), in nats.
    """

    input_ids_BT: torch.Tensor
    log_probs_BT: torch.Tensor

    def difference(self, log_probs_BT: torch.Tensor) -> float:
        """Largest difference of any token's log-probability, in nats; infinity where one is not a number."""
        largest = (log_probs_BT.cpu() - self.log_probs_BT).abs().max().item()
        return math.inf if math.isnan(largest) else largest


def write_probe(folder: Path, input_ids_BT: torch.Tensor, log_probs_BT: torch.Tensor) -> None:
    """Keeps a probe in a run folder, computed in float32 whatever the policy trained in."""
    facts = {"type": _TYPE, "input_ids": input_ids_BT.tolist(), "log_probs": log_probs_BT.float().tolist()}
    write_text(folder / PROBE, json.dumps(facts) + "\n")


def read_probe(folder: Path) -> Probe | None:
    """The probe in a run folder; None: the run kept none that was computed in float32.

    Raises:
        RunFolderError: The file is not what we write.
    """
    try:
        facts = parse_mapping((folder / PROBE).read_bytes(), finite=False)
        if facts.get("type") != _TYPE:
            return None
        found = Probe(_tensor(facts, "input_ids", torch.int64), _tensor(facts, "log_probs", torch.float32))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise RunFolderError(f"cannot be read: {error}", str(folder / PROBE)) from None
    rows, columns = found.input_ids_BT.shape
    if found.log_probs_BT.shape != (rows, columns - 1) or rows < 1 or columns < 2:
        raise RunFolderError("its prompts and log-probabilities do not fit", str(folder / PROBE))
    return found


def _tensor(facts: Mapping[str, Any], name: str, dtype: torch.dtype) -> torch.Tensor:
    """(B, T) numbers.

    Raises:
        ValueError: They are absent or malformed.
    """
    try:
        found = torch.tensor(facts.get(name))
    except (TypeError, RuntimeError, ValueError, OverflowError):
        raise ValueError(f"{name} is no table of numbers") from None
    if found.ndim != 2 or found.is_floating_point() != dtype.is_floating_point or found.dtype is torch.bool:
        raise ValueError(f"{name} is no table of numbers")
    return found.to(dtype)
