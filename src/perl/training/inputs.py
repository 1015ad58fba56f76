"""What a run reads before the base's weights: its base's config, adapter, teacher, problems, rewards and tasks.

Recipe, arguments -> Inputs
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from perl.algorithms.estimators import ADVANTAGES
from perl.data import ProblemSet, load_problem_set, render_prompts, thinking_arguments
from perl.errors import ModelError, PerlError, RecipeError
from perl.evaluation.scoring.protocol import Protocol, asked_facts, generation_settings
from perl.evaluation.scoring.results import is_held_out
from perl.evaluation.tasks.heldout import heldout_task
from perl.evaluation.tasks.own_tasks import ChosenTask, chosen_tasks, in_keys
from perl.evaluation.tasks.questions import PreparedTask, prepare_task
from perl.evaluation.tasks.task_data import load_task_data
from perl.methods.base_checks import check_on_quantised
from perl.methods.registry import METHODS, Method
from perl.methods.settings import Adaptation, adaptation, continued_adaptation
from perl.policy.attach import check_trainable, freeze_parts, own_method, shaped_adapter, shaped_saved_adapter
from perl.policy.critic import critic_parameters, critic_shapes, find_critic
from perl.policy.model import (
    check_quantisation,
    end_tokens,
    load_empty_base,
    load_tokenizer,
    total_parameters,
    trainable_parameters,
)
from perl.policy.quantised import has_bfloat16
from perl.policy.saved.adapter import SavedAdapter, find_adapter
from perl.policy.teacher import WHERE, check_base_is_kept, check_head, find_teacher
from perl.recipe import Recipe
from perl.recipe.eval_section import EvalSection
from perl.recipe.sections import ModelSection, PeftSection
from perl.rewards import Reward, resolve_rewards
from perl.rewards.process.model import read_process_config
from perl.rewards.process.reward import ProcessReward
from perl.rewards.resolve import judging_of
from perl.rewards.verifier import Judging
from perl.rollouts.agents.asked import Asking, asking_of
from perl.trainer.arguments.config import PeftRLConfig
from perl.types import Prompt


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What a run is made of, read without weights.

    Attributes:
        how: The method, and the config of its adapter.
        saved: The adapter that is continued, if one is.
        config: The base's.
        critic_parameters: Trained beside the adapter; 0: there is no critic.
        teacher: The adapter of the teacher, if it has one.
        template_arguments: Of the chat template, the switch of its thinking mode included; None: there are none.
        protocol: How base and adapter are scored.
        tasks: On what: the held-out problems and the benchmark tasks.
        asking: How prompts become conversations with tools; None: they are answered in one turn.
    """

    how: Adaptation
    saved: SavedAdapter | None
    config: PreTrainedConfig
    tokenizer: PreTrainedTokenizerBase
    trainable_parameters: int
    total_parameters: int
    critic_parameters: int
    teacher: SavedAdapter | None
    problems: ProblemSet
    template_arguments: Mapping[str, Any] | None
    rewards: list[Reward]
    protocol: Protocol
    tasks: tuple[PreparedTask, ...]
    asking: Asking | None

    def rendered(self, rows: Sequence[Mapping[str, Any]]) -> list[Prompt]:
        """Prompts as training asks them, in tokens; with tools, where there are any."""
        if self.asking is not None:
            return self.asking.rendered(rows)
        return render_prompts(rows, self.tokenizer, self.template_arguments)

    @property
    def method(self) -> Method:
        """The row of the table of methods."""
        return self.how.method

    @property
    def judging(self) -> Judging | None:
        """How answers are compared with gold answers, in training and evaluation; None if they never are."""
        return judging_of(self.rewards) or (Judging() if self.tasks else None)


def read_inputs(
    recipe: Recipe, arguments: PeftRLConfig, tokenizer: PreTrainedTokenizerBase | None = None, *, runs_here: bool = True
) -> Inputs:
    """Reads them, and refuses what does not fit together.

    Args:
        recipe: Of the run.
        arguments: Of its trainer.
        tokenizer: In the place of the base's, where that is not here.
        runs_here: False: on another machine, so that packages may be missing here.

    Raises:
        PerlError: Something cannot be read, or the model cannot carry the adapter.
    """
    model = recipe.model
    saved = find_adapter(recipe.peft.adapter, model.name) if recipe.peft.adapter else None
    how = continued_adaptation(recipe.peft, saved.config, own_method(saved)) if saved else adaptation(recipe.peft)
    if model.quantization is not None:
        check_on_quantised(how, model.quantization)  # only the adapter that is continued may tell
        if runs_here:
            check_quantisation(model, arguments.device)
        if model.dtype == "bfloat16" and not has_bfloat16(arguments.device):
            raise ModelError("this GPU has no bfloat16, and would emulate it", "model.dtype", "auto or float16")
    base = load_empty_base(model)
    total = total_parameters(base)
    policy = policy_without_weights(model, how, saved)
    trained, tokenizer, teacher = trainable_parameters(policy), tokenizer or load_tokenizer(model), None
    if recipe.teacher.acts:
        check_base_is_kept(policy)
    if recipe.teacher.adapter is not None:
        teacher = _teacher_that_fits(recipe.teacher.adapter, model, tokenizer)
    critic = 0
    if ADVANTAGES[arguments.advantage_estimator].critic:
        critic = critic_parameters(base, arguments.critic_rank)
        if arguments.critic_adapter is not None:
            shapes = critic_shapes(base, arguments.critic_rank)
            find_critic(arguments.critic_adapter, model.name).check_shapes(arguments.critic_rank, shapes)
    problems = load_problem_set(recipe.data, chat=tokenizer.chat_template is not None)
    first, hint = problems.train[0]["prompt"], "leave it out, or take a base with one"
    template_arguments = thinking_arguments(
        first, tokenizer, recipe.data.thinking, arguments.chat_template_kwargs, where="data.thinking", hint=hint
    )
    asking = _asking(recipe, problems, tokenizer, base.config, template_arguments)
    rewards = resolve_rewards(recipe.rewards, recipe.rollout, problems.own_names)
    for reward in rewards:
        if isinstance(reward.function, ProcessReward):
            read_process_config(reward.function.setting)
    solution = (judging_of(rewards) or Judging()).solution
    protocol, tasks = _scoring(recipe, problems, solution, tokenizer, base.config, template_arguments, asking)
    return Inputs(
        how=how,
        saved=saved,
        config=base.config,
        tokenizer=tokenizer,
        trainable_parameters=trained,
        total_parameters=total + trained if how.config else total,
        critic_parameters=critic,
        teacher=teacher,
        problems=problems,
        template_arguments=template_arguments or None,
        rewards=rewards,
        protocol=protocol,
        tasks=tasks,
        asking=asking,
    )


def _asking(
    recipe: Recipe,
    problems: ProblemSet,
    tokenizer: PreTrainedTokenizerBase,
    config: PreTrainedConfig,
    template_arguments: Mapping[str, Any],
) -> Asking | None:
    """Tools and environments held against the data and the base; None: there are none."""
    if not recipe.agent.acts:
        return None
    context = getattr(config.get_text_config(), "max_position_embeddings", None)
    asking = asking_of(recipe.agent, problems.own_names, tokenizer, template_arguments, context)
    if isinstance(problems.train[0]["prompt"], str):
        raise RecipeError("conversations need chat messages, and the prompts are plain text", "data.chat", "true")
    for rows in (problems.train, problems.heldout):
        asking.agent.check([] if rows is None else list(rows))
    hint = "def get_reward(self) of the environment, or a reward"
    if not recipe.rewards and not asking.rewards_itself:
        raise RecipeError("nothing rewards: there is no reward, and no environment has one", "rewards", hint)
    without = [kind.__name__ for kind in asking.agent.environments.values() if not hasattr(kind, "get_reward")]
    if not recipe.rewards and without:
        raise RecipeError(f"nothing rewards conversations in {', '.join(without)}", "rewards", hint)
    return asking


def policy_without_weights(model: ModelSection, how: Adaptation, saved: SavedAdapter | None = None) -> torch.nn.Module:
    """A policy that trains what a method trains, on the same layers.

    Args:
        model: The base.
        how: The method and its config.
        saved: The adapter that is continued.

    Raises:
        PerlError: The adapter does not fit the model.
    """
    alike = METHODS.get(how.method.counted_as)
    if alike is not None:
        names = {ours: getattr(how.config, how.method.arguments.get(ours, ours)) for ours in how.method.settings}
        targets = names.pop("target_modules", None)
        names["target_modules"] = sorted(targets) if isinstance(targets, set) else targets
        how, saved = adaptation(PeftSection(method=alike.name, **names)), None
    empty = load_empty_base(model)
    if how.config is None:
        return empty
    try:
        policy = shaped_saved_adapter(empty, saved) if saved else shaped_adapter(empty, how.config)
    except NotImplementedError:  # PEFT looks at the weights to set this one up: any will do to count
        policy = shaped_adapter(load_empty_base(model, torch.device("cpu")), how.config)
    freeze_parts(policy, how.method.frozen)
    check_trainable(policy)
    return policy


def _teacher_that_fits(name: str, model: ModelSection, tokenizer: PreTrainedTokenizerBase) -> SavedAdapter:
    """The teacher's adapter; refuses one not of the base's shapes, on its head, or that its weights cannot carry."""
    saved = find_teacher(name, model.name, tokenizer)
    how = Adaptation(own_method(saved), saved.config)
    try:
        if model.quantization is not None:
            check_on_quantised(how, model.quantization)
        check_head(policy_without_weights(model, how, saved), "the teacher's adapter", WHERE)
    except PerlError as error:
        raise error.moved(lambda where: WHERE if where.startswith("peft.") else where) from error
    return saved


def _scoring(
    recipe: Recipe,
    problems: ProblemSet,
    solution: str,
    tokenizer: PreTrainedTokenizerBase,
    config: PreTrainedConfig,
    template_arguments: Mapping[str, Any],
    conversations: Asking | None,
) -> tuple[Protocol, tuple[PreparedTask, ...]]:
    """How policies are scored, and on what: held-out problems with gold answers in a column, tasks of the recipe."""
    settings, heldout, name = recipe.eval, problems.heldout, problems.heldout_name
    protocol = protocol_of(settings, "recipe", recipe.rollout.max_completion_length, recipe.data.system_prompt)
    if not settings.enabled:
        return protocol, ()
    chosen, found = chosen_tasks(settings, "eval.tasks") if settings.tasks else [], list[PreparedTask]()
    asking = asked_facts(None, thinking=recipe.data.thinking)
    generation = generation_settings(recipe.model)
    ends = end_tokens(tokenizer, generation)
    judged = conversations is not None and conversations.rewards_itself
    if heldout is not None and name is not None and (judged or solution in heldout.column_names):
        for one in chosen:
            if one.task.name == name:
                raise RecipeError(f"{name} is held out, hence scored already", one.place, "leave it out")
        examples = [{**row, "solution": row.get(solution, "")} for row in heldout]
        if conversations is None:
            prompts = render_prompts(examples, tokenizer, template_arguments)
        else:
            prompts = conversations.rendered(examples)
        limit = settings.limit_of_heldout
        found.append(heldout_task(name, prompts, protocol, ends, limit, asking, conversations, list(heldout)))
    found += prepared_tasks(chosen, settings, tokenizer, protocol, ends, config, template_arguments, asking)
    return protocol, tuple(found)


def protocol_of(settings: EvalSection, preset: str, longest: int, system_prompt: str | None) -> Protocol:
    """How policies are scored; nothing comes from the base's generation settings, as in training.

    Args:
        settings: Say it.
        preset: Name of the protocol.
        longest: Tokens of a completion, where the settings do not say.
        system_prompt: Before every question.
    """
    return Protocol(
        preset=preset,
        temperature=settings.temperature,
        top_p=settings.top_p,
        max_new_tokens=settings.max_completion_length or longest,
        k=settings.k,
        seed=settings.seed,
        system_prompt=system_prompt,
    )


def prepared_tasks(
    chosen: Sequence[ChosenTask],
    settings: EvalSection,
    tokenizer: PreTrainedTokenizerBase,
    protocol: Protocol,
    ends: tuple[int, ...],
    config: PreTrainedConfig,
    template_arguments: Mapping[str, Any] | None,
    asking: Mapping[str, str] | None = None,
) -> list[PreparedTask]:
    """Tasks with their data and their prompts.

    Args:
        chosen: Of the section.
        settings: The section.
        tokenizer: The base's.
        protocol: How completions are drawn.
        ends: Tokens that end one.
        config: The base's.
        template_arguments: Of the chat template.
        asking: As of :func:`perl.evaluation.tasks.questions.prepare_task`.

    Raises:
        PerlError: A task's data is not there, or its prompts do not fit.
    """
    context = getattr(config.get_text_config(), "max_position_embeddings", None)
    folder, found = Path(settings.data).expanduser() if settings.data else None, []
    for one in chosen:
        with in_keys(one.place, one.place.partition("tasks[")[0]):
            data = load_task_data(one.task, folder, one.limit, one.few_shot, protocol.seed)
            limit = settings.scorer_timeout
            found.append(prepare_task(data, tokenizer, protocol, ends, context, template_arguments, asking, limit))
    return found


def held_out_here(task: PreparedTask) -> bool:
    """Whether a run's task is what the run itself holds out, and none that its recipe names."""
    return is_held_out(task.data.task.title) and task.data.task.path is None
