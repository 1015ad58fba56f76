"""Wheels for a GPU machine that reaches no package index: what the project needs beside PyTorch, about 35 MB in .whl/.

Run as ``python benchmarks/gpu_wheels.py`` in an environment in which the project is installed; the versions are those
of ``constraints.txt``. Copy the checkout with ``.whl/`` to the machine and run there, in its root, what this prints.
``python benchmarks/gpu.py doctor`` tells what is still missing. Packages that come with any CUDA build of PyTorch or
are large, and are taken from the machine, are left out: name others with ``--there``.
"""

import argparse
import importlib.metadata
import shutil
import subprocess
import sys
from pathlib import Path

from gpu_stages.requirements import dependencies
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
# Left out, with all that they need and nothing else does.
THERE = ("torch", "sympy", "numpy", "pandas", "pyarrow")
PLATFORMS = ("manylinux_2_34", "manylinux_2_28", "manylinux_2_27", "manylinux_2_24", "manylinux_2_17")
OLD_PLATFORMS = ("manylinux2014", "manylinux1", "linux")
INSTALL = "python3 -m pip install -q --no-index --no-deps --no-compile --upgrade --target .site .whl/*.whl"


def needed(asked: list[str], there: set[str], python: str) -> list[str]:
    """Names of all packages that the requirements come to, as this environment has them.

    Args:
        asked: Requirements as in ``pyproject.toml``.
        there: Names left out, with what only they need.
        python: Version that is installed for, such as ``3.12``.
    """
    todo = [Requirement(requirement) for requirement in asked]
    found: dict[str, None] = {}
    while todo:
        requirement = todo.pop(0)
        name = canonicalize_name(requirement.name)
        if name in there or name in found:
            continue
        found[name] = None
        for text in importlib.metadata.requires(name) or []:
            further = Requirement(text)
            target = {"python_version": python, "python_full_version": f"{python}.0", "sys_platform": "linux"}
            extras = {"", *requirement.extras}
            if not further.marker or any(further.marker.evaluate({**target, "extra": extra}) for extra in extras):
                todo.append(further)
    return sorted(found)


def pinned(names: list[str], constraints: str) -> list[str]:
    """Each name with the version that the constraints have for it, if they have one."""
    lines = [line.split("#")[0].strip() for line in constraints.splitlines()]
    pins = {canonicalize_name(line.split("==")[0]): line for line in lines if "==" in line}
    return [pins.get(name, name) for name in names]


def main() -> int:
    """Downloads them and prints how they are installed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", default="3.12", help="version on the machine (default 3.12)")
    parser.add_argument("--machine", default="x86_64", choices=("x86_64", "aarch64"))
    parser.add_argument("--there", nargs="*", default=[], metavar="NAME", help="further packages that it has")
    parser.add_argument("--folder", type=Path, default=ROOT / ".whl")
    options = parser.parse_args()
    there = {canonicalize_name(name) for name in (*THERE, *options.there)}
    wanted = pinned(needed(dependencies(), there, options.python), (ROOT / "constraints.txt").read_text())
    shutil.rmtree(options.folder, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", options.python, "--implementation", "cp"]
    for platform in (*PLATFORMS, *OLD_PLATFORMS):
        command += ["--platform", f"{platform}_{options.machine}"]
    done = subprocess.run([*command, "-d", str(options.folder), *wanted], check=False)  # noqa: S603 (our own pins)
    if done.returncode:
        return done.returncode
    size = sum(wheel.stat().st_size for wheel in options.folder.glob("*.whl"))
    print(f"{len(wanted)} wheels, {size / 1e6:.0f} MB, in {options.folder}. On the machine, in the checkout's root:")
    print(f"{INSTALL} && export PYTHONPATH=$PWD/src:$PWD/.site")
    return 0


if __name__ == "__main__":
    sys.exit(main())
