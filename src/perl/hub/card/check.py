"""Is a card true? It is rendered again from the facts that lie beside it, and these are held against the other files.

files of a repository -> what is wrong, what was compared, what is only reported

Scores are counted again, and must be of the adapter that lies there. Only what its author says below the last heading
is taken as it is. Reads neither runs nor the network.
"""

from dataclasses import dataclass, replace
from itertools import zip_longest

from perl.errors import Mistake, PerlError
from perl.evaluation.recounting.folder import recount_published
from perl.evaluation.recounting.published_samples import PUBLISHED
from perl.evaluation.recounting.recount import Recount
from perl.evaluation.scoring.results import Results
from perl.hub.card.card_facts import CardFacts, facts_from_files
from perl.hub.card.contradictions import contradictions
from perl.hub.card.eval_results import LEADERBOARDS, leaderboard_mistakes
from perl.hub.card.facts import RUN_FACTS, RunFacts, perl_version, read_run_facts
from perl.hub.card.form import AGAIN, AUTHOR, card_mistakes, shown, split_author, with_author
from perl.hub.card.published import CARD, METRICS, PUBLIC_RECIPE, SCORES, Files, content_of
from perl.hub.card.render import render_card
from perl.hub.card.scores_check import policy_mistakes, words_mistakes
from perl.hub.gate.gate import is_ours
from perl.policy.saved.adapter import CONFIG, WEIGHTS

# Completions do not tell what stood before the question, and no hash holds against somebody who computes it anew.
_AS_ASKED = "few-shot examples and sampling of the completions (perl zoo verify draws them again)"
_WINDOW, _MOST_FOREIGN = 100, 10
_OF_THE_HUB = ".gitattributes"


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
    card = _text(files)
    if mistakes := card_mistakes(card, files):
        return Checked(tuple(mistakes))
    run, facts, expected = _rendered_again(files)
    if run.perl != perl_version():
        message = f"was written by perl-rl {run.perl}, this is {perl_version()}, whose cards differ"
        hint = f"perl card RUN and perl push write it anew; perl-rl {run.perl} can check it"
        raise PerlError(message, CARD, hint)
    against, reported = contradictions(run, files)
    mistakes = [*_first_difference(card, with_author(expected, card)), *against]
    for name in (CONFIG, WEIGHTS):
        if name not in files and not (run.method == "full" and WEIGHTS not in files):
            mistakes.append(Mistake("is absent, without which nobody can load the adapter that the card is of", name))
    scores = _scores(files, facts, weights_sha256, counted)
    there = [name for name in (CONFIG, PUBLIC_RECIPE, METRICS, SCORES) if name in files]
    return Checked(
        tuple(dict.fromkeys([*mistakes, *scores.mistakes])),
        (*scores.compared, f"the whole card with the one that {', '.join([*there, RUN_FACTS])} give"),
        (*scores.reported, *reported),
        (*scores.unchecked, *_not_looked_at(files, card)),
    )


def _text(files: Files) -> str:
    content = content_of(files, CARD)
    if content is None:
        raise PerlError(f"there is no {CARD}")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        raise PerlError("is not UTF-8", CARD) from None


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
        run, facts = read_run_facts(content), facts_from_files(files)
        return run, facts, render_card(facts)
    except PerlError:
        raise
    except (TypeError, ValueError, AttributeError, KeyError, ArithmeticError, RecursionError) as error:
        reason = f"holds, or {METRICS} does, what perl does not write: {type(error).__name__}: {shown(str(error))}"
        raise PerlError(reason, SCORES) from None


def _first_difference(card: str, expected: str) -> list[Mistake]:
    """The first line that differs, as ``README.md:12: says ..., its files give ...``; nothing: none does."""
    for number, (there, right) in enumerate(zip_longest(card.split("\n"), expected.split("\n"), fillvalue=""), 1):
        if there != right:
            same = next((i for i, pair in enumerate(zip(there, right, strict=False)) if pair[0] != pair[1]), 0)
            start = max(0, same - 30)
            said, given = (shown(line[start:], _WINDOW) for line in (there, right))
            return [Mistake(f"says “{said}”, its files give “{given}”", f"{CARD}:{number}", AGAIN)]
    return []


def _not_looked_at(files: Files, card: str) -> list[str]:
    """What lies there and is no file of ours, and what the author says."""
    known = (LEADERBOARDS, _OF_THE_HUB)
    foreign = [name for name in files if not is_ours(name) and not name.startswith(known)]
    others = [f"{shown(name)}: not a file of perl's" for name in foreign[:_MOST_FOREIGN]]
    if len(foreign) > _MOST_FOREIGN:
        others.append(f"{len(foreign) - _MOST_FOREIGN:,} more files that are not perl's")
    return others + ([f"{CARD}: what stands below “{AUTHOR}”"] if split_author(card)[1] else [])


def _scores(files: Files, facts: CardFacts, weights_sha256: str | None, counted: Recount | None) -> Checked:
    """What was found of the scores and of the adapter that they are of."""
    results, unchecked = facts.results, []
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
    mistakes += words_mistakes(results)
    mistakes += policy_mistakes(results, content_of(files, CONFIG), weights_sha256)
    compared = ["the policy's name with config and weights"] if weights_sha256 and CONFIG in files else []
    if counted is None:
        try:
            written, samples = content_of(files, SCORES) or b"", content_of(files, PUBLISHED)
            counted = recount_published(written, samples, "eval", known=False)
        except PerlError as error:
            return Checked((*mistakes, *error.mistakes), tuple(compared), unchecked=tuple(unchecked))
    mistakes += [replace(mistake, where=f"eval/{mistake.where}") for mistake in counted.mistakes]
    compared.append(_what_was_counted(results, counted))
    reported = (*counted.reported, _AS_ASKED, "engine and versions of the evaluation")
    return Checked(tuple(mistakes), tuple(compared), reported, tuple(unchecked))


def _what_was_counted(results: Results, counted: Recount) -> str:
    figures = {task.name: bool(task.base) + bool(task.adapter) for task in results.tasks}
    count = sum(task.score.n * task.score.k * figures[task.name] for task in results.tasks)
    what = "completions that were judged again" if set(counted.basis.values()) == {"texts"} else "samples"
    return f"{sum(figures.values())} scores recounted from {count:,} {what}"
