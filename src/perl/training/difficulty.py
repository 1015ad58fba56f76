"""How hard a recipe's training problems are for a policy: the share of its completions that are right.

Recipe, completions a problem -> pass rate of each training problem, and a file of the data with them

Completions are drawn at the temperature of the recipe's rollouts by what draws an evaluation's, and are kept in a
folder: the same call goes on where it was stopped, and one for more completions draws the rest.
"""

import json
import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from perl.data import read_source
from perl.errors import DataError, InterruptedRunError, PerlError
from perl.evaluation.drawing.drawn_samples import draw_samples
from perl.evaluation.drawing.policies import BaseInMemory
from perl.evaluation.drawing.request import EvalSettings, Evaluation
from perl.evaluation.drawing.subject import Subject, adapter_digests
from perl.evaluation.scoring.protocol import Protocol, asked_facts, generation_settings
from perl.evaluation.tasks.heldout import heldout_task
from perl.evaluation.tasks.questions import template_hash
from perl.policy.model import end_tokens
from perl.policy.saved.adapter import find_adapter
from perl.recipe import Recipe
from perl.recipe.rollout_section import TRANSFORMERS, RolloutSection, best_backend, capabilities
from perl.recipe.sections import PromptsSection
from perl.rewards.verifier import Judging
from perl.run.devices import threads_kept, use_threads
from perl.run.files import write_text
from perl.training.plan import Plan
from perl.training.prepare import plan_of
from perl.training.reward_trial import GoldCheck

COLUMN = "pass_rate"
"""Of data that is written with its difficulty."""


@dataclass(frozen=True)
class Difficulty:
    """What a policy makes of the training problems.

    Attributes:
        policy: The adapter, or the base.
        problems: That it was asked.
        rollouts: Completions of each.
        mean: Pass rate.
        never: Share of the problems of which no completion is right.
        always: Share of which all are.
        written: The file with a pass rate for each.
    """

    policy: str
    problems: int
    rollouts: int
    mean: float
    never: float
    always: float
    written: str | None = None

    def lines(self) -> Iterator[str]:
        """For a person to read."""
        asked = f"{self.problems:,} training problems x {self.rollouts:,} completions, pass rate {self.mean:.3f}"
        shares = f"of the problems {self.never:.2f} never, {self.always:.2f} always right"
        yield f"policy {self.policy}: {asked}; {shares}"
        if self.written is not None:
            how = f"data.train={self.written} prompts.curriculum=-{COLUMN}"
            yield f"wrote  {self.written}: easy first with {how}"


def measured_difficulty(
    recipe: Recipe, gold: GoldCheck, rollouts: int, adapter: str | None, write: str | None
) -> Difficulty:
    """Asks the policy, and writes what came of it.

    Args:
        recipe: Of the data.
        gold: Of the same recipe: which training problems are asked, and their rows in the data set.
        rollouts: Completions of each.
        adapter: Of the policy; None: the recipe's, or the base.
        write: The file, whose completions are kept beside it; None: nothing is kept.

    Raises:
        InterruptedRunError: Ctrl-C; the same call goes on if a file is named.
        PerlError: As :func:`pass_rates`.
    """
    file = None if write is None else Path(write).expanduser()
    with tempfile.TemporaryDirectory() as scratch:
        kept = Path(scratch) if file is None else file.with_name(f"{file.stem}_completions")
        try:
            with recipe.locating():
                rates = pass_rates(recipe, rollouts, kept, adapter, gold.chosen)
        except KeyboardInterrupt:
            raise InterruptedRunError("stopped", str(kept), "the same command goes on" if file else "") from None
    if file is not None:
        source, _ = read_source(recipe.data.train, "train", "data.train")
        rows = [{**source[gold.rows[i]], COLUMN: rate} for i, rate in zip(gold.chosen, rates, strict=True)]
        write_text(file, "".join(f"{json.dumps(row, ensure_ascii=False, default=str)}\n" for row in rows))
    policy, share = adapter or recipe.peft.adapter or recipe.model.name, 1 / len(rates)
    never, always = (share * sum(rate == end for rate in rates) for end in (0.0, 1.0))
    return Difficulty(policy, len(rates), rollouts, share * math.fsum(rates), never, always, write)


def pass_rates(
    recipe: Recipe, count: int, folder: Path, adapter: str | None = None, rows: Sequence[int] | None = None
) -> list[float]:
    """Which share of so many completions of each training problem is right; what cannot be judged is not.

    Args:
        recipe: Names model, data and how completions are sampled; how it chooses prompts does not matter.
        count: Completions a problem.
        folder: Where they are kept.
        adapter: Of the policy; None: the one that the recipe continues, else the base is asked.
        rows: Of the training problems, those that are asked; None: all.

    Raises:
        PerlError: The recipe cannot be trained, or its data has no gold answers.
        RolloutError: No server answers.
    """
    with threads_kept():
        if recipe.engine.threads is not None:
            use_threads(recipe.engine.threads)
        subject = _subject(recipe, adapter, folder)
        # A curriculum may be by the column that is yet to be written.
        plan = plan_of(replace(recipe, prompts=PromptsSection()))
        evaluation = _evaluation(plan, count, subject, rows)
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):  # an adapter draws before it is filled
            policies = BaseInMemory().policies(evaluation.subject, evaluation.device)
        drawn = draw_samples(evaluation, policies)
    ((groups,),) = (found.values() for found in drawn.groups.values())
    return [sum(sample.right for sample in samples) / len(samples) for samples in groups]


def _subject(recipe: Recipe, adapter: str | None, folder: Path) -> Subject:
    """The base, or what is put on it."""
    model, name = recipe.model, adapter or recipe.peft.adapter
    if name is None:
        return Subject(model.name, model, None, None, None, None, folder)
    try:
        saved = find_adapter(name, model.name)
        return Subject(saved.name, model, saved, None, *adapter_digests(saved), folder)
    except PerlError as error:
        raise error.moved(lambda _: "--adapter" if adapter else "peft.adapter") from None


def _evaluation(plan: Plan, count: int, subject: Subject, rows: Sequence[int] | None) -> Evaluation:
    """The training problems as a task."""
    recipe, train = plan.recipe, plan.problems.train
    judging = plan.judging or Judging()
    if judging.solution not in train.column_names:
        raise DataError("there are no gold answers to compare with", "data.train", "columns: {answer: NAME}")
    how = recipe.rollout
    protocol = Protocol(
        preset="recipe",
        temperature=how.temperature,
        top_p=how.top_p,
        top_k=how.top_k,
        min_p=how.min_p or 0.0,
        repetition_penalty=how.repetition_penalty,
        max_new_tokens=how.max_completion_length,
        k=count,
        seed=plan.arguments.seed,
        system_prompt=recipe.data.system_prompt,
    )
    chosen = range(len(train)) if rows is None else rows
    examples = [{**train[i], "solution": train[i][judging.solution]} for i in chosen]
    prompts = plan.rendered(examples)
    ends = end_tokens(plan.tokenizer, generation_settings(recipe.model))
    asking = asked_facts(None, thinking=recipe.data.thinking)
    return Evaluation(
        subject=subject,
        protocol=protocol,
        tasks=(heldout_task("train", prompts, protocol, ends, None, asking, plan.asking, examples),),
        folder=subject.folder,
        engine=_engine(recipe, how),
        template=template_hash(plan.tokenizer),
        device=plan.arguments.device,
        settings=EvalSettings(with_base=False, base_cache=False, batch_size=recipe.eval.batch_size),
        judging=judging,
        asking=asking,
    )


def _engine(recipe: Recipe, how: RolloutSection) -> RolloutSection:
    """What draws, decided; nothing is drawn ahead."""
    on_gpu = torch.cuda.is_available() and recipe.engine.device != "cpu"
    backend = how.backend if how.decided else best_backend(on_gpu=on_gpu)
    if recipe.model.quantization is not None and not capabilities(backend).quantised_base:
        backend = TRANSFORMERS.name
    return how.model_copy(update={"backend": backend, "prefetch": 0, "in_flight": "finish"})
