"""Benchmark scores between steps, and the best adapter by one of them.

policy at a step -> completions of each task, judged -> metrics of the step, best/

All processes of a run draw completions together; the main one keeps what they scored.
"""

import json
import logging
import shutil
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from transformers import TrainerState, TrainingArguments

from perl.errors import PerlError, RecipeError, warn
from perl.evaluation.scoring.protocol import Protocol
from perl.evaluation.scoring.samples import Sample
from perl.evaluation.scoring.score import score_samples
from perl.evaluation.scoring.task import MATH
from perl.evaluation.tasks.draw import draw, share, within_batch
from perl.evaluation.tasks.own_tasks import chosen_tasks, in_keys
from perl.evaluation.tasks.questions import PreparedTask
from perl.evaluation.tasks.task_data import check_files
from perl.policy.model import base_of, end_tokens
from perl.policy.saved.adapter import WEIGHTS
from perl.recipe.eval_section import EvalSection
from perl.recipe.validation import checked
from perl.rewards.verifier import Judging
from perl.run.facts import BEST, averages, read_best
from perl.run.files import replace_folder, sha256_of, write_text
from perl.run.joint_work import Processes, joined
from perl.run.progress import progress
from perl.trainer.callbacks.run_callback import RunCallback, folder_of
from perl.training.inputs import prepared_tasks, protocol_of

logger = logging.getLogger("perl")

Metrics = dict[str, float]


@dataclass(frozen=True)
class Questions:
    """What is asked, and how.

    Attributes:
        tasks: With their prompts.
        protocol: How completions are drawn.
        judging: The limits of comparing answers; None: the usual ones.
    """

    tasks: tuple[PreparedTask, ...]
    protocol: Protocol
    judging: Judging | None = None

    @property
    def completions(self) -> int:
        """How many are drawn for one score of all tasks."""
        return self.protocol.k * sum(len(task.request.asked) for task in self.tasks)


class BenchmarkScores(RunCallback):
    """Scores the policy on benchmark tasks every so many steps, and keeps the adapter that scored best.

    Scores go into the log of the step: ``eval/TASK/avg@K`` with its standard error, ``eval/TASK/pass@K``, mean length
    and truncated share. The best adapter is in ``best/adapter``, what it scored in ``best/best.json``.

    Example:
        ``PeftGRPOTrainer(..., callbacks=[BenchmarkScores(tasks=["aime24"], k=8, every=50)])``
    """

    needs_ours = "its engine draws completions from the policy of the step"

    def __init__(
        self,
        tasks: Sequence[str | Mapping[str, Any]],
        k: int = 4,
        every: int = 50,
        *,
        system_prompt: str | None = None,
        folder: str | Path | None = None,
        questions: Questions | None = None,
        **settings: Any,  # noqa: ANN401 (of EvalSection)
    ) -> None:
        """Scores nothing yet.

        Args:
            tasks: Names from ``perl eval --list-tasks``, files as ``perl eval --tasks`` takes them, or mappings as a
                recipe's ``eval.tasks`` holds them: ``{"name": "my.jsonl", "limit": 50, "few_shot": 3}``.
            k: Completions a problem; the score is their mean (avg@k).
            every: Optimizer steps between two scores.
            system_prompt: Message before every question.
            folder: Where ``best/`` is kept; None: the trainer's ``output_dir``.
            questions: The tasks, ready to be asked, where they are; a recipe's are prepared before its model is loaded.
            settings: Others of a recipe's ``eval`` section: ``best``, ``data``, ``temperature``, ``top_p``,
                ``max_completion_length``, ``seed``, ``limit``, ``batch_size``, ``scorer_timeout``.

        Raises:
            PerlError: There is no such task, score or setting, or a number makes no sense.
        """
        given = {"tasks": [tasks] if isinstance(tasks, str) else list(tasks), "k": k, "every": every, **settings}
        given |= {"data": str(settings["data"])} if settings.get("data") is not None else {}
        with _named():
            if not tasks:
                raise RecipeError("names no task", "tasks", "as in tasks=['aime24']")
            self.settings = section = checked(EvalSection, given)  # as a recipe's
            chosen = chosen_tasks(section, "tasks")
            for one in chosen:
                with in_keys(one.place, ""):
                    check_files(one.task, Path(section.data).expanduser() if section.data else None, one.few_shot)
        self._system_prompt, self._given_folder, self._questions = system_prompt, folder, questions
        self._prepared = questions is not None
        self._processes = Processes()
        self._folder = self._staged = Path()

    @property
    def every(self) -> int:
        """Optimizer steps between two scores."""
        return self.settings.every or 1

    @property
    def completions(self) -> int:
        """That one score of all tasks draws; 0: not known before training begins."""
        return 0 if self._questions is None else self._questions.completions

    def on_train_begin(self, args: Any, state: TrainerState, *_: object, **__: object) -> None:  # noqa: ANN401 (TRL's)
        """Prepares the tasks.

        Raises:
            PerlError: The data of a task is not there, or its prompts do not fit.
        """
        super().on_train_begin(args, state)
        self._processes = joined()
        self._folder = folder_of(args, self._given_folder) / "best"
        self._staged = self._folder.with_name(f".{self._folder.name}.tmp")
        if not self._prepared:
            with self._processes.failing_together(), _named():
                settings, tokenizer, base = self.settings, self.trainer.processing_class, base_of(self.trainer.policy)
                protocol = protocol_of(settings, "script", args.max_completion_length, self._system_prompt)
                chosen, ends = (
                    chosen_tasks(settings, "tasks"),
                    end_tokens(tokenizer, base.generation_config.to_diff_dict()),
                )
                arguments = getattr(args, "chat_template_kwargs", None)
                tasks = prepared_tasks(chosen, settings, tokenizer, protocol, ends, base.config, arguments)
                self._questions = Questions(tuple(tasks), protocol)
            self._processes.meet()

    def on_step_end(self, _: TrainingArguments, state: TrainerState, *__: object, **___: object) -> None:
        """Scores, where it is due."""
        if state.global_step % self.every:
            return
        metrics = self.score()
        self.trainer.note(metrics)
        self.keep_best(state.global_step, metrics)

    def score(self) -> Metrics:
        """Metrics of the policy as it is now; called on every process, the main one has them."""
        questions, trainer, metrics = self._questions, self.trainer, Metrics()
        if questions is None or not questions.tasks:
            raise RuntimeError("no task is prepared")
        with self._processes.failing_together():
            first = questions.tasks[0].request.asked[0].prompt_ids
            engine = trainer.rollout_source.policy_engine(first, self.settings.batch_size)
            sharing = share(self._processes, engine.capabilities, self.settings.batch_size, trainer.policy)
            for task in questions.tasks:
                asked, main = task.request, self._processes.main
                asking = partial(draw, engine, trainer.processing_class, asked, questions.protocol, {})
                if main:  # with a progress line
                    with progress(
                        len(asked.places(questions.protocol.k)), f"scoring the policy on {asked.task}"
                    ) as state:
                        state.note = partial(within_batch, engine)
                        groups = asking(lambda _: state.update(), questions.judging, sharing)
                else:
                    groups = asking(lambda _: None, questions.judging, sharing)
                metrics |= self._processes.by_main(partial(task_metrics, asked.task, groups, asked.scorer.name))
        return metrics

    def keep_best(self, step: int, metrics: Mapping[str, float]) -> None:
        """Keeps the adapter, if it is the best so far; called on every process."""
        by = self.settings.best
        value = metrics[f"eval/{by}"] if by is not None else statistics.fmean(averages(metrics).values())
        if self._processes.main:
            scores = [f"{name.removeprefix('eval/')} {v:.3f}" for name, v in averages(metrics).items()]
            logger.info("step %d: %s", step, ", ".join(scores))
        with self._processes.failing_together():
            if self._processes.by_main(lambda: value > self._best_so_far(step)):
                record = {"step": step, "metric": by or "mean avg@k", "value": value, "metrics": dict(metrics)}
                # Weights and what they scored change places with the older ones at once: a kill pairs none wrongly.
                if self._processes.main:
                    shutil.rmtree(self._staged, ignore_errors=True)
                self.trainer.save_adapter(self._staged / "adapter")
                if self._processes.main:
                    weights = self._staged / "adapter" / WEIGHTS
                    record |= {"sha256": sha256_of(weights)} if weights.is_file() else {}  # a model has several files
                    write_text(self._staged / BEST, json.dumps(record, indent=2) + "\n")
                    replace_folder(self._staged, self._folder)

    def _best_so_far(self, step: int) -> float:
        """Of the steps before this one: a run that goes on from a checkpoint repeats those after it."""
        if not self._folder.exists() and (self._staged / BEST).is_file():  # a kill came while it took its place
            self._staged.rename(self._folder)
        try:
            record = read_best(self._folder)
        except FileNotFoundError:
            return float("-inf")
        except (OSError, ValueError) as error:
            warn("PRL303", "%s: %s; the best score so far is forgotten", self._folder / BEST, error)
            return float("-inf")
        return float(record["value"]) if record["step"] < step else float("-inf")


def task_metrics(task: str, groups: list[list[Sample]], scorer: str = MATH) -> Metrics:
    """What a step's log says of a task's completions."""
    found, name = score_samples(groups, scorer=scorer), f"eval/{task}"
    error = {} if found.stderr is None else {f"{name}/avg@{found.k}_stderr": found.stderr}
    return {
        f"{name}/avg@{found.k}": found.accuracy,
        **error,
        f"{name}/pass@{found.k}": found.pass_at[found.k],
        f"{name}/mean_tokens": found.mean_tokens,
        f"{name}/truncated": found.truncated,
    }


@contextmanager
def _named() -> Iterator[None]:
    """A mistake names the callback's argument."""
    try:
        yield
    except PerlError as error:
        raise error.moved(lambda where: f"BenchmarkScores({where})") from error
