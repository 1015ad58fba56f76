"""A script written for TRL does the same after renaming two classes, and an evaluation has TRL's loss and metrics.

That the gradient of a step is TRL's, and what is logged of it, is the matter of test_gradient_equality.py.
"""

import runpy

import pytest
import torch
from trl import GRPOTrainer

from perl import PeftGRPOTrainer
from perl.sandbox import BASE_FOLDER
from tests.oracles.two_trainers import relative_difference
from tests.trainer.clocks import CLOCKS
from tests.trainer.test_optimizer_step import ALL_LIVE, trainer_of

# What ours logs besides.
OWN_METRICS = {"rows/trained_fraction", "rows/masked_fraction", "rows/unscored", "tokens/run", "tokens/passes"}


@pytest.mark.parametrize(
    "options", [{"loss_type": "dapo", "beta": 0.04}, {"loss_type": "cispo"}, {"loss_type": "luspo"}]
)
def test_evaluation_gives_trls_loss_and_metrics(options):
    found = []
    for trainer_class in (PeftGRPOTrainer, GRPOTrainer):
        trainer = trainer_of(trainer_class, kinds=ALL_LIVE, **options)
        torch.manual_seed(1)
        with torch.no_grad():
            for parameter in trainer.model.parameters():
                if parameter.requires_grad:
                    parameter += 0.1 * torch.randn(parameter.shape)
        found.append(trainer.evaluate())
    ours, theirs = found
    clocks = {"eval_model_preparation_time", "eval_runtime", "eval_samples_per_second", "eval_steps_per_second"}
    assert ours.keys() - theirs.keys() == {"eval_rows/masked_fraction", "eval_rows/unscored"}
    assert not theirs.keys() - ours.keys()
    for name in theirs.keys() - clocks:
        assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-6, nan_ok=True), name


TRL_SCRIPT = """
from datasets import Dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

def reward_length(completions, **kwargs):
    return [len(completion) % 4 / 4 for completion in completions]

dataset = Dataset.from_dict({"prompt": ["12+34=", "56+7=", "8+91=", "23+45="]})
training_args = GRPOConfig(
    output_dir="run", use_cpu=True, bf16=False, gradient_checkpointing=False, dataloader_pin_memory=False,
    report_to=[], disable_tqdm=True, save_strategy="no", logging_steps=1, learning_rate=0.05, max_steps=4,
    num_generations=4, per_device_train_batch_size=8, max_completion_length=12, beta=0.04, seed=5,
)
trainer = GRPOTrainer(
    model="MODEL",
    reward_funcs=reward_length,
    args=training_args,
    train_dataset=dataset,
    peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
)
trainer.train()
"""


def adapter_of(trainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")
def test_a_script_written_for_trl_does_the_same_after_renaming_two_classes(tmp_path):
    theirs = TRL_SCRIPT.replace("MODEL", str(BASE_FOLDER))
    ours = theirs.replace("GRPOTrainer", "PeftGRPOTrainer").replace("GRPOConfig", "PeftRLConfig")
    trainers = []
    for script in (theirs, ours.replace("from trl", "from perl")):
        (tmp_path / "script.py").write_text(script)
        torch.manual_seed(3)
        trainers.append(runpy.run_path(str(tmp_path / "script.py"))["trainer"])
    assert [type(trainer) for trainer in trainers] == [GRPOTrainer, PeftGRPOTrainer]
    trl_adapter, adapter = (adapter_of(trainer) for trainer in trainers)
    assert max(tensor.abs().max().item() for name, tensor in trl_adapter.items() if "lora_B" in name) > 1e-3
    assert relative_difference(adapter, trl_adapter) <= 1e-5
    trl_history, history = (trainer.state.log_history for trainer in trainers)
    assert len({entry["reward"] for entry in trl_history[:-1]}) > 1
    for our_entry, their_entry in zip(history, trl_history, strict=True):
        closes = "train_loss" in our_entry  # has the last step's metrics too
        carried = {name for entry in history[:-1] for name in entry} - their_entry.keys() if closes else set()
        assert our_entry.keys() - OWN_METRICS - CLOCKS - carried == their_entry.keys() - CLOCKS
        for name in their_entry.keys() - CLOCKS:
            assert our_entry[name] == pytest.approx(their_entry[name], rel=1e-4, abs=1e-6), name
