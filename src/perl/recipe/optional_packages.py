"""Packages and logins that training arguments ask for and that are no part of the core.

train section -> Mistake for each package that is not installed, and for each tracker that cannot be used here

The libraries notice such a package at its first use, with the model loaded, or with a traceback of their own. Imports
none of the packages; a tracker or an optimizer that there is not is refused too.
"""

import configparser
import importlib.util
import netrc
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from perl.errors import Mistake, did_you_mean, missing_extra

# The trackers' own usage statistics and error reports; a user who wants them sets these otherwise.
_OWN_STATISTICS = {"mlflow": {"MLFLOW_DISABLE_TELEMETRY": "true"}, "wandb": {"WANDB_ERROR_REPORTING": "false"}}
_YES = ("1", "on", "true", "yes")
_WANDB_HOST = "https://api.wandb.ai"


@dataclass(frozen=True)
class RequiredPackage:
    """What must be installed.

    Attributes:
        modules: Any of these is enough.
        pip: What pip calls it.
        extra: Ours that brings it.
    """

    modules: tuple[str, ...]
    pip: str
    extra: str | None = None

    @property
    def installed(self) -> bool:
        """Whether one of its modules is there, without importing it."""
        try:
            return any(importlib.util.find_spec(module) is not None for module in self.modules)
        except ModuleNotFoundError:  # of a module whose parent is not there
            return False


# The trackers of transformers by their names in `report_to`, with the packages that each needs.
TRACKERS: dict[str, tuple[RequiredPackage, ...]] = {
    "azure_ml": (RequiredPackage(("azureml.core",), "azureml-core"),),
    **{name: (RequiredPackage((name,), name),) for name in ("clearml", "codecarbon", "dvclive", "neptune", "swanlab")},
    "comet_ml": (RequiredPackage(("comet_ml",), "comet-ml"),),
    "dagshub": (RequiredPackage(("dagshub",), "dagshub"), RequiredPackage(("mlflow",), "mlflow")),
    "flyte": (RequiredPackage(("flytekit",), "flytekit"),),
    "kubeflow": (),
    "mlflow": (RequiredPackage(("mlflow",), "mlflow-skinny", "track"),),
    "tensorboard": (RequiredPackage(("tensorboard", "tensorboardX"), "tensorboard", "track"),),
    "trackio": (RequiredPackage(("trackio",), "trackio", "track"),),
    "wandb": (RequiredPackage(("wandb",), "wandb", "track"),),
}
ADDED_TRACKERS: dict[str, str] = {}
"""Those of packages of the user's: name in ``report_to`` -> ``module:class``, a ``transformers.TrainerCallback``."""
_BITSANDBYTES = RequiredPackage(("bitsandbytes",), "bitsandbytes")
_TORCHAO = RequiredPackage(("torchao",), "torchao")
# The optimizers of transformers by how their names begin, the longest that fits; all others are in torch.
OPTIMIZERS: dict[str, RequiredPackage] = {
    **dict.fromkeys(("adalomo", "lomo"), RequiredPackage(("lomo_optim",), "lomo-optim")),
    **dict.fromkeys(("adamw_8bit", "adamw_bnb", "ademamix", "lion", "paged", "rmsprop_bnb"), _BITSANDBYTES),
    **dict.fromkeys(("adamw_torch_4bit", "adamw_torch_8bit"), _TORCHAO),
    "adamw_anyprecision": RequiredPackage(("torchdistx",), "torchdistx"),
    "adamw_torch_npu": RequiredPackage(("torch_npu",), "torch-npu"),
    "adamw_torch_xla": RequiredPackage(("torch_xla",), "torch-xla"),
    "apollo": RequiredPackage(("apollo_torch",), "apollo-torch"),
    "galore": RequiredPackage(("galore_torch",), "galore-torch"),
    "grokadamw": RequiredPackage(("grokadamw",), "grokadamw"),
    "schedule_free": RequiredPackage(("schedulefree",), "schedulefree"),
    "stable_adamw": RequiredPackage(("optimi",), "torch-optimi"),
}
# Arguments that need a package as soon as they say anything but no.
SWITCHES: dict[str, RequiredPackage] = {
    "use_liger_kernel": RequiredPackage(("liger_kernel",), "liger-kernel"),
}


def missing_packages(train: Mapping[str, Any]) -> Iterator[Mistake]:
    """What the training arguments need and this environment lacks, by key."""
    for name, package in SWITCHES.items():
        if train.get(name):
            yield from missing_package(f"train.{name}", package)
    optimizer = str(train.get("optim") or "")
    for start in sorted((start for start in OPTIMIZERS if optimizer.startswith(start)), key=len)[-1:]:
        yield from missing_package("train.optim", OPTIMIZERS[start], optimizer)
    yield from missing_trackers(train.get("report_to"), "train.report_to")


def tracker_mistakes(report_to: object, where: str) -> Iterator[Mistake]:
    """Trackers that there are not, or that cannot be used here.

    Args:
        report_to: A name or a list of names, as it may be written.
        where: What its reader calls it.
    """
    named = _written(report_to)
    for tracker in named:
        if tracker in ("all", "none"):  # those that are installed; none
            if len(named) > 1:
                yield Mistake(f"{tracker} stands beside other names", where, f"{tracker} alone, or the others")
        elif tracker not in {**TRACKERS, **ADDED_TRACKERS}:
            known = [*TRACKERS, *ADDED_TRACKERS, "none"]
            yield Mistake(f"there is no tracker {tracker!r}", where, did_you_mean(str(tracker), known))
        elif tracker == "kubeflow" and not os.environ.get("KUBEFLOW_TRAINER_SERVER_URL"):
            yield Mistake("kubeflow works inside its own trainer only", where, "leave it out")


def missing_trackers(report_to: object, where: str) -> Iterator[Mistake]:
    """Trackers whose packages are not installed; arguments as of :func:`tracker_mistakes`."""
    for tracker in _written(report_to):
        for package in TRACKERS.get(tracker, ()):
            yield from missing_package(where, package, tracker)


def _written(report_to: object) -> list[str]:
    names = [report_to] if isinstance(report_to, str) else report_to
    return [str(name) for name in names] if isinstance(names, list | tuple) else []


def missing_package(where: str, package: RequiredPackage, value: str = "") -> Iterator[Mistake]:
    """The problem of a package, unless it is installed.

    Args:
        where: The key that asks for it.
        package: What must be there.
        value: Of that key, where not every value needs the package.
    """
    if package.installed:
        return
    if package.extra is not None and value:
        yield missing_extra(package.pip, package.extra, where)
        return
    needs = f"{value} needs" if value and value != package.pip else "needs"
    installed = f"'perl-rl[{package.extra}]'" if package.extra else package.pip
    yield Mistake(f"{needs} the package {package.pip}", where, f"pip install {installed}")


_SQL = (RequiredPackage(("sqlalchemy",), "sqlalchemy", "track"), RequiredPackage(("alembic",), "alembic", "track"))


def named_trackers(report_to: object) -> list[str]:
    """The trackers of ``report_to`` as it may be written; ``all`` are those that are installed."""
    names = _written(report_to)
    if names == ["all"]:
        return [name for name, packages in TRACKERS.items() if packages and all(p.installed for p in packages)]
    return [] if names == ["none"] else names


def unusable_trackers(settings: Mapping[str, Any]) -> Iterator[Mistake]:
    """What keeps an installed tracker from working.

    Args:
        settings: Training arguments by name.
    """
    for name in named_trackers(settings.get("report_to")):
        check = _CHECKS.get(name)
        if check is not None and all(package.installed for package in TRACKERS[name]):
            for mistake in check(settings):
                yield Mistake(f"{name} {mistake.message}", "report_to", mistake.hint)


def send_no_statistics(report_to: object) -> None:
    """Switches off what trackers send to their makers; before they are first used."""
    for name in named_trackers(report_to):
        for variable, value in _OWN_STATISTICS.get(name, {}).items():
            os.environ.setdefault(variable, value)


def _wandb(_: Mapping[str, Any]) -> Iterator[Mistake]:
    root, config = Path(os.environ.get("WANDB_DIR", ".")), os.environ.get("WANDB_CONFIG_DIR", "~/.config/wandb")
    written = configparser.ConfigParser(interpolation=None)
    with suppress(configparser.Error, OSError, UnicodeDecodeError):  # the folder's own settings come last, and count
        folders = Path(config).expanduser(), root / ".wandb", root / "wandb"
        written.read([folder / "settings" for folder in folders])
    settings = dict(written["default"]) if written.has_section("default") else {}
    mode = os.environ.get("WANDB_MODE") or settings.get("mode", "online")
    if mode in ("offline", "dryrun", "disabled") or os.environ.get("WANDB_DISABLED", "").lower() in _YES:
        return
    if any(os.environ.get(name) for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")) or settings.get("api_key"):
        return
    address = os.environ.get("WANDB_BASE_URL") or settings.get("base_url") or _WANDB_HOST
    host = urlsplit(address).hostname or ""
    if not _has_login(host, address):
        hint = "`wandb login`, or WANDB_MODE=offline in the environment, whose runs `wandb sync` sends later"
        yield Mistake(f"has no login for {host}, and would ask for one", "", hint)


def _has_login(host: str, address: str) -> bool:
    """Whether a file has one, or a script has opened a run, or has logged in, before it made its arguments."""
    for file in (os.environ.get("NETRC"), "~/.netrc", "~/_netrc"):
        with suppress(OSError, netrc.NetrcParseError, UnicodeDecodeError):
            if file and netrc.netrc(Path(file).expanduser()).hosts.get(host):
                return True
    wandb = sys.modules.get("wandb")
    with suppress(ImportError, AttributeError, TypeError, ValueError):  # a private part, which another version may lack
        if wandb is not None:
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
