"""What `perl spectrum` found, as plain numbers: of each module, of groups of them, of a comparison.

spectra of modules -> FoundSpectra -> rows, JSON
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from perl.policy.spectra.against import Agreement
from perl.policy.spectra.measures import Spectrum
from perl.policy.spectra.pooled import Pooled, kind_of, layer_of, pool, pooled_by

By = Literal["kind", "layer", "module"]


@dataclass(frozen=True)
class FoundSpectra:
    """What was found.

    Attributes:
        adapter: What was read, by the name that results call it.
        method: As in ``peft.method``, as far as the files tell.
        base: The base's public name.
        principal: Share of the singular directions that count as principal.
        modules: A spectrum each, in the model's order.
        left_out: What was trained and is not in them, in words.
        against: What it is compared with; None: nothing.
        agreements: Of each module that both changed.
        only_in_one: Modules that one of the two changed alone.
    """

    adapter: str
    method: str
    base: str
    principal: float
    modules: tuple[Spectrum, ...]
    left_out: tuple[str, ...] = ()
    against: str | None = None
    agreements: tuple[Agreement, ...] = ()
    only_in_one: tuple[str, ...] = ()

    @property
    def pooled(self) -> Pooled:
        """All matrices together; the norms' vectors only where there is nothing else."""
        return pool("all", self._matrices)

    def rows(self, by: By = "kind") -> list[Pooled]:
        """A line for each kind of module, each layer, or each module."""
        keys: dict[str, Callable[[str], object]] = {"kind": kind_of, "layer": layer_of, "module": str}
        return pooled_by(self.modules if by != "layer" else self._matrices, keys[by])

    def to_dict(self) -> dict[str, Any]:
        """All numbers, as plain values for JSON."""
        found = {
            **{"version": 1, "adapter": self.adapter, "method": self.method, "base": self.base},
            **{"principal": self.principal, "left_out": list(self.left_out)},
            "pooled": dataclasses.asdict(self.pooled),
            "kinds": [dataclasses.asdict(row) for row in self.rows("kind")],
            "layers": [dataclasses.asdict(row) for row in self.rows("layer")],
            "modules": [dataclasses.asdict(one) for one in self.modules],
        }
        if self.against is not None:
            found["against"] = {
                "adapter": self.against,
                "only_in_one": list(self.only_in_one),
                "modules": [dataclasses.asdict(one) for one in self.agreements],
            }
        return found

    @property
    def _matrices(self) -> list[Spectrum]:
        return [one for one in self.modules if len(one.shape) > 1] or list(self.modules)
