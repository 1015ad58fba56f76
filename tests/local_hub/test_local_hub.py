"""The Hub of the tests answers the real client libraries as the real Hub does."""

import hashlib
import json
import os
import subprocess
import sys
import time
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


def test_one_commit_uploads_text_and_lfs_files(hub):
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


def test_what_is_there_already_is_not_uploaded_again(hub):
    hub.create("user/one", ADAPTER)
    first = hub.repo("user/one").head.oid
    assert push("user/one", ADAPTER).oid == first
    assert not asked(hub, "PUT")
    assert len(hub.repo("user/one").commits) == 2


def test_files_are_deleted_and_others_kept(hub):
    hub.create("user/one", ADAPTER | {"folder/a": b"a", "folder/b": b"b"})
    deletions = [CommitOperationDelete("adapter_config.json"), CommitOperationDelete("folder/", is_folder=True)]
    HfApi().create_commit("user/one", deletions, commit_message="less")
    assert set(hub.repo("user/one").files()) == {".gitattributes", "README.md", "adapter_model.safetensors"}


def test_a_repository_is_made_once_and_private_when_asked(hub):
    api = HfApi()
    api.create_repo("user/secret", private=True)
    assert hub.repo("user/secret").visibility.private
    with pytest.raises(HfHubHTTPError, match="already created"):
        api.create_repo("user/secret")
    assert str(api.create_repo("user/secret", exist_ok=True)) == f"{hub.url}/user/secret"
    api.delete_repo("user/secret")
    with pytest.raises(KeyError):
        hub.repo("user/secret")


def test_nobody_writes_under_another_name(hub):
    hub.create("other/one", {})
    with pytest.raises(HfHubHTTPError) as refused:
        HfApi().create_repo("other/two")
    assert refused.value.response.status_code == 403
    with pytest.raises(HfHubHTTPError, match="rights"):
        push("other/one", ADAPTER)
    assert set(hub.repo("other/one").files()) == {".gitattributes"}


def test_a_commit_on_a_parent_that_is_not_the_newest_is_refused(hub):
    hub.create("user/one", {"a": b"1"})
    old = hub.repo("user/one").head.oid
    newer = hub.commit("user/one", {"a": b"2"})
    with pytest.raises(HfHubHTTPError) as refused:
        push("user/one", {"b": b"1"}, parent_commit=old)
    assert refused.value.response.status_code == 412
    assert hub.repo("user/one").head.oid == newer
    push("user/one", {"b": b"1"}, parent_commit=newer)
    assert hub.repo("user/one").files() | {".gitattributes": b""} == {"a": b"2", "b": b"1", ".gitattributes": b""}


def test_tags_and_branches_name_commits(hub):
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


def test_a_pull_request_leaves_the_main_branch(hub):
    first = hub.create("user/one", {"a": b"1"})
    made = push("user/one", {"a": b"2"}, create_pr=True)
    assert made.pr_url == f"{hub.url}/user/one/discussions/1"
    assert hub.repo("user/one").head.oid == first
    assert hub.repo("user/one").files("refs/pr/1")["a"] == b"2"


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


def test_part_of_a_file_is_served(hub):
    hub.create("user/one", ADAPTER)
    url = huggingface_hub.hf_hub_url("user/one", "adapter_model.safetensors")
    session = huggingface_hub.get_session()
    part = session.get(url, headers={"Range": "bytes=100-199"})
    assert (part.status_code, part.content) == (206, WEIGHTS[100:200])
    assert part.headers["Content-Range"] == f"bytes 100-199/{len(WEIGHTS)}"
    assert session.get(url, headers={"Range": "bytes=-10"}).content == WEIGHTS[-10:]
    assert session.get(url, headers={"Range": f"bytes={len(WEIGHTS)}-"}).status_code == 416
    head = huggingface_hub.get_hf_file_metadata(url)
    assert (head.size, head.etag) == (len(WEIGHTS), hashlib.sha256(WEIGHTS).hexdigest())
    assert head.commit_hash == hub.repo("user/one").head.oid


def test_sizes_and_hashes_are_told_without_a_download(hub):
    hub.create("user/one", ADAPTER)
    info = HfApi().model_info("user/one", files_metadata=True)
    files = {sibling.rfilename: sibling for sibling in info.siblings}
    assert files["README.md"].size == len(CARD)
    assert files["README.md"].lfs is None
    assert files["adapter_model.safetensors"].lfs.sha256 == hashlib.sha256(WEIGHTS).hexdigest()
    paths = HfApi().get_paths_info("user/one", ["adapter_model.safetensors", "absent"])
    assert [(path.path, path.lfs.sha256) for path in paths] == [
        ("adapter_model.safetensors", hashlib.sha256(WEIGHTS).hexdigest())
    ]
    assert {"adapter_model.safetensors", "README.md"} < {entry.path for entry in HfApi().list_repo_tree("user/one")}


def test_the_listing_of_a_folder_has_what_is_in_it(hub):
    hub.create("user/one", {"a/b/c.txt": b"1", "a/d.txt": b"2", "e.txt": b"3"})
    api = HfApi()
    assert {entry.path for entry in api.list_repo_tree("user/one", "a")} == {"a/b", "a/d.txt"}
    assert {entry.path for entry in api.list_repo_tree("user/one", "a", recursive=True)} == {
        *("a/b", "a/b/c.txt", "a/d.txt")
    }
    with pytest.raises(EntryNotFoundError):
        list(api.list_repo_tree("user/one", "x"))


def test_what_is_not_there_is_told_apart(hub):
    hub.create("user/one", ADAPTER)
    with pytest.raises(RepositoryNotFoundError):
        HfApi().model_info("user/none")
    with pytest.raises(RepositoryNotFoundError):
        HfApi().dataset_info("user/one")  # it is a model
    with pytest.raises(RevisionNotFoundError):
        HfApi().model_info("user/one", revision="v9")
    with pytest.raises(EntryNotFoundError):
        huggingface_hub.hf_hub_download("user/one", "absent.txt")
    assert not HfApi().file_exists("user/one", "absent.txt")


def test_models_are_found_by_tags_owner_and_name(hub):
    hub.create("user/one", ADAPTER)
    hub.create("user/two", {"README.md": CARD.replace(b"[perl, lora]", b"[perl, vera]")})
    hub.create("other/one", {"README.md": CARD.replace(b"Qwen/Qwen3-4B", b"Qwen/Qwen3-8B"), "adapter_config.json": b""})
    hub.create("user/data", {"README.md": CARD}, kind="dataset")

    def found(**query):
        return {model.id for model in HfApi().list_models(**query)}

    assert found(filter="perl") == {"user/one", "user/two", "other/one"}
    assert found(filter=["perl", "base_model:adapter:Qwen/Qwen3-4B"]) == {"user/one"}
    assert found(filter="base_model:Qwen/Qwen3-4B") == {"user/one", "user/two"}
    assert found(filter="lora", author="user") == {"user/one"}
    assert found(search="TWO") == {"user/two"}
    assert found(filter="perl", limit=2) <= found(filter="perl")
    assert len(found(filter="perl", limit=2)) == 2
    assert found(filter="unknown") == set()


def test_a_long_list_comes_in_pages(hub):
    for number in range(7):
        hub.create(f"user/m{number}", {"README.md": CARD})
    hub.page_size = 3
    assert len(list(HfApi().list_models(filter="perl"))) == 7
    assert asked(hub) == ["/api/models"] * 3
    assert len(list(HfApi().list_models(filter="perl", limit=2))) == 2
    assert hub.requests == 4


def test_a_list_shows_only_what_is_expanded(hub):
    results = b"- dataset: {id: openai/gsm8k, task_id: gsm8k}\n  value: 41.2\n  date: '2026-01-01'\n"
    hub.create("user/one", ADAPTER | {".eval_results/gsm8k.yaml": results})
    (model,) = HfApi().list_models(filter="perl", expand=["cardData", "baseModels", "evalResults", "sha"])
    assert model.card_data.base_model == "Qwen/Qwen3-4B"
    assert model.base_models["relation"] == "adapter"
    assert [entry.value for entry in model.eval_results] == [41.2]
    assert model.sha == hub.repo("user/one").head.oid
    assert model.tags is None
    (model,) = HfApi().list_models(filter="perl")
    assert model.card_data is None
    assert "license:apache-2.0" in model.tags


# Cards.


@pytest.mark.parametrize(
    ("front_matter", "said"),
    [
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
    ],
)
def test_a_card_that_the_hub_cannot_read_is_refused_before_anything_is_uploaded(hub, front_matter, said):
    HfApi().create_repo("user/one")
    with pytest.raises(ValueError, match=said):
        push("user/one", ADAPTER | {"README.md": f"---\n{front_matter}\n---\ntext".encode()})
    assert len(hub.repo("user/one").commits) == 1
    assert not asked(hub, "PUT")


def test_a_card_without_a_licence_is_accepted(hub):
    HfApi().create_repo("user/one")
    push("user/one", {"README.md": b"---\nbase_model: Qwen/Qwen3-4B\n---\ntext"})
    assert hub.repo("user/one").card.endswith("text")


def test_a_card_without_front_matter_is_warned_about(hub):
    HfApi().create_repo("user/one")
    with pytest.warns(UserWarning, match="empty or missing yaml metadata"):
        push("user/one", {"README.md": b"text"})
    assert hub.repo("user/one").card == "text"


# Who may.


def test_the_stored_token_says_who_it_is(hub):
    assert huggingface_hub.get_token() == TOKEN
    assert HfApi().whoami()["name"] == "user"
    assert hub.log[-1].token == TOKEN


def test_without_a_token_or_with_a_wrong_one_nothing_is_written(hub):
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


def test_a_private_repository_is_there_for_its_owner_only(hub):
    hub.create("user/secret", ADAPTER, private=True)
    assert HfApi().model_info("user/secret").private
    assert [model.id for model in HfApi().list_models(author="user")] == ["user/secret"]
    with pytest.raises(RepositoryNotFoundError):
        HfApi(token=False).model_info("user/secret")
    with pytest.raises(RepositoryNotFoundError):
        huggingface_hub.hf_hub_download("user/secret", "README.md", token=False)
    assert list(HfApi(token=False).list_models(author="user")) == []


def test_a_gated_repository_is_seen_but_not_downloaded(hub):
    hub.create("user/one", ADAPTER)
    hub.gate("user/one")
    assert HfApi().model_info("user/one").gated == "manual"
    with pytest.raises(GatedRepoError) as refused:
        huggingface_hub.hf_hub_download("user/one", "README.md")
    assert refused.value.response.status_code == 403


# The libraries above the client.


def test_an_adapter_loads_from_the_hub(hub):
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


def test_a_data_set_loads_from_the_hub(hub):
    from datasets import load_dataset

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


def test_afterwards_this_process_is_offline_again(tmp_path):
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


def test_modules_first_imported_meanwhile_do_not_keep_the_hubs_address(tmp_path):
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


def test_requests_are_answered_without_a_wait(hub):
    hub.create("user/one", ADAPTER)
    seconds = []
    for _ in range(10):
        started = time.perf_counter()
        HfApi().model_info("user/one")
        seconds.append(time.perf_counter() - started)
    assert min(seconds) < 0.03  # 0.04 each, if an answer went out in two packets
