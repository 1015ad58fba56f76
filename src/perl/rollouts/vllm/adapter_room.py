"""How many adapters a vLLM server answers with at a time, and of what rank, asked before anything is trained.

addresses, rank -> AdapterRoom of each server

A server in development mode reports its settings. Others tell how many adapters share a batch once they have written a
token; the largest rank they name only when they refuse one that is larger. So they are given a folder that has the
config of an adapter and no tensors, which none of them loads.
"""

import asyncio
import json
import re
import secrets
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from perl.errors import PerlError
from perl.recipe.server_address import ServerAddress
from perl.rollouts.vllm.answers import ServerDownError, json_object, message_of, ranks_of_refusal
from perl.rollouts.vllm.http import VllmServer

# It looks around on its machine before it answers for the first time.
_SETTINGS_SECONDS = 120.0
_TOKEN_SECONDS = 180.0
_IN_A_BATCH = re.compile(r'^vllm:lora_requests_info\{(?:[^}]*,)?max_lora="(\d+)"', re.MULTILINE)


@dataclass(frozen=True)
class AdapterRoom:
    """What a server has room for.

    Attributes:
        url: Its address.
        adapters: That it answers with at a time (``--max-loras``); 0: it loads none; None: it does not say.
        rank: Largest rank that it loads (``--max-lora-rank``); None: it does not say, or loads the one asked for.
        absent: Why nothing is known of it; empty: it answers.
    """

    url: str
    adapters: int | None = None
    rank: int | None = None
    absent: str = ""


def adapter_rooms(
    addresses: Sequence[ServerAddress], rank: int, folder: Path, folder_on_servers: str | None = None
) -> list[AdapterRoom]:
    """Asks servers, all at once; what they serve does not change.

    Args:
        addresses: Of the servers.
        rank: Of the largest adapter that they are to load.
        folder: Through which they will get adapters; a folder is made in it for as long as they are asked, with those
            above it that are absent.
        folder_on_servers: The same folder as they see it; None: by the same path.

    Returns:
        What each has room for, in their order.

    Raises:
        PerlError: A server refuses access, or the folder cannot be written.
    """
    question = folder / f".room-{secrets.token_hex(4)}"
    made = [one for one in (folder, *folder.parents) if not one.exists()]
    try:
        question.mkdir(parents=True)  # as updates are made, so that servers of another user see it as they see those
    except OSError as error:
        raise PerlError(f"cannot be written: {error.strerror or error}", str(folder)) from error
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": ["q_proj"]}
    try:
        (question / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
        seen = str(PurePosixPath(folder_on_servers or folder.resolve()) / question.name)
        with ThreadPoolExecutor(1) as thread:  # a notebook's own thread has a loop that runs
            return thread.submit(asyncio.run, _asked(addresses, seen)).result()
    finally:
        shutil.rmtree(question, ignore_errors=True)
        with suppress(OSError):  # who trains may have begun to use them
            for one in made:
                one.rmdir()


async def _asked(addresses: Sequence[ServerAddress], question: str) -> list[AdapterRoom]:
    servers = [VllmServer(address) for address in addresses]
    try:
        return list(await asyncio.gather(*(_room(server, question) for server in servers)))
    finally:
        for server in servers:
            await server.close()


async def _room(server: VllmServer, question: str) -> AdapterRoom:
    try:
        return await _reported(server) or await _tried(server, question)
    except ServerDownError as error:
        return AdapterRoom(server.url, absent=str(error))


async def _reported(server: VllmServer) -> AdapterRoom | None:
    """By its settings; None: it does not report them."""
    answer = await server.ask("GET", "/server_info?config_format=json", seconds=_SETTINGS_SECONDS)
    config = json_object(answer).get("vllm_config") if answer.is_success else None
    settings = config.get("lora_config") if isinstance(config, dict) else None
    if not isinstance(settings, dict):
        return None
    try:
        return AdapterRoom(server.url, int(settings["max_loras"]), int(settings["max_lora_rank"]))
    except (KeyError, TypeError, ValueError):
        return None


async def _tried(server: VllmServer, question: str) -> AdapterRoom:
    """By what it counts, and what it says to the question's adapter."""
    adapters = _in_a_batch((await server.ask("GET", "/metrics")).text)
    if adapters is None:
        models = json_object(await server.ask("GET", "/v1/models")).get("data") or [{}]
        body = {"model": models[0].get("id"), "prompt": [1], "max_tokens": 1}
        await server.ask("POST", "/v1/completions", body, seconds=_TOKEN_SECONDS)
        adapters = _in_a_batch((await server.ask("GET", "/metrics")).text)
    asked = {"lora_name": PurePosixPath(question).name, "lora_path": question}
    answer = await server.ask("POST", "/v1/load_lora_adapter", asked, seconds=_TOKEN_SECONDS)
    if answer.status_code == 404 and "error" not in json_object(answer):  # it has no such path
        return AdapterRoom(server.url, 0)
    refused = ranks_of_refusal(message_of(answer))
    return AdapterRoom(server.url, adapters, refused[1] if refused is not None else None)


def _in_a_batch(counted: str) -> int | None:
    """Adapters of one batch, by what a server counts; None: it has written nothing yet, or serves none."""
    found = _IN_A_BATCH.search(counted)
    return int(found[1]) if found else None
