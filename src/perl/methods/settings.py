"""From what a person writes about the adapter to a method with all its settings, and PEFT's config for it.

PeftSection -> Adaptation

Imports PEFT only to build a config; names and settings are checked without it.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from perl.errors import Mistake, RecipeError, did_you_mean
from perl.methods.registry import ALL_LINEAR, AS_RANK, METHODS, REFUSED_TYPES, Method
from perl.recipe.sections import PeftSection

if TYPE_CHECKING:
    from peft import PeftConfig

_SETTINGS = ("rank", "alpha", "dropout", "target_modules")
# How the names of settings end that an update is multiplied by; settings that choose among what there is.
_SCALES = ("alpha", "alpha_pattern", "scaling", "delora_lambda", "lambda_pattern")
_CHOICES = ("layers_to_transform", "trainable_token_indices")
# Learning rates below this share of the method's usual one are those of full fine-tuning.
_FULL_RATE_SHARE = 0.2


@dataclass(frozen=True)
class Initialisation:
    """One of PEFT's initialisations of LoRA that depend on more than random numbers.

    Attributes:
        prefix: How PEFT's names for it begin; the rest are options (``pissa_niter_4``).
        name: As its paper has it.
        writes: Whether PEFT changes the base's weights for it.
        needs_data: Whether it needs more than those weights. One that does not is made beside them (``starts.py``).
    """

    prefix: str
    name: str
    writes: bool
    needs_data: bool


_INITIALISATIONS = (
    Initialisation("pissa", "PiSSA", writes=True, needs_data=False),
    Initialisation("olora", "OLoRA", writes=True, needs_data=False),
    Initialisation("corda", "CorDA", writes=True, needs_data=True),
    Initialisation("lora_ga", "LoRA-GA", writes=True, needs_data=True),
    Initialisation("loftq", "LoftQ", writes=True, needs_data=True),
    Initialisation("eva", "EVA", writes=False, needs_data=True),
)


@dataclass(frozen=True)
class Adaptation:
    """How a model is adapted: a method, its config, and arguments of ours.

    Attributes:
        config: PEFT's; None: no adapter, all weights train.
        options: The method's options, by name.
    """

    method: Method
    config: "PeftConfig | None"
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def method_mistakes(sections: Mapping[str, Any]) -> list[tuple[tuple[str, ...], Mistake]]:
    """What is wrong with the ``peft`` section that only the table of methods knows.

    Args:
        sections: The recipe's valid sections by name.

    Returns:
        Key path and problem: an unknown method or type, one that cannot be trained, or a setting it would ignore.
    """
    section = sections.get("peft")
    if section is None:
        return []
    if section.type is not None:
        return _type_mistakes(section)
    if section.method not in METHODS:
        problem = Mistake(f"no method {section.method!r}", hint=did_you_mean(section.method, METHODS))
        return [(("peft", "method"), problem)]
    method = METHODS[section.method]
    ignored = [name for name in _asked(section) if name not in method.settings]
    found: list[tuple[tuple[str, ...], Mistake]] = [
        (("peft", name), Mistake(f"{method.name} has no {name}", hint="leave it out")) for name in ignored
    ]
    if not method.config and (section.kwargs or section.adapter):
        what = "kwargs" if section.kwargs else "adapter"
        found.append((("peft", what), Mistake("method full trains the model itself, without an adapter")))
    # A training may be too short for the method; an adapter that is continued may have its ranks already.
    elif not section.adapter and sections.get("train", {}).get("max_steps", method.fewest_steps) < method.fewest_steps:
        what = f"{method.name} needs {method.fewest_steps} optimizer steps or more"
        found.append((("train", "max_steps"), Mistake(what)))
    if section.adapter is None:
        return found
    # An adapter that is continued brings its settings with it; a recipe that is extended may have them, and cannot be
    # changed by everybody.
    what, out = "comes from the adapter that is continued", "leave it out"
    inherited = [name for name in _asked(section) if name in method.settings]
    found += [(("peft", one), Mistake(what, hint=f"{out}, or {one}: null if it is inherited")) for one in inherited]
    options = [name for name in section.kwargs if name not in method.options]
    return [*found, *((("peft", "kwargs", name), Mistake(what, hint=out)) for name in options)]


def resolved_settings(section: PeftSection) -> dict[str, Any]:
    """The settings that the method will use: those that are set, its defaults for the rest.

    Raises:
        RecipeError: There is no such method, or it would ignore a setting.
    """
    _raise_mistakes(section)
    asked = _asked(section)
    if section.type is not None:
        return {"target_modules": ALL_LINEAR, **asked, **section.kwargs}
    settings = {**METHODS[section.method].settings, **asked}
    return {name: settings["rank"] if value == AS_RANK else value for name, value in settings.items()}


def adaptation(section: PeftSection) -> Adaptation:
    """The method with its config, everything filled in.

    Raises:
        RecipeError: There is no such method, it would ignore a setting, or PEFT refuses an argument.
    """
    settings = resolved_settings(section)
    if section.type is not None:  # any config of the installed PEFT, with its arguments as they stand
        from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

        known = {kind.value: config for kind, config in PEFT_TYPE_TO_CONFIG_MAPPING.items()}
        kind = str(section.type).upper()
        if kind not in known:
            raise RecipeError(f"PEFT has no type {section.type!r}", "peft.type", did_you_mean(kind, known))
        targets = {field.name for field in dataclasses.fields(known[kind])} & {"target_modules"}
        arguments = {key: value for key, value in settings.items() if key != "target_modules" or targets}
        verbatim = _config(known[kind].__name__, arguments, {})
        return Adaptation(method_of(verbatim), verbatim)
    method = METHODS[section.method]
    if not method.config:
        return Adaptation(method, None)
    options = {name: section.kwargs.get(name, default) for name, default in method.options.items()}
    further = {name: value for name, value in section.kwargs.items() if name not in method.options}
    for name in method.fixed.keys() & further.keys():
        raise RecipeError("is what makes this method", f"peft.kwargs.{name}", "choose another peft.method")
    named = {method.arguments.get(name, name): value for name, value in settings.items()}
    for name in named.keys() & further.keys():
        raise RecipeError("is set by this package", f"peft.kwargs.{name}", "use the settings of the peft section")
    derived = method.derived(settings) if method.derived else {}
    arguments = {**method.defaults, **derived, **further, **method.fixed, **named}
    config = _config(method.config, arguments, method.options)
    _refuse_dora(config, bool(method.starts))
    own = method_of(config)
    for name in own.fixed.keys() & further.keys():
        if method.name == "lora" or name == "init_lora_weights":
            raise RecipeError("makes this another method", f"peft.kwargs.{name}", f"write peft.method: {own.name}")
    return Adaptation(method, config, options)


def continued_adaptation(section: PeftSection, config: "PeftConfig", own: Method | None = None) -> Adaptation:
    """The method with the config of the adapter that is continued.

    The method's name says how to go on, as far as the adapter allows it: any LoRA may go on as ``lora_plus``. The
    default ``lora`` stands for the adapter's own method.

    Args:
        section: What the person writes.
        config: The adapter's.
        own: The method that it was trained with; None: the one that its config tells.

    Raises:
        RecipeError: The adapter belongs to another method, or cannot be trained.
    """
    own = own or method_of(config)
    _raise_mistakes(section)
    method = own if section.method == "lora" or section.type else METHODS[section.method]
    if method.config != type(config).__name__ or any(
        not _same(getattr(config, name, None), value) for name, value in method.fixed.items() if name.startswith("use_")
    ):
        raise RecipeError(f"the adapter is of the method {own.name}", "peft.method", "leave peft.method out")
    options = {name: section.kwargs.get(name, default) for name, default in method.options.items()}
    return Adaptation(method, config, options)


def rate_warning(method: Method, learning_rate: float) -> str | None:
    """What to tell a person whose learning rate would hardly move this adapter, or None."""
    if not method.config or learning_rate >= _FULL_RATE_SHARE * method.learning_rate:
        return None
    return (
        f"learning rate {learning_rate:g} is in the range of full fine-tuning; {method.name} usually takes about "
        f"{method.learning_rate:g}, and would hardly move at this one"
    )


def dropout_of(config: "PeftConfig | None") -> float:
    """The adapter's dropout, whatever the config calls it."""
    names = [name for name in vars(config) if name.endswith("_dropout")] if config is not None else []
    return max((float(getattr(config, name)) for name in names), default=0.0)


def initialisation_of(config: "PeftConfig") -> Initialisation | None:
    """The initialisation that a config asks for, if it depends on more than random numbers."""
    asked = str(getattr(config, "init_lora_weights", ""))
    return next((known for known in _INITIALISATIONS if asked.startswith(known.prefix)), None)


def starts_as_base(how: Adaptation) -> bool:
    """Whether a new adapter leaves the base as it is until it is trained, as those of the table do."""
    return how.method.name in METHODS and not asks_for_random_start(how.config)


def asks_for_random_start(config: "PeftConfig | None") -> bool:
    """Whether a config of the user's own switches its method's start off, so that the adapter is not 0 at first."""
    names = ("init_lora_weights", "init_weights", "init_ia3_weights")
    return any(getattr(config, name, None) is False for name in names)


def method_of(config: "PeftConfig") -> Method:
    """The row of the table that a PEFT config belongs to, or one made for it.

    Raises:
        RecipeError: The config's type or initialisation cannot be trained; says why.
    """
    kind = config.peft_type.value
    if kind in REFUSED_TYPES:
        raise RecipeError(f"{kind} cannot be trained: {REFUSED_TYPES[kind]}", "peft_config")
    if getattr(config, "bias", "none") != "none":
        raise RecipeError(
            "trains biases of the base itself, which switching the adapter off does not restore",
            "peft.kwargs.bias",
            "leave it out; lora_bias trains biases of the adapter",
        )
    start = _check_initialisation(config)
    rows = [row for row in METHODS.values() if row.config == type(config).__name__ and not row.options]
    fitting = [row for row in rows if all(_same(getattr(config, k, None), v) for k, v in row.fixed.items())]
    # Of LoRA's rows, those that the config does not tell from plain LoRA are not meant by it.
    plain = [row for row in fitting if len(rows) == 1 or row.fixed or not (row.starts or row.frozen)]
    _refuse_dora(config, start is not None)
    by_weight = ("init_lora_weights", "use_dora")  # what says more about a method comes first
    as_it_is = Method(
        kind.lower(), f"PEFT's {kind}, as it is", "PEFT's documentation", type(config).__name__, {}, delta="full"
    )
    return max(plain, key=lambda row: (*(name in row.fixed for name in by_weight), len(row.fixed)), default=as_it_is)


def _check_initialisation(config: Any) -> Initialisation | None:  # noqa: ANN401 (a config, or its arguments)
    """The initialisation that is asked for, which must not need data."""
    start = initialisation_of(config)
    if start is not None and start.needs_data:
        raise RecipeError(
            f"the initialisation {config.init_lora_weights!r} ({start.name}) changes the base or needs data to start "
            "from",
            "peft_config.init_lora_weights",
            "pissa, olora and milora start from the weights alone and leave the base untouched",
        )
    return start


def _refuse_dora(config: "PeftConfig", starts_on_weights: bool) -> None:
    if starts_on_weights and getattr(config, "use_dora", False):
        problem = "DoRA cannot start on parts of the base's weights"
        raise RecipeError(problem, "peft.kwargs.use_dora", "take one of the two")


def _same(value: Any, fixed: Any) -> bool:  # noqa: ANN401 (arguments of configs)
    """Whether an argument has a row's fixed value; PiSSA by its fast decomposition is PiSSA."""
    return value == fixed or (fixed == "pissa" and str(value).startswith("pissa"))


def _config(class_name: str, arguments: Mapping[str, Any], options: Mapping[str, Any]) -> "PeftConfig":
    """PEFT's config, with its refusals as one line."""
    import peft

    config_class = getattr(peft, class_name)
    known = {field.name for field in dataclasses.fields(config_class)} | options.keys()
    for name in arguments:
        if name not in known:
            raise RecipeError(f"{class_name} has no such argument", f"peft.kwargs.{name}", did_you_mean(name, known))
    try:
        _check_initialisation(SimpleNamespace(**arguments))
        config = config_class(**{"task_type": "CAUSAL_LM", **arguments})
    except (ValueError, TypeError, ImportError) as error:
        raise RecipeError(f"PEFT refuses: {error}", "peft.kwargs") from error
    check_task(config)
    method_of(config)
    return config


def check_task(config: "PeftConfig") -> None:
    """Refuses an adapter that nobody could load as the policy that it was, or one in which nothing is trained.

    Raises:
        RecipeError: It is for another task (one that names none is this one's), or a setting switches it off.
    """
    if config.task_type not in (None, "CAUSAL_LM"):
        raise RecipeError(
            f"{config.task_type} is not a policy's", "peft.kwargs.task_type", "CAUSAL_LM, or leave it out"
        )
    facts = vars(config).copy()
    for key in [key for key, given in facts.items() if isinstance(given, dict)]:
        facts |= {f"{key}.{name}": value for name, value in facts[key].items()}
    for name, value in facts.items():
        number, key = isinstance(value, int | float), name.partition(".")[0]
        if number and value == 0 and key.endswith(_SCALES) and config.peft_type.value != "ADALORA":
            raise RecipeError("at 0 the adapter has no effect", f"peft.kwargs.{name}", "a number above 0")
        if number and value >= 1 and key.endswith("dropout"):
            raise RecipeError("drops all of the adapter", f"peft.kwargs.{name}", "below 1; 0 is best")
        if name in _CHOICES and value is not None and value in ([], {}):
            raise RecipeError("is empty, and chooses nothing", f"peft.kwargs.{name}", "leave it out")
    if facts.get("save_only_topk_weights"):
        raise RecipeError("saves too little to train on", "peft.kwargs.save_only_topk_weights", "leave it out")
    if facts.get("arrow_config") is not None:
        raise RecipeError("routes between finished adapters, and trains none", "peft.kwargs.arrow_config")


def _type_mistakes(section: PeftSection) -> list[tuple[tuple[str, ...], Mistake]]:
    kind = str(section.type).upper()
    if kind in REFUSED_TYPES:
        return [(("peft", "type"), Mistake(f"{kind} cannot be trained: {REFUSED_TYPES[kind]}"))]
    hint = f"with peft.type the arguments are those of PEFT's config, verbatim ({', '.join(_SETTINGS[:3])} are ours)"
    ours = [name for name in _asked(section) if name != "target_modules"]
    found: list[tuple[tuple[str, ...], Mistake]] = [
        (("peft", name), Mistake("is not an argument of PEFT", hint=hint)) for name in ours
    ]
    if section.method != PeftSection.model_fields["method"].default:
        found.append((("peft", "method"), Mistake("is not read beside peft.type", hint="leave one of them out")))
    if section.adapter is not None:
        paths: list[tuple[str, ...]] = [("kwargs", name) for name in section.kwargs]
        paths += [("target_modules",)] if section.target_modules is not None else []
        comes = Mistake("comes from the adapter that is continued", hint="leave it out")
        found += [(("peft", *path), comes) for path in paths]
    return found


def _raise_mistakes(section: PeftSection) -> None:
    for path, mistake in method_mistakes({"peft": section}):
        raise RecipeError(mistake.message, ".".join(path), mistake.hint)


def _asked(section: PeftSection) -> dict[str, Any]:
    """The settings that are set: those that differ from their defaults."""
    return {name: getattr(section, name) for name in _SETTINGS if getattr(section, name) != _UNSET[name]}


_UNSET = {name: PeftSection.model_fields[name].default for name in _SETTINGS}
