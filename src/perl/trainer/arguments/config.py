"""PeftRLConfig: TRL's GRPOConfig plus the adapter, the batch in a person's terms, and defaults that fit adapters.

Recipe -> PeftRLConfig, and inside it fields -> derived fields. Knows nothing of models or data.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar, Unpack

import torch
from trl import GRPOConfig

from perl.algorithms.train_fields import Rules
from perl.errors import RecipeError, did_you_mean, raise_all
from perl.hub.gate import without_secrets
from perl.methods.registry import METHODS
from perl.recipe.agent_section import AgentSection
from perl.recipe.engine_section import processes_of_copy
from perl.recipe.quantisations import QUANTIZATIONS
from perl.recipe.recipe import processes_of_node, world_size
from perl.recipe.rollout_section import ENGINES, OF_TRL, RolloutSection, capabilities
from perl.recipe.section import Section
from perl.recipe.sections import (
    FIELD_OF_SETTING,
    STRATEGIES,
    EngineSection,
    ModelSection,
    PeftSection,
    PromptsSection,
    TeacherSection,
)
from perl.run.devices import accelerator
from perl.run.launched import adopt_launcher, taken_over
from perl.trainer.arguments.argument_checks import (
    algorithm_mistakes,
    check_enumerations,
    check_sampling,
    check_staleness,
    check_trackers,
    check_types,
    section_of_arguments,
)
from perl.trainer.arguments.derived_fields import (
    NUMBERS,
    apply_algorithm,
    completions_at_once,
    derive_batch,
    forget_derived,
    given_fields,
    note_derived,
)
from perl.trainer.arguments.shown_to_trl import for_arguments

_S = TypeVar("_S", bound=Section)


def own(default: Any, text: str, **_: Unpack[Rules]) -> Any:  # noqa: ANN401 (a dataclass field)
    """A field of ours: all that is known of it stands in its line, which :mod:`perl.algorithms.train_fields` reads.

    Args:
        default: A constant.
        text: What it is, for a person.
        _: Bounds and the like.
    """
    return field(default=default, metadata={"help": text})


def _setting(name: str, section: type[Section] = PeftSection) -> Any:  # noqa: ANN401 (a dataclass field)
    """A field that mirrors a setting of a recipe's section: same default, same sentence."""
    setting = section.model_fields[name]
    return field(default=setting.default, metadata={"help": setting.description})


@dataclass
class PeftRLConfig(GRPOConfig):
    """Arguments of :class:`perl.PeftGRPOTrainer`: every argument of TRL's ``GRPOConfig``, and these.

    Without a ``peft_config`` argument the trainer builds the adapter from the ``peft_*`` fields, which are the
    recipe's ``peft`` section under another name (``perl methods`` lists the methods).

    Seven defaults differ from TRL's, because an adapter is trained:

    * ``learning_rate`` is the method's usual one, 1e-5 for LoRA, instead of 1e-6: an adapter wants about ten times the
      rate of full fine-tuning (Schulman et al. 2025, "LoRA Without Regret").
    * ``logging_steps`` 1 instead of 10, ``save_steps`` 50 instead of 500: a step takes long and an adapter is small.
    * ``bf16``, ``gradient_checkpointing`` and ``dataloader_pin_memory`` are off on a CPU unless they are asked for.
    * ``vllm_importance_sampling_mode`` is ``token_truncate``: the product of thousands of ratios, which TRL's
      ``sequence_mask`` looks at, leaves its bounds however close the engine is, and long completions would not count.

    Raises:
        perl.errors.RecipeError: An argument is impossible, or two contradict each other; names them, and the nearest
            word where there is none of that name.
    """

    learning_rate: float | None = own(None, "The initial learning rate. None: the method's usual one, 1e-5 for LoRA.")
    logging_steps: float = own(1, "Log every X optimizer steps.")
    save_steps: float = own(50, "Save a checkpoint every X optimizer steps.")
    gradient_checkpointing: bool | None = own(
        None, "Recompute activations in the backward pass. None: if they would not fit otherwise."
    )
    dataloader_pin_memory: bool | None = own(None, "Pin memory in data loaders. None: not on a CPU.")
    per_device_train_batch_size: int | None = own(
        None, "Rows in one forward pass. None: 8, or what prompts_per_step leaves."
    )
    gradient_accumulation_steps: int | None = own(
        None, "Forward passes in one optimizer step. None: 1, or as prompts_per_step needs."
    )
    prompts_per_step: int | None = own(
        None, "Different prompts in one optimizer step; the other batch numbers follow.", ge=1
    )
    strategy: str = _setting("strategy", EngineSection)
    shards: str = _setting("shards", EngineSection)
    quantization: str | None = _setting("quantization", ModelSection)
    peft_method: str = _setting("method")
    peft_rank: int | None = _setting("rank")
    peft_alpha: float | None = _setting("alpha")
    peft_dropout: float = _setting("dropout")
    # A factory, since transformers' command-line parser ignores the plain default of a field that may be a list.
    peft_target_modules: list[str] | None | str = field(  # noqa: RUF036 (it takes the first member, the second is None)
        default_factory=lambda: None, metadata={"help": PeftSection.model_fields["target_modules"].description}
    )
    peft_type: str | None = _setting("type")
    adapter: str | None = _setting("adapter")
    peft_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata={"help": PeftSection.model_fields["kwargs"].description}
    )

    algorithm: str | None = own(
        None,
        "Name of an algorithm from `perl algorithms`, which sets the fields that make it; those given besides "
        "override it. In a recipe it stands at the top. None: only the fields count.",
    )
    _algorithm_applied: str | None = field(  # so that dataclasses.replace can tell what a name set from what was given
        default=None, repr=False, compare=False, metadata={"help": "Internal: the name whose fields are set already."}
    )

    _batch_derived: str | None = field(  # likewise, of the numbers of a generation batch
        default=None, repr=False, compare=False, metadata={"help": "Internal: numbers that TRL has derived already."}
    )

    reference: str | None = own(
        None,
        "What the KL divergence is measured against: base (the pristine base), initial (the policy before the "
        "first step), or rolling:N (the policy as it was at the last multiple of N steps). None: base for a new "
        "adapter, initial for one that is continued.",
    )

    rollout_backend: str = _setting("backend", RolloutSection)
    rollout_servers: list[str] | None = field(
        default=None, metadata={"help": RolloutSection.model_fields["servers"].description}
    )
    rollout_server_timeout: float = _setting("server_timeout", RolloutSection)
    rollout_sync: str = _setting("sync", RolloutSection)
    rollout_sync_folder: str | None = _setting("sync_folder", RolloutSection)
    rollout_sync_folder_on_servers: str | None = _setting("sync_folder_on_servers", RolloutSection)
    rollout_check_every: int = _setting("check_every", RolloutSection)
    rollout_tolerance: float | None = _setting("tolerance", RolloutSection)
    rollout_prefetch: int = _setting("prefetch", RolloutSection)
    rollout_max_staleness: int | None = _setting("max_staleness", RolloutSection)
    rollout_in_flight: str = _setting("in_flight", RolloutSection)
    vllm_importance_sampling_mode: str = own(
        "token_truncate",
        "How the ratio of the trainer's probabilities to the engine's is bounded: token_truncate, token_mask, "
        "sequence_truncate or sequence_mask.",
        words=("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
    )

    advantage_estimator: str = own(
        "group",
        "What rewards are compared with: group (GRPO; scale_rewards says what divides), rloo, batch "
        "(REINFORCE++), group_then_batch (REINFORCE++-baseline), maxrl, opo, gpg, remax (of one greedy completion"
        " more), pass_at_k, or gae (PPO), which trains a critic. batch, remax and gae take one completion too.",
    )
    gae_gamma: float = own(
        1.0, "Discount of a token under advantage_estimator: gae, from 0 to 1.", ge=0, le=1, part="critic"
    )
    gae_lambda: float = own(0.95, "GAE's lambda: 0 is one-step TD, 1 is Monte Carlo.", ge=0, le=1, part="critic")
    value_clip: float | None = own(
        0.2,
        "How far a value may move from that of the rollouts before its loss stops. None: no bound.",
        gt=0,
        part="critic",
    )
    critic_learning_rate: float | None = own(
        None,
        "The critic's, constant, with AdamW. None: ten times learning_rate over the method's rate, 1 for LoRA.",
        ge=0,
        part="critic",
    )
    critic_rank: int = own(16, "Rank of the critic's adapter, a LoRA of its own.", ge=1, part="critic")
    critic_warmup_steps: int = own(
        0, "Steps at the begin in which only the critic moves, and the policy waits.", ge=0, part="critic"
    )
    critic_adapter: str | None = own(
        None, "An exported critic to start from, the folder critic/ of a run. None: from the value 0.", part="critic"
    )
    kl_estimator: str = own(
        "k3",
        "Schulman's estimator of the KL divergence that beta weighs: k1, k2 or k3.",
        words=("k1", "k2", "k3"),
        part="objective",
    )
    kl_in_reward: bool = own(
        False,
        "Take beta times the KL divergence off the reward instead of adding it to the loss: a completion's "
        "(advantage_estimator rloo), or token by token (batch, group_then_batch, remax, gae).",
        part="objective",
    )
    entropy_weight: float = own(
        0.0,
        "The entropy of each token's distribution, times this, is taken off the token's objective; 0: not.",
        finite=True,
        part="objective",
    )
    dppo_divergence: str = own(
        "tv", "What loss_type: dppo bounds: tv (a difference of probabilities) or kl (nats).", words=("tv", "kl")
    )
    dppo_threshold: float | None = own(
        None, "Bound of dppo_divergence for each token. None: 0.15 for tv, 0.05 for kl.", ge=0
    )
    cov_fraction: float = own(
        2e-4, "Share of a batch's tokens that loss_type clip_cov or kl_cov selects, at least one token.", gt=0, le=1
    )
    cov_low: float = own(1.0, "clip_cov draws from tokens of a covariance above this.")
    cov_high: float = own(5.0, "And below this.")
    cov_kl_weight: float = own(1.0, "What loss_type: kl_cov multiplies abs(log r) of selected tokens by.", gt=0)

    teacher_adapter: str | None = _setting("adapter", TeacherSection)
    teacher_hint: str | None = _setting("hint", TeacherSection)
    teacher_system_prompt: str | None = _setting("system_prompt", TeacherSection)
    teacher_weight: float = _setting("weight", TeacherSection)
    teacher_top_k: int = _setting("top_k", TeacherSection)

    prompt_memory: bool = _setting("memory", PromptsSection)
    prompt_explore: float = _setting("explore", PromptsSection)
    prompt_floor: float = _setting("floor", PromptsSection)
    prompt_refill: float = _setting("refill", PromptsSection)
    prompt_curriculum: str | None = _setting("curriculum", PromptsSection)
    prompt_curriculum_start: float = _setting("curriculum_start", PromptsSection)
    prompt_curriculum_until: float = _setting("curriculum_until", PromptsSection)

    agent_max_turn_length: int | None = _setting("max_turn_length", AgentSection)
    agent_max_result_length: int = _setting("max_result_length", AgentSection)
    agent_call_timeout: float = _setting("call_timeout", AgentSection)

    process_reward_weight: float = own(
        0.0,
        "Weight of a process reward, the score that another model gives each step of a completion; 0: only the "
        "outcome counts. In a recipe it is rewards: {process_reward: {weight: ..., args: {model: ...}}}.",
    )
    process_reward_kwargs: dict[str, Any] | str | None = own(  # noqa: RUF009 (a field)
        None, "Arguments of perl.rewards.process_reward, model among them; needs a weight."
    )
    flat_reward_steps: int = own(
        5, "Say why after this many steps in a row in which no group's rewards differ; 0: never.", ge=0
    )
    padding_free: bool = own(
        True,
        "Run rows end to end, without padding, where the model allows it; else every micro-batch is padded to its"
        " own longest row.",
    )
    train_tokens_per_microbatch: int | None = own(
        None,
        "Tokens in one forward and backward pass; the rows of an optimizer step are distributed over such passes."
        " None: 2048 on a CPU, what fits into memory elsewhere. 0: the rows of each pass as TRL cuts them.",
        ge=0,
    )
    skip_zero_advantage: bool = own(
        True, "Leave out rows that add exactly nothing to the gradient: no advantage, no KL term."
    )
    reuse_old_log_probs: bool = own(
        True, "Take the old policy's log-probabilities from the training pass where no update lies between."
    )
    share_prompts: bool = own(True, "Run a prompt once for all completions of its group where that saves tokens.")
    fused_lora: bool = own(True, "Run plain LoRA layers as one operation instead of six; the same numbers in float32.")

    fused_head: bool | None = own(
        None,
        "Take the derivative of the log-probabilities in the head's forward pass, which is two products with the "
        "head instead of three. None: on a CPU; elsewhere TRL's kernel.",
    )
    compile_layers: bool = own(
        False, "Compile the layers for packed rows, which takes a minute or more before the first step."
    )

    _VALID_DICT_FIELDS: ClassVar = [*GRPOConfig._VALID_DICT_FIELDS, "peft_kwargs", "process_reward_kwargs"]

    bf16: bool | None = own(None, "Train in bfloat16. None: not on a CPU.")
    activation_checkpointing: bool | None = own(None, "transformers' new name of gradient_checkpointing.")

    def __new__(cls, *args: Any, **given: Any) -> "PeftRLConfig":  # noqa: ANN401 (what the constructor takes)
        """Notes which fields are given: a default, too, overrides what an algorithm's name sets."""
        self = super().__new__(cls)
        self._given = given_fields(cls, args, given)
        return self

    def __post_init__(self) -> None:
        """Derives what was left open, then lets TRL derive and check the rest."""
        check_types(self)
        apply_algorithm(self, self._given)
        if not self._given:  # by dataclasses.replace, or a parser
            forget_derived(self)
        asked = {name: getattr(self, name) for name in NUMBERS}
        derive_batch(self)
        self._check_own_fields()
        check_enumerations(self)
        check_trackers(self)
        check_sampling(self, self.rollout)
        self.of_a_recipe = False
        self.learning_rate_asked = self.learning_rate is not None
        if self.learning_rate is None:
            method = METHODS.get(self.peft_method if self.peft_type is None else "lora", METHODS["lora"])
            self.learning_rate = method.learning_rate
        if self.peft_target_modules == ["all-linear"]:  # as the command-line parser gives it
            self.peft_target_modules = "all-linear"
        on_cpu = self.use_cpu or accelerator() is None
        # Or transformers takes an accelerator that is there or refuses bf16, and accelerate takes each process for all.
        if on_cpu and (torch.accelerator.is_available() or world_size() > 1 or self.bf16):
            self.use_cpu: bool = True
        if self.bf16 is None and on_cpu:
            self.bf16 = False
        if self.dataloader_pin_memory is None:
            self.dataloader_pin_memory = not on_cpu
        self.recompute_asked = any(
            asked is not None for asked in (self.gradient_checkpointing, self.activation_checkpointing)
        )
        if self.gradient_checkpointing is None:
            self.gradient_checkpointing = not on_cpu
        if self.activation_checkpointing is None:
            self.activation_checkpointing = self.gradient_checkpointing
        with for_arguments(self, completions_at_once(self)):
            super().__post_init__()
        note_derived(self, asked)
        check_staleness(self, self.rollout)
        self.peft, self.teacher, prompts_section(self), agent_section(self)

    def to_dict(self) -> dict[str, Any]:
        """The arguments as transformers shows them to trackers and logs: without passwords, keys and tokens."""
        shown: dict[str, Any] = without_secrets(super().to_dict())
        return shown

    def _check_own_fields(self) -> None:
        if self.strategy not in STRATEGIES:
            raise RecipeError(f"no strategy {self.strategy!r}", "strategy", did_you_mean(self.strategy, STRATEGIES))
        adopt_launcher()
        self.strategy = taken_over(self.strategy, written="strategy" in self._given)
        if self.deepspeed:
            raise RecipeError(
                "DeepSpeed is not used", "deepspeed", "strategy: fsdp2 where the base is too large, or ddp"
            )
        if self.strategy == "fsdp2" and world_size() > 1:
            processes_of_copy(self.shards, world_size(), processes_of_node())
        asked = self.quantization
        if asked is not None and asked not in QUANTIZATIONS:
            raise RecipeError(f"no quantization {asked!r}", "quantization", did_you_mean(asked, QUANTIZATIONS))

        if self.compile_layers and (self.torch_compile or self.torch_compile_backend or self.torch_compile_mode):
            raise RecipeError(
                "compiles the model that torch_compile compiles", "compile_layers", "leave one of them out"
            )

        raise_all(RecipeError, algorithm_mistakes(self))
        if self.process_reward_weight and not self.process_reward_kwargs:
            raise RecipeError("has no model", "process_reward_weight", 'process_reward_kwargs={"model": ...}')
        if self.process_reward_kwargs and not self.process_reward_weight:
            raise RecipeError("has no weight", "process_reward_kwargs", "process_reward_weight=0.5")

    @property
    def peft(self) -> PeftSection:
        """The ``peft_*`` fields as the recipe's section."""
        values = {key: getattr(self, FIELD_OF_SETTING["peft", key]) for key in PeftSection.model_fields}
        return section_of_arguments(PeftSection, "peft", {**values, "kwargs": self.peft_kwargs or {}})

    @property
    def teacher(self) -> TeacherSection:
        """The ``teacher_*`` fields as the recipe's section."""
        return teacher_section(self)

    @property
    def rollout(self) -> RolloutSection:
        """The ``rollout_*`` fields as the recipe's section; see :func:`rollout_section`."""
        return rollout_section(self)


def own_setting(args: GRPOConfig, name: str) -> Any:  # noqa: ANN401 (of any field)
    """A field of ours; its default under TRL's own arguments."""
    return getattr(args, name, PeftRLConfig.__dataclass_fields__[name].default)


def rollout_section(args: GRPOConfig) -> RolloutSection:
    """Which engine samples, as arguments of ours or TRL's set it; how it samples is in TRL's fields.

    TRL's ``use_vllm`` asks for vLLM too: in this process, or on the server that its ``vllm_server_*`` fields name.

    Raises:
        RecipeError: A value is impossible, or two contradict each other.
    """
    ours = {name: f"rollout_{name}" for name in RolloutSection.model_fields}
    given = {name: getattr(args, ours_name) for name, ours_name in ours.items() if hasattr(args, ours_name)}
    servers = given.get("servers") or []
    given["servers"] = servers if isinstance(servers, dict) else list(servers)
    if args.use_vllm and given.get("backend", "auto") not in ENGINES:
        if args.vllm_mode not in OF_TRL:
            raise RecipeError(f"there is no {args.vllm_mode!r}", "vllm_mode", did_you_mean(str(args.vllm_mode), OF_TRL))
        given["backend"] = OF_TRL[args.vllm_mode]
        if capabilities(given["backend"]).needs_servers and not given["servers"]:
            host = "localhost" if args.vllm_server_host == "0.0.0.0" else args.vllm_server_host  # noqa: S104
            given["servers"] = [args.vllm_server_base_url or f"http://{host}:{args.vllm_server_port}"]
            given["server_timeout"] = float(args.vllm_server_timeout)
    return section_of_arguments(RolloutSection, "rollout", given)


def teacher_section(args: GRPOConfig) -> TeacherSection:
    """The teacher of arguments; TRL's own have none.

    Raises:
        RecipeError: A value is impossible.
    """
    return _mirrored(TeacherSection, "teacher", args)


def agent_section(args: GRPOConfig) -> AgentSection:
    """The ``agent_*`` fields as the recipe's section.

    Raises:
        RecipeError: A value is impossible.
    """
    own = {key: field for (part, key), field in FIELD_OF_SETTING.items() if part == "agent"}
    values = {key: own_setting(args, field) for key, field in own.items()}
    return section_of_arguments(AgentSection, "agent", values)


def prompts_section(args: GRPOConfig) -> PromptsSection:
    """Which prompts are sampled, as arguments say; TRL's own take them as they come.

    Raises:
        RecipeError: A value is impossible.
    """
    return _mirrored(PromptsSection, "prompts", args)


def _mirrored(section: type[_S], name: str, args: GRPOConfig) -> _S:
    values = {key: own_setting(args, FIELD_OF_SETTING[name, key]) for key in section.model_fields}
    return section_of_arguments(section, name, values)
