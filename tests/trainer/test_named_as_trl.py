"""Names of what TRL has too: the update of TRL's trainer whose arguments say the same, word by word."""

import copy

import torch
from datasets import Dataset
from trl import RLOOConfig, RLOOTrainer

from perl import PeftGRPOTrainer
from tests.oracles.rollouts import GENERATIONS, LONGEST, MIXED, ROWS, rollout_table
from tests.oracles.two_trainers import (
    ADAPTERS,
    OFFSET,
    QUIET,
    Diary,
    base,
    norm,
    relative_difference,
    tokenizer,
    train,
)

RELATIVE = 1e-5


class PresetRLOO(RLOOTrainer):
    """TRL's RLOO on given rollouts, which it has no argument for."""

    def __init__(self, *args, table, **kwargs):
        super().__init__(*args, **kwargs)
        self.groups, self.tokens = {tuple(group.prompt_ids): group for group in table.values()}, 0

    def _dealt(self, prompt_ids):
        places = [sum(earlier == ids for earlier in prompt_ids[:i]) for i, ids in enumerate(prompt_ids)]
        return [(self.groups[tuple(ids)], place) for ids, place in zip(prompt_ids, places, strict=True)]

    def _generate_single_turn(self, prompt_ids, *_):
        self.dealt = self._dealt(prompt_ids)
        completions = [group.completion_ids[place] for group, place in self.dealt]
        self.tokens += sum(map(len, completions))
        return completions

    def _calculate_rewards(self, *_):
        return torch.tensor([[group.rewards[place]] for group, place in self.dealt])


def test_rloo_gives_the_update_of_trls_own_trainer_but_for_the_mean_length_of_the_batch():
    """Of one step; TRL's loss adds up the tokens of a completion, ours is divided by all tokens of the batch."""
    table = rollout_table(MIXED[:1])
    model = copy.deepcopy(base(torch.float32))
    arguments = {
        **QUIET,
        **{"optim": "sgd", "learning_rate": 0.05, "lr_scheduler_type": "constant", "max_grad_norm": 0.0},
        **{"num_generations": GENERATIONS, "per_device_train_batch_size": ROWS, "max_completion_length": LONGEST},
        **{"max_steps": 1, "shuffle_dataset": False, "seed": 11, "beta": 0.03},
    }
    trainer = PresetRLOO(
        table=table,
        model=model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=RLOOConfig("run", **arguments),
        train_dataset=Dataset.from_dict({"prompt": list(table)}),
        processing_class=tokenizer(),
        peft_config=copy.deepcopy(ADAPTERS["lora"]),
    )
    diary = Diary(trainer.accelerator.unwrap_model(trainer.model), OFFSET)
    trainer.add_callback(diary)
    trainer.train()
    mean_length = trainer.tokens / ROWS
    rate = arguments["learning_rate"] * mean_length
    for beta in ({}, {"beta": 0.0, "kl_in_reward": False}):
        options = {"kinds": MIXED[:1], "max_steps": 1, "learning_rate": rate, **beta}
        ours = train(PeftGRPOTrainer, **options, algorithm="rloo")
        theirs = {name: diary.pages[-1][name] - start for name, start in diary.pages[0].items()}
        assert relative_difference(ours.pages[0], diary.pages[0]) == 0
        assert norm(theirs) > 0.01 * norm(diary.pages[0])
        assert (relative_difference(ours.update(), theirs) <= RELATIVE) == (not beta)  # the penalty counts
