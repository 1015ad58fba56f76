"""The model card of an adapter: true values, nothing else.

CardFacts -> README.md: YAML that the Hub reads, what was measured, how to use it, where its ideas come from

A fact that is unknown is left out; there are no placeholders. The words are in ``model_cards/templates``. Differences
of several tasks are shown by p values that are corrected for their number, as in the table below them.
"""

import functools
import json
import re
from collections.abc import Sequence
from functools import partial
from typing import Any

from huggingface_hub import ModelCardData
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from perl.algorithms.estimators import ADVANTAGES
from perl.algorithms.named import ALGORITHMS, shown_settings
from perl.algorithms.registry import GRPO, GSPO, LOSSES
from perl.evaluation.scoring import table
from perl.evaluation.scoring.metrics import SMALL_P
from perl.evaluation.scoring.results import HELD_OUT, TaskResult, is_held_out
from perl.evaluation.scoring.task import MATH
from perl.hub.card import snippets
from perl.hub.card.card_facts import CardFacts
from perl.hub.card.eval_results import model_index
from perl.hub.card.facts import RunFacts, has_hub_form
from perl.hub.card.published import PUBLIC_RECIPE, SCORES
from perl.methods.registry import METHODS
from perl.recipe.assets import card_templates_folder
from perl.recipe.plain_yaml import dump
from perl.recipe.sections import MEMORY_WORDS, REFILL_WORDS
from perl.sandbox import BASE_NAME, MODELS
from perl.zoo.intervals import percent

PIPELINE = "text-generation"
OURS = "perl-rl"
# Sandbox model -> the tag by which its adapters are found; the Hub has no base to name.
SANDBOX_TAGS = {name: "sandbox" if name == BASE_NAME else name.replace(":", "-") for name in MODELS}
"""Tags: of every card, and of adapters that no base of the Hub takes."""
_MOST_IN_HEADLINE = 3
_DISTILLATION = ALGORITHMS["opd"]
_OF_PROMPTS = {
    MEMORY_WORDS: ("prompts that rest (GRESO)", "Zheng et al. 2025, arXiv:2506.02177"),
    REFILL_WORDS: ("refilled groups (DAPO's dynamic sampling)", "Yu et al. 2025, arXiv:2503.14476"),
}
_PAPER = re.compile(r"^.*?arXiv:\d{4}\.\d{4,5}")


def render_card(facts: CardFacts) -> str:
    """The card as Markdown with YAML front matter, with one empty line where templates leave several.

    Args:
        facts: What it says.
    """
    results = facts.results
    tasks = table.judged_together(results.tasks) if results else ()
    # The table with its protocol and reservations, as ``perl eval`` writes it.
    results_lines = table.markdown(results).rstrip("\n").splitlines() if results else []
    card = (
        _templates()
        .get_template("adapter.md.jinja")
        .render(
            facts=facts,
            front_matter=front_matter(facts),
            title=facts.name or (f"{facts.method} for {facts.base}" if facts.method else f"Adapter for {facts.base}"),
            loss=loss_name(facts),
            overridden=shown_settings(facts.overridden),
            headline=headline(tasks),
            results_lines=results_lines,
            limitations=[*reservations(tasks), *contamination(tasks)],
            references=references(facts),
            names={"recipe": PUBLIC_RECIPE, "results": SCORES},
            snippets=snippets,
        )
    )
    lines: list[str] = []
    fenced = False
    for line in card.splitlines():
        fenced ^= line.startswith("```")
        if line.strip() or fenced or (lines and lines[-1]):
            lines.append(line if fenced else line.rstrip())
    return "\n".join(lines).rstrip() + "\n"


@functools.cache
def _templates() -> Environment:
    # Markdown, not HTML: nothing is to be escaped, and every name must be defined.
    environment = Environment(  # noqa: S701
        loader=FileSystemLoader(card_templates_folder()),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"cell": _cell, "linked": linked, "json": partial(json.dumps, ensure_ascii=False)}
    return environment


def _cell(value: object) -> str:
    """Text that keeps a table's row whole."""
    return " ".join(str(value).split()).replace("|", "\\|")


def linked(reference: str) -> str:
    """A reference in Markdown, its arXiv number a link."""
    return re.sub(r"arXiv:(\d{4}\.\d{4,5})", r"[arXiv:\1](https://arxiv.org/abs/\1)", reference)


def adapter_tag(base: str) -> str:
    """The tag by which the Hub finds a base's adapters."""
    return f"base_model:adapter:{base}"


def front_matter(facts: CardFacts) -> str:
    """What the Hub reads of a card, as YAML without the dashes around it. A key whose value is unknown is not there."""
    metadata: dict[str, Any] = {}
    if facts.base_on_hub:
        relation = "finetune" if facts.whole else "adapter"
        metadata |= {"base_model": facts.base, "base_model_relation": relation}
    metadata["library_name"] = "transformers" if facts.whole else "peft"
    metadata["pipeline_tag"] = PIPELINE
    if facts.licence is not None:
        licence = facts.licence
        metadata |= {"license": licence.identifier, "license_name": licence.name, "license_link": licence.link}
    if facts.dataset and has_hub_form(facts.dataset):
        metadata["datasets"] = [facts.dataset]
    tags = [OURS, "reinforcement-learning", facts.algorithm or ("grpo" if facts.rewarded else "opd")]
    tags += [facts.method] if facts.method else []
    tags += [SANDBOX_TAGS[facts.base]] if facts.base in SANDBOX_TAGS else []
    tags += [adapter_tag(facts.base)] if facts.base_on_hub and not facts.whole else []
    metadata["tags"] = list(dict.fromkeys([*tags, *facts.tags]))
    if facts.results is not None and facts.results.tasks:
        name = (facts.repo_id or facts.name or "adapter").rpartition("/")[2]
        metadata |= {"model_name": name, "eval_results": model_index(facts.results)}
    # Not by the Hub library, whose YAML 1.1 leaves a hash like 12e34 bare, which the Hub reads as a number.
    return dump(ModelCardData(**metadata).to_dict()).strip()  # type: ignore[no-untyped-call]


def headline(tasks: Sequence[TaskResult]) -> str:
    """The scores in a sentence each, of the first few tasks."""
    sentences = []
    for task in tasks[:_MOST_IN_HEADLINE]:
        score, name = task.score, f"avg@{task.score.k}"
        if task.scorer != MATH:
            name = f"judged by {table.judge_cell(task.scorer, table.MARKDOWN)}, {name}"
        how = f"({name} over {score.n:,} problems)"
        if task.base is None or task.adapter is None:
            sentences.append(f"On {task.title} it scores {score.average_estimate} % {how}.")
            continue
        verdict = "" if table.is_shown(task.difference) else ", which does not tell them apart"
        sentences.append(
            f"On {task.title} it scores {task.adapter.average_estimate} %, the base {task.base.average_estimate} % "
            f"{how}, a difference of {table.difference_cell(task.difference)}{verdict}."
        )
    return " ".join(sentences)


def reservations(tasks: Sequence[TaskResult]) -> list[str]:
    """What a reader must not conclude from the scores."""
    lines = []
    together = sum(task.difference is not None for task in tasks)
    for task in tasks:
        on, difference, score = f"On {task.title}", task.difference, task.score
        if difference is None:
            if task.adapter and not task.base:
                lines.append(f"The base was not scored beside it on {task.title}.")
        elif table.is_shown(difference):
            lines += [f"{on} it is worse than its base."] if difference.mean < 0 else []
        elif score.n < 2:
            lines.append(f"{on} a single problem was asked: the score says nothing of others.")
        elif table.excludes_zero(difference):
            correction = f", corrected for {together} tasks," if together > 1 else ""
            what = f"the p value of the difference{correction} is above {SMALL_P}."
            lines.append(f"{on} it cannot be told from its base: {what}")
        else:
            ends = table.difference_cell(difference).partition(" ")[2]
            what = f"the 95 % interval of the difference, {ends} points, holds 0."
            lines.append(f"{on} it cannot be told from its base: {what}")
        if score.truncated > 0:
            cut = f"{percent(score.truncated)} % of its completions were cut off after {task.max_new_tokens:,} tokens"
            lines.append(f"{on} {cut}; with more the score may be another one.")
        if score.unjudged > 0:
            what = f"{percent(score.unjudged)} % of its completions could not be compared with the gold answer"
            lines.append(f"{on} {what}; they count as wrong.")
    return lines


def contamination(tasks: Sequence[TaskResult]) -> list[str]:
    """What is known of whether the problems were seen before they were asked."""
    held_out = [task.title.removesuffix(HELD_OUT) for task in tasks if is_held_out(task.title)]
    benchmarks = [task.title for task in tasks if not is_held_out(task.title)]
    lines = []
    if held_out:
        lines.append(f"No held-out problem of {_listed(held_out)} is a training problem too.")
    if benchmarks:
        lines.append(
            f"The training problems were not compared with those of {_listed(benchmarks)}, and whether the base has "
            "seen these before is not known."
        )
    return lines


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


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
