"""The Hub of the tests answers the real client libraries as the real Hub does, and its faults do what they say."""

import hashlib
import os
import subprocess
import sys
import time
from pathlib import Path

import httpx2
import huggingface_hub
import pytest
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants, hf_hub_download
from huggingface_hub.errors import HfHubHTTPError

from perl.policy.hub_files import look_up
from tests.hub_fixtures import TOKEN, taken_for_the_hub
from tests.local_hub import LocalHub

WEIGHTS = bytes(range(256)) * 40
CARD = (
    b"---\nbase_model: Qwen/Qwen3-4B\nlibrary_name: peft\nlicense: apache-2.0\ntags: [perl, lora]\n---\nAn adapter.\n"
)
ADAPTER = {"README.md": CARD, "adapter_config.json": b"{}", "adapter_model.safetensors": WEIGHTS}


def push(name, files, **options):
    additions = [CommitOperationAdd(path, data) for path, data in files.items()]
    return HfApi().create_commit(name, additions, commit_message="adapter", **options)


def uploads(hub):
    return [request.path for request in hub.log if request.method == "PUT"]


def test_one_commit_uploads_text_and_lfs_files_once_and_only_on_the_newest(hub):
    HfApi().create_repo("user/one")
    made = push("user/one", ADAPTER, parent_commit=hub.repo("user/one").head.oid)
    there = hub.repo("user/one")
    assert there.files() == ADAPTER | {".gitattributes": b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"}
    assert [commit.title for commit in there.commits] == ["initial commit", "adapter"]
    assert (there.head.oid, there.head.parent) == (made.oid, there.commits[0].oid)
    assert uploads(hub) == [f"/lfs/{hashlib.sha256(WEIGHTS).hexdigest()}"]  # the weights came by LFS
    assert push("user/one", ADAPTER).oid == made.oid  # what is there already is not uploaded again
    assert (len(uploads(hub)), len(there.commits)) == (1, 2)
    HfApi().create_commit("user/one", [CommitOperationDelete("adapter_config.json")], commit_message="less")
    assert set(there.files()) == {".gitattributes", "README.md", "adapter_model.safetensors"}
    with pytest.raises(HfHubHTTPError) as refused:
        push("user/one", {"a": b"1"}, parent_commit=made.oid)
    assert refused.value.response.status_code == 412
    for front_matter, said in (
        ("base_model: /models/of/mine/base", '"base_model" with value "/models/of/mine/base" is not valid'),
        ("license: my-own", '"license" must be one of'),
        ("model-index: [{results: []}]", "name"),
    ):  # a card that the Hub cannot read
        with pytest.raises(ValueError, match=said):
            push("user/one", {"README.md": f"---\n{front_matter}\n---\ntext".encode()})
    assert len(there.commits) == 3


def test_each_fault_does_what_it_says_at_the_request_it_is_asked_for(hub):
    hub.create("user/one", {"a.txt": b"old", "w.safetensors": WEIGHTS})
    api, there = HfApi(), hub.repo("user/one")
    hub.faults.cut(2)
    api.create_tag("user/one", tag="v1")
    with pytest.raises(httpx2.RemoteProtocolError):
        api.create_tag("user/one", tag="v2")
    assert [(request.status, request.carried_out) for request in hub.log] == [(200, True), (0, False)]
    hub.faults.clear()
    hub.faults.cut_after(1, path="/commit/")
    with pytest.raises(httpx2.RemoteProtocolError):
        push("user/one", {"a.txt": b"new"})
    assert there.files()["a.txt"] == b"new"
    hub.faults.clear()
    hub.faults.fail(2, status=403, path="/tag/")
    api.create_tag("user/one", tag="v3")
    api.model_info("user/one")
    with pytest.raises(HfHubHTTPError):
        api.create_tag("user/one", tag="v4")
    assert list(there.tags) == ["v1", "v3"]
    hub.faults.clear()
    hub.faults.stale()
    with pytest.raises(HfHubHTTPError):
        push("user/one", {"a.txt": b"newer"}, parent_commit=there.head.oid)
    assert (there.head.title, there.files()["a.txt"]) == ("slipped in", b"new")
    hub.faults.slow(0.3)
    started = time.monotonic()
    api.model_info("user/one")
    assert time.monotonic() - started >= 0.3
    hub.faults.corrupt("w.safetensors")
    wrong = Path(hf_hub_download("user/one", "w.safetensors")).read_bytes()
    assert (len(wrong), wrong == WEIGHTS) == (len(WEIGHTS), False)
    hub.faults.clear()
    assert Path(hf_hub_download("user/one", "w.safetensors", force_download=True)).read_bytes() == WEIGHTS


def test_a_process_of_its_own_talks_to_the_same_hub_and_afterwards_this_one_is_offline(tmp_path, hub_env):
    before = {name: value for name, value in vars(constants).items() if name.isupper()}
    environment = dict(os.environ)
    with LocalHub("user", TOKEN) as running:
        with taken_for_the_hub(running, tmp_path / "home"):
            assert look_up("model", "user/one", None).message.startswith("no model")
            assert huggingface_hub.whoami(cache=True)["name"] == "user"
        text = "from huggingface_hub import HfApi; HfApi().create_repo('user/one'); print(HfApi().whoami()['name'])"
        done = subprocess.run(
            [sys.executable, "-c", text], env=hub_env(running), capture_output=True, text=True, check=False, timeout=120
        )
        assert (done.returncode, done.stdout.strip()) == (0, "user"), done.stderr
        assert running.repo("user/one").files()
    assert look_up("model", "user/one", None) is None
    assert {name: value for name, value in vars(constants).items() if name.isupper()} == before
    assert dict(os.environ) == environment
    with pytest.raises(huggingface_hub.errors.OfflineModeIsEnabled):
        HfApi().model_info("user/one")
