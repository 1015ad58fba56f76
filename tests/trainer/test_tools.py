"""Tools and environments are called as in TRL's trainer, by a model that writes real calls, and leave the same run."""

import json
from collections import Counter

import pytest
import torch
from datasets import Dataset
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import qwen3_chat_template

from perl import PeftGRPOTrainer, PeftRLConfig
from tests.oracles.two_trainers import QUIET

END, PAD = "<|im_end|>", "<|endoftext|>"


def tokenizer() -> PreTrainedTokenizerFast:
    """A token a byte, and Qwen3's own template and marks."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_alone = Tokenizer(models.BPE({letter: n for n, letter in enumerate(letters)}, []))
    bytes_alone.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_alone.decoder = decoders.ByteLevel()
    bytes_alone.add_special_tokens([AddedToken(mark, special=True) for mark in (PAD, "<|im_start|>", END)])
    bytes_alone.add_tokens(["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"])
    made = PreTrainedTokenizerFast(tokenizer_object=bytes_alone, eos_token=END, pad_token=PAD, padding_side="left")
    made.chat_template = qwen3_chat_template
    return made


def called(name: str, **arguments: object) -> str:
    call = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{call}\n</tool_call>{END}"


def multiply(a: int, b: int) -> int:
    """Multiplies.

    Args:
        a: One.
        b: The other.
    """
    return a * b


async def multiply_later(a: int, b: int) -> int:
    return a * b


multiply_later.__doc__ = multiply.__doc__


class Counting:
    """An environment whose calls are counted, and which has a reward of its own if a subclass says so."""

    def reset(self, **row: object) -> str | None:
        self.count, self.row = 0, row
        return f" from {row['start']}" if row.get("start") else None

    def increment(self, step: int) -> int:
        """Counts on.

        Args:
            step: By how much.
        """
        self.count += step
        return self.count


class Doubling(Counting):
    def double(self, step: int) -> int:
        self.count = 2 * (self.count + step)
        return self.count

    double.__doc__ = Counting.increment.__doc__


def by_calls(completions, environments=None, **_):
    """Another reward for each way in which a conversation may have gone."""
    counts = [environment.count for environment in environments] if environments else [0] * len(completions)
    said = [sum(len(message["content"] or "") for message in messages) for messages in completions]
    return [count + 0.01 * length for count, length in zip(counts, said, strict=True)]


Rewarded = type("Rewarded", (Counting,), {"get_reward": lambda self: float(self.count)})
CALLS = [called("multiply", a=3, b=4), called("multiply", a=3, c=4), f"12{END}", called("multiply_later", a=5, b=6)]
COUNTS = [called("increment", step=1), called("increment", by=2), f"1{END}", called("increment", step=4)]
MIXED = [called("increment", step=1), called("double", step=2), f"1{END}", called("double", by=4)]
NAMED = [{"environment": "counting", "start": "0"}, {"environment": "doubling", "start": ""}]
# What a trainer is given, what the model writes at first, further columns of rows, calls of a row, failures of a call.
CASES = {
    "tools": ({"tools": [multiply, multiply_later]}, CALLS, [{}], 3 / 4, 1 / 3),
    "environment": ({"environment_factory": Counting}, COUNTS, [{"start": "0"}], 3 / 4, 1 / 3),
    "environments": ({"environment_factory": {"counting": Counting, "doubling": Doubling}}, MIXED, NAMED, 3 / 4, 3 / 6),
    "own reward": ({"environment_factory": Rewarded, "reward_funcs": None}, COUNTS, [{"start": "0"}], 3 / 4, 1 / 3),
}


def run(folder, kind, case):
    """Two steps of a trainer in which each of four completions of a group begins with one of the texts."""
    given, first, columns, *_ = CASES[case]
    words, asked = tokenizer(), Counter()
    ask = [{"role": "user", "content": "Count"}]
    rows = [{"prompt": ask, **column} for _ in range(2) for column in (columns * 2)[:2]]
    torch.manual_seed(0)
    small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=len(words), num_key_value_heads=1, head_dim=8, **small))
    model.save_pretrained(folder)
    model = Qwen3ForCausalLM.from_pretrained(folder)  # whose reference policy TRL reads again
    config, own = (PeftRLConfig, {"peft_method": "full"}) if kind is not GRPOTrainer else (GRPOConfig, {})
    args = config(
        str(folder), per_device_train_batch_size=8, num_generations=4, max_completion_length=200, max_steps=2,
        learning_rate=1e-2, optim="sgd", shuffle_dataset=False, seed=3, beta=0.1, **QUIET, **own,
    )  # fmt: skip
    options = {"reward_funcs": by_calls, **given}
    trainer = kind(model=model, args=args, train_dataset=Dataset.from_list(rows), processing_class=words, **options)

    def write(input_ids, **_):
        texts = words.batch_decode(input_ids)
        answers = [f"So be it{END}" if "<tool_response>" in text else first[n % 4] for n, text in enumerate(texts)]
        asked.update(answers)
        ids = words(answers, padding=True, padding_side="right", return_tensors="pt")["input_ids"]
        return torch.cat([input_ids, ids], dim=1)

    trainer.model.generate = write
    trainer.train()
    return trainer, asked


def test_a_later_turn_is_asked_and_trained_with_the_tokens_that_were_sampled_before_it(tmp_path, monkeypatch):
    thought = f"<think>\nfirst \n\n</think>\n\n\n {CALLS[0]}"  # the template would write it with other spaces
    monkeypatch.setitem(CASES, "thoughts", ({"tools": [multiply]}, [thought, f"12{END}"] * 2, [{}]))
    asked, trained = [], []

    class Watched(PeftGRPOTrainer):
        def _generate_single_turn(self, prompt_ids, *args, **kwargs):
            asked.extend(list(ids) for ids in prompt_ids)
            return super()._generate_single_turn(prompt_ids, *args, **kwargs)

        def run_micro_batch(self, model, batch):
            trained.extend(row.prompt.tolist() + row.completion.tolist() for row in batch.rows)
            return super().run_micro_batch(model, batch)

    run(tmp_path, Watched, "thoughts")
    first, sampled = asked[0], tokenizer()(thought)["input_ids"]
    later = [ids for ids in asked if len(ids) > len(first)]
    assert {tuple(ids[: len(first) + len(sampled)]) for ids in later} == {(*first, *sampled)}
    assert all(any(row[: len(ids)] == ids for row in trained) for ids in later)


@pytest.mark.parametrize("case", CASES)
def test_calls_of_tools_and_environments_are_made_and_leave_what_trls_trainer_leaves(case, tmp_path):
    theirs, wrote = run(tmp_path / "theirs", GRPOTrainer, case)
    ours, written = run(tmp_path / "ours", PeftGRPOTrainer, case)
    *_, calls, failures = CASES[case]
    assert wrote == written
    for step in range(2):
        there, here = (trainer.state.log_history[step] for trainer in (theirs, ours))
        assert here["tools/call_frequency"] == pytest.approx(calls)
        assert here["tools/failure_frequency"] == pytest.approx(failures)
        kinds = ("tools/", "reward", "completions/", "grad_norm", "loss", "kl")
        shared = [name for name in there if name.startswith(kinds)]
        assert {name: here[name] for name in shared} == pytest.approx({name: there[name] for name in shared}, abs=2e-6)
        assert here["grad_norm"] > 0
    states = (trainer.accelerator.unwrap_model(trainer.model).state_dict() for trainer in (theirs, ours))
    for one, other in zip(*(state.values() for state in states), strict=True):
        assert torch.allclose(one, other, atol=1e-6)
