"""How old rollouts are that are sampled ahead: a law for every number of updates a batch, prefetch and bound."""

import copy
import itertools
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from peft import get_peft_model
from transformers import TrainerState

from perl import PeftGRPOTrainer, PeftRLConfig
from perl.errors import RecipeError
from perl.recipe.rollout_section import RolloutSection
from perl.rollouts.engine import EngineSampling, FinishedRollouts, Sampled
from perl.trainer.live import Position, updates_of_a_batch
from perl.trainer.prompts.order import later_prompts
from perl.trainer.sampling.generation import Prompts
from perl.trainer.sampling.rollout_source import RolloutSource
from perl.trainer.sampling.rollouts_ahead import LaterPrompts
from tests.oracles.rollouts import EOS
from tests.oracles.two_trainers import ADAPTERS, QUIET, base, tokenizer
from tests.trainer.test_rollout_source import problems


@dataclass
class Bare:
    """What a source of rollouts reads of a trainer, and no more."""

    model: torch.nn.Module
    args: PeftRLConfig
    accelerator: Accelerator = field(default_factory=lambda: Accelerator(cpu=True))
    state: TrainerState = field(default_factory=TrainerState)
    _metrics: Any = field(default_factory=lambda: {mode: defaultdict(list) for mode in ("train", "eval")})
    _step: int = 0
    _buffered_inputs: Any = None

    @property
    def policy(self) -> torch.nn.Module:
        return self.model


class Engine:
    """Writes the number of optimizer steps that the policy which it was given had taken."""

    counts = {}  # noqa: RUF012
    step = 0

    def start(self, requests, *_):
        groups = [[Sampled((self.step,), (0.0,), f"step {self.step}")] * request.count for request in requests]
        return FinishedRollouts(groups)

    def sleep(self):
        """Nothing to give back."""

    close = sleep


class Source(RolloutSource):
    """Whose syncs cost nothing and prove nothing."""

    def sync(self, *_):
        self._engine = self._engine or Engine()
        self._engine.step = self._live.state.global_step


EPOCHS = 3


class Training:
    """The loops of transformers and TRL around a bare source: epochs, steps of micro-batches, rollouts when due.

    Attributes:
        trained: For each generation batch the steps that trained on it, and what it was sampled with.
    """

    def __init__(self, bare, interval, accumulation, batches, prefetch, bound, known=True):
        bare.args.steps_per_generation, bare.args.num_iterations = interval, 1
        bare.args.gradient_accumulation_steps = accumulation
        self.bare, self.interval, self.accumulation, self.batches = bare, interval, accumulation, batches
        self.steps = -(-batches * interval // accumulation)
        bare.state.max_steps, bare.state.epoch = EPOCHS * self.steps, 0.0
        self.position = Position(bare)
        later = LaterPrompts(batches, lambda epoch: (self.inputs(epoch, batch) for batch in range(batches)))
        self.source = Source(
            bare,
            RolloutSection(backend="vllm-server", servers=["http://a"], prefetch=prefetch, max_staleness=bound),
            EngineSampling(temperature=1.0, max_completion_length=4, end_token_ids=(EOS,)),
            Prompts(tokenizer(), lambda prompts: prompts, lambda seen, _: seen),
            self.position,
            later=lambda: later if known else None,
        )
        self.trained, self.sampled = [], []

    @staticmethod
    def inputs(epoch, batch):
        return [{"prompt": [5 + epoch, 6 + batch]}] * 2

    def run(self):
        self.bare.model.train()
        for epoch in range(EPOCHS):
            of_epoch = [self.inputs(epoch, batch) for batch in range(self.batches) for _ in range(self.interval)]
            loader = iter(of_epoch)
            for step in range(self.steps):
                count = min(self.accumulation, len(of_epoch) - step * self.accumulation)
                self.position.begin_step()
                for inputs in itertools.islice(self.source.look_ahead(loader, count), count):
                    self._train_on(inputs)
                self.bare.state.global_step += 1
                self.bare.state.epoch = epoch + (step + 1) / self.steps
            assert next(loader, None) is None
        return self

    def _train_on(self, inputs):
        if self.position.at_step_begin:
            self.source.begin_step()
        if self.position.rollouts_due:
            prompt_ids = [row["prompt"] for row in inputs]
            self.source.inputs = inputs
            completions, _ = self.source.complete(prompt_ids)
            self.trained.append([])
            self.sampled.append((prompt_ids, completions))
            self.position.move(self.position.micro_batch, [{}])
        self.trained[-1].append(self.bare.state.global_step)
        self.position.advance()


def expected(training, prefetch, bound, known=True):
    """The step of the policy that samples each generation batch: as early as prefetch and the bound allow."""
    found = []
    for batch, steps in enumerate(training.trained):
        begin = batch - batch % training.batches
        earliest = max(batch - prefetch, 0 if known else begin)
        step = training.trained[earliest][0]
        if bound is not None:
            step = max(step, steps[-1] - bound)
        found.append(min(step, steps[0]))
    return found


@pytest.fixture
def bare(tmp_path):
    model = get_peft_model(copy.deepcopy(base(torch.float32)), copy.deepcopy(ADAPTERS["lora"]))
    return Bare(model, PeftRLConfig(str(tmp_path), **QUIET, temperature=1.0, max_completion_length=4))


SHAPES = [(1, 1, 4), (2, 1, 3), (4, 1, 2), (4, 2, 3), (6, 2, 1), (3, 2, 3), (2, 4, 3), (1, 4, 6), (2, 2, 1)]


@pytest.mark.parametrize(("interval", "accumulation", "batches"), SHAPES)
def test_rollouts_are_as_old_as_prefetch_gives_and_never_older_than_the_bound(bare, interval, accumulation, batches):
    """Over three epochs, whose last steps may be shorter; also in the middle of a batch and across the epochs' ends."""
    least = updates_of_a_batch(interval, accumulation) - 1
    for prefetch, bound in itertools.product((1, 2, 3), (None, least, least + 1, least + 2, 2 * least + 3)):
        bare._step, bare._buffered_inputs, bare.state.global_step = 0, None, 0
        training = Training(bare, interval, accumulation, batches, prefetch, bound).run()
        policies = [completions[0][0] for _, completions in training.sampled]
        assert policies == expected(training, prefetch, bound), (prefetch, bound)
        ages = [steps[-1] - policy for steps, policy in zip(training.trained, policies, strict=True)]
        if bound is not None:
            assert max(ages) <= bound, (prefetch, bound)
        asked = [prompt_ids for prompt_ids, _ in training.sampled]
        epochs = itertools.product(range(EPOCHS), range(batches))
        assert asked == [[row["prompt"] for row in Training.inputs(*place)] for place in epochs]


def test_where_prompts_of_the_next_epoch_are_not_known_its_first_rollouts_are_new(bare):
    training = Training(bare, 1, 1, 4, 2, None, known=False).run()
    policies = [completions[0][0] for _, completions in training.sampled]
    assert policies == expected(training, 2, None, known=False) == [0, 0, 0, 1, 4, 4, 4, 5, 8, 8, 8, 9]


def test_rollouts_of_other_prompts_than_were_foreseen_are_sampled_anew(bare):
    """As of a template that tells the time."""
    training = Training(bare, 1, 1, 4, 1, None)
    training.source._sight._find_later = lambda: LaterPrompts(4, lambda _: iter([[{"prompt": [9, 9]}] * 2] * 4))
    training.run()
    policies = [completions[0][0] for _, completions in training.sampled]
    assert policies == [0, 0, 1, 2, 4, 4, 5, 6, 8, 8, 9, 10]


@pytest.mark.parametrize("chooses", [{}, {"prompt_curriculum": "hard", "prompt_curriculum_start": 0.5}])
@pytest.mark.parametrize("shape", [{}, {"num_iterations": 2}, {"gradient_accumulation_steps": 2}])
def test_what_is_known_of_an_epoch_is_what_the_data_loader_gives_in_it(tmp_path, chooses, shape):
    class Keep(PeftGRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            if self.model.training:
                given.append([row["solution"] for row in inputs])
            return super()._generate_and_score_completions(inputs)

    given: list[list[str]] = []
    args = PeftRLConfig(
        str(tmp_path),
        use_cpu=True,
        prompts_per_step=2,
        num_generations=2,
        max_completion_length=2,
        num_train_epochs=3,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        **chooses,
        **shape,
    )
    data = problems(7).add_column("hard", [3.0, 1.0, 2.0, 7.0, 6.0, 4.0, 5.0])

    def reward(completions, **_):
        return [float(row % 2) for row in range(len(completions))]

    trainer = Keep(model="sandbox:base", reward_funcs=reward, args=args, train_dataset=data)
    trainer.train()
    known = later_prompts(trainer)
    if trainer.prompt_selection is not None:
        trainer.prompt_selection.begin()
    again = [[row["solution"] for row in inputs] for epoch in range(3) for inputs in known.of_epoch(epoch)]
    assert again == given
    assert len(again) == 3 * known.batches == 9


def test_the_updates_of_a_batch_are_counted_micro_batch_by_micro_batch():
    for interval, accumulation in ((1, 1), (4, 2), (3, 2), (5, 3), (2, 4), (8, 1)):
        steps = [[(first + i) // accumulation for i in range(interval)] for first in range(0, 60 * interval, interval)]
        assert max(len(set(found)) for found in steps) == updates_of_a_batch(interval, accumulation)


@pytest.mark.parametrize(
    ("changes", "bound", "says"),
    [
        ({"num_iterations": 3}, 1, r"1 cannot be kept: 3 updates .*2 or more"),
        ({"num_iterations": 2}, 1, r"lets nothing be sampled ahead.*2 or more"),
        ({}, -1, "max_staleness"),
        ({"rollout_prefetch": 0}, 2, r"2 bounds what is sampled ahead.* are 0 steps old at most \(leave it out"),
    ],
)
def test_a_bound_that_cannot_be_kept_is_refused_with_one_that_can(tmp_path, changes, bound, says):
    given = {**QUIET, "rollout_backend": "vllm-server", "rollout_servers": ["http://a"], "rollout_prefetch": 1}
    with pytest.raises(RecipeError, match=says) as refused:
        PeftRLConfig(str(tmp_path), **{**given, **changes}, rollout_max_staleness=bound)
    assert "\n" not in str(refused.value)
