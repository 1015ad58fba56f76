"""Everything about a run that can be known, and refused, before the base's weights are loaded.

Recipe -> Plan

Reads the data, counts what will be trained on an empty copy of the model, does the arithmetic of steps.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from perl.algorithms.estimators import ADVANTAGES
from perl.algorithms.overrides import counts
from perl.data import ProblemSet, load_problem_set
from perl.errors import MissingExtraError, ModelError, PerlError, RecipeError, raise_all
from perl.evaluation.scoring.protocol import Protocol
from perl.evaluation.tasks.questions import PreparedTask
from perl.methods.base_checks import check_on_quantised
from perl.methods.registry import METHODS, Method, served_rank
from perl.methods.settings import Adaptation, adaptation, continued_adaptation, resolved_settings
from perl.policy.attach import attach_adapter, continue_adapter, own_method
from perl.policy.critic import critic_parameters, critic_shapes, find_critic
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
from perl.recipe.optional_packages import SWITCHES, missing_package, missing_packages, tracker_mistakes
from perl.recipe.sections import ModelSection, PeftSection
from perl.rewards import Reward, resolve_rewards
from perl.rewards.process.model import read_process_config
from perl.rewards.process.reward import ProcessReward
from perl.rewards.resolve import judging_of
from perl.rewards.verifier import Judging
from perl.rollouts.engine import Form
from perl.rollouts.vllm.server_command import server_command
from perl.rollouts.vllm.version import check_engine
from perl.trainer.arguments.argument_checks import step_mistakes
from perl.trainer.arguments.config import PeftRLConfig
from perl.trainer.arguments.recipe_arguments import training_arguments
from perl.trainer.arguments.signal_checks import check_teacher, taught_alone
from perl.training.plan_checks import (
    asked_problems,
    check_rewards,
    check_teacher_prompts,
    prompt_tokens,
    steps_of,
    warn_of_data,
)
from perl.training.tasks import run_protocol, run_tasks


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
    critic_parameters: int = 0
    teacher: SavedAdapter | None = None

    @property
    def teacher_parameters(self) -> int | None:
        """Of the teacher's adapter; 0: the teacher is the base; None: no teacher."""
        if not self.recipe.teacher.acts:
            return None
        return 0 if self.teacher is None else sum(math.prod(shape) for shape in self.teacher.shapes.values())

    @property
    def judging(self) -> Judging | None:
        """How answers are compared with gold answers, in training and evaluation; None if they never are."""
        return judging_of(self.rewards) or (Judging() if self.tasks else None)

    @property
    def longest_text(self) -> int:
        """Tokens of the longest prompt with the longest completion, of training or of a score."""
        training = self.longest_prompt + self.arguments.max_completion_length
        return max([training, *(task.longest for task in self.tasks)])

    @property
    def form(self) -> Form:
        """In which vLLM gets the policy."""
        return "merged" if self.served_rank is None else "adapter"

    def server_command(self, port: int | str, *, on_cpu: bool, gpus: int = 1) -> str:
        """How a vLLM server for the run is started, with the environment variables that it needs.

        Args:
            port: That it listens on, or what stands for it.
            on_cpu: It has no GPU.
            gpus: Over which it splits the base.
        """
        return server_command(
            self.recipe.model,
            self.longest_text,
            port,
            on_cpu=on_cpu,
            form=self.form,
            rank=self.served_rank,
            adapters=1 + self.recipe.rollout.prefetch,  # those of rollouts that are sampled ahead, and the newest
            gpus=gpus,
        )


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
        raise_all(RecipeError, [*tracker_mistakes(recipe.train.get("report_to"), "train.report_to")])
        shared = recipe.engine.strategy == "zero2" and recipe.batch.world_size > 1
        of_strategy = missing_package("engine.strategy", SWITCHES["deepspeed"]) if shared else ()
        raise_all(MissingExtraError, [*missing_packages(recipe.train), *of_strategy])
        if engine_here:
            check_engine(recipe.rollout)
    checkpoints = str(recipe.output_dir / "checkpoints")  # another machine has a recipe's trackers or not
    arguments = training_arguments(recipe if runs_here else recipe.with_train(report_to=None), checkpoints)
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
    asked = asked_problems(problems, arguments)
    check_rewards(rewards, asked, problems, recipe)
    longest, mean = prompt_tokens(problems, tokenizer, empty.config, arguments)
    alone = taught_alone(arguments, rewarded=counts(r.weight for r in rewards), continued=saved is not None)
    same = alone and is_same(how, saved, teacher)
    check_teacher_prompts(recipe.teacher, asked, tokenizer, empty.config, arguments, same=same)
    protocol = run_protocol(recipe)
    solution = (judging_of(rewards) or Judging()).solution
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
        critic_parameters=_critic_that_fits(recipe, arguments, empty),
        teacher=teacher,
    )
    if arguments.vllm_max_model_length is None:
        arguments.vllm_max_model_length = plan.longest_text
    warn_of_data(problems, recipe, plan.tasks)
    return plan


def _check_arguments(arguments: PeftRLConfig) -> None:
    """Refuses a teacher where none can be, and settings of our step beside those that TRL's step is run for."""
    check_teacher(arguments)
    found = step_mistakes(arguments)
    fields = [one.where if one.where == "teacher" else f"train.{one.where}" for one in found]
    raise_all(RecipeError, [replace(one, where=where) for one, where in zip(found, fields, strict=True)])


def _adaptation(recipe: Recipe, arguments: PeftRLConfig, saved: SavedAdapter | None) -> Adaptation:
    """How the model is adapted; its method's usual rate goes into the arguments where no rate is asked for."""
    how = continued_adaptation(recipe.peft, saved.config, own_method(saved)) if saved else adaptation(recipe.peft)
    if not arguments.learning_rate_asked:
        arguments.learning_rate = how.method.learning_rate
    return how


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


def policy_without_weights(model: ModelSection, how: Adaptation, saved: SavedAdapter | None = None) -> torch.nn.Module:
    """A policy that trains what a method trains, on the same layers.

    Args:
        model: The base.
        how: The method and its config.
        saved: The adapter that is continued.

    Raises:
        PerlError: The adapter does not fit the model.
    """
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
