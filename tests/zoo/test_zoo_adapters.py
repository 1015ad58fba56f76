"""zoo:NAME is an adapter wherever one is named, and only if its files are those that the entry lists."""

import hashlib
import json
from pathlib import Path

import pytest

from perl.errors import PerlError
from perl.evaluation.subject import find_subject
from perl.policy.attach import continue_adapter
from perl.policy.model import load_empty_base
from perl.policy.saved.adapter import find_adapter
from perl.policy.saved.download import pull
from perl.recipe import load_recipe
from perl.recipe.sections import ModelSection
from perl.training.plan import make_plan
from perl.zoo.catalogue import Zoo, open_zoo
from perl.zoo.entry import Entry
from tests.saved_adapters import BASE, save_adapter

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
REPO = "someone/lora"


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def entry(name: str, **adapter) -> Entry:
    return Entry.model_validate(
        {
            "name": name,
            "provenance": "reported",
            "source": "a paper",
            "base": BASE,
            "method": "lora",
            "adapter": adapter,
        }
    )


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
def test_a_shipped_adapter_is_found_by_its_name(tmp_path):
    found = find_adapter("zoo:lora", BASE)
    assert (found.name, found.folder) == ("zoo:lora", tmp_path / "zoo/adapters/lora")
    continue_adapter(load_empty_base(ModelSection()), found)


@pytest.mark.usefixtures("shipped")
def test_it_is_evaluated_under_its_name_in_the_zoo(files):
    subject = find_subject("zoo:lora")
    assert (subject.name, subject.base.name, subject.folder) == ("zoo:lora", BASE, Path("evals/zoo-lora"))
    assert subject.adapter_sha256 == sha256(files[WEIGHTS])


@pytest.mark.usefixtures("shipped")
def test_a_recipe_continues_it_by_its_name():
    Path("recipe.yaml").write_text("peft: {adapter: zoo:lora}\ndata: {train: sandbox:addition}\n")
    plan = make_plan(load_recipe("recipe.yaml"))
    assert plan.settings["continues"] == "zoo:lora"
    assert plan.settings["rank"] == 4


@pytest.mark.usefixtures("shipped")
def test_a_folder_of_that_name_is_not_taken_for_it(tmp_path):
    Path("zoo:lora").mkdir()
    assert find_adapter("zoo:lora").folder == tmp_path / "zoo/adapters/lora"


@pytest.mark.usefixtures("shipped")
def test_a_name_that_the_zoo_does_not_have_is_said_with_the_nearest():
    assert refusal(find_adapter, "zoo:lroa") == "peft.adapter: the zoo has no 'lroa' (did you mean lora?)"
    assert refusal(find_subject, "zoo:lroa") == "--adapter: the zoo has no 'lroa' (did you mean lora?)"


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_a_shipped_file_that_was_changed_is_refused(shipped, files, name, tmp_path):
    (shipped.folder / "adapters/lora" / name).write_bytes(files[name] + b" ")
    said = (
        f"zoo:lora: {name} is not the file that its entry lists (SHA-256 {sha256(files[name] + b' ')[:12]}, "
        f"not {sha256(files[name])[:12]})"
    )
    assert refusal(find_adapter, "zoo:lora") == f"peft.adapter: {said}"
    assert refusal(pull, shipped, "lora", Path("mine")) == said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["zoo"]
    (shipped.folder / "adapters/lora" / name).unlink()
    assert f"zoo:lora ships no {name}" in refusal(find_adapter, "zoo:lora")


def test_a_shipped_file_that_the_entry_does_not_list_is_refused(shipped):
    changed = shipped.entries["lora"].adapter.model_dump() | {"sha256": {CONFIG: "0" * 64}}
    add(entry("lora", **changed))
    assert "not the file that its entry lists" in refusal(find_adapter, "zoo:lora")
    add(entry("lora", shipped=True))
    assert refusal(find_adapter, "zoo:lora") == (
        f"peft.adapter: zoo:lora lists no SHA-256 of {CONFIG}, so it cannot be verified"
    )


def test_an_entry_without_files_is_refused_with_its_source():
    add(entry("paper"))
    assert refusal(find_adapter, "zoo:paper") == (
        "peft.adapter: zoo:paper cannot be loaded: its entry names no files, only scores (reported) (see a paper)"
    )


def test_an_adapter_of_the_hub_is_fetched_at_its_commit_and_verified(hub, files, caplog):
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


def test_an_adapter_that_nobody_has_verified_is_loaded_with_a_warning(hub, files, caplog):
    then = hub.create(REPO, {f"best/{name}": content for name, content in files.items()})
    zoo = add(entry("reported", repo=REPO, revision=then, subfolder="best"))
    assert find_adapter("zoo:reported").folder.parts[-2:] == (then, "best")
    said = f"zoo:reported: nobody has verified the files of {REPO}@{then}; its entry lists no SHA-256"
    assert caplog.messages == [said]
    pull(zoo, "zoo:reported", Path("mine"))
    assert find_adapter("mine").shapes


@pytest.mark.parametrize("subfolder", ["../..", "/etc", "a/../../b", "..\\x"])
def test_an_entry_that_leads_elsewhere_is_refused(hub, files, subfolder):
    hub.create(REPO, files)
    add(entry("evil", repo=REPO, subfolder=subfolder))
    assert "is not a folder of a repository" in refusal(find_adapter, "zoo:evil")


def test_what_is_pulled_is_all_that_the_entry_lists(shipped, files):
    destination = Path("deep/er/mine")
    assert pull(shipped, "zoo:lora", destination) == destination
    assert {path.name: path.read_bytes() for path in destination.iterdir()} == {**files, "README.md": b"# lora\n"}
    assert list(destination.parent.iterdir()) == [destination]
    (shipped.folder / "adapters/lora/README.md").write_text("changed")
    assert "README.md is not the file that its entry lists" in refusal(pull, shipped, "lora", Path("another"))
    assert not Path("another").exists()


def test_an_empty_folder_is_filled_and_nothing_is_overwritten(shipped):
    Path("empty").mkdir()
    assert sorted(path.name for path in pull(shipped, "lora", Path("empty")).iterdir()) == [
        "README.md",
        CONFIG,
        WEIGHTS,
    ]
    Path("full").mkdir()
    Path("full/mine.txt").write_text("precious")
    Path("file").write_text("precious")
    for name in ("full", "file", "empty"):
        said = f"{name}: is in the way (name a folder that is absent or empty)"
        assert refusal(pull, shipped, "lora", Path(name)) == said
    assert [path.name for path in Path("full").iterdir()] == ["mine.txt"]
    assert Path("file").read_text() == "precious"


@pytest.mark.parametrize("name", ["../evil.py", "/etc/evil", "a/b", "..", "a\\b"])
def test_an_entry_that_lists_paths_is_refused(shipped, name, tmp_path):
    listed = {**shipped.entries["lora"].adapter.sha256, name: sha256(b"")}
    zoo = add(entry("lora", shipped=True, sha256=listed))
    assert refusal(pull, zoo, "lora", Path("mine")) == f"zoo:lora lists {name!r}, which is not a file name"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["zoo"]


def test_a_folder_that_cannot_be_written_is_said(shipped):
    Path("file").write_text("")
    assert refusal(pull, shipped, "lora", Path("file/mine")).startswith("file/mine: cannot be written: ")


@pytest.mark.usefixtures("shipped")
def test_export_and_eval_take_its_name(perl_command):
    exported = perl_command("export", "zoo:lora", "--as", "lora", "--output", "plain", timeout=300)
    assert exported.returncode == 0, exported.stderr
    assert find_adapter("plain", BASE).config.r == 4
    asked = ["--adapter", "zoo:lora", "--tasks", "sandbox:addition", "--limit", "2", "--k", "1"]
    evaluated = perl_command("eval", *asked, "-o", "results", timeout=300)
    assert evaluated.returncode == 0, evaluated.stderr
    subject = json.loads(Path("results/results.json").read_text())["perl"]["subject"]
    assert subject["name"] == "zoo:lora"
    assert subject["adapter_sha256"] == sha256(Path("zoo/adapters/lora", WEIGHTS).read_bytes())
