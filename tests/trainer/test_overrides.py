"""An override of any method that TRL's or transformers' trainer documents takes effect, or is refused by its name.

Every row of the table in ``docs/trainer.md`` has a test: a subclass replaces the method, and a number shows it.
"""

import functools
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from datasets import Dataset
from transformers import Trainer
from trl import GRPOTrainer
from trl.trainer.base_trainer import _BaseTrainer

from perl import PeftGRPOTrainer
from perl.errors import PerlError
from perl.hub.push.requests import HubOutageError
from perl.trainer.overrides import is_replaced
from perl.trainer.sampling.generation import generates_by_itself
from tests.conftest import CHECKOUT
from tests.trainer.test_tools import multiply
from tests.trainer.test_trainer import arguments, problems, weights_of

COVERED: list[str] = []
SHORT = {"max_steps": 1, "max_completion_length": 6, "learning_rate": 1e-2, "optim": "sgd"}
STEPS = {"save_strategy": "steps", "save_steps": 1}
EVALUATED = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4}


def covers(*names: str) -> Callable[[Any], Any]:
    """Notes which rows of the table a test is about."""
    COVERED.extend(names)
    return lambda test: test


def by_place(completions: list[Any], **_: Any) -> list[float]:
    """Rewards that differ in every group, whatever is sampled."""
    return [float(index % 4 == 0) for index in range(len(completions))]


def made(folder: Path, kind: type[PeftGRPOTrainer] = PeftGRPOTrainer, reward: Any = by_place, **changes: Any) -> Any:
    config = arguments(folder, **{**SHORT, **changes})
    data = problems(8)
    return kind(model="sandbox:base", reward_funcs=reward, args=config, train_dataset=data, eval_dataset=problems(2))


def instead(**methods: Any) -> type[PeftGRPOTrainer]:
    """A subclass whose methods do without their parents'."""
    return type("Instead", (PeftGRPOTrainer,), {**methods, "__module__": __name__})


def changed(**changes: Callable[..., Any]) -> type[PeftGRPOTrainer]:
    """A subclass whose methods make something else of what their parents' return."""

    def method(name: str) -> Callable[..., Any]:
        def call(self: PeftGRPOTrainer, *args: Any, **kwargs: Any) -> Any:
            return changes[name](self, getattr(super(kind, self), name)(*args, **kwargs))

        return call

    kind = instead(**{name: method(name) for name in changes})
    return kind


def trained(folder: Path, kind: type[PeftGRPOTrainer] = PeftGRPOTrainer, **changes: Any) -> Any:
    trainer = made(folder, kind, **changes)
    trainer.train()
    return trainer


def logged(trainer: Any, name: str) -> float:
    return float(trainer.state.log_history[0][name])


@functools.cache
def plain_norm(**changes: Any) -> float:
    return logged(trained(Path("plain"), **changes), "grad_norm")


def ratio(folder: Path, kind: type[PeftGRPOTrainer], **changes: Any) -> float:
    """The gradient's norm in relation to that of a trainer without the override."""
    return logged(trained(folder, kind, **changes), "grad_norm") / plain_norm(**changes)


# What is sampled.

COMPLETIONS = {"_generate": 1, "_generate_single_turn": 0}  # their place among what is returned


@covers(*COMPLETIONS)
@pytest.mark.parametrize("name", COMPLETIONS)
def test_completions_are_cut_short(name, tmp_path):
    def first_two(_, result):
        place = COMPLETIONS[name]
        return *result[:place], [ids[:2] for ids in result[place]], *result[place + 1 :]

    assert trained(tmp_path, changed(**{name: first_two}))._buffered_inputs[0]["completion_ids"].size(1) == 2


PUT_ON = {
    "policy": lambda policy: (policy, "generate"),
    "base": lambda policy: (policy.get_base_model(), "generate"),
    "tuner": lambda policy: (policy.base_model, "generate"),
    "class": lambda policy: (type(policy.get_base_model()), "generate"),
    "processors": lambda policy: (policy.get_base_model(), "_get_logits_processor"),
}


@pytest.mark.parametrize("where", PUT_ON)
def test_what_a_script_puts_into_the_place_of_generate_writes_and_without_it_ours_does(where, tmp_path):
    trainer = made(tmp_path)
    assert not generates_by_itself(trainer.policy)
    owner, name = PUT_ON[where](trainer.policy)
    replaced = mock.patch.object(owner, name, side_effect=AssertionError(where))
    with replaced, pytest.raises(AssertionError, match=where):
        trainer.train()
    assert not generates_by_itself(trainer.policy)


@covers("_tokenize_prompts")
def test_prompts_get_one_more_token(tmp_path):
    longer = changed(_tokenize_prompts=lambda _, result: ([[ids[0], *ids] for ids in result[0]], *result[1:]))
    widths = [
        trained(tmp_path / kind.__name__, kind)._buffered_inputs[0]["prompt_ids"].size(1)
        for kind in (PeftGRPOTrainer, longer)
    ]
    assert widths[1] == widths[0] + 1


@covers("_tool_call_loop")
def test_tools_are_run_by_another_loop(tmp_path):
    def loop(_, _prompts, _ids, completion_ids, completions, logprobs, *__):
        return [[1] * len(ids) for ids in completion_ids], completions, completion_ids, logprobs, 24, 0, []

    trainer = made(tmp_path, instead(_tool_call_loop=loop))
    trainer.tools = trainer._standalone_tools = [multiply]
    trainer.train()
    assert logged(trainer, "tools/call_frequency") == 24 / 8


@covers("_get_tool_suffix_ids")
def test_answers_of_tools_are_other_tokens(tmp_path):
    trainer = made(tmp_path, instead(_get_tool_suffix_ids=lambda *_: [9, 9, 9]))
    trainer._sync_tool_dicts, trainer._async_tool_dicts = [{"shout": str.upper}], [{}]
    trainer._generate_single_turn = lambda *_, **__: ([[]], None)
    call = {"type": "function", "function": {"name": "whisper", "arguments": {}}}
    said = [[{"role": "assistant", "content": "", "tool_calls": [call]}]]
    tool_mask, *_ = trainer._tool_call_loop([[]], [[1, 2]], [[3]], said, None, None, {})
    assert tool_mask == [[1, 0, 0, 0]]


# What it is worth.


@covers("_calculate_rewards")
def test_rewards_are_turned_round(tmp_path):
    plain = trained(tmp_path / "plain", logging_steps=1)
    turned = trained(tmp_path / "turned", changed(_calculate_rewards=lambda _, rewards_NK: -rewards_NK))
    assert logged(turned, "reward") == -logged(plain, "reward") == -0.25
    pairs = list(zip(plain.latest_group(), turned.latest_group(), strict=True))
    assert [a["completion"] for a, _ in pairs] == [b["completion"] for _, b in pairs]
    assert [a["advantage"] for a, _ in pairs] == [-b["advantage"] for _, b in pairs]
    start = weights_of(made(tmp_path / "start").policy)
    assert torch.allclose(weights_of(turned.policy) - start, start - weights_of(plain.policy), atol=1e-7)
    assert not torch.equal(weights_of(plain.policy), start)
    patched = made(tmp_path / "patched")
    patched._calculate_rewards = lambda _inputs, prompts, *_: torch.arange(-3.0, len(prompts) - 3.0).view(-1, 1)
    patched.train()
    assert logged(patched, "reward") == 0.5


@covers("_log_metric", "_log_completion_extra")
def test_what_rewards_log_is_heard(tmp_path):
    def reward(completions, log_metric, log_extra, **_):
        log_metric("mine", 1.0)
        log_extra("own", [1.0] * len(completions))
        return by_place(completions)

    def log_metric(self, name, value):
        self._pending_metrics[name].append(value + 2)

    def log_extra(self, column, values):
        self._pending_extra_logs[column].extend(value + 2 for value in values)

    trainer = trained(tmp_path, instead(_log_metric=log_metric, _log_completion_extra=log_extra), reward=reward)
    assert logged(trainer, "mine") == 3
    assert [sample["own"] for sample in trainer.latest_group()] == [3.0] * 4


# The loss.


@covers("_get_per_token_logps_and_entropies")
def test_tokens_are_scored_otherwise(tmp_path):
    """Of the policy, and of the reference, which is the only one that is asked for without a gradient here."""

    def apart(_, result):
        return (result[0] if torch.is_grad_enabled() else result[0] - 0.5), *result[1:]

    trainer = trained(tmp_path, changed(_get_per_token_logps_and_entropies=apart), beta=0.1)
    assert logged(trainer, "kl") == pytest.approx(torch.tensor(-0.5).exp().item() + 0.5 - 1, abs=1e-5)


DOUBLED = ("compute_loss", "_compute_loss", "_prepare_inputs", "_generate_and_score_completions")


@covers(*DOUBLED)
@pytest.mark.parametrize("name", DOUBLED)
def test_a_doubled_loss_or_advantage_doubles_the_gradient(name, tmp_path):
    def doubled(_, result):
        if isinstance(result, torch.Tensor):
            return 2 * result
        return {**result, "advantages": 2 * result["advantages"]} if "advantages" in result else result

    # The step prepares a micro-batch once, and TRL's own code prepares what a parent's step has prepared once more.
    assert ratio(tmp_path, changed(**{name: doubled})) == pytest.approx(2.0, rel=1e-4)


@covers("training_step")
def test_the_loss_of_each_micro_batch_is_added_to(tmp_path):
    cut = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4}
    plain = trained(tmp_path / "plain", **cut)
    trainer = trained(tmp_path / "added", changed(training_step=lambda _, loss: loss + 5.0), **cut)
    assert logged(trainer, "loss") == pytest.approx(logged(plain, "loss") + 10.0, abs=1e-5)


WEIGHTS = {
    "get_off_policy_mask": {"off_policy_mask_threshold": 10.0},
    "get_gamma_weights": {"loss_type": "vespo"},
    "get_high_entropy_mask": {"top_entropy_quantile": 0.5},
}


@covers(*WEIGHTS)
@pytest.mark.parametrize("name", WEIGHTS)
def test_without_a_sequence_or_a_token_there_is_no_gradient(name, tmp_path):
    def none(advantages, **_):
        return torch.zeros(len(advantages), 1)

    method = (lambda _, entropies, *__: torch.zeros_like(entropies)) if "entropy" in name else staticmethod(none)
    assert ratio(tmp_path, instead(**{name: method}), **WEIGHTS[name]) == 0.0


def test_a_loss_of_a_subclass_may_have_a_name_of_its_own(tmp_path):
    def own(self, model, inputs):
        self.seen = inputs["completion_ids"].shape
        return sum(p.sum() for p in model.parameters() if p.requires_grad)

    trainer = made(tmp_path, instead(_compute_loss=own), loss_type="my_loss")
    before = weights_of(trainer.model)
    trainer.train()
    assert trainer.seen[1] <= SHORT["max_completion_length"]
    moved = weights_of(trainer.model) - before
    assert (moved < 0).all()  # against a gradient of ones
    torch.testing.assert_close(moved, moved[0].expand_as(moved), rtol=1e-3, atol=1e-7)


# The order of prompts.


def own_train_loader(self):
    self.train_dataset = Dataset.from_list([problems(8)[3]] * 8)
    return PeftGRPOTrainer.get_train_dataloader(self)


def own_loader(self, dataset, *args, **kwargs):
    return PeftGRPOTrainer._get_dataloader(self, Dataset.from_list([dataset[3]] * 8), *args, **kwargs)


def own_samples(self, *args):
    batches, items = PeftGRPOTrainer.get_batch_samples(self, *args)
    return [[problems(8)[3]] * len(batch) for batch in batches], items


FOURTH = {
    "get_train_dataloader": own_train_loader,
    "_get_train_sampler": lambda *_: [3] * 8,
    "_get_dataloader": own_loader,
    "get_batch_samples": own_samples,
}


@covers(*FOURTH)
@pytest.mark.parametrize("name", FOURTH)
def test_only_the_fourth_prompt_is_trained_on(name, tmp_path):
    group = trained(tmp_path, instead(**{name: FOURTH[name]})).latest_group()
    assert all(sample["prompt"] == problems(8)[3]["prompt"] for sample in group)


# The optimizer, and what is logged of a step.


@covers("create_optimizer")
def test_the_optimizer_is_another(tmp_path):
    def sgd(self, _model=None):
        self.optimizer = torch.optim.SGD([p for p in self.model.parameters() if p.requires_grad], lr=0.125)
        return self.optimizer

    trainer = trained(tmp_path, instead(create_optimizer=sgd), optim="adamw_torch")
    assert trainer.optimizer.param_groups[0]["initial_lr"] == 0.125
    assert type(trainer.optimizer.optimizer) is torch.optim.SGD


@covers("get_optimizer_cls_and_kwargs", "get_decay_parameter_names", "create_scheduler", "store_flos")
def test_the_parts_of_an_optimizer_and_its_schedule_are_others(tmp_path):
    def half(self, **_):
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda _: 0.5)
        self._created_lr_scheduler = True
        return self.lr_scheduler

    def seven(self):
        self.state.total_flos = 7

    kind = instead(
        get_optimizer_cls_and_kwargs=staticmethod(lambda *_: (torch.optim.SGD, {"lr": 0.25})),
        get_decay_parameter_names=lambda *_: [],
        create_scheduler=half,
        store_flos=seven,
    )
    trainer = trained(tmp_path, kind, optim="adamw_torch", weight_decay=0.1)
    decaying, others = trainer.optimizer.param_groups
    assert (len(decaying["params"]), others["weight_decay"], others["initial_lr"]) == (0, 0.0, 0.25)
    assert others["params"]
    assert logged(trainer, "learning_rate") == 0.125
    assert trainer.state.total_flos == 7


@covers("_clip_grad_norm", "_get_learning_rate", "floating_point_ops", "log")
def test_what_a_step_logs_is_replaced(tmp_path):
    def log(self, logs, *args):
        PeftGRPOTrainer.log(self, {**logs, "mine": 7.0}, *args)

    kind = instead(
        log=log,
        _get_learning_rate=lambda _: 7.0,
        floating_point_ops=lambda *_: 7,
        _clip_grad_norm=lambda *_: torch.tensor(7.0),
    )
    trainer = trained(tmp_path, kind)
    assert [logged(trainer, name) for name in ("grad_norm", "learning_rate")] == [7.0, 7.0]
    assert [entry["mine"] for entry in trainer.state.log_history] == [7.0, 7.0]
    assert trainer.state.total_flos == 7


# What the code of transformers and TRL calls by itself, and goes on with what it returns.

CALLED = (
    *("evaluate", "evaluation_loop", "prediction_step", "_load_best_model", "_save_scaler", "_load_scaler"),
    *("_get_eval_sampler", "get_eval_dataloader", "get_test_dataloader", "_set_signature_columns_if_needed"),
    *("compute_loss_context_manager", "autocast_smart_context_manager", "_finish_current_push", "_send_telemetry"),
    *("_run_epoch", "set_initial_training_values", "_prepare_for_training"),
)


@covers(*CALLED)
def test_what_a_training_an_evaluation_and_a_resumed_training_call_is_replaced(tmp_path):
    called = []

    def noting(name):
        return lambda _, result: called.append(name) or result

    kind = changed(**{name: noting(name) for name in CALLED})
    best = {"load_best_model_at_end": True, "metric_for_best_model": "reward"}
    trainer = trained(tmp_path, kind, **EVALUATED, **STEPS, **best, remove_unused_columns=True)
    assert [called.count(name) for name in ("_finish_current_push", "_send_telemetry")] == [1, 1]
    trainer.predict(problems(2))
    made(tmp_path, kind, max_steps=2).train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert set(called) == set(CALLED)


# What is saved, and loaded.

SAVES = ("save_model", "_save", "_save_optimizer_and_scheduler", "_save_rng_state")


@covers(*SAVES)
def test_each_part_of_a_checkpoint_is_written_by_the_override(tmp_path):
    def marking(name):
        """Leaves a file beside what its parent writes."""

        def method(self, output_dir=None, *args, **kwargs):
            getattr(PeftGRPOTrainer, name)(self, output_dir, *args, **kwargs)
            (Path(output_dir or self.args.output_dir) / f"{name}.txt").touch()

        return method

    trained(tmp_path, instead(**{name: marking(name) for name in SAVES}), **STEPS)
    assert {path.stem for path in (tmp_path / "checkpoint-1").glob("*.txt")} == set(SAVES)


@covers("_save_checkpoint")
def test_checkpoints_are_written_otherwise(tmp_path):
    def own(self, *_):
        (Path(self.args.output_dir) / "mine.txt").write_text(str(self.state.global_step))

    trained(tmp_path, instead(_save_checkpoint=own), max_steps=2, **STEPS)
    assert (tmp_path / "mine.txt").read_text() == "2"
    assert not list(tmp_path.glob("checkpoint-*"))


@covers("_load_from_checkpoint", "_load_optimizer_and_scheduler", "_load_rng_state")
def test_each_part_of_a_checkpoint_is_loaded_by_the_override(tmp_path):
    whole = trained(tmp_path, max_steps=2, **STEPS)

    def resumed(**methods):
        trainer = made(tmp_path, instead(**methods), max_steps=2)
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
        return trainer

    plain = resumed()
    assert torch.equal(weights_of(plain.policy), weights_of(whole.policy))
    other = resumed(_load_from_checkpoint=lambda *_, **__: None)
    assert not torch.equal(weights_of(other.policy), weights_of(whole.policy))
    other = resumed(_load_optimizer_and_scheduler=lambda *_: None)
    rates = [trainer.state.log_history[1]["learning_rate"] for trainer in (plain, other)]
    assert rates == [0.5e-2, 1e-2]  # a schedule that was not loaded begins anew
    assert resumed(_load_rng_state=lambda *_: torch.manual_seed(7)).latest_group() != plain.latest_group()


@covers("create_model_card", "_push_from_checkpoint")
def test_a_card_and_a_push_are_replaced(tmp_path):
    """The card in the output folder, and in what is pushed."""
    pushed = []

    def more(self, *args, **kwargs):
        PeftGRPOTrainer.create_model_card(self, *args, **kwargs)
        card = Path(self.args.output_dir) / "README.md"
        card.write_text(card.read_text() + "\nThe 7 dwarfs like it.\n")

    kind = instead(create_model_card=more, _push_from_checkpoint=lambda _, place: pushed.append(place))
    trainer = trained(tmp_path, kind, **STEPS)
    assert "7 dwarfs" in (tmp_path / "README.md").read_text()
    trainer.args.hub_model_id = "user/dwarfs"
    with mock.patch("perl.trainer.publishing.push_script") as push:
        trainer.push_to_hub()
    assert b"7 dwarfs" in push.call_args.args[0].files["README.md"]
    assert not pushed
    trainer.args.push_to_hub = True
    trainer._save_checkpoint(trainer.model, trial=None)
    assert pushed == [str(tmp_path / "checkpoint-1")]


@covers("init_hf_repo")
def test_the_repository_is_made_otherwise(tmp_path):
    """The constructor calls it; without a network ours is one line."""
    called = []
    kind = instead(init_hf_repo=lambda _: called.append(1))
    made(tmp_path, kind, push_to_hub=True)
    made(tmp_path, kind)
    assert len(called) == 1
    with pytest.raises(HubOutageError, match=r"^push_to_hub: the Hub is unreachable: [^\n]*$"):
        made(tmp_path, push_to_hub=True)


REFUSED = {
    "create_optimizer_and_scheduler": "create_optimizer or create_scheduler",
    "compute_liger_loss": "_compute_loss",
    "_get_last_hidden_state": "_get_per_token_logps_and_entropies",
    "_get_per_token_logps": "_get_per_token_logps_and_entropies",
    "_move_model_to_vllm": "rollout_func",
}


@covers(*REFUSED)
def test_what_nothing_calls_is_refused_with_what_to_override_instead(tmp_path):
    with pytest.raises(PerlError) as caught:
        made(tmp_path, instead(**dict.fromkeys(REFUSED, lambda *_, **__: None)))
    for name, hint in REFUSED.items():
        assert re.search(rf"Instead\.{name}: .*{hint}", str(caught.value)), name


def documented() -> list[str]:
    """The first column of the table of overrides."""
    _, _, page = (CHECKOUT / "docs" / "trainer.md").read_text(encoding="utf-8").partition("## Overriding a method")
    return re.findall(r"^\| `(\w+)` \|", page.partition("\n## ")[0], flags=re.MULTILINE)


def test_the_documents_table_is_what_is_tested_and_has_every_method_of_trls_and_every_one_that_is_extended_here():
    assert sorted(documented()) == sorted(COVERED)
    theirs = {name for kind in (GRPOTrainer, _BaseTrainer) for name, m in vars(kind).items() if callable(m)}
    ours = {name for kind in PeftGRPOTrainer.__mro__ if kind.__module__.startswith("perl.") for name in vars(kind)}
    extended = {name for name, _ in inspect.getmembers(Trainer, inspect.isfunction)} & ours
    called_by_the_script = {"__init__", "train", "push_to_hub"}
    assert (theirs | extended) - called_by_the_script <= set(COVERED)


def test_a_mixin_a_patched_class_and_a_patched_trainer_are_seen(tmp_path, monkeypatch):
    class Mixin:
        def _compute_loss(self, model, inputs):
            return super()._compute_loss(model, inputs)

    class OfTrl(GRPOTrainer):
        _compute_loss = GRPOTrainer._compute_loss

    OfTrl.__module__ = "trl.experimental.another_loss"
    trainer = made(tmp_path)
    assert trainer.step_is_ours
    assert not is_replaced(trainer, *COVERED)
    assert not made(tmp_path, type("Mixed", (Mixin, PeftGRPOTrainer), {})).step_is_ours
    assert not made(tmp_path, type("Below", (PeftGRPOTrainer, OfTrl), {})).step_is_ours
    patched = made(tmp_path)
    patched.compute_loss = patched.compute_loss
    assert not patched.step_is_ours
    monkeypatch.setattr(PeftGRPOTrainer, "compute_loss", lambda *_: None, raising=False)
    assert not made(tmp_path).step_is_ours
