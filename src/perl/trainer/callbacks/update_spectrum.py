"""What the adapter has changed so far, as numbers of a step's log: rank, unchanged weights, principal energy.

policy at a step -> metrics

The measures are those of `perl spectrum` (``policy/spectra/measures.py``), which has more of them for a saved adapter.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import TrainerState, TrainingArguments

from perl.errors import RecipeError
from perl.methods.delta import adapted_layers
from perl.policy.spectra.measures import (
    PrincipalSpace,
    directions_of,
    norms_of,
    principal_energy,
    principal_space,
    unchanged_share,
)
from perl.policy.spectra.updates import update_of_layer, weight_of_layer
from perl.run.joint_work import Processes, joined
from perl.run.shards import is_sharded
from perl.trainer.callbacks.run_callback import Logs, RunCallback, check_every


@dataclass(frozen=True)
class _Part:
    """What one layer adds to the pooled numbers; energies are parts of ``norm2``."""

    numbers: int
    unchanged: float
    norm2: float
    largest2: float
    left: float = 0.0
    right: float = 0.0


class UpdateSpectrum(RunCallback):
    """Logs every so many steps what the update looks like, pooled over the adapted layers.

    ``spectrum/stable_rank`` (mean of ||dW||_F^2 / ||dW||_2^2), ``spectrum/unchanged`` (share of weights that are the
    same bfloat16 number as in the base), ``spectrum/off_principal_out`` and ``spectrum/off_principal_in`` (share of
    ||dW||_F^2 outside the base's first singular directions, of outputs and of inputs).

    Example:
        ``PeftGRPOTrainer(..., callbacks=[UpdateSpectrum(every=50)])``; with another trainer put it before what writes
        logs.
    """

    def __init__(self, every: int = 50, *, modules: str | None = None, principal: float | None = 0.1) -> None:
        """Measures nothing yet.

        Args:
            every: Optimizer steps between two measurements.
            modules: Regular expression that names of layers must hold; None: all that are adapted.
            principal: Share of the base's singular directions that count as principal. They are found once, at the
                first measurement, which takes seconds for each matrix of a large model. None: no energies are logged.

        Raises:
            RecipeError: An argument makes no sense.
        """
        check_every(every, "UpdateSpectrum(every)")
        if principal is not None and not 0 < principal < 1:
            raise RecipeError(f"must be above 0 and below 1, not {principal:g}", "UpdateSpectrum(principal)")
        try:
            self._chosen = re.compile(modules or "")
        except re.error as error:
            raise RecipeError(f"is not a regular expression: {error}", "UpdateSpectrum(modules)") from None
        self._every, self._principal = every, principal
        self._processes = Processes()
        self._spaces: dict[str, PrincipalSpace] = {}
        self._pending: dict[str, float] = {}

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, *_: object, **given: object) -> None:
        """Looks whether there is something to measure.

        Raises:
            RecipeError: The model itself is trained, or no adapted layer is chosen.
        """
        super().on_train_begin(args, state)
        policy = self._policy(given.get("model"))
        if policy is None:
            raise RecipeError(
                "UpdateSpectrum needs an adapter: of a model that is trained itself no base is left", "callbacks"
            )
        if not any(True for _ in self._layers(policy)):
            raise RecipeError(f"{self._chosen.pattern!r} fits no adapted layer", "UpdateSpectrum(modules)")
        self._processes, self._spaces, self._pending = joined(), {}, {}

    def on_step_end(self, _: TrainingArguments, state: TrainerState, *__: object, **given: object) -> None:
        """Measures, where it is due; the main process alone, unless the base is in shards, which all have to read."""
        policy = self._policy(given.get("model"))
        if policy is None or state.global_step % self._every:
            return
        with self._processes.failing_together():
            if is_sharded(policy):
                metrics = self._measured(policy)
            else:
                metrics = self._processes.by_main(lambda: self._measured(policy))
        if self.trainer is not None:
            self.trainer.note(metrics)
        else:
            self._pending = dict(metrics)

    def on_log(self, _: TrainingArguments, __: TrainerState, ___: object, logs: Logs = None, **____: object) -> None:
        """Adds the numbers to the log of a trainer that is not ours."""
        if isinstance(logs, dict) and self._pending and "train_runtime" not in logs:
            logs.update(self._pending)
            self._pending = {}

    def _policy(self, model: object) -> PeftModel | None:
        found = model if self.trainer is None else self.trainer.policy
        return found if isinstance(found, PeftModel) else None

    def _layers(self, policy: PeftModel) -> Iterator[tuple[str, BaseTunerLayer]]:
        """Adapted matrices and vectors; what holds its weights otherwise, as experts do, is not measured."""
        for name, layer in adapted_layers(policy):
            weight = getattr(layer.get_base_layer(), "weight", None)
            if isinstance(weight, torch.Tensor) and weight.dim() <= 2 and self._chosen.search(name):
                yield name, layer

    @torch.no_grad()
    def _measured(self, policy: PeftModel) -> dict[str, float]:
        parts = [self._part(name, layer, policy.active_adapter) for name, layer in self._layers(policy)]
        total, numbers = sum(part.norm2 for part in parts), sum(part.numbers for part in parts)
        found = {"spectrum/unchanged": sum(part.unchanged * part.numbers for part in parts) / numbers}
        changed = [part for part in parts if part.largest2 > 0]
        if changed:
            found["spectrum/stable_rank"] = sum(part.norm2 / part.largest2 for part in changed) / len(changed)
            if self._principal is not None:
                found["spectrum/off_principal_out"] = 1.0 - sum(part.left for part in changed) / total
                found["spectrum/off_principal_in"] = 1.0 - sum(part.right for part in changed) / total
        return found

    def _part(self, name: str, layer: BaseTunerLayer, adapter: str) -> _Part:
        weight, update = weight_of_layer(layer), update_of_layer(layer, adapter)
        norm2, largest2 = norms_of(update)
        part = _Part(weight.numel(), unchanged_share(weight, update), norm2, largest2)
        if self._principal is None or norm2 <= 0:
            return part
        if isinstance(update, torch.Tensor) and update.dim() == 1:
            k = directions_of(len(weight), self._principal)
            first = weight.abs().argsort(descending=True, stable=True)[:k]
            energy = float(update[first].double().square().sum())
            return _Part(part.numbers, part.unchanged, norm2, largest2, energy, energy)
        if name not in self._spaces:
            self._spaces[name] = principal_space(weight, self._principal)
        energies = principal_energy(weight, update, self._spaces[name])
        return _Part(part.numbers, part.unchanged, norm2, largest2, energies.left, energies.right)
