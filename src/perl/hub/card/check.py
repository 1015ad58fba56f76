"""Is a card true? It is rendered again from the files that it lies among, and these are held against each other.

files of a repository -> what is wrong, what was compared, what is only reported

Nothing of a card is taken for granted but an author's own notes, which are named as such. Knows nothing of runs or of
the network.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from perl.errors import Mistake, PerlError
from perl.evaluation.recounting.published_samples import PUBLISHED, read_published
from perl.evaluation.recounting.recount import Recount, layout_mistakes, recount
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
from perl.hub.card.form import CARD, LARGEST_CARD, card_problems, read_front_matter, shown
from perl.hub.card.leaderboards import leaderboard_problems, leaderboards_of_others
from perl.hub.card.lines import differences
from perl.hub.card.names import shown as public
from perl.hub.card.notes import notes_problems, numbers_of_notes, split_notes
from perl.hub.card.render import render_card
from perl.hub.card.run_facts import RUN_FACTS, RunFacts, perl_version, read_run_facts
from perl.hub.card.scores_text import headline
from perl.policy.name import adapter_config_digest, adapter_policy_name
from perl.policy.saved.adapter import CONFIG, WEIGHTS


@dataclass(frozen=True)
class Checked:
    """What came of a check.

    Attributes:
        problems: What is wrong; empty for a card that says what its files say.
        compared: What was held against what, for people.
        reported: What the card says and nothing here can confirm.
        unchecked: What was not looked at, a line each.
    """

    problems: tuple[Mistake, ...]
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
        weights_sha256: Of the adapter; None: it is not known, which is said.
        counted: The scores, counted again from more than the files hold; None: they are counted here.
    """
    content = content_of(files, CARD)
    if content is None:
        return _wrong(Mistake(f"there is no {CARD}"))
    try:
        card = content.decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError:
        return _wrong(Mistake("is not UTF-8", CARD))
    try:
        results_in(files)
    except PerlError as error:
        return _wrong(*error.mistakes)
    own, notes, first = split_notes(card)
    form = card_problems(card, files, first)
    if len(card) > LARGEST_CARD or read_front_matter(card)[0] is None:
        return _wrong(*form)
    if RUN_FACTS not in files:
        hint = "perl push writes both; or it was written by hand, and nobody can tell what it comes from"
        return _wrong(*form, Mistake(f"is absent, from which the card is rendered again: {CARD} was not checked",
                                     RUN_FACTS, hint))  # fmt: skip
    try:
        run = read_run_facts(content_of(files, RUN_FACTS) or b"")
        facts = facts_from_files(files)
        expected = render_card(facts)
    except PerlError as error:
        return _wrong(*form, *error.mistakes)
    except (TypeError, ValueError, AttributeError, KeyError, ArithmeticError, RecursionError) as error:
        reason = f"holds no results of perl eval: {type(error).__name__}: {shown(str(error))}"
        return _wrong(*form, Mistake(reason, SCORES))
    scores = _Scores(files, facts, weights_sha256, counted)
    problems = [*form, *_compared(own, expected, run, facts), *notes_problems(notes, first)]
    problems += [*_of_files(files, run), *scores.problems]
    unchecked = [*scores.unchecked, *numbers_of_notes(notes, first)]
    return Checked(
        tuple(dict.fromkeys(problems)),
        (*scores.compared, *_what_was_compared(files)),
        (*scores.reported, *only_reported(run, config_in(files), public_recipe_in(files), log_in(files))),
        tuple(unchecked),
    )


def _wrong(*problems: Mistake) -> Checked:
    return Checked(problems)


def _compared(card: str, expected: str, run: RunFacts, facts: CardFacts) -> list[Mistake]:
    """Where the card differs from the one that its files give; of another version's one line says so."""
    if run.perl != perl_version():
        message = f"was written by perl-rl {run.perl}, this is {perl_version()}, whose cards are others"
        hint = f"perl card RUN and perl push write it anew; perl-rl {run.perl} can check it"
        return [Mistake(message, CARD, hint)]
    return differences(card, expected, headline(facts.results) if facts.results else "")


def _of_files(files: Files, run: RunFacts) -> Iterator[Mistake]:
    """What the files say of each other, and of the scores on leaderboards."""
    config, recipe = config_in(files), public_recipe_in(files)
    log = log_in(files)
    yield from contradictions(run, config, recipe, log)
    whole = run.method == "full" and WEIGHTS not in files  # a model that was itself trained
    for name in (CONFIG, WEIGHTS):
        if name not in files and not whole:
            yield Mistake("is absent, without which nobody can load the adapter that the card is of", name)
    between = logging_interval(recipe)
    if not log and run.step and between is not None and run.step >= between:
        what = "has no steps" if METRICS in files else "is absent"
        yield Mistake(f"{what}, though there is a recipe", METRICS, "perl push sends it")


def _what_was_compared(files: Files) -> list[str]:
    there = [name for name in (CONFIG, PUBLIC_RECIPE, METRICS, SCORES) if name in files]
    return [f"the whole card with the one that {', '.join([*there, RUN_FACTS])} give"]


class _Scores:
    """What was found of the scores."""

    def __init__(self, files: Files, facts: CardFacts, weights_sha256: str | None, counted: Recount | None) -> None:
        self.problems: list[Mistake] = []
        self.compared: list[str] = []
        self.reported: list[str] = []
        self.unchecked: list[str] = []
        results = results_in(files)
        if weights_sha256 is None and WEIGHTS in files:
            self.unchecked.append(f"{WEIGHTS}: nobody says its SHA-256, and it was not read")
        elif facts.whole:
            self.unchecked.append("the weights: of a whole model they are no part of what is looked at")
        self.problems += leaderboard_problems(files, results)
        self.unchecked += [f"{name}: scores of others" for name in leaderboards_of_others(files, results)]
        if results is None:
            return
        self.problems += _identity_problems(files, facts, results, weights_sha256)
        if weights_sha256 is not None and CONFIG in files:
            self.compared.append("the policy's name with config and weights")
        self._recount(files, results, counted)

    def _recount(self, files: Files, results: Results, counted: Recount | None) -> None:
        if counted is None:
            samples = content_of(files, PUBLISHED)
            try:
                counted = recount(results, read_published(samples, PUBLISHED) if samples is not None else None)
            except PerlError as error:
                self.problems += error.mistakes
                return
            written: dict[str, Any] = json.loads(content_of(files, SCORES) or b"{}")
            whole = counted.results if len(counted.results.tasks) == len(results.tasks) else results
            self.problems += [_of_the_package(p) for p in layout_mistakes(written, whole)]
        self.problems += [_of_the_package(p) for p in counted.mistakes]
        count = sum(task.score.n * task.score.k * (bool(task.base) + bool(task.adapter)) for task in results.tasks)
        figures = sum(bool(task.base) + bool(task.adapter) for task in results.tasks)
        basis = set(counted.basis.values())
        of_what = (
            f"{count:,} completions that were judged again" if basis == {"texts"}
            else f"{count:,} samples" if "rights" not in basis
            else f"{count:,} rights and wrongs"
        )  # fmt: skip
        self.compared.append(f"{figures} scores recounted from {of_what}")
        self.reported += [*counted.reported, "engine and versions of the evaluation"]


def _of_the_package(problem: Mistake) -> Mistake:
    """A problem of the results' folder, named as in a repository."""
    where = problem.where
    for name in (SCORES, PUBLISHED):
        file = name.partition("/")[2]
        where = name + where.removeprefix(file) if where.startswith(file) else where
    return Mistake(problem.message, where, problem.hint)


def _identity_problems(
    files: Files, facts: CardFacts, results: Results, weights_sha256: str | None
) -> Iterator[Mistake]:
    """Whether the results are of this adapter on this base."""
    subject, config = results.subject, content_of(files, CONFIG)
    hint = "perl eval scores the one that is there"
    sha = subject.get("adapter_sha256")
    if weights_sha256 is not None and sha != weights_sha256:
        message = f"is of another adapter: sha256 {str(sha)[:12]}, the weights beside it have {weights_sha256[:12]}"
        yield Mistake(message, SCORES, hint)
    if public(str(subject.get("base"))) != facts.base:
        message = f"is of another base: {shown(str(subject.get('base')))}, {CONFIG} says {shown(facts.base)}"
        yield Mistake(message, SCORES, hint)
    elif facts.revision is not None and subject.get("base_revision") not in (None, facts.revision):
        message = f"is of another revision of the base: {subject['base_revision']}, {CONFIG} says {facts.revision}"
        yield Mistake(message, SCORES, hint)
    quantization = subject.get("base_quantization")
    if quantization != facts.quantization:
        said, right = (shown(str(word or "the ordinary base")) for word in (quantization, facts.quantization))
        yield Mistake(f"is of another base: {said}, {RUN_FACTS} says {right}", SCORES, hint)
    if config is None or sha is None:
        return
    try:
        digest = adapter_config_digest(config)
        name = adapter_policy_name(config, str(weights_sha256 or sha), str(subject.get("base_sha256")))
    except ValueError as error:
        yield Mistake(f"cannot be named: {shown(str(error))}", CONFIG)
        return
    if subject.get("adapter_config_sha256") != digest:
        said = shown(str(subject.get("adapter_config_sha256")), 12)
        yield Mistake(f"is of another {CONFIG}: sha256 {said}, the one beside it has {digest[:12]}", SCORES, hint)
    elif subject.get("policy") != name and weights_sha256 in (None, sha):
        said = shown(str(subject.get("policy")), 12)
        yield Mistake(f"names the policy {said}, weights, config and base give {name[:12]}", SCORES, hint)
