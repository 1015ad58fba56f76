"""What one server's answers mean: real vLLM where it answers well, and servers that answer otherwise."""

import asyncio
import contextlib
import dataclasses
import json
import math
import threading
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from perl.errors import PerlError, RolloutError
from perl.policy.model import load_base
from perl.recipe.sections import ModelSection
from perl.rollouts.engine import EngineSampling, Request
from perl.rollouts.vllm.answers import AccessError, AdapterGoneError, ServerDownError
from perl.rollouts.vllm.http import VllmServer
from perl.rollouts.vllm.servers import ServerPool
from tests.oracles.sampling import chances, logits_after
from tests.ports import free_port
from tests.servers import SERVED_NAME

TOKENS = [9, 4, 13, 5, 10, 15, 22, 31]
SAMPLING = EngineSampling(temperature=1.0, max_completion_length=6, end_token_ids=())
GOOD = {"index": 0, "finish_reason": "stop", "token_ids": [5, 6], "logprobs": {"token_logprobs": [-0.5, -0.25]}}


def ask(url, question):
    """The answer to one question."""

    async def answer():
        server = VllmServer(url)
        try:
            return await question(server)
        finally:
            await server.close()

    return asyncio.run(answer())


@contextlib.contextmanager
def answering(answers):
    """A server that answers each path with one status and text, whatever it is asked."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            status, text = answers.get(self.path, (404, '{"detail": "Not Found"}'))
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        do_POST = do_GET

        def log_message(self, *_args):
            """Says nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def choices(*found):
    return {"/v1/completions": (200, json.dumps({"choices": list(found)}))}


def completions(server):
    return server.complete("any", Request((1, 2), 1), SAMPLING)


@pytest.mark.parametrize("changes", [{}, {"temperature": 0.7}, {"top_k": 1}, {"top_k": 5, "temperature": 1.5}], ids=str)
def test_completions_are_tokens_with_log_probabilities_of_the_distribution_they_were_drawn_from(vllm_server, changes):
    how = dataclasses.replace(SAMPLING, **changes)
    found = ask(vllm_server, lambda s: s.complete(SERVED_NAME, Request(tuple(TOKENS), 3), how))
    base = load_base(ModelSection(), torch.device("cpu")).eval()
    assert len(found) == 3
    for token_ids, log_probs in found:
        assert len(token_ids) == len(log_probs) == 6
        for i, (token, log_prob) in enumerate(zip(token_ids, log_probs, strict=True)):
            before = (*TOKENS, *token_ids[:i])
            chance = chances(logits_after(base, before), before, how)[token]
            assert log_prob == pytest.approx(math.log(chance), abs=1e-3)


def test_a_server_says_what_it_is_and_how_much_it_has_done(vllm_server):
    facts, _ = ask(vllm_server, VllmServer.facts)
    assert (facts.base_name, facts.longest) == (SERVED_NAME, 256)
    assert facts.loads_adapters
    assert facts.takes_weights
    assert ask(vllm_server, VllmServer.weight_version) == "default"
    before = ask(vllm_server, lambda s: s.tokens_so_far(5.0))
    ask(vllm_server, lambda s: s.complete(SERVED_NAME, Request(tuple(TOKENS), 2), SAMPLING))
    assert ask(vllm_server, lambda s: s.tokens_so_far(5.0)) >= before + len(TOKENS) + 2 * 6


def test_a_model_that_is_not_there_is_not_the_servers_fault(vllm_server):
    with pytest.raises(AdapterGoneError):
        ask(vllm_server, lambda s: s.complete(f"t{uuid.uuid4().hex}", Request((1, 2), 1), SAMPLING))


def test_what_is_no_address_is_refused_and_one_may_end_with_the_path_of_the_api():
    for url in ("localhost:8000", "ftp://host", "http://", "http://host:port", ""):
        with pytest.raises(PerlError, match=r"like http://localhost:8000, not|not an address.*http://host:8000"):
            VllmServer(url)
    assert VllmServer("http://host:8000/v1/").url == "http://host:8000"


def of_version(version):
    return {
        "/version": (200, json.dumps({"version": version})),
        "/v1/models": (200, '{"data": [{"id": "base", "max_model_len": 64}]}'),
        "/metrics": (200, ""),
        "/health": (200, ""),
    }


def test_an_older_version_is_refused_and_a_newer_one_is_asked_what_a_tested_one_is_asked():
    """Whether the newer one samples from the policy is proven as for any other, before the first rollout."""
    with answering(of_version("0.31.1")) as url:
        with pytest.raises(PerlError, match=r"0\.31\.1 is not supported.*>=0\.32,<0\.33"):
            ask(url, VllmServer.facts)
        with pytest.raises(PerlError, match=r"0\.31\.1 is not supported"):
            ServerPool([url], None, main=False)
    with answering(of_version("0.34.0")) as url:
        facts, _ = ask(url, VllmServer.facts)
    assert (facts.version, facts.base_name, facts.longest) == ("0.34.0", "base", 64)


# As vLLM 0.32 counts that was started with --data-parallel-size 2.
TWO_REPLICAS = """# TYPE process_start_time_seconds gauge
process_start_time_seconds 1.79563079088e+09
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="sandbox"} 0.0
vllm:num_requests_running{engine="1",model_name="sandbox"} 0.0
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{_block_size_resolved="True",block_size="128",cache_dtype="auto",engine="0"} 1.0
vllm:cache_config_info{_block_size_resolved="True",block_size="128",cache_dtype="auto",engine="1"} 1.0
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{engine="0",model_name="sandbox"} 256.0
vllm:generation_tokens_total{engine="1",model_name="sandbox"} 255.0
vllm:lora_requests_info{max_lora="4",running_lora_adapters="",waiting_lora_adapters=""} 1.7e+09
"""


@pytest.mark.parametrize(("counted", "replicas", "tokens"), [(TWO_REPLICAS, 2, 511.0), ("", 1, None)])
def test_replicas_are_counted_by_the_counters_that_each_has(counted, replicas, tokens):
    with answering(of_version("0.32.0") | {"/metrics": (200, counted)}) as url:
        assert ask(url, VllmServer.facts)[0].replicas == replicas
        assert ask(url, lambda server: server.tokens_so_far(5.0)) == tokens


def test_a_real_server_reports_one_replica(vllm_server):
    assert ask(vllm_server, VllmServer.facts)[0].replicas == 1


PAGE = "<!DOCTYPE HTML>\n<html><head><title>Error response</title></head></html>"
# Status, text of the answer, words of the error.
NOT_WHOLE = (
    (200, '{"choices": [{"ind', ""),
    (200, "<html>", ""),
    (200, "[]", ""),
    (200, '{"choices": 3}', ""),
    (500, '{"error": {"message": "EngineCore encountered an issue"}}', ""),
    (503, "", ""),
    *((200, json.dumps({"choices": [GOOD | changes]}), "") for changes in (
        {"finish_reason": "abort"}, {"token_ids": [5]}, {"token_ids": []}, {"token_ids": None}, {"logprobs": None})),
    (200, json.dumps({"choices": [GOOD, GOOD | {"index": 1}]}), "2 completions for"),
)  # fmt: skip


def test_an_answer_that_is_not_whole_is_that_of_a_server_that_is_down():
    for status, text, words in NOT_WHOLE:
        with answering({"/v1/completions": (status, text)}) as url, pytest.raises(ServerDownError) as caught:
            ask(url, completions)
        assert words in str(caught.value)
        assert caught.value.answered, text
    with answering({"/health": (404, PAGE)}) as url, pytest.raises(ServerDownError) as caught:
        ask(url, VllmServer.health)
    assert str(caught.value).endswith("answers 404: with a web page, as no vLLM does")  # nothing of it is repeated
    with pytest.raises(ServerDownError) as caught:
        ask(f"http://127.0.0.1:{free_port()}", VllmServer.facts)
    assert not caught.value.answered


def test_a_log_probability_that_is_no_number_is_absent():
    odd = GOOD | {"logprobs": {"token_logprobs": [None, math.nan]}}
    with answering(choices(odd)) as url:
        assert ask(url, completions) == [((5, 6), (None, None))]


def test_what_a_server_says_of_a_request_it_refuses_is_in_the_error():
    rows = (
        (400, '{"error": {"message": "too\\nlong"}}', RolloutError, "refuses a request: too long"),
        (401, '{"error": "Unauthorized"}', AccessError, "VLLM_API_KEY"),
        (403, "{}", AccessError, "refuses access (403)"),
        (403, "<html>", AccessError, "refuses access (403)"),
    )
    for status, text, kind, words in rows:
        with answering({"/v1/completions": (status, text)}) as url, pytest.raises(kind) as caught:
            ask(url, completions)
        assert words in str(caught.value), (status, text)


def test_a_request_that_no_server_can_stand_ends_the_rollouts():
    with answering(of_version("0.32.0") | choices(GOOD)) as url:
        pool = ServerPool([url], None, main=False, timeout_seconds=60.0)
        try:
            assert pool.start([Request((1, 2), 1)], SAMPLING).result()[0][0].token_ids == (5, 6)
            with pytest.raises(RolloutError, match=r"again and again: gave 1 completions for 2"):
                pool.start([Request((1, 2), 2)], SAMPLING).result()
            assert pool.counts["servers_lost"] == 1  # after the third in a row
        finally:
            pool.close()
