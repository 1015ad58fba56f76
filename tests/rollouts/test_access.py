"""Addresses of servers: what they may be, and passwords in them, which are refused and never repeated."""

import pytest

from perl.cli.commands import run as run_command
from perl.errors import EXIT_USER_MISTAKE, PerlError
from perl.evaluation.drawing.request import EvalSettings, plan_evaluation
from perl.evaluation.drawing.serving import serving_command
from perl.recipe import Recipe
from perl.recipe.server_address import ServerAddress, server_address, server_option, without_credentials
from perl.rollouts.vllm.http import VllmServer
from perl.trainer.arguments.config import PeftRLConfig, rollout_section

SECRET = "hunter2-Zq"  # noqa: S105 (of nobody)

PASSWORDS = [f"https://{SECRET}@host", f"http://me:{SECRET}/x@host:8000/v1"]


@pytest.mark.parametrize("url", PASSWORDS)
def test_an_address_with_a_password_is_refused_without_repeating_it(url, tmp_path, capsys):
    def of_a_recipe(**rollout):
        return lambda: Recipe.load({"extends": "quickstart", "rollout": {"backend": "vllm-server", **rollout}})

    plan = plan_evaluation(None, "sandbox:base", ["sandbox:chain"], 1, None, tmp_path, EvalSettings())
    ways = [
        lambda: VllmServer(url),
        lambda: serving_command([plan], url),
        of_a_recipe(servers=[url]),
        of_a_recipe(servers=[{"url": url, "key_env": "NAME"}]),
        lambda: Recipe.load("quickstart", ["rollout.backend=vllm-server", f"rollout.servers=[{url}]"]),
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
    assert recipe.rollout.addresses == (ServerAddress("http://one:8000"), ServerAddress("https://two", "TWO", "ca.pem"))
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
