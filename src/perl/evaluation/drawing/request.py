"""What an evaluation will do, with everything refused that cannot be done, before weights are loaded.

adapter, base, tasks, settings -> Evaluation
"""

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from perl.errors import MissingExtraError, Mistake, PerlError, did_you_mean, raise_all
from perl.evaluation.drawing.policies import Who
from perl.evaluation.drawing.settings import EvalSettings as EvalSettings
from perl.evaluation.drawing.subject import Subject, find_subject
from perl.evaluation.scoring.metrics import power_line
from perl.evaluation.scoring.protocol import SHAPING, Protocol, asked_facts, generation_settings, resolve_protocol
from perl.evaluation.scoring.reward_scorer import check_scorer_timeout
from perl.evaluation.scoring.task import MATH, Task
from perl.evaluation.tasks.heldout import HELDOUT, asked_with_tools, recipe_of_run
from perl.evaluation.tasks.own_tasks import for_each, named_tasks
from perl.evaluation.tasks.questions import PreparedTask, prepare_task, set_template, template_hash
from perl.evaluation.tasks.task_data import check_examples, check_files, load_task_data
from perl.policy.attach import shaped_saved_adapter
from perl.policy.model import DeviceMap, end_tokens, load_empty_base, load_tokenizer
from perl.recipe.quantisations import QUANTISATIONS, in_few_bits, quantised_base
from perl.recipe.rollout_section import ENGINES, TRANSFORMERS, Capabilities, RolloutSection, best_backend
from perl.recipe.server_address import server_option
from perl.recipe.validation import checked
from perl.rewards.verifier import Judging
from perl.rollouts.vllm.release import missing_vllm
from perl.run.devices import accelerator

# What a recipe's key is called here.
_OPTIONS = {
    "tasks": "--tasks",
    "model.name": "--base",
    "model.quantization": "--quantization",
    "peft.adapter": "--adapter",
}


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
        settings = _thinking_as_trained(settings, chosen)
        limits = for_each(settings.limit, tasks, chosen, "--limit")
        examples = for_each(settings.few_shot, tasks, chosen, "--few-shot")
        counts: dict[str, Sequence[int | None]] = {"--limit": limits, "--few-shot": examples}
        counts |= {"--threads": [settings.threads], "--batch-size": [settings.batch_size]}
        for option, given in counts.items():
            least = 0 if option == "--few-shot" else 1
            if wrong := [number for number in given if number is not None and number < least]:
                raise PerlError(f"{wrong[0]} is too few", option, f"at least {least}")
        place = Path(data).expanduser() if data else None
        for task, limit, count in zip(chosen, limits, examples, strict=True):
            check_examples(task, limit, count or 0)
            check_files(task, place, count or 0)
        check_scorer_timeout(settings.scorer_timeout)
        engine = _engine(settings)
        resolve_protocol(settings.preset, _given(settings, k))  # before an adapter is looked for
        subject = _as_asked(find_subject(adapter, base, settings.dtype, settings.quantization), settings)
        engine = _for_the_base(engine, subject, settings)
        empty = load_empty_base(subject.base)
        if subject.adapter is not None:
            with contextlib.suppress(NotImplementedError):  # PEFT sets some up on weights; they are checked when loaded
                shaped_saved_adapter(load_empty_base(subject.base), subject.adapter)
        generation = generation_settings(subject.base)
        protocol = resolve_protocol(settings.preset, _given(settings, k), generation)
        check_pass_at(settings.pass_at, protocol.k)
        if settings.newest_data:
            chosen = [replace(task, revision=None) for task in chosen]
        found = [
            load_task_data(task, place, limit, shown or 0, protocol.seed)
            for task, limit, shown in zip(chosen, limits, examples, strict=True)
        ]
        tokenizer = load_tokenizer(subject.base)
        system = protocol.system_prompt
        arguments = set_template(tokenizer, settings.chat_template, thinking=settings.thinking, system=system)
    context = getattr(empty.config.get_text_config(), "max_position_embeddings", None)
    ends = end_tokens(tokenizer, generation)
    template = template_hash(tokenizer) if settings.chat_template is not None else None
    asking = asked_facts(template, thinking=settings.thinking)
    may_take = settings.scorer_timeout
    alone = [prepare_task(each, tokenizer, protocol, ends, context, arguments, asking, may_take) for each in found]
    prepared = [asked_with_tools(each, tokenizer, protocol, context, arguments, asking) for each in alone]
    return Evaluation(
        subject=subject,
        protocol=protocol,
        tasks=tuple(replace(one, request=replace(one.request, judged=not settings.predict_only)) for one in prepared),
        folder=Path(output).expanduser() if output else subject.folder / protocol.preset,
        engine=engine,
        template=template_hash(tokenizer),
        device=torch.device("cpu") if settings.device == "cpu" else accelerator() or torch.device("cpu"),
        settings=settings,
        asking=asking,
    )


def _thinking_as_trained(settings: EvalSettings, chosen: Sequence[Task]) -> EvalSettings:
    """The settings with the thinking mode of recipes whose held-out problems are asked, unless they have one."""
    modes = {task.thinking for task in chosen} - {None}
    if settings.thinking is not None or not modes:
        return settings
    if len(modes) > 1:
        raise PerlError("the recipes' data.thinking is true in one, false in another", "--thinking", "say which")
    return replace(settings, thinking=modes.pop())


def plan_adapters(
    adapters: Sequence[str],
    base: str | None,
    tasks: Sequence[str],
    k: int | None,
    data: str | Path | None,
    output: str | Path | None,
    settings: EvalSettings,
) -> list[Evaluation]:
    """Checks a request for any number of adapters, as :func:`plan_evaluation` does for one.

    Args:
        adapters: None of them: the base alone is asked.
        base: Of all of them; None: each has the one that it names.
        tasks: As there, and so on.
        k: See there.
        data: See there.
        output: Of one adapter its folder; of several each has a folder of its name in it. None: where each would be
            alone; those whose folders would be one have digits of their weights in its name.
        settings: See there.

    Raises:
        PerlError: The request cannot be done, or an adapter is named twice.
    """
    twice = sorted({name for name in adapters if adapters.count(name) > 1})
    raise_all(PerlError, [Mistake(f"{name} is named twice", "--adapter", "once is enough") for name in twice])
    if len(adapters) < 2:
        return [plan_evaluation(adapters[0] if adapters else None, base, tasks, k, data, output, settings)]
    plans = [
        replace(plan_evaluation(name, base, tasks, k, data, output, settings), compared=len(adapters))
        for name in adapters
    ]
    if output:
        above = Path(output).expanduser()
        return [replace(plan, folder=above / name) for plan, name in zip(plans, _names(plans), strict=True)]
    folders = [plan.folder for plan in plans]
    return [
        replace(plan, folder=plan.folder.parent.with_name(name) / plan.folder.name)
        if folders.count(plan.folder) > 1
        else plan
        for plan, name in zip(plans, _names(plans), strict=True)
    ]


def _names(plans: Sequence[Evaluation]) -> list[str]:
    """A name for each that a folder may have: the subject's, with digits of its weights where two are called alike."""
    plain = [re.sub(r"[^\w.@-]+", "-", plan.subject.name).strip("-.") or "adapter" for plan in plans]
    digests = [str(plan.subject.adapter_sha256)[:8] + str(plan.subject.config_sha256)[:4] for plan in plans]
    return [f"{name}-{digest}" if plain.count(name) > 1 else name for name, digest in zip(plain, digests, strict=True)]


@contextmanager
def naming_options() -> Iterator[None]:
    """A mistake names the option where other commands would name a recipe's key."""
    try:
        yield
    except PerlError as error:
        raise error.moved(lambda where: _OPTIONS.get(where, where)) from error


def _given(settings: EvalSettings, k: int | None) -> dict[str, Any]:
    names = (*SHAPING, "max_new_tokens", "system_prompt", "seed")
    return {"k": k, **{name: getattr(settings, name) for name in names}}


def _engine(settings: EvalSettings) -> RolloutSection:
    """What draws the completions, decided."""
    backend = settings.backend
    if backend not in ENGINES:
        on_gpu = torch.cuda.is_available() and settings.device != "cpu"
        backend = best_backend(on_gpu=on_gpu, servers=bool(settings.servers))
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
        given = [asdict(server_option(text)) for text in settings.servers]
        servers = [{name: value for name, value in one.items() if value is not None} for one in given]
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


def check_pass_at(pass_at: Sequence[int], k: int) -> None:
    """Refuses a pass@n of more completions than there are of a problem, or of none."""
    wrong = [n for n in pass_at if not 1 <= n <= k]
    hints = (f"1 to {k}, or draw more with --k {n}" if n > 0 else f"1 to {k}" for n in wrong)
    mistakes = [
        Mistake(f"there is no pass@{n} of {k} completions", "--pass-at", hint)
        for n, hint in zip(wrong, hints, strict=True)
    ]
    raise_all(PerlError, mistakes)
