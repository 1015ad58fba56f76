"""From what a trainer is given to the policy that it trains, beside its reference; its adapter on disk.

model or name, arguments, peft_config -> model with a new, a continued or no adapter
policy, reference -> log-probabilities at temperature 1; -> a saved adapter

Knows nothing of data, rewards or training.
"""

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import set_seed
from peft import PeftConfig, PeftModel
from torch import nn
from transformers import AutoProcessor, PreTrainedModel
from trl import GRPOConfig
from trl.trainer.utils import create_model_from_path

from perl.errors import ModelError, RecipeError, warn
from perl.methods.base_checks import IN_PROCESS, check_on_quantised
from perl.methods.registry import METHODS
from perl.methods.settings import (
    Adaptation,
    adaptation,
    check_task,
    continued_adaptation,
    dropout_of,
    method_of,
    rate_warning,
    starts_as_base,
)
from perl.policy.as_configured import check_as_configured, check_unchanged, facts_of
from perl.policy.attach import attach_adapter, check_trainable, check_untouched_base, continue_adapter, own_method
from perl.policy.critic import find_critic
from perl.policy.model import (
    base_identity,
    check_quantisation,
    evaluating,
    quantising,
    resolve_model,
    trainable_parameters,
)
from perl.policy.precision import in_float32
from perl.policy.published import check_published
from perl.policy.quantised import leave_in_processes, prepare_layers, quantisation_of
from perl.policy.reference import Reference, reference_log_probs, token_log_probs
from perl.policy.save_adapter import write_adapter, write_adapter_files, write_model
from perl.policy.saved.adapter import SavedAdapter, find_adapter
from perl.policy.sharding import FSDP2, check_on_shards, divisible, loaded_in_shards, settle, shard, strategy_of
from perl.policy.teacher import find_teacher
from perl.recipe.quantisations import Quantization, quantised_base
from perl.recipe.sections import ModelSection, PeftSection
from perl.rollouts.agents.plain_calls import is_plain, show_tools
from perl.trainer.arguments.config import PeftRLConfig, own_setting, rollout_section, teacher_section
from perl.trainer.live import LiveTrainer


@dataclass(frozen=True)
class GivenPolicy:
    """What a trainer is given to train.

    Attributes:
        model: With a new, a continued or no adapter; a name only without an adapter.
        processing_class: Its tokenizer or processor; None: TRL loads it.
        adaptation: How it is adapted.
        continued: Whether an adapter is continued.
        loaded: Whether the base was loaded here, by its name.
        trained: The values of what is trained, as they are before TRL's constructor.
    """

    model: Any
    processing_class: Any
    adaptation: Adaptation
    continued: bool
    loaded: bool
    trained: Mapping[nn.Parameter, torch.Tensor]

    def restore_precision(self) -> None:
        """Undoes TRL's rounding of adapters on quantised bases to bfloat16."""
        for parameter, data in self.trained.items():
            parameter.data = data.to(parameter.device)


def given_policy(
    model: Any,  # noqa: ANN401 (TRL's signature)
    args: GRPOConfig,
    processing_class: Any,  # noqa: ANN401
    peft_config: PeftConfig | None,
    quantization_config: Any,  # noqa: ANN401
) -> GivenPolicy:
    """The policy of a trainer's arguments, after warnings of what is probably not meant.

    Raises:
        PerlError: The method, the adapter or the model is not what it must be.
    """
    if args.sync_ref_model:
        raise RecipeError(
            "needs a separate reference model, which this trainer does not load",
            "sync_ref_model",
            f'PeftRLConfig(reference="rolling:{args.ref_model_sync_steps}") takes the policy itself as often',
        )
    if isinstance(model, str):
        model = resolve_model(model)
        if processing_class is None:
            processing_class = AutoProcessor.from_pretrained(
                model,
                revision=(args.model_init_kwargs or {}).get("revision"),
                truncation_side="left",
                padding_side="left",
                trust_remote_code=args.trust_remote_code,
            )
    # What is wrong with a teacher's adapter, or with the critic to start from, is said before weights are loaded.
    teacher, critic = teacher_section(args).adapter, own_setting(args, "critic_adapter")
    base = model if isinstance(model, str) else base_identity(model)[0]
    if teacher is not None:
        find_teacher(teacher, base, processing_class)
    if critic is not None:
        find_critic(critic, base).check_rank(own_setting(args, "critic_rank"))
    by_name, named = isinstance(model, str), peft_config is not None or isinstance(model, PeftModel)
    model, how, continued = adapted_policy(model, args, peft_config, quantization_config)
    if isinstance(model, nn.Module):
        leave_in_processes(model)
    for note in script_notes(model, args, how, named=named):
        warn("PRL316", "%s", note)
    trained = {p: p.data for p in model.parameters() if p.requires_grad} if isinstance(model, PeftModel) else {}
    loaded = by_name and not isinstance(model, str)
    return GivenPolicy(model, processing_class, how, continued, loaded, trained)


def default_arguments(model: Any) -> PeftRLConfig:  # noqa: ANN401 (TRL's signature)
    """The arguments of a trainer that is given none; the output folder is called as TRL calls it."""
    name = model if isinstance(model, str) else model.config.name_or_path
    return PeftRLConfig(f"{name.rstrip('/').split('/')[-1].replace(':', '-')}-GRPO")


def adapted_policy(
    model: Any,  # noqa: ANN401 (TRL's signature)
    args: GRPOConfig,
    peft_config: PeftConfig | None,
    quantization_config: Any,  # noqa: ANN401
) -> tuple[Any, Adaptation, bool]:
    """The policy that the trainer's arguments describe, with a new, a continued, or no adapter.

    Returns:
        The model; how it is adapted; whether an adapter is continued. A name stays a name if no adapter is requested.

    Raises:
        PerlError: The method, the adapter or the model is not what it must be.
    """
    quantization = _asked_quantization(model, args, quantization_config)
    if isinstance(model, nn.Module):
        prepare_layers(model)
    if isinstance(model, PeftModel):
        _check_with_adapter(args, model.active_peft_config)
        if peft_config is not None or (isinstance(args, PeftRLConfig) and args.adapter):
            raise ModelError("the model has an adapter already", "peft_config", "pass the base, or no peft_config")
        check_trainable(model)
        check_task(config := model.active_peft_config)
        how = Adaptation(method_of(config), config)
        check_untouched_base(model)
        check_as_configured(model)
        _take_base(model, args)
        return model, how, True
    saved = _to_continue(args, peft_config, model)
    if peft_config is not None:
        check_task(peft_config)
        how = Adaptation(method_of(peft_config), peft_config)
    elif not isinstance(args, PeftRLConfig):
        how = Adaptation(METHODS["full"], None)
    else:
        how = continued_adaptation(args.peft, saved.config, own_method(saved)) if saved else adaptation(args.peft)
    if isinstance(args, PeftRLConfig) and not args.learning_rate_asked:
        args.learning_rate = how.method.learning_rate  # of a continued adapter's or a type's own method
    was = quantisation_of(model) if isinstance(model, nn.Module) else quantization
    if was is not None:
        check_on_quantised(how, was)
    check_on_shards(how.method, own_setting(args, "strategy"))
    if how.config is None:
        return model, how, False
    _check_with_adapter(args, how.config)
    set_seed(args.seed)  # before the adapter draws its first numbers, and where TRL sets it
    by_name = isinstance(model, str)
    if by_name:
        model = _loaded(model, args, quantization_config, quantization)
    _take_base(model, args, by_name=by_name)
    adapted = attach_adapter(model, how) if saved is None else continue_adapter(model, saved, how)
    return adapted, how, saved is not None


def script_notes(model: Any, args: GRPOConfig, how: Adaptation, *, named: bool) -> Iterator[str]:  # noqa: ANN401
    """What a script should know before it trains, a line each.

    Args:
        model: The policy.
        args: The script's.
        how: How the model is adapted.
        named: Whether the script says so itself, by a ``peft_config`` or a PeftModel.
    """
    yield from setting_warnings(how, float(args.learning_rate or 0.0))
    if args.generation_kwargs:
        shaped = ", ".join(args.generation_kwargs)
        yield f"generation_kwargs: {shaped} may change what is sampled, and log-probabilities are the plain policy's"
    asked = named or not isinstance(args, PeftRLConfig) or args.of_a_recipe
    if not asked and how.config is not None and args.process_index == 0:
        rank = getattr(how.config, "r", None)
        of_rank = f" of rank {rank}" if isinstance(rank, int) else ""
        what = f"{trainable_parameters(model):,} parameters of an adapter are trained, {how.method.name}{of_rank}"
        if args.adapter:
            yield f"{what}, which goes on from {args.adapter}"
        else:  # TRL's full fine-tuning is got otherwise
            yield f'no peft_config: {what}; PeftRLConfig(peft_method="full") trains the whole model, as TRL does'
    unused: list[str] = []
    if named and isinstance(args, PeftRLConfig):  # that are not as they are by default
        found, default = (dict(section) for section in (args.peft, PeftSection()))
        unused = [f"peft_{name}" for name in found if name != "adapter" and found[name] != default[name]]
    if unused and args.process_index == 0:
        do = "does" if len(unused) == 1 else "do"
        yield f"{', '.join(unused)} {do} nothing: the adapter is that of the peft_config; leave one of them out"


def _check_with_adapter(args: GRPOConfig, config: PeftConfig) -> None:
    """Refuses what would only fail once the base is loaded, or the adapter is trained."""
    targets = getattr(config, "target_modules", None) or ()
    if re.fullmatch(targets, "lm_head") if isinstance(targets, str) else {"lm_head", "model.lm_head"} & {*targets}:
        what = "TRL reads the weights of lm_head by themselves, so that an adapter there would not be trained"
        raise RecipeError(what, "peft.target_modules", "leave lm_head out")
    if args.hub_token is not None:
        raise RecipeError("an adapter is pushed with the Hub's own login only", "hub_token", "hf auth login")


def _to_continue(args: GRPOConfig, peft_config: PeftConfig | None, model: Any) -> SavedAdapter | None:  # noqa: ANN401
    """The adapter that the arguments ask to continue, which a config of a new one contradicts."""
    if not isinstance(args, PeftRLConfig) or not args.adapter:
        return None
    if peft_config is not None:
        raise ModelError(
            f"asks for a new adapter, and PeftRLConfig.adapter to continue {args.adapter}",
            "peft_config",
            "leave one of the two out",
        )
    found = find_adapter(args.adapter, None if isinstance(model, str) else base_identity(model)[0])
    check_task(found.config)
    return found


def _asked_quantization(model: Any, args: GRPOConfig, quantization_config: Any) -> Quantization | None:  # noqa: ANN401
    """What the base is quantised to as it is loaded; refused where no base is loaded, or where two say how."""
    asked: Quantization | None = getattr(args, "quantization", None)
    options = args.model_init_kwargs or {}
    if asked is None:
        return None
    if not isinstance(model, str):
        what = "is of a base that is loaded by name; a model that is passed comes as it is"
        raise ModelError(what, "quantization", "pass the model's name, or leave it out")
    if quantization_config is not None or "quantization_config" in options:
        raise ModelError("is said twice", "quantization", "leave it or quantization_config out")
    if options.get("device_map") is not None:
        what = f"{quantised_base(asked)} lies whole on the device of its process, device_map would do nothing"
        raise ModelError(what, "model_init_kwargs", "leave device_map out")
    if own_setting(args, "strategy") == FSDP2:
        what = f"{quantised_base(asked)} cannot be in shards, which fsdp2 makes of it"
        raise RecipeError(what, "quantization", "strategy ddp, or leave it out")
    if not rollout_section(args).capabilities.quantised_base:
        raise ModelError(IN_PROCESS, "rollout_backend", "transformers, or vllm-server with servers of the same base")
    check_quantisation(ModelSection(name=model, revision=options.get("revision"), quantization=asked), args.device)
    return asked


def _loaded(name: str, args: GRPOConfig, quantization_config: Any, quantization: Quantization | None) -> Any:  # noqa: ANN401
    """The base as TRL loads it by name."""
    options = {**(args.model_init_kwargs or {}), "trust_remote_code": args.trust_remote_code}
    if quantization is not None:
        section = ModelSection(name=name, revision=options.get("revision"), quantization=quantization)
        options |= quantising(section, args.device, options.get("dtype") or "auto")  # TRL would take float32
    if quantization_config is not None:
        options["quantization_config"] = quantization_config
    if args.distributed_state.distributed_type == "MULTI_GPU" and quantization is None:
        options["device_map"] = None
    with divisible():
        model = create_model_from_path(
            name, **options, **loaded_in_shards(own_setting(args, "strategy"), own_setting(args, "shards"))
        )
    prepare_layers(model)
    settle(model)
    return model


def _take_base(model: PreTrainedModel | PeftModel, args: GRPOConfig, *, by_name: bool = False) -> None:
    """Looks at a base that is there, and under ``fsdp2`` leaves each process its part of it.

    It must be a published one; a recipe's, like one that comes by name, was in nobody's hands before. TRL looks for the
    embeddings of a tied head that is cast under an adapter where there are none.
    """
    unknown = check_published(model, loaded_here=by_name or getattr(args, "of_a_recipe", False))
    if unknown and args.process_index == 0:
        warn("PRL316", "%s", unknown)
    if args.cast_lm_head_to_fp32 and getattr(model.config, "tie_word_embeddings", False):
        name = type(model.get_base_model() if isinstance(model, PeftModel) else model).__name__
        raise ModelError(
            f"TRL cannot cast the head of {name} under an adapter: it is tied to the embeddings",
            "cast_lm_head_to_fp32",
            'leave it out; model_init_kwargs={"dtype": "float32"} computes all in float32',
        )
    if own_setting(args, "strategy") == FSDP2:
        shard(model, own_setting(args, "shards"))


def setting_warnings(how: Adaptation, learning_rate: float) -> Iterator[str]:
    """What is allowed and probably not meant."""
    warning = rate_warning(how.method, learning_rate)
    if warning:
        yield warning
    dropout = dropout_of(how.config)
    if dropout:
        yield (
            f"adapter dropout {dropout:g}: rollouts have none, so the policy that is trained is not the one that "
            "sampled; leave it at 0"
        )


class AdaptedPolicy:
    """A policy and what its KL divergence is measured against.

    Attributes:
        strategy: How the processes share the work, as it is; None: there is one.
        reference: None if the loss has no such term and there is no adapter.
    """

    def __init__(self, live: LiveTrainer, how: Adaptation, *, continued: bool) -> None:
        """Takes a policy before its first step.

        Args:
            live: Has the policy, which may be prepared for several processes later on.
            how: It is adapted.
            continued: Whether its adapter was trained before.
        """
        self._live, self._how, self.continued = live, how, continued
        args, policy = live.args, live.policy
        self.strategy = strategy_of(live.accelerator, policy)
        needed = isinstance(policy, PeftModel) or args.beta != 0.0
        asked = args.reference if isinstance(args, PeftRLConfig) else None
        spec = asked or ("initial" if continued else "base")
        self.reference = Reference(policy, spec) if needed else None
        self._proven, self._said = facts_of(policy) if isinstance(policy, PeftModel) else {}, False

    def check_unchanged(self) -> None:
        """Refuses what a script has changed since the policy was taken, where it would not be saved."""
        if isinstance(self._live.policy, PeftModel):
            self._proven = check_unchanged(self._live.policy, self._proven)

    @property
    def starts_as_reference(self) -> bool:
        """Whether the policy must equal its reference before the first step."""
        if self.reference is not None and not self.reference.is_the_base:
            return True
        return self.starts_as_base

    @property
    def starts_as_base(self) -> bool:
        """Whether the policy equals its base before the first step."""
        return not self.continued and starts_as_base(self._how)

    def log_probs(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """The policy's, (B, T-1); see :meth:`perl.PeftGRPOTrainer.policy_log_probs`."""
        policy, device = self._live.policy, self._live.args.device
        with evaluating(policy), in_float32(policy):
            return token_log_probs(policy, input_ids.to(device), attention_mask.to(device))

    def reference_log_probs(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """The reference's, (B, T-1).

        Raises:
            ModelError: A model without an adapter is trained and the loss needs no reference, so none is kept.
        """
        if self.reference is None:
            raise ModelError("without an adapter a reference is kept only where beta is above 0", "train.beta")
        policy, device = self._live.policy, self._live.args.device
        with evaluating(policy), in_float32(policy):
            return reference_log_probs(policy, input_ids.to(device), attention_mask.to(device), self.reference)

    def save(self, path: Path, processing_class: Any, fingerprint: str | None) -> None:  # noqa: ANN401 (TRL's)
        """Writes the adapter alone, or without one the model; on the main process.

        Args:
            path: Folder to write, replaced if it exists.
            processing_class: Goes beside a model.
            fingerprint: Of the base's weights, if it is known.

        Raises:
            ModelError: The policy has parts of a script's, which what was written lacks.
        """
        policy = self._live.policy
        if self._live.accelerator.is_main_process:
            if isinstance(policy, PeftModel):
                name, revision = base_identity(policy)
                write_adapter(policy, path, name, revision, fingerprint)
                with contextlib.suppress(Exception):  # a remark, which costs no training
                    own = AutoProcessor.from_pretrained(resolve_model(name), revision=revision, local_files_only=True)
                    given = processing_class
                    if is_plain(given):  # tools are shown as text, which loading it with show_tools does again
                        show_tools(own)
                    one, other = ((it.chat_template, getattr(it, "tokenizer", it).get_vocab()) for it in (given, own))
                    if one != other and not self._said:
                        self._said, what = True, "vocabulary" if one[1] != other[1] else "chat template"
                        warn("PRL316", "the tokenizer has another %s than the base's: save it beside the adapter", what)
            else:
                write_model(policy, processing_class, path)
        self.check_unchanged()  # once it is written, so that nothing is lost

    def write_files(self, folder: Path, processing_class: Any, fingerprint: str | None) -> None:  # noqa: ANN401
        """Writes the adapter's files into a checkpoint, as plain PEFT loads them on the pristine base."""
        folder.mkdir(parents=True, exist_ok=True)
        write_adapter_files(self._live.policy, folder, *base_identity(self._live.policy), fingerprint)
        if processing_class is not None:
            processing_class.save_pretrained(folder)
