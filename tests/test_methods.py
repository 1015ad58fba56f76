"""Every method of the table, trained for a few steps by the trainer: reference, saving, resuming, base, own optimizer.

The measuring is that of ``benchmarks/method_properties.py``; here its numbers are held to what is promised.
"""

import itertools
import json
from pathlib import Path

import method_properties as properties
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import TrainerCallback

from perl import PeftGRPOTrainer, PeftRLConfig
from perl.errors import BrokenPromiseError, ModelError
from perl.methods.registry import METHODS
from perl.policy.save_adapter import reload_difference
from tests.a_few_methods import A_FEW

TOLERANCE = 1e-4
OWN_OPTIMIZER = {"lora_plus": "LoRA+", "lora_fa": "LoRA-FA"}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory) -> str:
    """A tiny random model with grouped-query attention and attention biases."""
    return properties.write_model("biases", tmp_path_factory.mktemp("models"))


OTHER_ARCHITECTURES = itertools.product(["pissa", "adalora", "ln_tuning"], ["tied", "gqa", "untied"])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "model"),
    [
        *((name, "biases") for name in A_FEW),
        *(pytest.param(name, "biases", marks=pytest.mark.nightly) for name in METHODS if name not in A_FEW),
        *(pytest.param(*pair, marks=pytest.mark.nightly) for pair in OTHER_ARCHITECTURES),
    ],
)
def test_a_method_is_trained_right_whatever_the_architecture(name, model, model_path, tmp_path):
    path = model_path if model == "biases" else properties.write_model(model, tmp_path)
    row = properties.measure(PeftGRPOTrainer, path, METHODS[name], tmp_path)
    assert row["reference at 0"] <= TOLERANCE
    assert row["reference after 5"] <= TOLERANCE
    assert row["reloaded"] <= TOLERANCE
    assert row["resumed"] == 0.0
    assert row["base unchanged"]
    assert row["moved"] > 10 * TOLERANCE
    assert row["optimizer"] == OWN_OPTIMIZER.get(name, "AdamW")


def trainer_of(model, folder: Path, **changes) -> PeftGRPOTrainer:
    arguments = {
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "beta": 0.04,
        "learning_rate": 5e-3,
        "num_generations": properties.GENERATIONS,
        "per_device_train_batch_size": 2 * properties.GENERATIONS,
        "max_completion_length": 16,
        "max_steps": 5,
        "save_strategy": "no",
        "lr_scheduler_type": "constant",
        "seed": 1,
    }
    peft_config = changes.pop("peft_config", None)
    prompts = properties.Dataset.from_dict({"prompt": properties.PROMPTS})
    trainer = PeftGRPOTrainer(
        model=model,
        reward_funcs=properties.reward,
        args=PeftRLConfig(str(folder), **{**arguments, **changes}),
        train_dataset=prompts,
        eval_dataset=prompts if "eval_strategy" in changes else None,
        processing_class=properties.load_tokenizer(properties.ModelSection()),
        peft_config=peft_config,
        rollout_func=properties.rollouts,
    )
    trainer.remove_callback(properties.PrinterCallback)
    return trainer


def kl_of(trainer) -> list[float]:
    return [row["kl"] for row in trainer.state.log_history if "kl" in row and "loss" in row]


@pytest.mark.parametrize(
    ("reference", "zero_at"), [("base", [1]), ("initial", [1]), ("rolling:2", [1, 3, 5])], ids=lambda value: str(value)
)
def test_the_kl_divergence_is_zero_at_the_steps_that_begin_at_the_reference(reference, zero_at, model_path, tmp_path):
    trainer = trainer_of(properties.fresh(model_path), tmp_path, peft_method="pissa", reference=reference)
    trainer.train()
    assert [step for step, kl in enumerate(kl_of(trainer), 1) if kl == 0.0] == zero_at
    assert all(kl == 0.0 or kl > 1e-4 for kl in kl_of(trainer))
    assert len(kl_of(trainer)) == 5


def test_a_run_with_another_reference_resumes_exactly(model_path, tmp_path):
    changes = {"reference": "rolling:2", "save_strategy": "steps", "save_steps": 3}
    whole = trainer_of(properties.fresh(model_path), tmp_path, **changes)
    whole.train()
    resumed = trainer_of(properties.fresh(model_path), tmp_path, **changes)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert torch.equal(properties.logits_of(resumed.policy), properties.logits_of(whole.policy))
    assert torch.equal(properties.reference_logits(resumed), properties.reference_logits(whole))
    assert kl_of(resumed)[-2:] == kl_of(whole)[-2:]


def test_adalora_on_a_half_precision_base_ends_as_the_policy_that_is_saved_and_resumes_exactly(model_path, tmp_path):
    changes = {"peft_method": "adalora", "save_strategy": "steps", "save_steps": 3}
    whole = trainer_of(properties.fresh(model_path).bfloat16(), tmp_path, **changes)
    whole.train()
    whole.save_adapter(tmp_path / "adapter")
    factors = [p for p in whole.policy.parameters() if p.requires_grad]
    assert all(torch.equal(p, p.bfloat16().float()) and p.dtype == torch.float32 for p in factors)
    assert reload_difference(whole.policy, tmp_path / "adapter", torch.arange(20)[None]) < 1e-6
    last = load_file(tmp_path / "checkpoint-5" / "policy.safetensors")  # what later steps would go on from
    kept = {name: t for name, t in last.items() if name.startswith("adapter/") and "lora_A" in name}
    assert any(not torch.equal(t, t.bfloat16().float()) for t in kept.values())
    for step in (3, 5):
        resumed = trainer_of(properties.fresh(model_path).bfloat16(), tmp_path, **changes)
        resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
        ends = [p for p in resumed.policy.parameters() if p.requires_grad]
        assert all(torch.equal(p, q) for p, q in zip(factors, ends, strict=True))


@pytest.mark.parametrize(("then", "now"), [("base", "initial"), ("initial", "rolling:2"), ("rolling:2", "rolling:2")])
def test_a_run_that_resumes_with_a_reference_of_another_kind_has_it_right_or_is_refused(
    then, now, model_path, tmp_path
):
    changes = {"save_strategy": "steps", "save_steps": 3}
    first = trainer_of(properties.fresh(model_path), tmp_path, reference=then, **changes)
    start = properties.logits_of(first.policy)
    first.train()
    resumed = trainer_of(properties.fresh(model_path), tmp_path, reference=now, **changes)
    checkpoint = str(tmp_path / "checkpoint-3")
    if now == "rolling:2" != then:  # the policy as it was after step 2
        with pytest.raises(ModelError, match=f"was written with the reference {then}, so that rolling:2 cannot go on"):
            resumed.train(resume_from_checkpoint=checkpoint)
        return
    resumed.train(resume_from_checkpoint=checkpoint)
    if now == then:
        assert torch.equal(properties.reference_logits(resumed), properties.reference_logits(first))
    else:  # a new LoRA starts as the base
        assert torch.equal(properties.reference_logits(resumed), start)


@pytest.fixture
def saved(model_path, tmp_path) -> str:
    """An adapter of an earlier run."""
    trainer = trainer_of(properties.fresh(model_path), tmp_path / "earlier", peft_method="olora", learning_rate=0.02)
    trainer.train()
    trainer.save_adapter(tmp_path / "adapter")
    return str(tmp_path / "adapter")


@pytest.mark.parametrize("reference", [None, "base"])
def test_a_continued_adapter_starts_where_it_ended_and_is_held_to_itself_or_the_base(
    reference, saved, model_path, tmp_path
):
    pristine = properties.logits_of(properties.fresh(model_path))
    earlier = properties.logits_of(PeftModel.from_pretrained(properties.fresh(model_path), saved))
    trainer = trainer_of(properties.fresh(model_path), tmp_path / "later", adapter=saved, reference=reference)
    torch.testing.assert_close(properties.logits_of(trainer.policy), earlier, rtol=0, atol=TOLERANCE)
    trainer.train()
    assert (kl_of(trainer)[0] == 0.0) == (reference is None)
    assert reference is None or kl_of(trainer)[0] > 1e-4
    assert properties.distance(properties.logits_of(trainer.policy), earlier) > 10 * TOLERANCE
    held_to = earlier if reference is None else pristine
    torch.testing.assert_close(properties.reference_logits(trainer), held_to, rtol=0, atol=TOLERANCE)


def altered_base(path, _saved):
    config = LoraConfig(init_lora_weights="pissa", r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(properties.fresh(path), config), {}


def config_beside_an_adapter(path, _saved):
    return properties.fresh(path), {"adapter": "earlier/adapter", "peft_config": LoraConfig()}


def frozen_adapter(path, saved):
    return PeftModel.from_pretrained(properties.fresh(path), saved), {}


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (altered_base, ["has changed the weights of its base"]),
        (config_beside_an_adapter, ["peft_config: ", "PeftRLConfig.adapter", "earlier/adapter", "leave one"]),
        (frozen_adapter, ["is_trainable=True"]),
    ],
)
def test_a_model_or_config_that_cannot_be_trained_is_refused(make, said, saved, model_path, tmp_path):
    model, changes = make(model_path, saved)
    with pytest.raises(ModelError) as caught:
        trainer_of(model, tmp_path, **changes)
    assert [part for part in said if part not in str(caught.value)] == []


def test_what_is_saved_holds_neither_references_nor_pickles(model_path, tmp_path):
    config = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    policy = get_peft_model(properties.fresh(model_path), config)
    trainer = trainer_of(policy, tmp_path / "run", reference="rolling:1", save_strategy="steps", save_steps=5)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    for folder in (tmp_path / "saved", tmp_path / "run" / "checkpoint-5"):
        names = {path.name for path in folder.iterdir()}
        assert {"adapter_config.json", "adapter_model.safetensors"} <= names
        assert not {"ref", "training_args.bin"} & names
        assert str(tmp_path) not in (folder / "adapter_config.json").read_text()
    config = json.loads((tmp_path / "saved" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "biases"


def after_each_step(trainer, act):
    trainer.create_optimizer()
    trainer.optimizer.register_step_post_hook(lambda *_: act())


def hold_a_tensor(trainer):
    name, stuck = next((n, p) for n, p in trainer.policy.named_parameters() if "lora_B" in n)
    value = stuck.detach().clone()
    after_each_step(trainer, lambda: stuck.data.copy_(value))
    return f"1 trained tensors have a gradient and did not move.*{name}"


def add_a_tensor(trainer):
    class Adds(TrainerCallback):
        def on_train_begin(self, *_, **__):
            trainer.policy.register_parameter("forgotten", torch.nn.Parameter(torch.zeros(3)))

    trainer.callback_handler.callbacks.insert(0, Adds())
    return "1 trained tensors got no gradient in 5 updates: forgotten"


def start_elsewhere(trainer):
    for name, parameter in trainer.policy.named_parameters():
        if "lora_B" in name:
            torch.nn.init.constant_(parameter, 0.02)
    return "before its first step the policy differs from its reference by"


def write_to_the_base(trainer):
    weight = next(p for n, p in trainer.policy.named_parameters() if "base_layer.weight" in n)
    after_each_step(trainer, lambda: weight.data.add_(1e-3))
    return "the base's weights changed"


@pytest.mark.parametrize("break_it", [hold_a_tensor, add_a_tensor, start_elsewhere, write_to_the_base])
def test_a_run_that_breaks_a_promise_stops_and_says_which(break_it, model_path, tmp_path):
    trainer = trainer_of(properties.fresh(model_path), tmp_path, max_steps=8)
    said = break_it(trainer)
    with pytest.raises(BrokenPromiseError, match=said):
        trainer.train()


def test_the_best_checkpoint_is_loaded_whole(model_path, tmp_path):
    trainer = trainer_of(
        properties.fresh(model_path),
        tmp_path,
        peft_method="pissa",
        max_steps=4,
        **{"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2},
        per_device_eval_batch_size=4,
        load_best_model_at_end=True,
        metric_for_best_model="eval_reward",
    )
    at_step_2 = {}

    class Remember(TrainerCallback):
        def on_save(self, *_, **__):
            at_step_2.setdefault("logits", properties.logits_of(trainer.policy))

    trainer.add_callback(Remember())
    trainer.train()
    assert trainer.state.best_global_step == 2  # the rewards do not change, and the first of equals is the best
    assert torch.equal(properties.logits_of(trainer.policy), at_step_2["logits"])
