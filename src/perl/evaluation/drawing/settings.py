"""Settings of an evaluation, and the arguments of a script's: each of a type that it can have.

EvalSettings, arguments of ``perl.evaluate`` -> the same as plain values, or a line for each that is wrong
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any, Literal, get_type_hints

from pydantic import ValidationError, create_model

from perl.errors import PerlError, raise_all
from perl.evaluation.drawing.subject import QuantizationChoice
from perl.evaluation.scoring.protocol import DEFAULT_PRESET
from perl.policy.model import DeviceMap
from perl.recipe.eval_section import SCORER_SECONDS
from perl.recipe.layers import Layer
from perl.recipe.section import Section
from perl.recipe.validation import mistakes_of


@dataclass(frozen=True)
class EvalSettings:
    """Settings of an evaluation that are seldom changed; None: not given.

    Attributes:
        preset: A published protocol, see :data:`perl.evaluation.scoring.protocol.PRESETS`.
        temperature: Instead of the preset's.
        top_p: Likewise.
        top_k: Likewise; 0: all tokens.
        min_p: Likewise; 0: none.
        repetition_penalty: Likewise; 1: none.
        max_new_tokens: Likewise.
        system_prompt: Message before every question.
        chat_template: File with the Jinja template that renders questions; None: the base's own.
        thinking: Whether a template with a thinking mode asks for it (``enable_thinking``); None: as it does by itself.
        seed: From which each sample's own seed is derived.
        limit: Only the first so many problems of each task, or of those that are named.
        few_shot: Solved examples before every question, likewise. They come from the split that the task names for
            them, else from its own problems, which are not asked then; the seed decides which.
        columns: Of data files that are named as tasks: any of prompt, answer, id and choices -> the column's name.
        scorer: What makes a completion right on these: math, choice, exact, normalised, or a reward, as
            ``my_rewards.py:function>=0.5``; None: math.
        scorer_timeout: Seconds that a reward may take for a completion; 0: there is no limit, and it is called in this
            process instead of in worker processes.
        pass_at: Numbers for pass@k, beside the powers of two up to k.
        newest_data: Take the newest commit of data sets on the Hub instead of the pinned one.
        with_base: Score the base too.
        base_cache: Keep the base's completions for later evaluations, and take those that are kept.
        predict_only: Draw completions, and leave judging them to :func:`perl.evaluation.rescore.rescore`.
        lighteval: Report lighteval's own score of the same completions, where it is installed.
        backend: What draws completions; auto: the servers if there are any, else vLLM on a GPU where it is installed,
            else transformers.
        servers: Addresses of vLLM servers that serve the base: ``URL[,key_env=VARIABLE][,ca_file=FILE]``.
        server_timeout: Seconds to wait while no server answers.
        sync_folder: Folder through which servers get the adapter; None: in the output folder.
        device: ``auto`` or ``cpu``.
        dtype: Of the base's weights; auto: float32 on a CPU, the checkpoint's own elsewhere.
        attention: ``attn_implementation`` of transformers; None: the run's, else transformers' choice.
        device_map: How transformers spreads the base over the GPUs here, as ``auto``; None: it lies on one.
        quantization: Of the base; auto: as the adapter was trained, none: the ordinary base.
        batch_size: Completions that transformers write at a time; no score depends on it.
        threads: CPU threads, likewise; None: the run's ``engine.threads``, but no more than PyTorch takes, or as many
            as the model is large enough for.
    """

    preset: str = DEFAULT_PRESET
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None
    system_prompt: str | None = None
    chat_template: str | None = None
    thinking: bool | None = None
    seed: int | None = None
    limit: int | Mapping[str, int] | None = None
    few_shot: int | Mapping[str, int] = 0
    columns: Mapping[str, str] | None = None
    scorer: str | None = None
    scorer_timeout: float = SCORER_SECONDS
    pass_at: tuple[int, ...] = ()
    newest_data: bool = False
    with_base: bool = True
    base_cache: bool = True
    predict_only: bool = False
    lighteval: bool = True
    backend: str = "auto"
    servers: tuple[str, ...] = ()
    server_timeout: float = 600.0
    sync_folder: str | None = None
    device: Literal["auto", "cpu"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    quantization: QuantizationChoice = "auto"
    attention: str | None = None
    device_map: DeviceMap | None = None
    batch_size: int = 64
    threads: int | None = None

    def __post_init__(self) -> None:
        """Refuses what is of another type, in a line."""
        hints = get_type_hints(EvalSettings) | {"device_map": str | None}  # its names are known later, with the engine
        for name, value in checked_arguments("EvalSettings", vars(self), hints).items():
            object.__setattr__(self, name, value)


def checked_arguments(whose: str, given: Mapping[str, object], hints: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments as plain values: lists as tuples, paths as texts, whole numbers of NumPy as Python's.

    Args:
        whose: A function's or a record's name, for errors.
        given: By their names.
        hints: Name -> the type that each can have.

    Raises:
        PerlError: With every argument that is of another type than it can have.
    """
    values = {name: _plain(value) for name, value in given.items()}
    fields: dict[str, Any] = {name: (hints[name], ...) for name in given}
    model = create_model(whose, __base__=Section, **fields)
    try:
        model.model_validate(values)
    except ValidationError as error:
        found = mistakes_of(error, model, values, (), Layer())
        raise_all(PerlError, [replace(mistake, where=f"{whose}({mistake.where})") for mistake in found])
    return values


def names_of(given: object) -> list[str]:
    """One name, or several, as a list."""
    plain = _plain(given)
    return [plain] if isinstance(plain, str) else list(plain)


def _plain(value: object) -> Any:  # noqa: ANN401 (whatever a script gives)
    if isinstance(value, list | tuple):
        return tuple(_plain(one) for one in value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return int(value) if isinstance(value, Integral) and not isinstance(value, bool) else value
