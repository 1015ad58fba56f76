"""The trained policy's log-probabilities on a few prompts, kept with the run.

policy on prompts -> probe.json -> was this adapter that policy?

With it an adapter is compared with the policy that was trained when that is in no memory any more: before it is
published, or after it was downloaded.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch

from perl.run import write_text

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
    """The probe in a run folder; None: the run kept none that was computed in float32."""
    try:
        facts = json.loads((folder / PROBE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    if facts.get("type") != _TYPE:
        return None
    return Probe(torch.tensor(facts["input_ids"]), torch.tensor(facts["log_probs"], dtype=torch.float32))
