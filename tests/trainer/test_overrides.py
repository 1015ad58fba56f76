"""An override of any method that TRL's or transformers' trainer documents takes effect, or is refused by its name.

One test a row of the table in ``docs/trainer.md``: a subclass replaces the method, and a number shows it.
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
from transformers.trainer_utils import EvalLoopOutput
from trl import GRPOTrainer
from trl.trainer.base_trainer import _BaseTrainer

from perl import PeftGRPOTrainer
from perl.errors import PerlError
from perl.hub.push.retries import HubOutageError
from perl.trainer.overrides import is_replaced
from tests.conftest import CHECKOUT
from tests.trainer.test_trainer import arguments, problems, weights_of

ROWS: dict[str, Callable[[Path], None]] = {}
SHORT = {"max_steps": 1, "max_completion_length": 6, "learning_rate": 1e-2, "optim": "sgd"}


def row(check: Callable[[Path], None]) -> Callable[[Path], None]:
    """A row of the table; the check is called as its method is."""
    ROWS[check.__name__] = check
    return check


def by_place(completions: list[Any], **_: Any) -> list[float]:
    """Rewards that differ in every group, whatever is sampled."""
    return [float(index % 4 == 0) for index in range(len(completions))]


def made(folder: Path, kind: type[PeftGRPOTrainer] = PeftGRPOTrainer, reward: Any = by_place, **changes: Any) -> Any:
    config = arguments(folder, **{**SHORT, **changes})
    data = problems(8)
    return kind(model="sandbox:base", reward_funcs=reward, args=config, train_dataset=data, eval_dataset=problems(2))


def changed(name: str, change: Callable[..., Any]) -> type[PeftGRPOTrainer]:
    """A subclass whose method makes something else of what its parent's returns."""

    def method(self: PeftGRPOTrainer, *args: Any, **kwargs: Any) -> Any:
        return change(self, getattr(super(kind, self), name)(*args, **kwargs))

    method.__name__ = name
    kind = type("Changed", (PeftGRPOTrainer,), {name: method, "__module__": __name__})
    return kind


def instead(name: str, method: Any) -> type[PeftGRPOTrainer]:
    """A subclass whose method does without its parent's."""
    return type("Instead", (PeftGRPOTrainer,), {name: method, "__module__": __name__})


def trained(folder: Path, kind: type[PeftGRPOTrainer] = PeftGRPOTrainer, **changes: Any) -> Any:
    trainer = made(folder, kind, **changes)
    trainer.train()
    return trainer


def logged(trainer: Any, name: str) -> float:
    return float(trainer.state.log_history[0][name])


@functools.cache
def plain_norm(folder: Path, **changes: Any) -> float:
    return logged(trained(folder, **changes), "grad_norm")


def ratio(folder: Path, kind: type[PeftGRPOTrainer], **changes: Any) -> float:
    """The gradient's norm in relation to that of a trainer without the override."""
    return logged(trained(folder / "changed", kind, **changes), "grad_norm") / plain_norm(Path("plain"), **changes)


def twice(_: Any, result: torch.Tensor) -> torch.Tensor:
    return 2 * result


# What is sampled.


@row
def _generate(folder: Path) -> None:
    def first_two(_: Any, result: tuple[Any, ...]) -> tuple[Any, ...]:
        prompt_ids, completion_ids, *others = result
        return prompt_ids, [ids[:2] for ids in completion_ids], *others

    assert trained(folder, changed("_generate", first_two))._buffered_inputs[0]["completion_ids"].size(1) == 2


@row
def _generate_single_turn(folder: Path) -> None:
    def first_two(_: Any, result: tuple[Any, ...]) -> tuple[Any, ...]:
        return [ids[:2] for ids in result[0]], result[1]

    assert logged(trained(folder, changed("_generate_single_turn", first_two)), "completions/max_length") == 2


@row
def _tokenize_prompts(folder: Path) -> None:
    def longer(_: Any, result: tuple[Any, ...]) -> tuple[Any, ...]:
        return [[ids[0], *ids] for ids in result[0]], *result[1:]

    widths = [
        trained(folder / name, kind)._buffered_inputs[0]["prompt_ids"].size(1)
        for name, kind in (("plain", PeftGRPOTrainer), ("longer", changed("_tokenize_prompts", longer)))
    ]
    assert widths[1] == widths[0] + 1


@row
def _tool_call_loop(folder: Path) -> None:
    def loop(_: Any, _prompts: Any, _ids: Any, completion_ids: Any, completions: Any, logprobs: Any, *__: Any) -> Any:
        return [[1] * len(ids) for ids in completion_ids], completions, completion_ids, logprobs, 24, 0, []

    def shout(text: str) -> str:
        """Shouts.

        Args:
            text: What.
        """
        return text.upper()

    trainer = made(folder, instead("_tool_call_loop", loop))
    trainer.tools = [shout]
    trainer._standalone_tools = [shout]
    trainer.train()
    assert logged(trainer, "tools/call_frequency") == 24 / 8


@row
def _get_tool_suffix_ids(folder: Path) -> None:
    trainer = made(folder, instead("_get_tool_suffix_ids", lambda *_: [9, 9, 9]))
    trainer._sync_tool_dicts, trainer._async_tool_dicts = [{"shout": str.upper}], [{}]
    trainer._generate_single_turn = lambda *_, **__: ([[]], None)
    call = {"type": "function", "function": {"name": "whisper", "arguments": {}}}
    said = [[{"role": "assistant", "content": "", "tool_calls": [call]}]]
    tool_mask, *_ = trainer._tool_call_loop([[]], [[1, 2]], [[3]], said, None, None, {})
    assert tool_mask == [[1, 0, 0, 0]]


@row
def _generate_and_score_completions(folder: Path) -> None:
    def doubled(_: Any, output: dict[str, Any]) -> dict[str, Any]:
        return {**output, "advantages": 2 * output["advantages"]}

    assert ratio(folder, changed("_generate_and_score_completions", doubled)) == pytest.approx(2.0, rel=1e-4)


# What it is worth.


@row
def _calculate_rewards(folder: Path) -> None:
    plain = trained(folder / "plain", logging_steps=1)
    turned = trained(folder / "turned", changed("_calculate_rewards", lambda _, rewards_NK: -rewards_NK))
    assert logged(turned, "reward") == -logged(plain, "reward") == -0.25
    pairs = list(zip(plain.latest_group(), turned.latest_group(), strict=True))
    assert [a["completion"] for a, _ in pairs] == [b["completion"] for _, b in pairs]
    assert [a["advantage"] for a, _ in pairs] == [-b["advantage"] for _, b in pairs]
    start = weights_of(made(folder / "start").policy)
    assert torch.allclose(weights_of(turned.policy) - start, start - weights_of(plain.policy), atol=1e-7)
    assert not torch.equal(weights_of(plain.policy), start)


@row
def _log_metric(folder: Path) -> None:
    def reward(completions: list[Any], log_metric: Any, **_: Any) -> list[float]:
        log_metric("mine", 1.0)
        return by_place(completions)

    def log_metric(self: Any, name: str, value: float) -> None:
        self._pending_metrics[name].append(value + 2)

    assert logged(trained(folder, instead("_log_metric", log_metric), reward=reward), "mine") == 3


@row
def _log_completion_extra(folder: Path) -> None:
    def reward(completions: list[Any], log_extra: Any, **_: Any) -> list[float]:
        log_extra("mine", [1.0] * len(completions))
        return by_place(completions)

    def log_extra(self: Any, column: str, values: list[float]) -> None:
        self._pending_extra_logs[column].extend(value + 2 for value in values)

    trainer = trained(folder, instead("_log_completion_extra", log_extra), reward=reward)
    assert [sample["mine"] for sample in trainer.latest_group()] == [3.0] * 4


# The loss.


@row
def _get_per_token_logps_and_entropies(folder: Path) -> None:
    """Of the policy, and of the reference, which is the only one that is asked for without a gradient here."""

    def apart(_: Any, result: tuple[Any, ...]) -> tuple[Any, ...]:
        return (result[0] if torch.is_grad_enabled() else result[0] - 0.5), *result[1:]

    trainer = trained(folder, changed("_get_per_token_logps_and_entropies", apart), beta=0.1)
    assert logged(trainer, "kl") == pytest.approx(torch.tensor(-0.5).exp().item() + 0.5 - 1, abs=1e-5)


@row
def compute_loss(folder: Path) -> None:
    assert ratio(folder, changed("compute_loss", twice)) == pytest.approx(2.0, rel=1e-4)


@row
def _compute_loss(folder: Path) -> None:
    assert ratio(folder, changed("_compute_loss", twice)) == pytest.approx(2.0, rel=1e-4)


@row
def _prepare_inputs(folder: Path) -> None:
    def doubled(_: Any, inputs: dict[str, Any]) -> dict[str, Any]:
        return {**inputs, "advantages": 2 * inputs["advantages"]} if "advantages" in inputs else inputs

    # The step prepares a micro-batch once, and TRL's own code prepares what a parent's step has prepared once more.
    assert ratio(folder, changed("_prepare_inputs", doubled)) == pytest.approx(2.0, rel=1e-4)


@row
def training_step(folder: Path) -> None:
    plain = trained(folder / "plain", gradient_accumulation_steps=2, per_device_train_batch_size=4)
    added = changed("training_step", lambda _, loss: loss + 5.0)
    trainer = trained(folder / "added", added, gradient_accumulation_steps=2, per_device_train_batch_size=4)
    assert logged(trainer, "loss") == pytest.approx(logged(plain, "loss") + 10.0, abs=1e-5)  # in each micro-batch


@row
def get_off_policy_mask(folder: Path) -> None:
    def none(advantages: torch.Tensor, mask: torch.Tensor, **_: Any) -> torch.Tensor:
        return torch.zeros(len(advantages), 1, dtype=mask.dtype)

    kind = instead("get_off_policy_mask", staticmethod(none))
    assert ratio(folder, kind, off_policy_mask_threshold=10.0) == 0.0


@row
def get_gamma_weights(folder: Path) -> None:
    def none(advantages: torch.Tensor, **_: Any) -> torch.Tensor:
        return torch.zeros(len(advantages), 1)

    assert ratio(folder, instead("get_gamma_weights", staticmethod(none)), loss_type="vespo") == 0.0


@row
def get_high_entropy_mask(folder: Path) -> None:
    def none(_: Any, entropies: torch.Tensor, *__: Any) -> torch.Tensor:
        return torch.zeros_like(entropies)

    assert ratio(folder, instead("get_high_entropy_mask", none), top_entropy_quantile=0.5) == 0.0


@row
def compute_loss_context_manager(folder: Path) -> None:
    entered = []
    trained(folder, changed("compute_loss_context_manager", lambda _, context: entered.append(1) or context))
    assert entered


@row
def autocast_smart_context_manager(folder: Path) -> None:
    entered = []
    trained(folder, changed("autocast_smart_context_manager", lambda _, context: entered.append(1) or context))
    assert entered


# The order of prompts.


def fourth_prompt(trainer: Any) -> bool:
    fourth = problems(8)[3]["prompt"]
    return all(sample["prompt"] == fourth for sample in trainer.latest_group())


@row
def get_train_dataloader(folder: Path) -> None:
    def loader(self: Any) -> Any:
        self.train_dataset = Dataset.from_list([problems(8)[3]] * 8)
        return super(kind, self).get_train_dataloader()

    kind = instead("get_train_dataloader", loader)
    assert fourth_prompt(trained(folder, kind))


@row
def _get_train_sampler(folder: Path) -> None:
    assert fourth_prompt(trained(folder, instead("_get_train_sampler", lambda *_: [3] * 8)))


@row
def _get_dataloader(folder: Path) -> None:
    def loader(self: Any, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        same = Dataset.from_list([dataset[3]] * 8)
        return super(kind, self)._get_dataloader(same, *args, **kwargs)

    kind = instead("_get_dataloader", loader)
    assert fourth_prompt(trained(folder, kind))


@row
def get_batch_samples(folder: Path) -> None:
    def fourth(_: Any, result: tuple[Any, Any]) -> tuple[Any, Any]:
        return [[problems(8)[3]] * len(batch) for batch in result[0]], result[1]

    assert fourth_prompt(trained(folder, changed("get_batch_samples", fourth)))


@row
def _get_eval_sampler(folder: Path) -> None:
    trainer = made(folder, instead("_get_eval_sampler", lambda *_: [1] * 4), per_device_eval_batch_size=4)
    trainer.evaluate()
    assert {sample["prompt"][0]["content"] for sample in trainer.latest_group()} == {
        problems(2)[1]["prompt"][0]["content"]
    }


@row
def get_eval_dataloader(folder: Path) -> None:
    trainer = made(folder, instead("get_eval_dataloader", lambda *_: [[problems(2)[1]] * 4]))
    trainer.evaluate()
    assert {sample["prompt"][0]["content"] for sample in trainer.latest_group()} == {
        problems(2)[1]["prompt"][0]["content"]
    }


@row
def get_test_dataloader(folder: Path) -> None:
    trainer = made(folder, changed("get_test_dataloader", lambda *_: [[problems(2)[1]] * 4]))
    trainer.predict(problems(2))
    assert {sample["prompt"][0]["content"] for sample in trainer.latest_group()} == {
        problems(2)[1]["prompt"][0]["content"]
    }


@row
def _set_signature_columns_if_needed(folder: Path) -> None:
    seen: list[bool] = []

    def reward(completions: list[Any], **columns: Any) -> list[float]:
        seen.append("solution" in columns)
        return by_place(completions)

    def columns(self: Any) -> None:
        self._signature_columns = ["prompt", "solution"]

    trained(folder / "plain", reward=reward, remove_unused_columns=True)
    kind = instead("_set_signature_columns_if_needed", columns)
    trained(folder / "kept", kind, reward=reward, remove_unused_columns=True)
    assert seen == [False, True]


# The optimizer.


@row
def create_optimizer(folder: Path) -> None:
    def sgd(self: Any, _model: Any = None) -> torch.optim.Optimizer:
        trainable = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.SGD(trainable, lr=0.125)
        return self.optimizer

    trainer = trained(folder, instead("create_optimizer", sgd), optim="adamw_torch")
    assert trainer.optimizer.param_groups[0]["initial_lr"] == 0.125
    assert type(trainer.optimizer.optimizer) is torch.optim.SGD


@row
def create_scheduler(folder: Path) -> None:
    def half(self: Any, **_: Any) -> Any:
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda _: 0.5)
        self._created_lr_scheduler = True
        return self.lr_scheduler

    assert logged(trained(folder, instead("create_scheduler", half)), "learning_rate") == 0.5e-2


@row
def get_optimizer_cls_and_kwargs(folder: Path) -> None:
    def sgd(*_: Any) -> tuple[Any, dict[str, Any]]:
        return torch.optim.SGD, {"lr": 0.25}

    trainer = trained(folder, instead("get_optimizer_cls_and_kwargs", staticmethod(sgd)), optim="adamw_torch")
    assert trainer.optimizer.param_groups[0]["initial_lr"] == 0.25


@row
def get_decay_parameter_names(folder: Path) -> None:
    kind = instead("get_decay_parameter_names", lambda *_: [])
    decaying, others = trained(folder, kind, weight_decay=0.1).optimizer.param_groups
    assert (len(decaying["params"]), others["weight_decay"]) == (0, 0.0)
    assert others["params"]


@row
def _clip_grad_norm(folder: Path) -> None:
    assert logged(trained(folder, changed("_clip_grad_norm", lambda *_: torch.tensor(7.0))), "grad_norm") == 7.0


@row
def _get_learning_rate(folder: Path) -> None:
    assert logged(trained(folder, instead("_get_learning_rate", lambda _: 7.0)), "learning_rate") == 7.0


@row
def floating_point_ops(folder: Path) -> None:
    assert trained(folder, instead("floating_point_ops", lambda *_: 7)).state.total_flos == 7


@row
def store_flos(folder: Path) -> None:
    def seven(self: Any) -> None:
        self.state.total_flos = 7

    assert trained(folder, instead("store_flos", seven)).state.total_flos == 7


# Evaluation and the log.


@row
def evaluate(folder: Path) -> None:
    kind = instead("evaluate", lambda *_, **__: {"eval_mine": 7.0})
    trainer = trained(
        folder, kind, eval_strategy="steps", eval_steps=1, save_strategy="best", metric_for_best_model="mine",
        per_device_eval_batch_size=4,
    )  # fmt: skip
    assert trainer.state.best_metric == 7.0


@row
def evaluation_loop(folder: Path) -> None:
    kind = instead("evaluation_loop", lambda *_, **__: EvalLoopOutput(None, None, {"eval_mine": 7.0}, 1))
    trainer = made(folder, kind, per_device_eval_batch_size=4)
    assert trainer.evaluate()["eval_mine"] == 7.0


@row
def prediction_step(folder: Path) -> None:
    kind = instead("prediction_step", lambda *_, **__: (torch.tensor(7.0), None, None))
    assert made(folder, kind, per_device_eval_batch_size=4).evaluate()["eval_loss"] == 7.0


@row
def log(folder: Path) -> None:
    def more(self: Any, logs: dict[str, float], *args: Any) -> None:
        super(kind, self).log({**logs, "mine": 7.0}, *args)

    kind = instead("log", more)
    assert [entry["mine"] for entry in trained(folder, kind).state.log_history] == [7.0, 7.0]


# What is saved, and loaded.

STEPS = {"save_strategy": "steps", "save_steps": 1}


def marking(name: str, mark: str) -> type[PeftGRPOTrainer]:
    """A subclass whose method leaves a file beside what its parent writes."""

    def method(self: Any, output_dir: Any = None, *args: Any, **kwargs: Any) -> None:
        getattr(super(kind, self), name)(output_dir, *args, **kwargs)
        (Path(output_dir or self.args.output_dir) / "mine.txt").write_text(mark)

    kind = instead(name, method)
    return kind


@row
def save_model(folder: Path) -> None:
    trained(folder, marking("save_model", "7"), **STEPS)
    assert (folder / "checkpoint-1" / "mine.txt").read_text() == "7"


@row
def _save(folder: Path) -> None:
    trained(folder, marking("_save", "7"), **STEPS)
    assert (folder / "checkpoint-1" / "mine.txt").read_text() == "7"


@row
def _save_checkpoint(folder: Path) -> None:
    def own(self: Any, *_: Any) -> None:
        (Path(self.args.output_dir) / "mine.txt").write_text(str(self.state.global_step))

    trained(folder, instead("_save_checkpoint", own), max_steps=2, **STEPS)
    assert (folder / "mine.txt").read_text() == "2"
    assert not list(folder.glob("checkpoint-*"))


@row
def _load_from_checkpoint(folder: Path) -> None:
    last = weights_of(trained(folder, **STEPS).policy)
    found = []
    for kind in (PeftGRPOTrainer, instead("_load_from_checkpoint", lambda *_, **__: None)):
        resumed = made(folder, kind)
        resumed.train(resume_from_checkpoint=str(folder / "checkpoint-1"))
        found.append(torch.equal(weights_of(resumed.policy), last))
    assert found == [True, False]


@row
def _load_best_model(folder: Path) -> None:
    called = []
    trained(
        folder, instead("_load_best_model", lambda self: called.append(self.state.best_metric)), eval_steps=1,
        eval_strategy="steps", load_best_model_at_end=True, metric_for_best_model="reward",
        per_device_eval_batch_size=4, **STEPS,
    )  # fmt: skip
    assert called == [0.25]


@row
def _load_optimizer_and_scheduler(folder: Path) -> None:
    trained(folder, max_steps=2, **STEPS)
    kind = instead("_load_optimizer_and_scheduler", lambda *_: None)
    rates = []
    for of in (PeftGRPOTrainer, kind):
        resumed = made(folder, of, max_steps=2)
        resumed.train(resume_from_checkpoint=str(folder / "checkpoint-1"))
        rates.append(resumed.state.log_history[1]["learning_rate"])
    assert rates == [0.5e-2, 1e-2]  # a schedule that was not loaded begins anew


@row
def _save_optimizer_and_scheduler(folder: Path) -> None:
    trained(folder, marking("_save_optimizer_and_scheduler", "7"), **STEPS)
    assert (folder / "checkpoint-1" / "mine.txt").read_text() == "7"


@row
def _save_rng_state(folder: Path) -> None:
    trained(folder, marking("_save_rng_state", "7"), **STEPS)
    assert (folder / "checkpoint-1" / "mine.txt").read_text() == "7"


@row
def _load_rng_state(folder: Path) -> None:
    trained(folder, max_steps=2, **STEPS)
    found = []
    for kind in (PeftGRPOTrainer, instead("_load_rng_state", lambda *_: torch.manual_seed(7))):
        resumed = made(folder, kind, max_steps=2)
        resumed.train(resume_from_checkpoint=str(folder / "checkpoint-1"))
        found.append(resumed.latest_group())
    assert found[0] != found[1]


@row
def _save_scaler(folder: Path) -> None:
    trained(folder, marking("_save_scaler", "7"), **STEPS)
    assert (folder / "checkpoint-1" / "mine.txt").read_text() == "7"


@row
def _load_scaler(folder: Path) -> None:
    trained(folder, max_steps=2, **STEPS)
    asked: list[str] = []
    resumed = made(folder, instead("_load_scaler", lambda _, checkpoint: asked.append(checkpoint)), max_steps=2)
    resumed.train(resume_from_checkpoint=str(folder / "checkpoint-1"))
    assert asked == [str(folder / "checkpoint-1")]


@row
def create_model_card(folder: Path) -> None:
    """In the output folder, and in what is pushed."""

    def more(self: Any, *args: Any, **kwargs: Any) -> None:
        super(kind, self).create_model_card(*args, **kwargs)
        card = Path(self.args.output_dir) / "README.md"
        card.write_text(card.read_text() + "\nThe 7 dwarfs like it.\n")

    kind = instead("create_model_card", more)
    trainer = trained(folder, kind, **STEPS)
    assert "7 dwarfs" in (folder / "README.md").read_text()
    trainer.args.hub_model_id = "user/dwarfs"
    with mock.patch("perl.trainer.publishing.push_script") as push:
        trainer.push_to_hub()
    assert b"7 dwarfs" in push.call_args.args[0].files["README.md"]


@row
def _push_from_checkpoint(folder: Path) -> None:
    pushed = []
    trainer = trained(folder, instead("_push_from_checkpoint", lambda _, place: pushed.append(place)))
    trainer.args.push_to_hub = True
    trainer._save_checkpoint(trainer.model, trial=None)
    assert pushed == [str(folder / "checkpoint-1")]


@row
def _finish_current_push(folder: Path) -> None:
    finished = []
    trained(folder, instead("_finish_current_push", lambda _: finished.append(1)))
    assert len(finished) == 1


@row
def _send_telemetry(folder: Path) -> None:
    sent = []
    made(folder, instead("_send_telemetry", lambda _: sent.append(1)))
    assert len(sent) == 1


@row
def init_hf_repo(folder: Path) -> None:
    """The constructor calls it; without a network ours is one line."""
    called: list[int] = []
    made(folder, instead("init_hf_repo", lambda _: called.append(1)), push_to_hub=True)
    made(folder, instead("init_hf_repo", lambda _: called.append(1)))
    assert len(called) == 1
    with pytest.raises(HubOutageError, match=r"^push_to_hub: the Hub is unreachable: [^\n]*$"):
        made(folder, push_to_hub=True)


# Refused.


def refused(folder: Path, name: str, hint: str) -> None:
    with pytest.raises(PerlError, match=rf"Instead\.{name}: .*{hint}"):
        made(folder, instead(name, lambda *_, **__: None))


@row
def create_optimizer_and_scheduler(folder: Path) -> None:
    refused(folder, "create_optimizer_and_scheduler", "create_optimizer or create_scheduler")


@row
def compute_liger_loss(folder: Path) -> None:
    refused(folder, "compute_liger_loss", "_compute_loss")


@row
def _get_last_hidden_state(folder: Path) -> None:
    refused(folder, "_get_last_hidden_state", "_get_per_token_logps_and_entropies")


@row
def _get_per_token_logps(folder: Path) -> None:
    refused(folder, "_get_per_token_logps", "_get_per_token_logps_and_entropies")


@row
def _move_model_to_vllm(folder: Path) -> None:
    refused(folder, "_move_model_to_vllm", "rollout_func")


@pytest.mark.parametrize("name", sorted(ROWS))
def test_an_override_takes_effect_or_is_refused(name, tmp_path):
    ROWS[name](tmp_path)


def documented() -> list[str]:
    """The first column of the table of overrides."""
    _, _, page = (CHECKOUT / "docs" / "trainer.md").read_text(encoding="utf-8").partition("## Overriding a method")
    return re.findall(r"^\| `(\w+)` \|", page.partition("\n## ")[0], flags=re.MULTILINE)


def test_the_documents_table_is_what_is_tested_and_has_every_method_of_trls_and_every_one_that_is_extended_here():
    assert sorted(documented()) == sorted(ROWS)
    theirs = {name for kind in (GRPOTrainer, _BaseTrainer) for name, m in vars(kind).items() if callable(m)}
    ours = {name for kind in PeftGRPOTrainer.__mro__ if kind.__module__.startswith("perl.") for name in vars(kind)}
    extended = {name for name, _ in inspect.getmembers(Trainer, inspect.isfunction)} & ours
    called_by_the_script = {"__init__", "train", "push_to_hub"}
    assert (theirs | extended) - called_by_the_script <= set(ROWS)


def test_rewards_without_their_parents_are_what_is_trained_on(tmp_path):
    """Whole, for several functions, of a subclass that replaces the method and of a function put into its place."""

    def own(_self, _inputs, prompts, *_):
        return torch.tensor([[float(i), -2.0 * i] for i in range(len(prompts))])

    replaced = trained(tmp_path / "replaced", instead("_calculate_rewards", own), reward=[by_place, len])
    patched = made(tmp_path / "patched", reward=[by_place, len])
    patched._calculate_rewards = functools.partial(own, patched)
    patched.train()
    rewards = torch.tensor([0.0, -1.0, -2.0, -3.0])
    expected = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    for trainer in (replaced, patched):
        advantages = [sample["advantage"] for sample in trainer.latest_group()]
        assert advantages == pytest.approx(expected.tolist(), abs=1e-5)
        assert logged(trainer, "reward") == -3.5
    assert "_calculate_rewards" in vars(patched)
    assert "_calculate_rewards" not in vars(replaced)


def test_a_mixin_a_patched_class_and_a_patched_trainer_are_seen(tmp_path, monkeypatch):
    class Mixin:
        def _compute_loss(self, model, inputs):
            return super()._compute_loss(model, inputs)

    class OfTrl(GRPOTrainer):
        _compute_loss = GRPOTrainer._compute_loss

    OfTrl.__module__ = "trl.experimental.another_loss"
    trainer = made(tmp_path)
    assert trainer.step_is_ours
    assert not is_replaced(trainer, *ROWS)
    assert not made(tmp_path, type("Mixed", (Mixin, PeftGRPOTrainer), {})).step_is_ours
    assert not made(tmp_path, type("Below", (PeftGRPOTrainer, OfTrl), {})).step_is_ours
    patched = made(tmp_path)
    patched.compute_loss = patched.compute_loss
    assert not patched.step_is_ours
    monkeypatch.setattr(PeftGRPOTrainer, "compute_loss", lambda *_: None, raising=False)
    assert not made(tmp_path).step_is_ours


def test_a_loss_of_a_subclass_may_have_a_name_of_its_own(tmp_path):
    def own(self, model, inputs):
        self.seen = inputs["completion_ids"].shape
        return sum(p.sum() for p in model.parameters() if p.requires_grad)

    trainer = made(tmp_path, instead("_compute_loss", own), loss_type="my_loss")
    before = weights_of(trainer.model)
    trainer.train()
    assert trainer.seen[1] <= SHORT["max_completion_length"]
    moved = weights_of(trainer.model) - before
    assert (moved < 0).all()  # against a gradient of ones
    torch.testing.assert_close(moved, moved[0].expand_as(moved), rtol=1e-3, atol=1e-7)
