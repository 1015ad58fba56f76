"""What verl trained comes back as a run: the same adapter bit for bit, or one line that says why not."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, set_peft_model_state_dict
from safetensors.torch import load_file, save_file

import perl
from perl.errors import ModelError, PerlError, RunFolderError
from perl.hub.card.check import check_card
from perl.hub.found_card import find_card
from perl.hub.run_card import write_card
from perl.launch.verl.come_back import CameBack, come_back
from perl.launch.verl.log import rows_of_logs
from perl.launch.verl.shards import read_shards
from perl.policy.attach import continue_adapter
from perl.policy.model import load_base
from perl.policy.probe import read_probe
from perl.policy.saved.adapter import WEIGHTS, find_adapter
from perl.policy.saved.download import CONFIG
from perl.recipe.sections import ModelSection
from perl.reports.run_log import read_run
from perl.run.files import sha256_of
from perl.run.folder import Run
from perl.run.logs import read_log
from tests.launch.verl_jobs import (
    ALPHA,
    RANK,
    TARGETS,
    a_checkpoint,
    a_job,
    a_recipe,
    actor_of,
    log_steps,
    write_shards,
)

IDS = torch.arange(5, 29).reshape(1, 24)
STEP = 2


def base():
    return load_base(ModelSection(name="sandbox:base"), torch.device("cpu"))


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
def returned(trained, tmp_path_factory) -> CameBack:
    """The run of :func:`trained`, with its card."""
    done = come_back(trained[0], tmp_path_factory.mktemp("runs") / "back")
    write_card(done.run)
    return done


@pytest.fixture
def job(trained, tmp_path) -> Path:
    """A copy of :func:`trained`'s job, to be changed."""
    return Path(shutil.copytree(trained[0], tmp_path / "job"))


def test_the_adapter_that_comes_back_computes_what_verl_trained(trained, returned):
    _, tensors = trained
    written = load_file(returned.run.adapter / WEIGHTS)
    assert written.keys() == {saved_name(name) for name in tensors}
    for name, tensor in tensors.items():
        torch.testing.assert_close(written[saved_name(name)], tensor, rtol=0, atol=0)
    expected = as_verl_computes(tensors, ALPHA)
    torch.testing.assert_close(as_peft_loads(returned.run.adapter), expected, rtol=0, atol=0)
    policy = continue_adapter(base(), find_adapter(str(returned.run.path)))  # as peft.adapter: RUN begins
    with torch.no_grad():
        torch.testing.assert_close(policy.eval()(IDS).logits, expected, rtol=0, atol=0)
    probe = read_probe(returned.run.path)
    assert probe is not None
    with torch.no_grad():
        log_probs = policy(probe.input_ids_BT).logits[:, :-1].log_softmax(-1)
    given = log_probs.gather(-1, probe.input_ids_BT[:, 1:, None]).squeeze(-1)
    assert probe.difference(given) == pytest.approx(0.0, abs=1e-5)


def test_rslora_comes_back_at_the_scale_of_the_plain_lora_that_verl_trained(tmp_path):
    """alpha / sqrt(rank) = (alpha sqrt(rank)) / rank; the checkpoint holds the base too, in shards and copies of it."""
    job = a_job(tmp_path / "job", a_recipe("rslora"))
    tensors = a_checkpoint(job, STEP, processes=2, lora_only=False)
    done = come_back(job)
    config = json.loads((done.run.adapter / CONFIG).read_text())
    assert (config["use_rslora"], config["lora_alpha"], config["r"]) == (True, ALPHA, RANK)
    torch.testing.assert_close(
        as_peft_loads(done.run.adapter), as_verl_computes(tensors, ALPHA * RANK**0.5), rtol=0, atol=0
    )
    assert done.compared == sum(1 for _ in base().named_parameters())
    assert (done.logged, done.run.path) == (0, job / "run")


def test_the_run_tells_who_trained_it_and_what_was_logged(returned):
    facts = returned.run.facts
    assert (facts["status"], facts["steps"], facts["method"]) == ("done", STEP, "lora")
    assert facts["trained_by"]["program"] == "verl"
    assert facts["settings"]["trained by"] == "verl 0.9.1, fsdp2 on 3 processes"
    assert facts["versions"] == {"perl-rl": perl.__version__, "verl": "0.9.1"}
    assert facts["trainable_parameters"] == sum(t.numel() for t in load_file(returned.run.adapter / WEIGHTS).values())
    assert facts["reload_difference"] == pytest.approx(0.0, abs=1e-6)
    assert (facts["seconds"], facts["reward"]) == (pytest.approx(4.0), {"first": 0.625, "last": 0.75})
    rows = read_log(returned.run.metrics)
    assert [row["step"] for row in rows] == [1, 2]
    assert [row["reward"] for row in rows] == pytest.approx([0.625, 0.75])
    assert [row["num_tokens"] for row in rows] == pytest.approx([2000, 4000])
    log = read_run(returned.run.path)
    assert log.state == "done, step 2 of 2"
    assert perl.compare([returned.run.path]).rows[0].status == "done"
    card = find_card(str(returned.run.path))
    assert check_card(card.files, card.weights_sha256, card.counted).mistakes == ()
    assert "trained by | verl 0.9.1, fsdp2 on 3 processes" in returned.run.card.read_text()


def test_names_of_verls_log_are_ours_where_both_count_alike(job):
    log_steps(job, 2)
    newest = job / "verl_metrics.jsonl"
    earlier = job / "earlier.jsonl"
    earlier.write_text(newest.read_text().replace('"critic/score/mean": 0.625', '"critic/score/mean": 0.1') + '{"cut')
    newest.write_text(newest.read_text().splitlines()[2] + "\n")  # a start that went on after step 1
    rows = rows_of_logs([earlier, newest], 2, {"accuracy": 2.0}, steps_per_batch=3)
    assert [row["step"] for row in rows] == [1, 4]  # of the first optimizer step on each batch
    np.testing.assert_allclose([row["reward"] for row in rows], [0.1, 0.75])
    np.testing.assert_allclose([row["rewards/accuracy/mean"] for row in rows], [0.05, 0.375])
    first = rows[0]
    assert first["loss"] == pytest.approx(-0.011)
    assert first["verl/actor/pg_loss"] == pytest.approx(-0.012)
    assert first["verl/actor/ppo_kl"] == pytest.approx(0.0003)  # to the policy before: not our kl
    assert (first["kl"], first["grad_norm"], first["step_time"]) == pytest.approx((0.002, 0.25, 2.0))
    assert first["rollout/seconds"] == pytest.approx(1.0)  # with the policy's way to the engine
    alone = {"step": 1, "data": {"actor/pg_loss": 0.5, "odd": "text", "bad": None}}
    newest.write_text(json.dumps(alone))
    assert rows_of_logs([newest], 5, {}) == [{"step": 1, "loss": 0.5}]


@pytest.mark.parametrize(("processes", "shape"), [(3, ()), (5, ()), (1, ()), (4, (2, 2))])
def test_shards_of_any_division_are_put_together(tmp_path, processes, shape):
    """As torch.chunk divides: 7 rows over 5 are 2, 2, 2, 1, 0; on a mesh of (2, 2) each shard lies in two files."""
    generator = torch.Generator().manual_seed(1)
    whole = {f"lora_{rows}": torch.randn(rows, 3, generator=generator) for rows in (1, 2, 7, 16)}
    whole["lora_half"] = torch.randn(5, generator=generator).bfloat16()
    write_shards(tmp_path, whole | {"base": torch.ones(4)}, processes, shape)
    others = []
    found = read_shards(tmp_path, tmp_path, lambda name: "lora" in name, lambda *other: others.append(other[1].bounds))
    assert found.keys() == whole.keys()
    for name, tensor in whole.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0)
    assert len(others) == processes
    assert max(stop for ((_, stop),) in others) == 4


@pytest.mark.parametrize("form", ["ranks in a tensor", "sides and strides"])
def test_shards_of_earlier_versions_of_torch_are_read(tmp_path, monkeypatch, form):
    """Up to torch 2.9 a mesh holds a tensor of ranks, in 2.10 one layout for all of its dimensions."""
    from torch.distributed import device_mesh
    from torch.distributed.tensor import DTensor

    class DeviceMesh:
        """Pickled by the name of torch's."""

    DeviceMesh.__module__, DeviceMesh.__qualname__ = device_mesh.__name__, "DeviceMesh"
    earlier, save = DeviceMesh(), torch.save
    ranks = torch.arange(4).view(2, 2)
    state = {"mesh": ranks} if form == "ranks in a tensor" else {"_layout": DeviceMesh(), "_rank_map": ranks.flatten()}
    vars(earlier).update(state)
    vars(state.get("_layout", earlier)).update({} if "mesh" in state else {"shape": (2, 2), "stride": (2, 1)})

    def saved_by_it(held, path):
        for tensor in held.values():
            assert isinstance(tensor, DTensor)
            tensor._spec.__dict__["mesh"] = earlier
        with monkeypatch.context() as patched:
            patched.setattr(device_mesh, "DeviceMesh", DeviceMesh)
            save(held, path)

    monkeypatch.setattr(torch, "save", saved_by_it)
    whole = {"lora_A": torch.arange(21.0).view(7, 3)}
    write_shards(tmp_path, whole, 4, (2, 2))
    found = read_shards(tmp_path, tmp_path, lambda _: True, print)
    torch.testing.assert_close(found["lora_A"], whole["lora_A"], rtol=0, atol=0)


def of_actor(change):
    """A change of the checkpoint's folder."""
    return lambda job: change(actor_of(job, STEP))


def rewritten(change):
    """Other tensors, written again by three processes."""

    def apply(job):
        actor = actor_of(job, STEP)
        state = read_shards(actor, actor, lambda _: True, print)
        write_shards(actor, change(state), 3)

    return apply


def shard(actor, rank=1):
    return actor / f"model_world_size_3_rank_{rank}.pt"


def flip_a_byte(actor):
    data = bytearray(shard(actor).read_bytes())
    data[len(data) // 2] ^= 0xFF
    shard(actor).write_bytes(data)


class Harmful:
    def __reduce__(self):
        return (Path("was-run").touch, ())


def link_out(actor):
    outside = actor.parents[3] / "elsewhere.pt"
    shard(actor).rename(outside)
    shard(actor).symlink_to(outside)


def edit_recipe(job):
    path = job / "recipe.yaml"
    path.write_text(path.read_text().replace("rank: 8", "rank: 4"))


def edit_job(**changed):
    def apply(job):
        facts = json.loads((job / "job.json").read_text())
        (job / "job.json").write_text(json.dumps(facts | changed))

    return apply


def name_files(job, *names):
    """As files that were sent as they are."""
    known = json.loads((job / "job.json").read_text())["files"]
    edit_job(files=known | {name: sha256_of(job / name) for name in names})(job)


def first_is(value):
    return rewritten(lambda state: state | {next(iter(state)): torch.full_like(next(iter(state.values())), value)})


REFUSED = {
    "no job": (lambda job: (job / "job.json").unlink(), RunFolderError, ["no job.json"]),
    "another format": (edit_job(format=2), RunFolderError, ["job.json", "another format"]),
    "recipe edited": (edit_recipe, RunFolderError, ["recipe.yaml", "changed since it was sent"]),
    "another base": (edit_job(base_fingerprint="0" * 64), ModelError, ["other weights of sandbox:base"]),
    "another scale": (edit_job(verl_alpha=45), ModelError, ["scale 5.625", "has 2"]),
    "a shard absent": (of_actor(lambda actor: shard(actor).unlink()), RunFolderError, ["of 3", "rank_1.pt"]),
    "a shard cut": (
        of_actor(lambda actor: shard(actor).write_bytes(shard(actor).read_bytes()[:-500])),
        *(RunFolderError, ["rank_1.pt", "cut"]),
    ),
    "a byte flipped": (of_actor(flip_a_byte), RunFolderError, ["rank_1.pt", "checksum"]),
    "a link that leads out": (of_actor(link_out), RunFolderError, ["rank_1.pt", "out of the job's folder"]),
    "code in a shard": (
        of_actor(lambda actor: torch.save({"lora_A": Harmful()}, shard(actor))),
        *(RunFolderError, ["rank_1.pt", "nothing of it was run"]),
    ),
    "an object in a shard": (
        of_actor(lambda actor: torch.save({"lora_A": torch.nn.Linear(1, 1)}, shard(actor))),
        *(RunFolderError, ["rank_1.pt", "torch.nn"]),
    ),
    "rank by its meta": (
        of_actor(lambda actor: (actor / "lora_train_meta.json").write_text('{"r": 4, "lora_alpha": 16}')),
        *(ModelError, ["r is 4", "with 8"]),
    ),
    "another rank": (
        rewritten(lambda state: {name: t[:4] if "lora_A" in name else t[:, :4] for name, t in state.items()}),
        *(ModelError, ["4 x 128", "8 x 128", "rank"]),
    ),
    "keys absent": (
        rewritten(lambda state: {name: t for name, t in state.items() if "q_proj" not in name}),
        *(ModelError, ["of 24", "8 are absent", "q_proj", "target modules"]),
    ),
    "further keys": (
        rewritten(lambda state: state | {name.replace("q_", "k_"): t for name, t in state.items()}),
        *(ModelError, ["8 tensors that", "k_proj"]),
    ),
    "NaN": (first_is(float("nan")), ModelError, ["non-finite", "1,024 of 1,024"]),
    "nothing trained": (
        rewritten(lambda state: {name: t * ("lora_B" not in name) for name, t in state.items()}),
        *(ModelError, ["nothing was trained", "lora_B"]),
    ),
    "the base in it is another": (
        rewritten(lambda state: state | {"base_model.model.model.norm.weight": torch.ones(128) * 3}),
        *(ModelError, ["another base", "model.norm.weight"]),
    ),
}


@pytest.mark.parametrize(("change", "kind", "words"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_refused_in_one_line_and_nothing_is_written(job, change, kind, words):
    change(job)
    with pytest.raises(PerlError) as refused:
        come_back(job, "back")
    assert type(refused.value) is kind
    assert len(refused.value.mistakes) == 1
    line = str(refused.value)
    assert [word for word in words if word not in line] == []
    assert sorted(path.name for path in Path().iterdir() if path.name not in ("job", "elsewhere.pt")) == []


def test_a_step_is_chosen_and_one_that_is_not_there_is_refused_with_those_that_are(job):
    """verl's own file says which is the latest complete one, whatever else lies there."""
    newer = a_checkpoint(job, 4, processes=1, seed=4)
    (job / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("2")
    with pytest.raises(RunFolderError, match=r"no checkpoint of step 3 \(there are 2, 4\)"):
        come_back(job, "back", step=3)
    assert come_back(job, "back").step == 2
    done = come_back(job, "later", step=4)
    written = load_file(done.run.adapter / WEIGHTS)
    assert max((written[saved_name(name)] - tensor).abs().max().item() for name, tensor in newer.items()) == 0.0
    with pytest.raises(RunFolderError, match="later: is not empty"):
        come_back(job, "later")


def test_a_start_that_was_another_comes_back_and_says_so(job, monkeypatch):
    """run.sh and README.txt may be changed; what verl was told besides is on the card, its values in run.json."""
    for name in ("run.sh", "README.txt"):
        (job / name).write_text("as it was sent\n")
    name_files(job, "run.sh", "README.txt")
    (job / "README.txt").write_text("mine\n")
    assert "further" not in str(come_back(job, "as-sent").run.facts["settings"])
    (job / "run.sh").write_text("module load cuda\n")
    told = [f"actor_rollout_ref.actor.optim.lr={rate}" for rate in (1e-3, 1e-3, 5e-4)] + ["+a.b={c: 'x](y'}"]
    (job / "further_overrides.txt").write_text("\n".join(told) + "\n")
    done = come_back(job, "back")
    assert done.run.facts["trained_by"]["further_overrides"] == [told[0], *told[2:]]
    assert [float(one.partition("=")[2]) for one in told[:3]] == pytest.approx([0.001, 0.001, 0.0005])
    write_card(done.run)
    card = find_card(str(done.run.path))
    assert check_card(card.files, card.weights_sha256, card.counted).mistakes == ()
    line = "fsdp2 on 3 processes, told otherwise: actor_rollout_ref.actor.optim.lr a.b, run.sh changed"
    assert line in done.run.card.read_text()
    Path("empty").mkdir()
    monkeypatch.chdir("empty")
    with pytest.raises(RunFolderError, match="current folder"):
        come_back(job, ".")


def test_an_adapter_that_verl_has_continued_comes_back_from_the_jobs_own_copy(returned, tmp_path):
    """Whatever has become of the adapter that the recipe names."""
    job = a_job(tmp_path / "job", a_recipe(peft={"adapter": "gone/adapter"}))
    shutil.copytree(returned.run.adapter, job / "adapter")
    with pytest.raises(RunFolderError, match="was not sent"):
        come_back(job, "back")
    sent = [f"adapter/{name}" for name in (CONFIG, WEIGHTS)]
    name_files(job, *sent)
    before = load_file(job / "adapter" / WEIGHTS)
    named = {name.replace(".weight", ".default.weight"): tensor for name, tensor in before.items()}
    write_shards(actor_of(job, STEP), named, 2)
    with pytest.raises(ModelError, match="nothing was trained"):
        come_back(job, "back")
    write_shards(actor_of(job, STEP), {name: tensor * 1.25 for name, tensor in named.items()}, 2)
    done = come_back(job, "back")
    after = load_file(done.run.adapter / WEIGHTS)
    assert max((after[name] - 1.25 * tensor).abs().max().item() for name, tensor in before.items()) == 0.0
    assert done.run.facts["settings"]["continues"] == "gone/adapter"


def test_what_megatron_exports_in_pefts_form_comes_back_too(job, trained):
    edit_job(strategy="megatron", verl_alpha=16)(job)
    actor = actor_of(job, STEP)
    folder = actor / "model" / "huggingface" / "adapter"
    folder.mkdir(parents=True)
    with pytest.raises(RunFolderError, match=r"no adapter that PEFT loads.*hf_model"):
        come_back(job, "back")
    tensors = {saved_name(name): tensor.bfloat16() for name, tensor in trained[1].items()}
    save_file(tensors, folder / WEIGHTS)
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": 16, "target_modules": TARGETS}
    (folder / CONFIG).write_text(json.dumps(config))
    done = come_back(job, "back")
    written = load_file(done.run.adapter / WEIGHTS)
    for name, tensor in tensors.items():
        torch.testing.assert_close(written[name], tensor.float(), rtol=0, atol=0)
    assert done.run.facts["settings"]["trained by"] == "verl 0.9.1, megatron"


def test_an_imported_run_is_published_and_found_again(returned, hub, tmp_path):
    run = Run.read(shutil.copytree(returned.run.path, tmp_path / "run"))
    pushed = perl.push(run, "user/from-verl")
    assert pushed.repo_id == "user/from-verl"
    files = hub.repo("user/from-verl").files("main")
    assert b"verl 0.9.1, fsdp2 on 3 processes" in files["README.md"]
    there = find_adapter("user/from-verl")
    torch.testing.assert_close(as_peft_loads(there.folder), as_peft_loads(run.adapter), rtol=0, atol=0)
