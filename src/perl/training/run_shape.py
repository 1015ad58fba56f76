"""What is run on what: processes, device, model, batch; and how a process of it runs its rows.

Plan, Setup -> Shape, BatchPlan, MemoryEstimate, Execution
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from peft import LoraConfig, PeftConfig

from perl.algorithms.registry import LOSSES
from perl.errors import ModelError
from perl.methods.settings import adaptation
from perl.packing.memory import CPU_TOKENS
from perl.policy.model import load_empty_base
from perl.recipe.batch_plan import BatchPlan
from perl.recipe.sections import Strategy
from perl.training.cost_flops import Execution, Group, ModelSize, largest_pass, size_of
from perl.training.decoder import Decoder, Types, decoder_of, types_of, types_on_cpu
from perl.training.hardware import Hardware
from perl.training.lengths import Lengths
from perl.training.memory_estimate import (
    Attention,
    MemoryEstimate,
    Work,
    attention_of,
    estimate_memory,
    written_at_once,
)
from perl.training.plan import Plan
from perl.training.sharing import Sharing


@dataclass(frozen=True)
class Setup:
    """What a plan is made for.

    Attributes:
        batch: Of a step, over the processes that train.
        nodes: They are on.
        device: Of each process; a CPU is shared by all processes of a node.
        strategies: To be compared, one or all.
        lengths: Of prompts and completions.
        measured: Rates measured here, by the names of :class:`perl.training.cost_time.Rates`.
    """

    batch: BatchPlan
    nodes: int
    device: Hardware
    strategies: tuple[Strategy, ...]
    lengths: Lengths
    measured: Mapping[str, float] = field(default_factory=dict)

    @property
    def processes(self) -> int:
        """That train."""
        return self.batch.world_size

    @property
    def rows(self) -> int:
        """Completions of a process in a step."""
        return self.batch.completions_per_step // self.processes

    @property
    def on_a_node(self) -> int:
        """Processes of a node."""
        return -(-self.processes // self.nodes)


@dataclass(frozen=True)
class Shape:
    """The model, its numbers and its adapter, as far as the formulas need them.

    Attributes:
        model: The base's sizes.
        types: Of its numbers.
        rank: Of the LoRA whose activations and FLOPs are taken.
        trained: Parameters that train.
        exact: Whether the adapter is that LoRA; else a pass is estimated as if it were.
        dora: Whether its weights are decomposed.
    """

    model: Decoder
    types: Types
    rank: int
    trained: int
    exact: bool
    dora: bool = False

    @property
    def size(self) -> ModelSize:
        """For FLOPs."""
        return size_of(self.model, self.rank, dora=self.dora)


def shape_of(plan: Plan, *, on_cpu: bool) -> Shape:
    """The sizes that costs are derived from.

    Raises:
        ModelError: The model's layers are not known to the formulas.
    """
    config = load_empty_base(plan.recipe.model).config
    model = decoder_of(config)
    if model is None:
        known = "Llama, Mistral, Qwen2 and Qwen3 are"
        raise ModelError(f"costs of a {config.model_type} are not derived", "model.name", known)
    types = types_on_cpu(plan.recipe, config) if on_cpu else types_of(plan.recipe, config)
    adapter = adaptation(plan.recipe.peft).config if plan.method.config else None
    rank = _rank_of(adapter)
    dora = isinstance(adapter, LoraConfig) and bool(adapter.use_dora)
    as_known = model.lora_parameters(rank) + (model.outputs if dora else 0) == plan.trainable_parameters
    plain = type(adapter) is LoraConfig and as_known
    return Shape(model, types, rank, plan.trainable_parameters + plan.critic_parameters, plain, dora)


def peak_of(plan: Plan, shape: Shape, device: Hardware) -> float:
    """FLOP/s of a device's products in the type of the run."""
    return device.peak_of(shape.types.compute, tf32=bool(plan.recipe.train.get("tf32")))


def _rank_of(adapter: PeftConfig | None) -> int:
    rank = getattr(adapter, "r", None) or getattr(adapter, "init_r", None) or 8
    return int(rank) if isinstance(rank, int) else 8


def memory_on(
    plan: Plan, setup: Setup, shape: Shape, strategy: Strategy, available: tuple[str, float]
) -> MemoryEstimate:
    """What a process holds.

    Args:
        plan: Of the run.
        setup: What it is to run on.
        shape: Model and adapter.
        strategy: How processes share.
        available: Name and bytes of the memory.
    """
    arguments, engine = plan.arguments, plan.recipe.rollout.capabilities
    work = Work(
        plan.longest_prompt + int(arguments.max_completion_length or 0),
        completions=0 if engine.takes_updates else written_at_once(replace(plan.recipe, batch=setup.batch)),
        engine_share=arguments.vllm_gpu_memory_utilization if engine.in_process else 0.0,
        attention=attention_on(plan, setup.device),
        fused_head=setup.device.on_cpu or bool(arguments.fused_head),
        fixed_tokens=arguments.train_tokens_per_microbatch,
        pass_tokens=_largest_on_cpu(plan, setup) if setup.device.on_cpu else None,
        dora=shape.dora,
        teacher=plan.teacher_parameters,
    )
    sharing = Sharing(strategy, setup.processes)
    name, size = available
    return estimate_memory(
        shape.model, shape.types, shape.rank, name, work, sharing, trained=shape.trained, available=size
    )


def groups_of_process(setup: Setup) -> list[Group]:
    """The rows of a process: its share of the completions, in whole groups as far as they go."""
    whole, rest = divmod(setup.rows, setup.batch.num_generations)
    counts = [setup.batch.num_generations] * whole + ([rest] if rest else [])
    return [Group(setup.lengths.prompt, (setup.lengths.completion,) * count) for count in counts]


def _largest_on_cpu(plan: Plan, setup: Setup) -> int:
    how = _execution(plan, plan.arguments.train_tokens_per_microbatch or CPU_TOKENS, setup.device, recompute=False)
    return largest_pass(groups_of_process(setup), how)


def attention_on(plan: Plan, device: Hardware) -> Attention:
    """How packed rows are attended to there."""
    found = attention_of(plan.arguments, fp16=bool(plan.recipe.train.get("fp16")))
    if device.on_cpu:
        return Attention(kernel=False, grouped=True, shared=found.shared)
    return found if device.bfloat16 else Attention(kernel=False, grouped=False, shared=found.shared)


def execution_of(plan: Plan, shape: Shape, memory: MemoryEstimate, device: Hardware) -> Execution:
    """How a process runs its rows, and what else it runs beside the policy."""
    how = _execution(plan, memory.plan.tokens, device, recompute=memory.plan.recompute)
    critic = teacher = None
    if plan.critic_parameters:
        critic = replace(size_of(shape.model, plan.arguments.critic_rank), head=0)
    if plan.recipe.teacher.acts:
        rank = shape.rank if plan.recipe.teacher.adapter else 0  # of a saved adapter that of the run's is assumed
        teacher = size_of(shape.model, rank)
    return replace(how, critic=critic, teacher=teacher)


def _execution(plan: Plan, budget: int, device: Hardware, *, recompute: bool) -> Execution:
    arguments = plan.arguments
    old = arguments.num_iterations > 1 or arguments.steps_per_generation > arguments.gradient_accumulation_steps
    return Execution(
        budget=budget,
        packed=bool(arguments.padding_free),
        shared=bool(arguments.padding_free and arguments.share_prompts),
        masked=not attention_on(plan, device).kernel,
        recompute=recompute,
        fused_head=device.on_cpu or bool(arguments.fused_head),
        reference=arguments.beta > 0,
        old=old or not arguments.reuse_old_log_probs or LOSSES[arguments.loss_type].selection is not None,
    )
