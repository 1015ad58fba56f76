"""Each fault of the tests' Hub does what it says to the real client, once, and nothing else."""

import hashlib
import time
from pathlib import Path

import httpx2
import pytest
from huggingface_hub import CommitOperationAdd, HfApi, get_session, hf_hub_download, hf_hub_url, snapshot_download
from huggingface_hub.errors import HfHubHTTPError

WEIGHTS = bytes(range(256)) * 40


def commit(name="user/one", text=b"new", **options):
    return HfApi().create_commit(name, [CommitOperationAdd("a.txt", text)], commit_message="a", **options)


@pytest.fixture
def one(hub):
    """A Hub with ``user/one``."""
    hub.create("user/one", {"a.txt": b"old", "w.safetensors": WEIGHTS})
    return hub


def test_a_request_that_is_cut_is_not_carried_out_one_cut_afterwards_is_and_uploads_are_tried_again(one):
    one.faults.cut(2)
    api = HfApi()
    api.create_tag("user/one", tag="v1")
    with pytest.raises(httpx2.RemoteProtocolError):
        api.create_tag("user/one", tag="v2")
    api.create_tag("user/one", tag="v3")
    assert list(one.repo("user/one").tags) == ["v1", "v3"]
    assert [(request.status, request.carried_out) for request in one.log] == [(200, True), (0, False), (200, True)]
    one.faults.clear()
    one.faults.cut_after(1, path="/commit/")
    with pytest.raises(httpx2.RemoteProtocolError):
        commit()
    assert one.repo("user/one").files()["a.txt"] == b"new"
    assert (one.log[-1].status, one.log[-1].carried_out) == (0, True)
    one.faults.clear()
    before = len(one.log)
    upload = f"/lfs/{hashlib.sha256(b'other').hexdigest()}"
    one.faults.cut(1, path=upload)
    one.faults.cut_after(2, path=upload)
    HfApi().upload_file(path_or_fileobj=b"other", path_in_repo="w.safetensors", repo_id="user/one")  # seconds later
    assert one.repo("user/one").files()["w.safetensors"] == b"other"
    uploads = [request for request in one.log[before:] if request.method == "PUT"]
    assert [(request.status, request.carried_out) for request in uploads] == [(0, False), (0, True), (200, True)]


def test_a_status_is_answered_and_nothing_carried_out_and_a_client_that_is_told_when_comes_back(one):
    for status in (401, 403, 409, 500, 502, 503):
        one.faults.fail(1, status=status, times=2)
        before = one.repo("user/one").tags
        for _ in range(2):
            with pytest.raises(HfHubHTTPError) as failed:
                HfApi().create_tag("user/one", tag=f"v{status}")
            assert failed.value.response.status_code == status
        assert one.repo("user/one").tags == before
        HfApi().create_tag("user/one", tag=f"v{status}")
        assert f"v{status}" in one.repo("user/one").tags
        one.faults.clear()
    before = len(one.log)
    one.faults.fail(1, status=429, retry_after=0)
    assert [model.id for model in HfApi().list_models(author="user")] == ["user/one"]  # a second later
    assert [request.status for request in one.log[before:]] == [429, 200]
    one.faults.fail(1, status=429, retry_after=7)
    assert get_session().get(one.url + "/api/models").headers["Retry-After"] == "7"


def test_requests_are_counted_by_path_and_by_each_fault_independently(one):
    one.faults.fail(2, status=403, path="/tag/")
    api = HfApi()
    api.create_tag("user/one", tag="v1")
    api.model_info("user/one")
    api.create_branch("user/one", branch="b")
    with pytest.raises(HfHubHTTPError):
        api.create_tag("user/one", tag="v2")
    one.faults.clear()
    one.faults.fail(1, status=403)
    one.faults.fail(2, status=409)
    statuses = [get_session().get(one.url + "/api/models").status_code for _ in range(3)]
    assert statuses == [403, 409, 200]


def test_slow_answers_come_late_and_bodies_trickle(one):
    one.faults.slow(0.3)
    started = time.monotonic()
    HfApi().model_info("user/one")
    assert time.monotonic() - started >= 0.3
    with pytest.raises(httpx2.ReadTimeout):
        HfApi().model_info("user/one", timeout=0.1)
    one.faults.clear()
    one.faults.trickle(len(WEIGHTS) * 2)
    started = time.monotonic()
    path = hf_hub_download("user/one", "w.safetensors")
    assert time.monotonic() - started >= 0.45
    assert Path(path).read_bytes() == WEIGHTS


def test_a_commit_on_a_parent_that_is_not_the_newest_is_refused_also_where_one_is_slipped_in(one):
    old = one.repo("user/one").head.oid
    before = one.commit("user/one", {"a.txt": b"newer"})
    with pytest.raises(HfHubHTTPError) as refused:
        commit(parent_commit=old)
    assert refused.value.response.status_code == 412
    assert one.repo("user/one").head.oid == before
    one.faults.stale()
    with pytest.raises(HfHubHTTPError) as refused:
        commit(parent_commit=before)
    assert refused.value.response.status_code == 412
    there = one.repo("user/one")
    assert (there.head.title, there.head.parent) == ("slipped in", before)
    assert there.files()["a.txt"] == b"newer"
    commit(parent_commit=there.head.oid)
    assert there.files()["a.txt"] == b"new"
    assert "slipped-in.txt" in there.files()


def test_downloads_that_are_corrupted_cut_short_or_broken_off(one, tmp_path):
    one.faults.corrupt("w.safetensors")
    path = Path(hf_hub_download("user/one", "w.safetensors"))  # the client does not look
    assert path.stat().st_size == len(WEIGHTS)
    assert path.read_bytes() != WEIGHTS
    assert Path(hf_hub_download("user/one", "a.txt")).read_bytes() == b"old"
    assert one.repo("user/one").files()["w.safetensors"] == WEIGHTS
    one.faults.clear()
    one.faults.short("w.safetensors")
    with pytest.raises(OSError, match="Consistency check failed"):
        snapshot_download("user/one", max_workers=1, cache_dir=tmp_path / "short")
    assert len(get_session().get(hf_hub_url("user/one", "w.safetensors")).content) == len(WEIGHTS) // 2
    one.faults.clear()
    folder = Path(snapshot_download("user/one", max_workers=1, cache_dir=tmp_path / "short"))
    assert (folder / "w.safetensors").read_bytes() == WEIGHTS
    before = len(one.log)
    one.faults.break_off("w.safetensors")
    path = hf_hub_download("user/one", "w.safetensors", cache_dir=tmp_path / "broken")  # a second later
    assert Path(path).read_bytes() == WEIGHTS
    assert len([request for request in one.log[before:] if request.method == "GET"]) == 2


def test_a_cleared_hub_does_nothing_wrong(one):
    faults = one.faults
    faults.cut()
    faults.cut_after(2)
    faults.fail(3)
    faults.slow(60.0)
    faults.trickle(1.0)
    faults.corrupt("a.txt")
    faults.short("w.safetensors")
    faults.break_off("a.txt")
    faults.stale()
    faults.clear()
    head = one.repo("user/one").head.oid
    commit(parent_commit=head)
    folder = Path(snapshot_download("user/one"))
    assert (folder / "a.txt").read_bytes() == b"new"
    assert (folder / "w.safetensors").read_bytes() == WEIGHTS
    assert {request.status for request in one.log} == {200}
