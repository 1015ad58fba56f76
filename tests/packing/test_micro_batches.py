"""How an optimizer step's rows are distributed over passes: laws that hold for any rows and any budget."""

import itertools
import math
import random
from dataclasses import replace

import pytest
import torch

from perl.packing.micro_batches import (
    MicroBatch,
    Window,
    idle_micro_batch,
    join,
    micro_batches,
    renumbered,
    rows_of,
    rows_with_gradient,
    token_batches,
)
from perl.packing.rows import Row, pack, pad_right

PAD = 0
WAYS = [(True, True), (True, False), (False, False)]  # packed, shared
BUDGETS = [0, 1, 16, 64, 10**6]


def micro_batch(lengths: list[tuple[int, int]], prompts: list[int], *, tools=False, per_token=False) -> dict:
    """As TRL prepares one: prompts on the right of theirs, completions on the left; 0 tokens: a row cut off."""
    rows, longest_prompt = len(lengths), max(p for p, _ in lengths)
    longest = max(1, *(c for _, c in lengths))
    batch = {
        "prompt_ids": torch.full((rows, longest_prompt), PAD),
        "prompt_mask": torch.zeros(rows, longest_prompt, dtype=torch.long),
        "completion_ids": torch.randint(2, 64, (rows, longest)),
        "completion_mask": torch.zeros(rows, longest, dtype=torch.long),
        "advantages": torch.randn(rows, longest) if per_token else torch.randn(rows),
        "old_per_token_logps": torch.randn(rows, longest),
        "sampling_per_token_logps": None,
        "ref_per_token_logps": torch.rand(rows, 1),
    }
    if tools:
        batch["tool_mask"] = (torch.arange(longest) % 3 != 1).long().expand(rows, -1)
    for index, ((p, c), prompt) in enumerate(zip(lengths, prompts, strict=True)):
        batch["prompt_ids"][index, longest_prompt - p :] = 100 * prompt + torch.arange(p)
        batch["prompt_mask"][index, longest_prompt - p :] = 1
        batch["completion_mask"][index, :c] = 1
    return batch


def some_batches(**options) -> list[dict]:
    """Three micro-batches; groups of one prompt reach from one into the next; one row has no tokens left."""
    groups = [1, 1, 1, 1, 2, 2, 3, 3, 3, 3, 3, 4]
    sizes = {1: 3, 2: 9, 3: 1, 4: 5}
    completions = [4, 1, 7, 0, 12, 3, 8, 8, 2, 1, 5, 6]
    lengths = [(sizes[g], c) for g, c in zip(groups, completions, strict=True)]
    return [micro_batch(lengths[i : i + 4], groups[i : i + 4], **options) for i in (0, 4, 8)]


def some_window(**options) -> Window:
    batches = some_batches(**options)
    return join(batches, [torch.rand(b["completion_mask"].shape) * b["completion_mask"] for b in batches])


def padded_size(rows) -> int:
    return len(rows) * max(row.tokens for row in rows)


def size(batch: MicroBatch, packed: bool) -> int:
    """Tokens that go through the model, counted where they do."""
    return (pack(batch.rows, batch.groups) if packed else pad_right(batch.rows)).input_ids.numel()


@pytest.mark.parametrize("tools", [False, True])
@pytest.mark.parametrize("per_token", [False, True])
def test_a_window_is_its_micro_batches_one_under_the_other(per_token, tools):
    batches = some_batches(per_token=per_token, tools=tools)
    weights = [torch.rand(batch["completion_mask"].shape) for batch in batches]
    window = join(batches, weights)
    assert window.micro_batch_N.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert window.mask_NT.shape == window.weights_NT.shape == (12, 12)
    assert window.values.keys() == {"old_per_token_logps", "ref_per_token_logps"}
    number = 0
    for batch, own in zip(batches, weights, strict=True):
        for index in range(4):
            row, length = window.rows[number], int(batch["completion_mask"][index].sum())
            assert row.prompt.tolist() == batch["prompt_ids"][index][batch["prompt_mask"][index].bool()].tolist()
            assert row.completion.tolist() == batch["completion_ids"][index, :length].tolist()
            mask = (batch["completion_mask"] * batch.get("tool_mask", 1))[index].tolist()
            assert row.scored.int().tolist() == mask[:length]
            for joined, part in (
                (window.mask_NT[number].tolist(), mask),
                (window.weights_NT[number].tolist(), own[index].tolist()),
                (window.values["old_per_token_logps"][number].tolist(), batch["old_per_token_logps"][index].tolist()),
            ):
                assert joined == part + [0] * (12 - len(part))
            advantages = batch["advantages"][index].tolist() if per_token else [batch["advantages"][index].item()]
            assert window.advantages[number].tolist() == advantages + [0] * ((12 if per_token else 1) - len(advantages))
            number += 1
    assert window.values["ref_per_token_logps"].shape == (12, 1)


def test_only_rows_with_a_token_and_an_advantage_have_a_gradient():
    window = some_window()
    advantages = torch.tensor([1.0, -2.0, 0.0, 3.0, 1.9e-6, -2.1e-6, 2e-6, 1e-3, 0.0, -1.0, 0.0, 0.5])
    per_token = torch.zeros(12, 12)
    per_token[2, 6], per_token[4, 0] = -1.0, 1e-9
    with_a_token = [i for i in range(12) if i != 3]
    none = torch.zeros(12, 1)
    for values, largest, skip, expected in (
        (advantages.unsqueeze(1), 2.0, True, [0, 1, 5, 7, 9, 11]),
        (advantages.unsqueeze(1), 2.0, False, with_a_token),
        (per_token, 1.0, True, [2]),
        (none, 0.0, True, []),  # no group has a signal
    ):
        given = replace(window, advantages=values)
        assert rows_with_gradient(given, largest_advantage=largest, skip=skip) == expected
    for packed, share in WAYS:
        assert micro_batches(replace(window, advantages=none), [], budget=16, packed=packed, share=share) == []
    masked = replace(window, mask_NT=0 * window.mask_NT)
    assert rows_with_gradient(masked, largest_advantage=1.0, skip=False) == []


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize(("packed", "share"), WAYS)
def test_every_chosen_row_is_in_one_pass_with_all_that_belongs_to_it(packed, share, budget, per_token):
    window, chosen = some_window(per_token=per_token), [0, 1, 2, 4, 5, 6, 7, 9, 10, 11]
    passes = micro_batches(window, chosen, budget=budget, packed=packed, share=share)
    found = [next(i for i in chosen if window.rows[i] is row) for batch in passes for row in batch.rows]
    assert sorted(found) == chosen
    for batch in passes:
        assert sorted(index for group in batch.groups for index in group) == list(range(len(batch.rows)))
        columns = max(len(row.completion) for row in batch.rows)
        assert batch.mask_NT.shape == batch.weights_NT.shape == (len(batch.rows), columns)
        for index, row in enumerate(batch.rows):
            origin = next(i for i in chosen if window.rows[i] is row)
            assert batch.micro_batch_N[index] == window.micro_batch_N[origin]
            assert torch.equal(batch.mask_NT[index], window.mask_NT[origin, :columns])
            assert torch.equal(batch.weights_NT[index], window.weights_NT[origin, :columns])
            assert torch.equal(batch.advantages[index], window.advantages[origin, : columns if per_token else 1])
            for name, values in batch.values.items():
                assert torch.equal(values[index], window.values[name][origin, : values.size(1)])
            assert len(row.completion) <= columns
    weights = sum(batch.weights_NT.double().sum() for batch in passes)
    assert weights.item() == pytest.approx(window.weights_NT[chosen].double().sum().item(), rel=1e-12)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("packed", "share"), WAYS)
def test_no_pass_is_longer_than_the_budget_unless_it_is_a_single_row(packed, share, seed):
    generator = random.Random(seed)
    sizes = [generator.randint(1, 20) for _ in range(6)]
    groups = [generator.randrange(6) for _ in range(40)]
    window_of = [(sizes[g], generator.randint(0, 25)) for g in groups]
    batch = micro_batch(window_of, groups)
    window = join([batch], [torch.ones(batch["completion_mask"].shape)])
    for budget in (1, 12, 40, 100, 500):
        for one in micro_batches(window, range(40), budget=budget, packed=packed, share=share):
            assert size(one, packed) <= budget or len(one.rows) == 1
            if packed:
                assert one.tokens == size(one, packed)
        plan = token_batches(window.rows, budget=budget, packed=packed, share=share)
        assert sorted(index for groups in plan for group in groups for index in group) == list(range(40))
        for groups in plan:
            rows = [window.rows[index] for group in groups for index in group]
            place = itertools.count()
            places = [[next(place) for _ in group] for group in groups]
            used = pack(rows, places).input_ids.numel() if packed else padded_size(rows)
            assert used <= budget or len(rows) == 1


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize(("packed", "share"), WAYS)
def test_the_pass_that_takes_the_most_memory_comes_first(packed, share, budget):
    window = some_window()
    for chosen in (range(12), [0, 1, 4, 5], [2, 8, 9, 10]):
        passes = micro_batches(window, chosen, budget=budget, packed=packed, share=share)
        sizes = [size(batch, packed) for batch in passes]
        assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("copy_cost", [0.0, 0.25, 2.0])
@pytest.mark.parametrize("budget", BUDGETS)
def test_what_completions_see_of_a_shared_prompt_counts_for_each_of_them(budget, copy_cost):
    def cost(rows, groups) -> float:
        layout = pack(rows, groups).layout
        tokens, keys = (ends[-1].item() for ends in (layout.query_ends, layout.key_ends))
        return tokens + copy_cost * (keys - tokens)

    window = some_window()
    passes = micro_batches(window, range(12), budget=budget, packed=True, share=True, copy_cost=copy_cost)
    costs = [cost(batch.rows, batch.groups) for batch in passes]
    assert [batch.cost(copy_cost) for batch in passes] == costs == sorted(costs, reverse=True)
    if budget:
        assert all(found <= budget or len(batch.rows) == 1 for found, batch in zip(costs, passes, strict=True))
        for groups in token_batches(window.rows, budget=budget, packed=True, share=True, copy_cost=copy_cost):
            indices, own = renumbered(groups)
            assert cost([window.rows[index] for index in indices], own) <= budget or len(indices) == 1


@pytest.mark.parametrize("budget", BUDGETS)
def test_a_group_has_one_prompt_that_is_run_once_and_rows_that_do_not_share_are_groups_of_one(budget):
    window = some_window()
    for batch in micro_batches(window, range(12), budget=budget, packed=True, share=True):
        prompts = [{tuple(batch.rows[i].prompt.tolist()) for i in group} for group in batch.groups]
        assert all(len(prompt) == 1 for prompt in prompts)
        # each prompt, and of each completion all but the last token
        completions = sum(max(len(row.completion) - 1, 0) for row in batch.rows)
        assert batch.tokens == sum(len(*prompt) for prompt in prompts) + completions
        if budget == max(BUDGETS):
            assert sorted(map(len, batch.groups)) == [1, 2, 4, 5]
    for packed in (True, False):
        for batch in micro_batches(window, range(12), budget=budget, packed=packed, share=False):
            assert all(len(group) == 1 for group in batch.groups)


@pytest.mark.parametrize(("packed", "share"), WAYS)
def test_without_a_budget_rows_stay_in_the_micro_batch_they_came_in(packed, share):
    window, chosen = some_window(), [0, 2, 3, 8, 10, 11]
    passes = micro_batches(window, chosen, budget=0, packed=packed, share=share)
    found = {frozenset(i for i in chosen for row in batch.rows if window.rows[i] is row) for batch in passes}
    assert found == {frozenset([0, 2, 3]), frozenset([8, 10, 11])}


def test_an_idle_pass_is_the_shortest_row_and_weighs_nothing():
    window = some_window()
    idle = idle_micro_batch(window, packed=True)
    assert idle.tokens == min(row.tokens for row in window.rows)
    assert len(idle.rows) == 1
    assert idle.groups == ((0,),)
    assert not idle.counts
    assert not idle.weights_NT.any()


def test_rows_of_a_padded_batch_have_no_padding():
    batch = micro_batch([(2, 3), (4, 0), (1, 1)], [1, 2, 3])
    rows = rows_of(batch, batch["completion_mask"] * torch.tensor([[1, 0, 1]]))
    assert [row.prompt.tolist() for row in rows] == [[100, 101], [200, 201, 202, 203], [300]]
    assert [row.completion.tolist() for row in rows] == [
        batch["completion_ids"][i, :c].tolist() for i, c in enumerate((3, 0, 1))
    ]
    assert [row.scored.tolist() for row in rows] == [[True, False, True], [], [True]]
    assert all(isinstance(row, Row) and row.scored.device.type == "cpu" for row in rows)


def test_a_completion_that_several_rows_have_costs_once():
    prompt, scored = torch.arange(5), torch.ones(4, dtype=torch.bool)
    rows = [Row(prompt, torch.full((4,), token), scored) for token in (7, 8, 7, 7, 8, 9)]
    [[group]] = token_batches(rows, budget=14, packed=True, share=True)  # the prompt, and three times three tokens
    assert sorted(group) == list(range(6))
    assert pack([rows[index] for index in group], [list(range(6))]).input_ids.numel() == 14
    assert len(token_batches(rows, budget=13, packed=True, share=True)) == 2
    assert len(token_batches(rows, budget=14, packed=True, share=False)) == 6


def row(prompt: int, length: int, name: int = 0) -> Row:
    """A prompt of so many tokens that are its name, and a completion of so many."""
    return Row(torch.full((prompt,), name), torch.arange(length) + 2, torch.ones(length, dtype=torch.bool))


@pytest.mark.parametrize("seed", range(6))
def test_first_fit_needs_at_most_a_ninth_and_two_more_than_the_best_way(seed):
    """Johnson 1973: 11/9 OPT + 6/9. OPT by trying all ways."""
    choices = random.Random(seed)
    lengths = [choices.randint(1, 12) for _ in range(7)]
    rows = [row(1, length) for length in lengths]
    found = token_batches(rows, budget=14, packed=True, share=False)

    def best(left: list[int], bins: list[int], fewest: int) -> int:
        if len(bins) >= fewest:
            return fewest
        if not left:
            return len(bins)
        first, *rest = left
        for i, filled in enumerate(bins):
            if filled + first <= 14:
                fewest = best(rest, [*bins[:i], filled + first, *bins[i + 1 :]], fewest)
        return best(rest, [*bins, first], fewest)

    optimum = best(sorted(lengths, reverse=True), [], 8)
    assert optimum >= math.ceil(sum(lengths) / 14)
    assert optimum <= len(found) <= 11 / 9 * optimum + 6 / 9
