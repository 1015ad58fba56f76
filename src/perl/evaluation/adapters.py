"""Several adapters in one evaluation: each beside its own base, which is loaded and drawn once.

adapters, base, tasks, settings -> an Evaluation for each
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from perl.errors import Mistake, PerlError, raise_all
from perl.evaluation.request import EvalSettings, Evaluation, plan_evaluation


def plan_adapters(
    adapters: Sequence[str],
    base: str | None,
    tasks: Sequence[str],
    k: int | None,
    data: str | Path | None,
    output: str | Path | None,
    settings: EvalSettings,
) -> list[Evaluation]:
    """Checks a request for any number of adapters, as :func:`perl.evaluation.request.plan_evaluation` does for one.

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
    _check_different(adapters, plans)
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


def _check_different(adapters: Sequence[str], plans: Sequence[Evaluation]) -> None:
    """Refuses one adapter under two names: it would be two rows, and two tests of one difference."""
    seen: dict[tuple[object, ...], str] = {}
    for name, plan in zip(adapters, plans, strict=True):
        subject = plan.subject
        same = (subject.adapter_sha256, subject.config_sha256, subject.base.name, subject.base.revision)
        first = seen.setdefault(same, name) if subject.adapter_sha256 is not None else name
        if first != name:
            raise PerlError(f"{first} and {name} are the same adapter", "--adapter", "name it once")


def _names(plans: Sequence[Evaluation]) -> list[str]:
    """A name for each that a folder may have: the subject's, with digits of its weights where two are called alike."""
    plain = [re.sub(r"[^\w.@-]+", "-", plan.subject.name).strip("-.") or "adapter" for plan in plans]
    digests = [str(plan.subject.adapter_sha256)[:8] + str(plan.subject.config_sha256)[:4] for plan in plans]
    return [f"{name}-{digest}" if plain.count(name) > 1 else name for name, digest in zip(plain, digests, strict=True)]
