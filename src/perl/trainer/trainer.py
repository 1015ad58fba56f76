"""PeftGRPOTrainer: TRL's GRPOTrainer with our stages wired into its hooks.

Each override says which method it replaces and why.
"""

import contextlib
import importlib.util
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from peft import PeftModel
from trl import GRPOConfig

from perl.algorithms.advantages import (
    group_advantages,
    nan_std,
    normalized_sum_advantages,
    partly_scored,
    weighted_rewards,
)
from perl.errors import ModelError, PerlError
from perl.hub.card.fact_form import plain_word, showable_settings
from perl.hub.card.folder_card import write_folder_card
from perl.hub.card.form import CARD, LARGEST_CARD
from perl.hub.card.names import has_hub_form, label
from perl.hub.card.run_facts import RUN_FACTS, made_facts, perl_version
from perl.hub.gate.snapshot import take
from perl.hub.push.script_push import full_repo_id, pack_folder, push_script, write_log
from perl.methods.optim import lora_plus_optimizer, precondition_lora_fa
from perl.methods.registry import METHODS
from perl.methods.settings import asks_for_random_start
from perl.policy.attach import check_trainable
from perl.policy.guards import check_optimizer, check_saved_adapter
from perl.policy.logprobs import token_log_probs
from perl.policy.model import base_identity, base_of, evaluating, public_name, resolve_model, trainable_parameters
from perl.policy.precision import in_float32
from perl.policy.quantised import quantisation_of
from perl.policy.reference import Reference, reference_log_probs
from perl.policy.save_adapter import write_adapter, write_model
from perl.policy.sharding import check_push, check_reference, whole_adapter
from perl.rewards.answers import completion_text
from perl.rewards.named import JUDGES
from perl.rewards.process.reward import with_process_reward
from perl.rewards.verifier import Judging, start_workers
from perl.run.devices import check_device
from perl.run.folder import installed_versions
from perl.trainer.callbacks.adapter import AdapterCallback
from perl.trainer.callbacks.diagnosis import FlatRewards, MaskedRows
from perl.trainer.callbacks.plots import draw_curves
from perl.trainer.config import PeftRLConfig, rollout_section
from perl.trainer.optimizer_step import StepGRPOTrainer
from perl.trainer.overrides import check_overrides, is_replaced, received
from perl.trainer.policy_setup import adapted_policy, load_processor, what_to_say

logger = logging.getLogger("perl")
_PROBE_TOKENS = 64  # on which a saved adapter is compared with the one in memory before it is pushed


class PeftGRPOTrainer(StepGRPOTrainer):
    """Trains an adapter with GRPO and its relatives.

    Takes the arguments of TRL's ``GRPOTrainer``, all of them with TRL's meaning. What it adds:

    * ``args`` may be a :class:`perl.PeftRLConfig`; then, without a ``peft_config``, the adapter is built from its
      ``peft_*`` fields, or continued from its ``adapter``, and ``reference`` says what the KL divergence is from.
    * ``model`` may be ``"sandbox:base"``.
    * The base's weights are never written: an initialisation that PEFT would write into them is kept beside them, the
      reference is exact for every method, and what is saved is what was trained, on the published base.
    * LoRA+, LoRA-FA and AdaLoRA run as published.
    * Rollouts may come from vLLM, in this process or on servers, which is given the adapter and never the model.
    * An optimizer step runs no padding and no row without a gradient, and gives TRL's gradient.
    * Checkpoints are complete or do not count, and a resumed run ends like one that was never interrupted.
    * Nothing is sent anywhere (TRL sends usage statistics).

    Raises:
        perl.errors.ModelError: The adapter would touch no module, nothing would be trained, the adapter to continue was
            made for another base, or a PeftModel's initialisation has changed its base.
        perl.errors.RecipeError: The adapter's method cannot be trained; says why.
        perl.errors.BrokenPromiseError: While training: a trained tensor does not move, the policy does not start at its
            reference, or the base's weights change.
    """

    def __init__(  # noqa: PLR0913 (TRL's signature)
        self,
        model: Any,  # noqa: ANN401 (TRL's signature)
        reward_funcs: Any = None,  # noqa: ANN401
        args: GRPOConfig | None = None,
        train_dataset: Any = None,  # noqa: ANN401
        eval_dataset: Any = None,  # noqa: ANN401
        processing_class: Any = None,  # noqa: ANN401
        reward_processing_classes: Any = None,  # noqa: ANN401
        callbacks: Any = None,  # noqa: ANN401
        optimizers: Any = (None, None),  # noqa: ANN401
        quantization_config: Any = None,  # noqa: ANN401
        peft_config: Any = None,  # noqa: ANN401
        tools: Any = None,  # noqa: ANN401
        rollout_func: Any = None,  # noqa: ANN401
        environment_factory: Any = None,  # noqa: ANN401
    ) -> None:
        """Takes what TRL's ``GRPOTrainer`` takes."""
        if args is None:
            name = model if isinstance(model, str) else model.config.name_or_path
            args = PeftRLConfig(f"{name.rstrip('/').split('/')[-1].replace(':', '-')}-GRPO")
        check_push(args, asked=args.push_to_hub)
        check_overrides(self)
        check_device(args.device)
        given = reward_funcs
        reward_funcs, weights = self._rewards(reward_funcs, args)
        if isinstance(reward_processing_classes, list) and reward_funcs is not given:
            reward_processing_classes = [*reward_processing_classes, None]
        if isinstance(model, str):
            model = resolve_model(model)
            if processing_class is None:
                processing_class = load_processor(model, args)
        self._last_logged, self._said_of_unscored = dict[str, Any](), False
        loads, named = isinstance(model, str), peft_config is not None or isinstance(model, PeftModel)
        self.optimizer: torch.optim.Optimizer | None
        model, self.adaptation, continued = adapted_policy(model, args, peft_config, quantization_config)
        for note in what_to_say(model, args, self.adaptation, named=named):
            logger.warning("%s", note)
        trained = {p: p.data for p in model.parameters() if p.requires_grad} if isinstance(model, PeftModel) else {}
        beta = args.beta
        with _as_trl_may_read(args, weights, loaded=loads and not isinstance(model, str)):
            super().__init__(
                model=model,
                reward_funcs=reward_funcs,
                args=args,
                train_dataset=train_dataset,
                eval_dataset=eval_dataset,
                processing_class=processing_class,
                reward_processing_classes=reward_processing_classes,
                callbacks=callbacks,
                optimizers=optimizers,
                quantization_config=quantization_config if isinstance(model, str) else None,
                tools=tools,
                rollout_func=rollout_func,
                environment_factory=environment_factory,
            )
        self.beta = beta
        for parameter, data in trained.items():
            parameter.data = data.to(parameter.device)  # TRL rounds adapters on quantised bases to bfloat16
        check_trainable(self.model)
        if self.adaptation.method.starts and not self.whole_tensors:
            problem = f"{self.adaptation.method.name} needs each tensor whole and runs with DDP, not in shards"
            raise ModelError(problem, "peft.method", "lora, or accelerate launch without DeepSpeed and FSDP")
        self._continued = continued
        self.reference = self._reference()
        snapshot = self.reference is not None and bool(self.reference.snapshot)
        check_reference(self.strategy, snapshot=snapshot, beta=beta)
        self._add_callbacks()
        if any(judge in self.reward_funcs for judge in JUDGES):
            self.judging = Judging()
        self.prepare_rollouts(rollout_section(args))
        self.prepare_step()

    @property
    def starts_as_reference(self) -> bool:
        """Whether the policy must equal its reference before the first step."""
        if self.reference is not None and not self.reference.is_the_base:
            return True
        if self._continued or asks_for_random_start(self.adaptation.config):
            return False
        return self.adaptation.method.name in METHODS

    def policy_log_probs(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """The policy's log-probabilities at temperature 1, in float32, without dropout and without gradient.

        Args:
            input_ids: (B, T) int64.
            attention_mask: (B, T) 1 for tokens, 0 for padding.

        Returns:
            (B, T-1) float32, log p(token t+1 | tokens up to t).
        """
        return self._without_dropout(token_log_probs, input_ids, attention_mask)

    def reference_log_probs(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """The reference policy's log-probabilities; shapes and meaning as in :meth:`policy_log_probs`.

        Raises:
            ModelError: A model without an adapter is trained and the loss needs no reference, so none is kept.
        """
        reference = self.needed_reference()

        def log_probs(policy: torch.nn.Module, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return reference_log_probs(policy, ids, mask, reference)

        return self._without_dropout(log_probs, input_ids, attention_mask)

    def save_adapter(self, path: str | Path) -> None:
        """Saves the adapter alone; plain PEFT loads it on the pristine base. Without an adapter, the model.

        Args:
            path: Folder to write, replaced if it exists.

        Raises:
            ModelError: The adapter is in shards that cannot be gathered. Where they can, every process must call this.
        """
        gathered = None
        if self.strategy is not None and isinstance(self.policy, PeftModel):
            gathered = whole_adapter(self.policy, self.strategy)
        if not self.accelerator.is_main_process:
            return
        if isinstance(self.policy, PeftModel):
            identity = base_identity(self.policy)
            write_adapter(self.policy, Path(path), *identity, self.base_fingerprint, gathered)
        else:
            write_model(self.policy, self.processing_class, Path(path))

    def note(self, metrics: Mapping[str, float]) -> None:
        """Puts metrics of this step into its log."""
        for name, value in metrics.items():
            self._metrics["train"][name].append(value)

    def latest_group(self) -> list[dict[str, Any]]:
        """The newest logged completions of one prompt: prompt, completion, rewards by name, advantage, verdicts."""
        rows = min(self.num_generations, len(self._logs["prompt"]))
        return [
            {
                "prompt": self._logs["prompt"][i],
                "completion": self._logs["completion"][i],
                "rewards": {name: values[i] for name, values in self._logs["rewards"].items()},
                "advantage": self._logs["advantages"][i],
                **{name: values[i] for name, values in self._logs["extra"].items() if len(values) > i},
            }
            for i in range(rows)
        ]

    def latest_completions(self) -> list[str]:
        """The newest logged completions, of several prompts."""
        return [completion_text(completion) for completion in self._logs["completion"]]

    def create_optimizer(self, model: torch.nn.Module | None = None) -> torch.optim.Optimizer:
        """Extends ``Trainer.create_optimizer``: the method's own optimizer, which must hold all that trains."""
        kind, given = self.adaptation.method.optimizer, self.optimizer is not None
        if kind != "adamw" and not self.whole_tensors:
            raise ModelError(f"{kind} needs whole gradients and runs with DDP, not in shards", "peft.method")
        if kind == "lora_plus" and not given:
            optimizer_class, arguments = self.optimizer_cls_and_kwargs or self.get_optimizer_cls_and_kwargs(
                self.args, self.model
            )
            arguments = {**arguments, "weight_decay": self.args.weight_decay}
            ratio = self.adaptation.options["loraplus_lr_ratio"]
            self.optimizer = lora_plus_optimizer(self.policy, optimizer_class, arguments, ratio)
        optimizer = super().create_optimizer(model)
        if kind == "lora_fa" and not given:
            precondition_lora_fa(self.policy, optimizer)
        if self.whole_tensors:  # others hold shards under other identities
            check_optimizer(self.model if model is None else model, optimizer)
        return optimizer

    def create_model_card(
        self,
        model_name: str | None = None,
        dataset_name: str | None = None,
        tags: str | list[str] | None = None,
    ) -> None:
        """Replaces TRL's card, which calls an adapter a model and a local base "None", by ours."""
        if not self.accelerator.is_main_process:
            return
        folder = Path(self.args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        further = (tags,) if isinstance(tags, str) else tuple(tags or ())
        self.write_card(folder, model_name, dataset_name, further)

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs: Any,  # noqa: ANN401 (transformers' signature)
    ) -> Any:  # noqa: ANN401
        """Replaces ``Trainer.push_to_hub``, which sends pickles and the tokenizer too, in as many commits as it likes.

        One commit of the adapter, its card, its metrics and curves, once the saved adapter was found to be the trained
        one and no path or token is in any file. The repository is ``args.hub_model_id``, else called as the output
        folder.

        Args:
            commit_message: Of the commit.
            blocking: Whether to wait for the Hub.
            token: Must be None: it comes from the Hub's own login.
            revision: Branch; None: ``args.hub_revision``, else ``main``.
            private: Create the repository for its owner only; None: as ``args.hub_private_repo`` says.
            **kwargs: As in :meth:`create_model_card`.

        Returns:
            As in transformers: a ``CommitInfo``, or its future; None on other processes than the first.

        Raises:
            PerlError: The files or the repository are not fit for it, or the Hub refuses.
            HubOutageError: It cannot be reached.
        """
        if not isinstance(self.policy, PeftModel):
            return super().push_to_hub(commit_message, blocking, token, revision, private, **kwargs)
        check_push(self.args, asked=True, strategy=self.strategy)
        if token is not None or self.args.hub_token is not None:
            raise PerlError("a token comes from the Hub's own login only", "push_to_hub", "hf auth login")
        if not self.accelerator.is_main_process:
            return None
        repo_id = full_repo_id(self.args.hub_model_id or Path(self.args.output_dir).resolve().name)
        with TemporaryDirectory() as place:
            folder = Path(place) / "adapter"
            self.save_adapter(folder)
            vocabulary = self.policy.get_base_model().get_input_embeddings().weight.shape[0]
            probe = torch.arange(min(vocabulary, _PROBE_TOKENS), device=self.args.device)[None]
            check_saved_adapter(self.policy, folder, probe)
            tags = kwargs.get("tags") or ()
            tags = (tags,) if isinstance(tags, str) else tuple(tags)
            name, dataset = kwargs.get("model_name") or repo_id, kwargs.get("dataset_name")
            log = write_log(folder, self.state.log_history)
            if log is not None and importlib.util.find_spec("matplotlib"):
                draw_curves(log, folder / "plots", title=repo_id)
            self.write_card(folder, name, dataset, tags)  # last: it is rendered from what else is there
            if is_replaced(self, "create_model_card"):
                self.create_model_card(model_name=name, dataset_name=dataset, tags=list(tags))
                (folder / CARD).write_bytes(take(Path(self.args.output_dir), CARD, LARGEST_CARD))
                (folder / RUN_FACTS).unlink()  # from which that card was not rendered
            package = pack_folder(folder)
        return push_script(
            package,
            repo_id,
            message=commit_message or "End of training",
            private=bool(self.args.hub_private_repo if private is None else private),
            revision=revision or self.args.hub_revision,
            blocking=blocking,
        )

    def write_card(
        self, folder: Path, name: str | None = None, dataset: str | None = None, tags: tuple[str, ...] = ()
    ) -> None:
        """Writes ``README.md``: what the arguments and the state of the training tell of the adapter.

        Args:
            folder: Where.
            name: What the adapter is called; None: by its method and base.
            dataset: Name of the training problems.
            tags: Further ones.
        """
        args, config = self.args, self.adaptation.config
        base, revision = public_name(*base_identity(self.policy))
        asked = ("r", "lora_alpha", "target_modules")
        facts = {
            "perl": perl_version(),
            "name": plain_word(name) if name else None,
            "repo_id": args.hub_model_id if has_hub_form(args.hub_model_id or "") else None,
            "base": label(base),
            "revision": revision,
            "quantization": quantisation_of(base_of(self.policy)),
            "method": self.adaptation.method.name,
            "dataset": plain_word(label(dataset)) if dataset else None,
            "trainable_parameters": trainable_parameters(self.policy),
            "step": self.state.global_step,
            "seed": args.seed,
            "loss": args.loss_type,
            "ratio_level": args.importance_sampling_level,
            "settings": showable_settings(
                {
                    **{key: _readable(getattr(config, key)) for key in asked if getattr(config, key, None) is not None},
                    "learning rate": f"{args.learning_rate:g}",
                    "KL coefficient (beta)": args.beta,
                    "completions a prompt": self.num_generations,
                }
            ),
            "rewards": dict(zip(self.reward_func_names, self.reward_weights.tolist(), strict=True)),
            "tags": list(tags),
            "versions": installed_versions(quantised=quantisation_of(base_of(self.policy)) is not None),
        }
        write_folder_card(folder, made_facts(facts, CARD))

    def _send_telemetry(self) -> None:
        """Replaces TRL's usage statistics: nothing is sent."""

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        """Extends TRL's log: where no step is left for the entry that closes a training, it has the last one's."""
        metrics = list(self._metrics["train"]) if self.model.training else []
        if "train_runtime" in logs:
            logs.update({name: value for name, value in self._last_logged.items() if name not in metrics})
        super().log(logs, start_time)
        self._last_logged |= {name: logs[name] for name in metrics}

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Extends TRL's rollouts: advantages are ours, exactly 0 in a group whose rewards agree.

        Log-probabilities come last, when it is known which rows need them; TRL computes them before the rewards, and
        takes for the reference the policy with its adapter off or a copy named "ref".
        """
        generations = self.num_generations if self.model.training else self.num_generations_eval
        with self.without_log_probs(), received(self, "_calculate_rewards") as rewards:
            output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        rewards_PGK = rewards[-1].view(-1, generations, rewards[-1].size(1))
        advantages_N = self._advantages(rewards_PGK)
        mode = "train" if self.model.training else "eval"
        self._log_unscored(rewards_PGK, self._metrics[mode])
        # TRL's takes equal rewards that are not dyadic, and groups without a reward, for different ones.
        flat_P = (advantages_N.view(-1, generations) == 0).all(dim=1)
        self._metrics[mode]["frac_reward_zero_std"][-1] = flat_P.float().mean().item()
        logged = self._logs["advantages"]
        for _ in range(min(len(advantages_N), len(logged))):
            logged.pop()
        logged.extend(advantages_N.tolist())
        first = self.accelerator.process_index * len(inputs)
        output["advantages"] = advantages_N[first : first + len(inputs)]
        if not is_replaced(self, "_generate_and_score_completions"):  # a subclass may change advantages yet
            output["largest_advantage"] = advantages_N.abs().max()
        self.add_log_probs(output)
        return output

    def _advantages(self, rewards_PGK: torch.Tensor) -> torch.Tensor:
        """(N,) advantages over all processes, from their rewards."""
        weights_K = self.reward_weights.to(rewards_PGK.device)
        if self.multi_objective_aggregation == "normalize_then_sum":
            return normalized_sum_advantages(rewards_PGK, weights_K).flatten()
        rewards_PG = weighted_rewards(rewards_PGK, weights_K)
        return group_advantages(rewards_PG, scale=self.scale_rewards).flatten()

    def _log_unscored(self, rewards_PGK: torch.Tensor, metrics: dict[str, list[float]]) -> None:
        """Logs how many rows have no reward; TRL's "reward" also sums up what is known of those."""
        rewards_PG = weighted_rewards(rewards_PGK, self.reward_weights)
        metrics["rows/unscored"].append(float(rewards_PG.isnan().sum()))
        partly_PGK = partly_scored(rewards_PGK)
        if not partly_PGK.any():
            return
        metrics["reward"][-1] = rewards_PG.nanmean().item()
        metrics["reward_std"][-1] = nan_std(rewards_PG.view(1, -1)).item()
        if not self._said_of_unscored and self.accelerator.is_main_process:
            self._said_of_unscored = True
            partly_K = partly_PGK.flatten(end_dim=1).any(dim=0)
            logger.warning(
                "%s gave None for some completions of a group: they have no reward and are not trained on, %d of %d "
                "(logged as rows/unscored)",
                ", ".join(name for name, partly in zip(self.reward_func_names, partly_K, strict=True) if partly),
                int(partly_PGK.any(dim=2).sum()),
                rewards_PG.numel(),
            )

    @staticmethod
    def _rewards(reward_funcs: Any, args: GRPOConfig) -> tuple[Any, list[float] | None]:  # noqa: ANN401
        """The reward functions and their weights, with the process reward that the arguments ask for."""
        if any(judge in (reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]) for judge in JUDGES):
            start_workers()  # they import while the weights are read
        if not isinstance(args, PeftRLConfig):
            return reward_funcs, args.reward_weights
        made: Any = args.process_reward_kwargs  # text only until transformers has parsed it
        return with_process_reward(reward_funcs, args.reward_weights, args.process_reward_weight, made)

    def _add_callbacks(self) -> None:
        self.add_callback(AdapterCallback(self))
        self.add_callback(MaskedRows())
        if isinstance(self.args, PeftRLConfig) and self.args.flat_reward_steps:
            self.add_callback(FlatRewards(self.args.flat_reward_steps, self.latest_completions))

    def _reference(self) -> Reference | None:
        """The reference that the arguments ask for; a model without an adapter has one only if the loss needs it."""
        spec = (self.args.reference if isinstance(self.args, PeftRLConfig) else None) or (
            "initial" if self._continued else "base"
        )
        return Reference(self.policy, spec) if isinstance(self.policy, PeftModel) or self.beta != 0.0 else None

    def _without_dropout(self, log_probs: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:  # noqa: ANN401
        with evaluating(self.policy), in_float32(self.policy):
            return log_probs(self.policy, input_ids.to(self.args.device), attention_mask.to(self.args.device))


@contextlib.contextmanager
def _as_trl_may_read(args: GRPOConfig, weights: list[float] | None, *, loaded: bool) -> Iterator[None]:
    """The arguments without what TRL's constructor would act upon; see docs/stack.md.

    Args:
        args: Of the trainer.
        weights: Of the rewards, the process reward's among them.
        loaded: Whether the model that is passed on was loaded here, as the arguments say.
    """
    shown: dict[str, Any] = {
        "beta": 0.0,  # TRL would add an adapter or load a model for the reference
        "use_vllm": False,  # TRL's engine is sent the whole model, merged in place
        "reward_weights": weights,
    }
    if loaded:
        shown["model_init_kwargs"] = None  # they were used, and TRL would say that they are not
    kept = {name: getattr(args, name) for name in shown}
    try:
        for name, value in shown.items():
            setattr(args, name, value)
        yield
    finally:
        for name, value in kept.items():
            setattr(args, name, value)


def _readable(value: Any) -> Any:  # noqa: ANN401 (a setting of any config)
    """A setting as people write it: names in order, without brackets."""
    return ", ".join(sorted(value)) if isinstance(value, set | list) else value
