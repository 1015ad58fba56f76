"""What a run's policy is worth: the base before training, the policy between steps, both at the end.

Plan, model, trainer -> samples, metrics, Results

The held-out problems and the tasks of the recipe's ``eval`` section are one evaluation, in the run's ``eval`` folder;
what was drawn there is not drawn again. All processes of a run call these functions at once and share the completions;
the main process alone writes.
"""

import shutil
from dataclasses import replace

import torch
from peft import PeftModel
from transformers import PreTrainedModel

from perl.evaluation.drawing.drawn_samples import draw_samples
from perl.evaluation.drawing.policies import Policies
from perl.evaluation.drawing.request import EvalSettings, Evaluation
from perl.evaluation.drawing.subject import Subject, adapter_digests, model_digests
from perl.evaluation.evaluate import carry_out
from perl.evaluation.scoring.protocol import asked_facts
from perl.evaluation.scoring.results import SAMPLES, TaskResult
from perl.evaluation.tasks.questions import template_hash
from perl.launch.together import see_files
from perl.policy.attach import continue_adapter
from perl.policy.model import clean_base
from perl.policy.precision import without_autocast
from perl.policy.saved.adapter import find_adapter
from perl.recipe.rollout_section import RolloutSection
from perl.recipe.sections import ModelSection
from perl.run.folder import Run
from perl.run.joint_work import joined
from perl.trainer.callbacks.trackers import log_scores
from perl.trainer.trainer import PeftGRPOTrainer
from perl.training.callbacks.benchmark_scores import BenchmarkScores, Questions
from perl.training.inputs import held_out_here
from perl.training.plan import Plan


def score_base(plan: Plan, base: PreTrainedModel, run: Run) -> None:
    """Draws the base's answers to the held-out problems, before anything is trained.

    With vLLM this waits for the end, where an engine is opened for base and adapter.
    """
    heldout = tuple(task for task in plan.tasks if held_out_here(task))
    if not heldout or plan.recipe.rollout.capabilities.takes_updates:
        return
    alone = Subject(plan.recipe.name, plan.recipe.model, None, None, None, None, run.path / "eval")
    device = next(base.parameters()).device
    evaluation = _evaluation(plan, run, alone, plan.recipe.rollout, device)
    policies = Policies(base, None, plan.tokenizer, run.facts["fingerprint"]["base"])
    draw_samples(replace(evaluation, tasks=heldout), policies, joined())


def score_run(plan: Plan, base: PreTrainedModel, trainer: PeftGRPOTrainer, run: Run) -> None:
    """Scores base and adapter on every task, if there is one, and records it; the best adapter too, if it is pushed.

    Args:
        plan: Of the run.
        base: As it was loaded; of a run that trained the model itself another copy is loaded.
        trainer: Has the policy, which has been saved.
        run: Where results go.
    """
    if not plan.tasks:
        return
    trained = isinstance(trainer.policy, PeftModel)
    saved = find_adapter(str(run.adapter)) if trained else None
    weights, config = adapter_digests(saved) if saved is not None else model_digests(run.adapter)
    subject = Subject(
        name=plan.recipe.hub.repo_id or plan.recipe.name,
        base=plan.recipe.model,
        adapter=saved,
        model=None if trained else ModelSection(name=str(run.adapter)),
        adapter_sha256=weights,
        config_sha256=config,
        folder=run.path / "eval",
    )
    evaluation = _evaluation(plan, run, subject, trainer.rollout_source.rollout, trainer.args.device)
    fingerprint = run.facts["fingerprint"]["base"]
    policies = Policies(base, trainer.policy, plan.tokenizer, fingerprint) if trained else None
    with without_autocast(trainer.policy):  # as base and adapter are scored by anyone who loads them
        results = carry_out(evaluation, policies, joined())
    run.record(eval={task.name: _facts_of(task) for task in results.tasks})
    if plan.recipe.hub.push == "best":
        _score_best(plan, trainer, run)
    if joined().main:
        log_scores(trainer, evaluation.folder)


def _score_best(plan: Plan, trainer: PeftGRPOTrainer, run: Run) -> None:
    """Scores the adapter that was best between steps as the final one is, whose results are its own."""
    folder = run.path / "best"
    see_files(folder / "adapter", joined())
    saved = find_adapter(str(folder / "adapter"))
    digests = adapter_digests(saved)
    if digests[0] == run.facts["fingerprint"]["adapter"]:
        return
    name = plan.recipe.hub.repo_id or plan.recipe.name
    subject = Subject(name, plan.recipe.model, saved, None, *digests, folder / "eval")
    evaluation = replace(
        _evaluation(plan, run, subject, trainer.rollout_source.rollout, trainer.args.device), folder=subject.folder
    )
    processes = joined()
    if processes.main:
        subject.folder.mkdir(parents=True, exist_ok=True)
        if not (subject.folder / SAMPLES).exists():  # the base's are there already
            shutil.copyfile(run.path / "eval" / SAMPLES, subject.folder / SAMPLES)
    base = clean_base(trainer.policy)
    policy = continue_adapter(base, saved).eval()
    policies = Policies(base, policy, plan.tokenizer, run.facts["fingerprint"]["base"])
    carry_out(evaluation, policies, processes)


def between_steps(plan: Plan, run: Run) -> BenchmarkScores | None:
    """The callback that scores the policy while it is trained; None: the recipe does not ask for it."""
    settings = plan.recipe.eval
    tasks = tuple(task for task in plan.tasks if not held_out_here(task))
    if settings.every is None or not tasks:
        return None
    return BenchmarkScores(
        [item.model_dump() for item in settings.tasks],
        settings.k,
        settings.every,
        best=settings.best,
        batch_size=settings.batch_size,
        folder=run.path,
        questions=Questions(tasks, plan.protocol, plan.judging),
    )


def _evaluation(plan: Plan, run: Run, subject: Subject, engine: RolloutSection, device: torch.device) -> Evaluation:
    settings = plan.recipe.eval
    return Evaluation(
        subject=subject,
        protocol=plan.protocol,
        tasks=plan.tasks,
        folder=run.path / "eval",
        engine=engine.model_copy(update={"backend": engine.capabilities.name, "prefetch": 0, "in_flight": "finish"}),
        template=template_hash(plan.tokenizer),
        device=device,
        settings=EvalSettings(lighteval=bool(settings.tasks), batch_size=settings.batch_size),
        judging=plan.judging,
        within_run=True,
        asking=asked_facts(None, thinking=plan.recipe.data.thinking),
    )


def _facts_of(task: TaskResult) -> dict[str, float | int | None]:
    """For ``run.json``: the adapter's stderr is called so, since it is the number of the card."""
    score = task.score
    facts: dict[str, float | int | None] = {"k": score.k, "n": score.n, "stderr": score.stderr}
    for who, found in (("base", task.base), ("adapter", task.adapter)):
        if found is not None:
            facts |= {
                who: found.accuracy,
                f"{who}_stderr": found.stderr,
                f"{who}_length": found.mean_tokens,
                f"{who}_truncated": found.truncated,
                f"{who}_no_answer": found.no_answer,
                f"{who}_unjudged": found.unjudged,
            }
    facts.pop("adapter_stderr", None)
    return facts
