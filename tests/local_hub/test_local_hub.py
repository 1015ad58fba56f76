"""The Hub of the tests answers the real client libraries as the real Hub does."""

import hashlib
import itertools
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    LocalTokenNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from perl.policy.hub_lookup import look_up
from perl.sandbox import BASE_FOLDER
from tests.hub_fixtures import TOKEN, taken_for_the_hub
from tests.local_hub import LocalHub

WEIGHTS = bytes(range(256)) * 40
CARD = b"""---
base_model: Qwen/Qwen3-4B
library_name: peft
license: apache-2.0
tags: [perl, lora]
---
An adapter.
"""
ADAPTER = {"README.md": CARD, "adapter_config.json": b"{}", "adapter_model.safetensors": WEIGHTS}


def add(files):
    return [CommitOperationAdd(path, data) for path, data in files.items()]


def push(name, files, **options):
    return HfApi().create_commit(name, add(files), commit_message="adapter", **options)


def asked(hub, method=None):
    return [request.path.split("?")[0] for request in hub.log if method in (None, request.method)]


# What is written.


def test_one_commit_uploads_text_and_lfs_files_once(hub):
    address = HfApi().create_repo("user/one")
    made = push("user/one", ADAPTER, parent_commit=hub.repo("user/one").head.oid)
    there = hub.repo("user/one")
    assert there.files() == ADAPTER | {".gitattributes": b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"}
    assert [commit.title for commit in there.commits] == ["initial commit", "adapter"]
    assert (there.head.oid, there.head.parent) == (made.oid, there.commits[0].oid)
    assert there.card == CARD.decode()
    assert str(address) == f"{hub.url}/user/one"
    sha256 = hashlib.sha256(WEIGHTS).hexdigest()
    assert f"/lfs/{sha256}" in asked(hub, "PUT")  # the weights came by LFS
    assert {path: file.lfs for path, file in there.head.tree.items()} == {
        ".gitattributes": False,
        "README.md": False,
        "adapter_config.json": False,
        "adapter_model.safetensors": True,
    }
    uploads = len(asked(hub, "PUT"))
    assert push("user/one", ADAPTER).oid == made.oid  # what is there already is not uploaded again
    assert len(asked(hub, "PUT")) == uploads
    assert len(hub.repo("user/one").commits) == 2
    push("user/one", {"folder/a": b"a", "folder/b": b"b"})
    deletions = [CommitOperationDelete("adapter_config.json"), CommitOperationDelete("folder/", is_folder=True)]
    HfApi().create_commit("user/one", deletions, commit_message="less")
    assert set(hub.repo("user/one").files()) == {".gitattributes", "README.md", "adapter_model.safetensors"}


def test_a_repository_is_made_once_and_read_and_written_by_those_whose_token_may(hub):
    api = HfApi()
    api.create_repo("user/secret", private=True)
    assert hub.repo("user/secret").visibility.private
    with pytest.raises(HfHubHTTPError, match="already created"):
        api.create_repo("user/secret")
    assert str(api.create_repo("user/secret", exist_ok=True)) == f"{hub.url}/user/secret"
    push("user/secret", ADAPTER)
    assert api.model_info("user/secret").private
    assert [model.id for model in api.list_models(author="user")] == ["user/secret"]
    for read in (
        lambda: HfApi(token=False).model_info("user/secret"),
        lambda: huggingface_hub.hf_hub_download("user/secret", "README.md", token=False),
    ):
        with pytest.raises(RepositoryNotFoundError):
            read()
    assert list(HfApi(token=False).list_models(author="user")) == []
    api.delete_repo("user/secret")
    with pytest.raises(KeyError):
        hub.repo("user/secret")
    hub.create("other/one", {})
    with pytest.raises(HfHubHTTPError) as refused:
        api.create_repo("other/two")
    assert refused.value.response.status_code == 403
    with pytest.raises(HfHubHTTPError, match="rights"):
        push("other/one", ADAPTER)
    assert set(hub.repo("other/one").files()) == {".gitattributes"}
    hub.create("user/gated", ADAPTER)
    hub.gate("user/gated")
    assert api.model_info("user/gated").gated == "manual"
    with pytest.raises(GatedRepoError) as refused:
        huggingface_hub.hf_hub_download("user/gated", "README.md")
    assert refused.value.response.status_code == 403
    assert huggingface_hub.get_token() == TOKEN
    assert HfApi().whoami()["name"] == "user"
    assert hub.log[-1].token == TOKEN
    hub.create("user/one", ADAPTER)
    for token in (False, "hf_wrong"):
        with pytest.raises(HfHubHTTPError) as refused:
            HfApi(token=token).create_tag("user/one", tag="v1")
        assert refused.value.response.status_code == 401
    with pytest.raises(HfHubHTTPError, match="Invalid user token"):
        HfApi().whoami(token)
    Path(constants.HF_TOKEN_PATH).unlink()
    with pytest.raises(LocalTokenNotFoundError):
        HfApi().whoami()
    assert HfApi().model_info("user/one").id == "user/one"  # public
    assert hub.repo("user/one").tags == {}


def test_tags_branches_and_pull_requests_name_commits_and_leave_the_main_branch(hub):
    api = HfApi()
    first = hub.create("user/one", {"a": b"1"})
    api.create_tag("user/one", tag="step-10", revision=first)
    api.create_branch("user/one", branch="trial", revision=first)
    second = push("user/one", {"a": b"2"}).oid
    third = push("user/one", {"a": b"3"}, revision="trial").oid
    refs = api.list_repo_refs("user/one")
    assert {ref.name: ref.target_commit for ref in refs.tags} == {"step-10": first} == hub.repo("user/one").tags
    assert {ref.name: ref.target_commit for ref in refs.branches} == {"main": second, "trial": third}
    assert hub.repo("user/one").files("step-10")["a"] == b"1"
    with pytest.raises(HfHubHTTPError) as refused:
        api.create_tag("user/one", tag="step-10")
    assert refused.value.response.status_code == 409
    api.create_tag("user/one", tag="step-10", exist_ok=True)
    api.delete_tag("user/one", tag="step-10")
    assert hub.repo("user/one").tags == {}
    assert [commit.commit_id for commit in api.list_repo_commits("user/one")][:2] == [second, first]
    first = hub.create("user/two", {"a": b"1"})
    made = push("user/two", {"a": b"2"}, create_pr=True)
    assert made.pr_url == f"{hub.url}/user/two/discussions/1"
    assert hub.repo("user/two").head.oid == first
    assert hub.repo("user/two").files("refs/pr/1")["a"] == b"2"


# What is read.


def test_files_of_any_revision_are_downloaded(hub):
    api = HfApi()
    first = hub.create("user/one", ADAPTER | {"checkpoints/step-10/a.txt": b"old"})
    second = hub.commit("user/one", {"checkpoints/step-10/a.txt": b"new"})
    for revision, text in ((first, "old"), (None, "new"), (second[:8], "new")):
        path = huggingface_hub.hf_hub_download("user/one", "checkpoints/step-10/a.txt", revision=revision)
        assert Path(path).read_text() == text
        assert Path(path).is_relative_to(constants.HF_HUB_CACHE)
    folder = Path(huggingface_hub.snapshot_download("user/one"))
    assert folder.name == second
    assert (folder / "adapter_model.safetensors").read_bytes() == WEIGHTS
    assert sorted(api.list_repo_files("user/one")) == sorted(hub.repo("user/one").files())
    assert hub.repo("user/one").downloads > 0


def test_sizes_hashes_parts_and_listings_are_those_of_the_bytes(hub):
    hub.create("user/one", ADAPTER)
    digest = hashlib.sha256(WEIGHTS).hexdigest()
    url = huggingface_hub.hf_hub_url("user/one", "adapter_model.safetensors")
    session, api = huggingface_hub.get_session(), HfApi()
    for asked_for, expected in (("100-199", WEIGHTS[100:200]), ("-10", WEIGHTS[-10:]), ("7-7", WEIGHTS[7:8])):
        part = session.get(url, headers={"Range": f"bytes={asked_for}"})
        start, end, size = map(int, re.fullmatch(r"bytes (\d+)-(\d+)/(\d+)", part.headers["Content-Range"]).groups())
        assert (part.status_code, part.content, size) == (206, expected, len(WEIGHTS))
        assert WEIGHTS[start : end + 1] == expected
        assert end - start + 1 == sum(1 for _ in expected)
    assert session.get(url, headers={"Range": f"bytes={len(WEIGHTS)}-"}).status_code == 416
    head = huggingface_hub.get_hf_file_metadata(url)
    assert (head.size, head.etag) == (len(WEIGHTS), digest)
    assert head.commit_hash == hub.repo("user/one").head.oid
    files = {sibling.rfilename: sibling for sibling in api.model_info("user/one", files_metadata=True).siblings}
    assert files["README.md"].size == len(CARD)
    assert files["README.md"].lfs is None
    assert files["adapter_model.safetensors"].lfs.sha256 == digest
    paths = api.get_paths_info("user/one", ["adapter_model.safetensors", "absent"])
    assert [(path.path, path.lfs.sha256) for path in paths] == [("adapter_model.safetensors", digest)]
    assert {"adapter_model.safetensors", "README.md"} < {entry.path for entry in api.list_repo_tree("user/one")}
    hub.create("user/tree", {"a/b/c.txt": b"1", "a/d.txt": b"2", "e.txt": b"3"})
    assert {entry.path for entry in api.list_repo_tree("user/tree", "a")} == {"a/b", "a/d.txt"}
    assert {entry.path for entry in api.list_repo_tree("user/tree", "a", recursive=True)} == {
        *("a/b", "a/b/c.txt", "a/d.txt")
    }
    for error, read in (  # what is not there is told apart
        (EntryNotFoundError, lambda: list(api.list_repo_tree("user/tree", "x"))),
        (RepositoryNotFoundError, lambda: api.model_info("user/none")),
        (RepositoryNotFoundError, lambda: api.dataset_info("user/one")),  # it is a model
        (RevisionNotFoundError, lambda: api.model_info("user/one", revision="v9")),
        (EntryNotFoundError, lambda: huggingface_hub.hf_hub_download("user/one", "absent.txt")),
    ):
        with pytest.raises(error):
            read()
    assert not api.file_exists("user/one", "absent.txt")


def test_models_are_found_by_tags_owner_and_name(hub):
    hub.create("user/one", ADAPTER)
    hub.create("user/two", {"README.md": CARD.replace(b"[perl, lora]", b"[perl, vera]")})
    hub.create("other/one", {"README.md": CARD.replace(b"Qwen/Qwen3-4B", b"Qwen/Qwen3-8B"), "adapter_config.json": b""})
    hub.create("user/data", {"README.md": CARD}, kind="dataset")

    def found(**query):
        return {model.id for model in HfApi().list_models(**query)}

    for query, expected in (
        ({"filter": "perl"}, {"user/one", "user/two", "other/one"}),
        ({"filter": ["perl", "base_model:adapter:Qwen/Qwen3-4B"]}, {"user/one"}),
        ({"filter": "base_model:Qwen/Qwen3-4B"}, {"user/one", "user/two"}),
        ({"filter": "lora", "author": "user"}, {"user/one"}),
        ({"search": "TWO"}, {"user/two"}),
        ({"filter": "unknown"}, set()),
    ):
        assert found(**query) == expected, query
    assert found(filter="perl", limit=2) <= found(filter="perl")
    assert len(found(filter="perl", limit=2)) == 2
    results = b"- dataset: {id: openai/gsm8k, task_id: gsm8k}\n  value: 41.2\n  date: '2026-01-01'\n"
    hub.commit("user/one", {".eval_results/gsm8k.yaml": results})
    wanted = ["cardData", "baseModels", "evalResults", "sha"]  # only what is expanded is shown
    (model,) = HfApi().list_models(search="user/one", expand=wanted)
    assert model.card_data.base_model == "Qwen/Qwen3-4B"
    assert model.base_models["relation"] == "adapter"
    assert [entry.value for entry in model.eval_results] == [41.2]
    assert model.sha == hub.repo("user/one").head.oid
    assert model.tags is None
    (model,) = HfApi().list_models(search="user/one")
    assert model.card_data is None
    assert "license:apache-2.0" in model.tags


def test_a_long_list_comes_in_pages_of_the_hubs_size_up_to_the_limit(hub):
    for number in range(7):
        hub.create(f"user/m{number}", {"README.md": CARD})
    for size, limit in itertools.product((1, 2, 3, 6, 7, 8), (None, 1, 2, 4, 9)):
        hub.page_size, before, wanted = size, hub.requests, min(limit or 7, 7)
        assert len({model.id for model in HfApi().list_models(filter="perl", limit=limit)}) == wanted
        assert hub.requests - before == math.ceil(wanted / size), (size, limit)
    assert set(asked(hub)) == {"/api/models"}


# Cards.


INVALID_CARDS = [
    ("base_model: [unclosed", "YAML"),
    ("base_model: /models/of/mine/base", '"base_model" with value "/models/of/mine/base" is not valid'),
    ("base_model: ''", '"base_model" is not allowed to be empty'),
    ("base_model: [Qwen/Qwen3-4B, ./base]", r'"base_model\[1\]" with value "./base" is not valid'),
    ("license: my-own", '"license" must be one of'),
    ("datasets: ['my data']", r'"datasets\[0\]" with value "my data" is not valid'),
    ("tags: perl", '"tags" must be an array'),
    ("language: English", '"language" with value "English" is not valid'),
    ("model-index: [{name: x, results: [{task: {type: t}, dataset: {type: d, name: n}}]}]", "metrics"),
    ("model-index: [{results: []}]", "name"),
]


def test_a_card_that_the_hub_cannot_read_is_refused_before_anything_is_uploaded(hub):
    HfApi().create_repo("user/one")
    for front_matter, said in INVALID_CARDS:
        with pytest.raises(ValueError, match=said):
            push("user/one", ADAPTER | {"README.md": f"---\n{front_matter}\n---\ntext".encode()})
        assert len(hub.repo("user/one").commits) == 1, front_matter
        assert not asked(hub, "PUT"), front_matter
    push("user/one", {"README.md": b"---\nbase_model: Qwen/Qwen3-4B\n---\ntext"})  # a licence need not be there
    assert hub.repo("user/one").card.endswith("text")
    with pytest.warns(UserWarning, match="empty or missing yaml metadata"):
        push("user/one", {"README.md": b"text"})
    assert hub.repo("user/one").card == "text"


# Who may.


# The libraries above the client.


def test_adapters_and_data_sets_load_from_the_hub(hub):
    from datasets import load_dataset
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    hub.create("user/base", {path.name: path.read_bytes() for path in BASE_FOLDER.iterdir() if path.is_file()})
    base = AutoModelForCausalLM.from_pretrained("user/base")
    assert len(AutoTokenizer.from_pretrained("user/base")) > 0
    adapted = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    adapted.save_pretrained("adapter")
    hub.create("user/adapter", {path.name: path.read_bytes() for path in Path("adapter").iterdir()})
    tagged = hub.repo("user/adapter").head.oid
    HfApi().create_tag("user/adapter", tag="step-10")
    hub.commit("user/adapter", {"adapter_model.safetensors": b"broken"})
    loaded = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained("user/base"), "user/adapter", revision="step-10"
    )
    expected = adapted.state_dict()
    assert all((loaded.state_dict()[name] == tensor).all() for name, tensor in expected.items())
    assert any(f"/user/adapter/resolve/{tagged}/" in path or "step-10" in path for path in asked(hub))
    rows = [{"prompt": "1+1", "answer": "2"}, {"prompt": "1+2", "answer": "3"}]
    commit = hub.create("user/questions", {"train.jsonl": "\n".join(map(json.dumps, rows)).encode()}, kind="dataset")
    assert load_dataset("user/questions", split="train").to_list() == rows
    assert look_up("dataset", "user/questions", None) == commit


def test_a_process_of_its_own_talks_to_the_same_hub(hub, hub_env):
    text = "from huggingface_hub import HfApi; api = HfApi(); api.create_repo('user/one'); print(api.whoami()['name']);"
    text += "api.upload_file(path_or_fileobj=b'w' * 999, path_in_repo='w.safetensors', repo_id='user/one');"
    text += "from perl.policy.hub_lookup import look_up; print(look_up('model', 'user/one', None))"
    done = subprocess.run(
        [sys.executable, "-c", text], env=hub_env(hub), capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["user", hub.repo("user/one").head.oid]
    assert hub.repo("user/one").files()["w.safetensors"] == b"w" * 999


def test_afterwards_this_process_is_offline_and_no_module_keeps_the_hubs_address(tmp_path):
    before = {name: value for name, value in vars(constants).items() if name.isupper()}
    environment = dict(os.environ)
    for number in range(2):
        with LocalHub(tmp_path / f"{number}", "user", TOKEN) as running:
            with taken_for_the_hub(running, tmp_path / "home"):
                assert look_up("model", "user/one", None).message.startswith("no model")
                assert huggingface_hub.whoami(cache=True)["name"] == "user"  # asked of each Hub
                assert HfApi().endpoint == huggingface_hub.hf_api.api.endpoint == running.url
            assert running.requests == 2
    assert look_up("model", "user/one", None) is None
    assert {name: value for name, value in vars(constants).items() if name.isupper()} == before
    assert dict(os.environ) == environment
    assert huggingface_hub.hf_api.api.endpoint == constants.ENDPOINT
    with pytest.raises(huggingface_hub.errors.OfflineModeIsEnabled):
        HfApi().model_info("user/one")
    # Nor do modules that were first imported meanwhile.
    text = f"""
import sys
from tests.hub_fixtures import *
with LocalHub(Path({str(tmp_path / "s")!r})) as running, taken_for_the_hub(running, Path({str(tmp_path / "h")!r})):
    import datasets.config, perl.evaluation.task_data, huggingface_hub.cli.auth
    assert datasets.config.HF_ENDPOINT == running.url and not datasets.config.HF_HUB_OFFLINE
for name, module in sys.modules.items():
    for key, value in list(vars(module).items()) if name.startswith(("datasets", "huggingface_hub", "perl")) else ():
        assert not (isinstance(value, str) and running.url in value), (name, key)
        assert key != "HF_HUB_OFFLINE" or value, name
"""
    checkout = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", text], cwd=checkout, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
