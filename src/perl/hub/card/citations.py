"""The papers that an adapter's method and algorithm come from.

RunFacts -> references
"""

import re

from perl.algorithms.estimators import ADVANTAGES
from perl.algorithms.named import ALGORITHMS
from perl.algorithms.registry import GRPO, GSPO, LOSSES
from perl.hub.card.facts import RunFacts
from perl.methods.registry import METHODS
from perl.recipe.sections import MEMORY_WORDS, REFILL_WORDS

_DISTILLATION = ALGORITHMS["opd"]
_OF_PROMPTS = {
    MEMORY_WORDS: ("prompts that rest (GRESO)", "Zheng et al. 2025, arXiv:2506.02177"),
    REFILL_WORDS: ("refilled groups (DAPO's dynamic sampling)", "Yu et al. 2025, arXiv:2503.14476"),
}
_PAPER = re.compile(r"^.*?arXiv:\d{4}\.\d{4,5}")


def loss_name(facts: RunFacts) -> str:
    """What people call it: the algorithm, where the run names one, else GRPO and its loss; a teacher alone distils."""
    if not facts.rewarded:
        return _DISTILLATION.title
    if facts.algorithm in ALGORITHMS:
        return ALGORITHMS[facts.algorithm].title
    loss = LOSSES[facts.loss].title if facts.loss in LOSSES else facts.loss
    return "GRPO" if loss in (None, "GRPO") else f"GRPO with the loss {loss}"


def references(facts: RunFacts) -> list[tuple[str, str]]:
    """What is cited, and as what: ``("method lora", "Hu et al. 2021, arXiv:2106.09685")``.

    Of a run whose rewards do not count neither advantages nor a loss is cited: a teacher alone needs neither.
    """
    found = []
    row = METHODS.get(facts.method or "")
    paper = _PAPER.match(row.source) if row else None
    if paper:
        found.append((f"method {facts.method}", paper[0]))
    name = ALGORITHMS.get(facts.algorithm or "")
    own = name.paper.reference if name is not None and name.paper is not None else None
    if name is not None and own is not None:
        found.append((f"algorithm {name.title}", own))
    if not facts.rewarded:
        source = _DISTILLATION.source
        return found if own == source else [*found, ("distillation", source)]
    sets = {} if name is None else {**name.sets, **facts.overridden}
    estimator = ADVANTAGES.get(sets.get("advantage_estimator", "group"), ADVANTAGES["group"])
    what = "group-relative advantages (GRPO)" if estimator.paper == GRPO else f"advantages ({estimator.title})"
    of_update = [(what, estimator.paper.reference)]
    loss = LOSSES.get(facts.loss or "grpo")
    if loss is not None and loss.paper is not None and loss.paper not in (GRPO, estimator.paper):
        of_update.append((f"loss {loss.title}", loss.paper.reference))
    if facts.ratio_level == "sequence":
        of_update.append(("importance ratio of the whole sequence (GSPO)", GSPO.reference))
    prompts = str(facts.settings.get("prompts", ""))
    chosen = [cited for words, cited in _OF_PROMPTS.items() if words in prompts]
    return [*found, *((what, reference) for what, reference in [*of_update, *chosen] if reference != own)]


def linked(reference: str) -> str:
    """A reference in Markdown, its arXiv number a link."""
    return re.sub(r"arXiv:(\d{4}\.\d{4,5})", r"[arXiv:\1](https://arxiv.org/abs/\1)", reference)
