"""An update is given to one server: all that is said to it at one go, by whoever is near it.

Order, server -> Given

The process that trains does it over HTTP, or has it done on the server's node, where that was started for the run
(:class:`perl.run.host.Fleet`). Either way it is this code, and nothing is decided here: an order says what a server
must be before it is given anything, and what came back is compared by who sent it (``held_versions.py``).
"""

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from perl.errors import PerlError
from perl.recipe.server_address import ServerAddress
from perl.rollouts.engine import EngineSampling, Form, Request
from perl.rollouts.vllm.answers import AdapterGoneError, ServerDownError, Standing
from perl.rollouts.vllm.http import VllmServer
from perl.rollouts.vllm.weight_labels import WeightLabel, finished, owner_of

# For the first token that a server writes, when it still warms up.
FIRST_TOKEN_SECONDS = 180.0


@dataclass(frozen=True)
class Question:
    """What a server that has an update is to be compared by.

    Attributes:
        prompts: After each it is asked for its likeliest tokens; none: it is to write one.
        temperature: Of these.
    """

    prompts: Sequence[Sequence[int]] = ()
    temperature: float = 1.0


@dataclass(frozen=True)
class Order:
    """What is to be said to a server.

    Attributes:
        name: Of the update.
        form: Of the update; None: the base.
        path: Its folder as the server sees it.
        model: Name under which the server has it.
        load: Whether it is to be loaded; False: the server has it.
        look: Whether it is read first what the server is.
        standing: What it was when it was met, without its adapters: another one is given nothing.
        same_weights: Whether it must have the same weights, too.
        takes_weights: Whether it has a label for its weights.
        ours: Weights of this run that merged ones may replace, by name.
        left: Those that another run has left and that merged ones may replace.
        keeps: Whether weights are labelled that are there already.
        unload: Adapters that nothing needs any more.
        question: Asked at the end; None: nothing is.
    """

    name: str
    form: Form | None
    path: str
    model: str
    load: bool = False
    look: bool = False
    standing: Standing | None = None
    same_weights: bool = False
    takes_weights: bool = False
    ours: frozenset[str] = frozenset()
    left: str | None = None
    keeps: bool = False
    unload: tuple[str, ...] = ()
    question: Question | None = None


@dataclass(frozen=True)
class Given:
    """What came of an order.

    Attributes:
        standing: What the server was before it was given anything; None: nobody looked.
        loaded: It has the update by this order.
        unloaded: Adapters that it gave up.
        held: Owner of the weights that were in the way of merged ones.
        taken: They came while the merged ones were loaded.
        log_probs: After each prompt, of the likeliest tokens; None: it was not asked, or has written a token.
        after: What the server was after the question; None: it was not asked.
    """

    standing: Standing | None = None
    loaded: bool = False
    unloaded: frozenset[str] = frozenset()
    held: str | None = None
    taken: bool = False
    log_probs: Sequence[Mapping[int, float]] | None = None
    after: Standing | None = None


def difference(before: Standing, now: Standing, weights: bool) -> str | None:
    """What makes a server another one than before; None: nothing does.

    Args:
        before: With the owner of its weights in the place of their label.
        now: What it reports.
        weights: Whether its weights must be the same too.
    """
    if now.process != before.process:
        return "was restarted, or another server answers in its place"
    if now.base != before.base:
        return f"serves {' '.join(now.base)}, not {' '.join(before.base)}"
    if weights and owner_of(now.weights) != before.weights:
        return f"got weights from someone else ({owner_of(now.weights) or 'those of the base'})"
    return None


async def give(server: VllmServer, label: WeightLabel, order: Order) -> Given:
    """Says it to a server; one that is not what it must be is told nothing.

    Args:
        server: The server.
        label: Of its weights.
        order: What to say.

    Raises:
        ServerDownError: It does not answer.
        PerlError: It cannot do so before something is fixed.
    """
    found = Given()
    if order.look:
        now = await server.standing(order.takes_weights)
        found = replace(found, standing=now)
        if order.standing is not None and difference(order.standing, now, order.same_weights):
            return found
    if order.load and order.form == "adapter":
        await server.load_adapter(order.name, order.path)
        found = replace(found, loaded=True)
    elif order.load and order.form == "merged":
        found = await _take_over(server, label, order, found)
        if not found.loaded:
            return found
    for name in order.unload:
        with contextlib.suppress(ServerDownError, PerlError):
            await server.unload_adapter(name)
            found = replace(found, unloaded=found.unloaded | {name})
    return found if order.question is None else await _asked(server, order, order.question, found)


async def give_at(order: Order, address: ServerAddress) -> Given | ServerDownError | PerlError:
    """The same beside the server, in a process that keeps nothing of it; an error is returned, so that it can be sent.

    Nobody else uses a server that was started for the run, so the label of its weights needs no renewal.

    Args:
        order: What to say.
        address: Of the server.
    """
    server = VllmServer(address)
    try:
        return await give(server, WeightLabel(server, renewed=False), order)
    except (ServerDownError, PerlError) as error:
        return error
    finally:
        await server.close()


async def _take_over(server: VllmServer, label: WeightLabel, order: Order, found: Given) -> Given:
    """Puts merged weights on a server whose weights are the base's or ours, or are known to be left."""
    held = owner_of(found.standing.weights if found.standing is not None else await server.weight_version())
    if held != order.name:
        ours = held is not None and finished(held) in order.ours
        if held is not None and not ours and held != order.left:
            return replace(found, held=held)
        announced = await label.announce(order.name, fresh=not ours)
        if announced:
            await server.load_weights(order.name, order.path)
        if not announced or not await label.kept():
            return replace(found, held=owner_of(await server.weight_version()), taken=True)
    if held != order.name or order.keeps:
        await label.keep(order.name)
    return replace(found, loaded=True)


async def _asked(server: VllmServer, order: Order, question: Question, found: Given) -> Given:
    """Asks what a server that has the update is compared by, and then what it is."""
    log_probs = None
    try:
        if question.prompts:
            asked = server.next_log_probs(order.model, question.prompts, question.temperature)
            log_probs = await asyncio.wait_for(asked, FIRST_TOKEN_SECONDS)
        else:
            written = server.complete(order.model, Request((0,), 1), EngineSampling(1.0, 1, ()))
            await asyncio.wait_for(written, FIRST_TOKEN_SECONDS)
    except TimeoutError:
        raise ServerDownError(f"writes nothing within {FIRST_TOKEN_SECONDS:.0f} seconds") from None
    except AdapterGoneError:
        raise ServerDownError("was restarted once more") from None
    return replace(found, log_probs=log_probs, after=await server.standing(order.takes_weights))
