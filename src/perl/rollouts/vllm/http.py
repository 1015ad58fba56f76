"""One vLLM server: its HTTP calls as typed functions, and what its answers mean.

prompt ids -> server -> token ids and their log-probabilities; folder -> server

Every call opens its own connection: a server closes those
that are idle, and one that is closed while it is used again looks like a server that died. How many are open at a time
is bounded for all servers together, see ``connections.py``.
"""

import asyncio
import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

import httpx2

from perl.errors import PerlError, RolloutError
from perl.methods.registry import served_rank
from perl.recipe.server_address import DEFAULT_KEY, ServerAddress, server_address
from perl.rollouts.engine import EngineSampling, Request
from perl.rollouts.vllm.answers import (
    AccessError,
    AdapterGoneError,
    Answer,
    Part,
    ServerDownError,
    ServerFacts,
    Standing,
    json_object,
    key_of,
    message_of,
    ranks_of_refusal,
    read_answer,
    read_chunk,
    trust_of,
)
from perl.rollouts.vllm.connections import QUICK_SECONDS, Connections
from perl.rollouts.vllm.sampling_arguments import sampling_arguments
from perl.rollouts.vllm.version import check_version

UNTOUCHED = "default"
"""The weight version of a server whose weights nobody changed."""
PROBE = "seen"
"""Folder beside merged weights that holds a file without tensors; see :meth:`VllmServer.load_weights`."""

# What answers at once on a server that works, and what moves the weights of a model.
_SECONDS, _ADAPTER_SECONDS, _LOAD_SECONDS = QUICK_SECONDS, 120.0, 900.0
_RESET_PAUSE_SECONDS = 0.05
# How often, and after what pause, an answer that a proxy lost is requested again.
_TRIES, _TRY_PAUSE_SECONDS = 3, 0.1
_OF_A_GATEWAY = (502, 503, 504)
_UNDER_KEY = (401, 403)
# A server that still warms up takes long for its first token.
_FIRST_SECONDS = 180.0
# Tokens after each prompt of a proof; servers allow 20 at most by default.
_LIKELIEST = 8
# Counters are made when the engine starts, the process somewhat before.
_STARTED = ("process_start_time_seconds ", "vllm:generation_tokens_created")
# vLLM for CPUs alone gives its cache a size in bytes and pages of 128 tokens by default.
_OF_A_CPU = re.compile(
    r'^vllm:cache_config_info\{(?=.*\bblock_size="128")(?=.*\bkv_cache_memory_bytes="\d+")'
    r'(?=.*\buser_specified_block_size="False")',
    re.MULTILINE,
)
# Each data-parallel replica has counters of its own.
_OF_A_REPLICA = re.compile(r'^vllm:\w+\{(?:[^}]*,)?engine="(\d+)"', re.MULTILINE)
# After an engine has failed its server still reports itself healthy for a moment.
DYING_SECONDS = 1.0
LORA_FLAGS = "start it with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"
ONE_REPLICA = "start it without --data-parallel-size, and a server for each replica"
DEV_MODE = "start it with VLLM_SERVER_DEV_MODE=1"
_SHARE = "servers read updates from a folder that they share with the trainer; mount it, or set where they see it"


class VllmServer:
    """The calls. All of them raise :class:`ServerDownError`; those that a user must fix raise :class:`PerlError`."""

    def __init__(self, given: str | ServerAddress, connections: Connections | None = None) -> None:
        """Connects to nothing yet.

        Args:
            given: Its address, with what gives access to it.
            connections: That it shares with other servers; None: some of its own.

        Raises:
            PerlError: The address is malformed, or its key or certificates cannot be read.
        """
        try:
            address = server_address(given) if isinstance(given, str) else given
        except ValueError as error:
            raise PerlError(str(error)) from None
        self.url = address.url
        self._key_env = address.key_env or DEFAULT_KEY
        key = key_of(address)
        self._has_key = key is not None
        self._connections = connections or Connections()
        self._client = httpx2.AsyncClient(
            base_url=self.url,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=0),
            verify=trust_of(address),
            trust_env=False,  # a proxy is for the world outside, not for the machines of a training run
        )

    async def close(self) -> None:
        """Closes its connections."""
        await self._client.aclose()

    async def move(self, url: str) -> None:
        """The server is to be found at another address from now on."""
        if url != self.url:
            self.url = self._client.base_url = url

    async def health(self, seconds: float = _SECONDS) -> None:
        """Returns if the server is healthy."""
        self._expect_success(await self._send("GET", "/health", seconds=seconds))

    async def ask(
        self, method: str, path: str, body: dict[str, Any] | None = None, seconds: float = _SECONDS
    ) -> httpx2.Response:
        """The answer to any question that may be repeated, whatever it is."""
        return await self._send(method, path, body, seconds=seconds)

    async def facts(self) -> tuple[ServerFacts, Standing]:
        """What the server reports of itself, and what makes it itself.

        Raises:
            PerlError: It is not a vLLM of a known version.
        """
        version = str(self._field(await self._send("GET", "/version"), "version"))
        check_version(version, self.url)
        # A path that takes POST only answers 405; one that does not exist answers 404.
        paths = ("/v1/load_lora_adapter", "/collective_rpc")
        loads, takes = [(await self._send("GET", path)).status_code != 404 for path in paths]
        counted = await self._metrics()
        on_cpu = bool(_OF_A_CPU.search(counted))
        replicas = max(1, len(set(_OF_A_REPLICA.findall(counted))))
        base, adapters = await self._models()
        try:
            longest = int(base["max_model_len"])
        except (KeyError, TypeError, ValueError) as error:
            raise ServerDownError(f"lists no model: {base!r}", answered=True) from error
        facts = ServerFacts(version, str(base["id"]), longest, frozenset(adapters), loads, takes, on_cpu, replicas)
        weights = await self.weight_version() if takes else None
        return facts, _standing(counted, base, adapters, weights)

    async def standing(self, takes_weights: bool) -> Standing:
        """What makes the server itself, now.

        Args:
            takes_weights: It has a label for its weights.
        """
        counted = await self._metrics()
        base, adapters = await self._models()
        weights = await self.weight_version() if takes_weights else None
        return _standing(counted, base, adapters, weights)

    async def _models(self) -> tuple[dict[str, Any], dict[str, str]]:
        """The card of the base, and the folder of each adapter by its name."""
        cards = self._field(await self._send("GET", "/v1/models"), "data")
        try:
            bases = [card for card in cards if not card.get("parent")]
            adapters = {str(card["id"]): str(card.get("root")) for card in cards if card.get("parent")}
            str(bases[0]["id"])
        except (IndexError, KeyError, TypeError, AttributeError) as error:
            raise ServerDownError(f"lists no model: {cards!r}", answered=True) from error
        return bases[0], adapters

    async def _metrics(self) -> str:
        """What the server counts; empty where it does not report it."""
        try:
            answer = await self._send("GET", "/metrics")
        except PerlError:  # not for us
            return ""
        return answer.text if answer.is_success else ""

    async def tokens_so_far(self, seconds: float) -> float | None:
        """Tokens read and written since it started; None where it does not count, or not for us."""
        try:
            answer = self._expect_success(await self._send("GET", "/metrics", seconds=seconds))
        except AccessError:
            return None
        counters = re.findall(r"^vllm:(?:generation|prompt)_tokens_total(?:\{.*\})? (\S+)$", answer.text, re.MULTILINE)
        return sum(float(counter) for counter in counters) if counters else None

    async def complete(
        self, model: str, request: Request, sampling: EngineSampling, tries: int = _TRIES, *, counted: bool = False
    ) -> list[Answer]:
        """Completions of a prompt; waits for them without a limit.

        Args:
            model: Name under which the server has the policy.
            request: The prompt.
            sampling: How tokens are drawn.
            tries: How often to ask if the answer is lost on its way.
            counted: The caller bounds how many such requests are under way.

        Raises:
            AdapterGoneError: The server has no model of that name.
            RolloutError: The server refuses the request.
        """
        choices = await self._choices(self._body(model, request, sampling), tries, counted)
        choices = sorted(choices, key=lambda choice: int(choice.get("index", 0)))
        if len(choices) != request.count:
            raise ServerDownError(f"gave {len(choices)} completions for {request.count}", answered=True)
        answers = [read_answer(choice) for choice in choices]
        for choice, (token_ids, _) in zip(choices, answers, strict=True):
            self._check_length(choice.get("finish_reason"), len(token_ids), request, sampling)
        return answers

    async def stream(self, model: str, request: Request, sampling: EngineSampling, stop: asyncio.Event) -> list[Part]:
        """What came of the completions of a prompt until all are whole, or until a stop; then the server gives them up.

        The caller bounds how many such requests are under way.

        Args:
            model: Name under which the server has the policy.
            request: The prompt.
            sampling: How tokens are drawn.
            stop: When it is set.

        Raises:
            AdapterGoneError: The server has no model of that name.
            RolloutError: The server refuses the request.
        """
        parts = [Part() for _ in range(request.count)]
        reading = asyncio.create_task(self._read_stream(self._body(model, request, sampling) | {"stream": True}, parts))
        stopping = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({reading, stopping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
            stopped = reading.cancel()  # closes the connection, by which the server knows
        await asyncio.wait({reading})
        if not reading.cancelled():
            reading.result()
            if not stopped and not all(part.ended for part in parts):
                raise ServerDownError("ended a stream before its completions", answered=True)
        for part in parts:
            self._check_length(part.ended, len(part.token_ids), request, sampling)
        return parts

    async def _read_stream(self, body: dict[str, Any], parts: Sequence[Part]) -> None:
        limits = httpx2.Timeout(None, connect=_SECONDS)
        with self._errors("/v1/completions", None):
            async with self._client.stream("POST", "/v1/completions", json=body, timeout=limits) as answer:
                if not answer.is_success:
                    await answer.aread()
                    self._check_access(answer)
                    self._check_taken(answer, body)
                    self._expect_success(answer)
                async for line in answer.aiter_lines():
                    data = line.removeprefix("data:").strip()
                    if data and data != "[DONE]":
                        read_chunk(data, parts)

    @staticmethod
    def _body(model: str, request: Request, sampling: EngineSampling) -> dict[str, Any]:
        body = {"model": model, "prompt": list(request.prompt_ids), "return_token_ids": True}
        return body | sampling_arguments(request, sampling)

    def _check_length(self, ended: str | None, tokens: int, request: Request, sampling: EngineSampling) -> None:
        """Refuses an early end: vLLM takes a text that would get too long and ends it where its own bound is."""
        longest = request.most_tokens(sampling)
        if ended == "length" and tokens < longest:
            needed = len(request.prompt_ids) + longest
            raise RolloutError(f"{self.url} cuts completions short", hint=f"start it with --max-model-len {needed}")

    async def next_log_probs(
        self, model: str, prompts: Sequence[Sequence[int]], temperature: float
    ) -> list[dict[int, float]]:
        """After each prompt: log-probabilities of the likeliest tokens, as the server reports them for what it samples.

        A token is written after each prompt, and no prompt is scored, which vLLM for CPUs does not stand beside others.
        """
        body = {
            "model": model,
            "prompt": [list(prompt) for prompt in prompts],
            "temperature": temperature,
            "max_tokens": 1,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "ignore_eos": True,
            "logprobs": _LIKELIEST,
            "return_tokens_as_token_ids": True,
        }
        choices = self._field(await self._send("POST", "/v1/completions", body, seconds=_FIRST_SECONDS), "choices")
        try:
            ordered = sorted(choices, key=lambda choice: int(choice["index"]))
            found = [choice["logprobs"]["top_logprobs"][0] for choice in ordered]
            named = [{int(token.removeprefix("token_id:")): float(p) for token, p in row.items()} for row in found]
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise ServerDownError(f"gave no log-probabilities of tokens: {error!r}", answered=True) from error
        if len(named) != len(prompts) or not all(named):
            raise ServerDownError(f"answered {sum(map(bool, named))} prompts of {len(prompts)}", answered=True)
        return named

    async def load_adapter(self, name: str, path: str) -> None:
        """Serves the adapter in a folder under a name; one that is there already is left alone.

        Raises:
            PerlError: The server cannot do so before something is fixed.
        """
        body = {"lora_name": name, "lora_path": path}
        answer = await self._send("POST", "/v1/load_lora_adapter", body, seconds=_ADAPTER_SECONDS)
        message = message_of(answer)
        if answer.is_success or "has already been loaded" in message:
            return
        if answer.status_code == 404 and "error" not in json_object(answer):
            raise PerlError(f"{self.url} cannot load adapters", hint=LORA_FLAGS)
        if answer.status_code == 404:
            raise PerlError(f"{self.url} does not see {path}", hint=_SHARE)
        too_large = ranks_of_refusal(message)
        if too_large is not None:
            rank, largest = too_large
            allowed = served_rank(rank)
            raise PerlError(
                f"{self.url} takes adapters up to rank {largest}, this one has rank {rank}",
                hint=f"start it with --max-lora-rank {allowed}" if allowed else "choose a lower rank",
            )
        await self._refused(answer, f"adapter {name}")

    async def unload_adapter(self, name: str, seconds: float = _SECONDS) -> None:
        """Unloads an adapter; does nothing if it is not loaded."""
        await self._send("POST", "/v1/unload_lora_adapter", {"lora_name": name}, seconds=seconds)

    async def weight_version(self) -> str | None:
        """Name of the weights that replace the base's, ``default`` for the base's; None: not reported."""
        answer = await self._send("GET", "/weight_info")
        return None if answer.status_code == 404 else str(self._field(answer, "weight_version"))

    async def label_weights(self, label: str) -> None:
        """Says what the weights are."""
        self._expect_success(await self._send("POST", "/update_weight_version", {"new_version": label}))

    async def load_weights(self, name: str, path: str) -> None:
        """Puts weights in the place of the base's; to be called while none of our requests is under way.

        The server's label of its weights stays as it is.

        The folder holds a folder ``seen`` with a file that has no tensors. A server that cannot read the folder it is
        asked to load has by then given up its weights, and dies with the next request; so it first loads nothing.

        Raises:
            PerlError: The server cannot do so before something is fixed.
        """
        answer = await self._reload(weights_path=f"{path}/{PROBE}", is_checkpoint_format=False)
        if answer.status_code == 404:
            raise PerlError(f"{self.url} cannot take weights", hint=DEV_MODE)
        if not answer.is_success:
            await self.health()
            raise PerlError(f"{self.url} does not see {path}", hint=_SHARE)
        answer = await self._reload(weights_path=path)
        if not answer.is_success:
            await self._refused(answer, f"weights {name}; restart it")
        waited = 0.0
        while not self._field(await self._send("POST", "/reset_prefix_cache"), "success"):
            if waited > _LOAD_SECONDS:
                hint = "give the run servers that no other run uses"
                raise RolloutError(f"{self.url} is kept busy by others", hint=hint)
            await asyncio.sleep(_RESET_PAUSE_SECONDS)
            waited += _RESET_PAUSE_SECONDS

    async def _reload(self, **arguments: str | bool) -> httpx2.Response:
        body = {"method": "reload_weights", "kwargs": arguments}
        return await self._send("POST", "/collective_rpc", body, seconds=_LOAD_SECONDS)

    async def _choices(self, body: dict[str, Any], tries: int, counted: bool) -> list[dict[str, Any]]:
        answer = await self._send("POST", "/v1/completions", body, seconds=None, tries=tries, counted=counted)
        self._check_taken(answer, body)
        choices = self._field(answer, "choices")
        if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
            raise ServerDownError("gave something else than completions", answered=True)
        return choices

    def _check_taken(self, answer: httpx2.Response, body: dict[str, Any]) -> None:
        """Raises where a request for completions is refused."""
        if answer.status_code == 404 and "does not exist" in message_of(answer):
            raise AdapterGoneError(body["model"])
        if answer.status_code < 500 and not answer.is_success:
            raise RolloutError(f"{self.url} refuses a request: {message_of(answer)}")

    async def _send(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        seconds: float | None = _SECONDS,
        tries: int = _TRIES,
        counted: bool = False,
    ) -> httpx2.Response:
        """The answer, whatever it is; ``seconds`` None: only connecting is limited; ``counted`` as in ``complete``.

        Every request here may be repeated, so one whose answer was lost is sent again.

        Raises:
            AccessError: The server, or a proxy before it, wants another key.
        """
        for attempt in range(1, tries + 1):
            try:
                async with contextlib.nullcontext() if counted else self._connections.one(seconds):
                    answer = await self._send_once(method, path, body, seconds)
            except ServerDownError as error:
                if attempt == tries or error.timed_out:
                    raise
            else:
                if attempt == tries or answer.status_code not in _OF_A_GATEWAY:
                    break
            await asyncio.sleep(_TRY_PAUSE_SECONDS)
        self._check_access(answer)
        return answer

    def _check_access(self, answer: httpx2.Response) -> None:
        if answer.status_code in _UNDER_KEY:
            state = "has the key that was sent" if self._has_key else "is not set"
            hint = f"put its key into that variable, or name another one: {{url: {self.url}, key_env: NAME}}"
            raise AccessError(f"{self.url} refuses access ({answer.status_code}); {self._key_env} {state}", hint=hint)

    async def _send_once(
        self, method: str, path: str, body: dict[str, Any] | None, seconds: float | None
    ) -> httpx2.Response:
        limits = httpx2.Timeout(seconds, connect=min(seconds or _SECONDS, _SECONDS))
        with self._errors(path, seconds):
            return await self._client.request(method, path, json=body, timeout=limits)

    @contextlib.contextmanager
    def _errors(self, path: str, seconds: float | None) -> Iterator[None]:
        """What goes wrong on the way, as our errors."""
        try:
            yield
        except httpx2.TimeoutException:
            reason = f"did not answer {path} within {seconds or _SECONDS:.0f} seconds"
            raise ServerDownError(reason, timed_out=True) from None
        except httpx2.HTTPError as error:
            if "CERTIFICATE_VERIFY_FAILED" in str(error):
                reason = str(error).partition("CERTIFICATE_VERIFY_FAILED]")[2].partition("(_ssl")[0]
                hint = f"{{url: {self.url}, ca_file: FILE}} with the certificates of who signed it"
                raise AccessError(f"{self.url} has a certificate that is not trusted:{reason}", hint=hint) from None
            raise ServerDownError(str(error) or type(error).__name__) from error

    def _expect_success(self, answer: httpx2.Response) -> httpx2.Response:
        if not answer.is_success:
            raise ServerDownError(f"answers {answer.status_code}: {message_of(answer)}", answered=True)
        return answer

    def _field(self, answer: httpx2.Response, name: str) -> Any:  # noqa: ANN401 (a JSON value)
        """A field of an answer that succeeded."""
        fields = json_object(self._expect_success(answer))
        if name not in fields:
            raise ServerDownError(f"answers without {name}: {answer.text[:100]}", answered=True)
        return fields[name]

    async def _refused(self, answer: httpx2.Response, what: str) -> None:
        """An answer that asking again will not change, unless the server is dying.

        Raises:
            RolloutError: With the server's message.
        """
        await asyncio.sleep(DYING_SECONDS)
        await self.health()
        raise RolloutError(f"{self.url} cannot load {what}: {message_of(answer)}")


def _standing(counted: str, base: dict[str, Any], adapters: dict[str, str], weights: str | None) -> Standing:
    """Of what a server counts, the card of its base, the folders of its adapters, and the label of its weights."""
    started = [line.rpartition(" ")[2] for line in counted.splitlines() if line.startswith(_STARTED)]
    return Standing(" ".join(started) or None, (str(base["id"]), str(base.get("root"))), adapters, weights)
