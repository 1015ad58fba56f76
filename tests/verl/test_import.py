"""What verl trained comes back as a run: the same adapter bit for bit, or one line that says why not."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, set_peft_model_state_dict
from safetensors.torch import load_file

import perl
from perl.cli.main import run_commands
from perl.errors import ModelError, PerlError, RunFolderError
from perl.hub.card.check import check_card
from perl.hub.cards import find_card
from perl.policy.attach import continue_adapter
from perl.policy.probe import read_probe
from perl.policy.save_adapter import log_probs_in_float32
from perl.policy.saved.adapter import WEIGHTS, find_adapter
from perl.policy.saved.download import CONFIG
from perl.reports.run_log import read_run
from perl.run.files import sha256_of
from perl.run.folder import Run
from perl.run.logs import read_log
from perl.verl.import_job import import_job, rows_of_logs
from perl.verl.shards import read_shards
from tests.verl.jobs import ALPHA, PEFT, RANK, TARGETS, a_checkpoint, a_job, actor_of, base, log_steps, write_shards

IDS = torch.arange(5, 29).reshape(1, 24)
STEP = 2


def saved_name(name):
    return name.replace(".default", "")


def as_verl_computes(tensors, alpha):
    """(1, T, V) logits of the plain LoRA that verl makes, with its alpha, by PEFT alone."""
    config = LoraConfig(task_type="CAUSAL_LM", r=RANK, lora_alpha=alpha, target_modules=TARGETS, bias="none")
    policy = get_peft_model(base(), config).eval()
    set_peft_model_state_dict(policy, {saved_name(name): tensor for name, tensor in tensors.items()})
    with torch.no_grad():
        return policy(IDS).logits


def as_peft_loads(folder):
    with torch.no_grad():
        return PeftModel.from_pretrained(base(), str(folder)).eval()(IDS).logits


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, dict[str, torch.Tensor]]:
    """A job of which verl has trained two steps on three GPUs, and the adapter."""
    job = a_job(tmp_path_factory.mktemp("verl") / "job")
    tensors = a_checkpoint(job, STEP, processes=3)
    log_steps(job, 3)
    return job, tensors


@pytest.fixture(scope="module")
def returned(trained, tmp_path_factory) -> Run:
    """The run of :func:`trained`, with its card."""
    folder = tmp_path_factory.mktemp("runs") / "back"
    assert run_commands(["import-verl", str(trained[0]), "-o", str(folder)], "perl") == 0
    return Run.read(folder)


@pytest.fixture
def job(trained, tmp_path) -> Path:
    """A copy of :func:`trained`'s job, to be changed."""
    return Path(shutil.copytree(trained[0], tmp_path / "job"))


def test_the_adapter_that_comes_back_computes_what_verl_trained(trained, returned):
    _, tensors = trained
    written = load_file(returned.adapter / WEIGHTS)
    assert written.keys() == {saved_name(name) for name in tensors}
    for name, tensor in tensors.items():
        torch.testing.assert_close(written[saved_name(name)], tensor, rtol=0, atol=0)
    expected = as_verl_computes(tensors, ALPHA)
    torch.testing.assert_close(as_peft_loads(returned.adapter), expected, rtol=0, atol=0)
    policy = continue_adapter(base(), find_adapter(str(returned.path)))  # as peft.adapter: RUN begins
    with torch.no_grad():
        torch.testing.assert_close(policy.eval()(IDS).logits, expected, rtol=0, atol=0)
    assert (
        read_probe(returned.path).difference(log_probs_in_float32(policy, read_probe(returned.path).input_ids_BT))
        < 1e-5
    )


def test_rslora_comes_back_at_the_scale_of_the_plain_lora_that_verl_trained(tmp_path):
    """alpha / sqrt(rank) = (alpha sqrt(rank)) / rank."""
    job = a_job(tmp_path / "job", **PEFT | {"method": "rslora"})
    tensors = a_checkpoint(job, STEP, processes=2)
    done = import_job(job)
    config = json.loads((done.run.adapter / CONFIG).read_text())
    assert (config["use_rslora"], config["lora_alpha"], config["r"]) == (True, ALPHA, RANK)
    expected = as_verl_computes(tensors, ALPHA * RANK**0.5)
    torch.testing.assert_close(as_peft_loads(done.run.adapter), expected, rtol=0, atol=0)
    assert (done.logged, done.run.path) == (0, job / "run")


def test_the_run_tells_who_trained_it_and_what_was_logged(returned):
    facts = returned.facts
    assert (facts["status"], facts["steps"], facts["method"]) == ("done", STEP, "lora")
    assert facts["trained_by"]["program"] == "verl"
    assert facts["versions"] == {"perl-rl": perl.__version__, "verl": "0.9.1"}
    assert facts["trainable_parameters"] == sum(t.numel() for t in load_file(returned.adapter / WEIGHTS).values())
    assert facts["reload_difference"] == pytest.approx(0.0, abs=1e-6)
    assert (facts["seconds"], facts["reward"]) == (pytest.approx(4.0), {"first": 0.625, "last": 0.75})
    rows = read_log(returned.metrics)
    assert [row["num_tokens"] for row in rows] == pytest.approx([2000, 4000])
    assert read_run(returned.path).state == "done, step 2 of 3"
    assert perl.compare([returned.path]).rows[0].status == "done"
    card = find_card(str(returned.path))
    assert check_card(card.files, card.weights_sha256, card.counted).mistakes == ()
    assert "trained by | verl 0.9.1, fsdp2 on 3 processes" in returned.card.read_text()


def test_names_of_verls_log_are_ours_where_both_count_alike(job):
    log_steps(job, 2)
    newest, earlier = job / "verl_metrics.jsonl", job / "earlier.jsonl"
    earlier.write_text(newest.read_text().replace('"critic/score/mean": 0.625', '"critic/score/mean": 0.1') + '{"cut')
    newest.write_text(newest.read_text().splitlines()[2] + "\n")  # a start that went on after step 1
    first, second = rows_of_logs([earlier, newest], 2, {"accuracy": 2.0}, steps_per_batch=3)
    assert (first["step"], second["step"]) == (1, 4)  # of the first optimizer step on each batch
    assert (first["reward"], second["reward"], second["rewards/accuracy/mean"]) == pytest.approx((0.1, 0.75, 0.375))
    assert (first["loss"], first["kl"], first["step_time"]) == pytest.approx((-0.011, 0.002, 2.0))
    assert first["verl/actor/ppo_kl"] == pytest.approx(0.0003)  # to the policy before: not our kl
    assert first["rollout/seconds"] == pytest.approx(1.0)  # with the policy's way to the engine
    newest.write_text(json.dumps({"step": 1, "data": {"actor/pg_loss": 0.5, "odd": "text", "bad": None}}))
    assert rows_of_logs([newest], 5, {}) == [{"step": 1, "loss": 0.5}]
    newest.write_text("no log\n")
    with pytest.raises(RunFolderError, match=r"verl_metrics\.jsonl: is malformed"):
        rows_of_logs([newest], 5, {})


@pytest.mark.parametrize("processes", [5, 1])
def test_shards_of_any_division_are_put_together(tmp_path, processes):
    """As torch.chunk divides: 7 rows over 5 are 2, 2, 2, 1, 0."""
    generator = torch.Generator().manual_seed(1)
    whole = {f"lora_{rows}": torch.randn(rows, 3, generator=generator) for rows in (1, 2, 7, 16)}
    whole["lora_half"] = torch.randn(5, generator=generator).bfloat16()
    write_shards(tmp_path, whole, processes)
    found = read_shards(tmp_path)
    assert found.keys() == whole.keys()
    for name, tensor in whole.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0)


def rewritten(change, dim=0):
    """Other tensors, written again by three processes."""
    return lambda job: write_shards(actor_of(job, STEP), change(read_shards(actor_of(job, STEP))), 3, dim)


def shard(job):
    return actor_of(job, STEP) / "model_world_size_3_rank_1.pt"


def flip_a_byte(job):
    data = bytearray(shard(job).read_bytes())
    data[len(data) // 2] ^= 0xFF
    shard(job).write_bytes(data)


class Harmful:
    def __reduce__(self):
        return (Path("was-run").touch, ())


def edit_job(job, **changed):
    facts = json.loads((job / "job.json").read_text())
    (job / "job.json").write_text(json.dumps(facts | changed))


REFUSED = {
    "another base": (
        lambda job: edit_job(job, base_fingerprint="0" * 64),
        ModelError,
        ["other weights of sandbox:base"],
    ),
    "a shard absent": (lambda job: shard(job).unlink(), RunFolderError, ["of 3", "rank_1.pt"]),
    "a byte flipped": (flip_a_byte, RunFolderError, ["rank_1.pt", "checksum"]),
    "code in a shard": (
        lambda job: torch.save({"lora_A": Harmful()}, shard(job)),
        *(RunFolderError, ["rank_1.pt", "nothing of it was run"]),
    ),
    "another rank": (
        rewritten(lambda state: {name: t[:4] if "lora_A" in name else t[:, :4] for name, t in state.items()}),
        *(ModelError, ["24 tensors differ", "(4, ", "(8, ", "rank"]),
    ),
    "another dimension": (rewritten(dict, dim=1), RunFolderError, ["rank_0.pt", "first dimension"]),
    "NaN": (
        rewritten(lambda state: {name: t / 0 for name, t in state.items()}),
        ModelError,
        ["non-finite", "1,024 of 1,024"],
    ),
    "nothing trained": (
        rewritten(lambda state: {name: t * ("lora_B" not in name) for name, t in state.items()}),
        *(ModelError, ["nothing was trained", "lora_B"]),
    ),
}


@pytest.mark.parametrize(("change", "kind", "words"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_refused_in_one_line_and_nothing_is_written(job, change, kind, words):
    change(job)
    with pytest.raises(PerlError) as refused:
        import_job(job, "back")
    assert type(refused.value) is kind
    assert len(refused.value.mistakes) == 1
    line = str(refused.value)
    assert [word for word in words if word not in line] == []
    assert [path.name for path in Path().iterdir()] == ["job"]


def test_a_step_is_chosen_and_one_that_is_not_there_is_refused_with_those_that_are(job):
    """verl's own file says which is the latest complete one, whatever else lies there."""
    newer = a_checkpoint(job, 4, processes=1, seed=4)
    (job / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("2")
    with pytest.raises(RunFolderError, match=r"no checkpoint of step 3 \(there are 2, 4\)"):
        import_job(job, "back", step=3)
    assert import_job(job, "back").step == 2
    done = import_job(job, "later", step=4)
    written = load_file(done.run.adapter / WEIGHTS)
    assert max((written[saved_name(name)] - tensor).abs().max().item() for name, tensor in newer.items()) == 0.0


def test_an_adapter_that_verl_has_continued_comes_back_from_the_jobs_own_copy(returned, tmp_path):
    """Whatever has become of the adapter that the recipe names."""
    job = a_job(tmp_path / "job", adapter="gone/adapter")
    shutil.copytree(returned.adapter, job / "adapter")
    known = json.loads((job / "job.json").read_text())["files"]
    edit_job(job, files=known | {f"adapter/{name}": sha256_of(job / "adapter" / name) for name in (CONFIG, WEIGHTS)})
    before = load_file(job / "adapter" / WEIGHTS)
    named = {name.replace(".weight", ".default.weight"): tensor for name, tensor in before.items()}
    write_shards(actor_of(job, STEP), named, 2)
    with pytest.raises(ModelError, match="nothing was trained"):
        import_job(job, "back")
    write_shards(actor_of(job, STEP), {name: tensor * 1.25 for name, tensor in named.items()}, 2)
    done = import_job(job, "back")
    after = load_file(done.run.adapter / WEIGHTS)
    assert max((after[name] - 1.25 * tensor).abs().max().item() for name, tensor in before.items()) == 0.0
    assert done.run.facts["settings"]["continues"] == "gone/adapter"
