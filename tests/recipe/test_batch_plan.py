"""The arithmetic of a batch agrees with a search over all ways to cut it, and refuses what cannot be cut."""

import itertools
import re

import pytest

from perl.errors import RecipeError
from perl.recipe.batch_plan import NUMBERS, BatchPlan, plan_batch
from tests.oracles.batch_plans import search

PROMPTS = (None, 1, 2, 3, 4)
GENERATIONS = (None, 2, 3, 4, 6)
ROWS = (None, 1, 2, 3, 4, 8, 16)
PASSES = (None, 1, 2, 3, 4)
WORLD_SIZES = (1, 2, 3, 4, 8)


def plan(prompts=None, generations=None, rows=None, passes=None, world_size=1):
    return plan_batch(**dict(zip(NUMBERS, (prompts, generations, rows, passes), strict=True)), world_size=world_size)


def test_the_plan_is_the_one_that_a_search_finds():
    fitting = refused = 0
    for numbers in itertools.product(PROMPTS, GENERATIONS, ROWS, PASSES, WORLD_SIZES):
        expected = search(*numbers)
        if expected is None:
            with pytest.raises(RecipeError):
                plan(*numbers)
            refused += 1
        else:
            assert plan(*numbers) == BatchPlan(*expected), numbers
            fitting += 1
    assert fitting > 500
    assert refused > 500


def test_a_plan_multiplies_out_and_prints_its_arithmetic():
    assert plan() == BatchPlan(16, 8, 8, 16, 1)
    assert plan(prompts=6, generations=4, rows=3, world_size=4).completions_per_step == 24
    for numbers in ((16, 8, 8, 16, 1), (6, 4, 3, 2, 4), (8, 8, 16, 2, 2), (8, 8, 64, 1, 1)):
        prompts, generations, rows, passes, processes = numbers
        found = plan(prompts, generations, rows, None, processes)
        assert found == BatchPlan(*numbers)
        assert found.completions_per_step == prompts * generations == rows * passes * processes
        line = f"{prompts} prompts x {generations} generations = {prompts * generations} completions a step"
        among = f" x {processes} processes" if processes > 1 else ""
        assert str(found) == f"{line} = {rows} rows x {passes} passes{among}"


REFUSED = (
    ({"prompts": 3, "generations": 3, "world_size": 2}, "train.prompts_per_step", "9 completions a step"),
    ({"generations": 4, "rows": 6}, "train.num_generations", "num_generations 4 does not fit 6 completions"),
    ({"generations": 5, "passes": 2}, "train.num_generations", "num_generations 5 does not fit 16 completions"),
    ({"prompts": 4, "rows": 3}, "train.per_device_train_batch_size", "passes of 3 rows"),
    ({"prompts": 4, "passes": 3}, "train.gradient_accumulation_steps", "cut into 3 passes"),
    ({"prompts": 4, "rows": 8, "passes": 2}, "train.gradient_accumulation_steps", "8 rows x 2 passes"),
    ({"prompts": 10**400}, "train.prompts_per_step", "must be at most 1,000,000"),
    ({"generations": 10**400}, "train.num_generations", "must be at most 1,000,000"),
)
OFFERING = (
    ({"generations": 4, "rows": 6}, "generations"),
    ({"generations": 7, "rows": 4, "passes": 3, "world_size": 2}, "generations"),
    ({"prompts": 4, "generations": 6, "rows": 5}, "rows"),
    ({"prompts": 4, "generations": 6, "rows": 5, "world_size": 2}, "rows"),
    ({"prompts": 5, "generations": 6, "passes": 4}, "passes"),
)


def mistake_of(numbers):
    with pytest.raises(RecipeError) as caught:
        plan(**numbers)
    (mistake,) = caught.value.mistakes
    assert len(str(mistake).splitlines()) == 1
    return mistake


def test_a_refusal_names_the_key_and_the_reason():
    for numbers, where, words in REFUSED:
        mistake = mistake_of(numbers)
        assert mistake.where == where, numbers
        assert words in mistake.message, numbers
    hint = mistake_of({"rows": 1}).hint  # a batch of one row offers no empty choice
    assert "train.prompts_per_step" in hint
    assert ": ;" not in hint
    for name, number in itertools.product(("prompts", "generations", "rows", "passes"), (0, -4)):
        with pytest.raises(RecipeError):
            plan(**{"prompts": 4, name: number})


def test_every_number_that_a_refusal_offers_fits_and_no_other_does():
    """The offers are the divisors that the search finds."""
    for numbers, changed in OFFERING:
        divided, listed = re.search(r"it must divide (\d+): ([\d, ]+)", mistake_of(numbers).hint).groups()
        offered = {int(number) for number in listed.split(",")}
        least = 2 if changed == "generations" else 1
        asked = {"prompts": None, "generations": None, "rows": None, "passes": None, "world_size": 1, **numbers}
        found = {n: search(**{**asked, changed: n}) for n in range(least, 60)}
        # Rows that fit one process only are lowered, and not offered.
        searched = {n for n, plan_of in found.items() if plan_of is not None and plan_of[PLACES[changed]] == n}
        assert offered == searched == {n for n in range(least, 60) if int(divided) % n == 0}, numbers
        for candidate in range(least, 60):
            if candidate in offered:
                assert getattr(plan(**{**numbers, changed: candidate}), NUMBERS[PLACES[changed]]) == candidate
            elif found[candidate] is None:
                mistake_of({**numbers, changed: candidate})


PLACES = {"generations": 1, "rows": 2, "passes": 3}
