"""HTTP to one vLLM server: who is let in, how long it may take, how many connections there are, what goes wrong.

ServerAddress, method, path, body -> answer, ServerDownError or AccessError

Every call opens its own connection: a server closes those that are idle, and one that is closed while it is used again
looks like a server that died. How many are open at a time is bounded for all servers together.
"""

import asyncio
import contextlib
import os
import resource
import ssl
from collections.abc import Iterator
from typing import Any

import httpx2

from perl.errors import PerlError
from perl.recipe.server_address import DEFAULT_KEY, ServerAddress, server_address
from perl.rollouts.vllm.answers import AccessError, ServerDownError, json_object, message_of

QUICK_SECONDS = 30.0
"""For what answers at once on a server that works."""

# How often, and after what pause, a short answer that was lost on its way is requested again.
_TRIES, _TRY_PAUSE_SECONDS = 3, 0.1
# Of a proxy whose server does not answer.
_OF_A_GATEWAY = (502, 503, 504)
_UNDER_KEY = (401, 403)
# Of the files that the process may open, those for connections, and of these those for completions; of which nobody
# needs more than so many in all, and with which anything works.
_OF_FILES, _OF_COMPLETIONS, _MOST, _LEAST = 0.5, 0.75, 4096, 16


class Connections:
    """How many connections a process has open to all its servers at a time: each is an open file.

    Attributes:
        completions: Requests for completions that may be under way at a time; who sends them counts them.
        others: To hold by any other request, which would have to wait for minutes where completions have all.
    """

    def __init__(self, open_files: int | None = None) -> None:
        """Divides them.

        Args:
            open_files: That this process may have; None: as the operating system says.
        """
        allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if open_files is None else open_files
        most = _MOST if allowed == resource.RLIM_INFINITY else max(_LEAST, min(_MOST, int(allowed * _OF_FILES)))
        self.completions = int(most * _OF_COMPLETIONS)
        self.others = asyncio.Semaphore(most - self.completions)


class Transport:
    """Sends requests to a server. All calls raise :class:`ServerDownError`, or :class:`AccessError`."""

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
        key = _key_of(address)
        self._has_key = key is not None
        self._connections = connections or Connections()
        # Certificates are read only where they are needed.
        trusted: ssl.SSLContext | bool = address.url.startswith("https://")
        if address.ca_file is not None:
            try:
                trusted = ssl.create_default_context(cafile=os.path.expanduser(address.ca_file))
            except OSError as error:
                reason = "it holds no certificate" if isinstance(error, ssl.SSLError) else error.strerror
                hint = f"certificates (PEM) for {address.url}"
                raise PerlError(f"{address.ca_file}: {reason}", "ca_file", hint) from None
        self._client = httpx2.AsyncClient(
            base_url=self.url,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=0),
            verify=trusted,
            trust_env=False,  # a proxy is for the world outside, not for the machines of a training run
        )

    async def close(self) -> None:
        """Closes its connections."""
        await self._client.aclose()

    async def move(self, url: str) -> None:
        """The server is to be found at another address from now on."""
        if url != self.url:
            self.url = self._client.base_url = url

    async def _send(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        seconds: float | None = QUICK_SECONDS,
        counted: bool = False,
    ) -> httpx2.Response:
        """The answer, whatever it is; ``seconds`` None: only connecting is limited; ``counted`` as in ``complete``.

        Raises:
            AccessError: The server, or a proxy before it, wants another key.
        """
        limits = httpx2.Timeout(seconds, connect=min(seconds or QUICK_SECONDS, QUICK_SECONDS))
        for left in reversed(range(1 if counted else _TRIES)):
            try:
                async with contextlib.nullcontext() if counted else self._connections.others:
                    with self._errors(path, seconds):
                        answer = await self._client.request(method, path, json=body, timeout=limits)
                if answer.status_code in _OF_A_GATEWAY:
                    self._expect_success(answer)
                break
            except ServerDownError as error:
                if not left or error.timed_out:
                    raise
            await asyncio.sleep(_TRY_PAUSE_SECONDS)
        self._check_access(answer)
        return answer

    def _check_access(self, answer: httpx2.Response) -> None:
        if answer.status_code in _UNDER_KEY:
            state = "has the key that was sent" if self._has_key else "is not set"
            hint = f"put its key into that variable, or name another one: {{url: {self.url}, key_env: NAME}}"
            raise AccessError(f"{self.url} refuses access ({answer.status_code}); {self._key_env} {state}", hint=hint)

    @contextlib.contextmanager
    def _errors(self, path: str, seconds: float | None) -> Iterator[None]:
        """What goes wrong on the way, as our errors."""
        try:
            yield
        except httpx2.TimeoutException:
            reason = f"did not answer {path} within {seconds or QUICK_SECONDS:.0f} seconds"
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


def _key_of(address: ServerAddress) -> str | None:
    """The key that a server's variable holds; a variable that was named must be set."""
    name = address.key_env or DEFAULT_KEY
    key = os.environ.get(name, "").strip()
    if not key and address.key_env is not None:
        raise PerlError(f"the variable {name}, which is to hold the key of {address.url}, is not set")
    if not all("!" <= letter <= "~" for letter in key):  # what a header can hold; the key itself is not for logs
        raise PerlError(f"what {name} holds is not a valid key: it has spaces or letters that HTTP cannot send")
    return key or None
