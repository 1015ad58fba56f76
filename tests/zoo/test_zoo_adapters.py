"""zoo:NAME is an adapter wherever one is named, and only if its files are those that the entry lists."""

import hashlib
from pathlib import Path

import pytest

from perl.cli.commands import run as run_command
from perl.errors import PerlError
from perl.evaluation.drawing.subject import find_subject
from perl.policy.attach import shaped_saved_adapter
from perl.policy.model import load_empty_base
from perl.policy.saved.adapter import find_adapter
from perl.policy.saved.download import pull
from perl.recipe import load_recipe
from perl.recipe.sections import ModelSection
from perl.training.prepare import plan_of
from perl.zoo.catalogue import Zoo, open_zoo
from perl.zoo.entry import Entry
from tests.saved_adapters import BASE, save_adapter

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
REPO = "someone/lora"


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def entry(name: str, **adapter) -> Entry:
    known = {"name": name, "provenance": "reported", "source": "a paper", "base": BASE, "method": "lora"}
    return Entry.model_validate({**known, "adapter": adapter})


def add(*entries: Entry) -> Zoo:
    """The zoo in use, with these entries."""
    Path("zoo/entries").mkdir(parents=True, exist_ok=True)
    for each in entries:
        Path(f"zoo/entries/{each.name}.json").write_text(each.to_json())
    return open_zoo()


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("published")
    save_adapter(folder / "adapter")
    return {name: (folder / "adapter" / name).read_bytes() for name in (CONFIG, WEIGHTS)}


@pytest.fixture(autouse=True)
def _own_zoo(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("PERL_ZOO", str(tmp_path / "zoo"))


@pytest.fixture
def shipped(files) -> Zoo:
    """A zoo that ships ``lora`` with a card."""
    folder = Path("zoo/adapters/lora")
    folder.mkdir(parents=True)
    all_files = {**files, "README.md": b"# lora\n"}
    for name, content in all_files.items():
        (folder / name).write_bytes(content)
    return add(entry("lora", shipped=True, sha256={name: sha256(content) for name, content in all_files.items()}))


def refusal(function, *arguments) -> str:
    with pytest.raises(PerlError) as caught:
        function(*arguments)
    (line,) = str(caught.value).splitlines()
    return line


@pytest.mark.usefixtures("shipped")
def test_a_shipped_adapter_is_found_evaluated_and_continued_by_its_name(files, tmp_path):
    found = find_adapter("zoo:lora", BASE)
    assert (found.name, found.folder) == ("zoo:lora", tmp_path / "zoo/adapters/lora")
    shaped_saved_adapter(load_empty_base(ModelSection()), found)
    subject = find_subject("zoo:lora")
    assert (subject.name, subject.base.name, subject.folder) == ("zoo:lora", BASE, Path("evals/zoo-lora"))
    assert subject.adapter_sha256 == sha256(files[WEIGHTS])
    Path("recipe.yaml").write_text("peft: {adapter: zoo:lora}\ndata: {train: sandbox:addition}\n")
    plan = plan_of(load_recipe("recipe.yaml"))
    assert plan.settings["continues"] == "zoo:lora"
    assert plan.settings["rank"] == 4
    assert refusal(find_adapter, "zoo:lroa") == "peft.adapter: the zoo has no 'lroa' (did you mean lora?)"
    assert refusal(find_subject, "zoo:lroa") == "--adapter: the zoo has no 'lroa' (did you mean lora?)"
    Path("zoo:lora").mkdir()  # a folder of that name is not taken for it
    assert find_adapter("zoo:lora").folder == tmp_path / "zoo/adapters/lora"


def test_files_that_are_not_those_that_the_entry_lists_are_refused(shipped, files, tmp_path):
    for name in (CONFIG, WEIGHTS):
        place = shipped.folder / "adapters/lora" / name
        place.write_bytes(files[name] + b" ")
        said = (
            f"zoo:lora: {name} is not the file that its entry lists (SHA-256 {sha256(files[name] + b' ')[:12]}, "
            f"not {sha256(files[name])[:12]})"
        )
        assert refusal(find_adapter, "zoo:lora") == f"peft.adapter: {said}"
        assert refusal(pull, shipped, "lora", Path("mine")) == said
        assert sorted(path.name for path in tmp_path.iterdir()) == ["zoo"]
        place.unlink()
        assert f"zoo:lora ships no {name}" in refusal(find_adapter, "zoo:lora")
        place.write_bytes(files[name])
    changed = shipped.entries["lora"].adapter.model_dump() | {"sha256": {CONFIG: "0" * 64}}
    for adapter, said in (
        (entry("lora", **changed), "not the file that its entry lists"),
        (entry("lora", shipped=True), f"zoo:lora lists no SHA-256 of {CONFIG}, so it cannot be verified"),
        (entry("paper"), "zoo:paper cannot be loaded: its entry names no files, only scores (reported) (see a paper)"),
    ):
        add(adapter)
        line = refusal(find_adapter, f"zoo:{adapter.name}")
        assert said in line if adapter.adapter.sha256 else line == f"peft.adapter: {said}"


def test_an_adapter_of_the_hub_is_fetched_at_its_commit_and_verified_or_loaded_with_a_warning(hub, files, caplog):
    then = hub.create(REPO, files)
    hub.commit(REPO, {CONFIG: b"something else"})
    listed = {name: sha256(content) for name, content in files.items()}
    zoo = add(
        entry("good", repo=REPO, revision=then, sha256=listed),
        entry("other", repo=REPO, revision=then, sha256={**listed, WEIGHTS: "0" * 64}),
        entry("moved", repo=REPO, sha256=listed),
    )
    found = find_adapter("zoo:good")
    assert (found.name, found.folder.name) == ("zoo:good", then)
    assert find_subject("zoo:good").name == "zoo:good"
    assert "is not the requested file" in refusal(find_adapter, "zoo:other")
    assert "is not the requested file" in refusal(find_adapter, "zoo:moved")
    assert caplog.messages == []
    pulled = pull(zoo, "good", Path("mine"))
    assert {path.name: path.read_bytes() for path in pulled.iterdir()} == files
    assert not any(path.is_symlink() for path in pulled.iterdir())
    # One that nobody has verified is loaded with a warning.
    then = hub.create("someone/others", {f"best/{name}": content for name, content in files.items()})
    zoo = add(entry("reported", repo="someone/others", revision=then, subfolder="best"))
    assert find_adapter("zoo:reported").folder.parts[-2:] == (then, "best")
    said = f"zoo:reported: nobody has verified the files of someone/others@{then}; its entry lists no SHA-256 [PRL331]"
    assert caplog.messages == [said]
    pull(zoo, "zoo:reported", Path("theirs"))
    assert find_adapter("theirs").shapes


def test_what_is_pulled_is_all_that_the_entry_lists_and_nothing_is_overwritten(shipped, files):
    destination = Path("deep/er/mine")
    assert pull(shipped, "zoo:lora", destination) == destination
    assert {path.name: path.read_bytes() for path in destination.iterdir()} == {**files, "README.md": b"# lora\n"}
    assert list(destination.parent.iterdir()) == [destination]
    for place in (destination, Path("file")):
        place.touch()
        said = f"{place}: is in the way (name a folder that is absent or empty)"
        assert refusal(pull, shipped, "lora", place) == said
    with pytest.raises(OSError, match=r"cannot be written.*file/mine"):
        pull(shipped, "lora", Path("file/mine"))
    (shipped.folder / "adapters/lora/README.md").write_text("changed")
    assert "README.md is not the file that its entry lists" in refusal(pull, shipped, "lora", Path("another"))
    assert not Path("another").exists()


def test_an_entry_that_lists_paths_or_leads_to_other_folders_is_refused(hub, shipped, files):
    for name in ("../evil.py", "/etc/evil", "a\\b"):
        listed = {**shipped.entries["lora"].adapter.sha256, name: sha256(b"")}
        zoo = add(entry("lora", shipped=True, sha256=listed))
        assert refusal(pull, zoo, "lora", Path("mine")) == f"zoo:lora lists {name!r}, which is not a file name"
        assert not Path("mine").exists()
    hub.create(REPO, files)
    for subfolder in ("../..", "a/../../b"):
        add(entry("evil", repo=REPO, subfolder=subfolder))
        assert "is not a folder of a repository" in refusal(find_adapter, "zoo:evil"), subfolder


@pytest.mark.usefixtures("shipped")
def test_export_takes_its_name():
    assert run_command(["export", "zoo:lora", "--as", "lora", "--output", "plain"], "perl") == 0
    assert find_adapter("plain", BASE).config.r == 4
