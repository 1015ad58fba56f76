"""A training that publishes: its checkpoints while it goes on, its adapter at the end; and a script that does."""

import hashlib
import json
import re

import pytest
from huggingface_hub import CommitInfo

import perl
from perl import PeftGRPOTrainer, PeftRLConfig
from perl.errors import PerlError
from perl.hub.card.check import check_card
from perl.hub.push.outbox import read_push
from tests.hub.push_runs import FILES, REPO, files_of
from tests.hub_fixtures import TOKEN

SMALL = (
    "train.max_steps=2 train.save_strategy=steps train.save_steps=1 train.save_total_limit=1 train.prompts_per_step=2 "
    "train.num_generations=4 train.per_device_train_batch_size=8 rollout.max_completion_length=32 "
    f"train.learning_rate=1e-3 eval.limit=4 eval.k=2 hub.repo_id={REPO}"
).split()
pytestmark = pytest.mark.usefixtures("nothing_waits")


def test_every_checkpoint_and_the_adapter_are_on_the_hub_when_training_ends(hub):
    run = perl.train("quickstart", [*SMALL, "hub.push=every_save"])
    push = read_push(run)
    assert (push.status, push.steps, push.error) == ("done", (1, 2), None)
    first, last = (files_of(hub, f"step-{step}")["adapter_model.safetensors"] for step in (1, 2))
    final = files_of(hub)
    assert first != last == final["adapter_model.safetensors"]
    assert last == (run.adapter / "adapter_model.safetensors").read_bytes()
    assert "eval/results.json" in final
    assert "step-1" in final["README.md"].decode()
    assert not (run.path / "outbox").exists()
    assert not [name for name in final if name.endswith((".pt", ".bin", ".pth"))]
    assert perl.train("quickstart", [*SMALL, "hub.push=every_save"]).status == "done"


DRAWN = []  # the rewards of the last step


@pytest.fixture
def trainer(tmp_path):
    rows = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(8)]
    arguments = PeftRLConfig(
        str(tmp_path / "out"), hub_model_id=REPO, max_steps=1, per_device_train_batch_size=4, num_generations=4,
        max_completion_length=8, peft_method="lora", report_to=[], use_cpu=True, save_strategy="no",
    )  # fmt: skip
    from datasets import Dataset

    def longer_is_better(completions, **_):
        DRAWN[:] = [float(len(str(completion))) for completion in completions]
        return DRAWN

    made = PeftGRPOTrainer("sandbox:base", longer_is_better, arguments, Dataset.from_list(rows))
    made.train()
    return made


def test_a_script_pushes_the_adapter_card_and_log_in_one_commit(hub, trainer):
    done = trainer.push_to_hub("from a script", private=True)
    assert isinstance(done, CommitInfo)
    repository = hub.repo(REPO)
    assert (repository.head.oid, repository.head.title) == (done.oid, "from a script")
    assert repository.private
    there = files_of(hub)
    of_runs_only = {"eval/results.json", "eval/samples.jsonl", "perl_recipe.yaml"}
    assert there.keys() - {".gitattributes"} == set(FILES) - of_runs_only
    checked = check_card(there, hashlib.sha256(there["adapter_model.safetensors"]).hexdigest())
    assert checked.mistakes == ()
    (row,) = [json.loads(row) for row in there["metrics.jsonl"].splitlines()]
    assert row["step"] == 1
    shown = re.search(r"mean reward, first and last step \| ([\d.,]+), ([\d.,]+) \|", there["README.md"].decode())
    mean = sum(DRAWN) / len(DRAWN)
    assert row["reward"] == pytest.approx(mean)
    assert [float(text.replace(",", "")) for text in shown.groups()] == pytest.approx([mean, mean], abs=0.00051)
    later = trainer.push_to_hub(blocking=False).result(timeout=60)
    assert later.oid == done.oid
    with pytest.raises(PerlError, match="a token comes from the Hub's own login only"):
        trainer.push_to_hub(token=TOKEN)
