"""Conversations of a trainer: every token as it was sampled, every fault counted, and no step lost."""

import json
import os
import re
import sys
import time
import zlib
from collections import Counter
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from perl import PeftGRPOTrainer, PeftRLConfig
from perl.errors import BrokenPromiseError, RewardError
from perl.sandbox import BASE_FOLDER
from tests import warm
from tests.oracles.two_trainers import QUIET
from tests.rollouts.loopback import TOKEN, FakeVllm
from tests.trainer.test_tools import COUNTS, END, Counting, by_calls, run, tokenizer
from tests.trainer.test_trainer import problems


class Watched(PeftGRPOTrainer):
    """Keeps what was sampled after what, and what is trained."""

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        ids, log_probs = super()._generate_single_turn(prompt_ids, *args, **kwargs)
        self.__dict__.setdefault("asked", []).extend(zip(map(list, prompt_ids), ids, strict=True))
        self.__dict__.setdefault("sizes", []).append(len(ids))
        return ids, log_probs

    def run_micro_batch(self, model, batch):
        loss = super().run_micro_batch(model, batch)
        self.__dict__.setdefault("trained", []).append((batch, loss))
        return loss


def pieces(row):
    """The tokens of a trained row that the policy wrote, turn by turn, with all that stands before each."""
    ids, scored = row.completion.tolist(), row.scored.tolist()
    edges = [n for n in range(len(ids) + 1) if (scored[n - 1] if n else False) != ([*scored, False][n])]
    return [(row.prompt.tolist() + ids[:a], ids[a:b]) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def trained_turns(trainer):
    """How many turns were trained, each of which was sampled after what stands before it."""
    sampled = Counter((tuple(before), tuple(ids)) for before, ids in trainer.asked if ids)
    found = [turn for batch, _ in trainer.trained for row in batch.rows for turn in pieces(row)]
    trained = Counter((tuple(before), tuple(ids)) for before, ids in found)
    assert trained <= sampled
    return trained.total()


def test_what_was_sampled_is_what_is_trained_id_for_id_and_nothing_else_is(tmp_path):
    trainer, _ = run(tmp_path, Watched, "environment")
    assert trained_turns(trainer) == 2 * 14  # of 8 conversations a step 6 have two turns
    assert trainer.state.log_history[0]["tools/turns"] == 14 / 8


def test_the_gradient_is_a_plain_float64_ones_and_answers_of_tools_have_none(tmp_path):
    words, gradients = tokenizer(), []

    class Stopped(Watched):
        def training_step(self, *args, **kwargs):
            loss = super().training_step(*args, **kwargs)
            gradients.append({name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None})
            return loss

    trainer, _ = run(tmp_path, Stopped, "environment")
    torch.manual_seed(0)
    small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    plain = Qwen3ForCausalLM(Qwen3Config(vocab_size=len(words), num_key_value_heads=1, head_dim=8, **small)).double()
    batches = [batch for batch, _ in trainer.trained][: len(trainer.trained) // 2]
    total, tokens = torch.zeros((), dtype=torch.float64), 0
    rows = [row for batch in batches for row in batch.rows]
    advantages = torch.cat([batch.advantages.flatten() for batch in batches]).double()
    for row, advantage in zip(rows, advantages, strict=True):
        ids = torch.cat([row.prompt, row.completion])[None]
        log_probs = plain(ids).logits[0, row.prompt.numel() - 1 : -1].log_softmax(-1)
        own = log_probs.gather(1, row.completion[:, None])[:, 0]
        total = total - advantage * own[row.scored].sum()
        tokens += int(row.scored.sum())
    (total / tokens).backward()
    for name, parameter in plain.named_parameters():
        expected = parameter.grad.float()
        assert torch.allclose(gradients[0][name], expected, atol=1e-6, rtol=1e-4), name


def test_a_turn_that_was_rendered_again_is_refused(tmp_path):
    class Rendering(PeftGRPOTrainer):
        def _tool_call_loop(self, *args):
            masks, messages, ids, *rest = super()._tool_call_loop(*args)
            again = [self._tokenizer.encode(self._tokenizer.decode(one).replace(": 1}", ":1}")) for one in ids]
            masks = [
                [1] * len(one) if len(one) != len(old) else mask
                for one, old, mask in zip(again, ids, masks, strict=True)
            ]
            return masks, messages, again, *rest

    with pytest.raises(BrokenPromiseError, match=r"what is trained is not what was sampled: tokens \d+ to \d+ of"):
        run(tmp_path, Rendering, "environment")


class Failing(Counting):
    """Fails in the ways of its row."""

    def reset(self, **row):
        super().reset(**row)
        if row["start"] == "raise":
            raise ValueError("no such row")

    def increment(self, step: int) -> int:
        if self.row["start"] == "hang":
            time.sleep(60)
        return "7" * 10_000_000 if self.row["start"] == "long" else super().increment(step)

    increment.__doc__ = Counting.increment.__doc__


def trained(folder, rows, environment=Failing, rewards=by_calls, **settings):
    """One step with a conversation each of four ways for each row."""
    words = tokenizer()
    torch.manual_seed(0)
    small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=len(words), num_key_value_heads=1, head_dim=8, **small))
    usual = {"num_generations": 4, "max_completion_length": 200, "max_steps": 1, "learning_rate": 1e-2}
    usual |= {"agent_call_timeout": 0.5, "peft_method": "full", "per_device_train_batch_size": 4 * len(rows)}
    args = PeftRLConfig(str(folder), **{**QUIET, **usual, "shuffle_dataset": False, **settings})
    trainer = Watched(
        model=model, args=args, processing_class=words, reward_funcs=rewards,
        train_dataset=Dataset.from_list(rows), environment_factory=environment,
    )  # fmt: skip

    def write(input_ids, **_):
        texts = words.batch_decode(input_ids)
        answers = [f"So be it{END}" if "<tool_response>" in text else COUNTS[n % 4] for n, text in enumerate(texts)]
        ids = words(answers, padding=True, padding_side="right", return_tensors="pt")["input_ids"]
        return torch.cat([input_ids, ids], dim=1)

    trainer.model.generate = write
    trainer.train()
    return trainer


def rows_of(*starts):
    return [{"prompt": [{"role": "user", "content": "Count"}], "start": start} for start in starts]


def test_faults_are_counted_and_cost_no_step(tmp_path, caplog):
    trainer = trained(tmp_path, rows_of("raise", "hang", "long", "0"), agent_max_result_length=20)
    [log, *_] = trainer.state.log_history
    assert log["tools/void"] == 4 / 16
    assert log["rows/unscored"] == 4
    assert log["tools/call_frequency"] == 9 / 16  # three of four conversations of three rows call
    assert log["tools/timeout_frequency"] == 2 / 9
    assert log["tools/arguments_frequency"] == 3 / 9
    assert log["grad_norm"] > 0
    said = [record.getMessage() for record in caplog.records if "tools:" in record.getMessage()]
    assert any("a conversation has no reward: Failing.reset failed: test_conversations.py" in line for line in said)
    assert any("a call failed: increment did not answer within 0.5 s" in line for line in said)
    asked = [trainer._tokenizer.decode(before) for before, _ in trainer.asked]
    assert any(f"{'7' * 20}... (cut off: 10,000,000 characters)\n</tool_response>" in text for text in asked)


def test_groups_that_teach_nothing_are_replaced_conversation_by_conversation(tmp_path):
    section = {"prompt_refill": 2.0, "prompt_memory": True, "max_steps": 2, "per_device_train_batch_size": 8}
    trainer = trained(tmp_path, rows_of("0", "raise", "1", "2", "3", "4"), **section)
    assert trained_turns(trainer)
    first, second, *_ = trainer.state.log_history
    assert (first["tools/void"], first["refill/groups"]) == (0.5, 1)  # the group without an environment
    assert len(trainer.trained[0][0].rows) == 8  # two groups that differ, of which one was sampled for the other
    assert second["refill/groups"] == 0


def test_a_conversation_that_ends_without_room_or_a_reward_is_counted(tmp_path, caplog):
    class Silent(Failing):
        def get_reward(self):
            return None

    [log, *_] = trained(tmp_path, rows_of("long", "0"), Silent, rewards=None).state.log_history
    assert (log["tools/no_room"], log["rows/unscored"]) == (2 / 8, 8)
    said = [record.getMessage() for record in caplog.records]
    assert any("no conversation of a step has a reward: Silent gave None for all" in line for line in said)


def test_an_environment_that_fails_everywhere_ends_the_run_in_one_line(tmp_path):
    with pytest.raises(RewardError, match=r"in all 8 conversations of a step: Failing.reset failed: .*no such row"):
        trained(tmp_path, rows_of("raise", "raise"))


@pytest.mark.parametrize(("field", "value"), [("max_tool_calling_iterations", 0), ("agent_max_turn_length", 5)])
def test_turns_are_bounded_in_number_and_length(field, value, tmp_path):
    trainer = trained(tmp_path, rows_of("0"), **{field: value})
    [log, *_] = trainer.state.log_history
    assert log["tools/turns"] == 1.0
    assert value == 0 or log["completions/max_length"] <= 5


def test_an_environment_that_owns_the_data_needs_no_prompts(tmp_path):
    class Owner(Counting):
        def reset(self, **row):
            super().reset(**row)
            return "Count to three"

        def get_reward(self):
            return float(self.count)

    trainer = trained(tmp_path, [{"start": "0"}] * 2, Owner)
    assert "Count to three" in trainer._tokenizer.decode(trainer.asked[0][0])
    assert trainer.state.log_history[0]["grad_norm"] > 0


TEMPLATE = (
    "{% for m in messages %}{{ '<|' + ('user' if m.role == 'tool' else m.role) + '|>' + m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name ~ call.function.arguments }}{% endfor %}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


class Asking:
    """Asks again whatever is answered."""

    def reset(self, prompt, **_):
        self.question, self.given = prompt[-1]["content"], []

    def boxed(self, number: str) -> str:
        """Looks at an answer.

        Args:
            number: The answer.
        """
        self.given.append(number)
        return self.question

    def get_reward(self):
        return float(len(self.given)) + float(len("".join(self.given))) / 100


def served(folder, url, rows=16, **settings):
    """Two steps of conversations that a server's turns make: what the sandbox's base boxes is a call."""
    words = AutoTokenizer.from_pretrained(BASE_FOLDER)
    words.chat_template = TEMPLATE
    call = {"type": "function", "function": {"name": "{name}", "arguments": {"number": "{content}"}}}
    reading = {"open_pattern": r"\\(?P<name>boxed)\{", "close_pattern": r"\}", "content": "text", "repeats": True}
    content = {"close_pattern": r"<eos>|$", "content": "text"}
    fields = {"tool_calls": reading | {"transform": call}, "content": content}
    words.response_template = {"start_anchor": "<|assistant|>", "defaults": {"role": "assistant"}, "fields": fields}
    usual = {"num_generations": 4, "max_completion_length": 120, "agent_max_turn_length": 40, "max_steps": 2}
    usual |= {"max_tool_calling_iterations": 2, "learning_rate": 1e-3, "prompts_per_step": 4, "use_cpu": True}
    usual |= {"rollout_backend": "vllm-server", "rollout_servers": [url], "per_device_train_batch_size": 8}
    trainer = Watched(
        model="sandbox:base",
        args=PeftRLConfig(str(folder), **{**QUIET, **usual, **settings}),
        processing_class=words,
        train_dataset=problems(rows),
        environment_factory=Asking,
    )
    trainer.train()
    return trainer


def check_served(trainer):
    assert trained_turns(trainer)
    logs = [log for log in trainer.state.log_history if "tools/turns" in log]
    assert all(log["tools/turns"] > 1.5 for log in logs)
    texts = [trainer._tokenizer.decode(before + ids) for before, ids in trainer.asked]
    told_of = re.compile(r"boxed\{(.*?)(?:\}|<eos>|<\||$)", re.DOTALL)  # a turn that is cut may close nothing
    for environment in trainer.environments:  # what it was told stands in one conversation about its question
        own = [told_of.findall(text) for text in texts if f"<|user|>{environment.question}" in text]
        given = [number.partition("<eos>")[0] for number in environment.given]
        assert any(told[: len(given)] == given for told in own), environment.given


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_turns_of_a_server_are_trained_as_they_were_sampled_each_in_its_conversation(ahead, tmp_path, vllm_server):
    trainer = served(tmp_path, vllm_server, rollout_prefetch=ahead, max_steps=4)
    check_served(trainer)
    logs = [log for log in trainer.state.log_history if "tools/turns" in log][:4]
    assert all(log["sampling/sampling_logp_difference/max"] < 1e-3 for log in logs if not ahead)
    assert [log["sampling/staleness/max"] for log in logs] == [min(step, ahead) for step in range(4)]
    if ahead:  # first turns were sampled by the policy before; later ones by the one of their step
        assert all(0 < log["sampling/staleness/mean"] < ahead for log in logs[1:])


class Calling(FakeVllm):
    """Boxes a number that is made of the prompt, so that it is asked again, if the first of the questions is asked."""

    def tokens(self, body, index):
        return boxed(body["prompt"], index) if body["stop_token_ids"] else [TOKEN] * body["max_tokens"]


def boxed(prompt_ids, index):
    words = AutoTokenizer.from_pretrained(BASE_FOLDER)
    calls = problems(1)[0]["prompt"][0]["content"] in words.decode(prompt_ids)
    number = str(zlib.crc32(bytes(prompt_ids)) % 1000 + index)
    return [*words.encode(f"\\boxed{{{number}}}" if calls else number, add_special_tokens=False), words.eos_token_id]


def test_a_process_whose_conversations_have_ended_waits_for_those_of_another(tmp_path):
    """Two questions, one of each process, of which one calls, in one step this process's and in one the other's."""
    with Calling(longest=400)() as url:
        done = warm.run_distributed(["-m", "tests.trainer.test_conversations", tmp_path / "run", url], tmp_path)
    assert done.returncode == 0, done.stderr
    rows = [json.loads((tmp_path / f"run-{rank}.json").read_text()) for rank in range(2)]
    assert sorted(sizes for sizes, _ in rows) == [[4, 0, 0, 4, 4, 4], [4, 4, 4, 4, 0, 0]]
    for asked in (asked for _, asked in rows):
        assert asked
        assert all(ids in [boxed(before, index) for index in range(4)] for before, ids in asked)


if __name__ == "__main__":
    few = {"rows": 2, "prompts_per_step": 2, "per_device_train_batch_size": 4, "rollout_tolerance": 1e3}
    trainer = served(Path(sys.argv[1]), sys.argv[2], **few)
    check_served(trainer)
    Path(f"{sys.argv[1]}-{os.environ['RANK']}.json").write_text(json.dumps([trainer.sizes, trainer.asked]))
