"""An optimizer step around the gradient: memory, what a subclass replaces, models that are padded, what is logged.

That the gradient itself is TRL's is the matter of test_gradient_equality.py.
"""

import copy
import logging

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

from perl import PeftGRPOTrainer, PeftRLConfig
from perl.packing.forward import score
from perl.trainer.assembly import longest_that_may_come
from tests.oracles.rollouts import GENERATIONS, LONGEST, MIXED, ROWS, preset_reward, rollout_function, rollout_table
from tests.oracles.two_trainers import QUIET, base, norm, relative_difference, tokenizer

ALL_LIVE = (("live", "half", "live", "half"),)
ALL_DEAD = (("dyadic", "tenths", "dyadic", "tenths"),)
LORA = LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"])


def trainer_of(trainer_class=PeftGRPOTrainer, kinds=MIXED, adapter=LORA, model=None, **options):
    config_class = PeftRLConfig if issubclass(trainer_class, PeftGRPOTrainer) else GRPOConfig
    table = rollout_table(kinds)
    args = config_class(
        "run",
        **{
            **QUIET,
            "optim": "sgd",
            "learning_rate": 0.1,
            "max_steps": len(kinds),
            "num_generations": GENERATIONS,
            "per_device_train_batch_size": ROWS // options.get("gradient_accumulation_steps", 1),
            "per_device_eval_batch_size": ROWS,
            "max_completion_length": LONGEST,
            "shuffle_dataset": False,
            **options,
        },
    )
    return trainer_class(
        model=model or copy.deepcopy(base(torch.float32)),
        reward_funcs=preset_reward,
        args=args,
        train_dataset=Dataset.from_dict({"prompt": list(table)}),
        eval_dataset=Dataset.from_dict({"prompt": list(table)[: ROWS // GENERATIONS]}),
        processing_class=tokenizer(),
        peft_config=copy.deepcopy(adapter),
        rollout_func=rollout_function(table, log_probs=False, tools=False),
    )


def logged(trainer) -> list[dict[str, float]]:
    return [entry for entry in trainer.state.log_history if "loss" in entry]


class Cramped:
    """A device on which a pass with gradient over more than so many tokens does not fit."""

    def __init__(self, policy, most: int) -> None:
        self.refused: list[int] = []
        self.most = most
        policy.get_input_embeddings().register_forward_pre_hook(self.look)

    def look(self, _, inputs):
        tokens = inputs[0].numel()
        if torch.is_grad_enabled() and tokens > self.most:
            self.refused.append(tokens)
            raise torch.OutOfMemoryError(f"{tokens} tokens")


def test_rollouts_that_do_not_fit_are_scored_in_shorter_passes_with_the_same_numbers(caplog, monkeypatch):
    refused: list[int] = []

    def cramped(model, rows, *args, **kwargs):
        if sum(row.tokens for row in rows) > 60:
            refused.append(len(rows))
            raise torch.OutOfMemoryError("scoring")
        return score(model, rows, *args, **kwargs)

    adapters = []
    for device in (score, cramped):
        trainer = trainer_of(beta=0.04, share_prompts=False, kinds=MIXED[:2])
        monkeypatch.setattr(
            "perl.packing.forward.score", device
        )  # of passes without gradient; the others have their own name
        with caplog.at_level(logging.WARNING, "perl"):
            trainer.train()
        adapters.append({n: p.detach().clone() for n, p in trainer.model.named_parameters() if p.requires_grad})
    assert caplog.text.count("rollouts are scored again with") == len(refused) > 1
    assert relative_difference(adapters[1], adapters[0]) <= 1e-6


class FailsOnce:
    """A device on which one backward pass does not fit, once."""

    def __init__(self, policy, number: int) -> None:
        self.calls, self.failed, self.number = 0, False, number
        policy.get_input_embeddings().register_forward_pre_hook(self.look)

    def look(self, *_):
        if not torch.is_grad_enabled():
            return
        self.calls += 1
        if self.calls == self.number:
            self.failed = True
            raise torch.OutOfMemoryError("once")


@pytest.mark.nightly
def test_a_step_gives_the_same_adapter_whichever_of_its_passes_did_not_fit():
    options = {"gradient_accumulation_steps": 4, "train_tokens_per_microbatch": 30, "kinds": MIXED[:1], "beta": 0.04}
    adapters, number, passes = [], 0, None
    while passes is None or number <= passes:
        trainer = trainer_of(**options)
        device = FailsOnce(trainer.policy, number)
        trainer.train()
        adapters.append({n: p.detach().clone() for n, p in trainer.model.named_parameters() if p.requires_grad})
        passes = passes or int(logged(trainer)[0]["tokens/passes"])
        assert device.failed == (number > 0)
        number += 1
    assert passes >= 3
    for adapter in adapters[1:]:
        assert relative_difference(adapter, adapters[0]) <= 1e-6


class NoRoomForActivations:
    """A device on which a pass with gradient fits only if its activations are not kept."""

    def __init__(self, policy) -> None:
        self.policy, self.refused, self.recomputed = policy, 0, 0
        policy.get_input_embeddings().register_forward_pre_hook(self.look)

    def look(self, *_):
        if not torch.is_grad_enabled():
            return
        if not self.policy.get_base_model().is_gradient_checkpointing:
            self.refused += 1
            raise torch.OutOfMemoryError("activations")
        self.recomputed += 1


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing.*is deprecated:FutureWarning")  # called by TRL
def test_activations_are_computed_again_before_a_run_ends_for_want_of_memory(caplog):
    kwargs = {"activation_checkpointing_kwargs": {"use_reentrant": False}}
    adapters = []
    for cramped in (False, True):
        trainer = trainer_of(**kwargs)
        device = NoRoomForActivations(trainer.policy) if cramped else None
        with caplog.at_level(logging.WARNING, "perl"):
            trainer.train()
        adapters.append({n: p.detach().clone() for n, p in trainer.model.named_parameters() if p.requires_grad})
    assert device.refused > 1
    assert device.recomputed >= len(MIXED)
    assert caplog.text.count("with activations computed again") == 1
    assert relative_difference(adapters[1], adapters[0]) <= 1e-6


def test_a_row_that_does_not_fit_by_itself_ends_the_run_with_advice(caplog):
    trainer = trainer_of()
    Cramped(trainer.policy, 3)
    with pytest.raises(torch.OutOfMemoryError, match=r"shorten train\.max_completion_length"):
        trainer.train()
    assert caplog.text.count("with activations computed again") == 1  # tried before


def test_the_longest_prompt_that_may_come_is_the_data_sets():
    trainer = trainer_of()
    trainer.rollout_func = None
    texts = ["t2 t3", " ".join(["t4"] * 9), "t5 t6 t7"]
    trainer.train_dataset = Dataset.from_dict({"prompt": texts * 40})
    assert longest_that_may_come(trainer, 4) == 9
    assert longest_that_may_come(trainer, 12) == 12
    trainer.train_dataset = trainer.train_dataset.to_iterable_dataset()
    assert longest_that_may_come(trainer, 4) == 4  # can be read only once
    trainer.train_dataset, trainer.rollout_func = Dataset.from_dict({"prompt": texts}), preset_reward
    assert longest_that_may_come(trainer, 4) == 4  # prompts are the function's own


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing.*is deprecated:FutureWarning")
def test_recomputation_counts_as_asked_for_under_both_of_its_names():
    quiet = {"use_cpu": True, "bf16": False, "report_to": []}
    assert not PeftRLConfig("run", **quiet).recompute_asked
    for name in ("gradient_checkpointing", "activation_checkpointing"):
        assert all(PeftRLConfig("run", **quiet, **{name: asked}).recompute_asked for asked in (True, False))


def test_a_step_of_zero_advantage_samples_has_gradients_of_zero_and_is_taken():
    seen = []

    seen_loss: list[float] = []
    trainer = trainer_of(kinds=ALL_DEAD)
    run = trainer.optimizer_step.run_window

    def watched(model, batches):
        loss = run(model, batches)
        seen.extend(p.grad for p in trainer.model.parameters() if p.requires_grad)
        seen_loss.append(loss.item())
        return loss

    trainer.optimizer_step.run_window = watched
    trainer.train()
    assert trainer.state.global_step == 1
    assert len(seen) == len([p for p in trainer.model.parameters() if p.requires_grad])
    assert all(gradient is not None and not gradient.any() for gradient in seen)
    assert seen_loss == [0.0]
    assert logged(trainer)[0]["rows/trained_fraction"] == 0


def test_what_was_run_is_logged():
    trainer = trainer_of(kinds=(("live", "dyadic", "live", "tenths"),), train_tokens_per_microbatch=40)
    trainer.train()
    entry = logged(trainer)[0]
    assert trainer.log_prob_passes.passes.packed
    assert trainer.log_prob_passes.passes.shared
    assert entry["rows/trained_fraction"] == 0.5
    assert entry["tokens/passes"] >= 2
    shared, whole = entry["tokens/run"], trainer_of(share_prompts=False, kinds=(("live", "dyadic", "live", "tenths"),))
    whole.train()
    assert shared < logged(whole)[0]["tokens/run"]


def test_a_model_that_cannot_be_packed_is_padded_and_says_so_once(caplog, monkeypatch):
    own = copy.deepcopy(base(torch.float32))
    monkeypatch.setattr(type(own), "_can_set_attn_implementation", classmethod(lambda _: False))
    adapters = []
    with caplog.at_level(logging.WARNING, "perl"):
        for trainer_class in (PeftGRPOTrainer, GRPOTrainer):
            trainer = trainer_of(trainer_class, kinds=ALL_LIVE * 2, model=copy.deepcopy(own))
            torch.manual_seed(3)
            trainer.train()
            adapters.append({n: p.detach().clone() for n, p in trainer.model.named_parameters() if p.requires_grad})
    assert (
        caplog.text.count("rows are padded to the longest of each pass: its attention is written into the model") == 1
    )
    assert norm(adapters[0]) > 0
    assert relative_difference(*adapters) <= 1e-5
