"""TRL's AsyncGRPOTrainer on given rollouts: its packing and its training step, without its servers.

Case, Scale, rollouts -> trainer, Meter

Its packing is that of ``trl.experimental.async_grpo.packing``: a row is a tree of the samples' tokens, what they share
is run once. All samples of a micro-batch make one row. Four things stand in for what is not there: the rollouts lie in
the queue before training begins; nothing is sent to an engine; the model is given instead of read from a folder; and
the kernel is the variable-length one of PyTorch (FlashAttention 2), as ours is, where TRL fetches FlashAttention 3
from the Hub. On a CPU each segment runs by SDPA. Building the trees is not in a step's seconds, as it lies before a
step begins.
"""

import itertools
import queue
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from peft import LoraConfig
from step_cases import Case, Rollout, Scale, make_base, make_tokenizer
from step_turns import RANK, Begin, End, Meter
from torch.nn import functional
from torch.nn.attention.varlen import varlen_attn
from transformers import PrinterCallback
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer, packing
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from perl.packing.attention import KERNEL_CALL

NO_SYNC = 10**9  # steps between two updates of an engine


def make_async_trainer(
    case: Case, scale: Scale, rollouts: list[Rollout], folder: str
) -> tuple[AsyncGRPOTrainer, Meter]:
    """As :func:`step_turns.make_trainer`, whose settings it is given where it has them.

    Args:
        case: The lengths.
        scale: The model; ``rows`` are the samples of a micro-batch.
        rollouts: Of all steps, in their order.
        folder: For what the trainer writes.
    """
    packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=attend)

    def given_base(_: str, *, attn_implementation: str, **__: Any) -> Any:  # noqa: ANN401
        base = make_base(case, scale)
        base.set_attn_implementation(attn_implementation)
        return base

    async_grpo_trainer.create_model_from_path = given_base
    async_grpo_trainer.get_peak_flops_per_device = lambda *_: None  # for an MFU of its own; fails without a GPU
    arguments = {"optim": "sgd", "learning_rate": 1.0} | scale.arguments
    meter = Meter(on_cuda=not arguments["use_cpu"])
    trainer = AsyncGRPOTrainer(
        model="given",
        args=AsyncGRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=scale.rows,
            gradient_accumulation_steps=scale.groups * case.generations // scale.rows,
            num_generations=case.generations,
            token_budget=0,  # rows of so many samples
            max_steps=len(rollouts) // scale.groups,
            max_staleness=NO_SYNC,
            weight_sync_steps=NO_SYNC,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
            seed=0,
            **arguments,
        ),
        train_dataset=Dataset.from_dict({"prompt": ["p"]}),
        processing_class=make_tokenizer(case.vocabulary),
        peft_config=LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM"),
        rollout_worker=(worker := Queued([*rollouts, *rollouts[-scale.groups :]], case.vocabulary)),  # one read ahead
        weight_transfer=Unsent(),
        callbacks=[Begin(meter)],
    )
    trainer.add_callback(End(meter))
    trainer.remove_callback(PrinterCallback)

    def release() -> None:
        """A thread of the queue's data set never ends, and would keep the trainer and its model."""
        trainer._rollout_dataset.model_version_fn = trainer._rollout_dataset.check_health_fn = None

    worker.stop = release
    return trainer, meter


class Queued:
    """A worker whose rollouts are there before training begins; :class:`RolloutWorkerProtocol`."""

    def __init__(self, rollouts: list[Rollout], vocabulary: int) -> None:
        """Puts all of them into the queue, with the log-probs of a policy that knows nothing."""
        self.rollout_buffer: queue.Queue[RolloutSample] = queue.Queue()
        self.metrics_queue: queue.Queue[dict[str, Any]] = queue.Queue()
        self.stop: Callable[[], object] = object
        for group, rollout in enumerate(rollouts):
            rewards = np.array(rollout.rewards)
            advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-8)
            for completion, advantage in zip(rollout.completions, advantages.tolist(), strict=True):
                ids = np.array([*rollout.prompt, *completion])
                mask = np.arange(len(ids)) >= len(rollout.prompt)
                old = np.where(mask, -np.log(vocabulary), 0.0).astype(np.float32)
                self.rollout_buffer.put(RolloutSample([], [], ids, mask.astype(np.int64), old, advantage, 1, group, {}))

    def start(self) -> None:
        """Nothing is to be written."""

    def update_model_version(self, model_version: int) -> None:
        """Any version will do."""

    def check_health(self, stale_after_s: float) -> None:
        """Called when the queue is empty for some seconds: more was asked for than a training takes."""
        raise RuntimeError(f"no rollouts are left, {stale_after_s} s before they would be late")


class Unsent:
    """Weights that go nowhere; :class:`WeightTransferProtocol`."""

    def __getattr__(self, _: str) -> Any:  # noqa: ANN401
        """Any of its methods."""
        return lambda *_: None


def attend(
    query_LHD: torch.Tensor,
    key_SKD: torch.Tensor,
    value_SKD: torch.Tensor,
    query_ends: torch.Tensor,
    key_ends: torch.Tensor,
    longest_query: int,
    longest_key: int,
    *,
    softmax_scale: float | None,
    **_: Any,  # noqa: ANN401 (causal, without a window: what the models here ask for)
) -> torch.Tensor:
    """What TRL asks of FlashAttention 3: causal attention, a segment's keys end where its queries end."""
    groups = query_LHD.size(1) // key_SKD.size(1)
    if not query_LHD.is_cuda:
        return _by_sdpa(query_LHD, key_SKD, value_SKD, query_ends.tolist(), key_ends.tolist(), softmax_scale)
    if KERNEL_CALL is None:
        raise RuntimeError("this torch has no variable-length kernel that is known")
    if groups > 1 and not KERNEL_CALL.grouped:
        key_SKD, value_SKD = (tensor.repeat_interleave(groups, dim=1) for tensor in (key_SKD, value_SKD))
    ends = [ends.to(torch.int32) for ends in (query_ends, key_ends)]
    options = KERNEL_CALL.keywords(softmax_scale, grouped=groups > 1)
    tensors = [tensor.contiguous() for tensor in (query_LHD, key_SKD, value_SKD)]
    attended_LHD: torch.Tensor = varlen_attn(*tensors, *ends, longest_query, longest_key, **options)
    return attended_LHD


def _by_sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    queries: list[int],
    keys: list[int],
    scale: float | None,
) -> torch.Tensor:
    """(L, H, D), a segment at a time."""
    found = []
    for (begin, end), (first, last) in zip(itertools.pairwise(queries), itertools.pairwise(keys), strict=True):
        q, k, v = (x.transpose(0, 1)[None] for x in (query[begin:end], key[first:last], value[first:last]))
        mask = torch.ones(end - begin, last - first, dtype=torch.bool).tril(last - first - (end - begin))
        found.append(functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)[0])
    return torch.cat(found, dim=1).transpose(0, 1)
