"""All of a job's overrides, in the order in which a person would look for them.

Handover -> overrides, one a line, and what must be said beside them
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from perl.errors import Mistake, RecipeError, raise_all
from perl.launch.verl.adapter import adapter
from perl.launch.verl.can_go import refusals, stated
from perl.launch.verl.handover import Handover
from perl.launch.verl.hydra import FOLDER, override
from perl.launch.verl.job_files import BASE, CHECKPOINTS, EVAL, LOG, REWARDS, TRAIN
from perl.launch.verl.objective import Mapped, objective
from perl.launch.verl.schedule import schedule
from perl.sandbox import is_sandbox

_ACTOR, _ROLLOUT, _MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
_REF = "actor_rollout_ref.ref"
_TRACKERS = ("wandb", "mlflow", "swanlab", "tensorboard", "clearml", "trackio")
# Tokens of a pass at least, where the recipe does not say: verl's default.
_TOKENS = 16_384
# What verl must not be told otherwise: each of these is a trap that gives another training without a word.
_OURS: Mapping[str, str] = MappingProxyType(
    {
        "custom_reward_function": "verl reads reward.custom_reward_function only",
        "trainer.use_v1": "the older trainer is going away",
        "trainer.v1.trainer_mode": "an adapter that is trained asynchronously samples as it began (verl#7495)",
        "critic.model.lora_rank": "a LoRA as critic crashes",
        "model_engine": "engine.strategy says it",
    }
)
PLAIN_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""A chat template that gives a prompt's text as it is."""


@dataclass(frozen=True)
class Overrides:
    """What a job tells verl.

    Attributes:
        values: verl's key -> value.
        notes: What the text of a job says beside it: other numbers, and keys that have no meaning there.
    """

    values: Mapping[str, Any]
    notes: Sequence[str]

    @property
    def lines(self) -> list[str]:
        """As Hydra's command line takes them, one a line."""
        return [override(key, value) for key, value in self.values.items()]


def overrides(job: Handover) -> Overrides:
    """What verl is told.

    Args:
        job: The recipe with its data and its adapter.

    Raises:
        RecipeError: With everything that verl cannot do.
    """
    parts = [_data(job), _model(job), adapter(job), objective(job.arguments), schedule(job)]
    parts += [_rollout(job), _machine(job)]
    mistakes = [*refusals(job.recipe), *_values_refused(job), *(one for part in parts for one in part.mistakes)]
    raise_all(RecipeError, list({mistake.where: mistake for mistake in reversed(mistakes)}.values())[::-1])
    values: dict[str, Any] = {"model_engine": "megatron"} if job.megatron else {}
    for part in parts:
        values |= part.overrides
    values |= _critic(job, values) | _further(job, values)
    return Overrides(values, [*(note for part in parts for note in part.notes), *_notes(job), *stated(job.recipe)])


def _values_refused(job: Handover) -> list[Mistake]:
    """Values of keys that go with other values."""
    found, recipe, arguments = [], job.recipe, job.arguments
    if recipe.model.dtype not in ("auto", "bfloat16"):
        what = f"{recipe.model.dtype} cannot go to verl: it computes in bfloat16 over float32 weights"
        found.append(Mistake(what, "model.dtype", "auto or bfloat16"))
    if recipe.train.get("bf16") is False:
        found.append(Mistake("false cannot go to verl: it computes in bfloat16", "train.bf16", "leave it out"))
    reference = arguments.reference or "base"
    if reference.startswith("rolling") and arguments.beta:
        found.append(Mistake(f"{reference} cannot go to verl: its reference stays", "train.reference", "base"))
    if not recipe.rewards:
        found.append(Mistake("no rewards cannot go to verl: there is no teacher", "rewards", "name one"))
    return found


def _data(job: Handover) -> Mapped:
    arguments = job.arguments
    seed = arguments.seed if arguments.data_seed is None else arguments.data_seed
    mapped = Mapped(
        {
            "data.train_files": f"{FOLDER}/{TRAIN}",
            "data.val_files": f"{FOLDER}/{EVAL}",
            "data.max_prompt_length": job.longest_prompt,
            "data.max_response_length": arguments.max_completion_length,
            "data.truncation": "error",
            "data.filter_overlong_prompts": False,  # the longest prompt fits; verl would drop rows without a word
            "data.shuffle": bool(arguments.shuffle_dataset),
            "data.validation_shuffle": False,
            "data.seed": seed,
            "reward.custom_reward_function.path": f"{FOLDER}/{REWARDS}",
            "reward.custom_reward_function.name": "compute_score",
        }
    )
    if arguments.dataloader_num_workers:
        mapped.overrides["data.dataloader_num_workers"] = arguments.dataloader_num_workers
    for key, value in (arguments.chat_template_kwargs or {}).items():
        mapped.overrides[f"+data.apply_chat_template_kwargs.{key}"] = value
    if arguments.chat_template_kwargs and not job.chat:
        mapped.refuse("train.chat_template_kwargs", "the prompts are plain text", "leave it out")
    overlong = job.recipe.rewards.get("soft_overlong")
    if overlong is not None:
        _overlong(job, overlong, mapped)
    return mapped


def _overlong(job: Handover, setting: Any, mapped: Mapped) -> None:  # noqa: ANN401 (RewardSetting)
    """DAPO's soft overlong punishment is verl's own: its reward functions are not told how long a completion is."""
    longest = job.arguments.max_completion_length
    until = setting.args.get("max_completion_len", longest)
    cache = setting.args.get("soft_punish_cache")
    cache = until // 5 if cache is None else cache
    if until != longest or not cache or setting.weight < 0:
        what = f"verl's ends at the longest completion, {longest} tokens"
        mapped.refuse("rewards.soft_overlong", what, f"max_completion_len {longest}, a cache and a weight above 0")
        return
    mapped.overrides |= {
        "reward.reward_manager.name": "dapo",
        "+reward.reward_kwargs.max_resp_len": longest,
        "+reward.reward_kwargs.overlong_buffer_cfg": {
            "enable": True,
            "len": cache,
            "penalty_factor": setting.weight,
            "log": False,
        },
    }


def _model(job: Handover) -> Mapped:
    model, engine = job.recipe.model, job.recipe.engine
    # As the recipe says: what the plan decides is for a machine that is here.
    asked = [job.recipe.train.get(key) for key in ("gradient_checkpointing", "activation_checkpointing")]
    mapped = Mapped(
        {
            f"{_MODEL}.path": f"{FOLDER}/{BASE}" if is_sandbox(model.name) else model.name,
            f"{_MODEL}.use_shm": bool(engine.use_shm),
            f"{_MODEL}.enable_gradient_checkpointing": False not in asked,
        }
    )
    if model.attn_implementation is not None:
        packed = model.attn_implementation.startswith("flash")
        mapped.overrides |= {
            f"+{_MODEL}.override_config.attn_implementation": model.attn_implementation,
            f"{_MODEL}.use_remove_padding": packed,
        }
    if not job.chat:
        bos = job.tokenizer("a")["input_ids"][:1] == [job.tokenizer.bos_token_id]
        start = "{{ bos_token }}" if bos and job.tokenizer.bos_token_id is not None else ""
        mapped.overrides[f"{_MODEL}.custom_chat_template"] = start + PLAIN_TEMPLATE
    return mapped


def _rollout(job: Handover) -> Mapped:
    arguments, section, held = job.arguments, job.recipe.rollout, job.recipe.eval
    longest = job.longest_prompt + arguments.max_completion_length
    mapped = Mapped(
        {
            f"{_ROLLOUT}.name": job.rollout,
            f"{_ROLLOUT}.temperature": section.temperature,
            f"{_ROLLOUT}.top_p": section.top_p,
            f"{_ROLLOUT}.top_k": section.top_k or -1,
            f"{_ROLLOUT}.seed": arguments.seed,
            f"{_ROLLOUT}.dtype": "bfloat16",
            f"{_ROLLOUT}.calculate_log_probs": True,
            # The base comes from its files, and only the adapter from the trainer.
            f"{_ROLLOUT}.load_format": "safetensors",
            f"{_ROLLOUT}.tensor_model_parallel_size": arguments.vllm_tensor_parallel_size,
            f"{_ROLLOUT}.gpu_memory_utilization": arguments.vllm_gpu_memory_utilization,
            f"{_ROLLOUT}.max_model_len": max(longest, arguments.vllm_max_model_length or 0),
            f"{_ROLLOUT}.val_kwargs.n": arguments.num_generations_eval or held.k,
            f"{_ROLLOUT}.val_kwargs.temperature": held.temperature,
            f"{_ROLLOUT}.val_kwargs.top_p": held.top_p,
            f"{_ROLLOUT}.val_kwargs.do_sample": held.temperature > 0,
        }
    )
    if not job.megatron:  # gathers an adapter layer by layer, which needs the base in the engine already
        mapped.overrides[f"{_ROLLOUT}.layered_summon"] = True
    gpus, split = job.recipe.engine.gpus_in_all, arguments.vllm_tensor_parallel_size
    if gpus % split:
        what = f"{gpus} GPUs cannot be divided into engines of {split}"
        mapped.refuse("train.vllm_tensor_parallel_size", what, "a divisor of engine.nodes x engine.gpus")
    return mapped


def _machine(job: Handover) -> Mapped:
    """Who computes what, and where it is written."""
    arguments, engine, split = job.arguments, job.recipe.engine, job.parallel
    longest = job.longest_prompt + arguments.max_completion_length
    tokens = arguments.train_tokens_per_microbatch or max(_TOKENS, longest)
    mapped = Mapped(
        {
            f"{_ACTOR}.strategy": engine.strategy,
            f"{_ACTOR}.use_dynamic_bsz": True,
            f"{_ACTOR}.ppo_max_token_len_per_gpu": tokens,
            f"{_ACTOR}.data_loader_seed": arguments.seed,
            "algorithm.filter_groups.enable": job.recipe.prompts.refill > 0,
            "algorithm.filter_groups.metric": "reward",
        }
    )
    if tokens < longest:
        what = f"{tokens} tokens a pass are less than a prompt with its completion, {longest}"
        mapped.refuse("train.train_tokens_per_microbatch", what, f"{longest} or more")
    offload, told = bool(engine.offload), job.recipe.train
    if job.megatron:
        mapped.overrides |= _on_megatron(job, offload)
    else:
        mapped.overrides |= {
            f"{_ACTOR}.fsdp_config.model_dtype": "fp32",  # an adapter in bfloat16 would lose small steps
            f"{_ACTOR}.fsdp_config.seed": arguments.seed,
            f"{_ACTOR}.fsdp_config.fsdp_size": -1,
            f"{_ACTOR}.fsdp_config.ulysses_sequence_parallel_size": split.context,
            f"{_ACTOR}.fsdp_config.param_offload": offload,
            f"{_ACTOR}.fsdp_config.optimizer_offload": offload,
            f"{_REF}.fsdp_config.param_offload": offload,
            f"+{_ACTOR}.checkpoint.save_lora_only": True,
        }
    mapped.overrides |= {
        "trainer.nnodes": engine.nodes or 1,
        "trainer.n_gpus_per_node": engine.gpus or 1,
        "trainer.project_name": _name(told.get("project"), "perl"),
        "trainer.experiment_name": _name(told.get("run_name"), job.recipe.name),
        "trainer.logger": ["console", "file", *_trackers(told.get("report_to"), mapped)],
        "trainer.default_local_dir": f"{FOLDER}/{CHECKPOINTS}",
        "trainer.resume_mode": "auto",
        # Workers of a cluster have an environment of their own.
        "+ray_kwargs.ray_init.runtime_env.env_vars": {"VERL_FILE_LOGGER_PATH": f"{FOLDER}/{LOG}"},
    }
    return mapped


def _on_megatron(job: Handover, offload: bool) -> dict[str, Any]:
    split = job.parallel
    place = f"{_ACTOR}.megatron"
    return {
        f"{place}.use_mbridge": True,
        f"{place}.vanilla_mbridge": False,
        f"{place}.tensor_model_parallel_size": split.tensor,
        f"{place}.pipeline_model_parallel_size": split.pipeline,
        f"{place}.expert_model_parallel_size": split.expert,
        f"{place}.context_parallel_size": split.context,
        f"{place}.param_offload": offload,
        f"{place}.optimizer_offload": offload,
        f"{place}.seed": job.arguments.seed,
        # The adapter as PEFT's, which perl import-verl reads, is written with the model's.
        f"{_ACTOR}.checkpoint.save_contents": ["model", "optimizer", "extra", "hf_model"],
    }


def _name(given: str | None, usual: str) -> str:
    return usual if given in (None, "huggingface") else str(given)


def _trackers(report_to: Any, mapped: Mapped) -> list[str]:  # noqa: ANN401 (a name or a list)
    named = [report_to] if isinstance(report_to, str) else list(report_to or ())
    named = [name for name in named if name != "none"]
    for name in named:
        if name not in _TRACKERS:
            mapped.refuse("train.report_to", f"{name}: verl has no such tracker", ", ".join(_TRACKERS))
    return named


def _critic(job: Handover, values: Mapping[str, Any]) -> dict[str, Any]:
    """The critic's model, where there is one."""
    if job.arguments.advantage_estimator != "gae":
        return {}
    found = {
        "critic.strategy": job.recipe.engine.strategy,
        "critic.model.path": values[f"{_MODEL}.path"],
        "critic.model.lora_rank": 0,
        "critic.ppo_max_token_len_per_gpu": values[f"{_ACTOR}.ppo_max_token_len_per_gpu"],
        "critic.data_loader_seed": job.arguments.seed,
    }
    if job.recipe.engine.offload:
        place = "critic.megatron" if job.megatron else "critic.fsdp"
        found |= {f"{place}.param_offload": True, f"{place}.optimizer_offload": True}
    attention = f"+{_MODEL}.override_config.attn_implementation"
    if attention in values:
        found["+critic.model.override_config.attn_implementation"] = values[attention]
    return found


def _further(job: Handover, values: Mapping[str, Any]) -> dict[str, Any]:
    """The recipe's own overrides, which must not be of what the recipe says elsewhere."""
    found, mistakes = dict(job.recipe.engine.overrides or {}), []
    known = {key.lstrip("+") for key in values}
    for key in found:
        plain = key.lstrip("+~").rpartition("@")[2]  # GROUP@KEY chooses a file for all that is below KEY
        reason = next((why for ours, why in _OURS.items() if _within(plain, ours)), "")
        if any(_within(plain, one) for one in known):
            mistakes.append(Mistake(f"{key} is made of the recipe", "engine.overrides", "say it in the recipe"))
        elif reason:
            mistakes.append(Mistake(f"{key}: {reason}", "engine.overrides", "leave it out"))
    raise_all(RecipeError, mistakes)
    return found


def _within(one: str, other: str) -> bool:
    """Whether a key is another one, is below it, or has it below itself."""
    return one == other or one.startswith(f"{other}.") or other.startswith(f"{one}.")


def _notes(job: Handover) -> list[str]:
    """What everybody who hands a recipe over should know of."""
    in_float32 = "weights: the base is kept in float32 there, 4 bytes a parameter over all GPUs"
    notes = [] if job.megatron else [in_float32]
    notes.append("rewards: a completion that cannot be judged counts 0 there; here it is masked out of its group")
    if job.recipe.prompts.refill:
        notes.append("prompts: verl samples until every group of a batch has a signal, without prompts.refill's bound")
    if job.heldout is None:
        notes.append("held-out problems: there are none; verl wants a file, which is the first problem to train on")
    return notes
