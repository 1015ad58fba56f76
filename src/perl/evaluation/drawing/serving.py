"""How to start a stock vLLM server for an evaluation.

Evaluation -> a command line

Loads no weights.
"""

from collections.abc import Sequence
from urllib.parse import urlsplit

from perl.errors import PerlError
from perl.evaluation.drawing.request import Evaluation
from perl.methods.registry import served_rank
from perl.policy.attach import own_method, shaped_saved_adapter
from perl.policy.model import load_empty_base
from perl.recipe.server_address import server_option
from perl.rollouts.engine import Form
from perl.rollouts.sync import choose_form
from perl.rollouts.vllm.server_command import server_command

PORT = 8000


def serving_command(plans: Sequence[Evaluation], address: str | None = None, gpus: int = 1) -> str:
    """The command, for a machine like this one: without a GPU here it is one for CPUs.

    Args:
        plans: What will be evaluated.
        address: Of the server, whose port it takes; None: 8000.
        gpus: Over which the server splits the base.

    Raises:
        PerlError: The address has no port that there can be, adapters need different bases, or servers that are started
            differently.
    """
    if any(plan.subject.base != plans[0].subject.base for plan in plans):
        raise PerlError("a server serves one base, and these adapters have different ones", "--server-command")
    found = [_update(plan) for plan in plans]
    forms = {form for form, _ in found}
    if len(forms) > 1:
        what = "some of these adapters are served as LoRA, others as merged weights, and no server does both"
        raise PerlError(what, "--server-command", "name those of one kind at a time")
    try:
        port = (urlsplit(server_option(address).url).port if address else None) or PORT
    except ValueError as error:
        raise PerlError(str(error), "--server") from None
    return server_command(
        plans[0].subject.base,
        max(plan.longest for plan in plans),
        port,
        on_cpu=plans[0].device.type == "cpu",
        form=found[0][0],
        rank=max((rank for _, rank in found if rank is not None), default=None),
        gpus=gpus,
    )


def _update(plan: Evaluation) -> tuple[Form | None, int | None]:
    """In what form the policy will be sent, decided without weights, and the rank of a LoRA that a server holds."""
    saved = plan.subject.adapter
    if saved is None:
        return ("merged" if plan.subject.trained else None), None
    try:
        found = choose_form(shaped_saved_adapter(load_empty_base(plan.subject.base), saved), plan.engine.sync)
        rank = found.largest_rank
    except NotImplementedError:  # of a method that PEFT sets up on weights
        rank = own_method(saved).update_rank(saved.config)
    if rank is None:
        return "merged", None
    # With weights, what started on parts of the base's is twice as large: what it started on is taken away.
    served = served_rank(2 * rank if saved.start else rank)
    return ("merged" if served is None else "adapter"), served
