"""How to start a stock vLLM server for an evaluation.

Evaluation -> a command line

Loads no weights.
"""

from urllib.parse import urlsplit

from perl.errors import PerlError
from perl.evaluation.request import Evaluation
from perl.methods.registry import served_rank
from perl.policy.attach import continue_adapter, own_method
from perl.policy.model import load_empty_base
from perl.recipe.server_address import server_option
from perl.rollouts.engine import Form
from perl.rollouts.sync import choose_form
from perl.rollouts.vllm.server_command import server_command

PORT = 8000


def serving_command(plan: Evaluation, address: str | None = None) -> str:
    """The command, for a machine like this one: without a GPU here it is one for CPUs.

    Args:
        plan: What will be evaluated.
        address: Of the server, whose port it takes; None: 8000.

    Raises:
        PerlError: The address has no port that there can be.
    """
    form, rank = _update(plan)
    on_cpu = plan.device.type == "cpu"
    return server_command(plan.subject.base, plan.longest, _port(address), on_cpu=on_cpu, form=form, rank=rank)


def _update(plan: Evaluation) -> tuple[Form | None, int | None]:
    """In what form the policy will be sent, decided without weights, and the rank of a LoRA that a server holds."""
    saved = plan.subject.adapter
    if saved is None:
        return ("merged" if plan.subject.trained else None), None
    try:
        found = choose_form(continue_adapter(load_empty_base(plan.subject.base), saved), plan.engine.sync)
        rank = found.largest_rank
    except NotImplementedError:  # of a method that PEFT sets up on weights
        rank = own_method(saved).update_rank(saved.config)
    if rank is None:
        return "merged", None
    # With weights, what started on parts of the base's is twice as large: what it started on is taken away.
    served = served_rank(2 * rank if saved.start else rank)
    return ("merged" if served is None else "adapter"), served


def _port(address: str | None) -> int:
    try:
        return (urlsplit(server_option(address).url).port if address else None) or PORT
    except ValueError as error:
        raise PerlError(str(error), "--server") from None
