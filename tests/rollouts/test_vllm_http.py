"""What one server's answers mean, which vLLM is taken, and who gets in: servers that answer by arithmetic."""

import asyncio
import dataclasses
import json
import logging
import math
import shutil
import ssl
import subprocess

import pytest
import torch

from perl.errors import PerlError, RolloutError
from perl.policy.model import load_base
from perl.recipe.sections import ModelSection
from perl.recipe.server_address import server_address
from perl.rollouts.engine import EngineSampling, Request, Update
from perl.rollouts.vllm import release as vllm_version
from perl.rollouts.vllm.answers import AccessError, ChangedServerError, ServerDownError
from perl.rollouts.vllm.http import VllmServer
from perl.rollouts.vllm.release import check_version
from perl.rollouts.vllm.servers import ServerPool
from tests.oracles.sampling import chances, logits_after
from tests.ports import free_port
from tests.rollouts.loopback import FakeVllm, answering
from tests.servers import SERVED_NAME

TOKENS = [9, 4, 13, 5, 10, 15, 22, 31]
SAMPLING = EngineSampling(temperature=1.0, max_completion_length=6, end_token_ids=())
GOOD = {"index": 0, "finish_reason": "stop", "token_ids": [5, 6], "logprobs": {"token_logprobs": [-0.5, -0.25]}}
SECRET = "hunter2-Zq"  # noqa: S105 (of nobody)


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch):
    """No key, and no version that was warned of."""
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    vllm_version._warn_of.cache_clear()


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


def ask(url, question):
    """The answer to one question."""

    async def answer():
        server = VllmServer(url)
        try:
            return await question(server)
        finally:
            await server.close()

    return asyncio.run(answer())


def saying(answers):
    """A server that answers each path with one status and text, whatever it is asked."""

    def answer(_method, path, _headers, _body):
        status, text = answers.get(path, (404, '{"detail": "Not Found"}'))
        return status, text.encode()

    return answering(answer)


def choices(*found):
    return {"/v1/completions": (200, json.dumps({"choices": list(found)}))}


def completions(server):
    return server.complete("any", Request((1, 2), 1), SAMPLING)


@pytest.mark.nightly
@pytest.mark.parametrize("changes", [{"temperature": 0.7}, {"top_k": 5, "temperature": 1.5}], ids=str)
def test_completions_are_tokens_with_log_probabilities_of_the_distribution_they_were_drawn_from(vllm_server, changes):
    how = dataclasses.replace(SAMPLING, **changes)
    counted = ask(vllm_server, lambda s: s.tokens_so_far(5.0))
    found = ask(vllm_server, lambda s: s.complete(SERVED_NAME, Request(tuple(TOKENS), 3), how))
    base = load_base(ModelSection(), torch.device("cpu")).eval()
    assert len(found) == 3
    for part in found:
        assert len(part.token_ids) == len(part.log_probs) == 6
        for i, (token, log_prob) in enumerate(zip(part.token_ids, part.log_probs, strict=True)):
            before = (*TOKENS, *part.token_ids[:i])
            chance = chances(logits_after(base, before), before, how)[token]
            assert log_prob == pytest.approx(math.log(chance), abs=1e-3)
    facts, _ = ask(vllm_server, VllmServer.facts)
    assert (facts.base_name, facts.longest, facts.replicas) == (SERVED_NAME, 256, 1)
    assert ask(vllm_server, VllmServer.weight_label) is None
    assert ask(vllm_server, lambda s: s.tokens_so_far(5.0)) >= counted + len(TOKENS) + 3 * 6
    with pytest.raises(ChangedServerError):
        ask(vllm_server, lambda s: s.complete("absent", Request((1, 2), 1), SAMPLING))


def of_version(version):
    return {
        "/version": (200, json.dumps({"version": version})),
        "/v1/models": (200, '{"data": [{"id": "base", "max_model_len": 64}]}'),
        "/metrics": (200, ""),
        "/health": (200, ""),
    }


def test_a_tested_version_is_taken_in_silence_a_newer_one_with_one_line_and_an_older_one_refused(caplog):
    for version in ("0.28.0", "0.31.2", "0.32.7", "0.32.1.dev4+g1234"):
        check_version(version)
    assert not caplog.records
    with caplog.at_level(logging.WARNING, "perl"):
        for version in ("0.33.0rc1", "0.33.0rc1", "1.0"):  # each once, however often it is met
            check_version(version)
    assert [message.split(" is newer than the newest tested")[0] for message in caplog.messages] == [
        "vLLM 0.33.0rc1",
        "vLLM 1.0",
    ]
    for version in ("0.27.1", "0.28.0rc1", "dev"):  # the last has no number
        with pytest.raises(PerlError, match=rf"http://a: vLLM {version} is not supported .*vllm>=0\.28"):
            check_version(version, "http://a")
    with saying(of_version("0.27.1")) as url, pytest.raises(PerlError, match=r"0\.27\.1 is not supported"):
        ServerPool([url], None)
    with saying(of_version("0.34.0")) as url:
        facts, _ = ask(url, VllmServer.facts)
    assert (facts.version, facts.base_name, facts.longest) == ("0.34.0", "base", 64)


# As vLLM 0.32 counts that was started with --data-parallel-size 2.
TWO_REPLICAS = """# TYPE process_start_time_seconds gauge
process_start_time_seconds 1.79563079088e+09
vllm:num_requests_running{engine="0",model_name="sandbox"} 0.0
vllm:num_requests_running{engine="1",model_name="sandbox"} 0.0
vllm:cache_config_info{_block_size_resolved="True",block_size="128",cache_dtype="auto",engine="0"} 1.0
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{engine="0",model_name="sandbox"} 256.0
vllm:generation_tokens_total{engine="1",model_name="sandbox"} 255.0
vllm:lora_requests_info{max_lora="4",running_lora_adapters="",waiting_lora_adapters=""} 1.7e+09
"""


@pytest.mark.parametrize(("counted", "replicas", "tokens"), [(TWO_REPLICAS, 2, 511.0), ("", 1, None)])
def test_replicas_are_counted_by_the_counters_that_each_has(counted, replicas, tokens):
    with saying(of_version("0.32.0") | {"/metrics": (200, counted)}) as url:
        assert ask(url, VllmServer.facts)[0].replicas == replicas
        assert ask(url, lambda server: server.tokens_so_far(5.0)) == tokens


# Status, text of the answer, words of the error.
NOT_WHOLE = (
    (200, '{"choices": [{"ind', "something else"),
    (200, '{"choices": 3}', "something else"),
    (500, '{"error": {"message": "EngineCore encountered an issue"}}', "EngineCore"),
    (503, "<html>", "with a web page, as no vLLM does"),  # nothing of it is repeated
    *((200, json.dumps({"choices": [GOOD | changes]}), "") for changes in (
        {"finish_reason": "abort"}, {"token_ids": [5]}, {"token_ids": None, "logprobs": None}, {"logprobs": None})),
    (200, json.dumps({"choices": [GOOD, GOOD | {"index": 1}]}), "something else"),
    (200, json.dumps({"choices": []}), "before the completions"),
)  # fmt: skip


def test_an_answer_that_is_not_whole_is_that_of_a_server_that_is_down():
    for status, text, words in NOT_WHOLE:
        with saying({"/v1/completions": (status, text)}) as url, pytest.raises(ServerDownError) as caught:
            ask(url, completions)
        assert words in str(caught.value)
        assert caught.value.answered, text
    with pytest.raises(ServerDownError) as caught:
        ask(f"http://127.0.0.1:{free_port()}", VllmServer.facts)
    assert not caught.value.answered
    odd = GOOD | {"logprobs": {"token_logprobs": [None, math.nan]}}
    with saying(choices(odd)) as url:
        (part,) = ask(url, completions)
    assert (part.token_ids, part.log_probs) == ([5, 6], [None, None])


def test_what_a_server_says_of_a_request_it_refuses_is_in_the_error():
    rows = (
        (400, '{"error": {"message": "too\\nlong"}}', RolloutError, "refuses a request: too long"),
        (401, '{"error": "Unauthorized"}', AccessError, "VLLM_API_KEY"),
        (403, "<html>", AccessError, "refuses access (403)"),
    )
    for status, text, kind, words in rows:
        with saying({"/v1/completions": (status, text)}) as url, pytest.raises(kind) as caught:
            ask(url, completions)
        assert words in str(caught.value), (status, text)


def test_an_error_of_one_request_or_of_its_receiver_is_raised_and_the_others_go_on(open_pool, monkeypatch):
    monkeypatch.setattr("perl.rollouts.vllm.dispatch.DYING_SECONDS", 0.0)

    def fails(_position, _group):
        raise KeyError("of the caller's")

    with saying(of_version("0.32.0") | choices(GOOD)) as url:
        pool = open_pool([url], timeout_seconds=60.0)
        good = pool.start([Request((1, 2), 1)], SAMPLING)
        with pytest.raises(KeyError, match="of the caller's"):
            pool.start([Request((1, 2), 1)] * 3, SAMPLING, fails).result()
        assert good.result()[0][0].token_ids == (5, 6)
        with pytest.raises(RolloutError, match=r"again and again: ended its answer before the completions"):
            pool.start([Request((1, 2), 2)], SAMPLING).result()
        assert pool.start([], SAMPLING).result() == []


def sampled(pool):
    return [len(group) for group in pool.start([Request((1, 2), 1)] * 8, SAMPLING).result()]


def test_a_server_for_cpus_is_not_given_weights_of_experts(open_pool):
    with FakeVllm(on_cpu=True)() as url:
        pool = open_pool([url])
        with pytest.raises(PerlError, match=r"servers for CPUs compute .*experts.*backend vllm") as raised:
            pool.load(Update("v1", "merged", {"model.layers.0.mlp.experts.0.up_proj.weight": torch.zeros(2, 2)}))
        assert len(str(raised.value).splitlines()) == 1


def test_each_server_is_sent_the_key_of_its_own_variable_and_one_that_refuses_it_is_left(open_pool, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "of-all\n")
    monkeypatch.setenv("KEY_OF_TWO", SECRET)
    fakes = [FakeVllm(key="of-all"), FakeVllm(key=SECRET)]
    with fakes[0]() as one, fakes[1]() as two:
        pool = open_pool([one, {"url": two, "key_env": "KEY_OF_TWO"}], timeout_seconds=600.0)
        assert sampled(pool) == [1] * 8
        assert len(fakes[0].asked) == len(fakes[1].asked) == 4
        fakes[0].key = "new"
        assert sampled(pool) == [1] * 8
        assert pool.counts["servers_lost"] == 1
        fakes[1].key = "new"
        with pytest.raises(RolloutError, match=r"no vLLM server lets this run in.*KEY_OF_TWO has the key") as raised:
            sampled(pool)
        assert SECRET not in str(raised.value)


@pytest.mark.parametrize(
    ("variables", "setting", "said"),
    [({}, {}, "VLLM_API_KEY is not set"), ({"MINE": SECRET}, {"key_env": "MINE"}, "MINE has the key that was sent")],
)
def test_a_wrong_key_ends_it_at_once_and_names_server_and_variable(open_pool, monkeypatch, variables, setting, said):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with FakeVllm(key="another")() as url, pytest.raises(PerlError) as raised:
        open_pool([{"url": url, **setting}], timeout_seconds=600.0)
    message = str(raised.value)
    assert all(words in message for words in (url, said, "401"))
    assert not any(words in message for words in ("\n", SECRET))


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
        with pytest.raises(PerlError, match=r"certificate that is not trusted.*ca_file"):
            open_pool([url], timeout_seconds=600.0)
