"""What an evaluation will do, with everything refused that cannot be done, before weights are loaded.

adapter, base, tasks, settings -> Evaluation
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from perl.errors import MissingExtraError, PerlError, did_you_mean
from perl.evaluation.argument_types import check_fields
from perl.evaluation.few_shot import check_examples
from perl.evaluation.heldout import HELDOUT, recipe_of_run
from perl.evaluation.metrics import power_line
from perl.evaluation.own_tasks import for_each, named_tasks
from perl.evaluation.policies import Who
from perl.evaluation.protocol import DEFAULT_PRESET, Protocol, asked_facts, resolve_protocol
from perl.evaluation.questions import PreparedTask, prepare_task, set_template, template_hash
from perl.evaluation.reward_scorer import check_scorer_timeout
from perl.evaluation.subject import QuantizationChoice, Subject, find_subject
from perl.evaluation.task import MATH
from perl.evaluation.task_data import check_files, load_task_data
from perl.policy.attach import continue_adapter
from perl.policy.model import DeviceMap, load_empty_base, load_tokenizer, resolve_model
from perl.recipe.engines import ENGINES, TRANSFORMERS, Backend, Capabilities, best_backend
from perl.recipe.eval_section import SCORER_SECONDS
from perl.recipe.quantisations import QUANTISATIONS, in_few_bits, quantised_base
from perl.recipe.rollout_section import RolloutSection
from perl.recipe.sections import ModelSection
from perl.recipe.server_address import ServerAddress, server_option
from perl.recipe.validation import checked
from perl.rewards.verifier import Judging
from perl.rollouts.vllm.version import missing_vllm
from perl.run.devices import accelerator

# What a recipe's key is called here.
_OPTIONS = {
    "tasks": "--tasks",
    "model.name": "--base",
    "model.quantization": "--quantization",
    "peft.adapter": "--adapter",
}


@dataclass(frozen=True)
class EvalSettings:
    """Settings of an evaluation that are seldom changed; None: not given.

    Attributes:
        preset: A published protocol, see :data:`perl.evaluation.protocol.PRESETS`.
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
    backend: Backend = "auto"
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
        check_fields(self, {"device_map": str | None})  # its names are known later, with the engine


@dataclass(frozen=True)
class Evaluation:
    """An evaluation that can be done.

    Attributes:
        tasks: Ready to be asked.
        folder: Where results go.
        engine: What draws completions; decided.
        template: Hash of the chat template; None: prompts are plain text.
        judging: The limits of comparing answers; None: the usual ones.
        within_run: It is part of a run, which has logged its plan, and scores that are there already.
        asking: What was asked for in place of the base's own template and thinking mode.
        compared: How many adapters one table compares with their base, this one among them.
    """

    subject: Subject
    protocol: Protocol
    tasks: tuple[PreparedTask, ...]
    folder: Path
    engine: RolloutSection
    template: str | None
    device: torch.device
    settings: EvalSettings
    judging: Judging | None = None
    within_run: bool = False
    asking: Mapping[str, str] = field(default_factory=dict)
    compared: int = 1

    @property
    def policies(self) -> tuple[Who, ...]:
        """Whom it asks, in order."""
        if not self.subject.trained:
            return ("base",)
        return ("base", "adapter") if self.settings.with_base else ("adapter",)

    @property
    def threads(self) -> int | None:
        """CPU threads that someone chose for it; None: nobody did."""
        if self.settings.threads is not None or self.subject.threads is None:
            return self.settings.threads
        return min(self.subject.threads, torch.get_num_threads())

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with the longest completion."""
        return max(task.longest for task in self.tasks)

    def lines(self) -> Iterator[str]:
        """What will be done, for a person to read."""
        quantized = in_few_bits(self.subject.base.quantization)
        on = f" on {self.subject.base.name}{quantized}" if self.subject.trained else quantized
        yield f"policy   {self.subject.name}{on}"
        yield f"protocol {self.protocol.preset}: {self.protocol}"
        thinking = f", thinking {self.asking['thinking']}" if "thinking" in self.asking else ""
        yield f"prompts  {'plain text' if self.template is None else f'chat template {self.template}'}{thinking}"
        for task in self.tasks:
            n, longest, judge = len(task.request.asked), task.request.max_new_tokens, task.request.scorer.label
            asked = (
                f"{task.data.task.name}: {n} problem{'s' * (n != 1)} of {task.data.source}, up to {longest} tokens each"
            )
            shown = len(task.data.examples)
            examples = f", {shown} example{'s' * (shown > 1)} before each" if shown else ""
            yield f"task     {asked}{examples}{'' if judge == MATH else f', judged by {judge}'}"
        for task in self.tasks if len(self.policies) > 1 else ():
            says = power_line(len(task.request.asked), self.protocol.k, len(self.tasks) * self.compared)
            yield f"power    {task.data.task.name}: {says}"
        count = sum(len(task.request.asked) for task in self.tasks) * self.protocol.k * len(self.policies)
        yield f"engine   {self.engine.backend}, {count:,} completions"
        yield f"output   {self.folder}"


def plan_evaluation(
    adapter: str | None,
    base: str | None,
    tasks: Sequence[str],
    k: int | None,
    data: str | Path | None,
    output: str | Path | None,
    settings: EvalSettings,
) -> Evaluation:
    """Checks a request as far as it can be without weights.

    Raises:
        PerlError: Whatever is wrong.
    """
    with naming_options():
        names = [recipe_of_run(adapter, "--tasks") if name == HELDOUT else name for name in tasks]
        chosen = named_tasks(names, columns=settings.columns, scorer=settings.scorer)
        limits = for_each(settings.limit, tasks, chosen, "--limit")
        examples = for_each(settings.few_shot, tasks, chosen, "--few-shot")
        for option, least, given in (("--limit", 1, limits), ("--few-shot", 0, examples)):
            if wrong := [number for number in given if number is not None and number < least]:
                what = "problems" if option == "--limit" else "examples"
                raise PerlError(f"{wrong[0]} {what} are too few", option, f"at least {least}")
        place = Path(data).expanduser() if data else None
        for task, limit, count in zip(chosen, limits, examples, strict=True):
            check_examples(task, limit, count or 0)
            check_files(task, place, count or 0)
        check_scorer_timeout(settings.scorer_timeout)
        engine = _engine(settings)
        resolve_protocol(settings.preset, _given(settings, k))  # says what is wrong before anything is looked for
        for what, count in (("threads", settings.threads), ("batch size", settings.batch_size)):
            if count is not None and count < 1:
                raise PerlError(f"{count} is too few", f"--{what.replace(' ', '-')}", "at least 1")
        subject = _as_asked(find_subject(adapter, base, settings.dtype, settings.quantization), settings)
        engine = _for_the_base(engine, subject, settings)
        empty = load_empty_base(subject.base)
        if subject.adapter is not None:
            with contextlib.suppress(NotImplementedError):  # PEFT sets some up on weights; they are checked when loaded
                continue_adapter(load_empty_base(subject.base), subject.adapter)
        generation = generation_settings(subject.base)
        protocol = resolve_protocol(settings.preset, _given(settings, k), generation)
        _check_pass_at(settings.pass_at, protocol.k)
        if settings.newest_data:
            chosen = [replace(task, revision=None) for task in chosen]
        found = [
            load_task_data(task, place, limit, shown or 0, protocol.seed)
            for task, limit, shown in zip(chosen, limits, examples, strict=True)
        ]
        tokenizer = load_tokenizer(subject.base)
        arguments = set_template(tokenizer, settings.chat_template, thinking=settings.thinking)
    context = getattr(empty.config.get_text_config(), "max_position_embeddings", None)
    ends = end_tokens(tokenizer, generation)
    template = template_hash(tokenizer) if settings.chat_template is not None else None
    asking = asked_facts(template, thinking=settings.thinking)
    may_take = settings.scorer_timeout
    prepared = tuple(
        prepare_task(each, tokenizer, protocol, ends, context, arguments, asking, may_take) for each in found
    )
    return Evaluation(
        subject=subject,
        protocol=protocol,
        tasks=tuple(_judged_later(one) for one in prepared) if settings.predict_only else prepared,
        folder=Path(output).expanduser() if output else subject.folder / protocol.preset,
        engine=engine,
        template=template_hash(tokenizer),
        device=_device(settings),
        settings=settings,
        asking=asking,
    )


def _judged_later(task: PreparedTask) -> PreparedTask:
    return replace(task, request=replace(task.request, judged=False))


@contextmanager
def naming_options() -> Iterator[None]:
    """A mistake names the option where other commands would name a recipe's key."""
    try:
        yield
    except PerlError as error:
        raise error.moved(lambda where: _OPTIONS.get(where, where)) from error


def _given(settings: EvalSettings, k: int | None) -> dict[str, Any]:
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens", "system_prompt", "seed")
    return {"k": k, **{name: getattr(settings, name) for name in names}}


def _engine(settings: EvalSettings) -> RolloutSection:
    """What draws the completions, decided."""
    backend = settings.backend
    if backend not in ENGINES:
        backend = best_backend(on_gpu=torch.cuda.is_available(), servers=bool(settings.servers))
    engine = ENGINES[backend]
    if not engine.installed:
        problem = missing_vllm(f"--backend {backend}")
        raise MissingExtraError(problem.message, hint=problem.hint)
    if engine.needs_servers and not settings.servers:
        raise PerlError("vllm-server needs the address of one", "--backend", "--server http://localhost:8000")
    _check_spread(settings, engine)
    if settings.servers and not engine.needs_servers:
        raise PerlError(f"{backend} asks no server", "--server", "leave --backend out")
    if not settings.server_timeout > 0:
        raise PerlError(f"{settings.server_timeout:g} is out of range", "--server-timeout", "more than 0 seconds")
    asked = {"backend": backend, "server_timeout": settings.server_timeout, "sync_folder": settings.sync_folder}
    try:
        servers = [_as_setting(server_option(text)) for text in settings.servers]
        return checked(RolloutSection, {**asked, "servers": servers})
    except PerlError as error:
        raise error.moved(lambda _: "--server") from None
    except ValueError as error:
        raise PerlError(str(error), "--server") from None


def _check_spread(settings: EvalSettings, engine: Capabilities) -> None:
    """Refuses a way to spread the base over GPUs that the engine does not have."""
    if settings.device_map is not None:
        if settings.device_map not in get_args(DeviceMap):
            hint = did_you_mean(settings.device_map, get_args(DeviceMap))
            raise PerlError(f"there is no device map {settings.device_map!r}", "--device-map", hint)
        if engine.takes_updates:
            what = "spreads the base of transformers, and here vLLM draws the completions"
            raise PerlError(what, "--device-map", "--backend transformers, or --server-command --tensor-parallel N")
        if settings.quantization in QUANTISATIONS:
            what = f"{quantised_base(settings.quantization)} lies whole on one GPU"
            raise PerlError(what, "--device-map", "leave it out")


def _as_asked(subject: Subject, settings: EvalSettings) -> Subject:
    """The subject, its base computed as the settings say."""
    if settings.attention is None:
        return subject
    known = ["eager", *ALL_ATTENTION_FUNCTIONS.valid_keys()]
    if settings.attention not in known and "/" not in settings.attention:  # a kernel on the Hub
        hint = did_you_mean(settings.attention, known)
        raise PerlError(f"there is no attention {settings.attention!r}", "--attention", hint)
    return replace(subject, base=subject.base.model_copy(update={"attn_implementation": settings.attention}))


def _for_the_base(engine: RolloutSection, subject: Subject, settings: EvalSettings) -> RolloutSection:
    """The engine, where it can have the base as it will be scored: vLLM in this process loads the ordinary one."""
    if subject.base.quantization is None or engine.capabilities.quantised_base:
        return engine
    if settings.backend == engine.backend:
        hint = "--backend transformers, --server URL, or --quantization none for the ordinary base"
        what = f"vLLM in this process holds the ordinary base, not the one{in_few_bits(subject.base.quantization)}"
        raise PerlError(what, "--backend", hint)
    return engine.model_copy(update={"backend": TRANSFORMERS.name})


def _as_setting(address: ServerAddress) -> str | dict[str, str]:
    """A server as a recipe has it."""
    given = {key: value for key, value in asdict(address).items() if value is not None}
    return given if len(given) > 1 else address.url


def _device(settings: EvalSettings) -> torch.device:
    here = None if settings.device == "cpu" else accelerator()
    return torch.device("cpu") if here is None else here


def _check_pass_at(pass_at: Sequence[int], k: int) -> None:
    if pass_at and min(pass_at) < 1:
        raise PerlError(f"there is no pass@{min(pass_at)}", "--pass-at", f"1 to {k}")
    if pass_at and max(pass_at) > k:
        message = f"pass@{max(pass_at)} needs {max(pass_at)} completions a problem, there are {k}"
        raise PerlError(message, "--pass-at", f"--k {max(pass_at)}")


def generation_settings(section: ModelSection) -> Mapping[str, Any]:
    """What the base's ``generation_config.json`` says; nothing if it has none."""
    try:
        found = GenerationConfig.from_pretrained(resolve_model(section.name), revision=section.revision)
    except OSError:
        return {}
    settings: dict[str, Any] = found.to_diff_dict()
    return settings


def end_tokens(tokenizer: PreTrainedTokenizerBase, generation: Mapping[str, Any]) -> tuple[int, ...]:
    """Every token that ends a completion: the tokenizer's, and those the base declares."""
    declared = generation.get("eos_token_id")
    declared = [] if declared is None else [declared] if isinstance(declared, int) else list(declared)
    own = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return tuple(dict.fromkeys([*own, *declared]))
