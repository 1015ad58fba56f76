"""Walks, memories and curricula against their formulas; chosen prompts through accelerate's data loaders."""

import numpy as np
import pytest
from accelerate.data_loader import BatchSamplerShard, SkipBatchSampler
from torch.utils.data import BatchSampler
from trl.trainer.utils import RepeatSampler

from perl.errors import BrokenPromiseError, DataError
from perl.trainer.prompts.chances import Curriculum, PromptMemory, PromptOutcome, difficulties, ranked
from perl.trainer.prompts.choice import ChosenPrompts, PromptChoice, read_ahead
from perl.trainer.prompts.order import Walk

SIZE = 40


def test_a_lap_takes_every_prompt_once_in_an_order_of_its_seed():
    walk = Walk(SIZE, 3)
    laps = [
        [*walk.take(15, np.ones(SIZE)), *walk.take(15, np.ones(SIZE)), *walk.take(10, np.ones(SIZE))] for _ in "abc"
    ]
    assert all(sorted(lap) == list(range(SIZE)) for lap in laps)
    assert laps[0] != laps[1]
    other = Walk(SIZE, 4)
    assert other.take(40, np.ones(SIZE)) != laps[0]
    assert Walk(SIZE, 3, shuffled=False).take(7, np.ones(SIZE)) == list(range(7))


def test_prompts_are_drawn_as_often_as_their_chances_say():
    chance_N = np.linspace(0.05, 1.0, SIZE)
    walk, counts = Walk(SIZE, 1), np.zeros(SIZE)
    while walk.lap < 500:
        taken = walk.take(4, chance_N)
        assert len(set(taken)) == 4
        counts[taken] += 1
    deviation = np.sqrt(chance_N * (1 - chance_N) / 500)
    # Five deviations, and the few prompts that a batch across the border of two laps may not take twice.
    assert (np.abs(counts / 500 - chance_N) <= 5 * deviation + 0.02 * chance_N).all()


def test_a_walk_goes_on_where_it_was_and_gives_what_there_is():
    chance_N = np.full(SIZE, 0.5)
    walk = Walk(SIZE, 2)
    walk.take(30, chance_N)
    again = Walk(SIZE, 2)
    again.restore(walk.state())
    assert [again.take(9, chance_N) for _ in range(20)] == [walk.take(9, chance_N) for _ in range(20)]
    few_N = np.zeros(SIZE)
    few_N[[3, 5, 8]] = 1e-9, 0.5e-9, 1e-9  # they rest in every lap, and are drawn all the same
    assert set(walk.take(2, few_N)) == {3, 8}
    assert sorted(walk.take(10, few_N, without=[3])) == [5, 8]
    assert walk.take(0, chance_N) == []


def memory(lag=2, **settings):
    return PromptMemory(SIZE, **{"explore": 0.5, "floor": 0.05} | settings, lag=lag)


def test_chances_are_those_of_the_groups_without_variance_in_a_row():
    random, found, expected = np.random.default_rng(0), memory(lag=1), np.zeros(SIZE, int)
    for batch in range(200):
        chance_N = found.chances(batch)
        np.testing.assert_allclose(chance_N, np.maximum(0.5**expected, 0.05), rtol=1e-12)
        seen = [PromptOutcome(int(p), 0.0, bool(random.random() < 0.7)) for p in random.choice(SIZE, 6, replace=False)]
        found.note(batch, seen)
        for one in seen:
            expected[one.prompt] = expected[one.prompt] + 1 if one.flat else 0
    assert expected.max() > 5


def test_a_draw_knows_what_was_seen_so_many_batches_before_and_nothing_later():
    early, late = memory(lag=3), memory(lag=3)
    for batch in range(20):
        seen = [PromptOutcome(batch % SIZE, 1.0, True)]
        late.note(batch, seen)  # long before it is drawn
    for batch in range(20):
        np.testing.assert_array_equal(early.chances(batch), late.chances(batch))
        assert (early.latest() < 1).sum() == max(0, batch - 2)
        early.note(batch, [PromptOutcome(batch % SIZE, 1.0, True)])
        early.note(batch, [PromptOutcome(batch % SIZE, 1.0, True)])  # rollouts that were made again
    with pytest.raises(BrokenPromiseError, match="is drawn before 20 was seen"):
        early.chances(23)


def test_what_all_have_solved_rests_as_solved_and_a_group_without_rewards_says_nothing_of_its_prompt():
    found = memory(lag=1)
    found.note(0, [PromptOutcome(0, 1.0, True), PromptOutcome(1, 1.0, True), PromptOutcome(2, float("nan"), True)])
    found.chances(1)
    assert found.shares()["resting_solved"] == 2 / SIZE
    again = memory(lag=1)
    again.note(1, [])
    again.restore(found.state())
    np.testing.assert_array_equal(again.reward_N, found.reward_N)


@pytest.mark.parametrize(("progress", "share"), [(0.0, 0.25), (0.25, 0.625), (0.5, 1.0), (1.0, 1.0)])
def test_a_curriculum_grows_evenly_from_the_easiest(progress, share):
    numbers_N = np.random.default_rng(1).random(SIZE)
    allowed_N = Curriculum(ranked(numbers_N), 0.25, 0.5).allowed(progress)
    assert allowed_N.sum() == share * SIZE
    assert allowed_N.all() or numbers_N[allowed_N].max() < numbers_N[~allowed_N].min()


@pytest.mark.parametrize(
    ("values", "written", "line"),
    [
        ([1, "hard"], "level", r"column 'level' holds 'hard' in row 2, which is not a finite number"),
        ([1, None], "level", r"holds None in row 2"),
        ([1.0, float("nan")], "level", r"holds nan in row 2"),
        ([True, 1], "level", r"holds True in row 1"),
        ([1, 2], "lewel", r"no column 'lewel' \(did you mean level\?\)"),
    ],
)
def test_a_column_that_is_no_number_is_one_line(values, written, line):
    with pytest.raises(DataError, match=line) as raised:
        difficulties(["prompt", "level"], written, {"level": values}.__getitem__, "prompts.curriculum")
    assert "\n" not in str(raised.value)


def test_a_minus_turns_the_order_round():
    found = difficulties(["level"], "-level", {"level": [3, 1, 2]}.__getitem__, "prompts.curriculum")
    assert ranked(found).tolist() == [0, 2, 1]
    assert difficulties(["-level"], "-level", {"-level": [3.0]}.__getitem__, "").tolist() == [3.0]


class Arguments:
    """Of a trainer whose data loader reads as far ahead as accelerate's does."""

    def __init__(self, accumulation, steps_per_generation, num_iterations):
        self.gradient_accumulation_steps, self.num_iterations = accumulation, num_iterations
        self.steps_per_generation, self.dataloader_num_workers, self.dataloader_prefetch_factor = (
            steps_per_generation,
            0,
            2,
        )


def flat(prompt, batch):
    """What a policy would make of a prompt: the same for every way in which it is drawn."""
    return hash((prompt * 7919 + batch // 4) % 11) % 3 != 0


class Training:
    """Draws and notes as a trainer does, in so many processes, with a data loader that reads ahead."""

    PROMPTS = 6

    def __init__(self, args, processes=1, state=None, curriculum=None):
        self.args = args
        lag = read_ahead(args, 0)
        self.choice = PromptChoice(
            SIZE, 5, shuffled=True, memory=memory(lag=lag), curriculum=curriculum, progress=lambda batch: batch / 30
        )
        if state is not None:
            self.choice.restore(state)
        self.processes, self.lag = processes, lag

    def loader(self, epoch, skipped):
        each = self.args.steps_per_generation * self.args.num_iterations
        whole = RepeatSampler(list(range(SIZE)), 2, self.PROMPTS, each, shuffle=True, seed=5)
        shards = []
        for rank in range(self.processes):
            sampler = ChosenPrompts(whole, lambda: epoch, self.choice)
            batches = BatchSampler(sampler, 2 * self.PROMPTS // self.processes, drop_last=True)
            shards.append(iter(SkipBatchSampler(BatchSamplerShard(batches, self.processes, rank), skipped)))
        return zip(*shards, strict=True)

    def run(self, micro_batches, first=0):
        """The prompts of each generation batch; a step's micro-batches are read at once, and one more."""
        each = self.args.steps_per_generation * self.args.num_iterations
        epoch_size = SIZE // self.PROMPTS * each
        drawn, micro = [], first
        while micro < micro_batches:
            epoch, inside = divmod(micro, epoch_size)
            loader, read = self.loader(epoch, inside), []
            while inside < epoch_size and micro < micro_batches:
                wanted = min(self.args.gradient_accumulation_steps, epoch_size - inside)
                while len(read) < wanted + 1 and (rows := next(loader, None)) is not None:
                    read.append(rows)
                for rows in read[:wanted]:
                    if micro % each == 0:
                        batch = micro // each
                        prompts = [index for rank in rows for index in rank[::2]]
                        assert prompts == self.choice.chosen(batch, self.PROMPTS)
                        self.choice.note(batch, [PromptOutcome(p, 0.0, flat(p, batch)) for p in prompts])
                        drawn.append(prompts)
                    micro += 1
                inside, read = inside + wanted, read[wanted:]
        return drawn


@pytest.mark.parametrize("processes", [1, 2, 3])
@pytest.mark.parametrize("args", [(1, 1, 1), (4, 4, 1), (4, 2, 1), (2, 4, 2), (3, 3, 2)], ids=str)
def test_chosen_prompts_are_the_same_after_a_stop_and_for_any_number_of_processes(args, processes):
    how, micro = Arguments(*args), 20 * args[1] * args[2]
    micro -= micro % args[0]
    whole = Training(how).run(micro)
    assert Training(how, processes).run(micro) == whole
    assert len({tuple(sorted(batch)) for batch in whole}) == len(whole)
    stop = micro // 2 - micro // 2 % args[0]
    begun = Training(how, processes)
    head = begun.run(stop)
    rest = Training(how, state=begun.choice.state()).run(micro, stop)
    assert head + rest == whole


def furthest(args, prefetch):
    """The largest number of batches between a draw and the latest that is known, by walking through micro-batches."""
    each, lag = args.steps_per_generation * args.num_iterations, 0
    for first in range(0, 200, args.gradient_accumulation_steps):  # a step begins: all before it was generated
        known = (first - 1) // each
        read = first + args.gradient_accumulation_steps + prefetch * each  # with the one more that accelerate reads
        lag = max(lag, read // each - known)
    return lag


@pytest.mark.parametrize("prefetch", [0, 1, 3])
@pytest.mark.parametrize("args", [(1, 1, 1), (4, 4, 1), (4, 2, 1), (2, 4, 2), (3, 3, 2), (6, 4, 1)], ids=str)
def test_a_draw_waits_for_as_many_batches_as_are_read_ahead(args, prefetch):
    assert read_ahead(Arguments(*args), prefetch) >= furthest(Arguments(*args), prefetch)
    assert abs(read_ahead(Arguments(*args), prefetch) - furthest(Arguments(*args), prefetch)) <= 1


def test_a_curriculum_draws_the_easiest_first_and_all_in_the_end():
    curriculum = Curriculum(np.arange(SIZE), 0.25, 0.5)
    drawn = Training(Arguments(1, 1, 1), curriculum=curriculum).run(30)
    assert max(drawn[0]) < 10
    for batch, prompts in enumerate(drawn):
        assert max(prompts) < np.ceil(SIZE * min(1.0, 0.25 + 0.75 * batch / 15))
    assert max(max(prompts) for prompts in drawn[15:]) == SIZE - 1


def test_another_data_set_is_no_data_set_to_go_on_with():
    state = Training(Arguments(1, 1, 1)).choice.state()
    with pytest.raises(BrokenPromiseError, match="among 40 prompts, here are 41"):
        PromptChoice(41, 5, shuffled=True).restore(state)
