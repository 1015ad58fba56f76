"""Publishes each checkpoint while the run goes on.

checkpoint -> outbox -> revision on the Hub

A checkpoint is copied into the run's outbox when it is saved, and sent from there by a separate thread: the training
neither waits for the Hub nor fails with it. What is not sent when training ends waits for the next push.
"""

import logging
import threading
from typing import Any

from transformers import TrainerCallback, TrainerState

from perl.errors import PerlError
from perl.hub.push.outbox import Push, alone
from perl.hub.push.publish import pack_checkpoint, send_checkpoints, wanted_push
from perl.recipe.sections import HubSection
from perl.run.folder import Run
from perl.run.warned import warn

logger = logging.getLogger("perl")

LONGEST_WAIT = 600.0
"""Seconds that the end of a training waits for what is being sent."""


class Publishing(TrainerCallback):
    """Sends every checkpoint that is saved."""

    def __init__(self, run: Run, hub: HubSection) -> None:
        """Sends nothing yet.

        Args:
            run: The folder.
            hub: Where to.
        """
        self._run, self._hub = run, hub
        self._wanted: Push | None = None
        self._something, self._ended = threading.Event(), False
        self._thread: threading.Thread | None = None

    def on_save(self, _: Any, state: TrainerState, *__: Any, **___: Any) -> None:  # noqa: ANN401 (transformers')
        """Puts the checkpoint into the outbox; never fails."""
        if not state.is_world_process_zero:
            return
        try:
            self._wanted = self._wanted or wanted_push(self._run, self._hub.repo_id, private=self._hub.private)
            pack_checkpoint(self._run, state.global_step, self._wanted.repo_id)
        except Exception as error:  # noqa: BLE001 (a checkpoint that cannot be published must not end the training)
            warn("PRL308", "step %d is not published: %s", state.global_step, error)
            return
        self._something.set()
        if self._thread is None:
            # A daemon: a process that has to end does not wait for the Hub, and what it had not sent waits.
            self._thread = threading.Thread(target=self._send, name="perl-publishing", daemon=True)
            self._thread.start()

    def on_train_end(self, *_: Any, **__: Any) -> None:  # noqa: ANN401 (transformers')
        """Waits for what is being sent, within reason."""
        self._ended = True
        self._something.set()
        if self._thread is not None:
            self._thread.join(LONGEST_WAIT)

    def _send(self) -> None:
        """In a separate thread: sends whatever lies in the outbox, until training ends."""
        while True:
            self._something.wait()
            self._something.clear()
            ended = self._ended
            try:
                if self._wanted is not None:
                    with alone(self._run):
                        self._wanted = send_checkpoints(self._run, self._wanted)
            except PerlError as error:
                warn("PRL308", "checkpoints wait in %s for the next push: %s", self._run.path, error)
            except Exception:
                logger.exception("checkpoints wait in %s for the next push", self._run.path)
            if ended:
                return
