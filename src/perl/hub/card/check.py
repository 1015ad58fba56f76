"""Is a card true? It is rendered again from the files that lie beside it, and these are held against each other.

files of a repository -> what is wrong, what was compared, what is only reported

Scores are counted again, and must be of the adapter that lies there. Only what its author says below the last heading
is taken as it is. Reads neither runs nor the network.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import zip_longest

from perl.errors import Mistake, PerlError
from perl.evaluation.recounting.files import PUBLISHED, recount_published
from perl.evaluation.recounting.recount import Recount
from perl.evaluation.scoring.protocol import PRESETS, asking_of
from perl.evaluation.scoring.results import HELD_OUT, Results
from perl.evaluation.scoring.task import all_tasks, titled
from perl.hub.card import published
from perl.hub.card.card_facts import CardFacts, facts_from_files
from perl.hub.card.eval_results import LEADERBOARDS, leaderboard_mistakes
from perl.hub.card.facts import RUN_FACTS, VERSION, RunFacts, perl_version, published_label
from perl.hub.card.published import AGAIN, AUTHOR, CARD, METRICS, PUBLIC_RECIPE, SCORES, Files, shown
from perl.hub.card.render import render_card
from perl.hub.gate import is_ours
from perl.policy.name import adapter_config_digest, adapter_policy_name
from perl.policy.saved.adapter import CONFIG, WEIGHTS
from perl.recipe.rollout_section import ENGINES

# Completions do not tell what stood before the question, and no hash holds against somebody who computes it anew.
_AS_ASKED = "few-shot examples and sampling of the completions (perl zoo verify draws them again)"
_WINDOW, _MOST_FOREIGN = 100, 10
_OF_THE_HUB = ".gitattributes"
_SCORED_AGAIN = "perl eval scores the one that is there"
_PRESETS = {*PRESETS, "recipe", "script"}
_WORD = re.compile(r"[\w./:+-]{1,200}")


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
    content = published.content_of(files, CARD)
    if content is None:
        raise PerlError(f"there is no {CARD}")
    try:
        card = content.decode("utf-8")
    except UnicodeDecodeError:
        raise PerlError("is not UTF-8", CARD) from None
    if mistakes := published.card_mistakes(card, files):
        return Checked(tuple(mistakes))
    facts, mistakes = _rendered_again(files, card)
    for name in () if facts.whole and WEIGHTS not in files else (CONFIG, WEIGHTS):
        if name not in files:
            mistakes.append(Mistake("is absent, without which nobody can load the adapter that the card is of", name))
    mistakes += changed_files(facts, files, weights_sha256)
    scores = _scores(files, facts, weights_sha256, counted)
    # What lies there and is no file of ours, and what the author says.
    known = (LEADERBOARDS, _OF_THE_HUB)
    foreign = [name for name in files if not is_ours(name) and not name.startswith(known)]
    others = [f"{shown(name)}: not a file of perl's" for name in foreign[:_MOST_FOREIGN]]
    if len(foreign) > _MOST_FOREIGN:
        others.append(f"{len(foreign) - _MOST_FOREIGN:,} more files that are not perl's")
    others += [f"{CARD}: what stands below “{AUTHOR}”"] if published.split_author(card)[1] else []
    read = [name for name in (CONFIG, PUBLIC_RECIPE, METRICS, SCORES) if name in files]
    return Checked(
        tuple(dict.fromkeys([*mistakes, *scores.mistakes])),
        (*scores.compared, f"the whole card with the one that {', '.join([*read, RUN_FACTS])} give"),
        (*scores.reported, f"what {RUN_FACTS} says of the training"),
        (*scores.unchecked, *others),
    )


def _rendered_again(files: Files, card: str) -> tuple[CardFacts, list[Mistake]]:
    """What the files say, and the first line of the card that differs from the one which they give.

    Raises:
        PerlError: A file is absent or cannot be read, or another version wrote the card.
    """
    if RUN_FACTS not in files:
        hint = "perl push writes both; or it was written by hand, and nobody can tell what it comes from"
        raise PerlError(f"is absent, from which the card is rendered again: {CARD} was not checked", RUN_FACTS, hint)
    try:
        facts = facts_from_files(files)
        expected = published.with_author(render_card(facts), card)
    except (TypeError, ValueError, AttributeError, KeyError, ArithmeticError, RecursionError) as error:
        if isinstance(error, PerlError):
            raise
        reason = f"holds, or {METRICS} does, what perl does not write: {type(error).__name__}: {shown(str(error))}"
        raise PerlError(reason, SCORES) from None
    if facts.perl != perl_version():
        message = f"was written by perl-rl {facts.perl}, this is {perl_version()}, whose cards differ"
        hint = f"perl card RUN and perl push write it anew; perl-rl {facts.perl} can check it"
        raise PerlError(message, CARD, hint)
    lines = zip_longest(card.split("\n"), expected.split("\n"), fillvalue="")
    for number, (there, right) in enumerate(lines, 1):
        if there != right:  # the first line that differs says enough
            same = next((i for i, pair in enumerate(zip(there, right, strict=False)) if pair[0] != pair[1]), 0)
            said, given = (shown(line[max(0, same - 30) :], _WINDOW) for line in (there, right))
            return facts, [Mistake(f"says “{said}”, its files give “{given}”", f"{CARD}:{number}", AGAIN)]
    return facts, []


def changed_files(facts: RunFacts, files: Files, weights_sha256: str | None) -> list[Mistake]:
    """Files that are not those beside which the facts were written."""
    found = []
    for name, there in published.digests_in(files, weights_sha256).items():
        said = facts.files.get(name, "nothing" if facts.files else there)
        if said != there:
            what = f"has SHA-256 {there[:12]}, {RUN_FACTS} says {said[:12]}: one was changed"
            found.append(Mistake(what, name, AGAIN))
    return found


def _scores(files: Files, facts: CardFacts, weights_sha256: str | None, counted: Recount | None) -> Checked:
    """What was found of the scores and of the adapter that they are of."""
    results, unchecked = facts.results, []
    if weights_sha256 is None and WEIGHTS in files:
        unchecked.append(f"{WEIGHTS}: its SHA-256 is unknown, and it was not read")
    elif facts.whole:
        unchecked.append("the weights: of a whole model they are no part of what is looked at")
    mistakes, others = leaderboard_mistakes(files, results)
    unchecked += [f"{name}: scores of others" for name in others]
    if results is None:
        return Checked(tuple(mistakes), unchecked=tuple(unchecked))
    scored: dict[str, object] = {"base": published_label(str(results.subject.get("base")))}
    scored["quantization"] = results.subject.get("base_quantization")
    mistakes += [
        Mistake(f"says {shown(str(getattr(facts, fact)))}, {SCORES} says {shown(str(of))}", f"{RUN_FACTS}: {fact}")
        for fact, of in scored.items()
        if getattr(facts, fact) != of
    ]
    mistakes += words_mistakes(results)
    mistakes += policy_mistakes(results, published.content_of(files, CONFIG), weights_sha256)
    compared = ["the policy's name with config and weights"] if weights_sha256 and CONFIG in files else []
    if counted is None:
        try:
            written, samples = published.content_of(files, SCORES) or b"", published.content_of(files, PUBLISHED)
            counted = recount_published(written, samples, "eval")
        except PerlError as error:
            return Checked((*mistakes, *error.mistakes), tuple(compared), unchecked=tuple(unchecked))
    mistakes += [replace(mistake, where=f"eval/{mistake.where}") for mistake in counted.mistakes]
    figures = {task.name: bool(task.base) + bool(task.adapter) for task in results.tasks}
    count = sum(task.score.n * task.score.k * figures[task.name] for task in results.tasks)
    what = "completions that were judged again" if set(counted.basis.values()) == {"texts"} else "samples"
    compared.append(f"{sum(figures.values())} scores recounted from {count:,} {what}")
    reported = (*counted.reported, _AS_ASKED, "engine and versions of the evaluation")
    return Checked(tuple(mistakes), tuple(compared), reported, tuple(unchecked))


def policy_mistakes(
    results: Results, config: bytes | None, weights_sha256: str | None, where: str = SCORES
) -> Iterator[Mistake]:
    """Whether results name the policy that weights, config and base give.

    Args:
        results: Read from a file, which may hold anything.
        config: The ``adapter_config.json`` beside them; None: there is none.
        weights_sha256: Of the weights beside them; None: unknown.
        where: Names the results.
    """
    subject = results.subject
    sha, base_sha = subject.get("adapter_sha256"), str(subject.get("base_sha256"))
    if weights_sha256 is not None and sha != weights_sha256:
        whose = "of a base alone" if sha is None else f"of another adapter: sha256 {str(sha)[:12]}"
        yield Mistake(f"is {whose}, the weights beside it have {weights_sha256[:12]}", where, _SCORED_AGAIN)
    if config is None or sha is None:
        return
    try:
        digest = adapter_config_digest(config)
        name = adapter_policy_name(config, str(weights_sha256 or sha), base_sha)
    except ValueError as error:
        yield Mistake(f"cannot be named: {shown(str(error))}", CONFIG)
        return
    if subject.get("adapter_config_sha256") != digest:
        named = shown(str(subject.get("adapter_config_sha256")), 12)
        yield Mistake(
            f"is of another {CONFIG}: sha256 {named}, the one beside it has {digest[:12]}", where, _SCORED_AGAIN
        )
    elif subject.get("policy") != name and weights_sha256 in (None, sha):
        named = shown(str(subject.get("policy")), 12)
        yield Mistake(f"names the policy {named}, weights, config and base give {name[:12]}", where, _SCORED_AGAIN)


def words_mistakes(results: Results) -> Iterator[Mistake]:
    """Where results say in a text of their own what ``perl eval`` says in words of a list: a card shows these.

    Args:
        results: Of the adapter.
    """
    said: dict[str, tuple[object, set[str]]] = {
        "protocol.preset": (results.protocol.preset, _PRESETS),
        "engine.backend": (results.engine.get("backend"), set(ENGINES)),
    }
    for task in results.tasks:
        known = all_tasks().get(task.name)
        titles = (known.title if known else task.name, task.name + HELD_OUT)
        said[f"{task.name}: title"] = (task.title, {titled(title, task.few_shot) for title in titles})
    for where, (word, words) in said.items():
        if word not in words:
            yield Mistake(f"{where} is {shown(str(word))!r}, which perl eval does not say", SCORES, _SCORED_AGAIN)
    for package, version in results.versions.items():
        if _WORD.fullmatch(package) is None or re.fullmatch(VERSION, version) is None:
            yield Mistake(f"{shown(package)} {shown(version)} is not a version", SCORES, _SCORED_AGAIN)
    said_of_base = {**asking_of(results.subject), "base_revision": results.subject.get("base_revision")}
    for name, value in {**results.engine, **said_of_base}.items():
        if _WORD.fullmatch(name) is None or (isinstance(value, str) and _WORD.fullmatch(value) is None):
            yield Mistake(f"{shown(name)} is {shown(str(value))!r}, which is not a word", SCORES, _SCORED_AGAIN)
