"""A proxy that answers in the Hub's place is said to be one."""

import hashlib
from types import SimpleNamespace

import pytest

from perl.errors import PerlError
from perl.hub.push.commit import push_package
from perl.hub.push.package import Package
from perl.hub.push.retries import HubOutageError
from tests.hub.files import weights
from tests.hub.push_runs import REPO

FILES = {"adapter_model.safetensors": weights(b"new"), "adapter_config.json": b"{}"}
UPLOAD = "/lfs/" + hashlib.sha256(FILES["adapter_model.safetensors"]).hexdigest()


@pytest.fixture(autouse=True)
def _no_waiting_in_the_client(monkeypatch):
    monkeypatch.setattr("huggingface_hub.utils._http.time", SimpleNamespace(sleep=lambda _: None))


@pytest.mark.parametrize("status", [200, 401, 403, 404, 502])
@pytest.mark.parametrize("path", ["/api/", "/info/lfs", UPLOAD, "/commit/"])
def test_a_web_page_in_the_place_of_an_answer_is_an_outage_that_names_the_proxy(hub, status, path):
    hub.create(REPO, {})
    hub.faults.page(status, times=10**6, path=path)
    with pytest.raises(PerlError) as caught:
        push_package(Package(FILES), REPO, sleep=lambda _: None)
    assert isinstance(caught.value, HubOutageError), caught.value
    assert "proxy" in str(caught.value)
    assert "hf auth login" not in str(caught.value)
    assert FILES.keys().isdisjoint(hub.repo(REPO).files())
