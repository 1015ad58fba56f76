"""Of an adapter on the Hub two files are fetched, of one commit, and only if they are what the Hub declares."""

import hashlib
import shutil
from pathlib import Path

import pytest
from huggingface_hub import constants

from perl.errors import ModelError
from perl.evaluation.drawing.subject import find_subject
from perl.policy.saved.adapter import find_adapter
from perl.policy.saved.download import fetch_adapter
from tests.saved_adapters import save_adapter

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
REPO = "user/lora"


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("published")
    save_adapter(folder / "adapter")
    return {name: (folder / "adapter" / name).read_bytes() for name in (CONFIG, WEIGHTS)}


@pytest.fixture
def published(hub, files):
    """The commit of an adapter on the Hub, beside files that nobody needs."""
    others = {
        "README.md": b"---\nlicense: mit\n---\n",
        "adapter_model.bin": b"no pickle",
        "evil.py": b"raise SystemExit",
    }
    return hub.create(REPO, {**files, **others})


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def refusal(*arguments, **settings) -> str:
    with pytest.raises(ModelError) as caught:
        fetch_adapter(*arguments, **settings)
    (line,) = str(caught.value).splitlines()
    return line


def downloads(hub) -> list[str]:
    """What was asked for, apart from listings."""
    return [request.path for request in hub.log if "/resolve/" in request.path and request.method == "GET"]


def cached(name: str) -> list[Path]:
    return list(Path(constants.HF_HUB_CACHE).rglob(name))


def test_two_files_of_one_commit_are_fetched_and_nothing_else(hub, published, files):
    folder = fetch_adapter(REPO)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == files
    assert folder.name == published
    assert all(path.split("?")[0].endswith((CONFIG, WEIGHTS)) for path in downloads(hub))
    asked = len(downloads(hub))
    assert fetch_adapter(REPO) == folder
    assert len(downloads(hub)) == asked  # it is in the cache
    subject = find_subject(REPO)
    assert (subject.name, subject.base.name) == (REPO, "sandbox:base")
    assert subject.adapter_sha256 == sha256(files[WEIGHTS])
    newer = hub.commit(REPO, {CONFIG: files[CONFIG] + b"\n"})
    assert (fetch_adapter(REPO, published) / CONFIG).read_bytes() == files[CONFIG]
    assert fetch_adapter(REPO).name == newer
    assert find_adapter(f"{REPO}@{published}").folder.name == published
    steps = "user/steps"
    commit = hub.create(steps, {f"steps/step-64/{name}": content for name, content in files.items()})
    assert fetch_adapter(steps, subfolder="steps/step-64").parts[-3:] == (commit, "steps", "step-64")
    assert refusal(steps) == f"{steps} holds no adapter: adapter_config.json is absent"
    assert refusal(REPO, "v9") == f"{REPO} has no revision 'v9' on the Hub"
    assert refusal("user/nothing").startswith("no model 'user/nothing'")
    hub.create("user/model", {"config.json": b"{}", "model.safetensors": b""})
    for function, name, said in (
        (find_adapter, "user/nothing", r"^peft.adapter: no model 'user/nothing'"),
        (
            find_subject,
            "user/model",
            r"^--adapter: user/model holds no adapter: .* --base user/model\)$",
        ),
    ):
        with pytest.raises(ModelError, match=said):
            function(name)


def test_names_that_are_none_and_files_that_are_absent_pickled_or_too_large_are_not_downloaded(hub, files):
    for folder in ("..", "../x", "a/../b", "/etc", "a\\b", "a//b", "./a", "a b", "a/*", ""):
        assert "is not a folder of a repository" in refusal(REPO, subfolder=folder), folder
    names = ("../x", "user/..", "user/a..b", "/etc/passwd", "user", "user\\lora", "a/b/c", "http://a/b", "user/a b")
    for repo in names:
        assert refusal(repo).endswith(" is not a name on the Hub (user/name)"), repo
    assert hub.requests == 0
    for absent in (CONFIG, WEIGHTS):
        repo = f"user/{absent}"
        hub.create(repo, {name: content for name, content in files.items() if name != absent})
        assert refusal(repo) == f"{repo} holds no adapter: {absent} is absent"
    hub.create("user/pickle", {CONFIG: files[CONFIG], "adapter_model.bin": b"cos\nsystem\n"})
    line = refusal("user/pickle")
    assert line.startswith(
        "user/pickle holds no adapter_model.safetensors, only a pickle, adapter_model.bin (opening a pickle"
    )
    assert "weights_only=True" in line
    hub.create(REPO, {**files, CONFIG: b" " * 1_000_001})
    assert refusal(REPO) == f"{REPO}: {CONFIG} has 1,000,001 bytes, at most 1,000,000 are downloaded"
    hub.commit(REPO, files)
    size = len(files[WEIGHTS])
    assert (
        refusal(REPO, largest=size - 1) == f"{REPO}: {WEIGHTS} has {size:,} bytes, at most {size - 1:,} are downloaded"
    )
    assert downloads(hub) == []
    fetch_adapter(REPO, largest=size)


def test_other_files_than_those_asked_for_are_refused(hub, published, files):
    right = {name: sha256(content) for name, content in files.items()}
    fetch_adapter(REPO, published, sha256=right)
    shutil.rmtree(constants.HF_HUB_CACHE)
    before = len(downloads(hub))
    wrong = refusal(REPO, sha256={**right, WEIGHTS: "0" * 64})
    assert wrong.startswith(f"{REPO}: {WEIGHTS} is not the requested file (SHA-256 {right[WEIGHTS][:12]}, not 0000")
    assert len(downloads(hub)) == before  # the Hub says it before
    assert f"{CONFIG} is not the requested file" in refusal(REPO, sha256={**right, CONFIG: "0" * 64})


def test_what_is_cached_serves_without_a_network_unless_it_is_damaged(hub, published, files, monkeypatch):
    name = WEIGHTS
    folder = fetch_adapter(REPO)
    asked = hub.requests
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert fetch_adapter(REPO) == fetch_adapter(REPO, "main") == fetch_adapter(REPO, published) == folder
    assert hub.requests == asked
    assert find_adapter(REPO).shapes
    right = sha256(files[name])
    assert fetch_adapter(REPO, sha256={name: right}) == folder
    assert "is not the requested file" in refusal(REPO, sha256={name: "0" * 64})
    (folder / name).resolve().write_bytes(b"x" + files[name][1:])
    assert f"{name} is damaged in the Hub's cache" in refusal(REPO)
    assert "cannot be downloaded from the Hub" in refusal("user/other")


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_other_bytes_than_the_hub_declares_are_refused_and_not_kept(hub, published, files, name):
    said = f"{REPO}: other bytes of {name} arrived than the Hub declares (thrown away; try again)"
    hub.faults.corrupt(name)
    assert refusal(REPO) == said
    assert cached(name) == []
    assert not any(path.read_bytes() not in files.values() for path in cached("blobs/*"))
    hub.faults.clear()
    assert (fetch_adapter(REPO, published) / name).read_bytes() == files[name]
    (fetch_adapter(REPO) / name).resolve().write_bytes(b"x" + files[name][1:])  # damaged in the cache
    assert refusal(REPO) == said
    assert (fetch_adapter(REPO, published) / name).read_bytes() == files[name]
    shutil.rmtree(constants.HF_HUB_CACHE)
    hub.faults.short(name)
    line = refusal(REPO)
    assert name in line
    assert line.endswith("try again)")
    assert cached(name) == []
    hub.faults.clear()
    assert (fetch_adapter(REPO, published) / name).read_bytes() == files[name]


def test_a_downloaded_adapter_names_no_base_by_a_path(hub, files):
    hub.create(REPO, files)
    for base in ("/data/someone/base", "./base", "../base", "~/base", "https://a.b/c", "a/b/c", "C:\\base"):
        config = files[CONFIG].replace(b'"sandbox:base"', b'"' + base.replace("\\", "\\\\").encode() + b'"')
        hub.commit(REPO, {CONFIG: config})
        found = find_adapter(REPO, "sandbox:base")
        assert (found.config.base_model_name_or_path, found.foreign_base) == (None, base)
        with pytest.raises(ModelError) as caught:
            find_subject(REPO)
        assert str(caught.value) == (
            f"--base: {REPO} names its base by a place on another machine, {base} (name the one it belongs to)"
        )
        assert find_subject(REPO, "sandbox:base").base.name == "sandbox:base"
