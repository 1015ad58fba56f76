"""Whose the merged weights of a server are: a label that their owner renews for as long as it lives.

owner -> label on the server -> another run, which looks whether it is renewed

vLLM keeps one string beside its weights and gives it to any client. It is the only thing that two runs on different
machines both see, and it ends with the server; so it is the lock. A run that is killed renews nothing any more.
"""

import asyncio
import time

from perl.rollouts.vllm.http import UNTOUCHED, VllmServer

RENEW_SECONDS = 3.0
"""Between two renewals."""
LEASE_SECONDS = 15.0
"""An owner that renews nothing for so long has ended."""

_LOADING, _RENEWED = "-loading", "~"
# Two runs that claim a server at once both see who was the later one.
_SETTLE_SECONDS = 0.3


def owner_of(label: str | None) -> str | None:
    """Name of the weights in a label; None: they are the base's, or the server takes no label."""
    return None if label in (None, UNTOUCHED) else str(label).partition(_RENEWED)[0]


class WeightLabel:
    """The label that this process keeps on one server."""

    def __init__(self, server: VllmServer, *, renewed: bool = True) -> None:
        """Keeps none yet.

        Args:
            server: The server.
            renewed: False: nobody renews it, so it is written as one whose owner need not be waited for.
        """
        self._server, self._renewed = server, renewed
        self._name: str | None = None
        self._count = 0
        self._lock = asyncio.Lock()

    async def announce(self, name: str, fresh: bool) -> bool:
        """Says that weights are about to be loaded, so that no answer of meanwhile is taken for one of before.

        Args:
            name: Of the weights.
            fresh: The server had no weights of this run until now.

        Returns:
            False: another run does the same at this moment.
        """
        await self.keep(name + _LOADING)
        if fresh:
            await asyncio.sleep(_SETTLE_SECONDS)
        return await self.kept()

    async def keep(self, name: str) -> None:
        """Labels the weights, and renews that from now on."""
        async with self._lock:
            self._name = name
            await self._write()

    async def kept(self) -> bool:
        """Whether the server still has this label."""
        async with self._lock:
            return self._name is not None and owner_of(await self._server.weight_version()) == self._name

    async def renew(self) -> bool:
        """Shows that the owner lives, if the server still has the label.

        Returns:
            False: between reading the label and writing it so much time went by, as in a process that was stopped, that
            another run may have put its weights there; they are to be loaded again.
        """
        async with self._lock:
            name, began = self._name, time.monotonic()
            if name is None or owner_of(await self._server.weight_version()) != name or _late(began):
                return True
            await self._write()
            if name.endswith(_LOADING) or not _late(began):
                return True
            self._name = name + _LOADING
            await self._write()
            return False

    async def release(self) -> None:
        """Says that nobody owns the weights any more, if they are ours."""
        async with self._lock:
            name, self._name = self._name, None
            if name is not None and owner_of(await self._server.weight_version()) == name:
                await self._server.label_weights(name)

    def forget(self) -> None:
        """Renews nothing: the server may be another one now."""
        self._name = None

    async def _write(self) -> None:
        self._count += 1
        count = f"{_RENEWED}{self._count}" if self._renewed else ""
        await self._server.label_weights(f"{self._name}{count}")


def _late(began: float) -> bool:
    """Whether what was read then is too old to act on."""
    return time.monotonic() - began > LEASE_SECONDS / 2


def finished(name: str) -> str:
    """The name without the mark of weights that are being loaded."""
    return name.removesuffix(_LOADING)


async def is_owned(server: VllmServer) -> bool:
    """Whether somebody renews a server's label; takes up to the lease to find out."""
    label = await server.weight_version()
    if _RENEWED not in (label or ""):
        return False
    for _ in range(max(1, round(LEASE_SECONDS / RENEW_SECONDS * 2))):  # a server that is busy loading answers late
        await asyncio.sleep(RENEW_SECONDS / 2)
        if await server.weight_version() != label:
            return True
    return False
