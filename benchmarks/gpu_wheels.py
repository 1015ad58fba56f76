"""Wheels for a GPU machine that reaches no package index: what the project needs beside PyTorch, in .whl/.

Run as ``python benchmarks/gpu_wheels.py`` in an environment in which the project is installed; the versions are those
of ``constraints.txt``. Carry ``.whl/`` with the checkout, and run there, in its root, what this prints. The row
``machine`` of ``gpu.py`` tells what is missing. Packages that come with PyTorch or are large, and that the machine has,
are left out: name others with ``--there``, and further ones to bring with ``--also``. bitsandbytes is cut to the
libraries of one CUDA and of the CPU.
"""

import argparse
import importlib.metadata
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from importlib.metadata import Distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
# Left out, with all that they need and nothing else does.
THERE = ("torch", "sympy", "numpy", "pandas", "pyarrow", "scipy")
ALSO = ("bitsandbytes", "gguf")
PLATFORMS = ("manylinux_2_34", "manylinux_2_28", "manylinux_2_27", "manylinux_2_24", "manylinux_2_17")
OLD_PLATFORMS = ("manylinux2014", "manylinux1", "linux")
INSTALL = "python3 -m pip install -q --no-index --no-deps --no-compile --upgrade --target .site .whl/*.whl"


def dependencies() -> list[str]:
    """What the project asks for, extras aside."""
    return list(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"])


def installed(name: str) -> Distribution | None:
    """The package of this name that is imported here."""
    return next(iter(importlib.metadata.distributions(name=name)), None)


def walk(
    asked: list[str], there: frozenset[str] = frozenset(), python: str | None = None
) -> Iterator[tuple[Requirement, str, Distribution | None]]:
    """Every requirement that some come to, who has it, and the package that is installed for it, if one is.

    Args:
        asked: Requirements as in ``pyproject.toml``.
        there: Names left out, with what only they need.
        python: Version that is installed for, such as ``3.12``; None: this one.
    """
    target = {"python_version": python, "python_full_version": f"{python}.0"} if python else {}
    todo, known = [(Requirement(requirement), "perl-rl") for requirement in asked], set()
    while todo:
        requirement, by = todo.pop(0)
        name = canonicalize_name(requirement.name)
        if name in there or str(requirement) in known:
            continue
        known.add(str(requirement))
        found = installed(name)
        yield requirement, by, found
        for further in map(Requirement, found.requires or () if found else ()):
            extras = {"", *requirement.extras}
            if not further.marker or any(further.marker.evaluate({**target, "extra": extra}) for extra in extras):
                todo.append((further, name))


def pinned(names: list[str], constraints: str) -> list[str]:
    """Each name with the version that the constraints have for it, if they have one."""
    lines = [line.split("#")[0].strip() for line in constraints.splitlines()]
    pins = {canonicalize_name(line.split("==")[0]): line for line in lines if "==" in line}
    return [pins.get(name, name) for name in names]


def cut(wheel: Path, cuda: str) -> None:
    """Leaves out the libraries for other versions of CUDA, for ROCm and XPU."""
    other = re.compile(rf"/libbitsandbytes_(?!cpu|cuda{cuda}\.)")
    smaller = wheel.with_suffix(".part")
    with zipfile.ZipFile(wheel) as whole, zipfile.ZipFile(smaller, "w", zipfile.ZIP_DEFLATED) as part:
        for file in whole.infolist():
            if not other.search(file.filename):
                part.writestr(file, whole.read(file))
    smaller.replace(wheel)


def main() -> int:
    """Downloads them and prints how they are installed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", default="3.12", help="version on the machine (default 3.12)")
    parser.add_argument("--machine", default="x86_64", choices=("x86_64", "aarch64"))
    parser.add_argument("--cuda", default="130", help="of its torch (default 130)")
    parser.add_argument("--there", nargs="*", default=[], metavar="NAME", help="further packages that it has")
    parser.add_argument("--also", nargs="*", default=ALSO, metavar="NAME", help=f"further ones to bring: {ALSO}")
    parser.add_argument("--folder", type=Path, default=ROOT / ".whl")
    options = parser.parse_args()
    there = frozenset(canonicalize_name(name) for name in (*THERE, *options.there))
    names = {canonicalize_name(needed.name) for needed, _, _ in walk(dependencies(), there, options.python)}
    wanted = pinned(sorted({*names, *options.also}), (ROOT / "constraints.txt").read_text(encoding="utf-8"))
    shutil.rmtree(options.folder, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", options.python, "--implementation", "cp"]
    for platform in (*PLATFORMS, *OLD_PLATFORMS):
        command += ["--platform", f"{platform}_{options.machine}"]
    done = subprocess.run([*command, "-d", str(options.folder), *wanted], check=False)  # noqa: S603 (our own pins)
    if done.returncode:
        return done.returncode
    for wheel in options.folder.glob("bitsandbytes-*.whl"):
        cut(wheel, options.cuda)
    size = sum(wheel.stat().st_size for wheel in options.folder.glob("*.whl"))
    print(f"{len(wanted)} wheels, {size / 2**20:.1f} MiB, in {options.folder}. On the machine, in the checkout's root:")
    print(f"{INSTALL} && export PYTHONPATH=$PWD/src:$PWD/.site")
    return 0


if __name__ == "__main__":
    sys.exit(main())
