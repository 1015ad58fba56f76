"""What a subclass has made of the trainer's methods: what it replaced, what nothing would call, what a caller receives.

trainer, method names -> whether they are somebody else's; an error that names those without effect

Knows nothing of what the methods do. ``docs/trainer.md`` lists what an override of each does.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from datasets import Dataset
from trl import GRPOTrainer

from perl.errors import Mistake, PerlError, raise_all

# Packages whose methods work together here.
_LIBRARIES = ("perl", "trl", "transformers")
SCORES = "_get_per_token_logps_and_entropies"
LOSS = ("compute_loss", "_compute_loss")
PARTS_OF_A_LOSS = (SCORES, "get_off_policy_mask", "get_gamma_weights")
OF_A_LOSS = (*LOSS, *PARTS_OF_A_LOSS, "_prepare_inputs")
"""What a subclass may replace of the loss; then every micro-batch goes through its methods, as in TRL."""
MAY_NEED_NO_REWARD = (*LOSS, "_generate_and_score_completions", "_prepare_inputs", "training_step")
"""With one of these replaced a training may be taught by something else than rewards."""
# Methods that earlier versions of TRL's trainer had and called, and what does their work in 1.16.
_GONE = {
    "_get_per_token_logps": "_get_per_token_logps_and_entropies",
    "_get_last_hidden_state": "_get_per_token_logps_and_entropies",
    "compute_liger_loss": "_compute_loss",
    "_generate_and_score": "_generate_and_score_completions",
    "_move_model_to_vllm": "rollout_func",
    "_sync_fsdp1_params_to_vllm": "rollout_func",
    "_sync_fsdp2_params_to_vllm": "rollout_func",
    "_fix_param_name_to_vllm": "rollout_func",
}
_UNCALLED = "create_optimizer_and_scheduler"  # of transformers, which neither its loop nor anything here calls


def is_replaced(trainer: GRPOTrainer, *names: str) -> bool:
    """Whether a method under one of these names is somebody else's.

    Of a subclass, a mixin, put on the trainer, or exchanged in one of our or TRL's classes.
    """
    for name in names:
        owners = [owner for owner in type(trainer).__mro__ if name in vars(owner)]
        exchanged = any(_package(vars(owner)[name]) not in _LIBRARIES for owner in owners)
        foreign = any(_package(owner) != "perl" and owner not in GRPOTrainer.__mro__ for owner in owners)
        if name in vars(trainer) or exchanged or foreign:
            return True
    return False


def check_overrides(trainer: GRPOTrainer) -> None:
    """Refuses a subclass whose methods nothing would call.

    Raises:
        PerlError: Names them, and the methods to override instead.
    """
    kind = type(trainer).__name__
    hint = "override {}, or give a method of your own another name"
    found = [
        Mistake("TRL 1.16 does not call it", f"{kind}.{name}", hint.format(now))
        for name, now in _GONE.items()
        if hasattr(trainer, name)
    ]
    if is_replaced(trainer, _UNCALLED):
        found.append(Mistake("is not called", f"{kind}.{_UNCALLED}", "override create_optimizer or create_scheduler"))
    raise_all(PerlError, found)


def may_hold_images(trainer: GRPOTrainer) -> bool:
    """Whether prompts, or what tools answer, may hold images, which a model of text is never given.

    They are columns of TRL's names or parts of messages; all rows of a data set are of one form.
    """
    if not trainer._is_vlm:
        return False
    if trainer.tools or trainer.environment_factories is not None or trainer.rollout_func is not None:
        return True
    given = trainer.eval_dataset
    sets = [trainer.train_dataset, *(given.values() if isinstance(given, dict) else [given])]
    return any(not _is_of_text(one) for one in sets if one is not None)


def _is_of_text(data: Any) -> bool:  # noqa: ANN401 (as TRL takes it)
    """Whether a data set holds prompts of text alone; of a stream that is not known."""
    if not isinstance(data, Dataset) or {"image", "images"} & {*data.column_names}:
        return False
    prompt = Dataset(data.data, indices_table=data._indices)[0]["prompt"] if len(data) else ""
    contents = [] if isinstance(prompt, str) else [message.get("content") or "" for message in prompt]
    parts = [part for content in contents if not isinstance(content, str) for part in content]
    return all(part.get("type") == "text" for part in parts)


def reasons_for_trls_loss(trainer: GRPOTrainer) -> list[str]:
    """Why a loss that a subclass calls must be TRL's: only that has, or calls, what is named here."""
    reasons = {
        "top_entropy_quantile": trainer.top_entropy_quantile < 1.0,
        "entropy_coef or use_adaptive_entropy": trainer._entropy_bonus_enabled,
        "images in prompts": may_hold_images(trainer),
    }
    owners = [owner for owner in type(trainer).__mro__ if "_compute_loss" in vars(owner)]
    below = [owner.__name__ for owner in owners[-2:-1] if _package(owner) != "perl"]  # a parent that we inherit from
    methods = [f"{type(trainer).__name__}.{name}" for name in PARTS_OF_A_LOSS if is_replaced(trainer, name)]
    return [*(name for name, holds in reasons.items() if holds), *methods, *(f"{kind}._compute_loss" for kind in below)]


@contextlib.contextmanager
def received(
    trainer: GRPOTrainer, name: str, note: Callable[[Any, Any], None] = lambda *_: None
) -> Iterator[list[Any]]:
    """Keeps what callers of a trainer's method receive meanwhile.

    It listens outermost, so that it hears what a subclass, or a function that was put into the method's place, makes of
    it; a method of ours below those would hear what they were given.

    Args:
        trainer: Whose.
        name: Of the method.
        note: Told the first argument and the result of each call.
    """
    method, own = getattr(trainer, name), vars(trainer).get(name)
    results: list[Any] = []

    def listened(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 (any method's)
        results.append(method(*args, **kwargs))
        note((*args, *kwargs.values())[0], results[-1])
        return results[-1]

    setattr(trainer, name, listened)
    try:
        yield results
    finally:
        delattr(trainer, name)
        if own is not None:
            setattr(trainer, name, own)


def _package(thing: Any) -> str:  # noqa: ANN401 (a class or a function)
    return str(getattr(thing, "__module__", "")).partition(".")[0]
