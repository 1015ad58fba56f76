"""Keys and certificates of servers: each its own, named by its variable or file, and never repeated anywhere."""

import asyncio
import shutil
import ssl
import subprocess

import pytest

from perl.cli.commands import run as run_command
from perl.errors import EXIT_USER_MISTAKE, PerlError, RolloutError
from perl.evaluation.request import EvalSettings, plan_evaluation
from perl.evaluation.serving import _port
from perl.recipe import Recipe
from perl.recipe.server_address import ServerAddress, server_address, server_option, without_credentials
from perl.rollouts.engine import EngineSampling, Request
from perl.rollouts.vllm.http import VllmServer
from perl.rollouts.vllm.servers import ServerPool
from perl.trainer.config import PeftRLConfig, rollout_section
from tests.rollouts.loopback import FakeVllm

SAMPLING = EngineSampling(1.0, 8, end_token_ids=(0,))
SECRET = "hunter2-Zq"  # noqa: S105 (of nobody)


@pytest.fixture(autouse=True)
def no_key(monkeypatch):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)


@pytest.fixture
def open_pool():
    """Opens pools, and closes them."""
    opened = []

    def open_pool(servers, **settings):
        opened.append(ServerPool([server_address(given) for given in servers], None, **settings))
        return opened[-1]

    yield open_pool
    for pool in opened:
        pool.close()


def sampled(pool):
    return [len(group) for group in pool.start([Request((1, 2), 1)] * 8, SAMPLING).result()]


def test_each_server_is_sent_the_key_of_its_own_variable(open_pool, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "of-all\n")
    monkeypatch.setenv("KEY_OF_TWO", SECRET)
    fakes = [FakeVllm(key="of-all"), FakeVllm(key=SECRET)]
    with fakes[0]() as one, fakes[1]() as two:
        pool = open_pool([one, {"url": two, "key_env": "KEY_OF_TWO"}])
        assert sampled(pool) == [1] * 8
    assert fakes[0].asked
    assert fakes[1].asked


@pytest.mark.parametrize(
    ("variables", "setting", "said"),
    [
        ({}, {}, "VLLM_API_KEY is not set"),
        ({"VLLM_API_KEY": SECRET}, {}, "VLLM_API_KEY has the key that was sent"),
        ({"MINE": SECRET}, {"key_env": "MINE"}, "MINE has the key that was sent"),
    ],
)
def test_a_wrong_key_ends_it_at_once_and_names_server_and_variable(open_pool, monkeypatch, variables, setting, said):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with FakeVllm(key="another")() as url, pytest.raises(PerlError) as raised:
        open_pool([{"url": url, **setting}], timeout_seconds=600.0)
    message = str(raised.value)
    assert url in message
    assert said in message
    assert "401" in message
    assert "\n" not in message
    assert SECRET not in message


def test_a_key_that_is_no_longer_right_loses_that_server_and_ends_the_run_when_it_was_the_last(open_pool):
    fakes = [FakeVllm(), FakeVllm()]
    with fakes[0]() as one, fakes[1]() as two:
        pool = open_pool([one, two], timeout_seconds=600.0)
        fakes[0].key = "new"
        assert sampled(pool) == [1] * 8
        assert pool.counts["servers_lost"] == 1
        fakes[1].key = "new"
        with pytest.raises(RolloutError, match=r"no vLLM server lets this run in.*VLLM_API_KEY is not set"):
            sampled(pool)


def test_a_key_or_a_certificate_that_is_absent_or_no_such_thing_is_named_and_never_repeated(monkeypatch, tmp_path):
    monkeypatch.setenv("ODD", f"{SECRET} and more")
    (tmp_path / "empty.pem").write_text("")
    rows = (
        (ServerAddress("http://host:8000", key_env="NOT_THERE"),
         "NOT_THERE, which is to hold the key of http://host:8000, is not set"),
        (ServerAddress("http://host:8000", key_env="ODD"), "ODD holds is not a valid key"),
        (ServerAddress("https://host", ca_file=str(tmp_path / "nowhere.pem")), "nowhere.pem: No such file"),
        (ServerAddress("https://host", ca_file=str(tmp_path / "empty.pem")), "empty.pem: it holds no certificate"),
    )  # fmt: skip
    for address, words in rows:
        with pytest.raises(PerlError) as raised:
            VllmServer(address)
        assert words in str(raised.value)
        assert SECRET not in str(raised.value)


PASSWORDS = [f"http://me:{SECRET}@host:8000", f"https://{SECRET}@host", f"http://me:{SECRET}/x@host:8000/v1"]


@pytest.mark.parametrize("url", PASSWORDS)
def test_an_address_with_a_password_is_refused_without_repeating_it(url, tmp_path, capsys):
    def of_a_recipe(**rollout):
        return lambda: Recipe.load({"extends": "quickstart", "rollout": {"backend": "vllm-server", **rollout}})

    ways = [
        lambda: VllmServer(url),
        lambda: _port(url),
        of_a_recipe(servers=[url]),
        of_a_recipe(servers=[{"url": url, "key_env": "NAME"}]),
        of_a_recipe(servers=url),
        of_a_recipe(servers=[[url]]),
        lambda: Recipe.load("quickstart", ["rollout.backend=vllm-server", f"rollout.servers=[{url}]"]),
        lambda: Recipe.load("quickstart", [f"rollout.servers [{url}]"]),
        lambda: Recipe.load(
            {
                "extends": "quickstart",
                "rollout": {"servers": [url]},
                "train": {"rollout_servers": [f"{url}/other"]},
            }
        ),
        lambda: plan_evaluation(
            None, "sandbox:base", ["sandbox:chain"], 1, None, tmp_path, EvalSettings(servers=(url,))
        ),
        lambda: rollout_section(
            PeftRLConfig("out", rollout_backend="vllm-server", rollout_servers=[url], use_cpu=True)
        ),
    ]
    for way in ways:
        with pytest.raises((PerlError, ValueError)) as raised:
            way()
        assert SECRET not in str(raised.value)
    settings = ["rollout.backend=vllm-server", f"rollout.servers=[{url}]"]
    assert run_command(["rollout", "check", "quickstart", *settings], "perl") == EXIT_USER_MISTAKE
    printed = capsys.readouterr()
    assert "holds a password" in printed.err
    assert SECRET not in printed.out + printed.err
    assert without_credentials(f"['{url}', 'https://c@d/e', 'http://h/x']").endswith(
        ", 'https://***@d/e', 'http://h/x']"
    )
    assert SECRET not in without_credentials(f"as in {url} of {url}")
    with pytest.raises(PerlError, match=r"holds a password.*key_env: NAME"):
        ways[2]()


def test_settings_of_a_server_are_kept_as_they_were_written():
    servers = ["http://one:8000", {"url": "https://two", "key_env": "TWO", "ca_file": "ca.pem"}]
    recipe = Recipe.load({"extends": "quickstart", "rollout": {"backend": "vllm-server", "servers": servers}})
    assert recipe.rollout.addresses == (
        ServerAddress("http://one:8000"),
        ServerAddress("https://two", "TWO", "ca.pem"),
    )
    assert recipe.as_dict()["rollout"]["servers"] == servers
    assert Recipe.load(recipe.as_dict()) == recipe
    assert server_option("https://two/v1/,key_env=TWO,ca_file=ca.pem") == recipe.rollout.addresses[1]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"url": "http://a", "key": "k"}, "a server has no 'key', only url, key_env, ca_file"),
        ({"key_env": "A"}, "needs its url"),
        ({"url": "http://a", "key_env": "sk-123"}, "never the key itself"),
        ({"url": "http://a", "ca_file": "ca.pem"}, "ca_file is for https"),
        ({"url": ""}, "are text"),
        ("http://a?token=x", "must end with its path"),
    ],
)
def test_what_is_no_setting_of_a_server_is_said(given, said):
    with pytest.raises(ValueError, match=said) as raised:
        server_address(given)
    assert "sk-123" not in str(raised.value)
    assert "token" not in str(raised.value)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """A certificate for 127.0.0.1 that signed itself, as a file that clients may trust, and what a server needs."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("there is no openssl to make a certificate with")
    folder = tmp_path_factory.mktemp("tls")
    subprocess.run(
        [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=127.0.0.1",
         "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", "key.pem", "-out", "ca.pem"],
        cwd=folder, check=True, capture_output=True,
    )  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "ca.pem", folder / "key.pem")
    return folder / "ca.pem", context


def test_a_private_certificate_is_trusted_where_its_file_is_named(open_pool, certificate, monkeypatch):
    ca_file, context = certificate
    monkeypatch.setenv("VLLM_API_KEY", SECRET)
    with FakeVllm(key=SECRET)(context) as url:
        assert url.startswith("https://")
        assert sampled(open_pool([{"url": url, "ca_file": str(ca_file)}])) == [1] * 8
        with pytest.raises(PerlError, match=r"certificate that is not trusted.*ca_file") as raised:
            open_pool([url], timeout_seconds=600.0)
        assert "\n" not in str(raised.value)


def test_a_server_whose_counters_are_under_a_key_serves_all_the_same():
    class Guarded(FakeVllm):
        def answer(self, path, authorization, body):
            return (403, {}) if path == "/metrics" else super().answer(path, authorization, body)

    async def look(url):
        server = VllmServer(url)
        try:
            counted = await server.tokens_so_far(5.0)
            return counted, (await server.facts())[0]
        finally:
            await server.close()

    with Guarded()() as url:
        counted, facts = asyncio.run(look(url))
    assert counted is None
    assert facts.base_name == "base"
