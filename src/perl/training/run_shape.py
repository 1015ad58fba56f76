"""What is run on what: processes, device, model, batch, lengths; and how a process of it runs its rows.

Plan, a number or an earlier run -> Lengths; Plan, Setup -> Shape, MemoryEstimate, Execution
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean

from peft import LoraConfig

from perl.algorithms.registry import LOSSES
from perl.errors import ModelError, PerlError
from perl.packing.attention import KERNEL_CALL, Machine, needs_every_head
from perl.packing.memory import CPU_TOKENS
from perl.recipe.batch_plan import BatchPlan
from perl.recipe.engine_section import processes_of_copy
from perl.recipe.sections import Strategy
from perl.run.logs import read_log
from perl.training.cost_flops import Execution, Group, ModelSize, largest_pass, size_of
from perl.training.counted import counted_decoder
from perl.training.decoder import Decoder, ModelSharing, Types, decoder_of, types_of
from perl.training.hardware import Hardware, Range
from perl.training.memory_estimate import Attention, GpuWork, MemoryEstimate, estimate_memory
from perl.training.plan import Plan

# Of an earlier run's steps the last ones count: completions grow or shrink while it trains.
_LAST_STEPS = 50
# Groups of like rewards have no gradient; of a real model's a third to four fifths had one.
_LIVE = Range(1 / 3, 1.0)
_LENGTH, _LONGEST, _TRAINED = "completions/mean_length", "completions/max_length", "rows/trained_fraction"


@dataclass(frozen=True)
class Lengths:
    """Tokens of prompts and completions.

    Attributes:
        prompt: On average.
        common: Of a prompt, with which all begin.
        completion: On average.
        longest: Of the longest completion of a step.
        live: Share of the completions that have a gradient, at the least and at the most.
        source: Where the numbers are from, for a person to read.
        seconds: That a step of the earlier run took; None without one.
    """

    prompt: int
    common: int
    completion: int
    longest: int
    live: Range
    source: str
    seconds: float | None = None


@dataclass(frozen=True)
class PlanSetup:
    """What a plan is made for.

    Attributes:
        batch: Of a step, over the processes that train.
        device: Of each process; a CPU is shared by all.
        strategies: To be compared, one or all.
        lengths: Of prompts and completions.
        shards: ``engine.shards``.
        of_node: Processes of a node.
        measured: Rates measured here: ``products`` and ``token``, of ``measure_rates``.
    """

    batch: BatchPlan
    device: Hardware
    strategies: tuple[Strategy, ...]
    lengths: Lengths
    shards: str | int = "node"
    of_node: int = 1
    measured: Mapping[str, float] = field(default_factory=dict)

    @property
    def processes(self) -> int:
        """That train."""
        return self.batch.world_size

    def shared_by(self, strategy: Strategy) -> ModelSharing:
        """How its processes share the model under a strategy."""
        divided = strategy == "fsdp2" and self.processes > 1
        parts = processes_of_copy(self.shards, self.processes, self.of_node) if divided else 1
        return ModelSharing(strategy, self.processes, parts, self.of_node)

    @property
    def sharing(self) -> int:
        """Processes that share a device."""
        return self.processes if self.device.on_cpu else 1

    @property
    def rows(self) -> int:
        """Completions of a process in a step."""
        return self.batch.completions_per_step // self.processes


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


def lengths_of(plan: Plan, *, completion: int | None = None, run: str | None = None) -> Lengths:
    """What a plan reckons with.

    Args:
        plan: Of the run.
        completion: Tokens of a completion on average; None: half of the most.
        run: Folder of an earlier run, whose lengths are taken.

    Raises:
        PerlError: The run has no metrics, or the number is more than a completion may have.
    """
    prompt, most = round(plan.mean_prompt), int(plan.arguments.max_completion_length or 1)
    common = plan.common_beginning
    if completion is not None and not 1 <= completion <= most:
        raise PerlError(f"{completion} tokens", "--completion-tokens", f"1 to {most}, rollout.max_completion_length")
    if run is not None:
        rows = [row for row in read_log(Path(run) / "metrics.jsonl") if _LENGTH in row][-_LAST_STEPS:]
        if not rows:
            raise PerlError("no step of a run has been logged there", run, "the OUTPUT of an earlier `perl train`")
        mean, longest = (round(fmean(row[name] for row in rows)) for name in (_LENGTH, _LONGEST))
        seconds = [row["step_time"] for row in rows if "step_time" in row]
        live = fmean(row.get(_TRAINED, 1.0) for row in rows)
        return Lengths(
            prompt,
            common,
            completion or max(mean, 1),
            max(longest, completion or mean, 1),
            Range(live, live),
            f"measured in {run}, the last {len(rows)} steps",
            fmean(seconds) if seconds else None,
        )
    if completion is not None:
        return Lengths(prompt, common, completion, most, _LIVE, "as given; the longest as long as allowed")
    source = "assumed: half of the most; the longest as long as allowed"
    return Lengths(prompt, common, max(most // 2, 1), most, _LIVE, source)


def shape_of(plan: Plan, *, on_cpu: bool) -> Shape:
    """The sizes that costs are derived from.

    Raises:
        ModelError: The model's layers are not known to the formulas.
    """
    model, adapter = decoder_of(plan.config) or counted_decoder(plan.config), plan.how.config
    if model is None:
        known = "those of decoders that transformers builds of layers are"
        raise ModelError(f"costs of a {plan.config.model_type} are not derived", "model.name", known)
    written = getattr(adapter, "r", None) or getattr(adapter, "init_r", None)
    rank = written if isinstance(written, int) else 8
    dora = isinstance(adapter, LoraConfig) and bool(adapter.use_dora)
    as_known = model.lora_parameters(rank) + (model.outputs if dora else 0) == plan.trainable_parameters
    return Shape(
        model=model,
        types=types_of(plan.recipe, plan.config, on_cpu=on_cpu),
        rank=rank,
        trained=plan.trainable_parameters + plan.critic_parameters,
        exact=type(adapter) is LoraConfig and as_known,
        dora=dora,
    )


def memory_on(plan: Plan, setup: PlanSetup, shape: Shape, strategy: Strategy, available: float) -> MemoryEstimate:
    """What a process holds.

    Args:
        plan: Of the run.
        setup: What it is to run on.
        shape: Model and adapter.
        strategy: How processes share.
        available: Bytes of the memory.
    """
    arguments, engine, batch = plan.arguments, plan.recipe.rollout.capabilities, setup.batch
    fixed, largest = arguments.train_tokens_per_microbatch, None
    if setup.device.on_cpu:
        how = _execution(plan, fixed or CPU_TOKENS, setup.device, recompute=False)
        largest = largest_pass(groups_of_process(setup), how)
    passes = plan.recipe.train.get("steps_per_generation") or batch.gradient_accumulation_steps
    work = GpuWork(
        plan.longest_prompt + int(arguments.max_completion_length or 0),
        completions=0 if engine.takes_updates else int(batch.per_device_train_batch_size * passes),
        engine_share=arguments.vllm_gpu_memory_utilization if engine.in_process else 0.0,
        attention=attention_on(plan, setup.device),
        fused_head=setup.device.on_cpu or bool(arguments.fused_head),
        fixed_tokens=fixed,
        pass_tokens=largest,
        dora=shape.dora,
        teacher=plan.teacher_parameters,
    )
    return estimate_memory(
        shape.model,
        shape.types,
        shape.rank,
        work,
        available,
        setup.shared_by(strategy),
        trained=shape.trained,
        on_cpu=setup.device.on_cpu,
    )


def groups_of_process(setup: PlanSetup) -> list[Group]:
    """The rows of a process: its share of the completions, in whole groups as far as they go."""
    whole, rest = divmod(setup.rows, setup.batch.num_generations)
    counts = [setup.batch.num_generations] * whole + ([rest] if rest else [])
    prompt, common = setup.lengths.prompt, setup.lengths.common
    return [Group(prompt, (setup.lengths.completion,) * count, common=common) for count in counts]


def attention_on(plan: Plan, device: Hardware) -> Attention:
    """How packed rows are attended to there, with the torch that is installed."""
    shared = bool(plan.arguments.padding_free and plan.arguments.share_prompts)
    if device.on_cpu:
        return Attention(kernel=False, grouped=True, shared=shared)
    if not device.bfloat16:  # such GPUs have no kernel either
        return Attention(kernel=False, grouped=False, shared=shared)
    if plan.recipe.train.get("fp16"):
        return Attention(kernel=False, grouped=not needs_every_head(Machine("cuda")), shared=shared)
    return Attention(grouped=KERNEL_CALL is not None and KERNEL_CALL.grouped, shared=shared)


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
