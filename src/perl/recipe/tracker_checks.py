"""Whether the trackers that ``report_to`` names can be used, found out without importing or asking any of them.

report_to, environment -> Mistake for each tracker that would fail, wait at a prompt or send without being asked

A tracker is first used once the model is loaded; what it would complain about then is said before. What only its server
knows (whether a key is still valid) is not asked.
"""

import configparser
import netrc
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from perl.errors import Mistake, first_line
from perl.recipe.optional_packages import TRACKERS, Package, missing_package
from perl.recipe.server_address import without_credentials

# The trackers' own usage statistics and error reports; a user who wants them sets these otherwise.
_OWN_STATISTICS = {
    "mlflow": {"MLFLOW_DISABLE_TELEMETRY": "true"},
    "wandb": {"WANDB_ERROR_REPORTING": "false"},
}
_YES = ("1", "on", "true", "yes")
_WANDB_HOST = "https://api.wandb.ai"
_SQL = (Package(("sqlalchemy",), "sqlalchemy", "track"), Package(("alembic",), "alembic", "track"))


def named_trackers(report_to: object) -> list[str]:
    """The trackers of ``report_to`` as it may be written; ``all`` are those that are installed."""
    names = (
        [report_to] if isinstance(report_to, str) else list(report_to) if isinstance(report_to, list | tuple) else []
    )
    if names == ["all"]:
        return [name for name, packages in TRACKERS.items() if packages and all(p.installed for p in packages)]
    return [] if names == ["none"] else [str(name) for name in names]


def unusable_trackers(settings: Mapping[str, Any], where: str = "report_to") -> Iterator[Mistake]:
    """What keeps an installed tracker from working.

    Args:
        settings: Training arguments by name.
        where: What their reader calls ``report_to``.
    """
    for name in named_trackers(settings.get("report_to")):
        check = _CHECKS.get(name)
        if check is not None and all(package.installed for package in TRACKERS[name]):
            for mistake in check(settings):
                yield Mistake(f"{name} {mistake.message}", where, mistake.hint)


def send_no_statistics(report_to: object) -> None:
    """Switches off what trackers send to their makers; before they are first used."""
    for name in named_trackers(report_to):
        for variable, value in _OWN_STATISTICS.get(name, {}).items():
            os.environ.setdefault(variable, value)


def _wandb(_: Mapping[str, Any]) -> Iterator[Mistake]:
    settings = _wandb_settings()
    mode = os.environ.get("WANDB_MODE") or settings.get("mode", "online")
    if mode in ("offline", "dryrun", "disabled") or os.environ.get("WANDB_DISABLED", "").lower() in _YES:
        return
    if any(os.environ.get(name) for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")) or settings.get("api_key"):
        return
    address = os.environ.get("WANDB_BASE_URL") or settings.get("base_url") or _WANDB_HOST
    host = urlsplit(address).hostname or ""
    if not _has_login(host) and not _logged_in_here(address):
        hint = "`wandb login`, or WANDB_MODE=offline in the environment, whose runs `wandb sync` sends later"
        yield Mistake(f"has no login for {host}, and would ask for one", "", hint)


def _wandb_settings() -> dict[str, str]:
    """What `wandb login`, `wandb offline` and their like have written; the folder's own settings come first."""
    root = Path(os.environ.get("WANDB_DIR", "."))
    config = Path(os.environ.get("WANDB_CONFIG_DIR") or Path("~/.config/wandb").expanduser())
    found = configparser.ConfigParser(interpolation=None)
    with suppress(configparser.Error, OSError, UnicodeDecodeError):
        found.read([config / "settings", root / ".wandb" / "settings", root / "wandb" / "settings"])
    return dict(found["default"]) if found.has_section("default") else {}


def _has_login(host: str) -> bool:
    for file in (os.environ.get("NETRC"), "~/.netrc", "~/_netrc"):
        with suppress(OSError, netrc.NetrcParseError, UnicodeDecodeError):
            if file and netrc.netrc(Path(file).expanduser()).hosts.get(host):
                return True
    return False


def _logged_in_here(address: str) -> bool:
    """Whether a script has opened a run, or has logged in, before it made its arguments."""
    wandb = sys.modules.get("wandb")
    if wandb is None:
        return False
    with suppress(ImportError, AttributeError, TypeError, ValueError):  # a private part, which another version may lack
        from wandb.sdk.lib import wbauth

        if wbauth.session_credentials(host=address) is not None:
            return True
    return getattr(wandb, "run", None) is not None


def _mlflow(_: Mapping[str, Any]) -> Iterator[Mistake]:
    used = sys.modules.get("mlflow")
    asked = used.get_tracking_uri() if used is not None and used.is_tracking_uri_set() else ""
    uri = asked or os.environ.get("MLFLOW_TRACKING_URI", "")
    scheme = urlsplit(uri).scheme
    if not uri and not any(Path("mlruns").glob("[0-9]*/meta.yaml")):
        scheme = "sqlite"  # mlflow.db in the current folder, which is its default unless it wrote to mlruns before
    if scheme in ("", "file") and os.environ.get("MLFLOW_ALLOW_FILE_STORE", "").lower() not in _YES:
        what = f"no longer writes to a folder ({uri or 'mlruns'})"
        yield Mistake(what, "", "MLFLOW_TRACKING_URI=sqlite:///mlflow.db, or MLFLOW_ALLOW_FILE_STORE=true")
    if scheme.partition("+")[0] in ("sqlite", "mysql", "postgresql", "mssql"):
        for package in _SQL:
            for mistake in missing_package("", package):
                yield Mistake(f"{mistake.message} for its database", "", mistake.hint)
        yield from _missing_driver(uri)


def _missing_driver(uri: str) -> Iterator[Mistake]:
    """The package by which SQLAlchemy reaches a database, if it is not installed."""
    try:
        from sqlalchemy.engine import make_url
        from sqlalchemy.exc import SQLAlchemyError
    except ImportError:  # which is said already
        return
    try:
        make_url(uri or "sqlite://").get_dialect().import_dbapi()
    except ModuleNotFoundError as error:
        yield Mistake(f"needs the package {error.name} for its database", "", f"pip install {error.name}")
    except SQLAlchemyError as error:
        yield Mistake(
            f"cannot use MLFLOW_TRACKING_URI: {without_credentials(first_line(error))}", "", "another address"
        )


def _trackio(settings: Mapping[str, Any]) -> Iterator[Mistake]:
    space = settings.get("trackio_space_id") or os.environ.get("TRACKIO_SPACE_ID")
    if space and os.environ.get("HF_HUB_OFFLINE", "").lower() in _YES:
        hint = "leave trackio_space_id and TRACKIO_SPACE_ID out, and it writes to this machine"
        yield Mistake(f"is to write to the Space {space}, and HF_HUB_OFFLINE is set", "", hint)
    server = os.environ.get("TRACKIO_SERVER_URL")
    if server and not space and not os.environ.get("TRACKIO_WRITE_TOKEN") and "write_token=" not in server:
        yield Mistake("has no token for TRACKIO_SERVER_URL", "", "TRACKIO_WRITE_TOKEN in the environment")


_CHECKS: dict[str, Callable[[Mapping[str, Any]], Iterator[Mistake]]] = {
    "mlflow": _mlflow,
    "trackio": _trackio,
    "wandb": _wandb,
}
