"""Is a card true? It is rendered again from the files that it lies among, and these are compared with each other.

files of a repository -> what is wrong, what was compared, what is only reported

Only an author's own notes are taken as they are, and they are named as such. Reads neither runs nor the network.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from peft import PeftConfig

from perl.errors import Mistake, PerlError
from perl.evaluation.recounting.folder import recount_published
from perl.evaluation.recounting.published_samples import PUBLISHED
from perl.evaluation.recounting.recount import Recount
from perl.evaluation.results import Results
from perl.hub.card.fact_check import contradictions, logging_interval, only_reported
from perl.hub.card.facts import (
    METRICS,
    PUBLIC_RECIPE,
    SCORES,
    CardFacts,
    Files,
    config_in,
    content_of,
    facts_from_files,
    log_in,
    public_recipe_in,
    results_in,
)
from perl.hub.card.form import CARD, card_mistakes, read_front_matter, shown
from perl.hub.card.leaderboards import leaderboard_mistakes
from perl.hub.card.lines import differences
from perl.hub.card.notes import notes_mistakes, numbers_of_notes, split_notes
from perl.hub.card.policy_check import base_mistakes, header_mistakes, policy_mistakes
from perl.hub.card.render import render_card
from perl.hub.card.run_facts import RUN_FACTS, RunFacts, perl_version, read_run_facts
from perl.policy.saved.adapter import CONFIG, WEIGHTS
from perl.recipe import Recipe

# Completions do not tell what stood before the question, and no hash holds against somebody who computes it anew.
_AS_ASKED = "few-shot examples and sampling of the completions (perl zoo verify draws them again)"


@dataclass(frozen=True)
class Checked:
    """What came of a check.

    Attributes:
        mistakes: What is wrong; empty for a card that says what its files say.
        compared: What was compared with what, for people.
        reported: What the card says and nothing here can confirm.
        unchecked: What was not looked at, a line each.
    """

    mistakes: tuple[Mistake, ...]
    compared: tuple[str, ...] = ()
    reported: tuple[str, ...] = ()
    unchecked: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """What a card's reader should know of a check that found nothing wrong."""
        lines = [f"checked: {', '.join(self.compared)}"] if self.compared else []
        lines += [f"reported only: {', '.join(self.reported)}"] if self.reported else []
        return lines + [f"not checked: {line}" for line in self.unchecked]


def check_card(files: Files, weights_sha256: str | None = None, counted: Recount | None = None) -> Checked:
    """Renders a card again and compares it, and its files with each other.

    Args:
        files: All that lies in the repository, the card among it.
        weights_sha256: Of the adapter; None: it is not known, which is reported.
        counted: The scores, counted again from more than the files hold; None: they are counted here.
    """
    try:
        return _checked(files, weights_sha256, counted)
    except PerlError as error:
        return Checked(error.mistakes)


def _checked(files: Files, weights_sha256: str | None, counted: Recount | None) -> Checked:
    """As :func:`check_card`; raises what leaves nothing to compare."""
    content = content_of(files, CARD)
    if content is None:
        raise PerlError(f"there is no {CARD}")
    try:
        card = content.decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError:
        raise PerlError("is not UTF-8", CARD) from None
    results = results_in(files)
    own, notes, first = split_notes(card)
    mistakes = card_mistakes(card, files, first)
    if read_front_matter(card)[0] is None:
        return Checked(tuple(mistakes))
    try:
        run, facts, expected = _rendered_again(files)
    except PerlError as error:
        return Checked((*mistakes, *error.mistakes))
    if run.perl == perl_version():
        mistakes += differences(own, expected)
    else:
        message = f"was written by perl-rl {run.perl}, this is {perl_version()}, whose cards differ"
        hint = f"perl card RUN and perl push write it anew; perl-rl {run.perl} can check it"
        mistakes.append(Mistake(message, CARD, hint))
    scores = _scores(files, facts, results, weights_sha256, counted)
    held = config_in(files), public_recipe_in(files), log_in(files)
    mistakes += [*notes_mistakes(notes, first), *_of_files(files, run, *held), *scores.mistakes]
    there = [name for name in (CONFIG, PUBLIC_RECIPE, METRICS, SCORES) if name in files]
    return Checked(
        tuple(dict.fromkeys(mistakes)),
        (*scores.compared, f"the whole card with the one that {', '.join([*there, RUN_FACTS])} give"),
        (*scores.reported, *only_reported(run, *held)),
        (*scores.unchecked, *numbers_of_notes(notes, first)),
    )


def _rendered_again(files: Files) -> tuple[RunFacts, CardFacts, str]:
    """What the run reports, all facts, and the card that they give.

    Raises:
        PerlError: A file is absent or cannot be read.
    """
    content = content_of(files, RUN_FACTS)
    if content is None:
        hint = "perl push writes both; or it was written by hand, and nobody can tell what it comes from"
        raise PerlError(f"is absent, from which the card is rendered again: {CARD} was not checked", RUN_FACTS, hint)
    try:
        facts = facts_from_files(files)
        run = read_run_facts(content)
        return run, facts, render_card(facts)
    except PerlError:
        raise
    except (TypeError, ValueError, AttributeError, KeyError, ArithmeticError, RecursionError) as error:
        reason = f"holds no results of perl eval: {type(error).__name__}: {shown(str(error))}"
        raise PerlError(reason, SCORES) from None


def _of_files(
    files: Files, run: RunFacts, config: PeftConfig | None, recipe: Recipe | None, log: Sequence[Mapping[str, Any]]
) -> Iterator[Mistake]:
    """Where the files contradict each other, or one is absent."""
    yield from contradictions(run, config, recipe, log)
    yield from header_mistakes(files, run)
    whole = run.method == "full" and WEIGHTS not in files  # a model that was itself trained
    for name in (CONFIG, WEIGHTS):
        if name not in files and not whole:
            yield Mistake("is absent, without which nobody can load the adapter that the card is of", name)
    between = logging_interval(recipe)
    if not log and run.step and between is not None and run.step >= between:
        what = "has no steps" if METRICS in files else "is absent"
        yield Mistake(f"{what}, though there is a recipe", METRICS, "perl push sends it")


def _scores(
    files: Files, facts: CardFacts, results: Results | None, weights_sha256: str | None, counted: Recount | None
) -> Checked:
    """What was found of the scores and of the adapter that they are of."""
    unchecked = []
    if weights_sha256 is None and WEIGHTS in files:
        unchecked.append(f"{WEIGHTS}: its SHA-256 is unknown, and it was not read")
    elif facts.whole:
        unchecked.append("the weights: of a whole model they are no part of what is looked at")
    elif files.get(WEIGHTS, b"") is None:
        unchecked.append(f"the header of {WEIGHTS}, which names the base: it was not downloaded")
    mistakes, others = leaderboard_mistakes(files, results)
    unchecked += [f"{name}: scores of others" for name in others]
    if results is None:
        return Checked(tuple(mistakes), unchecked=tuple(unchecked))
    mistakes += base_mistakes(results, facts)
    mistakes += policy_mistakes(results, content_of(files, CONFIG), weights_sha256)
    compared = ["the policy's name with config and weights"] if weights_sha256 and CONFIG in files else []
    if counted is None:
        try:
            written, samples = content_of(files, SCORES) or b"", content_of(files, PUBLISHED)
            counted = recount_published(written, samples, "eval", known=False)
        except PerlError as error:
            return Checked((*mistakes, *error.mistakes), tuple(compared), unchecked=tuple(unchecked))
    mistakes += [_of_the_package(mistake) for mistake in counted.mistakes]
    compared.append(_what_was_counted(results, counted))
    reported = (*counted.reported, _AS_ASKED, "engine and versions of the evaluation")
    return Checked(tuple(mistakes), tuple(compared), reported, tuple(unchecked))


def _what_was_counted(results: Results, counted: Recount) -> str:
    figures = {task.name: bool(task.base) + bool(task.adapter) for task in results.tasks}
    count = sum(task.score.n * task.score.k * figures[task.name] for task in results.tasks)
    what = "completions that were judged again" if set(counted.basis.values()) == {"texts"} else "samples"
    return f"{sum(figures.values())} scores recounted from {count:,} {what}"


def _of_the_package(mistake: Mistake) -> Mistake:
    """A mistake of the results' folder, named as in a repository."""
    where = mistake.where
    for name in (SCORES, PUBLISHED):
        file = name.partition("/")[2]
        where = name + where.removeprefix(file) if where.startswith(file) else where
    return replace(mistake, where=where)
