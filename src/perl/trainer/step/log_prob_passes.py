"""LogProbPasses: how rows go through the policy, packed, in as few micro-batches as memory allows.

padded batch -> rows -> packed micro-batches -> log-probabilities of policy, old policy and reference as TRL wants them
"""

import logging
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from trl.models.utils import disable_gradient_checkpointing

from perl.errors import warn
from perl.packing.compiled import check_compiler, compile_layers
from perl.packing.forward import Passes, Read, choose_passes, score, score_all, whole_passes
from perl.packing.fused_lora import fuse_lora
from perl.packing.head import EntropyKind, add_scored_forward, logit_settings
from perl.packing.in_step import InStep, Kind
from perl.packing.memory import CPU_TOKENS, free_bytes, measure, plan_memory
from perl.packing.micro_batches import (
    MicroBatch,
    Window,
    have_advantage,
    idle_micro_batch,
    join,
    micro_batches,
    rows_of,
)
from perl.packing.rope import rope_width
from perl.packing.rows import Row
from perl.policy.critic import Critic
from perl.policy.model import base_of, trainable_parameters
from perl.policy.reference import Reference
from perl.run.devices import threads_for
from perl.trainer.arguments.config import own_setting
from perl.trainer.live import LiveTrainer, most

logger = logging.getLogger("perl")

MASKED = "rows/masked_fraction"
"""Share of the rows of which no token is in the loss, as of truncated ones with ``mask_truncated_completions``."""
# Inputs of multimodal models, handed through to the forward pass as TRL does.
_IMAGES = (
    *("pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes"),
    *("num_tiles", "image_sizes", "token_type_ids", "mm_token_type_ids", "image_position_ids"),
)
FORWARD_ONLY = 2
"""How much longer a micro-batch without gradient may be, which keeps no activations."""


class LogProbPasses:
    """Runs rows without padding, wherever the model allows it. Owns the budget of tokens in a micro-batch.

    Attributes:
        critic: That trains beside the policy, on the same device and with the same budget; None: there is none.
    """

    critic: Critic | None = None

    def __init__(
        self,
        live: LiveTrainer,
        *,
        longest_prompt: Callable[[int], int],
        asleep_bytes: Callable[[], int],
    ) -> None:
        """Teaches a complete model to run rows without padding.

        Args:
            live: Has the policy, and arguments that decide how rows may be run.
            longest_prompt: Tokens of the longest prompt that may come, from those of the longest seen.
            asleep_bytes: Bytes of the device that are free now and taken again before the next rollouts.
        """
        self._live, self._whole_tensors = live, live.whole_tensors
        self._longest_prompt, self._asleep_bytes = longest_prompt, asleep_bytes
        args, model = live.args, base_of(live.policy)
        # Tokens in a micro-batch; 0: the rows of each as TRL cuts them; None: as memory allows.
        self._budget: int | None = own_setting(args, "train_tokens_per_microbatch")
        self._copy_cost = 0.0
        self._scored_tokens: int | None = None
        # Of a base in shards, in each of whose passes the processes wait for each other.
        self.in_step = None if live.whole_tensors else InStep(model)
        # A fused head has no gradient of the entropy.
        self._fused_head: bool | None = (
            False if own_setting(args, "entropy_weight") else own_setting(args, "fused_head")
        )
        self._compiles: bool = own_setting(args, "compile_layers")
        self._packs: bool = own_setting(args, "padding_free")
        self._shares: bool = own_setting(args, "share_prompts")
        if own_setting(args, "fused_lora"):
            fuse_lora(live.policy)
        self._width_of = rope_width(model)
        if self._compiles:
            check_compiler(live.accelerator.device)
        logits = logit_settings(model.config, temperature=args.temperature, float32=args.cast_lm_head_to_fp32)
        add_scored_forward(model, logits, fused=self._fused_head, compiled=self._compiles)

    @cached_property
    def passes(self) -> Passes:
        """How rows go through this model; found out, with a warning if it is not as requested, when first needed."""
        live = self._live
        # With dropout a shared prompt would draw one mask for all.
        dropout = any(isinstance(module, torch.nn.Dropout) and module.p > 0 for module in live.policy.modules())
        with live.accelerator.autocast():  # whoever asks: the types decide what difference is rounding
            how = choose_passes(live.policy, padding_free=self._packs, share=self._shares and not dropout)
        if how.why:
            what = "prompts are not shared" if how.packed else "rows are padded to the longest of each pass"
            warn("PRL322", "%s: %s", what, how.why)
        if self._compiles:
            why = compile_layers(base_of(live.policy), packed=how.packed, whole=self._whole_tensors)
            if why:
                warn("PRL322", "layers are not compiled: %s", why)
        return how

    @property
    def tokens(self) -> int:
        """The budget of a micro-batch with gradient; 0: rows as TRL cuts them."""
        return CPU_TOKENS if self._budget is None else self._budget

    @property
    def tokens_without_gradient(self) -> int:
        """The budget of a micro-batch without gradient; less where that was too much before."""
        usual = FORWARD_ONLY * (self.tokens or CPU_TOKENS)
        return usual if self._scored_tokens is None else min(usual, self._scored_tokens)

    def window(self, batches: Sequence[dict[str, Any]], weights: Sequence[torch.Tensor]) -> Window:
        """The rows of several micro-batches of TRL's, with the weights of their tokens."""
        return join(batches, weights, self._width_of)

    def plan(self, window: Window, chosen: Sequence[int], budget: int) -> list[MicroBatch]:
        """The micro-batches of a window, as many on every process; at least one, so that every gradient is there.

        Args:
            window: The rows.
            chosen: Indices of those that are run.
            budget: Tokens in a micro-batch.
        """
        plan = micro_batches(window, chosen, budget=budget, **self._grouping(window.rows))
        idle = most(self._live.accelerator, max(len(plan), 1)) - len(plan)
        return plan + [self.idle(window) for _ in range(idle)]

    def idle(self, window: Window) -> MicroBatch:
        """A micro-batch that adds exactly zero to every gradient."""
        return idle_micro_batch(window, packed=self.passes.packs(window.rows))

    def lower_budget(self, longest: int, *, halve: bool) -> None:
        """Fewer tokens in a micro-batch from now on.

        Args:
            longest: Tokens of the longest one that was too much.
            halve: Whether half of that; else as many.
        """
        self._budget = max(min(self._budget or longest, longest) // 2, 1) if halve else longest

    def recompute_activations(self) -> bool:
        """Has activations computed again in backward passes from now on; False: they are already, or cannot be."""
        model = base_of(self._live.policy)
        if model.is_gradient_checkpointing or not model.supports_gradient_checkpointing:
            return False
        options = dict(self._live.args.activation_checkpointing_kwargs or {"use_reentrant": False})
        every, offload = options.pop("every_n_layers", 1), options.pop("offload", False)
        model.activation_checkpointing_enable(options, every_n_layers=every, offload=offload)
        if self.in_step is not None:
            self.in_step.forget()
        model.enable_input_require_grads()  # without it reentrant recomputation of a frozen base has no gradient
        return True

    def of_padded(
        self,
        model: torch.nn.Module,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        columns: int,
        entropy: EntropyKind = "none",
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(N, T) log-probabilities of the completions of a batch that TRL has padded, and their entropies.

        Args:
            model: The policy, as TRL runs it.
            input_ids: (N, P + T) prompts and completions.
            attention_mask: (N, P + T).
            columns: T.
            entropy: Whether entropies are wanted, and with a gradient.
        """
        parts = (slice(None, -columns), slice(-columns, None))
        ids, masks = [input_ids[:, part] for part in parts], [attention_mask[:, part] for part in parts]
        names = ("prompt_ids", "completion_ids", "prompt_mask", "completion_mask")
        rows = rows_of(dict(zip(names, [*ids, *masks], strict=True)), masks[1], self._width_of)
        if not torch.is_grad_enabled() and entropy == "none":
            return self._score_all(model, rows, columns), None
        with self._live.accelerator.autocast():
            return score(
                model,
                rows,
                [[index] for index in range(len(rows))],
                # Equal tokens of a group have equal entropies in a rectangle only, and a quantile must not divide them.
                packed=self.passes.packs(rows) and self._live.args.top_entropy_quantile >= 1.0,
                columns=columns,
                entropy=entropy,
            )

    def add(
        self,
        rollouts: dict[str, Any],
        metrics: dict[str, list[float]],
        *,
        old: bool = False,
        reference: Reference | None = None,
        skips: bool = False,
        score: Callable[[dict[str, Any]], torch.Tensor] | None = None,
    ) -> None:
        """Gives rollouts the log-probabilities of the old policy and the reference, where a row's loss needs them.

        Args:
            rollouts: TRL's padded tensors; gets ``old_per_token_logps`` and ``ref_per_token_logps``, (N, T).
            metrics: Gets the share of rows that are masked out.
            old: Whether the old policy's: an update lies between rollout and loss, or they are requested; else the
                training's own micro-batches have them.
            reference: Whose, for a KL term.
            skips: Whether zero-advantage samples need none.
            score: Scores all rows of a padded batch, where TRL's hook has to; else only rows that need it are scored.
        """
        self._plan_memory(rollouts["prompt_ids"].size(1))
        mask_NT = rollouts["completion_mask"] * rollouts.get("tool_mask", 1)
        needed_N = mask_NT.any(dim=1)
        masked_N = self._live.accelerator.gather(~needed_N)
        metrics[MASKED].append(masked_N.float().mean().item())
        if skips and "largest_advantage" in rollouts:
            needed_N &= have_advantage(rollouts["advantages"], rollouts["largest_advantage"])

        def scored() -> torch.Tensor:
            if score is not None:
                return score(rollouts)
            return self._scattered(rollouts, mask_NT, needed_N.nonzero().flatten())

        if old:
            rollouts["old_per_token_logps"] = scored()
        if reference is not None:
            with reference.in_place_of(self._live.policy):
                rollouts["ref_per_token_logps"] = scored()

    def values(self, rollouts: dict[str, Any], critic: Critic) -> torch.Tensor:
        """(N, T) the critic's value of the state before each completion token that counts, without gradient; else 0.

        Args:
            rollouts: TRL's padded tensors.
            critic: Of this policy.
        """
        self._plan_memory(rollouts["prompt_ids"].size(1))
        mask_NT = rollouts["completion_mask"] * rollouts.get("tool_mask", 1)
        with critic.in_place_of(self._live.policy):
            return self._scattered(rollouts, mask_NT, mask_NT.any(dim=1).nonzero().flatten(), critic.values)

    def _scattered(
        self, rollouts: dict[str, Any], mask_NT: torch.Tensor, indices: torch.Tensor, read: Read | None = None
    ) -> torch.Tensor:
        """(N, T) log-probabilities of some rows, or what is read in their place, zeros for the others."""
        rows = rows_of(rollouts, mask_NT, self._width_of)
        result_NT = torch.zeros(mask_NT.shape, device=mask_NT.device)
        model, columns = self._live.model, mask_NT.size(1)
        if len(indices) == 0 and not self._whole_tensors:  # the other processes' shards need this one
            self._score_all(model, rows[:1], columns, read)
        elif len(indices):
            chosen = [rows[index] for index in indices.tolist()]
            result_NT[indices] = self._score_all(model, chosen, columns, read).to(result_NT)
        return result_NT

    def _score_all(
        self, model: torch.nn.Module, rows: Sequence[Row], columns: int, read: Read | None = None
    ) -> torch.Tensor:
        """(N, T) log-probabilities without gradient; on too little memory once more with half the tokens.

        Where the base is in shards, all processes run theirs again.

        Raises:
            OutOfMemoryError: A single row does not fit.
        """
        longest = self._agreed(max(row.tokens for row in rows))
        while True:
            found = self._score_in_passes(model, rows, columns, read)
            if not self._agreed(int(found is None)) and found is not None:
                return found
            if self.tokens_without_gradient <= longest:  # a single row cannot be divided
                raise torch.OutOfMemoryError("a single row does not fit: shorten train.max_completion_length")
            self._scored_tokens = max(self.tokens_without_gradient // 2, longest)
            torch.cuda.empty_cache()
            warn("PRL321", "out of memory: rollouts are scored again with %d tokens in a pass", self._scored_tokens)

    def _agreed(self, number: int) -> int:
        """The largest of all processes' numbers, where each pass is taken together."""
        return number if self._whole_tensors else most(self._live.accelerator, number)

    def _score_in_passes(
        self, model: torch.nn.Module, rows: Sequence[Row], columns: int, read: Read | None
    ) -> torch.Tensor | None:
        """None: memory did not suffice on this process."""
        live, run = self._live, whole_passes
        checkpointing = disable_gradient_checkpointing(live.model, live.args.gradient_checkpointing_kwargs)
        with torch.no_grad(), checkpointing, live.accelerator.autocast(), threads_for(model):
            if self.in_step is not None:
                one = min(rows, key=lambda row: row.tokens)
                kind: Kind = "scoring" if read is None else "values"  # which take no head
                how: dict[str, Any] = {"packed": self.passes.packs(rows), "columns": columns, "read": read}
                self.in_step.rehearse(kind, partial(score, model, [one], [[0]], **how))
                run = partial(self._run_in_step, self.in_step, kind)
            return score_all(
                model,
                rows,
                budget=self.tokens_without_gradient,
                columns=columns,
                run=run,
                read=read,
                **self._grouping(rows),
            )

    def _run_in_step(
        self, together: InStep, kind: Kind, passes: Sequence[Callable[[], torch.Tensor]]
    ) -> list[torch.Tensor] | None:
        """The results of passes, and on each process as many as the one with most has."""
        idle = self._agreed(len(passes)) - len(passes)

        def again() -> torch.Tensor:
            with torch.random.fork_rng():  # a pass may draw, and this one would not be there with whole tensors
                return passes[0]()

        results = together.run(kind, [*passes, *[again] * idle])
        return None if results is None else results[: len(passes)]

    def _grouping(self, rows: Sequence[Row]) -> dict[str, Any]:
        """How rows are put into micro-batches."""
        packed = self.passes.packs(rows)
        return {"packed": packed, "share": packed and self.passes.shared, "copy_cost": self._copy_cost}

    def _plan_memory(self, longest_seen: int) -> None:
        """Measures what fits, once, if it is not given; every process must ask, since they go by the least of them."""
        if self._budget is not None:
            return
        self._budget = CPU_TOKENS
        live = self._live
        if live.accelerator.device.type != "cuda":
            return
        with (
            live.accelerator.autocast(),
            disable_gradient_checkpointing(live.model, live.args.gradient_checkpointing_kwargs),
        ):
            policy, packed, shared = live.policy, self.passes.packed, self.passes.shared
            per_token = measure(policy, packed=packed, shared=shared, fused_head=self._fused_head)
            if self.critic is not None:  # whose passes may keep more
                with self.critic.in_place_of(policy):
                    of_critic = measure(policy, packed=packed, shared=shared, read=self.critic.values)
                per_token = per_token.at_least(of_critic)
        longest = self._longest_prompt(longest_seen) + (live.args.max_completion_length or 0)
        free = free_bytes(self._asleep_bytes())
        trained = trainable_parameters(live.policy)
        trained += 0 if self.critic is None else sum(parameter.numel() for parameter in self.critic.parameters)
        plan = plan_memory(free, trained, per_token, longest_row=longest)
        found = torch.tensor([[plan.tokens, int(not plan.recompute)]], device=live.accelerator.device)
        tokens, fits = live.accelerator.gather(found).amin(dim=0).tolist()
        self._budget, self._copy_cost = int(tokens), plan.copy_cost
        model = base_of(live.policy)
        recompute_asked = getattr(live.args, "recompute_asked", True)  # by the user, for or against it
        if fits and model.is_gradient_checkpointing and not recompute_asked:
            model.activation_checkpointing_disable()
        logger.info("%d tokens in a pass, activations %s", tokens, "kept" if fits else "computed again")


def images_of(rollouts: dict[str, Any]) -> dict[str, Any]:
    """The inputs of a multimodal model that rollouts have beside their tokens."""
    return {name: rollouts[name] for name in _IMAGES if rollouts.get(name) is not None}


def scored_as_trl(trainer: Any, rollouts: dict[str, Any]) -> torch.Tensor:  # noqa: ANN401 (ours)
    """(N, T) log-probabilities without gradient, padded as TRL has them: of images, or by a subclass's method."""
    args, hook, model = trainer.args, trainer._get_per_token_logps_and_entropies, trainer.model
    rows = args.per_device_train_batch_size if model.training else args.per_device_eval_batch_size
    ids = torch.cat([rollouts["prompt_ids"], rollouts["completion_ids"]], dim=1)
    mask = torch.cat([rollouts["prompt_mask"], rollouts["completion_mask"]], dim=1)
    columns = rollouts["completion_ids"].size(1)
    with torch.no_grad(), disable_gradient_checkpointing(model, args.gradient_checkpointing_kwargs):
        found: torch.Tensor = hook(model, ids, mask, columns, rows, **images_of(rollouts))[0]
    return found
