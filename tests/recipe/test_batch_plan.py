"""The arithmetic of a batch agrees with a search over all ways to cut it, and refuses what cannot be cut."""

import itertools
import re

import pytest

from perl.errors import RecipeError
from perl.recipe.batch_plan import BatchPlan, plan_batch

PROMPTS = (None, 1, 2, 3, 4)
GENERATIONS = (None, 2, 3, 4, 6)
ROWS = (None, 1, 2, 3, 4, 8, 16)
PASSES = (None, 1, 2, 3, 4)
WORLD_SIZES = (1, 2, 3, 4, 8)


def plan(prompts=None, generations=None, rows=None, passes=None, world_size=1):
    return plan_batch(
        prompts_per_step=prompts,
        num_generations=generations,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=passes,
        world_size=world_size,
    )


def search(prompts, generations, rows, passes, world_size):
    """The first plan among all that fit, in the documented order of preference; None if nothing fits."""
    generations = generations or 8
    if prompts is None and (rows or passes):
        rows, passes = rows or 8, passes or 1
        wanted = range(1, rows * passes * world_size + 1)
    else:
        wanted = [prompts or 16]
    for p in wanted:
        completions = p * generations
        largest_first = [rows] if rows else range(8 if passes is None else completions, 0, -1)
        for r in largest_first:
            for a in [passes] if passes else range(1, completions + 1):
                if r * a * world_size == completions:
                    return BatchPlan(p, generations, r, a, world_size)
    return None


def test_the_plan_is_the_one_that_a_search_finds():
    fitting = refused = 0
    for numbers in itertools.product(PROMPTS, GENERATIONS, ROWS, PASSES, WORLD_SIZES):
        expected = search(*numbers)
        if expected is None:
            with pytest.raises(RecipeError):
                plan(*numbers)
            refused += 1
        else:
            assert plan(*numbers) == expected, numbers
            fitting += 1
    assert fitting > 500
    assert refused > 500


def test_nothing_given_is_16_prompts_of_8_completions():
    assert plan() == BatchPlan(16, 8, 8, 16, 1)


def test_completions_per_step_counts_all_processes():
    found = plan(prompts=6, generations=4, rows=3, world_size=4)
    assert found.completions_per_step == 24 == 3 * found.gradient_accumulation_steps * 4


def test_the_plan_says_its_arithmetic_in_one_line():
    assert str(BatchPlan(8, 8, 16, 2, 2)) == (
        "8 prompts x 8 generations = 64 completions a step = 16 rows x 2 passes x 2 processes"
    )
    assert str(BatchPlan(8, 8, 64, 1)) == "8 prompts x 8 generations = 64 completions a step = 64 rows x 1 passes"


@pytest.mark.parametrize(
    ("numbers", "where", "words"),
    [
        ({"prompts": 3, "generations": 3, "world_size": 2}, "train.prompts_per_step", "9 completions a step"),
        ({"generations": 4, "rows": 6}, "train.num_generations", "num_generations 4 does not fit 6 completions"),
        ({"generations": 5, "passes": 2}, "train.num_generations", "num_generations 5 does not fit 16 completions"),
        ({"prompts": 4, "rows": 3}, "train.per_device_train_batch_size", "passes of 3 rows"),
        ({"prompts": 4, "passes": 3}, "train.gradient_accumulation_steps", "cut into 3 passes"),
        ({"prompts": 4, "rows": 8, "passes": 2}, "train.gradient_accumulation_steps", "8 rows x 2 passes"),
        ({"prompts": 10**400}, "train.prompts_per_step", "must be at most 1,000,000"),
        ({"generations": 10**400}, "train.num_generations", "must be at most 1,000,000"),
    ],
)
def test_a_refusal_says_where_and_what(numbers, where, words):
    with pytest.raises(RecipeError) as caught:
        plan(**numbers)
    (problem,) = caught.value.mistakes
    assert problem.where == where
    assert words in problem.message
    assert len(str(problem).splitlines()) == 1


@pytest.mark.parametrize(
    ("numbers", "changed"),
    [
        ({"generations": 4, "rows": 6}, "generations"),
        ({"generations": 7, "rows": 4, "passes": 3, "world_size": 2}, "generations"),
        ({"prompts": 4, "generations": 6, "rows": 5}, "rows"),
        ({"prompts": 4, "generations": 6, "rows": 5, "world_size": 2}, "rows"),
        ({"prompts": 5, "generations": 6, "passes": 4}, "passes"),
    ],
)
def test_every_number_that_a_refusal_offers_fits_and_no_other_does(numbers, changed):
    with pytest.raises(RecipeError) as caught:
        plan(**numbers)
    offered = re.search(r"it must divide \d+: ([\d, ]+)", caught.value.mistakes[0].hint).group(1)
    offered = {int(number) for number in offered.split(",")}
    fitting = set()
    for candidate in range(2 if changed == "generations" else 1, 60):
        try:
            plan(**{**numbers, changed: candidate})
            fitting.add(candidate)
        except RecipeError:
            pass
    assert offered == fitting


def test_a_batch_of_one_row_offers_no_empty_choice():
    with pytest.raises(RecipeError) as caught:
        plan(rows=1)
    hint = caught.value.mistakes[0].hint
    assert "train.prompts_per_step" in hint
    assert ": ;" not in hint


@pytest.mark.parametrize("name", ["prompts", "generations", "rows", "passes"])
@pytest.mark.parametrize("number", [0, -4])
def test_a_number_below_one_is_refused_and_not_taken_for_nothing(name, number):
    with pytest.raises(RecipeError):
        plan(**{"prompts": 4, name: number})
