"""What of a recipe can be handed over to verl: one table of all keys, and one of the methods.

Recipe -> what is refused, by key; what has no meaning there, said in a line

Every key is in exactly one of :data:`MAPPED`, :data:`REFUSED` (where it is not at its default) and :data:`STATED`. What
of a mapped key's values verl has not is refused where it is mapped. Facts are those of verl 0.9.1. No torch here.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from perl.algorithms.named import ALGORITHMS, KEY
from perl.errors import Mistake
from perl.methods.registry import METHODS
from perl.recipe import Recipe
from perl.recipe.sections import FIELD_OF_SETTING, SECTIONS, RewardSetting
from perl.recipe.train_fields import REFUSED as REFUSED_FIELDS
from perl.recipe.train_fields import train_fields


@dataclass(frozen=True)
class Refused:
    """Why a setting cannot go, and the nearest thing that works."""

    why: str
    instead: str = "leave it out"


def plain_alpha(rank: int, alpha: float, *, rslora: bool) -> float:
    """The alpha of the plain LoRA that has an adapter's scale: alpha, or of rsLoRA alpha sqrt(rank).

    rsLoRA's scale is alpha / sqrt(r) = (alpha sqrt(r)) / r, a plain LoRA's with another alpha. verl's own tools lose
    the flag of rsLoRA, so that it goes as the plain LoRA that it is equal to.
    """
    return alpha * math.sqrt(rank) if rslora else alpha


GOES: Mapping[str, str] = MappingProxyType(
    {"lora": "as it is", "rslora": "as the plain LoRA with alpha x sqrt(rank), which is the same adapter"}
)
"""Methods that go, and how."""
_MERGES_ONLY_LORA = "verl can give its engine only what PEFT's LoRA layers are"
_OTHER_METHODS: Mapping[str, Refused] = MappingProxyType(
    {
        "dora": Refused("verl 0.9.1 serves no DoRA, and its tools cannot read the magnitudes back", "rslora"),
        "lora_plus": Refused("verl has one learning rate for all tensors of an adapter", "lora with a higher rate"),
        "lora_fa": Refused("verl trains both factors and has no optimizer that projects", "lora"),
        "full": Refused("this is for adapters; verl trains whole models by its own scripts", "lora of a high rank"),
        **dict.fromkeys(
            ("pissa", "milora", "olora", "milora_plus", "rlpo"),
            Refused("verl has no key for how an adapter starts", "lora"),
        ),
    }
)


def method_refusal(name: str) -> Refused | None:
    """Why a method cannot go; None: it does."""
    if name in GOES:
        return None
    if METHODS[name].hooks:
        return Refused("verl would not call what this method does between the steps", "lora")
    return _OTHER_METHODS.get(name, Refused(_MERGES_ONLY_LORA, "lora or rslora"))


_ROLLOUT, _ACTOR, _OPTIM = "actor_rollout_ref.rollout", "actor_rollout_ref.actor", "actor_rollout_ref.actor.optim"
_MODEL = "actor_rollout_ref.model"

MAPPED: Mapping[str, str] = MappingProxyType(
    {
        "model.name": f"{_MODEL}.path",
        "model.revision": "job.json; the same commit must be what verl loads",
        "model.dtype": f"{_ROLLOUT}.dtype; weights are kept in float32, passes run in bfloat16",
        "model.attn_implementation": f"{_MODEL}.override_config.attn_implementation",
        "peft.method": "see GOES",
        "peft.adapter": f"{_MODEL}.lora_adapter_path, with its rank and alpha",
        "peft.rank": f"{_MODEL}.lora_rank (Megatron: lora.rank)",
        "peft.alpha": f"{_MODEL}.lora_alpha (Megatron: lora.alpha)",
        "peft.target_modules": f"{_MODEL}.target_modules (Megatron: lora.target_modules)",
        "peft.kwargs": f"target_parameters and exclude_modules: {_MODEL}; any other is refused",
        **dict.fromkeys(
            (*(f"data.{one}.{key}" for one in ("train", "eval") for key in ("name", "subset", "split", "revision")),),
            "train.parquet, eval.parquet",
        ),
        **dict.fromkeys(("data.train.columns", "data.eval.columns", "data.train.limit", "data.eval.limit"), "the rows"),
        **dict.fromkeys(
            ("data.prompt_template", "data.system_prompt", "data.chat", "data.drop_overlap"), "the rows' prompts"
        ),
        "rollout.temperature": f"{_ROLLOUT}.temperature",
        "rollout.top_p": f"{_ROLLOUT}.top_p",
        "rollout.top_k": f"{_ROLLOUT}.top_k (0 is -1 there)",
        "rollout.max_completion_length": "data.max_response_length",
        **dict.fromkeys(("rollout.sync",), "engine.merge says the same: merged is lora.merge"),
        "eval.enabled": "trainer.val_before_train, trainer.test_freq",
        "eval.k": f"{_ROLLOUT}.val_kwargs.n",
        "eval.limit": "rows of eval.parquet",
        "eval.temperature": f"{_ROLLOUT}.val_kwargs.temperature",
        "eval.top_p": f"{_ROLLOUT}.val_kwargs.top_p",
        "engine.name": "who trains",
        "engine.strategy": f"{_ACTOR}.strategy",
        "engine.nodes": "trainer.nnodes",
        "engine.gpus": "trainer.n_gpus_per_node",
        "engine.rollout": f"{_ROLLOUT}.name",
        "engine.parallel": f"{_ACTOR}.megatron.*_parallel_size, fsdp_config.ulysses_sequence_parallel_size",
        "engine.offload": f"{_ACTOR}.fsdp_config.*_offload, {_ACTOR}.megatron.*_offload",
        "engine.merge": f"{_MODEL}.lora.merge",
        "engine.use_shm": f"{_MODEL}.use_shm",
        "engine.overrides": "as they are",
        "prompts.refill": "algorithm.filter_groups.enable, which has no bound",
        **dict.fromkeys(("rewards.weight", "rewards.args", "rewards.columns", "rewards.workers"), "rewards.json"),
        **dict.fromkeys(("rewards.timeout_seconds", "rewards.max_failures"), "rewards.json"),
        KEY: "the fields of train that it sets",
        "train.learning_rate": f"{_OPTIM}.lr",
        "train.weight_decay": f"{_OPTIM}.weight_decay",
        "train.adam_beta1": f"{_OPTIM}.betas",
        "train.adam_beta2": f"{_OPTIM}.betas",
        "train.adam_epsilon": f"{_OPTIM}.override_optimizer_config",
        "train.max_grad_norm": f"{_OPTIM}.clip_grad",
        "train.optim": f"{_OPTIM}.optimizer",
        "train.lr_scheduler_type": f"{_OPTIM}.lr_scheduler_type (Megatron: lr_decay_style)",
        "train.lr_scheduler_kwargs": f"{_OPTIM}.min_lr_ratio",
        "train.warmup_steps": f"{_OPTIM}.lr_warmup_steps",
        "train.max_steps": "trainer.total_training_steps",
        "train.num_train_epochs": "trainer.total_training_steps",
        "train.prompts_per_step": f"{_ACTOR}.ppo_mini_batch_size, data.train_batch_size",
        "train.num_generations": f"{_ROLLOUT}.n",
        "train.per_device_train_batch_size": "with the next two: the prompts of a step; passes are cut by tokens there",
        "train.gradient_accumulation_steps": "likewise",
        "train.steps_per_generation": "data.train_batch_size over ppo_mini_batch_size",
        "train.num_iterations": f"{_ACTOR}.ppo_epochs",
        "train.train_tokens_per_microbatch": f"{_ACTOR}.ppo_max_token_len_per_gpu",
        "train.gradient_checkpointing": f"{_MODEL}.enable_gradient_checkpointing",
        "train.activation_checkpointing": f"{_MODEL}.enable_gradient_checkpointing",
        "train.save_steps": "trainer.save_freq",
        "train.save_strategy": "trainer.save_freq",
        "train.save_total_limit": "trainer.max_actor_ckpt_to_keep",
        "train.eval_strategy": "trainer.test_freq",
        "train.eval_steps": "trainer.test_freq",
        "train.eval_on_start": "trainer.val_before_train",
        "train.num_generations_eval": f"{_ROLLOUT}.val_kwargs.n",
        "train.report_to": "trainer.logger",
        "train.run_name": "trainer.experiment_name",
        "train.project": "trainer.project_name",
        "train.seed": f"data.seed, {_ACTOR}.data_loader_seed, {_ROLLOUT}.seed, the engine's seed",
        "train.data_seed": "data.seed",
        "train.shuffle_dataset": "data.shuffle",
        "train.dataloader_num_workers": "data.dataloader_num_workers",
        "train.chat_template_kwargs": "data.apply_chat_template_kwargs",
        "train.vllm_gpu_memory_utilization": f"{_ROLLOUT}.gpu_memory_utilization",
        "train.vllm_tensor_parallel_size": f"{_ROLLOUT}.tensor_model_parallel_size",
        "train.vllm_max_model_length": f"{_ROLLOUT}.max_model_len",
        "train.beta": f"{_ACTOR}.kl_loss_coef or algorithm.kl_ctrl.kl_coef",
        "train.kl_estimator": f"{_ACTOR}.kl_loss_type",
        "train.kl_in_reward": "algorithm.use_kl_in_reward",
        "train.use_bias_correction_kl": "false only: verl's KL term is not multiplied by the ratio",
        "train.reference": "the base, which is verl's only one for an adapter",
        "train.bf16": "true only: passes run in bfloat16",
        "train.epsilon": f"{_ACTOR}.clip_ratio_low",
        "train.epsilon_high": f"{_ACTOR}.clip_ratio_high",
        "train.delta": f"{_ACTOR}.clip_ratio_c",
        "train.loss_type": f"{_ACTOR}.loss_agg_mode, policy_loss.loss_mode",
        "train.importance_sampling_level": f"{_ACTOR}.policy_loss.loss_mode",
        "train.sapo_temperature_pos": f"{_ACTOR}.tau_pos",
        "train.sapo_temperature_neg": f"{_ACTOR}.tau_neg",
        "train.entropy_weight": f"{_ACTOR}.entropy_coeff",
        "train.advantage_estimator": "algorithm.adv_estimator",
        "train.scale_rewards": "algorithm.norm_adv_by_std_in_grpo",
        "train.gae_gamma": "algorithm.gamma",
        "train.gae_lambda": "algorithm.lam",
        "train.value_clip": "critic.cliprange_value",
        "train.critic_learning_rate": "critic.optim.lr",
        "train.critic_warmup_steps": "trainer.critic_warmup",
        "train.vllm_importance_sampling_correction": "algorithm.rollout_correction.rollout_is",
        "train.vllm_importance_sampling_mode": "algorithm.rollout_correction.rollout_is",
        "train.vllm_importance_sampling_clip_max": "algorithm.rollout_correction.rollout_is_threshold",
        "train.vllm_importance_sampling_clip_min": "algorithm.rollout_correction.rollout_is_threshold",
    }
)
"""Key of a recipe -> where it goes."""

_IN_SLICES = "verl cuts no such thing out of a batch"
_OF_OTHER_LOSS = "of a loss that is refused"
_TEACHER = Refused("verl has no teacher that is the same base with another adapter or prompt", "train it here")
_ORDER = Refused("verl draws prompts at random, each once an epoch", "prompts.refill goes")
_DTYPE = Refused("verl computes in bfloat16 over float32 weights", "leave it out")
_OWN_WAY = Refused("another way to share the work than verl's", "engine.strategy: fsdp2, fsdp or megatron")
_LOOP = Refused("verl's training loop has no such setting")
_COMPILED = Refused("verl compiles by settings of its own", "engine.overrides")

REFUSED: Mapping[str, Refused] = MappingProxyType(
    {
        "model.quantization": Refused("verl trains adapters on bases in full precision", "null, or train it here"),
        "peft.type": Refused("verl makes PEFT's LoRA and nothing else", "peft.method: lora"),
        "peft.dropout": Refused("verl has no key for LoRA dropout", "0, its default"),
        "rollout.min_p": Refused("verl hands min_p to no engine", "rollout.top_p"),
        "rollout.repetition_penalty": Refused("verl samples with a penalty of 1.0, always", "1.0"),
        "rollout.servers": Refused("verl starts its own engines", "engine.rollout and engine.gpus"),
        "rollout.prefetch": Refused(
            "verl's asynchronous trainer samples with the adapter as it began (verl#7495)", "0"
        ),
        "rollout.max_staleness": Refused("rollouts of verl's synchronous trainer are never older than a batch"),
        "rollout.in_flight": Refused("verl's synchronous trainer finishes rollouts before a step", "finish"),
        "eval.every": Refused("verl scores no benchmark tasks in between", "train.eval_steps, for held-out problems"),
        "eval.best": Refused("verl keeps no best adapter", "score checkpoints after perl import-verl"),
        **dict.fromkeys(("teacher.adapter", "teacher.hint", "teacher.system_prompt"), _TEACHER),
        **dict.fromkeys(("teacher.weight", "teacher.top_k"), _TEACHER),
        **dict.fromkeys(
            ("prompts.memory", "prompts.explore", "prompts.floor", "prompts.curriculum"),
            _ORDER,
        ),
        **dict.fromkeys(("prompts.curriculum_start", "prompts.curriculum_until"), _ORDER),
        "alarms.stop": Refused("nobody watches the signs of a run in verl", "perl import-verl, then perl report"),
        "hub.push": Refused("verl pushes nothing", "perl push, after perl import-verl"),
        **dict.fromkeys(("engine.address", "engine.restarts", "engine.storage"), Refused("of engine.name: ray")),
        **dict.fromkeys(
            ("engine.device", "engine.threads", "engine.processes"), Refused("of this package's trainer", "engine.gpus")
        ),
        "train.mask_truncated_completions": Refused(
            "verl takes every completion into the loss", "false, with rewards.soft_overlong against long ones"
        ),
        "train.multi_objective_aggregation": Refused("the reward is one number there", "sum_then_normalize"),
        "train.top_entropy_quantile": Refused(_IN_SLICES, "1.0"),
        "train.off_policy_mask_threshold": Refused("verl's rejection masks by other numbers", "null"),
        "train.entropy_coef": Refused("it is TRL's bonus", "train.entropy_weight"),
        "train.use_adaptive_entropy": Refused("verl's entropy bonus is constant", "train.entropy_weight"),
        **dict.fromkeys(
            (f"train.entropy_{key}" for key in ("coef_min", "coef_max", "coef_delta", "target")),
            Refused("verl's entropy bonus is constant", "train.entropy_weight"),
        ),
        **dict.fromkeys(
            (f"train.vespo_{key}" for key in ("k_pos", "lambda_pos", "k_neg", "lambda_neg")), Refused(_OF_OTHER_LOSS)
        ),
        **dict.fromkeys(
            (f"train.{key}" for key in ("dppo_divergence", "dppo_threshold", "cov_fraction", "cov_low", "cov_high")),
            Refused(_OF_OTHER_LOSS),
        ),
        "train.cov_kl_weight": Refused(_OF_OTHER_LOSS),
        "train.critic_adapter": Refused("verl's critic is a whole model, which starts from the base"),
        "train.critic_rank": Refused("verl's critic is a whole model: a LoRA crashes there", "its default"),
        "train.process_reward_weight": Refused("a process reward holds a model, and verl's workers none of ours", "0"),
        "train.process_reward_kwargs": Refused("a process reward holds a model", "null"),
        "train.generation_batch_size": Refused("say it as prompts", "train.prompts_per_step"),
        "train.generation_kwargs": Refused("verl hands temperature, top_p and top_k to its engine, no more"),
        "train.vllm_structured_outputs_regex": Refused("verl's engines write freely"),
        "train.max_tool_calling_iterations": Refused("tools are verl's own there", "engine.overrides"),
        "train.train_sampling_strategy": Refused("verl shuffles or takes rows as they come", "train.shuffle_dataset"),
        **dict.fromkeys(("train.fp16", "train.tf32", "train.bf16_full_eval", "train.fp16_full_eval"), _DTYPE),
        "train.cast_lm_head_to_fp32": _DTYPE,
        **dict.fromkeys(("train.fsdp", "train.fsdp_config", "train.deepspeed", "train.parallelism_config"), _OWN_WAY),
        "train.accelerator_config": _OWN_WAY,
        **dict.fromkeys(("train.torch_compile", "train.torch_compile_backend", "train.torch_compile_mode"), _COMPILED),
        **dict.fromkeys(("train.use_liger_kernel", "train.liger_kernel_config", "train.compile_layers"), _COMPILED),
        **dict.fromkeys(("train.optim_args", "train.optim_target_modules"), Refused("verl's optimizer is AdamW")),
        **dict.fromkeys(("train.label_smoothing_factor", "train.neftune_noise_alpha", "train.disable_dropout"), _LOOP),
        **dict.fromkeys(("train.router_aux_loss_coef", "train.full_determinism", "train.eval_delay"), _LOOP),
        **dict.fromkeys(
            ("train.load_best_model_at_end", "train.metric_for_best_model", "train.greater_is_better"), _LOOP
        ),
        **dict.fromkeys(("train.activation_checkpointing_kwargs", "train.gradient_checkpointing_kwargs"), _LOOP),
        "train.ref_model_mixup_alpha": Refused("verl's reference is the base", "train.reference: base"),
        "train.ref_model_sync_steps": Refused("verl's reference is the base", "train.reference: base"),
        "train.vllm_importance_sampling_cap": Refused("an old name", "train.vllm_importance_sampling_clip_max"),
        "train.output_dir": Refused("the job's folder is", "-o DIR"),
        "train.enable_jit_checkpoint": _LOOP,
    }
)
"""Key of a recipe -> why it is refused where it is not at its default."""

_HERE = "it is about this package's own trainer"
_GROUPS: Mapping[str, str] = MappingProxyType(
    {
        "verl starts its own engines": "rollout.backend rollout.server_timeout rollout.sync_folder "
        "rollout.sync_folder_on_servers train.vllm_model_impl train.vllm_enable_sleep_mode train.vllm_group_port "
        "train.cache_implementation train.use_transformers_continuous_batching "
        "train.transformers_continuous_batching_config train.use_transformers_paged train.ds3_gather_for_generation",
        "verl proves no engine before it trains; it logs rollout_probs_diff": "rollout.check_every rollout.tolerance",
        "perl eval scores as the recipe says, after perl import-verl": "eval.max_completion_length eval.tasks "
        "eval.scorer_timeout eval.data",
        "verl's validation draws by the seed of its engine, and writes all at once": "eval.seed eval.batch_size "
        "train.per_device_eval_batch_size train.eval_accumulation_steps train.eval_use_gather_object "
        "train.eval_do_concat_batches train.prediction_loss_only train.batch_eval_metrics train.include_for_metrics "
        "train.label_names",
        "perl push sends the adapter, after perl import-verl": "hub.repo_id hub.private train.hub_private_repo "
        "train.hub_model_id train.hub_strategy train.hub_always_push train.hub_revision "
        "train.log_completions_hub_repo",
        "verl logs every step, to verl_metrics.jsonl": "train.logging_strategy train.logging_steps "
        "train.logging_first_step train.logging_nan_inf_filter train.log_on_each_node train.log_level "
        "train.log_level_replica train.include_num_input_tokens_seen train.log_completions train.log_multimodal "
        "train.num_completions_to_print train.log_unique_prompts train.trackio_space_id train.trackio_bucket_id "
        "train.trackio_static_space_id train.flat_reward_steps train.debug train.skip_memory_metrics",
        "how a step is computed is verl's own way, of the same loss": "train.padding_free train.skip_zero_advantage "
        "train.reuse_old_log_probs train.share_prompts train.fused_lora train.fused_head train.use_cache "
        "train.pad_to_multiple_of train.average_tokens_across_devices train.torch_empty_cache_steps",
        "perl train starts verl with it": "engine.python",
        _HERE: "train.dataloader_drop_last train.dataloader_pin_memory train.dataloader_persistent_workers "
        "train.dataloader_prefetch_factor train.dataloader_multiprocessing_context train.dataloader_in_order "
        "train.length_column_name train.ddp_find_unused_parameters train.ddp_bucket_cap_mb "
        "train.ddp_broadcast_buffers train.ddp_static_graph train.ddp_backend train.ddp_timeout train.local_rank "
        "train.do_train train.do_eval train.do_predict train.save_on_each_node train.ignore_data_skip "
        "train.restore_callback_states_from_checkpoint",
    }
)
STATED: Mapping[str, str] = MappingProxyType({key: why for why, keys in _GROUPS.items() for key in keys.split()})
"""Key of a recipe -> why it has no meaning in verl."""


def all_keys() -> list[str]:
    """Every key that a recipe may hold, as ``section.key``; of data sets and rewards those of each one."""
    keys = [KEY]
    for section, model in SECTIONS.items():
        for name in model.model_fields:
            if (section, name) in (("data", "train"), ("data", "eval")):
                source = SECTIONS["data"].model_fields["train"].annotation
                keys += [f"data.{name}.{key}" for key in getattr(source, "model_fields", ())]
            else:
                keys.append(f"{section}.{name}")
    keys += [f"rewards.{name}" for name in RewardSetting.model_fields]
    elsewhere = {*FIELD_OF_SETTING.values(), *REFUSED_FIELDS, KEY}
    return keys + [f"train.{name}" for name in train_fields() if name not in elsewhere]


def refusals(recipe: Recipe) -> list[Mistake]:
    """What of a recipe cannot go at all, each with the reason and the nearest thing that works."""
    found = []
    for key, value in _written(recipe):
        if key in REFUSED:
            what = f"{_shown(value)} cannot go to verl: {REFUSED[key].why}{_set_by(recipe, key)}"
            found.append(Mistake(what, key, REFUSED[key].instead))
    refused = method_refusal(recipe.peft.method) if recipe.peft.type is None else None
    if refused is not None and recipe.peft.adapter is None:
        what = f"{recipe.peft.method} cannot go to verl: {refused.why}"
        found.append(Mistake(what, "peft.method", refused.instead))
    return found


def stated(recipe: Recipe) -> list[str]:
    """A line for each key that is set and has no meaning in verl."""
    return [f"{key}: nothing reads it there: {STATED[key]}" for key, _ in _written(recipe) if key in STATED]


def _written(recipe: Recipe) -> Iterator[tuple[str, Any]]:
    """The keys that are not at their defaults, with their values."""
    for section, model in SECTIONS.items():
        values = getattr(recipe, section)
        for name, field in model.model_fields.items():
            default = field.get_default(call_default_factory=True)
            if getattr(values, name) != default:
                yield f"{section}.{name}", getattr(values, name)
    fields = train_fields()
    for name, value in recipe.train.items():
        if name in fields and (fields[name].computed or value != fields[name].default):
            yield f"train.{name}", value


def _set_by(recipe: Recipe, key: str) -> str:
    """Which algorithm's name has set it, if it was that."""
    row = ALGORITHMS.get(recipe.algorithm or "")
    name = key.removeprefix("train.")
    named = row is not None and name in row.settings and row.settings[name] == recipe.train.get(name)
    return f" (algorithm: {recipe.algorithm} sets it)" if named else ""


def _shown(value: object) -> str:
    text = {True: "true", False: "false"}.get(value) if isinstance(value, bool) else None
    return text or f"{value!r:.40}"
