"""What transformers' callbacks of trackers lack: one run however often a training is gone on with.

transformers' callback -> the same in the run that belongs to the training, each step once

A tracker either forgets the steps that a resumed training repeats, or cannot; then it keeps them as they came first.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from transformers import TrainerCallback, TrainerState
from trl import GRPOConfig

from perl.trainer.trackers.place import Place, forget, known, last_logged, note, place_of
from perl.trainer.trackers.shown import ShownArguments

_AT_THE_END = ("epoch", "total_flos")
"""Of the entry that closes a training, beside its own ``train_...``."""


class OneRun(TrainerCallback):
    """Comes before transformers' callback among the bases of a class, which says how its run is opened."""

    tracker: ClassVar[str]

    def __init__(self) -> None:
        """Nothing is open yet."""
        super().__init__()
        self._open = False
        self._initialized = False  # transformers' own, where it has one
        self._held = 0  # the last step that is not to be logged again

    # What a tracker must say.

    def open_run(self, place: Place) -> None:
        """Opens the run that is known, or a new one, and notes which it is; on the main process."""
        raise NotImplementedError

    def rewind(self, place: Place, step: int) -> int:
        """Makes the open run forget what came after a step.

        Returns:
            The last step that it still has.
        """
        raise NotImplementedError

    # What transformers calls.

    def on_train_begin(self, args: GRPOConfig, state: TrainerState, *rest: Any, **given: Any) -> None:  # noqa: ANN401 (transformers')
        """Opens the run before transformers would open one, at the step that training goes on from."""
        place = place_of(args)
        if state.is_world_process_zero:
            if not place.of_a_recipe and state.global_step == 0 and known(place, self.tracker).get("logged"):
                forget(place, self.tracker)  # another training of the same script
                self._open = self._initialized = False
            self._opened(place)
            self._held = self.rewind(place, state.global_step)
        super().on_train_begin(self._shown(args, place), state, *rest, **given)

    def on_log(
        self,
        args: GRPOConfig,
        state: TrainerState,
        control: Any,  # noqa: ANN401 (transformers')
        logs: Mapping[str, Any] | None = None,
        **given: Any,  # noqa: ANN401 (transformers')
    ) -> None:
        """Logs a step that the run does not have yet, without what has no value in it."""
        place = place_of(args)
        if state.is_world_process_zero:
            if 0 < state.global_step <= self._held:
                return
            self._opened(place)
        logs = {name: value for name, value in (logs or {}).items() if value is not None}
        if "train_runtime" in logs:  # which has the last step's values once more
            logs = {name: value for name, value in logs.items() if name.startswith("train_") or name in _AT_THE_END}
        super().on_log(self._shown(args, place), state, control, logs=logs, **given)
        if state.is_world_process_zero:
            note(place, self.tracker, logged=max(state.global_step, last_logged(place, self.tracker)))

    def on_train_end(self, *given: Any, **more: Any) -> None:  # noqa: ANN401 (transformers')
        """Lets transformers close the run, if it does; what is logged later opens the same one."""
        super().on_train_end(*given, **more)
        self._open, self._held = False, 0

    def _opened(self, place: Place) -> None:
        if not self._open:
            self.open_run(place)
            self._open = True

    def _shown(self, args: GRPOConfig, place: Place) -> Any:  # noqa: ANN401 (stands for arguments)
        return ShownArguments(args, run_name=place.name)
