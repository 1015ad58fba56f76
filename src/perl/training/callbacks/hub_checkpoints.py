"""Publishes each checkpoint while the training goes on.

checkpoint -> outbox -> revision on the Hub

A checkpoint is copied into an outbox when it is saved, and sent from there by a separate thread: the training neither
waits for the Hub nor fails with it. What is not sent when training ends waits for the next training or push.
"""

import logging
import re
import threading
from pathlib import Path

from peft import PeftModel
from transformers import TrainerState, TrainingArguments
from trl import GRPOTrainer

from perl.errors import PerlError, RecipeError, warn
from perl.hub.push.outbox import HUB_NAME, Push, alone, queue_checkpoint, read_push
from perl.hub.push.publish import full_repo_id, pack_checkpoint, send_checkpoints, wanted_push
from perl.hub.push.requests import check_login
from perl.recipe.sections import HubSection
from perl.run.folder import Run
from perl.run.joint_work import joined
from perl.trainer.callbacks.run_callback import RunCallback
from perl.trainer.publishing import pack_script_checkpoint

logger = logging.getLogger("perl")

LONGEST_WAIT = 600.0
"""Seconds that the end of a training waits for what is being sent."""


class HubCheckpoints(RunCallback):
    """Sends every checkpoint that is saved to the Hub, with a card, as revision ``step-N`` of one repository.

    Example:
        ``PeftGRPOTrainer(..., callbacks=[HubCheckpoints("user/name", private=True)])``
    """

    needs_ours = "it publishes an adapter with its card, and other trainers save neither as it is published"

    def __init__(self, repo_id: str | None = None, *, private: bool = False, run: Run | None = None) -> None:
        """Sends nothing yet.

        Args:
            repo_id: Where to, ``user/name``; None: ``args.hub_model_id``, else the output folder's name.
            private: Create the repository so that only its owner sees it.
            run: The run folder of a recipe, whose checkpoints these are; None: a script's.

        Raises:
            RecipeError: It is no name on the Hub.
        """
        if repo_id is not None and re.fullmatch(HUB_NAME, str(repo_id)) is None:
            raise RecipeError(f"is not a name on the Hub: {repo_id!r}", "HubCheckpoints(repo_id)", "user/name")
        self._repo_id, self._private, self._run = repo_id, private, run
        self._outbox = run
        self._wanted: Push | None = None
        self._something, self._ended = threading.Event(), False
        self._thread: threading.Thread | None = None

    def serve(self, trainer: GRPOTrainer) -> None:
        """Refuses a trainer without an adapter."""
        super().serve(trainer)
        if not isinstance(trainer.policy, PeftModel):
            raise RecipeError(
                "HubCheckpoints publishes adapters, and this trainer trains the model itself", "callbacks"
            )

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, *_: object, **__: object) -> None:
        """Looks whether the Hub knows who will publish; a recipe has, before its model was loaded.

        Raises:
            PerlError: There is no token, or the Hub refuses it.
        """
        super().on_train_begin(args, state)
        self._ended = False
        if self._run is not None:
            return
        self._outbox = Run(Path(str(args.output_dir)))

        def look() -> str:
            try:
                check_login(HubSection(repo_id="user/name", push="every_save"))
                return full_repo_id(self._repo_id or args.hub_model_id or Path(str(args.output_dir)).resolve().name)
            except PerlError as error:
                raise error.moved(lambda _: "HubCheckpoints") from error

        self._repo_id = joined().by_main(look)

    def on_save(self, args: TrainingArguments, state: TrainerState, *_: object, **__: object) -> None:
        """Puts the checkpoint into the outbox; never fails."""
        if not state.is_world_process_zero:
            return
        try:
            outbox, repo_id, step = self._outbox, self._repo_id, state.global_step
            if self._run is not None:
                self._wanted = self._wanted or wanted_push(self._run, repo_id, private=self._private)
                pack_checkpoint(self._run, step, self._wanted.repo_id)
            elif outbox is not None and repo_id is not None:
                known = read_push(outbox, repo_id)
                self._wanted = self._wanted or known or Push("queued", repo_id, private=self._private)
                folder = Path(str(args.output_dir)) / f"checkpoint-{step}"
                queue_checkpoint(outbox, repo_id, step, pack_script_checkpoint(self.trainer, folder, repo_id))
            else:
                raise RuntimeError("training has not begun")
        except Exception as error:  # noqa: BLE001 (a checkpoint that cannot be published must not end the training)
            warn("PRL308", "step %d is not published: %s", state.global_step, error)
            return
        self._something.set()
        if self._thread is None:
            # A daemon: a process that has to end does not wait for the Hub, and what it had not sent waits.
            self._thread = threading.Thread(target=self._send, name="perl-publishing", daemon=True)
            self._thread.start()

    def on_train_end(self, *_: object, **__: object) -> None:
        """Waits for what is being sent, within reason."""
        self._ended = True
        self._something.set()
        if self._thread is not None:
            self._thread.join(LONGEST_WAIT)
            self._thread = None

    def _send(self) -> None:
        """In a separate thread: sends whatever lies in the outbox, until training ends."""
        while True:
            self._something.wait()
            self._something.clear()
            ended, outbox = self._ended, self._outbox
            try:
                if self._wanted is not None and outbox is not None:
                    with alone(outbox):
                        self._wanted = send_checkpoints(outbox, self._wanted)
            except PerlError as error:
                warn("PRL308", "checkpoints wait in %s for the next push: %s", outbox and outbox.path, error)
            except Exception:
                logger.exception("checkpoints wait in %s for the next push", outbox and outbox.path)
            if ended:
                return
