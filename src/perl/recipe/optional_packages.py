"""Packages that training arguments ask for and that are no part of the core.

train section -> Mistake for each package that is not installed

The libraries notice such a package at its first use, with the model loaded, or with a traceback of their own. Imports
none of the packages; a tracker or an optimizer that there is not is refused too.
"""

import importlib.util
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from perl.errors import Mistake, did_you_mean, missing_extra


@dataclass(frozen=True)
class Package:
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
        return any(_found(module) for module in self.modules)


# The trackers of transformers by their names in `report_to`, with the packages that each needs.
TRACKERS: dict[str, tuple[Package, ...]] = {
    "azure_ml": (Package(("azureml.core",), "azureml-core"),),
    "clearml": (Package(("clearml",), "clearml"),),
    "codecarbon": (Package(("codecarbon",), "codecarbon"),),
    "comet_ml": (Package(("comet_ml",), "comet-ml"),),
    "dagshub": (Package(("dagshub",), "dagshub"), Package(("mlflow",), "mlflow")),
    "dvclive": (Package(("dvclive",), "dvclive"),),
    "flyte": (Package(("flytekit",), "flytekit"),),
    "kubeflow": (),
    "mlflow": (Package(("mlflow",), "mlflow-skinny", "track"),),
    "neptune": (Package(("neptune",), "neptune"),),
    "swanlab": (Package(("swanlab",), "swanlab"),),
    "tensorboard": (Package(("tensorboard", "tensorboardX"), "tensorboard", "track"),),
    "trackio": (Package(("trackio",), "trackio", "track"),),
    "wandb": (Package(("wandb",), "wandb", "track"),),
}
_BITSANDBYTES = Package(("bitsandbytes",), "bitsandbytes")
_TORCHAO = Package(("torchao",), "torchao")
# The optimizers of transformers by how their names begin, the longest that fits; all others are in torch.
OPTIMIZERS: dict[str, Package] = {
    "adalomo": Package(("lomo_optim",), "lomo-optim"),
    "adamw_8bit": _BITSANDBYTES,
    "adamw_anyprecision": Package(("torchdistx",), "torchdistx"),
    "adamw_bnb": _BITSANDBYTES,
    "adamw_torch_4bit": _TORCHAO,
    "adamw_torch_8bit": _TORCHAO,
    "adamw_torch_npu": Package(("torch_npu",), "torch-npu"),
    "adamw_torch_xla": Package(("torch_xla",), "torch-xla"),
    "ademamix": _BITSANDBYTES,
    "apollo": Package(("apollo_torch",), "apollo-torch"),
    "galore": Package(("galore_torch",), "galore-torch"),
    "grokadamw": Package(("grokadamw",), "grokadamw"),
    "lion": _BITSANDBYTES,
    "lomo": Package(("lomo_optim",), "lomo-optim"),
    "paged": _BITSANDBYTES,
    "rmsprop_bnb": _BITSANDBYTES,
    "schedule_free": Package(("schedulefree",), "schedulefree"),
    "stable_adamw": Package(("optimi",), "torch-optimi"),
}
# Arguments that need a package as soon as they say anything but no.
SWITCHES: dict[str, Package] = {
    "deepspeed": Package(("deepspeed",), "deepspeed", "deepspeed"),
    "use_liger_kernel": Package(("liger_kernel",), "liger-kernel"),
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
        elif tracker not in TRACKERS:
            yield Mistake(f"there is no tracker {tracker!r}", where, did_you_mean(str(tracker), [*TRACKERS, "none"]))
        elif tracker == "kubeflow" and not os.environ.get("KUBEFLOW_TRAINER_SERVER_URL"):
            yield Mistake("kubeflow works inside its own trainer only", where, "leave it out")


def missing_trackers(report_to: object, where: str) -> Iterator[Mistake]:
    """Trackers whose packages are not installed; arguments as of :func:`tracker_mistakes`."""
    for tracker in _written(report_to):
        for package in TRACKERS.get(tracker, ()):
            yield from missing_package(where, package, tracker)


def _written(report_to: object) -> list[str]:
    return (
        [report_to] if isinstance(report_to, str) else list(map(str, report_to)) if isinstance(report_to, list) else []
    )


def missing_package(where: str, package: Package, value: str = "") -> Iterator[Mistake]:
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


def _found(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of a module whose parent is not there
        return False
