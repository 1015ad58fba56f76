"""One vLLM server: its HTTP calls as typed functions, and what its answers mean.

prompt ids -> server -> token ids and their log-probabilities; folder -> server
"""

import asyncio
import re
from collections.abc import Sequence
from typing import Any

import httpx2

from perl.errors import PerlError, RolloutError
from perl.methods.registry import served_rank
from perl.rollouts.engine import EngineSampling, Request
from perl.rollouts.vllm.answers import (
    ChangedServerError,
    Part,
    ServerDownError,
    ServerFacts,
    ServerIdentity,
    json_object,
    message_of,
    read_choices,
    sampling_arguments,
)
from perl.rollouts.vllm.release import check_version
from perl.rollouts.vllm.transport import QUICK_SECONDS, Transport

PROBE = "seen"
"""Folder beside merged weights that holds a file without tensors; see :meth:`VllmServer.load_weights`."""

# The label of a server's weights that nobody changed.
_UNTOUCHED = "default"
# For what moves the weights of a model.
_ADAPTER_SECONDS, _LOAD_SECONDS = 120.0, 900.0
_RESET_PAUSE_SECONDS = 0.05
# Tokens after each prompt of a proof; servers allow 20 at most by default.
_LIKELIEST = 8
# Counters are made when the engine starts, the process somewhat before.
_STARTED = ("process_start_time_seconds ", "vllm:generation_tokens_created")
_OF_TOKENS = r"^vllm:(?:generation|prompt)_tokens_total(?:\{.*\})? (\S+)$"
# vLLM for CPUs alone gives its cache a size in bytes and pages of 128 tokens by default.
_OF_A_CPU = re.compile(
    r'^vllm:cache_config_info\{(?=.*\bblock_size="128")(?=.*\bkv_cache_memory_bytes="\d+")'
    r'(?=.*\buser_specified_block_size="False")',
    re.MULTILINE,
)
# Each data-parallel replica has counters of its own.
_OF_A_REPLICA = re.compile(r'^vllm:\w+\{(?:[^}]*,)?engine="(\d+)"', re.MULTILINE)
FIRST_TOKEN_SECONDS = 180.0
"""For the first token that a server writes, when it still warms up."""
# After an engine has failed its server still reports itself healthy for a moment.
DYING_SECONDS = 1.0
LORA_FLAGS = "start it with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"
ONE_REPLICA = "start it without --data-parallel-size, and a server for each replica"
DEV_MODE = "start it with VLLM_SERVER_DEV_MODE=1"
_SHARE = "servers read updates from a folder that they share with the trainer; mount it, or set where they see it"


class VllmServer(Transport):
    """The calls. All of them raise :class:`ServerDownError`; those that a user must fix raise :class:`PerlError`."""

    async def health(self, seconds: float = QUICK_SECONDS) -> None:
        """Returns if the server is healthy."""
        self._expect_success(await self._send("GET", "/health", seconds=seconds))

    async def facts(self) -> tuple[ServerFacts, ServerIdentity]:
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
        identity = await self.identity(takes, counted)
        name, adapters = identity.base[0], frozenset(identity.adapters)
        return ServerFacts(version, name, identity.longest, adapters, loads, takes, on_cpu, replicas), identity

    async def identity(self, takes_weights: bool, counted: str | None = None) -> ServerIdentity:
        """What makes the server itself, now.

        Args:
            takes_weights: It has a label for its weights.
            counted: What it counts, if that is known.
        """
        counted = await self._metrics() if counted is None else counted
        started = [line.rpartition(" ")[2] for line in counted.splitlines() if line.startswith(_STARTED)]
        cards = self._field(await self._send("GET", "/v1/models"), "data")
        try:
            base = next(card for card in cards if not card.get("parent"))
            adapters = {str(card["id"]): str(card.get("root")) for card in cards if card.get("parent")}
            served, longest = (str(base["id"]), str(base.get("root"))), int(base["max_model_len"])
        except (StopIteration, KeyError, TypeError, ValueError, AttributeError) as error:
            raise ServerDownError(f"lists no model: {cards!r}", answered=True) from error
        weights = await self.weight_label() if takes_weights else None
        return ServerIdentity(" ".join(started) or None, served, adapters, weights, longest)

    async def _metrics(self, seconds: float = QUICK_SECONDS) -> str:
        """What the server counts; empty where it does not report it."""
        try:
            answer = await self._send("GET", "/metrics", seconds=seconds)
        except PerlError:  # not for us
            return ""
        return answer.text if answer.is_success else ""

    async def tokens_so_far(self, seconds: float) -> float | None:
        """Tokens read and written since it started; None where it does not count, or not for us."""
        counters = re.findall(_OF_TOKENS, await self._metrics(seconds), re.MULTILINE)
        return sum(map(float, counters)) if counters else None

    async def complete(
        self,
        model: str,
        request: Request,
        sampling: EngineSampling,
        *,
        seconds: float | None = None,
        counted: bool = False,
    ) -> list[Part]:
        """Completions of a prompt, each whole.

        Args:
            model: Name under which the server has the policy.
            request: The prompt.
            sampling: How tokens are drawn.
            seconds: That it may take; None: any time.
            counted: The caller bounds how many such requests are under way.

        Raises:
            ChangedServerError: The server has no model of that name.
            RolloutError: The server refuses the request.
        """
        body, parts = self._body(model, request, sampling), [Part() for _ in range(request.count)]
        answer = await self._send("POST", "/v1/completions", body, seconds=seconds, counted=counted)
        self._check_taken(answer, body)
        read_choices(self._expect_success(answer).text, parts)
        return self._checked(parts, request, sampling, whole=True)

    async def stream(self, model: str, request: Request, sampling: EngineSampling, stop: asyncio.Event) -> list[Part]:
        """What came of the completions of a prompt until all are whole, or until a stop; then the server gives them up.

        The caller bounds how many such requests are under way.

        Args:
            model: Name under which the server has the policy.
            request: The prompt.
            sampling: How tokens are drawn.
            stop: When it is set.

        Raises:
            ChangedServerError: The server has no model of that name.
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
        return self._checked(parts, request, sampling, whole=not stopped)

    async def _read_stream(self, body: dict[str, Any], parts: Sequence[Part]) -> None:
        limits = httpx2.Timeout(None, connect=QUICK_SECONDS)
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
                        read_choices(data, parts)

    @staticmethod
    def _body(model: str, request: Request, sampling: EngineSampling) -> dict[str, Any]:
        body = {"model": model, "prompt": list(request.prompt_ids), "return_token_ids": True}
        return body | sampling_arguments(request, sampling)

    def _checked(self, parts: list[Part], request: Request, sampling: EngineSampling, *, whole: bool) -> list[Part]:
        """What came, unless it has ended early."""
        longest = request.most_tokens(sampling)
        for part in parts:
            if whole and part.ended is None:
                raise ServerDownError("ended its answer before the completions", answered=True)
            # vLLM takes a text that would get too long and ends it where its own bound is.
            if part.ended == "length" and len(part.token_ids) < longest:
                hint = f"start it with --max-model-len {len(request.prompt_ids) + longest}"
                raise RolloutError(f"{self.url} cuts completions short", hint=hint)
        return parts

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
        choices = self._field(await self._send("POST", "/v1/completions", body, seconds=FIRST_TOKEN_SECONDS), "choices")
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
        ranks = re.search(r"LoRA rank (\d+) is greater than max_lora_rank (\d+)", message)
        if ranks is not None:
            allowed = served_rank(int(ranks[1]))
            raise PerlError(
                f"{self.url} takes adapters up to rank {ranks[2]}, this one has rank {ranks[1]}",
                hint=f"start it with --max-lora-rank {allowed}" if allowed else "choose a lower rank",
            )
        await self._refused(answer, f"adapter {name}")

    async def unload_adapter(self, name: str, seconds: float = QUICK_SECONDS) -> None:
        """Unloads an adapter; does nothing if it is not loaded."""
        await self._send("POST", "/v1/unload_lora_adapter", {"lora_name": name}, seconds=seconds)

    async def weight_label(self, seconds: float = QUICK_SECONDS) -> str | None:
        """What somebody called the weights that replace the base's; None: there are none, or it is not reported."""
        answer = await self._send("GET", "/weight_info", seconds=seconds)
        label = None if answer.status_code == 404 else str(self._field(answer, "weight_version"))
        return None if label == _UNTOUCHED else label

    async def label_weights(self, label: str, seconds: float = QUICK_SECONDS) -> None:
        """Says what the weights are."""
        body = {"new_version": label}
        self._expect_success(await self._send("POST", "/update_weight_version", body, seconds=seconds))

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

    def _check_taken(self, answer: httpx2.Response, body: dict[str, Any]) -> None:
        """Raises where a request for completions is refused."""
        if answer.status_code == 404 and "does not exist" in message_of(answer):
            raise ChangedServerError(f"has forgotten {body['model']}, as after a restart", answered=True)
        if answer.status_code < 500 and not answer.is_success:
            raise RolloutError(f"{self.url} refuses a request: {message_of(answer)}")

    async def _refused(self, answer: httpx2.Response, what: str) -> None:
        """An answer that asking again will not change, unless the server is dying.

        Raises:
            RolloutError: With the server's message.
        """
        await asyncio.sleep(DYING_SECONDS)
        await self.health()
        raise RolloutError(f"{self.url} cannot load {what}: {message_of(answer)}")
