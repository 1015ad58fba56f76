"""All that a job tells verl: the rows of ``keys.toml``, and here what takes more than a row.

Handover -> Settings, or everything that verl cannot do

A step of verl is a batch of rollouts: here ``steps_per_generation`` over ``gradient_accumulation_steps`` optimizer
steps, times ``num_iterations``. verl counts saving, testing, warm-up and the learning rate's schedule in those.
The definitions compared are ``perl.algorithms`` and verl 0.9.1's ``core_algos.py``.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from perl.algorithms.kl_place import KL_IN_REWARD, in_loss, off_reward
from perl.errors import Mistake, RecipeError, raise_all
from perl.methods.registry import ALL_LINEAR, LARGEST_RANK
from perl.policy.saved.adapter import SavedAdapter
from perl.recipe import Recipe
from perl.sandbox import is_sandbox
from perl.verl.job_folder import ADAPTER, BASE, FOLDER
from perl.verl.table import cannot_go, further_overrides, override, refusals, told, unused_keys

if TYPE_CHECKING:
    from datasets import Dataset
    from peft import PeftConfig
    from transformers import PreTrainedTokenizerBase

_ACTOR, _ROLLOUT, _MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
_NEVER = 1.0e9  # a bound that no ratio reaches
_CLIPPED = ("grpo", "dapo", "dr_grpo", "luspo")
"""Losses that verl has with a ratio for each token and, as gspo, for each sequence."""
_TRACKERS = ("wandb", "mlflow", "swanlab", "tensorboard", "clearml", "trackio")
# Tokens of a micro-batch at least, where the recipe does not say: verl's default.
_TOKENS = 16_384
# Arguments of a LoRA that verl has keys for; and those that must be as in a plain LoRA, for which it has none.
_KWARGS = ("target_parameters", "exclude_modules")
_PLAIN = (
    *("use_dora", "lora_bias", "bias", "modules_to_save", "rank_pattern", "alpha_pattern"),
    *("layers_to_transform", "trainable_token_indices", "layer_replication"),
)
_PLAIN_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@dataclass(frozen=True)
class Handover:
    """A recipe, and what is known of its data and model.

    Attributes:
        recipe: With ``engine.name: verl``.
        arguments: The trainer's, a complete ``PeftRLConfig``.
        train: Problems to train on, with ``prompt`` and, where there are answers, ``solution``.
        heldout: Held-out problems, those that are scored; None: there are none.
        tokenizer: The base's.
        adapter: PEFT's config of the adapter as it would train here.
        saved: The adapter that is continued; None: a new one.
        steps: Optimizer steps.
        longest_prompt: In tokens.
        own_names: Name in the data set -> where it is stored, of the columns that custom rewards get by it.
    """

    recipe: Recipe
    arguments: Any
    train: "Dataset"
    heldout: "Dataset | None"
    tokenizer: "PreTrainedTokenizerBase"
    adapter: "PeftConfig"
    saved: SavedAdapter | None
    steps: int
    longest_prompt: int
    own_names: Mapping[str, str] = field(default_factory=dict)

    @property
    def prompts_per_step(self) -> int:
        """Prompts of an optimizer step."""
        return self.recipe.batch.prompts_per_step

    @property
    def updates_per_batch(self) -> int:
        """Optimizer steps that one batch of rollouts is cut into, each seen ``num_iterations`` times."""
        accumulated = self.arguments.gradient_accumulation_steps or 1
        return int((self.arguments.steps_per_generation or accumulated) // accumulated)

    @property
    def steps_per_batch(self) -> int:
        """Optimizer steps of one batch of rollouts, which is one step of verl."""
        return self.updates_per_batch * int(self.arguments.num_iterations)

    @property
    def longest_row(self) -> int:
        """Tokens of the longest prompt with the longest completion."""
        return self.longest_prompt + int(self.arguments.max_completion_length)

    def setting(self, key: str) -> Any:  # noqa: ANN401 (whatever a setting is)
        """What the recipe has for a key; of ``train`` the complete arguments, of ``job`` what is known of the data."""
        section, *names = key.split(".")
        value: Any = {"job": self, "train": self.arguments}.get(section) or getattr(self.recipe, section)
        for name in names:
            value = getattr(value, name, None)
        return getattr(value, "value", value)  # of an enumeration


@dataclass(frozen=True)
class Settings:
    """What a job tells verl.

    Attributes:
        values: verl's key -> value.
        notes: What a person should know beside them: other numbers, and keys that mean nothing there.
    """

    values: Mapping[str, Any]
    notes: Sequence[str]

    @property
    def lines(self) -> list[str]:
        """As Hydra's command line takes them, one a line."""
        return [override(key, value) for key, value in self.values.items()]


@dataclass
class _Made:
    """What is made of a recipe, bit by bit."""

    values: dict[str, Any] = field(default_factory=dict)
    mistakes: list[Mistake] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def refuse(self, key: str, why: str, instead: str) -> None:
        self.mistakes.append(cannot_go(why, key, instead))

    def batches(self, job: Handover, steps: int, key: str) -> int:
        """Optimizer steps as steps of verl."""
        if steps % job.steps_per_batch:
            what = f"{steps} steps are no whole number of batches of rollouts, {job.steps_per_batch} steps each"
            self.refuse(key, what, f"a multiple of {job.steps_per_batch}")
        return steps // job.steps_per_batch


def settings(job: Handover) -> Settings:
    """What verl is told.

    Args:
        job: The recipe with its data and its adapter.

    Raises:
        RecipeError: With everything that verl cannot do.
    """
    made = _Made(mistakes=refusals(job.recipe))
    for part in (_data, _model, _adapter, _loss, _correction, _batches, _rate, _saving, _machine):
        part(job, made)
    arguments, fields = job.arguments, vars(job.arguments)
    conditions = {
        "always": True,
        "kl_in_loss": in_loss(fields),
        "kl_off_reward": off_reward(fields),
        "cosine": job.setting("train.lr_scheduler_type").startswith("cosine"),
        "dr_grpo": arguments.loss_type == "dr_grpo",
        "sapo": arguments.loss_type == "sapo",
        "critic": arguments.advantage_estimator == "gae",
    }
    holding = [name for name, holds in conditions.items() if holds]
    values, refused = told(job.setting, holding, made.values)
    first = {mistake.where: mistake for mistake in reversed(made.mistakes + refused)}  # of a key's, which says most
    raise_all(RecipeError, [*first.values()][::-1])
    values |= further_overrides(job.recipe)
    notes = [
        "weights: the base is kept in float32 there, 4 bytes a parameter over all GPUs",
        "rewards: a completion that cannot be judged counts 0 there; here it is masked out of its group",
    ]
    if job.recipe.prompts.refill:
        notes.append("prompts: verl samples until every group of a batch has a signal, without prompts.refill's bound")
    if job.heldout is None:
        notes.append("held-out problems: there are none; verl wants a file, which is the first problem to train on")
    if conditions["critic"]:
        what = "a whole model of the base's size, all of it trained, where ours is a LoRA on the policy's base"
        notes.append(f"critic: {what}")
    return Settings(values, [*made.notes, *notes, *unused_keys(job.recipe)])


def _data(job: Handover, made: _Made) -> None:
    arguments = job.arguments
    if arguments.dataloader_num_workers:
        made.values["data.dataloader_num_workers"] = arguments.dataloader_num_workers
    if arguments.chat_template_kwargs:
        made.values["+data.apply_chat_template_kwargs"] = arguments.chat_template_kwargs
        if isinstance(job.train[0]["prompt"], str):
            made.refuse("train.chat_template_kwargs", "the prompts are plain text", "leave it out")
    if not job.recipe.rewards:
        made.refuse("rewards", "there is no teacher, and nothing is rewarded", "name one")
    if (overlong := job.recipe.rewards.get("soft_overlong")) is None:
        return
    # DAPO's soft overlong punishment is verl's own: its reward functions are not told how long a completion is.
    longest = arguments.max_completion_length
    until, cache = overlong.args.get("max_completion_len", longest), overlong.args.get("soft_punish_cache")
    cache = until // 5 if cache is None else cache
    if until != longest or not cache or overlong.weight < 0:
        what = f"verl's ends at the longest completion, {longest} tokens"
        made.refuse("rewards.soft_overlong", what, f"max_completion_len {longest}, a cache and a weight above 0")
    buffer = {"enable": True, "len": cache, "penalty_factor": overlong.weight, "log": False}
    made.values |= {
        "reward.reward_manager.name": "dapo",
        "+reward.reward_kwargs.max_resp_len": longest,
        "+reward.reward_kwargs.overlong_buffer_cfg": buffer,
    }


def _model(job: Handover, made: _Made) -> None:
    model, train = job.recipe.model, job.recipe.train
    path = f"{FOLDER}/{BASE}" if is_sandbox(model.name) else model.name
    # As the recipe says: what the plan decides is for a machine that is here.
    asked = [train.get(key) for key in ("gradient_checkpointing", "activation_checkpointing")]
    made.values |= {
        f"{_MODEL}.path": path,
        "critic.model.path": path,
        f"{_MODEL}.enable_gradient_checkpointing": False not in asked,
    }
    if model.attn_implementation is not None:
        made.values[f"{_MODEL}.use_remove_padding"] = model.attn_implementation.startswith("flash")
    if train.get("bf16") is False:
        made.refuse("train.bf16", "false: it computes in bfloat16", "leave it out")
    if isinstance(job.train[0]["prompt"], str):
        bos = job.tokenizer.bos_token_id
        begins = bos is not None and job.tokenizer("a")["input_ids"][:1] == [bos]
        made.values[f"{_MODEL}.custom_chat_template"] = ("{{ bos_token }}" if begins else "") + _PLAIN_TEMPLATE


def _adapter(job: Handover, made: _Made) -> None:
    config: Any = job.adapter
    if any(mistake.where in ("peft.method", "peft.type") for mistake in made.mistakes):
        return  # refused by its name, which says more than what it is made of
    where, kind = "peft.adapter" if job.saved else "peft.kwargs", getattr(config.peft_type, "value", config.peft_type)
    if kind != "LORA" or (job.saved is not None and job.saved.start is not None):
        made.refuse(where, f"the adapter is no plain LoRA ({kind})", "perl export --as lora, then that folder")
        return
    for key in job.recipe.peft.kwargs:
        if key not in _KWARGS:
            made.refuse(f"peft.kwargs.{key}", "verl has no key for it", f"{' and '.join(_KWARGS)} go")
    odd = [key for key in _PLAIN if getattr(config, key, None) not in (None, False, "none", [], {})]
    if job.saved is not None and odd:
        made.refuse(where, f"{', '.join(odd)}: verl has no key for it", "a plain LoRA")
    rank, alpha = ranks(config)
    targets = config.target_modules
    merge = bool(job.recipe.engine.merge or job.recipe.rollout.sync == "merged")
    if rank > LARGEST_RANK and not merge:
        made.refuse("peft.rank", f"vLLM serves ranks up to {LARGEST_RANK}", "engine.merge: true")
    by_name = not isinstance(targets, str) or targets == ALL_LINEAR
    if job.recipe.engine.rollout == "sglang" and not (by_name or merge):
        made.refuse("peft.target_modules", "SGLang takes names, no expression", "a list of names")
    made.values |= {
        f"{_MODEL}.lora.merge": merge,
        f"{_MODEL}.lora_rank": rank,
        f"{_MODEL}.lora_alpha": alpha,
        f"{_MODEL}.target_modules": targets if isinstance(targets, str) else sorted(targets or ()),
    }
    further = {key: job.recipe.peft.kwargs.get(key) for key in _KWARGS} | {
        "lora_adapter_path": f"{FOLDER}/{ADAPTER}" if job.saved is not None else None
    }
    new = {"target_parameters": "+"}
    made.values |= {f"{new.get(key, '')}{_MODEL}.{key}": value for key, value in further.items() if value is not None}


def ranks(config: Any) -> tuple[int, float | int]:  # noqa: ANN401 (PEFT's LoraConfig)
    """Rank and alpha of the plain LoRA that an adapter is equal to; a whole alpha as a whole number.

    rsLoRA's scale is alpha / sqrt(r) = (alpha sqrt(r)) / r, a plain LoRA's with another alpha. verl's own tools lose
    the flag of rsLoRA, so that it goes as the plain LoRA that it is equal to.
    """
    alpha = config.lora_alpha * (math.sqrt(config.r) if config.use_rslora else 1.0)
    return config.r, int(alpha) if float(alpha).is_integer() else alpha


def _loss(job: Handover, made: _Made) -> None:
    """Loss and advantage: where a formula is the same up to a constant below, it is said; another one is refused."""
    arguments = job.arguments
    name, sequences = arguments.loss_type, arguments.importance_sampling_level == "sequence"
    if sequences and name in _CLIPPED:
        made.values[f"{_ACTOR}.policy_loss.loss_mode"] = "gspo"
        if arguments.delta is not None:
            made.refuse("train.delta", "verl has no dual clip for ratios of sequences", "null")
    elif sequences and name in ("cispo", "sapo"):
        what = f"verl's {name} has a ratio for each token"
        made.refuse("train.importance_sampling_level", what, "token, or loss_type: grpo")
    if name == "cispo":  # ours bounds the ratio itself, from above alone; verl clamps it to 1 - low, 1 + high
        high = arguments.epsilon if arguments.epsilon_high is None else arguments.epsilon_high
        bounds = {"clip_ratio": 1.0, "clip_ratio_low": 1.0, "clip_ratio_high": high - 1.0}
        made.values |= {f"{_ACTOR}.{key}": bound for key, bound in bounds.items()}
    estimator = arguments.advantage_estimator
    scale = {True: "group", False: "none"}.get(arguments.scale_rewards, arguments.scale_rewards)
    made.values["algorithm.norm_adv_by_std_in_grpo"] = scale != "none"
    if estimator == "group" and scale == "batch":
        what = "verl divides by the deviation of a group or not at all"
        made.refuse("train.scale_rewards", what, "group or none")
    if estimator == "group" and scale == "group":
        made.notes.append("advantages: verl adds 1e-6 to a group's deviation, here it is 1e-4")
    if estimator == "group_then_batch" or (estimator == "batch" and not off_reward(vars(arguments))):
        made.notes.append("advantages: mean and deviation of a batch weigh each completion by its tokens in verl")


def _correction(job: Handover, made: _Made) -> None:
    """What the KL divergence is to, and how the loss corrects for an engine that computes other numbers."""
    arguments, fields = job.arguments, vars(job.arguments)
    made.values |= {f"{_ACTOR}.use_kl_loss": in_loss(fields), "algorithm.use_kl_in_reward": off_reward(fields)}
    reference = arguments.reference or ("the adapter" if job.saved is not None else "base")
    others = reference.startswith("rolling") or (job.saved is not None and reference != "base")
    if arguments.beta and others:
        what = f"{reference}: verl's reference is the base, not the adapter that is continued"
        made.refuse("train.reference", what, "base, or train.beta: 0")
    if in_loss(fields) and arguments.use_bias_correction_kl:
        what = "verl's KL term is not multiplied by the ratio"
        made.refuse("train.use_bias_correction_kl", what, "false, as GRPO's paper has it")
    if off_reward(fields) and arguments.advantage_estimator in ("group", "opo", "group_then_batch"):
        what = "verl takes no such penalty off the reward with this advantage, or off the whole completion"
        made.refuse(f"train.{KL_IN_REWARD}", what, "false")
    place = "algorithm.rollout_correction"
    if not arguments.vllm_importance_sampling_correction:
        made.values[f"{place}.rollout_is"] = None
        return
    level, _, bound = arguments.vllm_importance_sampling_mode.partition("_")
    low, high = arguments.vllm_importance_sampling_clip_min, arguments.vllm_importance_sampling_clip_max
    limit: Any = _NEVER if high is None else high
    if bound == "truncate" and low is not None:
        what = "verl bounds ratios from above only where it moves them"
        made.refuse("train.vllm_importance_sampling_clip_min", what, "null")
    elif bound == "mask" and not (low and high):
        what = "verl sets ratios to 0 between two bounds only"
        made.refuse("train.vllm_importance_sampling_mode", what, f"{level}_truncate, or clip_min above 0")
    elif bound == "mask":
        limit = f"{low:g}_{high:g}"
    made.values |= {f"{place}.rollout_is": level, f"{place}.rollout_is_threshold": limit}


def _batches(job: Handover, made: _Made) -> None:
    arguments, gpus = job.arguments, job.recipe.engine.gpus_in_all
    accumulated = arguments.gradient_accumulation_steps or 1
    generation = arguments.steps_per_generation or accumulated
    if generation % accumulated:
        what = f"{generation} micro-batches of rollouts are no whole number of steps of {accumulated}"
        made.refuse("train.steps_per_generation", what, f"a multiple of {accumulated}")
        return
    prompts, problems = job.prompts_per_step * job.updates_per_batch, len(job.train)
    if problems < prompts:  # verl would divide by its 0 steps an epoch
        made.refuse("train.prompts_per_step", f"{problems} problems for {prompts} prompts a batch", f"{problems}")
        return
    if (completions := prompts * arguments.num_generations) % gpus:
        what = f"{completions} completions a batch cannot be divided over {gpus} GPUs"
        least = job.prompts_per_step * gpus // math.gcd(gpus, completions)
        made.refuse("train.prompts_per_step", what, f"{least}, or engine.gpus by which {completions} can be divided")
    if gpus % arguments.vllm_tensor_parallel_size:
        what = f"{gpus} GPUs cannot be divided into engines of {arguments.vllm_tensor_parallel_size}"
        made.refuse("train.vllm_tensor_parallel_size", what, "a divisor of engine.nodes x engine.gpus")
    steps = made.batches(job, job.steps, "train.max_steps")
    made.values |= {
        "data.train_batch_size": prompts,
        "trainer.total_training_steps": steps,
        "trainer.total_epochs": math.ceil(steps / (problems // prompts)),
    }


def _rate(job: Handover, made: _Made) -> None:
    arguments, place = job.arguments, f"{_ACTOR}.optim"
    name, kwargs = job.setting("train.lr_scheduler_type"), dict(arguments.lr_scheduler_kwargs or {})
    least = 0.0
    if name == "cosine_with_min_lr":
        least = kwargs.pop("min_lr_rate", None) or kwargs.pop("min_lr", 0.0) / arguments.learning_rate
    if kwargs:
        made.refuse("train.lr_scheduler_kwargs", f"{', '.join(kwargs)} is not read there", "min_lr_rate goes")
    warm = 0 if name == "constant" else _steps(arguments.warmup_steps, job)
    made.values |= {
        f"{place}.betas": [arguments.adam_beta1, arguments.adam_beta2],
        f"{place}.lr_warmup_steps": made.batches(job, warm, "train.warmup_steps"),
        f"{place}.min_lr_ratio": least,
    }
    if arguments.adam_epsilon != 1e-8:
        made.values[f"{place}.override_optimizer_config"] = {"eps": arguments.adam_epsilon}
    if job.steps_per_batch > 1 and (name.startswith("cosine") or warm):
        made.notes.append("rate: verl moves it once a batch of rollouts, not at each of its optimizer steps")
    waits = int(arguments.critic_warmup_steps)
    # verl's policy trains from the batch that it names, and the first is 1.
    batches = made.batches(job, waits, "train.critic_warmup_steps")
    made.values["trainer.critic_warmup"] = batches + 1 if waits else 0
    if waits and name != "constant":
        made.notes.append("rate: the policy's begins to move after the critic's warm-up in verl, here with it")


def _steps(given: float, job: Handover) -> int:
    """Optimizer steps, as transformers reads a number of them: below 1 a share of all, rounded up."""
    return math.ceil(job.steps * given) if 0 < given < 1 else int(given)


def _saving(job: Handover, made: _Made) -> None:
    """Held-out problems are scored before and after the training, as is done here, and in between if asked."""
    arguments, all_steps = job.arguments, math.ceil(job.steps / job.steps_per_batch)
    heldout = job.heldout is not None and job.recipe.eval.enabled
    save, test = all_steps, all_steps if heldout else -1  # verl saves at the last step in any case
    if job.setting("train.save_strategy") == "steps" and arguments.save_steps:
        save = max(1, made.batches(job, _steps(arguments.save_steps, job), "train.save_steps"))
    if job.setting("train.eval_strategy") == "steps":
        every = _steps(arguments.eval_steps or arguments.logging_steps, job)
        test = max(1, made.batches(job, every, "train.eval_steps"))
    made.values |= {
        "trainer.save_freq": save,
        "trainer.test_freq": test,
        "trainer.val_before_train": bool(heldout or arguments.eval_on_start),
    }


def _machine(job: Handover, made: _Made) -> None:
    """Sizes of rows and passes, and where the run is told of."""
    arguments, recipe = job.arguments, job.recipe
    tokens = arguments.train_tokens_per_microbatch or max(_TOKENS, job.longest_row)
    if tokens < job.longest_row:
        what = f"{tokens} tokens a micro-batch are less than a prompt with its completion, {job.longest_row}"
        made.refuse("train.train_tokens_per_microbatch", what, f"{job.longest_row} or more")
    report_to = recipe.train.get("report_to") or ()
    trackers = [one for one in ([report_to] if isinstance(report_to, str) else report_to) if one != "none"]
    for name in set(trackers) - set(_TRACKERS):
        made.refuse("train.report_to", f"{name}: verl has no such tracker", ", ".join(_TRACKERS))
    run_name = recipe.train.get("run_name")
    made.values |= {
        f"{_ACTOR}.ppo_max_token_len_per_gpu": tokens,
        "critic.ppo_max_token_len_per_gpu": tokens,
        f"{_ROLLOUT}.max_model_len": max(job.longest_row, arguments.vllm_max_model_length or 0),
        f"{_ROLLOUT}.top_k": recipe.rollout.top_k or -1,
        f"{_ROLLOUT}.val_kwargs.do_sample": recipe.eval.temperature > 0,
        "algorithm.filter_groups.enable": recipe.prompts.refill > 0,
        "trainer.project_name": recipe.train.get("project") or "perl",
        "trainer.experiment_name": run_name or recipe.name,
        "trainer.logger": ["console", "file", *trackers],
    }
