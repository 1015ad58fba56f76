"""What one server's answers mean: real vLLM where it answers well, and servers that answer otherwise."""

import asyncio
import contextlib
import json
import math
import threading
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from perl.errors import PerlError, RolloutError
from perl.rollouts.engine import EngineSampling, Request
from perl.rollouts.vllm.answers import AdapterGoneError, ServerDownError
from perl.rollouts.vllm.http import VllmServer
from perl.rollouts.vllm.servers import ServerPool
from tests.rollouts.policies import completion_log_probs, log_probs_of
from tests.servers import SERVED_NAME, free_port

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


def test_completions_are_tokens_with_their_log_probabilities(vllm_server):
    found = ask(vllm_server, lambda s: s.complete(SERVED_NAME, Request(tuple(TOKENS), 3), SAMPLING))
    assert len(found) == 3
    for token_ids, log_probs in found:
        assert len(token_ids) == 6
        mine = completion_log_probs(None, TOKENS, token_ids)
        torch.testing.assert_close(torch.tensor(log_probs), mine, atol=1e-3, rtol=0)


def test_a_cut_distribution_is_the_one_that_log_probabilities_are_of(vllm_server):
    only_one = EngineSampling(1.0, 6, (), top_k=1)
    ((_, log_probs),) = ask(vllm_server, lambda s: s.complete(SERVED_NAME, Request(tuple(TOKENS), 1), only_one))
    assert log_probs == pytest.approx([0.0] * 6)


def test_tokens_of_a_prompt_have_log_probabilities_at_temperature_1(vllm_server):
    found = ask(vllm_server, lambda s: s.prompt_log_probs(SERVED_NAME, TOKENS))
    torch.testing.assert_close(torch.tensor(found), log_probs_of(None, TOKENS), atol=1e-3, rtol=0)


def test_a_server_says_what_it_is_and_how_much_it_has_done(vllm_server):
    facts = ask(vllm_server, VllmServer.facts)
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
    with pytest.raises(AdapterGoneError):
        ask(vllm_server, lambda s: s.prompt_log_probs(f"t{uuid.uuid4().hex}", TOKENS))


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://host", "http://", "http://host:port", ""])
def test_what_is_no_address_is_refused(url):
    with pytest.raises(PerlError, match=r"like http://localhost:8000, not|not an address.*http://host:8000"):
        VllmServer(url)


def test_the_path_of_the_api_may_be_part_of_the_address():
    assert VllmServer("http://host:8000/v1/").url == "http://host:8000"


def test_nobody_there_is_a_server_that_is_down():
    with pytest.raises(ServerDownError):
        ask(f"http://127.0.0.1:{free_port()}", VllmServer.facts)


def test_an_older_version_is_refused_by_name():
    with answering({"/health": (200, ""), "/version": (200, '{"version": "0.31.1"}')}) as url:
        with pytest.raises(PerlError, match=r"0\.31\.1 is not supported.*>=0\.32,<0\.33"):
            ask(url, VllmServer.facts)
        with pytest.raises(PerlError, match=r"0\.31\.1 is not supported"):
            ServerPool([url], None, leads=False)


def test_a_newer_version_is_asked_what_a_tested_one_is_asked():
    """Whether it samples from the policy is proven as for any other, before the first rollout."""
    answers = {
        "/version": (200, '{"version": "0.34.0"}'),
        "/v1/models": (200, '{"data": [{"id": "base", "max_model_len": 64}]}'),
        "/metrics": (200, ""),
    }
    with answering(answers) as url:
        facts = ask(url, VllmServer.facts)
    assert (facts.version, facts.base_name, facts.longest) == ("0.34.0", "base", 64)


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (200, '{"choices": [{"ind'),
        (200, "<html>"),
        (200, "[]"),
        (200, '{"choices": 3}'),
        (500, '{"error": {"message": "EngineCore encountered an issue"}}'),
        (503, ""),
    ],
)
def test_an_answer_that_cannot_be_read_is_a_server_that_is_down(status, text):
    with answering({"/v1/completions": (status, text)}) as url, pytest.raises(ServerDownError) as caught:
        ask(url, completions)
    assert caught.value.answered


@pytest.mark.parametrize(
    "choice",
    [
        GOOD | {"finish_reason": "abort"},
        GOOD | {"token_ids": [5]},
        GOOD | {"token_ids": []},
        GOOD | {"token_ids": None},
        GOOD | {"logprobs": None},
    ],
)
def test_a_completion_that_is_not_whole_is_none(choice):
    with answering(choices(choice)) as url, pytest.raises(ServerDownError):
        ask(url, completions)


def test_each_completion_that_was_asked_for_must_be_there():
    with (
        answering(choices(GOOD, GOOD | {"index": 1})) as url,
        pytest.raises(ServerDownError, match="2 completions for"),
    ):
        ask(url, completions)


def test_a_log_probability_that_is_no_number_is_absent():
    odd = GOOD | {"logprobs": {"token_logprobs": [None, math.nan]}}
    with answering(choices(odd)) as url:
        assert ask(url, completions) == [((5, 6), (None, None))]


def test_what_the_server_says_of_a_request_it_refuses_is_said():
    refusal = {"/v1/completions": (400, '{"error": {"message": "too\\nlong"}}')}
    with answering(refusal) as url, pytest.raises(RolloutError, match="refuses a request: too long"):
        ask(url, completions)
    stranger = {"/v1/completions": (401, '{"error": "Unauthorized"}')}
    with answering(stranger) as url, pytest.raises(RolloutError, match="VLLM_API_KEY"):
        ask(url, completions)


def test_of_a_web_page_that_something_else_answers_with_nothing_is_repeated():
    page = {"/health": (404, "<!DOCTYPE HTML>\n<html><head><title>Error response</title></head></html>")}
    with (
        answering(page) as url,
        pytest.raises(ServerDownError, match=r"answers 404: with a web page, as no vLLM does$"),
    ):
        ask(url, VllmServer.health)


def test_a_request_that_no_server_can_stand_ends_the_rollouts():
    healthy = {
        "/version": (200, '{"version": "0.32.0"}'),
        "/v1/models": (200, '{"data": [{"id": "base", "max_model_len": 64}]}'),
        "/health": (200, ""),
        "/v1/completions": (200, json.dumps({"choices": [GOOD]})),
    }
    with answering(healthy) as url:
        pool = ServerPool([url], None, leads=False, timeout_seconds=60.0)
        try:
            assert pool.start([Request((1, 2), 1)], SAMPLING).result()[0][0].token_ids == (5, 6)
            with pytest.raises(RolloutError, match=r"again and again: gave 1 completions for 2"):
                pool.start([Request((1, 2), 2)], SAMPLING).result()
            assert pool.counts["servers_lost"] == 1  # after the third in a row
        finally:
            pool.close()
