"""Where a vLLM server is, and what gives access to it.

text or mapping -> ServerAddress

Keys are named, never held: a recipe says which environment variable holds one. An address with a password is refused,
and none is ever repeated in a message.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from urllib.parse import urlsplit

DEFAULT_KEY = "VLLM_API_KEY"
"""The environment variable that holds a server's key unless the recipe names another; vLLM itself reads it too."""

# What stands before the @ of an address. A password may hold a slash, so it ends at the last @ of the word.
_CREDENTIALS = re.compile(r"//[^\s'\"]*@")
_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]*")  # no key looks like that
_AS = "as http://host:8000"


@dataclass(frozen=True)
class ServerAddress:
    """A vLLM server as a recipe names it.

    Attributes:
        url: Without a slash at its end and without the API's path.
        key_env: Environment variable that holds its key; None: :data:`DEFAULT_KEY`, which need not be set.
        ca_file: Certificates (PEM) of the authority that signed the server's; None: the public ones.
    """

    url: str
    key_env: str | None = None
    ca_file: str | None = None


def server_address(given: str | Mapping[str, object]) -> ServerAddress:
    """The address that a setting names.

    Args:
        given: A URL, or a mapping of ``url``, ``key_env`` and ``ca_file``.

    Raises:
        ValueError: It names none; one line, which repeats no password.
    """
    if isinstance(given, str):
        return ServerAddress(_url(given))
    known = [field.name for field in fields(ServerAddress)]
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise ValueError(f"a server has no {unknown[0]!r}, only {', '.join(known)}")
    texts = {name: value for name, value in given.items() if value is not None}
    if not all(isinstance(value, str) and value for value in texts.values()):
        raise ValueError("url, key_env and ca_file of a server are text")
    if "url" not in texts:
        raise ValueError("a server needs its url, as in {url: http://host:8000, key_env: NAME}")
    key_env, ca_file = texts.get("key_env"), texts.get("ca_file")
    if key_env is not None and not _VARIABLE.fullmatch(str(key_env)):
        raise ValueError("key_env is the name of an environment variable that holds the key, never the key itself")
    url = _url(str(texts["url"]))
    if ca_file is not None and not url.startswith("https://"):
        raise ValueError(f"ca_file is for https, not for {url}")
    return ServerAddress(url, None if key_env is None else str(key_env), None if ca_file is None else str(ca_file))


def server_option(text: str) -> ServerAddress:
    """The address that an option of the command line names: ``URL[,key_env=NAME][,ca_file=FILE]``.

    Raises:
        ValueError: As of :func:`server_address`.
    """
    url, *settings = text.split(",")
    pairs = [setting.partition("=")[::2] for setting in settings]
    return server_address({"url": url, **dict(pairs)})


def without_credentials(text: str) -> str:
    """The text with ``***`` for what stands before the @ of an address in it."""
    return _CREDENTIALS.sub("//***@", text)


def _url(text: str) -> str:
    shown = without_credentials(text)
    if "@" in text:
        raise ValueError(
            f"{shown} holds a password or user name; write the address alone, put the server's key into an environment "
            "variable and name that: {url: http://host:8000, key_env: NAME}"
        )
    try:
        parts = urlsplit(text)
        parts.port  # noqa: B018 (raises)
    except ValueError:
        raise ValueError(f"{shown} is not an address ({_AS})") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"a server is an address like http://localhost:8000, not {shown!r}")
    if parts.query or parts.fragment:
        raise ValueError(f"{text.partition('?')[0].partition('#')[0]} must end with its path ({_AS})")
    return text.rstrip("/").removesuffix("/v1")
