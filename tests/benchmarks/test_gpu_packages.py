"""What a GPU machine without a package index lacks is found and named, and the wheels for it are whole."""

from pathlib import Path

import gpu_stages.__main__ as stage_process
import gpu_wheels
from gpu_stages import requirements


def distribution(folder: Path, name: str, version: str, *needs: str) -> None:
    place = folder / f"{name}-{version}.dist-info"
    place.mkdir()
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {n}" for n in needs)]
    (place / "METADATA").write_text("\n".join(lines) + "\n")


def test_missing_packages_are_found_to_the_last(tmp_path):
    distribution(tmp_path, "one", "1.5", "two>=2", "extra-only; extra == 'more'", "other; sys_platform == 'nowhere'")
    distribution(tmp_path, "two", "2.0", "three_a<3", "one")
    distribution(tmp_path, "three_a", "3.1")
    path = [str(tmp_path)]
    assert dict(requirements.unmet(["one>=1"], path)) == {"three-a": "3.1 is here, two needs <3"}
    assert dict(requirements.unmet(["one[more]>=2"], path)) == {
        "one": "1.5 is here, perl-rl needs >=2",
        "three-a": "3.1 is here, two needs <3",
        "extra-only": "missing, one needs it",
    }
    assert dict(requirements.unmet(requirements.dependencies())) == {}


def test_the_wheels_are_all_that_is_needed_but_for_what_comes_with_torch(checkout):
    names = gpu_wheels.needed(requirements.dependencies(), set(gpu_wheels.THERE), "3.12")
    assert {"annotated-types", "typing-inspection", "httpcore2", "detect-secrets", "math-verify", "peft"} <= set(names)
    assert not set(names) & {"torch", "numpy", "pandas", "pyarrow", "sympy", "mpmath", "networkx"}
    pins = gpu_wheels.pinned(names, (checkout / "constraints.txt").read_text())
    assert all("==" in pin for pin in pins)
    assert "http" not in Path(gpu_wheels.__file__).read_text()


def test_what_cannot_be_imported_is_named_with_the_reason_all_that_is_missing_and_where_to_read(tmp_path, monkeypatch):
    (tmp_path / "broken_one.py").write_text("import no_such_module")
    monkeypatch.syspath_prepend(tmp_path)
    (missing,) = requirements.not_importable(("json", "broken_one"))
    assert missing == ("broken_one", "ModuleNotFoundError: No module named 'no_such_module'")
    assert stage_process.how_to_set_up() == ""
    monkeypatch.setattr(requirements, "unmet", lambda _: iter([("pydantic", "missing, perl-rl needs it")]))
    said = stage_process.how_to_set_up()
    assert "pydantic (missing, perl-rl needs it)" in said
    assert "benchmarks/README.md" in said
