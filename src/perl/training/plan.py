"""Everything about a run that can be known, and refused, before the base's weights are loaded.

Recipe -> Plan

Reads the data, counts what will be trained on an empty copy of the model, does the arithmetic of steps.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from datasets import Dataset
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from perl.algorithms.estimators import ADVANTAGES
from perl.algorithms.unrewarded import counts
from perl.data import ProblemSet, load_problem_set, render_prompts
from perl.errors import DataError, MissingExtraError, Mistake, ModelError, PerlError, RecipeError, raise_all
from perl.evaluation.protocol import Protocol
from perl.evaluation.questions import PreparedTask
from perl.methods.on_quantised import check_on_quantised
from perl.methods.registry import METHODS, Method, served_rank
from perl.methods.settings import Adaptation, adaptation, continued_adaptation, resolved_settings
from perl.policy.attach import attach_adapter, continue_adapter, own_method
from perl.policy.critic import critic_parameters, critic_shapes
from perl.policy.critic_file import find_critic
from perl.policy.model import (
    check_quantisation,
    load_empty_base,
    load_tokenizer,
    total_parameters,
    trainable_parameters,
)
from perl.policy.quantised import has_bfloat16
from perl.policy.saved.adapter import SavedAdapter, find_adapter
from perl.policy.teacher import WHERE, check_base_is_kept, check_head, find_teacher, is_same
from perl.recipe import Recipe
from perl.recipe.optional_packages import missing_packages, tracker_mistakes
from perl.recipe.quantisations import in_few_bits
from perl.recipe.recipe import is_first_process
from perl.recipe.sections import ModelSection, PeftSection
from perl.rewards import Reward, resolve_rewards
from perl.rewards.custom import unsendable
from perl.rewards.process.model import read_process_config
from perl.rewards.process.reward import ProcessReward
from perl.rewards.resolve import GOLD, by_own_names
from perl.rewards.verifier import Judging, unreadable
from perl.rollouts.engine import Form
from perl.rollouts.vllm.version import check_engine
from perl.run.progress import live_line
from perl.run.warned import warn
from perl.trainer.argument_checks import of_our_step
from perl.trainer.config import PeftRLConfig
from perl.trainer.recipe_arguments import training_arguments
from perl.trainer.signal_checks import check_teacher, taught_alone
from perl.training.memory_estimate import MemoryEstimate, described, recipe_estimates
from perl.training.plan_text import algorithm_lines, critic_lines, prompt_lines, rollout_lines
from perl.training.prompt_checks import steps_of
from perl.training.tasks import run_protocol, run_tasks
from perl.training.teacher_fit import check_teacher_prompts

# A data set with more gold answers that cannot be read than this share is refused; fewer are logged, and masked out.
_MOST_UNREADABLE = 0.05
_ANSWERS_AT_A_TIME = 500

# Arguments that TRL hands to every reward function; all others are columns of the data set.
_ARGUMENTS_FROM_TRL = {"prompts", "completions", "completion_ids", "trainer_state", "environments"}
_ARGUMENTS_FROM_TRL |= {"log_extra", "log_metric"}

# What to do about an argument that no column can fill.
_HINTS = {"solution": "set data.train.columns.answer", "prompt": "it is called prompts, as in TRL"}


@dataclass(frozen=True)
class Plan:
    """What a run will do.

    Attributes:
        arguments: The trainer's, complete but for the folder.
        steps: Optimizer steps.
        longest_prompt: In tokens.
        mean_prompt: Of those to train on, in tokens.
        protocol: How base and adapter are scored.
        tasks: On what: the held-out problems and the benchmark tasks.
        method: The row of the table of methods.
        settings: The adapter's settings, defaults filled in.
        served_rank: Of the LoRA that vLLM gets after each step; None: it gets the weights that the adapter changes.
        memory: What it is estimated to need on GPUs of several sizes; empty if that is not known.
        critic_parameters: Trained beside the adapter; 0: there is no critic.
        teacher: The adapter of the teacher, if it has one.
    """

    recipe: Recipe
    arguments: PeftRLConfig
    problems: ProblemSet
    rewards: list[Reward]
    tokenizer: PreTrainedTokenizerBase
    steps: int
    longest_prompt: int
    mean_prompt: float
    protocol: Protocol
    tasks: tuple[PreparedTask, ...]
    method: Method
    settings: dict[str, Any]
    trainable_parameters: int
    total_parameters: int
    served_rank: int | None
    memory: list[MemoryEstimate]
    critic_parameters: int = 0
    teacher: SavedAdapter | None = None

    @property
    def teacher_parameters(self) -> int | None:
        """Of the teacher's adapter; 0: the teacher is the base; None: nobody teaches."""
        return _teacher_parameters(self.recipe, self.teacher)

    @property
    def judging(self) -> Judging | None:
        """How answers are compared with gold answers, in training and evaluation; None if they never are."""
        return _judging(self.rewards) or (Judging() if self.tasks else None)

    @property
    def longest_text(self) -> int:
        """Tokens of the longest prompt with the longest completion, of training or of a score."""
        training = self.longest_prompt + self.arguments.max_completion_length
        return max([training, *(task.longest for task in self.tasks)])

    @property
    def form(self) -> Form:
        """In which vLLM gets the policy."""
        return "merged" if self.served_rank is None else "adapter"

    def lines(self) -> Iterator[str]:
        """The plan for a person to read."""
        share = 100 * self.trainable_parameters / self.total_parameters
        heldout = len(self.problems.heldout) if self.problems.heldout is not None else 0
        settings = ", ".join(f"{name} {value}" for name, value in self.settings.items())
        base = self.total_parameters - (self.trainable_parameters if self.method.config else 0)
        quantization = self.recipe.model.quantization
        in_bits = f", base{in_few_bits(quantization)}" if quantization else ""
        yield f"model    {self.recipe.model.name}, {base:,} parameters{in_bits}"
        yield f"adapter  {self.method.name} ({settings})" if self.method.config else "adapter  none: the model itself"
        yield from algorithm_lines(self.recipe, self.arguments)
        yield f"trained  {self.trainable_parameters:,} parameters ({share:.2f} % of all)"
        yield from critic_lines(self.arguments, self.method, self.critic_parameters)
        yield f"data     {self.recipe.data.train.name}: {len(self.problems.train):,} problems, {heldout:,} held out"
        yield f"tokens   prompts up to {self.longest_prompt}, completions up to {self.arguments.max_completion_length}"
        yield from prompt_lines(self.recipe, self.arguments)
        yield from rollout_lines(self.recipe, self.served_rank)
        yield f"rewards  {', '.join(f'{r.name} x {r.weight:g}' for r in self.rewards) or 'none: the teacher alone'}"
        greedy = ADVANTAGES[self.arguments.advantage_estimator].writes_greedy
        more = f", and {self.recipe.batch.prompts_per_step} greedy completions" if greedy else ""
        yield f"batch    {self.recipe.batch}{more}"
        if self.recipe.batch.world_size > 1:
            yield f"strategy {self.recipe.engine.strategy}"
        completions = self.steps * self.recipe.batch.completions_per_step
        least = "at least " if self.recipe.prompts.refill else ""
        yield f"steps    {self.steps} ({least}{completions:,} completions in all)"
        if self.memory:
            yield f"memory   {described(self.memory)}"
        yield f"output   {self.recipe.output_dir}"


def make_plan(recipe: Recipe, *, runs_here: bool = True, engine_here: bool = True) -> Plan:
    """Checks a recipe against its data and its model.

    Args:
        recipe: Of the run.
        runs_here: False: on another machine, so that packages may be missing here.
        engine_here: False: what writes rollouts may be missing here.

    Raises:
        PerlError: Whatever is wrong, before any weights are loaded.
    """
    if runs_here:
        _check_packages(recipe)
        if engine_here:
            check_engine(recipe.rollout)
    checkpoints = str(recipe.output_dir / "checkpoints")
    arguments = training_arguments(recipe if runs_here else _untracked(recipe), checkpoints)
    _check_arguments(arguments)
    saved = find_adapter(recipe.peft.adapter, recipe.model.name) if recipe.peft.adapter else None
    how = _adaptation(recipe, arguments, saved)
    if recipe.model.quantization is not None:
        if runs_here:
            check_quantisation(recipe.model, arguments.device)
        _check_quantised(recipe, recipe.model.quantization, how, arguments)
    empty = load_empty_base(recipe.model)
    total = total_parameters(empty)
    policy = policy_without_weights(recipe.model, how, saved)
    trained = trainable_parameters(policy)
    tokenizer = load_tokenizer(recipe.model)
    teacher = _teacher_that_fits(recipe, policy, tokenizer)
    problems = load_problem_set(recipe.data, chat=tokenizer.chat_template is not None)
    rewards = resolve_rewards(recipe.rewards, recipe.rollout, problems.own_names)
    for reward in rewards:
        if isinstance(reward.function, ProcessReward):
            read_process_config(reward.function.setting)
    _check_template(problems, tokenizer)
    asked = _asked(problems, arguments)
    _check_rewards(rewards, asked, problems, recipe)
    longest, mean = _prompt_tokens(problems, tokenizer, empty.config, arguments)
    alone = taught_alone(arguments, rewarded=counts(r.weight for r in rewards), continued=saved is not None)
    same = alone and is_same(how, saved, teacher)
    check_teacher_prompts(recipe.teacher, asked, tokenizer, empty.config, arguments, same=same)
    protocol = run_protocol(recipe)
    solution = (_judging(rewards) or Judging()).solution
    critic = _critic_that_fits(recipe, arguments, empty)
    longest_row = longest + arguments.max_completion_length
    plan = Plan(
        recipe=recipe,
        arguments=arguments,
        problems=problems,
        rewards=rewards,
        tokenizer=tokenizer,
        steps=steps_of(problems.train, arguments, recipe),
        longest_prompt=longest,
        mean_prompt=mean,
        protocol=protocol,
        tasks=run_tasks(recipe, problems, solution, tokenizer, empty.config, protocol),
        method=how.method,
        settings=_settings(recipe, saved),
        trainable_parameters=trained,
        total_parameters=total + trained if how.config else total,
        served_rank=_served_rank(recipe, how),
        memory=recipe_estimates(
            recipe, arguments, empty.config, how.config, longest_row, critic, _teacher_parameters(recipe, teacher)
        ),
        critic_parameters=critic,
        teacher=teacher,
    )
    if arguments.vllm_max_model_length is None:
        arguments.vllm_max_model_length = plan.longest_text
    return plan


def _check_arguments(arguments: PeftRLConfig) -> None:
    """Refuses a teacher where none can be, and settings of our step beside those that TRL's step is run for."""
    check_teacher(arguments)
    found = of_our_step(arguments)
    fields = [one.where if one.where == "teacher" else f"train.{one.where}" for one in found]
    raise_all(RecipeError, [replace(one, where=where) for one, where in zip(found, fields, strict=True)])


def _adaptation(recipe: Recipe, arguments: PeftRLConfig, saved: SavedAdapter | None) -> Adaptation:
    """How the model is adapted; its method's usual rate goes into the arguments where no rate is asked for."""
    how = continued_adaptation(recipe.peft, saved.config, own_method(saved)) if saved else adaptation(recipe.peft)
    if not arguments.learning_rate_asked:
        arguments.learning_rate = how.method.learning_rate
    return how


def _check_rewards(rewards: list[Reward], asked: dict[str, Dataset], problems: ProblemSet, recipe: Recipe) -> None:
    """Refuses rewards that the data has no columns or answers for, and says which columns were taken."""
    for what, rows in asked.items():
        _check_rewards_fit(rewards, rows, what, problems.own_names)
    for line in (*problems.renamed, *_with_two_answers(rewards, problems, recipe)):
        warn("PRL314", "%s", line)
    _check_answers(rewards, problems, recipe)


def _check_packages(recipe: Recipe) -> None:
    """Refuses what needs a package that is not part of the core and not installed."""
    raise_all(RecipeError, [*tracker_mistakes(recipe.train.get("report_to"), "train.report_to")])
    raise_all(MissingExtraError, list(missing_packages(recipe.train)))


def _untracked(recipe: Recipe) -> Recipe:
    """The recipe without trackers, which another machine has or not."""
    train = {name: value for name, value in recipe.train.items() if name != "report_to"}
    return replace(recipe, train=MappingProxyType(train))


def _served_rank(recipe: Recipe, how: Adaptation) -> int | None:
    """The rank of the LoRA that vLLM gets, or None for weights; refuses an adapter that no LoRA is equal to."""
    rank = None if recipe.rollout.sync == "merged" or how.config is None else how.method.update_rank(how.config)
    served = served_rank(rank) if rank is not None else None
    if recipe.rollout.sync == "adapter" and served is None:
        what = f"the update of {how.method.name} is not a LoRA that vLLM serves"
        raise ModelError(what, "rollout.sync", "merged, or auto")
    if recipe.rollout.in_flight == "continue" and served is None:
        raise ModelError(f"continue needs a LoRA that vLLM serves: {how.method.name}", "rollout.in_flight", "finish")
    return served


def count_trained(model: ModelSection, how: Adaptation, saved: SavedAdapter | None = None) -> int:
    """Number of parameters that a method trains, counted on a model without weights.

    Args:
        model: The base.
        how: The method and its config.
        saved: The adapter that is continued.

    Raises:
        PerlError: The adapter does not fit the model.
    """
    return trainable_parameters(policy_without_weights(model, how, saved))


def policy_without_weights(model: ModelSection, how: Adaptation, saved: SavedAdapter | None = None) -> torch.nn.Module:
    """A policy that trains what a method trains, on the same layers; arguments and errors of :func:`count_trained`."""
    empty = load_empty_base(model)
    if how.config is None:
        return empty
    alike = METHODS.get(how.method.counted_as)
    if alike is not None:
        names = {ours: getattr(how.config, how.method.arguments.get(ours, ours)) for ours in how.method.settings}
        targets = names.pop("target_modules", None)
        names["target_modules"] = sorted(targets) if isinstance(targets, set) else targets
        return attach_adapter(empty, adaptation(PeftSection(method=alike.name, **names)))
    try:
        return continue_adapter(empty, saved, how) if saved else attach_adapter(empty, how)
    except NotImplementedError:  # PEFT looks at the weights to set this one up: any will do to count
        return attach_adapter(load_empty_base(model, torch.device("cpu")), how)


def _critic_that_fits(recipe: Recipe, arguments: PeftRLConfig, base: torch.nn.Module) -> int:
    """Number of parameters of the critic, 0 without one; refuses to start from one of another shape or base.

    The base is without weights.
    """
    if not ADVANTAGES[arguments.advantage_estimator].critic:
        return 0
    if arguments.critic_adapter is not None:
        shapes = critic_shapes(base, arguments.critic_rank)
        find_critic(arguments.critic_adapter, recipe.model.name).check_shapes(arguments.critic_rank, shapes)
    return critic_parameters(base, arguments.critic_rank)


def _teacher_that_fits(
    recipe: Recipe, policy: torch.nn.Module, tokenizer: PreTrainedTokenizerBase
) -> SavedAdapter | None:
    """The teacher's adapter; refuses one not of the base's shapes, on its head, or that a quantised base cannot carry.

    Also refuses a policy, here without weights, that leaves no base to teach.
    """
    if recipe.teacher.acts:
        check_base_is_kept(policy)
    if recipe.teacher.adapter is None:
        return None
    model, saved = recipe.model, find_teacher(recipe.teacher.adapter, recipe.model.name, tokenizer)
    how = Adaptation(own_method(saved), saved.config)
    try:
        if model.quantization is not None:
            check_on_quantised(how, model.quantization)
        check_head(policy_without_weights(model, how, saved), "the teacher's adapter", WHERE)
    except PerlError as error:
        raise error.moved(lambda where: WHERE if where.startswith("peft.") else where) from error
    return saved


def _teacher_parameters(recipe: Recipe, teacher: SavedAdapter | None) -> int | None:
    if not recipe.teacher.acts:
        return None
    return 0 if teacher is None else sum(math.prod(shape) for shape in teacher.shapes.values())


def _settings(recipe: Recipe, saved: SavedAdapter | None) -> dict[str, Any]:
    """The adapter's settings for a person to read."""
    if saved is None:
        return resolved_settings(recipe.peft)
    names = {"rank": "r", "alpha": "lora_alpha", "target_modules": "target_modules"}
    found = {ours: getattr(saved.config, theirs, None) for ours, theirs in names.items()}
    shown = {ours: sorted(value) if isinstance(value, set) else value for ours, value in found.items()}
    if saved.base_quantization is not None:
        shown["continued base loaded as"] = saved.base_quantization
    return {"continues": saved.name, **{ours: value for ours, value in shown.items() if value is not None}}


def _check_quantised(recipe: Recipe, quantization: str, how: Adaptation, arguments: PeftRLConfig) -> None:
    """Refuses what a quantised base cannot carry, also where only the adapter that is continued tells."""
    check_on_quantised(how, quantization)
    if recipe.model.dtype == "bfloat16" and not has_bfloat16(arguments.device):
        raise ModelError("this GPU has no bfloat16, and would emulate it", "model.dtype", "auto or float16")
    if recipe.rollout.capabilities.needs_servers and _served_rank(recipe, how) is None:
        what = f"{how.method.name} sends weights after each step, which servers of a quantised base do not take"
        raise ModelError(what, "peft.method", "lora, or rollout.backend: transformers")


def _check_template(problems: ProblemSet, tokenizer: PreTrainedTokenizerBase) -> None:
    """Messages need a chat template to become tokens."""
    for role, rows in (("train", problems.train), ("eval", problems.heldout)):
        if rows is not None and tokenizer.chat_template is None and not isinstance(rows[0]["prompt"], str):
            raise DataError(
                "prompts are chat messages, but the model has no chat template", f"data.{role}", "set data.chat: false"
            )


def _asked(problems: ProblemSet, arguments: PeftRLConfig) -> dict[str, Dataset]:
    """What the policy is asked and rewarded for, in training and between its steps, by what it is called."""
    evaluated = problems.heldout if arguments.eval_strategy != "no" else None
    return {"data": problems.train, **({} if evaluated is None else {"held-out data": evaluated})}


def _check_rewards_fit(rewards: list[Reward], rows: Dataset, what: str, own_names: Mapping[str, str]) -> None:
    """Every argument that a reward function insists on must be a column of the data, in a form that reaches it."""
    found: list[Mistake] = []
    known = (_ARGUMENTS_FROM_TRL | set(rows.column_names)) - {"prompt"}  # which TRL hands over as prompts
    for reward in rewards:
        where = f"rewards.{reward.name}"
        stored = dict.fromkeys(rows.column_names, "")
        own = by_own_names(stored, own_names) if reward.failures is not None else {}
        for name in reward.needs:
            if name not in known and name not in own:
                column = "an answer" if name == "solution" else f"the column {name!r}"
                hint = f"there are {', '.join(sorted(known & set(rows.column_names)))}; {where}.columns maps names"
                hint = _HINTS.get(name, hint)
                found.append(Mistake(f"needs {column}, which the {what} does not have", where, hint))
        if not reward.takes_all:
            hint = "TRL hands every column of the data to every reward"
            found.append(Mistake("the function must accept **kwargs", where, hint))
        unsent = unsendable(rows[0]) if reward.in_workers else None
        if unsent:
            found.append(Mistake(f"cannot be given to a worker process: {unsent}", where, "leave workers out"))
    raise_all(DataError, found)


def _with_two_answers(rewards: list[Reward], problems: ProblemSet, recipe: Recipe) -> Iterator[str]:
    """A line for each custom reward that asks for ``solution`` where that is not the gold answer."""
    if GOLD not in problems.own_names:
        return
    gold = recipe.data.train.columns.answer
    for reward in rewards:
        if reward.failures is not None and GOLD in reward.by_name:
            yield (
                f"rewards.{reward.name}: {GOLD} is the data set's column of that name; the gold answer, from {gold}, "
                f"is {'answer' if gold != 'answer' and 'answer' not in problems.train.column_names else gold}"
            )


def _check_answers(rewards: list[Reward], problems: ProblemSet, recipe: Recipe) -> None:
    """Gold answers that cannot be read are right only letter for letter: many of them are a mistake."""
    judging = _judging(rewards)
    sets = [("train", problems.train)] if judging is not None else []
    if problems.heldout is not None and recipe.eval.enabled:
        sets.append(("eval", problems.heldout))
    judging = judging or Judging()
    found = []
    for role, rows in sets:
        if judging.solution not in rows.column_names:  # of the training data it is checked as any other column
            found.append(Mistake("held-out problems need answers", f"data.{role}", "or set eval.enabled: false"))
        elif is_first_process():  # the others would find the same
            found += _unreadable_answers(rows[judging.solution], role, judging.workers)
    raise_all(DataError, found)


def _judging(rewards: list[Reward]) -> Judging | None:
    """How the first reward that judges answers does it."""
    return next((reward.judging for reward in rewards if reward.judging is not None), None)


def _unreadable_answers(golds: list[str | None], role: str, workers: int) -> list[Mistake]:
    """A mistake if there are many; a few are logged."""
    bad: list[int] = []
    with live_line(len(golds), "reading gold answers") as line:
        for start in range(0, len(golds), _ANSWERS_AT_A_TIME):
            part = golds[start : start + _ANSWERS_AT_A_TIME]
            bad += [start + position for position in unreadable(part, workers)]
            line.update(len(part))
    if not bad:
        return []
    what = f"{len(bad)} of {len(golds)} gold answers cannot be read, e.g. {str(golds[bad[0]])[:40]!r}"
    if len(bad) > _MOST_UNREADABLE * len(golds):
        hint = "`perl reward check RECIPE` lists them; drop those rows, or use a custom reward"
        return [Mistake(what, f"data.{role}", hint)]
    warn("PRL315", "data.%s: %s; right only letter for letter, else without a reward", role, what)
    return []


def _prompt_tokens(
    problems: ProblemSet, tokenizer: PreTrainedTokenizerBase, model_config: PreTrainedConfig, arguments: PeftRLConfig
) -> tuple[int, float]:
    """Of the longest prompt, and on average; refuses one that leaves no room for the completion in the context."""
    sets = [rows for rows in (problems.train, problems.heldout) if rows is not None]
    rendered = [render_prompts(list(rows), tokenizer, arguments.chat_template_kwargs) for rows in sets]
    lengths = [[len(prompt.token_ids) for prompt in prompts] for prompts in rendered]
    longest = max(max(of_set) for of_set in lengths)
    context = getattr(model_config.get_text_config(), "max_position_embeddings", None)
    if context is not None and longest + arguments.max_completion_length > context:
        raise ModelError(
            f"the longest prompt has {longest} tokens, with {arguments.max_completion_length} of completion that is "
            f"more than the model's {context}",
            "rollout.max_completion_length",
            f"at most {context - longest}" if context > longest else "shorten or drop the long prompts",
        )
    return longest, sum(lengths[0]) / len(lengths[0])
