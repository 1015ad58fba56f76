"""Packed and padded rows against loops over tokens: what stands where, who predicts whom, who sees whom."""

from dataclasses import replace

import pytest
import torch

from perl.packing.rows import Layout, PackedBatch, Row, Segment, pack, pad_right

CPU = torch.device("cpu")


def row(prompt: list[int], completion: list[int], scored: list[int] | None = None) -> Row:
    chosen = [1] * len(completion) if scored is None else scored
    return Row(torch.tensor(prompt), torch.tensor(completion, dtype=torch.long), torch.tensor(chosen).bool())


# A tool's tokens in the middle, a completion of one token, a prompt of one, nothing scored, no completion at all.
ROWS = [
    *(row([11, 12, 13], [21, 22, 23, 24], [1, 0, 1, 1]), row([14], [31, 32]), row([11, 12, 13], [41])),
    *(row([15, 16], [51, 52, 53], [0, 0, 0]), row([14], [61, 62, 63]), row([17, 18, 19, 20], []), row([14], [71])),
    row([11, 12, 13], [81, 82], [0, 1]),
]
ALONE = [[index] for index in range(len(ROWS))]
GROUPS = [[1, 4, 6], [3], [7, 0, 2], [5]]
SHOWN = torch.arange(100, 120)  # as examples before every question
BEGUN = [replace(one, prompt=torch.cat([SHOWN, one.prompt])) for one in ROWS]


def history(batch: PackedBatch, predictor: int) -> list[int]:
    """The tokens that a place sees, its own the last, by a walk over segments or the columns of its row."""
    width = batch.input_ids.size(1)
    place, start = predictor % width, predictor // width * width
    ids = batch.input_ids.flatten().tolist()
    if batch.layout is None:
        return ids[start : predictor + 1]
    segment = next(s for s in batch.layout.segments if s.start <= place < s.start + s.length)
    seen = [token for start, count in segment.prefixes for token in ids[start : start + count]]
    return seen + ids[segment.start : place + 1]


BATCHES = {
    "alone": (ROWS, lambda rows: pack(rows, ALONE)),
    "shared": (ROWS, lambda rows: pack(rows, GROUPS)),
    "in another order": (ROWS, lambda rows: pack(rows, ALONE[::-1])),
    "padded": (ROWS, pad_right),
    "begun alike": (BEGUN, lambda rows: pack(rows, GROUPS)),
}


@pytest.mark.parametrize("how", BATCHES)
def test_every_scored_token_comes_out_once_and_is_predicted_by_what_stands_before_it(how):
    rows, build = BATCHES[how]
    batch, found = build(rows), {}
    columns = (batch.scored.predictors, batch.scored.targets, batch.scored.rows, batch.scored.columns)
    for predictor, target, index, column in zip(*(values.tolist() for values in columns), strict=True):
        assert (index, column) not in found
        found[index, column] = (history(batch, predictor), target)
    expected = {}
    for index, one in enumerate(rows):
        prompt, completion = one.prompt.tolist(), one.completion.tolist()
        for column, scored in enumerate(one.scored.tolist()):
            if scored:
                expected[index, column] = (prompt + completion[:column], completion[column])
    assert found == expected
    assert batch.scored.width == batch.input_ids.size(1)


@pytest.mark.parametrize("how", BATCHES)
def test_positions_count_from_the_rows_first_token(how):
    rows, build = BATCHES[how]
    batch = build(rows)
    if batch.position_ids is None:  # the model counts the columns, and each row begins in the first
        assert how == "padded"
        return
    assert batch.position_ids.shape == batch.input_ids.shape
    for place, position in enumerate(batch.position_ids.flatten().tolist()):
        assert position == len(history(batch, place)) - 1


def test_a_row_runs_its_prompt_once_and_all_of_its_completion_but_the_last_token():
    lasts = {one.completion[-1].item() for one in ROWS if len(one.completion)}
    for rows, build in BATCHES.values():
        assert not lasts & set(build(rows).input_ids.flatten().tolist())
    for one in ROWS:
        expected = len(one.prompt) + max(len(one.completion) - 1, 0)
        assert one.tokens == expected
        assert pack([one], [[0]]).input_ids.numel() == pad_right([one]).input_ids.numel() == expected
    prompts = {tuple(one.prompt.tolist()) for one in ROWS}
    shared = [token for prompt in prompts for token in prompt]
    shared += [token for one in ROWS for token in one.completion[:-1].tolist()]
    assert sorted(pack(ROWS, GROUPS).input_ids.flatten().tolist()) == sorted(shared)
    assert sorted(pack(BEGUN, GROUPS).input_ids.flatten().tolist()) == sorted([*SHOWN.tolist(), *shared])
    assert pack(BEGUN, ALONE).input_ids.numel() == sum(one.tokens for one in BEGUN)  # where nothing is to be shared
    short = [replace(one, prompt=torch.cat([SHOWN[:4], one.prompt])) for one in ROWS]
    assert pack(short, GROUPS).input_ids.numel() == len(shared) + 4 * len(prompts)


def test_what_rows_of_a_group_run_alike_is_run_once_and_scored_for_each():
    """The last token is not run, so that completions which differ there alone are run alike."""
    rows = [row([11, 12], [21, 22, 23]), row([11, 12], [21, 22, 24], [0, 1, 1]), row([11, 12], [21, 22, 23])]
    rows += [row([11, 12], [21, 22]), row([13], [21, 22, 23])]
    batch = pack(rows, [[0, 1, 2, 3], [4]])
    assert batch.input_ids.flatten().tolist() == [11, 12, 21, 22, 21, 13, 21, 22]
    assert [(s.start, s.length, s.prefix_length) for s in batch.layout.segments] == [
        *((0, 2, 0), (2, 2, 2), (4, 1, 2), (5, 3, 0))
    ]
    scored = batch.scored
    found = zip(*(t.tolist() for t in (scored.rows, scored.columns, scored.predictors, scored.targets)), strict=True)
    first = [(0, 0, 1, 21), (0, 1, 2, 22), (0, 2, 3, 23), (1, 1, 2, 22), (1, 2, 3, 24)]
    rest = [(2, 0, 1, 21), (2, 1, 2, 22), (2, 2, 3, 23), (3, 0, 1, 21), (3, 1, 4, 22)]
    assert list(found) == [*first, *rest, (4, 0, 5, 21), (4, 1, 6, 22), (4, 2, 7, 23)]
    alone = pack(rows, [[index] for index in range(5)])  # where prompts are not shared nothing is
    assert alone.input_ids.numel() == sum(one.tokens for one in rows)


def naive_mask(rows: list[Row], groups: list[list[int]], common: int = 0) -> torch.Tensor:
    """(L, L) who sees whom, token by token: (group or None for what is common, row or None for a prompt, place)."""
    tokens = [(None, None, i) for i in range(common)]
    for number, group in enumerate(groups):
        prompt = rows[group[0]].prompt.tolist()
        shared = len(group) > 1
        tokens += [(number, None if shared else group[0], i) for i in range(common, len(prompt))]
        for index in group:
            tokens += [(number, index, len(prompt) + i) for i in range(len(rows[index].completion) - 1)]
    mask = torch.zeros(len(tokens), len(tokens), dtype=torch.bool)
    for i, (group, index, place) in enumerate(tokens):
        for j, (other_group, other_index, other_place) in enumerate(tokens):
            mask[i, j] = other_group in (None, group) and other_index in (None, index) and other_place <= place
    return mask


def unfolded(layout: Layout, length: int) -> torch.Tensor:
    """(L, L) who sees whom, from ``keys``, ``query_ends``, ``key_ends`` and the rule of the kernel: last with last."""
    queries, keys = layout.query_ends.tolist(), layout.key_ends.tolist()
    mask = torch.zeros(length, length, dtype=torch.bool)
    for segment in range(len(queries) - 1):
        count = queries[segment + 1] - queries[segment]
        seen = layout.keys[keys[segment] : keys[segment + 1]]
        for i in range(count):
            mask[queries[segment] + i, seen[: len(seen) - count + i + 1]] = True
    return mask


@pytest.mark.parametrize(("rows", "groups"), [(ROWS, ALONE), (ROWS, GROUPS), (BEGUN, GROUPS)])
def test_a_token_sees_its_prompt_and_its_own_row_and_nothing_else(rows, groups):
    batch = pack(rows, groups)
    expected, layout = naive_mask(rows, groups, 0 if rows is ROWS else len(SHOWN)), batch.layout
    assert torch.equal(unfolded(layout, batch.input_ids.size(1)), expected)
    for segment in layout.segments:
        own = expected[segment.start : segment.start + segment.length]
        assert own.sum() == segment.length * segment.prefix_length + segment.length * (segment.length + 1) // 2
        if segment.prefix_length:
            places = (*segment.prefixes, (segment.start, segment.length))
            seen = torch.cat([own[:, start : start + count] for start, count in places], dim=1)
            assert torch.equal(layout.mask(segment.prefix_length, segment.length), seen)


def test_a_layout_as_kernels_take_it():
    layout = Layout((Segment(0, 2), Segment(2, 3, prefixes=((0, 2),)), Segment(5, 1)), CPU)
    assert layout.query_ends.tolist() == [0, 2, 5, 6]
    assert layout.key_ends.tolist() == [0, 2, 7, 8]
    assert layout.keys.tolist() == [0, 1, 0, 1, 2, 3, 4, 5]
    assert layout.longest == (3, 5)
    assert layout.query_ends.dtype == layout.key_ends.dtype == torch.int32
    assert layout.mask(2, 3).int().tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert layout.mask(2, 3, 2).int().tolist() == [[0, 1, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 1, 1]]


def test_padding_stands_on_the_right_and_is_masked():
    batch = pad_right(ROWS)
    for one, ids, mask in zip(ROWS, batch.input_ids, batch.attention_mask, strict=True):
        assert mask.tolist() == [1] * one.tokens + [0] * (len(mask) - one.tokens)
        assert ids[: one.tokens].tolist() == (one.prompt.tolist() + one.completion[:-1].tolist())
    assert batch.input_ids.size(1) == max(one.tokens for one in ROWS)
    assert batch.layout is None


@pytest.mark.parametrize("how", BATCHES)
def test_a_rectangle_holds_each_value_at_its_row_and_column_and_hands_its_gradient_back(how):
    rows, build = BATCHES[how]
    scored = build(rows).scored
    values = torch.arange(1.0, len(scored.targets) + 1, dtype=torch.float64, requires_grad=True)
    rectangle = scored.rectangle(values, len(ROWS), 5)
    expected = torch.zeros(len(ROWS), 5, dtype=torch.float64)
    for value, index, column in zip(values.tolist(), scored.rows.tolist(), scored.columns.tolist(), strict=True):
        expected[index, column] = value
    assert torch.equal(rectangle.detach(), expected)
    factors = torch.randn(len(ROWS), 5, dtype=torch.float64)
    (rectangle * factors).sum().backward()
    assert torch.equal(values.grad, factors[scored.rows, scored.columns])
