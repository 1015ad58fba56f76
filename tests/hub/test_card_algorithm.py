"""A card of a run with a named algorithm names it, its overrides and its paper; any other card is as it was."""

import json

import pytest

from perl.algorithms.algorithm import Algorithm
from perl.algorithms.named import ALGORITHMS
from perl.algorithms.registry import Paper
from perl.errors import PerlError
from perl.hub.card.card_facts import facts_from_files
from perl.hub.card.facts import RUN_FACTS, RunFacts, read_run_facts
from perl.hub.card.published import PUBLIC_RECIPE, public_recipe
from perl.hub.card.render import render_card
from perl.recipe import load_recipe

FACTS = {"base": "sandbox:base", "method": "lora", "loss": "grpo", "ratio_level": "sequence"}


def card_of(run: RunFacts, recipe=None) -> str:
    files = {RUN_FACTS: run.to_json()}
    if recipe is not None:
        files[PUBLIC_RECIPE] = public_recipe(recipe).encode()
    return render_card(facts_from_files(files))


def test_a_named_algorithm_stands_in_the_sentence_the_table_and_the_citations():
    recipe = load_recipe("quickstart", ["algorithm=gspo", "train.beta=0.01"])
    card = card_of(RunFacts(**FACTS, algorithm="gspo", overridden={"beta": 0.01}), recipe)
    assert "trained with reinforcement learning (GSPO)" in card
    assert "\n| algorithm | gspo; overridden: beta 0.01 |\n" in card
    assert "\n- algorithm GSPO: Zheng et al. 2025, [arXiv:2507.18071]" in card
    assert card.count("2507.18071]") == 1
    assert "\n| algorithm | gspo |\n" in card_of(RunFacts(**FACTS, algorithm="gspo"), recipe)
    plain = card_of(RunFacts(**FACTS))
    assert "| algorithm |" not in plain
    assert "trained with reinforcement learning (GRPO)" in plain
    named = RunFacts(**FACTS, algorithm="gspo", overridden={"delta": None, "scale_rewards": "none"})
    assert read_run_facts(named.to_json()) == named


def test_a_row_added_at_run_time_is_on_cards(monkeypatch):
    paper = Paper("nobody2031toy", "Nobody et al.", 2031, "A Toy", "3101.00001")
    monkeypatch.setitem(ALGORITHMS, "toy", Algorithm("toy", "TOY", paper, {"loss_type": "bnpo"}, "x", "y"))
    card = card_of(RunFacts(**FACTS, algorithm="toy"), load_recipe("quickstart", ["algorithm=toy"]))
    assert "learning (TOY)" in card
    assert "- algorithm TOY: Nobody et al. 2031, [arXiv:3101.00001]" in card


@pytest.mark.parametrize(
    "overridden", [{"seed": 3}, {"beta": "](x)"}, {"beta": float("inf")}, {"beta": [1]}, {"beta": "a b"}]
)
def test_an_override_that_is_no_setting_or_no_plain_value_is_refused(overridden):
    facts = json.loads(RunFacts(**FACTS, algorithm="gspo").to_json()) | {"overridden": overridden}
    with pytest.raises(PerlError, match=r"perl_run\.json: overridden"):
        read_run_facts(json.dumps(facts).encode())
