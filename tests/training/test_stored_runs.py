"""Runs that outlive their machine: kept in a store, killed, gone on with in a fresh folder; what is refused."""

import json
import os
import shutil
from dataclasses import replace

import httpx2
import pytest

import perl
from perl.errors import PerlError, RunFolderError
from perl.hub.stores import BRANCH, store_at
from perl.policy.checkpoint import seal
from perl.recipe import Recipe
from perl.run.folder import Run
from perl.training import stored_run
from perl.training.stored_run import StoredRun, bring, check_kept
from tests import warm
from tests.launch import launchers
from tests.training.test_interruptions import RECIPE, assert_finished_like, train, uninterrupted

__all__ = ["uninterrupted"]  # a fixture
REPO = "user/kept"


@pytest.fixture
def s3(monkeypatch):
    """A bucket on an S3 server of this machine."""
    server = pytest.importorskip("moto.server", reason="moto is not installed, there is no S3 server")
    running = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    url = "http://{}:{}".format(*running.get_host_and_port())
    monkeypatch.setenv("AWS_ENDPOINT_URL", url)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "nobody")
    httpx2.put(f"{url}/bucket").raise_for_status()
    yield "s3://bucket/some/run"
    running.stop()


@pytest.fixture(params=["folder", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("s3", "hub"))])
def place(request, tmp_path, monkeypatch):
    """A place that keeps a run, which processes find with this one's environment."""
    if request.param == "folder":
        return str(tmp_path / "store")
    if request.param == "s3":
        return request.getfixturevalue("s3")
    hub = request.getfixturevalue("hub")
    for name, value in request.getfixturevalue("hub_env")(hub).items():
        monkeypatch.setenv(name, value)
    return f"hub:{REPO}"


def test_a_run_that_is_killed_goes_on_elsewhere_with_nothing_but_its_recipe_bit_for_bit(tmp_path, place, uninterrupted):
    """Killed in step 4; the newest checkpoint is of step 3, or, if that was being sent, of step 2."""
    recipe = RECIPE.replace("save_steps: 2", "save_steps: 1").replace("engine: {", f"engine: {{storage: '{place}', ")
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tripwire.py").write_text(launchers.TRIPWIRE)
        (tmp_path / name / "recipe.yaml").write_text(recipe)
    (tmp_path / "first" / "tripwire-0").write_text("4 9")
    code, said = train(tmp_path / "first")
    assert code == -9, said
    shutil.rmtree(tmp_path / "first")
    command = [*warm.COMMAND, "train", "recipe.yaml", "--resume-from", place]
    again = warm.run(command, cwd=tmp_path / "second", capture_output=True, text=True, check=False, env=os.environ)
    assert again.returncode == 0, again.stderr
    assert f"was brought from {place}" in again.stderr
    assert "resuming from step" in again.stderr
    assert "0 failed" in again.stderr
    assert_finished_like(tmp_path / "second" / "runs" / "recipe", uninterrupted)
    # The run is kept as it ended, too: nothing is left to do elsewhere.
    done = perl.train(Recipe.load(tmp_path / "second" / "recipe.yaml"), (), tmp_path / "third", place)
    assert_finished_like(done.path, uninterrupted)
    assert {step for step, whole in store_at(place, "").states().items() if whole} == {3, 4}


def made(folder, step, **facts):
    """A run folder with a checkpoint, as far as a store looks into it."""
    recipe = Recipe.load("quickstart").with_train(output_dir=str(folder))
    checkpoint = folder / "checkpoints" / f"checkpoint-{step}"
    checkpoint.mkdir(parents=True)
    (checkpoint / "adapter_model.safetensors").write_bytes(bytes([step]) * 1000)
    seal(checkpoint)
    (folder / "recipe.yaml").write_text(recipe.to_yaml())
    (folder / "run.json").write_text(json.dumps({"status": "running", **facts}))
    (folder / "metrics.jsonl").write_text("{}\n" * step)
    return recipe


def kept(folder, place, *steps):
    """A run that was kept at steps; its recipe."""
    recipe, store = None, store_at(place, "engine.storage")
    store.prepare()
    for step in steps:
        recipe = made(folder, step)
        keeping = StoredRun(folder, store)
        keeping.saved(folder)
        keeping.close()
        assert (keeping.sent, keeping.failed) == (1, 0)
    return recipe


def test_an_s3_server_keeps_two_states_of_which_a_fresh_folder_gets_the_newest(s3, tmp_path):
    recipe = kept(tmp_path / "run", s3, 1, 2, 3)
    assert store_at(s3, "").states() == {2: True, 3: True}
    bring(s3, here(recipe, tmp_path / "fresh"))
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "checkpoint-2")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "checkpoint-1")
    ours, theirs = (
        {str(path.relative_to(one)): path.read_bytes() for path in one.rglob("[!.]*") if path.is_file()}
        for one in (tmp_path / "run", tmp_path / "fresh")
    )
    assert ours == theirs
    again = StoredRun(tmp_path / "fresh", store_at(s3, ""))  # the same step once more
    again.saved(tmp_path / "fresh")
    again.close()
    bring(s3, here(recipe, tmp_path / "once more"))


def here(recipe, folder):
    return recipe.with_train(output_dir=str(folder))


def test_a_state_that_was_not_sent_whole_is_said_and_the_one_before_it_is_taken(tmp_path, caplog):
    store = tmp_path / "store"
    recipe = kept(tmp_path / "run", str(store), 1, 2, 3)
    assert sorted(path.name for path in store.iterdir()) == ["step-2", "step-3"]
    for name in ("cut", "more"):
        shutil.copytree(store, tmp_path / name)
    (tmp_path / "more" / "step-3" / "checkpoints" / "own.py").touch()
    (tmp_path / "cut" / "step-3" / "manifest.json").unlink()
    (store / "step-3" / "checkpoints" / "checkpoint-3" / "adapter_model.safetensors").write_bytes(b"\3" * 999 + b"\4")
    wrong = {
        store: "has another SHA-256",
        tmp_path / "cut": "not sent whole",
        tmp_path / "more": "was not sent with it",
    }
    for number, (place, said) in enumerate(wrong.items()):
        folder = tmp_path / f"fresh-{number}"
        bring(str(place), here(recipe, folder))
        assert said in caplog.text
        assert [path.name for path in (folder / "checkpoints").iterdir()] == ["checkpoint-2"]
        assert (folder / "metrics.jsonl").read_text() == "{}\n" * 2
        caplog.clear()
    (store / "step-2" / "manifest.json").write_text("{}")
    with pytest.raises(PerlError, match="holds no whole checkpoint"):
        bring(str(store), here(recipe, tmp_path / "none"))


def test_a_run_folder_that_is_as_far_stays_and_one_that_is_behind_is_replaced(tmp_path):
    store, folder = str(tmp_path / "store"), tmp_path / "run"
    recipe = kept(folder, store, 1, 2)
    (folder / "own.txt").touch()
    bring(store, recipe)
    assert (folder / "own.txt").exists()
    shutil.rmtree(folder / "checkpoints" / "checkpoint-2")
    with pytest.raises(PerlError, match="holds step 2 of this run, and its folder here step 1"):
        check_kept(stored(recipe, store), Run.read(folder))
    bring(store, recipe)
    assert not (folder / "own.txt").exists()
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["checkpoint-2"]


def stored(recipe, place):
    return replace(recipe, engine=recipe.engine.model_copy(update={"storage": place}))


def test_no_checkpoint_another_recipe_and_another_run_are_refused(tmp_path):
    store = str(tmp_path / "store")
    recipe = kept(tmp_path / "run", store, 2)
    with pytest.raises(PerlError, match="holds no checkpoint of a run"):
        bring(str(tmp_path / "nothing"), here(recipe, tmp_path / "fresh"))
    other = Recipe.load("quickstart", ["train.learning_rate=0.5"]).with_train(output_dir=str(tmp_path / "fresh"))
    with pytest.raises(RunFolderError, match=r"another recipe: train.learning_rate is .* there, 0.5 here") as caught:
        bring(store, other)
    assert caught.value.mistakes[0].where == store
    made(tmp_path / "other", 1)
    with pytest.raises(RunFolderError, match="holds another run than run-"):
        bring(store, here(recipe, tmp_path / "other"))
    with pytest.raises(PerlError, match="holds step 2 of another run, run-"):
        check_kept(stored(here(recipe, tmp_path / "other"), store), Run.read(tmp_path / "other"))
    for wrong in ("ftp://host/run", "hub:name"):
        with pytest.raises(PerlError, match="is no place that keeps a run"):
            bring(wrong, here(recipe, tmp_path / "fresh"))


@pytest.mark.usefixtures("nothing_waits")
def test_an_outage_is_counted_loses_no_run_and_the_next_checkpoint_is_sent(hub, tmp_path, caplog):
    store = store_at(f"hub:{REPO}", "engine.storage")
    store.prepare()
    folder = tmp_path / "run"
    made(folder, 1)
    keeping = StoredRun(folder, store)
    hub.faults.fail(status=503, times=100)
    keeping.saved(folder)
    keeping._thread.join(0)
    while not keeping.failed:
        keeping._thread.join(0.05)
    assert "step 1 is not kept there (failure 1 of this start): the Hub is unreachable: it answers 503" in caplog.text
    hub.faults.clear()
    made(folder, 2)
    keeping.saved(folder)
    keeping.close()
    assert (keeping.sent, keeping.failed) == (1, 1)
    assert store.states() == {2: True}
    assert not list(folder.glob(".outgoing"))


def test_the_hub_keeps_two_states_in_one_commit_of_a_branch_and_only_in_a_private_repository(hub, tmp_path):
    hub.create(REPO, {"README.md": b"mine\n"}, private=True)
    kept(tmp_path / "run", f"hub:{REPO}", 1, 2, 3)
    repository = hub.repo(REPO)
    assert {name.split("/")[0] for name in repository.files(BRANCH)} >= {"step-2", "step-3"}
    assert not [name for name in repository.files(BRANCH) if name.startswith("step-1/")]
    assert not [name for name in repository.files() if name.startswith("step-")]
    assert repository.at(BRANCH).parent is None
    hub.create("user/public", {})
    with pytest.raises(PerlError, match="is public"):
        store_at("hub:user/public", "").prepare()


def test_what_is_put_aside_does_not_change_while_it_is_sent(tmp_path, monkeypatch):
    """The log grows, and the checkpoint is deleted, before the first byte is sent."""
    store, folder = tmp_path / "store", tmp_path / "run"
    made(folder, 1)
    (folder / "events.out").write_text("first\n")
    sent = stored_run._send

    def later(*args):
        for name in ("metrics.jsonl", "events.out"):
            with (folder / name).open("a") as log:
                log.write("later\n")
        shutil.rmtree(folder / "checkpoints")
        return sent(*args)

    monkeypatch.setattr(stored_run, "_send", later)
    keeping = StoredRun(folder, store_at(str(store), ""))
    keeping.saved(folder)
    keeping.close()
    assert (store / "step-1" / "metrics.jsonl").read_text() == "{}\n"
    assert (store / "step-1" / "events.out").read_text() == "first\n"
    assert (store / "step-1" / "checkpoints" / "checkpoint-1" / "adapter_model.safetensors").is_file()
